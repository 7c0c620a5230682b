"""Locally built stand-ins for the tiny checkpoints that diffusers' own tests load from the Hub.

In: the class and the id of a `from_pretrained`. Out: a tokenizer, processor, configuration or random model of that
class with the sizes the tests count on. Used by the sweep alone, inside `offline()`.
"""

import contextlib
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import UNet2DModel
from diffusers.models.controlnets import controlnet_cosmos
from diffusers.models.transformers import transformer_cosmos
from diffusers.modular_pipelines.qwenimage import encoders as qwenimage_encoders
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from diffusers.pipelines.longcat_image import pipeline_longcat_image_edit
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_inpaint,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
)
from tiny_pipelines import glm, language
from tiny_pipelines.basic import clip_tokenizer, t5_tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch.nn.attention import flex_attention

BYTES = sorted(ByteLevel.alphabet())
ASCII = [chr(code) for code in range(33, 127)]
QWEN_SPECIAL = dict(zip(language.QWEN_SPECIAL, (*range(151643, 151646), *range(151652, 151657)), strict=True))
QWEN_TEXT = {"vocab_size": 152064, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
QWEN_TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 2}
QWEN_TEXT |= {"rope_parameters": language.ROPE | {"rope_theta": 1000000.0}}
QWEN_TOKENS = {
    "vision_start_token_id": QWEN_SPECIAL["<|vision_start|>"],
    "vision_end_token_id": QWEN_SPECIAL["<|vision_end|>"],
    "image_token_id": QWEN_SPECIAL["<|image_pad|>"],
    "video_token_id": QWEN_SPECIAL["<|video_pad|>"],
}
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# of the text that Kandinsky 5 puts around an instruction and cuts off again by its length, and of the test's prompt
KANDINSKY_WORDS = (
    "You are a prompt engineer Based on the provided source image first and target second create an interesting text "
    "that can be used together with to system user red square"
).split()
# they bring every image to a million pixels, whose encoding takes minutes here
MEGAPIXEL_EDITORS = (
    pipeline_longcat_image_edit,
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_inpaint,
    pipeline_qwenimage_edit_plus,
    pipeline_qwenimage_layered,
    qwenimage_encoders,
)
PLAIN_CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '[IMG]' if part.type in ('image', 'image_url') else part.text }}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}"
)


def _t5_tokenizer(cls: type | None = None, **kwargs: Any):
    return t5_tokenizer(**kwargs)


def _gemma_tokenizer(cls: type | None = None, **kwargs: Any):
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *ASCII]
    names += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
    tokenizer = transformers.GemmaTokenizer(vocab={token: index for index, token in enumerate(names)}, merges=[])
    # as the real one: an empty prompt is one token, not none
    begin = {"single": "<bos> $A", "special_tokens": [("<bos>", names.index("<bos>"))]}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(**begin)
    tokenizer.chat_template = PLAIN_CHAT
    return tokenizer


def _qwen_tokenizer(cls: type | None = None, **kwargs: Any):
    words = [*KANDINSKY_WORDS, *(f" {word}" for word in KANDINSKY_WORDS)]
    names = [*BYTES, *words, *(f"<{index}>" for index in range(151657))]
    vocabulary = {name: index for index, name in enumerate(names[:151643])} | QWEN_SPECIAL
    taken = set(vocabulary.values())
    vocabulary |= {f"<spare {index}>": index for index in range(151643, 151657) if index not in taken}
    tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=[], model_max_length=32768)
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL)})
    tokenizer.add_tokens(words)
    tokenizer.chat_template = CHAT
    for name in ("image", "video", "vision_start", "vision_end"):
        token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", QWEN_SPECIAL[token])
    return tokenizer


def byte_tokenizer(special: dict[str, str], first: list[str] = (), chat: str = PLAIN_CHAT, **kwargs: Any):
    """A tokenizer of bytes with special tokens under the lowest ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = list(dict.fromkeys([*first, *special.values(), *BYTES]))
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=512, **special, **kwargs, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat
    return tokenizer


def _llama_tokenizer(cls: type | None = None, **kwargs: Any):
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = byte_tokenizer(special)
    tokenizer.add_bos_token = True
    return tokenizer


def _bert_tokenizer(cls: type | None = None, **kwargs: Any):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *ASCII, *(f"##{letter}" for letter in ASCII)]
    return transformers.BertTokenizer(vocab={token: i for i, token in enumerate(names)}, model_max_length=512)


def _roberta_tokenizer(cls: type | None = None, **kwargs: Any):
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *BYTES]
    return transformers.RobertaTokenizer(vocab={t: i for i, t in enumerate(names)}, merges=[], **kwargs)


def _xlm_roberta_tokenizer(cls: type | None = None, **kwargs: Any):
    names = ["<s>", "<pad>", "</s>", "<unk>", "▁", *ASCII, "<mask>"]
    return transformers.XLMRobertaTokenizer(vocab=[(name, -1.0) for name in names], model_max_length=512)


def _glm_tokenizer(cls: type | None = None, **kwargs: Any):
    special = {"pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    return byte_tokenizer(special, first=["[gMASK]", "<sop>"], padding_side="left")


def _chatglm_tokenizer(cls: type | None = None, **kwargs: Any):
    import sentencepiece

    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("\n".join(["".join(ASCII[i:] + ASCII[:i]) for i in range(90)]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=100, model_type="char"
    )
    return ChatGLMTokenizer(str(folder / "tokenizer.model"))


def _chatglm(cls: type | None = None, **kwargs: Any):
    sizes = dict(num_layers=2, padded_vocab_size=200, hidden_size=8, ffn_hidden_size=8, kv_channels=4, seq_length=512)
    attention = dict(num_attention_heads=2, multi_query_attention=True, multi_query_group_num=1, rmsnorm=True)
    config = ChatGLMConfig(**sizes, **attention, add_bias_linear=False, add_qkv_bias=True, original_rope=True)
    model = ChatGLMModel(config).float().eval()
    for parameter in model.parameters():  # the class leaves its weights uninitialised
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def _qwen_image_processor():
    return transformers.Qwen2VLImageProcessor(patch_size=14, min_pixels=28 * 28, max_pixels=56 * 56, merge_size=2)


def _qwen_processor(cls: type | None = None, **kwargs: Any):
    cls = transformers.Qwen2VLProcessor if cls is transformers.AutoProcessor else cls
    processor = cls.__new__(cls)
    tokenizer = _qwen_tokenizer()
    image_processor = _qwen_image_processor()
    if cls.__name__ == "Qwen3VLProcessor":
        image_processor = transformers.Qwen2VLImageProcessor(
            patch_size=16, min_pixels=32 * 32, max_pixels=64 * 64, merge_size=2
        )
    processor.image_processor, processor.tokenizer, processor.video_processor = image_processor, tokenizer, None
    processor.chat_template = CHAT
    for name in ("image", "video", "vision_start", "vision_end"):
        setattr(processor, f"{name}_token", getattr(tokenizer, f"{name}_token"))
        setattr(processor, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    return processor


def _qwen_vl(cls: type | None = None, **kwargs: Any):
    vision = dict(depth=2, embed_dim=16, hidden_size=16, num_heads=2, patch_size=14)
    config = transformers.Qwen2VLConfig(text_config=QWEN_TEXT, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen2VLForConditionalGeneration(config).eval()


def _qwen3_vl(cls: type | None = None, **kwargs: Any):
    vision = dict(depth=2, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16, patch_size=16)
    vision |= dict(deepstack_visual_indexes=[0], num_position_embeddings=16)
    config = transformers.Qwen3VLConfig(text_config=QWEN_TEXT | {"head_dim": 8}, vision_config=vision, **QWEN_TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config).eval()


def _gemma3(cls: type | None = None, **kwargs: Any):
    text = dict(vocab_size=200, hidden_size=32, intermediate_size=32, head_dim=16)
    text |= dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def _t5_config(cls: type | None = None, **kwargs: Any):
    return transformers.T5Config(vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)


def _t5(cls: type | None = None, **kwargs: Any):
    return transformers.T5EncoderModel(_t5_config()).eval()


def _umt5(cls: type | None = None, **kwargs: Any):
    sizes = dict(vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**sizes)).eval()


def _bert(cls: type | None = None, **kwargs: Any):
    sizes = dict(vocab_size=1124, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)
    return transformers.BertModel(transformers.BertConfig(**sizes)).eval()


def _llama(cls: type | None = None, **kwargs: Any):
    sizes = dict(vocab_size=32000, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


def _siglip(cls: type | None = None, **kwargs: Any):
    sizes = dict(hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4)
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(image_size=30, patch_size=2, **sizes)).eval()


def _consistency_unet(cls: type | None = None, subfolder: str = "", **kwargs: Any):
    return UNet2DModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        num_class_embeds=10 if "class_cond" in subfolder else None,
    )


def _pixtral_processor(cls: type | None = None, **kwargs: Any):
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = byte_tokenizer(special, first=["[IMG]", "[IMG_BREAK]", "[IMG_END]"], padding_side="left")
    return tokenizer  # without images a processor does what its tokenizer does


class _Transforms:
    """What Cosmos' networks and OmniGen's processor use of torchvision, where torchvision is not installed."""

    # OmniGen's are for images, and the sweep gives it none
    Compose = Lambda = ToTensor = Normalize = staticmethod(lambda *args, **kwargs: None)

    InterpolationMode = types.SimpleNamespace(NEAREST="nearest")

    class functional:
        @staticmethod
        def resize(picture: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
            """Resizes the last two dimensions."""
            return torch.nn.functional.interpolate(picture, size=size, mode=interpolation)


# (class name or "", part of the id) -> how it is built; the first that fits counts
STAND_INS: list[tuple[str, str, Callable]] = [
    ("UNet2DModel", "consistency-models-test", _consistency_unet),
    ("AutoConfig", "t5", _t5_config),
    ("AutoConfig", "T5", _t5_config),
    ("UMT5EncoderModel", "umt5", _umt5),
    ("T5EncoderModel", "", _t5),
    ("CLIPTokenizer", "", lambda cls, **kwargs: clip_tokenizer()),
    ("T5Tokenizer", "", _t5_tokenizer),
    ("AutoTokenizer", "t5", _t5_tokenizer),
    ("AutoTokenizer", "umt5", _t5_tokenizer),
    ("AutoProcessor", "Mistral", _pixtral_processor),
    ("AutoProcessor", "Qwen", _qwen_processor),
    ("Qwen2VLProcessor", "", _qwen_processor),
    ("Qwen3VLProcessor", "", _qwen_processor),
    ("GlmImageProcessor", "", lambda cls, **kwargs: glm.processor()),
    ("Qwen2VLForConditionalGeneration", "", _qwen_vl),
    ("Qwen3VLForConditionalGeneration", "", _qwen3_vl),
    ("Gemma3ForConditionalGeneration", "", _gemma3),
    ("GemmaTokenizer", "", _gemma_tokenizer),
    ("AutoTokenizer", "emma", _gemma_tokenizer),
    ("AutoTokenizer", "Qwen", _qwen_tokenizer),
    ("AutoTokenizer", "cosmos3", _qwen_tokenizer),
    ("Qwen2Tokenizer", "", _qwen_tokenizer),
    ("BertModel", "", _bert),
    ("AutoTokenizer", "Bert", _bert_tokenizer),
    ("XLMRobertaTokenizer", "", _xlm_roberta_tokenizer),
    ("RobertaTokenizer", "", _roberta_tokenizer),
    ("LlamaTokenizer", "", _llama_tokenizer),
    ("AutoTokenizer", "lama", _llama_tokenizer),
    ("LlamaForCausalLM", "", _llama),
    ("ChatGLMModel", "", _chatglm),
    ("ChatGLMTokenizer", "", _chatglm_tokenizer),
    ("AutoTokenizer", "glm", _glm_tokenizer),
    ("ClapFeatureExtractor", "", lambda cls, **kwargs: transformers.ClapFeatureExtractor(**kwargs)),
    ("SiglipVisionModel", "", _siglip),
    ("SiglipImageProcessor", "", lambda cls, **kwargs: transformers.SiglipImageProcessor(**kwargs)),
    ("DPTImageProcessor", "", lambda cls, **kwargs: transformers.DPTImageProcessor(size={"height": 32, "width": 32})),
]


def stand_in(cls: type, name: str, **kwargs: Any) -> Any:
    """What `cls.from_pretrained(name)` returns here.

    Raises:
        LookupError: nothing is built for this class and id.
    """
    for wanted, part, build in STAND_INS:
        if cls.__name__.removesuffix("Fast").removesuffix("Pil") == wanted and part in name:
            for unused in ("trust_remote_code", "torch_dtype", "dtype", "revision"):
                kwargs.pop(unused, None)
            with torch.random.fork_rng(devices=[]):
                return build(cls, **kwargs)
    raise LookupError(f"no stand-in for {cls.__name__}.from_pretrained({name!r})")


def dense_attention(query, key, value, block_mask=None, scale=None, **kwargs):
    """Flex attention, whose backward pass needs a GPU, with its block mask written out."""
    if block_mask is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
    lengths = query.shape[2], key.shape[2]
    blocks = block_mask.to_dense().bool()
    for axis, size in zip((-2, -1), block_mask.BLOCK_SIZE, strict=True):
        blocks = blocks.repeat_interleave(size, dim=axis)
    mask = blocks[..., : lengths[0], : lengths[1]]
    mask = mask & flex_attention.create_mask(block_mask.mask_mod, 1, 1, *lengths, device=query.device)
    mask = mask | ~mask.any(-1, keepdim=True)  # rows of padding
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Every `from_pretrained` of a Hub id inside gives a stand-in; folders are loaded as usual."""
    owners = (
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.ProcessorMixin,
        transformers.AutoConfig,
        transformers.AutoTokenizer,
        transformers.AutoProcessor,
        transformers.image_processing_base.ImageProcessingMixin,
        transformers.FeatureExtractionMixin,
        UNet2DModel.__mro__[[c.__name__ for c in UNet2DModel.__mro__].index("ModelMixin")],
    )
    saved = [(owner, owner.__dict__["from_pretrained"]) for owner in owners if "from_pretrained" in owner.__dict__]
    for owner, original in saved:

        def from_pretrained(cls, name, *args, _original=original, **kwargs):
            if Path(str(name)).exists():
                return _original.__get__(None, cls)(name, *args, **kwargs)
            return stand_in(cls, str(name), **kwargs)

        owner.from_pretrained = classmethod(from_pretrained)
    for module in (transformer_cosmos, controlnet_cosmos, processor_omnigen):
        if not hasattr(module, "transforms"):
            module.transforms = _Transforms
    pipeline_omnigen.OmniGenMultiModalProcessor = processor_omnigen.OmniGenMultiModalProcessor
    editors = [(module, module.calculate_dimensions) for module in MEGAPIXEL_EDITORS]
    for module, calculate in editors:
        module.calculate_dimensions = lambda area, ratio, _calculate=calculate: _calculate(min(area, 64 * 64), ratio)
    flex, flex_attention.flex_attention = flex_attention.flex_attention, dense_attention
    try:
        yield
    finally:
        flex_attention.flex_attention = flex
        for module, calculate in editors:
            module.calculate_dimensions = calculate
        for owner, original in saved:
            owner.from_pretrained = original
