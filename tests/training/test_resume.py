"""A run that was killed and resumed ends with the weights of one that was not, bit for bit."""

import contextlib
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import ranks_server
import resumable_run
import torch
from safetensors.torch import load_file
from tiny_runs import (
    are_equal,
    assert_resumes,
    brightness,
    finished_run,
    first_frame_brightness,
    logged,
    policy_weights,
    trained_weights,
    trainer_for,
)
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import CheckpointManager

from diffusion_grpo.report.record import ResumeError
from diffusion_grpo.report.run_folder import read_log_history
from diffusion_grpo.rewards import RewardError

# 4 prompts, 2 a rollout: two rollouts an epoch, so that six updates cross epochs
PLAIN = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 3}
# one rollout is used for four updates: most checkpoints lie within one
WITHIN = PLAIN | {"steps_per_generation": 4, "num_iterations": 2, "ema_decay": 0.9, "ema_update_interval": 2}
# the means of the policy that rolled out are compared, from replays or as recorded, and the steps are weighted
DPPO = WITHIN | {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-9}, "step_weight": "velocity"}
GUARD = WITHIN | {
    "loss_type": "grpo_guard",
    "old_log_prob": "rollout",
    "num_trained_steps": 2,
    "step_selection": "sample",
}
FDFO = WITHIN | {"loss_type": "fdfo", "trained_steps": [0, 1], "noisy_steps": "trained", "samples_per_latent": "group"}
FULL = PLAIN | {"lora": False, "beta": 0.05, "sync_ref_model": True, "ref_model_sync_steps": 2, "best_of_n": 2}
FULL |= {"target_change": 0.1, "learning_rate": 1.0}


def run(folder: Path, settings: dict, kill_at: str | None = None, kill_after: int = 0) -> int:
    """Exit status of one process that trains."""
    (code,) = ranks_server.run(
        folder.with_name(folder.name + "-output"), 1, resumable_run.run, folder, settings, kill_at, kill_after
    ).codes
    return code


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in the run's folder, the average's too, by file and name."""
    found = {}
    for path in [
        *folder.glob("*.safetensors"),
        *folder.glob("policy/*.safetensors"),
        *folder.glob("transformer/*.safetensors"),
    ]:
        found |= {f"{path.relative_to(folder)}:{name}": tensor for name, tensor in load_file(path).items()}
    return found


def assert_equal_runs(one: Path, other: Path) -> None:
    ours = weights(one)
    assert are_equal(ours, weights(other)) and len(ours) > 4


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    assert run(folder, PLAIN) == 0
    return folder


# three moments, in different epochs: in the third rollout, in the fourth update, while the third checkpoint is written
@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        pytest.param("rollout", 5, marks=pytest.mark.slow),
        pytest.param("update", 20, marks=pytest.mark.slow),
        ("checkpoint", 2),
    ],
)
def test_sigkill_and_resume(tmp_path, unbroken, moment, calls):
    assert run(tmp_path, PLAIN, moment, calls) == -signal.SIGKILL
    half = [path.name for path in tmp_path.glob("tmp-*")]
    assert bool(half) == (moment == "checkpoint")
    whole = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert 1 <= len(whole) < 6 and all((tmp_path / name / "trainer_state.json").is_file() for name in whole)
    assert run(tmp_path, PLAIN) == 0
    assert_equal_runs(tmp_path, unbroken)
    assert not list(tmp_path.glob("tmp-*"))


EXPERTS = {"name": "wan_experts", "lora": False, "rewards": first_frame_brightness, "num_inference_steps": 6}
EXPERTS |= {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "ema_decay": 0.9, "ema_update_interval": 2}


def test_two_experts_trained_in_full_resume_exactly(tmp_path):
    """From a checkpoint of another name, such as `hub_strategy="checkpoint"` publishes."""
    whole = finished_run(tmp_path / "whole", **EXPERTS)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "downloaded" / "last-checkpoint")
    again = trainer_for(tmp_path / "again", **EXPERTS)
    again.train(resume_from_checkpoint=str(tmp_path / "downloaded" / "last-checkpoint"))
    expected = policy_weights(whole)
    assert {name.split(".")[0] for name in expected} == {"transformer", "transformer_2"}
    assert are_equal(policy_weights(again), expected)
    pairs = zip(whole.learner.average.shares, again.learner.average.shares, strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "settings",
    [
        WITHIN,
        pytest.param(FULL, marks=pytest.mark.slow),
        DPPO,
        pytest.param(GUARD, marks=pytest.mark.slow),
        FDFO,
    ],
    ids=[
        "within a rollout, EMA",
        "full, reference, best of n",
        "dppo, weighted steps",
        "guard, recorded means",
        "fdfo",
    ],
)
def test_resume_from_every_checkpoint(tmp_path, settings):
    """In one process: a new trainer for each resume, as a new process would build it."""
    settings = settings | {"save_total_limit": None}
    # within a rollout, and after it where one serves for four updates
    whole, *resumed = assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 1, 4)
    if settings.get("loss_type") in ("dppo", "grpo_guard"):
        kept = load_file(tmp_path / "whole" / "checkpoint-1" / "rollout-rank0.safetensors")
        assert kept["means.0"].dtype == torch.float32 and max(logged(resumed[0], "kl/old")) > 0
        assert ("step_weights.0" in kept) == ("step_weight" in settings)
    for again in resumed:
        assert again.state.global_step == 6
        for key in ("reward", "kl/old", "prediction/change"):
            assert logged(again, key) == logged(whole, key), key
        if whole.learner.average is not None:
            pairs = zip(whole.learner.average.shares, again.learner.average.shares, strict=True)
            assert all(torch.equal(one, other) for one, other in pairs)


def test_only_between_two_rollouts_may_the_guidance_change(tmp_path):
    own = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_for(tmp_path / "whole", **own).train()
    assert (tmp_path / "whole" / "checkpoint-1" / "rollout-rank0.safetensors").is_file()
    changed = own | {"guidance_scale": 9.0, "max_steps": 3}
    for step in (1, 2):
        again = trainer_for(tmp_path / f"from-{step}", **changed)
        refusal = pytest.raises(ValueError, match="guidance_scale is .* there and 9.0 here.; resume with the earlier")
        with refusal if step == 1 else contextlib.nullcontext():
            again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert again.state.global_step == (1 if step == 1 else 3)


def test_resuming_where_rollouts_are_larger_than_micro_batches(tmp_path):
    """The rollout encoded two prompts, the resumed micro-batches ask for one of them at a time."""
    settings = {"rollout_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    settings |= {"save_strategy": "steps", "save_steps": 1, "num_iterations": 2, "max_steps": 3}
    assert_resumes(lambda folder: trainer_for(folder, **settings), tmp_path, 1)


def drawn(images, **columns):
    """A reward that draws from every generator whose state a checkpoint keeps."""
    return [float(torch.rand(())) + random.random() + float(np.random.rand()) for _ in images]


@pytest.fixture(scope="module")
def drawing(tmp_path_factory):
    """Two rollouts an epoch, each drawn by chance and scored by chance, at a rate that falls."""
    settings = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "rewards": drawn, "save_total_limit": None}
    settings |= {"lr_scheduler_type": "linear"}
    folder = tmp_path_factory.mktemp("drawing")
    trainer = finished_run(folder, **settings)
    return folder, settings, trainer


def rolled_out(folder, update):
    """The prompts of an update's samples."""
    return pyarrow.parquet.read_table(folder / "samples" / f"step-{update:06d}.parquet")["prompt"].to_pylist()


@pytest.mark.parametrize("step", [1, 2])
def test_chance_the_rate_and_the_prompts_go_on_where_they_were(tmp_path, drawing, step):
    """Within an epoch and between two: generators neither anew nor shifted, the schedule, the sampler's epoch."""
    folder, settings, whole = drawing
    trainer = trainer_for(tmp_path, **settings)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    for key in ("reward", "learning_rate", "epoch"):
        assert logged(trainer, key)[step:] == logged(whole, key)[step:], key
    assert len(set(logged(whole, "reward"))) == len(set(logged(whole, "learning_rate"))) == 5
    orders = [rolled_out(folder, update) for update in range(5)]
    assert [rolled_out(tmp_path, update) for update in range(step, 5)] == orders[step:]
    assert orders[:2] != orders[2:4]  # of the two epochs
    assert are_equal(trained_weights(trainer), trained_weights(whole))


class Interrupt(TrainerCallback):
    """Ctrl-C in the middle of an update."""

    def __init__(self, at):
        self.at = at

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            raise KeyboardInterrupt


def test_a_run_that_was_interrupted_before_its_first_checkpoint_is_started_again(tmp_path):
    """Also with other settings, without the other run's samples."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    with pytest.raises(KeyboardInterrupt, match="Interrupted after 1 update; there is no checkpoint yet, so start"):
        trainer_for(tmp_path, callbacks=[Interrupt(1)], **settings).train()
    assert (tmp_path / "run.json").is_file() and list(tmp_path.glob("samples/step-*"))
    stale = tmp_path / "samples" / "step-000077.parquet"
    stale.touch()
    again = finished_run(tmp_path, noise_level=0.5, **settings)
    assert again.state.global_step == 2 and not stale.exists() and (tmp_path / "checkpoint-2").is_dir()
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["noise_level"] == 0.5


def test_ctrl_c_says_how_to_go_on(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(KeyboardInterrupt, match="after 1 update; continue from .*checkpoint-1 .*resume_from"):
        trainer_for(tmp_path, callbacks=[Interrupt(1)], **settings).train()
    again = trainer_for(tmp_path, **settings)
    with pytest.raises(ValueError, match="resume_from_checkpoint"):
        again.train()
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2


class Preempt(TrainerCallback):
    """What a cluster sends before it takes a machine back."""

    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


def test_one_script_begins_goes_on_and_ends(tmp_path, monkeypatch):
    """As a job that a cluster starts, preempts and puts back into its queue."""
    monkeypatch.setattr(CheckpointManager, "_sigterm_handler", lambda self, *args: self._enable_checkpoint())

    def start(**changed):
        settings = {"num_inference_steps": 2, "save_strategy": "steps", "save_steps": 50}
        trainer = trainer_for(tmp_path, **settings | {"enable_jit_checkpoint": True} | changed)
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
        return trainer

    assert start(callbacks=[Preempt(1)]).state.global_step == 1
    ended, again = start(), start()
    assert ended.state.global_step == again.state.global_step == 2
    assert logged(again, "reward") == logged(ended, "reward")
    assert are_equal(trained_weights(again), trained_weights(ended))
    assert start(max_steps=3).state.global_step == 3
    assert start(max_steps=-1, num_train_epochs=2).state.global_step == 4  # of two updates


def test_a_run_that_goes_back_leaves_no_later_checkpoint_behind(tmp_path, caplog):
    """The newest checkpoint, the report and the samples are those of the updates that it makes then."""
    settings = {"save_strategy": "steps", "save_steps": 1, "num_inference_steps": 2}
    trainer_for(tmp_path, **settings, max_steps=4).train()
    assert len(read_log_history(tmp_path)) == 5
    kept, before = (tmp_path / "checkpoint-1", tmp_path / "samples" / "step-000001.parquet")
    (tmp_path / "samples" / "step-of-my-own.txt").touch()
    assert kept.is_dir() and before.is_file()
    settings["max_steps"] = 3
    again = trainer_for(tmp_path, **settings, resume_from_checkpoint=str(kept))
    again.train(resume_from_checkpoint=str(kept))
    aside = tmp_path / "abandoned" / "after-1"
    assert "goes back to update 1" in caplog.text
    moved = ["checkpoint-2", "checkpoint-3", "checkpoint-4", "samples", "trainer_state.json"]
    assert sorted(path.name for path in aside.glob("*")) == moved
    assert {path.stem for path in aside.glob("samples/*")} == {"step-000002", "step-000003"}
    assert read_log_history(tmp_path) == again.state.log_history and again.state.global_step == 3
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in (1, 2, 3)]

    trainer_for(tmp_path, **settings, resume_from_checkpoint=True).train(resume_from_checkpoint=str(kept))
    assert (tmp_path / "abandoned" / "after-1-2" / "checkpoint-3").is_dir()
    last = trainer_for(tmp_path, **settings, resume_from_checkpoint=True)
    last.train(resume_from_checkpoint=True)  # from the newest: nothing is moved
    assert len(list((tmp_path / "abandoned").iterdir())) == 2


def test_resuming_may_be_said_to_be_off(tmp_path):
    trainer = trainer_for(tmp_path, max_steps=1, num_inference_steps=2, resume_from_checkpoint="False")
    trainer.train(resume_from_checkpoint=False)
    assert trainer.state.global_step == 1


def test_an_interrupted_trainer_evaluates_without_saving_and_says_where_a_second_training_starts(tmp_path, caplog):
    is_down = []

    def failing(images, **columns):
        if is_down:
            raise RuntimeError("server is down")
        return brightness(images)

    trainer = trainer_for(tmp_path, rewards=failing, callbacks=[Interrupt(1)], num_inference_steps=2)
    with pytest.raises(KeyboardInterrupt, match="no checkpoint yet, so start again"):
        trainer.train()
    is_down.append(True)
    with pytest.raises(RewardError, match="server is down"):
        trainer.evaluate()
    assert not (tmp_path / "checkpoint-1").exists()
    is_down.clear()
    trainer.pop_callback(Interrupt)
    trainer.train()
    assert "starts with them from update 0" in caplog.text


def test_the_folder_of_a_run_is_no_checkpoint(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "num_inference_steps": 2}
    (tmp_path / "whole" / "checkpoint-2").mkdir(parents=True)
    again = trainer_for(tmp_path / "again", **settings)
    with pytest.raises(ResumeError, match="whole is the folder of a run, not a checkpoint; its newest .* is .*-2[.]"):
        again.train(resume_from_checkpoint=str(tmp_path / "whole"))
    with pytest.raises(ValueError, match="there is no folder .*nothing/checkpoint-1"):
        again.train(resume_from_checkpoint=str(tmp_path / "nothing" / "checkpoint-1"))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "num_inference_steps": 2}
    trainer_for(tmp_path / "lora", **settings).train()
    full = trainer_for(tmp_path / "full", lora=False, **settings)
    with pytest.raises(ValueError, match="trains_by is 'LoRA rank 4' there and 'full' here"):
        full.train(resume_from_checkpoint=str(tmp_path / "lora" / "checkpoint-1"))
    shutil.copytree(tmp_path / "lora" / "checkpoint-1", tmp_path / "alone" / "checkpoint-1")
    with pytest.raises(ValueError, match="no folder 'transformer'.*full training"):
        full.train(resume_from_checkpoint=str(tmp_path / "alone" / "checkpoint-1"))


def test_other_prompts_are_accepted_with_a_warning(tmp_path, caplog):
    saved = {"save_strategy": "steps", "save_steps": 2}
    trainer_for(tmp_path, max_steps=2, **saved).train()
    others = ["a cat", "a dog", "the sea", "a new one"]
    for updates, columns, is_told in ((4, {}, False), (6, {"prompt": others}, True)):
        caplog.clear()
        trainer = finished_run(tmp_path, max_steps=updates, columns=columns, resume_from_checkpoint=True, **saved)
        assert trainer.state.global_step == updates
        assert ("training prompts" in caplog.text) == is_told


def test_a_resumed_run_evaluates_and_saves_as_often_as_its_own_settings_say(tmp_path):
    settings = {"num_inference_steps": 2, "save_strategy": "steps"}
    trainer_for(tmp_path, max_steps=1, save_steps=1, **settings).train()
    often = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 3, "resume_from_checkpoint": "true"}
    again = finished_run(tmp_path, max_steps=3, **often, **settings)
    assert [entry["step"] for entry in again.state.log_history if "eval_reward" in entry] == [2, 3]
    assert not (tmp_path / "checkpoint-2").exists() and (tmp_path / "checkpoint-3").is_dir()


def test_another_optimizer_is_refused_or_starts_afresh(tmp_path, caplog):
    settings = {"save_strategy": "steps", "save_steps": 1, "num_inference_steps": 2, "resume_from_checkpoint": "true"}
    trainer_for(tmp_path, **{**settings, "resume_from_checkpoint": None, "max_steps": 1}).train()
    with pytest.raises(ResumeError, match="no state of sgd but that of adamw_torch.*resume_without_optimizer=True"):
        trainer_for(tmp_path, optim="sgd", **settings).train()
    again = finished_run(tmp_path, optim="sgd", resume_without_optimizer=True, **settings)
    assert again.state.global_step == 2 and "has no state of sgd but that of adamw_torch" in caplog.text
