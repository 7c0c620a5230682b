"""Models in their real sizes: folders of configuration files without weights, and pipelines with random weights.

The folders are what `plan` needs: each part has the class and the sizes that its published `config.json` names. The
pipelines are built from such a folder on the device where they will be, in half precision or in 4 bits, so nothing is
downloaded and nothing passes through CPU memory. Tokenizers are stand-ins with one token per word; prompts are padded
as in the real models. Stable Diffusion 1.5 is without its safety checker.
"""

import contextlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch import nn

TURNS = ["<|im_start|>", "<|im_end|>"]  # one token each, as in Qwen's tokenizer
IDS = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}  # of the stand-in tokenizer
CLIP = {"hidden_act": "quick_gelu", "max_position_embeddings": 77, "vocab_size": 49408, **IDS}
CLIP_L = CLIP | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
CLIP_G = CLIP | {
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
T5_XXL = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_heads": 64,
    "num_layers": 24,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
}
KL_AUTOENCODER = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD_SCHEDULER = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SD3_SCHEDULER = ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})
SD3_PARTS = {
    "vae": ("AutoencoderKL", KL_AUTOENCODER | {"scaling_factor": 1.5305, "shift_factor": 0.0609}),
    "text_encoder": ("CLIPTextModelWithProjection", CLIP_L),
    "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
    "text_encoder_3": ("T5EncoderModel", T5_XXL),
}
SD3_NETWORK = {
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
    "qk_norm": "rms_norm",
}
SD3_TOKENIZERS = {"tokenizer": 77, "tokenizer_2": 77, "tokenizer_3": 512}
SMALL_SD3 = {"num_layers": 2, "num_attention_heads": 1, "caption_projection_dim": 64}
WAN_SCHEDULER = {"flow_shift": 3.0, "prediction_type": "flow_prediction", "use_flow_sigmas": True}
T5_BASE = {
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 3072,
    "num_heads": 12,
    "num_layers": 12,
    "vocab_size": 32128,
}
BYT5_SMALL = {
    "d_model": 1472,
    "d_kv": 64,
    "d_ff": 3584,
    "num_heads": 6,
    "num_layers": 12,
    "vocab_size": 384,
    "feed_forward_proj": "gated-gelu",
}
LLAMA_3_8B = {  # with the tokens that LLaVA adds
    "vocab_size": 128320,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
UMT5 = ("UMT5EncoderModel", T5_XXL | {"vocab_size": 256384})
WAN_NETWORK = {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256, "num_layers": 30}
SMALL_WAN = {"num_layers": 1, "num_attention_heads": 2, "ffn_dim": 64}
QWEN3_4B = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
QWEN_TEXT = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "layer_types": ["full_attention"] * 28,
    "max_window_layers": 28,
    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1_000_000.0},
}
QWEN_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
# ids of the stand-in tokenizer, after the visual tokens
GLM_MARKS = {"<unk>": 16512, "<|endoftext|>": 16513, "<|image|>": 16514, "<sop>": 16515, "<eop>": 16516}
GLM_TEXT = {
    "vocab_size": 168064,
    "vision_vocab_size": 16512,
    "pad_token_id": GLM_MARKS["<|endoftext|>"],
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [8, 12, 12],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10_000.0,
    },
}
GLM_VISION = {
    "depth": 40,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_heads": 16,
    "image_size": 2048,
    "patch_size": 16,
}


def make_glm_processor() -> transformers.GlmImageProcessor:
    """Make GLM-Image's processor with a stand-in tokenizer: visual tokens under their real ids, words unknown."""
    visual = {f"<|dit_token_{index}|>": index for index in range(GLM_TEXT["vision_vocab_size"])}
    inner = Tokenizer(models.WordLevel(visual | GLM_MARKS, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        pad_token="<|endoftext|>",
        bos_token="<|dit_token_16384|>",
        eos_token="<|dit_token_16385|>",
        extra_special_tokens={"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"},
        padding_side="left",
    )
    chat = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"
    images = transformers.GlmImageImageProcessorPil(patch_size=16, merge_size=1, temporal_patch_size=1)
    return transformers.GlmImageProcessor(image_processor=images, tokenizer=tokenizer, chat_template=chat)


SDXL = {
    "pipeline": "StableDiffusionXLPipeline",
    "scheduler": (
        "EulerDiscreteScheduler",
        SD_SCHEDULER | {"timestep_spacing": "leading"},
    ),
    "tokenizers": {"tokenizer": 77, "tokenizer_2": 77},
    "parts": {
        "unet": (
            "UNet2DConditionModel",
            {
                "sample_size": 128,
                "block_out_channels": [320, 640, 1280],
                "layers_per_block": 2,
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "transformer_layers_per_block": [1, 2, 10],
                "attention_head_dim": [5, 10, 20],
                "cross_attention_dim": 2048,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
                "use_linear_projection": True,
            },
        ),
        "vae": (
            "AutoencoderKL",
            KL_AUTOENCODER
            | {"latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True}
            | {"scaling_factor": 0.13025},
        ),
        "text_encoder": ("CLIPTextModel", CLIP_L),
        "text_encoder_2": ("CLIPTextModelWithProjection", CLIP_G),
    },
    "small": {
        "block_out_channels": [32, 64, 64],
        "layers_per_block": 1,
        "transformer_layers_per_block": 1,
        "attention_head_dim": [1, 1, 1],
    },
}


# of each model: its pipeline, scheduler, tokenizers with their lengths or what makes them, and parts; `small`
# changes the network for `is_tiny`
MODELS: dict[str, dict[str, Any]] = {
    "FLUX.1-dev": {
        "pipeline": "FluxPipeline",
        "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
        "tokenizers": {"tokenizer": 77, "tokenizer_2": 512},
        "parts": {
            "transformer": (
                "FluxTransformer2DModel",
                {
                    "in_channels": 64,
                    "num_layers": 19,
                    "num_single_layers": 38,
                    "attention_head_dim": 128,
                    "num_attention_heads": 24,
                    "joint_attention_dim": 4096,
                    "pooled_projection_dim": 768,
                    "axes_dims_rope": [16, 56, 56],
                    "guidance_embeds": True,
                },
            ),
            "vae": ("AutoencoderKL", KL_AUTOENCODER | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
            "text_encoder": ("CLIPTextModel", CLIP_L),
            "text_encoder_2": ("T5EncoderModel", T5_XXL),
        },
        "small": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
    },
    "SD3.5-M": {
        "pipeline": "StableDiffusion3Pipeline",
        "scheduler": SD3_SCHEDULER,
        "tokenizers": SD3_TOKENIZERS,
        "parts": SD3_PARTS
        | {
            "transformer": (
                "SD3Transformer2DModel",
                SD3_NETWORK
                | {
                    "num_layers": 24,
                    "num_attention_heads": 24,
                    "caption_projection_dim": 1536,
                    "pos_embed_max_size": 384,
                    "dual_attention_layers": list(range(13)),
                },
            )
        },
        "small": SMALL_SD3 | {"dual_attention_layers": [0]},
    },
    "SD3.5-L": {
        "pipeline": "StableDiffusion3Pipeline",
        "scheduler": SD3_SCHEDULER,
        "tokenizers": SD3_TOKENIZERS,
        "parts": SD3_PARTS
        | {
            "transformer": (
                "SD3Transformer2DModel",
                SD3_NETWORK
                | {
                    "num_layers": 38,
                    "num_attention_heads": 38,
                    "caption_projection_dim": 2432,
                    "pos_embed_max_size": 192,
                    "dual_attention_layers": [],
                },
            )
        },
        "small": SMALL_SD3,
    },
    "SD1.5": {
        "pipeline": "StableDiffusionPipeline",
        "arguments": {
            "safety_checker": [None, None],
            "feature_extractor": [None, None],
            "requires_safety_checker": False,
        },
        "scheduler": ("PNDMScheduler", SD_SCHEDULER | {"skip_prk_steps": True}),
        "tokenizers": {"tokenizer": 77},
        "parts": {
            "unet": (
                "UNet2DConditionModel",
                {
                    "sample_size": 64,
                    "block_out_channels": [320, 640, 1280, 1280],
                    "layers_per_block": 2,
                    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
                    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
                    "attention_head_dim": 8,
                    "cross_attention_dim": 768,
                },
            ),
            "vae": (
                "AutoencoderKL",
                KL_AUTOENCODER
                | {"latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True}
                | {"sample_size": 512, "scaling_factor": 0.18215},
            ),
            "text_encoder": ("CLIPTextModel", CLIP_L),
        },
        "small": {"block_out_channels": [32, 64, 64, 64], "layers_per_block": 1, "attention_head_dim": 1},
    },
    "SDXL": SDXL,
    "SDXL-Turbo": SDXL
    | {"scheduler": ("EulerAncestralDiscreteScheduler", SD_SCHEDULER | {"timestep_spacing": "trailing"})},
    "Qwen-Image": {
        "pipeline": "QwenImagePipeline",
        "scheduler": (
            "FlowMatchEulerDiscreteScheduler",
            {"max_image_seq_len": 8192, "max_shift": 0.9, "shift_terminal": 0.02, "use_dynamic_shifting": True},
        ),
        "tokenizers": {"tokenizer": 2048},
        "parts": {
            "transformer": (
                "QwenImageTransformer2DModel",
                {
                    "in_channels": 64,
                    "out_channels": 16,
                    "num_layers": 60,
                    "attention_head_dim": 128,
                    "num_attention_heads": 24,
                    "joint_attention_dim": 3584,
                    "axes_dims_rope": [16, 56, 56],
                },
            ),
            "vae": ("AutoencoderKLQwenImage", {"base_dim": 96, "dim_mult": [1, 2, 4, 4]}),
            "text_encoder": (
                "Qwen2_5_VLForConditionalGeneration",
                {"text_config": QWEN_TEXT, "vision_config": QWEN_VISION},
            ),
        },
        "small": {"num_layers": 1, "num_attention_heads": 2},
    },
    "Z-Image-Turbo": {
        "pipeline": "ZImagePipeline",
        "scheduler": SD3_SCHEDULER,
        "tokenizers": {"tokenizer": lambda: make_tokenizer(512, CHAT)},
        "parts": {
            "transformer": (
                "ZImageTransformer2DModel",
                {"dim": 3840, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30},
            ),
            "vae": ("AutoencoderKL", KL_AUTOENCODER | {"scaling_factor": 0.3611, "shift_factor": 0.1159}),
            "text_encoder": ("Qwen3ForCausalLM", QWEN3_4B),
        },
        "small": {"n_layers": 1, "n_refiner_layers": 1},
    },
    "FLUX.2-klein-4B": {
        "pipeline": "Flux2KleinPipeline",
        "arguments": {"is_distilled": True},
        "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
        "tokenizers": {"tokenizer": lambda: make_tokenizer(512, CHAT)},
        "parts": {
            "transformer": (
                "Flux2Transformer2DModel",
                {
                    "in_channels": 128,
                    "num_layers": 5,
                    "num_single_layers": 20,
                    "attention_head_dim": 128,
                    "num_attention_heads": 24,
                    "joint_attention_dim": 7680,
                    "guidance_embeds": False,
                },
            ),
            "vae": ("AutoencoderKLFlux2", {}),
            "text_encoder": ("Qwen3ForCausalLM", QWEN3_4B),
        },
        "small": {"num_layers": 1, "num_single_layers": 1},
    },
    # as in diffusers' conversion script; the text encoder, of 62 GiB there too, is Qwen3-VL-32B
    "MiniMax-H3": {
        "pipeline": "MiniMaxH3ModularPipeline",
        "blocks": "MiniMaxH3Blocks",
        "scheduler": ("MiniMaxH3Scheduler", {"shift": 12.0}),
        "audio_scheduler": ("MiniMaxH3Scheduler", {"shift": 3.0}),
        "tokenizers": {"tokenizer": lambda: make_tokenizer(8192, CHAT), "processor": lambda: make_processor(8192)},
        "parts": {
            "transformer": (
                "MiniMaxH3Transformer3DModel",
                {"num_layers": 50, "hidden_size": 5376, "num_attention_heads": 56, "ffn_dim": 14336, "text_dim": 5120},
            ),
            "vae": ("AutoencoderKLMiniMaxH3", {}),
            "audio_vae": ("AutoencoderKLMiniMaxH3Audio", {}),
            "text_encoder": (
                "Qwen3VLForConditionalGeneration",
                {
                    "text_config": QWEN3_4B
                    | {
                        "hidden_size": 5120,
                        "intermediate_size": 25600,
                        "num_hidden_layers": 64,
                        "num_attention_heads": 64,
                        "rope_parameters": {
                            "rope_type": "default",
                            "mrope_section": [24, 20, 20],
                            "rope_theta": 5_000_000.0,
                        },
                    },
                    "vision_config": {
                        "depth": 27,
                        "hidden_size": 1152,
                        "intermediate_size": 4304,
                        "out_hidden_size": 5120,
                    },
                },
            ),
        },
        "small": {"num_layers": 1, "num_refiner_layers": 1},
    },
    "FLUX.3-klein": {
        "pipeline": "Flux3ModularPipeline",
        "blocks": "Flux3AutoBlocks",
        "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 6.93}),
        "tokenizers": {"tokenizer": lambda: make_processor(8192)},
        "parts": {
            "transformer": (
                "Flux3Transformer2DModel",
                {
                    "in_channels": 128,
                    "cond_in_channels": 128,
                    "num_layers": 5,
                    "num_single_layers": 28,
                    "attention_head_dim": 128,
                    "num_attention_heads": 24,
                    "joint_attention_dim": 20480,
                },
            ),
            "vae": ("AutoencoderKLFlux2", {}),
            "text_encoder": (
                "Qwen3VLForConditionalGeneration",
                {
                    "text_config": QWEN3_4B
                    | {
                        "rope_parameters": {
                            "rope_type": "default",
                            "mrope_section": [24, 20, 20],
                            "rope_theta": 5_000_000.0,
                        },
                    },
                    "vision_config": {"depth": 24, "hidden_size": 1024, "out_hidden_size": 2560},
                },
            ),
        },
        "small": {"num_layers": 1, "num_single_layers": 1},
    },
    "Wan2.1-1.3B": {
        "pipeline": "WanPipeline",
        "scheduler": ("UniPCMultistepScheduler", WAN_SCHEDULER),
        "tokenizers": {"tokenizer": 512},
        "parts": {
            "transformer": ("WanTransformer3DModel", WAN_NETWORK | {"num_attention_heads": 12, "ffn_dim": 8960}),
            "text_encoder": UMT5,
            "vae": ("AutoencoderKLWan", {"base_dim": 96, "dim_mult": [1, 2, 4, 4]}),
        },
        "small": SMALL_WAN,
    },
    "Wan2.2-TI2V-5B": {
        "pipeline": "WanPipeline",
        "arguments": {"expand_timesteps": True},
        "scheduler": ("UniPCMultistepScheduler", WAN_SCHEDULER | {"flow_shift": 5.0}),
        "tokenizers": {"tokenizer": 512},
        "parts": {
            "transformer": (
                "WanTransformer3DModel",
                WAN_NETWORK | {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
            ),
            "text_encoder": UMT5,
            "vae": (
                "AutoencoderKLWan",
                {
                    "base_dim": 160,
                    "decoder_base_dim": 256,
                    "z_dim": 48,
                    "dim_mult": [1, 2, 4, 4],
                    "in_channels": 12,
                    "out_channels": 12,
                    "patch_size": 2,
                    "is_residual": True,
                    "scale_factor_spatial": 16,
                    "latents_mean": [0.0] * 48,
                    "latents_std": [1.0] * 48,
                },
            ),
        },
        "small": SMALL_WAN,
    },
    "HunyuanVideo": {
        "pipeline": "HunyuanVideoPipeline",
        "scheduler": ("FlowMatchEulerDiscreteScheduler", {"shift": 7.0}),
        "tokenizers": {"tokenizer": 256, "tokenizer_2": 77},
        "parts": {
            "transformer": (
                "HunyuanVideoTransformer3DModel",
                {
                    "in_channels": 16,
                    "out_channels": 16,
                    "num_layers": 20,
                    "num_single_layers": 40,
                    "num_refiner_layers": 2,
                    "attention_head_dim": 128,
                    "num_attention_heads": 24,
                    "text_embed_dim": 4096,
                    "pooled_projection_dim": 768,
                    "rope_axes_dim": [16, 56, 56],
                    "guidance_embeds": True,
                },
            ),
            "vae": (
                "AutoencoderKLHunyuanVideo",
                {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16},
            ),
            "text_encoder": ("LlamaModel", LLAMA_3_8B),
            "text_encoder_2": ("CLIPTextModel", CLIP_L),
        },
        "small": {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "num_attention_heads": 2},
    },
    "Stable Audio Open 1.0": {
        "pipeline": "StableAudioPipeline",
        "scheduler": (
            "CosineDPMSolverMultistepScheduler",
            {"sigma_min": 0.3, "sigma_max": 500, "sigma_data": 1.0, "prediction_type": "v_prediction"},
        ),
        "tokenizers": {"tokenizer": 128},
        "parts": {
            "transformer": (
                "StableAudioDiTModel",
                {
                    "sample_size": 1024,
                    "in_channels": 64,
                    "out_channels": 64,
                    "num_layers": 24,
                    "attention_head_dim": 64,
                    "num_attention_heads": 24,
                    "num_key_value_attention_heads": 12,
                    "cross_attention_dim": 768,
                    "cross_attention_input_dim": 768,
                    "global_states_input_dim": 1536,
                    "time_proj_dim": 256,
                },
            ),
            "vae": (
                "AutoencoderOobleck",
                {
                    "encoder_hidden_size": 128,
                    "decoder_channels": 128,
                    "decoder_input_channels": 64,
                    "channel_multiples": [1, 2, 4, 8, 16],
                    "downsampling_ratios": [2, 4, 4, 8, 8],
                    "audio_channels": 2,
                    "sampling_rate": 44100,
                },
            ),
            "text_encoder": ("T5EncoderModel", T5_BASE),
            "projection_model": (
                "StableAudioProjectionModel",
                {"text_encoder_dim": 768, "conditioning_dim": 768, "min_value": 0, "max_value": 512},
            ),
        },
        "small": {"num_layers": 1},
    },
    "GLM-Image": {
        "pipeline": "GlmImagePipeline",
        "scheduler": (
            "FlowMatchEulerDiscreteScheduler",
            {"base_shift": 0.25, "max_shift": 0.75, "time_shift_type": "linear", "use_dynamic_shifting": True},
        ),
        "tokenizers": {"tokenizer": transformers.ByT5Tokenizer, "processor": make_glm_processor},
        "parts": {
            "transformer": (
                "GlmImageTransformer2DModel",
                {
                    "in_channels": 16,
                    "out_channels": 16,
                    "num_layers": 30,
                    "attention_head_dim": 128,
                    "num_attention_heads": 32,
                    "text_embed_dim": 1472,
                    "time_embed_dim": 512,
                    "condition_dim": 256,
                    "prior_vq_quantizer_codebook_size": 16384,
                },
            ),
            "vae": (
                "AutoencoderKL",
                KL_AUTOENCODER
                | {"block_out_channels": [128, 512, 1024, 1024], "layers_per_block": 3}
                | {"mid_block_add_attention": False, "latents_mean": [0.0] * 16, "latents_std": [1.0] * 16},
            ),
            "text_encoder": ("T5EncoderModel", BYT5_SMALL),
            "vision_language_encoder": (
                "GlmImageForConditionalGeneration",
                {
                    "text_config": GLM_TEXT,
                    "vision_config": GLM_VISION,
                    "vq_config": {"embed_dim": 2048, "num_embeddings": 16384, "latent_channels": 1536},
                    "image_token_id": GLM_MARKS["<|image|>"],
                    "image_start_token_id": 16384,
                    "image_end_token_id": 16385,
                },
            ),
        },
        "small": {"num_layers": 1, "num_attention_heads": 2},
    },
}
# the sizes of all other parts for `is_tiny`: depths, and widths that nobody else sees
SMALL_PARTS = {
    "num_layers": 1,
    "num_hidden_layers": 2,  # HunyuanVideo takes the output of the last but two
    "depth": 1,
    "num_heads": 4,
    "d_ff": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "layers_per_block": 1,
    "block_out_channels": [32] * 4,
    "base_dim": 8,
    "decoder_base_dim": 8,
    "layer_types": ["full_attention"] * 2,
    "fullatt_block_indexes": [0],
}
NETWORKS = ("transformer", "unet")


def write_model(name: str, folder: Path, is_tiny: bool = False) -> Path:
    """Write the configuration files of a model of `MODELS` into a folder.

    Args:
        name: of the model.
        folder: is made if it is not there.
        is_tiny: whether each part has a layer or two only, of the real widths: for runs on a CPU.

    Returns:
        the folder.
    """
    model = MODELS[name]
    index = {"_class_name": model["pipeline"]} | model.get("arguments", {})
    for part in ("scheduler", "audio_scheduler"):
        if part in model:
            cls, config = model[part]
            getattr(diffusers, cls)(**config).save_pretrained(folder / part)
            index[part] = ["diffusers", cls]
    for part, made in model["tokenizers"].items():
        is_length = isinstance(made, int)
        tokenizer = make_tokenizer(made) if is_length else made()
        tokenizer.save_pretrained(folder / part)
        index[part] = ["transformers", "PreTrainedTokenizerFast" if is_length else type(tokenizer).__name__]
    for part, (cls, config) in model["parts"].items():
        if is_tiny:
            config = config | model["small"] if part in NETWORKS else _shrink(config)
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps({"_class_name": cls} | config))
        index[part] = ["diffusers" if hasattr(diffusers, cls) else "transformers", cls]
    if "blocks" in model:  # a modular pipeline
        index = {name: _locate(folder, name, value) for name, value in index.items()}
        index["_blocks_class_name"] = model["blocks"]
    (folder / f"{'modular_' if 'blocks' in model else ''}model_index.json").write_text(json.dumps(index))
    return folder


def _locate(folder: Path, name: str, entry: Any) -> Any:
    """Return a component's entry in a modular index, which says where its files are."""
    place = {"pretrained_model_name_or_path": str(folder), "subfolder": name, "type_hint": entry}
    return [*entry, place | {"variant": None, "revision": None}] if isinstance(entry, list) else entry


CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"


def make_processor(length: int) -> transformers.LlavaProcessor:
    """Make a processor of prompts that loads without torchvision, in place of Qwen 3 VL's."""
    return transformers.LlavaProcessor(transformers.CLIPImageProcessor(), make_tokenizer(length), chat_template=CHAT)


def _shrink(config: dict[str, Any]) -> dict[str, Any]:
    small = {key: SMALL_PARTS.get(key, value) for key, value in config.items()}
    if "vision_vocab_size" in config:  # words come after the visual tokens, whose ids are fixed
        small["vocab_size"] += config["vision_vocab_size"]
    return {key: _shrink(value) if isinstance(value, dict) else value for key, value in small.items()}


def make_tokenizer(length: int, chat: str | None = None) -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer with one token per word or sign, all of them unknown, that pads to `length`."""
    special = ["<unk>", "<pad>", "</s>", *TURNS]
    inner = Tokenizer(models.WordLevel({token: at for at, token in enumerate(special)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    roles = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=length, chat_template=chat, **roles
    )


def build_pipeline(
    folder: Path, device: str, dtype: torch.dtype | dict[str, torch.dtype], in_4bit: Collection[str] = ()
) -> DiffusionPipeline:
    """Build the pipeline of a folder from `write_model` with random weights.

    Args:
        folder: with the configuration files.
        device: where the weights are made.
        dtype: of the weights; by part, with one for all others under "default".
        in_4bit: parts whose linear layers are nf4 layers of bitsandbytes, each quantised as soon as it is made.
    """
    index = json.loads((folder / "model_index.json").read_text())
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, list) or entry[1] is None:
            parts[name] = None if isinstance(entry, list) else entry
            continue
        cls = getattr(diffusers, entry[1], None) or getattr(transformers, entry[1])
        if not issubclass(cls, nn.Module):
            parts[name] = cls.from_pretrained(folder / name)
            continue
        own = dtype.get(name, dtype["default"]) if isinstance(dtype, dict) else dtype
        with _make_there(device, own), _make_4bit_layers() if name in in_4bit else contextlib.nullcontext():
            parts[name] = _build_part(cls, folder / name)
        parts[name].is_loaded_in_4bit = name in in_4bit  # by which PEFT chooses its layer
        _cast_as_loaded(parts[name], own)
    return getattr(diffusers, index["_class_name"])(**parts)


def _build_part(cls: type[nn.Module], folder: Path) -> nn.Module:
    if issubclass(cls, transformers.PreTrainedModel):
        return cls(cls.config_class.from_pretrained(folder)).eval()
    return cls.from_config(cls.load_config(folder)).eval()


def _cast_as_loaded(part: nn.Module, dtype: torch.dtype) -> None:
    """Give weights and saved buffers the types that they have after loading: some classes keep some in float32."""
    if isinstance(part, transformers.PreTrainedModel):
        kept = set(part._keep_in_fp32_modules_strict or ())
        kept |= set(part._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    else:
        kept = set(getattr(part, "_keep_in_fp32_modules", None) or ())
    buffers = dict(part.named_buffers())
    for name, tensor in part.state_dict(keep_vars=True).items():
        is_kept = bool(kept & set(name.split(".")))
        if tensor.is_floating_point() and (is_kept or name in buffers):
            tensor.data = tensor.data.to(torch.float32 if is_kept else dtype)


@contextlib.contextmanager
def _make_there(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _make_4bit_layers() -> Iterator[None]:
    """Let every linear layer that is made be one of 4 bits: its 16-bit weights exist for that moment only."""
    import bitsandbytes

    class Quantized(bitsandbytes.nn.Linear4bit):
        def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None):
            compute = dtype or torch.get_default_dtype()
            super().__init__(in_features, out_features, bias, compute_dtype=compute, quant_type="nf4", device=device)
            self.to(self.weight.device)  # which quantises

    real, nn.Linear = nn.Linear, Quantized
    try:
        yield
    finally:
        nn.Linear = real
