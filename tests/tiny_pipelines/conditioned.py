"""Pipelines that start from an image, a mask or a control image, of the same networks as the plain ones."""

import functools
import inspect
from collections.abc import Callable

import diffusers
import numpy as np
import torch
from PIL import Image

from . import basic

Case = tuple[diffusers.DiffusionPipeline, dict]
SIZE = 16
STRENGTH = {"strength": 0.9}


def draw_images(seed: int = 0, size: int = SIZE) -> list[Image.Image]:
    """Two random images."""
    numbers = np.random.default_rng(seed)
    return [Image.fromarray(numbers.integers(0, 255, (size, size, 3), dtype=np.uint8)) for _ in range(2)]


def masks(size: int = SIZE) -> list[Image.Image]:
    """Two masks: the right half is to be painted."""
    mask = np.zeros((size, size), dtype=np.uint8)
    mask[:, size // 2 :] = 255
    return [Image.fromarray(mask)] * 2


def rebuilt(name: str, plain: Callable[[], Case], **parts) -> Case:
    """Another pipeline class around the plain one's components; `parts` replace or add some."""
    pipe, inputs = plain()
    cls = getattr(diffusers, name)
    components = {**pipe.components, **parts}
    if "safety_checker" in components:
        parts = {"requires_safety_checker": False}
        components |= parts
    known = {key: value for key, value in components.items() if key in _parameters(cls)}
    return cls(**known), inputs


def _parameters(cls: type) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters)


def with_picture(name: str, plain: Callable[[], Case], **extra) -> Case:
    """Image-to-image."""
    pipe, inputs = rebuilt(name, plain)
    return pipe, _accepted(pipe, {**inputs, "image": draw_images(), **STRENGTH, **extra})


def with_mask(name: str, plain: Callable[[], Case], **extra) -> Case:
    """Inpainting."""
    pipe, inputs = rebuilt(name, plain)
    inputs |= {"image": draw_images(), "mask_image": masks(), **STRENGTH}
    return pipe, _accepted(pipe, {**inputs, **extra})


def _accepted(pipe: diffusers.DiffusionPipeline, inputs: dict) -> dict:
    known = inspect.signature(type(pipe).__call__).parameters
    return {key: value for key, value in inputs.items() if key in known}


def with_more_channels(name: str, plain: Callable[[], Case], channels: int, has_mask: bool = False) -> Case:
    """A network that takes the image (and mask) beside the latents."""
    pipe, inputs = plain()
    network = "unet" if "unet" in pipe.components else "transformer"
    old = pipe.components[network]
    new = type(old)(**{k: v for k, v in old.config.items() if not k.startswith("_")} | {"in_channels": channels})
    cls = getattr(diffusers, name)
    known = {key: value for key, value in pipe.components.items() if key in _parameters(cls)} | {network: new}
    if "safety_checker" in known:
        known["requires_safety_checker"] = False
    pipe = cls(**known)
    inputs = {**inputs, "image": draw_images(), **({"mask_image": masks()} if has_mask else {})}
    return pipe, _accepted(pipe, inputs)


def sd_controlnet(name: str, plain: Callable[[], Case], **extra) -> Case:
    """A ControlNet made from the UNet; its zero convolutions get numbers, or it would do nothing."""
    controlnet = diffusers.ControlNetModel.from_unet(
        plain()[0].unet, conditioning_channels=3, conditioning_embedding_out_channels=(8, 8)
    )
    basic.randomize(controlnet)
    pipe, inputs = rebuilt(name, plain, controlnet=controlnet)
    return pipe, _accepted(pipe, {**inputs, **extra})


def sd3_controlnet() -> Case:
    """SD3 with a ControlNet of its own two blocks."""
    known = _parameters(diffusers.SD3ControlNetModel)
    config = {k: v for k, v in basic.sd3()[0].transformer.config.items() if k in known}
    controlnet = diffusers.SD3ControlNetModel(**config)
    basic.randomize(controlnet)
    pipe, inputs = rebuilt("StableDiffusion3ControlNetPipeline", basic.sd3, controlnet=controlnet)
    return pipe, {**inputs, "control_image": draw_images(1)}


def flux_controlnet() -> Case:
    """FLUX with a ControlNet of one block."""
    config = {k: v for k, v in basic.flux()[0].transformer.config.items() if not k.startswith("_")}
    config.pop("out_channels", None)
    controlnet = diffusers.FluxControlNetModel(**config)
    basic.randomize(controlnet)
    pipe, inputs = rebuilt("FluxControlNetPipeline", basic.flux, controlnet=controlnet)
    return pipe, {**inputs, "control_image": draw_images(1)}


def sd2_v_prediction() -> Case:
    """Stable Diffusion 2.1: v-prediction."""
    pipe, inputs = basic.sd15()
    pipe.scheduler = diffusers.DDIMScheduler.from_config(
        {**pipe.scheduler.config, "prediction_type": "v_prediction", "clip_sample": False}
    )
    return pipe, inputs


def ip_adapter() -> Case:
    """Stable Diffusion with an IP-adapter's image embeddings beside the text."""
    pipe, inputs = basic.sd15()
    from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection

    width = basic.WIDTH
    unet = pipe.unet
    projection = ImageProjection(image_embed_dim=width, cross_attention_dim=width, num_image_text_embeds=4)
    unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection])
    unet.config.encoder_hid_dim_type = "ip_image_proj"
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")
    processors = {}
    for name, processor in unet.attn_processors.items():
        if name.endswith("attn2.processor"):
            attention = unet.get_submodule(name.removesuffix(".processor"))
            processors[name] = diffusers.models.attention_processor.IPAdapterAttnProcessor2_0(
                hidden_size=attention.to_q.in_features, cross_attention_dim=width, num_tokens=(4,)
            )
        else:
            processors[name] = processor
    unet.set_attn_processor(processors)
    embeddings = torch.randn(4, 1, width)  # without and with the image, for two samples
    return pipe, {**inputs, "ip_adapter_image_embeds": [embeddings]}


PIPELINES: dict[str, Callable[[], Case]] = {
    "sd15_img2img": functools.partial(with_picture, "StableDiffusionImg2ImgPipeline", basic.sd15),
    "sd15_inpaint": functools.partial(with_mask, "StableDiffusionInpaintPipeline", basic.sd15),
    "sd15_inpaint_9": functools.partial(
        with_more_channels, "StableDiffusionInpaintPipeline", basic.sd15, 9, has_mask=True
    ),
    "sd15_pix2pix": functools.partial(with_more_channels, "StableDiffusionInstructPix2PixPipeline", basic.sd15, 8),
    "sd15_pag": functools.partial(rebuilt, "StableDiffusionPAGPipeline", basic.sd15),
    "sd15_controlnet": functools.partial(
        sd_controlnet, "StableDiffusionControlNetPipeline", basic.sd15, image=draw_images(1)
    ),
    "sd15_controlnet_img2img": functools.partial(
        sd_controlnet,
        "StableDiffusionControlNetImg2ImgPipeline",
        basic.sd15,
        image=draw_images(),
        control_image=draw_images(1),
        **STRENGTH,
    ),
    "sd15_controlnet_inpaint": functools.partial(
        sd_controlnet,
        "StableDiffusionControlNetInpaintPipeline",
        basic.sd15,
        image=draw_images(),
        mask_image=masks(),
        control_image=draw_images(1),
        **STRENGTH,
    ),
    "sd15_ip_adapter": ip_adapter,
    "sd2": sd2_v_prediction,
    "sdxl_img2img": functools.partial(with_picture, "StableDiffusionXLImg2ImgPipeline", basic.sdxl),
    "sdxl_inpaint": functools.partial(with_mask, "StableDiffusionXLInpaintPipeline", basic.sdxl),
    "sdxl_pag": functools.partial(rebuilt, "StableDiffusionXLPAGPipeline", basic.sdxl),
    "sdxl_controlnet": functools.partial(
        sd_controlnet, "StableDiffusionXLControlNetPipeline", basic.sdxl, image=draw_images(1)
    ),
    "sd3_img2img": functools.partial(with_picture, "StableDiffusion3Img2ImgPipeline", basic.sd3),
    "sd3_pag": functools.partial(rebuilt, "StableDiffusion3PAGPipeline", basic.sd3),
    "sd3_controlnet": sd3_controlnet,
    "flux_img2img": functools.partial(with_picture, "FluxImg2ImgPipeline", basic.flux),
    "flux_inpaint": functools.partial(with_mask, "FluxInpaintPipeline", basic.flux),
    "flux_kontext": functools.partial(
        with_picture, "FluxKontextPipeline", basic.flux, max_area=SIZE * SIZE, _auto_resize=False
    ),
    "flux_controlnet": flux_controlnet,
}
