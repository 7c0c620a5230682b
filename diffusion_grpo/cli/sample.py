"""`diffusion-grpo sample`: prompts and a pipeline go in; samples and their scores leave, without training."""

import argparse

from ..config.early_checks import check_prompts_file, check_reward_names
from ..sampling import settings as sample_settings
from .inputs import check_model_name, hide_loading_bars, load_checked, refusing


def add_options(command: argparse.ArgumentParser) -> None:
    """Options of `sample`."""
    sample_settings.add_sample_options(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes samples, scores and a table, without training. Returns the exit code."""
    settings = refusing(sample_settings.read_settings, arguments, arguments.overrides)
    refusing(check_reward_names, settings.reward_funcs)
    refusing(check_prompts_file, settings.prompts, "--prompts")
    refusing(check_model_name, settings.model)

    from ..rewards import check_columns, check_needs, load_rewards

    rewards = refusing(load_rewards, settings.reward_funcs)
    judges = refusing(load_rewards, settings.eval_reward_funcs, "eval_reward_funcs")
    judges = [judge for judge in judges if judge.name not in {reward.name for reward in rewards}]
    dataset = refusing(load_checked, settings.prompts, settings.split, "--prompts")
    refusing(check_columns, rewards + judges, dataset.column_names, "--prompts")
    refusing(check_needs, rewards + judges)
    dataset = dataset.select(range(min(settings.max_prompts or len(dataset), len(dataset))))

    from ..sampling.sample import check_folder, load_sampled, write_samples

    refusing(check_folder, settings)
    hide_loading_bars(settings.model)
    pipe = refusing(load_sampled, settings)
    summary = refusing(write_samples, pipe, dataset, rewards, judges, settings)
    for name, (mean, error) in summary.items():
        print(f"{name:<16} {mean:.3f} ± {error:.3f}")
    made = len(dataset) * settings.num_generations
    print(f"{made} samples of {len(dataset)} prompts and samples.parquet in {settings.output_dir}")
    return 0
