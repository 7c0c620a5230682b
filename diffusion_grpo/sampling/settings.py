"""Options and settings of `diffusion-grpo sample`, given as a model with options or as the YAML file of a run.

So are rewards, the call of a run, and what two jobs must share for their samples to stand in one table.
`diffusion-grpo check` shares the options of the pipeline's call. Without torch, invalid options are refused at once.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config.declare import Count, NotNegative, setting
from ..config.fields import check_fields, list_fields
from ..config.files import check_folder
from ..tiny import default_settings

if TYPE_CHECKING:
    from ..config.settings import DiffusionGRPOConfig

STEPS = ("trained_steps", "num_trained_steps", "step_selection", "step_interval", "noisy_steps")
OF_THE_RUN = ("scheduler_kwargs", *STEPS, "train_component", "temperature", "top_k", "top_p")
OF_THE_RUN += ("bf16", "fp16", "load_in_4bit", "load_in_8bit", "quantization")
NOT_IDENTITY = {"prompts", "split", "output_dir", "max_prompts", "reward_weights", "batch_size", "device"}
NOT_IDENTITY |= {"offload_frozen", "train", "prompt_column"}
CALL = ("guidance_scale", "height", "width", "num_frames")  # arguments of the pipeline's call, passed if given


@dataclass
class SampleSettings:
    model: str
    prompts: str | list[str] = setting(
        MISSING,
        "file of prompts (.txt, .jsonl, .json, .csv, .parquet), dataset folder, Hub id, or `tiny`",
    )
    split: str = setting(MISSING, "split of the prompts; default: test")
    output_dir: Path = setting(MISSING, "folder to write to; default: samples")
    prompt_column: str | None = setting(None, "column that holds the prompts; default: found by its name")
    max_prompts: Count | None = setting(None, "use only the first N prompts; default: 16, or all with a YAML file")
    reward_funcs: Any = None
    eval_reward_funcs: Any = None
    reward_weights: list[float] | None = None
    num_generations: Count = setting(1, "samples per prompt; default: 1")
    noise_level: NotNegative | None = setting(
        0.0,
        "noise level of the denoising steps, as in training; default: 0 (the pipeline's own scheduler)",
    )
    sde_type: str = setting("auto", "SDE of the noise; default: auto")
    batch_size: Count = setting(4, "samples per pipeline call; default: 4")
    fps: float | None = setting(None, "frames per second of videos; default: the pipeline's, or 16")
    offload_frozen: Literal["cpu"] | None = setting(
        None,
        "keep all parts but the network in CPU memory until they are needed",
    )
    # those that `check` has too
    num_inference_steps: int | None = setting(None, "number of denoising steps")
    guidance_scale: float | None = setting(None, "guidance scale")
    height: int | None = setting(None, "height in pixels")
    width: int | None = setting(None, "width in pixels")
    num_frames: int | None = setting(None, "number of frames per video")
    pipeline_kwargs: dict[str, Any] = setting({}, "additional arguments of the pipeline's call, as JSON")
    model_init_kwargs: dict[str, Any] | None = setting(
        None, 'arguments that load the pipeline, as JSON, such as {"revision": "main"}'
    )
    lora: str | None = setting(
        None,
        "LoRA or weights to load: the output folder of a run or one of its checkpoints, with the size, guidance and "
        "steps of its evaluations as defaults; or any LoRA of the model",
    )
    seed: int = setting(0, "random seed; default: 0")
    dtype: str | None = setting(
        None, "torch dtype of the weights; default: bfloat16 on an accelerator, float32 on a CPU"
    )
    device: str | None = setting(None, "torch device; default: an accelerator where there is one")
    samples_per_latent: int | None = 1
    sigmas: list[float] | None = None
    train: "DiffusionGRPOConfig | None" = None

    def __post_init__(self):
        check_fields(self)
        if self.noise_level != 0 and self.num_inference_steps is None:
            raise ValueError("Noise in the steps needs --num_inference_steps, the number of steps it is spread over.")
        if self.lora is not None and not Path(self.lora).exists():
            in_a_run = (Path(self.lora).parent / "run.json").is_file()  # then the checkpoint is missing
            if self.lora.startswith((".", "/", "~")) or self.lora.count("/") != 1 or in_a_run:
                raise ValueError(f"--lora: there is no folder or file {self.lora}, and a Hub id is `owner/name`.")

    @property
    def component(self) -> str | None:
        """The trained networks of a run, if its settings name them."""
        return None if self.train is None else self.train.train_component

    @property
    def identity(self) -> dict[str, Any]:
        """Values that two jobs must share for their samples to belong in one table."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in NOT_IDENTITY}
        for name in ("model", "lora"):  # ignore a slash at the end of a folder
            if values[name] and Path(values[name]).exists():
                values[name] = str(Path(values[name]))
        values["lora_weights"] = hash_weights(self.lora)
        values |= {name: getattr(self.train, name, None) for name in OF_THE_RUN}
        return json.loads(json.dumps(values, default=repr))  # as they are read back from a file


def hash_weights(source: str | None) -> str | None:
    """Return a hash of the weights in a file, or in a run's folder without its checkpoints; None for a Hub id."""
    if source is None or not (path := Path(source)).exists():
        return None
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(path.rglob("*")):
        name = file.relative_to(path)
        is_weights = file.suffix in (".safetensors", ".bin") or file.name == "adapter_config.json" or file == path
        if is_weights and not str(name).startswith(("checkpoint-", "policy", "abandoned")):
            with file.open("rb") as weights:
                digest.update(name.as_posix().encode() + hashlib.file_digest(weights, "sha256").digest())
    return digest.hexdigest()[:16]


def add_options(command: argparse.ArgumentParser, first: str) -> None:
    """Add options for the settings that have a help text, from the field `first` on; None stands for the default."""
    described = [each for each in fields(SampleSettings) if each.metadata]
    names = [each.name for each in described]
    for each in described[names.index(first) :]:
        field = list_fields(SampleSettings)[each.name]
        kind = field.kinds[0] if field.kinds[0] in (int, float) else str
        command.add_argument(f"--{each.name}", type=kind, choices=field.choices or None, help=each.metadata["help"])


def add_sample_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "source",
        metavar="model",
        help="Hub id or folder of a pipeline, `tiny`, or a YAML file of `train`, whose settings are then the defaults",
    )
    command.add_argument("--prompt", nargs="+", help="texts to sample, in place of --prompts")
    command.add_argument(
        "--reward_funcs", nargs="+", help="rewards that score the samples: names, dotted paths, or one YAML mapping"
    )
    add_options(command, "prompts")
    command.set_defaults(output_dir="samples")
    command.epilog = (
        "With a YAML file of `train` the samples are like those of its rollouts: dataset, rewards, group size, image\n"
        "size, guidance, noise and sigmas come from the file. Options given here override it, and so does any other\n"
        "setting given as --key value. An interrupted job continues: samples in --output_dir are not made again."
    )


def read_call_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of a pipeline's call from its options, and their defaults."""
    options = {name: getattr(arguments, name) for name in ("num_inference_steps", *CALL)}
    options = {name: value for name, value in options.items() if value is not None}
    defaults = find_default_call(getattr(arguments, "source", None) or arguments.model, arguments.lora)
    return defaults | options | parse_json_object(arguments.pipeline_kwargs)


def find_default_call(model: str, lora: str | None) -> dict[str, Any]:
    """Return the call with which the run of a LoRA was evaluated, or that of the embedded model; {} if unknown."""
    source = Path(lora or "").expanduser().resolve()
    for folder in (source, *source.parents[:3]) if lora is not None and source.exists() else ():
        if (folder / "run.json").is_file():
            run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
            return run.get("evaluation_call", {}).get("arguments", {})
    if model != "tiny":
        return {}
    settings = default_settings({})
    call = {name: settings[name] for name in ("num_inference_steps", *CALL) if name in settings}
    return call | settings["pipeline_kwargs"]


def parse_json_object(text: str | None, option: str = "--pipeline_kwargs") -> dict[str, Any]:
    """Parse a JSON object of the command line; return {} if it was not given."""
    try:
        values = json.loads(text) if text else {}
    except json.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        raise ValueError(f'{option} is {text}; write a JSON object, {{"key": value}}.')
    return values


def read_settings(arguments: argparse.Namespace, overrides: Sequence[str]) -> SampleSettings:
    check_folder("--output_dir", arguments.output_dir)
    names = {each.name for each in fields(SampleSettings)}
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    given |= {
        "output_dir": Path(arguments.output_dir).expanduser(),
        "pipeline_kwargs": parse_json_object(arguments.pipeline_kwargs),
        "model_init_kwargs": parse_json_object(arguments.model_init_kwargs, "--model_init_kwargs"),
    }
    if arguments.prompt:
        given["prompts"] = arguments.prompt
    for name in ("prompts", "lora"):
        if isinstance(given.get(name), str):
            given[name] = os.path.expanduser(given[name])
    if arguments.reward_funcs:
        given |= {
            "reward_funcs": read_rewards(arguments.reward_funcs),
            "eval_reward_funcs": None,
            "reward_weights": None,
        }
    if Path(arguments.source).suffix in (".yaml", ".yml"):
        return _read_yaml(arguments, list(overrides), given)
    if overrides:
        raise ValueError(f"unknown option {overrides[0]}; see diffusion-grpo sample --help.")
    if "prompts" not in given:
        raise ValueError(
            "--prompts is missing; give a file of prompts, or texts with --prompt, or a run's YAML file as the model."
        )
    call = read_call_options(arguments)
    given |= {name: call.pop(name) for name in ("num_inference_steps", *CALL) if name in call}
    given |= {"model": os.path.expanduser(arguments.source), "pipeline_kwargs": call}
    return SampleSettings(**{"split": "test", "max_prompts": 16} | given)


def _read_yaml(arguments: argparse.Namespace, overrides: list[str], given: dict[str, Any]) -> SampleSettings:
    from ..config.parse import parse_train_arguments

    overrides = [*overrides, f"--output_dir={arguments.output_dir}"]
    if init_kwargs := given.pop("model_init_kwargs"):
        overrides.append(f"--model_init_kwargs={json.dumps(init_kwargs)}")
    if arguments.num_inference_steps is not None:  # the noisy steps depend on it
        overrides.append(f"--num_inference_steps={arguments.num_inference_steps}")
    script, _, train = parse_train_arguments(arguments.source, overrides)
    names = ("num_generations", "num_inference_steps", "sigmas", "sde_type", "noise_level", "seed", "fps")
    settings = {name: getattr(train, name) for name in (*names, "reward_weights", "prompt_column", *CALL)}
    # a number stays even where it is the run's group, as --num_generations may make groups of another size
    is_of_group = train.samples_per_latent in (None, "group") and train.latent_sharing == train.num_generations
    settings |= {
        "model": script.model,
        "prompts": script.dataset,
        "lora": train.lora_path,  # the rollouts of the run start from it
        "split": script.dataset_train_split,
        "reward_funcs": script.reward_funcs,
        "eval_reward_funcs": script.eval_reward_funcs,
        "samples_per_latent": None if is_of_group else train.latent_sharing,
        "batch_size": train.rollout_call_size,
        "offload_frozen": train.offload_frozen,
        "train": train,
    }
    if not train.is_recorded:  # the rollouts of the run draw no noise
        settings["noise_level"] = 0.0
    given["pipeline_kwargs"] = (train.pipeline_kwargs or {}) | given["pipeline_kwargs"]
    return SampleSettings(**(settings | given))


def read_rewards(words: list[str]) -> Any:
    """Read rewards from words: names or dotted paths, or a single word that is a YAML mapping or list."""
    from ..config.parse import read_overrides

    return read_overrides(["--reward_funcs", *words])["reward_funcs"]
