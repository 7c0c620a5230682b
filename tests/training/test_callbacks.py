"""Trackers, grids, warnings and the report beside the updates."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import first_frame_brightness, trained_weights, trainer_for
from transformers.integrations import TrackioCallback, WandbCallback

from diffusion_grpo.distributed.weights import TrainedWeights
from diffusion_grpo.media.files import write_sound, write_video
from diffusion_grpo.training.callbacks import SyncRefModelCallback, draw_grid, log_files, log_image

VIDEO = {"name": "wan", "rewards": first_frame_brightness, "num_inference_steps": 3, "fps": 8.0}


def test_validation_prompts_are_sampled_and_never_scored(tmp_path):
    scored = []

    def counted(prompts, videos, **columns):
        scored.extend(prompts)
        return first_frame_brightness(videos)

    settings = VIDEO | {"rewards": counted, "max_steps": 3, "validation_steps": 2, "num_inference_steps": 3}
    prompts = ["a held-out street", "another one"]
    trainer = trainer_for(tmp_path / "seen", **settings, validation_prompts=prompts, report_to="tensorboard")
    trainer.train()
    assert not set(prompts) & set(scored)
    folder = tmp_path / "seen" / "validation"
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000", "step-000002"]
    files = sorted(path.name for path in (folder / "step-000002").iterdir())
    assert files == ["0000.mp4", "0000.png", "0001.mp4", "0001.png"]
    steps = [np.asarray(Image.open(folder / f"step-{step:06d}" / "0000.png")) for step in (0, 2)]
    assert not np.array_equal(*steps)  # the policy has moved
    assert (tmp_path / "seen" / "validation.png").is_file()
    assert {"validation", "validation/frames"} <= set(logged(tmp_path / "seen", "images"))
    unseen = trainer_for(tmp_path / "unseen", **settings)
    unseen.train()  # looking changes nothing
    assert all((value == trained_weights(unseen)[name]).all() for name, value in trained_weights(trainer).items())


def logged(run, kind):
    """The names under which tensorboard has images or sounds of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = (run / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    return events.Tags()[kind]


class Tracker:
    """A stand-in for the modules `wandb` and `trackio`: both take the path of a file in these classes."""

    def __init__(self):
        self.logged = []

    def log(self, values):
        self.logged.append(values)

    class Video(str): ...

    class Audio(str): ...

    class Image(SimpleNamespace):
        def __init__(self, image):
            super().__init__(image=image)


@pytest.mark.parametrize(("callback", "attribute"), [(WandbCallback, "_wandb"), (TrackioCallback, "_trackio")])
def test_trackers_get_videos_and_sounds_under_names_of_their_own(tmp_path, callback, attribute):
    video = write_video([Image.new("RGB", (16, 16))] * 3, tmp_path / "0000.mp4", 8)
    sound = write_sound(np.zeros(100), tmp_path / "0001.wav", 8000)
    one = callback.__new__(callback)
    setattr(one, attribute, tracker := Tracker())
    log_files([one], "samples", [video, sound], 7)
    log_files([one], "samples", [], 8)
    [values] = tracker.logged
    assert values == {"samples/0000": str(video), "samples/0001": str(sound), "train/global_step": 7}
    assert isinstance(values["samples/0000"], Tracker.Video) and isinstance(values["samples/0001"], Tracker.Audio)
    log_image([one], "samples", Image.new("RGB", (2, 2)), 7)
    assert tracker.logged[-1]["samples"].image.size == (2, 2)


def test_a_grid_has_a_row_per_evaluation_and_scales_images_down(tmp_path):
    Image.new("RGB", (600, 300), "red").save(tmp_path / "a.png")
    small = Image.new("RGB", (20, 20), "blue")
    grid = draw_grid({"step 0": [tmp_path / "a.png", small], "step 10": [small]}, cell=100)
    colors = {color for _, color in grid.getcolors(maxcolors=100_000)}
    assert (255, 0, 0) in colors and (0, 0, 255) in colors
    red = sum(count for count, color in grid.getcolors(maxcolors=100_000) if color == (255, 0, 0))
    blue = sum(count for count, color in grid.getcolors(maxcolors=100_000) if color == (0, 0, 255))
    assert red == 100 * 50 and blue == 2 * 20 * 20


class Reference(TrainedWeights):
    """Keeps how often its copies were renewed."""

    refreshed = 0

    def refresh(self):
        self.refreshed += 1


def test_the_reference_moves_towards_the_policy_every_n_updates():
    policy, base = torch.nn.Parameter(torch.tensor([1.0, 3.0])), torch.nn.Parameter(torch.tensor([0.0, 1.0]))
    reference = Reference([base])
    callback = SyncRefModelCallback(TrainedWeights([policy]), lambda: reference, alpha=0.25, interval=2)
    callback.on_step_end(None, SimpleNamespace(global_step=1), None)
    assert base.tolist() == [0.0, 1.0] and reference.refreshed == 0
    callback.on_step_end(None, SimpleNamespace(global_step=2), None)
    assert base.tolist() == [0.25, 1.5] and reference.refreshed == 1
    assert policy.tolist() == [1.0, 3.0]
