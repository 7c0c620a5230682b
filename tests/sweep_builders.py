"""Tiny pipelines for the sweep: those of diffusers' own tests, and ours of classes that have none there.

Most of ours are a sister class' components, out of a test or of tests/tiny_pipelines, in another class, beside the one
that the sister lacks; the others are configured here, with random weights.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DiffusionPipeline
from stand_ins import stand_in
from tiny_pipelines import basic, conditioned, language, large, modular, more, physical
from tiny_pipelines.basic import WIDTH
from tiny_pipelines.conditioned import STRENGTH, draw_images, masks

from diffusion_grpo.policy.modular import as_pipeline

Case = tuple[DiffusionPipeline, dict[str, Any]]
SET_BY_CHECK = ("generator", "num_inference_steps", "output_type", "return_dict")


def load_case(module: str, name: str) -> type | None:
    """The test class, if it is one that builds a pipeline from components."""
    cls = getattr(importlib.import_module(module), name)
    wanted = ("pipeline_class", "get_dummy_components", "get_dummy_inputs")
    if not all(hasattr(cls, attribute) for attribute in wanted) or isinstance(cls.pipeline_class, property):
        return None
    return cls


def build(cls: type) -> tuple[DiffusionPipeline, dict[str, Any]]:
    """The pipeline of a test class and the inputs of a call, with random numbers where weights are all zero."""
    try:
        case = cls()
    except TypeError:
        case = cls("run")
    for setup in ("setUp", "setup_method"):
        if setup in cls.__dict__:
            with contextlib.suppress(Exception):
                getattr(case, setup)()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = cls.pipeline_class(**case.get_dummy_components())
        parameters = inspect.signature(case.get_dummy_inputs).parameters
        inputs = case.get_dummy_inputs(*(["cpu"] if "device" in parameters else []))
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                fill_blanks(component)
                shorten_head(component)
    pipe.set_progress_bar_config(disable=True)
    inputs = {key: value for key, value in inputs.items() if key not in SET_BY_CHECK}
    if "intermediate_timesteps" in inspect.signature(type(pipe).__call__).parameters:
        inputs["intermediate_timesteps"] = None  # Sana-Sprint's default allows for two steps only
    return pipe, inputs


@torch.no_grad()
def fill_blanks(module: torch.nn.Module) -> None:
    """Random numbers for zeros, which would hide errors, and for what `torch.empty` left uninitialised."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not (parameter.any() and parameter.isfinite().all()):
            noise = torch.randn_like(parameter)
            # a negative bias before a last ReLU (a depth estimator's) would leave one and the same value everywhere
            parameter.copy_(0.1 * noise.abs() if parameter.ndim < 2 else noise * parameter[0].numel() ** -0.5)


def shorten_head(module: torch.nn.Module) -> None:
    """Logits over a vocabulary cost seconds, and a pipeline that conditions on hidden states never reads them."""
    head = getattr(module, "lm_head", None)
    if isinstance(head, torch.nn.Linear) and head.out_features > 10_000:
        module.lm_head = torch.nn.Linear(head.in_features, 8, bias=head.bias is not None)


def from_test(module: str, name: str) -> Case:
    """The pipeline of a test class of diffusers, and the inputs of a call."""
    return build(load_case(f"tests.pipelines.{module}", name))


def around(name: str, sister: Callable[[], Case], inputs: dict[str, Any] | None = None, **parts: Any) -> Case:
    """A class around a sister's components: `parts` replace some or make new ones, from the sister if callable."""
    pipe, given = sister()
    made = {key: part(pipe) if inspect.isfunction(part) else part for key, part in parts.items()}
    pipe, _ = conditioned.rebuilt(name, lambda: (pipe, given), **made)
    known = inspect.signature(type(pipe).__call__).parameters
    return pipe, {key: value for key, value in (given | (inputs or {})).items() if key in known}


def as_modular(name: str, sister: Callable[[], Case], inputs: dict[str, Any] | None = None, **parts: Any) -> Case:
    """A modular class around the components of a classic pipeline of the same model; else as `around`."""
    classic, given = sister()
    pipe, given = getattr(diffusers, name)(), given | (inputs or {})
    if hasattr(pipe, "disable_safety_checker"):
        pipe.disable_safety_checker()
    made = {key: part(classic) if inspect.isfunction(part) else part for key, part in parts.items()}
    found = {**dict(classic.config), **classic.components, **made}
    names = {*pipe.component_names, *pipe._config_specs}
    pipe.update_components(**{key: part for key, part in found.items() if key in names and part is not None})
    known = inspect.signature(type(as_pipeline(pipe)).__call__).parameters
    scale = given.get("true_cfg_scale", given.get("guidance_scale"))
    given = {"guidance_scale": scale, "negative_prompt": "", **given} if scale else given
    return pipe, {key: value for key, value in given.items() if key in known}


def wider(network: str, **config: Any) -> Callable[[DiffusionPipeline], torch.nn.Module]:
    """A pipeline's network with another configuration, such as more channels."""

    def make(pipe: DiffusionPipeline) -> torch.nn.Module:
        old = pipe.components[network]
        return type(old)(**{k: v for k, v in old.config.items() if not k.startswith("_")} | config)

    return make


def video(frames: int, size: int = 16) -> torch.Tensor:
    """A video of random numbers between 0 and 1, of shape (1, 3, frames, size, size)."""
    return torch.rand(1, 3, frames, size, size)


def dance_diffusion() -> Case:
    """Sound without a prompt, by a UNet over time."""
    unet = diffusers.UNet1DModel(
        block_out_channels=(8, 8, 16),
        extra_in_channels=16,
        sample_size=512,
        sample_rate=16_000,
        in_channels=2,
        out_channels=2,
        flip_sin_to_cos=True,
        use_timestep_embedding=False,
        time_embedding_type="fourier",
        mid_block_type="UNetMidBlock1D",
        down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
        up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
    )
    pipe = diffusers.DanceDiffusionPipeline(unet, diffusers.IPNDMScheduler())
    return pipe, {"batch_size": 2, "audio_length_in_s": 512 / 16_000}


def z_image_controlnet(put: Callable[..., Case], channels: int, **inputs: Any) -> Case:
    """Z-Image with control blocks beside its own."""
    controlnet = diffusers.ZImageControlNetModel(
        control_layers_places=[0],
        control_refiner_layers_places=[0],
        control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner",
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    return put(large.z_image, {"control_image": draw_images(1)[0], **inputs}, controlnet=controlnet)


def sdxl_union(put: Callable[..., Case], **inputs: Any) -> Case:
    """SDXL with one ControlNet for several kinds of control images."""

    def controlnet(pipe: DiffusionPipeline) -> torch.nn.Module:
        known = inspect.signature(diffusers.ControlNetUnionModel.__init__).parameters
        config = {key: value for key, value in pipe.unet.config.items() if key in known}
        small = {
            "conditioning_embedding_out_channels": (8, 8),
            "num_trans_channel": 8,
            "num_trans_head": 2,
            "num_proj_channel": 8,
        }
        return diffusers.ControlNetUnionModel(**config, **small)

    given = {"control_image": [draw_images(1)[0]], "control_mode": [1], "prompt": "a cat"}
    return put(basic.sdxl, given | inputs, controlnet=controlnet)


def sd_video(put: Callable[..., Case], **inputs: Any) -> Case:
    """ModelScope's text-to-video: Stable Diffusion with layers over time."""
    unet = diffusers.UNet3DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        sample_size=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=2,
    )
    return put(basic.sd15, inputs, unet=unet)


def i2vgen_xl() -> Case:
    """An image and a prompt become a video."""
    unet = diffusers.I2VGenXLUNet(
        block_out_channels=(8, 8),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        num_attention_heads=None,
        norm_num_groups=2,
    )
    parts = {"image_encoder": more.clip_vision(), "feature_extractor": more.clip_image_processor()}
    parts["scheduler"] = diffusers.DDIMScheduler(clip_sample=False)
    # with clip_skip it reads a layer of CLIP where transformers 4 had it
    inputs = {"image": draw_images()[0], "num_frames": 2, "target_fps": 7, "clip_skip": None}
    return around("I2VGenXLPipeline", basic.sd15, inputs, unet=unet, **parts)


def ldm_upscale() -> Case:
    """Latent diffusion from a small image to a large one."""
    unet = diffusers.UNet2DModel(
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=6,
        out_channels=3,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    vqvae = diffusers.VQModel(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=4,
    )
    pipe = diffusers.LDMSuperResolutionPipeline(vqvae, unet, diffusers.DDIMScheduler(clip_sample=False))
    return pipe, {"image": draw_images(size=32)[0]}


def siglip() -> torch.nn.Module:
    """A SigLIP vision encoder of one layer."""
    sizes = dict(hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=2)
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(image_size=32, patch_size=16, **sizes))


def qwen_controlnet(pipe: DiffusionPipeline) -> torch.nn.Module:
    """A ControlNet of Qwen-Image's blocks, which reads the control image beside its mask."""
    known = inspect.signature(diffusers.QwenImageControlNetModel.__init__).parameters
    config = {key: value for key, value in pipe.transformer.config.items() if key in known}
    return diffusers.QwenImageControlNetModel(**config, extra_condition_channels=4)


def hunyuan15_image(put: Callable[..., Case]) -> Case:
    """HunyuanVideo 1.5 from an image, which SigLIP reads too."""
    return put(
        hunyuan15,
        {"image": draw_images(size=16)[0]},
        transformer=wider("transformer", task_type="i2v"),
        image_encoder=siglip(),
        feature_extractor=transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
    )


def chroma_inpaint() -> Case:
    """Chroma's inpainting reads a setting of FLUX's network from the configuration, which Chroma's does not have."""
    inputs = {"image": draw_images()[0], "mask_image": masks()[0], **STRENGTH}
    pipe, inputs = around("ChromaInpaintPipeline", test["chroma"], inputs)
    pipe.transformer.register_to_config(guidance_embeds=False)
    return pipe, inputs


def z_image_omni() -> Case:
    """Z-Image that reads images by SigLIP 2."""
    sizes = dict(hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Siglip2VisionConfig(num_patches=16, patch_size=8, **sizes)
    return around(
        "ZImageOmniPipeline",
        large.z_image,
        {"image": draw_images(size=64)[:1], "prompt": "a cat"},
        transformer=wider("transformer", siglip_feat_dim=WIDTH),
        vae=lambda pipe: pipe.vae.bfloat16(),  # to which it casts the images
        siglip=transformers.Siglip2VisionModel(config),
        siglip_processor=transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16),
    )


def flux2() -> Case:
    """FLUX.2 [dev]: Mistral's inner layers as the text, guidance as an embedding."""
    text = {"vocab_size": 512, "num_hidden_layers": 2, "head_dim": 8, **basic.WIDTHS}
    vision = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **text},
        vision_config={"model_type": "pixtral", "head_dim": WIDTH // 2, **vision},
    )
    parts = {
        "text_encoder": transformers.Mistral3ForConditionalGeneration(config),
        "tokenizer": stand_in(transformers.AutoProcessor, "Mistral"),
        "transformer": wider("transformer", guidance_embeds=True),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
    }
    return around("Flux2Pipeline", large.flux2, {"prompt": "a cat"}, **parts)


def ernie_image() -> Case:
    """ERNIE-Image: an autoencoder like FLUX.2's, Ministral as the text encoder."""
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=1,
        ffn_hidden_size=32,
        in_channels=8,
        out_channels=8,
        text_in_dim=WIDTH,
        rope_axes_dim=(4, 6, 6),
    )
    encoder = {"text_encoder": lambda pipe: pipe.text_encoder.model}
    inputs = {"use_pe": False, "negative_prompt": ""}
    return around("ErnieImagePipeline", flux2, inputs, transformer=transformer, **encoder)


def ideogram4() -> Case:
    """Ideogram 4: a network of its own for the unconditional pass, hidden states of 13 layers of Qwen 3 VL."""

    def network() -> torch.nn.Module:
        return diffusers.Ideogram4Transformer2DModel(
            in_channels=8,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            intermediate_size=32,
            adaln_dim=16,
            llm_features_dim=13 * WIDTH,
            mrope_section=(4, 2, 2),
        )

    plain, _ = large.flux2()
    pipe = diffusers.Ideogram4Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=plain.vae,
        text_encoder=modular.qwen3_vl(plain.tokenizer, layers=36).model,
        tokenizer=plain.tokenizer,
        transformer=network(),
        unconditional_transformer=network(),
    )
    sizes = {"height": 16, "width": 16, "max_sequence_length": 128}
    return pipe, {**sizes, "guidance_scale": 7.0, "guidance_schedule": None}


def bria_fibo2() -> Case:
    """FIBO 2: Qwen 3 VL's hidden states, three layers each for six places of the network."""
    transformer = diffusers.BriaFibo2Transformer2DModel(
        in_channels=2,
        dim=32,
        n_layers=6,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=3 * 16,
        injection_layer_ids=(1, 2, 3, 4, 5),
        perceiver_num_layers=1,
        min_num_gist_tokens=4,
        max_num_gist_tokens=8,
        gist_step=4,
        axes_dims=(8, 4, 4),
        axes_lens=(64, 64, 64),
    )
    encoder = stand_in(transformers.Qwen3VLForConditionalGeneration, "Qwen")
    config = encoder.config
    config.text_config.num_hidden_layers = 36
    plain, _ = large.flux2()
    pipe = diffusers.BriaFibo2Pipeline(
        transformer=transformer,
        scheduler=plain.scheduler,
        vae=plain.vae,
        text_encoder=transformers.Qwen3VLForConditionalGeneration(config).eval(),
        processor=stand_in(transformers.Qwen3VLProcessor, "Qwen"),
    )
    inputs = {"prompt": '{"short_description": "a cat"}', "negative_prompt": "", "guidance_scale": 5.0}
    return pipe, {**inputs, "height": 16, "width": 16}


def longcat_image(put: Callable[..., Case], **inputs: Any) -> Case:
    """LongCat-Image: FLUX's blocks behind Qwen 2.5 VL."""
    transformer = diffusers.LongCatImageTransformer2DModel(
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[8, 4, 4],
    )
    pipe, given = test["qwen_edit"]()
    vae = basic.kl_autoencoder(16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False)
    parts = {"vae": vae, "text_processor": pipe.processor}
    given = {"guidance_scale": 4.0, "enable_prompt_rewrite": False, **inputs}
    return put(lambda: (pipe, {"height": 16, "width": 16, **ONE}), given, transformer=transformer, **parts)


def qwen_image21() -> Case:
    """Qwen-Image 2.1: one stream of text and image tokens, latents of 64 channels that are not packed."""
    size = 4
    pipe = diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=size,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.0] * size,
            latents_std=[1.0] * size,
        ),
        text_encoder=stand_in(transformers.Qwen3VLForConditionalGeneration, "Qwen"),
        processor=stand_in(transformers.Qwen3VLProcessor, "Qwen"),
        transformer=diffusers.QwenImage21Transformer2DModel(
            in_channels=size,
            out_channels=size,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
    )
    return pipe, {"height": 32, "width": 32, "true_cfg_scale": 4.0, **ONE}


def layered() -> Case:
    """An image is taken apart into layers, each a sample of its own frame."""
    return around(
        "QwenImageLayeredPipeline",
        large.qwen_image_edit,
        # normalised as its modular blocks always do
        {"layers": 2, "image": draw_images(size=32)[0].convert("RGBA"), "cfg_normalize": True, **ONE},
        transformer=wider(
            "transformer", in_channels=32, out_channels=8, use_layer3d_rope=True, use_additional_t_cond=True
        ),
        # an image with as many channels as the latents would pass for latents
        vae=wider("vae", input_channels=4, z_dim=8, latents_mean=[0.0] * 8, latents_std=[1.0] * 8),
    )


def hunyuan_refiner() -> Case:
    """HunyuanImage's refiner: the image that it improves beside the latents, guidance as an embedding."""
    vae = diffusers.AutoencoderKLHunyuanImageRefiner(
        latent_channels=2,  # half as many as the network has, which takes frames in pairs
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=1,
        downsample_match_channel=False,
        upsample_match_channel=False,
    )
    network = {"in_channels": 8, "patch_size": (1, 1, 1), "rope_axes_dim": (2, 2, 4), "text_embed_2_dim": None}
    return around(
        "HunyuanImageRefinerPipeline",
        test["hunyuan_image"],
        {"image": draw_images()[0]},
        vae=vae,
        transformer=wider("transformer", **network, guidance_embeds=True),
        guider=None,
    )


def kandinsky6() -> Case:
    """Kandinsky 6: video and its sound from a prompt."""
    transformer = diffusers.Kandinsky6Transformer3DModel(
        in_visual_dim=16,
        out_visual_dim=16,
        in_text_dim=32,
        in_text_dim2=16,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
        in_audio_dim=4,
        out_audio_dim=4,
    )
    audio_vae = diffusers.MMAudioVAE(
        mel_bins=8, latent_channels=4, hidden_channels=8, channel_multipliers=(1, 1), layers_per_block=1, n_fft=64
    )
    vocoder = diffusers.MMAudioVocoder(
        num_mels=8,
        upsample_initial_channel=8,
        upsample_rates=(2, 2),
        upsample_kernel_sizes=(4, 4),
        resblock_kernel_sizes=(3,),
        resblock_dilation_sizes=((1,),),
    )
    parts = {"transformer": transformer, "audio_vae": audio_vae, "vocoder": vocoder}
    return around("Kandinsky6TI2VAPipeline", test["kandinsky5"], {"max_sequence_length": 64}, **parts)


def kandinsky6_sr() -> Case:
    """Kandinsky 6's upscaler, for a video of one tile."""
    transformer = diffusers.Kandinsky6SRTransformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        time_dim=16,
        model_dim=16,
        ff_dim=32,
        num_visual_blocks=1,
        axes_dims=(4, 6, 6),
        tile_sizes=((32, 32),),
    )
    vae = diffusers.Kandinsky6SRVAE(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        layers_per_block=1,
        temporal_compression_start_level=0,
    )
    pipe = diffusers.Kandinsky6SRPipeline(transformer, vae, diffusers.FlowMatchEulerDiscreteScheduler())
    return pipe, {"video": video(5).transpose(1, 2), "resolution_scale": 2}


def sana_wm() -> Case:
    """SANA-WM: an image and a camera's path become a video; the first frame stays."""
    plain, _ = test["ltx2"]()
    ratio = plain.vae.temporal_compression_ratio
    transformer = diffusers.SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=16,
        chunk_plucker_channels=6 * ratio,
        caption_channels=WIDTH,
    )
    parts = {"tokenizer": basic.gemma_tokenizer(), "text_encoder": basic.gemma(), "vae": plain.vae}
    pipe = diffusers.SanaWMPipeline(**parts, transformer=transformer, scheduler=plain.scheduler)
    camera = {"c2w": np.tile(np.eye(4), (9, 1, 1)), "intrinsics": [16.0, 16.0, 8.0, 8.0]}
    sizes = {"height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 16}
    return pipe, {"image": draw_images(size=32)[0], "guidance_scale": 5.0, **camera, **sizes, "chi_prompt": ["Say: "]}


def anima() -> Case:
    """Anima: Cosmos 2's network, whose text is T5 tokens that read Qwen 3's states."""
    vocabulary, t5 = language.qwen3_tokenizer(), basic.t5_tokenizer()
    network = physical.cosmos_network()
    parts = {
        "text_encoder": language.qwen3(vocabulary).model,
        "tokenizer": vocabulary,
        "t5_tokenizer": t5,
        "text_conditioner": diffusers.AnimaTextConditioner(
            source_dim=WIDTH,
            target_dim=WIDTH,
            model_dim=WIDTH,
            num_layers=1,
            num_attention_heads=4,
            target_vocab_size=len(t5),
            min_sequence_length=16,
        ),
        "transformer": network,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    sizes = {"height": 32, "width": 32, "max_sequence_length": 16}
    return as_modular(
        "AnimaModularPipeline", lambda: (large.qwen_image()[0], {"guidance_scale": 4.0, **sizes}), **parts
    )


def krea2() -> Case:
    """Krea 2: twelve layers of Qwen 3 VL for each token, in one stream with the image."""
    config = stand_in(transformers.Qwen3VLForConditionalGeneration, "Qwen").config
    config.text_config.num_hidden_layers = 36
    plain, _ = large.qwen_image()
    pipe = diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=plain.vae,
        text_encoder=transformers.Qwen3VLModel(config),
        tokenizer=stand_in(transformers.Qwen2Tokenizer, "Qwen"),
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=16,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(8, 4, 4),
        ),
    )
    sizes = {"height": 16, "width": 16, "max_sequence_length": 128}
    return pipe, {"prompt": "a cat", "negative_prompt": "", "guidance_scale": 3.0, **sizes}


def hunyuan15() -> Case:
    """HunyuanVideo 1.5: Qwen 2.5 VL beside ByT5, the first frame and its mask in further channels, a guider."""
    rope = language.ROPE | {"rope_theta": 1_000_000.0}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.Qwen2_5_VLTextConfig(**sizes, num_hidden_layers=3, rope_parameters=rope)
    pipe = diffusers.HunyuanVideo15Pipeline(
        text_encoder=transformers.Qwen2_5_VLTextModel(config),
        tokenizer=stand_in(transformers.Qwen2Tokenizer, "Qwen"),
        text_encoder_2=stand_in(transformers.T5EncoderModel, ""),
        tokenizer_2=transformers.ByT5Tokenizer(),
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=32,
            image_embed_dim=WIDTH,
            rope_axes_dim=(2, 2, 4),
            target_size=16,
            task_type="t2v",
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(8, 8),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        guider=diffusers.ClassifierFreeGuidance(6.0),
    )
    return pipe, {"prompt": "a cat", "height": 16, "width": 16, "num_frames": 9}


def cosmos3() -> Case:
    """Cosmos 3: text and frames in one network, which reads the words itself."""
    plain, _ = basic.wan()
    channels = plain.vae.config.z_dim
    pipe = diffusers.Cosmos3OmniPipeline(
        transformer=diffusers.Cosmos3OmniTransformer(
            head_dim=16,
            hidden_size=32,
            intermediate_size=32,
            latent_channel=channels,
            latent_patch_size=1,
            patch_latent_dim=channels,
            num_attention_heads=2,
            num_hidden_layers=1,
            num_key_value_heads=1,
            rope_axes_dim=[4, 2, 2],
            vocab_size=151_657,
        ),
        text_tokenizer=stand_in(transformers.AutoTokenizer, "cosmos3"),
        vae=plain.vae,
        scheduler=diffusers.UniPCMultistepScheduler(),
        safety_checker=physical.NothingIsUnsafe(),
        enable_safety_checker=False,
    )
    bare = dict.fromkeys(("use_system_prompt", "add_resolution_template", "add_duration_template"), False)
    sizes = {"height": 16, "width": 16, "num_frames": 1}
    return pipe, {"prompt": "a cat", "negative_prompt": "a dog", "guidance_scale": 4.0, **sizes, **bare}


def ltx25_decoder() -> torch.nn.Module:
    """LTX-2.5's decoder, which denoises, for the latents of the tiny LTX-2."""
    sizes = importlib.import_module("tests.pipelines.ltx2.test_ltx2_diffusion_decode").DECODER_CONFIG
    small = {"latent_channels": 4, "spatial_compression_ratio": 2, "temporal_compression_ratio": 1}
    small |= {"decoder_upsample_strides": ((1, 1, 1),) * 4, "patch_size": 2}
    return diffusers.LTX2VideoDiffusionDecoderModel(**sizes | small)


def minimax_music3() -> Case:
    """MiniMax Music 3: tokens of sound by a language model, and sound by flow matching from its states."""
    width = 16
    config = transformers.Qwen3Config(
        vocab_size=151_675 + 16_384,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    depth = {"hidden_size": width, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": width}
    pipe = diffusers.MiniMaxMusic3ModularPipeline()
    pipe.update_components(
        tokenizer=stand_in(transformers.Qwen2Tokenizer, "Qwen"),
        language_model=transformers.Qwen3ForCausalLM(config),
        rvq_depth_decoder=diffusers.MiniMaxMusic3RVQDepthDecoder(**depth, audio_vocab_size=64),
        condition_encoder=diffusers.MiniMaxMusic3ConditionEncoder(condition_hidden_dim=width, out_dim=width),
        transformer=diffusers.MiniMaxMusic3Transformer1DModel(
            in_channels=8,
            condition_dim=width,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=8,
            ff_inner_dim=32,
            rotary_dim=4,
            fourier_embedding_dim=8,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, invert_sigmas=True),
        vocoder=diffusers.MiniMaxMusic3Vocoder(
            latent_channels=8, decoder_input_dim=8, decoder_hidden_dim=32, upsampling_ratios=(2, 2)
        ),
    )
    return pipe, {"prompt": "a song", "lyrics": "[verse]\nhello", "audio_duration": 0.2, "guidance_scale": 1.7}


def wan_animate2(put: Callable[..., Case]) -> Case:
    """Wan-Animate 2: a character moves as in a video; one segment."""
    transformer = diffusers.WanAnimate2Transformer3DModel(
        in_dim=36, text_len=16, dim=48, ffn_dim=32, freq_dim=32, text_dim=WIDTH, num_heads=2, num_layers=1
    )
    config = transformers.CLIPVisionConfig(
        hidden_size=1280,  # which the network counts on
        intermediate_size=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        image_size=224,
        patch_size=112,
    )
    inputs = {"image": draw_images(size=64)[0], "driving_video": draw_images(size=64) * 4 + draw_images(size=64)[:1]}
    inputs |= {"prompt": "a cat", "height": 64, "width": 64, "segment_frame_length": 9, "max_sequence_length": 16}
    encoder = transformers.CLIPVisionModel(config)
    return put(basic.wan, inputs, transformer=transformer, image_encoder=encoder)


def rfd4_proteina() -> Case:
    """RFdiffusion 4: two schedulers, one for a protein's backbone and one for the latents of its atoms."""
    sizes = {"nlayers": 1, "token_dim": 16, "nheads": 2, "dim_cond": 8, "pair_repr_dim": 8, "latent_dim": 4}
    pipe = diffusers.RFD4ProteinaPipeline(
        transformer=diffusers.RFD4ProteinaTransformer(**sizes, t_emb_dim=8, tri_mult_c=8),
        vae=diffusers.RFD4ProteinaAutoencoder([[True] * 37] * 147, [[True] * 147] * 7, **sizes),
        bb_ca_scheduler=diffusers.RFD4ProteinaScheduler("log", "1/t", 1.0, 1.0),
        local_latents_scheduler=diffusers.RFD4ProteinaScheduler("power", "tan", 1.0, 1.0),
    )
    return pipe, {}


TESTS = {
    "anyflow_far": ("anyflow.test_anyflow_far", "AnyFlowFARPipelineFastTests"),
    "chroma": ("chroma.test_pipeline_chroma_img2img", "ChromaImg2ImgPipelineFastTests"),
    "cogview4": ("cogview4.test_cogview4", "CogView4PipelineFastTests"),
    "hunyuan_image": ("hunyuan_image_21.test_hunyuanimage", "HunyuanImagePipelineFastTests"),
    "kandinsky5": ("kandinsky5.test_kandinsky5", "Kandinsky5T2VPipelineFastTests"),
    "skyreels_v2v": (
        "skyreels_v2.test_skyreels_v2_df_video_to_video",
        "SkyReelsV2DiffusionForcingVideoToVideoPipelineFastTests",
    ),
    "ltx2": ("ltx2.test_ltx2", "LTX2PipelineFastTests"),
    "qwen_edit": ("qwenimage.test_qwenimage_edit", "QwenImageEditPipelineTesterConfig"),
    "easyanimate": ("easyanimate.test_easyanimate", "EasyAnimatePipelineFastTests"),
    "helios": ("helios.test_helios", "HeliosPipelineFastTests"),
    "stable_audio3": ("stable_audio_3.test_stable_audio_3", "StableAudio3PipelineFastTests"),
}
test = {name: functools.partial(from_test, *place) for name, place in TESTS.items()}
ONE = {"prompt": "a cat", "negative_prompt": " "}  # in place of a list
EASY = {"in_channels": 12, "resize_inpaint_mask_directly": False}
BUILDERS: dict[str, Callable[[], Case]] = {
    "AnimaModularPipeline": anima,
    "BriaFibo2Pipeline": bria_fibo2,
    "ChromaInpaintPipeline": chroma_inpaint,
    "DanceDiffusionPipeline": dance_diffusion,
    "DiffusionGemmaPipeline": lambda: (
        diffusers.DiffusionGemmaPipeline(
            model=torch.nn.Linear(1, 1), scheduler=diffusers.DiscreteDDIMScheduler(), processor=None
        ),
        {},
    ),
    "ErnieImagePipeline": ernie_image,
    "HunyuanImageRefinerPipeline": hunyuan_refiner,
    "I2VGenXLPipeline": i2vgen_xl,
    "Ideogram4Pipeline": ideogram4,
    "Kandinsky6SRPipeline": kandinsky6_sr,
    "Kandinsky6TI2VAPipeline": kandinsky6,
    "LDMSuperResolutionPipeline": ldm_upscale,
    "LLaDA2Pipeline": lambda: (
        diffusers.LLaDA2Pipeline(model=torch.nn.Linear(1, 1), scheduler=diffusers.BlockRefinementScheduler()),
        {},
    ),
    "LTX2VideoDiffusionDecodePipeline": lambda: (
        diffusers.LTX2VideoDiffusionDecodePipeline(ltx25_decoder(), diffusers.FlowMatchEulerDiscreteScheduler()),
        {"latents": torch.randn(1, 4, 3, 4, 4)},
    ),
    "MiniMaxMusic3ModularPipeline": minimax_music3,
    "QwenImage21Pipeline": qwen_image21,
    "QwenImageLayeredPipeline": layered,
    "RFD4ProteinaPipeline": rfd4_proteina,
    "SanaWMPipeline": sana_wm,
    "ZImageOmniPipeline": z_image_omni,
}
# `put` is `around` or `as_modular` of the class
AROUND_SISTERS: dict[str, Callable[[Callable[..., Case]], Case]] = {
    "AnyFlowFARPipeline": lambda put: put(test["anyflow_far"], {"chunk_partition": [3]}),  # one chunk
    "CogView4ControlPipeline": lambda put: put(
        test["cogview4"], {"control_image": draw_images()[0]}, transformer=wider("transformer", in_channels=8)
    ),
    "Cosmos3DistilledModularPipeline": lambda put: put(
        cosmos3,
        {"guidance_scale": None},
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        distilled_sigmas=[1.0, 0.9, 0.7, 0.4],
    ),
    "DDPMPipeline": lambda put: put(more.ddim_pixels, scheduler=diffusers.DDPMScheduler()),
    "EasyAnimateControlPipeline": lambda put: put(
        test["easyanimate"], {"control_video": video(5)}, transformer=wider("transformer", **EASY)
    ),
    "EasyAnimateInpaintPipeline": lambda put: put(
        test["easyanimate"],
        {"video": video(5), "mask_video": video(5)[:, :1].round()},
        transformer=wider("transformer", **EASY),
    ),
    "EchoModularPipeline": lambda put: put(test["ltx2"]),
    "HeliosPyramidDistilledModularPipeline": lambda put: put(test["helios"]),
    "HeliosPyramidPipeline": lambda put: put(test["helios"]),
    "HunyuanVideo15ImageToVideoPipeline": hunyuan15_image,
    # with one pass its text encoder's block fails
    "HunyuanVideo15ModularPipeline": lambda put: put(hunyuan15, {"guidance_scale": 6.0}),
    "Ideogram4ModularPipeline": lambda put: put(ideogram4, {"guidance_scale": None, "guidance_schedule": [7.0] * 4}),
    "Krea2ModularPipeline": lambda put: put(krea2),
    "Krea2TurboModularPipeline": lambda put: put(krea2),
    "LTX25ModularPipeline": lambda put: put(test["ltx2"], diffusion_decoder=ltx25_decoder()),
    "LTX2DFRPipeline": lambda put: put(
        test["ltx2"], transformer=wider("transformer", use_keyframes_abs_pos_embedding=True)
    ),
    "LTX2DFRTemporalRefinePipeline": lambda put: put(
        test["ltx2"],
        scheduler=diffusers.LTXEulerAncestralRFScheduler(),
        temporal_latent_upsampler=torch.nn.Linear(1, 1),
    ),
    "LTXI2VLongMultiPromptPipeline": lambda put: put(more.ltx, {"prompt": "a cat"}),
    "LongCatImageEditPipeline": lambda put: longcat_image(put, image=draw_images(size=32)[0]),
    "LongCatImagePipeline": longcat_image,
    "LucyEditPipeline": lambda put: put(
        basic.wan,
        {"video": draw_images(size=32) * 2 + draw_images(size=32)[:1], "prompt": "a cat"},
        transformer=wider("transformer", in_channels=32),
    ),
    "QwenImage21TurboModularPipeline": lambda put: put(qwen_image21, sample_sigmas=[1.0, 0.8, 0.6, 0.3]),
    "QwenImageControlNetInpaintPipeline": lambda put: put(
        large.qwen_image,
        {"control_image": draw_images()[0], "control_mask": masks()[0], **ONE},
        controlnet=qwen_controlnet,
    ),
    "QwenImageEditInpaintPipeline": lambda put: put(test["qwen_edit"], {"mask_image": masks(32)[0], **STRENGTH}),
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": lambda put: put(
        test["skyreels_v2v"],
        {"base_num_frames": 17},  # one chunk
    ),
    "StableAudio3AudioToAudioPipeline": lambda put: put(test["stable_audio3"], {"audio": torch.randn(1, 2, 16)}),
    "StableAudio3InpaintPipeline": lambda put: put(
        test["stable_audio3"],
        {"audio": torch.randn(1, 2, 16), "mask_start_seconds": 0.25, "mask_end_seconds": 0.75},
        transformer=wider("transformer", local_add_cond_dim=9),
    ),
    "StableDiffusionUpscalePipeline": lambda put: put(
        basic.sd15,
        {"image": draw_images(size=8)[0]},
        unet=wider("unet", in_channels=7, num_class_embeds=1000),
        low_res_scheduler=diffusers.DDPMScheduler(),
        scheduler=diffusers.DDIMScheduler(prediction_type="v_prediction", clip_sample=False),
    ),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": lambda put: sdxl_union(put, image=draw_images()[0], **STRENGTH),
    "StableDiffusionXLControlNetUnionInpaintPipeline": lambda put: sdxl_union(
        put, image=draw_images()[0], mask_image=masks()[0], **STRENGTH
    ),
    "StableDiffusionXLControlNetUnionPipeline": sdxl_union,
    "TextToVideoSDPipeline": lambda put: sd_video(put, num_frames=2),
    "VideoToVideoSDPipeline": lambda put: sd_video(
        put, video=[np.asarray(frame) for frame in draw_images()], **STRENGTH
    ),
    "Wan22VaceModularPipeline": lambda put: put(
        more.wan_vace, transformer_2=wider("transformer"), boundary_ratio=0.875
    ),
    "WanAnimate2DistilledModularPipeline": wan_animate2,
    "WanAnimate2ModularPipeline": wan_animate2,
    "ZImageControlNetInpaintPipeline": lambda put: z_image_controlnet(
        put, 9, image=draw_images()[0], mask_image=masks()[0]
    ),
    "ZImageControlNetPipeline": lambda put: z_image_controlnet(put, 4),
}
for _name, _make in AROUND_SISTERS.items():
    BUILDERS[_name] = functools.partial(_make, functools.partial(as_modular if "Modular" in _name else around, _name))


def build_ours(name: str) -> Case:
    """The pipeline of a class of `BUILDERS`, in eval mode, with random numbers for all weights that are zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe, inputs = BUILDERS[name]()
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                fill_blanks(component.eval())
    pipe.set_progress_bar_config(disable=True)
    if "prompt" in inspect.signature(type(pipe).__call__).parameters:
        inputs = {"prompt": "a cat", **inputs}
    return pipe, inputs
