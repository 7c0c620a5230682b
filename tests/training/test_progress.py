"""What a user sees of a running training, in a terminal, in a pipe and in a notebook."""

import contextlib
import fcntl
import io
import logging
import os
import pty
import struct
import sys
import termios
import threading
from types import ModuleType, SimpleNamespace

import pytest
import transformers.trainer
from tiny_runs import first_frame_brightness, trainer_for
from transformers import TrainerCallback

from diffusion_grpo.config.batch_sizes import BatchSizes
from diffusion_grpo.training.progress import BarsCallback, LinesCallback, UpdateProgress, format_seconds, update_line


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


def test_without_a_terminal_there_is_one_line_per_update(tmp_path, capsys):
    settings = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "beta": 0.1}
    trainer_for(tmp_path, **settings).train()
    first, before, one, two, after, *rest = lines_of(capsys)
    assert first == "Each update makes 8 samples (2 prompts x 4, 4 steps each)."
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


def test_several_updates_share_a_rollout_and_say_so(tmp_path, capsys):
    trainer_for(tmp_path, steps_per_generation=4).train()
    assert lines_of(capsys)[0] == "Each rollout makes 16 samples (4 prompts x 4, 4 steps each) for 2 updates."


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
    callback = LinesCallback(progress, "held-out", clock=lambda: now[0])
    sizes = BatchSizes(16, None, micro_batch=4, accumulation=32, steps_per_generation=32, num_iterations=1)
    args = SimpleNamespace(batch_sizes=sizes, num_generations=16, num_inference_steps=10)
    state = SimpleNamespace(global_step=0, max_steps=3, is_world_process_zero=True)
    callback.on_train_begin(args, state, None)
    progress.begin("rollout", 128)
    for _ in range(8):
        now[0] += 20
        progress.advance(4)
    said = lines_of(capsys)[1:]
    assert said == [
        "update 1/3: rollout, 12 of 128 samples, 10 min left in it",
        "update 1/3: rollout, 24 of 128 samples, 9 min left in it",
    ]


def read_all(terminal, shown):
    """All that is written to a pseudo-terminal, until nobody has it open any more."""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1 << 16):
            shown.append(part)


def test_bars_in_a_terminal(tmp_path, monkeypatch):
    """In a real pseudo-terminal: both bars, and the lines above them."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    screen, shown = os.fdopen(slave, "w"), []
    reader = threading.Thread(target=read_all, args=(master, shown))  # or a full terminal would hold the writer up
    reader.start()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    trainer = trainer_for(tmp_path, disable_tqdm=False)
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, BarsCallback)]
    trainer.train()
    screen.close()
    reader.join()
    os.close(master)
    shown = b"".join(shown).decode()
    assert "updates: 100%" in shown and "update 1: rollout:" in shown and "update 2: training:" in shown
    assert "update 1/2: reward 0." in shown and "{'loss'" not in shown


def test_a_user_who_removed_the_progress_gets_none(tmp_path, capsys):
    trainer = trainer_for(tmp_path)
    trainer.remove_callback(LinesCallback)
    trainer.train()
    assert not [line for line in lines_of(capsys) if line.startswith("update")]


class Display:
    """A stand-in for `IPython.display`: keeps what each output shows last."""

    def __init__(self):
        self.outputs = []

    class HTML(SimpleNamespace):
        def __init__(self, data):
            super().__init__(data=data)

    class Image(SimpleNamespace):
        def __init__(self, data, format):
            super().__init__(data=data, format=format)

    def display(self, content, display_id):
        handle = SimpleNamespace(shown=[content])
        handle.update = handle.shown.append
        self.outputs.append(handle)
        return handle


@pytest.fixture
def notebook(monkeypatch):
    """A machine on which transformers believes that it is in a notebook."""

    class NotebookProgressCallback(TrainerCallback):
        def on_log(self, *args, **kwargs):
            raise AssertionError("transformers' table of losses is shown")

    fake = Display()
    module = ModuleType("IPython.display")
    module.display, module.HTML, module.Image = fake.display, fake.HTML, fake.Image
    package = ModuleType("IPython")
    package.display = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.delitem(sys.modules, "diffusion_grpo.training.notebook", raising=False)
    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    monkeypatch.setattr("diffusion_grpo.training.show_progress.is_in_notebook", lambda: True)
    yield fake
    sys.modules.pop("diffusion_grpo.training.notebook", None)


def test_a_notebook_shows_rewards_and_images(tmp_path, notebook, capsys):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "beta": 0.1}
    trainer_for(tmp_path, **settings, disable_tqdm=False).train()
    table, images = notebook.outputs
    pages = [shown.data for shown in table.shown]
    for title in ("update", "reward", "KL", "grad norm", "s/update"):
        assert f"<th>{title}</th>" in pages[-1], title
    assert pages[-1].count("<tr>") == 3 and " ± " in pages[-1]  # titles and two updates
    assert "before training: held-out reward" in pages[-1] and "after 2 updates" in pages[-1]
    assert any("1 of 2 updates, " in page and " left" in page for page in pages)
    assert any("samples of the rollout" in page for page in pages)
    assert len(images.shown) == 3 and images.shown[-1].data == (tmp_path / "grid.png").read_bytes()
    assert "Training Loss" not in "".join(pages) and "update 1/2" not in capsys.readouterr().out


def test_numbers_for_people():
    assert [format_seconds(value) for value in (45, 720, 12600)] == ["45 s", "12 min", "3.5 h"]
    logs = {"reward": 0.5, "reward_std": 0.1, "time/rollout": 20.0, "time/update": 10.0}
    assert update_line(3, 9, logs) == "update 3/9: reward 0.500 ± 0.100, 30 s/update"


def test_metrics_of_a_log_entry(tmp_path):
    """Memory, spreads and ratios are logged; samples of videos are not called images."""
    trainer = trainer_for(tmp_path, name="wan", rewards=first_frame_brightness, num_iterations=2, epsilon=0.1)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        assert 0.05 < entry["memory/peak_gib"] < 100
        assert "images_per_second" not in entry
    assert trainer.state.log_history[0]["samples_per_second"] > 0  # the second update uses that rollout again
    first, second = trainer.state.log_history[:2]
    assert first["ratio/min"] == first["ratio/max"] == 1 and second["ratio/min"] < second["ratio/max"]
    assert first["spread/reward_min"] <= first["reward"] <= first["spread/reward_max"]
    assert first["spread/advantage_min"] < 0 < first["spread/advantage_max"]
    assert first["spread/reward_std"] == pytest.approx(first["rewards/first_frame_brightness/std"])


def test_both_standard_deviations_are_unbiased(tmp_path):
    """With one group of one reward they are the same number."""
    trainer = trainer_for(tmp_path, max_steps=1, num_generations=8)
    trainer.train()
    [entry] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["rewards/brightness/std"] == pytest.approx(entry["reward_std"], rel=1e-4)


def test_messages_that_tell_nothing_are_dropped():
    for name, text, is_shown in (
        ("DeepSpeed", "Setting accelerator to CPU. If you have GPU ...", False),
        ("DeepSpeed", "something else", True),
        ("transformers.utils.import_utils", "`X` requires torchvision (not installed); falling back to `Y`", False),
    ):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).warning(text)
        logging.getLogger(name).removeHandler(handler)
        assert bool(stream.getvalue()) == is_shown
