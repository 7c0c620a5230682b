"""Optimizers with compressed states are refused early where they cannot work."""

import pytest
from transformers.training_args import OptimizerNames

from diffusion_grpo.config import optimizers
from diffusion_grpo.config.optimizers import BITSANDBYTES, TORCHAO, check_optimizer


def test_the_names_are_those_of_transformers():
    known = {name.value for name in OptimizerNames}
    assert known >= {*BITSANDBYTES, *TORCHAO}
    marks = ("bnb", "paged", "lion", "ademamix", "8bit", "4bit")
    others = {name for name in known if "galore" not in name and any(mark in name for mark in marks)}
    assert others - {"adamw_8bit"} <= {*BITSANDBYTES, *TORCHAO}


@pytest.mark.parametrize(("name", "package"), [("adamw_torch_4bit", "torchao"), ("lion_8bit", "bitsandbytes")])
def test_a_missing_package_is_named(monkeypatch, name, package):
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"optim='{name}' needs the package {package}: pip install {package}"):
        check_optimizer(name, has_gpu=True)
    check_optimizer("adamw_torch", has_gpu=False)


def test_a_paged_one_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="'paged_adamw_8bit' keeps.*no GPU; use 'adamw_8bit' or 'adamw_torch_8bit'"):
        check_optimizer("paged_adamw_8bit", has_gpu=False)
    check_optimizer("paged_adamw_8bit", has_gpu=True)
    check_optimizer("adamw_8bit", has_gpu=False)
