"""
Measure what training with few steps is worth at other numbers of steps: `python benchmarks/eval_steps.py`.

`grpo` trains the embedded model for 144 updates with 4, 6 and 8 steps per rollout, the first of them trained, and
each result is evaluated with 4, 8 and 16 steps on the demo's held-out prompts. Prints a Markdown table.
"""

import argparse
import tempfile

from demo_seeds import ROOT, machine
from transformers import PrinterCallback

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.quiet import hide_loading_bars
from diffusion_grpo.training.callbacks import ReportCallback

GRPO = "--loss_type=grpo --sigmas=null --learning_rate=5.5e-4 --warmup_steps=3 --max_steps=144"
OFF = ("--eval_strategy=no", "--eval_on_start=false", "--baseline_guidance_scales=null", "--report_experiment=null")


def measure(steps: int, evaluated: list[int], words: list[str]) -> list[float]:
    """Train with `steps` per rollout, and return its held-out reward at each number of steps.

    Args:
        steps: per rollout; 0 trains nothing.
        evaluated: numbers of steps of the evaluations.
        words: settings over `GRPO` and the demo's, as on the command line.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = [*GRPO.split(), *OFF, f"--output_dir={folder}", f"--num_inference_steps={steps or 6}", *words]
        trainer = build_trainer(*parse_train_arguments(str(ROOT / "examples" / "demo.yaml"), given))
        for callback in (PrinterCallback, ReportCallback):
            trainer.remove_callback(callback)
        if steps:
            trainer.train()
        rewards = []
        for number in evaluated:
            trainer.args.eval_num_inference_steps = number
            rewards.append(trainer.evaluate(metric_key_prefix="measured")["measured_reward"])
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[0, 4, 6, 8], help="per rollout; 0: untrained")
    parser.add_argument("--evaluated", type=int, nargs="+", default=[4, 8, 16], help="steps of the evaluations")
    arguments, words = parser.parse_known_args()
    hide_loading_bars("tiny")
    lines = ["| steps per rollout | " + " | ".join(f"{number} steps" for number in arguments.evaluated) + " |"]
    lines.append("|---|" + "---|" * len(arguments.evaluated))
    for steps in arguments.steps:
        cells = [f"{reward:.3f}" for reward in measure(steps, arguments.evaluated, words)]
        lines.append(f"| {steps or 'untrained'} | " + " | ".join(cells) + " |")
    print(*lines, "", machine(), sep="\n")


if __name__ == "__main__":
    main()
