"""
Seconds of one full GRPO step beside the bare network, and peak memory: `make bench`.

The second update of a real run records every call of a network (policy, decoder, text encoders) with its arguments;
the first also asks what the pipeline can do. After each further update the same calls are made bare, in a loop, with
autocast and a backward pass where the trainer made them so: both sides see the same shapes, the same precision and the
same load of the machine. The overhead is (rollout + update) / bare, median over the rounds; the reward is timed by
itself, since no network of ours works in it. Both sides are also measured in seconds of the processor, which other
work on the machine moves less: `OMP_NUM_THREADS=1` gives the steadiest numbers.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig
from quiet import LORA_LAYERS, QUIET, silence
from torch import nn
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny
from diffusion_grpo.quiet import hide_loading_bars

STAGES = ("rollout", "reward", "update")
Call = tuple[Callable, tuple, dict, bool, torch.dtype | None]  # with a backward pass or not, and autocast's dtype


class BareLoop(TrainerCallback):
    """Times updates, and after each the same network calls without pipeline, scheduler, loss and optimizer.

    Args:
        pipe: the trained pipeline; its networks' calls are recorded in the second update.
        network: name of the trained one.
    """

    def __init__(self, pipe: DiffusionPipeline, network: str = "transformer"):
        self.calls: list[Call] = []
        self.updates: list[float] = []
        self.bare: list[float] = []
        self.processor_ratios: list[float] = []
        self.policy_alone: list[float] = []
        self.peak = 0.0
        self.policy = getattr(pipe, network)
        self._kind = self.policy.device.type
        self._replaced: list[tuple[nn.Module, str, dict[str, Callable]]] = []
        self._start = self._processor_start = 0.0
        parts = [part for name, part in pipe.components.items() if isinstance(part, nn.Module) and name != "vae"]
        self._spied = [(pipe.vae, "decode"), *((part, "forward") for part in parts)]

    def _spy(self, module: nn.Module, method: str) -> None:
        real = getattr(module, method)

        def record(*args, **kwargs):
            has_backward = torch.is_grad_enabled() and module is self.policy
            half = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
            self.calls.append((real, *_detached((args, kwargs)), has_backward, half))
            return real(*args, **kwargs)

        # in full training accelerate's own forward may be there
        self._replaced.append((module, method, {k: v for k, v in module.__dict__.items() if k == method}))
        module.__dict__[method] = record

    def on_step_begin(self, args, state, control, **kwargs):
        for module, method in self._spied if state.global_step == 1 else []:
            self._spy(module, method)
        _synchronize()
        self._start, self._processor_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        _synchronize()
        elapsed = time.perf_counter() - self._start
        processor_seconds = time.process_time() - self._processor_start
        if state.global_step == 1:  # warm-up
            return
        if state.global_step == 2:  # recorded
            for module, method, before in self._replaced:
                del module.__dict__[method]
                module.__dict__.update(before)
            self.peak = peak_memory()
        else:
            self.updates.append(elapsed)
        policy_calls = [call for call in self.calls if getattr(call[0], "__self__", None) is self.policy]
        others = [call for call in self.calls if getattr(call[0], "__self__", None) is not self.policy]
        processor_start = time.process_time()
        policy_alone, rest = run_bare(policy_calls, self._kind), run_bare(others, self._kind)
        processor_bare = time.process_time() - processor_start
        kwargs["model"].zero_grad()
        if state.global_step > 2:
            self.processor_ratios.append(processor_seconds / processor_bare)
            self.policy_alone.append(policy_alone)
            self.bare.append(policy_alone + rest)


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


def run_bare(calls: list[Call], kind: str) -> float:
    """Seconds of the calls in a loop on this kind of device, each with its autocast and its backward pass, if any."""
    _synchronize()
    start = time.perf_counter()
    for function, args, kwargs, has_backward, half in calls:
        with torch.set_grad_enabled(has_backward):
            with torch.autocast(kind, half, enabled=half is not None):
                output = function(*args, **kwargs)
            if has_backward:
                output[0].float().square().mean().backward()
    _synchronize()
    return time.perf_counter() - start


def _detached(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach(), tree)


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def peak_memory() -> float:
    """GiB, the most this process has held: on the accelerator if there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def random_vae() -> AutoencoderKL:
    """16 channels of an eighth of a picture's size, as SD3's and FLUX's, and otherwise small."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 64),
        latent_channels=16,
        norm_num_groups=8,
        sample_size=128,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.5305,
        shift_factor=0.0609,
    )


def medium_pipeline() -> StableDiffusion3Pipeline:
    """SD3's shape at a middle size, random weights: 12 layers of width 512, 16-channel latents, pictures of 128."""
    pipe = StableDiffusion3Pipeline.from_pretrained(tiny.PATH)
    small = pipe.transformer.config
    torch.manual_seed(0)
    pipe.transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=12,
        attention_head_dim=64,
        num_attention_heads=8,
        joint_attention_dim=small.joint_attention_dim,
        caption_projection_dim=512,
        pooled_projection_dim=small.pooled_projection_dim,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    pipe.vae = random_vae()
    return StableDiffusion3Pipeline(**pipe.components)


# what each benchmark trains: pipeline, rewards, settings
BENCHMARKS = {
    "embedded": (
        lambda: StableDiffusion3Pipeline.from_pretrained(tiny.PATH),
        ["brightness"],  # a reward with a network would score while the next samples are made, and take their cores
        dict(num_generations=16, per_device_train_batch_size=64, gradient_accumulation_steps=4, height=32, width=96)
        | dict(num_inference_steps=8, trained_steps=[0, 4]),
    ),
    "medium": (
        medium_pipeline,
        ["brightness"],
        dict(num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, height=128, width=128)
        | dict(num_inference_steps=6, trained_steps=[0, 3]),
    ),
}


def measure(name: str, rounds: int) -> None:
    """Trains for `rounds` updates after two that are not timed, and prints the medians."""
    make_pipeline, rewards, settings = BENCHMARKS[name]
    hide_loading_bars("tiny")
    pipe = make_pipeline()
    with tempfile.TemporaryDirectory() as folder:
        args = DiffusionGRPOConfig(
            folder,
            max_steps=rounds + 2,
            learning_rate=1e-4,
            guidance_scale=1.0,
            pipeline_kwargs={"max_sequence_length": 1},
            **QUIET,
            **settings,
        )
        trainer = DiffusionGRPOTrainer(
            pipe,
            rewards,
            args,
            tiny.prompts("train"),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS),
        )
        silence(trainer)
        bare = BareLoop(trainer.pipe)
        trainer.add_callback(bare)
        trainer.train()
    print_result(name, trainer, bare)


def print_result(name: str, trainer: DiffusionGRPOTrainer, bare: BareLoop) -> None:
    entries = [entry for entry in trainer.state.log_history if "time/rollout" in entry][2:]
    stages = {stage: statistics.median(entry[f"time/{stage}"] for entry in entries) for stage in STAGES}
    reward = [entry["time/reward"] for entry in entries]
    ratios = [(step - spent) / loop for step, spent, loop in zip(bare.updates, reward, bare.bare, strict=True)]
    parameters = sum(parameter.numel() for parameter in trainer.pipe.transformer.parameters()) / 1e6
    forwards = len([call for call in bare.calls if call[0].__self__ is bare.policy])
    backwards = len([call for call in bare.calls if call[3]])
    samples = trainer.args.batch_sizes.rollout_share
    print(f"{name}: policy of {parameters:.1f} M weights, {samples} pictures an update, LoRA rank 16, one process")
    print(f"  policy calls in an update  {forwards} forward, {backwards} of them with backward")
    print(f"  one GRPO step              {statistics.median(bare.updates):7.2f} s")
    for stage, seconds in stages.items():
        print(f"    {stage:<24} {seconds:7.2f} s")
    print(f"  same calls bare            {statistics.median(bare.bare):7.2f} s")
    print(f"    policy alone             {statistics.median(bare.policy_alone):7.2f} s")
    print(f"  overhead without reward    {format_ratios(ratios)}")
    print(f"    in processor seconds     {format_ratios(bare.processor_ratios)}, reward included")
    print(f"  peak memory                {bare.peak:7.2f} GiB", flush=True)


def format_ratios(ratios: list[float]) -> str:
    """Return the median of some ratios, and their range."""
    return f"{statistics.median(ratios):7.2f}   ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], help="default: all, each in its own process")
    parser.add_argument("--rounds", type=int, default=5, help="timed updates after two others; default: %(default)s")
    arguments = parser.parse_args()
    if len(arguments.names) == 1:
        measure(arguments.names[0], arguments.rounds)
        return
    for name in arguments.names or BENCHMARKS:  # a process each, so that peak memory is its own
        subprocess.run([sys.executable, __file__, name, "--rounds", str(arguments.rounds)], check=True)


if __name__ == "__main__":
    main()
