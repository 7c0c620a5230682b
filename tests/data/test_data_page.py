"""The examples of docs/data.md run as they stand, with tiny pipelines of the same classes for the models."""

import re
from pathlib import Path

import pytest
import tiny_pipelines
from PIL import Image
from tiny_runs import SETTINGS, logged

import diffusion_grpo
from diffusion_grpo import DiffusionGRPOConfig

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
EXAMPLES = dict(re.findall(r"### ([^\n]+)\n+```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))
PIPELINES = {
    "Editing": ("flux_kontext", {"pipeline_kwargs": {"max_area": 256, "_auto_resize": False}}),
    "Inpainting": ("sd15_inpaint_9", {"height": 16, "width": 16}),
}
TINY = {**SETTINGS, "num_generations": 2, "max_steps": 1}


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title, tmp_path, monkeypatch):
    name, sizes = PIPELINES[title]
    (tmp_path / "photos").mkdir()
    for file in ("street", "field", "mask"):
        Image.new("RGB", (16, 16), "white" if file == "mask" else "green").save(tmp_path / "photos" / f"{file}.png")
    monkeypatch.chdir(tmp_path)

    def config(folder, **settings):
        steps = {"num_inference_steps": 10} if "trained_steps" in settings else {}
        loaded = {"model_init_kwargs": None}  # the stand-in is in memory
        return DiffusionGRPOConfig(folder, **{**settings, **TINY, **steps, **sizes, **loaded})

    real = diffusion_grpo.DiffusionGRPOTrainer
    monkeypatch.setattr(diffusion_grpo, "DiffusionGRPOConfig", config)
    monkeypatch.setattr(
        diffusion_grpo, "DiffusionGRPOTrainer", lambda model, **rest: real(tiny_pipelines.build(name)[0], **rest)
    )
    exec(compile(EXAMPLES[title], title, "exec"), names := {})
    assert logged(names["trainer"], "ratio/max_error") == [0.0]
