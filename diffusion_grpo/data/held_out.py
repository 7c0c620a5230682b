"""Do evaluation prompts also occur in training? Count and warn; reports say "held-out" only if none does."""

import logging
from collections.abc import Collection
from typing import Any

from datasets import Dataset

from .prompts import read_prompts

logger = logging.getLogger(__name__)
MEDIA = ("image", "video", "mask", "audio")  # parts of the names of pipeline arguments


def count_prompts(
    train: Dataset | None, evaluation: Dataset | dict[str, Dataset] | None, accepted: Collection[str] = ()
) -> dict[str, int | None]:
    """Count the prompts for `run.json`."""
    evaluations = list(evaluation.values()) if isinstance(evaluation, dict) else [evaluation]
    parts = [part for part in evaluations if part is not None]
    counts = {"train": 0 if train is None else len(train), "eval": sum(map(len, parts)), "eval_in_train": None}
    datasets = [*parts, *([] if train is None else [train])]
    given = {name for dataset in datasets for name in dataset.column_names if name in accepted}
    has_media = any(word in name for name in given for word in MEDIA)
    if parts and not has_media and all("prompt" in dataset.column_names for dataset in datasets):
        trained = set() if train is None else set(map(_strip, read_prompts(train)))
        counts["eval_in_train"] = sum(_strip(prompt) in trained for part in parts for prompt in read_prompts(part))
    return counts


def _strip(prompt: Any) -> Any:
    return prompt.strip() if isinstance(prompt, str) else prompt


def warn_of_trained_prompts(counts: dict[str, int | None]) -> None:
    """Warn at the start of a run if evaluation prompts are also trained on."""
    if counts["eval_in_train"]:
        logger.warning(
            "%d of the %d prompts of eval_dataset are in train_dataset too, so evaluations will not say how well the "
            "model does on new prompts; use other prompts in eval_dataset to measure that.",
            counts["eval_in_train"],
            counts["eval"],
        )


def name_prompts(counts: dict[str, int | None]) -> str:
    """Return what to call the evaluation's prompts: "held-out" only where none of them is trained on."""
    return "held-out" if counts.get("eval_in_train") == 0 else "evaluation"


def describe_prompts(counts: dict[str, int | None]) -> str:
    """Describe the evaluation's prompts, for instance `96 held-out prompts, none of which is trained on`."""
    total, trained = counts.get("eval") or 0, counts.get("eval_in_train")
    prompts = f"{name_prompts(counts)} prompt{'' if total == 1 else 's'}"
    if trained is None:
        return f"{total} {prompts}"
    share = {0: "none of which is trained on", total: "all of which are trained on too"}
    return f"{total} {prompts}, {share.get(trained, f'{trained} of which are trained on too')}"
