"""A tiny random Qwen2-VL, on which the tests of HPSv3 and VideoAlign run."""

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tiny_pipelines.language import QWEN_SPECIAL, qwen_tokenizer
from torch import nn

from diffusion_grpo.rewards.models.qwen_vl import CHAT, read_template

WIDTH = 32


def tiny_qwen(folder, marks: list[str], seed: int = 0):
    """A tokenizer and a configuration in `folder`, and a random Qwen2-VL of two layers that knows `marks`."""
    torch.manual_seed(seed)
    name = "hpsv3" if len(marks) == 1 else "videoalign"
    tokenizer = qwen_tokenizer(CHAT + read_template(name))
    ids = dict(zip(QWEN_SPECIAL, tokenizer.convert_tokens_to_ids(QWEN_SPECIAL), strict=True))
    text = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
    config = tf.Qwen2VLConfig(
        text_config={**text, "num_key_value_heads": 2, "vocab_size": len(tokenizer) + 9, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 2},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    tokenizer.add_tokens(marks, special_tokens=True)
    config.text_config.vocab_size = len(tokenizer)
    model = tf.Qwen2VLModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model, tokenizer


def old_names(model: nn.Module, head: dict) -> dict:
    """As transformers 4.45 called the weights, which the published checkpoints hold."""
    named = {name.replace("language_model.", "model."): value for name, value in model.state_dict().items()}
    named["lm_head.weight"] = model.language_model.embed_tokens.weight.detach().clone()
    return {name: value.clone() for name, value in named.items()} | head


@torch.no_grad()
def hidden_at(model, tokenizer, text: str, kind: str, pixels, grid, marks: list[str]):
    """(marks, width): the hidden states, one text at a time, from embeddings at the positions 0, 1, 2, ..."""
    pad = {"image": "<|image_pad|>", "video": "<|video_pad|>"}[kind]
    words = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
    words += pad * (int(np.prod(grid)) // 4) + f"<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor(tokenizer(words)["input_ids"])
    embedded = model.language_model.embed_tokens(ids)
    embedded[ids == tokenizer.convert_tokens_to_ids(pad)] = model.visual(pixels, torch.tensor([grid])).pooler_output
    states = model.language_model(inputs_embeds=embedded[None]).last_hidden_state[0]
    return torch.stack([states[ids.tolist().index(tokenizer.convert_tokens_to_ids(mark))] for mark in marks])


def noise(width: int, height: int, seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))
