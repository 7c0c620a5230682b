"""Weights that stay in their files until each process takes its share, so that a machine holds a network once.

safetensors maps a file into memory: as long as nothing converts its tensors, all processes of a machine read the same
pages, which the system can drop again. What would make copies is another dtype, for which each process would convert
the whole network, and copies of the network. So a network that will be sharded is given stand-ins: its parameters have
the shape and dtype of the run and take no memory, and beside each waits the tensor of the file. Values come in one
unit or parameter at a time, when they are sharded.

A stand-in is NaN. The first call of a network fills it in, and so does whatever else reads its weights.
"""

import contextlib
import copy
import functools
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors import safe_open
from torch import Tensor, nn

WAITING = "waiting_value"  # attribute of a parameter: the tensor of its file, and the dtypes it passes on the way
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # what is read as it is


# Loading


@contextlib.contextmanager
def read_late(names: Collection[str]) -> Iterator[None]:
    """Have diffusers' networks of these names keep the dtype of their files inside, and hold their weights back.

    A network is built as always, in the dtype that is asked for: tables that it computes depend on that.

    Args:
        names: of components, which are the folders they are read from.
    """
    real = ModelMixin.__dict__["_load_pretrained_model"]

    def load(cls: type[ModelMixin], model: nn.Module, state_dict: Any, files: Any, source: Any, *args: Any, **kwargs):
        read = functools.partial(real.__get__(None, cls), model, state_dict, files, source, *args)
        stored = None
        if Path(source).name in names and kwargs.get("hf_quantizer") is None:
            stored = find_dtype(state_dict, files)
        if stored is None:
            return read(**kwargs)
        asked, kept = kwargs.get("dtype"), kwargs.get("keep_in_fp32_modules") or []
        built = {name: value.dtype for name, value in model.state_dict().items()}  # where no dtype is asked for
        result = read(**kwargs | {"dtype": stored})
        dtypes = {
            name: torch.float32 if set(kept) & set(name.split(".")) else asked or dtype
            for name, dtype in built.items()
            if dtype.is_floating_point
        }
        for name, buffer in model.named_buffers():
            if name in dtypes:
                buffer.data = buffer.data.to(dtypes[name])
        hold(model, dtypes)
        return result

    ModelMixin._load_pretrained_model = classmethod(load)
    try:
        yield
    finally:
        ModelMixin._load_pretrained_model = real


def find_dtype(state_dict: dict[str, Tensor] | None, files: Iterable[str | Path]) -> torch.dtype | None:
    """Return the narrowest dtype that holds all floating-point weights of a network's files as they are.

    Args:
        state_dict: the weights, where they are one file.
        files: the files.

    Returns:
        None where that is not float32, bfloat16 or float16, or a file is not safetensors.
    """
    if isinstance(state_dict, dict):
        found = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
    else:
        found = set()
        for path in files or ():
            if not str(path).endswith(".safetensors"):
                return None
            with safe_open(path, framework="pt") as file:
                found |= {STORED.get(file.get_slice(name).get_dtype()) for name in file.keys()}
    if not found or not found <= set(STORED.values()):
        return None
    return found.pop() if len(found) == 1 else torch.float32


# Stand-ins


def hold(network: nn.Module, dtypes: dict[str, torch.dtype] | torch.dtype) -> nn.Module:
    """Hold a network's weights back; those that are held already pass one more dtype on the way.

    Args:
        network: on the CPU.
        dtypes: of the parameters, by name or of all; others are left as they are.

    Returns:
        the network.
    """
    for name, parameter in network.named_parameters():
        dtype = dtypes.get(name) if isinstance(dtypes, dict) else dtypes
        is_plain = type(parameter.data) is Tensor and parameter.is_floating_point() and not parameter.is_meta
        if dtype is None or not is_plain:
            continue
        source, passed = getattr(parameter, WAITING, (parameter.data, []))
        parameter.data = torch.full((), torch.nan, dtype=dtype).expand(parameter.shape)
        setattr(parameter, WAITING, (source, [*passed, dtype]))
    if not getattr(network, "_fills_itself", False):
        network._fills_itself = True
        network.register_forward_pre_hook(_fill_for_call)
        network.register_state_dict_post_hook(_show_values)
        network.register_load_state_dict_pre_hook(_fill_what_is_loaded)
    return network


def is_waiting(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a stand-in."""
    return hasattr(parameter, WAITING)


def fill(parameters: Iterable[nn.Parameter], is_copied: bool | None = None) -> None:
    """Put the values in the place of stand-ins.

    Args:
        parameters: also others.
        is_copied: whether values may be written to; by default those of parameters that are trained. Others of the
            right dtype stay in their file.
    """
    for parameter in parameters:
        if not is_waiting(parameter):
            continue
        copies = parameter.requires_grad if is_copied is None else is_copied
        source, value = getattr(parameter, WAITING)[0], _value(parameter)
        parameter.data = value.clone() if copies and value.data_ptr() == source.data_ptr() else value
        delattr(parameter, WAITING)


def load_held(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """As `load_state_dict`, but stand-ins go on waiting, for these tensors, which must not be written to."""
    held = {name: parameter for name, parameter in model.named_parameters() if is_waiting(parameter)}
    if any(name not in tensors or tensors[name].shape != held[name].shape for name in held):
        held = {}  # torch says what is wrong
    for name, parameter in held.items():
        setattr(parameter, WAITING, (tensors[name], [parameter.dtype]))
    rest = {name: tensor for name, tensor in tensors.items() if name not in held}
    result = model.load_state_dict(rest, strict=not held)
    if held and (result.unexpected_keys or set(result.missing_keys) - set(held)):
        model.load_state_dict(tensors)


def copy_held(model: nn.Module) -> nn.Module:
    """Copy a model; what it holds back is not copied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if is_waiting(parameter):
            memo[id(parameter)] = nn.Parameter(parameter.data, parameter.requires_grad)
            setattr(memo[id(parameter)], WAITING, getattr(parameter, WAITING))
    return copy.deepcopy(model, memo)


def _value(parameter: nn.Parameter) -> Tensor:
    value, passed = getattr(parameter, WAITING)
    for dtype in (*passed, parameter.dtype):
        value = value.to(dtype)
    return value.to(parameter.device)


def _fill_for_call(network: nn.Module, *_: Any) -> None:
    if network._fills_itself:
        fill(network.parameters())
        network._fills_itself = False


def _show_values(network: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name, parameter in network.named_parameters():
        if is_waiting(parameter) and prefix + name in state_dict:
            state_dict[prefix + name] = _value(parameter)


def _fill_what_is_loaded(network: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    fill(parameter for name, parameter in network.named_parameters() if prefix + name in state_dict)
