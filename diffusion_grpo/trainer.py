"""GRPO for a diffusers pipeline on transformers' `Trainer`.

A pipeline, reward functions and a dataset of prompts go in; trained weights that diffusers loads, logs and images come
out. Read `training_step` from the top: the next micro-batch (from a new rollout where the last is used up), then one
pass and one backward pass for each trained step. This is the only module that knows all others.
"""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import PeftConfig
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed

from .algorithms.base import RatioError
from .algorithms.batch import MicroBatch
from .config.settings import DiffusionGRPOConfig
from .data.held_out import warn_of_trained_prompts
from .data.prompts import check_dataset
from .data.sampler import GroupSampler
from .distributed.context_parallel import spread_over_context
from .distributed.failure import ProcessGroupMonitor
from .distributed.generation import NetworkPasses
from .policy.token import make_policy
from .rewards import Reward, RewardError
from .rollout.value_model import ValueModel
from .run.card import write_model_card
from .run.card_data import name_repository
from .run.records import write_json
from .run.report import write_curve
from .run.resume_point import explain_interrupt
from .run.weights import PolicyFiles
from .training import setup, start
from .training.base import DiffusersTrainer
from .training.checkpoints import Checkpointer
from .training.finite import NonFiniteError
from .training.metrics import Metrics
from .training.model import load_pipeline, prepare_model, stand_in_for_encoders
from .training.offload import place_pipeline
from .training.out_of_memory import MicroBatchSearch, count_updates, explain_out_of_memory, weigh_run
from .training.progress import UpdateProgress
from .training.prompt_embeds import make_prompt_embeds
from .training.update import Place, PolicyUpdate

Scores = Sequence[float | None] | torch.Tensor
RewardFunc = str | Callable[..., Scores | Awaitable[Scores]] | dict[Any, Any]


class DiffusionGRPOTrainer(DiffusersTrainer):
    """Trains a diffusers pipeline on rewards with GRPO (Flow-GRPO, https://huggingface.co/papers/2505.05470; DDPO,
    https://huggingface.co/papers/2305.13301).

    Args:
        model: Hub id or folder of a pipeline, "tiny" for the embedded one, or a `DiffusionPipeline`.
        reward_funcs: a function, a name of `diffusion_grpo.rewards.REWARDS`, a dotted path, a list of these, or a
            mapping from these to weights or options (`rewards.load_rewards`). Called with keywords `prompts`,
            `completions` (also as `images` or `videos`), every dataset column, `trainer_state`, `log_metric` and
            `log_extra`; returns one `float | None` per sample, may be async.
        args: settings; `DiffusionGRPOConfig("<model>-GRPO")` by default.
        train_dataset: with a column `prompt`. Columns named as parameters of the pipeline's `__call__` are passed to
            it, every column to the rewards.
        eval_dataset: held-out prompts, or a dict of such datasets.
        peft_config: trains a LoRA; without it all weights of the network are trained.
        eval_reward_funcs: rewards that are only measured, in evaluation.
        callbacks, optimizers: as in `Trainer`.

    Attributes:
        pipe: the pipeline that is trained; call it at any time as usual. With `ema_decay` it has the average's weights
            once training has ended, those that were evaluated and are saved.

    Raises:
        ValueError: something that cannot work, in one sentence and before a model is loaded where possible.

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
        Each update makes 4 samples (1 prompt x 4, 6 steps each).
        update 1/1: reward ... ± ..., grad norm ..., ... s/update
        Report: ...
        >>> trainer.pipe('the word "TEA" in red', height=32, width=96, max_sequence_length=1).images[0].size
        (96, 32)
    """

    def __init__(
        self,
        model: str | Path | DiffusionPipeline,
        reward_funcs: RewardFunc | list[RewardFunc],
        args: DiffusionGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        peft_config: PeftConfig | None = None,
        eval_reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ):
        given = start.check_run(
            str(model) if isinstance(model, Path) else model,
            reward_funcs,
            eval_reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            peft_config,
        )
        args, self.rewards, self.backend, self.run = given.args, given.rewards, given.backend, given.record
        encoders = stand_in_for_encoders(given.model, args)
        pipe = load_pipeline(given.model, args, given.is_full_training, self.backend, given.quantized, encoders)
        set_seed(args.seed)  # a LoRA starts from random weights
        component, network = prepare_model(pipe, args, peft_config, self.backend)
        self.inputs = given.prepare_inputs(type(pipe))
        self.policy = make_policy(
            pipe,
            component,
            sde_type=args.sde_type,
            sampling=args.token_sampling,
            access=self.backend.network_access(network),
            log_prob_type=args.log_prob_type,
        )
        setup.check_policy(args, self.policy, self.rewards)
        self.embeds = make_prompt_embeds(args, given, self.policy, self.inputs)
        super().__init__(
            backend=self.backend,
            networks=self.policy.networks,
            model=network,
            args=args,
            data_collator=list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if self.embeds is not None:
            self.embeds.share(self.accelerator)
        self._make_policy_objects(given.is_full_training)
        self._make_rollout_objects()
        self._make_keeping_objects()

    def _make_policy_objects(self, is_full_training: bool) -> None:
        """Make what an update needs: the trained weights, the reference, the algorithm and what they pass through."""
        args, backend, policy = self.args, self.backend, self.policy
        has_values = args.advantage_estimator == "gae"
        backend.check_run(policy.component, args.trains_own_steps, policy.draws_tokens, has_values)
        self.weights = backend.trained_weights(self.model, take_turns=len(policy.component) > 1)
        self.monitor = ProcessGroupMonitor(
            self.accelerator, args.ddp_timeout, (RewardError, RatioError, NonFiniteError)
        )
        self.reference = setup.make_reference(args, policy, self.model, backend, is_full_training)
        if backend.groups.size > 1:
            copy = self._reference_module()
            spread_over_context([*policy.networks, *([] if copy is None else [copy])], backend.groups, args.device)
        swaps_blocks = args.group_offload is not None
        self.offload = place_pipeline(
            self.pipe,
            policy.networks,
            args.device,
            args.offload_frozen,
            leaves_networks=swaps_blocks or backend.leaves_networks_in_place,
        )
        if swaps_blocks:
            backend.leave_frozen_weights(self.model)
        self.values = ValueModel(args.seed).to(args.device) if has_values else None
        self.metrics, self.progress = Metrics(), UpdateProgress()
        self.average = setup.make_average(args, self.weights, backend, self.metrics)
        self.algorithm = setup.make_algorithm(args, policy.networks, self.rewards.weights)
        self.old_policy = setup.make_old_policy(args, self.weights, self.algorithm)
        self.run_passes = NetworkPasses(backend, self.monitor, policy.networks, self._reference_module)
        self.update = PolicyUpdate(
            algorithm=self.algorithm,
            policy=policy,
            reference=self.reference,
            weights=self.weights,
            values=self.values,
            value_clip=args.value_clip,
            backend=backend,
            monitor=self.monitor,
            metrics=self.metrics,
            progress=self.progress,
            device=args.device,
            output_dir=args.output_dir,
        )

    def _make_rollout_objects(self) -> None:
        """Make what samples and scores, in rollouts and in evaluations."""
        args, shared = self.args, {"policy": self.policy, "backend": self.backend, "monitor": self.monitor}
        self.scorer = setup.make_scorer(args, self.rewards, state=lambda: self.state, **shared)
        shared |= {"inputs": self.inputs}
        self.replays = setup.make_replays(args, self.policy, self.reference, self.inputs, self.backend)
        generator = setup.make_generator(
            args,
            self.rewards,
            algorithm=self.algorithm,
            old_policy=self.old_policy,
            read_rows=lambda indices: self.inputs.rows(self.train_dataset, indices),
            scorer=self.scorer,
            values=self.values,
            replays=self.replays,
            run_passes=self.run_passes,
            metrics=self.metrics,
            progress=self.progress,
            **shared,
        )
        self.feed = setup.make_feed(args, generator, self.backend)
        self.evaluator = setup.make_evaluator(
            args,
            self.rewards,
            scorer=self.scorer,
            generator=generator,
            feed=self.feed,
            replays=self.replays,
            reference=self.reference,
            average=self.average,
            run_passes=self.run_passes,
            **shared,
        )

    def _make_keeping_objects(self) -> None:
        """Make what writes checkpoints, tells of the run and acts between updates."""
        args, component = self.args, self.policy.component
        self.use_checkpointer(
            Checkpointer(
                model=self.model,
                files=PolicyFiles(self.pipe, component),
                weights=self.weights,
                average=self.average,
                old_policy=self.old_policy,
                reference=self.reference if args.sync_ref_model else None,
                values=self.values,
                feed=self.feed,
                is_writer=args.should_save,
                pushes_samples=args.push_samples,
            )
        )
        self.run |= setup.describe_model(
            self.pipe, self.model, component, self.inputs, self.train_dataset, self.eval_dataset
        )
        if self.is_world_process_zero():
            warn_of_trained_prompts(self.run["prompts"])
        setup.add_callbacks(
            self.callback_handler,
            args,
            values=self.values,
            average=self.average,
            old_policy=self.old_policy,
            weights=self.weights,
            reference=self.reference,
            accelerator=self.accelerator,
            progress=self.progress,
            prompts=self.run["prompts"],
            write_validation=self._write_validation,
        )

    def _reference_module(self) -> nn.Module | None:
        """Return the reference's own copy of the network, or the engine around it; None where there is none."""
        return None if self.reference is None else self.reference.module

    @property
    def pipe(self) -> DiffusionPipeline:
        """The pipeline that is trained; call it at any time as usual."""
        return self.policy.pipe

    @property
    def reward_funcs(self) -> list[Reward]:
        """The rewards that are trained on."""
        return self.rewards.trained

    @property
    def eval_reward_funcs(self) -> list[Reward]:
        """The rewards that are only measured, in evaluations."""
        return self.rewards.evaluated

    @property
    def reward_weights(self) -> list[float]:
        """One weight for each reward that is trained on."""
        return self.rewards.weights

    # Data: every batch of the dataloader is one whole rollout, repeated for each micro-batch that is trained on it

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return dataset rows of one rollout per batch; see [`~diffusion_grpo.data.sampler.GroupSampler`]."""
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset with a column 'prompt'.")
        rows, share = range(len(self.train_dataset)), self.args.batch_sizes.rollout_share
        return self._get_dataloader(rows, "Training", share, self._get_train_sampler, is_training=True)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> GroupSampler:
        num_rows = len(train_dataset or self.train_dataset)
        self._sampler = setup.make_sampler(self.args, num_rows, copies=self.backend.groups.size)
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._sampler.set_epoch(kwargs["epoch"])  # accelerate's wrappers do not pass it on after a resume
        self.metrics.start(self.state.global_step)
        super()._run_epoch(*args, **kwargs)

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Train; see `Trainer.train`.

        Raises:
            ValueError: the output folder holds a run already and `resume_from_checkpoint` does not say to go on.
            RatioError: the replay does not reproduce the rollout within `max_ratio_error`.
            UntrainedStepError: a step that is trained on passes none of the trained networks.
            NonFiniteError: a loss or gradient is not finite.
            RewardError: a reward function failed.
            torch.OutOfMemoryError: with what takes how much, and what to change.
        """
        self.feed.reset()  # a second call starts with a rollout of its own
        self.metrics.reset()
        folder = Path(self.args.output_dir)
        with contextlib.ExitStack() as held:
            point = self.find_start(
                resume_from_checkpoint or self.args.resume_from_checkpoint, held, self.monitor.agree
            )
            if self.args.should_save:
                write_json(folder / "run.json", self.run)
            if self.average is not None:
                self.average.hide()  # a second training goes on from the policy
            held.enter_context(explain_interrupt(folder, lambda: self.state.global_step))
            held.enter_context(self.monitor.propagate_errors())
            held.enter_context(
                explain_out_of_memory(
                    self.args,
                    lambda: weigh_run(self.model, self.pipe, self.optimizer, self.feed),
                    self.progress,
                    lambda: self.state.global_step,
                )
            )
            start = count_updates(point)
            search = MicroBatchSearch(self.args, lambda: self.state.global_step - start, self._resize)
            output = search.run(lambda: super(DiffusionGRPOTrainer, self).train(point, **kwargs))
        if self.average is not None:
            self.average.show()
        return output

    def _resize(self) -> None:
        """Take changed sizes of micro-batches to where they are needed."""
        self._train_batch_size = self.args.train_batch_size
        self.replays.batch_size = self.args.rollout_batch_size or self.args.per_device_train_batch_size
        self.feed.resize(self.args.batch_sizes)
        self.metrics.reset()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with a group for the value model."""
        optimizer = super().create_optimizer(model)
        if self.values is not None:
            setup.add_value_parameters(optimizer, self.values, self.args.value_learning_rate)
        return optimizer

    def on_engine_ready(self) -> None:
        """Spread the reference over the processes, as the policy is."""
        if self.reference is not None:
            self.reference.shard()

    def training_step(self, model: nn.Module, inputs: list[int], num_items_in_batch: Any = None) -> Tensor:
        """Train on one micro-batch: one pass and one backward pass per part and trained step.

        Returns:
            the detached loss.
        """
        model.eval()  # dropout would make the replay differ from the rollout
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = self._next_batch(inputs)
        place = Place(
            update=self.state.global_step + 1,
            count=self.current_gradient_accumulation_steps,
            is_first=self.feed.is_first,
            is_last=self.accelerator.sync_gradients,
        )
        with self.metrics.time("time/update"):
            if place.is_first:
                self.backend.begin_update(self.optimizer)
            self.update.train_values(self.feed.value_targets, place)
            return self.update.train_policy(model, batch, place)

    def _next_batch(self, row_indices: list[int]) -> MicroBatch:
        """Return the next micro-batch; leave a checkpoint where a reward fails in its rollout."""
        try:
            batch = self.feed.next(row_indices, self.state.global_step, self.state.max_steps)
        except RewardError:
            self._save_before_stopping()
            raise
        if self.args.importance_sampling_level == "sequence" and not batch.is_on_policy:  # on policy all ratios are 1
            batch.log_ratio = self.run_passes(self.replays.sequence_log_ratio, batch)
        return batch

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self.args.fp16:  # its loss scaling skips such updates by itself
            self.update.check_gradient_norm(grad_norm, self.state.global_step + 1)
        return grad_norm

    def _save_before_stopping(self) -> None:
        """Write a checkpoint of the last update, to go on from; all processes write it together."""
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
        """Sample held-out prompts without noise and score them with all rewards, also those that are only measured.

        Args:
            eval_dataset: by default the trainer's.
            ignore_keys: unused, for `Trainer`'s signature.
            metric_key_prefix: "eval" is logged, and its images are kept in the output folder; any other is only
                returned.
            pipeline_kwargs: over those of training, e.g. `{"guidance_scale": 4.0}`.

        Returns:
            `{prefix}_reward`, `{prefix}_reward_std_error`, and `{prefix}_rewards/{name}/mean` and `/std_error`; of
            several datasets these are over all of them, and `{prefix}_{dataset}_...` over each. Of rewards that are
            only looked at (`watch_rewards`) `{prefix}_watch/{name}/mean` and `/std_error`; with `num_generations_eval`
            above 1 `{prefix}_diversity`; after a rollout with a reference `{prefix}_kl`, and of the training since the
            last evaluation `{prefix}_rollouts/{name}` (`watch.ROLLOUTS`).
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        datasets = dataset if isinstance(dataset, dict) else {"eval_dataset": dataset}
        for name, part in datasets.items():
            check_dataset(part, name)
            self.inputs.columns(part).check(name)
        self.model.eval()
        if self.embeds is not None:
            self.embeds.prepare(self.accelerator, list(datasets.values()), [], **(pipeline_kwargs or {}))
        try:
            with self.monitor.propagate_errors():
                metrics = self.evaluator.evaluate(
                    datasets, metric_key_prefix, pipeline_kwargs or {}, self.state.global_step, self.state.log_history
                )
        except RewardError:
            self._save_before_stopping()
            raise
        if metric_key_prefix.startswith("eval"):
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _write_validation(self) -> Path:
        """Sample `validation_prompts` with the weights that evaluations measure."""
        self.model.eval()
        return self.evaluator.write_validation(self.args.validation_prompts, self.state.global_step)

    # Log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what was measured since the last log."""
        if "loss" in logs and self.metrics:
            logs = logs | self.metrics.gather(self.backend, self.state.global_step)
        super().log(logs, start_time)

    def write_card(self, name: str | None) -> None:
        """Write the model card into the output folder."""
        folder = Path(self.args.output_dir)
        if (folder / "run.json").is_file():
            write_curve(folder)
        repository = name_repository(self.hub_model_id, self.args.hub_model_id)
        write_model_card(folder, self.run, self.state.log_history, name, self.state.global_step, repository)
