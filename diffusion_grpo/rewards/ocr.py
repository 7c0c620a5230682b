"""Rewards that read the text in an image: `text`, `text_by_model` and `tesseract`.

For `text`, images of one line are read by the PP-OCR recognition network in the `rapidocr` wheel, called in batches
through onnxruntime. Unlike in rapidocr's own interface, there is no detection, retrying or state, so the same image
always gets the same score. Text in a scene has to be detected first, by rapidocr's interface (`scene=True`) or
PaddleOCR.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import yaml
from PIL import Image
from torch import nn

from .contract import check_package, needs, reads_text
from .models.base import CONFIG, IMAGE_PROCESSOR, TOKENIZER, WEIGHTS, ModelReward, Source

if TYPE_CHECKING:
    from onnxruntime import InferenceSession
    from tesserocr import PyTessBaseAPI

HEIGHT = 48  # pixels, as in the training of PP-OCR's recognition networks
BATCH = 64
QUOTED = re.compile(r'"([^"]+)"|[“„]([^“”„]+)[“”]')
INSTALL = 'pip install "diffusion-grpo[ocr]"'
PADDLE = "pip install paddleocr paddlepaddle"  # or paddlepaddle-gpu

Match = Literal["edit", "exact", "contains"]
Engine = Literal["rapidocr", "paddleocr"]
# On words decoded by the built-in model's autoencoder, 78 % are read exactly in colour and 99 % in grey.
ENLARGE = 3
TURN_END = "<|im_end|>"


def _check_reader(
    scene: bool = False, engine: Engine = "rapidocr", engine_kwargs: dict | None = None, **options
) -> None:
    """Load the reader now, so that problems show before the first samples are made."""
    if engine_kwargs and engine != "paddleocr":
        raise ValueError(f"engine_kwargs are arguments of PaddleOCR, but the engine is {engine}; leave them out.")
    if engine == "paddleocr":
        _check_paddle(engine_kwargs or {})
    elif scene:
        load_scene_reader()
    else:
        load_recogniser()
    check_package("rapidfuzz", INSTALL)


@reads_text
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
    """Score in [0, 1] how well the text in each image agrees with the wanted text."""
    wanted = find_wanted(prompts, target_column, columns)
    if engine == "paddleocr":
        readings = read_with_paddle(images, engine_kwargs)
    else:
        readings = read_scenes(images) if scene else read(images)
    return score_spelling(readings, wanted, match, ignore_case, ignore_spaces)


def score_spelling(
    readings: list[str],
    wanted: list[str | int | None],
    match: Match = "edit",
    ignore_case: bool = True,
    ignore_spaces: bool = False,
) -> list[float | None]:
    """Score each reading against the wanted text, with None where no text is wanted; see `text`."""

    def plain(written: str | int) -> str:
        written = str(written).upper() if ignore_case else str(written)
        return re.sub(r"\s+", "", written) if ignore_spaces else written.strip()

    targets = [None if text is None else plain(text) for text in wanted]
    pairs = zip(readings, targets, strict=True)
    return [MATCHES[match](plain(reading), target) if target else None for reading, target in pairs]


def find_wanted(prompts: list[str], target_column: str | None, columns: dict[str, list]) -> list[Any]:
    """Return the text that each image should show: that of a column, or the one that the prompt quotes."""
    return columns[target_column] if target_column else [find_quoted(prompt) for prompt in prompts]


def find_quoted(prompt: str) -> str | None:
    """Return the first text in double quotes, straight or typographic, or `None`."""
    match = QUOTED.search(prompt)
    return match and (match.group(1) or match.group(2))


def similarity(reading: str, wanted: str) -> float:
    """Return 1 - Levenshtein distance / length of the longer text: 1 if equal, 0 if nothing matches."""
    return 1 - edit_distance(reading, wanted) / max(len(reading), len(wanted), 1)


def containment(reading: str, wanted: str) -> float:
    """Return 1 if the reading contains the text, else 1 - Levenshtein distance / length of the text, at least 0."""
    if wanted in reading:
        return 1.0
    return max(0.0, 1 - edit_distance(reading, wanted) / len(wanted))


MATCHES = {"edit": similarity, "exact": lambda reading, wanted: float(reading == wanted), "contains": containment}


def edit_distance(reading: str, wanted: str) -> int:
    """Return the Levenshtein distance, the number of letters to insert, delete or replace."""
    from rapidfuzz.distance import Levenshtein

    return Levenshtein.distance(reading, wanted)


def read(images: list[Image.Image]) -> list[str]:
    """Read each image with the recognition network (greedy CTC), in batches of images of one size."""
    session, characters = load_recogniser()
    widths = [max(8, round(HEIGHT * image.width / image.height)) for image in images]
    readings = [""] * len(images)
    for width in sorted(set(widths)):
        rows = [row for row, other in enumerate(widths) if other == width]
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            batch = np.stack([_pixels(images[row], width) for row in chunk])
            (scores,) = session.run(None, {session.get_inputs()[0].name: batch})  # (batch, positions, classes)
            for row, classes in zip(chunk, scores.argmax(axis=2), strict=True):
                readings[row] = _greedy_ctc(classes, characters)
    return readings


def read_scenes(images: list[Image.Image]) -> list[str]:
    """Detect and read the lines in each image with rapidocr; join them with spaces, from top to bottom."""
    engine = load_scene_reader()
    readings = []
    for image in images:
        result = engine(np.asarray(image.convert("RGB"))[:, :, ::-1])  # BGR, as in OpenCV
        readings.append(" ".join(result.txts or ()))
    return readings


def read_with_paddle(images: list[Image.Image], options: dict[str, Any] | None = None) -> list[str]:
    """Detect and read the lines in each image with PaddleOCR; join them with spaces, in its order."""
    engine = load_paddle(json.dumps(options or {}, sort_keys=True))
    readings = []
    for image in images:
        (result,) = engine.predict(np.asarray(image.convert("RGB"))[:, :, ::-1])  # BGR
        readings.append(" ".join(result["rec_texts"]))
    return readings


def _check_paddle(options: dict[str, Any]) -> None:
    """Raise ImportError or FileNotFoundError if anything is missing, without the slow loading of PaddleOCR itself."""
    check_package("paddleocr", PADDLE)
    if "engine" not in options:  # with PaddleOCR's setting `engine`, other packages run the networks
        check_package("paddle", PADDLE)
    version = importlib.metadata.version("paddleocr")
    if int(version.partition(".")[0]) < 3:
        raise ImportError(f"PaddleOCR {version} is installed, but 3 or later is needed; pip install -U paddleocr.")
    _paddle_models(options)


def _paddle_models(options: dict[str, Any]) -> dict[str, str]:
    """Read the names of the models in the folders in `options`, because PaddleOCR requires the names as well."""
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
def load_paddle(options: str) -> Any:
    """Build PaddleOCR with these arguments (JSON); turning and unwarping pages is off unless they enable it."""
    import paddleocr

    given = json.loads(options)

    off = ("use_doc_orientation_classify", "use_doc_unwarping", "use_textline_orientation")
    language = {} if any("_model_" in key for key in given) else {"lang": "en"}  # named models have their own
    return paddleocr.PaddleOCR(**language | dict.fromkeys(off, False) | _paddle_models(given) | given)


@cache
def load_scene_reader() -> Callable:
    """Load rapidocr, which detects lines and reads them, once per process."""
    load_recogniser()  # reports missing packages
    import rapidocr

    return rapidocr.RapidOCR(params={"Global.log_level": "error"})


def _pixels(image: Image.Image, width: int) -> np.ndarray:
    """Convert an image to `(3, 48, width)` float32 in [-1, 1], with BGR channels as in PP-OCR's training."""
    resized = image.convert("RGB").resize((width, HEIGHT), Image.Resampling.BILINEAR)
    return (np.asarray(resized, dtype=np.float32)[:, :, ::-1] / 127.5 - 1).transpose(2, 0, 1)


def _greedy_ctc(classes: np.ndarray, characters: list[str]) -> str:
    """Decode greedily: drop the blank (class 0) and merge repeated classes."""
    kept = classes[np.insert(classes[1:] != classes[:-1], 0, True)]
    return "".join(characters[index - 1] for index in kept if index > 0)


@cache
def load_recogniser() -> tuple[InferenceSession, list[str]]:
    """Load the recognition network of the installed rapidocr and its characters, once per process."""
    for package in ("onnxruntime", "rapidocr"):
        check_package(package, INSTALL)
    import onnxruntime
    import rapidocr

    models = sorted((Path(rapidocr.__file__).parent / "models").glob("*_rec_*.onnx"))
    if not models:
        raise ImportError(f"the installed rapidocr has no models/*_rec_*.onnx; install it with `{INSTALL}`.")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(models[0]), options, providers=["CPUExecutionProvider"])
    characters = session.get_modelmeta().custom_metadata_map["character"].split("\n")
    classes = session.get_outputs()[0].shape[2]
    return session, (characters + [" "] * classes)[: classes - 1]  # classes that the list lacks are spaces


@reads_text
@dataclasses.dataclass(eq=False)
class ModelText(ModelReward):
    """Agreement between a transformers image-to-text model's reading and the quoted text or that of a column."""

    # TrOCR (https://arxiv.org/abs/2109.10282) reads a line, GOT-OCR 2.0 (https://arxiv.org/abs/2409.01704) a page
    model: str = "microsoft/trocr-base-printed"
    max_new_tokens: int = 64
    target_column: str | None = None
    match: Match = "edit"
    ignore_case: bool = True
    ignore_spaces: bool = False

    def sources(self) -> list[Source]:
        return [Source("model", self.model, CONFIG + WEIGHTS + TOKENIZER + IMAGE_PROCESSOR, self.revision)]

    def check_needs(self) -> None:
        """Raise ImportError also if rapidfuzz is missing."""
        super().check_needs()
        check_package("rapidfuzz", INSTALL)

    def load(self) -> nn.Module:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.processor = AutoProcessor.from_pretrained(self.model, revision=self.revision, backend="pil")
        return AutoModelForImageTextToText.from_pretrained(self.model, revision=self.revision, dtype=self.torch_dtype)

    def __call__(self, images: list[Image.Image], prompts: list[str], **columns) -> list[float | None]:
        """Return one score in [0, 1] per image; None if its prompt quotes no text or its column is empty."""
        wanted = find_wanted(prompts, self.target_column, columns)
        readings = self.in_batches(self.read, images)
        return score_spelling(readings, wanted, self.match, self.ignore_case, self.ignore_spaces)

    def read(self, network: nn.Module, images: list[Image.Image]) -> list[str]:
        """Read each image; join its lines with spaces."""
        inputs = self.processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        inputs = inputs.to(network.device, network.dtype)
        tokens = network.generate(
            **inputs,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            eos_token_id=self.find_ends(network),
        )
        if not network.config.is_encoder_decoder:  # the output starts with the input tokens
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        readings = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [" ".join(reading.split()) for reading in readings]

    def find_ends(self, network: nn.Module) -> int | list[int] | None:
        """Return the ids of the tokens that end a reading; GOT-OCR's own configuration lacks its end of turn."""
        ends = network.generation_config.eos_token_id
        turn = self.processor.tokenizer.get_vocab().get(TURN_END)
        others = ends if isinstance(ends, list) else [ends] if ends is not None else []
        return ends if turn is None else [turn, *others]


def _check_tesseract(**options) -> None:
    load_tesseract()
    check_package("rapidfuzz", INSTALL)


@reads_text
@needs(_check_tesseract)
def tesseract(
    images: list[Image.Image],
    prompts: list[str],
    target_column: str | None = None,
    match: Match = "edit",
    ignore_case: bool = True,
    ignore_spaces: bool = False,
    **columns,
) -> list[float | None]:
    """Score how well Tesseract's reading of one line agrees with the wanted text; see `text`."""
    wanted = find_wanted(prompts, target_column, columns)
    return score_spelling(read_with_tesseract(images), wanted, match, ignore_case, ignore_spaces)


def read_with_tesseract(images: list[Image.Image]) -> list[str]:
    """Read each image with Tesseract: in grey, enlarged three times, as a single line (page mode 7)."""
    api = load_tesseract()
    readings = []
    for image in images:
        size = (ENLARGE * image.width, ENLARGE * image.height)
        api.SetImage(image.convert("L").resize(size, Image.Resampling.BICUBIC))
        readings.append(api.GetUTF8Text().strip())
    return readings


@cache
def load_tesseract() -> PyTessBaseAPI:
    """Load Tesseract with its English model, once per process."""
    check_package("tesserocr", INSTALL)
    import tesserocr

    folder = Path(sys.prefix) / "share" / "tessdata"
    if not (folder / "eng.traineddata").exists():
        raise ImportError(f"Tesseract's English model is not in {folder}; install it with `{INSTALL}`.")
    return tesserocr.PyTessBaseAPI(path=str(folder), lang="eng", psm=tesserocr.PSM.SINGLE_LINE)
