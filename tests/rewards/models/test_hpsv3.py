"""HPSv3 on a tiny random Qwen2-VL, against its formula written here a second time."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_qwen import WIDTH, hidden_at, noise, old_names, tiny_qwen
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from diffusion_grpo.rewards import RewardError, load_rewards, score
from diffusion_grpo.rewards.models.hpsv3 import HPSv3
from diffusion_grpo.rewards.models.qwen_vl import read_template


@pytest.fixture
def hpsv3(tmp_path):
    """The folders of a checkpoint and its base, and the score by hand."""
    model, tokenizer = tiny_qwen(tmp_path / "base", ["<|Reward|>"])
    head = nn.Sequential(
        nn.Linear(WIDTH, 24), nn.ReLU(), nn.Dropout(0.05), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    weights = old_names(model, {f"rm_head.{name}": value for name, value in head.state_dict().items()})
    (tmp_path / "hps").mkdir()
    save_file(weights, tmp_path / "hps" / "HPSv3.safetensors")
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 256 * 28 * 28, "longest_edge": 256 * 28 * 28})

    @torch.no_grad()
    def by_hand(image, prompt):
        seen = processor(images=image, return_tensors="pt")
        text = read_template("hpsv3").replace("{text_prompt}", prompt)
        grid = seen["image_grid_thw"][0].tolist()
        states = hidden_at(model, tokenizer, text, "image", seen["pixel_values"], grid, ["<|Reward|>"])
        mean, log_sigma = head.eval()(states)[0].tolist()
        return mean, np.exp(log_sigma)

    return {"model": str(tmp_path / "hps"), "base": str(tmp_path / "base")}, by_hand


def test_hpsv3_is_the_head_at_the_reward_token(hpsv3) -> None:
    folders, by_hand = hpsv3
    images = [noise(500, 300, 1), noise(64, 200, 2), noise(500, 300, 3).convert("L")]
    prompts = ["a fox", "a much longer prompt, so that the others are padded", "{braces} are only text"]
    expected = [by_hand(image.convert("RGB"), prompt) for image, prompt in zip(images, prompts)]
    logged = {}
    (reward,) = load_rewards({"hpsv3": {**folders, "dtype": "float32", "device": "cpu", "batch_size": 2}})
    values = score([reward], images=images, prompts=prompts, log_metric=logged.__setitem__)[:, 0].tolist()
    assert values == pytest.approx([mean for mean, _ in expected], abs=2e-5) and len(set(values)) == 3
    assert logged == {"hpsv3/sigma": pytest.approx(np.mean([sigma for _, sigma in expected]), rel=1e-4)}
    sigma = HPSv3(**folders, dtype="float32", device="cpu", output="sigma")
    assert sigma(images=images, prompts=prompts) == pytest.approx([sigma for _, sigma in expected], rel=1e-4)
    half = HPSv3(**folders, device="cpu")
    assert half(images=images, prompts=prompts) == pytest.approx(values, abs=0.1)
    with half.network() as network:
        dtypes = network.head[0].weight.dtype, network.backbone.dtype
    assert dtypes == (torch.float32, torch.bfloat16)


def test_what_hpsv3_refuses(hpsv3, tmp_path) -> None:
    folders, _ = hpsv3
    with pytest.raises(RewardError, match=r"contains '<\|Reward\|>', a special token of the model"):
        score([HPSv3(**folders)], images=[noise(60, 60, 0)], prompts=["<|Reward|>"])
    save_file({"model.embed_tokens.weight": torch.zeros(3, 4)}, tmp_path / "hps" / "HPSv3.safetensors")
    with pytest.raises(RewardError, match="does not hold the weights of this architecture"):
        score([HPSv3(**folders)], images=[noise(60, 60, 0)], prompts=["a"])
