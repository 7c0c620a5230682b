"""Callbacks of a run: its start, the moving reference, grids of samples, limits that end it, the report.

Files go to the run's folder; images, videos and sound also go to the trackers that `report_to` names.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy

from ..data.held_out import describe_prompts
from ..distributed.trained_weights import TrainedWeights
from ..media.files import write_whole
from ..media.samples import choose_evenly
from ..report.gallery import EVALUATIONS
from ..report.record import write_json
from ..report.run_folder import LOG_OF_EVALUATIONS, LOOK, find_passed_limit, format_updates
from .checkpoints import set_later_aside
from .trackers import draw_grid, log_files, log_image

logger = logging.getLogger(__name__)


class StartCallback(TrainerCallback):
    """Callback that calls a function once a run has found where it starts, before its first update."""

    def __init__(self, function: Callable[[], None]):
        self._function = function

    def on_train_begin(self, *args, **kwargs):
        self._function()


class ResumeCallback(TrainerCallback):
    """Callback that gives a resumed run its own intervals, and moves aside what was left after its checkpoint."""

    def on_train_begin(self, args, state, control, **kwargs):
        state.compute_steps(args, state.max_steps)  # transformers takes the intervals from the checkpoint
        if not args.should_save:
            return
        Path(args.output_dir, LOG_OF_EVALUATIONS).unlink(missing_ok=True)  # of updates that the run has gone back on
        if state.global_step == 0:
            return
        aside = set_later_aside(Path(args.output_dir), state.global_step)
        if aside is not None:
            logger.warning(
                "This run goes back to update %d, so later checkpoints and samples in its folder were moved to %s.",
                state.global_step,
                aside,
            )


class SyncRefModelCallback(TrainerCallback):
    """Callback that moves the reference towards the policy (https://huggingface.co/papers/2404.09656).

    TRL's callback of this name gathers both models whole and reads half-precision copies; ours moves each process's
    shares using the optimizer's 32-bit weights, and also works under FSDP2 and with an offloaded reference.

    Args:
        weights: weights of the policy.
        ref_weights: returns the weights of the reference.
        alpha: share of the policy in the new reference.
        interval: number of updates between two synchronisations.

    Examples:
        `sync_ref_model=True` in the settings adds it to a run. By hand, with two networks:

        >>> from transformers import TrainerState
        >>> from diffusion_grpo.distributed.trained_weights import TrainedWeights
        >>> policy, reference = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        >>> for network, value in ((policy, 1.0), (reference, 0.0)):
        ...     _ = torch.nn.init.constant_(network.weight, value)
        >>> weights = [TrainedWeights(list(network.parameters())) for network in (policy, reference)]
        >>> callback = SyncRefModelCallback(weights[0], lambda: weights[1], alpha=0.25, interval=10)
        >>> callback.on_step_end(None, TrainerState(global_step=10), None)
        >>> reference.weight.item()
        0.25
    """

    def __init__(
        self, weights: TrainedWeights, ref_weights: Callable[[], TrainedWeights], alpha: float, interval: int
    ):
        self.weights, self.ref_weights, self.alpha, self.interval = weights, ref_weights, alpha, interval

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.interval == 0:
            self.ref_weights().approach(self.weights, self.alpha)


class SampleGridCallback(TrainerCallback):
    """Callback that draws a grid of samples after each evaluation, with a row per evaluation and a column per prompt.

    In a long run, the grid shows eight evaluations, evenly spaced, including the first and the last. If the samples
    were made from images, these are the first row. The newest row also goes to the trackers, along with videos and
    sound.

    Args:
        handler: handler of the trainer's callbacks, which include the active trackers.

    Examples:
        Every run has one. By hand, with the samples of one evaluation:

        >>> from transformers import TrainerState
        >>> samples = Path(folder, "evaluations", "step-000010")
        >>> samples.mkdir(parents=True)
        >>> for number, image in enumerate(images):
        ...     image.save(samples / f"{number}.png")
        >>> args = DiffusionGRPOConfig(folder, use_cpu=True)
        >>> callback = SampleGridCallback(CallbackHandler([], None, None, None, None))
        >>> state = TrainerState(global_step=10, log_history=[{"eval_reward": 0.5}], is_world_process_zero=True)
        >>> callback.on_evaluate(args, state, None)
        >>> Path(folder, "grid.png").is_file()
        True
    """

    def __init__(self, handler: CallbackHandler):
        self.handler = handler

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        last = state.log_history[-1] if state.log_history else {}
        if state.is_world_process_zero and "eval_reward" in last:  # those of another dataset are not logged
            run, step = Path(args.output_dir), state.global_step
            write_whole(run / LOG_OF_EVALUATIONS, lambda path: state.save_to_json(str(path)))
            prompts = {}
            for table in (run / "evaluations").glob(f"step-{step:06d}*.parquet"):  # one per process
                columns = pyarrow.parquet.read_table(table, columns=["image", "prompt"]).to_pydict()
                prompts |= {
                    Path(image).name: prompt for image, prompt in zip(columns["image"], columns["prompt"]) if image
                }
            _show(self.handler, run, "evaluations", "grid.png", "samples", step, prompts)


class ValidationCallback(TrainerCallback):
    """Callback that samples the fixed prompts before the first update and every `validation_steps` updates.

    Args:
        write: samples the prompts and writes the files.
        handler: handler of the trainer's callbacks, which include the active trackers.

    Examples:
        `validation_prompts` in the settings adds it to a run. By hand:

        >>> from transformers import TrainerState
        >>> args = DiffusionGRPOConfig(folder, validation_prompts=["a cat"], validation_steps=20, use_cpu=True)
        >>> callback = ValidationCallback(lambda: print("sampled"), CallbackHandler([], None, None, None, None))
        >>> for step in (20, 30, 40):
        ...     callback.on_step_end(args, TrainerState(global_step=step, is_world_process_zero=False), None)
        sampled
        sampled
    """

    def __init__(self, write: Callable[[], Path], handler: CallbackHandler):
        self.write, self.handler = write, handler

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.validation_steps == 0:
            self.write()
            if state.is_world_process_zero:
                name = "validation"
                prompts = {f"{number:04d}.png": prompt for number, prompt in enumerate(args.validation_prompts)}
                _show(self.handler, Path(args.output_dir), name, f"{name}.png", name, state.global_step, prompts)


def _show(
    handler: CallbackHandler, run: Path, folder: str, file: str, tracked_as: str, step: int, prompts: dict[str, str]
) -> None:
    """Draw a grid of a folder's steps, below the files' prompts; send this step's row and media to the trackers."""
    folder = run / folder
    newest = folder / f"step-{step:06d}"
    if not newest.is_dir():
        return
    steps = sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.is_dir())
    steps = choose_evenly([each for each in steps if each <= step], EVALUATIONS)  # a resumed run may have left others
    rows = {f"step {each}": sorted((folder / f"step-{each:06d}").glob("*.png")) for each in steps}
    names = [path.name for path in rows[f"step {step}"]]
    inputs = [folder / "inputs" / name if (folder / "inputs" / name).is_file() else None for name in names]
    first = {"input": inputs} if any(inputs) else {}  # samples made from text alone have none
    titles = [prompts.get(name, "") for name in names] if prompts else []
    draw_grid(first | rows, titles=titles).save(run / file)
    grid = draw_grid(first | {f"step {step}": rows[f"step {step}"]}, titles=titles)
    log_image(handler.callbacks, tracked_as, grid, step)
    media = [path for path in sorted(newest.iterdir()) if path.suffix in (".mp4", ".wav")]
    log_files(handler.callbacks, tracked_as, media, step)


class LastLogCallback(TrainerCallback):
    """Callback that logs the last updates of a run if `logging_steps` does not divide their number.

    Examples:
        Every run has one. By hand, in the last of five updates:

        >>> from transformers import TrainerControl
        >>> args, control = DiffusionGRPOConfig(folder, logging_steps=2, use_cpu=True), TrainerControl()
        >>> control.should_training_stop = True
        >>> LastLogCallback().on_step_end(args, None, control)
        >>> control.should_log
        True
    """

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_training_stop and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    on_epoch_end = on_step_end  # for a run that an evaluation has stopped


class GuardCallback(TrainerCallback):
    """Callback that ends a run once a metric passes its limit in `stop_when`.

    It warns, once per run, if the samples of a prompt have become alike.

    Args:
        limits: the setting `stop_when`.
        run: contents of run.json, where the entry `stopped` says what ended the run.

    Examples:
        Every run has one. By hand:

        >>> from transformers import TrainerControl, TrainerState
        >>> args, control, run = DiffusionGRPOConfig(folder, use_cpu=True), TrainerControl(), {}
        >>> callback = GuardCallback({"eval_velocity/ratio_to_ref": 1.1}, run)
        >>> callback.on_train_begin()
        >>> state = TrainerState(global_step=9, log_history=[{"eval_velocity/ratio_to_ref": 1.2}])
        >>> callback.on_log(args, state, control)
        >>> run["stopped"], control.should_training_stop
        ('Update 9 ended the run (stop_when): eval_velocity/ratio_to_ref rose to 1.2, above 1.1.', True)
    """

    def __init__(self, limits: dict[str, float] | None, run: dict[str, Any]):
        self.limits, self.run, self.is_training, self.has_warned = limits or {}, run, False, False

    def on_train_begin(self, *args, **kwargs):
        self.is_training = True

    def on_train_end(self, *args, **kwargs):
        self.is_training = False  # later evaluations are the user's own

    def on_log(self, args, state, control, **kwargs):
        if not self.is_training or "stopped" in self.run:
            return
        if (passed := find_passed_limit(state.log_history, self.limits)) is not None:
            control.should_training_stop = True
            self.run["stopped"] = f"Update {state.global_step} ended the run (stop_when): {passed}"
            best = state.best_global_step if args.load_best_model_at_end else None
            which = f"best evaluation, {format_updates(best)}" if best else "last update: no earlier ones were saved"
            if args.should_save:
                write_json(Path(args.output_dir, "run.json"), self.run)
                logger.warning("%s The weights are those of the %s. %s", self.run["stopped"], which, LOOK)
        elif not self.has_warned and args.should_save and (passed := find_passed_limit(state.log_history)):
            self.has_warned = True
            warnings.warn(f"Update {state.global_step}: {passed} {LOOK}", stacklevel=2)


class ReportCallback(TrainerCallback):
    """Callback that writes `report.html` and `summary.json` at the end, and prints the report's path and the result.

    Examples:
        Every run has one. `trainer.remove_callback(ReportCallback)` leaves the report out; `diffusion-grpo report`
        writes it later.

        >>> handler = CallbackHandler([ReportCallback()], None, None, None, None)
        >>> handler.remove_callback(ReportCallback)
        >>> handler.callbacks
        []
    """

    def on_train_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        try:
            self._report(args, state)
        except Exception:  # such as a damaged file or a full disk; the run has ended well, and its weights matter more
            logger.exception("The report was not written. To try again: diffusion-grpo report %s", args.output_dir)

    def _report(self, args, state):
        from ..report.page import missing_packages, write_report, write_summary
        from ..report.run_folder import describe_change, read_run

        state.save_to_json(str(Path(args.output_dir) / "trainer_state.json"))
        write_summary(args.output_dir)
        run, missing = read_run(args.output_dir), missing_packages()
        if (change := describe_change(run, "reward")) is not None:
            _print(f"Reward {change}, on {describe_prompts(run.prompts)}.")
        if run.published_after not in (None, run.updates):
            best = format_updates(run.published_after)
            _print(f"The weights are those of the best evaluation, {best}; the run went on to {run.updates}.")
        if missing:
            _print(
                f"No report: {' and '.join(missing)} not installed. After pip install 'diffusion-grpo[report]': "
                f"diffusion-grpo report {args.output_dir}"
            )
        else:
            _print(f"Report: {write_report(args.output_dir)}")


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe must not keep the weights from being saved
        print(line, flush=True)
