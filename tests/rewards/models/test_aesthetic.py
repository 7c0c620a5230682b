"""LAION's aesthetic score against its formula in float64."""

import pytest
import torch
from formulas import linear, scored, torchvision_square, unit
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
