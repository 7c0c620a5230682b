"""Hash what seven short runs train: `python benchmarks/weight_hashes.py` prints a line for each.

To see that a change leaves trainings as they are, run it before and after, on one machine: other kernels give other
last bits. Each run makes two updates on a tiny pipeline of the tests and takes another path through the library.
"""

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from quiet import silence
from tiny_runs import SMOOTH, brightness, trainer_for

from diffusion_grpo import DiffusionGRPOTrainer

TWO_UPDATES = {"steps_per_generation": 4}  # on one rollout
RUNS: dict[str, dict] = {
    "nft": {"loss_type": "nft", "beta": 1e-4, **TWO_UPDATES},
    "dppo": {"loss_type": "dppo", **TWO_UPDATES},
    "steps per prompt": {
        "step_selection": "prompt",
        "num_trained_steps": 1,
        "noisy_steps": "trained",
        "step_weight": "velocity",
    },
    "kl": {"beta": 0.01, "kl_reward": 0.1, "num_trained_steps": 2, "step_selection": "sample", "best_of_n": 2},
    "full": {"lora": False, "beta": 0.01, "ema_decay": 0.9, "learning_rate": 1e-4, **TWO_UPDATES},
    "gae": {"advantage_estimator": "gae", "num_generations": 1},
    "tokens": {
        "name": "glm_image",
        "train_component": "vision_language_encoder",
        "peft_config": LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]),
        "beta": 0.01,
        "epsilon": 0.2,
        "learning_rate": 0.02,
        "rewards": brightness,  # this pipeline has no latents for `SMOOTH`
        "reward_weights": None,
    },
}


def hash_weights(trainer: DiffusionGRPOTrainer) -> str:
    """Return the first digits of a hash of all trained weights, and of the value model's."""
    values = trainer.learner.values
    parts = [trainer.model] if values is None else [trainer.model, values]
    digest = hashlib.sha256()
    for part in parts:
        for name, weight in sorted(part.named_parameters()):
            if weight.requires_grad:
                digest.update(name.encode() + weight.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def train(name: str) -> str:
    """Make one of the `RUNS`, and return the hash of its weights."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(folder, **SMOOTH | RUNS[name], log_completions=False)
        silence(trainer)
        trainer.train()
        return hash_weights(trainer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", default=list(RUNS), metavar="run", help=", ".join(RUNS))
    torch.set_num_threads(1)
    for name in parser.parse_args().runs:
        print(f"{name:<18}{train(name)}", flush=True)


if __name__ == "__main__":
    main()
