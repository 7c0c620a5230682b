"""What the timed runs have in common: a LoRA's layers, and nothing that writes or prints beside what is measured."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion_grpo import DiffusionGRPOTrainer

LORA_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
QUIET: dict[str, Any] = {
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "log_completions": False,
    "gradient_checkpointing": False,
}


def silence(trainer: "DiffusionGRPOTrainer") -> None:
    """Keep a trainer from printing a line per update and from writing a report."""
    from diffusion_grpo.training.callbacks import ReportCallback
    from diffusion_grpo.training.progress import RewardProgressCallback

    for callback in (RewardProgressCallback, ReportCallback):
        trainer.remove_callback(callback)
