"""What a reward writes to what it was handed reaches no other reward, no saved file and no dataset row."""

import asyncio

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from tiny_runs import trainer_for

from diffusion_grpo.media.files import VideoWithSound
from diffusion_grpo.rewards import groupwise, score, takes_latents, takes_tensors
from diffusion_grpo.rollout.score import embed_samples


def make_image(shade: int, size: int = 8) -> Image.Image:
    return Image.new("RGB", (size, size), (shade,) * 3)


def sound() -> np.ndarray:
    return np.full((2, 6), 0.25, dtype=np.float32)


SAMPLES = {
    "images": lambda: [make_image(10), make_image(20)],
    "videos": lambda: [[make_image(10), make_image(30)], [make_image(20), make_image(40)]],
    "videos with sound": lambda: [VideoWithSound([make_image(10), make_image(30)], sound(), 24) for _ in range(2)],
    "sounds": lambda: [sound(), sound()],
    "tensors": lambda: [torch.full((4, 6), 0.5), torch.full((4, 6), 0.25)],
}


def seen(value) -> object:
    """What a sample or column comes to, to compare."""
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, (list, tuple)):
        return (
            [*map(seen, value), *map(seen, vars(value).values())] if hasattr(value, "sound") else [*map(seen, value)]
        )
    if isinstance(value, dict):
        return {name: seen(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


def spoil(value) -> None:
    """Write to all that can be written to."""
    if isinstance(value, Image.Image):
        ImageDraw.Draw(value).rectangle((0, 0, *value.size), fill="white")
        value.info["spoilt"] = True
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = True
    elif isinstance(value, list):
        for item in [*value, *vars(value).values()] if hasattr(value, "sound") else value:
            spoil(item)
        value.reverse()
        value.append("spoilt")
    elif isinstance(value, (np.ndarray, torch.Tensor)):
        value[:] = 9


def vandal(completions, prompts, **columns):
    count = len(prompts)
    for value in (completions, prompts, *(value for value in columns.values() if isinstance(value, list))):
        spoil(value)
    return [0.0] * count


async def slow_vandal(completions, prompts, **columns):
    await asyncio.sleep(0)
    return vandal(completions, prompts, **columns)


@pytest.mark.parametrize("first", [vandal, slow_vandal, groupwise(lambda **keywords: vandal(**keywords))])
@pytest.mark.parametrize("kind", SAMPLES)
def test_a_reward_that_writes_to_what_it_gets_changes_it_for_nobody_else(kind, first) -> None:
    prompts, handed = ["a", "b"], SAMPLES[kind]()
    columns = {
        "meta": [{"count": 1, "more": [1]}, {"count": 2}],
        "words": [["x"], ["y"]],
        "target": [make_image(1)] * 2,
    }
    before, found = (seen(SAMPLES[kind]()), seen(columns), list(prompts)), []

    async def look(completions, prompts, meta, words, target):
        await asyncio.sleep(0.01)
        others = seen({"meta": meta, "words": words, "target": target})
        found.append((seen(completions), others, list(prompts)))
        return [0.0] * len(prompts)

    named = "videos" if kind.startswith("videos") else "images"
    score([first, look, vandal], **{named: handed}, prompts=prompts, columns=columns)
    assert found == [before] and (seen(handed), seen(columns), prompts) == before
    assert all("spoilt" not in image.info for image in columns["target"])


def test_frames_tensors_and_latents_are_a_reward_s_own() -> None:
    found = []

    def draw(images):
        spoil(images)
        return [0.0] * (len(images) - 1)

    def shades(images):
        return [image.getpixel((0, 0))[0] for image in images]

    @takes_tensors
    def write(videos):
        found.append(videos.mean().item())
        videos.zero_()
        return [0.0] * len(videos)

    @takes_latents
    def overwrite(latents):
        found.append(latents.mean().item())
        latents.zero_()
        return [0.0] * len(latents)

    videos, latents = [[make_image(51)] * 3, [make_image(102)] * 3], [torch.ones(2, 2), torch.ones(2, 2)]
    given = {"videos": videos, "latents": latents, "prompts": ["a", "b"]}
    table = score([draw, shades, write, write, overwrite, overwrite], **given)
    assert table[:, 1].tolist() == [51, 102] and found == pytest.approx([0.3, 0.3, 1, 1])
    assert all((latent == 1).all() for latent in latents)


def test_what_embeds_for_the_diversity_gets_copies() -> None:
    class Embedder:
        def embed(self, images):
            for image in images:
                spoil(image)
            return torch.zeros(len(images), 2)

    samples = [make_image(3)]
    embed_samples(type("Reward", (), {"function": Embedder()}), samples)
    assert samples[0].getpixel((0, 0)) == (3, 3, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_saved_samples_are_those_that_were_made(tmp_path, overlap) -> None:
    made = {}

    def remember(images, prompts):
        for image, prompt in zip(images, prompts, strict=True):
            made.setdefault(prompt, []).append(image.tobytes())
        return [image.getpixel((0, 0))[0] / 255 for image in images]

    def draw(images, prompts):
        for image in images:
            ImageDraw.Draw(image).line((0, 0, *image.size), fill="red", width=4)
        prompts[:] = ["another"] * len(prompts)
        return [0.0] * len(images)

    settings = {"max_steps": 1, "save_samples_steps": 1, "overlap_rewards": overlap}
    trainer_for(tmp_path, rewards=[remember, draw], **settings).train()
    saved = [Image.open(path).convert("RGB").tobytes() for path in sorted(tmp_path.glob("samples/step-000000/*.png"))]
    assert len(saved) == 8 and sorted(saved) == sorted(pixels for own in made.values() for pixels in own)
