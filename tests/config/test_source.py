"""What is read from source files is what importing them gives."""

import dataclasses
import sys

import pytest

from diffusion_grpo import DiffusionGRPOConfig, rewards
from diffusion_grpo.algorithms import ALGORITHMS, advantages
from diffusion_grpo.config import early_checks, source
from diffusion_grpo.data import prompts as data
from diffusion_grpo.policy import processes
from diffusion_grpo.policy.step_weights import STEP_WEIGHTS


def test_settings_are_those_of_the_config():
    real = {field.name: field for field in dataclasses.fields(DiffusionGRPOConfig) if field.init}
    read = source.config_fields()
    assert read.keys() == real.keys()
    assert all(read[name].default in (None, field.default) for name, field in real.items())
    assert read["num_generations"].type == "int" and read["learning_rate"].type == "float | None"
    literal = [name for name, setting in read.items() if setting.default is not None]
    assert len(literal) > 80


def test_names_are_those_of_the_tables(monkeypatch):
    assert source.loss_names() == list(ALGORITHMS)
    silent = ["cps", "precise", "ancestral"]
    assert [name for name, process in processes.PROCESSES.items() if process.is_silent_at_end] == silent
    assert source.process_names() == list(processes.PROCESSES)
    assert source.silent_last_step() == silent
    monkeypatch.delitem(sys.modules, "diffusion_grpo.policy.processes")  # now they are read from the file
    assert source.process_names() == list(processes.PROCESSES)
    assert source.silent_last_step() == silent
    assert source.log_prob_names() == list(processes.LOG_PROBS)
    assert source.step_weight_names() == list(STEP_WEIGHTS)
    assert source.aggregation_names() == list(advantages.AGGREGATIONS)
    assert source.reward_names() == list(rewards.REWARDS)
    assert early_checks.FILES == tuple(data.READERS)


def test_a_variable_that_is_not_there_is_named(tmp_path):
    (tmp_path / "module.py").write_text("A = {'a': 1}\nB: dict = {**A, 'b': 2}\n")
    assert source.read_names(tmp_path / "module.py", "B") == ["a", "b"]
    with pytest.raises(LookupError, match="module.py assigns nothing to C"):
        source.read_names(tmp_path / "module.py", "C")
