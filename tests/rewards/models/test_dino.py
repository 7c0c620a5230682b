"""DINO's similarity against its formula in float64."""

import pytest
import torch
import transformers as tf
from formulas import scored, torchvision_square, unit
from plain_images import save_turned
from tiny_scorers import IMAGES

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
