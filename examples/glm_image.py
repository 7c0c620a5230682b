"""GLM-Image's language model learns from four rewards: glm_image_ar.yaml in Python."""

from peft import LoraConfig

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts

args = DiffusionGRPOConfig(
    output_dir="outputs/glm-image-ar",
    train_component="vision_language_encoder",
    num_generations=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    steps_per_generation=16,
    learning_rate=5e-6,
    warmup_steps=10,
    max_grad_norm=1.0,
    offload_trajectories=True,
    temperature=0.9,
    top_p=0.75,
    importance_sampling_level="token",
    epsilon=0.2,
    beta=0.01,
    same_initial_noise=True,
    num_inference_steps=30,
    guidance_scale=1.5,
    height=1024,
    width=1024,
    eval_strategy="steps",
    eval_steps=50,
    per_device_eval_batch_size=2,
    save_steps=50,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="zai-org/GLM-Image",
    reward_funcs={
        "lpips": 0.4,
        "ssim": 0.2,
        "text": {"scene": True, "match": "contains", "ignore_case": True, "weight": 0.3},
        "aesthetic": {"std": 10, "weight": 0.1},
    },
    args=args,
    train_dataset=load_prompts("examples/data/posters.jsonl"),
    eval_dataset=load_prompts("examples/data/posters.jsonl"),
    peft_config=LoraConfig(
        r=32,
        lora_alpha=64,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
    ),
)
trainer.train()
trainer.save_model()
