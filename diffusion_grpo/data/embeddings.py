"""Dataset columns with embeddings of prompts, which a pipeline takes in place of text, and which belong together.

Names are those of the pipeline's own parameters: `prompt_embeds` with `pooled_prompt_embeds` (SD3, SDXL, FLUX),
`prompt_attention_mask` (PixArt, Sana, LTX) or `prompt_embeds_mask` (Qwen-Image), and the same with `negative_`.
"""

import re
from typing import Any

import datasets
import numpy as np

EMBEDDED = "prompt_embeds"  # name in most pipelines for encoded prompts
WORDS = re.compile(r"(pooled_)?prompt_embeds(_(?!mask|scale|pooled)\w+)?|prompt_embeds_pooled")
MASKS = re.compile(r"prompt_attention_mask(_2)?|prompt_embeds_mask(_2)?|(encoder_)?attention_mask")
TEXTS = ("prompt", "prompt_2", "prompt_3", "prompt_4")
PREFIXES = ("", "negative_")


def is_embedding(name: str) -> bool:
    """Return whether a column of this name holds embeddings of prompts, or the mask of their tokens."""
    name = name.removeprefix("negative_")
    return bool(WORDS.fullmatch(name) or MASKS.fullmatch(name))


def find_replaced_texts(row: dict[str, Any], accepted: set[str]) -> set[str]:
    """Return the text arguments that a row's embeddings replace; pipelines do not take both."""
    found: set[str] = set()
    for prefix in PREFIXES:
        given = [name for name in _list_group(accepted, prefix) if row.get(name) is not None]
        if given:
            found |= {f"{prefix}{text}" for text in TEXTS}
    return found


def _list_group(accepted: set[str], prefix: str) -> list[str]:
    """Return the names of embeddings, without masks, that replace the prompt, or the negative prompt."""
    return sorted(
        name
        for name in accepted
        if name.startswith(prefix) and WORDS.fullmatch(name.removeprefix(prefix)) and "scale" not in name
    )


def list_companions(accepted: set[str], prefix: str) -> list[str]:
    """Return the columns that must be given together for the prompt, or for the negative prompt.

    A mask like Qwen-Image's may be left out: every token then counts.
    """
    masks = [f"{prefix}prompt_attention_mask", f"{prefix}prompt_attention_mask_2"]
    return _list_group(accepted, prefix) + [name for name in masks if name in accepted]


def check_embeddings(dataset: datasets.Dataset, accepted: set[str], name: str, pipeline: str) -> None:
    """Refuse embeddings without others that belong to them, or whose first row is not that of a single sample."""
    columns = [column for column in dataset.column_names if column in accepted and is_embedding(column)]
    for prefix in PREFIXES:
        needed = list_companions(accepted, prefix)
        given = [column for column in needed if column in columns]
        missing = [column for column in needed if column not in columns]
        if given and missing:
            raise ValueError(
                f"{name} has the column {given[0]!r} but not {missing[0]!r}, and {pipeline} needs them together; add "
                f"the column, or leave out {', '.join(map(repr, given))}."
            )
    is_stored = columns and dataset.format["type"] != "custom"  # a transform (set_transform) decides what a row holds
    first = dataset.select_columns(columns).with_format(None)[0] if is_stored else {}
    for column, value in first.items():
        is_flat = "pooled" in column or "mask" in column
        if value is not None and len(value) == 1 and np.ndim(value) > (1 if is_flat else 2):
            raise ValueError(f"{name}: each row of {column!r} is one sample; leave out the batch dimension.")
