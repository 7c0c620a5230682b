"""Find settings that have no effect because another one is off.

They are no errors: turning off a part of a run for a comparison should not take removing its settings too.
"""

from .defaults import Sizes
from .source import config_fields

GAE = "advantage_estimator: gae"
NEEDED = {
    "gamma": GAE,
    "gae_lambda": GAE,
    "value_clip": GAE,
    "value_learning_rate": GAE,
    "ref_model_mixup_alpha": "sync_ref_model: true",
    "ref_model_sync_steps": "sync_ref_model: true",
    "offload_ref_model": "beta above 0",
    "ema_update_interval": "ema_decay",
    "validation_steps": "validation_prompts",
    "eval_steps": "eval_strategy: steps",
    "context_parallel_type": "context_parallel_size above 1",
    "advantage_clip": "an algorithm other than dpo, which only ranks samples",
}


def list_idle(args: Sizes) -> list[str]:
    """Describe settings that the user changed and that have no effect: `gamma (needs advantage_estimator: gae)`."""
    met = {
        GAE: args.advantage_estimator == "gae",
        "sync_ref_model: true": args.sync_ref_model,
        "beta above 0": args.needs_reference,
        "ema_decay": args.ema_decay is not None,
        "validation_prompts": bool(args.validation_prompts),
        "eval_strategy: steps": getattr(args.eval_strategy, "value", args.eval_strategy) == "steps",
        "context_parallel_size above 1": args.context_parallel_size > 1,
        NEEDED["advantage_clip"]: args.loss_type != "dpo",
    }
    usual = config_fields()
    return [
        f"{name} (needs {need})"
        for name, need in NEEDED.items()
        if not met[need] and getattr(args, name) != usual[name].default
    ]
