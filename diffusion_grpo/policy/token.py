"""A pipeline whose language model is the policy: its actions are tokens, everything after them is a fixed decoder.

In: a pipeline in whose call a language model generates. Out of `rollout`: its samples and a `TokenTrajectory`. Out of
`replay`: the `TokenDistribution` of the recorded tokens under the model as it is now, with gradient. As with latents
the pipeline is called in both, so that prompts, pictures and templates come from it and cannot drift apart: in the
rollout its `generate` draws, in the replay it scores what was drawn, and the call ends there.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor
from torch.nn.functional import pad

from ..config.settings import DiffusionGRPOConfig
from ..media.files import samples_of
from ..pipelines import family_of
from .denoising import Policy, replaced, seeded
from .drivers import StepScored, UnsupportedPipeline
from .language_model import Drawn, prompt_of, recomputing, score
from .processes import SILENT_LAST_STEP
from .token_process import TokenDistribution, TokenTrajectory, packed, unpacked

logger = logging.getLogger(__name__)


class TokenPolicy(Policy):
    """A [`Policy`] whose network is the language model of the pipeline's family; it needs no scheduler."""

    default_noise_level = None  # its decoder takes the pipeline's own steps

    def _make_scheduler(self, sde_type: str, log_prob_type: str) -> None:
        return None

    @contextlib.contextmanager
    def _generating(self, generate: Callable, initial_seeds: Tensor) -> Iterator[None]:
        """The pipeline with `generate` in place of its language model's; restored on leaving."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.prompts.serving(self.pipe))
            stack.enter_context(seeded(initial_seeds, self))
            stack.enter_context(self.family.bridged(self.pipe))
            stack.enter_context(replaced(self.pipe, "_progress_bar_config", {"disable": True}))
            stack.enter_context(replaced(self.network, "generate", generate))
            yield

    def rollout(
        self,
        arguments: dict[str, Any],
        seeds: Tensor,
        initial_seeds: Tensor,
        num_inference_steps: int,
        is_recorded: bool,
    ) -> tuple[Any, TokenTrajectory | None]:
        """Calls the pipeline with tokens drawn from `seeds`; see [`~diffusion_grpo.policy.rollout.rollout`].

        The log-probabilities that are kept come from a teacher-forced pass right after the generation, in the same
        batch and by the same code as in the replay: those of the generation itself, with its key-value cache, differ
        in the last bits, and the first ratio would not be 1.
        """
        made: list[TokenTrajectory | None] = []
        shared = {"seeds": seeds, "initial_seeds": initial_seeds, "num_inference_steps": num_inference_steps}

        def generate(**call: Any) -> Tensor:
            with self.forward_context():
                drawn = self.drawn(call, seeds)
            made.append(self._recorded(call, drawn, shared) if is_recorded else None)
            return torch.cat([call["input_ids"], drawn.ids], dim=1)

        with self._generating(generate, initial_seeds):
            samples = samples_of(self.pipe, self.pipe(**arguments))
        if len(made) != 1:
            raise UnsupportedPipeline(
                f"{type(self.pipe).__name__} asked its {self.component} for tokens {len(made)} times in one call, "
                "where one is trained; leave out inputs that stand in for its tokens."
            )
        return samples, made[0]

    def _recorded(self, call: dict[str, Any], drawn: Drawn, shared: dict[str, Any]) -> TokenTrajectory:
        log_probs = self._scored(call, drawn.ids, drawn.mask, drawn.kept, self.sampling.temperature)
        drift = (log_probs - drawn.log_probs).masked_fill(~drawn.mask, 0.0)
        support = drawn.ids.new_zeros((*drawn.ids.shape, 0), dtype=torch.uint8)
        return TokenTrajectory(
            ids=drawn.ids,
            mask=drawn.mask,
            support=support if drawn.kept is None else packed(drawn.kept),
            log_probs=log_probs[:, None],
            drift=drift,
            steps=torch.zeros(len(drawn.ids), 1, dtype=torch.int64),
            temperature=float(self.sampling.temperature),
            **shared,
        )

    def replay(
        self, arguments: dict[str, Any], trajectory: TokenTrajectory, forwards: Sequence[Callable] | None
    ) -> TokenDistribution:
        """Scores the recorded tokens; see [`~diffusion_grpo.policy.rollout.replay`]."""
        scored: list[Tensor] = []
        here = trajectory.to(self.network.device)
        length = int(here.mask.any(0).sum())  # that of this batch in the rollout
        ids, mask, support = here.ids[:, :length], here.mask[:, :length], here.support[:, :length]
        kept = unpacked(support, self.family.vocabulary(self.pipe)) if support.shape[-1] else None

        def generate(**call: Any) -> None:
            scored.append(self._scored(call, ids, mask, kept, here.temperature, forwards))
            raise StepScored

        with self._generating(generate, trajectory.initial_seeds), contextlib.suppress(StepScored):
            self.undecorated(self.pipe, **arguments)
        return TokenDistribution(pad(scored[0], (0, here.ids.shape[1] - length)), here.mask)

    def _scored(
        self,
        call: dict[str, Any],
        ids: Tensor,
        mask: Tensor,
        kept: Tensor | None,
        temperature: float,
        forwards: Sequence[Callable] | None = None,
    ) -> Tensor:
        arguments = self.family.scoring(self.network, prompt_of(call), ids)
        forward = forwards[0] if forwards else self.network.forward
        recomputed = recomputing(self.network) if torch.is_grad_enabled() else contextlib.nullcontext()
        vocabulary = self.family.vocabulary(self.pipe)
        with self.forward_context(), recomputed:
            return score(forward, arguments, ids, mask, kept, vocabulary=vocabulary, temperature=temperature)


def policy_for(
    pipe: DiffusionPipeline,
    component: str,
    args: DiffusionGRPOConfig,
    forward_context: Callable[[], contextlib.AbstractContextManager],
    is_mixed_precision: bool,
) -> Policy:
    """The policy for the trained network: of tokens where it is the language model, else of denoising steps.

    Raises:
        UnsupportedPipeline: it is a language model, but nobody has said how this pipeline uses it.
        ValueError: a setting of denoising steps where tokens are trained, or of tokens where there are none.
    """
    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    settings = (pipe, component, args.sde_type, forward_context, is_mixed_precision, sampling, args.log_prob_type)
    if component == family_of(pipe).language_model:
        check_token_settings(args)
        return TokenPolicy(*settings)
    if hasattr(getattr(pipe, component.split(", ")[0]), "generate"):
        raise UnsupportedPipeline(
            f"{type(pipe).__name__}'s {component} is a language model, and it is not known how the pipeline uses what "
            "it generates; train another component, or add a family to diffusion_grpo.pipelines."
        )
    policy = Policy(*settings)
    check_last_step(args, policy)
    return policy


def check_last_step(args: DiffusionGRPOConfig, policy: Policy) -> None:
    """Refuse noise in the last step of a process that has none there.

    Raises:
        ValueError: `noise_in_last_step` would change nothing.
    """
    process = policy.scheduler.process
    if args.noise_in_last_step and process in SILENT_LAST_STEP:
        raise ValueError(
            f"noise_in_last_step=True changes nothing: {type(policy.pipe).__name__} is sampled by {process}, whose "
            "noise is 0 in the last step whatever is asked for; leave it out."
        )


def check_token_settings(args: DiffusionGRPOConfig) -> None:
    """Refuses settings of denoising steps where tokens are trained, and warns of their clip range.

    Raises:
        ValueError: a setting that would have no effect or has no meaning, or a loss of Gaussian steps.
    """
    usual = {"sde_type": "auto", "noise_level": None, "sde_window": None, "timestep_fraction": 1.0}
    usual |= {"sde_window_size": None, "permute_steps": False, "deterministic_outside_window": False}
    usual |= {"noise_in_last_step": False, "log_prob_type": "gaussian"}
    usual |= {"kl_reward": 0.0, "advantage_estimator": "group"}
    for name, default in usual.items():
        if getattr(args, name) != default:
            raise ValueError(
                f"{name}={getattr(args, name)!r} is of denoising steps, and what a language model does is tokens; "
                "leave it out, or train the denoising network."
            )
    if "." not in args.loss_type and args.loss_type != "grpo":
        raise ValueError(f"loss_type={args.loss_type!r} is of denoising steps; tokens are trained with grpo.")
    if args.epsilon <= type(args).epsilon:
        logger.warning(
            "epsilon=%g is a clip range of denoising steps, whose log-probabilities are means over a latent; ratios "
            "of tokens leave it at once, and nearly all of them would be clipped. Set epsilon to the order of 0.2.",
            args.epsilon,
        )
