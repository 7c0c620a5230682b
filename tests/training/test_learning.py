"""The embedded model really learns from its rewards, and unlearns where the sign of the advantage is flipped."""

from pathlib import Path

import pytest
from datasets import Dataset
from tiny_runs import logged

from diffusion_grpo import DiffusionGRPOTrainer, tiny
from diffusion_grpo.config.parse import parse_train_arguments

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
SHORT = "--max_steps 5 --eval_steps 5 --warmup_steps 0 --learning_rate 1e-3 --per_device_eval_batch_size 64"
MARGIN = 0.02  # of held-out reward; the gain is about 0.1, with the sign flipped more is lost


def held_out_gain(folder: Path, sign: float, micro_batches: int, *settings: str) -> float:
    """Gain in the unsigned held-out reward after five updates of the demo, with other settings."""
    overrides = [*SHORT.split(), "--output_dir", str(folder), "--disable_tqdm", "true", "--use_cpu", "true"]
    overrides += ["--gradient_accumulation_steps", str(micro_batches), *settings]
    script, lora, args = parse_train_arguments(str(DEMO), overrides)
    args.reward_weights = [sign * weight for weight in args.reward_weights]
    trainer = DiffusionGRPOTrainer(
        model=script.model,
        reward_funcs=script.reward_funcs,
        args=args,
        train_dataset=tiny.prompts("train"),
        eval_dataset=tiny.prompts("test", n=64),
        peft_config=lora.peft_config(),
    )
    trainer.train()
    assert max(logged(trainer, "ratio/max_error")) <= 1e-5
    before, after = logged(trainer, "eval_reward")
    return sign * (after - before)


# half the samples would gain too little to be told from chance, and lose 0.3
@pytest.mark.parametrize(("sign", "micro_batches"), [(1.0, 4), (-1.0, 2)], ids=["learns", "sign flipped"])
def test_the_demo_at_a_reduced_size(tmp_path, sign, micro_batches):
    gain = held_out_gain(tmp_path, sign, micro_batches)
    assert gain * sign > MARGIN, gain


# On recorded steps: each with both signs. Two updates per rollout where the losses differ from grpo's only then.
TWICE = "--steps_per_generation 4 --gradient_accumulation_steps 2 --max_steps 8 --eval_steps 8"
RECORDED = {
    "noise": "--step_weight noise",
    "velocity": "--step_weight velocity",
    "guard's weight": "--step_weight guard",
    "grpo_guard": f"--loss_type grpo_guard {TWICE}",
    "dppo": f"--loss_type dppo {TWICE}",
    "precise": "--sde_type precise --noise_level 1.5",
    "wan_sde": "--sde_type wan_sde --noise_level 1.0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize(("sign", "micro_batches"), [(1.0, 4), (-1.0, 2)], ids=["learns", "sign flipped"])
def test_recorded_steps(tmp_path, sign, micro_batches, name):
    gain = held_out_gain(tmp_path, sign, micro_batches, *RECORDED[name].split())
    assert gain * sign > MARGIN, gain


def test_held_out_words_are_not_trained_on():
    train, test = (set(tiny.prompts(split)["prompt"]) for split in ("train", "test"))
    assert isinstance(tiny.prompts("test"), Dataset) and not train & test
