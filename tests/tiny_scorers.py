"""Tiny random models of the architectures behind the rewards with weights, saved as their originals are: nothing is
downloaded. In: a folder. Out: the model, whose files lie in the folder.
"""

import json
from pathlib import Path

import torch
import transformers as tf
from PIL import Image
from stand_ins import byte_tokenizer
from tiny_pipelines import clip_tokenizer
from tiny_pipelines.basic import randomize

SIZES = [(64, 48), (40, 64), (32, 32), (61, 37)]
IMAGES = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
for _number, _image in enumerate(IMAGES):  # channels that differ, so that their order counts
    IMAGES[_number] = Image.merge(
        "RGB", [_image.getchannel(0), _image.getchannel(1).rotate(90), _image.getchannel(2).rotate(180)]
    )
PROMPTS = ["a red cat", "Two DOGS, a house and much more " * 9, "a red cat", "été"]
SIDE, PATCH = 32, 8
TEXT = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def clip_config(act: str = "quick_gelu") -> tf.CLIPConfig:
    tokens = clip_tokenizer()
    ends = {"eos_token_id": tokens.eos_token_id, "bos_token_id": tokens.bos_token_id, "pad_token_id": 0}
    return tf.CLIPConfig(
        text_config={**TEXT, **ends, "vocab_size": len(tokens), "hidden_act": act},
        vision_config={**TEXT, "image_size": SIDE, "patch_size": PATCH, "hidden_act": act},
        projection_dim=12,
    )


def clip(folder: Path, act: str = "quick_gelu") -> tf.CLIPModel:
    torch.manual_seed(0)
    model = tf.CLIPModel(clip_config(act)).eval()
    randomize(model)
    torch.nn.init.constant_(model.logit_scale, 3.0)
    model.save_pretrained(folder)
    processor = tf.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_mean=MEAN, image_std=STD
    )
    tf.CLIPProcessor(processor, clip_tokenizer()).save_pretrained(folder)
    return model


def bert_tokenizer(folder: Path) -> tf.BertTokenizer:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz,"]
    names += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = tf.BertTokenizer(vocab={token: i for i, token in enumerate(names)}, model_max_length=512)
    tokenizer.save_pretrained(folder)
    return tokenizer


def chain(width: int, prefix: str) -> dict[str, torch.Tensor]:
    """Weights of the linear chain 1024, 128, 64, 16, 1 with dropouts counted, under the authors' names."""
    weights = {}
    for name, (inner, outer) in zip((0, 2, 4, 6, 7), ((width, 1024), (1024, 128), (128, 64), (64, 16), (16, 1))):
        weights[f"{prefix}{name}.weight"] = torch.randn(outer, inner) / inner**0.5
        weights[f"{prefix}{name}.bias"] = 0.1 * torch.randn(outer)
    return weights


def med_config(folder: Path, vocabulary: int) -> dict:
    written = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_act": "gelu", "hidden_size": 32,
        "intermediate_size": 48, "layer_norm_eps": 1e-12, "max_position_embeddings": 40, "num_attention_heads": 2,
        "num_hidden_layers": 2, "pad_token_id": 0, "type_vocab_size": 2, "vocab_size": vocabulary,
        "encoder_width": 32, "add_cross_attention": True,
    }  # fmt: skip
    (folder / "med_config.json").write_text(json.dumps(written))
    return written


def trocr(folder: Path, size: tuple[int, int] = (SIDE, SIDE), width: int = 16) -> tf.VisionEncoderDecoderModel:
    """ViT to a decoder of bytes, as TrOCR is saved, for images of `size` (width, height)."""
    torch.manual_seed(6)
    tokenizer = byte_tokenizer({"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"})
    layers = {**TEXT, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    vision = tf.ViTConfig(**layers, **still, image_size=size[::-1], patch_size=PATCH)
    text = tf.TrOCRConfig(
        vocab_size=len(tokenizer), d_model=width, decoder_layers=1, decoder_attention_heads=2,
        decoder_ffn_dim=2 * width, max_position_embeddings=64, cross_attention_hidden_size=width, bos_token_id=0,
        pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, dropout=0.0,
    )  # fmt: skip
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 2, 1, 2
    model = tf.VisionEncoderDecoderModel(config)
    randomize(model)
    model.save_pretrained(folder)
    processor = tf.ViTImageProcessorPil(size={"height": size[1], "width": size[0]})
    tf.TrOCRProcessor(processor, tokenizer).save_pretrained(folder)
    return model


def got_ocr(folder: Path) -> None:
    """SAM's tower to a Qwen2 of bytes, as GOT-OCR 2.0 is saved; the image is as large as its 256 tokens need."""
    torch.manual_seed(7)
    first = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"]
    tokenizer = byte_tokenizer({"pad_token": first[0], "eos_token": first[0]}, first=first)
    tokenizer.add_special_tokens({"additional_special_tokens": first[1:]})
    ends = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    text = {**TEXT, **ends, "vocab_size": len(tokenizer), "num_key_value_heads": 2}
    vision = {
        "hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 1024,
        "patch_size": 16, "window_size": 14, "global_attn_indexes": [], "mlp_dim": 24,
    }  # fmt: skip
    model = tf.GotOcr2ForConditionalGeneration(
        tf.GotOcr2Config(vision_config=vision, text_config=text, image_token_index=5)
    )
    randomize(model)
    model.save_pretrained(folder)
    processor = tf.GotOcr2ImageProcessorPil(size={"height": 1024, "width": 1024})
    tf.GotOcr2Processor(processor, tokenizer).save_pretrained(folder)
