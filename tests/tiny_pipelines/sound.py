"""Pipelines that make sound."""

from collections.abc import Callable

import diffusers
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

from . import basic
from .basic import WIDTH
from .conditioned import Case


def ltx2(is_guided: bool = False) -> Case:
    """LTX-2: video and its sound, stepped by two schedulers."""
    text_encoder = basic.gemma()
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=1,
        qk_norm="rms_norm_across_heads",
        caption_channels=WIDTH,
        rope_double_precision=False,
        rope_type="split",
    )
    one_layer = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 1, "num_learnable_registers": None}
    connectors = LTX2TextConnectors(
        caption_channels=WIDTH,
        text_proj_in_factor=text_encoder.config.num_hidden_layers + 1,
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in one_layer.items()},
        connector_rope_base_seq_len=basic.TOKENS,
        rope_theta=10000.0,
        rope_double_precision=False,
        causal_temporal_positioning=False,
        rope_type="split",
    )
    pipe = diffusers.LTX2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_video_autoencoder(),
        audio_vae=_sound_autoencoder(),
        text_encoder=text_encoder,
        tokenizer=basic.gemma_tokenizer(),
        connectors=connectors,
        transformer=transformer,
        vocoder=_vocoder(channels=16, sampling_rate=24000),
    )
    sizes = {"height": 32, "width": 32, "num_frames": 5, "frame_rate": 25.0, "max_sequence_length": basic.TOKENS}
    if is_guided:
        return pipe, {**sizes, "guidance_scale": 3.0}
    plain = {"guidance_scale": 1.0, "audio_guidance_scale": 1.0, "stg_scale": 0.0, "audio_stg_scale": 0.0}
    plain |= {"modality_scale": 1.0, "audio_modality_scale": 1.0, "use_cross_timestep": False}
    return pipe, {**sizes, **plain, "spatio_temporal_guidance_blocks": None}


def _video_autoencoder() -> diffusers.AutoencoderKLLTX2Video:
    return diffusers.AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )


def _sound_autoencoder() -> diffusers.AutoencoderKLLTX2Audio:
    return diffusers.AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=2,
        ch_mult=(1,),
        num_res_blocks=1,
        attn_resolutions=None,
        in_channels=2,
        resolution=32,
        latent_channels=2,
        norm_type="pixel",
        causality_axis="height",
        mid_block_add_attention=False,
        sample_rate=16000,
        mel_hop_length=160,
        mel_bins=8,
    )


def _vocoder(channels: int, sampling_rate: int) -> LTX2Vocoder:
    return LTX2Vocoder(
        in_channels=channels,
        hidden_channels=32,
        out_channels=2,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        leaky_relu_negative_slope=0.1,
        output_sampling_rate=sampling_rate,
    )


PIPELINES: dict[str, Callable[[], tuple[diffusers.DiffusionPipeline, dict]]] = {"ltx2": ltx2}
