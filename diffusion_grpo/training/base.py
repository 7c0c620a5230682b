"""Overrides of transformers' `Trainer` that diffusers models need: wrapping, evaluating, saving, loading and pushing.

Around them it locks the run's folder, finds where a run starts, notes the best metric, and has the card written.
Methods that are never called, or cannot work here, are refused.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils import AutocastKwargs
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, rotate_checkpoints
from transformers.utils import PushInProgress, hf_api

from ..config.files import check_hub_access, check_resume_folder
from ..config.names import suggest
from ..distributed import checkpoints as shares
from ..distributed.backend import DistributedBackend
from ..distributed.collectives import gather_json, is_shared
from ..report.card import CardDetails
from ..report.record import ResumeError, check_same_run, write_json
from ..report.run_folder import name_error
from ..weights.files import name_repository
from . import checkpoints

logger = logging.getLogger(__name__)
# methods of `Trainer` that are never called here, and what a subclass overrides or sets instead
NEVER_CALLED = {
    "compute_loss": "set loss_type to the dotted path of a loss of your own (docs/algorithms/own.md), or override "
    "training_step",
    "_prepare_inputs": "override training_step",
    **dict.fromkeys(("prediction_step", "evaluation_loop", "get_eval_dataloader"), "override evaluate"),
    "_save": "override save_model",
}
# metrics that the evaluation before training lacks: `Evaluator` measures them on the last rollout
AFTER_ROLLOUTS = ("_kl", "_velocity/", "_rollouts/")
OF_SETTINGS = ("initial_lr", "weight_decay", "betas", "eps")  # entries of an optimizer's groups that settings give


def apply_settings(optimizer: torch.optim.Optimizer, schedule: Any, settings: list[dict[str, Any]]) -> None:
    """Give an optimizer that was read from a checkpoint this run's settings, and its schedule's learning rate."""
    groups = optimizer.param_groups
    if len(groups) != len(settings):
        return
    for number, (group, values) in enumerate(zip(groups, settings, strict=True)):
        group.update({name: value for name, value in values.items() if name != "initial_lr"})
        rate = values.get("initial_lr")
        if rate is None or not isinstance(schedule, LambdaLR):
            continue
        group["initial_lr"] = schedule.base_lrs[number] = rate
        now = rate * schedule.lr_lambdas[number](schedule.last_epoch)
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(now)
        else:
            group["lr"] = now
        schedule._last_lr[number] = now  # which the log shows


class DiffusersTrainer(Trainer):
    """transformers' `Trainer` for a diffusers model, with atomic checkpoints in diffusers' layout."""

    run: dict[str, Any]
    checkpointer: checkpoints.Checkpointer  # saves and loads the policy and its companion weights

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, advice in NEVER_CALLED.items():
            if getattr(cls, name) is not getattr(Trainer, name):
                raise TypeError(f"{cls.__name__} overrides {name}(), which is never called here; {advice} instead.")

    def __init__(self, *, backend: DistributedBackend, networks: list[nn.Module], model: nn.Module, **kwargs: Any):
        self._backend, self._bound = backend, (model, networks)
        self._owns_folder = False  # True once the output folder holds this run
        self._card_details = CardDetails()
        super().__init__(model=model, **kwargs)
        # without a shared disk, the first process of each machine saves; with one, they would overwrite each other
        self.args.save_on_each_node = not is_shared(self.accelerator, Path(self.args.output_dir))
        if self.args.save_on_each_node and not self.args.save_only_model:
            shares.check_separate_disks(backend.mode, self.args.output_dir)

    def on_engine_ready(self) -> None:
        """Run after the model is wrapped and before the optimizer's state is loaded; a hook for subclasses."""

    def write_card(self, details: CardDetails) -> None:
        """Write the model card into the output folder."""

    # Set-up

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        arguments.pop("dynamo_plugin", None)  # the network's blocks are compiled already
        # autocast's cache would keep copies of all weights in half precision until the end of a call
        arguments["kwargs_handlers"].append(AutocastKwargs(cache_enabled=False))
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        """As in `Trainer`, but enables FSDP2 where accelerate would fall back to DDP."""
        super().create_accelerator_and_postprocess()
        self._backend.bind(self.accelerator, *self._bound)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """As in `Trainer`, but loads diffusers' weights before an engine shards them, and the engine's state after."""
        with self._backend.wrap_prepare(self.model), warnings.catch_warnings():
            if resume_from_checkpoint is not None and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
                self._load_from_checkpoint(resume_from_checkpoint)  # else `train` has done so
            # accelerate still passes DDP's deprecated `broadcast_buffers`; users cannot change that
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.on_engine_ready()
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
            if self.accelerator.scaler is not None:  # DeepSpeed's engine restores its own
                self._load_scaler(resume_from_checkpoint)
        return prepared

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in `Trainer`, but looks for the metrics that settings name in the evaluation before training too."""
        metrics, best = super()._evaluate(*args, **kwargs), self.args.metric_for_best_model
        limited = [name for name in self.args.stop_when or {} if name.startswith("eval_")]
        wanted = [f"eval_{best.removeprefix('eval_')}"] if best else []
        for name in filter(None, [*wanted, *limited, *map(name_error, limited)]):
            is_late = self.state.global_step == 0 and any(part in name for part in AFTER_ROLLOUTS)
            if name not in metrics and not is_late:
                raise ValueError(
                    f"{name!r} (metric_for_best_model or stop_when) is not among the metrics of the evaluation, "
                    f"{', '.join(metrics)}.{suggest(name, metrics)}"
                )
        return metrics

    def _determine_best_metric(self, *args: Any, **kwargs: Any) -> bool:
        """As in `Trainer`, but an evaluation after which `stop_when` ends the run is not the best."""
        return "stopped" not in self.run and super()._determine_best_metric(*args, **kwargs)

    # Where a run starts

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As in `Trainer`, but without the extra update it makes when a run is resumed at `max_steps`."""
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        logger.warning(
            "This run is at update %d and max_steps is %d, so nothing is trained; raise max_steps to continue.",
            self.state.global_step,
            self.state.max_steps,
        )

    def find_start(
        self, wanted: str | bool | None, held: contextlib.ExitStack, agree: Callable[[Exception | None], None]
    ) -> str | None:
        """Find the checkpoint to resume from, the same on every process; lock the output folder until `held` exits."""
        folder, step, error = Path(self.args.output_dir), None, None
        wanted = None if str(wanted).lower() == "false" else wanted
        is_named = bool(wanted) and str(wanted).lower() != "true"
        if self.args.should_save:
            try:
                held.enter_context(checkpoints.lock_folder(folder))
                checkpoints.clear_leftovers(folder)
                step = self._check_named(str(wanted)) if is_named else self._find_newest(folder, bool(wanted))
            except Exception as failed:  # refusals, and errors of the file system
                error = failed
        agree(error)
        self._owns_folder = True
        if is_named:
            return str(wanted)
        steps = [step for step in gather_json(self.accelerator, step) if step is not None]  # one per disk
        if max(steps) < 0:
            return None
        point, error = folder / f"checkpoint-{min(steps)}", None
        if self.args.should_save and not point.is_dir():
            error = ResumeError(
                f"{folder} has no checkpoint that all machines have; copy checkpoint-{max(steps)} there."
            )
        agree(error)
        return str(point)

    def _check_named(self, wanted: str) -> None:
        check_resume_folder(wanted)
        newest = next(iter(checkpoints.list_checkpoints(Path(wanted))), None)
        if newest is not None:
            raise ResumeError(f"{wanted} is the folder of a run, not a checkpoint; its newest checkpoint is {newest}.")
        checkpoints.check(Path(wanted))
        advice = "resume with the settings of that run, or from a checkpoint of this one"
        check_same_run(Path(wanted).resolve().parent, self.run, advice)

    def _find_newest(self, folder: Path, is_resumed: bool) -> int:
        """Return the update of the newest complete checkpoint; -1 if the run starts anew, in a folder that is free."""
        point = checkpoints.find_newest_whole(folder) if is_resumed else None
        if point is not None:
            check_same_run(folder, self.run)
            return int(point.name.split("-")[1])
        if not self._owns_folder or checkpoints.list_checkpoints(folder):
            if not self.args.overwrite_output_dir:
                checkpoints.refuse_used_folder(folder)
            if self.args.overwrite_output_dir or (folder / "run.json").is_file():
                # samples from before the first update are this run's own if it has logged an evaluation
                checkpoints.clear_run(folder, 0 if self.state.log_history else -1)
        return -1

    # Save

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        staging = folder.with_name(f"tmp-{folder.name}")
        self.save_model(str(staging), _internal_call=True)
        self.checkpointer.save_beside_weights(staging)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(staging))
            self._save_scaler(str(staging))
            self._save_rng_state(str(staging))
            self.checkpointer.save_rollout(staging, self.state.global_step)
        self._note_best(folder)
        if self.args.should_save:
            self._save_trainer_state(staging)
            shares.write_mode(staging, self._backend.mode, self._optimizer_name)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:  # every process has written its files by now
            checkpoints.write_manifest(staging)
            checkpoints.replace_folder(staging, folder)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:  # every disk has the new one by now
            limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(folder.parent), limit, best)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write weights that diffusers can load to `output_dir` or the run's folder; every process calls it.

        After full training this is the whole pipeline; checkpoints hold only the trained networks.

        With `ema_decay` these are the averaged weights, which evaluations use; the policy's own weights are in the
        subfolder `policy`.
        """
        folder = Path(output_dir or self.args.output_dir)
        is_final = folder.resolve() == Path(self.args.output_dir).resolve()
        self.checkpointer.save_weights(folder, whole_pipeline=is_final or not _internal_call)
        if is_final:
            if self.state.global_step > 0 and self.args.should_save:  # which mark the folder as that of a run
                write_json(folder / "run.json", self.run)
                self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            self.create_model_card()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._backend.save_optimizer(Path(output_dir), self.model, self.optimizer, self.args.should_save):
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _note_best(self, folder: Path) -> None:
        if self.state.best_global_step:
            best = folder.with_name(f"checkpoint-{self.state.best_global_step}")
            if best == folder or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _save_trainer_state(self, folder: Path) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name, state = type(callback).__name__, callback.state()
                saved = self.state.stateful_callbacks.get(name)
                self.state.stateful_callbacks[name] = [*saved, state] if isinstance(saved, list) else state
        self.state.save_to_json(str(folder / TRAINER_STATE_NAME))

    # Load

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.checkpointer.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """As in `Trainer`, but also records for the model card which checkpoint was loaded."""
        best = Path(self.state.best_model_checkpoint)
        if any(gather_json(self.accelerator, self.args.should_save and not checkpoints.is_whole(best))):
            logger.warning("%s is gone or damaged: the run ends with the weights of its last update.", best)
            self.state.best_model_checkpoint = None
            return
        self.checkpointer.load_best(best)
        self.run["published_after"] = int(best.name.split("-")[-1])
        if self.args.should_save:
            write_json(Path(self.args.output_dir) / "run.json", self.run)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As in `Trainer`, but if another mode wrote the checkpoint, the optimizer starts anew with a warning."""
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        is_readable = shares.is_readable(folder, self._backend.mode)
        missing = shares.find_missing_state(folder)
        other = shares.find_other_optimizer(folder, self._optimizer_name)
        if other is not None and is_readable and not missing:
            missing = f"state of {self._optimizer_name} but that of {other}"
        if missing and not self.args.resume_without_optimizer:
            raise ResumeError(
                f"{folder} has no {missing}, so the resumed run would end with other weights; resume from another "
                "checkpoint, or set resume_without_optimizer=True to start the optimizer afresh."
            )
        if is_readable and not missing:
            self._read_optimizer_and_scheduler(folder)
            return
        logger.warning(
            "%s was written %s, and %s %s: weights and learning rate continue from there, but the optimizer starts "
            "afresh.",
            folder,
            shares.read_mode(folder),
            f"has no {missing} to be read" if missing else "its optimizer state cannot be read",
            shares.describe_mode(self._backend.mode),
        )
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if isinstance(schedule, LambdaLR):  # other schedules follow evaluations, not updates
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # the optimizer has made no step
                for _ in range(self.state.global_step):
                    schedule.step()

    @property
    def _optimizer_name(self) -> str:
        return str(getattr(self.args.optim, "value", self.args.optim))

    def _read_optimizer_and_scheduler(self, folder: Path) -> None:
        settings = [{key: group[key] for key in OF_SETTINGS if key in group} for group in self.optimizer.param_groups]
        if self._backend.load_optimizer(folder, self.model, self.optimizer):
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
        else:
            super()._load_optimizer_and_scheduler(str(folder))
        apply_settings(self.optimizer, getattr(self.lr_scheduler, "scheduler", self.lr_scheduler), settings)

    # Hub

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the model card, `README.md`, into the output folder. Later cards of this trainer keep these values."""
        given = {"model_name": model_name, "dataset_name": dataset_name, "tags": tags}
        self._card_details = self._card_details.add(**given, **kwargs)
        if self.is_world_process_zero():
            self.write_card(self._card_details)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to search, for which a trainer would have to load its pipeline anew for each trial."""
        raise NotImplementedError(
            "hyperparameter_search() cannot load the pipeline anew for each trial; create a trainer per trial, with "
            "an output_dir of its own, and compare what evaluate() returns."
        )

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Push weights, run.json and the model card with its images; with `push_samples` everything but checkpoints.

        See `Trainer.push_to_hub` for the arguments; `kwargs` are those of `create_model_card`.
        """
        if self.is_world_process_zero():
            check_hub_access(token or self.args.hub_token)
        self._card_details = self._card_details.add(**kwargs)  # raises before anything is pushed
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token or self.args.hub_token, private=private)
        self.save_model(_internal_call=True)  # also writes the card
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        return self._upload(
            self.args.output_dir,
            commit_message,
            run_as_future=not blocking,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            **self.checkpointer.list_upload_patterns(),
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """As in `Trainer`, but in diffusers' layout and without the pickled arguments."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        is_busy = self.push_in_progress is not None and not self.push_in_progress.is_done()  # only process 0 has it
        if is_busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.checkpointer.copy_weights(Path(checkpoint_folder), Path(self.args.output_dir))
        self.create_model_card()
        message = f"Training in progress, step {self.state.global_step}"
        jobs = [self._upload(self.args.output_dir, message, **self.checkpointer.list_upload_patterns())]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = self.args.hub_strategy == HubStrategy.CHECKPOINT
            name = "last-checkpoint" if is_last else Path(checkpoint_folder).name
            jobs.append(self._upload(checkpoint_folder, f"{message}, checkpoint", path_in_repo=name))
        if is_busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)

    def _upload(self, folder: str, message: str, **kwargs: Any) -> Any:
        name_repository(Path(folder), Path(folder).resolve().name, self.hub_model_id)
        defaults = {"run_as_future": True, "token": self.args.hub_token, "revision": self.args.hub_revision}
        return hf_api().upload_folder(
            repo_id=self.hub_model_id, folder_path=folder, commit_message=message, **defaults | kwargs
        )
