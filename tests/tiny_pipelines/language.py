"""Language models in front of the large pipelines, and tokenizers that know the words of their templates.

These pipelines put the prompt into a fixed text and cut that text's tokens off again, by their number in the real
vocabulary. So that the prompt is what is left, each word of the template is one token here too, and other text is
bytes.
"""

import re

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from .basic import WIDTH, WIDTHS

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
QWEN_SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0}
VISION = {"depth": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "out_hidden_size": WIDTH}
QWEN3_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str, special: list[str], **roles: str) -> transformers.PreTrainedTokenizerFast:
    """One token a word of `template` and a byte of anything else; `special` have the lowest ids."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain = re.split("|".join(map(re.escape, special)), template)
    words = sorted({word for text in plain for word, _ in splitter.pre_tokenize_str(text)} - set(BYTES))
    pieces = [(token, -100.0) for token in special] + [(byte, -10.0) for byte in BYTES] + [(w, -1.0) for w in words]
    inner = Tokenizer(models.Unigram(pieces, unk_id=0))
    inner.pre_tokenizer, inner.decoder = splitter, decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=2048, **roles)


def llama_tokenizer(template: str) -> transformers.PreTrainedTokenizerFast:
    """Llama 3's: a token at the beginning, right padding with the end of the text."""
    roles = {"bos_token": LLAMA_SPECIAL[0], "eos_token": LLAMA_SPECIAL[1], "pad_token": LLAMA_SPECIAL[1]}
    made = tokenizer(template, [*LLAMA_SPECIAL, "<image>"], padding_side="right", **roles)
    begin = {"single": f"{LLAMA_SPECIAL[0]} $A", "special_tokens": [(LLAMA_SPECIAL[0], 0)]}
    made.backend_tokenizer.post_processor = TemplateProcessing(**begin)
    return made


def llama_config(vocabulary: transformers.PreTrainedTokenizerFast) -> transformers.LlamaConfig:
    """Three layers, because HunyuanVideo reads the hidden states before the last two."""
    return transformers.LlamaConfig(
        vocab_size=len(vocabulary), num_hidden_layers=3, pad_token_id=vocabulary.pad_token_id, **WIDTHS
    )


def llama(vocabulary: transformers.PreTrainedTokenizerFast) -> transformers.LlamaModel:
    """A Llama without head."""
    return transformers.LlamaModel(llama_config(vocabulary))


def qwen_tokenizer(template: str) -> transformers.PreTrainedTokenizerFast:
    """Qwen 2's, with its tokens for images."""
    made = tokenizer(template, QWEN_SPECIAL, pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="right")
    for name, token in {"image": "<|image_pad|>", "video": "<|video_pad|>"}.items():
        setattr(made, f"{name}_token", token)
        setattr(made, f"{name}_token_id", made.convert_tokens_to_ids(token))
    return made


def qwen3_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """The same with Qwen 3's chat template, without images."""
    made = qwen_tokenizer(QWEN3_CHAT)
    made.chat_template = QWEN3_CHAT
    return made


def qwen3(vocabulary: transformers.PreTrainedTokenizerFast) -> transformers.Qwen3ForCausalLM:
    """Qwen 3 of two layers."""
    config = transformers.Qwen3Config(vocab_size=len(vocabulary), num_hidden_layers=2, head_dim=8, **WIDTHS)
    return transformers.Qwen3ForCausalLM(config)


def qwen_ids(vocabulary: transformers.PreTrainedTokenizerFast) -> dict[str, int]:
    """What the configuration of a Qwen that sees says of the ids of its tokens for images."""
    ids = dict(zip(QWEN_SPECIAL, vocabulary.convert_tokens_to_ids(QWEN_SPECIAL), strict=True))
    names = {"image_token": "image_pad", "video_token": "video_pad"}
    names |= {"vision_start_token": "vision_start", "vision_end_token": "vision_end"}
    return {f"{name}_id": ids[f"<|{token}|>"] for name, token in names.items()}


def qwen_vl(vocabulary: transformers.PreTrainedTokenizerFast) -> torch.nn.Module:
    """Qwen 2.5 VL: one layer for text, one for images in patches of 14."""
    config = transformers.Qwen2_5_VLConfig(
        text_config=WIDTHS | {"vocab_size": len(vocabulary), "num_hidden_layers": 1, "rope_parameters": ROPE},
        vision_config=VISION | {"fullatt_block_indexes": [0]},
        **qwen_ids(vocabulary),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def vision_processor(cls: type, image_processor: object, vocabulary: transformers.PreTrainedTokenizerFast) -> object:
    """A processor for text and images, built without its constructor, whose video processor needs torchvision."""
    made = cls.__new__(cls)
    made.image_processor, made.tokenizer, made.video_processor = image_processor, vocabulary, None
    made.chat_template = None
    for name in ("image", "video"):
        setattr(made, f"{name}_token", getattr(vocabulary, f"{name}_token"))
        setattr(made, f"{name}_token_id", getattr(vocabulary, f"{name}_token_id"))
    return made


def llava(vocabulary: transformers.PreTrainedTokenizerFast) -> transformers.LlavaForConditionalGeneration:
    """The Llama above behind CLIP's eyes, whose images are 576 tokens as in HunyuanVideo's template."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_attention_heads=2,
        num_hidden_layers=1,
        image_size=336,
        patch_size=14,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=llama_config(vocabulary),
        pad_token_id=vocabulary.pad_token_id,
        image_token_index=vocabulary.convert_tokens_to_ids("<image>"),
    )
    return transformers.LlavaForConditionalGeneration(config)
