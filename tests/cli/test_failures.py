"""Errors that stop a run: one line, after the traceback of a reward's own code."""

import pytest
import torch
from command_line import SIZE

from diffusion_grpo import cli
from diffusion_grpo.cli.failures import is_explained, print_failure
from diffusion_grpo.data.columns import RowError
from diffusion_grpo.distributed.failure import RankError
from diffusion_grpo.rewards import RewardError

REWARD = """
def broken(images, **columns):
    return [1 / len(columns["trainer_state"].log_history) for _ in images]
"""


def test_a_reward_that_fails_shows_its_own_code_and_one_line(config_file, model, tmp_path, capsys, monkeypatch):
    (tmp_path / "broken_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"model": model, "reward_funcs": ["broken_reward.broken"], "max_steps": 1, "disable_tqdm": True} | SIZE
    assert cli.main(["train", config_file(**settings)]) == 1
    lines = capsys.readouterr().err.splitlines()
    start = lines.index("Traceback (most recent call last):")
    assert 'broken_reward.py", line 3, in broken' in lines[start + 1]
    assert lines[-2] == "ZeroDivisionError: division by zero"
    assert lines[-1].startswith("error: The reward 'broken' raised ZeroDivisionError: division by zero (prompt ")
    assert not any("diffusion_grpo" in line for line in lines[start:-1])


def test_the_traceback_of_the_library_is_there_where_it_is_asked_for(monkeypatch):
    def fail(arguments) -> int:
        raise RewardError("the reward failed")

    monkeypatch.setattr("diffusion_grpo.cli.report.run", fail)
    assert cli.main(["report", "run"]) == 1
    with pytest.raises(RewardError, match="the reward failed"):
        cli.main(["--traceback", "report", "run"])


def test_other_errors_keep_their_traceback(monkeypatch):
    def fail(arguments) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr("diffusion_grpo.cli.report.run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["report", "run"])
    assert not is_explained(RuntimeError("a bug"))


def test_a_row_that_cannot_be_read_is_one_line(monkeypatch, capsys):
    def fail(arguments) -> int:
        try:
            raise OSError("cannot identify image file")
        except OSError as error:
            raise RowError("Row 3 (the first is row 0), column 'image': cannot identify image file") from error

    monkeypatch.setattr("diffusion_grpo.cli.train.run", fail)
    assert cli.main(["train", "x.yaml"]) == 1
    assert capsys.readouterr().err == "error: Row 3 (the first is row 0), column 'image': cannot identify image file\n"


def test_a_message_is_one_line(capsys):
    error = RankError("Process 1 of 2 failed with ValueError: first\nsecond")
    assert is_explained(error)
    print_failure(error)
    assert capsys.readouterr().err == "error: Process 1 of 2 failed with ValueError: first second\n"


def test_memory_that_runs_out_is_one_line(config_file, model, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("diffusion_grpo.training.learner.place_pipeline", fail)
    settings = {"model": model, "reward_funcs": ["brightness"], "max_steps": 1, "disable_tqdm": True} | SIZE
    assert cli.main(["train", config_file(**settings)]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("error: Out of memory while the model was loaded: CUDA out of memory.")
