"""`make demo` in Python: the embedded model learns to spell and to colour, with the settings of demo.yaml."""

from pathlib import Path

from diffusion_grpo import DiffusionGRPOTrainer, tiny
from diffusion_grpo.config.parse import parse_train_arguments

settings = Path(__file__).with_name("demo.yaml")
script, lora, args = parse_train_arguments(str(settings), ["--output_dir", "outputs/demo-py"])
trainer = DiffusionGRPOTrainer(
    model=script.model,
    reward_funcs=script.reward_funcs,
    eval_reward_funcs=script.eval_reward_funcs,
    args=args,
    train_dataset=tiny.prompts("train"),
    eval_dataset=tiny.prompts("test", n=script.eval_max_prompts),
    peft_config=lora.peft_config(),
)
trainer.train()
trainer.save_model()
