"""Rewards on tensors: the values of the images, gradients by finite differences, and what is refused."""

import math

import pytest
import torch
from PIL import ImageDraw
from plain_images import noise

from diffusion_grpo.media.samples import as_tensor
from diffusion_grpo.rewards import RewardError, differentiable, differentiate, load_rewards, score

PROMPTS = ['the word "RED" in blue', "a word in red", "no colour"]


def written():
    images = [noise(24, 16) for _ in range(2)]
    for image, colour in zip(images, ((30, 60, 200), (200, 60, 90))):
        image.paste((250, 250, 250), (0, 0, 24, 16))
        ImageDraw.Draw(image).text((2, 2), "RED", fill=colour)
    return [*images, noise(24, 16)]


@pytest.mark.parametrize("name", ["color", "brightness", "sharpness"])
def test_a_tensor_has_the_value_of_the_image(name):
    images = written()
    rewards = load_rewards({name: {"mean": 0.1, "std": 2.0, "clip": [-5, 5]}})
    expected = score(rewards, images=images, prompts=PROMPTS)[:, 0].nan_to_num(0.0)
    pixels = as_tensor(images)[:, 0].double().requires_grad_()
    found = differentiate(rewards, [3.0], pixels, PROMPTS, {})
    torch.testing.assert_close(found.detach(), 3 * expected, rtol=0, atol=4e-3)  # luma has 8 bits in Pillow
    (gradient,) = torch.autograd.grad(found.sum(), pixels)
    assert gradient[:2].flatten(1).norm(dim=1).min() > 0
    direction = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = [differentiate(rewards, [3.0], (pixels + e * direction).detach(), PROMPTS, {}) for e in (1e-4, -1e-4)]
    slope = float((ends[0] - ends[1]).double().sum() / 2e-4)
    assert slope == pytest.approx(float((gradient * direction).sum()), rel=0.05, abs=2e-3)


@differentiable
def half_green(images, word, **columns):
    assert images.shape[1:] == (3, 16, 24) and word[0] == "a"
    return images[:, 1].mean((1, 2)) / 2


def test_a_function_of_ones_own_gets_tensors_columns_and_frames():
    images = written()
    scored = score([half_green], images=images, prompts=PROMPTS, columns={"word": ["a", "b", "c"]})
    pixels = as_tensor(images)[:, 0].requires_grad_()
    rewards = load_rewards({half_green: 1.0})
    found = differentiate(rewards, [1.0], pixels, PROMPTS, {"word": ["a", "b", "c"]})
    torch.testing.assert_close(found.detach(), scored[:, 0])
    videos = [images, images[::-1]]
    scored = score([half_green], videos=videos, prompts=PROMPTS[:2], columns={"word": ["a", "b"]})
    found = differentiate(rewards, [1.0], as_tensor(videos).requires_grad_(), PROMPTS[:2], {"word": ["a", "b"]})
    torch.testing.assert_close(found.detach(), scored[:, 0])


@differentiable
def scaled(images, scale=1.0, **columns):
    return scale * images.mean((1, 2, 3))


def test_an_option_is_not_replaced_by_a_column_of_its_name_and_scores_are_clipped():
    pixels = as_tensor(written())[:, 0]
    rewards = load_rewards({scaled: {"scale": 2.0, "clip": [0.0, 1.2]}})
    found = differentiate(rewards, [1.0], pixels, PROMPTS, {"scale": ["a", "b", "c"]})
    torch.testing.assert_close(found, (2 * pixels.mean((1, 2, 3))).clamp(max=1.2))
    assert found.min() < 1.2 == pytest.approx(found.max().item())


def test_an_answer_without_a_gradient_for_each_image_is_refused():
    @differentiable
    def whole(images, **columns):
        return images.mean((1, 2, 3))[:1]

    with pytest.raises(RewardError, match="'whole' must return a tensor"):
        differentiate(load_rewards(whole), [1.0], as_tensor(written())[:, 0], PROMPTS, {})


def test_faint_ink_gives_no_gradient_and_no_error():
    pixels = torch.full((1, 3, 8, 8), 0.5, requires_grad=True)
    total = differentiate(load_rewards("color"), [1.0], pixels, ["in red"], {})
    assert total.tolist() == [0.0] and not math.isnan(torch.autograd.grad(total.sum(), pixels)[0].sum())
