"""A language model inside a pipeline: it draws tokens through its own `generate`, and scores them by teacher forcing.

Nothing here knows a model family; whatever differs between families comes from the pipeline's
[`~diffusion_grpo.pipelines.Family`].
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor
from transformers.modeling_layers import GradientCheckpointingLayer

from .token_process import Sampling, draw_ids, token_log_prob
from .trajectory import make_generators, sample_seed

SETTINGS = frozenset(vars(GenerationConfig()))  # arguments of `generate` that are settings, not inputs


@dataclasses.dataclass
class Drawn:
    """What one call of `generate` drew.

    Attributes:
        ids: (batch, tokens) int64, the drawn ids.
        mask: (batch, tokens) bool, False after the end of a sample's text.
        kept: (batch, tokens, ids) bool, the ids that could be drawn; None if all could.
        log_probs: (batch, tokens) float32, as computed while generating.
    """

    ids: Tensor
    mask: Tensor
    kept: Tensor | None
    log_probs: Tensor


class _Drawing(LogitsProcessor):
    """Draws each token itself, with one random number per sample, and leaves `generate` no choice but that token."""

    def __init__(self, sampling: Sampling, vocabulary: int, uniform: Tensor):
        self.sampling, self.vocabulary, self.uniform = sampling, vocabulary, uniform
        self.kept: list[Tensor] = []
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        filtered = self.sampling.filter(scores[:, : self.vocabulary].float())
        log_probs = filtered.log_softmax(1)
        ids = draw_ids(log_probs, self.uniform[:, len(self.log_probs)].to(scores.device))[:, None]
        if self.sampling.is_truncated:
            self.kept.append(filtered > -torch.inf)
        self.log_probs.append(log_probs.gather(1, ids)[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(1, ids, 0.0)


def select_prompt(call: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors among the arguments of `generate`, which make up the prompt."""
    return {name: value for name, value in call.items() if name not in SETTINGS}


@torch.no_grad()
def draw(
    model: nn.Module, call: dict[str, Any], *, count: int, vocabulary: int, sampling: Sampling, seeds: Tensor
) -> Drawn:
    """Draw tokens with the model's own `generate`; those of a sample depend on its seed, not on its batch."""
    prompt, settings = select_prompt(call), model.generation_config
    # generators that differ from those of the latents, even if the seeds are the same
    generators = make_generators(torch.tensor([sample_seed(seed, "tokens") for seed in seeds.tolist()]))
    uniform = torch.stack([torch.rand(count, generator=generator) for generator in generators])
    drawing = _Drawing(sampling, vocabulary, uniform)
    ends = {name: getattr(settings, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    output = type(model).generate(
        model,
        **prompt,
        # temperature and top-p are already applied in the drawing
        generation_config=GenerationConfig(do_sample=False, temperature=1.0, top_p=1.0, max_new_tokens=count, **ends),
        logits_processor=[drawing],
    )
    ids = output[:, prompt["input_ids"].shape[1] :]
    kept = torch.stack(drawing.kept, dim=1) if drawing.kept else None
    return Drawn(ids, _mask_until_end(ids, settings.eos_token_id), kept, torch.stack(drawing.log_probs, dim=1))


def _mask_until_end(ids: Tensor, end: int | list[int] | None) -> Tensor:
    """Return (batch, tokens) bool: True up to and including the id that ends a text."""
    ends = torch.tensor([] if end is None else end, dtype=ids.dtype, device=ids.device).reshape(-1)
    is_end = torch.isin(ids, ends).long()
    return is_end.cumsum(1) - is_end == 0


def score(
    forward: Callable,
    arguments: dict[str, Tensor],
    ids: Tensor,
    mask: Tensor,
    kept: Tensor | None,
    *,
    vocabulary: int,
    temperature: float,
) -> Tensor:
    """Return (batch, tokens) log-probabilities of recorded tokens by one teacher-forced pass; 0 where masked."""
    logits = forward(**arguments, logits_to_keep=ids.shape[1], use_cache=False).logits
    safe = ids.masked_fill(~mask, 0)  # padding after the end may be outside the vocabulary
    log_probs = token_log_prob(logits[..., :vocabulary].float(), safe, kept, temperature)
    return log_probs.masked_fill(~mask, 0.0)


@contextlib.contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Enable gradient checkpointing inside: transformers ties it to the training mode, which would bring dropout."""
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    layers = [layer for layer in layers if layer.gradient_checkpointing and not layer.training]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
