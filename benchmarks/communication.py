"""
What processes send each other in one update: counted in a run on two processes, by formula for hundreds.

`python benchmarks/communication.py` prints what docs/distributed.md sums up. `--count ddp` trains the embedded model
on two CPU processes and counts the bytes that each hands to each collective in its second update, rollout included, as
torch's profiler records them. tests/distributed/test_communication.py compares DDP's formula with that count.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from peft import LoraConfig, get_peft_model
from quiet import LORA_LAYERS, QUIET
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny
from diffusion_grpo.rollout.score import SIDE

MACHINE = 8  # GPUs
WITHIN, BETWEEN = 300e9, 40e9  # bytes a second that one GPU sends: NVLink within a machine, 400 Gb/s between machines
# bytes of a number, by name as torch's profiler has it
WIDTHS = {"float": 4, "int": 4, "long int": 8, "unsigned char": 1}
FLOPS = 400e12  # a second, of a GPU in bf16: what large matrix products reach of an H100's 989e12
THUMBNAIL = 3 * SIDE**2


@dataclass
class Update:
    """One update and its share of a rollout, from the view of one process.

    Attributes:
        weights: number of the network's.
        trained: of them, or of a LoRA beside them.
        micro_batches: in an update.
        rollout_calls: forward passes of the network in the rollout that belongs to the update.
        trained_passes: forward and backward passes in the update: micro-batches x trained steps x calls a step.
        samples: of all processes, in the rollout.
        rewards: functions.
        width: bytes of a weight in a forward pass: 2 in bf16.
    """

    weights: int
    trained: int
    micro_batches: int
    rollout_calls: int
    trained_passes: int
    samples: int
    rewards: int = 1
    width: int = 2


def reward_bytes(update: Update) -> int:
    """Rewards of all samples, float32, that each process ends up with: the group's size does not matter further."""
    return 4 * update.samples * update.rewards


def gather_bytes(update: Update, numbers: int = THUMBNAIL) -> int:
    """Return what all processes hand to gathers in a rollout: rewards, and an int64 and a uint8 thumbnail per sample.

    Args:
        numbers: of a thumbnail, by which `diversity` compares samples: 32 x 32 x 3, of a video four times as many.
    """
    return reward_bytes(update) + (8 + numbers) * update.samples


def ddp(update: Update, processes: int) -> dict[str, float]:
    """Bytes that one process sends: a ring all-reduce of float32 gradients once an update."""
    return {"gradients": 2 * (processes - 1) / processes * 4 * update.trained, "weights": 0.0}


def zero2(update: Update, processes: int) -> dict[str, float]:
    """Gradients are reduced to their owners after each micro-batch, and the new weights gathered once an update."""
    share = (processes - 1) / processes
    return {
        "gradients": share * update.width * update.trained * update.micro_batches,
        "weights": share * update.width * update.trained,
    }


def zero3(update: Update, processes: int, gathers_once: bool = True) -> dict[str, float]:
    """Count ZeRO-3: weights are gathered for each pass, forward and backward; in the rollout once or for each call."""
    share, whole = (processes - 1) / processes, update.width * (update.weights + update.trained)
    rollout = 1 if gathers_once else update.rollout_calls
    return {
        "gradients": share * update.width * update.trained * update.micro_batches,
        "weights": share * whole * (2 * update.trained_passes + rollout),
    }


MODES = {"DDP": ddp, "ZeRO-2": zero2, "ZeRO-3, FSDP2": zero3}

# the network's class and what differs from its defaults, tokens of a sample, calls a step, networks
MODELS = {
    "SD3.5-M": (
        "SD3Transformer2DModel",
        dict(num_layers=24, num_attention_heads=24, attention_head_dim=64, caption_projection_dim=1536)
        | dict(joint_attention_dim=4096, pos_embed_max_size=384, qk_norm="rms_norm")
        | dict(dual_attention_layers=tuple(range(13))),
        1024 + 333,
        2,
        1,
    ),
    "FLUX.1-dev": ("FluxTransformer2DModel", dict(guidance_embeds=True), 1024 + 512, 1, 1),
    "Wan2.2-A14B": ("WanTransformer3DModel", {}, 13 * 30 * 52, 2, 2),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", {}, 14 * 30 * 53 + 256, 1, 1),
}


@functools.cache
def sizes(name: str, rank: int = 32) -> tuple[int, int]:
    """Weights of a network and of a LoRA on its attention, counted on the meta device."""
    cls, config, _, _, networks = MODELS[name]
    with torch.device("meta"):
        network = getattr(diffusers, cls)(**config)
        weights = sum(p.numel() for p in network.parameters())
        model = get_peft_model(network, LoraConfig(r=rank, target_modules=LORA_LAYERS))
    return networks * weights, networks * sum(p.numel() for p in model.parameters() if p.requires_grad)


def update_of(name: str, is_lora: bool, processes: int) -> tuple[Update, float]:
    """8 samples a process, one a micro-batch, 9 of 10 steps trained; and the seconds of arithmetic.

    A forward pass is 2 operations a weight and token (attention's own are left out), a backward pass twice that, of a
    LoRA once; gradient checkpointing adds a forward pass.
    """
    _, _, tokens, calls, networks = MODELS[name]
    weights, lora = sizes(name)
    passes, rollout = 8 * 9, 8 * 10
    # one of two experts is gathered at a time
    gathered = (rollout * calls // networks, passes * calls // networks)
    update = Update(weights, lora if is_lora else weights, 8, *gathered, 8 * processes)
    forward = 2 * weights / networks * tokens * calls  # one of two experts works at a time
    return update, forward * (rollout + passes * (3 if is_lora else 4)) / FLOPS


def seconds(sent: float, processes: int) -> float:
    """Of sending that many bytes; a ring over several machines is as fast as the link between them."""
    return sent / (WITHIN if processes <= MACHINE else BETWEEN)


def print_tables() -> None:
    """Print the tables that docs/distributed.md sums up."""
    print("| model | trained | processes | mode | gradients sent | weights sent | seconds | of the arithmetic |")
    print("|---|---|---|---|---|---|---|---|")
    for name in MODELS:
        for is_lora in (True, False):
            for processes in (8, 64, 512):
                update, arithmetic = update_of(name, is_lora, processes)
                for mode, formula in MODES.items():
                    sent = formula(update, processes)
                    took = seconds(sum(sent.values()), processes)
                    kind = f"LoRA, {update.trained / 1e6:.0f} M" if is_lora else f"all, {update.weights / 1e9:.1f} B"
                    sent = " | ".join(f"{sent[part] / 1e9:.2f} GB" for part in ("gradients", "weights"))
                    share = f"{100 * took / arithmetic:.1f} %"
                    print(f"| {name} | {kind} | {processes} | {mode} | {sent} | {took:.2f} | {share} |")


class CountedUpdate(TrainerCallback):
    """Profiles one update, and adds up what this process hands to each collective.

    Args:
        number: of the update.
    """

    def __init__(self, number: int):
        self.number, self.bytes = number, Counter()
        self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.number:
            self.profile.start()

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step != self.number:
            return
        self.profile.stop()
        for event in self.profile.events():
            if event.name.startswith("gloo:"):
                parts = zip(event.input_shapes, event.input_dtypes, strict=True)
                handed = sum(torch.Size(shape).numel() * WIDTHS[dtype] for shape, dtype in parts if shape)
                self.bytes[event.name.removeprefix("gloo:")] += handed


def count(folder: Path, is_lora: bool) -> None:
    """One process of the counted run; writes the bytes by collective, and what the formula needs."""
    args = DiffusionGRPOConfig(
        str(folder),
        max_steps=2,
        learning_rate=1e-4,
        num_generations=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_inference_steps=3,
        guidance_scale=1.0,
        height=32,
        width=32,
        pipeline_kwargs={"max_sequence_length": 1},
        logging_strategy="no",
        use_cpu=True,
        **QUIET,
    )
    lora = LoraConfig(r=4, target_modules=LORA_LAYERS) if is_lora else None
    trainer = DiffusionGRPOTrainer("tiny", ["brightness", "sharpness"], args, tiny.prompts("train"), peft_config=lora)
    counted = CountedUpdate(2)
    trainer.add_callback(counted)
    trainer.train()
    if trainer.is_world_process_zero():
        trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        found = {
            "bytes": counted.bytes,
            "trained": trained,
            "samples": 2 * args.batch_sizes.rollout_share,
            "rewards": 2,
        }
        (folder / "counted.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def counted_run(is_lora: bool) -> dict:
    """Two processes on this machine; what the first of them handed to each collective in its second update."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "--worker", folder]
        words += ["--lora"] if is_lora else []
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
        subprocess.run([sys.executable, *words], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "counted.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", choices=["ddp"], help="count in a run of two processes on this machine")
    parser.add_argument("--lora", action="store_true", help="of a LoRA, not of all weights")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        count(arguments.worker, arguments.lora)
    elif arguments.count:
        print(json.dumps(counted_run(arguments.lora), indent=2))
    else:
        print_tables()


if __name__ == "__main__":
    main()
