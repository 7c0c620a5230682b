"""Reward: does the picture show the word that the prompt quotes?

In: pictures of one line of text, and prompts with that text in double quotes. Out: scores in [0, 1]. The reader is the
PP-OCR recognition network that the `rapidocr` wheel carries, called in batches through onnxruntime: no detection, no
retries and no state, unlike rapidocr's own interface, so that the same picture always gets the same score. Pictures
with text somewhere in a scene need detection first and are not for this reward.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

HEIGHT = 48  # pixels, what PP-OCR's recognition networks were trained on
BATCH = 64


def text(images: list[Image.Image], prompts: list[str], **columns) -> list[float | None]:
    """1 - edit distance / length of the longer, between what is read and what is quoted, capitals and small alike.

    `None` for a prompt without a quoted text.

    Raises:
        ImportError: rapidocr or onnxruntime is missing.
    """
    return spelling_scores(read(images), prompts)


def spelling_scores(readings: list[str], prompts: list[str]) -> list[float | None]:
    """The score of each reading against the first text in double quotes of its prompt (`None`: no quotes)."""
    return [
        None if (wanted := quoted(prompt)) is None else similarity(reading, wanted)
        for reading, prompt in zip(readings, prompts, strict=True)
    ]


def quoted(prompt: str) -> str | None:
    """The first text in double quotes, or `None`."""
    found = re.search(r'"([^"]+)"', prompt)
    return found.group(1) if found else None


def similarity(reading: str, wanted: str) -> float:
    """1 - Levenshtein distance / length of the longer, case and outer blanks ignored: 1 exact, 0 nothing alike."""
    reading, wanted = reading.strip().upper(), wanted.strip().upper()
    row = list(range(len(wanted) + 1))
    for i, found in enumerate(reading, start=1):
        diagonal, row[0] = row[0], i
        for j, letter in enumerate(wanted, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (found != letter))
    return 1 - row[-1] / max(len(reading), len(wanted), 1)


def read(images: list[Image.Image]) -> list[str]:
    """What the recognition network reads on each picture (greedy CTC), pictures of one size in common batches."""
    session, characters = _recogniser()
    widths = [max(8, round(HEIGHT * image.width / image.height)) for image in images]
    readings = [""] * len(images)
    for width in sorted(set(widths)):
        rows = [row for row, own in enumerate(widths) if own == width]
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            batch = np.stack([_pixels(images[row], width) for row in chunk])
            (scores,) = session.run(None, {session.get_inputs()[0].name: batch})  # (batch, positions, classes)
            for row, classes in zip(chunk, scores.argmax(axis=2), strict=True):
                readings[row] = _greedy_ctc(classes, characters)
    return readings


def _pixels(image: Image.Image, width: int) -> np.ndarray:
    """`(3, 48, width)` float32 in [-1, 1], channels in the order blue, green, red that PP-OCR was trained on."""
    resized = image.convert("RGB").resize((width, HEIGHT), Image.Resampling.BILINEAR)
    return (np.asarray(resized, dtype=np.float32)[:, :, ::-1] / 127.5 - 1).transpose(2, 0, 1)


def _greedy_ctc(classes: np.ndarray, characters: list[str]) -> str:
    """Class 0 is the blank; a class that follows itself is the same letter."""
    kept = classes[np.insert(classes[1:] != classes[:-1], 0, True)]
    return "".join(characters[index - 1] for index in kept if index > 0)


@cache
def _recogniser() -> tuple[InferenceSession, list[str]]:
    """The recognition network of the installed rapidocr and its characters, loaded once a process."""
    try:
        import onnxruntime
        import rapidocr
    except ImportError as error:
        raise ImportError(
            'The "text" reward reads with rapidocr and onnxruntime; get them with pip install "diffusion-grpo[ocr]".'
        ) from error
    import torch

    models = sorted((Path(rapidocr.__file__).parent / "models").glob("*_rec_*.onnx"))
    if not models:
        raise ImportError(
            f"rapidocr at {Path(rapidocr.__file__).parent} carries no recognition network (models/*_rec_*.onnx); "
            'install the tested version with pip install "diffusion-grpo[ocr]".'
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(models[0]), options, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["character"].split("\n")
    classes = session.get_outputs()[0].shape[2]
    return session, (characters + [" "] * classes)[: classes - 1]  # what the list lacks are blanks between words
