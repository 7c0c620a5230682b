"""Measure how well the embedded model writes: `python -m benchmarks.tiny_model.evaluate [--prompts 192]`.

Prints the table of the model card for held-out prompts, one row per guidance scale: the share of words that PP-OCR
and Tesseract read exactly, the share in the right colour, and the mean rewards.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from PIL import Image

from diffusion_grpo.rewards.ocr import tesseract, text
from diffusion_grpo.rewards.pixels import color, find_color_name, ink_color
from diffusion_grpo.tiny import COLORS, PATH, prompts

from .render import HEIGHT, WIDTH


def draw(pipe: StableDiffusion3Pipeline, wanted: list[str], guidance: float, steps: int = 8, batch: int = 48) -> list:
    """Sample one PIL image per prompt with the pipeline's own scheduler; the prompt's position seeds its noise."""
    images = []
    for start in range(0, len(wanted), batch):
        chunk = wanted[start : start + batch]
        images += pipe(
            prompt=chunk,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=1,
            generator=[torch.Generator().manual_seed(start + row) for row in range(len(chunk))],
        ).images
    return images


def nearest_color(image: Image.Image) -> str | None:
    """Return the name of the colour nearest to the ink's, or `None` if there is no ink."""
    ink = ink_color(image)
    return None if ink is None else min(COLORS, key=lambda name: math.dist(ink, COLORS[name]))


def measure(images: list, wanted: list[str]) -> dict[str, float]:
    """Return the shares in [0, 1] of exact readings and right colours, and the means of the three rewards."""
    by_pp_ocr, by_tesseract, colored = (reward(images=images, prompts=wanted) for reward in (text, tesseract, color))
    right = [nearest_color(image) == find_color_name(prompt) for image, prompt in zip(images, wanted, strict=True)]
    count = len(wanted)
    return {
        "text exact": sum(value == 1 for value in by_pp_ocr) / count,
        "tesseract exact": sum(value == 1 for value in by_tesseract) / count,
        "color right": sum(right) / count,
        "text": sum(by_pp_ocr) / count,
        "tesseract": sum(by_tesseract) / count,
        "color": sum(colored) / count,
    }


def main() -> None:
    """Print the table of the model card."""
    parser = argparse.ArgumentParser(description="Measure the embedded model on held-out words.")
    parser.add_argument("--model", type=Path, default=PATH, help="folder of the pipeline")
    parser.add_argument("--prompts", type=int, default=192, help="number of held-out prompts")
    parser.add_argument("--steps", type=int, default=8, help="denoising steps")
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    arguments = parser.parse_args()
    pipe = StableDiffusion3Pipeline.from_pretrained(arguments.model)
    pipe.set_progress_bar_config(disable=True)
    wanted = prompts("test", arguments.prompts)["prompt"][:]
    print("| guidance | PP-OCR exact | Tesseract exact | color right | text | tesseract | color |")
    print("|---|---|---|---|---|---|---|")
    for guidance in arguments.guidance:
        found = measure(draw(pipe, wanted, guidance, arguments.steps), wanted)
        shares = [f"{100 * found[name]:.0f} %" for name in ("text exact", "tesseract exact", "color right")]
        means = [f"{found[name]:.3f}" for name in ("text", "tesseract", "color")]
        print("| " + " | ".join([f"{guidance:g}", *shares, *means]) + " |", flush=True)


if __name__ == "__main__":
    main()
