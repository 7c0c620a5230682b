"""
The command `diffusion-grpo`: words of a command line go in, an exit code comes out.

A module of its own so that the library never reads arguments or prints. Nothing heavy is imported before it is needed,
so `--help` answers at once; and everything that can be refused is refused, as one line `error: ...` with exit code 2,
before a model is loaded.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import sample_settings

if TYPE_CHECKING:
    from datasets import Dataset

    from .arguments import LoraArguments, ScriptArguments
    from .config import DiffusionGRPOConfig
    from .trainer import DiffusionGRPOTrainer


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Returns 0; 1 where `check` finds that a pipeline does not train; 2 where input is refused."""
    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    if "" not in sys.path:
        sys.path.append("")  # rewards and losses named by dotted path may lie in the working directory
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(words)
    if unknown and arguments.command != "sample":  # `sample` takes settings of a training too
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.overrides = [*overrides, *unknown]
    try:
        return arguments.run(arguments)
    except Refusal as refusal:
        if arguments.traceback:
            raise
        print(f"error: {refusal}", file=sys.stderr)
        return 2


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """`train config.yaml --beta 0.1` -> what argparse reads, and the overrides that follow."""
    if "train" not in words[:2]:
        return words, []
    start = words.index("train") + 1
    if words[start:] and not words[start].startswith("-"):
        start += 1
    own = ("-h", "--help", "--list-settings")
    rest = words[start:]
    return words[:start] + [word for word in rest if word in own], [word for word in rest if word not in own]


class Refusal(Exception):
    """Input that cannot be used; the message is one sentence that says what to change."""


def refusing(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls what checks or loads a user's input, and turns its errors into a Refusal."""
    try:
        return function(*args, **kwargs)
    except (ValueError, OSError, ImportError) as error:
        raise Refusal(" ".join(str(error).split())) from error


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="diffusion-grpo", description="Post-train any diffusers pipeline with GRPO on any reward."
    )
    parser.add_argument("--traceback", action="store_true", help="show where in the code an input was refused")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{train,check,sample,report,rewards}")
    for add, name, purpose in (
        (add_train, "train", "train from a YAML file"),
        (add_check, "check", "tell in seconds whether a pipeline can be trained, and how exactly it replays"),
        (add_sample, "sample", "make pictures, videos or sound and score them, without training"),
        (add_report, "report", "write report.html and summary.json of a run again"),
        (add_rewards, "rewards", "serve rewards to trainings in other processes or on other machines"),
    ):
        description = f"{purpose[0].upper()}{purpose[1:]}."
        formatter = argparse.RawDescriptionHelpFormatter
        add(commands.add_parser(name, help=purpose, description=description, formatter_class=formatter))
    return parser


def add_train(command: argparse.ArgumentParser) -> None:
    """Options of `train`: a file and whatever is overridden; `parse_train_arguments` reads the rest."""
    from .arguments import LoraArguments, ScriptArguments

    command.add_argument("config", nargs="?", help="YAML file of settings; overrides on the command line win")
    command.add_argument("--list-settings", action="store_true", help="list every setting with its default, and stop")
    command.usage = "diffusion-grpo train [config.yaml] [--key value ...] [--help] [--list-settings]"
    command.epilog = "\n\n".join(
        [
            "Keys, in the file or as --key value:",
            describe_settings(ScriptArguments),
            describe_settings(LoraArguments),
            "and every setting of DiffusionGRPOConfig (--list-settings; docs/config.md).",
        ]
    )
    command.set_defaults(run=run_train)


def describe_settings(settings: type) -> str:
    """One paragraph for each field of a dataclass: name, default, help text."""
    lines = []
    for field in fields(settings):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        default = "required" if default is MISSING else f"default {default!r}"
        help_text = " ".join(str(field.metadata.get("help", "")).split())
        lines.append(f"  {field.name} ({default})")
        lines += textwrap.wrap(help_text, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def run_train(arguments: argparse.Namespace) -> int:
    """Trains, saves, pushes where asked, and writes the report. Returns the exit code."""
    from .arguments import parse_train_arguments

    if arguments.list_settings:
        from .config import DiffusionGRPOConfig

        print(describe_settings(DiffusionGRPOConfig))
        return 0
    script, lora, config = refusing(parse_train_arguments, arguments.config, arguments.overrides)
    trainer = build_trainer(script, lora, config)
    if script.baseline_guidance_scales:
        refusing(measure_baselines, trainer, script.baseline_guidance_scales)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    trainer.save_model()
    if config.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        finish_run(Path(config.output_dir), script.report_experiment)
    return 0


def build_trainer(
    script: "ScriptArguments", lora: "LoraArguments", config: "DiffusionGRPOConfig"
) -> "DiffusionGRPOTrainer":
    """Refuses unusable prompts and rewards first; only then is the model loaded."""
    from .rewards import check_columns, load_rewards

    train_dataset = refusing(load_checked, script.dataset, script.dataset_train_split, "dataset")
    eval_dataset = None
    if script.eval_dataset is not None:
        eval_dataset = refusing(load_checked, script.eval_dataset, script.dataset_test_split, "eval_dataset")
        if script.eval_max_prompts is not None:
            eval_dataset = eval_dataset.select(range(min(script.eval_max_prompts, len(eval_dataset))))
    reward_funcs = refusing(load_rewards, script.reward_funcs)
    eval_reward_funcs = refusing(load_rewards, script.eval_reward_funcs, "eval_reward_funcs")
    refusing(check_columns, reward_funcs, train_dataset.column_names, "dataset")
    refusing(check_model_name, script.model)
    if not config.resume_from_checkpoint:
        from .records import refuse_used_folder

        refusing(refuse_used_folder, config.output_dir, "add --resume_from_checkpoint true")

    from .trainer import DiffusionGRPOTrainer

    hide_loading_bars(script.model)
    return refusing(
        DiffusionGRPOTrainer,
        model=script.model,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=lora.peft_config(),
        eval_reward_funcs=eval_reward_funcs,
    )


def load_checked(source: str, split: str, name: str) -> "Dataset":
    """Prompts of a file, folder, Hub id or `tiny`; ValueError that names the setting where they cannot be used."""
    from .data import check_dataset, load_prompts

    dataset = load_prompts(source, split=split)
    check_dataset(dataset, name=name)
    return dataset


def check_model_name(model: str) -> None:
    """Raises ValueError where `model` is meant as a local folder but is none of a pipeline."""
    folder = Path(model).expanduser()
    if model == "tiny":
        return
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(f"model: {model} holds no model_index.json, so it is not a folder of a diffusers pipeline.")
    if not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise ValueError(f"model: there is no folder {model}, and a Hub id has the form `owner/name`.")


def hide_loading_bars(model: str) -> None:
    """The embedded model loads at once; bars for that would bury what matters."""
    if model == "tiny":
        import diffusers
        import transformers

        diffusers.utils.logging.disable_progress_bar()
        transformers.utils.logging.disable_progress_bar()


def measure_baselines(trainer: "DiffusionGRPOTrainer", guidance_scales: list[float]) -> None:
    """Evaluates the untrained model at other guidance scales, and writes baselines.json into the run's folder."""
    from .records import write_json

    path = Path(trainer.args.output_dir) / "baselines.json"
    if trainer.args.resume_from_checkpoint and path.is_file():
        return
    baselines = []
    for scale in guidance_scales:
        metrics = trainer.evaluate(metric_key_prefix="baseline", pipeline_kwargs={"guidance_scale": scale})
        names = [key.split("/")[1] for key in metrics if key.endswith("/mean")]
        rewards = {
            name: {key: metrics[f"baseline_rewards/{name}/{key}"] for key in ("mean", "std_error")} for name in names
        }
        reward = {"mean": metrics["baseline_reward"], "std_error": metrics["baseline_reward_std_error"]}
        baselines.append({"name": f"guidance {scale:g}", "rewards": rewards, "reward": reward})
        print(f"untrained, guidance {scale:g}: held-out reward {reward['mean']:.3f} ± {reward['std_error']:.3f}")
    if trainer.is_world_process_zero():
        write_json(path, baselines)


def finish_run(run_dir: Path, experiment: str | None) -> None:
    """Shows the earlier experiment in the report the trainer wrote, and says what lies where."""
    from .report import missing_packages, write_report, write_summary

    if experiment is not None and not missing_packages():
        write_report(run_dir, experiment=experiment)
    for name, reward in write_summary(run_dir)["rewards"].items():
        if reward["before"] is not None and reward["after"] is not None:
            print(f"  {name:<16} {reward['before']:.3f} -> {reward['after']:.3f} ± {reward['standard_error']:.3f}")
    for what, where in (
        ("Weights", run_dir),
        ("Summary", run_dir / "summary.json"),
        ("Pictures", run_dir / "evaluations"),
        ("Samples", run_dir / "samples"),
    ):
        print(f"{what}: {where}")


def add_check(command: argparse.ArgumentParser) -> None:
    """Options of `check`."""
    command.add_argument("model", help="Hub id or folder of a diffusers pipeline, or `tiny`")
    command.add_argument("--prompt", default="a photo of a cat", help="default: %(default)s")
    sample_settings.add_call_options(command, steps_default=4)
    command.add_argument("--sde_type", default="auto", help="process put on the scheduler; default: %(default)s")
    command.add_argument("--noise_level", type=float, default=None, help="noise of the process")
    command.set_defaults(run=run_check)


def run_check(arguments: argparse.Namespace) -> int:
    """Prints the replay report as a table. Returns 0 where the pipeline trains, else 1."""
    inputs = {"prompt": arguments.prompt, **refusing(sample_settings.call_options, arguments)}
    refusing(check_model_name, arguments.model)
    from rich.console import Console
    from rich.table import Table

    from .check import check_pipeline
    from .loading import plain_pipeline

    hide_loading_bars(arguments.model)
    pipe = refusing(plain_pipeline, arguments.model, arguments.dtype, arguments.device)
    steps = inputs.pop("num_inference_steps")
    replay = refusing(
        check_pipeline,
        pipe,
        inputs,
        num_inference_steps=steps,
        sde_type=arguments.sde_type,
        noise_level=arguments.noise_level,
        seed=arguments.seed or 0,
    )
    table = Table(show_header=False, title=f"{arguments.model}: {'trains' if replay.trains else 'does not train'}")
    for field in fields(replay):
        value = getattr(replay, field.name)
        if value is not None and value != "":
            table.add_row(field.name, f"{value:.3g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return 0 if replay.trains else 1


def add_sample(command: argparse.ArgumentParser) -> None:
    """Options of `sample`."""
    sample_settings.add_sample_options(command)
    command.set_defaults(run=run_sample)


def run_sample(arguments: argparse.Namespace) -> int:
    """Writes samples, scores and a table, without training. Returns the exit code."""
    from .rewards import check_columns, load_rewards

    settings = refusing(sample_settings.read_settings, arguments, arguments.overrides)
    rewards = refusing(load_rewards, settings.reward_funcs)
    judges = refusing(load_rewards, settings.eval_reward_funcs, "eval_reward_funcs")
    judges = [judge for judge in judges if judge.name not in {reward.name for reward in rewards}]
    dataset = refusing(load_checked, settings.prompts, settings.split, "--prompts")
    refusing(check_columns, rewards + judges, dataset.column_names, "--prompts")
    dataset = dataset.select(range(min(settings.max_prompts or len(dataset), len(dataset))))
    refusing(check_model_name, settings.model)

    from .sample import check_folder, load_sampled, write_samples

    refusing(check_folder, settings)
    hide_loading_bars(settings.model)
    pipe = refusing(load_sampled, settings)
    summary = refusing(write_samples, pipe, dataset, rewards, judges, settings)
    for name, (mean, error) in summary.items():
        print(f"{name:<16} {mean:.3f} ± {error:.3f}")
    made = len(dataset) * settings.num_generations
    print(f"{made} samples of {len(dataset)} prompts and samples.parquet in {settings.output_dir}")
    return 0


def add_rewards(command: argparse.ArgumentParser) -> None:
    """Options of `rewards serve`."""
    actions = command.add_subparsers(dest="action", required=True, metavar="{serve}")
    purpose = "answer scoring requests of RemoteReward over HTTP, until stopped"
    serve = actions.add_parser("serve", help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
    serve.add_argument("rewards", nargs="+", help="names, dotted paths, or one YAML mapping with options")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; default: %(default)s, this machine")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one; default: %(default)s")
    serve.add_argument("--token_env", help="environment variable with the token that requests must carry")
    serve.add_argument("--max_waiting", type=int, default=16, help="requests in the queue; default: %(default)s")
    serve.add_argument("--max_megabytes", type=int, default=256, help="of one request; default: %(default)s")
    serve.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serves until it is interrupted. Returns the exit code."""
    import os
    import socket

    from .rewards import load_rewards

    rewards = refusing(load_rewards, refusing(sample_settings.read_rewards, arguments.rewards))
    token = os.environ.get(arguments.token_env) if arguments.token_env else None
    if arguments.token_env and not token:
        raise Refusal(f"--token_env names {arguments.token_env}, but no such environment variable is set.")
    if arguments.max_waiting < 1 or arguments.max_megabytes < 1:
        raise Refusal("--max_waiting and --max_megabytes must be at least 1.")
    try:
        import uvicorn

        from .rewards.serve import create_app
    except ImportError as error:
        raise Refusal('A server needs fastapi and uvicorn; pip install "diffusion-grpo[rewards]".') from error
    app = create_app(rewards, token, arguments.max_waiting, arguments.max_megabytes * 2**20)
    listener = refusing(socket.create_server, (arguments.host, arguments.port))
    if token is None and not arguments.host.startswith("127.") and arguments.host not in ("localhost", "::1"):
        print("warning: other machines can reach this server, and it asks for no token (--token_env)", file=sys.stderr)
    address = f"http://{arguments.host}:{listener.getsockname()[1]}"
    print(f"serving {', '.join(reward.name for reward in rewards)} on {address}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


def add_report(command: argparse.ArgumentParser) -> None:
    """Options of `report`."""
    command.add_argument("run_dir", help="output folder of a run")
    command.add_argument("--experiment", help="JSON of an earlier experiment to show beside the run (docs/metrics.md)")
    command.set_defaults(run=run_report)


def run_report(arguments: argparse.Namespace) -> int:
    """Writes report.html and summary.json again from a run's files. Returns the exit code."""
    from .report import write_report, write_summary

    run_dir = Path(arguments.run_dir)
    refusing(write_summary, run_dir)
    print(refusing(write_report, run_dir, experiment=arguments.experiment))
    return 0


if __name__ == "__main__":
    sys.exit(main())
