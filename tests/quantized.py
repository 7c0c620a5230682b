"""A tiny pipeline on disk, and runs that load it with quantised networks."""

import json
import os
from pathlib import Path

import tiny_pipelines
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from tiny_runs import LORA, PROMPTS, SETTINGS, SMOOTH, brightness, trained_weights
from zero_run import deepspeed_config, use_deepspeed_on_a_cpu

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


def train(folder: Path, base: Path, settings: dict, backend: str = "torchao") -> None:
    """Train as each of several processes does; process 0 writes what it logged and the weights.

    `gradient_accumulation_steps` is given for one process. `backend` quantises the transformer: torchao's int8, or
    bitsandbytes with its CPU kernels.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    settings = settings | {"gradient_accumulation_steps": settings["gradient_accumulation_steps"] // processes}
    settings |= {"quantization": {"transformer": backend}, "reward_weights": SMOOTH["reward_weights"]}
    if settings.pop("fsdp2", False):
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    if "deepspeed" in settings:
        use_deepspeed_on_a_cpu()
    if backend.startswith("bitsandbytes"):
        allow_bitsandbytes_on_a_cpu(setattr)
    trainer = trainer_of(base, folder, rewards=SMOOTH["rewards"], **settings)
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        report = {"wrapper": type(trainer.model_wrapped).__name__, "log": trainer.state.log_history}
        (folder / "result.json").write_text(json.dumps(report))
    with trainer.learner.weights.show_whole(is_kept=trainer.is_world_process_zero()):
        if trainer.is_world_process_zero():
            save_file(trained_weights(trainer), folder / "weights.safetensors")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def allow_bitsandbytes_on_a_cpu(replace) -> None:
    """Let diffusers use bitsandbytes' CPU kernels, of which it does not know; `replace` is a kind of `setattr`."""
    import bitsandbytes
    from diffusers.quantizers.bitsandbytes import bnb_quantizer

    for cls in (bnb_quantizer.BnB4BitDiffusersQuantizer, bnb_quantizer.BnB8BitDiffusersQuantizer):
        replace(cls, "validate_environment", lambda *args, **kwargs: None)
        replace(cls, "update_device_map", lambda self, device_map: device_map or {"": "cpu"})
    replace(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)  # whose packing wants wider layers
    replace(quantization, "check_gpu", lambda name, spec: None)


def engine_settings(mode: str) -> dict:
    """Settings of `train` for zero1, zero2, zero3 or fsdp2."""
    return {"fsdp2": True} if mode == "fsdp2" else {"deepspeed": deepspeed_config(int(mode[-1]))}
