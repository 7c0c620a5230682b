"""The rewards of samples, for trainings and evaluations: what a run knows of them is put beside what rewards ask for.

In: samples with their dataset rows. Out: a `Scoring`, or the scores. A module of its own because rollouts, which are
scored while they are made, and evaluations, which are scored at once, must call rewards with the same keywords.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoints import CheckpointingTrainer
from .media import sampling_rate
from .records import extra_column
from .rewards import Reward
from .rewards.contract import is_marked
from .rewards.overlap import Overlap, RolloutScoring
from .rewards.score import Scoring, score_here
from .rollout import check_latents


def only_takes_latents(reward: Reward) -> bool:
    """Whether a reward needs no pixels."""
    return is_marked(reward.function, "takes_latents")


class ScoringTrainer(CheckpointingTrainer):
    """The part of the trainer that calls rewards; see `GeneratingTrainer` for what the trainer that inherits sets."""

    @cached_property
    def _overlap(self) -> Overlap:
        return Overlap(self.args.overlap_rewards, lambda: self.policy.draws_globally)

    def _takes_latents(self, funcs: list[Reward]) -> bool:
        """Whether one of the rewards takes latents.

        Raises:
            UnsupportedPipeline: one does, and the pipeline has none to give.
        """
        if any(map(only_takes_latents, funcs)):
            check_latents(self.policy)
            return True
        return False

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
            prompts=[row["prompt"] for row in rows],
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

    def _rewards_of(self, scoring: RolloutScoring, extra: dict[str, list]) -> Tensor:
        """(samples, functions) rewards of this process' rollout, when the last is there."""
        scoring.wait()
        return self._values(scoring.result, self._metrics, extra, len(scoring.groups))

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
