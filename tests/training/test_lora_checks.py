"""LoRAs that cannot be trained exactly, or loaded again, are refused."""

import pytest
from peft import IA3Config, LoraConfig

from diffusion_grpo.training.lora_checks import check_peft_config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (IA3Config(), "is of type IA3; only LoraConfig"),
        ({"r": 4}, "peft_config is {'r': 4}; pass a LoraConfig of peft"),
        (LoraConfig(init_lora_weights="olora"), "'olora' changes the base model's own weights"),
        (LoraConfig(bias="lora_only"), "bias='lora_only' trains the base model's own biases"),
        (LoraConfig(modules_to_save=["proj_out"]), "modules_to_save=.'proj_out'. trains weights of the base model"),
        (LoraConfig(trainable_token_indices=[3]), "trainable_token_indices=.3. trains weights of the base model"),
        (LoraConfig(target_parameters=["proj"]), "target_parameters=.'proj'. gives a LoRA to single parameters"),
        (LoraConfig(lora_dropout=0.1), "lora_dropout=0.1 would make every replay differ"),
    ],
    ids=["kind", "dict", "init", "bias", "modules", "tokens", "parameters", "dropout"],
)
def test_adapters_that_make_a_replay_differ_are_refused(config, message):
    with pytest.raises(ValueError, match=message) as plain:
        check_peft_config(config)
    assert "has no reference" not in str(plain.value)


def test_adapters_that_train_exactly():
    check_peft_config(None)
    for init in (True, False, "gaussian", "orthogonal"):
        check_peft_config(LoraConfig(init_lora_weights=init), beta=0.1)
