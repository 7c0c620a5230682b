"""Input that cannot be used is refused in one line; a run that fails ends in one, after a reward's own traceback."""

import pytest
import torch
from command_line import SIZE

from diffusion_grpo import cli
from diffusion_grpo.cli.errors import refusing
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


ROW = RowError("row 3, column 'image':\ncannot identify image file")
ROW.__cause__ = OSError("cannot identify image file")


@pytest.mark.parametrize(
    "error",
    [
        RewardError("the reward\nfailed"),
        RankError("process 1\nfailed"),
        ROW,
        UnsupportedPipeline("Own returned a str in place of samples."),
        RuntimeError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_only_errors_that_explain_themselves_are_one_line_unless_more_is_asked_for(monkeypatch, capsys, error):
    def fail(arguments) -> int:
        raise error

    monkeypatch.setattr("diffusion_grpo.cli.train.run", fail)
    with pytest.raises(type(error)):
        cli.main(["--traceback", "train", "x.yaml"])
    if type(error) is RuntimeError:
        with pytest.raises(RuntimeError):
            cli.main(["train", "x.yaml"])
    else:
        assert cli.main(["train", "x.yaml"]) == 1
        assert capsys.readouterr().err == f"error: {' '.join(str(error).split())}\n"


def test_memory_that_runs_out_is_one_line(config_file, model, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("diffusion_grpo.training.learner.make_algorithm", fail)
    settings = {"model": model, "reward_funcs": ["brightness"], "max_steps": 1, "disable_tqdm": True} | SIZE
    assert cli.main(["train", config_file(**settings)]) == 1
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    assert printed.splitlines()[-1].startswith("error: Out of memory while the model was loaded: CUDA out of memory.")


# Input that is refused


@pytest.mark.parametrize("error", [ValueError("too\n  large"), OSError("too large"), ImportError("too large")])
def test_errors_of_input_become_one_line(error, monkeypatch, capsys):
    def fail(arguments):
        with refusing():
            raise error

    monkeypatch.setattr("diffusion_grpo.cli.train.run", fail)
    assert cli.main(["train", "x.yaml"]) == 2
    assert capsys.readouterr().err == "error: too large\n"


def test_bugs_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), refusing():
        _ = 7 // 0
