"""One case of `gpu_check.py` in its own process: `python benchmarks/gpu_cases.py a/bf16 --values FILE --work DIR`.

Each case trains as a user would: settings as in a YAML file, a trainer, `train()`; what it found is written as JSON.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import re
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from quiet import LORA_LAYERS, QUIET, silence

# over the settings of every case
USUAL = {
    "reward_funcs": ["brightness"],
    "gradient_accumulation_steps": 1,
    "max_ratio_error": 1e9,  # it is measured here, and does not stop the run
    **QUIET,
}
LORA = {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": LORA_LAYERS}
RATIO = {
    "dataset": "tiny",
    "num_generations": 16,
    "per_device_train_batch_size": 16,
    "num_inference_steps": 6,
    "trained_steps": [0, 3],
    "height": 256,
    "width": 256,
    "guidance_scale": 4.5,
    "pipeline_kwargs": {"max_sequence_length": 32},
    "max_steps": 2,
    "learning_rate": 1e-3,
}
SMALL_RATIO = {
    "num_inference_steps": 2,
    "trained_steps": [0, 1],
    "height": 32,
    "width": 32,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "guidance_scale": 1.0,
    "pipeline_kwargs": {"max_sequence_length": 1},
}
# of section a, by what stands in the case's name beside the precision
VARIANTS: dict[str, dict[str, Any]] = {
    "compile": {"torch_compile": True},
    "nf4": {"load_in_4bit": True},
    "int8": {"load_in_8bit": True},
    "torchao-int8": {"quantization": {"transformer": "torchao"}},
    "rollout-1": {"rollout_batch_size": 1},
    "checkpointing": {"gradient_checkpointing": True},
    "offload-frozen": {"offload_frozen": "cpu"},
    "group-offload": {"group_offload": "block_level", "group_offload_stream": True, "gradient_checkpointing": True},
    "leaf-offload": {"group_offload": "leaf_level", "group_offload_stream": True, "gradient_checkpointing": True},
    "tf32": {"tf32": True},
    "adamw-8bit": {"optim": "adamw_bnb_8bit"},
    "nft": {"loss_type": "nft", "trained_steps": None},
    "nft-compile": {"loss_type": "nft", "trained_steps": None, "torch_compile": True},
}
ATTENTION = {  # torch's back ends of scaled_dot_product_attention
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    "sdpa-cudnn": "CUDNN_ATTENTION",
    "sdpa-math": "MATH",
}
NEEDS_GPU = (
    "nf4 int8 nf4-compile float32-tf32 fp16 fp16-compile bf16-sdpa-cudnn bf16-sdpa-efficient bf16-adamw-8bit"
).split()


class NotRunError(Exception):
    """The case cannot run on this machine, which is no failure."""


def split_name(name: str) -> tuple[dict[str, Any], str | None]:
    """Return the settings of a case of section a, and the attention back end that it is about, or None."""
    first = name.split("-")[0]
    precision = first if first in ("bf16", "fp16", "float32") else "bf16"
    rest = name.removeprefix(precision).strip("-")
    settings: dict[str, Any] = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
    if rest in ATTENTION:
        return settings, ATTENTION[rest]
    for part in [rest] if rest in VARIANTS or not rest else rest.split("-", 1):
        settings |= VARIANTS[part] if part else {}
    return settings, None


def train(settings: dict[str, Any], work: Path, model: Any = None, callbacks: tuple = ()) -> Any:
    """Train as `diffusion-grpo train` does with a file of these settings.

    Args:
        settings: as in YAML, over `USUAL`.
        work: for files.
        model: a pipeline in place of the one that the settings name.
        callbacks: for the trainer.

    Returns:
        the trainer, after `train()`.
    """
    trainer = make_trainer(settings, work, model)
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    return trainer


def make_trainer(settings: dict[str, Any], work: Path, model: Any = None) -> Any:
    """Make the trainer of these settings; see [`train`]."""
    from diffusion_grpo import DiffusionGRPOTrainer
    from diffusion_grpo.config.parse import parse_train_arguments
    from diffusion_grpo.data.prompts import load_prompts
    from diffusion_grpo.quiet import hide_loading_bars

    script, lora, args = parse_train_arguments(str(write_settings(settings, work)), [])
    hide_loading_bars(script.model)
    held_out = None
    if script.eval_dataset is not None:
        held_out = load_prompts(script.eval_dataset, script.dataset_test_split)
        held_out = held_out.select(range(script.eval_max_prompts))
    train_prompts = load_prompts(script.dataset, script.dataset_train_split)
    trainer = DiffusionGRPOTrainer(
        model or script.model, script.reward_funcs, args, train_prompts, held_out, lora.peft_config()
    )
    silence(trainer)
    return trainer


def write_settings(settings: dict[str, Any], work: Path) -> Path:
    """Write a YAML file into a new folder of `work`, where the run's output goes too."""
    import torch
    import yaml

    folder = Path(tempfile.mkdtemp(dir=work))
    own = {"output_dir": str(folder / "run"), "use_cpu": not torch.cuda.is_available()}
    (folder / "config.yaml").write_text(yaml.safe_dump(USUAL | own | settings))
    return folder / "config.yaml"


def collect_ratio(trainer: Any) -> dict[str, Any]:
    """Return what the log says of the ratios, or of predictions on re-noised samples: the worst over the updates."""
    key = "ratio/max_error" if trainer.args.loss_type == "grpo" else "prediction/max_error"
    log = [entry for entry in trainer.state.log_history if key in entry]
    return {
        "max error": max(entry[key] for entry in log),
        **({"mean": log[-1]["ratio/mean"]} if "ratio/mean" in log[-1] else {}),
        "gradient": log[-1]["grad_norm"],
        "reward": log[-1]["reward"],
    }


# Sections


def write_ratio_model(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Save the model of sections a and b: 111 M random weights in SD3's classes, or the embedded model if tiny."""
    import torch
    from diffusers import DiffusionPipeline

    from benchmarks.step import medium_pipeline
    from diffusion_grpo import tiny

    pipe = DiffusionPipeline.from_pretrained(tiny.PATH) if is_tiny else medium_pipeline()
    pipe.save_pretrained(work / "model")
    weights = sum(p.numel() for p in pipe.transformer.parameters())
    return {"weights": f"{weights / 1e6:.1f} M", "GPU": torch.cuda.is_available()}


def measure_ratio(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Train two updates in one precision and variant."""
    import torch

    if name in NEEDS_GPU and not torch.cuda.is_available():
        raise NotRunError("needs a GPU")
    settings, attention = split_name(name)
    model = {"model": str(work / "model")}
    with contextlib.nullcontext() if attention is None else use_attention(attention):
        trainer = train(LORA | RATIO | (SMALL_RATIO if is_tiny else {}) | model | settings, work)
    found = collect_ratio(trainer)
    if torch.cuda.is_available():
        found["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return found


@contextlib.contextmanager
def use_attention(name: str) -> Iterator[None]:
    """Have the trained network use one of torch's attention kernels, also where blocks are computed again.

    Text encoders choose their own: T5 has a mask and sizes that most kernels refuse.
    """
    from diffusers.models.attention_processor import JointAttnProcessor2_0
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = JointAttnProcessor2_0.__call__

    @functools.wraps(call)
    def call_with_kernel(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return call(*args, **kwargs)

    JointAttnProcessor2_0.__call__ = call_with_kernel
    try:
        yield
    finally:
        JointAttnProcessor2_0.__call__ = call


def measure_mode(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Train one update by one mode, in the environment that a launcher gives to the only process of a group."""
    mode, trains = name.rsplit(" ", 1)
    settings = RATIO | (SMALL_RATIO if is_tiny else {}) | {"model": str(work / "model"), "max_steps": 1, "bf16": False}
    settings |= LORA | {"learning_rate": 1e-3} if trains == "lora" else {"learning_rate": 1e-5}
    samples = settings["num_generations"] // 2
    settings |= {"per_device_train_batch_size": samples, "gradient_accumulation_steps": 2}
    if mode != "one process":
        enter_group(mode)
    if mode.startswith("ZeRO"):
        if importlib.util.find_spec("deepspeed") is None:
            raise NotRunError("DeepSpeed is not installed")
        settings["deepspeed"] = deepspeed_settings(int(mode[-1]))
    trainer = train(settings, work)
    return describe_mode(trainer, work / f"{trains}.safetensors", mode == "one process")


def enter_group(mode: str) -> None:
    """Set the environment of a launcher's only process, by which accelerate makes a process group, over NCCL on a GPU.

    Without these variables accelerate sees one plain process, whatever is asked for.
    """
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    if not torch.cuda.is_available() and mode.startswith("ZeRO"):
        os.environ["DS_ACCELERATOR"] = "cpu"
    if mode == "FSDP2":  # as accelerate launch sets them for accelerate_configs/fsdp2.yaml
        os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT")
        os.environ.update(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_RESHARD_AFTER_FORWARD="true")


def deepspeed_settings(stage: int) -> dict[str, Any]:
    """Return a usual configuration, with a threshold low enough to shard small layers too."""
    zero = {"stage": stage, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 1000}
    names = "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping"
    return {"zero_optimization": zero, "bf16": {"enabled": "auto"}, **dict.fromkeys(names.split(), "auto")}


def describe_mode(trainer: Any, file: Path, is_plain: bool) -> dict[str, Any]:
    """Return how an update was made, and how far its weights are from those of the plain process.

    Args:
        trainer: after one update.
        file: the plain process's weights; written by that process.
        is_plain: whether this is it.
    """
    import torch
    from safetensors.torch import load_file, save_file

    with trainer.learner.weights.show_whole():
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        weights = {name: p.detach().float().cpu().contiguous().clone() for name, p in named}
    found = {"engine": type(trainer.model_wrapped).__name__}
    if torch.distributed.is_initialized():
        found["group"] = f"{torch.distributed.get_backend()}, {torch.distributed.get_world_size()}"
        torch.distributed.destroy_process_group()
    found |= collect_ratio(trainer)
    if is_plain:
        save_file(weights, file)
        return found
    plain = load_file(file)
    if plain.keys() != weights.keys():
        raise ValueError(f"{len(weights)} trained weights have other names than the {len(plain)} of the plain process")
    return found | {"largest difference": max((weights[key] - plain[key]).abs().max().item() for key in plain)}


def measure_demo(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Train `examples/demo.yaml` for 50 updates, without Tesseract, which needs a library of its own."""
    from diffusion_grpo.config.parse import read_yaml

    settings = read_yaml("examples/demo.yaml")
    for key in ("output_dir", "eval_reward_funcs", "baseline_guidance_scales", "report_experiment"):
        settings.pop(key)
    settings |= {"max_steps": 50, "eval_steps": 50, "eval_max_prompts": 48, "per_device_eval_batch_size": 48}
    if importlib.util.find_spec("rapidocr") is None:
        settings |= {"reward_funcs": ["color"], "reward_weights": [1.0]}
    if is_tiny:
        settings |= {"max_steps": 1, "eval_steps": 1, "eval_max_prompts": 2, "num_generations": 2}
        settings |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        settings |= {"num_inference_steps": 3, "trained_steps": [0, 2]}
    trainer = train(settings, work)
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    names = [key for key in evaluated[0] if key == "eval_reward" or re.fullmatch("eval_rewards/.*/mean", key)]
    found = {"updates": settings["max_steps"]}
    for key in names:
        found[key.removeprefix("eval_")] = f"{evaluated[0][key]:.3f} to {evaluated[-1][key]:.3f}"
    log = [entry for entry in trainer.state.log_history if "time/rollout" in entry]
    for stage in ("rollout", "reward", "update"):  # of an update on average, as two share a rollout
        found[f"{stage} s"] = statistics.mean(entry[f"time/{stage}"] for entry in log)
    return found | {"max error": collect_ratio(trainer)["max error"]}


def run(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Run a case by its name; return what it found, by column."""
    section, own = name.split("/", 1)
    if section == "c":
        from benchmarks.gpu_sizes import measure_plan, measure_size

        if own.startswith("plan "):
            return measure_plan(own.removeprefix("plan "), work, is_tiny)
        return measure_size(own, work, is_tiny)
    functions = {"a": measure_ratio, "b": measure_mode, "d": measure_demo}
    return (write_ratio_model if own == "model" else functions[section])(own, work, is_tiny)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--values", type=Path, required=True, help="file for what was found, as JSON")
    parser.add_argument("--work", type=Path, required=True, help="folder that the cases share")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    try:
        found = run(options.case, options.work, options.tiny)
    except NotRunError as reason:
        found = {"not run": str(reason)}
    except ImportError as error:
        if "needs the package" not in str(error):  # of a quantisation that `make setup` does not install
            raise
        found = {"not run": str(error)}
    options.values.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
