"""Dataset columns with embeddings of prompts, which a pipeline takes in place of text, and which belong together.

Names are those of the pipeline's own parameters: `prompt_embeds` with `pooled_prompt_embeds` (SD3, SDXL, FLUX),
`prompt_attention_mask` (PixArt, Sana, LTX) or `prompt_embeds_mask` (Qwen-Image), and the same with `negative_`.
"""

import functools
import re

import datasets
import numpy as np

EMBEDDED = "prompt_embeds"  # name in most pipelines for encoded prompts
WORDS = re.compile(r"(pooled_)?prompt_embeds(_(?!mask|scale|pooled)\w+)?|prompt_embeds_pooled")
MASKS = re.compile(r"prompt_attention_mask(_2)?|prompt_embeds_mask(_2)?|(encoder_)?attention_mask")
TEXTS = ("prompt", "prompt_2", "prompt_3", "prompt_4")


def is_embedding(name: str) -> bool:
    """Return whether a column of this name holds embeddings of prompts, or the mask of their tokens."""
    name = name.removeprefix("negative_")
    return bool(WORDS.fullmatch(name) or MASKS.fullmatch(name))


@functools.cache
def find_replaced_texts(given: frozenset[str]) -> frozenset[str]:
    """Return the text arguments that embeddings among the `given` inputs replace; pipelines do not take both."""
    names = [name for name in given if "scale" not in name]
    prefixes = [
        p for p in ("", "negative_") if any(WORDS.fullmatch(n.removeprefix(p)) for n in names if n.startswith(p))
    ]
    return frozenset(f"{prefix}{text}" for prefix in prefixes for text in TEXTS)


def check_embeddings(dataset: datasets.Dataset, accepted: set[str], name: str) -> None:
    """Refuse embeddings whose first row is not that of a single sample."""
    columns = [column for column in dataset.column_names if column in accepted and is_embedding(column)]
    is_stored = columns and dataset.format["type"] != "custom"  # a transform (set_transform) decides what a row holds
    first = dataset.select_columns(columns).with_format(None)[0] if is_stored else {}
    for column, value in first.items():
        is_flat = "pooled" in column or "mask" in column
        if value is not None and len(value) == 1 and np.ndim(value) > (1 if is_flat else 2):
            raise ValueError(f"{name}: each row of {column!r} is one sample; leave out the batch dimension.")
