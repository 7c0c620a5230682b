"""One generation: prompts enter, samples are rolled out and scored, and what the updates need of them is kept.

In: dataset rows. Out: a `RolloutBuffer`, its micro-batches one after the other, tables and files of the samples. A
module of its own because nothing here takes a gradient.
"""

import contextlib
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..algorithms.zero_advantages import sample_weights
from ..data.inputs import check_count
from ..distributed.context_parallel import one_a_group
from ..distributed.deepspeed import in_step
from ..media.files import sampling_rate
from ..policy.rollout import rollout, sample_seed, trained_steps
from ..rewards import RewardError, reward_name
from ..rewards.overlap import RolloutScoring
from ..rewards.subset import SubsetScoring
from ..rewards.unscored import UnscoredRollouts
from ..run.kept_samples import count_kept, saves_whole_rollout
from ..run.records import write_files, write_samples
from ..run.watch import diversity, thumbnails
from ..training.progress import UpdateProgress
from .buffer import MicroBatch, Recorded, RolloutBuffer
from .credit import Estimate, estimate, measure_spread
from .order import RolloutOrder, inverse
from .reference import ReplayingTrainer
from .restore import restored_buffer
from .scoring import only_takes_latents
from .value_model import recorded_conditions, states_of_calls

AnyScoring = RolloutScoring | SubsetScoring


class GeneratingTrainer(ReplayingTrainer):
    """The part of the trainer that makes what it trains on.

    The trainer that inherits sets `policy`, `inputs`, `noise_level`, `reward_funcs`, `reward_weights`, `values`,
    `ranks` and `_metrics`, and has `with_weights`.
    """

    @cached_property
    def _unscored(self) -> UnscoredRollouts:
        names = [reward.name for reward in self.reward_funcs]
        return UnscoredRollouts(names, is_warning=self.args.process_index == 0)

    def _next_batch(self, numbers: list[int], progress: UpdateProgress) -> tuple[MicroBatch, bool]:
        """The next micro-batch, from a new rollout where the old one is used up.

        Args:
            numbers: dataset rows of the rollout.
            progress: is told how far the rollout is.

        Returns:
            the batch, and whether the policy is still the one that rolled it out.
        """
        if self._update != self.state.global_step:
            self._update, self._micro_step = self.state.global_step, 0
        step = self.state.global_step * self.args.gradient_accumulation_steps + self._micro_step
        self._micro_step += 1
        generation, slot = divmod(step, self._slots)
        if slot == 0 or self.buffer is None:
            everyone = self.accelerator.gather(torch.tensor(numbers, device=self.args.device))
            everyone = one_a_group(everyone, self.args).tolist()
            order = RolloutOrder(self.args, generation)
            if slot == 0:
                self.buffer = self._generate(order, everyone, generation, progress)
            else:
                self.buffer = self._restored_buffer(order, everyone)
        return self.buffer.micro_batch(slot), slot < self.args.gradient_accumulation_steps

    def _rows_at(self, positions: list[int], numbers: list[int]) -> list[dict]:
        """Dataset rows of samples by their position in a generation; `numbers` are those of all its rows."""
        return self.inputs.rows(self.train_dataset, [numbers[position] for position in positions])

    def _generate(
        self, order: RolloutOrder, numbers: list[int], generation: int, progress: UpdateProgress
    ) -> RolloutBuffer:
        """One rollout, its rewards (which are computed while it is made), advantages, and the buffer they end in."""
        positions = order.of_process(order.rolled, self.args.data_process)
        extra: dict[str, list] = {}
        try:
            with self.ranks.apart("reads its rows"):  # who fails at it comes to no collective of the rollout
                rows = self._rows_at(positions.tolist(), numbers)
                scoring = self._scoring_of(order, numbers, rows)
            scoring.arrivals.watch = progress.advance
            progress.begin("rollout", len(rows), copies=self.args.data_processes)
            with self.ranks.apart("rolls out"):
                with scoring:
                    samples, trajectory, *parts = self._observed_rollout(rows, generation, positions, scoring)
                    progress.begin("rewards", scoring.count)
                    start = time.perf_counter()
                    local = self._rewards_of(scoring, extra, progress.advance)
                    self._metrics["time/reward"].append(time.perf_counter() - start + scoring.waited)
            divergences, seen = (self._gathered(part, order) for part in parts)
            rewards, local, extra = self._shared(scoring, local, extra, order)
            self._unscored.add(rewards)
        except RewardError:
            self._save_before_stopping()
            raise
        self._samples += len(rewards)

        names = [reward.name for reward in self.reward_funcs]
        found = estimate(self.args, self.reward_weights, names, rewards, positions, divergences, seen, self.values)
        self._log_rewards(rewards, found)
        self._log_diversity(samples, order)
        files = self._sample_files(samples, positions)
        if self.args.log_completions or files:
            self._write_samples(rows, local, found.columns | {"seed": trajectory.seeds.tolist()} | files | extra)
        return self._buffer_of(rows, trajectory, found, order)

    def _observed_rollout(
        self, rows: list[dict], generation: int, positions: Tensor, scoring: AnyScoring
    ) -> tuple[list, Recorded, Tensor | None, Tensor | None]:
        """Samples, trajectories, and of the trained steps what the settings ask for: KL divergences, states."""
        start = time.perf_counter()
        samples, trajectory, divergences, seen = self.with_weights(
            self._rolled_out, rows, generation, positions, scoring
        )
        for name, value in trajectory.metrics().items():
            self._metrics[name].append(value)
        self._metrics["time/rollout"].append(time.perf_counter() - start - scoring.waited)
        return samples, trajectory, divergences, seen

    def _shared(
        self, scoring: AnyScoring, local: Tensor, extra: dict[str, list], order: RolloutOrder
    ) -> tuple[Tensor, Tensor, dict[str, list]]:
        """Rewards of all samples by position; and of those made here rewards and the columns that rewards added."""
        if self.post is None:
            return self._gathered(local, order), local, extra
        self.post.close()
        scored, own = scoring.deal.taken, scoring.deal.own
        rewards = self._of_all(local, scored, len(order.rolled))
        return rewards, rewards[own], self._extra_of(extra, scored, own)

    def _gathered(self, local: Tensor | None, order: RolloutOrder) -> Tensor | None:
        """What every process has, by position in the generation; on the CPU."""
        if local is None:
            return None
        every = one_a_group(self.accelerator.gather(local.to(self.args.device)), self.args)
        return every.cpu()[inverse(order.by_process())]

    def _learn(self, rows: list[dict]) -> None:
        all_ask = self.accelerator if self.passes_together else None
        self.inputs.learn(self.policy, rows, self.noise_level, accelerator=all_ask)

    def _rolled_out(
        self, rows: list[dict], generation: int, positions: Tensor, scoring: AnyScoring
    ) -> tuple[list, Recorded, Tensor | None, Tensor | None]:
        """What of a generation passes the network; divergences for `kl_reward`, states for a value model."""
        self._learn(rows)
        observed = contextlib.nullcontext() if self.values is None else recorded_conditions(self.policy)
        with observed as conditions:
            samples, trajectory = self._rollout(rows, generation, positions, scoring)
        divergences = self._divergences(rows, trajectory) if self.args.kl_reward > 0 else None
        seen = None
        if conditions is not None:
            seen = states_of_calls(trajectory.samples, conditions, self.inputs.calls(rows))
        return samples, trajectory, divergences, seen

    @torch.no_grad()
    def _rollout(
        self, rows: list[dict], generation: int, positions: Tensor, scoring: AnyScoring
    ) -> tuple[list, Recorded]:
        """Samples and trajectories of `rows`, in chunks; what each gets depends on its place in the generation."""
        args = self.args
        self.policy.prompts.clear()
        self.model.eval()
        start, stop = window = args.window_of(generation)
        groups = positions // args.num_generations
        seeds = torch.tensor([sample_seed(args.seed, "noise", generation, place) for place in positions.tolist()])
        places = groups if args.same_initial_noise else positions
        initial = torch.tensor([sample_seed(args.seed, "initial", generation, place) for place in places.tolist()])
        noise_steps = range(start, stop) if args.deterministic_outside_window else None
        steps = trained_steps(
            args.num_inference_steps, window, args.timestep_fraction, seeds if args.permute_steps else None
        )
        steps = steps if args.permute_steps else steps * len(rows)
        trajectories = [None] * len(rows)
        is_saved = saves_whole_rollout(args, self.state.global_step)
        is_decoded = is_saved or not all(map(only_takes_latents, self.reward_funcs))
        calls = self.inputs.calls(rows)
        for places, is_own in in_step(calls, self.accelerator, self.passes_together):
            latents = [] if self._takes_latents(self.reward_funcs) else None
            images, trajectory = rollout(
                self.policy,
                self.inputs([rows[place] for place in places]),
                seeds=seeds[places],
                initial_seeds=initial[places],
                num_inference_steps=args.num_inference_steps,
                steps=[steps[place] for place in places],
                noise_steps=noise_steps,
                noise_in_last_step=args.noise_in_last_step,
                noise_level=self.noise_level,
                device=self._trajectory_device,
                latents=latents,
                is_decoded=is_decoded,
            )
            check_count(latents if images is None else images, len(places), self.pipe)
            if is_own:
                scoring.add(places, images, latents)
            for number, place in enumerate(places):
                trajectories[place] = trajectory[[number]]
        return scoring.samples, Recorded(trajectories)

    @property
    def _trajectory_device(self) -> Any:
        return "cpu" if self.args.offload_trajectories else self.args.device

    def _log_rewards(self, rewards: Tensor, found: Estimate) -> None:
        metrics, result = self._metrics, found.result
        for name, value in found.metrics.items():
            metrics[name].append(value)
        if not result.rewards.isnan().all():
            metrics["reward"].append(result.rewards.nanmean().item())
        metrics["reward_std"].append(result.group_std.mean().item())
        metrics["frac_reward_zero_std"].append(result.frac_reward_zero_std)
        spread = measure_spread("reward", result.rewards) | measure_spread("advantage", found.every)
        for name, value in spread.items():
            metrics[name].append(value)
        if self.args.advantage_clip is not None:
            reached = result.advantages.abs() >= self.args.advantage_clip
            metrics["frac_advantage_clipped"].append(reached.float().mean().item())
        for func, column in zip(self.reward_funcs, rewards.T, strict=True):
            known = column[~column.isnan()]
            if len(known):
                metrics[f"rewards/{reward_name(func)}/mean"].append(known.mean().item())
            if len(known) > 1:  # unbiased, as that of the groups in `reward_std`
                metrics[f"rewards/{reward_name(func)}/std"].append(known.std().item())

    def _log_diversity(self, samples: list, order: RolloutOrder) -> None:
        """How different the samples of a prompt are, wherever they were made."""
        points = None if samples[0] is None else thumbnails(samples)  # None: only latents are looked at
        if points is not None:
            points = self._gathered(points, order)
            found = diversity(points, torch.arange(len(points)) // self.args.num_generations)
            self._metrics["diversity"] += [] if found is None else [found]

    def _write_samples(self, rows: list[dict], rewards: Tensor, columns: dict[str, list]) -> None:
        if not self.args.writes_samples:
            return
        names = [reward_name(func) for func in self.reward_funcs]
        rank = f"-rank{self.args.data_process}" if self.args.data_processes > 1 else ""
        path = Path(self.args.output_dir) / "samples" / f"step-{self.state.global_step:06d}{rank}.parquet"
        table = {"step": [self.state.global_step] * len(rows), "prompt": [row.get("prompt", "") for row in rows]}
        table |= dict(zip(names, rewards.T.tolist(), strict=True))
        write_samples(path, columns | table)

    def _sample_files(self, samples: list, positions: Tensor) -> dict[str, list]:
        """Columns that name the files of this rollout's samples; none where it is not its turn to be saved."""
        folder, step = Path(self.args.output_dir) / "samples", self.state.global_step
        kept = count_kept(self.args, step, self.state.max_steps)
        if kept == 0 or not self.args.writes_samples or samples[0] is None:  # None: only latents are looked at
            return {}
        names = [f"{position:04d}" if position < kept else None for position in positions.tolist()]
        stems = [None if name is None else folder / f"step-{step:06d}" / name for name in names]
        return write_files(samples, stems, folder, self.args.fps, sampling_rate(self.pipe))

    def _buffer_of(
        self, rows: list[dict], trajectory: Recorded, found: Estimate, order: RolloutOrder
    ) -> RolloutBuffer:
        args, process = self.args, self.args.data_process
        trained = order.trained(found.result.advantages)
        positions = order.of_process(trained, process)
        weights = sample_weights(found.every, trained)[positions] if args.drop_zero_advantages else None
        kept = inverse(order.of_process(order.rolled, process), len(order.rolled))[positions]
        buffer = RolloutBuffer(
            [rows[place] for place in kept.tolist()],
            trajectory[kept],
            found.advantages[kept].to(args.device),
            args.per_device_train_batch_size,
            order.seed,
            None if found.targets is None else found.targets[kept],
            positions,
            order.updates,
            weights,
        )
        if args.old_log_prob == "replay" and self._slots > args.gradient_accumulation_steps:
            buffer.old_log_probs = self.with_weights(self._replayed_log_probs, buffer)
        return buffer

    def _restored_buffer(self, order: RolloutOrder, numbers: list[int]) -> RolloutBuffer:
        def rows_at(positions: list[int]) -> list[dict]:
            rows = self._rows_at(positions, numbers)
            self.with_weights(self._learn, rows)
            return rows

        folder, process = Path(self._resumed_from or ""), self.args.data_process
        return restored_buffer(folder, order, process, rows_at, self._trajectory_device)
