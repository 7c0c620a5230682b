"""Make the samples of an evaluation and score them, some prompts at a time where the rewards allow it."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.inputs import PipelineInputs
from ..distributed.backend import DistributedBackend
from ..media.samples import count_bytes
from ..policy.base import Policy
from ..policy.rollout import rollout
from ..policy.trajectory import sample_seed
from ..rewards import Reward, RewardError
from ..rewards.executor import waits_for_all
from ..rollout.score import RewardScorer, embed_samples, find_embedders, kind_of, make_thumbnails, takes_only_latents

KEPT_BYTES = 2**30  # about the most that the samples of an evaluation take, in each process, until they are scored


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Settings of evaluations."""

    seed: int
    num_generations: int
    num_inference_steps: int
    batch_size: int
    reward_batch_size: int
    watched: list[str] | None
    shown: int
    aggregation: str
    fps: float
    sampling_rate: int | None
    folder: Path


@dataclasses.dataclass
class Share:
    """One process's share of the evaluation of one dataset: its samples, and what was measured of those it scored.

    Attributes:
        rewards: (samples, functions) tensors that together cover `scored`.
    """

    rows: list[dict]
    positions: list[int]
    own: int
    shown: int
    pipeline_kwargs: dict[str, Any]
    log_metric: Callable[[str, float], None]
    samples: list[Any] = dataclasses.field(default_factory=list)
    latents: list[Tensor | None] = dataclasses.field(default_factory=list)
    largest: int = 0
    kind: str | None = None
    scored: list[int] = dataclasses.field(default_factory=list)
    rewards: list[Tensor] = dataclasses.field(default_factory=list)
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    points: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)

    def add_scores(
        self, positions: list[int], rewards: Tensor, extra: dict[str, list], points: dict[str, Tensor]
    ) -> None:
        """Add what was measured of some samples.

        Args:
            rewards: (samples, functions) rewards.
        """
        for name in self.extra | extra:
            column = self.extra.setdefault(name, [None] * len(self.scored))
            column += extra.get(name, [None] * len(positions))
        self.scored += positions
        self.rewards.append(rewards)
        for name, own in points.items():
            self.points.setdefault(name, []).append(own)

    def drop(self, first: int, end: int) -> None:
        """Drop the samples and latents of a range, except the samples that are shown."""
        for index in range(first, end):
            if self.positions[index] >= self.shown:
                self.samples[index] = None
        self.latents[first:end] = [None] * len(self.latents[first:end])


class EvaluationSampler:
    """Makes the samples of evaluations, and has them scored."""

    def __init__(
        self,
        *,
        policy: Policy,
        inputs: PipelineInputs,
        backend: DistributedBackend,
        scorer: RewardScorer,
        rewards: list[Reward],
        load_watched: Callable[[str | None], list[Reward]],
        settings: Callable[[], EvaluationSettings],
    ):
        self._policy, self._inputs, self._backend = policy, inputs, backend
        self._scorer, self._rewards, self._load_watched = scorer, rewards, load_watched
        self._read_settings = settings

    @property
    def scores_in_parts(self) -> bool:
        """Whether samples are scored before all have been made; the same on all processes.

        They are not if a reward waits for all of them.
        """
        rewards = self._rewards + self._load_watched(None)  # those for one kind are cheap, and wait for nothing
        return not any(map(waits_for_all, rewards))

    @property
    def takes_latents(self) -> bool:
        """Whether a reward takes latents in place of pixels."""
        return any(map(takes_only_latents, self._rewards + self._load_watched(None)))

    def count_part(self, largest: int) -> int:
        """Return the number of samples in a part: whole pipeline calls, and at least one call of a reward.

        Parts are as large as `KEPT_BYTES` allows, because rewards that wait for servers answer many samples together,
        and because each part may gather sharded weights.
        """
        size = self._read_settings().batch_size
        least = math.ceil(self._call_size / size) * size
        return least * max(KEPT_BYTES // largest // least, 1) if largest else least

    @property
    def _call_size(self) -> int:
        """Number of samples in a call of a reward: whole prompts."""
        settings = self._read_settings()
        return max(settings.reward_batch_size // settings.num_generations, 1) * settings.num_generations

    def sample_part(self, share: Share, first: int, end: int) -> None:
        """Make the samples of a range of rows."""
        rows, positions = share.rows[first:end], share.positions[first:end]
        latents = [None] * len(rows) if self.takes_latents else None
        made = self.sample(rows, positions, share.pipeline_kwargs, latents)
        share.largest = max(share.largest, *map(count_bytes, made)) if made else share.largest
        share.samples += made
        share.latents += latents or []
        del share.samples[share.own :], share.latents[share.own :]

    def score_part(self, share: Share, is_last: bool) -> None:
        """Score the samples that fill calls of the rewards, or all that are left, and drop them."""
        first, end = len(share.scored), len(share.samples)
        end -= 0 if is_last else (end - first) % self._call_size
        if first < end:
            part = slice(first, end)
            latents = share.latents[part] if self.takes_latents else None
            self.score(share, share.samples[part], share.rows[part], share.positions[part], latents)
            share.drop(first, end)

    def score(
        self, share: Share, samples: list[Any], rows: list[dict], positions: list[int], latents: list[Tensor] | None
    ) -> None:
        """Score samples by all rewards, and measure what their diversity is computed from."""
        settings, extra = self._read_settings(), {}
        count, share.kind = settings.num_generations, share.kind or kind_of(samples)
        looked_at = self._rewards + self._load_watched(share.kind)
        groups = [position // count for position in positions]
        found = self._scorer.score(
            looked_at,
            samples,
            rows,
            groups,
            settings.reward_batch_size,
            share.log_metric,
            extra,
            latents,
            first=len(share.scored),
        )
        for reward in self._rewards:
            if reward.name in extra:
                raise RewardError(
                    f"log_extra({reward.name!r}) has the name of a reward, a column of the table; change it."
                )
        points = self._find_points(samples) if count > 1 and share.kind is not None else {}
        share.add_scores(positions, found, extra, points)

    def sample(
        self,
        rows: list[dict],
        positions: list[int],
        pipeline_kwargs: dict[str, Any],
        latents: list[Tensor | None] | None = None,
    ) -> list[Any]:
        """Return the sample of each row."""
        settings, samples = self._read_settings(), [None] * len(rows)
        for first in range(0, len(rows), settings.batch_size):
            self._policy.prompts.clear()
            parts = self._inputs.parts(rows[first : first + settings.batch_size])
            for part, _ in self._backend.equalize(parts):  # a repeated part gives the same samples
                chosen = [first + number for number in part]
                own = None if latents is None else []
                arguments = self._inputs.of_evaluation([rows[row] for row in chosen], **pipeline_kwargs)
                images, _ = rollout(
                    self._policy,
                    arguments,
                    seeds=[sample_seed(settings.seed, "evaluation", positions[row]) for row in chosen],
                    num_inference_steps=settings.num_inference_steps,
                    noise_level=0.0,
                    latents=own,
                )
                self._inputs.check_samples(images, len(chosen), arguments)
                for number, row in enumerate(chosen):
                    samples[row] = images[number]
                    if latents is not None:
                        latents[row] = own[number]
        self._policy.prompts.clear()  # prompts encoded in other batches differ in the last bits
        return samples

    def _find_points(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return the points whose distances are measured: thumbnails, and embeddings of rewards that have them."""
        embedders = find_embedders(self._rewards)
        embedded = {f"diversity/{reward.name}": embed_samples(reward, samples) for reward in embedders}
        return {"diversity": make_thumbnails(samples).float()} | embedded
