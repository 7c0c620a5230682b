"""Qwen-Image learns to write: qwen_image.yaml in Python."""

from peft import LoraConfig

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts

args = DiffusionGRPOConfig(
    output_dir="outputs/qwen-image",
    num_generations=16,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=16,
    steps_per_generation=32,
    learning_rate=0.0003,
    bf16=True,
    num_inference_steps=10,
    eval_num_inference_steps=50,
    height=512,
    width=512,
    pipeline_kwargs={"true_cfg_scale": 4.0, "negative_prompt": " "},
    sde_type="flow_sde",
    noise_level=1.2,
    sde_window=[0, 5],
    sde_window_size=2,
    deterministic_outside_window=True,
    scale_rewards="batch",
    drop_zero_advantages=True,
    epsilon=0.0001,
    beta=0.0,
    eval_strategy="steps",
    eval_steps=60,
    save_steps=60,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="Qwen/Qwen-Image",
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
            "img_mlp.net.0.proj",
            "img_mlp.net.2",
            "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        ],
    ),
)
trainer.train()
trainer.save_model()
