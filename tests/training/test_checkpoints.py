"""What a checkpoint holds beside the policy's weights, and what starts afresh where it lacks that."""

import shutil

import torch
from tiny_runs import are_equal, finished_run, policy_weights, trained_weights

from diffusion_grpo.training.checkpoints import replace_folder

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
