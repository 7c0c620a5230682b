"""Wan 2.1 learns to write in videos: wan21_ocr.yaml in Python, with a callback that ends the run in time.

Videos are expensive. Callbacks are those of `transformers.Trainer`, so they see each evaluation and may stop the run.
"""

from peft import LoraConfig
from transformers import TrainerCallback

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts


class StopWhenLearned(TrainerCallback):
    """Stops the run once held-out videos reach a reward, after saving a checkpoint."""

    def __init__(self, reward: float):
        self.reward = reward

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if metrics.get("eval_reward", 0.0) >= self.reward:
            control.should_save = control.should_training_stop = True


args = DiffusionGRPOConfig(
    output_dir="outputs/wan21-ocr",
    num_generations=4,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    num_batches_per_step=2,
    learning_rate=0.0001,
    max_steps=1000,
    bf16=True,
    num_inference_steps=20,
    eval_num_inference_steps=50,
    guidance_scale=4.5,
    height=240,
    width=416,
    num_frames=33,
    fps=16,
    sde_type="wan_sde",
    noise_level=1.0,
    samples_per_latent=1,
    trained_steps="all",
    noisy_steps="all_and_last",
    drop_zero_advantages=True,
    epsilon=0.001,
    beta=0.004,
    ema_decay=0.9,
    ema_update_interval=8,
    eval_strategy="steps",
    eval_steps=60,
    save_steps=120,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    reward_funcs=[{"text": {"scene": True, "match": "contains", "frames": 4, "ignore_case": True}}],
    args=args,
    callbacks=[StopWhenLearned(0.95)],
    train_dataset=load_prompts("examples/data/video_ocr.txt"),
    eval_dataset=load_prompts("examples/data/video_ocr_test.txt").select(range(4)),
    peft_config=LoraConfig(
        r=32,
        lora_alpha=64,
        init_lora_weights="gaussian",
        target_modules=["to_q", "to_k", "to_v", "to_out.0"],
    ),
)
trainer.train()
trainer.save_model()
