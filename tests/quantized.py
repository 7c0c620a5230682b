"""A tiny pipeline on disk, and runs that load it with quantised networks."""

from pathlib import Path

import rank_runs
import tiny_pipelines
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_runs import LORA, PROMPTS, SETTINGS, brightness

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.weights import quantization

INT8 = {"transformer": "torchao", "text_encoder_3": {"backend": "torchao", "quant_type": "Int8WeightOnlyConfig"}}
SIZE = {"height": 16, "width": 16, "pipeline_kwargs": {"max_sequence_length": 16}}


def save_pipeline(folder: Path) -> Path:
    """Write the tiny SD3 pipeline once."""
    if not folder.exists():
        tiny_pipelines.build("sd3", 0)[0].save_pretrained(folder)
    return folder


def trainer_of(model, output_dir, lora: bool = True, rewards=brightness, callbacks=None, **settings):
    """A trainer of a folder or a pipeline, of a LoRA by default."""
    args = DiffusionGRPOConfig(str(output_dir), **SETTINGS | SIZE | settings)
    return DiffusionGRPOTrainer(
        model=model if not isinstance(model, Path) else str(model),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        peft_config=LoraConfig(**LORA) if lora else None,
        callbacks=callbacks,
    )


def call_network(network, dtype=torch.float32):
    """What the transformer says to fixed inputs."""
    torch.manual_seed(0)
    config = network.config
    inputs = {
        "hidden_states": torch.randn(1, config.in_channels, 8, 8),
        "encoder_hidden_states": torch.randn(1, 5, config.joint_attention_dim),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim),
        "timestep": torch.tensor([500.0]),
    }
    with torch.no_grad():
        return network(**{name: value.to(dtype) for name, value in inputs.items()}).sample


def train_on_bitsandbytes(*args) -> None:
    """`rank_runs.train` on a base that bitsandbytes quantises with its CPU kernels."""
    allow_bitsandbytes_on_a_cpu(setattr)
    rank_runs.train(*args)


def allow_bitsandbytes_on_a_cpu(replace) -> None:
    """Let diffusers use bitsandbytes' CPU kernels, of which it does not know; `replace` is a kind of `setattr`."""
    import bitsandbytes
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    for cls in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
        replace(cls, "validate_environment", lambda *args, **kwargs: None)
        replace(cls, "update_device_map", lambda self, device_map: device_map or {"": "cpu"})
    replace(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)  # whose packing wants wider layers
    replace(quantization, "check_gpu", lambda name, spec: None)
