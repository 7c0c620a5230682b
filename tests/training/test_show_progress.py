"""Progress is shown where and how the user wants it."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading

from tiny_runs import trainer_for

from diffusion_grpo.training.progress import BarsCallback, LinesCallback


def lines_of(capsys):
    return capsys.readouterr().out.splitlines()


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
