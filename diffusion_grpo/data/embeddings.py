"""Dataset columns with embeddings of prompts, which a pipeline takes in place of text, and which belong together.

Names are those of the pipeline's own parameters: `prompt_embeds` with `pooled_prompt_embeds` (SD3, SDXL, FLUX),
`prompt_attention_mask` (PixArt, Sana, LTX) or `prompt_embeds_mask` (Qwen-Image), and the same with `negative_`.
"""

import re
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc

EMBEDDED = "prompt_embeds"  # name in most pipelines for encoded prompts
WORDS = re.compile(r"(pooled_)?prompt_embeds(_(?!mask|scale|pooled)\w+)?|prompt_embeds_pooled")
MASKS = re.compile(r"prompt_attention_mask(_2)?|prompt_embeds_mask(_2)?|(encoder_)?attention_mask")
TEXTS = ("prompt", "prompt_2", "prompt_3", "prompt_4")
PREFIXES = ("", "negative_")
BATCHED = "leave out the batch dimension, because each row is one sample"


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
    """Refuse embeddings that are incomplete, or that do not have the shape of a single sample."""
    columns = [column for column in dataset.column_names if column in accepted and is_embedding(column)]
    is_stored = dataset.format["type"] != "custom"  # a transform (set_transform) decides what a row holds
    for prefix in PREFIXES:
        needed = list_companions(accepted, prefix)
        given = [column for column in needed if column in columns]
        missing = [column for column in needed if column not in columns]
        if given and missing:
            raise ValueError(
                f"{name} has the column {given[0]!r} but not {missing[0]!r}, and {pipeline} needs them together; add "
                f"the column, or leave out {', '.join(map(repr, given))}."
            )
        if is_stored:
            _check_rows(dataset, given, name)
    if is_stored:
        _check_shapes(dataset, columns, name)


def _check_rows(dataset: datasets.Dataset, together: list[str], name: str) -> None:
    """Refuse rows that have only some of the embeddings that belong together."""
    valid = {column: _read(dataset, column).is_valid() for column in together}
    for column in together[1:]:
        differs = pc.xor(valid[together[0]], valid[column])
        if pc.any(differs).as_py():
            row = pc.index(differs, True).as_py()
            raise ValueError(
                f"{name}, row {row} (the first is row 0): only one of {together[0]!r} and {column!r} is given; fill "
                "in both, or neither."
            )


def _check_shapes(dataset: datasets.Dataset, columns: list[str], name: str) -> None:
    tokens: dict[str, pa.Array] = {}
    widths: dict[str, int] = {}
    for column in columns:
        is_flat = "pooled" in column or "mask" in column
        wanted = "(width,)" if "pooled" in column else "(tokens,)" if "mask" in column else "(tokens, width)"
        values = _read(dataset, column)
        depth, kind = 0, values.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            depth, kind = depth + 1, kind.value_type
        is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
        if not is_number or depth < (1 if is_flat else 2):
            raise ValueError(f"{name}: each row of {column!r} must hold numbers of shape {wanted}, not {values.type}.")
        lengths = [pc.list_value_length(values)]
        for _ in range(depth - 1):
            values = pc.list_flatten(values)
            lengths.append(pc.list_value_length(values))
        sizes = [pc.unique(each.drop_null()).to_pylist() for each in lengths]
        if sizes[0] == [1] and depth == (2 if is_flat else 3):
            raise ValueError(f"{name}: each row of {column!r} must have the shape {wanted}; {BATCHED}.")
        if len(sizes[-1]) > 1 and (not is_flat or "pooled" in column):
            found = sorted(sizes[-1])
            raise ValueError(
                f"{name}: the rows of {column!r} must all have the same width, but {found[0]} and {found[1]} were "
                "found."
            )
        tokens[column] = lengths[-2] if len(lengths) == 2 and not is_flat else lengths[0]
        if not is_flat and sizes[-1]:
            widths[column] = sizes[-1][0]
    _check_tokens(tokens, name)
    for column, width in widths.items():
        other = widths.get(f"negative_{column}", width)
        if other != width:
            raise ValueError(
                f"{name}: 'negative_{column}' has the width {other} and {column!r} has {width}; both come from the "
                "same text encoder."
            )


def _check_tokens(tokens: dict[str, pa.Array], name: str) -> None:
    """Refuse masks that differ in length from the embeddings of their row."""
    for mask in tokens:
        prefix, end = ("negative_" if mask.startswith("negative_") else ""), ("_2" if mask.endswith("_2") else "")
        column = f"{prefix}prompt_embeds{end}"
        if "mask" not in mask or column not in tokens:
            continue
        differs = pc.not_equal(tokens[mask], tokens[column])
        if pc.any(differs).as_py():
            row = pc.index(differs, True).as_py()
            raise ValueError(
                f"{name}, row {row} (the first is row 0): {mask!r} has {tokens[mask][row]} numbers, and {column!r} "
                f"has {tokens[column][row]} tokens; a mask has one number per token."
            )


def _read(dataset: datasets.Dataset, column: str) -> pa.ChunkedArray:
    values = dataset.select_columns([column]).with_format("arrow")[:][column]
    if isinstance(values.type, pa.ExtensionType):
        values = pa.chunked_array([chunk.storage for chunk in values.chunks], values.type.storage_type)
    return values
