"""Reward colour alone, at a rate that is too high: what `beta` costs and protects, for docs/rewards/hacking.md.

`python benchmarks/guards.py` prints a row for each value; it takes about five minutes on a core.
"""

import argparse

from recipe_run import train_row
from recipe_settings import FIRST_OF_3, Recipe

from diffusion_grpo.quiet import hide_loading_bars

COLOR = FIRST_OF_3 | {
    "reward_funcs": ["color"],
    "reward_weights": None,
    "eval_reward_funcs": ["text", "tesseract"],
    "eval_max_prompts": 48,
    "num_generations_eval": 2,  # for the diversity
}
MOVING = {"beta": 0.1, "sync_ref_model": True, "ref_model_mixup_alpha": 1.0, "ref_model_sync_steps": 20}
# rate, settings, network passes per sample
RUNS = {
    "before training": (0.0, {}, 2.0),
    "none": (1.1e-3, {}, 75.0),
    "`beta: 0.1`": (1.1e-3, {"beta": 0.1}, 75.0),
    "`beta: 0.5`": (1.1e-3, {"beta": 0.5}, 75.0),
    "`beta: 0.1`, a reference that moves every 20 updates": (1.1e-3, MOVING, 75.0),
}
METRICS = ("race_reward", "race_rewards/tesseract/mean", "race_rewards/text/mean", "race_diversity")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    hide_loading_bars("tiny")
    print("| guard | colour | Tesseract | spelling | diversity |\n|---|---|---|---|---|")
    for name, (rate, settings, passes) in RUNS.items():
        recipe = Recipe(name, "colour alone", COLOR | settings)
        row = train_row(recipe, rate, seed, max_passes=passes, eval_passes=passes, describe=measure)
        print(f"| {name} | {' | '.join(f'{row[metric]:.3f}' for metric in METRICS)} |", flush=True)


def measure(trainer) -> dict[str, float]:
    """Return the held-out metrics of the table."""
    metrics = trainer.evaluate(metric_key_prefix="race")
    return {name: metrics[name] for name in METRICS}


if __name__ == "__main__":
    main()
