"""GLM-Image: a language model that writes visual tokens, and a DiT that draws an image from them."""

import functools
from collections.abc import Callable

import diffusers
import torch
import transformers
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler, GlmImageTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers

from .basic import WIDTH, WIDTHS, randomize
from .conditioned import draw_images
from .language import ROPE

Case = tuple[DiffusionPipeline, dict]
CODEBOOK = 64  # visual tokens; the real model has 16384, and its special ids come after them as here
START, END = CODEBOOK, CODEBOOK + 1
SIZE = 64  # pixels: a grid of 2 x 2 tokens, 32 pixels each
VISION = "<|dit_token_{}|>"
CHAT = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    f"{VISION.format(START)}<|image|>{VISION.format(END)}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Visual tokens under the lowest ids, then one token a byte and what marks the places of images and grids."""
    visual = [VISION.format(index) for index in range(CODEBOOK + 4)]
    marks = ["<|endoftext|>", "<|image|>", "<sop>", "<eop>"]
    names = [*visual, *sorted(pre_tokenizers.ByteLevel.alphabet()), *marks]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|endoftext|>",
        eos_token=VISION.format(END),
        bos_token=VISION.format(START),
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def processor() -> transformers.GlmImageProcessor:
    """Prompts and images to token ids; an image of 32 pixels is one token, one of 64 pixels four."""
    images = transformers.GlmImageImageProcessorPil(
        patch_size=16, merge_size=1, temporal_patch_size=1, size={"shortest_edge": 32 * 32, "longest_edge": SIZE**2}
    )
    whole = transformers.GlmImageProcessor(image_processor=images, tokenizer=tokenizer(), chat_template=CHAT)
    whole._get_target_shape = choose_target_shape
    return whole


def choose_target_shape(height: int, width: int) -> tuple[int, int, int, int]:
    """The grids of the image and of its preview: half a row, where the real preview always has 256 tokens."""
    return height // 32, width // 32, 1, max(1, width // 64)


def language_model() -> transformers.GlmImageForConditionalGeneration:
    """Two layers, a vision tower of one, and a codebook; samples as the real one does by default."""
    ids = tokenizer()
    text = {
        "vocab_size": len(ids),
        "vision_vocab_size": CODEBOOK + 4,
        "num_hidden_layers": 2,
        "rope_parameters": ROPE,
        **WIDTHS,
        "pad_token_id": ids.pad_token_id,
        "eos_token_id": END,
    }
    vision = {"depth": 1, "hidden_size": WIDTH, "num_heads": 4, "intermediate_size": WIDTH, "image_size": SIZE}
    config = transformers.GlmImageConfig(
        text_config=text,
        vision_config=vision,
        vq_config={"embed_dim": 8, "num_embeddings": CODEBOOK, "latent_channels": WIDTH},
        image_token_id=ids.convert_tokens_to_ids("<|image|>"),
        image_start_token_id=START,
        image_end_token_id=END,
    )
    model = transformers.GlmImageForConditionalGeneration(config)
    randomize(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(2)  # a distribution that a nucleus really cuts
    model.generation_config.update(
        do_sample=True, temperature=0.9, top_p=0.75, eos_token_id=END, pad_token_id=ids.pad_token_id
    )
    return model


def decoder() -> AutoencoderKL:
    """Factor 8, as the grids of tokens and of patches only fit together so."""
    return AutoencoderKL(
        block_out_channels=(4,) * 4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=2,
        latents_mean=[0.1, -0.1, 0.2, 0.0],
        latents_std=[1.0, 1.1, 0.9, 1.0],
    )


def glm_image(has_picture: bool = False) -> Case:
    """Text-to-image, which writes the tokens of a preview first, or image-to-image, which does not."""
    glyphs = transformers.ByT5Tokenizer()
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_heads": 4, "num_layers": 1}
    transformer = GlmImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        text_embed_dim=WIDTH,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=CODEBOOK,
    )
    pipe = diffusers.GlmImagePipeline(
        tokenizer=glyphs,
        processor=processor(),
        text_encoder=transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=len(glyphs), feed_forward_proj="gated-gelu", **sizes)
        ),
        vision_language_encoder=language_model(),
        vae=decoder(),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )
    inputs = {"height": SIZE, "width": SIZE, "guidance_scale": 1.5}
    if has_picture:
        inputs["image"] = [[image] for image in draw_images(size=32)]
    return pipe, inputs


PIPELINES: dict[str, Callable[[], Case]] = {
    "glm_image": glm_image,
    "glm_image_edit": functools.partial(glm_image, has_picture=True),
}
