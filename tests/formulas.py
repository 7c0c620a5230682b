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
from tiny_scorers import IMAGES, MEAN, PROMPTS, STD

from diffusion_grpo.rewards import REWARDS, check_needs, differentiate, load_rewards, score
from diffusion_grpo.rewards.contract import OPTIONS, is_marked

TOLERANCE = 1e-2


def scored(name, options, images=IMAGES, prompts=PROMPTS, **columns):
    """What a run makes of it; three at a time, so that batches are cut."""
    rewards = load_rewards({name: {"device": "cpu", "batch_size": 3, **only_what_is_checked(name, options)}})
    check_needs(rewards)
    values = score(rewards, images=images, prompts=prompts, columns=columns)[:, 0].double()
    if is_marked(rewards[0].function, "has_gradient") and rewards[0].threshold is None:
        assert_same_on_tensors(rewards, values, images, prompts, columns)
    return values


def assert_same_on_tensors(rewards, values, images, prompts, columns):
    """A tensor of pixels has the value of the image, but for Pillow's 8 bits after a resize, and has a gradient."""
    with torch.enable_grad():
        for row, image in enumerate(images):
            pixels = tensor64(image)[None].float().requires_grad_()
            others = {name: [values[row]] for name, values in columns.items()}
            total = differentiate(rewards, [1.0], pixels, [prompts[row]], others)
            (gradient,) = torch.autograd.grad(total, pixels)
            expected = torch.nan_to_num(values[row], 0.0)
            assert total.item() == pytest.approx(expected.item(), rel=1e-2, abs=TOLERANCE), (row, image.size)
            assert gradient.isfinite().all()


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
