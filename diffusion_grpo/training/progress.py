"""What a run prints: where it trains what, a line per update and evaluation, and where a long update is.

All other metrics go only to the trackers.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_callback import CallbackHandler
from transformers.utils import is_in_notebook

from ..config.settings import DiffusionGRPOConfig
from ..data.held_out import name_prompts
from ..quiet import replace_unprintable
from ..report.run_folder import format_measured, format_updates
from ..rollout.runtime import TOTALS, UpdateProgress

FEW_UPDATES = 50  # a run of fewer, whose max_steps is not set, says why it is short


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

    def __init__(self, progress: UpdateProgress, run: dict[str, Any]):
        super().__init__()
        self.progress, self.run = progress, run
        self.first = self.step = self.total = 0
        self.grid: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.first = self.step = state.global_step
        self.total, self.started = state.max_steps, self.progress.clock()
        if state.is_world_process_zero:
            if not args.disable_tqdm and (sys.stderr.isatty() or is_in_notebook()):
                super().on_train_begin(args, state, control, **kwargs)
            self._write(describe_run(args, self.run, self.total))
            self.progress.notice = self._show_stage

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
            left = (self.progress.clock() - self.started) / done * rest if done and rest else None
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
        self.progress.notice = lambda: None
        self.total = 0
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)

    def _show_stage(self) -> None:
        """Write how far a long update is."""
        progress = self.progress
        done, seconds = progress.done, progress.clock() - progress.began
        left = f", {format_seconds(seconds / done * (progress.total - done))} left in it" if done else ""
        unit = "passes" if progress.stage == "training" else "samples"
        self._write(f"update {self.step + 1}/{self.total}: {progress.stage}, {done} of {progress.total} {unit}{left}")

    def _write(self, line: str) -> None:
        self.progress.noticed = self.progress.clock()
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
