"""HunyuanVideo with two rewards: hunyuan_video.yaml in Python."""

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer
from diffusion_grpo.data.prompts import load_prompts

args = DiffusionGRPOConfig(
    output_dir="outputs/hunyuan-video",
    num_generations=24,
    best_of_n=8,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=8,
    steps_per_generation=8,
    learning_rate=1e-05,
    weight_decay=0.0001,
    lr_scheduler_type="constant",
    max_grad_norm=1.0,
    bf16=True,
    selective_checkpointing=1.0,
    num_inference_steps=16,
    guidance_scale=6.018,
    scheduler_kwargs={"shift": 5.0},
    height=480,
    width=480,
    num_frames=53,
    fps=8,
    sde_type="dance_sde",
    noise_level=0.25,
    same_initial_noise=True,
    timestep_fraction=0.6,
    permute_steps=True,
    multi_objective_aggregation="loss_per_reward",
    advantage_clip=5,
    epsilon=0.0001,
    beta=0.0,
    save_samples_steps=10,
    eval_strategy="steps",
    eval_steps=50,
    save_steps=50,
    report_to="tensorboard",
)
trainer = DiffusionGRPOTrainer(
    model="hunyuanvideo-community/HunyuanVideo",
    reward_funcs=[
        {"videoalign": {"dimension": "VQ", "name": "vq", "weight": 1.0}},
        {"videoalign": {"dimension": "MQ", "name": "mq", "weight": 0.0}},
    ],
    args=args,
    train_dataset=load_prompts("examples/data/videos.txt"),
    eval_dataset=load_prompts("examples/data/videos.txt").select(range(4)),
)
trainer.train()
trainer.save_model()
