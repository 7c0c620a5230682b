"""Compare rewards with their real weights to published scores of known images.

The tests check rewards against formulas on tiny models, which says nothing about the weights. Only images with
published scores show that the right files were found, are complete, and are used as their authors use them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from .calls import score
from .contract import Reward
from .loading import load_rewards
from .models.pixels import open_image


@dataclasses.dataclass(frozen=True)
class Published:
    """Published scores of a reward.

    Attributes:
        source: URL of the scores.
        scores: one score per image.
        tolerance: largest difference that still counts as agreement.
        prompts: one prompt per image.
        options: options of the reward that differ from its defaults.
        files: URLs of the images, for the user to fetch; empty if `render` makes them.
        targets: URLs of the images to compare with.
        render: makes images and, for rewards that compare, targets.
        scale: converts a value of the reward to the published scale.
    """

    source: str
    scores: tuple[float, ...]
    tolerance: float
    prompts: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    render: Callable[[], tuple[list[Image.Image], list[Image.Image] | None]] | None = None
    scale: Callable[[float], float] = lambda value: value


@dataclasses.dataclass(frozen=True)
class Line:
    """One image's score.

    Attributes:
        image: name of the image.
        prompt: prompt of the image.
        value: the score, on the published scale if there is one; None if the reward gives no score.
        published: the published score.
        agrees: whether the two differ by at most the tolerance.
    """

    image: str
    prompt: str
    value: float | None
    published: float | None = None
    agrees: bool | None = None


def noise(seed: int) -> Image.Image:
    """Make the image of torchmetrics' examples: 224 x 224 pixels of `torch.randint(255, ...)`."""
    pixels = torch.randint(255, (3, 224, 224), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.to(torch.uint8).permute(1, 2, 0).numpy())


TORCHMETRICS = (
    "https://github.com/Lightning-AI/torchmetrics/blob/v1.9.0/src/torchmetrics/functional/multimodal/clip_score.py"
)
IMAGEREWARD = "https://github.com/THUDM/ImageReward"
HPSV2 = "https://github.com/tgxs002/HPSv2"
CALIBRATION = "https://github.com/chaofengc/IQA-PyTorch/tree/main/ResultsCalibra"
HPSV3 = "https://github.com/MizzenAI/HPSv3"
FOX = "cute chibi anime cartoon fox, smiling wagging tail with a small cartoon heart above sticker"
PAIRS = ("I03", "I04", "I06", "I08", "I19")
SEA = "a painting of an ocean with clouds and birds, day time, low depth field effect"

PUBLISHED: dict[str, Published] = {
    "clip_score": Published(
        TORCHMETRICS,
        scores=(24.426,),
        tolerance=0.01,
        prompts=("a photo of a cat",),
        options={"model": "openai/clip-vit-base-patch16"},
        render=lambda: ([noise(42)], None),
    ),
    "clip_similarity": Published(
        TORCHMETRICS,
        scores=(99.486,),
        tolerance=0.01,
        prompts=("",),
        options={"model": "openai/clip-vit-base-patch16"},
        render=lambda: ([noise(42)], [noise(43)]),
        scale=lambda value: 100 * value,
    ),
    "imagereward": Published(
        f"{IMAGEREWARD}#example-use",
        scores=(0.5811622738838196, 0.2745276093482971, -1.4131819009780884, -2.029569625854492),
        tolerance=0.02,  # "may be slightly different depending on the compute device"
        prompts=(SEA,) * 4,
        files=tuple(f"{IMAGEREWARD}/raw/main/assets/images/{number}.webp" for number in (1, 2, 3, 4)),
    ),
    "hpsv2": Published(  # by v2.0 in half precision: v2.1, for which none was found, differs only in its checkpoint
        f"{HPSV2}/issues/27",
        scores=(0.2876,),
        tolerance=0.002,
        prompts=("A cat with two horns on its head",),
        options={"filename": "HPS_v2_compressed.pt"},
        files=(f"{HPSV2}/raw/master/hpsv2/assets/demo_image.jpg",),
    ),
    "hpsv3": Published(  # the example in the authors' README, scored by others with the authors' code
        "https://github.com/Andrei3223/HPSv3_xai/blob/"
        "e8d29edfe84ef469f16a209554828930f3ca4eae/results/xai_24135564/REPORT.md",
        scores=(10.823, 7.163),
        tolerance=0.2,  # for bfloat16 and possibly another way of resizing
        prompts=(FOX,) * 2,
        files=tuple(f"{HPSV3}/raw/main/assets/example{number}.png" for number in (1, 2)),
    ),
    "aesthetic": Published(  # called official in the table; for the distorted images of LPIPS
        f"{CALIBRATION}/results_official.csv",
        scores=(3.6420, 5.5836, 5.0716, 4.6458, 3.0889),
        tolerance=0.03,  # OpenAI's CLIP computes in half precision on a GPU
        prompts=("",) * 5,
        files=tuple(f"{CALIBRATION}/dist_dir/{name}.bmp" for name in PAIRS),
    ),
    "lpips": Published(
        f"{CALIBRATION}/results_original.csv",
        scores=(0.7237, 0.2572, 0.05079, 0.05205, 0.4253),
        tolerance=0.001,
        prompts=("",) * 5,
        files=tuple(f"{CALIBRATION}/dist_dir/{name}.bmp" for name in PAIRS),
        targets=tuple(f"{CALIBRATION}/ref_dir/{name}.bmp" for name in PAIRS),
        scale=lambda value: 1 - value,
    ),
}


def compare(name: str, options: dict[str, Any], images: list[Path], targets: list[Path]) -> list[Line]:
    """Score the images that have published scores, and compare the scores.

    Args:
        name: name of a built-in reward; without published scores, nothing is compared.
        options: options of the reward, which override those of the published scores.
        images, targets: files in the order of `Published.files` and `Published.targets`.

    Returns:
        One line per image; empty if no scores were published or no images are given.

    Raises:
        ValueError: the number of images differs from that of published scores.
        RewardError: the reward failed.
    """
    published = PUBLISHED.get(name)
    if published is None or not (published.render or images):
        return []
    for given, wanted, flag in ((images, published.files, "--image"), (targets, published.targets, "--target")):
        if len(given) != len(wanted):
            raise ValueError(f"{name} has published scores of {len(wanted)} images, but {flag} names {len(given)}.")
    images, others = published.render() if published.render else (images, targets or None)
    names = [getattr(image, "name", f"rendered {row}") for row, image in enumerate(images, start=1)]
    (reward,) = load_rewards({name: {**published.options, **options}})
    values = _scores(reward, [open_image(image).convert("RGB") for image in images], list(published.prompts), others)
    lines = []
    for row, value in enumerate(values):
        found = None if value is None else published.scale(value)
        agrees = found is not None and abs(found - published.scores[row]) <= published.tolerance
        lines.append(Line(names[row], published.prompts[row], found, published.scores[row], agrees))
    return lines


def score_drawings(name: str, options: dict[str, Any]) -> list[Line]:
    """Score images drawn here, for visual inspection, for a reward without published scores.

    Raises:
        RewardError: the reward failed.
    """
    (reward,) = load_rewards({name: options})
    images = draw_images()
    prompts = ["a red circle on a white ground", "a blue square on a yellow ground", 'the word "SIGN"', "noise"]
    values = _scores(reward, list(images.values()), prompts, [images["red circle"]] * len(images))
    return [Line(image, *rest) for image, *rest in zip(images, prompts, values)]


def draw_images() -> dict[str, Image.Image]:
    """Draw four images of 256 x 256 pixels, the same on every machine."""
    circle = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(circle).ellipse((64, 64, 192, 192), fill=(220, 20, 20))
    square = Image.new("RGB", (256, 256), (250, 220, 40))
    ImageDraw.Draw(square).rectangle((70, 70, 186, 186), fill=(20, 40, 200))
    word = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(word).text((128, 128), "SIGN", font=ImageFont.load_default(80), fill="black", anchor="mm")
    static = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    return {"red circle": circle, "blue square": square, "word": word, "noise": Image.fromarray(static)}


def _scores(reward: Reward, images: list, prompts: list[str], targets: list | None) -> list[float | None]:
    column = getattr(reward.function, "target_column", None) or "target"
    columns = {} if targets is None else {column: targets}
    is_video = "videos" in reward.parameters and "images" not in reward.parameters
    samples = {"videos": [[image] * 8 for image in images], "fps": 8.0} if is_video else {"images": images}
    values = score([reward], prompts=prompts, columns=columns, **samples)[:, 0].tolist()
    return [None if value != value else value for value in values]
