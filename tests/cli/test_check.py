"""`diffusion-grpo check` prints how exactly a pipeline replays."""

import json

import torch
from command_line import SIZE, flags, refusal

from diffusion_grpo import cli


def test_check_prints_the_replay_report(model, capsys):
    assert cli.main(["check", model, *flags(**SIZE, pipeline_kwargs='{"max_sequence_length": 8}')]) == 0
    printed = capsys.readouterr().out
    assert "max_ratio_error" in printed and "StableDiffusion3Pipeline" in printed


def test_a_model_that_does_not_fit_is_no_model_that_does_not_train(model, capsys, monkeypatch):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("diffusion_grpo.policy.check.check_pipeline", run_out)
    assert cli.main(["check", model]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # after the bars of loading
    assert line.startswith("error: ") and "do not fit into the accelerator's memory" in line and "--device cpu" in line


def test_a_pipeline_that_needs_an_image_is_refused_before_it_is_loaded(tmp_path, capsys):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    line = refusal(capsys, "check", str(tmp_path))
    assert "WanImageToVideoPipeline cannot be called without 'image'; load it in Python, and call check_" in line
