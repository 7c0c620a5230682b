"""Rewards by published image models against their published formulas, written out in float64.

On tiny random models of the same architecture whose files have the originals' names and form; `rewards verify` is for
the real weights. HPSv2, ImageReward and LPIPS have files of their own.
"""

import math

import pytest
import torch
import transformers as tf
from formulas import linear, normal, scored, tensor64, torchvision_square, unit
from PIL import Image
from tiny_pipelines import clip_tokenizer
from tiny_scorers import IMAGES, PROMPTS, SIDE, bert_tokenizer, chain, clip, med_config

from diffusion_grpo.rewards import REWARDS, load_rewards
from diffusion_grpo.rewards.server.serve import score_request
from diffusion_grpo.rewards.server.wire import read_request, write_request
from diffusion_grpo.rollout.diversity import embed_samples, find_embedders
from tests.rewards.models.test_imagereward import blip_weights

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def transformers_square(image):
    """transformers' CLIP image processor: as torchvision's, but the crop's corner is rounded down."""
    short, long = sorted(image.size)
    sides = {short: SIDE, long: int(SIDE * long / short)}
    image = image.resize((sides[image.width], sides[image.height]), Image.Resampling.BICUBIC)
    top, left = (image.height - SIDE) // 2, (image.width - SIDE) // 2
    return normal(tensor64(image)[:, top : top + SIDE, left : left + SIDE])


def clip_cosines(model, images, prompts):
    """cos(picture, prompt) by transformers' CLIP, prompts cut off at 77 tokens."""
    tokenizer, model = clip_tokenizer(), model.double()
    values = []
    for image, prompt in zip(images, prompts):
        ids = tokenizer(prompt)["input_ids"]
        ids = ids if len(ids) <= 77 else [*ids[:76], tokenizer.eos_token_id]
        states = model.text_model(input_ids=torch.tensor([ids])).last_hidden_state[:, -1]
        said = unit(states @ model.text_projection.weight.T)
        pixels = transformers_square(image)[None]
        seen = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
        values.append((seen * said).sum())
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
    IMAGES[3].save(tmp_path / "other.png")
    others = [IMAGES[1], None, IMAGES[2], str(tmp_path / "other.png")]
    found = scored("clip_similarity", {"model": str(tmp_path), "target_column": "other"}, other=others)
    assert found[1].isnan() and found[2:].tolist() == pytest.approx([1, 1], abs=1e-6)
    assert found[0].item() == pytest.approx((seen[0] @ seen[1]).item(), abs=1e-5)
    (reward,) = find_embedders(load_rewards({"clip_similarity": {"model": str(tmp_path), "target_column": "other"}}))
    torch.testing.assert_close(embed_samples(reward, IMAGES).double(), seen, rtol=0, atol=1e-5)


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


@torch.no_grad()
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_aesthetic(tmp_path, suffix) -> None:
    model = clip(tmp_path / "clip").double()
    weights = chain(12, "layers.")
    torch.save(weights, tmp_path / "mlp.pth")
    if suffix == "safetensors":
        from safetensors.torch import save_file

        save_file(weights, tmp_path / "mlp.safetensors")
    pixels = torch.stack([torchvision_square(image, SIDE, SIDE) for image in IMAGES])
    expected = unit(model.vision_model(pixels).pooler_output @ model.visual_projection.weight.T)
    for number in (0, 2, 4, 6, 7):
        expected = linear(expected, {name: each.double() for name, each in weights.items()}, f"layers.{number}")
    options = {"model": str(tmp_path), "filename": f"mlp.{suffix}", "backbone": str(tmp_path / "clip")}
    torch.testing.assert_close(scored("aesthetic", options), expected[:, 0], rtol=0, atol=1e-5)


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
    others = [IMAGES[1], IMAGES[2], None, IMAGES[3]]
    found = scored("dino_similarity", {"model": str(tmp_path), "target_column": "o"}, o=others)
    expected = [(seen[0] @ seen[1]).item(), (seen[1] @ seen[2]).item(), 1.0]
    assert found[[0, 1, 3]].tolist() == pytest.approx(expected, abs=1e-5) and found[2].isnan()
    assert expected[0] < 0.9999


@torch.no_grad()
def test_nsfw_filter_as_a_reward_and_as_a_mask(tmp_path) -> None:
    torch.manual_seed(5)
    labels = {0: "drawings", 1: "normal", 2: "porn"}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    config = tf.ViTConfig(**sizes, intermediate_size=24, id2label=labels, label2id={v: k for k, v in labels.items()})
    model = tf.ViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=2.0)
    model.save_pretrained(tmp_path)
    tf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    images = [image.resize((32, 32)) for image in IMAGES]
    pixels = torch.stack([2 * tensor64(image) - 1 for image in images])
    chances = torch.softmax(model.double()(pixels).logits, -1)
    options = {"model": str(tmp_path), "unsafe_labels": ["porn", "drawings"]}
    found = scored("nsfw_filter", options, images)
    torch.testing.assert_close(found, chances[:, 1], rtol=0, atol=1e-5)
    pass_mark = chances[:, 1].median().item() + 1e-9
    mask = scored("nsfw_filter", {**options, "threshold": pass_mark}, images)
    assert mask.tolist() == [float(chance >= pass_mark) for chance in chances[:, 1]] and 0 < mask.sum() < 4
    with pytest.raises(RuntimeError, match=r"has the classes drawings, normal, porn; unsafe_labels is \['nsfw'\]"):
        scored("nsfw_filter", {"model": str(tmp_path)}, images)


MODELS = [
    "clip_score",
    "pickscore",
    "hpsv2",
    "imagereward",
    "aesthetic",
    "lpips",
    "dino_similarity",
    "clip_similarity",
]


@pytest.mark.parametrize("name", [*MODELS, "nsfw_filter"])
def test_every_one_has_the_common_settings_and_loads_late(name) -> None:
    common = {"device": "cpu", "dtype": "bfloat16", "batch_size": 2, "revision": "abc", "offload": True}
    (reward,) = load_rewards({name: {"model": "owner/does-not-exist", **common}})
    assert isinstance(reward.function, REWARDS[name]) and reward.function.torch_dtype == torch.bfloat16
    assert load_rewards(name)[0].function == REWARDS[name]()


def test_a_served_one_answers_as_a_local_one(tmp_path) -> None:
    clip(tmp_path)
    (reward,) = load_rewards({"clip_score": {"model": str(tmp_path), "device": "cpu", "batch_size": 3}})
    samples = read_request(write_request(IMAGES, PROMPTS, {}, None, None))
    assert score_request(reward, samples) == scored("clip_score", {"model": str(tmp_path)}).tolist()


@torch.no_grad()
def test_in_bfloat16_the_score_is_near(tmp_path) -> None:
    clip(tmp_path)
    exact = scored("clip_score", {"model": str(tmp_path)})
    half = scored("clip_score", {"model": str(tmp_path), "dtype": "bfloat16"})
    assert 0 < (exact - half).abs().max() < 3
