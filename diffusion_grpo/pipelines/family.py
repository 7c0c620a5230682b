"""What a pipeline may need beyond the defaults; each method here is the default.

A family has no state: one object serves all pipelines of its class.
"""

import contextlib
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn


class Family:
    """Default behaviour, for pipelines without special needs.

    If a language model writes tokens in a pipeline's call, the family sets `language_model`, and the library takes
    over that model's `generate`. While another network is trained, the tokens are drawn once per sample and kept for
    the replays. If `train_component` is the language model, the tokens are the policy's actions.

    Attributes:
        language_model: the component whose `generate` is used once in a call of the pipeline; None if there is none.
        without_gradient: parts of the language model that get no gradient from the probability of a token; they are
            never trained.

    Examples:
        >>> class Lowercase(Family):  # of a pipeline that was trained on prompts in small letters
        ...     def arguments(self, pipe, inputs):
        ...         return inputs | {"prompt": [prompt.lower() for prompt in inputs["prompt"]]}
        >>> Lowercase().arguments(None, {"prompt": ["A Cat"]})
        {'prompt': ['a cat']}
    """

    language_model: str | None = None
    without_gradient: tuple[str, ...] = ()

    def arguments(self, pipe: DiffusionPipeline, inputs: dict[str, Any]) -> dict[str, Any]:
        """Convert keyword arguments as the user gave them (`inputs`) to the form that the pipeline's call takes."""
        return inputs

    def network_call(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the keyword arguments of a call of the denoising network, and whether it must run in every replay.

        It must run if its side effects, and not its result, are needed later.
        """
        return kwargs, False

    def bridged(self, pipe: DiffusionPipeline) -> contextlib.AbstractContextManager:
        """Return a context for each call of the pipeline that works around faults of the installed versions."""
        return contextlib.nullcontext()

    def vocabulary(self, pipe: DiffusionPipeline) -> int:
        """Return the number of ids that may be drawn; higher ids are not image tokens."""
        return getattr(pipe, self.language_model).get_output_embeddings().out_features

    def token_count(self, call: dict[str, Any]) -> int:
        """Return how many tokens are drawn; `call` holds the keyword arguments of `generate`.

        If the vocabulary includes the id that ends a text, a text may be shorter.
        """
        return call["max_new_tokens"]

    def scoring(self, model: nn.Module, prompt: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Return the keyword arguments of a forward pass of the language model that is teacher-forced on `ids`.

        Args:
            model: the language model.
            prompt: what `generate` was given, without its settings; `input_ids` and `attention_mask` are padded left.
            ids: (batch, tokens) int64, the recorded tokens.
        """
        mask = torch.cat([prompt["attention_mask"], torch.ones_like(ids[:, 1:])], dim=1)
        return {
            **prompt,
            "input_ids": torch.cat([prompt["input_ids"], ids[:, :-1]], dim=1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
