"""Reward one thing alone, by its gradient and by GRPO at equal network passes, for docs/algorithms/draft.md.

`python benchmarks/draft.py` prints the curves of each row; it takes about ten minutes on a core.
"""

import argparse

from recipe_run import train_row
from recipe_settings import FIRST_OF_3, Recipe

from diffusion_grpo.quiet import hide_loading_bars

PASSES = 9600  # of the network, over a whole run: the race's 75 for each of 128 samples
ALONE = {
    "reward_funcs": ["color"],
    "reward_weights": None,
    "eval_reward_funcs": ["tesseract"],
    "eval_max_prompts": 48,
    "num_generations_eval": 2,  # for the diversity
}
EVEN = {"num_inference_steps": 3, "sigmas": "even"}
DRAFT = EVEN | {
    "loss_type": "draft",
    "num_generations": 1,
    "samples_per_latent": None,
    "sde_type": "auto",
    "noise_level": None,
    "trained_steps": None,
    "gradient_accumulation_steps": 1,  # 32 samples
    "stop_when": {},
}
BRIGHT = {"reward_funcs": ["brightness"], "eval_reward_funcs": ["color", "tesseract"]}
# changed settings, learning rate
ROWS = {
    "grpo": (FIRST_OF_3, 1.1e-3),
    "draft": (DRAFT, 5.5e-4),
    "draft, six steps of SD3's schedule": (DRAFT | {"num_inference_steps": 6, "sigmas": None}, 5.5e-4),
    "draft, two steps": (DRAFT | {"num_trained_steps": 2}, 5.5e-4),
    "draft, truncated at random": (DRAFT | {"trained_steps": [0, 3]}, 5.5e-4),
    "draft, truncated at random, twice the rate": (DRAFT | {"trained_steps": [0, 3]}, 1.1e-3),
    "draft, `beta: 0.1`": (DRAFT | {"beta": 0.1}, 5.5e-4),
    "draft, brightness": (DRAFT | BRIGHT, 5.5e-4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--row", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--learning_rate", type=float, help="of all these rows")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    hide_loading_bars("tiny")
    for name in arguments.row:
        settings, rate = ROWS[name]
        samples = 32 * settings.get("gradient_accumulation_steps", 4)
        budget = {"max_passes": PASSES / samples, "eval_passes": PASSES / samples / 5}
        recipe = Recipe(name, "one reward alone", ALONE | settings)
        row = train_row(recipe, arguments.learning_rate or rate, arguments.seed, **budget, describe=measure)
        print(f"{name}: {row['updates']} updates, rate {row['learning_rate']}, diversity {row['diversity']:.3f}")
        for metric in ("passes", "reward", "tesseract"):
            scale = samples if metric == "passes" else 1
            print(
                f"| {metric} | {' | '.join(f'{scale * value:.4g}' for value in row['curves'][metric])} |", flush=True
            )


def measure(trainer) -> dict[str, float]:
    return {"diversity": trainer.evaluate(metric_key_prefix="race")["race_diversity"]}


if __name__ == "__main__":
    main()
