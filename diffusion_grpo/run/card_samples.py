"""Samples for the model card: the same prompts and seeds before and after training, as files published with it."""

import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from . import markdown
from .folder import Run, format_updates
from .gallery import find_file, pair_samples

FOLDER = "images"  # subfolder of the run's folder
SHOWN = 4
WIDEST = 512  # pixels
# files that a card wrote; the folder may hold others
OWN_FILE = re.compile(r"\d+-(before|after|input)\.(png|mp4|wav)")


@dataclass(frozen=True)
class CardSample:
    """One sample of an evaluation, shown in the card.

    Attributes:
        image: image file that represents the sample.
        file: file of the sample if it is a video or sound; otherwise the image.
        reward: combined trained rewards; NaN if none scored the sample.
    """

    image: str
    file: str
    reward: float


@dataclass(frozen=True)
class CardPair:
    """The samples of one prompt and seed in the first and the last evaluation.

    Attributes:
        input: file of the image that they were made from; None if they were made from text alone.
    """

    prompt: str
    before: CardSample
    after: CardSample
    input: str | None


def write_card_samples(run: Run) -> list[CardPair]:
    """Copy the first samples of the evaluations, not hand-picked, into the folder `images`, and return them."""
    _remove_samples(run.path / FOLDER)
    found: list[CardPair] = []
    for pair in pair_samples(run):
        if len(found) == SHOWN:
            break
        rows = [pair["before"], pair["after"]]
        images = [find_file(run, row["image"]) if row.get("image") else None for row in rows]
        if None in images:
            continue
        stems = [f"{len(found)}-{when}" for when in ("before", "after")]
        samples = [_copy(run, row, image, stem) for row, image, stem in zip(rows, images, stems, strict=True)]
        taken = find_file(run, pair["after"]["input"]) if pair["after"].get("input") else None
        taken = taken and _copy_image(run, taken, f"{len(found)}-input")
        found.append(CardPair(pair["prompt"], *samples, taken))
    return found


def _remove_samples(folder: Path) -> None:
    """Remove the samples of an earlier card of the run; keep other files in the folder."""
    if not folder.is_dir():
        return
    for path in list(folder.iterdir()):
        if OWN_FILE.fullmatch(path.name) and not path.is_dir():
            path.unlink()


def _copy(run: Run, row: dict, image: Path, stem: str) -> CardSample:
    shown = file = _copy_image(run, image, stem)
    source = find_file(run, row["file"]) if row.get("file") else None
    if source is not None and source.suffix in (".mp4", ".wav"):
        file = f"{FOLDER}/{stem}{source.suffix}"
        shutil.copyfile(source, run.path / file)
    return CardSample(shown, file, row["reward"])


def _copy_image(run: Run, image: Path, stem: str) -> str:
    """Copy an image, scaled down, into the folder `images`, and return its path in the run's folder."""
    (run.path / FOLDER).mkdir(exist_ok=True)
    with Image.open(image) as loaded:
        small = loaded.convert("RGB")
    small.thumbnail((WIDEST, WIDEST))
    small.save(run.path / FOLDER / f"{stem}.png")
    return f"{FOLDER}/{stem}.png"


def make_widget(pairs: list[CardPair]) -> list[dict]:
    """Return the gallery that the Hub shows above a card: each prompt with its image or video after training."""
    return [
        {"text": pair.prompt, "output": {"url": pair.after.file}}
        for pair in pairs
        if not pair.after.file.endswith(".wav")
    ]


def draw_table(run: Run, pairs: list[CardPair]) -> str:
    """Return a Markdown table of the samples, a row per pair; images of videos and sounds link to the files."""
    names = [format_updates(step) for step in (min(run.samples), max(run.samples))]
    has_inputs = any(pair.input is not None for pair in pairs)
    titles = ["prompt", *(["input"] if has_inputs else []), *names]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for pair in pairs:
        cells = [_show(sample, name) for sample, name in zip((pair.before, pair.after), names, strict=True)]
        if has_inputs:
            cells.insert(0, f"![input]({pair.input})" if pair.input else "–")
        lines.append(f"| {' | '.join([markdown.escape(pair.prompt), *cells])} |")
    return "\n".join(lines)


def _show(sample: CardSample, name: str) -> str:
    shown = f"![{name}]({sample.image})"
    shown = shown if sample.file == sample.image else f"[{shown}]({sample.file})"
    return f"{shown} –" if math.isnan(sample.reward) else f"{shown} {sample.reward:.3f}"
