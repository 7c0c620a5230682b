"""What a run writes about itself: `run.json` and tables of samples.

In: settings and rows. Out: files that the report, the model card and a user's own analysis read.
"""

import dataclasses
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from peft import PeftConfig
from transformers.trainer_utils import get_last_checkpoint

from .config import DiffusionGRPOConfig

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "trl")
IDENTITY = ("model", "trains_by", "reward_funcs")
NOT_SETTINGS = {"output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token", "resume_from_checkpoint"}


def run_record(
    model: str,
    args: DiffusionGRPOConfig,
    peft_config: PeftConfig | None,
    reward_funcs: list[str],
    eval_reward_funcs: list[str],
    reward_weights: list[float],
) -> dict[str, Any]:
    """Contents of `run.json`, as far as they are known before the model is loaded."""
    trains_by = "full" if peft_config is None else f"LoRA rank {getattr(peft_config, 'r', '?')}"
    return {
        "model": model,
        "trains_by": trains_by,
        "reward_funcs": reward_funcs,
        "eval_reward_funcs": eval_reward_funcs,
        "reward_weights": reward_weights,
        "settings": changed_settings(args),
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def changed_settings(args: DiffusionGRPOConfig) -> dict[str, Any]:
    """The settings that differ from their defaults, without paths and secrets."""
    defaults = DiffusionGRPOConfig(output_dir=args.output_dir, use_cpu=args.use_cpu)
    changed = {}
    for setting in dataclasses.fields(args):
        value = getattr(args, setting.name)
        if setting.name in NOT_SETTINGS or value == getattr(defaults, setting.name):
            continue
        if isinstance(value, (str, int, float, list, dict, type(None))):
            changed[setting.name] = getattr(value, "value", value)
    return changed


def check_same_run(output_dir: str, run: dict[str, Any]) -> None:
    """Refuses an output folder with checkpoints of another run.

    Raises:
        ValueError: model, rewards or what is trained differ from the run that is there.
    """
    path = Path(output_dir) / "run.json"
    if not path.is_file() or get_last_checkpoint(output_dir) is None:
        return
    other = json.loads(path.read_text(encoding="utf-8"))
    for key in IDENTITY:
        if other[key] != run[key]:
            raise ValueError(
                f"{output_dir} holds another run ({key} is {other[key]!r} there and {run[key]!r} here); choose "
                "another output_dir."
            )


def write_json(path: Path, content: Any) -> None:
    """Writes JSON aside and renames it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"tmp-{path.name}")
    aside.write_text(json.dumps(content, indent=2), encoding="utf-8")
    os.replace(aside, path)


def write_samples(path: Path, columns: dict[str, list[Any]]) -> None:
    """Writes one parquet table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
