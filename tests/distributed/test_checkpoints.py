"""A checkpoint says what wrote it; sharded optimizer state comes back bit for bit, and no code can hide in it."""

import pytest
import torch
import transformers
from poison import write_poison
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from diffusion_grpo.distributed.checkpoints import (
    check_separate_disks,
    find_other_optimizer,
    is_readable,
    restore_optimizer,
    save_shards,
    write_mode,
)

# How it was written


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


# Shares of FSDP2


def trained(optimizer_class, seed=0, steps=3, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = optimizer_class(model.parameters(), **settings)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("optimizer_class", "settings"),
    [
        (torch.optim.AdamW, {"lr": 0.1, "betas": (0.8, 0.9)}),
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (transformers.Adafactor, {"lr": 0.1, "relative_step": False}),  # its `step` is a number
    ],
)
def test_sharded_state_comes_back_bit_for_bit(tmp_path, optimizer_class, settings):
    model, optimizer = trained(optimizer_class, **settings)
    save_shards(tmp_path, model, optimizer, is_first=True)
    other, fresh = trained(optimizer_class, seed=1, steps=0, **settings | {"lr": 0.7})
    assert restore_optimizer(tmp_path, other, fresh)
    expected, found = optimizer.state_dict(), fresh.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for place, values in expected["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(found["state"][place][name]), torch.as_tensor(value)), name


def test_sharded_state_is_safetensors_and_json_and_no_index_is_unpickled(tmp_path):
    model, optimizer = trained(torch.optim.AdamW)
    save_shards(tmp_path, model, optimizer, is_first=True)
    assert {path.suffix for path in (tmp_path / "optimizer").iterdir()} == {".safetensors", ".json"}
    for folder in (tmp_path / "optimizer", tmp_path / "dcp"):
        folder.mkdir(exist_ok=True)
        write_poison(folder / ".metadata", tmp_path / "ran")
    assert restore_optimizer(tmp_path, model, optimizer) and not (tmp_path / "ran").exists()


def test_parameters_that_were_never_trained_get_no_state(tmp_path):
    """As an expert that has had no step yet: its first step is its first, as in the unbroken run."""
    model, optimizer = trained(torch.optim.AdamW, steps=0)
    for _ in range(2):
        model[0](torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    save_shards(tmp_path, model, optimizer, is_first=True)
    other, fresh = trained(torch.optim.AdamW, seed=1, steps=0)
    assert restore_optimizer(tmp_path, other, fresh)
    assert set(fresh.state) == {other[0].weight, other[0].bias}
    assert fresh.state[other[0].weight]["step"] == 2


def test_state_of_other_parameters_is_refused(tmp_path):
    model, optimizer = trained(torch.optim.AdamW)
    save_shards(tmp_path, model, optimizer, is_first=True)
    wider = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with pytest.raises(CheckpointException, match="(?i)size mismatch"):
        restore_optimizer(tmp_path, wider, torch.optim.AdamW(wider.parameters()))
    renamed = nn.Sequential(nn.Identity(), nn.Linear(3, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="other parameters"):
        restore_optimizer(tmp_path, renamed, torch.optim.AdamW(renamed.parameters()))
