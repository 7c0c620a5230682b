"""`diffusion-grpo sample`: sample from a pipeline and score the samples, without training."""

import argparse

from ..config.files import check_model_name
from ..quiet import hide_loading_bars
from ..sampling import settings as sample_settings


def add_options(command: argparse.ArgumentParser) -> None:
    sample_settings.add_sample_options(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write samples and a table of their scores, print the mean scores, and return the exit code."""
    settings = sample_settings.read_settings(arguments, arguments.overrides)
    check_model_name(settings.model)

    from ..data.columns import list_types
    from ..data.prompts import check_dataset, load_prompts
    from ..rewards import check_columns, check_needs, load_rewards

    rewards = load_rewards(settings.reward_funcs)
    names = {reward.name for reward in rewards}
    eval_rewards = load_rewards(settings.eval_reward_funcs, "eval_reward_funcs")
    eval_rewards = [reward for reward in eval_rewards if reward.name not in names]
    dataset = load_prompts(settings.prompts, settings.split, settings.prompt_column)
    check_dataset(dataset, "--prompts")
    check_columns(rewards + eval_rewards, dataset.column_names, "--prompts", list_types(dataset))
    check_needs(rewards + eval_rewards)
    dataset = dataset.select(range(min(settings.max_prompts or len(dataset), len(dataset))))

    from ..report.run_folder import format_measured
    from ..sampling.sample import check_folder, check_inputs, load_pipeline_to_sample, write_samples
    from ..training.out_of_memory import is_out_of_memory

    check_inputs(settings, dataset, rewards + eval_rewards)
    check_folder(settings, dataset)
    hide_loading_bars(settings.model)
    try:
        pipe = load_pipeline_to_sample(settings)
        summary = write_samples(pipe, dataset, rewards, eval_rewards, settings)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        offload = "" if settings.offload_frozen else "--offload_frozen cpu, "
        raise ValueError(
            f"{settings.model} and {settings.batch_size} samples at a time do not fit into memory; set {offload}a "
            "smaller --batch_size, or a smaller --height and --width. Samples that are already in the table are kept."
        ) from error
    for name, (mean, error) in summary.items():
        print(f"{name:<16} {format_measured(mean, error)}")
    made = len(dataset) * settings.num_generations
    print(f"{made} samples of {len(dataset)} prompts and samples.parquet in {settings.output_dir}")
    return 0
