"""
Measure how far rounding in half precision moves predictions and ratios: `python benchmarks/half_precision.py`.

Each tiny pipeline of the tests rolls out 8 samples in half precision. Each recorded step is then replayed three times:
by the same weights in float32, which gives rms(d) / rms(v) and the ratio to the rollout; in half precision in the same
batch; and in half precision one sample at a time, as with `rollout_batch_size: 8` and a training batch of 1. The
printed table is that of docs/how_it_works.md.

With `--renoised` predictions on re-noised samples are compared instead: those of one network in half precision with
those of the same network one sample at a time, with other prompts, with dropout, and with `--compiled` those of its
compiled blocks without and with gradients.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import diffusers
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny_pipelines

from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout
from diffusion_grpo.training.compiling import compile_blocks

SAMPLES, STEPS = 8, 10
OTHER_PROMPTS = [f"number {number} of other prompts" for number in range(SAMPLES)]
DROPOUT = 0.05
RENOISED_HEAD = """\
| pipeline | batch of 1 | compiled: without against with gradients | other prompts | dropout of 5 % |
|---|---|---|---|---|"""
PIPELINES = ("sd3", "wan", "cogvideox", "sdxl", "animatediff", "dit", "qwen_image", "flux")
EMBEDDED = ("flux",)  # guidance is an input of the network, and cannot be switched off
HEAD = """\
| pipeline | guidance | bfloat16: rms(d)/rms(v), median (largest) | largest \\|ρ − 1\\| | of the bound \
| batch of 1: largest rms(d)/rms(v) | \\|ρ − 1\\| | float16: rms(d)/rms(v), median (largest) | largest \\|ρ − 1\\| |
|---|---|---|---|---|---|---|---|---|"""


def make_policy(name: str, dtype: torch.dtype, is_guided: bool) -> tuple[DenoisingPolicy, dict]:
    """Build a tiny pipeline in a dtype, and the inputs for all samples."""
    pipe, inputs = tiny_pipelines.build(name)
    pipe.to(dtype=dtype)
    inputs = {key: (value * SAMPLES)[:SAMPLES] if isinstance(value, list) else value for key, value in inputs.items()}
    return DenoisingPolicy(pipe), inputs if is_guided else inputs | {find_guidance(inputs): 1.0}


def find_guidance(inputs: dict) -> str:
    """Return the name of the input that sets the scale of guidance."""
    return "true_cfg_scale" if "true_cfg_scale" in inputs else "guidance_scale"


@torch.no_grad()
def measure(name: str, dtype: torch.dtype, is_guided: bool, steps: int = STEPS) -> dict[str, Tensor]:
    """Roll out in half precision, and replay each recorded step in the three ways.

    Returns:
        one number for each sample and step: `error`, rms(d) / rms(v) of float32 against half precision; `drift`,
        |ratio - 1| of the replay in float32; `share`, this divided by the trainer's bound; `error_alone` and
        `drift_alone`, the first two of a batch of one sample, against the whole batch and the rollout.
    """
    policy, inputs = make_policy(name, dtype, is_guided)
    reference, _ = make_policy(name, torch.float32, is_guided)
    seeds, found = list(range(SAMPLES)), defaultdict(list)
    _, trajectory = rollout(policy, inputs, seeds=seeds, num_inference_steps=steps, is_decoded=False)
    for column, step in enumerate(trajectory.steps[0].tolist()):
        recorded = trajectory.log_probs[:, column]
        exact, now = (replay(one, inputs, trajectory, step) for one in (reference, policy))
        found["error"].append(compare(exact.prediction, now.prediction))
        found["drift"].append((exact.log_prob - recorded).double().expm1().abs())
        found["share"].append(found["drift"][-1] / exact.rounding())
        for row in range(SAMPLES):
            one = slice(row, row + 1)
            own = {key: value[one] if isinstance(value, list) else value for key, value in inputs.items()}
            alone = replay(policy, own, trajectory[one], step)
            found["error_alone"].append(compare(alone.prediction, now.prediction[one]))
            found["drift_alone"].append((alone.log_prob - recorded[one]).double().expm1().abs())
    return {key: torch.cat(values) for key, values in found.items()}


@torch.no_grad()
def measure_renoised(name: str, is_compiled: bool = False, steps: int = STEPS) -> dict[str, Tensor]:
    """Compare predictions on re-noised samples in bfloat16 with those of a second pass, at every other step.

    Returns:
        one number for each sample and step, `Denoised.difference`: `alone`, of batches of one sample; `compiled`, of
        compiled blocks with gradients against those without; `prompts`, of other prompts or classes; `dropout`.
    """
    policy, inputs = make_policy(name, torch.bfloat16, True)
    seeds, found = list(range(SAMPLES)), defaultdict(list)
    _, clean = rollout(policy, inputs, seeds=seeds, num_inference_steps=steps, is_decoded=False, keeps_clean=True)
    others = {"prompt": OTHER_PROMPTS} if "prompt" in inputs else {}
    others |= {"class_labels": [label + 1 for label in inputs["class_labels"]]} if "class_labels" in inputs else {}
    layers = [module for module in policy.network.modules() if isinstance(module, torch.nn.Dropout)]
    for step in range(1, steps, 2):
        now = policy.denoise(inputs, clean, step)
        for row in range(SAMPLES):
            one = slice(row, row + 1)
            own = {key: value[one] if isinstance(value, list) else value for key, value in inputs.items()}
            found["alone"].append(policy.denoise(own, clean[one], step).difference(now.clean[one]))
        found["prompts"].append(now.difference(policy.denoise(inputs | others, clean, step).clean))
        for layer in layers:
            layer.p = DROPOUT
            layer.train()
        found["dropout"].append(now.difference(policy.denoise(inputs, clean, step).clean))
        policy.network.eval()
    if is_compiled:
        policy.network.requires_grad_(True)
        compile_blocks(policy.network, {})
        for step in range(1, steps, 2):
            now = policy.denoise(inputs, clean, step)
            with torch.enable_grad():
                found["compiled"].append(policy.denoise(inputs, clean, step).difference(now.clean))
    return {key: torch.cat(values) for key, values in found.items()}


def make_renoised_row(name: str, is_compiled: bool = False, steps: int = STEPS) -> str:
    """Measure one pipeline on re-noised samples; return a line of the table."""
    found = measure_renoised(name, is_compiled, steps)
    keys = ("alone", "compiled", "prompts", "dropout")
    return f"| {name} | {' | '.join(format_errors(found[key]) if key in found else '' for key in keys)} |"


def compare(prediction: Tensor, other: Tensor) -> Tensor:
    """Return the rms of the difference of each sample, relative to that of `other`."""
    difference, size = (x.float().flatten(1).norm(dim=1) for x in (prediction.float() - other.float(), other))
    return difference / size


def make_row(name: str, is_guided: bool, steps: int = STEPS) -> str:
    """Measure one pipeline in both dtypes; return a line of the table."""
    brain, half = (measure(name, dtype, is_guided, steps) for dtype in (torch.bfloat16, torch.float16))
    inputs = tiny_pipelines.build(name)[1]
    cells = [name, f"{inputs[find_guidance(inputs)]:g}" if is_guided else "none"]
    cells += [format_errors(brain["error"]), f"{brain['drift'].max():.2g}", format_share(brain["share"].max())]
    cells += [format_share(brain["error_alone"].max()), f"{brain['drift_alone'].max():.2g}"]
    cells += [format_errors(half["error"]), f"{half['drift'].max():.2g}"]
    return f"| {' | '.join(cells)} |"


def format_errors(values: Tensor) -> str:
    """Return the median of some shares, and the largest in brackets."""
    return f"{format_share(values.median())} ({format_share(values.max())})"


def format_share(value: Tensor) -> str:
    """Return a share in percent, with two digits."""
    return f"{100 * value:.0f} %" if value >= 0.1 else f"{100 * value:.2g} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"tiny pipelines; default: {' '.join(PIPELINES)}")
    parser.add_argument("--renoised", action="store_true", help="compare predictions on re-noised samples")
    parser.add_argument("--compiled", action="store_true", help="with --renoised: those of compiled blocks too")
    diffusers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    given = parser.parse_args()
    if given.renoised:
        print(RENOISED_HEAD)
        for name in given.names or PIPELINES:
            print(make_renoised_row(name, given.compiled), flush=True)
        return
    print(HEAD)
    for name in given.names or PIPELINES:
        for is_guided in (True,) if name in EMBEDDED else (False, True):
            print(make_row(name, is_guided), flush=True)


if __name__ == "__main__":
    main()
