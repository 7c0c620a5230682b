"""The reward `text`: does the image show the text that the prompt quotes, or that a column holds?

Images of one line are read by the PP-OCR recognition network in the `rapidocr` wheel, called in batches through
onnxruntime. Unlike rapidocr's own interface, it has no detection, retries or state, so the same image always gets the
same score. Text anywhere in a scene is detected first, by rapidocr's own interface (`scene=True`) or by PaddleOCR.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import yaml
from PIL import Image

from ..needs import check_package, needs

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

HEIGHT = 48  # pixels, what PP-OCR's recognition networks were trained on
BATCH = 64
PADDLE = "pip install paddleocr paddlepaddle"  # or paddlepaddle-gpu

Match = Literal["edit", "exact", "contains"]
Engine = Literal["rapidocr", "paddleocr"]


def _check_reader(
    scene: bool = False, engine: Engine = "rapidocr", engine_kwargs: dict | None = None, **options
) -> None:
    """Load what a user of the reward would otherwise wait for until the first samples are there."""
    _check_engine(engine, engine_kwargs)
    if engine == "paddleocr":
        _check_paddle(engine_kwargs or {})
    elif scene:
        _scene_reader()
    else:
        _recogniser()


@needs(_check_reader)
def text(
    images: list[Image.Image],
    prompts: list[str],
    target_column: str | None = None,
    match: Match = "edit",
    ignore_case: bool = True,
    ignore_spaces: bool = False,
    scene: bool = False,
    engine: Engine = "rapidocr",
    engine_kwargs: dict | None = None,
    **columns,
) -> list[float | None]:
    """How well what is read agrees with what is wanted, in [0, 1]. Of a video, frames are read (`Reward.frames`).

    Args:
        target_column: column with the wanted text; by default the first text in double quotes of the prompt.
        match: `"edit"`, 1 - edit distance / length of the longer; `"exact"`, 1 or 0; `"contains"`, Flow-GRPO's rule
            (https://huggingface.co/papers/2505.05470): 1 where the reading contains the text, else
            1 - edit distance / length of the text, at least 0, so that other writing beside it costs nothing.
        ignore_case: capitals and small letters are alike.
        ignore_spaces: blanks are left out on both sides; outer ones always are.
        scene: lines of text are first searched in the image, and joined with blanks in the order of reading;
            otherwise the image is one line of text.
        engine: the reader, `"rapidocr"` or `"paddleocr"` (3.x, which always searches, and is what Flow-GRPO reads
            with). A model of transformers reads in the reward `text_by_model`.
        engine_kwargs: arguments of `paddleocr.PaddleOCR`, such as another `lang` than `en`, or folders of its models
            (`text_detection_model_dir`, `text_recognition_model_dir`), which it downloads otherwise.

    Returns:
        `None` for a prompt without a quoted text, or an empty column.

    Raises:
        ImportError: the engine is not installed.
        ValueError: `engine_kwargs` for another engine than PaddleOCR.
    """
    _check_engine(engine, engine_kwargs)
    wanted = columns[target_column] if target_column else [find_quoted(prompt) for prompt in prompts]
    if engine == "paddleocr":
        readings = read_with_paddle(images, engine_kwargs)
    else:
        readings = read_scenes(images) if scene else read(images)
    return score_spelling(readings, wanted, match, ignore_case, ignore_spaces)


def score_spelling(
    readings: list[str],
    wanted: list[str | None],
    match: Match = "edit",
    ignore_case: bool = True,
    ignore_spaces: bool = False,
) -> list[float | None]:
    """The score of each reading against the wanted text (`None`: nothing is wanted); see `text`."""

    def plain(written: str) -> str:
        written = written.upper() if ignore_case else written
        return re.sub(r"\s+", "", written) if ignore_spaces else written.strip()

    pairs = zip(readings, wanted, strict=True)
    return [MATCHES[match](plain(reading), plain(text)) if text else None for reading, text in pairs]


def find_quoted(prompt: str) -> str | None:
    """The first text in double quotes, or `None`."""
    found = re.search(r'"([^"]+)"', prompt)
    return found.group(1) if found else None


def similarity(reading: str, wanted: str) -> float:
    """1 - Levenshtein distance / length of the longer: 1 exact, 0 nothing alike."""
    return 1 - edit_distance(reading, wanted) / max(len(reading), len(wanted), 1)


def equality(reading: str, wanted: str) -> float:
    """1 for the same letters, else 0."""
    return float(reading == wanted)


def containment(reading: str, wanted: str) -> float:
    """1 where the text is read somewhere, else 1 - Levenshtein distance / length of the text, at least 0."""
    if wanted in reading:
        return 1.0
    return max(0.0, 1 - edit_distance(reading, wanted) / len(wanted))


MATCHES = {"edit": similarity, "exact": equality, "contains": containment}


def edit_distance(reading: str, wanted: str) -> int:
    """Levenshtein distance: letters to insert, delete or replace."""
    row = list(range(len(wanted) + 1))
    for i, found in enumerate(reading, start=1):
        diagonal, row[0] = row[0], i
        for j, letter in enumerate(wanted, start=1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (found != letter))
    return row[-1]


def read(images: list[Image.Image]) -> list[str]:
    """What the recognition network reads on each image (greedy CTC), images of one size in common batches."""
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


def read_scenes(images: list[Image.Image]) -> list[str]:
    """What rapidocr finds and reads on each image, lines joined with blanks, from top to bottom."""
    engine = _scene_reader()
    readings = []
    for image in images:
        found = engine(np.asarray(image.convert("RGB"))[:, :, ::-1])  # blue, green, red, as OpenCV's images are
        readings.append(" ".join(found.txts or ()))
    return readings


def read_with_paddle(images: list[Image.Image], options: dict[str, Any] | None = None) -> list[str]:
    """What PaddleOCR finds and reads on each image, lines joined with blanks, in its own order.

    Args:
        options: arguments of `paddleocr.PaddleOCR` beside those that are set here.
    """
    engine = _paddle_reader(json.dumps(options or {}, sort_keys=True))
    readings = []
    for image in images:
        (found,) = engine.predict(np.asarray(image.convert("RGB"))[:, :, ::-1])  # blue, green, red
        readings.append(" ".join(found["rec_texts"]))
    return readings


def _check_engine(engine: Engine, options: dict[str, Any] | None) -> None:
    if options and engine != "paddleocr":
        raise ValueError(f"engine_kwargs are arguments of PaddleOCR, but the engine is {engine}; take them out.")


def _check_paddle(options: dict[str, Any]) -> None:
    """Raise ImportError or FileNotFoundError for what is not there; PaddleOCR itself loads slowly, and downloads."""
    from huggingface_hub import constants

    check_package("paddleocr", PADDLE)
    if "engine" not in options:  # PaddleOCR's own setting, with which other packages compute
        check_package("paddle", PADDLE)
    version = importlib.metadata.version("paddleocr")
    if int(version.partition(".")[0]) < 3:
        raise ImportError(f"PaddleOCR {version} is installed, but 3 or later is needed; pip install -U paddleocr.")
    folder = Path(os.environ.get("PADDLE_PDX_CACHE_HOME", Path.home() / ".paddlex")) / "official_models"
    named = {"text_detection_model_name", "text_recognition_model_name"} <= _paddle_models(options).keys()
    if not named and constants.HF_HUB_OFFLINE and not folder.is_dir():
        raise FileNotFoundError(
            f"HF_HUB_OFFLINE is set, and PaddleOCR's models are not at {folder}; put them there, or name folders in "
            "engine_kwargs (text_detection_model_dir, text_recognition_model_dir)."
        )


def _paddle_models(options: dict[str, Any]) -> dict[str, str]:
    """The names of the models in the folders that `options` name, which PaddleOCR wants to be told beside them."""
    names = {}
    for key, folder in options.items():
        if key.endswith("_model_dir"):
            path = Path(folder) / "inference.yml"
            if not path.is_file():
                raise FileNotFoundError(f"{key}={folder} holds no inference.yml; name a folder of PaddleOCR 3.")
            written = yaml.safe_load(path.read_text(encoding="utf-8"))
            names[f"{key.removesuffix('dir')}name"] = written["Global"]["model_name"]
    return names


@cache
def _paddle_reader(options: str) -> Any:
    """PaddleOCR with these arguments, in JSON; what turns whole pages is off unless asked for."""
    given = json.loads(options)
    _check_paddle(given)
    import paddleocr

    off = ("use_doc_orientation_classify", "use_doc_unwarping", "use_textline_orientation")
    language = {} if any("_model_" in key for key in given) else {"lang": "en"}  # models named have their own
    return paddleocr.PaddleOCR(**language | dict.fromkeys(off, False) | _paddle_models(given) | given)


@cache
def _scene_reader() -> Callable:
    _recogniser()  # says what is missing, if anything is
    import rapidocr

    return rapidocr.RapidOCR(params={"Global.log_level": "error"})


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
            "rapidocr and onnxruntime, by which it reads, are not installed; get them with "
            'pip install "diffusion-grpo[ocr]".'
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
