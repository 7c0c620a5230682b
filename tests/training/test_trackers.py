"""Trackers get images, videos and sounds of a run: tensorboard by its package, the others by stand-ins."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import tiny_pipelines
from peft import LoraConfig
from PIL import Image
from tiny_runs import LORA, finished_run, first_frame_brightness, trainer_for
from transformers import TrainerState, TrainingArguments
from transformers.integrations import (
    ClearMLCallback,
    CometCallback,
    TensorBoardCallback,
    TrackioCallback,
    WandbCallback,
)
from transformers.trainer_callback import PrinterCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.media.files import write_sound, write_video
from diffusion_grpo.training import trackers
from diffusion_grpo.training.trackers import log_files, log_image, patch_trackers
from diffusion_grpo.weights import lora as adapters

RUN = {"name": "wan", "rewards": first_frame_brightness, "num_inference_steps": 3, "fps": 8.0, "max_steps": 1}
RUN |= {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}


def test_trackers_that_are_missing_are_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "comet_ml", ("no_such_module",))
    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", ("no_such_module", "json"))  # either will do
    trackers.check_trackers(["tensorboard"], logs=True)
    config = DiffusionGRPOConfig(str(tmp_path), use_cpu=True, report_to="comet_ml")
    with pytest.raises(ImportError, match="pip install comet-ml"):
        DiffusionGRPOTrainer("no/such-model", first_frame_brightness, config)


def test_wandb_without_a_login_is_refused(monkeypatch):
    wandb = MagicMock(errors=SimpleNamespace(UsageError=OSError))
    wandb.login.side_effect = OSError("No API key configured.")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(trackers.TRACKERS, "wandb", ("json",))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(ValueError, match="WANDB_API_KEY"):
        trackers.check_trackers(["wandb"], logs=True)
    trackers.check_trackers(["wandb"], logs=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    trackers.check_trackers(["wandb"], logs=True)


def test_tensorboard_has_curves_and_frames(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer_for(tmp_path / "run", **RUN, report_to="tensorboard").train()
    [folder] = (tmp_path / "run" / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert {"samples", "samples/frames"} <= set(events.Tags()["images"])
    assert [event.step for event in events.Images("samples/frames")] == [0, 1]
    assert [event.step for event in events.Scalars("eval/reward")] == [0, 1]


def test_trackers_of_the_users_own_stay(tmp_path):
    pytest.importorskip("tensorboard")

    class Own(TensorBoardCallback):
        pass

    writer, shown = MagicMock(), []

    class Printer(PrinterCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            shown.append(logs)

    own = Own(writer)
    trainer = finished_run(tmp_path, callbacks=[own, Printer()], report_to="tensorboard", max_steps=1)
    assert any(call.args[0] == "train/reward" for call in writer.add_scalar.call_args_list)
    assert own in trainer.callback_handler.callbacks and shown


def set_up(callback, model, *rest):
    """Set up a callback of transformers as training does, once the trackers have been patched."""
    patch_trackers(SimpleNamespace(callbacks=[callback]))
    state = TrainerState(is_world_process_zero=True)
    callback.setup(TrainingArguments("unused", use_cpu=True, report_to="none"), state, model, *rest)


def test_comet_and_clearml_get_the_config_of_a_diffusers_network(monkeypatch):
    network = tiny_pipelines.build("sd3")[0].transformer
    model = adapters.wrap_lora(network, LoraConfig(**LORA), "default")
    monkeypatch.setitem(sys.modules, "comet_ml", comet := MagicMock())
    experiment = comet.start.return_value = MagicMock()
    parameters = "__internal_api__log_parameters__"
    setattr(experiment, parameters, MagicMock())
    experiment.__internal_api__set_model_graph__ = MagicMock()
    callback = CometCallback.__new__(CometCallback)
    callback._initialized, callback._log_assets, callback._experiment = False, False, None
    set_up(callback, model)
    logged = getattr(experiment, parameters).call_args.args[0]
    assert logged["config"] == dict(network.config) and len(logged["config"]) > 5
    callback = ClearMLCallback.__new__(ClearMLCallback)
    callback._initialized, callback._clearml_task, callback._clearml = False, None, (clearml := MagicMock())
    monkeypatch.setattr(ClearMLCallback, "_copy_training_args_as_hparams", lambda *args: None)
    set_up(callback, model, None)
    task = clearml.Task.current_task.return_value
    assert task.set_configuration_object.call_args.kwargs["config_dict"] == dict(network.config)
    assert not hasattr(network.config, "to_dict")  # as it was


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
