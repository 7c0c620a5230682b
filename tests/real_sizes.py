"""Folders of models in their real sizes, with configuration files and no weights: what `plan` needs, and all it needs.

Each is the folder of a tiny pipeline of the same classes (tokenizers and scheduler included), with the sizes that the
published `config.json` of each part has. Prompts count as in the tiny pipelines: about a token a letter, up to the
length to which the pipeline pads.
"""

import json
from pathlib import Path
from typing import Any

from tiny_pipelines import build

CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "vocab_size": 49408,
}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "vocab_size": 49408,
}
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "vocab_size": 32128}
KL_AUTOENCODER = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "sample_size": 1024,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD3_PARTS = {"vae": KL_AUTOENCODER, "text_encoder": CLIP_L, "text_encoder_2": CLIP_G, "text_encoder_3": T5_XXL}
SD3_NETWORK = {
    "sample_size": 128,
    "in_channels": 16,
    "out_channels": 16,
    "attention_head_dim": 64,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 2048,
}
WAN_PARTS = {
    "text_encoder": T5_XXL | {"vocab_size": 256384},
    "vae": {"base_dim": 96, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2},
}
WAN_NETWORK = {"attention_head_dim": 128, "text_dim": 4096, "freq_dim": 256, "num_layers": 30}

MODELS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {  # the tiny pipeline, and the sizes of each part
    "FLUX.1-dev": (
        "flux",
        {
            "transformer": {
                "in_channels": 64,
                "num_layers": 19,
                "num_single_layers": 38,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 4096,
                "pooled_projection_dim": 768,
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": KL_AUTOENCODER,
            "text_encoder": CLIP_L,
            "text_encoder_2": T5_XXL,
        },
    ),
    "SD3.5-M": (
        "sd3",
        SD3_PARTS
        | {
            "transformer": SD3_NETWORK
            | {
                "num_layers": 24,
                "num_attention_heads": 24,
                "caption_projection_dim": 1536,
                "pos_embed_max_size": 384,
                "dual_attention_layers": list(range(13)),
            }
        },
    ),
    "SD3.5-L": (
        "sd3",
        SD3_PARTS
        | {
            "transformer": SD3_NETWORK
            | {
                "num_layers": 38,
                "num_attention_heads": 38,
                "caption_projection_dim": 2432,
                "pos_embed_max_size": 192,
                "dual_attention_layers": [],
            }
        },
    ),
    "SDXL": (
        "sdxl",
        {
            "unet": {
                "sample_size": 128,
                "block_out_channels": [320, 640, 1280],
                "layers_per_block": 2,
                "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
                "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
                "transformer_layers_per_block": [1, 2, 10],
                "attention_head_dim": [5, 10, 20],
                "norm_num_groups": 32,
                "cross_attention_dim": 2048,
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
                "use_linear_projection": True,
            },
            "vae": KL_AUTOENCODER | {"latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True},
            "text_encoder": CLIP_L,
            "text_encoder_2": CLIP_G,
        },
    ),
    "Qwen-Image": (
        "qwen_image",
        {
            "transformer": {
                "in_channels": 64,
                "out_channels": 16,
                "num_layers": 60,
                "attention_head_dim": 128,
                "num_attention_heads": 24,
                "joint_attention_dim": 3584,
                "axes_dims_rope": [16, 56, 56],
            },
            "vae": {
                "base_dim": 96,
                "z_dim": 16,
                "dim_mult": [1, 2, 4, 4],
                "num_res_blocks": 2,
                "temperal_downsample": [False, True, True],
                "latents_mean": [0.0] * 16,
                "latents_std": [1.0] * 16,
            },
            "text_encoder": {
                "text_config": {
                    "vocab_size": 152064,
                    "hidden_size": 3584,
                    "intermediate_size": 18944,
                    "num_hidden_layers": 28,
                    "num_attention_heads": 28,
                    "num_key_value_heads": 4,
                    "layer_types": ["full_attention"] * 28,
                    "max_window_layers": 28,
                    "rope_parameters": {
                        "rope_type": "default",
                        "mrope_section": [16, 24, 24],
                        "rope_theta": 1_000_000.0,
                    },
                },
                "vision_config": {
                    "depth": 32,
                    "hidden_size": 1280,
                    "intermediate_size": 3420,
                    "num_heads": 16,
                    "out_hidden_size": 3584,
                    "fullatt_block_indexes": [7, 15, 23, 31],
                },
            },
        },
    ),
    "Wan2.1-1.3B": (
        "wan",
        WAN_PARTS | {"transformer": WAN_NETWORK | {"num_attention_heads": 12, "ffn_dim": 8960}},
    ),
    "Wan2.2-TI2V-5B": (
        "wan_ti2v",
        WAN_PARTS
        | {
            "transformer": WAN_NETWORK
            | {"num_attention_heads": 24, "ffn_dim": 14336, "in_channels": 48, "out_channels": 48},
            "vae": {
                "base_dim": 160,
                "decoder_base_dim": 256,
                "z_dim": 48,
                "dim_mult": [1, 2, 4, 4],
                "num_res_blocks": 2,
                "latents_mean": [0.0] * 48,
                "latents_std": [1.0] * 48,
            },
        },
    ),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the configuration files of a model of `MODELS` into a folder; return the folder."""
    tiny, sizes = MODELS[name]
    build(tiny)[0].save_pretrained(folder)
    for weights in [*folder.rglob("*.safetensors"), *folder.rglob("*.safetensors.index.json")]:
        weights.unlink()
    for part, changes in sizes.items():
        path = folder / part / "config.json"
        path.write_text(json.dumps(_merge(json.loads(path.read_text()), changes)))
    return folder


def _merge(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {name: _merge(config[name], value) for name, value in changes.items() if name.endswith("_config")}
    return config | changes | nested
