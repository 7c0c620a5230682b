"""Train from any YAML file of settings: `python examples/train.py examples/demo.yaml --max_steps 4`."""

import sys

from diffusion_grpo import DiffusionGRPOTrainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.data.prompts import load_prompts

script, lora, args = parse_train_arguments(sys.argv[1], sys.argv[2:])
held_out = script.eval_dataset and load_prompts(script.eval_dataset, script.dataset_test_split)
if held_out and script.eval_max_prompts:
    held_out = held_out.select(range(min(script.eval_max_prompts, len(held_out))))
trainer = DiffusionGRPOTrainer(
    model=script.model,
    reward_funcs=script.reward_funcs,
    args=args,
    train_dataset=load_prompts(script.dataset, script.dataset_train_split),
    eval_dataset=held_out,
    peft_config=lora.peft_config(args.lora_path),
    eval_reward_funcs=script.eval_reward_funcs,
)
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
