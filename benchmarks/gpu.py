"""
Seconds and peak memory of rollout and update for networks of published sizes: `python benchmarks/gpu.py`, with a GPU.

SD3.5-M's network (2.2 B weights) and FLUX.1-dev's (11.9 B), with random weights in bf16, so nothing is downloaded; VAE
and text encoders are small, in float32, and of the right widths, so the network gets as many tokens as the real one.
Prints a row of Markdown for each run. `--tiny` does the same with networks of two blocks, on a CPU too, to check that
it works.
"""

import argparse
import gc
import platform
import statistics
import subprocess
import sys
import tempfile
import time

import diffusers
import torch
from communication import MODELS
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline, StableDiffusion3Pipeline
from peft import LoraConfig
from step import LORA_LAYERS, peak_memory, random_vae
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    PrinterCallback,
    T5Config,
    T5EncoderModel,
    TrainerCallback,
)

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny
from diffusion_grpo.training.callbacks import ReportCallback

# the network, whether a LoRA is trained, settings
TRAININGS = {
    "sd35-lora": ("SD3.5-M", True, {"guidance_scale": 4.5}),
    "sd35-full": ("SD3.5-M", False, {"guidance_scale": 4.5}),
    "flux-lora": ("FLUX.1-dev", True, {"guidance_scale": 3.5}),
}
SMALL = {
    "SD3.5-M": {
        "num_layers": 2,
        "num_attention_heads": 1,
        "caption_projection_dim": 64,
        "dual_attention_layers": (0,),
    },
    "FLUX.1-dev": {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2},
}


def network(name: str, is_tiny: bool, device: str) -> nn.Module:
    """Random weights in bf16, made where they will be: 12 B need 24 GB there and nothing in the machine's memory."""
    cls, config, *_ = MODELS[name]
    config = config | (SMALL[name] if is_tiny else {})
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(diffusers, cls)(**config).bfloat16()  # tables of positions too
    finally:
        torch.set_default_dtype(before)


def tokenizer(length: int) -> CLIPTokenizer:
    """The embedded model's, which pads to `length` tokens."""
    return CLIPTokenizer.from_pretrained(tiny.PATH, subfolder="tokenizer", model_max_length=length)


def clip(width: int, cls: type[nn.Module]) -> nn.Module:
    """One small layer of the width that the network expects."""
    sizes = {
        "hidden_size": width,
        "projection_dim": width,
        "intermediate_size": 64,
        "num_attention_heads": width // 64,
    }
    words = tokenizer(77)
    tokens = {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return cls(
        CLIPTextConfig(vocab_size=len(words), num_hidden_layers=1, max_position_embeddings=77, **sizes, **tokens)
    )


def pipeline(name: str, is_tiny: bool, device: str) -> DiffusionPipeline:
    """SD3's or FLUX's pipeline around the network."""
    torch.manual_seed(0)
    parts = {"transformer": network(name, is_tiny, device), "vae": random_vae(), "tokenizer": tokenizer(77)}
    t5 = T5Config(d_model=4096, d_kv=64, d_ff=64, num_heads=1, num_layers=1, vocab_size=len(tokenizer(512)))
    t5 = T5EncoderModel(t5)
    if name == "SD3.5-M":
        parts |= {"text_encoder": clip(768, CLIPTextModelWithProjection), "tokenizer_2": tokenizer(77)}
        parts |= {"text_encoder_2": clip(1280, CLIPTextModelWithProjection)}
        parts |= {"text_encoder_3": t5, "tokenizer_3": tokenizer(256)}
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return StableDiffusion3Pipeline(**parts)
    parts |= {"text_encoder": clip(768, CLIPTextModel), "text_encoder_2": t5, "tokenizer_2": tokenizer(512)}
    shift = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256}
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(shift=3.0, **shift)
    return FluxPipeline(**parts)


class Stages(TrainerCallback):
    """Seconds and peak memory of each update's rollout, rewards included, and of the update itself.

    The update begins where the network is first called with gradient.

    Args:
        policy: the network.
    """

    def __init__(self, policy: nn.Module):
        self.seconds: dict[str, list[float]] = {"rollout": [], "update": []}
        self.memory: dict[str, list[float]] = {"rollout": [], "update": []}
        self._stage: str | None = None
        policy.register_forward_pre_hook(self._called)

    def _called(self, *args) -> None:
        if self._stage == "rollout" and torch.is_grad_enabled():
            self._end()
            self._begin("update")

    def _begin(self, stage: str) -> None:
        self._stage, self._start = stage, time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[self._stage].append(time.perf_counter() - self._start)
        self.memory[self._stage].append(peak_memory())

    def on_step_begin(self, args, state, control, **kwargs):
        self._begin("rollout")

    def on_step_end(self, args, state, control, **kwargs):
        self._end()
        self._stage = None


def measure(training: str, options: argparse.Namespace) -> str:
    """Trains for a warm-up update and `rounds` more; a row of Markdown."""
    name, is_lora, settings = TRAININGS[training]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = pipeline(name, options.tiny, device)
    with tempfile.TemporaryDirectory() as folder:
        args = DiffusionGRPOConfig(
            folder,
            max_steps=options.rounds + 1,
            num_generations=options.samples,
            per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.samples // options.micro_batch,
            num_inference_steps=options.steps,
            height=options.size,
            width=options.size,
            bf16=True,
            use_cpu=device == "cpu",
            gradient_checkpointing=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_completions=False,
            **settings,
        )
        lora = LoraConfig(r=32, lora_alpha=64, target_modules=LORA_LAYERS) if is_lora else None
        trainer = DiffusionGRPOTrainer(pipe, "brightness", args, tiny.prompts("train"), peft_config=lora)
        for callback in (PrinterCallback, ReportCallback):
            trainer.remove_callback(callback)
        stages = Stages(trainer.pipe.transformer)
        trainer.add_callback(stages)
        gc.collect()
        trainer.train()
    return row(trainer, name, is_lora, stages)


def row(trainer: DiffusionGRPOTrainer, name: str, is_lora: bool, stages: Stages) -> str:
    """One line: sizes as they are in this run, medians without the warm-up."""
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    weights = sum(p.numel() for p in trainer.pipe.transformer.parameters()) - is_lora * trained
    kind = f"LoRA, {trained / 1e6:.1f} M" if is_lora else "all"
    cells = [name, f"{weights / 1e6:,.1f} M", kind]
    for stage in ("rollout", "update"):
        cells += [f"{statistics.median(stages.seconds[stage][1:]):.2f} s", f"{max(stages.memory[stage]):.1f} GiB"]
    return f"| {' | '.join(cells)} |"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """What is asked for; without `--tiny` a GPU must be there.

    Args:
        words: of the command line; those of this process by default.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(TRAININGS)}; default: all, each in its own process")
    parser.add_argument("--rounds", type=int, default=3, help="timed updates after a warm-up; default: %(default)s")
    parser.add_argument("--samples", type=int, default=8, help="in an update, of one prompt; default: %(default)s")
    parser.add_argument("--micro_batch", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps; default: %(default)s")
    parser.add_argument("--size", type=int, default=512, help="pixels; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="networks of two blocks: whether it works, not how fast")
    options = parser.parse_args(words)
    unknown = set(options.names) - set(TRAININGS)
    if unknown:
        parser.error(f"no training {sorted(unknown)[0]}; there are {', '.join(TRAININGS)}.")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU here, and these networks take hours on a CPU; --tiny runs two blocks of each.")
    return options


def main() -> None:
    options = parse()
    if len(options.names) == 1:
        print(measure(options.names[0], options), flush=True)
        return
    print(
        f"{torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()}, bf16, {options.size} px"
    )
    print(
        "| model | weights | trains | rollout | its peak | update | its peak |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    for name in options.names or TRAININGS:  # a process each, so that peak memory is its own
        words = [f"--{key}={value}" for key, value in vars(options).items() if key not in ("names", "tiny")]
        words += ["--tiny"] if options.tiny else []
        subprocess.run([sys.executable, __file__, name, *words], check=True)


if __name__ == "__main__":
    main()
