"""Compare `target_change` with fixed learning rates on tiny random networks: `python benchmarks/step_size.py`.

Each case trains another network, or other weights of it. The table shows what the held-out reward gains, as a share of
what the best of four fixed rates gains. It takes about ten minutes on a core.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from quiet import silence
from tiny_runs import brightness, trainer_for

from diffusion_grpo.rewards import takes_latents

RATES = (1e-4, 6e-4, 3.6e-3, 2e-2)
TARGET = 0.25
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
SETTINGS = {
    "num_generations": 8,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "num_inference_steps": 3,
    "trained_steps": [0, 1],
    "noisy_steps": "trained",
    "samples_per_latent": "group",
    "num_iterations": 2,
    "scale_rewards": "batch",
    "lr_scheduler_type": "linear",
    "warmup_steps": 3,
    "num_generations_eval": 32,
}
TOKENS = {"name": "glm_image", "train_component": "vision_language_encoder", "epsilon": 0.2, "rewards": brightness}
TOKENS |= {"trained_steps": None, "noisy_steps": "trained", "samples_per_latent": 1, "num_inference_steps": 2}


@takes_latents
def closeness(latents, **columns) -> torch.Tensor:
    """The negative squared distance of each sample's latents from a fixed pattern."""
    pattern = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(0))
    return -(latents - pattern).flatten(1).square().mean(1)


def lora(r: int, alpha: int, target_modules: list[str] | str = ATTENTION) -> dict:
    """Settings of a run that trains a LoRA."""
    return {"peft_config": LoraConfig(r=r, lora_alpha=alpha, target_modules=target_modules)}


CASES: dict[str, dict] = {
    "SD 1.5 (DDIM), LoRA of rank 4, alpha 4": {"name": "sd15", **lora(4, 4)},
    "SD 1.5 (DDIM), LoRA of rank 64, alpha 128": {"name": "sd15", **lora(64, 128)},
    "SD 1.5 (DDIM), all weights": {"name": "sd15", "lora": False},
    "SD3, LoRA of rank 4, alpha 32": {"name": "sd3", **lora(4, 32)},
    "SD3, LoRA of rank 64, alpha 16": {"name": "sd3", **lora(64, 16)},
    "SD3, all weights": {"name": "sd3", "lora": False},
    "SD3, `nft`, LoRA of rank 16, alpha 32": {
        "name": "sd3",
        "loss_type": "nft",
        "num_iterations": 1,
        "trained_steps": None,
        "samples_per_latent": 1,
        **lora(16, 32),
    },
    "GLM-Image's language model (tokens), LoRA of rank 8, alpha 16": {**TOKENS, **lora(8, 16, ["q_proj", "v_proj"])},
}


def train(case: dict, updates: int, seed: int, **of_rate: float) -> float:
    """Train one run, and return what its held-out reward gains."""
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"rewards": closeness, "learning_rate": None, **SETTINGS, **case, **of_rate}
        trainer = trainer_for(folder, **settings, max_steps=updates, seed=seed, log_completions=False)
        silence(trainer)
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        return trainer.evaluate()["eval_reward"] - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="by number, from 0")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = [f"{rate:g}" for rate in RATES] + [f"`target_change: {TARGET}`"]
    print(f"| trained | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, case in [list(CASES.items())[number] for number in arguments.cases]:
        gains = []
        for of_rate in [*({"learning_rate": rate} for rate in RATES), {"target_change": TARGET}]:
            gains.append([train(case, arguments.updates, seed, **of_rate) for seed in arguments.seeds])
        best = [max(of_seed) for of_seed in zip(*gains[:-1])]
        cells = [", ".join(f"{gain / most:.2f}" for gain, most in zip(own, best)) for own in gains]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
