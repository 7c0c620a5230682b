"""A second family whose pipeline only writes tokens: a language model, one colour per token, and no DiT.

Its texts end where the model says so, so that samples have different lengths.
"""

import tiny_pipelines
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image
from tiny_pipelines.glm import tokenizer as byte_tokenizer
from tiny_runs import SETTINGS, brightness
from transformers import LlamaConfig, LlamaForCausalLM

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.pipelines import Family

COLORS, END, LENGTH = 16, 15, 6
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
INPUTS = {"prompt": ["a cat", "a long-haired dog"]}


class Painter(DiffusionPipeline):
    """A row of grey squares, one per token; black after the end."""

    def __init__(self, tokenizer, writer):
        super().__init__()
        self.register_modules(tokenizer=tokenizer, writer=writer)

    @torch.no_grad()
    def __call__(self, prompt, generator=None, output_type="pil"):
        call = self.tokenizer(prompt, return_tensors="pt", padding=True, return_token_type_ids=False)
        ids = self.writer.generate(**call, max_new_tokens=LENGTH, do_sample=True)[:, call["input_ids"].shape[1] :]
        squares = torch.nn.functional.pad(ids, (0, LENGTH - ids.shape[1]), value=END)
        return ([Image.fromarray((row * 16 % 240).byte().numpy()[None]) for row in squares],)


class PainterFamily(Family):
    """Its language model is `writer`, and ids below `COLORS` are colours."""

    language_model = "writer"

    def vocabulary(self, pipe):
        return COLORS


def make_painter():
    """A painter with random weights."""
    ids = byte_tokenizer()
    torch.manual_seed(0)
    writer = LlamaForCausalLM(LlamaConfig(vocab_size=len(ids), **LLAMA)).eval()
    tiny_pipelines.randomize(writer)
    writer.generation_config.update(eos_token_id=END, pad_token_id=ids.pad_token_id, top_k=0)
    return Painter(ids, writer)


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def trainer_of(pipe, folder, peft_config=LORA, rewards=brightness, **settings):
    """A trainer of the painter, two updates."""
    args = DiffusionGRPOConfig(output_dir=str(folder), **SETTINGS | {"train_component": "writer", **settings})
    rows = Dataset.from_dict({"prompt": ["a cat", "a long-haired dog"]})
    return DiffusionGRPOTrainer(pipe, rewards, args, rows, eval_dataset=rows, peft_config=peft_config)
