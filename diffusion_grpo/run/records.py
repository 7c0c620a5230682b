"""Records of a run: `run.json` and tables of samples."""

import dataclasses
import importlib.metadata
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from peft import PeftConfig
from PIL import Image
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from .. import __version__
from ..config.settings import DiffusionGRPOConfig, describe, find_launched_precision
from ..media.files import write_sample
from ..media.samples import convert_image
from ..policy.base import split_component
from .card_data import public_model_name, strip_folders, strip_secrets
from .manifest import ResumeError
from .resume_point import checkpoints
from .resume_settings import IDENTITY_SETTINGS, describe_lora, find_difference, resolve_settings

logger = logging.getLogger(__name__)
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "trl")
IDENTITY = ("model", "trains_by", "reward_funcs")
# entries that a record may lack, and their names in messages
KNOWN_LATE = {"component": "train_component"} | {
    name: name.replace("_", " ") for name in ("prompts_per_rollout", "updates_per_rollout")
}
# weights at the top of the folder: from the run's end, from `save_model`, or from a push during the run
WEIGHTS = ("model_index.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors")
INPUT_WIDEST, INPUT_GAP = 512, 4  # pixels: of a copy of an image that samples were made from, and between two
SAMPLES = ("evaluations", "samples", "validation")  # folders whose entries have the number of their update
ABANDONED = "abandoned"  # folder of what a run left after the update that it went back to
NOT_SETTINGS = {"output_dir", "logging_dir", "run_name", "hub_token", "push_to_hub_token", "resume_from_checkpoint"}
NOT_SETTINGS |= {"lora_path"}  # the entry `trains_by` reports it


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


def has_ended(output_dir: str | Path) -> bool:
    """Return whether a run has ended in this folder.

    Only the end of a run leaves a trainer state at the top. Weights may be there earlier, from a push or `save_model`,
    and `diffusion-grpo report` can write a summary at any time.
    """
    return (Path(output_dir) / TRAINER_STATE_NAME).is_file()


def holds_run(output_dir: str | Path) -> bool:
    """Return whether this folder holds a checkpoint or a result, which a run should not overwrite.

    A run that was interrupted before its first checkpoint leaves neither, and is simply started again.
    """
    folder = Path(output_dir)
    has_result = has_ended(folder) or any((folder / name).is_file() for name in ("summary.json", *WEIGHTS))
    return has_result or (folder.is_dir() and get_last_checkpoint(folder) is not None)


def refuse_used_folder(output_dir: str | Path, how_to_resume: str) -> None:
    """Refuse a folder that holds a run.

    Args:
        how_to_resume: how to continue that run, for the message.

    Raises:
        ResumeError: there is such a run.
    """
    refuse_ended_run(output_dir)
    if holds_run(output_dir):
        last = get_last_checkpoint(output_dir)
        newest = f" (newest: {Path(last).name})" if last else " (it has saved no checkpoint)"
        raise ResumeError(
            f"{output_dir} already contains a run{newest}; {how_to_resume} to continue it, choose another output_dir, "
            "or delete it."
        )


def refuse_ended_run(output_dir: str | Path) -> None:
    """Refuse a folder with the result of an ended run without checkpoints, which resuming would overwrite.

    Raises:
        ResumeError: there is such a run.
    """
    if has_ended(output_dir) and get_last_checkpoint(output_dir) is None:
        raise ResumeError(
            f"{output_dir} already contains a run, which has ended and has no checkpoint to continue from; choose "
            "another output_dir, or delete it."
        )


def check_output_folder(output_dir: str, run: dict[str, Any], is_resumed: bool) -> None:
    """Refuse, before a model is loaded, an output folder in which nothing can be trained.

    An interrupted run only causes a warning: `train(resume_from_checkpoint=True)` may still continue it.

    Args:
        output_dir: the folder.
        run: the record of this run.
        is_resumed: whether the settings ask to resume the run that is there.

    Raises:
        ValueError: another run is there.
        ResumeError: a run has ended there, and the settings do not ask to resume it.
    """
    if not holds_run(output_dir):
        return
    check_same_run(output_dir, run)
    if is_resumed:
        return
    newest = get_last_checkpoint(output_dir)
    if has_ended(output_dir) or newest is None:
        refuse_used_folder(output_dir, "set resume_from_checkpoint=True in the settings")
    logger.warning(
        "%s contains a run that was interrupted (newest: %s); train(resume_from_checkpoint=True) continues it.",
        output_dir,
        Path(newest).name,
    )


def clear_started_run(output_dir: Path) -> None:
    """Remove samples of a run that was interrupted before its first checkpoint and is started again.

    Samples from before the first update stay: they may already belong to the new run.
    """
    if not (output_dir / "run.json").is_file():
        return
    for path in [path for name in SAMPLES for path in (output_dir / name).glob("step-*")]:
        if not path.name.startswith("step-000000"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def set_later_aside(output_dir: Path, update: int) -> Path | None:
    """Move what a run left after an update into a folder of its own, for a run that goes back to that update.

    Otherwise, the updates that it abandons would leave the newest checkpoint, the longest log and the latest samples.

    Args:
        output_dir: folder of the run.
        update: the update that the run goes on from.

    Returns:
        the folder that later checkpoints, samples and the ended run's log were moved to; None, with nothing moved, if
        there is no later checkpoint.
    """

    def is_later(path: Path) -> bool:
        found = re.match(r"(?:checkpoint|step)-(\d+)", path.name)
        return found is not None and int(found[1]) > update

    newer = [path for path in checkpoints(output_dir) if is_later(path)]
    if not newer:
        return None
    later = [path for name in SAMPLES for path in (output_dir / name).glob("step-*") if is_later(path)]
    later += [path for path in [output_dir / TRAINER_STATE_NAME] if path.is_file()]
    later += newer  # last, so that a run that is killed meanwhile moves the rest the next time
    aside = output_dir / ABANDONED / f"after-{update}"
    number = 2
    while aside.exists():
        aside = aside.with_name(f"after-{update}-{number}")
        number += 1
    for path in later:
        target = aside / path.relative_to(output_dir)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    return aside


def check_same_run(folder: str | Path, run: dict[str, Any], advice: str = "choose another output_dir") -> None:
    """Refuse a folder that holds another run.

    Args:
        folder: an output folder; one without a `run.json` is accepted.
        run: the record of this run. Entries that are unknown before the model is loaded are compared later.
        advice: advice in the message about another run.

    Raises:
        ValueError: the model, the rewards, what is trained or how it is sampled differ from the run that is there.
    """
    path = Path(folder) / "run.json"
    if not path.is_file():
        return
    other = json.loads(path.read_text(encoding="utf-8"))
    other["model"] = public_model_name(other["model"])  # as this version records it
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
    theirs, ours = ({key: record[key] for key in IDENTITY} | record.get("lora", {}) for record in (other, run))
    for record, found in ((other, theirs), (run, ours)):
        found |= {name: record[key] for key, name in KNOWN_LATE.items() if key in record}
    if other.get("resolved", {}).get("is_renoised") == run["resolved"]["is_renoised"]:
        theirs, ours = theirs | other["resolved"], ours | run["resolved"]
    else:  # earlier versions recorded only changed settings, and other kinds of algorithm have other defaults
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
    """Return the values that a reward passed to `log_extra` as a list, one per sample.

    Raises:
        ValueError: the number of values is wrong.
    """
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
    """Write small copies of the images that the samples were made from, to be shown beside them.

    Args:
        images: a list per sample, empty if it was made from text alone. Several are put side by side.
        stems: path of each image's file, without its suffix; None for a sample that is not kept.
        root: folder to which the paths in the table are relative.

    Returns:
        a column of a table, `input`; no column without images.
    """
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
    """Write samples as images, videos and sound ([`~media.write_sample`]).

    Args:
        stems: path of each sample's files, without their suffix; None for a sample that is not kept.
        root: folder to which the paths in the table are relative.

    Returns:
        two columns of a table: `image`, which represents a sample, and `file`, the sample itself.
    """
    columns: dict[str, list[str | None]] = {"image": [], "file": []}
    for sample, stem in zip(samples, stems, strict=True):
        files = (None, None) if stem is None else write_sample(sample, stem, fps, sampling_rate)
        for column, path in zip(columns.values(), files, strict=True):
            column.append(None if path is None else str(path.relative_to(root)))
    return columns
