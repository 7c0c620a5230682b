"""The rewards `aesthetic` and `nsfw_filter`."""

import json

import pytest
import torch
import transformers as tf
from formulas import linear, scored, tensor64, torchvision_square, unit
from tiny_scorers import IMAGES, SIDE, chain, clip


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
def test_nsfw_filter_as_a_reward_and_as_a_mask(tmp_path) -> None:
    torch.manual_seed(5)
    labels = {0: "drawings", 1: "normal", 2: "porn"}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    config = tf.ViTConfig(**sizes, intermediate_size=24, id2label=labels)
    model = tf.ViTForImageClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=0.3)  # no chance is close to 0 or 1
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["label2id"] = {label: str(number) for number, label in labels.items()}  # as in many published models
    (tmp_path / "config.json").write_text(json.dumps(written))
    tf.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    images = [image.resize((32, 32)) for image in IMAGES]
    pixels = torch.stack([2 * tensor64(image) - 1 for image in images])
    chances = torch.softmax(model.double()(pixels).logits, -1)
    options = {"model": str(tmp_path), "unsafe_labels": ["porn", "drawings"]}
    found = scored("nsfw_filter", options, images)
    torch.testing.assert_close(found, chances[:, 1], rtol=0, atol=1e-5)
    pass_mark = chances[:, 1].sort().values[1:3].mean().item()  # far from each, since scores are rounded to float32
    mask = scored("nsfw_filter", {**options, "threshold": pass_mark}, images)
    assert mask.tolist() == [float(chance >= pass_mark) for chance in chances[:, 1]] and 0 < mask.sum() < 4
    with pytest.raises(RuntimeError, match=r"has the classes drawings, normal, porn; unsafe_labels is \['nsfw'\]"):
        scored("nsfw_filter", {"model": str(tmp_path)}, images)
