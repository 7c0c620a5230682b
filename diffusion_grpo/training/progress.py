"""What a run measures and prints of its updates: `Metrics` until they are logged, and `UpdateProgress` meanwhile.

It prints where it trains what, a line per update and evaluation, and where a long update is. All other metrics go only
to the trackers.
"""

import contextlib
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler
from transformers.utils import is_in_notebook

from ..config.settings import DiffusionGRPOConfig
from ..data.held_out import name_prompts
from ..distributed.backend import DistributedBackend
from ..distributed.collectives import gather_means
from ..quiet import replace_unprintable
from ..report.run_folder import format_measured, format_updates
from .memory import measure_peak_memory

logger = logging.getLogger(__name__)
FEW_UPDATES = 50  # a run of fewer, whose max_steps is not set, says why it is short
NOTICE = 60.0  # seconds without output after which a long update prints its progress
TOTALS = ("time/rollout", "time/reward", "time/update")  # seconds per update of the slowest process
# metrics that are logged as the largest or smallest value since the last log, instead of the mean
LARGEST = (
    "ratio/max_error",
    "prediction/max_error",
    "ratio/max",
    "sampling/sampling_logp_difference/max",
    "spread/reward_max",
    "spread/advantage_max",
    "memory/peak_gib",
    *TOTALS,
)
SMALLEST = ("ratio/min", "spread/reward_min", "spread/advantage_min", "samples_per_second")


class Metrics:
    """Collection of values by name, until they are logged."""

    def __init__(self):
        self.reset()

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add one value, unless its weight is 0."""
        if weight:
            self.values[name].append(value)
            self.weights[name].append(weight)
            self._seconds += value if name in TOTALS else 0.0

    def add_all(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.add(name, value)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds that are spent inside this context."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def start(self, step: int) -> None:
        """Start counting updates at `step`, unless counting has begun already."""
        if self._logged_step is None:
            self._logged_step = step

    def reset(self) -> None:
        """Forget everything, for a new run."""
        self.values: dict[str, list[float]] = defaultdict(list)
        self.weights: dict[str, list[float]] = defaultdict(list)
        self._logged_step: int | None = None
        self.samples, self._seconds = 0, 0.0  # of the rollout that is being trained on
        self._finished_samples, self._finished_seconds = 0, 0.0  # of rollouts used up since the last log

    def finish_rollout(self) -> None:
        """Count the finished rollout in `samples_per_second`: all its updates are done, so its total time is known."""
        if self.samples:  # 0 if it was made before the run was resumed
            self._finished_samples += self.samples
            self._finished_seconds += self._seconds
        self.samples, self._seconds = 0, 0.0

    def gather(self, backend: DistributedBackend, step: int) -> dict[str, float]:
        """Return the metrics since the last log, combined over all processes, and forget them; a collective."""
        updates = max(1, step - self._logged_step)
        totals = {name: [sum(self.values.pop(name, [])) / updates] for name in TOTALS}
        measured, weights = self.values | totals, {name: self.weights[name] for name in self.values}
        measured["memory/peak_gib"] = [measure_peak_memory(backend.accelerator.device)]
        if self._finished_samples:
            measured["samples_per_second"] = [self._finished_samples / self._finished_seconds]
        self._finished_samples, self._finished_seconds, self._logged_step = 0, 0.0, step
        self.values.clear()
        self.weights.clear()
        return gather_means(backend.accelerator, measured, LARGEST, SMALLEST, weights)


class UpdateProgress:
    """Progress of the current update: its stage and how much of it is done."""

    def __init__(self):
        self.stage: str | None = None
        self.done = self.total = 0
        self.copies = 1
        self.watch: Callable[[], None] = lambda: None

    def begin(self, stage: str | None, total: int = 0, copies: int = 1) -> None:
        """Enter a stage; None after the last one of an update."""
        if self.stage is not None and logger.isEnabledFor(logging.DEBUG):
            device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
            logger.debug("RL_METRIC: after %s: peak memory %.2f GiB", self.stage, measure_peak_memory(device))
        self.stage, self.done, self.total, self.copies = stage, 0, total * copies, copies
        self.watch()

    def advance(self, count: int = 1) -> None:
        """Count units of the stage that this process has done."""
        self.done += count * self.copies
        self.watch()


def describe_run(args: DiffusionGRPOConfig, run: dict[str, Any], updates_of_run: int) -> str:
    """Describe in one line where what is trained on how many samples, and why a run without `max_steps` is short."""
    trained = "all weights" if run["trains_by"] == "full" else run["trains_by"]
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else run.get("dtype", "float32")
    sizes = args.batch_sizes
    prompts, updates = sizes.prompts_per_rollout, sizes.updates_per_rollout
    line = (
        f"Training {run['component']} ({trained}) in {precision} on {_describe_devices(args)}: each "
        f"{'update' if updates == 1 else 'rollout'} makes {sizes.samples_per_rollout} samples "
        f"({prompts} prompt{'s' if prompts > 1 else ''} x {args.num_generations}, {args.num_inference_steps} steps "
        f"each){'' if updates == 1 else f' for {updates} updates'}."
    )
    if args.max_steps < 0 and updates_of_run < FEW_UPDATES:
        length = f"{updates_of_run} update{'' if updates_of_run == 1 else 's'}"
        line += f" The run makes {length}, from num_train_epochs={args.num_train_epochs:g}; "
        line += "set max_steps for a longer one."
    return line


def _describe_devices(args: DiffusionGRPOConfig) -> str:
    kind, number = args.device.type, args.world_size
    if kind == "cpu":
        return "the CPU" if number == 1 else f"the CPU ({number} processes)"
    name = torch.cuda.get_device_name(args.device) if kind == "cuda" else kind
    return name if number == 1 else f"{number} x {name}"


def update_line(step: int, total: int, logs: dict[str, float], left: float | None = None) -> str:
    """Describe an update in one line, such as `update 2/64: reward 0.312 ± 0.120, grad norm 0.21, 4.1 s/update`."""
    parts = []
    if "reward" in logs:
        parts.append(f"reward {logs['reward']:.3f} ± {logs.get('reward_std', 0.0):.3f}{_list_rewards(logs, '')}")
    if "kl" in logs:
        parts.append(f"KL {logs['kl']:.2g}")
    if "grad_norm" in logs:
        parts.append(f"grad norm {float(logs['grad_norm']):.3g}")
    seconds = [logs[stage] for stage in TOTALS if stage in logs]
    if seconds:
        parts.append(f"{sum(seconds):.2g} s/update" if sum(seconds) < 10 else f"{sum(seconds):.0f} s/update")
    parts += [] if left is None else [f"{format_seconds(left)} left"]
    return f"update {step}/{total}: {', '.join(parts)}"


def evaluation_line(step: int, logs: dict[str, float], prompts: str) -> str:
    """Describe an evaluation in one line; `prompts` names the kind of its prompts."""
    value = format_measured(logs["eval_reward"], logs.get("eval_reward_std_error"))
    return f"{format_updates(step)}: {prompts} reward {value}{_list_rewards(logs, 'eval_')}"


def _list_rewards(logs: dict[str, float], prefix: str) -> str:
    """List the means of several rewards, of which the combined reward shows only the sum."""
    start, end = f"{prefix}rewards/", "/mean"
    means = {key[len(start) : -len(end)]: logs[key] for key in logs if key.startswith(start) and key.endswith(end)}
    return f" ({', '.join(f'{name} {mean:.3f}' for name, mean in means.items())})" if len(means) > 1 else ""


def format_seconds(seconds: float) -> str:
    """Format a duration in a readable way: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


class RewardProgressCallback(ProgressCallback):
    """transformers' progress bar with lines about rewards above it; the lines alone where there is no terminal.

    It must come after `SampleGridCallback`, whose images a notebook shows below.
    """

    def __init__(self, progress: UpdateProgress, run: dict[str, Any], clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self.progress, self.run, self.clock = progress, run, clock
        self.first = self.step = self.total = 0
        self.grid: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = self.step = state.global_step
        self.total, self.started = state.max_steps, self.clock()
        self.written = self.stage_began = self.started
        if state.is_world_process_zero:
            if not args.disable_tqdm and (sys.stderr.isatty() or is_in_notebook()):
                super().on_train_begin(args, state, control, **kwargs)
            self._write(describe_run(args, self.run, self.total))
            self.progress.watch = self._show_stage

    def on_step_end(self, args, state, control, **kwargs):
        self.step = state.global_step
        self.progress.begin(None)
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not self.total or logs is None:
            return
        if "eval_reward" in logs:
            self._write(evaluation_line(state.global_step, logs, name_prompts(self.run["prompts"])))
        elif "loss" in logs:  # not the summary at the end; has no reward if a rollout is used again
            done, rest = self.step - self.first, self.total - self.step
            left = (self.clock() - self.started) / done * rest if done and rest else None
            self._write(update_line(state.global_step, self.total, logs, left))

    def on_evaluate(self, args, state, control, **kwargs):
        file = Path(args.output_dir) / "grid.png"
        if state.is_world_process_zero and not args.disable_tqdm and is_in_notebook() and file.is_file():
            from IPython import display  # every notebook has it

            image = display.Image(data=file.read_bytes(), format="png")
            if self.total and self.grid is not None:
                self.grid.update(image)
            else:
                self.grid = display.display(image, display_id=True)

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.watch = lambda: None
        self.total = 0
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)

    def _show_stage(self) -> None:
        """Write how far a long update is, once a minute."""
        progress, now = self.progress, self.clock()
        if progress.done == 0:
            self.stage_began = now
        if progress.stage is None or now - self.written < NOTICE:
            return
        done, seconds = progress.done, now - self.stage_began
        left = f", {format_seconds(seconds / done * (progress.total - done))} left in it" if done else ""
        unit = "passes" if progress.stage == "training" else "samples"
        stage = f"{progress.stage}, {done} of {progress.total} {unit}{left}"
        self._write(f"update {self.step + 1}/{self.total}: {stage}")

    def _write(self, line: str) -> None:
        self.written = self.clock()
        with contextlib.suppress(OSError):  # a terminal or pipe that was closed must not end the run
            if self.training_bar is not None:
                self.training_bar.write(line)
            else:
                print(line, flush=True)


def replace_progress(
    handler: CallbackHandler, args: DiffusionGRPOConfig, progress: UpdateProgress, run: dict[str, Any]
) -> None:
    """Replace transformers' progress callback, which shows losses, with one that shows rewards."""
    shown = PrinterCallback if args.disable_tqdm else transformers.trainer.DEFAULT_PROGRESS_CALLBACK
    replace_unprintable()
    for callback in [callback for callback in handler.callbacks if type(callback) is shown]:  # a user's own stay
        handler.remove_callback(callback)
    handler.add_callback(RewardProgressCallback(progress, run))
