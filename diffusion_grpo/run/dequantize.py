"""Replace quantised weights by plain ones while a network is saved."""

import contextlib
from collections.abc import Iterator

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from ..policy.network_gate import replace_attribute
from ..policy.quantized import is_quantized_weight


def dequantize_weight(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight of a layer, on the layer's device."""
    weight = layer.weight
    if type(weight).__name__ == "GGUFParameter":
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor  # needs the package gguf

        weight = dequantize_gguf_tensor(weight)
    elif type(weight).__module__.startswith("optimum."):  # quanto
        weight = weight.dequantize()
    else:
        weight = dequantize_module_weight(layer)
    return weight.detach().to(dtype)


def make_plain_layer(layer: nn.Module, dtype: torch.dtype) -> nn.Linear:
    """Make a plain layer on the CPU that computes the same as a quantised one."""
    weight = dequantize_weight(layer, dtype)
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=layer.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight.cpu(), requires_grad=False)
    if layer.bias is not None:
        plain.bias = nn.Parameter(layer.bias.detach().to("cpu", dtype), requires_grad=False)
    return plain


@contextlib.contextmanager
def show_plain_layers(network: nn.Module) -> Iterator[None]:
    """Replace quantised layers by plain ones inside this context, and remove quantisation from the network's config.

    LoRA layers stay, around a plain layer. This takes CPU memory for a whole plain copy.
    """
    layers = {
        name: layer
        for name, layer in network.named_modules()
        if not isinstance(layer, BaseTunerLayer)
        and layer._parameters.get("weight") is not None
        and is_quantized_weight(layer.weight)
    }
    with contextlib.ExitStack() as stack:
        for name, layer in layers.items():
            path, _, own = name.rpartition(".")
            parent = network.get_submodule(path)
            stack.callback(setattr, parent, own, layer)
            setattr(parent, own, make_plain_layer(layer, network.dtype))
        config = dict(network.config)
        config.pop("quantization_config", None)
        stack.enter_context(replace_attribute(network, "_internal_dict", type(network.config)(config)))
        stack.enter_context(replace_attribute(network, "hf_quantizer", None))
        yield
