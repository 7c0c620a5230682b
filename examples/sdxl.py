"""Stable Diffusion XL with DDIM and noise: sdxl.yaml in Python, started again by the same command after a break.

Then the trained pipeline is used as it is, without loading anything: `trainer.pipe` holds the LoRA.
"""

from pathlib import Path

from peft import LoraConfig
from transformers.trainer_utils import get_last_checkpoint

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts

args = DiffusionGRPOConfig(
    output_dir="outputs/sdxl",
    num_generations=16,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=32,
    learning_rate=0.0001,
    max_steps=300,
    bf16=True,
    num_inference_steps=20,
    eval_num_inference_steps=30,
    guidance_scale=5.0,
    height=1024,
    width=1024,
    sde_type="ddim",
    noise_level=1.0,
    trained_steps="all",
    num_trained_steps=10,
    step_selection="sample",
    advantage_clip=5,
    epsilon=0.0001,
    eval_strategy="steps",
    eval_steps=25,
    save_steps=50,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="stabilityai/stable-diffusion-xl-base-1.0",
    reward_funcs={"colorfulness": 0.02, "jpeg_incompressibility": 1.0},
    args=args,
    train_dataset=load_prompts("examples/data/photos.txt"),
    eval_dataset=load_prompts("examples/data/photos_test.txt"),
    peft_config=LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["to_q", "to_k", "to_v", "to_out.0"],
    ),
)
output = Path(args.output_dir)
trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
trainer.save_model()
if trainer.is_world_process_zero():
    [image] = trainer.pipe("A lighthouse keeper at breakfast", num_inference_steps=30, guidance_scale=5.0).images
    image.save(output / "after.png")
