"""
Measure how far compiled blocks drift: `python benchmarks/compiled.py` prints the table of docs/memory.md.

Each case rolls out four samples with a random LoRA on a tiny pipeline of the tests, in two sizes, once with compiled
blocks and once without, and replays the two recorded steps with a gradient. The ratio is that of replay to rollout.
Compiling takes some minutes in all; it needs a C++ compiler.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny_pipelines

from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout
from diffusion_grpo.training.compiling import compile_blocks

SAMPLES = 4
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"], "init_lora_weights": False}
HEAD = """\
| pipeline | backend | dtype | samples per replay | \\|ρ − 1\\|, compiled | not compiled \
| latents, compiled against not |
|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """What is compiled, and how.

    Attributes:
        pipeline: the name of a tiny one.
        backend: of torch.compile.
        dtype: of all weights.
        batch: samples per replay; a rollout has four.
        heights: of the samples, one rollout each.
    """

    pipeline: str
    backend: str
    dtype: torch.dtype = torch.float32
    batch: int = SAMPLES
    heights: tuple[int, ...] = (16, 32)


CASES = (
    Case("wan", "inductor", heights=(32, 64)),
    Case("wan", "inductor", torch.bfloat16, heights=(32, 64)),
    Case("wan", "aot_eager", heights=(32, 64)),
    Case("sd3", "eager", batch=1),
    Case("sdxl", "eager", batch=1),
    Case("flux", "eager", batch=1),
)


def measure(case: Case, is_compiled: bool, steps: int = 3) -> tuple[float, list[Tensor]]:
    """Roll out and replay; return the largest |ratio - 1|, and for each height the latents of the trained steps."""
    torch._dynamo.reset()
    pipe, inputs = tiny_pipelines.build(case.pipeline)
    network = tiny_pipelines.policy(pipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network.add_adapter(LoraConfig(**LORA))
    pipe.to(dtype=case.dtype)
    if is_compiled:
        compile_blocks(network, {"backend": case.backend})
    inputs = {key: (value * SAMPLES)[:SAMPLES] if isinstance(value, list) else value for key, value in inputs.items()}
    policy, seeds, drifts, latents = DenoisingPolicy(pipe), list(range(SAMPLES)), [], []
    for height in case.heights:
        given = inputs | {"height": height}
        _, trajectory = rollout(policy, given, seeds=seeds, num_inference_steps=steps, is_decoded=False)
        latents.append(trajectory.next_latents)
        for column, step in enumerate(trajectory.steps[0].tolist()):
            for start in range(0, SAMPLES, case.batch):
                rows = slice(start, start + case.batch)
                own = {key: value[rows] if isinstance(value, list) else value for key, value in given.items()}
                now = replay(policy, own, trajectory[rows], step).log_prob.detach()
                drifts.append((now - trajectory.log_probs[rows, column]).double().expm1().abs().max().item())
    return max(drifts), latents


def make_row(case: Case, steps: int = 3) -> str:
    """Measure a case with and without compiled blocks; return a line of the table."""
    (compiled, latents), (plain, expected) = (measure(case, is_compiled, steps) for is_compiled in (True, False))
    moved = max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(latents, expected, strict=True))
    name = str(case.dtype).removeprefix("torch.")
    cells = [case.pipeline, f"`{case.backend}`", name, str(case.batch), f"{compiled:.1g}", f"{plain:.1g}"]
    return f"| {' | '.join(cells)} | {f'{moved:.1g} of the largest value' if moved else '0'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="tiny pipelines; default: all cases")
    names = parser.parse_args().names
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print(HEAD)
    for case in CASES:
        if not names or case.pipeline in names:
            print(make_row(case), flush=True)


if __name__ == "__main__":
    main()
