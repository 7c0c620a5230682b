"""A checkpoint that is not what was written is named, and an older one is taken."""

import json
import shutil

import pytest
import torch
from tiny_runs import are_equal, finished_run, trained_weights, trainer_for
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from diffusion_grpo.report.record import ResumeError
from diffusion_grpo.training.checkpoints import (
    MANIFEST,
    DamagedCheckpoint,
    check,
    find_newest_whole,
    write_manifest,
)

SETTINGS = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "steps_per_generation": 4}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = finished_run(folder / "run", **SETTINGS)
    return folder / "run", trained_weights(trainer)


@pytest.fixture
def run(whole, tmp_path):
    """An interrupted run: its last checkpoint is the second, within a rollout's updates or between two."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoint-3")
    for name in ("summary.json", "trainer_state.json"):
        (folder / name).unlink()
    return folder


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:100])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


DAMAGES = [
    (OPTIMIZER_NAME, flip),
    ("rollout-rank0.safetensors", flip),
    ("adapter_model.safetensors", truncate),
    ("trainer_state.json", empty),
    (SCHEDULER_NAME, remove),
    (MANIFEST, truncate),
]


def test_every_file_is_listed_but_the_list(whole):
    checkpoint = whole[0] / "checkpoint-1"
    listed = json.loads((checkpoint / MANIFEST).read_text())
    files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert files - set(listed) == {MANIFEST} and {name for name, _ in DAMAGES} - {MANIFEST} <= set(listed)
    check(checkpoint)


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_file_is_named(run, tmp_path, caplog, name, damage):
    damaged = run / "checkpoint-2"
    shutil.copytree(run / "checkpoint-1", damaged, dirs_exist_ok=True)  # with a rollout in it
    write_manifest(damaged)
    damage(damaged / name)
    what = "is missing" if damage is remove else "is not what" if name != MANIFEST else "cannot be read"
    with pytest.raises(DamagedCheckpoint, match=f"checkpoint-2 is damaged: {name} {what}"):
        check(damaged)
    assert find_newest_whole(run) == run / "checkpoint-1"
    assert "continuing from checkpoint-1" in caplog.text and name in caplog.text


def test_a_run_goes_on_from_the_whole_checkpoint_before_a_damaged_one(run, whole):
    flip(run / "checkpoint-2" / OPTIMIZER_NAME)
    trainer = trainer_for(run, **SETTINGS)
    with pytest.raises(DamagedCheckpoint, match="optimizer.pt"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert are_equal(trained_weights(trainer), whole[1])
    check(run / "checkpoint-2")  # written again


@pytest.mark.parametrize("name", [OPTIMIZER_NAME, SCHEDULER_NAME])
def test_state_that_is_not_there_is_refused_unless_asked_for(run, whole, caplog, name):
    """Of a checkpoint that was written so, by `save_only_model`."""
    checkpoint = run / "checkpoint-2"
    (checkpoint / name).unlink()
    write_manifest(checkpoint)
    what = "optimizer state" if name == OPTIMIZER_NAME else name
    with pytest.raises(ResumeError, match=f"checkpoint-2 has no {what}.*resume_without_optimizer=True"):
        trainer_for(run, **SETTINGS).train(resume_from_checkpoint=True)
    settings = SETTINGS | {"resume_without_optimizer": True, "lr_scheduler_type": "linear"}
    trainer = trainer_for(run, **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3 and "the optimizer starts afresh" in caplog.text
    assert trainer.lr_scheduler.last_epoch == 3  # it went on from the checkpoint's update
    ours = trained_weights(trainer)
    assert not all(torch.equal(ours[name], value) for name, value in whole[1].items())
