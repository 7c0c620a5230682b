"""What a user sees of a running training, in a terminal, in a pipe and in a notebook."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from tiny_runs import brightness, trainer_for
from transformers import ProgressCallback, TrainerCallback

from diffusion_grpo.config.batch_sizes import BatchSizes
from diffusion_grpo.training.progress import RewardProgressCallback, UpdateProgress, format_seconds, update_line


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_without_a_terminal_there_is_one_line_per_update(tmp_path, capsys):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "beta": 0.1}
    trainer_for(tmp_path, **settings).train()
    first, before, one, two, after, *rest = lines_of(capsys)
    assert first.startswith("Training transformer (LoRA rank 4) in float32 on the CPU: each update makes 8 samples ")
    assert before.startswith("before training: held-out reward 0.") and " ± " in before
    assert one.startswith("update 1/2: reward 0.") and two.startswith("update 2/2: reward 0.")
    for part in (" ± ", "KL ", "grad norm ", "s/update"):
        assert part in one and len(one) < 120
    assert one.endswith(" left") and not two.endswith(" left")
    assert after.startswith("after 2 updates: held-out reward 0.")
    assert (
        rest[0].startswith("Reward 0.") and "before training" in rest[0] and "none of which is trained on" in rest[0]
    )
    assert rest[1:] == [f"Report: {tmp_path}/report.html"]


def test_a_run_that_its_few_prompts_make_short_says_so(tmp_path, capsys):
    trainer_for(tmp_path / "a", max_steps=-1, num_train_epochs=1).train()
    assert "The run makes 2 updates, from num_train_epochs=1; set max_steps" in lines_of(capsys)[0]
    trainer_for(tmp_path / "b", max_steps=0).train()
    assert "The run makes" not in lines_of(capsys)[0]


def test_several_updates_share_a_rollout_and_several_rewards_are_shown_each(tmp_path, capsys):
    def dark(images, **columns):
        return [-value for value in brightness(images)]

    evaluated = {"eval_strategy": "steps", "eval_steps": 2}
    trainer_for(tmp_path, steps_per_generation=4, lora=False, rewards=[brightness, dark], **evaluated).train()
    first, update, _, evaluation, *_ = lines_of(capsys)
    assert "(all weights)" in first and "each rollout makes 16 samples (4 prompts x 4, 4 steps each) for 2" in first
    assert " (brightness 0." in update and ", dark -0." in update
    assert " (brightness 0." in evaluation and ", dark -0." in evaluation


def test_an_update_tells_where_it_is(tmp_path):
    """All samples and all passes are counted, stage after stage."""
    seen = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            progress = trainer.progress
            progress.watch = lambda: seen.append((progress.stage, progress.done, progress.total))

    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.add_callback(Watch)
    trainer.train()
    assert seen[0] == ("rollout", 0, 8) and ("rollout", 4, 8) in seen and ("rollout", 8, 8) in seen
    assert ("rewards", 0, 8) in seen and ("rewards", 8, 8) in seen
    passes = [(done, total) for stage, done, total in seen if stage == "training"]
    assert passes == [(done, 6) for done in range(7)]  # two micro-batches, three steps each
    assert seen[-1] == (None, 6, 6)


def test_a_long_update_says_once_a_minute_where_it_is(capsys):
    now = [0.0]
    progress = UpdateProgress()
    run = {"trains_by": "full", "component": "transformer"}
    callback = RewardProgressCallback(progress, run, clock=lambda: now[0])
    sizes = BatchSizes(16, None, micro_batch=4, accumulation=32, steps_per_generation=32, num_iterations=1)
    args = SimpleNamespace(batch_sizes=sizes, num_generations=16, num_inference_steps=10, max_steps=3)
    args.bf16, args.fp16, args.disable_tqdm, args.world_size = True, False, True, 8
    args.device = SimpleNamespace(type="cpu")
    state = SimpleNamespace(global_step=0, max_steps=3, is_world_process_zero=True)
    callback.on_train_begin(args, state, None)
    progress.begin("rollout", 128)
    for _ in range(8):
        now[0] += 20
        progress.advance(4)
    first, *lines = lines_of(capsys)
    assert first.startswith("Training transformer (all weights) in bfloat16 on the CPU (8 processes): ")
    assert lines == [
        "update 1/3: rollout, 12 of 128 samples, 10 min left in it",
        "update 1/3: rollout, 24 of 128 samples, 9 min left in it",
    ]


def test_numbers_for_people():
    assert [format_seconds(value) for value in (45, 720, 12600)] == ["45 s", "12 min", "3.5 h"]
    logs = {"reward": 0.5, "reward_std": 0.1, "time/rollout": 20.0, "time/update": 10.0}
    assert update_line(3, 9, logs) == "update 3/9: reward 0.500 ± 0.100, 30 s/update"


def test_a_terminal_shows_a_bar_and_the_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer = trainer_for(tmp_path, disable_tqdm=False)
    trainer.train()
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


def test_a_user_who_removed_the_progress_gets_none(tmp_path, capsys):
    trainer = trainer_for(tmp_path)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    assert not [line for line in lines_of(capsys) if line.startswith("update")]


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
