"""
Two processes beside one on the same global batch, ZeRO-3 and FSDP2 beside DDP: `make bench-distributed`.

Trains the embedded model, as a LoRA and in full, and prints a table: seconds of rollout and update, their ratio to one
process and to DDP, and the share of an update in which a collective is under way. Each process computes with one
thread, so that two have twice the cores of one. Times are medians over updates without the profiler, after one that
warms up. The share is measured in one more update under torch's profiler; it includes waiting for the other process
and what is computed meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from quiet import LORA_LAYERS, QUIET, silence
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny

PARTS = {"stage": 3, "stage3_param_persistence_threshold": 1000, "reduce_bucket_size": "auto"}
OPEN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
ZERO3 = {"zero_optimization": PARTS, **dict.fromkeys(OPEN, "auto")}
# processes, settings, environment
MODES = {
    "one process": (1, {}, {}),
    "DDP": (2, {}, {}),
    "ZeRO-3": (2, {"deepspeed": ZERO3}, {"DS_ACCELERATOR": "cpu"}),
    "FSDP2": (2, {}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
}
MICRO_BATCH, GROUP = 4, 8


class Times(TrainerCallback):
    """Seconds of each update with its rollout, and of the last one how long a collective was under way.

    Args:
        last: number of the update that is profiled.
    """

    def __init__(self, last: int):
        self.last, self.seconds, self.share = last, [], 0.0
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.last:
            self.profile.start()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        elapsed = time.perf_counter() - self._start
        if state.global_step < self.last:
            self.seconds.append(elapsed)
            return
        self.profile.stop()
        spans = [event.time_range for event in self.profile.events() if event.name.startswith("gloo:")]
        self.share = covered([(span.start, span.end) for span in spans]) / 1e6 / elapsed


def covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals: what lies in several counts once."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def work(folder: Path, mode: str, is_lora: bool, samples: int, rounds: int) -> None:
    """Train on each process: `rounds` timed updates of `samples` samples, counted over all processes."""
    processes, settings, _ = MODES[mode]
    args = DiffusionGRPOConfig(
        str(folder),
        max_steps=rounds + 2,
        learning_rate=1e-5,
        num_generations=GROUP,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=samples // (MICRO_BATCH * processes),
        num_inference_steps=8,
        trained_steps=[0, 4],
        guidance_scale=1.0,
        height=32,
        width=96,
        pipeline_kwargs={"max_sequence_length": 1},
        use_cpu=True,
        **QUIET,
        **settings,
    )
    lora = LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS) if is_lora else None
    trainer = DiffusionGRPOTrainer("tiny", "brightness", args, tiny.prompts("train"), peft_config=lora)
    silence(trainer)
    times = Times(rounds + 2)
    trainer.add_callback(times)
    trainer.train()
    if trainer.is_world_process_zero():
        entries = [entry for entry in trainer.state.log_history if "time/rollout" in entry][1:-1]
        found = {name: statistics.median(entry[f"time/{name}"] for entry in entries) for name in ("rollout", "update")}
        found |= {"step": statistics.median(times.seconds[1:]), "share": times.share}
        found["wrapper"] = type(trainer.model_wrapped).__name__
        (folder / "times.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def measured(mode: str, is_lora: bool, samples: int, rounds: int) -> dict:
    """Starts the processes of a mode and returns what the first of them measured.

    Returns:
        seconds by `rollout`, `update` and `step`, both with all else; `share` of a step; `wrapper`, the model's class.
    """
    processes, _, more = MODES[mode]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        words = [__file__, "--worker", folder, "--mode", mode, "--samples", str(samples), "--rounds", str(rounds)]
        words += ["--lora"] if is_lora else []
        path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more
        command = [sys.executable, *(launcher if processes > 1 else []), *words]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "times.json").read_text())


def row(trains: str, mode: str, found: dict[str, dict]) -> str:
    """Markdown of one mode; all are compared to one process, the engines that divide weights to DDP too."""
    own = found[mode]
    to_one = own["step"] / found["one process"]["step"]
    to_ddp = own["step"] / found["DDP"]["step"] if mode in ("ZeRO-3", "FSDP2") else None
    cells = [f"{own[name]:.2f} s" for name in ("rollout", "update", "step")]
    cells += [f"{to_one:.2f}", "" if to_ddp is None else f"{to_ddp:.2f}"]
    cells.append("" if mode == "one process" else f"{own['share']:.0%}")
    return f"| {trains} | {mode} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32, help="in an update, of all processes; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="timed updates; default: %(default)s")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--lora", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.samples % GROUP or options.samples % (2 * MICRO_BATCH):
        parser.error(f"--samples {options.samples} is no multiple of {GROUP}, the samples of a prompt.")
    if options.worker:
        work(options.worker, options.mode, options.lora, options.samples, options.rounds)
        return
    print("| trained | mode | rollout | update | both | ratio to one process | ratio to DDP | in collectives |")
    print("|---|---|---|---|---|---|---|---|")
    for is_lora, trains in ((True, "LoRA"), (False, "all weights")):
        found: dict[str, dict] = {}
        for mode in MODES:
            found[mode] = measured(mode, is_lora, options.samples, options.rounds)
            print(row(trains, mode, found), flush=True)


if __name__ == "__main__":
    main()
