"""
Host memory of each process until training begins, of a network with random weights: `python benchmarks/loading.py`.

Saves an SD3 transformer of about the given number of weights in bfloat16, as most are published, and starts all its
weights' training in float32 masters (`bf16`): the dtype has to be converted. Each process samples its own memory from
`/proc` (Linux) while it loads, shards and makes a reference, and prints nothing of training itself. `early` loads the
network whole in every process, as DDP does; `late` leaves it in its file until it is sharded.

Two numbers, over what a process had before it loaded anything: private memory, which no other process shares and
nobody can take away, and the proportional share of all (PSS), which counts pages of the file that the processes of a
machine share, and which the system may drop.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, SD3Transformer2DModel
from peft import LoraConfig
from quiet import LORA_LAYERS, QUIET
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny
from diffusion_grpo.distributed import late_weights

PARTS = {"stage": 3, "reduce_bucket_size": 1_000_000}
OPEN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
ZERO3 = {"zero_optimization": PARTS, "bf16": {"enabled": "auto"}, **dict.fromkeys(OPEN, "auto")}
MODES = {
    "zero3": ({"deepspeed": ZERO3}, {"DS_ACCELERATOR": "cpu"}),
    "fsdp2": ({}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
}
WIDTH = 24 * 64


def memory() -> tuple[float, float]:
    """Return this process's private memory and its proportional share, in MB."""
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    sizes = {line[0]: int(line[1]) / 1000 for line in lines}
    return sizes["Anonymous:"], sizes["Pss:"]


class Peak(threading.Thread):
    """The most memory since it was started, sampled every 20 ms."""

    def __init__(self):
        super().__init__(daemon=True)
        self.first, self.found, self.is_over = memory(), memory(), False
        self.start()

    def run(self):
        while not self.is_over:
            self.found = tuple(max(pair) for pair in zip(self.found, memory(), strict=True))
            time.sleep(0.02)

    def stop(self) -> list[float]:
        """Return the growth of both numbers, in MB."""
        self.is_over = True
        self.join()
        return [last - first for last, first in zip(self.found, self.first, strict=True)]


class Stop(TrainerCallback):
    """Writes down the peak when training begins, and ends the process."""

    def __init__(self, peak: Peak, path: Path):
        self.peak, self.path = peak, path

    def on_train_begin(self, args, state, control, **kwargs):
        self.path.write_text(json.dumps(self.peak.stop()))
        torch.distributed.barrier()
        os._exit(0)


def save_model(folder: Path, weights: float) -> None:
    """Save the embedded pipeline with a larger transformer of about so many random weights."""
    pipe = DiffusionPipeline.from_pretrained(tiny.PATH)
    config = {**pipe.transformer.config, "num_attention_heads": WIDTH // 64, "attention_head_dim": 64}
    config |= {"caption_projection_dim": WIDTH, "num_layers": max(1, round(weights / 36 / WIDTH**2))}
    pipe.transformer = SD3Transformer2DModel.from_config(config).to(torch.bfloat16)
    print(f"{sum(p.numel() for p in pipe.transformer.parameters()) / 1e6:.0f} M weights", file=sys.stderr)
    pipe.save_pretrained(folder, max_shard_size="200MB")


def work(model: Path, folder: Path, mode: str, is_late: bool, is_lora: bool) -> None:
    """Load, shard and stop; with a reference beside all weights."""
    args = DiffusionGRPOConfig(
        str(folder / "run"),
        max_steps=1,
        bf16=True,
        beta=0.1,
        num_generations=2,
        per_device_train_batch_size=2,
        pipeline_kwargs={"max_sequence_length": 1},
        use_cpu=True,
        **QUIET,
        **MODES[mode][0],
    )
    if not is_late:
        late_weights.read_late, late_weights.hold = contextlib.nullcontext, torch.nn.Module.to
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS) if is_lora else None
    peak = Peak()
    trainer = DiffusionGRPOTrainer(str(model), "brightness", args, tiny.prompts("train"), peft_config=lora)
    trainer.add_callback(Stop(peak, folder / f"peak-{os.environ['RANK']}.json"))
    trainer.train()


def measure(model: Path, mode: str, processes: int, *flags: str) -> list[list[float]]:
    """Return each process's private memory and its share of all, in MB."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        words = [__file__, "--worker", folder, "--model", str(model), "--mode", mode, *flags]
        path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | MODES[mode][1]
        subprocess.run([sys.executable, *launcher, *words], check=True, env=environment, stdout=subprocess.DEVNULL)
        return [json.loads((Path(folder) / f"peak-{rank}.json").read_text()) for rank in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=300e6, help="of the network, about")
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--lora", action="store_true", help="train a LoRA instead of all weights")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    for hidden in ("--worker", "--model", "--mode"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--late", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(Path(given.model), Path(given.worker), given.mode, given.late, given.lora)
        return
    print("| mode | processes | loaded | private, each | private, together | with shared pages, together |")
    print("|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as model:
        save_model(Path(model), given.weights)
        for mode in given.modes:
            for processes in given.processes:
                for way in ("early", "late"):
                    flags = (["--late"] if way == "late" else []) + (["--lora"] if given.lora else [])
                    found = measure(Path(model), mode, processes, *flags)
                    private, shares = zip(*found, strict=True)
                    each = ", ".join(f"{size / 1000:.2f}" for size in private)
                    sums = f"{sum(private) / 1000:.2f} GB | {sum(shares) / 1000:.2f} GB"
                    print(f"| {mode} | {processes} | {way} | {each} GB | {sums} |", flush=True)


if __name__ == "__main__":
    main()
