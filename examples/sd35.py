"""Stable Diffusion 3.5 Medium learns to write: sd35_ocr.yaml in Python, with a reward function of your own.

`contrast` is only evaluated: a policy that is paid for legible words alone may learn to paint black on white.
"""

from peft import LoraConfig
from PIL import Image, ImageStat

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts


def contrast(images: list[Image.Image], **columns) -> list[float]:
    """Return the standard deviation of each image's grey values, in [0, 0.5]."""
    return [ImageStat.Stat(image.convert("L")).stddev[0] / 255 for image in images]


args = DiffusionGRPOConfig(
    output_dir="outputs/sd35-ocr",
    num_generations=24,
    per_device_train_batch_size=9,
    gradient_accumulation_steps=8,
    steps_per_generation=16,
    learning_rate=0.0003,
    max_steps=1000,
    fp16=True,
    max_grad_norm=1.0,
    num_inference_steps=10,
    eval_num_inference_steps=40,
    guidance_scale=4.5,
    height=512,
    width=512,
    pipeline_kwargs={"max_sequence_length": 128},
    sde_type="flow_sde",
    noise_level=0.7,
    samples_per_latent=1,
    trained_steps="all",
    noisy_steps="all_and_last",
    scale_rewards="batch",
    advantage_clip=5,
    drop_zero_advantages=True,
    epsilon=0.0001,
    beta=0.0044,
    ema_decay=0.9,
    ema_update_interval=8,
    eval_strategy="steps",
    eval_steps=120,
    save_steps=120,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="stabilityai/stable-diffusion-3.5-medium",
    reward_funcs=[{"text": {"scene": True, "match": "contains", "ignore_case": True, "ignore_spaces": True}}],
    eval_reward_funcs=[contrast],
    args=args,
    train_dataset=load_prompts("examples/data/ocr.txt"),
    eval_dataset=load_prompts("examples/data/ocr_test.txt"),
    peft_config=LoraConfig(
        r=32,
        lora_alpha=64,
        init_lora_weights="gaussian",
        target_modules=[
            "attn.to_q",
            "attn.to_k",
            "attn.to_v",
            "attn.to_out.0",
            "attn.add_q_proj",
            "attn.add_k_proj",
            "attn.add_v_proj",
            "attn.to_add_out",
        ],
    ),
)
trainer.train()
trainer.save_model()
