"""The plain pipelines of the families, and the parts that others are built of."""

from collections.abc import Callable

import diffusers
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel

WIDTH = 32  # of the text encoders
TOKENS = 32  # of a prompt in T5, UMT5 and Gemma
# of a language model's layers
WIDTHS = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
PATCHES = {"sample_size": 8, "patch_size": 2, "in_channels": 4}
SD_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


@torch.no_grad()
def randomize(network: torch.nn.Module) -> None:
    """Gives every parameter a random value, also those that diffusers starts at zero or one."""
    for name, parameter in network.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            parameter.copy_(noise / parameter[0].numel() ** 0.5)
        elif name.endswith("weight"):  # a norm's
            parameter.copy_(1 + 0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)


# Text


def clip_tokenizer(max_length: int = 77) -> transformers.CLIPTokenizer:
    """One token a byte. The end has the highest id, as in the real vocabulary."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=max_length)


def t5_tokenizer(**options: int) -> transformers.T5Tokenizer:
    """One token a printable ASCII character."""
    characters = [(chr(code), -1.0) for code in range(33, 127)]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return transformers.T5Tokenizer(vocab=special + characters, **{"extra_ids": 0, "model_max_length": 512, **options})


def gemma_tokenizer() -> transformers.GemmaTokenizer:
    """One token a printable ASCII character."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *(chr(code) for code in range(33, 127))]
    return transformers.GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=[])


def clip(cls: type = transformers.CLIPTextModel) -> torch.nn.Module:
    """A CLIP text encoder of two layers."""
    tokenizer = clip_tokenizer()
    config = transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        projection_dim=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        **{f"{token}_token_id": getattr(tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")},
    )
    return cls(config)


def t5(
    config_cls: type = transformers.T5Config, cls: type = transformers.T5EncoderModel, width: int = WIDTH
) -> torch.nn.Module:
    """A T5 encoder of one layer."""
    sizes = {"d_model": width, "d_kv": 8, "d_ff": WIDTH, "num_heads": 4, "num_layers": 1}
    return cls(config_cls(vocab_size=len(t5_tokenizer()), feed_forward_proj="gated-gelu", **sizes))


def gemma() -> torch.nn.Module:
    """A Gemma 2 of one layer."""
    config = transformers.Gemma2Config(vocab_size=len(gemma_tokenizer()), num_hidden_layers=1, head_dim=8, **WIDTHS)
    return transformers.Gemma2Model(config)


# Images


def kl_autoencoder(latent_channels: int, **config: float | bool) -> diffusers.AutoencoderKL:
    """A KL autoencoder that makes an image half as high and half as wide."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        **config,
    )


def sd3() -> tuple[diffusers.DiffusionPipeline, dict]:
    """Stable Diffusion 3.5 medium: flow matching, three text encoders, guidance by concatenation."""
    transformer = diffusers.SD3Transformer2DModel(
        **PATCHES,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        vae=kl_autoencoder(4, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=clip(transformers.CLIPTextModelWithProjection),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
        text_encoder_3=t5(width=2 * WIDTH),
        tokenizer=clip_tokenizer(),
        tokenizer_2=clip_tokenizer(),
        tokenizer_3=t5_tokenizer(),
    )
    return pipe, {"height": 16, "width": 16, "guidance_scale": 4.5, "max_sequence_length": TOKENS}


def flux() -> tuple[diffusers.DiffusionPipeline, dict]:
    """FLUX.1 dev: flow matching with dynamic shift, packed latents, guidance as an embedding."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    )
    pipe = diffusers.FluxPipeline(
        transformer=transformer,
        vae=kl_autoencoder(4, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256
        ),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
    )
    return pipe, {"height": 16, "width": 16, "guidance_scale": 3.5, "max_sequence_length": TOKENS}


def unet(**config: int | str) -> diffusers.UNet2DConditionModel:
    """A UNet of two levels, the lower one with attention to the text."""
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        attention_head_dim=4,
        **config,
    )


def sdxl() -> tuple[diffusers.DiffusionPipeline, dict]:
    """Stable Diffusion XL: epsilon prediction, Euler with latents scaled by sigma."""
    pipe = diffusers.StableDiffusionXLPipeline(
        unet=unet(
            cross_attention_dim=2 * WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        ),
        vae=kl_autoencoder(4, scaling_factor=0.13025),
        scheduler=diffusers.EulerDiscreteScheduler(**SD_BETAS, timestep_spacing="leading", steps_offset=1),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection),
        tokenizer_2=clip_tokenizer(),
        add_watermarker=False,
    )
    return pipe, {"height": 16, "width": 16, "guidance_scale": 5.0}


def sd15() -> tuple[diffusers.DiffusionPipeline, dict]:
    """Stable Diffusion 1.5: epsilon prediction, PNDM."""
    pipe = diffusers.StableDiffusionPipeline(
        unet=unet(cross_attention_dim=WIDTH),
        vae=kl_autoencoder(4),
        scheduler=diffusers.PNDMScheduler(**SD_BETAS, skip_prk_steps=True, set_alpha_to_one=False, steps_offset=1),
        text_encoder=clip(),
        tokenizer=clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return pipe, {"height": 16, "width": 16, "guidance_scale": 7.5}


def pixart() -> tuple[diffusers.DiffusionPipeline, dict]:
    """PixArt-alpha: epsilon prediction beside a learned variance, DPM-Solver++."""
    transformer = diffusers.PixArtTransformer2DModel(
        **PATCHES,
        out_channels=8,
        num_layers=2,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        caption_channels=WIDTH,
        use_additional_conditions=False,
    )
    pipe = diffusers.PixArtAlphaPipeline(
        transformer=transformer,
        vae=kl_autoencoder(4),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            beta_start=0.0001, beta_end=0.02, algorithm_type="dpmsolver++", timestep_spacing="linspace"
        ),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
    )
    plain = {"use_resolution_binning": False, "clean_caption": False, "max_sequence_length": TOKENS}
    return pipe, {"height": 16, "width": 16, "guidance_scale": 4.5, **plain}


def sana() -> tuple[diffusers.DiffusionPipeline, dict]:
    """Sana: flow prediction by DPM-Solver++, linear attention, deep-compression autoencoder."""
    transformer = diffusers.SanaTransformer2DModel(
        **PATCHES | {"patch_size": 1},
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
    )
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        **{f"{part}_block_types": ("ResBlock", "EfficientViTBlock") for part in ("encoder", "decoder")},
        **{f"{part}_block_out_channels": (8, 8) for part in ("encoder", "decoder")},
        **{f"{part}_layers_per_block": (1, 1) for part in ("encoder", "decoder")},
        **{f"{part}_qkv_multiscales": ((), (5,)) for part in ("encoder", "decoder")},
        upsample_block_type="interpolate",
        downsample_block_type="conv",
        scaling_factor=0.41407,
    )
    scheduler = diffusers.DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, algorithm_type="dpmsolver++"
    )
    pipe = diffusers.SanaPipeline(gemma_tokenizer(), gemma(), vae, transformer, scheduler)
    plain = {"use_resolution_binning": False, "complex_human_instruction": None, "max_sequence_length": TOKENS}
    return pipe, {"height": 32, "width": 32, "guidance_scale": 4.5, **plain}  # it takes multiples of 32


# Videos


def wan() -> tuple[diffusers.DiffusionPipeline, dict]:
    """Wan 2.1: flow prediction by UniPC, guidance by a second pass."""
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
    )
    pipe = diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5(transformers.UMT5Config, transformers.UMT5EncoderModel),
        vae=diffusers.AutoencoderKLWan(base_dim=3, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, solver_order=2
        ),
        transformer=transformer,
    )
    return pipe, {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 5.0, "max_sequence_length": TOKENS}


def cogvideox() -> tuple[diffusers.DiffusionPipeline, dict]:
    """CogVideoX: v-prediction by a DDIM of its own, zero terminal signal-to-noise ratio."""
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=WIDTH,
        num_layers=1,
        sample_width=4,
        sample_height=4,
        sample_frames=5,
        patch_size=2,
        max_text_seq_length=TOKENS,
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    scheduler = diffusers.CogVideoXDDIMScheduler(
        **SD_BETAS,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        snr_shift_scale=3.0,
        timestep_spacing="trailing",
    )
    pipe = diffusers.CogVideoXPipeline(t5_tokenizer(), t5(), vae, transformer, scheduler)
    return pipe, {"height": 32, "width": 32, "num_frames": 5, "guidance_scale": 6.0, "max_sequence_length": TOKENS}


PIPELINES: dict[str, Callable[[], tuple[diffusers.DiffusionPipeline, dict]]] = {
    function.__name__: function for function in (sd3, flux, sdxl, sd15, wan, cogvideox, pixart, sana)
}
