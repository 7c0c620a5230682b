"""A checkpoint says by how many processes it was written, and with what."""

import pytest

from diffusion_grpo.distributed.checkpoints import (
    check_separate_disks,
    describe_mode,
    find_missing_state,
    find_other_optimizer,
    is_readable,
    read_mode,
    write_mode,
)


def mode(processes=1, sharding="ddp"):
    return {"processes": processes, "sharding": sharding}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (mode(), "by one process with whole weights"),
        (mode(2, "zero3"), "by 2 processes with ZeRO-3"),
        (mode(4, "fsdp2"), "by 4 processes with FSDP2"),
    ],
)
def test_a_mode_in_words(tmp_path, given, words):
    write_mode(tmp_path, given, "adamw_torch")
    assert read_mode(tmp_path) == describe_mode(given) == words


def test_an_engines_state_is_read_by_as_many_processes_in_its_own_mode(tmp_path):
    write_mode(tmp_path, mode(2, "zero2"), "adamw_torch")
    assert is_readable(tmp_path, mode()) and not is_readable(tmp_path, mode(2, "zero2"))
    (tmp_path / "global_step3").mkdir()
    assert is_readable(tmp_path, mode(2, "zero2"))
    for other in (mode(), mode(2), mode(2, "zero3"), mode(4, "zero2")):
        assert not is_readable(tmp_path, other)


@pytest.mark.parametrize("sharded", [mode(2, "zero1"), mode(2, "fsdp2")])
def test_shares_of_a_checkpoint_are_not_written_to_separate_disks(sharded):
    check_separate_disks(mode(2), "run")
    with pytest.raises(ValueError, match="output_dir.*save_only_model"):
        check_separate_disks(sharded, "run")


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    assert find_missing_state(tmp_path) == "optimizer state"
    (tmp_path / "optimizer.pt").touch()
    assert find_missing_state(tmp_path) == "scheduler.pt"
    (tmp_path / "scheduler.pt").touch()
    assert find_missing_state(tmp_path) is None


def test_an_optimizer_with_another_state_is_named(tmp_path):
    for wrote, alike in (("adamw_torch", "adamw_torch_fused"), ("adamw_bnb_8bit", "paged_adamw_8bit")):
        write_mode(tmp_path, mode(), wrote)
        assert find_other_optimizer(tmp_path, wrote) is find_other_optimizer(tmp_path, alike) is None
        assert find_other_optimizer(tmp_path, "sgd") == wrote
