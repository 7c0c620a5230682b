"""Refuse typing errors before torch is imported: unknown keys, wrong types, contradictions, names that do not exist.

Each check raises a ValueError of one sentence. Everything that takes more than names, types and numbers (options of
rewards, rows of a dataset, the model) is checked later.
"""

import os
import typing
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from .arguments import LaunchArguments, LoraArguments, ScriptArguments
from .checks import check_settings
from .defaults import Sizes
from .names import RENAMED_REWARDS, refuse_unknown, suggest
from .source import Setting, config_fields, reward_names

TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")  # as in transformers' parser
# Strings that may be true or false: the newest checkpoint, FSDP as in `fsdp_config`, TRL's names of group and none.
TAKE_BOOL = ("resume_from_checkpoint", "fsdp", "scale_rewards")
FILES = (".txt", ".jsonl", ".json", ".parquet", ".csv")
MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # launchers that accelerate knows


class EarlySettings(Sizes):
    """The settings of a `DiffusionGRPOConfig` before it is built: defaults and given values as attributes."""

    def __init__(self, values: dict[str, Any], world_size: int):
        for name, setting in config_fields().items():
            setattr(self, name, None if setting.default is MISSING else setting.default)
        vars(self).update(values)
        self.given = values.keys()
        self.world_size, self.process_index = world_size, 0
        self.fill_in()


def script_fields() -> dict[str, Setting]:
    """Return the settings that only the command line takes, with their types as text."""
    classes = (ScriptArguments, LoraArguments, LaunchArguments)
    hints = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    return {f.name: Setting(type_name(hints[f.name]), f.default) for cls in classes for f in fields(cls)}


def type_name(hint: Any) -> str:
    """Write a type as a user would: `int`, `list[str] | None`."""
    return hint.__name__ if isinstance(hint, type) else str(hint)


def check_values(values: dict[str, Any], world_size: int | None, extra: dict[str, Setting] | None = None) -> None:
    """Refuse settings by their names, types and values.

    Args:
        values: settings from the file and the command line; the latter are strings.
        world_size: number of processes. If it is None, because unknown, nothing that depends on it is checked.
        extra: settings of the user's own subclass.

    Raises:
        ValueError: a key is unknown or missing, a value has the wrong type, or settings contradict each other.
    """
    known = (extra or {}) | script_fields() | config_fields()
    refuse_unknown(values, list(known))
    read = {name: read_value(name, value, known[name].type) for name, value in values.items()}
    missing = [f.name for f in fields(ScriptArguments) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"the following arguments are required: {', '.join(f'`{name}`' for name in missing)}.")
    for cls in (ScriptArguments, LoraArguments, LaunchArguments):
        cls(**{f.name: read[f.name] for f in fields(cls) if f.name in read})
    # the needs of a user's own loss are known only once it is imported; everything is checked again then
    if world_size is not None and "." not in str(read.get("loss_type", "")):
        check_settings(EarlySettings({name: read[name] for name in config_fields().keys() & read.keys()}, world_size))


def check_names(values: dict[str, Any]) -> None:
    """Refuse rewards and files of prompts that do not exist.

    Raises:
        ValueError: the message names the setting, and for a reward the nearest known one.
    """
    for setting in ("reward_funcs", "eval_reward_funcs"):
        check_reward_names(values.get(setting))
    for setting in ("dataset", "eval_dataset"):
        check_prompts_file(values.get(setting), setting)


def check_reward_names(rewards: Any) -> None:
    """Refuse a name without a dot that is not a built-in reward; anything but names is checked later."""
    known = reward_names()
    entries = rewards if isinstance(rewards, list) else [rewards]
    for name in (name for entry in entries for name in (entry if isinstance(entry, dict) else [entry])):
        if isinstance(name, str) and "." not in name and name not in known:
            raise ValueError(
                f"Unknown reward {name!r}: use one of {', '.join(known)}, or a dotted path to a function."
                f"{suggest(RENAMED_REWARDS.get(name, name), known)}"
            )


def check_prompts_file(source: Any, setting: str) -> None:
    """Refuse a file that does not exist or holds no prompts; a folder or a Hub id is checked when it is read."""
    if isinstance(source, str) and Path(source).suffix not in FILES and Path(source).is_file():
        raise ValueError(
            f"{setting}: {source} is not a file of prompts; use a file whose name ends in {', '.join(FILES[:-1])} or "
            f"{FILES[-1]}."
        )
    if isinstance(source, str) and Path(source).suffix in FILES and not Path(source).exists():
        start = "" if Path(source).is_absolute() else " (paths are relative to the working directory)"
        raise ValueError(
            f"{setting}: there is no file {source}{start}; give the path of an existing file with prompts."
        )


def check_model_name(model: str) -> None:
    """Check that `model`, if it is a local folder, holds a pipeline.

    Raises:
        ValueError: `model` is a folder that does not exist, a file, or a folder without a pipeline.
    """
    folder = Path(model).expanduser()
    if model == "tiny":
        return
    if folder.is_file():
        raise ValueError(f"model: {model} is a file; give the folder of a diffusers pipeline, a Hub id, or `tiny`.")
    if folder.is_dir() and not (folder / "model_index.json").is_file():
        raise ValueError(
            f"model: {model} contains no model_index.json, so it is not the folder of a diffusers pipeline; give such "
            "a folder, a Hub id, or `tiny`."
        )
    if not folder.exists() and (model.startswith((".", "/", "~")) or model.count("/") != 1):
        raise ValueError(
            f"model: there is no folder {model}, and a Hub id has the form `owner/name`; give an existing folder or a "
            "Hub id."
        )


def check_resume_folder(wanted: Any, output_dir: Any) -> None:
    """Refuse a checkpoint whose folder does not exist.

    Args:
        wanted: value of `resume_from_checkpoint`.
        output_dir: folder of the run; None if it is not given.

    Raises:
        ValueError: the message names the newest checkpoint in `output_dir`, if there is one.
    """
    folder = Path(str(wanted))
    if wanted is None or str(wanted).lower() in ("true", "false", "") or folder.is_dir():
        return
    if folder.with_name(f"tmp-{folder.name}-old").is_dir():  # left by a kill, and restored when the run starts
        return
    there = Path(output_dir or ".").glob("checkpoint-*")
    found = [path for path in there if path.name.removeprefix("checkpoint-").isdigit()]
    newest = max(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), default=None)
    advice = f"the newest checkpoint in output_dir is {newest}" if newest else "give that of a checkpoint, or true"
    raise ValueError(f"resume_from_checkpoint: there is no folder {wanted}; {advice}.")


def check_hub_access(token: str | None) -> None:
    """Refuse to push to the Hub if that cannot work.

    Args:
        token: value of `hub_token`.

    Raises:
        ValueError: the Hub's client is offline, or there is no token.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError(
            "push_to_hub needs the Hub, but HF_HUB_OFFLINE is set; unset it, or set push_to_hub=False and upload the "
            "output folder later."
        )
    if not (token or get_token()):
        raise ValueError(
            "push_to_hub needs a token of the Hub, and none was found; run `hf auth login`, or set HF_TOKEN or "
            "hub_token."
        )


def processes_here() -> int | None:
    """Return how many processes a launcher started: 1 without a launcher, None if only MPI knows."""
    if any(name in os.environ for name in MPI):
        return None
    return int(os.environ.get("WORLD_SIZE", 1))


def read_value(name: str, value: Any, kind: str) -> Any:
    """Convert a value to its type; raise ValueError if it does not fit."""
    if name in ("reward_funcs", "eval_reward_funcs") and isinstance(value, (dict, list)) and value:
        return value  # `load_rewards` checks it
    for cls, word in ((type(None), "None"), (bool, "bool"), (list, "list"), (dict, "dict")):
        if isinstance(value, cls) and word not in kind and not (cls is bool and name in TAKE_BOOL):
            raise ValueError(f"`{name}` is {value}, expected one {kind}.")
    kinds = {word.strip() for word in kind.split("|")} - {"None"}
    if isinstance(value, list) and len(kinds) == 1:
        inner = kind.partition("[")[2].partition("]")[0]
        return [_convert(name, item, inner) for item in value]
    if value is None or isinstance(value, (list, dict)) or len(kinds) != 1:
        return value
    return _convert(name, value, *kinds)


def _convert(name: str, value: Any, kind: str) -> Any:
    """Convert a word to an int, a float or a bool, if its type is one of these."""
    if kind == "bool":
        word = str(value).lower()
        if word not in (*TRUE, *FALSE):
            raise ValueError(f"`{name}`: invalid bool value: {value!r}; write true or false.")
        return word in TRUE
    if kind not in ("int", "float"):
        return value
    try:
        return int(str(value)) if kind == "int" else float(str(value))
    except ValueError as error:
        raise ValueError(f"`{name}`: invalid {kind} value: {str(value)!r}.") from error
