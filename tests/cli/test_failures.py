"""Errors that stop a run: one line, after the traceback of a reward's own code."""

import pytest
import torch
from command_line import SIZE

from diffusion_grpo import cli
from diffusion_grpo.data.columns import RowError
from diffusion_grpo.distributed.failure import RankError
from diffusion_grpo.policy.drivers import UnsupportedPipeline
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


@pytest.mark.parametrize(
    "error", [RewardError("the reward\nfailed"), RankError("process 1\nfailed"), RuntimeError("a bug")]
)
def test_only_errors_that_explain_themselves_are_one_line_unless_more_is_asked_for(monkeypatch, capsys, error):
    def fail(arguments) -> int:
        raise error

    monkeypatch.setattr("diffusion_grpo.cli.report.run", fail)
    with pytest.raises(type(error)):
        cli.main(["--traceback", "report", "run"])
    if type(error) is RuntimeError:
        with pytest.raises(RuntimeError):
            cli.main(["report", "run"])
    else:
        assert cli.main(["report", "run"]) == 1
        assert capsys.readouterr().err == f"error: {' '.join(str(error).split())}\n"


def test_a_row_that_cannot_be_read_is_one_line(monkeypatch, capsys):
    def fail(arguments) -> int:
        try:
            raise OSError("cannot identify image file")
        except OSError as error:
            raise RowError("Row 3 (the first is row 0), column 'image': cannot identify image file") from error

    monkeypatch.setattr("diffusion_grpo.cli.train.run", fail)
    assert cli.main(["train", "x.yaml"]) == 1
    assert capsys.readouterr().err == "error: Row 3 (the first is row 0), column 'image': cannot identify image file\n"


def test_a_pipeline_that_turns_out_not_to_train_is_one_line(monkeypatch, capsys):
    def fail(arguments) -> int:
        raise UnsupportedPipeline("Own returned a str in place of samples.")

    monkeypatch.setattr("diffusion_grpo.cli.train.run", fail)
    assert cli.main(["train", "x.yaml"]) == 1
    assert capsys.readouterr().err == "error: Own returned a str in place of samples.\n"


def test_memory_that_runs_out_is_one_line(config_file, model, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("diffusion_grpo.training.learner.make_algorithm", fail)
    settings = {"model": model, "reward_funcs": ["brightness"], "max_steps": 1, "disable_tqdm": True} | SIZE
    assert cli.main(["train", config_file(**settings)]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("error: Out of memory while the model was loaded: CUDA out of memory.")
