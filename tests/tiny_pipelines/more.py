"""Other families: pixels, priors and decoders, learned variances, classes, continuous timesteps, video, experts."""

import inspect
from collections.abc import Callable

import diffusers
import torch
import transformers
from diffusers.models.unets import StableCascadeUNet
from diffusers.schedulers import SCMScheduler

from . import basic
from .basic import WIDTH
from .conditioned import Case, draw_images


def clip_vision(image_size: int = 32) -> transformers.CLIPVisionModelWithProjection:
    """A CLIP image encoder of one layer."""
    sizes = dict(hidden_size=WIDTH, intermediate_size=WIDTH, projection_dim=WIDTH, num_attention_heads=4)
    config = transformers.CLIPVisionConfig(
        image_size=image_size, patch_size=image_size // 2, num_hidden_layers=1, **sizes
    )
    return transformers.CLIPVisionModelWithProjection(config)


def clip_image_processor() -> transformers.CLIPImageProcessor:
    """Images of 32 x 32."""
    return transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})


def deepfloyd() -> Case:
    """DeepFloyd IF: pixels, learned variance, dynamic thresholds."""
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        in_channels=3,
        out_channels=6,
        block_out_channels=(8, 16),
        layers_per_block=1,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        cross_attention_dim=WIDTH,
        encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="text_proj",
        attention_head_dim=4,
        addition_embed_type="text",
        addition_embed_type_num_heads=2,
        norm_num_groups=4,
        resnet_time_scale_shift="scale_shift",
    )
    scheduler = diffusers.DDPMScheduler(
        beta_schedule="squaredcos_cap_v2", variance_type="learned_range", thresholding=True, sample_max_value=1.5
    )
    pipe = diffusers.IFPipeline(
        basic.t5_tokenizer(), basic.t5(), unet, scheduler, None, None, None, requires_safety_checker=False
    )
    return pipe, {"height": 16, "width": 16, "guidance_scale": 7.0}


def ddim_pixels() -> Case:
    """Unconditional pixels."""
    unet = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return diffusers.DDIMPipeline(unet, diffusers.DDIMScheduler()), {"batch_size": 2}


def dit() -> Case:
    """DiT: classes for prompts, both halves of guidance in the latents."""
    transformer = diffusers.DiTTransformer2DModel(
        **basic.PATCHES,
        out_channels=8,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_embeds_ada_norm=1000,
    )
    pipe = diffusers.DiTPipeline(transformer, basic.kl_autoencoder(4), diffusers.DDIMScheduler(clip_sample=False))
    return pipe, {"class_labels": [3, 7], "guidance_scale": 4.0}


def kandinsky_prior() -> Case:
    """Kandinsky 2.2's prior: image embeddings by sample prediction."""
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, embedding_dim=WIDTH, num_layers=1, num_embeddings=77
    )
    text_encoder = basic.clip(transformers.CLIPTextModelWithProjection)
    pipe = diffusers.KandinskyV22PriorPipeline(
        prior=prior,
        image_encoder=clip_vision(),
        text_encoder=text_encoder,
        tokenizer=basic.clip_tokenizer(),
        scheduler=diffusers.UnCLIPScheduler(
            variance_type="fixed_small_log", prediction_type="sample", clip_sample=True, clip_sample_range=10.0
        ),
        image_processor=clip_image_processor(),
    )
    return pipe, {"guidance_scale": 4.0}


def kandinsky_decoder() -> Case:
    """Kandinsky 2.2's decoder: a learned variance beside the noise."""
    unet = diffusers.UNet2DConditionModel(
        in_channels=4,
        out_channels=8,
        addition_embed_type="image",
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        encoder_hid_dim=WIDTH,
        encoder_hid_dim_type="image_proj",
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
    )
    movq = diffusers.VQModel(
        block_out_channels=[32, 32],
        down_block_types=["DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
        up_block_types=["AttnUpDecoderBlock2D", "UpDecoderBlock2D"],
        latent_channels=4,
        norm_num_groups=8,
        norm_type="spatial",
        num_vq_embeddings=12,
        vq_embed_dim=4,
    )
    scheduler = diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, clip_sample=False, steps_offset=1)
    embeddings = torch.randn(2, 2, WIDTH)
    inputs = {"image_embeds": embeddings[0], "negative_image_embeds": embeddings[1], "guidance_scale": 4.0}
    return diffusers.KandinskyV22Pipeline(unet, scheduler, movq), {**inputs, "height": 64, "width": 64}


def cascade_prior() -> Case:
    """Stable Cascade's prior: continuous time by a cosine schedule."""
    prior = StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        conditioning_dim=16,
        block_out_channels=(16, 16),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_image_in_channels=WIDTH,
        clip_text_in_channels=WIDTH,
        clip_text_pooled_in_channels=WIDTH,
        switch_level=(False,),
        down_blocks_repeat_mappers=(1, 1),
        up_blocks_repeat_mappers=(1, 1),
        block_types_per_layer=(("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),) * 2,
    )
    pipe = diffusers.StableCascadePriorPipeline(
        tokenizer=basic.clip_tokenizer(),
        text_encoder=basic.clip(transformers.CLIPTextModelWithProjection),
        prior=prior,
        scheduler=diffusers.DDPMWuerstchenScheduler(),
    )
    return pipe, {"guidance_scale": 4.0}


def svd() -> Case:
    """Stable Video Diffusion: Euler with continuous timesteps, an image in, v-prediction."""
    unet = diffusers.UNetSpatioTemporalConditionModel(
        block_out_channels=(32, 32),
        layers_per_block=1,
        sample_size=8,
        in_channels=8,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=WIDTH,
        num_attention_heads=2,
        projection_class_embeddings_input_dim=24,
        addition_time_embed_dim=8,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        timestep_type="continuous",
        timestep_spacing="leading",
        use_karras_sigmas=True,
        sigma_min=0.002,
        sigma_max=700.0,
        steps_offset=1,
    )
    vae = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4
    )
    pipe = diffusers.StableVideoDiffusionPipeline(
        vae, clip_vision(image_size=224), unet, scheduler, clip_image_processor()
    )
    sizes = {"height": 16, "width": 16, "num_frames": 2, "decode_chunk_size": 2}
    return pipe, {"image": draw_images(), **sizes, "min_guidance_scale": 1.0, "max_guidance_scale": 2.5}


def ltx() -> Case:
    """LTX-Video: packed video tokens."""
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=WIDTH,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    )
    pipe = diffusers.LTXPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, basic.t5(), basic.t5_tokenizer(), transformer
    )
    sizes = {"height": 32, "width": 32, "num_frames": 9}
    return pipe, {**sizes, "guidance_scale": 3.0, "max_sequence_length": basic.TOKENS}


def wan_experts() -> Case:
    """Wan 2.2 A14B: one expert for the noisy steps, another for the rest."""
    pipe, inputs = basic.wan()
    second = diffusers.WanTransformer3DModel.from_config(pipe.transformer.config)
    basic.randomize(second)
    pipe = diffusers.WanPipeline(**{**pipe.components, "transformer_2": second}, boundary_ratio=0.875)
    return pipe, {**inputs, "guidance_scale_2": 3.0}


def wan_image() -> Case:
    """Wan 2.2's image-to-video: the image in 20 more channels."""
    pipe, inputs = basic.wan()
    transformer = diffusers.WanTransformer3DModel.from_config({**pipe.transformer.config, "in_channels": 36})
    pipe = diffusers.WanImageToVideoPipeline(**{**pipe.components, "transformer": transformer}, image_encoder=None)
    return pipe, {**inputs, "image": draw_images(size=32)[0]}


def wan_vace() -> Case:
    """Wan VACE: a second branch that reads a reference video and its mask."""
    pipe, inputs = basic.wan()
    config = {k: v for k, v in pipe.transformer.config.items() if not k.startswith("_")}
    transformer = diffusers.WanVACETransformer3DModel(**config, vace_layers=[0], vace_in_channels=96)
    components = {**pipe.components, "transformer": transformer}
    return diffusers.WanVACEPipeline(**components), {**inputs, "prompt": "a cat"}  # no lists of prompts


def anyflow() -> Case:
    """AnyFlow: a network of Wan's kind that predicts the jump to the next time of any schedule."""
    pipe, inputs = basic.wan()
    known = inspect.signature(diffusers.AnyFlowTransformer3DModel.__init__).parameters
    config = {k: v for k, v in pipe.transformer.config.items() if k in known}
    components = pipe.components | {"transformer": diffusers.AnyFlowTransformer3DModel(**config)}
    components["scheduler"] = diffusers.FlowMapEulerDiscreteScheduler(shift=5.0)
    components.pop("transformer_2")
    return diffusers.AnyFlowPipeline(**components), inputs


def animatediff() -> Case:
    """AnimateDiff: motion modules in Stable Diffusion."""
    pipe, inputs = basic.sd15()
    adapter = diffusers.MotionAdapter(
        block_out_channels=(8, 16), motion_layers_per_block=1, motion_norm_num_groups=4, motion_num_attention_heads=2
    )
    components = {k: v for k, v in pipe.components.items() if k != "safety_checker"}
    components["scheduler"] = diffusers.DDIMScheduler(beta_schedule="linear", clip_sample=False, steps_offset=1)
    pipe = diffusers.AnimateDiffPipeline(**components, motion_adapter=adapter)
    return pipe, {**inputs, "num_frames": 2}


def sd15_heun() -> Case:
    """Stable Diffusion by Heun's scheduler: its own sigmas are replaced by DDIM's alphas."""
    pipe, inputs = basic.sd15()
    pipe.scheduler = diffusers.HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    return pipe, inputs


def sd3_heun() -> Case:
    """SD3 by Heun: becomes Euler."""
    pipe, inputs = basic.sd3()
    pipe.scheduler = diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0)
    return pipe, inputs


def lcm() -> Case:
    """A latent consistency model: its steps jump to the clean sample, guidance is an input of the network."""
    pipe, _ = basic.sd15()
    parts = pipe.components | {
        "unet": basic.unet(cross_attention_dim=WIDTH, time_cond_proj_dim=8),
        "scheduler": diffusers.LCMScheduler(**basic.SD_BETAS),
    }
    pipe = diffusers.LatentConsistencyModelPipeline(**parts, requires_safety_checker=False)
    return pipe, {"height": 16, "width": 16, "guidance_scale": 8.5}


def sana_sprint() -> Case:
    """Sana-Sprint: continuous-time consistency in angles."""
    pipe, inputs = basic.sana()
    config = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
    transformer = diffusers.SanaTransformer2DModel.from_config(pipe.transformer.config, **config)
    pipe = diffusers.SanaSprintPipeline(pipe.tokenizer, pipe.text_encoder, pipe.vae, transformer, SCMScheduler())
    return pipe, inputs | {"intermediate_timesteps": None}  # for more than two steps


PIPELINES: dict[str, Callable[[], tuple[diffusers.DiffusionPipeline, dict]]] = {
    "deepfloyd": deepfloyd,
    "ddim_pixels": ddim_pixels,
    "dit": dit,
    "kandinsky_prior": kandinsky_prior,
    "kandinsky_decoder": kandinsky_decoder,
    "cascade_prior": cascade_prior,
    "svd": svd,
    "ltx": ltx,
    "wan_experts": wan_experts,
    "wan_image": wan_image,
    "wan_vace": wan_vace,
    "anyflow": anyflow,
    "lcm": lcm,
    "sana_sprint": sana_sprint,
    "animatediff": animatediff,
    "sd15_heun": sd15_heun,
    "sd3_heun": sd3_heun,
}
