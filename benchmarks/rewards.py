"""
Measure samples per second of each reward without weights, and how long the demo waits for its rewards.

The images have the embedded model's size and a common one; the videos are short. The demo is examples/demo.yaml for a
few updates, once with the rewards computed during the rollout and once after it. The two take turns, so that other
load on the machine affects both, and the median update counts.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from quiet import silence

from diffusion_grpo import DiffusionGRPOTrainer, tiny
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.rewards import load_rewards, score

PICTURES = ["brightness", "jpeg_compressibility", "jpeg_incompressibility", "sharpness", "colorfulness", "ssim"]
PICTURES += ["psnr", "color", "text", "tesseract"]
VIDEOS = ["flicker", "smoothness", "motion"]
STAGES = ("time/rollout", "time/reward", "time/update")
DEMO = Path(__file__).parents[1] / "examples" / "demo.yaml"


def pictures(count: int, size: tuple[int, int]) -> list[Image.Image]:
    """Smooth colours with some grain: a JPEG of them is neither tiny nor huge."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
        made.append(Image.fromarray((pixels + rng.integers(-8, 9, pixels.shape)).clip(0, 255).astype(np.uint8)))
    return made


def speed(name: str, samples: list, kind: str, rounds: int) -> float:
    """Samples a second, the median over the rounds; the first call, which loads, is not counted."""
    (reward,) = load_rewards(name)
    others = pictures(len(samples), samples[0].size) if kind == "images" else None
    prompts, seconds = ['the word "CAT" in red'] * len(samples), []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        score([reward], **{kind: samples}, prompts=prompts, columns={"target": others} if others else {})
        seconds.append(time.perf_counter() - start)
    return len(samples) / statistics.median(seconds[1:])


def demo_stages(updates: int, is_overlapped: bool) -> list[list[float]]:
    """Seconds of rollout, waiting for rewards, and update, of each update but the first, which loads."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--output_dir", folder, "--max_steps", str(updates), "--overlap_rewards", str(is_overlapped)]
        options += ["--eval_strategy", "no", "--eval_on_start", "false", "--disable_tqdm", "true"]
        options += ["--num_iterations", "1"]  # a rollout, and so a wait for rewards, for each update
        script, lora, args = parse_train_arguments(str(DEMO), options)
        trainer = DiffusionGRPOTrainer(
            model=script.model,
            reward_funcs=script.reward_funcs,
            args=args,
            train_dataset=tiny.prompts("train"),
            peft_config=lora.peft_config(),
        )
        silence(trainer)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "time/reward" in entry]
        return [[entry[stage] for stage in STAGES] for entry in entries[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--skip_demo", action="store_true")
    options = parser.parse_args()
    small, usual = (96, 32), (512, 512)
    print("| reward | samples per second | of |\n|---|---|---|")
    for name in PICTURES:
        for size, count in ((small, 64), (usual, 8)):
            each = speed(name, pictures(count, size), "images", options.rounds)
            print(f"| `{name}` | {each:,.0f} | images of {size[0]} × {size[1]} |", flush=True)
    for name in VIDEOS:
        videos = [pictures(16, (416, 240)) for _ in range(2)]
        each = speed(name, videos, "videos", options.rounds)
        print(f"| `{name}` | {each:,.1f} | videos of 16 × 416 × 240 |", flush=True)
    if options.skip_demo:
        return
    print("\n| rewards are computed | rollout | waited for rewards | update | share waited |\n|---|---|---|---|---|")
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(options.rounds):
        for is_overlapped, entries in found.items():
            entries += demo_stages(options.updates, is_overlapped)
    for is_overlapped, entries in found.items():
        stages = [statistics.median(column) for column in zip(*entries)]
        share = statistics.median(entry[1] / sum(entry) for entry in entries)
        when = "during the rollout" if is_overlapped else "after it"
        print(f"| {when} | " + " | ".join(f"{stage:.2f} s" for stage in stages) + f" | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
