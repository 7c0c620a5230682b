"""FLUX.1 Kontext learns to edit: flux_kontext.yaml in Python, with a measure of its own.

The images come from the dataset. A reward sees every column of it, so one that is only evaluated can tell whether an
edit left the rest of the image alone: the edge of the frame, which none of these instructions names.

Every instruction quotes a text to write. One that quotes none would be scored by SSIM alone, which is highest where
nothing is edited.
"""

import numpy as np
from peft import LoraConfig
from PIL import Image

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
FEED_FORWARD = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2", "proj_mlp"]


def kept_edge(images: list[Image.Image], image: list, **columns) -> list[float]:
    """Return 1 minus the mean change of the outermost pixels, in [0, 1]; `image` is the column of the dataset."""
    scores = []
    for edited, source in zip(images, image, strict=True):
        source = source if isinstance(source, Image.Image) else Image.open(source)
        before, after = (np.asarray(part.convert("RGB").resize((64, 64)), dtype=float) for part in (source, edited))
        edge = np.ones((64, 64), dtype=bool)
        edge[4:-4, 4:-4] = False
        scores.append(float(1 - np.abs(before - after)[edge].mean() / 255))
    return scores


trainer = DiffusionGRPOTrainer(
    model="black-forest-labs/FLUX.1-Kontext-dev",
    reward_funcs=[
        {"ssim": {"target_column": "image", "weight": 0.5}},
        {"text": {"scene": True, "match": "contains", "weight": 0.5}},
    ],
    eval_reward_funcs=[kept_edge],
    train_dataset=load_prompts("examples/data/edits.jsonl"),
    eval_dataset=load_prompts("examples/data/edits_test.jsonl"),
    peft_config=LoraConfig(
        r=64,
        lora_alpha=128,
        init_lora_weights="gaussian",
        target_modules=[f"attn.{name}" for name in ATTENTION] + FEED_FORWARD,
    ),
    args=DiffusionGRPOConfig(
        output_dir="outputs/flux-kontext",
        bf16=True,
        learning_rate=3e-4,
        max_steps=1000,
        num_generations=21,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=21,
        steps_per_generation=42,
        num_inference_steps=6,
        guidance_scale=2.5,
        height=512,
        width=512,
        pipeline_kwargs={"max_area": 512 * 512, "_auto_resize": False, "max_sequence_length": 128},
        sde_type="flow_sde",
        noise_level=0.9,
        samples_per_latent=1,
        trained_steps="all",
        noisy_steps="all_and_last",
        scale_rewards="batch",
        drop_zero_advantages=True,
        epsilon=1e-4,
        beta=0.0,
        ema_decay=0.9,
        ema_update_interval=8,
        eval_num_inference_steps=28,
        eval_strategy="steps",
        eval_steps=60,
        save_steps=60,
        report_to="tensorboard",
    ),
)
trainer.train()
trainer.save_model()
