"""GRPO for a diffusers pipeline on transformers' `Trainer`.

In: a pipeline, reward functions, a dataset of prompts. Out: trained weights that diffusers loads, logs, pictures. Read
`training_step` from the top: `_next_batch` (rollout, rewards, advantages, buffer), then one replay, loss and backward
for each trained step. This is the only module that knows all others.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
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

from .algorithms.losses import LossInputs, get_loss, loss_per_reward
from .algorithms.zero_advantages import summed_loss
from .config.settings import DiffusionGRPOConfig
from .data.held_out import count_prompts, name_prompts, warn_of_trained_prompts
from .data.inputs import checked_inputs
from .data.prompts import GroupSampler, check_dataset, named_datasets
from .distributed import fsdp
from .distributed.collectives import gathered_means
from .distributed.context_parallel import spread_over_context
from .distributed.deepspeed import (
    TrainedWeights,
    accumulating,
    check_deepspeed,
    check_experts,
    clear_gradients,
    drop_idle_gradients,
    fill_sizes,
    gathered,
    hide_deepspeed,
    in_step,
    layered,
    next_of_all,
    precision,
    redirected,
    set_learning_rate,
    without_weights,
    zero_stage,
)
from .distributed.failure import Ranks
from .policy.denoising import replaced
from .policy.rollout import TokenPolicy, replay
from .policy.token import policy_for
from .rewards import RewardError, check_columns, check_groups, check_judges, check_needs, load_rewards, reward_weights
from .rewards.subset import Post, is_scorer
from .rollout.buffer import MicroBatch, RolloutBuffer
from .rollout.generation import GeneratingTrainer
from .rollout.value_model import ValueCallback, ValueModel
from .run.adapters import continues_lora, kept_adapters
from .run.card_data import known_license, pipeline_tag
from .run.records import check_output_folder, run_record, write_json
from .run.watch import watched_rewards
from .run.weights import lora_loader
from .tiny import default_settings
from .training.average import PolicyAverage
from .training.callbacks import (
    CollapseCallback,
    PipelineTensorBoardCallback,
    ReportCallback,
    SampleGridCallback,
    SyncRefModelCallback,
    ValidationCallback,
)
from .training.evaluation import evaluate_policy, write_validation
from .training.memory import peak_memory_gib
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
from .training.offload import placed
from .training.progress import UpdateProgress, replace_progress
from .training.resume_point import explain_interrupt

# metrics of which the largest or the smallest value since the last log is kept, not the mean
LARGEST = ("ratio/max_error", "ratio/max", "spread/reward_max", "spread/advantage_max", "memory/peak_gib")
SMALLEST = ("ratio/min", "spread/reward_min", "spread/advantage_min")
RewardFunc = str | Callable[..., list[float | None]] | dict[Any, Any]


class RatioError(RuntimeError):
    """The replay does not reproduce the rollout, so the ratio is not 1 where it must be."""


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; the weights are those of the last update."""


class DiffusionGRPOTrainer(GeneratingTrainer):
    """Trains a diffusers pipeline on rewards with GRPO (Flow-GRPO, https://huggingface.co/papers/2505.05470; DDPO,
    https://huggingface.co/papers/2305.13301).

    Args:
        model: Hub id or folder of a pipeline, "tiny" for the embedded one, or a `DiffusionPipeline`.
        reward_funcs: a function, a name of `diffusion_grpo.rewards.REWARDS`, a dotted path, a list of these, or a
            mapping from these to weights or options (`rewards.load_rewards`). Called with keywords `prompts`,
            `completions` (also as `images` or `videos`), every dataset column, `trainer_state`, `log_metric` and
            `log_extra`; returns one `float | None` a sample, may be async.
        args: settings; `DiffusionGRPOConfig("<model>-GRPO")` by default.
        train_dataset: with a column `prompt`. Columns named as parameters of the pipeline's `__call__` are passed to
            it, every column to the rewards.
        eval_dataset: held-out prompts, or a dict of such datasets.
        peft_config: trains a LoRA; without it all weights of the network are trained.
        eval_reward_funcs: judges that are only measured, in evaluation.
        callbacks, optimizers: as in `Trainer`.

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
        self._take_rewards(reward_funcs, eval_reward_funcs, args)
        check_peft_config(peft_config, args.beta or args.kl_reward)
        continues = continues_lora(args.lora_path, args.lora_adapter, peft_config)
        is_full_training = peft_config is None and not continues
        if args.sync_ref_model and not is_full_training:
            raise ValueError("sync_ref_model=True needs full training: a LoRA's reference is the frozen base.")
        self._check_datasets(args, train_dataset, eval_dataset)
        if args.learning_rate is None:
            set_learning_rate(args, 1e-5 if is_full_training else 3e-4)
        check_deepspeed(args)
        fsdp.check_fsdp(args)
        hide_deepspeed()
        given = named_datasets(train_dataset, eval_dataset), self.reward_funcs + self.eval_reward_funcs
        cls = pipeline_class(model, args)
        check_scheduler(model, cls, args)
        self.inputs = None if cls is None else checked_inputs(cls, args, *given)  # before the model is loaded
        self._describe_run(model, args, peft_config)

        pipe = load_pipeline(model, args, is_full_training)
        set_seed(args.seed)  # a LoRA starts from random weights
        self.component, model = prepare_model(pipe, args, peft_config)
        self.inputs = self.inputs or checked_inputs(type(pipe), args, *given)
        self.policy = policy_for(pipe, self.component, args, self._autocast, args.bf16 or args.fp16)
        self.noise_level = args.noise_level or self.policy.default_noise_level
        self._takes_latents(self.reward_funcs + self.eval_reward_funcs)  # refuses a pipeline that gives none
        super().__init__(
            model=model,
            args=args,
            data_collator=_as_list,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self._set_up(pipe, is_full_training)
        self._begin()

    def _begin(self) -> None:
        """What a training keeps from one step to the next, before the first."""
        self.buffer: RolloutBuffer | None = None
        self._has_started = False
        self._micro_step, self._update = 0, -1
        self._resumed_from: str | None = None
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._samples, self._logged_step = 0, None
        self._failure: Exception | None = None

    def _set_up(self, pipe: DiffusionPipeline, is_full_training: bool) -> None:
        """What stands beside the model: processes, reference, value model, callbacks."""
        args = self.args
        hide_deepspeed()  # Trainer has made it known again
        if self.is_deepspeed_enabled:
            fill_sizes(self.accelerator.state.deepspeed_plugin.hf_ds_config, self.model)
        self._check_processes()
        self.weights = self._trained_weights(self.model)
        self.ranks = Ranks(self.accelerator, args.ddp_timeout, (RewardError, RatioError, NonFiniteError))
        self.post = Post(self.ranks, args.device, args.ddp_timeout) if args.scores_on_some else None
        self.ref_model = self._reference_copy() if args.needs_reference and is_full_training else None
        if args.context_parallel_size > 1:
            if self.is_deepspeed_enabled or self.is_fsdp_enabled:
                raise ValueError("context_parallel_size goes with DDP only; start without DeepSpeed and FSDP.")
            reference = [] if self.ref_model is None else [self.ref_model]
            spread_over_context([*self.policy.networks, *reference], args)
        self.offload = placed(pipe, self.policy.networks, args)
        self.values = self._value_model() if args.advantage_estimator == "gae" else None
        self._describe_model(pipe)
        self._add_callbacks()

    def _take_rewards(self, reward_funcs: Any, eval_reward_funcs: Any, args: DiffusionGRPOConfig) -> None:
        """Rewards, judges, and the loss they are trained with."""
        self.reward_funcs = load_rewards(reward_funcs)
        judges = load_rewards(eval_reward_funcs, "eval_reward_funcs")
        check_judges(self.reward_funcs, judges)
        trained = {reward.name for reward in self.reward_funcs}
        self.eval_reward_funcs = [judge for judge in judges if judge.name not in trained]  # those are measured anyway
        watched = watched_rewards(args.watch_rewards, None, self.reward_funcs)  # refuses unknown names
        if not args.scores_on_some or is_scorer(args):  # the others load nothing
            check_needs([*self.reward_funcs, *self.eval_reward_funcs, *watched])
        self.reward_weights = reward_weights(self.reward_funcs, args.reward_weights)
        if not args.scores_on_some:  # where groups are put together first
            check_groups(self.reward_funcs, args.samples_side_by_side, args.num_generations)
        self.loss = get_loss(args.loss_type)
        if args.multi_objective_aggregation == "loss_per_reward":
            self.loss = loss_per_reward(self.loss, self.reward_weights)

    def _describe_run(self, model: str | DiffusionPipeline, args: DiffusionGRPOConfig, peft_config: Any) -> None:
        """What run.json says before the model is loaded; refuses a folder in which another run is."""
        names = [[reward.name for reward in rewards] for rewards in (self.reward_funcs, self.eval_reward_funcs)]
        self.run = run_record(model_name(model), args, peft_config, *names, self.reward_weights)
        self.run["reward_options"] = {r.name: r.options() for r in self.reward_funcs + self.eval_reward_funcs}
        self.run["license"] = known_license(model_name(model))
        check_output_folder(args.output_dir, self.run, bool(args.resume_from_checkpoint))

    def _describe_model(self, pipe: DiffusionPipeline) -> None:
        """What run.json says of the model and the data."""
        counts = count_prompts(self.train_dataset, self.eval_dataset)
        if self.is_world_process_zero():
            warn_of_trained_prompts(counts)
        self.run |= {"pipeline": type(pipe).__name__, "component": self.component, "prompts": counts}
        self.run["loads_by"] = lora_loader(pipe, self.component)
        given = {*self.inputs.fixed, *(self.train_dataset.column_names if self.train_dataset is not None else [])}
        self.run["pipeline_tag"] = pipeline_tag(type(pipe), given)
        if kept := kept_adapters(pipe, self.model, self.component):
            self.run["kept_adapters"] = kept

    def _check_processes(self) -> None:
        """Refuses a layout of processes that cannot train this model."""
        if self.args.n_gpu > 1:
            raise ValueError("Several GPUs need a launcher: start with `accelerate launch`, or make one GPU visible.")
        check_experts(self.component, self.accelerator, self.args)
        tokens = isinstance(self.policy, TokenPolicy)
        if tokens and zero_stage(self.accelerator) == 3 and not self.args.ds3_gather_for_generation:
            raise ValueError(
                "ds3_gather_for_generation=False gathers each layer anew for every token, and processes that end "
                "early would be waited for; set it to True."
            )

    def _check_datasets(self, args: DiffusionGRPOConfig, train: Any, evaluation: Any) -> None:
        """Refuses datasets without prompts, or without a column that a reward asks for."""
        for name, dataset in named_datasets(train, evaluation):
            check_dataset(dataset, name)
            judges = self.eval_reward_funcs if name != "train_dataset" else []
            check_columns(self.reward_funcs + judges, dataset.column_names, name)
        if self.eval_reward_funcs and not evaluation:
            raise ValueError(
                f"eval_reward_funcs={self.eval_reward_funcs[0].name} has no prompts to be measured on; pass an "
                "eval_dataset."
            )
        if args.eval_strategy != "no" and not evaluation:
            raise ValueError(
                f"eval_strategy={args.eval_strategy.value!r} has nothing to evaluate; pass an eval_dataset."
            )

    @property
    def pipe(self) -> DiffusionPipeline:
        """The pipeline that is trained; call it at any time as usual.

        With `ema_decay` it has the average's weights once training has ended, those that were evaluated and are saved.
        """
        return self.policy.pipe

    def _autocast(self) -> contextlib.AbstractContextManager:
        return precision(self.accelerator, self.args) if self.policy.is_mixed_precision else contextlib.nullcontext()

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        arguments.pop("dynamo_plugin", None)  # the network's blocks are compiled already
        return arguments

    def create_accelerator_and_postprocess(self) -> None:
        """`Trainer`'s, which does not see where accelerate gives DDP to who asked for FSDP."""
        super().create_accelerator_and_postprocess()
        self.is_fsdp_enabled = fsdp.activate(self.accelerator, self.args)
        if self.is_fsdp_enabled:
            fsdp.settle(self.accelerator.state.fsdp_plugin, self.policy.networks)
            self.policy.skips_hooks = True

    def _trained_weights(self, model: nn.Module) -> TrainedWeights:
        if self.is_fsdp_enabled:
            weights: TrainedWeights = fsdp.ShardedWeights(model)
        else:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            weights = TrainedWeights(trained, zero_stage(self.accelerator), ", " in self.component)
        if weights.stage == 3:
            self.policy.shapes_only, self.policy.skips_hooks = lambda: without_weights(model), True
        if weights.stage == 3 or self.is_fsdp_enabled:
            self.policy.next_of_all = next_of_all(self.accelerator, weights)
        return weights

    @property
    def passes_together(self) -> bool:
        """Whether all processes must call the network equally often outside updates too: ZeRO-3, layer by layer, and
        FSDP2."""
        return self.is_fsdp_enabled or self.weights.is_parted and not self.args.ds3_gather_for_generation

    def with_weights(self, method: Callable, *args: Any) -> Any:
        """Calls what passes the network outside an update: with gathered weights, where ZeRO-3 has parted them."""
        is_unwrapped = self.model_wrapped is self.model and not self.weights.is_parted
        is_waiting = is_unwrapped and (self.is_fsdp_enabled or self.is_deepspeed_enabled)  # for its engine, on the CPU
        for network in self.policy.networks if is_waiting else []:
            network.to(self.args.device)  # before training they wait where they were loaded
        if self.is_fsdp_enabled:
            kept = fsdp.gathered(self.model, self.accelerator, self.args.fsdp_gather_for_generation)
            with self.ranks.together(), kept:
                return method(*args)
        if not self.weights.is_parted:  # a context-parallel group meets in every call of the network
            is_split = self.args.context_parallel_size > 1
            with self.ranks.together() if is_split else contextlib.nullcontext():
                return method(*args)
        if self.passes_together:
            with self.ranks.together():
                return layered(self.model_wrapped, self.accelerator.unwrap_model(self.model_wrapped), method, *args)
        with replaced(self.policy, "next_of_all", None), contextlib.ExitStack() as stack:
            for engine in (self.model_wrapped, self.ref_model):
                if engine is not None and self.accelerator.unwrap_model(engine) is not engine:
                    stack.enter_context(gathered(engine))
            return method(*args)

    def _value_model(self) -> ValueModel:
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "advantage_estimator='gae' has weights beside the policy's, which DeepSpeed and FSDP would not train; "
                "start without them."
            )
        values = ValueModel(self.args.seed).to(self.args.device)
        self.add_callback(ValueCallback(values, self.accelerator))
        return values

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """`Trainer`'s, with a group of its own for the value model."""
        optimizer = super().create_optimizer(model)
        if self.values is not None:
            parameters = list(self.values.parameters())
            if not any(
                parameter is parameters[0] for group in optimizer.param_groups for parameter in group["params"]
            ):
                group = {"params": parameters, "lr": self.args.value_learning_rate, "weight_decay": 0.0}
                optimizer.add_param_group(group)
        return optimizer

    def _add_callbacks(self) -> None:
        args = self.args
        self.ema = None
        if args.ema_decay is not None:
            self.ema = PolicyAverage(self.weights, args.ema_decay, args.ema_update_interval)
            self.add_callback(self.ema)
        if args.sync_ref_model:
            self.add_callback(
                SyncRefModelCallback(
                    self.weights, lambda: self.ref_weights, args.ref_model_mixup_alpha, args.ref_model_sync_steps
                )
            )
        if self.pop_callback(TensorBoardCallback) is not None:
            self.add_callback(PipelineTensorBoardCallback)
        self.add_callback(SampleGridCallback(self.callback_handler))
        self.progress = UpdateProgress()
        prompts = name_prompts(self.run["prompts"])
        replace_progress(self.callback_handler, args, self.progress, prompts)  # after the grid, which it may show
        self.add_callback(CollapseCallback)
        if args.validation_prompts:
            self.add_callback(ValidationCallback(lambda: write_validation(self), self.callback_handler))
        self.add_callback(ReportCallback)

    # Data: every batch of the dataloader is one whole rollout, given again for each micro-batch trained on it

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        """Row numbers of one rollout a batch; see [`~diffusion_grpo.data.prompts.GroupSampler`] for their order."""
        if self.train_dataset is None:
            raise ValueError("Training needs a train_dataset with a column 'prompt'.")
        return self._get_dataloader(
            range(len(self.train_dataset)),
            "Training",
            self.args.rollout_size,
            self._get_train_sampler,
            is_training=True,
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> GroupSampler:
        self._sampler = GroupSampler(
            num_rows=len(train_dataset or self.train_dataset),
            num_generations=self.args.num_generations,
            prompts_per_generation=self.args.prompts_per_generation,
            repeat_count=self._slots,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.data_seed if self.args.data_seed is not None else self.args.seed,
            processes=self.args.data_processes,
            copies=self.args.context_parallel_size,
        )
        return self._sampler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        self._sampler.set_epoch(kwargs["epoch"])  # accelerate's wrappers do not pass it on after a resume
        self._logged_step = self.state.global_step if self._logged_step is None else self._logged_step
        super()._run_epoch(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Trains; see `Trainer.train`.

        Raises:
            ValueError: the output folder holds a run already and `resume_from_checkpoint` does not say to go on.
            RatioError: the replay does not reproduce the rollout within `max_ratio_error`.
            NonFiniteError: a loss or gradient is not finite.
            RewardError: a reward function failed.
        """
        self.buffer, self._update, self._logged_step = None, -1, None  # a second call starts with its own rollout
        self._metrics.clear()
        self._failure = None
        with contextlib.ExitStack() as held:
            point = self._resume_point(resume_from_checkpoint or self.args.resume_from_checkpoint, held)
            self._has_started = True
            if self.args.should_save:
                write_json(Path(self.args.output_dir) / "run.json", self.run)
            if self.ema is not None:
                self.ema.hide()  # a second training goes on from the policy
            held.enter_context(explain_interrupt(Path(self.args.output_dir), lambda: self.state.global_step))
            held.enter_context(self.ranks.together())
            output = super().train(resume_from_checkpoint=point, **kwargs)
        if self.ema is not None:
            self.ema.show()
        return output

    def training_step(self, model: nn.Module, inputs: list[int], num_items_in_batch: Any = None) -> Tensor:
        """One micro-batch: a replay, a loss and a backward pass for each trained step. Returns the detached loss.

        Samples that cannot share a pipeline call pass one part after the other. Each loss is a sum over samples,
        divided by the trained steps of the whole micro-batch: every sample weighs the same however they are parted.
        """
        model.eval()  # dropout would part the replay from the rollout
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch, is_on_policy = self._next_batch(inputs, self.progress)
        start = time.perf_counter()
        total, errors = torch.zeros((), device=self.args.device), []
        if self.args.importance_sampling_level == "sequence" and not is_on_policy:  # on policy all ratios are 1
            batch.log_ratio = self.with_weights(self._sequence_log_ratio, batch)
        if batch.targets is not None:
            self._train_values(batch)
        if self._micro_step == 1:
            clear_gradients(self.optimizer, self.weights)
        if self.is_fsdp_enabled:  # Trainer's no_sync would keep whole gradients on each process
            model.set_requires_gradient_sync(True)
        passes = self._passes(batch)
        if self._micro_step == 1 or self.progress.stage != "training":
            self.progress.begin("training", len(passes) * self.current_gradient_accumulation_steps)
        for number, ((part, step), is_own) in enumerate(passes, start=1):
            is_last = number == len(passes)
            is_reduced = is_last or self.is_fsdp_enabled  # waiting would keep sharded gradients whole
            with contextlib.nullcontext() if is_reduced else accumulating(self.accelerator, model):
                with contextlib.nullcontext() if is_own else self._unmeasured():
                    loss, error = self._redirected(model, self._step_loss, part.at_step(step), step, is_on_policy)
                loss = loss * is_own / (batch.trajectory.steps.numel() * self.current_gradient_accumulation_steps)
                if (is_last or self.ranks.is_alone) and self.weights.are_shared_out:  # one process may have DDP too
                    loss = loss + self.weights.nothing()
                errors.append(error)
                self._or_later(self._refuse_non_finite, loss.detach(), "loss")
                if is_last and is_on_policy:
                    self._or_later(self._check_ratio, max(errors))
                if is_last and self.accelerator.sync_gradients:
                    self.ranks.agree(self._failure)
                self._backward(loss * self.args.context_parallel_size)  # DDP takes the mean, a group makes the sum
                self.progress.advance()
            total += loss.detach()
        if self.weights.are_shared_out and self.weights.stage == 0:
            drop_idle_gradients(self.accelerator.unwrap_model(model))
        self._metrics["time/update"].append(time.perf_counter() - start)
        return total

    def _passes(self, batch: MicroBatch) -> list[tuple[tuple[MicroBatch, int], bool]]:
        """What is trained one after the other: samples that share a call, a step they all train on; and whether
        it counts."""
        parts = [batch.part(places) for places in self.inputs.parts(batch.rows)]  # as in the rollout
        is_shared = self.weights.stage >= 2 or self.is_fsdp_enabled  # each backward pass
        passes = [one for turn in self._turns(parts) for one in in_step(turn, self.accelerator, is_shared)]
        return [((parts[number], step), is_own) for (number, step), is_own in passes]

    @contextlib.contextmanager
    def _unmeasured(self) -> Iterator[None]:
        """Metrics are left as they are: of passes that are made only because other processes make them."""
        kept, self._metrics = self._metrics, defaultdict(list)
        try:
            yield
        finally:
            self._metrics = kept

    def _or_later(self, check: Callable, *args: Any) -> None:
        """Alone, a process refuses at once; several do so together, before their gradients meet."""
        try:
            check(*args)
        except (NonFiniteError, RatioError) as error:
            if self.ranks.is_alone:
                raise
            self._failure = self._failure or error

    def _step_loss(self, batch: MicroBatch, step: int, is_on_policy: bool) -> tuple[Tensor, float]:
        """The summed loss of the samples that train on `step`, and how far their first ratio is from 1."""
        inputs = self.inputs(batch.rows)
        reference = self._reference(inputs, batch.trajectory, step) if self.args.beta > 0 else None
        now = replay(self.policy, inputs, batch.trajectory, step)
        recorded = batch.trajectory.log_probs[batch.trajectory.steps == step].to(now.log_prob)
        old = batch.old_log_prob(step).to(now.log_prob)
        if self.args.old_log_prob == "replay" and self._slots == self.args.gradient_accumulation_steps:
            old = now.log_prob.detach()  # one update a rollout: this replay is the first
        if batch.log_ratio is not None:  # that value, with the gradient of this step
            old = now.log_prob.detach() - batch.log_ratio.to(now.log_prob)
        output = summed_loss(
            self.loss,
            LossInputs(
                log_prob=now.log_prob,
                old_log_prob=old,
                advantages=batch.advantage(step).to(now.log_prob),
                **now.loss_inputs(reference),
                epsilon=self.args.epsilon,
                epsilon_high=self.args.epsilon_high,
                beta=self.args.beta,
            ),
            batch.weights,
        )
        for name, value in output.metrics.items():
            self._metrics[name].append(value.item())
        error = float((now.log_prob.detach() - recorded).double().expm1().abs().max()) if is_on_policy else 0.0
        return output.loss + self.policy.spare(), error

    def _train_values(self, batch: MicroBatch) -> None:
        """One backward pass of the value model, which shares nothing with the policy."""
        loss = self.values.loss(batch.targets, self.args.value_clip)
        self._or_later(self._refuse_non_finite, loss.detach(), "value loss")
        self._backward(loss / self.current_gradient_accumulation_steps)
        self._metrics["value/loss"].append(loss.item())

    def _redirected(self, model: nn.Module, method: Callable, *args: Any) -> Any:
        if self.is_fsdp_enabled:  # its hooks are on the network that the pipeline calls
            return method(*args)
        return redirected(model, self.accelerator.unwrap_model(model), method, *args)

    def _backward(self, loss: Tensor) -> None:
        kwargs = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        self.accelerator.backward(loss, **kwargs)

    def _check_ratio(self, error: float) -> None:
        self._metrics["ratio/max_error"].append(error)
        limit = self.args.max_ratio_error
        if limit is None or self.args.old_log_prob == "replay" or error <= limit:
            return
        raise RatioError(
            f"The first ratio after a rollout is off by {error:.1e}, more than max_ratio_error={limit:.0e}: the "
            "replay does not see what the rollout saw. Look for dropout or randomness in the pipeline, for "
            "rollout_batch_size other than per_device_train_batch_size in half precision, or set "
            'old_log_prob="replay".'
        )

    def _refuse_non_finite(self, value: Tensor, name: str) -> None:
        if not torch.isfinite(value).all():
            last = get_last_checkpoint(self.args.output_dir)
            has_stepped = self.is_deepspeed_enabled and name == "gradient norm"  # its engine steps in backward
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

    # Evaluation

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        pipeline_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, float]:
        """Samples held-out prompts without noise and scores them with all rewards and judges.

        Args:
            eval_dataset: by default the trainer's.
            ignore_keys: unused, for `Trainer`'s signature.
            metric_key_prefix: "eval" is logged, and its pictures are kept in the output folder; any other is only
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
        self.model.eval()  # no dropout, whatever the caller has set
        try:
            with self.ranks.together(), self.averaged_weights():
                distance = self._distance_to_reference() if metric_key_prefix.startswith("eval") else {}
                metrics = evaluate_policy(self, datasets, metric_key_prefix, pipeline_kwargs)
        except RewardError:
            self._save_before_stopping()
            raise
        metrics |= {f"{metric_key_prefix}_{name}": value for name, value in distance.items()}
        if metric_key_prefix.startswith("eval"):
            self.log(dict(metrics))
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # Log

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of what was measured since the last log."""
        if "loss" in logs and self._metrics:
            logs = logs | self._gathered_metrics()
            self._metrics.clear()
        super().log(logs, start_time)

    def _gathered_metrics(self) -> dict[str, float]:
        totals = ("time/rollout", "time/reward", "time/update")
        updates = max(1, self.state.global_step - self._logged_step)
        measured = self._metrics | {name: [sum(self._metrics[name]) / updates] for name in totals}
        measured["memory/peak_gib"] = [peak_memory_gib(self.args.device)]
        metrics = gathered_means(self.accelerator, measured, largest=(*LARGEST, *totals), smallest=SMALLEST)
        if self._samples:
            metrics["samples_per_second"] = self._samples / (sum(metrics[name] for name in totals) * updates)
        self._samples, self._logged_step = 0, self.state.global_step
        return metrics


def _as_list(value: Any) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]
