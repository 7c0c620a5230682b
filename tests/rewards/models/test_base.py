"""Loading, batches, devices and pixels of the rewards with weights."""

import dataclasses
import math

import numpy as np
import pytest
import torch
import transformers as tf
from formulas import torchvision_square
from PIL import Image
from plain_images import noise
from tiny_scorers import bert_tokenizer, med_config
from torch import nn
from transformers.integrations import deepspeed

from diffusion_grpo.rewards import load_rewards, score
from diffusion_grpo.rewards.models.base import (
    CLIP_MEAN,
    CLIP_STD,
    ModelReward,
    as_pixels,
    crop_squares,
    crop_tensor,
    default_device,
    read_weights,
    weights_path,
)
from tests.rewards.models.test_imagereward import blip_weights


@dataclasses.dataclass(eq=False)
class Doubled(ModelReward):
    """Twice the number in a column, by a network of one weight."""

    model: str = "tiny"
    factor: float = 2.0

    loads = 0

    def sources(self):
        return []

    def load(self):
        type(self).loads += 1
        self.sharded = deepspeed.is_deepspeed_zero3_enabled()
        network = nn.Linear(1, 1, bias=False).to(self.torch_dtype)  # which draws random numbers
        nn.init.constant_(network.weight, self.factor)
        return network

    def __call__(self, prompts, numbers, **columns):
        self.seen = []
        return self.in_batches(self._score, numbers)

    def _score(self, network, numbers):
        self.seen.append((len(numbers), torch.is_grad_enabled(), network.training, network.weight.requires_grad))
        return network(torch.tensor(numbers, dtype=self.torch_dtype, device=network.weight.device)[:, None])[:, 0]


def columns(*numbers):
    return {"prompts": [""] * len(numbers), "numbers": list(numbers)}


def test_it_is_loaded_at_the_first_call_and_scores_frozen_in_batches() -> None:
    Doubled.loads = 0
    (reward,) = load_rewards({f"{__name__}.Doubled": {"batch_size": 2, "factor": 3.0, "weight": 0.5}})
    # loading changes torch's default dtype, and a later call may be made beside the rollout
    assert Doubled.loads == 0 and Doubled(device="cpu")(**columns()) == [] and Doubled.loads == 1
    drawn = torch.get_rng_state()
    values = score([reward], images=[None] * 3, prompts=["a", "b", "c"], columns={"numbers": [1.0, 2.0, 4.0]})
    assert values[:, 0].tolist() == [3.0, 6.0, 12.0]
    assert torch.equal(drawn, torch.get_rng_state())  # a resumed run loads it at another step
    assert reward.function.seen == [(2, False, False, False), (1, False, False, False)]
    assert reward.function(**columns(5.0)) == [15.0] and reward.function(**columns()) == []
    assert Doubled.loads == 2
    assert reward.options() == {"batch_size": 2, "factor": 3.0}


def test_it_keeps_its_own_dtype_under_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Doubled(factor=1.0)(**columns(1.001)) == [pytest.approx(1.001, abs=1e-6)]
    assert Doubled(factor=1.0, dtype="bfloat16")(**columns(1.001)) == [1.0]


def test_it_is_not_sharded_though_the_policy_is() -> None:
    config = deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        reward = Doubled()
        reward(**columns(1.0))
        assert not reward.sharded and deepspeed.is_deepspeed_zero3_enabled()
    finally:
        del config
        deepspeed.unset_hf_deepspeed_config()


@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_between_calls(offload) -> None:
    reward, events = Doubled(device="cpu", offload=offload), []
    reward(**columns(1.0))
    with reward.network() as network:
        network.to = lambda device: events.append(str(device)) or network
    reward.in_batches(lambda network, numbers: events.append("scored") or numbers, [1.0])

    def fail(network, numbers):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        reward.in_batches(fail, [0.0])
    last = ["cpu"] * offload
    assert events == [*last, "cpu", "scored", *last, "cpu", *last]
    for has_gradient, after in ((True, []), (False, last)):  # a backward pass would follow
        events.clear()
        with torch.set_grad_enabled(has_gradient):
            reward.in_batches(lambda network, numbers: events.append("scored") or numbers, torch.ones(1))
        assert events == ["cpu", "scored", *after]


def test_wrong_settings_are_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="batch_size=0 for tiny; give 1 or more"):
        load_rewards({f"{__name__}.Doubled": {"batch_size": 0}})
    with pytest.raises(ValueError, match="no folder ./missing"):
        load_rewards({f"{__name__}.Doubled": {"model": "./missing"}})
    with pytest.raises(ValueError, match="dtype='int8'"):
        Doubled(dtype="int8")
    with pytest.raises(ValueError, match="expected bool"):
        load_rewards({f"{__name__}.Doubled": {"offload": "yes"}})
    with pytest.raises(ValueError, match="shorter"):
        Doubled().in_batches(lambda network, a, b: a, [1, 2], [1])


def test_the_default_device_is_that_of_the_process(monkeypatch) -> None:
    assert default_device() == torch.device("cpu") or torch.accelerator.is_available()
    for name, answer in {
        "is_available": True,
        "current_accelerator": torch.device("cuda"),
        "current_device_index": 1,
        "device_count": 4,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, lambda answer=answer: answer)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert default_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert default_device() == torch.device("cuda", 3)


def test_weights_are_read_from_a_folder_or_a_file_of_their_own(tmp_path) -> None:
    weights = {"weight": torch.ones(2)}
    torch.save({"state_dict": weights}, tmp_path / "a.pth")
    assert weights_path(str(tmp_path / "a.pth"), "other.pth") == tmp_path / "a.pth"
    assert read_weights(weights_path(str(tmp_path), "a.pth"))["weight"].tolist() == [1.0, 1.0]


class _Asked(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "part", "cls"),
    [
        ("clip_score", "processor", "AutoTokenizer"),
        ("hpsv2", "processor", "AutoTokenizer"),
        ("aesthetic", "backbone", "CLIPConfig"),
        ("imagereward", "tokenizer", "AutoTokenizer"),
    ],
)
def test_the_revision_of_the_second_repository_can_be_pinned(name, part, cls, tmp_path, monkeypatch) -> None:
    def ask(source, **kwargs):
        raise _Asked(source, kwargs["revision"])

    if name == "imagereward":  # which reads its checkpoint first
        vocabulary = len(bert_tokenizer(tmp_path))
        torch.save(blip_weights(vocabulary), tmp_path / "ImageReward.pt")
        med_config(tmp_path, vocabulary)
    monkeypatch.setattr(getattr(tf, cls), "from_pretrained", ask)
    (reward,) = load_rewards({name: {"model": str(tmp_path), part: "owner/part", f"{part}_revision": "v7"}})
    with pytest.raises(_Asked) as asked:
        reward.function.load()
    assert asked.value.args == ("owner/part", "v7")


def test_squares_are_those_of_torchvision():
    images = [noise(50, 33), noise(20, 61), noise(24, 24).convert("L")]
    found = crop_squares(images, 26, 24, CLIP_MEAN, CLIP_STD)
    expected = torch.stack([torchvision_square(image, 26, 24, CLIP_MEAN, CLIP_STD) for image in images])
    assert found.shape == (3, 3, 24, 24) and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("corner", [round, math.floor])
def test_tensors_are_resized_as_by_pillow_without_its_8_bits(corner):
    for image in (noise(64, 48), noise(40, 61), noise(26, 31), noise(20, 23)):
        width, height = (int(26 * side / min(image.size)) for side in image.size)
        left, top = (corner((side - 24) / 2) for side in (width, height))
        pixels = as_pixels([image])
        cut = crop_tensor(pixels, 26, 24, corner)
        for channel, values in enumerate(pixels[0]):
            one = Image.fromarray(values.numpy(), "F").resize((width, height), Image.Resampling.BICUBIC)
            expected = torch.from_numpy(np.array(one)).clamp(0, 1)[top : top + 24, left : left + 24]
            torch.testing.assert_close(cut[0, channel], expected, rtol=0, atol=1e-5)
