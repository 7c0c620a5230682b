"""What a user sees of a running training, in a terminal, in a pipe and in a notebook."""

import itertools
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from command_line import make_config
from tiny_runs import finished_run, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.rollout.runtime import UpdateProgress
from diffusion_grpo.training.progress import RewardProgressCallback


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_without_a_terminal_there_is_one_line_per_update(tmp_path, capsys):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "beta": 0.1}
    trainer_for(tmp_path, **settings).train()
    first, before, one, two, after, change, report = lines_of(capsys)
    assert all(part in first for part in ("LoRA rank 4", "float32 on the CPU", "8 samples"))
    assert before.startswith("before training: held-out reward 0.") and after.startswith("after 2 updates: held-out")
    assert one.startswith("update 1/2: reward 0.") and two.startswith("update 2/2: reward 0.")
    for part in (" ± ", "KL ", "grad norm ", "s/update"):
        assert part in one and len(one) < 120
    assert one.endswith(" left") and not two.endswith(" left")
    assert change.startswith("Reward 0.") and report == f"Report: {tmp_path}/report.html"


def test_an_update_tells_where_it_is(tmp_path):
    """All samples and all passes are counted, stage after stage."""
    seen = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            progress = trainer.progress
            progress.clock = itertools.count(progress.noticed + 60, 60).__next__  # a minute passes at each look
            progress.notice = lambda: seen.append((progress.stage, progress.done, progress.total))

    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.add_callback(Watch)
    trainer.train()
    assert seen[0] == ("rollout", 0, 8) and ("rollout", 4, 8) in seen and ("rollout", 8, 8) in seen
    assert ("rewards", 0, 8) in seen and ("rewards", 8, 8) in seen
    passes = [(done, total) for stage, done, total in seen if stage == "training"]
    assert passes == [(done, 6) for done in range(7)]  # two micro-batches, three steps each
    assert trainer.progress.stage is None


def test_a_long_update_says_once_a_minute_where_it_is(capsys):
    now = [0.0]
    progress = UpdateProgress(clock=lambda: now[0])
    run = {"trains_by": "full", "component": "transformer"}
    callback = RewardProgressCallback(progress, run)
    state = SimpleNamespace(global_step=0, max_steps=3, is_world_process_zero=True)
    callback.on_train_begin(make_config(disable_tqdm=True, max_steps=3), state, None)
    progress.begin("rollout", 64, copies=2)  # two processes
    for _ in range(8):
        now[0] += 20
        progress.advance(2)
    assert lines_of(capsys)[1:] == [
        "update 1/3: rollout, 12 of 128 samples, 10 min left in it",
        "update 1/3: rollout, 24 of 128 samples, 9 min left in it",
    ]


def test_a_terminal_shows_a_bar_and_the_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    finished_run(tmp_path, disable_tqdm=False)
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "update 1/2: reward 0." in shown.out and "'loss'" not in shown.out


def test_a_notebook_shows_the_images_of_the_last_evaluation(tmp_path, monkeypatch):
    shown = []
    fake = ModuleType("IPython.display")
    fake.Image = lambda data, format: data
    handle = SimpleNamespace(update=shown.append)
    fake.display = lambda image, display_id: shown.append(image) or handle
    package = ModuleType("IPython")
    package.display = fake
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setattr("diffusion_grpo.training.progress.is_in_notebook", lambda: True)
    trainer_for(tmp_path, disable_tqdm=False, eval_strategy="steps", eval_steps=1).train()
    assert len(shown) == 2 and shown[-1] == (tmp_path / "grid.png").read_bytes()


@pytest.mark.parametrize("is_closed", [False, True])
def test_no_output_ends_a_run(tmp_path, monkeypatch, is_closed):
    """Neither characters that the terminal lacks nor a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    with open(reader, "rb") as read, open(writer, "w", encoding="ascii") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        trainer = trainer_for(tmp_path)
        if is_closed:
            read.close()
        trainer.train()
        monkeypatch.undo()
        if is_closed:
            with pytest.raises(BrokenPipeError):
                stdout.close()
        else:
            stdout.close()
            assert b"update 2/2: reward 0." in (text := read.read()) and b" ? " in text
    assert trainer.state.global_step == 2
