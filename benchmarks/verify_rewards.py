"""
Compare rewards with their real weights to published scores of known images.

    python -m benchmarks.verify_rewards clip_score
    python -m benchmarks.verify_rewards imagereward 1.webp 2.webp 3.webp 4.webp
    python -m benchmarks.verify_rewards lpips IMAGES TARGETS

The tests check rewards against formulas on tiny models, which says nothing about the weights. Only images with
published scores show that the right files were found, are complete, and are used as their authors use them. Without
images, the script lists where those of a reward are.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image

from diffusion_grpo.rewards import load_rewards, score


@dataclasses.dataclass(frozen=True)
class Published:
    """Published scores of the images at `files`, compared with `targets` if there are any, or of rendered images."""

    source: str
    scores: tuple[float, ...]
    tolerance: float
    prompts: tuple[str, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    render: Callable[[], tuple[list[Image.Image], list[Image.Image]]] | None = None
    scale: Callable[[float], float] = lambda value: value


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
        render=lambda: ([noise(42)], []),
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


def compare(name: str, images: list[Image.Image], targets: list[Image.Image]) -> bool:
    """Print a reward's scores beside the published ones, and return whether all agree."""
    published = PUBLISHED[name]
    values = score(
        load_rewards({name: published.options}),
        images=images,
        prompts=list(published.prompts),
        columns={"target": targets} if targets else {},
    )
    agree = True
    for value, expected in zip(values[:, 0].tolist(), published.scores, strict=True):
        agrees = abs(published.scale(value) - expected) <= published.tolerance
        print(f"{published.scale(value):10.4f}  published {expected:.4f}  {'agrees' if agrees else 'DIFFERS'}")
        agree = agree and agrees
    return agree


def main(words: list[str]) -> int:
    """Compare one reward. Return 0 if all scores agree, 1 if one does not, 2 if nothing was compared."""
    if not words or words[0] not in PUBLISHED:
        print(f"name one of {', '.join(PUBLISHED)}", file=sys.stderr)
        return 2
    name, *paths = words
    published = PUBLISHED[name]
    wanted = (*published.files, *published.targets)
    if len(paths) != len(wanted):
        print("download these files and name them in this order:", *wanted, sep="\n  ", file=sys.stderr)
        return 2
    images = [Image.open(path).convert("RGB") for path in paths]
    count = len(published.files)
    images, targets = published.render() if published.render else (images[:count], images[count:])
    return int(not compare(name, images, targets))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
