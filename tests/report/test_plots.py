"""Plots are drawn from what they are given, and the same bytes come out each time."""

import base64

import pytest
from PIL import Image

from diffusion_grpo.report import plots

pytestmark = pytest.mark.plots
CURVE = plots.Curve("text", [1, 2, 3], [0.1, 0.2, 0.4], [0, 3], [0.1, 0.5], [0.02, 0.03], {"guidance 2": 0.7})


def read_svg(uri: str) -> str:
    kind, _, content = uri.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return base64.b64decode(content).decode()


def test_a_curve_shows_rollouts_evaluations_and_baselines():
    page = read_svg(plots.draw_curve(CURVE))
    for text in ("text during the run", "guidance 2", "rollouts in training", "held-out prompts ± standard error"):
        assert text in page, text
    assert plots.draw_curve(CURVE) == plots.draw_curve(CURVE)


def test_an_empty_curve_is_drawn_too():
    assert "<svg" in read_svg(plots.draw_curve(plots.Curve("text", [], [], [], [], [], {})))


def test_a_curve_is_saved_as_an_image(tmp_path):
    plots.save_curve(CURVE, tmp_path / "curve.png")
    assert Image.open(tmp_path / "curve.png").size == (960, 408)
