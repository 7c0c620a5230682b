"""
Show what leaving out a reward costs: `python benchmarks/left_out.py` writes examples/demo_left_out.json.

The demo runs twice with the same seed, for 34 updates of 256 samples with `grpo` in three of six steps: once on both
rewards, and once on spelling alone while colour is only measured. A finished run is not repeated. The file is what
`report_experiment` in examples/demo.yaml shows.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from demo_seeds import ROOT, machine

from diffusion_grpo.report.record import write_json
from diffusion_grpo.report.run_folder import Run, read_run

PAGE = ROOT / "examples" / "demo_left_out.json"
REWARDS = ["text", "color", "tesseract"]
SETTINGS = (
    "--seed 0 --per_device_train_batch_size 64 --gradient_accumulation_steps 4 --num_iterations 1 --max_steps 34 "
    "--eval_steps 17 --learning_rate 1.5e-3 --warmup_steps 2 --num_inference_steps 6 --trained_steps 0 3 "
    "--loss_type grpo --sigmas null"
)
LEFT_OUT = "--reward_funcs text --reward_weights 1.0 --eval_reward_funcs color tesseract"
NOTE = (
    "The demo with and without the reward for colour, {updates} updates of 256 samples each. Spelling improves in "
    "both runs, but what is not rewarded is lost. This is why the demo trains on two rewards, and why it also "
    "measures one that it never trains on."
)


def run_or_read(folder: str, rewards: str = "") -> Run:
    """Return the run in `folder`; train it first if it is not there."""
    if not (ROOT / folder / "summary.json").is_file():
        words = f"train examples/demo.yaml --output_dir {folder} {SETTINGS} {rewards}".split()
        subprocess.run([sys.executable, "-m", "diffusion_grpo.cli", *words], check=True, cwd=ROOT)
    return read_run(ROOT / folder)


def row(name: str, run: Run, index: int) -> dict:
    """Return a row of the table: the held-out means of one evaluation."""
    return {"name": name, "values": [run.held_out(reward, index)[0] for reward in REWARDS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    both, alone = run_or_read("outputs/demo-both"), run_or_read("outputs/demo-left-out", LEFT_OUT)
    rows = [
        row("untrained", both, 0),
        row("trained on 0.7 text + 0.3 color", both, -1),
        row("trained on text alone", alone, -1),
    ]
    experiment = {
        "title": "When a reward is left out",
        "note": NOTE.format(updates=alone.updates),
        "columns": REWARDS,
        "rows": rows,
        "command": "python benchmarks/left_out.py",
        "machine": machine(),
    }
    write_json(PAGE, experiment)
    print(*(f"{line['name']:<34} {line['values']}" for line in rows), f"-> {Path(PAGE).relative_to(ROOT)}", sep="\n")


if __name__ == "__main__":
    main()
