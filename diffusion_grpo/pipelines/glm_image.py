"""GLM-Image: a language model writes the tokens of a preview and of the image, and a DiT makes the image from them.

What sets it apart: images are lists of lists, a key-value cache is filled before the denoising loop, only some ids are
image tokens, and tokens have positions on their grids. It has no default size, and its features of condition images
are split again for newer versions of transformers.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from .family import Family


class GlmImage(Family):
    """`GlmImagePipeline`, text-to-image and image-to-image."""

    language_model = "vision_language_encoder"
    without_gradient = ("model.visual", "model.vqmodel")  # they end in an argmin

    def arguments(self, pipe: DiffusionPipeline, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return one list of images per sample, even if the dataset has one image per row."""
        missing = [name for name in ("height", "width") if inputs.get(name) is None]
        if missing:
            raise ValueError(f"{type(pipe).__name__} has no default size; set {' and '.join(missing)}.")
        images = inputs.get("image")
        if images is None:
            return inputs
        images = [list(row) if isinstance(row, (list, tuple)) else [row] for row in images]
        sizes = sorted({image.size for row in images for image in row})
        if len(sizes) > 1:
            raise ValueError(
                f"{type(pipe).__name__} got images of the sizes {', '.join(map(str, sizes))} in one call; resize "
                "them to one, or train one sample at a time (per_device_train_batch_size=1)."
            )
        return {**inputs, "image": images}

    def network_call(self, kwargs: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """Pin the cache in its current state: a backward pass that recomputes activations runs after later calls.

        The calls that write the condition images into the cache must run, whichever step is replayed.
        """
        caches = kwargs.get("kv_caches")
        if caches is None:
            return kwargs, False
        return {**kwargs, "kv_caches": _Pinned(caches)}, caches[0].mode == "write"

    @contextlib.contextmanager
    def bridged(self, pipe: DiffusionPipeline) -> Iterator[None]:
        """Split image features by image: diffusers 0.42 joins them, transformers from 5.2 on needs them split."""
        model = getattr(pipe, self.language_model)
        real = model.get_image_tokens

        def by_image(features: Tensor | list[Tensor], grids: Tensor | None = None) -> Tensor:
            return real(features.chunk(len(grids)) if torch.is_tensor(features) else features, grids)

        model.__dict__["get_image_tokens"] = by_image
        try:
            yield
        finally:
            del model.__dict__["get_image_tokens"]

    def vocabulary(self, pipe: DiffusionPipeline) -> int:
        """Return the codebook's size. Higher ids mark beginnings and ends; the DiT has no embedding for them."""
        return pipe.transformer.config.prior_vq_quantizer_codebook_size

    def token_count(self, call: dict[str, Any]) -> int:
        """Return the number of new tokens without the last one, which marks the end and is never read."""
        return call["max_new_tokens"] - 1

    def scoring(self, model: nn.Module, prompt: dict[str, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """Add the grid's rows and columns as positions, as the model itself numbers them while it generates."""
        arguments = super().scoring(model, prompt, ids)
        names = ("input_ids", "image_grid_thw", "images_per_sample", "attention_mask")
        places, _ = model.model.get_rope_index(**{name: prompt[name] for name in names if name in prompt})
        drawn = model.model._cached_decode_position_ids[..., : ids.shape[1] - 1].permute(1, 0, 2)
        return {**arguments, "position_ids": torch.cat([places, drawn], dim=2)}


class _Pinned:
    """The DiT's key-value caches as one call sees them."""

    def __init__(self, caches: Any):
        self.layers = [_PinnedLayer(caches[index]) for index in range(caches.num_layers)]

    def __getitem__(self, index: int) -> "_PinnedLayer":
        return self.layers[index]


class _PinnedLayer:
    def __init__(self, layer: Any):
        self.layer, self.mode, self.has_stored = layer, layer.mode, False

    def store(self, key: Tensor, value: Tensor) -> None:
        if not self.has_stored:  # gradient checkpointing computes the call a second time
            self.layer.store(key, value)
        self.has_stored = True

    def get(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.get(key, value)
