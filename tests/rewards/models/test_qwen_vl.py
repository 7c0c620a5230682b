"""HPSv3 and VideoAlign on tiny random Qwen2-VLs, against their formulas written here a second time."""

import hashlib
import json
import math

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import save_file
from tiny_pipelines.language import QWEN_SPECIAL, qwen_tokenizer
from torch import nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from diffusion_grpo.rewards import RewardError, load_rewards, score
from diffusion_grpo.rewards.models import videoalign as videoalign_module
from diffusion_grpo.rewards.models.hpsv3 import HPSv3
from diffusion_grpo.rewards.models.qwen_vl import CHAT, fit_size, read_template
from diffusion_grpo.rewards.models.videoalign import VideoAlign

WIDTH = 32
SCALE = {"VQ_mean": 0.3, "VQ_std": 2.0, "MQ_mean": -0.2, "MQ_std": 0.5, "TA_mean": 0.1, "TA_std": 1.5}


def tiny_qwen(folder, marks: list[str], seed: int = 0):
    """A tokenizer and a configuration in `folder`, and a random Qwen2-VL of two layers that knows `marks`."""
    torch.manual_seed(seed)
    name = "hpsv3" if len(marks) == 1 else "videoalign"
    tokenizer = qwen_tokenizer(CHAT + read_template(name))
    ids = dict(zip(QWEN_SPECIAL, tokenizer.convert_tokens_to_ids(QWEN_SPECIAL), strict=True))
    text = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    config = tf.Qwen2VLConfig(
        text_config={**text, "num_key_value_heads": 2, "vocab_size": len(tokenizer) + 9, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 2},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.add_tokens(marks, special_tokens=True)
    config.text_config.vocab_size = len(tokenizer)
    model = tf.Qwen2VLModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model, tokenizer


def old_names(model: nn.Module, head: dict) -> dict:
    """As transformers 4.45 called the weights, which the published checkpoints hold."""
    named = {name.replace("language_model.", "model."): value for name, value in model.state_dict().items()}
    named["lm_head.weight"] = model.language_model.embed_tokens.weight.detach().clone()
    return {name: value.clone() for name, value in named.items()} | head


@torch.no_grad()
def hidden_at(model, tokenizer, text: str, kind: str, pixels, grid, marks: list[str]):
    """(marks, width): the hidden states, one text at a time, from embeddings at the positions 0, 1, 2, ..."""
    pad = {"image": "<|image_pad|>", "video": "<|video_pad|>"}[kind]
    words = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    words += pad * (int(np.prod(grid)) // 4) + f"<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor(tokenizer(words)["input_ids"])
    embedded = model.language_model.embed_tokens(ids)
    embedded[ids == tokenizer.convert_tokens_to_ids(pad)] = model.visual(pixels, torch.tensor([grid])).pooler_output
    states = model.language_model(inputs_embeds=embedded[None]).last_hidden_state[0]
    return torch.stack([states[ids.tolist().index(tokenizer.convert_tokens_to_ids(mark))] for mark in marks])


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


# HPSv3


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


def test_hpsv3_reads_the_first_frame_or_the_whole_video(hpsv3) -> None:
    folders, by_hand = hpsv3
    video = [noise(60, 60, seed) for seed in range(3)]
    each = [by_hand(frame, "a fox")[0] for frame in video]
    for frames, expected in ((1, each[0]), ("all", np.mean(each))):
        options = {**folders, "dtype": "float32", "device": "cpu", "frames": frames, "std": 10.0}
        values = score(load_rewards({"hpsv3": options}), videos=[video], prompts=["a fox"], fps=8)
        assert values.item() == pytest.approx(expected / 10, abs=1e-5)


def test_what_hpsv3_refuses(hpsv3, tmp_path) -> None:
    folders, _ = hpsv3
    with pytest.raises(ValueError, match="output"):
        HPSv3(**folders, output="variance")
    with pytest.raises(RewardError, match="holds '<|Reward|>', a mark of the model's own"):
        score([HPSv3(**folders)], images=[noise(60, 60, 0)], prompts=["<|Reward|>"])
    save_file({"model.embed_tokens.weight": torch.zeros(3, 4)}, tmp_path / "hps" / "HPSv3.safetensors")
    with pytest.raises(RewardError, match="does not hold the weights of this architecture"):
        score([HPSv3(**folders)], images=[noise(60, 60, 0)], prompts=["a"])


# VideoAlign


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
    forward = videoalign_module.build_batch
    monkeypatch.setattr(
        videoalign_module, "build_batch", lambda texts, *rest: passes.append(texts) or forward(texts, *rest)
    )
    options = {**folders, "dtype": "float32", "device": "cpu"}
    rewards = load_rewards(
        [{"videoalign": {**options, "dimension": name, "name": name}} for name in ("VQ", "MQ", "TA", "Overall")]
    )
    values = score(rewards, videos=videos, prompts=prompts, fps=8)
    assert values[:, :3].tolist() == [pytest.approx(own, abs=1e-4) for own in expected]
    assert values[:, 3].tolist() == pytest.approx([sum(own) for own in expected], abs=3e-4)
    assert [len(texts) for texts in passes] == [2]  # one model, one pass for the four
    assert len({id(reward.function._scorer) for reward in rewards}) == 1
    again = score(rewards[2:3], videos=[videos[0], videos[0]], prompts=["a boat", "a ship"], fps=8)[:, 0].tolist()
    assert again[0] == values[0, 2] and again[1] != again[0] and len(passes[1]) == 1
    half = VideoAlign(**folders, device="cpu", dimension="VQ")
    assert half(videos, prompts, fps=8) == pytest.approx(values[:, 0].tolist(), abs=0.1)
    assert half._scorer is half  # another dtype is another model


def test_videoalign_remembers_so_many(videoalign, monkeypatch) -> None:
    folders, _, _ = videoalign
    monkeypatch.setattr(videoalign_module, "REMEMBERED", 1)
    reward = VideoAlign(**folders, dtype="float32", device="cpu", batch_size=1)
    videos = [[noise(60, 60, seed)] * 4 for seed in range(2)]
    assert len(reward(videos, ["a", "b"], fps=8)) == 2 and len(reward._known) == 1


def test_videoalign_with_one_output(tmp_path) -> None:
    folders, by_hand, _ = videoalign_folder(tmp_path, outputs=1)
    video = [noise(60, 60, seed) for seed in range(4)]
    expected = by_hand(video, "a boat", [0, 1, 2, 3])
    values = VideoAlign(**folders, dtype="float32", device="cpu").all_dimensions([video], ["a boat"], fps=8)
    assert values == [pytest.approx(expected, abs=1e-4)]


def test_videoalign_reads_what_the_training_of_the_original_leaves(videoalign, tmp_path) -> None:
    """An adapter beside the weights that were trained whole, on top of a base of today's or yesterday's names."""
    folders, by_hand, weights = videoalign
    video = [noise(60, 60, seed) for seed in range(4)]
    published = VideoAlign(**folders, dtype="float32", device="cpu").all_dimensions([video], ["a"], fps=8)
    assert published == [pytest.approx(by_hand(video, "a", [0, 1, 2, 3]), abs=1e-4)]
    folder = tmp_path / "reward" / "checkpoint-11352"
    lora = {name.replace(".default", ""): value for name, value in weights.items() if ".lora_" in name}
    save_file(lora, folder / "adapter_model.safetensors")
    plain = {name: value for name, value in weights.items() if ".lora_" not in name}
    kept = ("visual", "embed_tokens", "rm_head")
    trained = {name: value for name, value in plain.items() if any(part in name for part in kept)}
    torch.save(trained, folder / "non_lora_state_dict.pth")
    (folder / "model.pth").unlink()
    base = {name.removeprefix("base_model.model.").replace(".base_layer", ""): v for name, v in plain.items()}
    rows = torch.zeros(json.loads((tmp_path / "base" / "config.json").read_text())["text_config"]["vocab_size"], WIDTH)
    base |= {"model.embed_tokens.weight": rows, "lm_head.weight": rows.clone()}
    save_file({n: v for n, v in base.items() if n != "rm_head.weight"}, tmp_path / "base" / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    adapter = VideoAlign(**folders, dtype="float32", device="cpu", batch_size=1)  # loaded anew
    assert adapter.all_dimensions([video], ["a"], fps=8) == [pytest.approx(published[0], abs=1e-6)]


@pytest.mark.parametrize(
    ("length", "fps", "count"),
    [(53, 8, 14), (81, 16, 10), (5, 8, 4), (3, 8, 2), (2, 8, 2), (16, 1, 16), (49, 24, 4)],
)
def test_how_many_frames_videoalign_reads(length, fps, count) -> None:
    places = videoalign_module._positions(length, fps, {"data_config": {"fps": 2.0}})
    assert len(places) == count and places[0] == 0 and places[-1] == length - 1 and places == sorted(set(places))
    assert len(videoalign_module._positions(60, 8, {"data_config": {"fps": 2.0, "num_frames": 12}})) == 12


def test_what_videoalign_refuses(videoalign, tmp_path) -> None:
    folders, _, _ = videoalign
    with pytest.raises(ValueError, match="dimension is 'vq'"):
        VideoAlign(**folders, dimension="vq")
    reward = VideoAlign(**folders, device="cpu")
    with pytest.raises(RewardError, match="one frame only"):
        score([reward], videos=[[noise(60, 60, 0)]], prompts=["a"], fps=8)
    with pytest.raises(RewardError, match="asks for videos"):
        score([reward], images=[noise(60, 60, 0)], prompts=["a"])
    settings = json.loads((tmp_path / "reward" / "model_config.json").read_text())
    settings["data_config"]["sample_type"] = "multi_pts"
    (tmp_path / "reward" / "model_config.json").write_text(json.dumps(settings))
    with pytest.raises(RewardError, match="sample_type='multi_pts'; videoalign reads checkpoints with 'uniform'"):
        score([VideoAlign(**folders, batch_size=7)], videos=[[noise(60, 60, 0)] * 4], prompts=["a"], fps=8)
    torch.save({"weights": print}, tmp_path / "reward" / "checkpoint-11352" / "model.pth")
    del settings["data_config"]["sample_type"]
    (tmp_path / "reward" / "model_config.json").write_text(json.dumps(settings))
    with pytest.raises(RewardError, match="Weights only load failed"):  # no code from a checkpoint
        score([VideoAlign(**folders, batch_size=6)], videos=[[noise(60, 60, 0)] * 4], prompts=["a"], fps=8)


# what both share


@pytest.mark.parametrize("size", [(500, 300), (64, 2000), (448, 448), (20, 20), (1280, 704), (448, 462)])
@pytest.mark.parametrize(("least", "most"), [(200704, 200704), (100352, 200704)])
def test_sizes_are_those_of_qwen(size, least, most) -> None:
    width, height = fit_size(*size, min_pixels=least, max_pixels=most)
    assert (height, width) == smart_resize(size[1], size[0], min_pixels=least, max_pixels=most)
    with pytest.raises(ValueError, match="too long"):
        fit_size(2010, 10, 1, 2)


@pytest.mark.parametrize(("least", "most"), [(200704, 200704), (100352, 200704), (100352, 602112)])
def test_sizes_of_a_dense_grid_are_those_of_qwen_vl_utils(least, most) -> None:
    """Its formula written out; where sides land on multiples of 28 the order of the operations decides."""

    def expected(height: int, width: int) -> tuple[int, int]:
        rows, columns = max(28, round(height / 28) * 28), max(28, round(width / 28) * 28)
        if rows * columns > most:
            beta = math.sqrt((height * width) / most)
            rows, columns = (math.floor(side / beta / 28) * 28 for side in (height, width))
        elif rows * columns < least:
            beta = math.sqrt(least / (height * width))
            rows, columns = (math.ceil(side * beta / 28) * 28 for side in (height, width))
        return columns, rows

    sides = range(16, 2049, 8)
    wrong = [
        (width, height)
        for width in sides
        for height in sides
        if fit_size(width, height, min_pixels=least, max_pixels=most) != expected(height, width)
    ]
    assert wrong == []
    assert fit_size(272, 272, min_pixels=200704, max_pixels=200704) == (448, 448)


def test_the_texts_are_as_the_models_were_trained_on() -> None:
    """To the last space: an editor that strips the ends of lines would change the scores."""
    digests = {
        name: hashlib.sha256(read_template(name).encode()).hexdigest()[:16]
        for name in ("hpsv3", "videoalign", "unified_reward_image", "unified_reward_video")
    }
    assert digests == {
        "hpsv3": "f6ee57479d4e9eee",
        "videoalign": "fdb6309bac618dd0",
        "unified_reward_image": "f56f919ce3bc6aab",
        "unified_reward_video": "514a6343388979f8",
    }
