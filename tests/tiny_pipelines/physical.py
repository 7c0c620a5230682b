"""Cosmos, whose noise goes up to sigma 80."""

from collections.abc import Callable

import diffusers
import torch

from . import basic
from .basic import WIDTH
from .conditioned import Case


class NothingIsUnsafe(diffusers.ModelMixin, diffusers.ConfigMixin):
    """In place of Cosmos' guardrail, which is a package of its own with large models."""

    def check_text_safety(self, prompt: str) -> bool:
        """Any text may pass."""
        return True

    def check_video_safety(self, frames: object) -> object:
        """Any video may pass."""
        return frames

    @property
    def device(self) -> torch.device:
        """It has no weights that could be elsewhere."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """It has no weights of another type."""
        return torch.float32


def cosmos_network() -> diffusers.CosmosTransformer3DModel:
    """One block; without the mask of padding, which would need torchvision."""
    return diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        mlp_ratio=2,
        text_embed_dim=WIDTH,
        adaln_lora_dim=4,
        max_size=(4, 16, 16),
        patch_size=(1, 2, 2),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )


def cosmos() -> Case:
    """Cosmos 1: EDM by Euler, guidance between two estimates of the clean sample."""
    vae = diffusers.AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decode_block_out_channels=(8, 8, 8),
        attention_resolutions=(),
        resolution=32,
        num_layers=1,
        patch_size=2,
        scaling_factor=1.0,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    scheduler = diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, final_sigmas_type="sigma_min"
    )
    parts = {"vae": vae, "text_encoder": basic.t5(), "tokenizer": basic.t5_tokenizer(), "scheduler": scheduler}
    pipe = diffusers.CosmosTextToWorldPipeline(**parts, transformer=cosmos_network(), safety_checker=NothingIsUnsafe())
    sizes = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": basic.TOKENS}
    return pipe, {**sizes, "guidance_scale": 7.0, "negative_prompt": "blurred"}


def cosmos2() -> Case:
    """Cosmos 2: the same noise, written as a flow and stepped by the scheduler of flows."""
    vae = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    parts = {"vae": vae, "text_encoder": basic.t5(), "tokenizer": basic.t5_tokenizer(), "scheduler": scheduler}
    pipe = diffusers.Cosmos2TextToImagePipeline(
        **parts, transformer=cosmos_network(), safety_checker=NothingIsUnsafe()
    )
    sizes = {"height": 32, "width": 32, "max_sequence_length": basic.TOKENS}
    return pipe, {**sizes, "guidance_scale": 4.0, "negative_prompt": "blurred"}


PIPELINES: dict[str, Callable[[], tuple[diffusers.DiffusionPipeline, dict]]] = {
    function.__name__: function for function in (cosmos, cosmos2)
}
