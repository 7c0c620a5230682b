"""Race recipes on the distilled embedded model for docs/models/few_steps.md.

    python -m benchmarks.tiny_model.distil outputs/student         # the model of three steps; eight minutes
    python benchmarks/few_steps.py outputs/student none:0:3 first_cps:1.1e-3:3
    python benchmarks/few_steps.py                                 # only the table

Each RECIPE:RATE:SEED is trained as `make bench-recipes` does (LoRA, prompts, groups and rewards of the demo, 148
network passes per sample) and appended to few_steps_rows.jsonl, unless it is there. A pipeline of SD3 ends with a step
from almost no noise to none, so N steps are N + 1 of its `num_inference_steps`; rollouts leave that step out.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from recipe_run import read_rewards, train_row
from recipe_settings import CLEAN, FIRST_OF_3, FIRST_STEP, SHORT, Recipe

ROWS = Path(__file__).parent / "few_steps_rows.jsonl"
OWN = 3  # steps of the student
STEPS = (2, OWN, 6)  # that each model is measured with at the end
CPS = {"sde_type": "cps", "noise_level": 0.8}
RENOISED = CLEAN | {"num_inference_steps": OWN, "sigmas": FIRST_OF_3["sigmas"], "num_iterations": 1}
SUMMARIES_AND_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("not trained", FIRST_OF_3),
    "first_flow": ("`grpo`, the first step, `flow_sde` at 0.7", FIRST_OF_3),
    "first_flow_low": ("`grpo`, the first step, `flow_sde` at 0.3", FIRST_OF_3 | {"noise_level": 0.3}),
    "first_cps": ("`grpo`, the first step, `cps` at 0.8", FIRST_OF_3 | CPS),
    "first_cps_all": ("`grpo`, the first step, `cps` at 1.0", FIRST_OF_3 | CPS | {"noise_level": 1.0}),
    "both_cps": ("`grpo`, the first two steps, `cps` at 0.8", FIRST_OF_3 | CPS | {"trained_steps": [0, 2]}),
    "nft": ("`nft`", RENOISED | {"loss_type": "nft", "loss_kwargs": {"decay_max": 0.0}}),
    "awm": ("`awm`", RENOISED | {"loss_type": "awm", "loss_kwargs": {"ema_beta": 0.1, "clip": 1e-5}}),
    "six_flow": ("`grpo`, the first of 6 steps, `flow_sde` at 0.7", FIRST_STEP | {"num_iterations": 2}),
    "six_cps": ("`grpo`, the first of 6 steps, `cps` at 0.8", FIRST_STEP | CPS | {"num_iterations": 2}),
}
RECIPES = {name: Recipe(name, *both) for name, both in SUMMARIES_AND_SETTINGS.items()}


def measure_steps(trainer: Any, images: Path | None) -> dict[str, Any]:
    """Return the held-out rewards of a model with several numbers of steps, without guidance; keep some images."""
    found = {}
    for steps in STEPS:
        trainer.args.eval_num_inference_steps = steps + 1
        metrics = trainer.evaluate(metric_key_prefix="race", pipeline_kwargs={"guidance_scale": 1.0})
        found[str(steps)] = read_rewards(metrics, "reward", "tesseract")
        if images:
            save_grid(trainer, steps, images)
    return {"steps": found}


def save_grid(trainer: Any, steps: int, folder: Path) -> None:
    """Save twelve held-out images, four in a row."""
    import torch
    from PIL import Image
    from tiny_model.evaluate import draw

    with torch.no_grad():
        made = draw(trainer.pipe, list(trainer.eval_dataset["prompt"])[:12], 1.0, steps + 1)
    grid = Image.new("RGB", (4 * 98, 3 * 34), "white")
    for number, image in enumerate(made):
        grid.paste(image, (number % 4 * 98, number // 4 * 34))
    folder.mkdir(parents=True, exist_ok=True)
    grid.resize((grid.width * 2, grid.height * 2)).save(folder / f"{steps}.png")


def make_row(model: str, name: str, rate: float, seed: int, passes: float, images: Path | None) -> dict[str, Any]:
    """Train the model by a recipe."""
    return train_row(
        RECIPES[name],
        rate,
        seed,
        max_passes=passes,
        max_updates=1 if name == "none" else None,  # at a learning rate of 0
        eval_passes=passes,
        sizes={"model": model, "eval_num_inference_steps": OWN + 1},
        describe=lambda trainer: measure_steps(trainer, images),
    )


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the Markdown of the table: a line per model, recipe and learning rate, seeds separated by commas."""
    runs = defaultdict(list)
    for row in sorted(rows, key=lambda row: (list(RECIPES).index(row["recipe"]), row["learning_rate"], row["seed"])):
        runs[row["recipe"], row["learning_rate"]].append(row)
    lines = [f"| trained by | rate | updates | {' | '.join(f'{n} steps' for n in STEPS)} | Tesseract, {OWN} steps |"]
    lines.append("|" + "---|" * (len(STEPS) + 4))
    for (name, rate), made in runs.items():
        cells = [RECIPES[name].summary, f"{rate:g}" if rate else "", made[0]["updates"] if rate else ""]
        cells += [", ".join(f"{row['steps'][str(steps)]['reward']:.3f}" for row in made) for steps in STEPS]
        cells.append(", ".join(f"{row['steps'][str(OWN)]['tesseract']:.3f}" for row in made))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of the student; `tiny` is its teacher")
    parser.add_argument("rows", nargs="*", metavar="RECIPE:RATE:SEED")
    parser.add_argument("--max-passes", type=float, default=SHORT)
    parser.add_argument("--file", type=Path, default=ROWS, help=f"that lines are added to; default: {ROWS.name}")
    parser.add_argument("--images", type=Path, help="folder for images of the models at the end")
    arguments = parser.parse_args()
    known = arguments.file.read_text().splitlines() if arguments.file.exists() else []
    rows = [json.loads(line) for line in known]
    for words in arguments.rows:
        name, rate, seed = words.split(":")
        if (name, float(rate), int(seed)) in {(row["recipe"], row["learning_rate"], row["seed"]) for row in rows}:
            continue
        images = arguments.images and arguments.images / words
        rows.append(make_row(arguments.model, name, float(rate), int(seed), arguments.max_passes, images))
        with arguments.file.open("a") as file:
            file.write(json.dumps(rows[-1], separators=(",", ":")) + "\n")
    print(format_table(rows))


if __name__ == "__main__":
    main()
