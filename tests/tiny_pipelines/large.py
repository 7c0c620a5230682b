"""The pipelines of the reference systems: HunyuanVideo, Qwen-Image and its editing form, Wan 2.2's 5B, and sound."""

from collections.abc import Callable

import diffusers
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video_image2video import (
    DEFAULT_PROMPT_TEMPLATE as IMAGE_PROMPT_TEMPLATE,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from diffusers.pipelines.stable_audio import StableAudioProjectionModel
from transformers import CLIPImageProcessor, Qwen2VLImageProcessor, Qwen2VLProcessor

from . import basic, language
from .basic import WIDTH
from .conditioned import Case, draw_images

_qwen_dimensions = pipeline_qwenimage_edit.calculate_dimensions
SIZES = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": basic.TOKENS}
QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
QWEN_EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n"
)


def hunyuan_network(**config: int | str | bool) -> diffusers.HunyuanVideoTransformer3DModel:
    """One double and one single block."""
    return diffusers.HunyuanVideoTransformer3DModel(
        **{"in_channels": 4, "guidance_embeds": True, **config},
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        text_embed_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        rope_axes_dim=(2, 4, 4),
    )


def hunyuan_autoencoder() -> diffusers.AutoencoderKLHunyuanVideo:
    """Eight times smaller in space and four times in time, as the real one."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )


def hunyuan_video() -> Case:
    """HunyuanVideo: guidance as an embedding, a Llama beside CLIP, shift 7."""
    vocabulary = language.llama_tokenizer(DEFAULT_PROMPT_TEMPLATE["template"])
    pipe = diffusers.HunyuanVideoPipeline(
        text_encoder=language.llama(vocabulary),
        tokenizer=vocabulary,
        transformer=hunyuan_network(),
        vae=hunyuan_autoencoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=basic.clip(),
        tokenizer_2=basic.clip_tokenizer(),
    )
    return pipe, {**SIZES, "guidance_scale": 6.0}


def hunyuan_video_image() -> Case:
    """HunyuanVideo from an image: it goes to the language model, and as latents beside the noise."""
    vocabulary = language.llama_tokenizer(IMAGE_PROMPT_TEMPLATE["template"])
    pipe = diffusers.HunyuanVideoImageToVideoPipeline(
        text_encoder=language.llava(vocabulary),
        tokenizer=vocabulary,
        transformer=hunyuan_network(in_channels=9, guidance_embeds=False, image_condition_type="latent_concat"),
        vae=hunyuan_autoencoder(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=basic.clip(),
        tokenizer_2=basic.clip_tokenizer(),
        image_processor=CLIPImageProcessor(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}),
    )
    return pipe, {**SIZES, "num_frames": 9, "guidance_scale": 6.0, "image": draw_images()}


def qwen_parts(template: str, **autoencoder: int | list) -> dict:
    """What Qwen-Image and its editing form have in common."""
    vocabulary = language.qwen_tokenizer(template)
    return {
        "transformer": diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(8, 4, 4),
        ),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=4, z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4, **autoencoder
        ),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        "text_encoder": language.qwen_vl(vocabulary),
        "tokenizer": vocabulary,
    }


def qwen_image() -> Case:
    """Qwen-Image: true guidance with a rescaled norm, shift that ends at 0.02."""
    pipe = diffusers.QwenImagePipeline(
        **qwen_parts(QWEN_TEMPLATE, num_res_blocks=1, dim_mult=[1, 2, 2], temperal_downsample=[False, True])
    )
    return pipe, {"height": 16, "width": 16, "true_cfg_scale": 4.0, "negative_prompt": [" ", " "]}


def qwen_image_edit() -> Case:
    """Qwen-Image-Edit: the image goes to the language model, and as tokens beside the latents.

    The pipeline brings every image to a million pixels first; here to 64 x 64.
    """
    pipeline_qwenimage_edit.calculate_dimensions = lambda area, ratio: _qwen_dimensions(min(area, 64 * 64), ratio)
    parts = qwen_parts(QWEN_EDIT_TEMPLATE, num_res_blocks=1, dim_mult=[1, 2, 2], temperal_downsample=[False, True])
    image_processor = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    pipe = diffusers.QwenImageEditPipeline(
        **parts, processor=language.vision_processor(Qwen2VLProcessor, image_processor, parts["tokenizer"])
    )
    inputs = {"height": 16, "width": 16, "true_cfg_scale": 4.0, "negative_prompt": [" ", " "]}
    return pipe, {**inputs, "image": draw_images(size=32)}


def flux2() -> Case:
    """FLUX.2 klein: Qwen 3's inner layers as the text, a latent patch of four."""
    vocabulary = language.qwen3_tokenizer()
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(4, 4),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=2,
            norm_num_groups=2,
        ),
        text_encoder=language.qwen3(vocabulary),
        tokenizer=vocabulary,
        transformer=diffusers.Flux2Transformer2DModel(
            patch_size=1,
            in_channels=8,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            timestep_guidance_channels=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
    )
    sizes = {"height": 16, "width": 16, "max_sequence_length": basic.TOKENS}
    return pipe, {**sizes, "guidance_scale": 4.0, "text_encoder_out_layers": (1, 2)}


def z_image() -> Case:
    """Z-Image: lists of samples into the network and out of it, time from 0 to 1."""
    vocabulary = language.qwen3_tokenizer()
    pipe = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=basic.kl_autoencoder(4, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False),
        text_encoder=language.qwen3(vocabulary),
        tokenizer=vocabulary,
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[8, 4, 4],
            axes_lens=[256, 32, 32],
        ),
    )
    sizes = {"height": 16, "width": 16, "max_sequence_length": basic.TOKENS}
    return pipe, {**sizes, "guidance_scale": 4.0}


def wan_ti2v() -> Case:
    """Wan 2.2 TI2V-5B: a timestep for each token, 48 channels, 16 times smaller."""
    pipe, inputs = basic.wan()
    config = {**pipe.transformer.config, "in_channels": 8, "out_channels": 8}
    vae = diffusers.AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=8,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        is_residual=True,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 8,
        latents_std=[1.0] * 8,
    )
    parts = {**pipe.components, "transformer": diffusers.WanTransformer3DModel.from_config(config), "vae": vae}
    return diffusers.WanPipeline(**parts, expand_timesteps=True), {**inputs, "height": 64, "width": 64}


def stable_audio() -> Case:
    """Stable Audio: sound, EDM with exponential sigmas, v-prediction."""
    transformer = diffusers.StableAudioDiTModel(
        sample_size=8,
        in_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        out_channels=4,
        cross_attention_dim=WIDTH,
        time_proj_dim=8,
        global_states_input_dim=2 * WIDTH,
        cross_attention_input_dim=WIDTH,
    )
    vae = diffusers.AutoencoderOobleck(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 2],
        channel_multiples=[1, 2],
        decoder_channels=4,
        decoder_input_channels=4,
        sampling_rate=16,
    )
    tokenizer = basic.t5_tokenizer()
    tokenizer.model_max_length = basic.TOKENS
    pipe = diffusers.StableAudioPipeline(
        vae=vae,
        text_encoder=basic.t5(),
        projection_model=StableAudioProjectionModel(WIDTH, WIDTH, 0, 32),
        tokenizer=tokenizer,
        transformer=transformer,
        scheduler=diffusers.EDMDPMSolverMultistepScheduler(
            sigma_min=0.3, sigma_max=500, sigma_data=1.0, sigma_schedule="exponential", prediction_type="v_prediction"
        ),
    )
    return pipe, {"guidance_scale": 7.0, "audio_end_in_s": 2.0}


PIPELINES: dict[str, Callable[[], tuple[diffusers.DiffusionPipeline, dict]]] = {
    function.__name__: function
    for function in (
        hunyuan_video,
        hunyuan_video_image,
        qwen_image,
        qwen_image_edit,
        flux2,
        z_image,
        wan_ti2v,
        stable_audio,
    )
}
