"""Which backend answers for a run."""

import pytest
import torch

from diffusion_grpo.distributed.backend import DistributedBackend
from diffusion_grpo.distributed.choose import make_backend
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.distributed.fsdp import FSDP2Backend

NOTHING = {"deepspeed_plugin": None, "ds3_gather_for_generation": True, "fsdp_gather_for_generation": False}
VERSION_2 = {"fsdp_version": 2}


def test_without_an_engine_it_is_the_plain_one():
    for processes in (1, 2):
        backend = make_backend(None, ContextGroups(), processes=processes, fsdp=None, fsdp_plugin_args=None, **NOTHING)
        assert type(backend) is DistributedBackend


def test_fsdp_is_chosen_by_its_setting_and_checked():
    settings = NOTHING | {"processes": 2, "fsdp": True}
    backend = make_backend(torch.bfloat16, ContextGroups(), fsdp_plugin_args=VERSION_2, **settings)
    assert type(backend) is FSDP2Backend
    with pytest.raises(ValueError):
        make_backend(None, ContextGroups(), fsdp_plugin_args={"fsdp_version": 1}, **settings)
