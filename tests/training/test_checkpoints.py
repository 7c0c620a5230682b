"""What a checkpoint holds beside the policy's weights; how it is found in the folder of a run, and what is cleared."""

import contextlib
import shutil

import pytest
import torch
from tiny_runs import are_equal, finished_run, policy_weights, trained_weights

from diffusion_grpo.report.record import ResumeError
from diffusion_grpo.training.checkpoints import (
    DamagedCheckpoint,
    clear_leftovers,
    clear_run,
    find_newest_whole,
    refuse_used_folder,
    replace_folder,
    write_manifest,
)

SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, "num_inference_steps": 3}


def test_an_old_policy_that_a_checkpoint_lacks_starts_from_its_policy(tmp_path, caplog):
    """Not from the average, which is what is published."""
    own = {"loss_type": "nft", "loss_kwargs": {"decay_rate": 0.3, "decay_max": 0.9}}
    trainer = finished_run(tmp_path, ema_decay=0.9, ema_update_interval=1, **SAVED, **own)
    policy, average = policy_weights(trainer), trained_weights(trainer)
    shutil.rmtree(tmp_path / "checkpoint-1" / "old_policy")
    trainer.checkpointer.load(tmp_path / "checkpoint-1")
    with trainer.learner.average.place(is_shown=False), trainer.learner.old_policy.place(is_shown=True):
        old = trained_weights(trainer)
    assert are_equal(old, policy) and not are_equal(old, average)
    assert "contains no old policy: it starts from the policy's weights there" in caplog.text


def test_a_moving_reference_is_read_where_there_is_one(tmp_path, caplog):
    own = {"lora": False, "beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    trainer = finished_run(tmp_path, **SAVED, **own)
    policy, reference = trained_weights(trainer), list(trainer.learner.reference.module.parameters())
    saved = [parameter.clone() for parameter in reference]
    for is_there in (True, False):
        for parameter in reference:
            parameter.data.zero_()
        trainer.checkpointer.load(tmp_path / "checkpoint-1")
        assert all(torch.equal(*pair) for pair in zip(reference, saved)) == is_there
        assert are_equal(trained_weights(trainer), policy)  # which is another one
        assert ("contains no reference: it starts from the model as it was before" in caplog.text) != is_there
        shutil.rmtree(tmp_path / "checkpoint-1" / "reference", ignore_errors=True)


def test_a_folder_is_replaced_and_leaves_nothing_aside(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"] and (tmp_path / "old" / "new").exists()
    (tmp_path / "again").mkdir()
    replace_folder(tmp_path / "again", tmp_path / "first")
    assert (tmp_path / "first").is_dir()


# The folder of a run


def make_checkpoint(folder, step):
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text("{}")
    write_manifest(checkpoint)
    return checkpoint


def test_the_newest_whole_checkpoint_is_found(tmp_path, caplog):
    assert find_newest_whole(tmp_path) is None
    first, second = make_checkpoint(tmp_path, 9), make_checkpoint(tmp_path, 10)  # ordered by number
    (tmp_path / "checkpoint-x").mkdir()
    assert find_newest_whole(tmp_path) == second and not caplog.text
    (second / "trainer_state.json").write_text("[]")
    assert find_newest_whole(tmp_path) == first and "continuing from checkpoint-9" in caplog.text
    (first / "trainer_state.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="there is no complete checkpoint; delete"):
        find_newest_whole(tmp_path)


def test_a_folder_is_used_by_a_checkpoint_or_the_result_of_updates(tmp_path):
    """Not by what `save_state` and `save_model` leave before the first update."""
    refuse_used_folder(tmp_path / "none")
    (tmp_path / "adapter_model.safetensors").touch()
    for updates, is_used in ((0, False), (3, True)):
        (tmp_path / "trainer_state.json").write_text(f'{{"global_step": {updates}}}')
        with pytest.raises(ResumeError, match="overwrite_output_dir") if is_used else contextlib.nullcontext():
            refuse_used_folder(tmp_path)
    make_checkpoint(tmp_path / "other", 3)
    with pytest.raises(ResumeError, match="checkpoint-3.*resume_from_checkpoint.*overwrite_output_dir"):
        refuse_used_folder(tmp_path / "other")


@pytest.mark.parametrize("update", [-1, 0])
def test_a_run_that_starts_in_the_place_of_another_keeps_its_own_samples_from_before(tmp_path, update):
    for name in ("samples/step-000000", "samples/step-000005", "evaluations/step-000005", "checkpoint-5", "mine"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / f"{name}.parquet").touch()
    clear_run(tmp_path, update)
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.parquet")}
    assert left == {"mine.parquet", "checkpoint-5.parquet"} | (
        {"samples/step-000000.parquet"} if update == 0 else set()
    )


def test_what_a_kill_left_half_written_is_removed_and_what_was_put_aside_returns(tmp_path):
    (tmp_path / "tmp-checkpoint-3").mkdir()
    for step in (1, 2):
        (tmp_path / f"tmp-checkpoint-{step}-old").mkdir()
        (tmp_path / f"tmp-checkpoint-{step}-old" / "mark").touch()
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "checkpoint-is-incomplete.txt").touch()
    clear_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]
    assert (tmp_path / "checkpoint-1" / "mark").exists() and not (tmp_path / "checkpoint-2" / "mark").exists()
