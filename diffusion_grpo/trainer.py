"""GRPO for a diffusers pipeline on transformers' `Trainer`.

A pipeline, reward functions and a dataset of prompts go in; trained weights in diffusers' format, logs and images come
out. Read `training_step` from the top: it takes the next micro-batch (from a new rollout when the last one is used
up), then makes one forward and one backward pass per trained step. This is the only module that knows all the others.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from datasets import Dataset
from diffusers import DiffusionPipeline, ModularPipeline
from peft import PeftConfig
from torch import Tensor, nn
from transformers import TrainerCallback

from .algorithms.base import RatioError
from .algorithms.batch import MicroBatch
from .config.settings import DiffusionGRPOConfig
from .data.columns import RowError, list_given, list_types
from .data.held_out import warn_of_trained_prompts
from .data.prompts import choose_evaluated, load_given
from .data.sampler import GroupSampler
from .distributed.failure import ProcessGroupMonitor
from .policy.networks import avoid_cudnn_attention
from .report.card import CardDetails, name_repository, write_model_card
from .report.page import write_curve
from .report.record import write_json
from .rewards import Reward, RewardError, check_columns
from .rollout.runtime import Metrics, Runtime, UpdateProgress
from .training import build, preflight
from .training.base import DiffusersTrainer
from .training.checkpoints import count_updates, explain_interrupt, holds_run
from .training.learner import check_own_optimizer, make_learner
from .training.loading import load_policy
from .training.memory import weigh_run
from .training.out_of_memory import explain_out_of_memory, train_with_smaller_batches
from .training.update import NonFiniteError, Place, refuse_non_finite

logger = logging.getLogger(__name__)
Scores = Sequence[float | None] | torch.Tensor
Prompts = Dataset | list[str] | str | Path
RewardFunc = str | Callable[..., Scores | Awaitable[Scores]] | dict[Any, Any]


class DiffusionGRPOTrainer(DiffusersTrainer):
    """Trainer that fine-tunes a diffusers pipeline on rewards with GRPO (Flow-GRPO,
    https://huggingface.co/papers/2505.05470; DDPO, https://huggingface.co/papers/2305.13301).

    Args:
        model: Hub id or folder of a pipeline, "tiny" for the embedded one, a `DiffusionPipeline`, or a
            `ModularPipeline` with its components loaded.
        reward_funcs: a function, a name of `diffusion_grpo.rewards.REWARDS`, a dotted path, a list of these, or a
            mapping from these to weights or options (`rewards.load_rewards`). A function is called with the keyword
            arguments `prompts`, `completions` (also as `images` or `videos`), every dataset column, `trainer_state`,
            `log_metric` and `log_extra`. It returns one `float | None` per sample and may be async.
        args: configuration of the run, which the trainer copies; `DiffusionGRPOConfig("<model>-GRPO")` by default.
        train_dataset: dataset with a column `prompt`, a list of prompts, or a path or Hub id as in `load_prompts`.
            Columns named like parameters of the pipeline's `__call__` are passed to it; all columns are passed to the
            rewards.
        eval_dataset: held-out prompts in any such form, or a dict of several; of a path, the split `test`.
        peft_config: configuration of the LoRA to train; without it, all weights of the network are trained.
        eval_reward_funcs: evaluation-only rewards, in the same forms as `reward_funcs`.
        callbacks, optimizers: as in `Trainer`.

    Attributes:
        pipe: the pipeline being trained, which can be called as usual at any time; in full training with `bf16` or
            `fp16`, call it inside `torch.autocast`. With `ema_decay` it holds the averaged weights once training has
            ended, the same weights that were evaluated and are saved.

    Raises:
        ValueError: an argument or setting cannot work; raised before a model is loaded where possible.
        NotEnoughMemoryError: the model does not fit into memory; the message says what to change.

    Examples:
        >>> from peft import LoraConfig
        >>> def red(images, **columns):
        ...     return [image.resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]
        >>> trainer = DiffusionGRPOTrainer(
        ...     model="tiny",
        ...     reward_funcs=red,
        ...     args=DiffusionGRPOConfig(folder, max_steps=1, num_generations=4, gradient_accumulation_steps=1),
        ...     train_dataset=tiny.prompts("train"),
        ...     peft_config=LoraConfig(r=4, target_modules=["to_q", "to_v"]),
        ... )
        >>> result = trainer.train()  # doctest: +ELLIPSIS
        Training transformer (LoRA rank 4) in float32 on the CPU: each update makes 16 samples ...
        update 1/1: reward ... ± ..., grad norm ..., ... s/update
        Report: ...
        >>> trainer.pipe('the word "TEA" in red', height=32, width=96, max_sequence_length=1).images[0].size
        (96, 32)
    """

    def __init__(
        self,
        model: str | Path | DiffusionPipeline | ModularPipeline,
        reward_funcs: RewardFunc | list[RewardFunc],
        args: DiffusionGRPOConfig | None = None,
        train_dataset: Prompts | None = None,
        eval_dataset: Prompts | dict[str, Prompts] | None = None,
        peft_config: PeftConfig | None = None,
        eval_reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        prompt_column = getattr(args, "prompt_column", None)
        train_dataset = load_given(train_dataset, "train", prompt_column)
        eval_dataset = load_given(eval_dataset, "test", prompt_column)
        given = preflight.check_run(
            str(model) if isinstance(model, Path) else model,
            reward_funcs,
            eval_reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            peft_config,
            has_optimizer=optimizers[0] is not None,
        )
        self.rewards, self.backend, self.run = given.rewards, given.backend, given.record
        kinds = (RewardError, RowError, RatioError, NonFiniteError)
        self.monitor = ProcessGroupMonitor(given.args.distributed_state, kinds)
        with explain_out_of_memory(given.args, lambda: "while the model was loaded"):
            loaded = load_policy(given, peft_config, self.monitor)
            check_own_optimizer(*optimizers, loaded.model)
            self.policy, self.inputs, self.embeds = loaded.policy, loaded.inputs, loaded.embeds
            super().__init__(
                backend=self.backend,
                networks=self.policy.networks,
                model=loaded.model,
                args=given.args,
                data_collator=list,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                callbacks=callbacks,
                optimizers=optimizers,
            )
            if self.embeds is not None:
                self.embeds.share(self.accelerator)
            self.metrics, self.progress = Metrics(), UpdateProgress()
            self._sampler: GroupSampler | None = None
            self._noted_settings = preflight.note_settings(self.args)
            self._make_collaborators(given.is_full_training)
            self.inputs.check_arguments(self.args.eval_pipeline_kwargs or {}, "eval_pipeline_kwargs")

    def _make_collaborators(self, is_full_training: bool) -> None:
        """Create the objects that train, then those that sample and score, then those that save the run."""
        args, policy, inputs = self.args, self.policy, self.inputs
        runtime = Runtime(self.backend, self.monitor, self.metrics, self.progress)
        self.learner = make_learner(
            args, policy, self.model, runtime, rewards=self.rewards, is_full_training=is_full_training
        )
        build.warn_of_guidance(args, policy, inputs, self.train_dataset)
        built = build.build(
            args,
            self.rewards,
            self.learner,
            policy,
            inputs,
            runtime,
            read_rows=lambda indices: self.inputs.rows(self.train_dataset, indices),
            state=lambda: self.state,
        )
        self.update, self.passes = built.update, built.passes
        self.loader, self.evaluator = built.loader, built.evaluator
        self.step_size, self.checkpointer = built.step_size, built.checkpointer
        self.run |= build.describe_model(policy, self.model, self.inputs, self.train_dataset, self.eval_dataset)
        if self.is_world_process_zero():
            warn_of_trained_prompts(self.run["prompts"])
        build.add_callbacks(
            self.callback_handler,
            args,
            self.learner,
            self.step_size,
            accelerator=self.accelerator,
            progress=self.progress,
            run=self.run,
            write_validation=self._write_validation,
        )

    @property
    def pipe(self) -> DiffusionPipeline:
        """The pipeline being trained, which can be called as usual at any time."""
        return self.policy.pipe

    @property
    def reward_funcs(self) -> list[Reward]:
        """The rewards that are trained on."""
        return self.rewards.trained

    @property
    def eval_reward_funcs(self) -> list[Reward]:
        """The evaluation-only rewards."""
        return self.rewards.evaluated

    @property
    def reward_weights(self) -> list[float]:
        """One weight per trained reward."""
        return self.rewards.weights

    @property
    def ref_model(self) -> nn.Module | None:
        """The reference's copy of the network, as in TRL; None for a LoRA, whose reference is the base model."""
        return None if self.learner.reference is None else self.learner.reference.module

    # Data: every batch of the dataloader is one whole rollout, repeated for each micro-batch that is trained on it

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return batches of dataset rows, one rollout each; see [`~diffusion_grpo.data.sampler.GroupSampler`]."""
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset with a column 'prompt'.")
        rows, share = range(len(self.train_dataset)), self.args.batch_sizes.rollout_share
        return self._get_dataloader(rows, "Training", share, self._get_train_sampler, is_training=True)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> GroupSampler:
        num_rows, args = len(train_dataset or self.train_dataset), self.args
        seed, copies = args.seed if args.data_seed is None else args.data_seed, self.backend.groups.size
        self._sampler = GroupSampler(num_rows, args.batch_sizes, args.shuffle_dataset, seed, copies)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self._sampler is None:
            raise TypeError(
                "get_train_dataloader() must return what super().get_train_dataloader() does, whose batches are "
                "rollouts of whole groups; pass another train_dataset for other prompts or another order of them."
            )
        self._sampler.set_epoch(kwargs["epoch"])  # accelerate's wrappers do not pass it on after a resume
        self.metrics.start(self.state.global_step)
        super()._run_epoch(*args, **kwargs)

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Train; see `Trainer.train`."""
        preflight.refuse_changed_settings(self._noted_settings, self.args)
        self.loader.reset()  # a second call to `train` starts with a new rollout
        self.metrics.reset()
        folder = Path(self.args.output_dir)
        with contextlib.ExitStack() as held:
            held.enter_context(self.monitor.propagate_errors())
            wanted = resume_from_checkpoint or self.args.resume_from_checkpoint
            point = self.find_start(wanted, held, self.monitor.agree)
            for name in ("published_after", "stopped"):
                self.run.pop(name, None)
            if self.args.should_save:
                write_json(folder / "run.json", self.run)
            if self.learner.average is not None:
                self.learner.average.hide()  # a second call to `train` continues from the policy
            held.enter_context(explain_interrupt(folder, lambda: self.state.global_step))
            held.enter_context(self._explain_out_of_memory())
            held.enter_context(avoid_cudnn_attention())
            held.enter_context(torch.enable_grad())  # also where the caller has switched gradients off
            done = 0 if point is None else count_updates(Path(point))
            if done > 0:  # `eval_on_start` measures the model before its first update
                held.callback(setattr, self.args, "eval_on_start", self.args.eval_on_start)
                self.args.eval_on_start = False
            held.callback(setattr, self, "is_in_train", False)  # transformers does so only if nothing fails
            if point is None and self.state.global_step > 0 and self.args.should_log:
                logger.warning(
                    "An earlier train() of this trainer has changed the weights, and this one starts with them from "
                    "update 0. To start from the untrained model, create a new trainer."
                )
            output = train_with_smaller_batches(
                self.args,
                lambda: super(DiffusionGRPOTrainer, self).train(point, **kwargs),
                lambda: self.state.global_step - done,
                self._resize,
            )
        if self.learner.average is not None:
            self.learner.average.show()  # which was evaluated and is saved
        return output

    def _resize(self) -> None:
        """Pass changed micro-batch sizes on to the objects that use them."""
        self._train_batch_size = self.args.train_batch_size
        self._noted_settings = preflight.note_settings(self.args)
        self.loader.reset()
        self.metrics.reset()

    def _explain_out_of_memory(self, is_evaluating: bool = False) -> contextlib.AbstractContextManager[None]:
        return explain_out_of_memory(
            self.args,
            lambda: (
                f"in the {'evaluation' if is_evaluating else self.progress.stage or 'run'} after update "
                f"{self.state.global_step}"
            ),
            lambda: weigh_run(self.model, self.pipe, self.optimizer, self.loader),
            "evaluation" if is_evaluating else "training",
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer as in `Trainer`, and let the backend change it."""
        optimizer = super().create_optimizer(model)
        self.backend.prepare_optimizer(optimizer, self.model)
        if self.step_size is not None:
            self.step_size.attach(optimizer)
        return optimizer

    def on_engine_ready(self) -> None:
        """Shard the reference across the processes, like the policy."""
        if self.learner.reference is not None:
            self.learner.reference.shard()

    def training_step(self, model: nn.Module, inputs: list[int], num_items_in_batch: Any = None) -> Tensor:
        """Train on one micro-batch: one forward and one backward pass per part and trained step."""
        model.eval()  # dropout would make the replay differ from the rollout
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = self._next_batch(inputs)
        place = Place(
            update=self.state.global_step + 1,
            count=self.current_gradient_accumulation_steps,
            is_first=self.loader.is_first,
            is_last=self.accelerator.sync_gradients,
        )
        with self.metrics.time("time/update"):
            if place.is_first:
                if self.step_size is not None:
                    self.step_size.watch(batch)
                self.backend.begin_update(self.optimizer)
            if self.learner.values is not None:
                self.update.train_values(self.loader.value_targets, place)
            loss = self.update.train_policy(model, batch, place)
        every = self.args.torch_empty_cache_steps
        if every is not None and place.is_last and place.update % every == 0:
            clear_device_cache()
        if self.loader.is_used_up:
            self.metrics.finish_rollout()
        return loss

    def _next_batch(self, row_indices: list[int]) -> MicroBatch:
        """Return the next micro-batch; if a reward or a row fails in its rollout, save a checkpoint first."""
        try:
            batch = self.loader.next(row_indices, self.state.global_step, self.state.max_steps)
        except (RewardError, RowError):
            self._save_before_stopping()
            raise
        if self.args.importance_sampling_level == "sequence" and not batch.is_on_policy:  # on policy all ratios are 1
            with self.metrics.time("time/update"):
                batch.log_ratio = self.learner.run_passes(self.passes.sequence_log_ratio, batch)
        return batch

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self.step_size is not None:  # fp16 skips updates that overflow, fused optimizers do so within their step
            self.step_size.has_gradient = grad_norm is None or 0 < float(grad_norm) < torch.inf
        if not self.args.fp16:  # fp16's loss scaling already skips such updates
            update = self.state.global_step + 1
            refuse_non_finite(torch.as_tensor(grad_norm), "gradient norm", update, self.args.output_dir)
        return grad_norm

    def _get_learning_rate(self) -> float:
        return super()._get_learning_rate() * (1.0 if self.step_size is None else self.step_size.scale)

    def _save_before_stopping(self) -> None:
        """Save a checkpoint of the last update to resume from; all processes take part."""
        if self.state.global_step > 0:
            self._save_checkpoint(self.model, trial=None)

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        pipeline_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        """Sample held-out prompts without noise and score them with all rewards, including evaluation-only ones."""
        overrides = (self.args.eval_pipeline_kwargs or {}) | (pipeline_kwargs or {})
        self.inputs.check_arguments(overrides)
        is_other = eval_dataset is not None and self.eval_dataset is not None and eval_dataset is not self.eval_dataset
        is_earlier = self.run.get("published_after", self.state.global_step) != self.state.global_step
        # of an ended run in the folder, this trainer may know nothing
        is_own = self._owns_folder or self.args.overwrite_output_dir or not holds_run(Path(self.args.output_dir))
        is_kept = is_own and not (is_other or is_earlier or pipeline_kwargs)
        if not isinstance(eval_dataset, str):  # the name of one of several
            eval_dataset = load_given(eval_dataset, "test", self.args.prompt_column)
        datasets = choose_evaluated(eval_dataset, self.eval_dataset)
        for name, part in datasets.items():
            check_columns(self.rewards.all, list_given(part), name, list_types(part))
            self.inputs.check_columns(part, name)
        self.model.eval()
        if self.embeds is not None:
            with self._explain_out_of_memory(is_evaluating=True):
                self.embeds.prepare(self.accelerator, list(datasets.values()), [], **overrides)
        try:
            with (
                self.monitor.propagate_errors(),
                self._explain_out_of_memory(is_evaluating=True),
                avoid_cudnn_attention(),  # as in `train`, for comparable images
            ):
                metrics = self.evaluator.evaluate(
                    datasets, metric_key_prefix, overrides, self.state.global_step, self.state.log_history, is_kept
                )
        except (RewardError, RowError):
            if self.is_in_train:  # else the model may hold other weights than those of the last update
                self._save_before_stopping()
            raise
        if metric_key_prefix.startswith("eval"):
            self.log(dict(metrics))
            if metric_key_prefix == "eval" and not is_kept:
                self.state.log_history.pop()  # the report and the card read it, and compare the same prompts
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _write_validation(self) -> Path:
        self.model.eval()
        with self._explain_out_of_memory(is_evaluating=True):
            return self.evaluator.write_validation(
                self.args.validation_prompts, self.args.eval_pipeline_kwargs or {}, self.state.global_step
            )

    # Log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs` together with the metrics collected since the last log."""
        if "loss" in logs and self.metrics.values:
            logs = logs | self.metrics.gather(self.backend, self.state.global_step)
        super().log(logs, start_time)

    def write_card(self, details: CardDetails) -> None:
        """Write the model card into the output folder."""
        folder = Path(self.args.output_dir)
        if (folder / "run.json").is_file():
            write_curve(folder)
        repository = name_repository(self.hub_model_id, self.args.hub_model_id)
        write_model_card(folder, self.run, self.state.log_history, self.state.global_step, repository, details)
