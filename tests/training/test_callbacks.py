"""Trackers, grids, warnings and the report beside the updates."""

from types import SimpleNamespace

import numpy as np
from PIL import Image
from tiny_runs import are_equal, finished_run, first_frame_brightness, list_tags, trained_weights, trainer_for
from transformers import TrainerCallback, TrainerState

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.report.run_folder import read_log_history
from diffusion_grpo.training.callbacks import SampleGridCallback

VIDEO = {"name": "wan", "rewards": first_frame_brightness, "num_inference_steps": 3, "fps": 8.0}


def test_the_cache_is_emptied_as_often_as_asked(tmp_path, monkeypatch):
    emptied = []
    trainer = trainer_for(tmp_path, max_steps=5, torch_empty_cache_steps=2)
    monkeypatch.setattr("diffusion_grpo.trainer.clear_device_cache", lambda: emptied.append(trainer.state.global_step))
    trainer.train()
    assert emptied == [1, 3]  # at the end of updates 2 and 4


def test_validation_prompts_are_sampled_and_never_scored(tmp_path):
    scored = []

    def counted(prompts, videos, **columns):
        scored.extend(prompts)
        return first_frame_brightness(videos)

    settings = VIDEO | {"rewards": counted, "max_steps": 3, "validation_steps": 2, "num_inference_steps": 3}
    prompts = ["a held-out street", "another one"]
    trainer = finished_run(tmp_path / "seen", **settings, validation_prompts=prompts, report_to="tensorboard")
    assert not set(prompts) & set(scored)
    folder = tmp_path / "seen" / "validation"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000", "step-000002"]
    files = sorted(path.name for path in (folder / "step-000002").iterdir())
    assert files == ["0000.mp4", "0000.png", "0001.mp4", "0001.png"]
    steps = [np.asarray(Image.open(folder / f"step-{step:06d}" / "0000.png")) for step in (0, 2)]
    assert not np.array_equal(*steps)  # the policy has moved
    assert (tmp_path / "seen" / "validation.png").is_file()
    assert {"validation", "validation/frames"} <= set(list_tags(tmp_path / "seen", "images"))
    unseen = trainer_for(tmp_path / "unseen", **settings)
    unseen.train()  # looking changes nothing
    assert are_equal(trained_weights(trainer), trained_weights(unseen))


def show_evaluation(folder, step, handler):
    """Call the callback after an evaluation that left two samples, each with its input."""
    for name, color in (("inputs", "blue"), (f"step-{step:06d}", (step % 256, 0, 0))):
        (folder / "evaluations" / name).mkdir(parents=True, exist_ok=True)
        for number in range(2):
            Image.new("RGB", (64, 64), color).save(folder / "evaluations" / name / f"{number:04d}.png")
    state = TrainerState(log_history=[{"eval_reward": 0.5, "step": step}], global_step=step)
    state.is_world_process_zero = True
    SampleGridCallback(handler).on_evaluate(DiffusionGRPOConfig(str(folder), use_cpu=True), state, None)
    assert read_log_history(folder) == state.log_history  # by which an active run is reported


def test_a_grid_stays_small_and_trackers_get_its_newest_row(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(
        "diffusion_grpo.training.callbacks.log_image", lambda _, name, image, step: sent.append((name, image, step))
    )
    for step in range(0, 200, 10):
        show_evaluation(tmp_path, step, SimpleNamespace(callbacks=[]))
    with Image.open(tmp_path / "grid.png") as grid:
        cells = [grid.getpixel((80, 68 * row + 32)) for row in range(grid.height // 68)]
    assert cells[0] == (0, 0, 255)  # the inputs
    assert cells[1:] == [(step, 0, 0) for step in (0, 30, 50, 80, 110, 140, 160, 190)]
    assert [step for _, _, step in sent] == list(range(0, 200, 10))
    name, image, step = sent[-1]
    assert name == "samples" and image.height == 2 * 68
    assert [image.getpixel((80, y)) for y in (32, 100)] == [(0, 0, 255), (step, 0, 0)]
    # a resumed run draws its own evaluations, not those that were left after its checkpoint
    show_evaluation(tmp_path, 70, SimpleNamespace(callbacks=[]))
    with Image.open(tmp_path / "grid.png") as grid:
        assert [grid.getpixel((80, 68 * row + 32))[0] for row in range(1, grid.height // 68)] == list(range(0, 80, 10))


SHORT = {"num_inference_steps": 2, "gradient_accumulation_steps": 1}


class Stopping(TrainerCallback):
    """Stops a run, as `EarlyStoppingCallback` does, in the evaluation after its third update."""

    def on_evaluate(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 3


def test_the_last_updates_are_logged(tmp_path):
    def steps(name, **settings):
        trainer = finished_run(tmp_path / name, **SHORT, **settings)
        return [entry["step"] for entry in trainer.state.log_history if "ratio/mean" in entry]

    assert steps("at the end", max_steps=3, logging_steps=2) == [2, 3]
    assert steps("never", max_steps=2, logging_strategy="no") == []
    stopped = {"max_steps": 6, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    assert steps("stopped", **stopped, callbacks=[Stopping()]) == [2, 3]
