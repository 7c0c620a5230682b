"""A checkpoint says by how many processes it was written, and with what."""

import pytest

from diffusion_grpo.distributed.checkpoint_mode import (
    describe_mode,
    find_missing_state,
    find_other_optimizer,
    is_readable,
    read_mode,
    write_mode,
)


def mode(processes=1, zero_stage=0, fsdp=0):
    return {"processes": processes, "zero_stage": zero_stage, "fsdp": fsdp}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (mode(), "by one process with whole weights"),
        (mode(2, zero_stage=3), "by 2 processes with ZeRO-3"),
        (mode(4, fsdp=1), "by 4 processes with FSDP2"),
        ({"processes": 2, "zero_stage": 0}, "by 2 processes with whole weights"),  # of earlier versions
    ],
)
def test_a_mode_in_words(tmp_path, given, words):
    assert read_mode(tmp_path) == "in another mode"
    write_mode(tmp_path, given, "adamw_torch")
    assert read_mode(tmp_path) == describe_mode(given) == words


def test_an_engines_state_is_read_by_as_many_processes_in_its_own_mode(tmp_path):
    write_mode(tmp_path, mode(2, zero_stage=2), "adamw_torch")
    assert is_readable(tmp_path, mode()) and not is_readable(tmp_path, mode(2, zero_stage=2))
    (tmp_path / "global_step3").mkdir()
    assert is_readable(tmp_path, mode(2, zero_stage=2))
    for other in (mode(), mode(2), mode(2, zero_stage=3), mode(4, zero_stage=2)):
        assert not is_readable(tmp_path, other)


def test_what_a_checkpoint_lacks_is_named(tmp_path):
    assert find_missing_state(tmp_path, ()) == "optimizer state"
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").touch()
    assert find_missing_state(tmp_path, ()) == "optimizer state but one whose index would have to be unpickled"
    (tmp_path / "optimizer.pt").touch()
    assert find_missing_state(tmp_path, ()) is None
    assert find_missing_state(tmp_path, ("scheduler.pt",)) == "scheduler.pt"


def test_an_optimizer_with_another_state_is_named(tmp_path):
    assert find_other_optimizer(tmp_path, "sgd") is None  # written by an earlier version
    write_mode(tmp_path, mode(), "adamw_torch")
    assert find_other_optimizer(tmp_path, "adamw_torch_fused") is None
    assert find_other_optimizer(tmp_path, "adamw_bnb_8bit") == "adamw_torch"
    write_mode(tmp_path, mode(), "adamw_bnb_8bit")
    for alike in ("adamw_8bit", "paged_adamw_8bit"):
        assert find_other_optimizer(tmp_path, alike) is None
