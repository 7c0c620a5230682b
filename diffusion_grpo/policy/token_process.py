"""From logits to a distribution, a drawn token and its log-probability.

This is the counterpart of `sde.py`. The data that a rollout of tokens passes to replays is here too. Nothing
here needs a model.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .trajectory import SampleTensors

# settings of a generation config that are not scored here, with the values that leave probabilities unchanged
OTHERS = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
OTHERS |= {"eta_cutoff": 0.0, "num_beams": 1, "min_new_tokens": 0, "min_length": 0}
OTHERS |= dict.fromkeys(("min_p", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"))
TRANSFORMERS_TOP_K = 50  # default of `generate` if neither its caller nor the generation config sets it


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, in the order of `generate`: temperature, then top-k, then top-p."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, config: GenerationConfig, **wanted: float | None) -> "Sampling":
        """Return a model's own generation settings, overridden by those in `wanted` that are not None."""
        for name, neutral in OTHERS.items():
            if getattr(config, name, None) not in (None, neutral):
                raise ValueError(
                    f"The language model's generation config has {name}={getattr(config, name)}, which changes the "
                    f"probabilities of tokens in a way that is not replayed; set it to {neutral} there."
                )
        model_settings = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        usual = {"temperature": 1.0, "top_k": TRANSFORMERS_TOP_K, "top_p": 1.0}
        first = {name: value for name, value in wanted.items() if value is not None}
        rest = {name: usual[name] if value is None else value for name, value in model_settings.items()}
        return cls(**{**rest, **first})

    @property
    def is_truncated(self) -> bool:
        """Whether some ids cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1

    def filter(self, logits: Tensor) -> Tensor:
        """Return (batch, ids) float32 logits at this temperature, -inf where an id cannot be drawn."""
        warpers = [TemperatureLogitsWarper(float(self.temperature))]
        warpers += [TopKLogitsWarper(min(self.top_k, logits.shape[1]))] if self.top_k > 0 else []
        warpers += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        for warper in warpers:
            logits = warper(None, logits)
        return logits


def draw_ids(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the (batch,) ids for (batch,) numbers from [0, 1), by the inverse of the cumulative distribution.

    Each token takes one number, so that a sample depends only on its own generator and not on its batch.
    """
    cumulative = log_probs.exp().cumsum(1)
    ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    places = torch.arange(log_probs.shape[1], device=log_probs.device)
    last = (places * (log_probs > -torch.inf)).amax(1, keepdim=True)  # rounding may go past the end
    return torch.minimum(ids, last)[:, 0]


def token_log_prob(logits: Tensor, ids: Tensor, kept: Tensor | None, temperature: float) -> Tensor:
    """Return the (batch, tokens) log-probability of each id in the distribution it was drawn from.

    It is renormalised over the ids that could be drawn *in the rollout* (`kept`, None for all), whatever policy the
    (batch, tokens, ids) logits come from. So no token can fall out of the nucleus of an updated policy, ratios compare
    distributions over the same set, and the first ratio is 1 (https://huggingface.co/papers/2512.02556 does the same).
    """
    scaled = logits / temperature
    if kept is not None:
        scaled = scaled.masked_fill(~kept, -torch.inf)
    return scaled.gather(2, ids[..., None])[..., 0] - scaled.logsumexp(2)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average (batch, tokens) values over the tokens that count; return (batch,), 0 if none does."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def pack_bits(kept: Tensor) -> Tensor:
    """Pack (..., ids) bool into (..., ceil(ids / 8)) uint8: one bit per id."""
    bits = pad(kept, (0, -kept.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = 2 ** torch.arange(8, device=kept.device, dtype=torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, count: int) -> Tensor:
    """Unpack (..., bytes) uint8 into (..., count) bool; see [`pack_bits`]."""
    places = torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits[..., None] >> places & 1).bool().flatten(-2)[..., :count]


@dataclasses.dataclass
class TokenTrajectory(SampleTensors):
    """What a replay needs from a rollout whose actions are tokens. All tokens of a sample form one step, scored by one
    forward pass.

    Attributes:
        ids: (batch, tokens) int64, the drawn ids.
        mask: (batch, tokens) bool, False after the end of a sample's text.
        log_probs: (batch, 1, tokens) float32, from one teacher-forced pass right after the generation.
        drift: (batch, tokens) float32, `log_probs` minus the log-probabilities of the generation itself.
        steps: (batch, 1) int64 zeros, the index of the only step.
        seeds: (batch,) int64, seed of each sample's tokens.
        initial_seeds: (batch,) int64, seed of each sample's decoding.
    """

    ids: Tensor
    mask: Tensor
    support: Tensor
    log_probs: Tensor
    drift: Tensor
    steps: Tensor
    seeds: Tensor
    initial_seeds: Tensor
    num_inference_steps: int
    temperature: float
    step_weights: ClassVar[None] = None  # there is only one step
    means: ClassVar[None] = None
    shared_steps: ClassVar[None] = None

    @classmethod
    def cat(cls, parts: Sequence["TokenTrajectory"]) -> "TokenTrajectory":
        """Join several trajectories with the same settings; pad shorter ones with tokens that do not count."""
        return super().cat(cls.align(parts))

    @classmethod
    def align(cls, samples: Sequence["TokenTrajectory"]) -> list["TokenTrajectory"]:
        """Pad all trajectories to the length of the longest."""
        longest = max(sample.ids.shape[1] for sample in samples)
        return [sample._pad(longest - sample.ids.shape[1]) for sample in samples]

    def _pad(self, more: int) -> "TokenTrajectory":
        by_token = {name: getattr(self, name) for name in ("ids", "mask", "drift", "log_probs")}
        padded = {name: pad(tensor, (0, more)) for name, tensor in by_token.items()}
        # all ids: with an empty support, the gradient would not be finite
        return dataclasses.replace(self, **padded, support=pad(self.support, (0, 0, 0, more), value=255))

    def over_steps(self, values: Tensor) -> Tensor:
        """Average (batch, 1, tokens) values over each sample's own tokens; return (batch, 1)."""
        return masked_mean(values[:, 0], self.mask)[:, None]

    def metrics(self) -> dict[str, float]:
        """Measure the difference of generation and teacher forcing, and the lengths of samples, under TRL's names."""
        drift = self.drift[self.mask].abs()
        return {
            "sampling/sampling_logp_difference/mean": drift.mean().item(),
            "sampling/sampling_logp_difference/max": drift.max().item(),
            "completions/mean_length": self.mask.sum(1).double().mean().item(),
        }


@dataclasses.dataclass
class TokenDistribution:
    """The policy's (batch, tokens) log-probabilities of the recorded ids; `mask` is False where none counts."""

    log_prob: Tensor
    mask: Tensor

    @property
    def prediction(self) -> Tensor:
        """The (batch, tokens) probabilities of the recorded ids, 0 for tokens that do not count, without gradient."""
        return self.log_prob.detach().exp() * self.mask

    def rounding(self) -> Tensor:
        """Return how far half precision may move the ratio of a token from 1, 0-dimensional."""
        # a logit of up to 64 is rounded by up to 0.25 in bfloat16, once in each of the two passes
        return self.log_prob.new_tensor(0.5).expm1()

    def compare(self, reference: "TokenDistribution") -> dict[str, Tensor]:
        """Return metrics in addition to the KL divergence to the reference: there are none."""
        return {}

    def loss_inputs(self, reference: "TokenDistribution | None") -> dict[str, Tensor | None]:
        """Return the inputs of a loss in addition to log-probabilities; the parameters of a Gaussian are None."""
        gaussian = dict.fromkeys(("mean", "std", "ref_mean"))
        return {**gaussian, "mask": self.mask, "ref_log_prob": reference and reference.log_prob}
