"""`make demo` without the command line: the embedded model learns to spell and to colour."""

from peft import LoraConfig

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, tiny

layers = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
layers += ["net.0.proj", "net.2"]
prompt_layers = ["norm1.linear", "norm1_context.linear", "context_embedder", "text_embedder.linear_1"]
prompt_layers += ["text_embedder.linear_2"]
rollout = dict(num_inference_steps=8, noise_level=0.7, sde_window=[0, 4], deterministic_outside_window=True)
picture = dict(height=32, width=96, guidance_scale=1.0, pipeline_kwargs={"max_sequence_length": 1})
batches = dict(num_generations=16, per_device_train_batch_size=64, gradient_accumulation_steps=4, max_steps=32)
evaluation = dict(eval_strategy="steps", eval_steps=16, eval_on_start=True, per_device_eval_batch_size=96)

trainer = DiffusionGRPOTrainer(
    model="tiny",
    reward_funcs=["text", "color"],
    eval_reward_funcs="tesseract",
    args=DiffusionGRPOConfig(
        "outputs/demo-py",
        reward_weights=[0.6, 0.4],
        learning_rate=1.5e-3,
        lr_scheduler_type="linear",
        gradient_checkpointing=False,
        **rollout,
        **picture,
        **batches,
        **evaluation,
    ),
    train_dataset=tiny.prompts("train"),
    eval_dataset=tiny.prompts("test", n=96),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=layers + prompt_layers),
)
trainer.train()
trainer.save_model()
