"""A checkpoint says by how many processes it was written, and with what."""

import pytest

from diffusion_grpo.distributed.checkpoints import (
    check_separate_disks,
    find_other_optimizer,
    is_readable,
    write_mode,
)


def mode(processes=1, sharding="ddp"):
    return {"processes": processes, "sharding": sharding}


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


def test_an_optimizer_with_another_state_is_named(tmp_path):
    for wrote, alike in (("adamw_torch", "adamw_torch_fused"), ("adamw_bnb_8bit", "paged_adamw_8bit")):
        write_mode(tmp_path, mode(), wrote)
        assert find_other_optimizer(tmp_path, wrote) is find_other_optimizer(tmp_path, alike) is None
        assert find_other_optimizer(tmp_path, "sgd") == wrote
