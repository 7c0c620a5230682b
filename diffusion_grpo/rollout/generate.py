"""Make rollouts, without gradients, and hand out their micro-batches in order.

`RolloutLoader` is what an update asks. When the last rollout is used up, its `RolloutGenerator` makes a new one: it
takes shared first steps, samples, scores, estimates advantages, and keeps what updates need.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..algorithms.batch import MicroBatch, Rows
from ..config.settings import DiffusionGRPOConfig
from ..data.call_form import learn_forms, refuse_single
from ..data.inputs import PipelineInputs
from ..distributed.backend import DistributedBackend
from ..policy.base import Policy
from ..policy.token_process import TokenTrajectory
from ..policy.trajectory import CleanSamples, Prefix, RolloutRequest, Trajectory
from ..report.samples import SampleWriter
from ..rewards.contract import takes_only_latents
from ..rewards.executor import GroupScoring
from .buffer import RolloutBuffer, Samples
from .estimator import AdvantageEstimator, Estimate
from .passes import Passes
from .plan import RolloutOrder, RolloutPlan, SamplingPlan, gather_by_position
from .restore import restore_buffer, rollout_file, save_buffer
from .runtime import Runtime
from .score import RewardScorer, SignalCheck, make_thumbnails, measure_diversity
from .value_model import ValueTargets, record_conditions, reduce_calls

logger = logging.getLogger(__name__)
Calls = list[list[int]]


class RolloutGenerator:
    """Generator of rollouts, which also writes tables and files of their samples."""

    def __init__(
        self,
        args: DiffusionGRPOConfig,
        policy: Policy,
        inputs: PipelineInputs,
        *,
        scorer: RewardScorer,
        estimator: AdvantageEstimator,
        passes: Passes,
        writer: SampleWriter,
        runtime: Runtime,
    ):
        self._args, self._policy, self.inputs = args, policy, inputs
        self.scorer, self._estimator, self._passes, self._writer = scorer, estimator, passes, writer
        self._backend, self._monitor = runtime.backend, runtime.monitor
        self._metrics, self._progress = runtime.metrics, runtime.progress
        self._plan, self._recording, self._anchor = SamplingPlan(args), passes.recording, args.anchor
        self._device = args.trajectory_device
        takes_latents = list(map(takes_only_latents, scorer.rewards))
        self._takes_latents, self._needs_pixels = any(takes_latents), not all(takes_latents)
        self._signal = SignalCheck(estimator.names, warns=args.process_index == 0)

    def __call__(
        self, order: RolloutOrder, read_rows: Callable[[list[int]], Rows], step: int, last_step: int
    ) -> RolloutBuffer:
        """Make and score one rollout, and return the buffer for its updates."""
        positions, metrics = order.own(), self._metrics
        indices = [order.row_indices[position] for position in positions.tolist()]
        with self._monitor.barrier_after("reads its rows"), metrics.time("time/rollout"):
            # a process that fails here reaches no collective
            rows = read_rows(indices)
            groups = (positions // order.sizes.num_generations).tolist()
            scoring = self.scorer.open(self.scorer.rewards, rows, groups)
        self._progress.begin("rollout", len(rows), copies=self._backend.groups.count)
        with self._monitor.barrier_after("rolls out"), scoring:
            with metrics.time("time/rollout"), self._passes.show_sampler():
                samples, trajectories, *observed = self._passes.run(self._roll_out, rows, order, step, scoring)
            if self._policy.draws_tokens:
                metrics.add_all(TokenTrajectory.cat(trajectories).metrics())
            self._progress.begin("rewards", len(rows))
            with metrics.time("time/reward"):
                local, extra = scoring.finish(metrics.add, self._progress.advance)
        with metrics.time("time/rollout"):
            divergences, states = (gather_by_position(self._backend, part, order) for part in observed)
            rewards = gather_by_position(self._backend, local, order)
            metrics.samples += len(rewards)
            estimate = self._estimator(rewards, positions, divergences, states)
            measured = estimate.metrics
            points = None if samples[0] is None else make_thumbnails(samples)  # None: rewards see only latents
            if points is not None:
                points = gather_by_position(self._backend, points, order)
                diversity = measure_diversity(points, torch.arange(len(points)) // order.sizes.num_generations)
                measured |= {} if diversity is None else {"diversity": diversity}
            metrics.add_all(measured)
            self._signal.add(rewards, measured)
            if logger.isEnabledFor(logging.DEBUG):
                self._describe(step, trajectories[0], rewards)
            seeds = torch.cat([trajectory.seeds for trajectory in trajectories]).tolist()
            columns = estimate.columns | {"seed": seeds, "row": indices} | extra
            self._writer.write(step, last_step, rows, samples, positions, local, columns)
            return self._buffer(rows, trajectories, estimate, order)

    def learn(self, rows: Rows) -> None:
        """Find out in which form the pipeline takes these rows, if that is not known yet."""
        self._passes.run(self.learn_inputs, rows)

    def learn_inputs(self, rows: Rows) -> None:
        """Do the same as `learn`, when called by `Passes.run`."""
        all_ask = self._backend.accelerator if self._backend.passes_together else None
        if all_ask is not None or self.inputs.has_new(rows):
            learn_forms(self.inputs, self._policy, rows, self._args.noise_level, accelerator=all_ask)
        if self._recording.whole_groups:
            refuse_single(self.inputs, rows, self._args.loss_type)

    def _roll_out(
        self, rows: Rows, order: RolloutOrder, step: int, scoring: GroupScoring
    ) -> tuple[list, Samples, Tensor | None, Tensor | None]:
        """Do the part of a rollout that calls the network."""
        self.learn_inputs(rows)
        observes = self._estimator.values is not None
        with record_conditions(self._policy) if observes else contextlib.nullcontext() as conditions:
            trajectories = self._sample(rows, order, step, scoring)
        divergences = self._passes.rollout_divergences(rows, trajectories) if self._args.kl_reward > 0 else None
        states = None
        if observes:
            calls = self.inputs.calls(rows, order.sizes.rollout_call)
            states = reduce_calls(trajectories, conditions[: len(calls)], calls)  # without repeated calls
        return scoring.samples, trajectories, divergences, states

    @torch.no_grad()
    def _sample(self, rows: Rows, order: RolloutOrder, step: int, scoring: GroupScoring) -> Samples:
        """Sample `rows` call by call, hand the samples to the scoring, and return their trajectories."""
        self._policy.prompts.clear()
        plan = self._plan.draw(order.generation, order.own())
        is_decoded = self._writer.saves_all(step) or self._needs_pixels
        trajectories: list = [None] * len(rows)
        calls, prefixes = self.inputs.calls(rows, order.sizes.rollout_call), None
        # where a group shares one latent, only if samples with equal inputs make equal calls of the network
        differs = self._policy.draws_tokens or self.inputs.draws_globally
        has_several = 1 < self._plan.samples_per_latent < self._plan.num_generations
        if plan.prefix_lengths is not None and (has_several or not differs):
            calls = split_by_length(calls, plan.prefix_lengths)
            length = self._args.num_inference_steps
            run = functools.partial(self._policy.run_prefix, num_inference_steps=length, device=self._device)
            prefixes = compute_prefixes(run, self.inputs, self._backend, rows, calls, plan)
        for indices, is_own in self._backend.equalize(calls):
            latents = [] if self._takes_latents else None
            arguments = self.inputs([rows[index] for index in indices])
            request = RolloutRequest(
                seeds=plan.seeds[indices],
                initial_seeds=plan.initial_seeds[indices],
                num_inference_steps=self._args.num_inference_steps,
                steps=[plan.steps[index] for index in indices],
                noise_steps=None if plan.noise_steps is None else [plan.noise_steps[index] for index in indices],
                noise_in_last_step=self._args.noisy_steps == "all_and_last",
                noise_level=self._args.noise_level,
                device=self._device,
                latents=latents,
                is_decoded=is_decoded,
                step_weight=self._args.step_weight,
                weighted_steps=self._plan.trainable_steps,
                keeps_means=self._recording.old == "mean" and self._anchor == "rollout",
                keeps_finished=self._recording.finished,
                keeps=self._recording.keeps,
                prefix=None if prefixes is None else Prefix.cat([prefixes[index] for index in indices]),
            )
            images, trajectory = self._policy.rollout(arguments, request)
            self.inputs.check_samples(latents if images is None else images, len(indices), arguments)
            if is_own:
                scoring.add(indices, images, latents)
                self._progress.advance(len(indices))
            for number, index in enumerate(indices):
                trajectories[index] = trajectory[[number]]
        return TokenTrajectory.align(trajectories) if self._policy.draws_tokens else trajectories

    def _describe(self, step: int, trajectory: Trajectory | TokenTrajectory | CleanSamples, rewards: Tensor) -> None:
        """Write lines for debugging about a rollout: the shapes of what it recorded, its rewards and its schedule."""
        recorded = {name: tuple(value.shape) for name, value in vars(trajectory).items() if isinstance(value, Tensor)}
        logger.debug("RL_METRIC: rollout after update %d, recorded of a sample: %s", step, recorded)
        logger.debug("RL_METRIC: rewards %s, mean %s", tuple(rewards.shape), rewards.nanmean(0).tolist())
        timesteps = getattr(getattr(self._policy, "scheduler", None), "timesteps", ())  # there are none for tokens
        logger.debug("RL_METRIC: timesteps %s", [round(float(timestep), 3) for timestep in timesteps])

    def _buffer(self, rows: Rows, trajectories: Samples, estimate: Estimate, order: RolloutOrder) -> RolloutBuffer:
        """Return the buffer of the samples that are trained on, with what updates need of the current policy."""
        trained = order.trained(estimate.result.ranking)
        positions = order.own(trained)
        places = {position: place for place, position in enumerate(order.own().tolist())}
        kept = [places[position] for position in positions.tolist()]
        advantages = self._estimator.weigh(estimate, trained)[positions]
        advantages.values = advantages.values.to(self._args.device)
        rows, trajectories = [rows[place] for place in kept], [trajectories[place] for place in kept]
        buffer = RolloutBuffer(rows, trajectories, advantages, self.inputs, order, positions)
        self._passes.record_old(buffer)
        return buffer


class RolloutLoader:
    """Loader of the micro-batches of a run.

    Attributes:
        is_first: whether the last micro-batch handed out is the first of its update.
        is_used_up: whether it is the last of its rollout.
    """

    def __init__(
        self,
        generator: RolloutGenerator,
        args: DiffusionGRPOConfig,
        backend: DistributedBackend,
        read_rows: Callable[[list[int]], Rows],
    ):
        self._generator, self._args, self._backend, self._read_rows = generator, args, backend, read_rows
        self._checkpoint: Path | None = None
        self.reset()

    def reset(self) -> None:
        """Forget the current rollout, so that the next micro-batch starts a new one, of the sizes set now."""
        self.buffer: RolloutBuffer | None = None
        self._sizes, self._slot, self._update, self._micro_step = self._args.batch_sizes, 0, -1, 0
        self.is_first = self.is_used_up = False

    def resume_from(self, checkpoint: Path) -> None:
        """Start from a checkpoint, which may have been written within a rollout."""
        self.reset()
        self._checkpoint = checkpoint

    def next(self, row_indices: list[int], step: int, last_step: int) -> MicroBatch:
        """Return the next micro-batch."""
        if self._update != step:
            self._update, self._micro_step = step, 0
        self.is_first = self._micro_step == 0
        generation, self._slot = divmod(step * self._sizes.accumulation + self._micro_step, self._sizes.slots)
        self._micro_step += 1
        self.is_used_up = self._slot == self._sizes.slots - 1
        if self._slot == 0 or self.buffer is None:
            everyone = self._backend.gather(torch.tensor(row_indices, device=self._args.device)).tolist()
            order = RolloutOrder(self._sizes, self._args.seed, generation, everyone)
            if self._slot == 0:
                self.buffer = self._generator(order, self._read_rows, step, last_step)
            else:
                self.buffer = self._restore(order)
        return self.buffer.micro_batch(self._slot)

    @property
    def value_targets(self) -> ValueTargets:
        """The value model's targets in the last micro-batch handed out."""
        return self.buffer.advantages.targets[self.buffer.range_of(self._slot)]

    def save(self, folder: Path, step: int) -> None:
        """Write the current rollout into a checkpoint after `step` updates, unless it is used up."""
        is_within = self.buffer is not None and step * self._sizes.accumulation % self._sizes.slots
        if is_within and self._backend.groups.is_first:
            save_buffer(self.buffer, rollout_file(folder, self._sizes.data_process))

    def _restore(self, order: RolloutOrder) -> RolloutBuffer:
        def learn_rows(indices: list[int]) -> Rows:
            rows = self._read_rows(indices)
            self._generator.learn(rows)
            return rows

        folder = self._checkpoint or Path()
        return restore_buffer(folder, order, self._generator.inputs, learn_rows, self._args.trajectory_device)


def compute_prefixes(
    run_prefix: Callable[..., Prefix],
    inputs: PipelineInputs,
    backend: DistributedBackend,
    rows: Rows,
    calls: Calls,
    plan: RolloutPlan,
) -> list[Prefix]:
    """Take the steps from an initial latent to its samples' first noise once, and predict the step after them.

    Return the prefix of each sample. Latents that share a call in the rollout also share a call here. A micro-batch
    with the same latents makes the same call in a replay, so that its prediction is the same bit for bit.
    """
    seeds, first_of, shared = plan.initial_seeds.tolist(), {}, []
    for call in calls:
        new = {seeds[index]: index for index in reversed(call) if seeds[index] not in first_of}
        first_of |= new
        shared += [sorted(new.values())] if new else []
    prefixes: dict[int, Prefix] = {}
    for indices, _ in backend.equalize(shared):  # a repeated call gives the same latents
        arguments, length = inputs([rows[index] for index in indices]), plan.prefix_lengths[indices[0]]
        prefix = run_prefix(arguments, length, initial_seeds=plan.initial_seeds[indices])
        prefixes |= {index: prefix[[number]] for number, index in enumerate(indices)}
    return [prefixes[first_of[seed]] for seed in seeds]


def split_by_length(calls: Calls, lengths: list[int]) -> Calls:
    """Split pipeline calls so that all samples of a call branch at the same step."""
    return [
        [index for index in call if lengths[index] == length]
        for call in calls
        for length in dict.fromkeys(lengths[index] for index in call)
    ]
