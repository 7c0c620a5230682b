"""VideoAlign on a tiny random Qwen2-VL, against its formula written here a second time."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_qwen import WIDTH, hidden_at, noise, old_names, tiny_qwen
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from diffusion_grpo.rewards import RewardError, load_rewards, score
from diffusion_grpo.rewards.models import qwen_vl
from diffusion_grpo.rewards.models import videoalign as videoalign_module
from diffusion_grpo.rewards.models.qwen_vl import read_template
from diffusion_grpo.rewards.models.videoalign import VideoAlign

SCALE = {"VQ_mean": 0.3, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.1, "TA_std": 1.5}


@pytest.fixture
def videoalign(tmp_path):
    """The folders of a checkpoint as published and of its base, and the three scores by hand."""
    return videoalign_folder(tmp_path, outputs=3)


def videoalign_folder(tmp_path, outputs: int):
    marks = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
    model, tokenizer = tiny_qwen(tmp_path / "base", marks)
    head = nn.Linear(WIDTH, outputs, bias=False)
    weights = {}
    for name, value in old_names(model, {"rm_head.weight": head.weight.detach().clone()}).items():
        layer = name.removesuffix(".weight").removesuffix(".bias")
        if layer.endswith(("q_proj", "down_proj")) and "visual" not in name:
            base = f"base_model.model.{layer}"
            weights[base + name.replace(layer, ".base_layer")] = value
            if name.endswith("weight"):
                low, high = 0.1 * torch.randn(4, value.shape[1]), 0.1 * torch.randn(value.shape[0], 4)
                weights |= {f"{base}.lora_A.default.weight": low, f"{base}.lora_B.default.weight": high}
                inner = model.get_submodule(layer.replace("model.", "language_model.", 1))
                inner.weight.data += 2.0 * high @ low  # alpha / r
        else:
            weights[f"base_model.model.{name}"] = value
    folder = tmp_path / "reward" / "checkpoint-11352"
    folder.mkdir(parents=True)
    torch.save(weights, folder / "model.pth")
    settings = {
        "data_config": {"fps": 2.0, "num_frames": None, "max_frame_pixels": 200704, "sample_type": "uniform"},
        "model_config": {"use_special_tokens": True, "output_dim": outputs},
        "peft_lora_config": {"lora_r": 4, "lora_alpha": 8, "use_rslora": False},
        "inference_config": SCALE,
    }
    (folder.parent / "model_config.json").write_text(json.dumps(settings))

    @torch.no_grad()
    def by_hand(video, prompt, places):
        frames = [video[place] for place in places]
        height, width = smart_resize(*frames[0].size[::-1], min_pixels=128 * 28 * 28, max_pixels=200704)
        seen, grid = patches_by_hand([resized(frame, width, height) for frame in frames])
        text = read_template("videoalign").replace("{text_prompt}", prompt)
        states = hidden_at(model, tokenizer, text, "video", seen, grid, marks)
        logits = [float(head(states)[row, row if outputs == 3 else 0]) for row in range(3)]
        named = zip(("VQ", "MQ", "TA"), logits)
        return [(value - SCALE[f"{name}_mean"]) / SCALE[f"{name}_std"] for name, value in named]

    return {"model": str(folder.parent), "base": str(tmp_path / "base")}, by_hand, weights


def resized(frame: Image.Image, width: int, height: int) -> np.ndarray:
    pixels = torch.from_numpy(np.array(frame)).permute(2, 0, 1)[None].float()
    sized = nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
    return sized[0].clamp(0, 255).round().numpy() / 255


def patches_by_hand(frames: list[np.ndarray]):
    """Qwen2-VL's order, one patch at a time: moments, blocks of 2 x 2 patches, the patches of a block."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = np.array([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    frames = [(frame - mean) / std for frame in frames]
    rows, columns = frames[0].shape[1] // 14, frames[0].shape[2] // 14
    cut = []
    for moment in range(len(frames) // 2):
        for block in range(rows // 2 * (columns // 2)):
            for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
                top, left = 2 * (block // (columns // 2)) + row, 2 * (block % (columns // 2)) + column
                pair = [f[:, 14 * top : 14 * top + 14, 14 * left : 14 * left + 14] for f in frames[2 * moment :][:2]]
                cut.append(np.stack(pair, axis=1).ravel())
    return torch.tensor(np.stack(cut), dtype=torch.float32), [len(frames) // 2, rows, columns]


def test_videoalign_is_each_output_at_its_token_normalised(videoalign, monkeypatch) -> None:
    folders, by_hand, _ = videoalign
    videos = [[noise(300, 200, seed) for seed in range(10)], [noise(90, 300, seed) for seed in range(24)]]
    prompts = ["a boat", "a much longer prompt, so that the other one is padded"]
    # at 8 frames a second: 10 frames are 2.5 at the checkpoint's 2 a second, at least 4; 24 are 6
    places = [[0, 3, 6, 9], [0, 5, 9, 14, 18, 23]]
    expected = [by_hand(*sample) for sample in zip(videos, prompts, places)]
    passes = []
    build_batch = qwen_vl.build_batch
    monkeypatch.setattr(qwen_vl, "build_batch", lambda texts, *rest: passes.append(texts) or build_batch(texts, *rest))
    options = {**folders, "dtype": "float32", "device": "cpu"}
    rewards = load_rewards(
        [{"videoalign": {**options, "dimension": name, "name": name}} for name in ("VQ", "MQ", "TA", "Overall")]
    )
    values = score(rewards, videos=videos, prompts=prompts, fps=8)
    assert values[:, :3].tolist() == [pytest.approx(own, abs=1e-4) for own in expected]
    assert values[:, 3].tolist() == pytest.approx([sum(own) for own in expected], abs=3e-4)
    assert [len(texts) for texts in passes] == [2]  # one model, one pass for the four
    again = score(rewards[2:3], videos=[videos[0], videos[0]], prompts=["a boat", "a ship"], fps=8)[:, 0].tolist()
    assert again[0] == values[0, 2] and again[1] != again[0] and len(passes[1]) == 1
    half = VideoAlign(**folders, device="cpu", dimension="VQ")
    assert half(videos, prompts, fps=8) == pytest.approx(values[:, 0].tolist(), abs=0.1)
    assert len(passes) == 3  # another dtype is another model


def test_videoalign_with_one_output(tmp_path) -> None:
    folders, by_hand, _ = videoalign_folder(tmp_path, outputs=1)
    video = [noise(60, 60, seed) for seed in range(4)]
    expected = by_hand(video, "a boat", [0, 1, 2, 3])
    values = VideoAlign(**folders, dtype="float32", device="cpu").all_dimensions([video], ["a boat"], fps=8)
    assert values == [pytest.approx(expected, abs=1e-4)]


@pytest.mark.parametrize(
    ("length", "fps", "count"),
    [(53, 8, 14), (81, 16, 10), (5, 8, 4), (3, 8, 2), (2, 8, 2), (16, 1, 16), (49, 24, 4)],
)
def test_how_many_frames_videoalign_reads(length, fps, count) -> None:
    places = videoalign_module.choose_frames(length, fps, {"data_config": {"fps": 2.0}})
    assert len(places) == count and places[0] == 0 and places[-1] == length - 1 and places == sorted(set(places))
    assert len(videoalign_module.choose_frames(60, 8, {"data_config": {"fps": 2.0, "num_frames": 12}})) == 12


def test_what_videoalign_refuses(videoalign, tmp_path) -> None:
    folders, _, _ = videoalign
    reward = VideoAlign(**folders, device="cpu")
    with pytest.raises(RewardError, match="one frame only"):
        score([reward], videos=[[noise(60, 60, 0)]], prompts=["a"], fps=8)
    with pytest.raises(RewardError, match="asks for videos"):
        score([reward], images=[noise(60, 60, 0)], prompts=["a"])
    torch.save({"weights": print}, tmp_path / "reward" / "checkpoint-11352" / "model.pth")
    with pytest.raises(RewardError, match="Weights only load failed"):  # no code from a checkpoint
        score([VideoAlign(**folders, batch_size=6)], videos=[[noise(60, 60, 0)] * 4], prompts=["a"], fps=8)
