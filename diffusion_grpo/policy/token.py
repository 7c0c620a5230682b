"""The policy whose actions are tokens: a language model in the pipeline writes them, and the rest is a fixed decoder.

A rollout returns samples and a `TokenTrajectory`; a replay returns the `TokenDistribution` of the recorded tokens
under the current model, with gradient. As with latents, both call the pipeline, so that prompts, images and templates
come from it and cannot drift apart. In the rollout, `generate` draws tokens; in the replay, it scores the recorded
tokens, and the call ends there. `make_policy` chooses between this policy and that of denoising steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.nn.functional import pad

from ..media.samples import extract_samples
from ..pipelines import family_of
from .base import Policy, policy_component
from .denoising import DenoisingPolicy
from .drivers import StepScored, UnsupportedPipeline
from .language_model import Drawn, recomputing, score, select_prompt
from .networks import NetworkAccess, replace_attribute
from .token_process import TokenDistribution, TokenTrajectory, pack_bits, unpack_bits
from .trajectory import RolloutRequest


class TokenPolicy(Policy):
    """A policy whose network is the language model of the pipeline's family; it needs no scheduler.

    Args:
        pipe, component, access, sampling: see [`~diffusion_grpo.policy.base.Policy`].

    Examples:
        `make_policy` chooses it where `component` names a language model. The embedded model has none:

        >>> isinstance(make_policy(pipe), TokenPolicy)
        False
    """

    draws_tokens = True

    @property
    def default_noise_level(self) -> None:
        return None  # the decoder takes the pipeline's own steps

    def check_noise_level(self, noise_level: float | None) -> None:
        """Accept any level: tokens have no SDE."""

    def check_latents(self) -> None:
        raise UnsupportedPipeline(
            f"A reward takes latents, but {type(self.pipe).__name__} gives none: its policy writes tokens; use "
            "rewards that take the finished samples."
        )

    def run_prefix(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to branch."""
        raise UnsupportedPipeline(
            f"{type(self.pipe).__name__}'s policy samples tokens, so there are no noiseless steps that samples could "
            "share; leave out samples_per_latent."
        )

    @contextlib.contextmanager
    def _generating(self, generate: Callable, initial_seeds: Tensor) -> Iterator[None]:
        """Put `generate` in place of the language model's; restore the pipeline on leaving."""
        replaced = replace_attribute(self.network, "generate", generate)
        with self._calling(initial_seeds), self.family.bridged(self.pipe), replaced:
            yield

    def rollout(self, inputs: dict[str, Any], request: RolloutRequest) -> tuple[Any, TokenTrajectory | None]:
        """Call the pipeline with tokens drawn from the request's seeds; `noise_level=0` records nothing.

        The recorded log-probabilities come from a teacher-forced pass right after the generation, in the same batch
        and by the same code as in the replay. Those of the generation itself, which uses a key-value cache, differ in
        the last bits, so the first ratio would not be 1.
        """
        if request.prefix is not None:
            self.run_prefix()
        arguments = self.call_arguments(inputs, request.num_inference_steps, request.initial_seeds)
        is_recorded = request.noise_level is None
        made: list[TokenTrajectory | None] = []

        def generate(**call: Any) -> Tensor:
            with self.access.forward_context():
                drawn = self.draw_tokens(call, request.seeds)
            made.append(self.record(call, drawn, request) if is_recorded else None)
            return torch.cat([call["input_ids"], drawn.ids], dim=1)

        with self._generating(generate, request.initial_seeds):
            samples = extract_samples(self.pipe, self.pipe(**arguments))
        if len(made) != 1:
            raise UnsupportedPipeline(
                f"{type(self.pipe).__name__} asked its {', '.join(self.component)} for tokens {len(made)} times in "
                "one call, but only one such request per call can be trained; leave out inputs that replace its "
                "tokens."
            )
        return samples, made[0] and made[0].to(request.device)

    def record(self, call: dict[str, Any], drawn: Drawn, request: RolloutRequest) -> TokenTrajectory:
        log_probs = self._score(call, drawn.ids, drawn.mask, drawn.kept, self.sampling.temperature)
        drift = (log_probs - drawn.log_probs).masked_fill(~drawn.mask, 0.0)
        support = drawn.ids.new_zeros((*drawn.ids.shape, 0), dtype=torch.uint8)
        return TokenTrajectory(
            ids=drawn.ids,
            mask=drawn.mask,
            support=support if drawn.kept is None else pack_bits(drawn.kept),
            log_probs=log_probs[:, None],
            drift=drift,
            steps=torch.zeros(len(drawn.ids), 1, dtype=torch.int64),
            temperature=float(self.sampling.temperature),
            seeds=request.seeds,
            initial_seeds=request.initial_seeds,
            num_inference_steps=request.num_inference_steps,
        )

    def replay(
        self,
        inputs: dict[str, Any],
        trajectory: TokenTrajectory,
        step: int,
        forwards: Sequence[Callable] | None = None,
        sources: Tensor | None = None,
    ) -> TokenDistribution:
        """Score the recorded tokens, which are one step of number 0, whose call samples never share."""
        arguments = self.call_arguments(inputs, trajectory.num_inference_steps, trajectory.initial_seeds)
        scored: list[Tensor] = []
        here = trajectory.to(self.network.device)
        length = int(here.mask.any(0).sum())  # the length of this batch in the rollout
        ids, mask, support = here.ids[:, :length], here.mask[:, :length], here.support[:, :length]
        kept = unpack_bits(support, self.family.vocabulary(self.pipe)) if support.shape[-1] else None

        def generate(**call: Any) -> None:
            scored.append(self._score(call, ids, mask, kept, here.temperature, forwards))
            raise StepScored

        with self._generating(generate, trajectory.initial_seeds), contextlib.suppress(StepScored):
            self.undecorated(self.pipe, **arguments)
        return TokenDistribution(pad(scored[0], (0, here.ids.shape[1] - length)), here.mask)

    def _score(
        self,
        call: dict[str, Any],
        ids: Tensor,
        mask: Tensor,
        kept: Tensor | None,
        temperature: float,
        forwards: Sequence[Callable] | None = None,
    ) -> Tensor:
        arguments = self.family.scoring(self.network, select_prompt(call), ids)
        forward = forwards[0] if forwards else self.network.forward
        recomputed = recomputing(self.network) if torch.is_grad_enabled() else contextlib.nullcontext()
        vocabulary = self.family.vocabulary(self.pipe)
        with self.access.forward_context(), recomputed:
            return score(forward, arguments, ids, mask, kept, vocabulary=vocabulary, temperature=temperature)


def make_policy(
    pipe: DiffusionPipeline,
    component: str | Sequence[str] | None = None,
    *,
    sde_type: str = "auto",
    sampling: dict[str, float | None] | None = None,
    access: NetworkAccess | None = None,
    log_prob_type: str = "gaussian",
) -> Policy:
    """Make the policy for a trained network: a token policy for the language model, else a denoising policy."""
    component = policy_component(pipe, component)
    if component == (family_of(pipe).language_model,):
        return TokenPolicy(pipe, component, access, sampling)
    if hasattr(getattr(pipe, component[0]), "generate"):
        raise UnsupportedPipeline(
            f"{type(pipe).__name__}'s {component[0]} is a language model, and it is not known how the pipeline uses "
            "what it generates; train another component, or add a family to diffusion_grpo.pipelines."
        )
    return DenoisingPolicy(pipe, component, sde_type, access, sampling, log_prob_type)
