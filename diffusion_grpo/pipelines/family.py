"""What a pipeline may need beyond the defaults; each method here is the default.

In: a pipeline's own arguments and calls. Out: the same, as rollout and replay need them. A family has no state: one
object serves all pipelines of its class.
"""

import contextlib
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn


class Family:
    """The defaults, which fit pipelines without particulars.

    A pipeline in whose call a language model writes tokens sets `language_model`. That model's `generate` is what the
    library takes over: while another network is trained the tokens are drawn once a sample and kept for the replays,
    and with `train_component` set to the language model they are the actions of the policy.

    Attributes:
        language_model: name of the component whose `generate` the pipeline's call uses, once; None where none does.
        without_gradient: parts of it that no gradient of a token's probability reaches; they are never trained.
    """

    language_model: str | None = None
    without_gradient: tuple[str, ...] = ()

    def arguments(self, pipe: DiffusionPipeline, inputs: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of the pipeline's call, as dataset and settings give them, in the form it takes."""
        return inputs

    def network_call(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Keyword arguments of a call of the denoising network, and whether it must run in every replay.

        It must where what it leaves behind, not what it returns, is needed later.
        """
        return kwargs, False

    def bridged(self, pipe: DiffusionPipeline) -> contextlib.AbstractContextManager:
        """Entered around each call of the pipeline; for what does not work in the installed versions."""
        return contextlib.nullcontext()

    def vocabulary(self, pipe: DiffusionPipeline) -> int:
        """Ids below this number may be drawn; what is above are no tokens of a picture."""
        return getattr(pipe, self.language_model).get_output_embeddings().out_features

    def token_count(self, call: dict[str, Any]) -> int:
        """How many tokens are drawn; `call` are the keyword arguments of `generate`.

        Where the id that ends a text is in the vocabulary a text may be shorter.
        """
        return call["max_new_tokens"]

    def scoring(self, model: nn.Module, prompt: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Keyword arguments of the language model's forward, in which every token follows the true ones before it.

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
