"""FLUX.1 dev learns to write: flux.yaml in Python."""

from peft import LoraConfig

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts

args = DiffusionGRPOConfig(
    output_dir="outputs/flux",
    num_generations=24,
    per_device_train_batch_size=3,
    gradient_accumulation_steps=24,
    steps_per_generation=48,
    learning_rate=0.0003,
    bf16=True,
    num_inference_steps=6,
    eval_num_inference_steps=28,
    guidance_scale=3.5,
    height=512,
    width=512,
    pipeline_kwargs={"max_sequence_length": 128},
    sde_type="flow_sde",
    noise_level=0.9,
    noise_in_last_step=True,
    scale_rewards="batch",
    drop_zero_advantages=True,
    epsilon=0.0001,
    beta=0.0,
    ema_decay=0.9,
    ema_update_interval=8,
    eval_strategy="steps",
    eval_steps=60,
    save_steps=60,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="black-forest-labs/FLUX.1-dev",
    reward_funcs=[{"text": {"scene": True, "match": "contains", "ignore_case": True, "ignore_spaces": True}}],
    args=args,
    train_dataset=load_prompts("examples/data/ocr.txt"),
    eval_dataset=load_prompts("examples/data/ocr.txt"),
    peft_config=LoraConfig(
        r=64,
        lora_alpha=128,
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
            "ff.net.0.proj",
            "ff.net.2",
            "ff_context.net.0.proj",
            "ff_context.net.2",
        ],
    ),
)
trainer.train()
trainer.save_model()
