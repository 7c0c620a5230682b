"""Checkpoints that are whole or not there, and resuming from them exactly.

In: the trainer's state. Out: folders `checkpoint-N`, written aside and renamed into place, so that a kill at any
moment leaves the older ones as they were. A module of its own because none of it depends on how the weights were
trained.
"""

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedSchedulerWrapper, broadcast
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, sort_checkpoints
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress, hf_api

from ..distributed import checkpoint_mode
from ..distributed import deepspeed as distributed
from ..distributed.deepspeed_checkpoints import restore_engine
from ..distributed.sharded_checkpoints import restore_optimizer, save_shards
from ..rollout.restore import rollout_file
from ..run import weights as hub
from ..run.card_data import upload_patterns
from ..run.records import clear_started_run, refuse_used_folder
from ..run.report import write_curve
from . import resume_point
from .average import POLICY_FOLDER, policy_folder
from .manifest import ResumeError, write_manifest
from .run_lock import locked

logger = logging.getLogger(__name__)


class CheckpointingTrainer(Trainer):
    """transformers' `Trainer` with whole checkpoints in diffusers' layout.

    The trainer that inherits sets `pipe`, `component`, `run`, `weights`, `ema`, `ref_model`, `values` (a value model,
    or None), and `buffer`, the samples of the running rollout, and `_has_started` once the run in the output folder is
    its own.
    """

    @property
    def _slots(self) -> int:
        """Micro-batches that are trained on one rollout."""
        return self.args.steps_per_generation * self.args.num_iterations

    def _resume_point(self, wanted: str | bool | None, held: contextlib.ExitStack) -> str | None:
        """The checkpoint to go on from, the same on every process; holds the output folder until `held` is left.

        Raises:
            ResumeError: another run is writing there, the checkpoint is damaged, or the output folder holds a run and
                `wanted` does not say to go on with it.
        """
        folder, point, error = Path(self.args.output_dir), None, None
        if self.args.should_save:
            try:
                held.enter_context(locked(folder))
                point = self._find_point(folder, wanted)
            except ValueError as refused:
                error = refused
        self.ranks.agree(error)
        if wanted and str(wanted).lower() != "true":
            return str(wanted)
        step = torch.tensor([-1 if point is None else int(point.name.split("-")[1])], device=self.args.device)
        step = int(broadcast(step, from_process=0))
        # without any checkpoint the run was killed before its first, and starts where the unbroken one does
        return None if step < 0 else str(folder / f"checkpoint-{step}")

    def _find_point(self, folder: Path, wanted: str | bool | None) -> Path | None:
        resume_point.clear_leftovers(folder)
        if wanted and str(wanted).lower() != "true":
            resume_point.check_named(Path(wanted))
            return None
        if not wanted and (resume_point.checkpoints(folder) or not self._has_started):
            refuse_used_folder(folder, "pass resume_from_checkpoint=True")
        point = resume_point.newest_whole(folder) if wanted else None
        if point is None and not self._has_started:
            clear_started_run(folder)
        return point

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The policy's moving average in place of its weights, where there is one."""
        if self.ema is None:
            yield
            return
        with self.ema.placed(is_shown=True):
            yield

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        staging = folder.with_name(f"tmp-{folder.name}")
        self.store_flos()
        self.save_model(str(staging), _internal_call=True)
        self._save_beside_model(staging)
        if self.values is not None and self.args.should_save:
            self.values.save(staging)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(staging))
            self._save_scaler(str(staging))
            self._save_rng_state(str(staging))
            if (
                self.buffer is not None
                and self.args.writes_samples
                and self.state.global_step * self.args.gradient_accumulation_steps % self._slots
            ):
                self.buffer.save(rollout_file(staging, self.args.data_process), self.args.data_processes)
        self._note_best(folder)
        if self.args.should_save:
            self._save_trainer_state(staging)
            checkpoint_mode.write_mode(staging, self.accelerator)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:  # every process has written what it writes
            write_manifest(staging)
            _replace_folder(staging, folder)
            self._rotate(folder.parent)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(folder))

    def _save_beside_model(self, folder: Path) -> None:
        if self.args.sync_ref_model:
            with self.ref_weights.whole(is_kept=self.args.should_save):
                self._write(self.accelerator.unwrap_model(self.ref_model), folder / "reference")

    def _write(self, model: nn.Module, folder: Path) -> None:
        if self.args.should_save:
            hub.save_policy(model, self.pipe, self.component, folder)

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

    def _rotate(self, folder: Path) -> None:
        """Deletes what `save_total_limit` leaves no room for, out of sight first: never the newest or the best."""
        limit = self.args.save_total_limit
        checkpoints = [Path(path) for path in sort_checkpoints(str(folder), use_mtime=True)]
        newest = folder / f"checkpoint-{self.state.global_step}"
        protected = {newest, Path(self.state.best_model_checkpoint or newest)}
        old = [path for path in checkpoints if path not in protected]
        for path in old[: max(0, len(checkpoints) - max(limit, len(protected)))] if limit else []:
            aside = path.with_name(f"tmp-{path.name}")
            path.rename(aside)
            shutil.rmtree(aside)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """`Trainer`'s: weights that diffusers loads, in `output_dir` or the run's folder; every process calls it.

        With `ema_decay` these are the average's, which the evaluations measure; the policy's own are in `policy`.
        """
        folder = Path(output_dir or self.args.output_dir)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or self.ema is not None:
            average = None if self.ema is None else self.ema.average.shadow_params
            with self.weights.whole(average, is_kept=self.args.should_save):
                self._save(str(folder))
        else:
            super().save_model(str(folder), _internal_call=True)
        if self.ema is not None:
            with self.ema.placed(is_shown=False), self.weights.whole(is_kept=self.args.should_save):
                self._write(self.accelerator.unwrap_model(self.model), folder / POLICY_FOLDER)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        model = self.accelerator.unwrap_model(self.model)
        is_final = folder.resolve() == Path(self.args.output_dir).resolve()
        hub.save_policy(model, self.pipe, self.component, folder, whole_pipeline=is_final)
        if is_final:
            self.create_model_card()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled:
            save_shards(Path(output_dir), self.model, self.optimizer, self.args.should_save)
        elif self.is_deepspeed_enabled:
            self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        else:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.args.should_save and not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper):
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """`Trainer`'s; weights in diffusers' layout go in before an engine parts them, its own state afterwards."""
        if not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
        with distributed.kept_buffers(self.model):
            prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._part_reference()
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        return prepared

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """`Trainer`'s; where another mode wrote the checkpoint, the optimizer starts anew and says so.

        Raises:
            ResumeError: the state is not there, and `resume_without_optimizer` does not say to go on all the same.
        """
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        is_readable = checkpoint_mode.is_readable(folder, self.accelerator)
        is_own_schedule = is_readable and not isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper)
        missing = checkpoint_mode.missing_state(folder, (SCHEDULER_NAME,) if is_own_schedule else ())
        if missing and not self.args.resume_without_optimizer:
            raise ResumeError(
                f"{folder} has no {missing}, without which the weights would end elsewhere; resume from another "
                "checkpoint, or set resume_without_optimizer=True to start the optimizer anew."
            )
        if is_readable and not missing:
            self._read_optimizer_and_scheduler(folder)
            return
        logger.warning(
            "%s was written %s, and %s %s: weights and learning rate go on from there, the optimizer starts anew.",
            folder,
            checkpoint_mode.written_mode(folder),
            f"has no {missing} to be read" if missing else "its optimizer state cannot be read",
            checkpoint_mode.mode(self.accelerator),
        )
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if isinstance(schedule, LambdaLR):  # others follow the evaluations, not the updates
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # of an optimizer without steps
                for _ in range(self.state.global_step):
                    schedule.step()

    def _read_optimizer_and_scheduler(self, folder: Path) -> None:
        with resume_point.refuse_unreadable(folder):
            if self.is_deepspeed_enabled:
                restore_engine(self.model_wrapped, folder)
            elif restore_optimizer(folder, self.model, self.optimizer):
                self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))
                return
            super()._load_optimizer_and_scheduler(str(folder))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with resume_point.refuse_unreadable(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with resume_point.refuse_unreadable(Path(checkpoint or "")):
            super()._load_scaler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if not (folder / TRAINER_STATE_NAME).is_file():
            raise ResumeError(f"{folder} is no whole checkpoint: it has no {TRAINER_STATE_NAME}.")
        with resume_point.refuse_unreadable(folder):
            self._load_average(folder)
            if self.args.sync_ref_model:
                with self.ref_weights.rewritten() if self.is_fsdp_enabled else contextlib.nullcontext():
                    hub.load_policy(self.ref_model, self.component, folder / "reference")
            self._load_policy(policy_folder(folder, has_average=self.ema is not None))
            if self.values is not None:
                self.values.load(folder)
        self._resumed_from, self.buffer, self._update = str(folder), None, -1

    def _load_average(self, folder: Path) -> None:
        """Into the moving average; the model holds it afterwards too, until its own weights are loaded."""
        if self.ema is None:
            return
        self._load_policy(folder)
        for average, value in zip(self.ema.average.shadow_params, self.weights.exact(), strict=True):
            average.data.copy_(value)

    def _load_policy(self, folder: Path) -> None:
        with self.weights.rewritten():
            hub.load_policy(self.accelerator.unwrap_model(self.model), self.component, folder)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint)
        self._load_average(best)
        self._load_policy(policy_folder(best, has_average=self.ema is not None))

    # Hub

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """Writes the model card, `README.md`, into the output folder."""
        if self.is_world_process_zero():
            if (Path(self.args.output_dir) / "run.json").is_file():
                write_curve(self.args.output_dir)
            repository = self.hub_model_id or self.args.hub_model_id
            updates = self.state.global_step
            hub.write_model_card(
                self.args.output_dir, self.run, self.state.log_history, model_name, updates, repository
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
        """`Trainer`'s, of weights, card and the pictures in it; of everything but checkpoints with `push_samples`."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            self.init_hf_repo(token=token or self.args.hub_token, private=private)
        self.save_model(_internal_call=True)  # with the card
        if not self.is_world_process_zero():
            return None
        self.create_model_card(kwargs.get("model_name"))
        self._finish_current_push()
        return self._upload(
            self.args.output_dir,
            commit_message,
            run_as_future=not blocking,
            token=token or self.args.hub_token,
            revision=revision or self.args.hub_revision,
            **upload_patterns(self.pipe.components, self.args.push_samples),
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """`Trainer`'s, for diffusers' layout and without its pickled arguments."""
        is_busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if is_busy and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        hub.copy_weights(checkpoint_folder, self.args.output_dir, self.component)
        self.create_model_card()
        message = f"Training in progress, step {self.state.global_step}"
        patterns = upload_patterns(self.pipe.components, self.args.push_samples)
        jobs = [self._upload(self.args.output_dir, message, **patterns)]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_last = self.args.hub_strategy == HubStrategy.CHECKPOINT
            name = "last-checkpoint" if is_last else Path(checkpoint_folder).name
            jobs.append(self._upload(checkpoint_folder, f"{message}, checkpoint", path_in_repo=name))
        if is_busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)

    def _upload(self, folder: str, message: str, **kwargs: Any) -> Any:
        defaults = {"run_as_future": True, "token": self.args.hub_token, "revision": self.args.hub_revision}
        return hf_api().upload_folder(
            repo_id=self.hub_model_id, folder_path=folder, commit_message=message, **defaults | kwargs
        )


def _replace_folder(source: Path, target: Path) -> None:
    """Renames into place; a folder of that name goes only after the new one stands."""
    aside = target.with_name(f"tmp-{target.name}-old")
    if target.exists():
        target.rename(aside)
    source.rename(target)
    if aside.exists():
        shutil.rmtree(aside)
