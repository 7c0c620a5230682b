"""Modular pipelines: around the components of classic ones, or models that exist in this form only."""

import functools
from collections.abc import Callable

import diffusers
import torch
from transformers import CLIPImageProcessor, LlavaProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from . import basic, conditioned, language, large, more
from .basic import WIDTH, WIDTHS

Case = tuple[diffusers.ModularPipeline, dict]


def around(kind: str, classic: Callable[[], tuple], **inputs) -> Case:
    """A modular pipeline with the components of a classic one; `inputs` replace some, or leave them out by None."""
    pipe = getattr(diffusers, kind)()
    plain, given = classic()
    parts = {
        name: part for name, part in plain.components.items() if name in pipe._component_specs and part is not None
    }
    parts |= {name: value for name, value in plain.config.items() if name in pipe._config_specs}
    pipe.update_components(**parts)
    return pipe, {name: value for name, value in (given | inputs).items() if value is not None}


def qwen3_vl(vocabulary, layers: int) -> torch.nn.Module:
    """Qwen 3 VL, with one layer for images."""
    text = {"vocab_size": len(vocabulary), "head_dim": 8, "num_hidden_layers": layers, **WIDTHS}
    config = Qwen3VLConfig(
        text_config=text | {"rope_parameters": language.ROPE},
        vision_config=language.VISION | {"deepstack_visual_indexes": [0]},
        **language.qwen_ids(vocabulary),
    )
    return Qwen3VLForConditionalGeneration(config)


def flux3(name: str = "Flux3ModularPipeline") -> Case:
    """FLUX.3: one prompt a call, a window of text that is not masked; distilled, it also takes the next time."""
    vocabulary = language.qwen3_tokenizer()
    # a processor that loads without torchvision; the real one is Qwen 3 VL's
    processor = LlavaProcessor(CLIPImageProcessor(), vocabulary, chat_template=language.QWEN3_CHAT)
    pipe = getattr(diffusers, name)()
    pipe.update_components(
        text_encoder=qwen3_vl(vocabulary, layers=32),  # of which eight are read
        tokenizer=processor,
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(4, 4, 4, 4),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=2,
            norm_num_groups=2,
        ),
        transformer=diffusers.Flux3Transformer2DModel(
            in_channels=8,
            cond_in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8 * WIDTH,
            timestep_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            flow_map="Distilled" in name,
        ),
    )
    inputs = {"prompt": "a cat", "height": 64, "width": 64}
    return pipe, inputs | ({} if "guider" not in pipe.components else {"guidance_scale": 3.5})


def minimax_h3() -> Case:
    """MiniMax-H3: video and sound in one sequence, two schedules, no guidance, no axis of the batch."""
    vocabulary = language.qwen3_tokenizer()
    pipe = diffusers.MiniMaxH3ModularPipeline(workflow="t2va")
    pipe.update_components(
        text_encoder=qwen3_vl(vocabulary, layers=51),
        tokenizer=vocabulary,
        processor=LlavaProcessor(CLIPImageProcessor(), vocabulary),  # as above
        scheduler=diffusers.MiniMaxH3Scheduler(),
        audio_scheduler=diffusers.MiniMaxH3Scheduler(shift=3.0),
        transformer=diffusers.MiniMaxH3Transformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            hidden_size=32,
            num_layers=1,
            num_refiner_layers=1,
            ffn_dim=32,
            in_channels=4,
            audio_in_channels=4,
            text_dim=WIDTH,
            freq_dim=16,
            time_embed_hidden_dim=32,
            time_embed_dim=16,
            rope_freq_dim=2,
        ),
        vae=diffusers.AutoencoderKLMiniMaxH3(
            latent_channels=4,
            block_out_channels=(8, 16, 16),
            layers_per_block=1,
            spatial_downsample_factors=(2, 2, 1),
            temporal_downsample_factors=(1, 2, 2),
            norm_num_groups=8,
            decoder_num_layers=1,
            decoder_num_attention_heads=2,
            decoder_attention_head_dim=8,
            decoder_num_register_tokens=2,
            decoder_ffn_mult=2,
            latents_mean=(0.0,) * 4,
            latents_std=(1.0,) * 4,
        ),
        audio_vae=diffusers.AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4,
            latent_dim=8,
            latent_channels=4,
            num_attention_heads=2,
            decoder_dim=128,
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
    )
    return pipe, {"prompt": "a cat", "height": 16, "width": 16, "num_frames": 124}


PIPELINES: dict[str, Callable[[], Case]] = {
    # guides only with a negative prompt
    "modular_sd3": functools.partial(around, "StableDiffusion3ModularPipeline", basic.sd3, negative_prompt=["", ""]),
    "modular_flux": functools.partial(around, "FluxModularPipeline", basic.flux),
    "modular_sdxl": functools.partial(around, "StableDiffusionXLModularPipeline", basic.sdxl),
    "modular_wan": functools.partial(around, "WanModularPipeline", basic.wan),
    "modular_flux2": functools.partial(around, "Flux2KleinBaseModularPipeline", large.flux2),
    # counts the scale from the unconditional prediction, not from the conditional one
    "modular_z_image": functools.partial(around, "ZImageModularPipeline", large.z_image, guidance_scale=5.0),
    "modular_kontext": functools.partial(around, "FluxKontextModularPipeline", conditioned.PIPELINES["flux_kontext"]),
    "modular_ltx": functools.partial(around, "LTXModularPipeline", more.ltx),
    "modular_qwen_image": functools.partial(
        around, "QwenImageModularPipeline", large.qwen_image, true_cfg_scale=None, guidance_scale=4.0
    ),
    "modular_wan_experts": functools.partial(around, "Wan22ModularPipeline", more.PIPELINES["wan_experts"]),
    "flux2_klein": functools.partial(around, "Flux2KleinModularPipeline", large.flux2, guidance_scale=None),
    "flux3": flux3,
    "flux3_distilled": functools.partial(flux3, "Flux3DistilledModularPipeline"),
    "minimax_h3": minimax_h3,
}
