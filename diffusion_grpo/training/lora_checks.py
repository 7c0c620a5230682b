"""Refuse LoRAs that cannot be trained exactly, or that plain diffusers could not load."""

from peft import PeftConfig

SAFE_INITS = ("gaussian", "orthogonal")  # in addition to True and False, these leave the base model unchanged


def check_peft_config(peft_config: PeftConfig | None, beta: float = 0.0) -> None:
    """Refuse adapters that make the replay differ from the rollout, lack a reference, or cannot be loaded later."""
    if peft_config is None:
        return
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(f"peft_config is {peft_config!r}; pass a LoraConfig of peft.")
    reference = " and beta > 0 has no reference" if beta > 0 else ""
    kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
    if kind != "LORA":
        raise ValueError(f"peft_config is of type {kind}; only LoraConfig gives weights that diffusers loads.")
    if isinstance(peft_config.init_lora_weights, str) and peft_config.init_lora_weights.lower() not in SAFE_INITS:
        raise ValueError(
            f"init_lora_weights={peft_config.init_lora_weights!r} changes the base model's own weights, so that the "
            f"saved LoRA does not fit the published model{reference}; use True, 'gaussian' or 'orthogonal'."
        )
    if peft_config.bias != "none":
        raise ValueError(
            f"bias={peft_config.bias!r} trains the base model's own biases, which the saved LoRA does not hold"
            f"{reference}; use bias='none'."
        )
    for name in ("modules_to_save", "trainable_token_indices"):
        value = getattr(peft_config, name, None)
        if value:
            raise ValueError(
                f"{name}={value!r} trains weights of the base model itself, which diffusers does not load with a "
                "saved LoRA; leave it out, or train all weights without peft_config."
            )
    if peft_config.target_parameters:
        raise ValueError(
            f"target_parameters={peft_config.target_parameters!r} gives a LoRA to single parameters, which diffusers "
            "does not load; name the layers that hold them in target_modules."
        )
    if getattr(peft_config, "lora_dropout", 0.0):
        raise ValueError(
            f"lora_dropout={peft_config.lora_dropout} would make every replay differ from its rollout and the ratio "
            "from 1; set it to 0."
        )
