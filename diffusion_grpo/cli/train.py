"""`diffusion-grpo train`: start processes, train from a YAML file, measure baselines, write weights and a report."""

import argparse
import functools
import json
import os
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quiet import hide_loading_bars
from .errors import refusing

if TYPE_CHECKING:
    from ..config.arguments import LaunchArguments, LoraArguments, ScriptArguments
    from ..config.settings import DiffusionGRPOConfig
    from ..trainer import DiffusionGRPOTrainer

NEGATIVE = {"negative_prompt", "negative_prompt_embeds"}  # without one, true_cfg_scale has no effect


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `train`. `parse_train_arguments` reads the YAML file and the overrides."""
    from ..config.arguments import LaunchArguments, LoraArguments, ScriptArguments

    command.add_argument(
        "config", nargs="?", help="YAML file of settings; settings on the command line take precedence"
    )
    command.add_argument(
        "--list-settings", action="store_true", help="list all settings with their defaults, and exit"
    )
    command.usage = "diffusion-grpo train [config.yaml] [--key value ...] [--help] [--list-settings]"
    command.epilog = "\n\n".join(
        [
            "Keys, in the file or as --key value:",
            *map(describe_settings, (ScriptArguments, LoraArguments, LaunchArguments)),
            "and every setting of DiffusionGRPOConfig (--list-settings; docs/config.md).",
        ]
    )
    command.set_defaults(run=run)


def describe_settings(settings: type) -> str:
    """Describe each field of a dataclass in one paragraph: name, default, help text."""
    lines = []
    for field in fields(settings):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        default = "required" if default is MISSING else f"default {default!r}"
        help_text = " ".join(str(field.metadata.get("help", "")).split())
        lines.append(f"  {field.name} ({default})")
        lines += textwrap.wrap(help_text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Train, save, push to the Hub if requested, write the report, and return the exit code."""
    from ..config.arguments import LAUNCH_VARIABLE, LaunchArguments, LoraArguments, ScriptArguments
    from ..config.parse import make_script_arguments, make_settings, read_values, resolve_values

    if arguments.list_settings:
        from ..config.settings import DiffusionGRPOConfig

        for settings in (ScriptArguments, LoraArguments, LaunchArguments, DiffusionGRPOConfig):
            print(describe_settings(settings))
        return 0
    with refusing():
        values = read_values(arguments.config, arguments.overrides)
        kinds = (ScriptArguments, LoraArguments, LaunchArguments)
        script, lora, processes = (make_script_arguments(values, kind) for kind in kinds)
        if arguments.config and Path(arguments.config).name == "train.yaml" and values.get("output_dir"):
            from ..report.record import refuse_own_settings

            refuse_own_settings(arguments.config, values["output_dir"])
    # otherwise a launcher has started this process
    if not processes.is_empty and not {"LOCAL_RANK", LAUNCH_VARIABLE} & os.environ.keys():
        return start_processes(processes, arguments, str(values.get("use_cpu", False)).lower() == "true")
    with refusing():
        values = resolve_values(values)
        config = make_settings(values)
        if str(config.resume_from_checkpoint).lower() == "false":  # transformers would take it for a folder's name
            config.resume_from_checkpoint = None
        trainer = build_trainer(script, lora, config)
    if trainer.is_world_process_zero():
        save_command_at_start(trainer, values)
    path = Path(trainer.args.output_dir) / "baselines.json"
    if script.baseline_guidance_scales and not (config.resume_from_checkpoint and path.is_file()):
        with refusing():
            measure_baselines(trainer, script.baseline_guidance_scales, path)
    from ..policy.base import UntrainedStepError
    from ..report.record import ResumeError

    with refusing((ResumeError, UntrainedStepError)):
        trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()
    if script.dataset != "tiny":
        trainer.create_model_card(dataset_name=script.dataset)
    if config.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        finish_run(Path(trainer.args.output_dir), script.report_experiment)
    return 0


def save_command_at_start(trainer: "DiffusionGRPOTrainer", values: dict[str, Any]) -> None:
    """Have the run write `train.yaml` when it starts; until then, its folder may hold another run."""
    from ..config.arguments import LaunchArguments
    from ..config.settings import find_launched_precision
    from ..report.record import read_launch, save_settings
    from ..training.callbacks import StartCallback

    values = find_launched_precision(trainer.args) | values
    processes = {key: values.pop(key, None) for key in LaunchArguments.__dataclass_fields__}
    values |= read_launch(processes, trainer.args.world_size)
    trainer.add_callback(StartCallback(functools.partial(save_settings, Path(trainer.args.output_dir), values)))


def start_processes(processes: "LaunchArguments", arguments: argparse.Namespace, use_cpu: bool) -> int:
    """Start this command in each process, wait, and return the exit code."""
    from ..config.arguments import LAUNCH_VARIABLE
    from ..distributed.launch import launch, make_launch_settings

    with refusing():
        settings = make_launch_settings(processes)
    words = ["--traceback"] if arguments.traceback else []
    words += ["train", *([arguments.config] if arguments.config else []), *arguments.overrides]
    chosen = {key: value for key, value in vars(processes).items() if value is not None}
    return launch(settings, words, use_cpu=use_cpu, variables={LAUNCH_VARIABLE: json.dumps(chosen)})


def build_trainer(
    script: "ScriptArguments", lora: "LoraArguments", config: "DiffusionGRPOConfig"
) -> "DiffusionGRPOTrainer":
    """Load the prompts and build the trainer, which checks everything before its model is loaded."""
    from ..data.prompts import load_prompts
    from ..trainer import DiffusionGRPOTrainer

    if not config.resume_from_checkpoint and not config.overwrite_output_dir:
        from ..training.checkpoints import refuse_used_folder

        refuse_used_folder(Path(config.output_dir))
    column, eval_dataset = config.prompt_column, None
    train_dataset = load_prompts(script.dataset, script.dataset_train_split, column)
    if script.eval_dataset is not None:
        eval_dataset = load_prompts(script.eval_dataset, script.dataset_test_split, column)
        if script.eval_max_prompts is not None:
            eval_dataset = eval_dataset.select(range(min(script.eval_max_prompts, len(eval_dataset))))
    hide_loading_bars(script.model)
    return DiffusionGRPOTrainer(
        model=script.model,
        reward_funcs=script.reward_funcs,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=lora.peft_config(config.lora_path),
        eval_reward_funcs=script.eval_reward_funcs,
    )


def find_baseline_argument(trainer: "DiffusionGRPOTrainer", guidance_scales: list[float]) -> str:
    """Return the argument of the pipeline's call that `baseline_guidance_scales` sets."""
    from ..policy.unguided import find_guidance_argument

    argument = find_guidance_argument(trainer.pipe, trainer.policy.networks)
    given = {*(trainer.args.pipeline_kwargs or {}), *trainer.eval_dataset.column_names}
    if argument == "true_cfg_scale" and not given & NEGATIVE and any(scale > 1 for scale in guidance_scales):
        raise ValueError(
            f"baseline_guidance_scales sets true_cfg_scale, which {type(trainer.pipe).__name__} ignores without a "
            'negative prompt; add one, for instance pipeline_kwargs: {negative_prompt: " "}.'
        )
    return argument


def measure_baselines(trainer: "DiffusionGRPOTrainer", guidance_scales: list[float], path: Path) -> None:
    """Evaluate the untrained model at several guidance scales, and write the rewards to a file."""
    from ..report.record import write_json
    from ..report.run_folder import format_measured, name_metrics

    argument, baselines = find_baseline_argument(trainer, guidance_scales), []
    for scale in guidance_scales:
        metrics = trainer.evaluate(metric_key_prefix="baseline", pipeline_kwargs={argument: scale})
        cells = {
            name: dict(zip(("mean", "std_error"), map(metrics.get, name_metrics(name, "baseline")), strict=True))
            for name in ["reward", *(reward.name for reward in trainer.rewards.all)]
        }
        reward = cells.pop("reward")
        baselines.append({"name": f"guidance {scale:g}", "rewards": cells, "reward": reward})
        if trainer.is_world_process_zero():
            print(f"before training, guidance {scale:g}: reward {format_measured(*reward.values())}")
    if trainer.is_world_process_zero():
        write_json(path, baselines)


def finish_run(run_dir: Path, experiment: str | None) -> None:
    """Add the earlier experiment to the report, write the summary, and print where the results are."""
    from ..report.page import missing_packages, write_report, write_summary
    from ..report.run_folder import describe_change, read_run

    if experiment is not None and not missing_packages():
        write_report(run_dir, experiment=experiment)
    write_summary(run_dir)
    run = read_run(run_dir)
    for name in run.reward_names:
        line = describe_change(run, name)
        if line is not None:
            print(f"  {name:<16} {line}")
    for what, where in (
        ("Weights", run_dir),
        ("Summary", run_dir / "summary.json"),
        ("Evaluations", run_dir / "evaluations"),
        ("Samples", run_dir / "samples"),
    ):
        if where.exists():  # some files need an eval_dataset or log_completions
            print(f"{what}: {where}")
