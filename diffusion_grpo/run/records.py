"""Records of a run: `run.json` and tables of samples."""

import dataclasses
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from peft import PeftConfig
from PIL import Image

from .. import __version__
from ..config.settings import DiffusionGRPOConfig, describe, find_launched_precision
from ..media.files import write_sample
from ..media.samples import convert_image
from ..policy.base import split_component
from ..weights.public_names import public_model_name, strip_folders, strip_secrets
from .resume_settings import IDENTITY_SETTINGS, describe_lora, find_difference, resolve_settings

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "trl")
IDENTITY = ("model", "trains_by", "reward_funcs")
# entries that a record may lack, and their names in messages
KNOWN_LATE = {"component": "train_component"} | {
    name: name.replace("_", " ") for name in ("prompts_per_rollout", "updates_per_rollout")
}
INPUT_WIDEST, INPUT_GAP = 512, 4  # pixels: of a copy of an image that samples were made from, and between two
NOT_SETTINGS = {"output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token", "resume_from_checkpoint"}
NOT_SETTINGS |= {"overwrite_output_dir", "lora_path"}  # the entry `trains_by` reports the latter


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
    changed = {}
    for setting in dataclasses.fields(DiffusionGRPOConfig):  # a subclass may have more
        value = getattr(args, setting.name)
        if setting.name in NOT_SETTINGS or value == getattr(defaults, setting.name):
            continue
        if isinstance(value, (str, int, float, list, dict, type(None))):
            changed[setting.name] = strip_folders(strip_secrets(describe(getattr(value, "value", value))))
    return changed | find_launched_precision(args)  # which the defaults have too


def check_same_run(folder: str | Path, run: dict[str, Any], advice: str = "choose another output_dir") -> None:
    """Refuse a folder that holds another run."""
    path = Path(folder) / "run.json"
    if not path.is_file():
        return
    other = json.loads(path.read_text(encoding="utf-8"))
    difference = _find_difference(other, run)
    if difference is not None:
        raise ValueError(f"{folder} contains another run ({difference}); {advice}.")


def warn_of_other_prompts(folder: str | Path, run: dict[str, Any]) -> None:
    """Warn if a run is resumed on other training prompts, or in another order, than those in its `run.json`."""
    path = Path(folder) / "run.json"
    before = json.loads(path.read_text(encoding="utf-8")).get("prompts_hash") if path.is_file() else None
    if None not in (before, run.get("prompts_hash")) and before != run["prompts_hash"]:
        logger.warning(
            "The training prompts, or their order, differ from those of the run in %s so far; it goes on with the new "
            "ones.",
            folder,
        )


def _find_difference(other: dict[str, Any], run: dict[str, Any]) -> str | None:
    theirs, ours = ({key: record[key] for key in IDENTITY} | record["lora"] for record in (other, run))
    for record, found in ((other, theirs), (run, ours)):
        found |= {name: record[key] for key, name in KNOWN_LATE.items() if key in record}
    if other["resolved"]["is_renoised"] == run["resolved"]["is_renoised"]:
        theirs, ours = theirs | other["resolved"], ours | run["resolved"]
    else:  # other kinds of algorithm have other defaults
        theirs |= {key: other["settings"].get(key) for key in IDENTITY_SETTINGS}
        ours |= {key: run["settings"].get(key) for key in IDENTITY_SETTINGS}
    return find_difference(theirs, ours)


def write_json(path: Path, content: Any) -> None:
    """Write JSON to a temporary file and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"tmp-{path.name}")
    aside.write_text(json.dumps(content, indent=2), encoding="utf-8")
    os.replace(aside, path)


def check_extra_column(name: str, values: Sequence[Any], count: int) -> list[Any]:
    """Return the values that a reward passed to `log_extra` as a list, one per sample."""
    values = values.tolist() if hasattr(values, "tolist") else list(values)
    if len(values) != count:
        raise ValueError(
            f"log_extra({name!r}, ...) got {len(values)} values for {count} samples; give one per sample."
        )
    return values


def write_samples(path: Path, columns: dict[str, list[Any]]) -> None:
    """Write a parquet table to a temporary file and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"tmp-{path.name}")
    pyarrow.parquet.write_table(pyarrow.table(columns), aside)
    os.replace(aside, path)


def write_inputs(images: Iterable[list[Image.Image]], stems: Iterable[Path | None], root: Path) -> dict[str, list]:
    """Write small copies of the images that the samples were made from, to be shown beside them."""
    found: list[str | None] = []
    for own, stem in zip(images, stems, strict=True):
        if not own or stem is None:
            found.append(None)
            continue
        _, path = write_sample(_join(own), stem, fps=1.0)
        found.append(str(path.relative_to(root)))
    return {"input": found} if any(found) else {}


def _join(images: list[Image.Image]) -> Image.Image:
    """Put small copies of images side by side, all of the height of the first."""
    first, *others = (convert_image(image, "RGB") for image in images)
    first = first.copy()  # the next line changes it in place, and replays still need the original
    first.thumbnail((INPUT_WIDEST, INPUT_WIDEST))
    height = first.height
    row = [first, *(image.resize((max(1, round(image.width * height / image.height)), height)) for image in others)]
    joined = Image.new("RGB", (sum(image.width for image in row) + INPUT_GAP * len(others), height), "white")
    start = 0
    for image in row:
        joined.paste(image, (start, 0))
        start += image.width + INPUT_GAP
    return joined


def write_files(
    samples: Iterable[Any], stems: Iterable[Path | None], root: Path, fps: float, sampling_rate: int | None
) -> dict[str, list[str | None]]:
    """Write samples as images, videos and sound ([`~media.write_sample`])."""
    columns: dict[str, list[str | None]] = {"image": [], "file": []}
    for sample, stem in zip(samples, stems, strict=True):
        files = (None, None) if stem is None else write_sample(sample, stem, fps, sampling_rate)
        for column, path in zip(columns.values(), files, strict=True):
            column.append(None if path is None else str(path.relative_to(root)))
    return columns
