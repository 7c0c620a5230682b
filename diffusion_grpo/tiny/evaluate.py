"""How well the embedded model writes: `python -m diffusion_grpo.tiny.evaluate [--prompts 192]`.

In: a pipeline folder (the package's own by default) and held-out prompts. Out: the table of the model's card, one row
a guidance scale: share of words read exactly by PP-OCR and by Tesseract, share in the right colour, mean rewards.
A module of its own because it is the command by which the card's figures can be checked.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

from ..rewards.images.color import color, named_color, nearest_color
from ..rewards.ocr.tesseract import tesseract
from ..rewards.ocr.text import text
from . import PATH, prompts
from .render import HEIGHT, WIDTH


def draw(pipe: StableDiffusion3Pipeline, wanted: list[str], guidance: float, steps: int = 8, batch: int = 48) -> list:
    """One PIL picture a prompt by the pipeline's own deterministic sampler, noise seeded by the prompt's position."""
    pictures = []
    for start in range(0, len(wanted), batch):
        chunk = wanted[start : start + batch]
        pictures += pipe(
            prompt=chunk,
            height=HEIGHT,
            width=WIDTH,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=1,
            generator=[torch.Generator().manual_seed(start + row) for row in range(len(chunk))],
        ).images
    return pictures


def measure(pictures: list, wanted: list[str]) -> dict[str, float]:
    """Shares in [0, 1] of exact readings and right colours, and the means of the three rewards."""
    spelled, judged, colored = (reward(images=pictures, prompts=wanted) for reward in (text, tesseract, color))
    right = [nearest_color(picture) == named_color(prompt) for picture, prompt in zip(pictures, wanted, strict=True)]
    count = len(wanted)
    return {
        "text exact": sum(value == 1 for value in spelled) / count,
        "tesseract exact": sum(value == 1 for value in judged) / count,
        "color right": sum(right) / count,
        "text": sum(spelled) / count,
        "tesseract": sum(judged) / count,
        "color": sum(colored) / count,
    }


def main() -> None:
    """Prints the table of the model's card."""
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
