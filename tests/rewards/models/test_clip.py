"""The rewards by CLIP and DINO, against formulas."""

import math
import os
import resource

import pytest
import torch
import transformers as tf
from formulas import normal, scored, tensor64, torchvision_square, unit
from PIL import Image
from plain_images import noise, save_turned
from tiny_pipelines import clip_tokenizer
from tiny_scorers import IMAGES, PROMPTS, SIDE, clip

from diffusion_grpo.rewards import load_rewards, score
from diffusion_grpo.rollout.score import embed_samples, find_embedders


def transformers_square(image):
    """transformers' CLIP image processor: as torchvision's, but the crop's corner is rounded down."""
    short, long = sorted(image.size)
    sides = {short: SIDE, long: int(SIDE * long / short)}
    image = image.resize((sides[image.width], sides[image.height]), Image.Resampling.BICUBIC)
    top, left = (image.height - SIDE) // 2, (image.width - SIDE) // 2
    return normal(tensor64(image)[:, top : top + SIDE, left : left + SIDE])


def clip_cosines(model, images, prompts):
    """cos(image, prompt) by transformers' CLIP, prompts cut off at 77 tokens."""
    tokenizer, model = clip_tokenizer(), model.double()
    values = []
    for image, prompt in zip(images, prompts):
        ids = tokenizer(prompt)["input_ids"]
        ids = ids if len(ids) <= 77 else [*ids[:76], tokenizer.eos_token_id]
        states = model.text_model(input_ids=torch.tensor([ids])).last_hidden_state[:, -1]
        text_features = unit(states @ model.text_projection.weight.T)
        pixels = transformers_square(image)[None]
        seen = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
        values.append((seen * text_features).sum())
    return torch.stack(values)


@torch.no_grad()
def test_clip_score_and_pickscore(tmp_path) -> None:
    model = clip(tmp_path)
    cosines = clip_cosines(model, IMAGES, PROMPTS)
    assert cosines.std() > 0.01 and (cosines < 0).any() and len(clip_tokenizer()(PROMPTS[1])["input_ids"]) > 77
    found = scored("clip_score", {"model": str(tmp_path)})
    torch.testing.assert_close(found, (100 * cosines).clamp(min=0), rtol=0, atol=1e-3)
    found = scored("pickscore", {"model": str(tmp_path), "processor": str(tmp_path)})
    torch.testing.assert_close(found, math.exp(3.0) * cosines, rtol=0, atol=2e-4)
    found = scored("pickscore", {"model": str(tmp_path), "processor": str(tmp_path), "std": 26})  # Flow-GRPO's
    torch.testing.assert_close(found, math.exp(3.0) * cosines / 26, rtol=0, atol=1e-5)


@torch.no_grad()
def test_clip_similarity(tmp_path) -> None:
    model = clip(tmp_path).double()
    pixels = torch.stack([transformers_square(image) for image in IMAGES])
    seen = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
    others = [IMAGES[1], None, IMAGES[2], save_turned(IMAGES[3], tmp_path / "other.png")]
    found = scored("clip_similarity", {"model": str(tmp_path), "target_column": "other"}, other=others)
    assert found[1].isnan() and found[2:].tolist() == pytest.approx([1, 1], abs=1e-6)
    assert found[0].item() == pytest.approx((seen[0] @ seen[1]).item(), abs=1e-5)
    (reward,) = find_embedders(load_rewards({"clip_similarity": {"model": str(tmp_path), "target_column": "other"}}))
    torch.testing.assert_close(embed_samples(reward, IMAGES).double(), seen, rtol=0, atol=1e-5)


def test_more_targets_than_files_may_be_open(tmp_path) -> None:
    clip(tmp_path)
    (reward,) = load_rewards({"clip_similarity": {"model": str(tmp_path), "device": "cpu"}})
    paths = [str(tmp_path / f"{number}.png") for number in range(100)]
    for path in paths:
        noise(8, 8).save(path)
    assert reward(images=IMAGES[:1], target=paths[:1])  # loads the network
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 40, limits[1]))
    try:
        values = reward(images=[IMAGES[0]] * 100, target=paths)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(set(values)) == 100


def test_the_preprocessing_is_pillows_with_torchvision_too(tmp_path, monkeypatch) -> None:
    """transformers would take torchvision's resize where it is installed, and give other scores."""
    asked = {}
    real = tf.AutoImageProcessor.from_pretrained
    monkeypatch.setattr(
        tf.AutoImageProcessor, "from_pretrained", lambda *args, **kw: asked.update(kw) or real(*args, **kw)
    )
    clip(tmp_path)
    scored("clip_score", {"model": str(tmp_path), "revision": "v1"})
    assert asked == {"revision": "v1", "backend": "pil"}


def test_a_served_one_answers_as_a_local_one(tmp_path, serve) -> None:
    clip(tmp_path)
    url = serve({"clip_score": {"model": str(tmp_path), "device": "cpu", "batch_size": 3}})
    remote = score(load_rewards({"remote": {"url": url}}), images=IMAGES, prompts=PROMPTS)[:, 0]
    assert torch.equal(remote.double(), scored("clip_score", {"model": str(tmp_path)}))


IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@torch.no_grad()
@pytest.mark.parametrize("family", ["dino", "dinov2"])
def test_dino_similarity(tmp_path, family) -> None:
    torch.manual_seed(4)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 224, "patch_size": 56}
    if family == "dino":
        model = tf.ViTModel(tf.ViTConfig(**sizes, intermediate_size=24), add_pooling_layer=False)
    else:
        model = tf.Dinov2Model(tf.Dinov2Config(**sizes, mlp_ratio=2))
    model.save_pretrained(tmp_path)
    model = model.double().eval()
    pixels = torch.stack([torchvision_square(image, 256, 224, *IMAGENET) for image in IMAGES])
    seen = unit(model(pixels).last_hidden_state[:, 0])
    others = [IMAGES[1], IMAGES[2], None, save_turned(IMAGES[3], tmp_path / "turned.png")]
    found = scored("dino_similarity", {"model": str(tmp_path), "target_column": "o"}, o=others)
    expected = [(seen[0] @ seen[1]).item(), (seen[1] @ seen[2]).item(), 1.0]
    assert found[[0, 1, 3]].tolist() == pytest.approx(expected, abs=1e-5) and found[2].isnan()
    assert expected[0] < 0.9999
