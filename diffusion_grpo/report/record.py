"""What a run writes about itself, without secrets: `run.json`, by which it is recognised again, and `train.yaml`.

The task and the licence of the base model, for the model card, are found here too.
"""

import dataclasses
import importlib.metadata
import inspect
import json
import logging
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from diffusers import DiffusionPipeline
from huggingface_hub import metadata_load, try_to_load_from_cache
from peft import PeftConfig

from .. import __version__
from ..config.arguments import LAUNCH_VARIABLE
from ..config.settings import DiffusionGRPOConfig, describe, find_launched_precision
from ..media.files import write_whole
from ..policy.base import split_component
from ..policy.sde import SDES, sdes_of
from ..weights.public_names import public_model_name, strip_folders, strip_secrets

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "trl")
# entries of run.json, settings, and settings of a LoRA that identify a run: they may not change when it is resumed
IDENTITY = ("model", "trains_by", "component", "reward_funcs", "prompts_per_rollout", "updates_per_rollout")
IDENTITY_SETTINGS = """seed num_generations num_inference_steps sigmas sde_type noise_level log_prob_type trained_steps
num_trained_steps step_selection noisy_steps samples_per_latent scheduler_kwargs num_iterations best_of_n
advantage_estimator load_in_4bit load_in_8bit quantization""".split()
LORA_SETTINGS = ("lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")
LORA_SETTINGS += ("use_rslora", "use_dora")
# not shown; the entry `trains_by` reports the last
NOT_SETTINGS = {"output_dir", "run_name", "hub_token", "resume_from_checkpoint", "overwrite_output_dir", "lora_path"}
SETTINGS_FILE = "train.yaml"
WRITTEN = "# The settings of this run, written when it started."  # first line of that file
# settings of one launch, which are not part of the run
LOCAL = {"output_dir", "resume_from_checkpoint", "report_experiment", "run_name"}
LOCAL |= {"push_to_hub", "push_samples", "machine_rank", "main_process_ip", "main_process_port"}
LICENSE_FIELDS = ("license", "license_name", "license_link")


class ResumeError(ValueError):
    """A run cannot start in its folder, or cannot resume from the requested checkpoint.

    Examples:
        >>> from diffusion_grpo.training.checkpoints import refuse_used_folder
        >>> Path(folder, "checkpoint-5").mkdir()
        >>> refuse_used_folder(Path(folder))
        Traceback (most recent call last):
        ResumeError: ...
    """


def make_record(
    model: str,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    reward_funcs: list[str],
    eval_reward_funcs: list[str],
    reward_weights: list[float],
) -> dict[str, Any]:
    """Return the contents of `run.json`, as far as they are known before the model is loaded."""
    record = {
        "model": public_model_name(model),
        "trains_by": _trains_by(args, peft_config),
        "reward_funcs": reward_funcs,
        "eval_reward_funcs": eval_reward_funcs,
        "reward_weights": reward_weights,
        "prompts_per_rollout": args.batch_sizes.prompts_per_rollout,  # over all processes
        "updates_per_rollout": args.batch_sizes.updates_per_rollout,
        "settings": list_changed_settings(args),
        "resolved": resolve_settings(args),
        "lora": describe_lora(peft_config),
        "versions": {"diffusion-grpo": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    if args.train_component is not None:  # otherwise the pipeline decides
        record["component"] = ", ".join(split_component(args.train_component))
    return record


def _trains_by(args: DiffusionGRPOConfig, peft_config: PeftConfig | None) -> str:
    if args.lora_adapter is not None:
        return f"LoRA {args.lora_adapter}, trained further"
    if args.lora_path is not None:  # a Hub id, or a folder's name without its path
        path = Path(args.lora_path)
        return f"LoRA {path.resolve().name if path.exists() else args.lora_path}, trained further"
    return "full" if peft_config is None else f"LoRA rank {getattr(peft_config, 'r', '?')}"


def list_changed_settings(args: DiffusionGRPOConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without paths and secrets."""
    defaults = DiffusionGRPOConfig(output_dir=args.output_dir, use_cpu=args.use_cpu)
    # a rate that regulates itself has only a limit, which would be a rate in another run
    changed, left_out = {}, NOT_SETTINGS | ({"learning_rate"} - args.given)
    for setting in dataclasses.fields(DiffusionGRPOConfig):  # a subclass may have more
        value = getattr(args, setting.name)
        if setting.name in left_out or value == getattr(defaults, setting.name):
            continue
        if isinstance(value, (str, int, float, list, dict, type(None))):
            changed[setting.name] = getattr(value, "value", value)
    return publish(changed) | find_launched_precision(args)  # which the defaults have too


def resolve_settings(args: DiffusionGRPOConfig) -> dict[str, Any]:
    """Return the settings that a run has to keep; a default and the same value written out are equal."""
    settings = {name: getattr(args, name) for name in IDENTITY_SETTINGS}
    settings["trained_steps"] = [args.trainable_steps.start, args.trainable_steps.stop]
    settings |= {"num_trained_steps": args.trained_count, "samples_per_latent": args.latent_sharing}
    sde = SDES.get(args.sde_type)
    if sde is not None:  # None: "auto", for which the scheduler decides once the model is loaded
        if sdes_of(sde.coordinates)[0] is sde:  # what "auto" means for every scheduler that it fits
            settings["sde_type"] = "auto"
        elif args.noise_level is None:
            settings["noise_level"] = sde.noise_level
    return publish(settings)


def describe_lora(peft_config: PeftConfig | None) -> dict[str, Any]:
    """Return the settings, other than the rank, that define the trained layers; nothing without a new LoRA."""
    if peft_config is None:
        return {}
    settings = {name: getattr(peft_config, name, None) for name in LORA_SETTINGS}
    return {
        name: sorted(value) if isinstance(value, (set, list, tuple)) else value for name, value in settings.items()
    }


def publish(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make settings serialisable as JSON, without folders and secrets."""
    return strip_folders(strip_secrets(describe(settings)))


def find_difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Describe the first setting that has another value here; None if all settings that both have are equal."""
    for name in there:
        if name in here and there[name] != here[name]:
            values = ("the default" if value is None else repr(value) for value in (there[name], here[name]))
            return "{} is {} there and {} here".format(name, *values)
    return None


def check_same_run(folder: str | Path, run: dict[str, Any], advice: str = "choose another output_dir") -> None:
    """Refuse a folder that holds another run, and warn if the run so far had other training prompts."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        return
    other = json.loads(path.read_text(encoding="utf-8"))
    there, here = (
        {name: record[name] for name in IDENTITY if name in record} | record["lora"] | record["resolved"]
        for record in (other, run)
    )
    difference = find_difference(there, here)
    if difference is not None:
        raise ResumeError(f"{folder} contains another run ({difference}); {advice}.")
    if None not in (prompts := [record.get("prompts_hash") for record in (other, run)]) and len({*prompts}) > 1:
        logger.warning("The run in %s so far had other training prompts, or another order of them.", folder)


# Entries for the header of the model card


def pipeline_tag(pipeline: type[DiffusionPipeline], inputs: Iterable[str]) -> str | None:
    """Return the Hub's name of the task that a pipeline was trained on; None if the Hub has none."""
    parameters = inspect.signature(pipeline.__call__).parameters
    if "Prior" in pipeline.__name__:  # makes embeddings for another pipeline
        return None
    source = "video" if "video" in inputs else "image" if {"image", "images"} & set(inputs) else "text"
    if {"num_frames", "video_length", "video"} & parameters.keys():
        return f"{source}-to-video"
    if any(name.startswith("audio_") for name in parameters):
        return "text-to-audio"
    return f"{source}-to-image" if "prompt" in parameters else "unconditional-image-generation"


def find_license(model: str) -> dict[str, str]:
    """Read the licence fields of the base model's card, if that card is on this machine; nothing is downloaded."""
    if model == "tiny":
        return {"license": "apache-2.0"}
    card = Path(model).expanduser() / "README.md"
    if not card.is_file() and model.count("/") == 1:
        cached = try_to_load_from_cache(model, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    try:
        data = metadata_load(card) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {name: data[name] for name in LICENSE_FIELDS if isinstance(data.get(name), str)}


# How the run was started


def save_settings(folder: str | Path, values: Mapping[str, Any]) -> None:
    """Write `train.yaml`, from which this run can be started again, without folders and secrets: it is published."""
    settings = {key: value for key, value in values.items() if key not in LOCAL and not key.startswith("hub_")}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = strip_folders(strip_secrets(settings)) | {"output_dir": f"outputs/{folder.resolve().name}"}
    # every version of YAML reads JSON in the same way
    lines = [WRITTEN, *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items())]
    (folder / SETTINGS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def refuse_own_settings(file: str | Path, folder: str | Path) -> None:
    """Refuse a user's settings file that the run would overwrite with its `train.yaml`."""
    file = Path(file)
    if file.resolve() != (Path(folder).expanduser() / SETTINGS_FILE).resolve():
        return
    if not file.read_text(encoding="utf-8").startswith(WRITTEN):
        raise ValueError(
            f"{file} is where the run writes its own settings, without comments and paths; rename the file, or choose "
            "another output_dir."
        )


def describe_script(argv: Sequence[str], processes: int) -> str | None:
    """Return the command of a run that was started by a Python script, without its arguments; None if it was not."""
    script = Path(argv[0]) if argv and argv[0] else None
    if script is None or script.suffix != ".py" or script.name in ("ipykernel_launcher.py", "__main__.py"):
        return None
    starter = ["python"] if processes == 1 else ["accelerate", "launch", "--num_processes", str(processes)]
    return shlex.join([*starter, script.name])


def read_launch(values: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the settings of processes for `train.yaml`."""
    launched = json.loads(os.environ.get(LAUNCH_VARIABLE, "{}"))
    settings = launched or {key: value for key, value in values.items() if value is not None}
    return settings if settings or world_size == 1 else {"num_processes": world_size}


def write_json(path: Path, content: Any) -> None:
    write_whole(path, lambda aside: aside.write_text(json.dumps(content, indent=2), encoding="utf-8"))
