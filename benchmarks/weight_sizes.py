"""
Print what text encoders, the networks of rewards and the states of optimizers weigh, from their sizes alone.

    python -m benchmarks.weight_sizes

The networks have the sizes of the published configurations and no weights. The tables are those of docs/memory.md and
docs/rewards/built_in.md, with 10⁹ bytes to a GB.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers as tf
from torch import nn

from diffusion_grpo.rewards.models.aesthetic import build_predictor
from diffusion_grpo.rewards.similarity import Features

from .real_sizes import build_pipeline, write_model

ENCODED = ("FLUX.1-dev", "SD3.5-L", "SDXL", "Qwen-Image", "Wan2.1-1.3B", "HunyuanVideo")
BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
HUGE = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16}
PIXELS = {"image_size": 224, "patch_size": 14}
DINO = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
BLIP_TEXT = {"vocab_size": 30524, "encoder_hidden_size": 1024, "is_decoder": True, "max_position_embeddings": 512}
TROCR = {"vocab_size": 50265, "d_model": 1024, "decoder_layers": 12, "decoder_ffn_dim": 4096}
TROCR |= {"decoder_attention_heads": 16, "max_position_embeddings": 512, "cross_attention_hidden_size": 768}


def make_clip(text: dict[str, int], vision: dict[str, int], width: int) -> nn.Module:
    """Make a CLIP of two towers."""
    return tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=width))


def make_trocr() -> nn.Module:
    """Make TrOCR's base size: a ViT for 384 pixels, and a decoder."""
    vision, text = tf.ViTConfig(**BASE, image_size=384, qkv_bias=False), tf.TrOCRConfig(**TROCR)
    return tf.VisionEncoderDecoderModel(tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text))


def list_rewards() -> Iterator[tuple[str, nn.Module]]:
    """Yield the names of rewards with weights, and networks like theirs."""
    yield "clip_score, clip_similarity", make_clip(BASE, LARGE | PIXELS, 768)
    yield "pickscore, hpsv2", make_clip(LARGE, HUGE | PIXELS, 1024)
    vision = tf.BlipVisionModel(tf.BlipVisionConfig(**LARGE, image_size=224, patch_size=16))
    text = tf.BlipTextModel(tf.BlipTextConfig(**BASE, **BLIP_TEXT), add_pooling_layer=False)
    yield "imagereward", nn.ModuleList([vision, text, build_predictor(768)])
    seen = tf.CLIPVisionConfig(**LARGE, **PIXELS, projection_dim=768)
    yield "aesthetic", nn.ModuleList([tf.CLIPVisionModelWithProjection(seen), build_predictor(768)])
    yield "lpips", Features("alex")
    yield "lpips (net: vgg)", Features("vgg")
    yield "dino_similarity", tf.ViTModel(tf.ViTConfig(**DINO))
    yield "nsfw_filter", tf.ViTForImageClassification(tf.ViTConfig(**BASE, num_labels=2))
    yield "text_by_model (TrOCR)", make_trocr()


def list_encoders(name: str) -> list[nn.Module]:
    """Make the text encoders of a model of `real_sizes.py`."""
    with tempfile.TemporaryDirectory() as folder:
        pipe = build_pipeline(write_model(name, Path(folder)), "meta", torch.bfloat16)
    return [part for part_name, part in pipe.components.items() if part_name.startswith("text_encoder")]


def count_weights(*parts: nn.Module) -> int:
    """Count the numbers that some networks hold."""
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def format_bytes(count: int) -> str:
    """Write a number of bytes in GB, or below 100 MB in MB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.0f} MB"


def count_states(name: str, side: int = 1024) -> float:
    """Take a step with one of torchao's optimizers; return the bytes of its states per weight."""
    import torchao.optim

    weight = nn.Parameter(torch.zeros(side, side))
    weight.grad = torch.zeros_like(weight)
    optimizer = getattr(torchao.optim, name)([weight], block_size=256)  # transformers' block
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    states = [state for state in optimizer.state[weight].values() if state.ndim]
    parts = [getattr(state, part) for state in states for part in state.__tensor_flatten__()[0]]
    return sum(part.numel() * part.element_size() for part in parts) / weight.numel()


def main() -> None:
    print("| text encoders of | weights | bfloat16 |\n|---|---|---|")
    for name in ENCODED:
        count = count_weights(*list_encoders(name))
        print(f"| {name} | {count / 1e9:.2f} B | {format_bytes(2 * count)} |", flush=True)
    print("\n| reward | weights | float32 |\n|---|---|---|")
    with torch.device("meta"):
        for name, network in list_rewards():
            count = count_weights(network)
            print(f"| {name} | {count / 1e6:.1f} M | {format_bytes(4 * count)} |")
    print("\n| optimizer of torchao | bytes per weight |\n|---|---|")
    for name in ("AdamW8bit", "AdamW4bit"):
        print(f"| {name} | {count_states(name):.2f} |")


if __name__ == "__main__":
    main()
