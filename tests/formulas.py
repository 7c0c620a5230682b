"""What published scorers do to images and states, in float64: the part that the tests of several rewards need.

In: PIL images, states. Out: tensors of float64. `scored` is what a run makes of a reward.
"""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tiny_scorers import IMAGES, MEAN, PROMPTS, SIDE, STD

from diffusion_grpo.rewards import REWARDS, check_needs, differentiate, load_rewards, score
from diffusion_grpo.rewards.contract import OPTIONS, is_marked

TOLERANCE = 1e-2


def scored(name, options, images=IMAGES, prompts=PROMPTS, **columns):
    """What a run makes of it; three at a time, so that batches are cut."""
    rewards = load_rewards({name: {"device": "cpu", "batch_size": 3, **only_what_is_checked(name, options)}})
    check_needs(rewards)
    values = score(rewards, images=images, prompts=prompts, columns=columns)[:, 0].double()
    if is_marked(rewards[0].function, "has_gradient") and isinstance(REWARDS[name], type):
        assert_same_on_tensors(rewards, images, prompts, columns)
    return values


def assert_same_on_tensors(rewards, images, prompts, columns):
    """Tensors have the values of images that need no resize; others, too, have a gradient."""
    corners = [image.crop((0, 0, SIDE, SIDE + 19)) for image in images]  # the square in the middle is at 9 or 10
    expected = torch.nan_to_num(score(rewards, images=corners, prompts=prompts, columns=columns)[:, 0], 0.0)
    with torch.enable_grad():
        for row, pair in enumerate(zip(images, corners)):
            others = {name: [values[row]] for name, values in columns.items()}
            for image in pair:
                pixels = tensor64(image)[None].float().requires_grad_()
                total = differentiate(rewards, [1.0], pixels, [prompts[row]], others)
                gradient = torch.autograd.grad(total, pixels)[0]
                assert gradient.isfinite().all()
                # none where a score is clamped at 0 or has no target, and at the largest of LPIPS
                assert gradient.any() or total.item() in (0.0, 1.0), (row, image.size)
            assert total.item() == pytest.approx(expected[row].item(), rel=1e-4, abs=1e-4), (row, image.size)


def only_what_is_checked(name, options):
    """The options with each folder replaced by one of links to those files alone that `check_needs` looks for."""
    if not isinstance(REWARDS.get(name), type):
        return options
    plain = {key: value for key, value in options.items() if key not in OPTIONS}
    linked = {}
    for source in REWARDS[name](**plain).sources():
        folder = Path(source.place).resolve()
        if folder.is_dir():
            copy = Path(tempfile.mkdtemp(dir=folder.parent))
            for names in source.files:
                file = next(name for name in names if source.path(name) is not None)
                (copy / file).parent.mkdir(parents=True, exist_ok=True)
                (copy / file).exists() or (copy / file).symlink_to(folder / file)
            linked[source.setting] = str(copy)
    return {**options, **linked}


def tensor64(image):
    return torch.from_numpy(np.asarray(image.convert("RGB")).astype(np.float64) / 255).permute(2, 0, 1)


def normal(pixels, mean=MEAN, std=STD):
    return (pixels - torch.tensor(mean).double()[:, None, None]) / torch.tensor(std).double()[:, None, None]


def torchvision_square(image, resize, crop, mean=MEAN, std=STD):
    """Resize(resize, BICUBIC), CenterCrop(crop), ToTensor, Normalize."""
    short, long = sorted(image.size)
    sides = {short: resize, long: int(resize * long / short)}
    image = image.convert("RGB").resize((sides[image.width], sides[image.height]), Image.Resampling.BICUBIC)
    top, left = (int(round((side - crop) / 2.0)) for side in (image.height, image.width))
    return normal(tensor64(image)[:, top : top + crop, left : left + crop], mean, std)


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def norm(states, weights, name, eps=1e-5):
    return F.layer_norm(states, states.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def linear(states, weights, name):
    return F.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])
