"""Tell quantised networks and weights from plain ones."""

from torch import nn


def find_quantization(network: nn.Module) -> str | None:
    """Return how a network is quantised, under diffusers' names; None for plain weights."""
    config = getattr(getattr(network, "hf_quantizer", None), "quantization_config", None)
    if config is None:
        return None
    method = str(getattr(config.quant_method, "value", config.quant_method))
    if method == "bitsandbytes":
        return "bitsandbytes_4bit" if config.load_in_4bit else "bitsandbytes_8bit"
    return method


def is_quantized_weight(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is stored in a special form instead of a plain tensor of numbers."""
    return type(parameter) is not nn.Parameter or not parameter.is_floating_point()


def list_quantized_weights(model: nn.Module) -> list[str]:
    """Return the names of the quantised parameters in a model; none if no network in it is quantised."""
    if not any(find_quantization(module) for module in model.modules()):
        return []
    return [name for name, parameter in model.named_parameters() if is_quantized_weight(parameter)]
