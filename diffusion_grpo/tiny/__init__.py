"""The embedded model: its folder, settings that suit it, the colours it knows, and prompts for it.

`PATH` is the folder of a diffusers `StableDiffusion3Pipeline` that writes a given word in a given colour, `COLORS` are
the six colours, and `prompts` makes datasets of prompts such as `the word "RAINS" in red`. The repository's
`benchmarks/tiny_model` shows how the model was made.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

PATH = Path(__file__).parent / "model"

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (215, 35, 40),
    "orange": (240, 145, 20),
    "green": (25, 150, 60),
    "blue": (40, 85, 215),
    "purple": (145, 50, 185),
    "black": (25, 25, 25),
}


# Defaults of `model="tiny"`: the image size that it was trained on, no 256 tokens for a T5 encoder that it lacks, and
# a batch whose update takes seconds on a CPU. An entry is left out if the user set one of the settings behind it.
DEFAULTS: dict[str, tuple[Any, set[str]]] = {
    "height": (32, {"width"}),
    "width": (96, {"height"}),
    "guidance_scale": (1.0, set()),
    "pipeline_kwargs": ({"max_sequence_length": 1}, set()),
    "num_inference_steps": (6, {"trained_steps", "num_trained_steps"}),
    "activation_checkpointing": (False, {"gradient_checkpointing", "selective_checkpointing"}),
    "per_device_train_batch_size": (16, set()),
    "num_generations": (8, set()),
}
SAMPLES_PER_UPDATE = 32


def default_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the embedded model that replace the general defaults.

    Args:
        given: settings that the user chose; defaults that belong to one of them are left out.

    Examples:
        >>> default_settings({"num_inference_steps": 4})["height"]
        32
    """
    settings = {
        name: copy.copy(value) for name, (value, others) in DEFAULTS.items() if not {name, *others} & set(given)
    }
    if "gradient_accumulation_steps" not in given:
        chosen = {name: int(value) for name, value in (settings | dict(given)).items() if str(value).isdigit()}
        batch = chosen.get("per_device_train_batch_size") or 1
        group = chosen.get("best_of_n") or chosen.get("num_generations") or 1
        whole_groups = math.lcm(batch, group) // batch  # the least number of micro-batches
        settings["gradient_accumulation_steps"] = whole_groups * -(-SAMPLES_PER_UPDATE // (batch * whole_groups))
    return settings


def words(split: str) -> list[str]:
    """Return the words of a split in capitals, sorted: `"train"` (608) or `"test"` (1000, held out from training).

    Raises:
        ValueError: for any other split.

    Examples:
        >>> len(words("train")), len(words("test"))
        (608, 1000)
    """
    if split not in ("train", "test"):
        raise ValueError(f'split must be "train" or "test", found {split!r}.')
    return (Path(__file__).parent / f"words_{split}.txt").read_text(encoding="ascii").split()


def make_prompt(word: str, color: str) -> str:
    """Return the sentence the model was trained on, for example `the word "RAINS" in red`.

    Args:
        word: word in capitals; see [`words`].
        color: a key of `COLORS`.

    Examples:
        >>> make_prompt("RAINS", "red")
        'the word "RAINS" in red'
    """
    return f'the word "{word}" in {color}'


def prompts(split: str = "train", n: int | None = None, seed: int = 0) -> Dataset:
    """Return a dataset with one column, `prompt`: each a word of the split in one of the six colours.

    Args:
        split: `"train"`, or `"test"` for held-out words.
        n: number of prompts; by default one per word. No prompt appears twice.
        seed: shuffles words and colours; the same seed gives the same prompts.

    Raises:
        ValueError: unknown split, or `n` not in 1 .. words x colours.

    Examples:
        >>> prompts("test", n=2)["prompt"] == prompts("test", n=2)["prompt"]
        True
    """
    from datasets import Dataset

    pool = words(split)
    n = len(pool) if n is None else n
    if not 1 <= n <= len(pool) * len(COLORS):
        raise ValueError(f"n must be between 1 and {len(pool) * len(COLORS)} for the {split} split, found {n}.")
    generator = random.Random(f"{split}-{seed}")
    generator.shuffle(pool)
    offsets = [generator.randrange(len(COLORS)) for _ in pool]
    names = list(COLORS)
    rows = []
    for index in range(n):
        turn, row = divmod(index, len(pool))
        rows.append(make_prompt(pool[row], names[(offsets[row] + turn) % len(names)]))
    return Dataset.from_dict({"prompt": rows})
