"""Distil the embedded model to three steps without guidance: `python -m benchmarks.tiny_model.distil FOLDER`.

The teacher takes nine Euler steps with guidance from noise to data. The student, which starts with the teacher's
weights, learns the velocity that leads straight from the first of each three levels to the last, so three of its steps
retrace nine of the teacher's. All weights of the transformer are trained; the other parts stay as they are.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from diffusion_grpo.tiny import COLORS, PATH, make_prompt, words

from .render import random_word
from .train import encode_prompts, optimize

LEVELS = (1.0, 0.6677, 0.3353, 0.0)  # of the student: those of SD3 at four steps, whose last goes from 0.001 to 0
SUBSTEPS = 3  # of the teacher for one of the student
GUIDANCE = 3.0
TRAJECTORIES, TRAIN_STEPS, BATCH = 1536, 400, 64


@torch.no_grad()
def integrate(pipe: StableDiffusion3Pipeline, embeds: Tensor, pooled: Tensor, empty: tuple[Tensor, Tensor]) -> Tensor:
    """Return the teacher's guided trajectories at the student's levels, `(levels, batch, 6, 8, 24)`."""
    count = len(embeds)
    texts = torch.cat([empty[0].expand_as(embeds), embeds])
    pools = torch.cat([empty[1].expand_as(pooled), pooled])
    latents = torch.randn(count, 6, 8, 24)
    states = [latents]
    for level, lower in zip(LEVELS, LEVELS[1:], strict=False):
        for substep in range(SUBSTEPS):
            sigma = level + (lower - level) * substep / SUBSTEPS
            plain, guided = predict(pipe, latents.repeat(2, 1, 1, 1), texts, pools, sigma).chunk(2)
            latents = latents + (plain + GUIDANCE * (guided - plain)) * (lower - level) / SUBSTEPS
        states.append(latents)
    return torch.stack(states)


def predict(pipe: StableDiffusion3Pipeline, latents: Tensor, embeds: Tensor, pooled: Tensor, sigma) -> Tensor:
    """Return the network's velocity at a level, or at a level for each row."""
    return pipe.transformer(
        hidden_states=latents,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        timestep=1000 * torch.as_tensor(sigma).expand(len(latents)),
    ).sample


def distil(count: int = TRAJECTORIES, steps: int = TRAIN_STEPS) -> StableDiffusion3Pipeline:
    """Return the pipeline of the student."""
    torch.manual_seed(0)
    generator, known, held_out = random.Random(0), words("train"), set(words("test"))
    pipe = StableDiffusion3Pipeline.from_pretrained(PATH)
    names = [make_prompt(random_word(generator, known, held_out), generator.choice([*COLORS])) for _ in range(count)]
    with torch.no_grad():
        embeds, pooled = encode_prompts(pipe, names)
        empty = encode_prompts(pipe, [""])
    rows = range(0, count, BATCH)
    parts = [integrate(pipe, embeds[row : row + BATCH], pooled[row : row + BATCH], empty) for row in rows]
    states, levels = torch.cat(parts, dim=1), torch.tensor(LEVELS)
    print(f"{count} trajectories of the teacher", flush=True)

    def loss_of() -> Tensor:
        chosen, step = torch.randint(count, (BATCH,)), torch.randint(len(LEVELS) - 1, (BATCH,))
        start, end = states[step, chosen], states[step + 1, chosen]
        length = (levels[step] - levels[step + 1]).view(-1, 1, 1, 1)
        velocity = predict(pipe, start, embeds[chosen], pooled[chosen], levels[step])
        return F.mse_loss(velocity, (start - end) / length)

    pipe.transformer.train()
    optimize("student", list(pipe.transformer.parameters()), steps, 5e-4, loss_of)
    pipe.transformer.eval()
    return pipe


def main() -> None:
    """Write the student's folder."""
    parser = argparse.ArgumentParser(description="Distil the embedded model to three steps.")
    parser.add_argument("output", type=Path, help="folder for the student's pipeline")
    distil().save_pretrained(parser.parse_args().output)


if __name__ == "__main__":
    main()
