"""Section c of `gpu_check.py`: what published sizes take, and what `plan` said that they take.

The whole pipeline is built on the GPU with random weights: network, VAE and text encoders at their real sizes. The
same settings are planned from the same configuration files, in another process.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_cases import NotRunError, make_trainer, write_settings
from benchmarks.quiet import LORA_LAYERS
from benchmarks.real_sizes import build_pipeline, write_model
from benchmarks.step import BareLoop, Stages

GIB = 2**30
ROUNDS = 2  # timed updates, after a warm-up and one that is recorded
USUAL = {
    "bf16": True,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "num_inference_steps": 6,
    "trained_steps": [0, 2],
    "gradient_checkpointing": True,
    "height": 512,
    "width": 512,
    "max_steps": ROUNDS + 2,
    "learning_rate": 1e-5,
}
LORA = {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_target_modules": LORA_LAYERS}
NF4 = {"quantization": {"transformer": "bitsandbytes_4bit"}}  # text encoders stay as they are
TWO = {"num_generations": 2, "per_device_train_batch_size": 2}
QWEN = {"pipeline_kwargs": {"true_cfg_scale": 4.0, "negative_prompt": " "}}
WAN = {"height": 480, "width": 832, "num_frames": 9, "guidance_scale": 5.0, "sde_type": "wan_sde"}
ONE = {"num_generations": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
UNET_LAYERS = {"lora_target_modules": LORA_LAYERS[:4]}
# the model, and the settings over `USUAL`
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sd35m-lora": ("SD3.5-M", LORA | {"guidance_scale": 4.5}),
    "sd35m-full": ("SD3.5-M", {"guidance_scale": 4.5}),
    "sdxl": ("SDXL", LORA | UNET_LAYERS | TWO | {"guidance_scale": 5.0, "height": 1024, "width": 1024}),
    "flux-bf16": ("FLUX.1-dev", LORA | TWO | {"guidance_scale": 3.5}),
    "flux-nf4": ("FLUX.1-dev", LORA | TWO | NF4 | {"guidance_scale": 3.5}),
    "qwen-nf4": ("Qwen-Image", LORA | TWO | NF4 | QWEN),
    "wan21": ("Wan2.1-1.3B", LORA | UNET_LAYERS | ONE | WAN),
}


def choose_settings(name: str, folder: Path, is_tiny: bool) -> dict[str, Any]:
    """Return the settings of a training, with the model's configuration files and prompts in a folder."""
    model, own = TRAININGS[name]
    write_model(model, folder / "model", is_tiny)
    (folder / "prompts.txt").write_text("a red cat on a sofa\na blue dog in the snow\n")
    small: dict[str, Any] = {}
    if is_tiny:
        small = {"height": 32, "width": 32, "num_inference_steps": 2, "trained_steps": [0, 1], "bf16": False, **ONE}
        small |= {"num_frames": 5} if "num_frames" in own else {}
    where = {"model": str(folder / "model"), "dataset": str(folder / "prompts.txt")}
    return USUAL | own | small | where


def measure_plan(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Plan a training; leave the bytes for [`measure_size`]."""
    from diffusion_grpo.planning.plan import plan

    folder = work / "sizes" / name
    folder.mkdir(parents=True)
    settings = choose_settings(name, folder, is_tiny)
    made = plan(str(write_settings(settings | {"use_cpu": False}, folder)), [])
    if not made.memory:
        raise ValueError(f"nothing was planned: {' '.join(made.notes)}")
    (folder / "plan.json").write_text(json.dumps({"settings": settings, "bytes": made.total.accelerator}))
    return {"plan GiB": made.total.accelerator / GIB} | ({"notes": " ".join(made.notes)} if made.notes else {})


def measure_size(name: str, work: Path, is_tiny: bool) -> dict[str, Any]:
    """Train a few updates with random weights; time them beside the bare network's calls."""
    folder = work / "sizes" / name
    planned = json.loads((folder / "plan.json").read_text())
    settings, has_gpu = planned["settings"], torch.cuda.is_available()
    if not is_tiny:
        check_room(planned["bytes"])
    is_quantized = "quantization" in settings
    if (
        is_quantized and not has_gpu
    ):  # on CPUs bitsandbytes packs the weights of eval mode so that they have no gradient
        raise NotRunError("needs a GPU")
    network = "unet" if (folder / "model" / "unet").is_dir() else "transformer"
    is_full = not settings.get("use_peft")
    dtype = {"default": torch.bfloat16 if settings["bf16"] else torch.float32} | (
        {network: torch.float32} if is_full else {}
    )
    torch.manual_seed(0)
    pipe = build_pipeline(
        Path(settings["model"]), "cuda" if has_gpu else "cpu", dtype, [network] if is_quantized else ()
    )
    # the pipeline is quantised already
    trainer = make_trainer({key: value for key, value in settings.items() if key != "quantization"}, folder, pipe)
    bare, stages = BareLoop(trainer.pipe, network), Stages(getattr(trainer.pipe, network))
    trainer.add_callback(stages)  # its end comes before the bare loop's
    trainer.add_callback(bare)
    trainer.train()
    return describe_size(trainer, bare, stages, planned["bytes"])


def check_room(planned: int) -> None:
    """Refuse what the GPU has no room for by the plan.

    Raises:
        NotRunError: there is no GPU, or it is too small.
    """
    if not torch.cuda.is_available():
        raise NotRunError("needs a GPU")
    free, whole = torch.cuda.mem_get_info()
    if planned > 1.1 * free:
        raise NotRunError(f"planned are {planned / GIB:.1f} GiB, and {free / GIB:.1f} of {whole / GIB:.1f} are free")


def describe_size(trainer: Any, bare: BareLoop, stages: Stages, planned: int) -> dict[str, Any]:
    """Return the row of a training: medians of the timed updates; memory of the updates before the bare loop."""
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    rollout, update = (statistics.median(stages.seconds[name][2:]) for name in ("rollout", "update"))
    rewards = [entry["time/reward"] for entry in trainer.state.log_history if "time/reward" in entry][2:]
    # the bare loop's own passes come after the second update
    peaks = {name: max(stages.memory[name][:2]) for name in ("rollout", "update")}
    log = [entry["ratio/max_error"] for entry in trainer.state.log_history if "ratio/max_error" in entry]
    return {
        "trained": f"{trained / 1e6:,.1f} M",
        "rollout s": rollout,
        "update s": update,
        "bare s": statistics.median(bare.bare),
        "overhead": (rollout - statistics.median(rewards) + update) / statistics.median(bare.bare),
        "rollout GiB": peaks["rollout"],
        "update GiB": peaks["update"],
        "plan GiB": planned / GIB,
        "of the plan": max(peaks.values()) / (planned / GIB),
        "max error": max(log),
    }
