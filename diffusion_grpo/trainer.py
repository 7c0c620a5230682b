"""GRPO for a diffusers pipeline on transformers' `Trainer`.

A pipeline, reward functions and a dataset of prompts go in; trained weights that diffusers loads, logs and images come
out. Read `training_step` from the top: the next micro-batch (from a new rollout where the last is used up), then one
pass and one backward pass for each trained step. This is the only module that knows all others.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import PeftConfig
from torch import Tensor, nn
from transformers import TrainerCallback, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_utils import get_last_checkpoint

from .algorithms.base import RatioError
from .algorithms.batch import MicroBatch
from .config.checks import check_token_settings
from .config.settings import DiffusionGRPOConfig
from .data.held_out import count_prompts, name_prompts, warn_of_trained_prompts
from .data.inputs import checked_inputs
from .data.prompts import check_dataset, named_datasets
from .data.sampler import GroupSampler
from .distributed.context_parallel import spread_over_context
from .distributed.deepspeed import set_learning_rate
from .distributed.failure import Ranks
from .distributed.generation import NetworkPasses
from .media.files import sampling_rate
from .policy.token import make_policy
from .rewards import RewardError
from .rewards.overlap import Overlap
from .rewards.reward_processes import SampleChannel
from .rewards.unscored import UnscoredRollouts
from .rollout.feed import RolloutFeed
from .rollout.generation import RolloutGenerator
from .rollout.reference import AdapterReference, CopiedReference
from .rollout.replays import Replays
from .rollout.scoring import RewardScorer, takes_only_latents
from .rollout.value_model import ValueCallback, ValueModel
from .run.adapters import continues_lora, kept_adapters
from .run.card_data import known_license, pipeline_tag
from .run.records import check_output_folder, run_record, write_json
from .run.report import write_curve
from .run.resume_point import explain_interrupt
from .run.weights import PolicyFiles, lora_loader, write_model_card
from .tiny import default_settings
from .training.average import PolicyAverage
from .training.base import DiffusersTrainer
from .training.callbacks import (
    CollapseCallback,
    PipelineTensorBoardCallback,
    ReportCallback,
    SampleGridCallback,
    SyncRefModelCallback,
    ValidationCallback,
)
from .training.checkpoints import Checkpointer
from .training.evaluation import Evaluator
from .training.metrics import Metrics
from .training.model import (
    check_args,
    check_model,
    check_peft_config,
    check_scheduler,
    load_pipeline,
    model_name,
    pipeline_class,
    prepare_model,
)
from .training.offload import place_pipeline
from .training.progress import UpdateProgress, replace_progress
from .training.setup import (
    RunRewards,
    add_value_parameters,
    check_datasets,
    choose_backend,
    evaluation_settings,
    load_run_rewards,
    make_algorithm,
    make_credit,
    make_sample_writer,
    make_sampling_plan,
)

RewardFunc = str | Callable[..., list[float | None]] | dict[Any, Any]


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are those of the last update."""


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
        model = str(model) if isinstance(model, Path) else model
        check_model(model)
        check_args(args)
        args = args or DiffusionGRPOConfig(f"{model_name(model).split('/')[-1]}-GRPO")
        if model == "tiny":
            args.fill(default_settings(args.given))
        self.rewards = load_run_rewards(reward_funcs, eval_reward_funcs, args)
        check_peft_config(peft_config, args.beta or args.kl_reward)
        is_full_training = peft_config is None and not continues_lora(args.lora_path, args.lora_adapter, peft_config)
        if args.sync_ref_model and not is_full_training:
            raise ValueError("sync_ref_model=True needs full training: a LoRA's reference is the frozen base.")
        check_datasets(self.rewards, args, train_dataset, eval_dataset)
        if args.learning_rate is None:
            set_learning_rate(args, 1e-5 if is_full_training else 3e-4)
        self.backend = choose_backend(args)
        datasets = named_datasets(train_dataset, eval_dataset)
        cls = pipeline_class(model, args)
        check_scheduler(model, cls, args)
        # None for a pipeline whose code comes from elsewhere: it is checked once it is loaded
        inputs = None if cls is None else checked_inputs(cls, args, datasets, self.rewards.all)
        self.run = _describe_run(model, args, peft_config, self.rewards)
        check_output_folder(args.output_dir, self.run, bool(args.resume_from_checkpoint))

        pipe = load_pipeline(model, args, is_full_training)
        set_seed(args.seed)  # a LoRA starts from random weights
        component, network = prepare_model(pipe, args, peft_config)
        self.inputs = inputs or checked_inputs(type(pipe), args, datasets, self.rewards.all)
        self.policy = make_policy(
            pipe,
            component,
            sde_type=args.sde_type,
            sampling=args.token_sampling,
            access=self.backend.network_access(network),
            log_prob_type=args.log_prob_type,
        )
        self._check_policy(args)
        super().__init__(
            backend=self.backend,
            networks=self.policy.networks,
            model=network,
            args=args,
            data_collator=_as_list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._assemble(is_full_training)

    def _check_policy(self, args: DiffusionGRPOConfig) -> None:
        """Refuse settings that do not fit the policy."""
        if self.policy.draws_tokens:
            check_token_settings(args)
        elif args.noise_in_last_step:
            self.policy.check_noise_in_last_step()
        if any(map(takes_only_latents, self.rewards.all)):
            self.policy.check_latents()

    def _assemble(self, is_full_training: bool) -> None:
        """Make the objects that the trainer holds and calls."""
        args, backend, component = self.args, self.backend, self.policy.component
        groups, sizes = backend.groups, args.batch_sizes
        has_values = args.advantage_estimator == "gae"
        backend.check_run(component, args.permute_steps, self.policy.draws_tokens, has_values)
        self.weights = backend.trained_weights(self.model, take_turns=len(component) > 1)
        self.ranks = Ranks(self.accelerator, args.ddp_timeout, (RewardError, RatioError, NonFiniteError))
        self.reference = self._make_reference(is_full_training)
        reference_module = getattr(self.reference, "module", None)
        if groups.size > 1:
            copies = [] if reference_module is None else [reference_module]
            spread_over_context([*self.policy.networks, *copies], groups, args.device)
        self.offload = place_pipeline(
            self.pipe, self.policy.networks, args.device, args.offload_frozen, backend.leaves_networks_in_place
        )
        self.values = ValueModel(args.seed).to(args.device) if has_values else None
        self.metrics, self.progress = Metrics(), UpdateProgress()
        self.algorithm = make_algorithm(args, component, self.rewards.weights)
        self.run_passes = NetworkPasses(
            backend, self.ranks, self.policy.networks, lambda: getattr(self.reference, "module", None)
        )
        batch_size = args.rollout_batch_size or args.per_device_train_batch_size
        self.replays = Replays(self.policy, self.reference, self.inputs, backend, batch_size)
        rate = sampling_rate(self.pipe)
        self.scorer = RewardScorer(
            self.rewards.trained,
            inputs=self.inputs,
            backend=backend,
            ranks=self.ranks,
            reward_processes=args.reward_processes,
            channel=SampleChannel(self.ranks, args.device, args.ddp_timeout) if args.scores_on_some else None,
            overlap=Overlap(args.overlap_rewards, lambda: self.policy.draws_globally, lambda: backend.passes_together),
            fps=args.fps,
            sampling_rate=rate,
            state=lambda: self.state,
            failures=Path(args.output_dir) / "failures",
        )
        trajectory_device = "cpu" if args.offload_trajectories else args.device
        generator = RolloutGenerator(
            policy=self.policy,
            inputs=self.inputs,
            dataset=self.train_dataset,
            plan=make_sampling_plan(args),
            scorer=self.scorer,
            credit=make_credit(args, self.rewards, self.values),
            replays=self.replays,
            writer=make_sample_writer(args, self.rewards, groups, rate),
            unscored=UnscoredRollouts(self.rewards.names, is_warning=args.process_index == 0),
            backend=backend,
            ranks=self.ranks,
            run_passes=self.run_passes,
            metrics=self.metrics,
            progress=self.progress,
            noise_level=args.noise_level or self.policy.default_noise_level,
            noise_in_last_step=args.noise_in_last_step,
            measures_divergence=args.kl_reward > 0,
            anchors_on_replay=args.old_log_prob == "replay" and sizes.updates_per_rollout > 1,
            drops_zero_advantages=args.drop_zero_advantages,
            trajectory_device=trajectory_device,
            device=args.device,
        )
        self.feed = RolloutFeed(
            generator,
            sizes=sizes,
            seed=args.seed,
            backend=backend,
            device=args.device,
            trajectory_device=trajectory_device,
        )
        self.evaluator = Evaluator(
            policy=self.policy,
            inputs=self.inputs,
            scorer=self.scorer,
            generator=generator,
            eval_rewards=self.rewards.evaluated,
            reward_weights=self.rewards.weights,
            backend=backend,
            ranks=self.ranks,
            run_passes=self.run_passes,
            settings=evaluation_settings(args, rate),
        )
        self.average = None
        if args.ema_decay is not None:
            self.average = PolicyAverage(self.weights, args.ema_decay, args.ema_update_interval)
        self.use_checkpointer(
            Checkpointer(
                model=self.model,
                files=PolicyFiles(self.pipe, component),
                weights=self.weights,
                average=self.average,
                reference=self.reference if args.sync_ref_model else None,
                values=self.values,
                feed=self.feed,
                backend=backend,
                is_writer=args.should_save,
                pushes_samples=args.push_samples,
            )
        )
        self._describe_model()
        self._add_callbacks()

    def _make_reference(self, is_full_training: bool) -> AdapterReference | CopiedReference | None:
        """Make the frozen reference; None where full training does without a second copy of the weights."""
        if not is_full_training:
            return AdapterReference(self.policy, self.model)
        if not self.args.needs_reference:
            return None
        return CopiedReference(self.policy, self.model, self.backend, self.args.device, self.args.offload_ref_model)

    def _describe_model(self) -> None:
        """Add to run.json what is known of the model and the data once they are loaded."""
        counts, pipe, component = (
            count_prompts(self.train_dataset, self.eval_dataset),
            self.pipe,
            self.policy.component,
        )
        if self.is_world_process_zero():
            warn_of_trained_prompts(counts)
        self.run |= {"pipeline": type(pipe).__name__, "component": ", ".join(component), "prompts": counts}
        self.run["loads_by"] = lora_loader(pipe, component[0])
        given = {*self.inputs.fixed, *(self.train_dataset.column_names if self.train_dataset is not None else [])}
        self.run["pipeline_tag"] = pipeline_tag(type(pipe), given)
        if kept := kept_adapters(pipe, self.model, component):
            self.run["kept_adapters"] = kept

    def _add_callbacks(self) -> None:
        args, handler = self.args, self.callback_handler
        if self.values is not None:
            self.add_callback(ValueCallback(self.values, self.accelerator))
        if self.average is not None:
            self.add_callback(self.average)
        if args.sync_ref_model:
            alpha, interval = args.ref_model_mixup_alpha, args.ref_model_sync_steps
            self.add_callback(SyncRefModelCallback(self.weights, lambda: self.reference.weights, alpha, interval))
        if self.pop_callback(TensorBoardCallback) is not None:
            self.add_callback(PipelineTensorBoardCallback)
        self.add_callback(SampleGridCallback(handler))
        prompts = name_prompts(self.run["prompts"])
        replace_progress(handler, args, self.progress, prompts)  # after the grid, which it may show
        self.add_callback(CollapseCallback)
        if args.validation_prompts:
            self.add_callback(ValidationCallback(self._write_validation, handler))
        self.add_callback(ReportCallback)

    @property
    def pipe(self) -> DiffusionPipeline:
        """The pipeline that is trained; call it at any time as usual."""
        return self.policy.pipe

    @property
    def reward_funcs(self) -> list:
        """The rewards that are trained on."""
        return self.rewards.trained

    # Data: every batch of the dataloader is one whole rollout, repeated for each micro-batch that is trained on it

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Return dataset rows of one rollout per batch; see [`~diffusion_grpo.data.sampler.GroupSampler`]."""
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset with a column 'prompt'.")
        rows, share = range(len(self.train_dataset)), self.args.batch_sizes.rollout_share
        return self._get_dataloader(rows, "Training", share, self._get_train_sampler, is_training=True)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> GroupSampler:
        sizes = self.args.batch_sizes
        self._sampler = GroupSampler(
            num_rows=len(train_dataset or self.train_dataset),
            num_generations=sizes.num_generations,
            prompts_per_rollout=sizes.prompts_per_rollout,
            repeat_count=sizes.slots,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            processes=sizes.data_processes,
            copies=self.backend.groups.size,
        )
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
            NonFiniteError: a loss or gradient is not finite.
            RewardError: a reward function failed.
        """
        self.feed.reset()  # a second call starts with a rollout of its own
        self.metrics.reset()
        folder = Path(self.args.output_dir)
        with contextlib.ExitStack() as held:
            start = self.find_start(resume_from_checkpoint or self.args.resume_from_checkpoint, held, self.ranks.agree)
            if self.args.should_save:
                write_json(folder / "run.json", self.run)
            if self.average is not None:
                self.average.hide()  # a second training goes on from the policy
            held.enter_context(explain_interrupt(folder, lambda: self.state.global_step))
            held.enter_context(self.ranks.together())
            output = super().train(resume_from_checkpoint=start, **kwargs)
        if self.average is not None:
            self.average.show()
        return output

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with a group for the value model."""
        optimizer = super().create_optimizer(model)
        if self.values is not None:
            add_value_parameters(optimizer, self.values, self.args.value_learning_rate)
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
        with self.metrics.time("time/update"):
            self._train_values()
            if self.feed.is_first:
                self.backend.begin_update(self.optimizer)
            self.backend.begin_micro_batch(model)
            loss = self._train_policy(model, batch)
            self.backend.finish_micro_batch(model, self.weights)
        return loss

    def _next_batch(self, row_indices: list[int]) -> MicroBatch:
        """Return the next micro-batch; leave a checkpoint where a reward fails in its rollout."""
        try:
            batch = self.feed.next(row_indices, self.state.global_step, self.state.max_steps)
        except RewardError:
            self._save_before_stopping()
            raise
        if self.algorithm.by_sequence and not batch.is_on_policy:  # on policy all ratios are 1
            batch.log_ratio = self.run_passes(self.replays.sequence_log_ratio, batch)
        return batch

    def _train_policy(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Make the passes of a micro-batch.

        Each loss is a sum over samples, divided by the trained steps of the whole micro-batch: every sample weighs the
        same, however they are split into parts.
        """
        backend, ranks, outputs = self.backend, self.ranks, []

        def compute(part: Any, step: int) -> Tensor:
            outputs.append(self.algorithm.loss(self.policy, self.reference, part, step))
            return outputs[-1].loss

        total = torch.zeros((), device=self.args.device)
        passes = [one for turn in self.algorithm.passes(batch) for one in backend.equalize(turn)]
        if self.feed.is_first or self.progress.stage != "training":
            self.progress.begin("training", len(passes) * self.current_gradient_accumulation_steps)
        for number, ((part, step), counts) in enumerate(passes, start=1):
            is_last = number == len(passes)
            with backend.accumulate(model, is_last):
                loss = backend.forward(model, compute, part, step)
                loss = loss * counts / (batch.num_trained_steps * self.current_gradient_accumulation_steps)
                if (is_last or ranks.is_alone) and self.weights.leave_some_without_gradient:
                    loss = loss + self.weights.zero()  # one process may have DDP too
                if counts:
                    self.metrics.add_all(outputs[-1].metrics)
                ranks.defer(self._refuse_non_finite, loss.detach(), "loss")
                if is_last:
                    drift = max(output.drift for output in outputs)
                    self.metrics.add_all(ranks.defer(self.algorithm.check, batch, drift) or {})
                    if self.accelerator.sync_gradients:
                        ranks.agree_on_deferred()
                backend.backward(loss * backend.groups.size)  # DDP takes the mean, a context group makes the sum
            self.progress.advance()
            total += loss.detach()
        return total

    def _train_values(self) -> None:
        """Make one backward pass of the value model, which shares nothing with the policy."""
        targets = self.feed.value_targets
        if targets is None:
            return
        loss = self.values.loss(targets, self.args.value_clip)
        self.ranks.defer(self._refuse_non_finite, loss.detach(), "value loss")
        self.backend.backward(loss / self.current_gradient_accumulation_steps)
        self.metrics.add("value/loss", loss.item())

    def _refuse_non_finite(self, value: Tensor, name: str) -> None:
        if not torch.isfinite(value).all():
            last = get_last_checkpoint(self.args.output_dir)
            has_stepped = self.backend.steps_in_backward and name == "gradient norm"
            kept = "the weights may hold it already" if has_stepped else "the weights were not updated"
            raise NonFiniteError(
                f"The {name} of update {self.state.global_step + 1} is {value.item()}; {kept}. "
                f"Newest whole checkpoint: {last or 'none'}. Try a lower learning rate, or float32."
            )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if not self.args.fp16:  # its loss scaling skips such updates by itself
            self._refuse_non_finite(torch.as_tensor(grad_norm), "gradient norm")
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
        try:
            with self.ranks.together(), self._averaged_weights():
                distance = self._distance_to_reference() if metric_key_prefix.startswith("eval") else {}
                metrics = self.evaluator.evaluate(
                    datasets, metric_key_prefix, pipeline_kwargs or {}, self.state.global_step, self.state.log_history
                )
        except RewardError:
            self._save_before_stopping()
            raise
        metrics |= {f"{metric_key_prefix}_{name}": value for name, value in distance.items()}
        if metric_key_prefix.startswith("eval"):
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _averaged_weights(self) -> contextlib.AbstractContextManager:
        """Have the moving average in place of the policy's weights inside, where there is one."""
        return contextlib.nullcontext() if self.average is None else self.average.placed(is_shown=True)

    def _distance_to_reference(self) -> dict[str, float]:
        """Measure the KL divergence at the trained steps of one micro-batch of the last rollout, whatever beta is.

        Nothing is measured before the first rollout, for tokens, and where no reference is kept: full training with
        beta=0 would need a second copy of the weights for it.
        """
        if self.feed.buffer is None or self.reference is None or self.policy.draws_tokens:
            return {}
        local = self.run_passes(self.replays.divergences, self.feed.buffer.micro_batch(0)).mean()
        return {"kl": self.accelerator.gather(local.to(self.args.device)).mean().item()}

    def _write_validation(self) -> Path:
        """Sample `validation_prompts` with the weights that evaluations measure."""
        self.model.eval()
        with self._averaged_weights():
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
        repository = self.hub_model_id or self.args.hub_model_id
        write_model_card(folder, self.run, self.state.log_history, name, self.state.global_step, repository)


def _describe_run(
    model: str | DiffusionPipeline, args: DiffusionGRPOConfig, peft_config: PeftConfig | None, rewards: RunRewards
) -> dict[str, Any]:
    """Return what run.json says before the model is loaded."""
    evaluated = [reward.name for reward in rewards.evaluated]
    run = run_record(model_name(model), args, peft_config, rewards.names, evaluated, rewards.weights)
    run["reward_options"] = {reward.name: reward.options() for reward in rewards.all}
    run["license"] = known_license(model_name(model))
    return run


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
