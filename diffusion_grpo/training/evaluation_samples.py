"""Make the samples of an evaluation and score them, a few prompts at a time where the rewards allow it."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from ..data.inputs import PipelineInputs
from ..distributed.backend import DistributedBackend
from ..policy.base import Policy
from ..policy.rollout import rollout
from ..policy.trajectory import sample_seed
from ..rewards import Reward, RewardError
from ..rewards.overlap import waits_for_all
from ..rollout.diversity import embed_samples, find_embedders, kind_of, make_thumbnails
from ..rollout.generation import RolloutGenerator
from ..rollout.scoring import RewardScorer, takes_only_latents


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Settings of evaluations.

    Attributes:
        seed: seed of the run.
        num_generations: number of samples per prompt.
        num_inference_steps: number of denoising steps.
        batch_size: number of samples per pipeline call.
        reward_batch_size: number of samples per call of a reward, or per prompt if that is more.
        watched: names of rewards that are only watched (`watch_rewards`).
        shown: number of images that are kept of the main evaluation.
        aggregation: how several rewards are combined into one number.
        fps: frames per second of videos.
        sampling_rate: sampling rate of sound in hertz; None without sound.
        folder: output folder of the run.
    """

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
class Scores:
    """What this process has measured of the samples that it scores, in the order in which it scored them.

    Args:
        log_metric: called with the metrics that rewards log.

    Attributes:
        kind: kind of the samples, as from [`~diffusion_grpo.rollout.diversity.kind_of`]; None before the first ones.
        positions: position of each sample in the evaluation.
        rewards: (samples, functions) tensors, one for each time that samples were added.
        extra: columns that rewards added, one value per sample.
        points: tensors of what diversity is computed from, one for each time that samples were added.
    """

    log_metric: Callable[[str, float], None]
    kind: str | None = None
    positions: list[int] = dataclasses.field(default_factory=list)
    rewards: list[Tensor] = dataclasses.field(default_factory=list)
    extra: dict[str, list] = dataclasses.field(default_factory=dict)
    points: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)

    def add(self, positions: list[int], rewards: Tensor, extra: dict[str, list], points: dict[str, Tensor]) -> None:
        """Add what was measured of samples; a column that is missing here or was missing before has None there."""
        for name in self.extra | extra:
            column = self.extra.setdefault(name, [None] * len(self.positions))
            column += extra.get(name, [None] * len(positions))
        self.positions += positions
        self.rewards.append(rewards)
        for name, own in points.items():
            self.points.setdefault(name, []).append(own)


class EvaluationSampler:
    """Makes and scores one process's samples of an evaluation.

    Args:
        policy: the policy that samples.
        inputs: makes the arguments of the pipeline's calls.
        generator: finds out in which form the pipeline takes dataset rows.
        backend: distributed backend of the run.
        scorer: calls the rewards.
        rewards: trained and evaluation-only rewards.
        load_watched: returns the rewards to watch on samples of a kind; see `Evaluator`.
        settings: returns the settings of evaluations.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        inputs: PipelineInputs,
        generator: RolloutGenerator,
        backend: DistributedBackend,
        scorer: RewardScorer,
        rewards: list[Reward],
        load_watched: Callable[[str | None], list[Reward]],
        settings: Callable[[], EvaluationSettings],
    ):
        self._policy, self._inputs, self._generator, self._backend = policy, inputs, generator, backend
        self._scorer, self._rewards, self._load_watched = scorer, rewards, load_watched
        self._read_settings = settings

    def sample(self, rows: list[dict], positions: list[int]) -> list[Any]:
        """Return the sample of each row; score nothing."""
        self._generator.learn_inputs(rows)
        return self._sample(rows, positions, {})

    def sample_and_score(
        self,
        rows: list[dict],
        positions: list[int],
        own: int,
        pipeline_kwargs: dict[str, Any],
        shown: int,
        scores: Scores,
    ) -> tuple[list[Any], list[Tensor] | None]:
        """Sample some prompts at a time and score them, so that only the samples to be shown stay in memory.

        If a reward waits for all samples, or other processes score them, all samples are kept and none is scored.

        Args:
            rows, positions: dataset row and position of each sample.
            own: number of samples that count; the rest keep processes in step.
            pipeline_kwargs: pipeline arguments that override those of training.
            shown: number of positions whose samples are kept.
            scores: takes the scores.

        Returns:
            the samples that count and their latents, with None in place of dropped ones; no latents (None) unless a
            reward takes them.
        """
        self._generator.learn_inputs(rows)
        takes_latents = any(map(takes_only_latents, self._rewards + self._load_watched(None)))
        samples: list[Any] = []
        latents: list[Tensor | None] | None = [] if takes_latents else None
        size = self._part_size()
        for first in range(0, len(rows), size):
            part = slice(first, first + size)
            some = [None] * len(rows[part]) if takes_latents else None
            made = self._sample(rows[part], positions[part], pipeline_kwargs, some)
            part = slice(first, max(first, min(first + size, own)))
            made, some = made[: part.stop - first], some and some[: part.stop - first]
            if made and self._scores_in_parts(made):
                self.score(scores, made, rows[part], positions[part], some)
                made = [one if at < shown else None for one, at in zip(made, positions[part], strict=True)]
                some = some and [None] * len(made)
            samples += made
            if latents is not None:
                latents += some
        return samples, latents

    def score(
        self,
        scores: Scores,
        samples: list[Any],
        rows: list[dict],
        positions: list[int],
        latents: list[Tensor] | None,
    ) -> None:
        """Score samples by all rewards, and measure what their diversity is computed from.

        Raises:
            RewardError: a reward fails, or logs a column named like a reward.
        """
        settings, extra = self._read_settings(), {}
        count, scores.kind = settings.num_generations, kind_of(samples)
        looked_at = self._rewards + self._load_watched(scores.kind)
        groups = [position // count for position in positions]
        size, log_metric = settings.reward_batch_size, scores.log_metric
        found = self._scorer.score(looked_at, samples, rows, groups, size, log_metric, extra, latents)
        for reward in self._rewards:
            if reward.name in extra:
                raise RewardError(
                    f"log_extra({reward.name!r}) has the name of a reward, a column of the table; change it."
                )
        scores.add(positions, found, extra, self._find_points(samples) if count > 1 and scores.kind else {})

    def _find_points(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return the points whose distances are measured: thumbnails, and embeddings of rewards that have them."""
        embedders = find_embedders(self._rewards)
        embedded = {f"diversity/{reward.name}": embed_samples(reward, samples) for reward in embedders}
        return {"diversity": make_thumbnails(samples).float()} | embedded

    def _part_size(self) -> int:
        """Return how many samples are scored together: whole pipeline calls, and whole calls of the rewards."""
        settings = self._read_settings()
        prompts = max(settings.reward_batch_size // settings.num_generations, 1)
        return math.lcm(settings.batch_size, prompts * settings.num_generations)

    def _scores_in_parts(self, samples: list[Any]) -> bool:
        """Return whether samples can be scored here before all have been made."""
        rewards = self._rewards + self._load_watched(kind_of(samples))
        return self._scorer.channel is None and not any(map(waits_for_all, rewards))

    def _sample(
        self,
        rows: list[dict],
        positions: list[int],
        pipeline_kwargs: dict[str, Any],
        latents: list[Tensor | None] | None = None,
    ) -> list[Any]:
        """Return the sample of each row; store the latents from which it is decoded in `latents`, if given."""
        settings, samples = self._read_settings(), [None] * len(rows)
        for first in range(0, len(rows), settings.batch_size):
            self._policy.prompts.clear()
            parts = self._inputs.parts(rows[first : first + settings.batch_size])
            for part, _ in self._backend.equalize_outside_updates(parts):  # a repeated part gives the same samples
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
