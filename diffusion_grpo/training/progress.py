"""Progress display of a run: bars in a terminal, a table in a notebook, elsewhere one line per update.

All other metrics go only to the trackers.
"""

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from ..config.settings import DiffusionGRPOConfig
from ..run.folder import format_measured, format_updates

FEW_UPDATES = 50  # a run of fewer, whose max_steps is not set, says why it is short
NOTICE = 60.0  # seconds without output after which a long update prints its progress, without a terminal
STAGES = ("time/rollout", "time/reward", "time/update")


class UpdateProgress:
    """Progress of the current update: its stage and how much of it is done.

    Attributes:
        stage: "rollout", "rewards" or "training"; None between updates.
        done, total: numbers of samples in a rollout and its rewards, or of network passes in training.
    """

    def __init__(self):
        self.stage: str | None = None
        self.done = self.total = 0
        self.copies = 1
        self.watch: Callable[[], None] = lambda: None

    @property
    def unit(self) -> str:
        """The unit in which progress is counted."""
        return "passes" if self.stage == "training" else "samples"

    def begin(self, stage: str, total: int, copies: int = 1) -> None:
        """Enter a stage.

        Args:
            stage: name of the stage.
            total: units of this process in this stage.
            copies: number of processes that do as much at the same time; their units are counted too.
        """
        self.stage, self.done, self.total, self.copies = stage, 0, total * copies, copies
        self.watch()

    def advance(self, count: int = 1) -> None:
        """Count units of the stage that this process has done."""
        self.done += count * self.copies
        self.watch()

    def end(self) -> None:
        """Leave the last stage of an update."""
        self.stage = None
        self.watch()


def describe_rollout(args: DiffusionGRPOConfig, updates_of_run: int) -> str:
    """Describe in one line how many samples an update makes, and why a run is short whose `max_steps` is not set."""
    sizes = args.batch_sizes
    samples, updates = sizes.samples_per_rollout, sizes.updates_per_rollout
    prompts = sizes.prompts_per_rollout
    made = f"{samples} samples ({prompts} prompt{'s' if prompts > 1 else ''} x {args.num_generations}"
    made += f", {args.num_inference_steps} steps each)"
    line = f"Each update makes {made}." if updates == 1 else f"Each rollout makes {made} for {updates} updates."
    if args.max_steps < 0 and updates_of_run < FEW_UPDATES:
        length = f"{updates_of_run} update{'' if updates_of_run == 1 else 's'}"
        line += f" The run makes {length}, from num_train_epochs={args.num_train_epochs:g}; "
        line += "set max_steps for a longer one."
    return line


def update_values(logs: dict[str, float]) -> dict[str, str]:
    """Return the values of an update's log entry that users are shown, by title."""
    shown = {}
    if "reward" in logs:
        shown["reward"] = f"{logs['reward']:.3f} ± {logs.get('reward_std', 0.0):.3f}"
    if "kl" in logs:
        shown["KL"] = f"{logs['kl']:.2g}"
    if "grad_norm" in logs:
        shown["grad norm"] = f"{float(logs['grad_norm']):.3g}"
    seconds = [logs[stage] for stage in STAGES if stage in logs]
    if seconds:
        shown["s/update"] = f"{sum(seconds):.2g}" if sum(seconds) < 10 else f"{sum(seconds):.0f}"
    return shown


def update_line(step: int, total: int, logs: dict[str, float], left: float | None = None) -> str:
    """Describe an update in one line, such as `update 2/64: reward 0.312 ± 0.120, grad norm 0.21, 4.1 s/update`."""
    values = update_values(logs)
    parts = [f"{value} {name}" if name == "s/update" else f"{name} {value}" for name, value in values.items()]
    parts += [] if left is None else [f"{format_seconds(left)} left"]
    return f"update {step}/{total}: {', '.join(parts)}"


def evaluation_line(step: int, logs: dict[str, float], prompts: str) -> str:
    """Describe an evaluation in one line; `prompts` names the kind of its prompts."""
    value = format_measured(logs["eval_reward"], logs.get("eval_reward_std_error"))
    return f"{format_updates(step)}: {prompts} reward {value}"


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable way: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


class ShowingCallback(TrainerCallback):
    """Callback that shows updates and evaluations on the first process; subclasses decide how.

    Args:
        progress: progress of the current update.
        prompts: kind of the prompts in evaluations, "held-out" or "evaluation".
        clock: returns the time in seconds.
    """

    def __init__(self, progress: UpdateProgress, prompts: str, clock: Callable[[], float] = time.monotonic):
        self.progress, self.prompts, self.clock = progress, prompts, clock
        self.started, self.first, self.step, self.total = 0.0, 0, 0, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.started, self.first, self.step, self.total = (
            self.clock(),
            state.global_step,
            state.global_step,
            state.max_steps,
        )
        if state.is_world_process_zero:
            self.begin(args)
            self.progress.watch = self.show_progress

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.progress.end()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not self.total or logs is None:
            return
        if "eval_reward" in logs:
            self.show_evaluation(state.global_step, logs)
        elif "loss" in logs:  # not the summary at the end; has no reward if a rollout is used again
            self.show_update(state.global_step, logs)

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.watch = lambda: None
        if state.is_world_process_zero:
            self.end()
        self.total = 0

    @property
    def left(self) -> float | None:
        """Estimated seconds until the end, at the speed so far; None before the first update."""
        done = self.step - self.first
        return (self.clock() - self.started) / done * (self.total - self.step) if done else None

    def begin(self, args: DiffusionGRPOConfig) -> None:
        """Show what the run is about to do."""

    def show_progress(self) -> None:
        """Show the progress of the current update."""

    def show_update(self, step: int, logs: dict[str, float]) -> None:
        """Show an update's log entry."""

    def show_evaluation(self, step: int, logs: dict[str, float]) -> None:
        """Show an evaluation's log entry."""

    def end(self) -> None:
        """Close the display."""


class LinesCallback(ShowingCallback):
    """Callback that prints a line per update, for logs and pipes, and once a minute the progress of a long update."""

    def begin(self, args):
        self.notified = self.stage_began = self.clock()
        print(describe_rollout(args, self.total), flush=True)

    def show_progress(self):
        progress, now = self.progress, self.clock()
        if progress.done == 0:
            self.stage_began = now
        if progress.stage is None or now - self.notified < NOTICE:
            return
        done, took = progress.done, now - self.stage_began
        left = f", {format_seconds(took / done * (progress.total - done))} left in it" if done else ""
        self._say(
            f"update {self.step + 1}/{self.total}: {progress.stage}, {done} of {progress.total} {progress.unit}{left}"
        )

    def show_update(self, step, logs):
        self._say(update_line(step, self.total, logs, self.left if step < self.total else None))

    def show_evaluation(self, step, logs):
        self._say(evaluation_line(step, logs, self.prompts))

    def _say(self, line: str) -> None:
        self.notified = self.clock()
        print(line, flush=True)


class BarsCallback(ShowingCallback):
    """Callback with a bar for all updates and the time left, a bar for the current update, and a line per update."""

    def begin(self, args):
        self.bar = tqdm(total=self.total, initial=self.step, desc="updates", dynamic_ncols=True)
        self.inner: Any = None
        self.stage: str | None = None
        self.bar.write(describe_rollout(args, self.total))

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if state.is_world_process_zero:
            self.bar.update(state.global_step - self.bar.n)

    def show_progress(self):
        progress = self.progress
        if self.inner is not None and (progress.stage != self.stage or progress.done < self.inner.n):
            self.inner.close()
            self.inner = None
        self.stage = progress.stage
        if self.stage is None:
            return
        if self.inner is None:
            self.inner = tqdm(
                total=progress.total,
                desc=f"update {self.step + 1}: {progress.stage}",
                unit=f" {progress.unit}",
                position=1,
                leave=False,
                dynamic_ncols=True,
            )
        self.inner.update(progress.done - self.inner.n)

    def show_update(self, step, logs):
        self.bar.write(update_line(step, self.total, logs))

    def show_evaluation(self, step, logs):
        self.bar.write(evaluation_line(step, logs, self.prompts))

    def end(self):
        for bar in (self.inner, self.bar):
            if bar is not None:
                bar.close()
