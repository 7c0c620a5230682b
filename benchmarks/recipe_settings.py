"""The recipes of the race: what each changes in `BASE`, and whether this package knows its settings."""

import inspect
from dataclasses import dataclass
from typing import Any

from diffusion_grpo.algorithms import ALGORITHMS
from diffusion_grpo.config.fields import OF_TRANSFORMERS, own_fields
from diffusion_grpo.policy.sde import SDES

DEMO = "examples/demo.yaml"
LEARNING_RATES = (5.5e-4, 1.1e-3, 1.65e-3)  # the same for each recipe
LOWER_RATE = 2.75e-4  # also tried by each recipe that does best at the lowest of these on the first tuning seed
TUNE_SEEDS, REPORT_SEEDS = (0, 1, 2), (3, 4, 5)
FRESH_SEEDS = (9, 10, 11)  # of what was tried after the race, when all seeds above were known
# A rate so far below the best on the first tuning seed, or on average over the first two, is not tried on the others
LEFT_BEHIND = (0.04, 0.015)
SHORT, LONG = 148.0, 1480.0  # budgets: 40 updates of Flow-GRPO at 37 passes per sample, and a tenth of that
TARGET = 0.86  # held-out reward that recipes are to reach

# What the demo was before the race, whatever it is now; all else is read from it
BASE = {
    "num_inference_steps": 6,
    "sigmas": None,
    "loss_type": "grpo",
    "trained_steps": [0, 3],
    "num_trained_steps": None,
    "num_iterations": 1,
    "steps_per_generation": None,
}


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    Attributes:
        name: in the tables, on the command line and in the rows. If its settings change, its rows are to be deleted.
        summary: what it does, in one line.
        settings: what it changes in `BASE` and in the demo's settings.
        max_passes: its budget: network passes per sample of an update, summed over updates.
        tuned_as: the recipe whose learning rate it has; None if it is tuned itself.
        passes_per_update: per sample, for settings that depend on the number of updates of a run (`target_change`).
    """

    name: str
    summary: str
    settings: dict[str, Any]
    max_passes: float = SHORT
    tuned_as: str | None = None
    passes_per_update: float | None = None


# Flow-GRPO (2505.05470) without guidance: every step but the last is stochastic and trained. Its scripts for SD3 also
# have guidance 4.5, two updates per rollout, the standard deviation of the batch, a KL term, a moving average of the
# weights, and noise in the last step
FLOW_GRPO = {
    "num_inference_steps": 10,
    "trained_steps": [0, 9],
    "noisy_steps": "all",
    "samples_per_latent": 1,
    "scale_rewards": "group",
    "epsilon": 1e-4,
}
HALF = FLOW_GRPO | {"trained_steps": [0, 5], "noisy_steps": "trained"}  # only the first half may be trained
TWO_UPDATES = {"steps_per_generation": 8}  # a rollout of two updates, each sample trained once
# MixGRPO's script moves its window by one step every 25 rollouts, 12 times in 300. About 50 updates fit into the long
# budget here, so a move every 4 updates gives as many
MOVING = {"step_selection": "sliding", "step_interval": 4}
FIRST_STEP = {"num_inference_steps": 6, "trained_steps": [0, 1]}
FIRST_OF_4 = {"num_inference_steps": 4, "trained_steps": [0, 1]}
# `sigmas: even` but for rounding: the first three of the schedule's four, which ends in a step from 0.001 to 0
FIRST_OF_3 = {"num_inference_steps": 3, "sigmas": [1.0, 0.6677, 0.3353], "trained_steps": [0, 1], "num_iterations": 2}
REGULATED = {"target_change": 0.25}
# The first of six steps, and three longer ones after it
COARSE = {"num_inference_steps": 4, "sigmas": [1.0, 0.8, 0.53, 0.27], "trained_steps": [0, 1], "num_iterations": 2}

# Algorithms on re-noised samples roll out without noise, and train at levels of the rollout's steps after the first
CLEAN = {
    "num_inference_steps": 10,
    "sde_type": "auto",
    "noise_level": None,
    "trained_steps": None,
    "samples_per_latent": 1,  # without noise in the steps the samples of a prompt would be equal
}
SHORT_CLEAN = CLEAN | {"num_inference_steps": 6, "num_trained_steps": 3, "step_selection": "sample"}  # 3 levels of 5

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("flow_grpo", "Flow-GRPO without guidance: 10 steps, 9 trained", FLOW_GRPO, LONG),
        Recipe(
            "flow_grpo_long", "Flow-GRPO without guidance, with twice the passes", FLOW_GRPO, 2 * LONG, "flow_grpo"
        ),
        Recipe(
            "flow_grpo_guided",
            "Flow-GRPO at guidance 4.5: 10 steps, 9 trained",
            FLOW_GRPO | {"guidance_scale": 4.5},
            LONG,
        ),
        Recipe(
            "flow_grpo_fast",
            "Flow-GRPO-Fast: 2 consecutive steps of the first 5, drawn for each rollout",
            HALF | {"num_trained_steps": 2},
            LONG,
        ),
        Recipe("demo", "the first 3 of 6 steps trained, one latent per prompt (the demo before the race)", {}),
        Recipe("first_of_6", "the first of 6 steps trained, one latent per prompt", FIRST_STEP),
        Recipe("first_of_4", "the first of 4 steps trained, one latent per prompt", FIRST_OF_4),
        Recipe(
            "first_of_4_twice",
            "the first of 4 steps trained, one latent per prompt, each rollout used twice",
            FIRST_OF_4 | {"num_iterations": 2},
        ),
        Recipe(
            "first_of_6_twice",
            "the first of 6 steps trained, one latent per prompt, each rollout used twice",
            FIRST_STEP | {"num_iterations": 2},
            LONG,
        ),
        Recipe(
            "first_of_3_twice",
            "the first of 3 even steps trained, one latent per prompt, each rollout used twice",
            FIRST_OF_3,
        ),
        Recipe(
            "first_of_3_regulated",
            "the same, with a learning rate that regulates itself (target_change 0.25)",
            FIRST_OF_3 | REGULATED,
            passes_per_update=1.24,
        ),
        Recipe(
            "first_of_3_fdfo",
            "the same with loss fdfo, a direction in place of a log-probability",
            FIRST_OF_3 | {"loss_type": "fdfo"},
        ),
        Recipe(
            "first_two_of_3_fdfo",
            "the same with loss fdfo in the first two steps",
            FIRST_OF_3 | {"loss_type": "fdfo", "trained_steps": [0, 2]},
        ),
        Recipe(
            "fdfo_pairs",
            "the same with loss fdfo and pairs in place of groups of 16",
            FIRST_OF_3 | {"loss_type": "fdfo", "num_generations": 2},
        ),
        Recipe(
            "first_of_3_fdfo_regulated",
            "the same with loss fdfo, with a learning rate that regulates itself (target_change 0.25)",
            FIRST_OF_3 | {"loss_type": "fdfo"} | REGULATED,
            passes_per_update=1.24,
        ),
        Recipe(
            "first_of_2_fdfo_regulated",
            "the same in two even steps",
            FIRST_OF_3 | {"num_inference_steps": 2, "sigmas": [1.0, 0.5], "loss_type": "fdfo"} | REGULATED,
            passes_per_update=0.78,
        ),
        Recipe(
            "first_of_4_even",
            "the first of 4 even steps trained, one latent per prompt, each rollout used twice",
            FIRST_OF_3 | {"num_inference_steps": 4, "sigmas": [1.0, 0.75, 0.5, 0.25]},
        ),
        Recipe(
            "first_of_6_coarse",
            "the first of 6 steps trained, 3 longer ones after it, one latent per prompt, each rollout used twice",
            COARSE,
        ),
        Recipe(
            "first_of_8_twice",
            "the first of 8 steps trained, one latent per prompt, each rollout used twice",
            {"num_inference_steps": 8, "trained_steps": [0, 1], "num_iterations": 2},
            LONG,
        ),
        Recipe(
            "fast",
            "the steps of examples/fast: one of the first 4 of 8 steps per rollout, each rollout used twice",
            {"num_inference_steps": 8, "trained_steps": [0, 4], "num_trained_steps": 1, "num_iterations": 2},
            LONG,
        ),
        Recipe(
            "first_of_4_own_latents",
            "the first of 4 steps trained, each sample with a latent of its own",
            FIRST_OF_4 | {"samples_per_latent": 1},
        ),
        Recipe(
            "defaults",
            "the defaults of DiffusionGRPOConfig: one of the first 5 of 10 steps per rollout, one latent per prompt",
            {"num_inference_steps": 10, "trained_steps": None, "scale_rewards": "group"}
            | {"noisy_steps": "trained", "samples_per_latent": None},
        ),
        Recipe("first_two_of_6", "the first 2 of 6 steps trained, one latent per prompt", {"trained_steps": [0, 2]}),
        # Step weights, processes and ratios on recorded steps
        Recipe(
            "tempflow",
            "TempFlow-GRPO: 4 initial latents of 4 branches at one step of 10, weighted by its noise",
            FLOW_GRPO
            | {"trained_steps": [1, 9], "num_trained_steps": 1, "noisy_steps": "trained", "samples_per_latent": 4}
            | {"step_weight": "noise"},
            LONG,
        ),
        Recipe(
            "tempflow_tuned",
            "the first 3 of 6 steps trained, weighted by their noise, one latent per prompt",
            {"step_weight": "noise"},
        ),
        Recipe(
            "flash",
            "Flash-GRPO: one step drawn for each prompt of the first 10 of 20",
            FLOW_GRPO
            | {
                "num_inference_steps": 20,
                "trained_steps": [0, 10],
                "num_trained_steps": 1,
                "step_selection": "prompt",
            }
            | {"noisy_steps": "trained", "step_weight": "velocity", "epsilon": 1e-3},
            LONG,
        ),
        Recipe(
            "flash_tuned",
            "one of the first 3 of 6 steps, drawn for each prompt, with Flash-GRPO's weights; one latent per prompt",
            {"num_trained_steps": 1, "step_selection": "prompt", "step_weight": "velocity"},
        ),
        Recipe(
            "mixgrpo",
            "MixGRPO: 4 consecutive steps of 25, one step later every 4 updates; one latent per prompt",
            FLOW_GRPO
            | {"num_inference_steps": 25, "trained_steps": [0, 23], "num_trained_steps": 4}
            | MOVING
            | {"noisy_steps": "trained", "samples_per_latent": "group"},
            LONG,
        ),
        Recipe(
            "mixgrpo_tuned",
            "one of the first 3 of 6 steps, the next one every 4 updates; one latent per prompt",
            {"num_trained_steps": 1} | MOVING,
        ),
        Recipe(
            "grpo_guard",
            "GRPO-Guard: normalized ratios, 9 of 10 steps, a rollout for two updates",
            FLOW_GRPO | TWO_UPDATES | {"loss_type": "grpo_guard", "loss_kwargs": {"clip_range": 4e-6}},
            LONG,
        ),
        Recipe(
            "grpo_guard_tuned",
            "the first 3 of 6 steps trained with GRPO-Guard's ratios and weights, one latent per prompt",
            {"loss_type": "grpo_guard", "loss_kwargs": {"clip_range": 4e-6}},
        ),
        Recipe(
            "precise",
            "Precise: its process at noise 1.5, 9 of 10 steps",
            FLOW_GRPO | {"sde_type": "precise", "noise_level": 1.5},
            LONG,
        ),
        Recipe(
            "precise_tuned",
            "the first of 6 steps by the process of Precise, one latent per prompt",
            FIRST_STEP | {"sde_type": "precise", "noise_level": 1.5},
        ),
        Recipe(
            "wan_sde",
            "the process that Flow-GRPO has for Wan, at its noise 1.0, 9 of 10 steps",
            FLOW_GRPO | {"sde_type": "wan_sde", "noise_level": 1.0},
            LONG,
        ),
        Recipe(
            "wan_sde_tuned",
            "the first of 6 steps by the process that Flow-GRPO has for Wan, one latent per prompt",
            FIRST_STEP | {"sde_type": "wan_sde", "noise_level": 1.0},
        ),
        Recipe(
            "dppo",
            "Flow-DPPO: a mask on the divergence, 3 of the first 5 of 10 steps, a rollout for two updates",
            HALF
            | TWO_UPDATES
            | {"num_trained_steps": 3, "scale_rewards": "batch"}
            | {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-5}},
            LONG,
        ),
        Recipe(
            "dppo_tuned",
            "the first of 6 steps with Flow-DPPO's mask, one latent per prompt, a rollout for two updates",
            FIRST_STEP | TWO_UPDATES | {"loss_type": "dppo", "loss_kwargs": {"threshold": 1e-5}},
        ),
        # Algorithms on re-noised samples
        Recipe(
            "nft",
            "DiffusionNFT: 10 steps without noise, trained at 9 levels, with old policy and reference",
            CLEAN | {"loss_type": "nft", "beta": 1e-4, "loss_kwargs": {"strength": 1.0, "decay_max": 0.5}},
            LONG,
        ),
        Recipe(
            "nft_regulated",
            "the same as nft, with a learning rate that regulates itself (target_change 0.25)",
            CLEAN | {"loss_type": "nft", "beta": 1e-4, "loss_kwargs": {"strength": 1.0, "decay_max": 0.5}} | REGULATED,
            LONG,
            passes_per_update=64,
        ),
        Recipe(
            "nft_tuned",
            "DiffusionNFT in 6 steps, trained at 3 levels, without old policy and reference",
            SHORT_CLEAN | {"loss_type": "nft", "loss_kwargs": {"decay_max": 0.0}},
        ),
        Recipe(
            "nft_tuned_regulated",
            "the same as nft_tuned, with a learning rate that regulates itself (target_change 0.25)",
            SHORT_CLEAN | {"loss_type": "nft", "loss_kwargs": {"decay_max": 0.0}} | REGULATED,
            passes_per_update=19.5,
        ),
        Recipe(
            "awm",
            "AWM: 14 steps without noise, trained at 6 levels of the first 90 %, with average and reference",
            CLEAN
            | {"num_inference_steps": 14, "trained_steps": [1, 13], "num_trained_steps": 6, "step_selection": "sample"}
            | {"loss_type": "awm", "beta": 1e-3, "loss_kwargs": {"ema_beta": 1.0, "clip": 1.0}},
            LONG,
        ),
        Recipe(
            "awm_tuned",
            "AWM in 6 steps, trained at 3 levels, with a looser pull to the average, without reference",
            SHORT_CLEAN | {"loss_type": "awm", "loss_kwargs": {"ema_beta": 0.1, "clip": 1e-5}},
        ),
        Recipe(
            "dgpo",
            "DGPO: 10 steps at guidance 4.5, trained at 4 of 6 levels without guidance",
            CLEAN
            | {"trained_steps": [1, 7], "num_trained_steps": 4, "step_selection": "sample", "guidance_scale": 4.5}
            | {"loss_type": "dgpo", "loss_kwargs": {"preference_beta": 100.0}},
            LONG,
        ),
        Recipe(
            "dgpo_tuned", "DGPO in 6 steps without guidance, trained at 3 levels", SHORT_CLEAN | {"loss_type": "dgpo"}
        ),
        Recipe(
            "dpo",
            "online Diffusion-DPO: best and worst of a group at one level of 9",
            CLEAN
            | {"num_trained_steps": 1, "step_selection": "sample"}
            | {"loss_type": "dpo", "loss_kwargs": {"preference_beta": 2000.0}, "best_of_n": 2},
            LONG,
        ),
        Recipe(
            "dpo_tuned",
            "online DPO in 6 steps, trained at 3 levels",
            SHORT_CLEAN | {"loss_type": "dpo", "best_of_n": 2},
        ),
    )
}


def find_unknown(recipe: Recipe) -> str | None:
    """Say in a few words what this package lacks for a recipe; None where it has everything."""
    settings = recipe.settings
    if unknown := sorted(settings.keys() - {*own_fields(), *OF_TRANSFORMERS}):
        return f"no setting {unknown[0]}"
    loss, process = settings.get("loss_type", "grpo"), settings.get("sde_type", "auto")
    if loss not in ALGORITHMS:
        return f"no loss_type {loss}"
    if process not in ("auto", *SDES):
        return f"no sde_type {process}"
    if "loss_kwargs" in settings:
        if unknown := sorted(settings["loss_kwargs"].keys() - inspect.signature(ALGORITHMS[loss]).parameters.keys()):
            return f"no {unknown[0]} in the loss_kwargs of {loss}"
    return None
