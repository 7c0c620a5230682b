"""The rewards of samples, for trainings and evaluations: what a run knows of them is put beside what rewards ask for.

In: samples with their dataset rows. Out: a `Scoring`, or the scores. A module of its own because rollouts, which are
scored while they are made, and evaluations, which are scored at once, must call rewards with the same keywords.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.prompts import prompts_of
from ..distributed.collectives import gathered_bytes
from ..media.files import sampling_rate
from ..media.serialize import packed_columns, unpacked_columns
from ..policy.rollout import check_latents
from ..rewards import Reward
from ..rewards.contract import is_marked
from ..rewards.overlap import Overlap, RolloutScoring
from ..rewards.score import Scoring, score_here
from ..rewards.subset import Deal, Post, SubsetScoring, exchanged
from ..run.records import extra_column
from ..training.checkpoints import CheckpointingTrainer
from .order import RolloutOrder


def only_takes_latents(reward: Reward) -> bool:
    """Whether a reward needs no pixels."""
    return is_marked(reward.function, "takes_latents")


class ScoringTrainer(CheckpointingTrainer):
    """The part of the trainer that calls rewards; see `GeneratingTrainer` for what the trainer that inherits sets.

    It sets `post` too: None where each process scores its own samples.
    """

    post: Post | None

    @cached_property
    def _overlap(self) -> Overlap:
        return Overlap(self.args.overlap_rewards, lambda: self.policy.draws_globally, self.passes_together)

    def _takes_latents(self, funcs: list[Reward]) -> bool:
        """Whether one of the rewards takes latents.

        Raises:
            UnsupportedPipeline: one does, and the pipeline has none to give.
        """
        if any(map(only_takes_latents, funcs)):
            check_latents(self.policy)
            return True
        return False

    def _scoring_of(self, order: RolloutOrder, numbers: list[int], rows: list[dict]) -> RolloutScoring | SubsetScoring:
        """Takes the samples of a rollout as they are made.

        Args:
            order: of the samples of all processes.
            numbers: dataset row of each position.
            rows: of this process' samples.
        """
        size = self.args.num_generations
        if self.post is None:
            own = order.of_process(order.rolled, self.args.data_process)
            return self._rollout_scoring(rows, (own // size).tolist())
        deal = self._deal([order.of_process(order.rolled, p).tolist() for p in range(self.args.data_processes)], size)
        groups, own = ([position // size for position in positions] for positions in (deal.taken, deal.own))
        rows = self.inputs.rows(self.train_dataset, [numbers[position] for position in deal.taken])
        return SubsetScoring(deal, self.post, self._rollout_scoring(rows, groups), own)

    def _deal(self, made: list[list[int]], group_size: int) -> Deal:
        """Who scores what of the positions that each process makes."""
        args = self.args
        return Deal.of(made, group_size, args.reward_processes, args.process_index, args.context_parallel_size)

    def _rollout_scoring(self, rows: list[dict], groups: list[int]) -> RolloutScoring:
        """Takes the samples of a rollout as they are made; `groups` has the group of each."""

        def begin(
            funcs: list[Reward], places: list[int], samples: list[Any] | None, latents: list[Tensor] | None
        ) -> Scoring:
            own = [rows[place] for place in places]
            return self._scoring(funcs, samples, own, [groups[place] for place in places], latents, places)

        return RolloutScoring(self.reward_funcs, groups, begin, self._overlap, self._announce)

    def _scoring(
        self,
        funcs: list[Reward],
        samples: list | None,
        rows: list[dict],
        groups: list[int],
        latents: list[Tensor] | None,
        places: list[int] | None = None,
    ) -> Scoring:
        kinds = {} if samples is None else {"videos" if isinstance(samples[0], list) else "images": samples}
        return Scoring(
            funcs,
            **kinds,
            latents=latents,
            prompts=prompts_of(rows),
            columns={name: [row[name] for row in rows] for name in rows[0] if name != "prompt"},
            groups=groups,
            fps=self.args.fps,
            sampling_rate=sampling_rate(self.pipe),
            trainer_state=self.state,
            places=places,
        )

    def _score(
        self,
        funcs: list[Reward],
        samples: list,
        rows: list[dict],
        metrics: dict[str, list[float]],
        groups: list[int],
        extra: dict[str, list],
        latents: list[Tensor] | None = None,
    ) -> Tensor:
        """(samples, functions) float32 rewards of this process, NaN for None.

        What they log goes into `metrics`, the columns they add, one value a sample, into `extra`.
        """
        scoring = self._scoring(funcs, samples, rows, groups, latents)
        score_here([scoring], self._announce)
        return self._values(scoring.values, metrics, extra, len(samples))

    def _rewards_of(
        self, scoring: RolloutScoring | SubsetScoring, extra: dict[str, list], watch: Callable[[int], None]
    ) -> Tensor:
        """Wait for this process's rewards, `(samples, functions)`; `watch` is told how many samples have theirs."""
        scoring.wait(watch)
        return self._values(scoring.result, self._metrics, extra, scoring.count)

    def _of_all(self, values: Tensor, places: list[int], total: int) -> Tensor:
        """What every process has, `(total, ...)` float32 on the CPU: a collective of all.

        Args:
            values: `(places, ...)` of this process, at places that no other one has.
        """
        every = torch.zeros(total, *values.shape[1:])
        every[places] = values.float()
        return self.accelerator.reduce(every.to(self.args.device), "sum").cpu()

    def _extra_of(self, extra: dict[str, list], places: list[int], own: list[int]) -> dict[str, list]:
        """Columns that rewards added for the samples at `own`, wherever these were scored: a collective of all.

        Args:
            extra: columns that they added here, one value for each of `places`.
        """
        found: dict[str, list] = {}
        for content in gathered_bytes(self.accelerator, packed_columns(extra, places)):
            columns, others = unpacked_columns(content)
            known = {place: row for row, place in enumerate(others)}
            for name, column in columns.items():
                for number, place in enumerate(own):
                    if place in known:
                        found.setdefault(name, [None] * len(own))[number] = column[known[place]]
        return found

    def _to_score(
        self, made: list[list[int]], group_size: int, samples: list, latents: list[Tensor] | None
    ) -> tuple[list[int], list, list[Tensor] | None]:
        """Places, samples and latents of what this process scores, inside of `apart`; of an evaluation.

        Args:
            made: places of what each process makes, `samples` and `latents` those of this one.
        """
        if self.post is None:
            return made[self.args.data_process], samples, latents
        return exchanged(self._deal(made, group_size), self.post, samples, latents)

    def _values(self, values: Any, metrics: dict[str, list[float]], extra: dict[str, list], count: int) -> Tensor:
        return values(
            Path(self.args.output_dir) / "failures",
            lambda name, value: metrics[name].append(value),
            lambda name, column: extra.update({name: extra_column(name, column, count)}),
        )

    def _announce(self, names: str | None) -> None:
        self.ranks.announce("rolls out" if names is None else f"computes the reward {names}")

    def _save_before_stopping(self) -> None:
        """A checkpoint of the last update, to go on from; all processes save it together."""
        if self.state.global_step > 0:
            self._save_checkpoint(self.model, trial=None)
