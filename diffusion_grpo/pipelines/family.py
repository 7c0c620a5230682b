"""What a pipeline may need beyond the defaults; each method here is the default.

A family has no state: one object serves all pipelines of its class.
"""

import contextlib
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn


class Family:
    """The defaults, which fit pipelines without particulars.

    Where a language model writes tokens in a pipeline's call, its family sets `language_model`. The library takes over
    that model's `generate`: while another network is trained, the tokens are drawn once per sample and kept for the
    replays; with `train_component` set to the language model they are the policy's actions.

    Attributes:
        language_model: name of the component whose `generate` the pipeline's call uses, once; None where none does.
        without_gradient: parts of it that no gradient of a token's probability reaches; they are never trained.

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
        """Return keyword arguments of the pipeline's call in the form it takes; `inputs` is as the user gave it."""
        return inputs

    def network_call(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Return the keyword arguments of a call of the denoising network, and whether it must run in every replay.

        It must if its side effects, not its result, are needed later.
        """
        return kwargs, False

    def bridged(self, pipe: DiffusionPipeline) -> contextlib.AbstractContextManager:
        """Return a context for each call of the pipeline, for what does not work in the installed versions."""
        return contextlib.nullcontext()

    def vocabulary(self, pipe: DiffusionPipeline) -> int:
        """Return the number below which ids may be drawn; those above are no tokens of an image."""
        return getattr(pipe, self.language_model).get_output_embeddings().out_features

    def token_count(self, call: dict[str, Any]) -> int:
        """Return how many tokens are drawn; `call` holds the keyword arguments of `generate`.

        If the id that ends a text is in the vocabulary, a text may be shorter.
        """
        return call["max_new_tokens"]

    def scoring(self, model: nn.Module, prompt: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Return keyword arguments of the language model's forward, where every token follows the recorded ones.

        Args:
            model: the language model.
            prompt: what `generate` was given, without its settings; `input_ids` and `attention_mask` are padded left.
            ids: (batch, tokens) int64, what was drawn.
        """
        mask = torch.cat([prompt["attention_mask"], torch.ones_like(ids[:, 1:])], dim=1)
        return {
            **prompt,
            "input_ids": torch.cat([prompt["input_ids"], ids[:, :-1]], dim=1),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        }
