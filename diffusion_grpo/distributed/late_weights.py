"""Weights that stay in their files until each process takes its share, so that a machine holds a network once.

safetensors maps a file into memory: as long as nothing converts its tensors, all processes of a machine read the same
pages, which the system can drop again. Each process would make copies, though, to convert the network to another dtype
or to duplicate it. So the parameters of a network that will be sharded are replaced by stand-ins, which have the shape
and dtype of the run, take no memory, and refer to the tensors of the file. Values are filled in for one unit or
parameter at a time, when it is sharded.

The elements of a stand-in are NaN. Values are also filled in by the first call of the network, and by other code that
reads its weights. Inside `read_late`, a function of this module stands in for diffusers' private method that loads.
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

WAITING = "waiting_value"  # attribute of a parameter: the tensor of its file, and the dtypes to cast it to in turn
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # dtypes that are kept


# Loading


@contextlib.contextmanager
def read_late(names: Collection[str]) -> Iterator[None]:
    """Let diffusers load networks of these names in the dtype of their files, and hold their weights back."""
    real = ModelMixin.__dict__["_load_pretrained_model"]

    def load(cls: type[ModelMixin], model: nn.Module, state_dict: Any, files: Any, source: Any, *args: Any, **kwargs):
        read = functools.partial(real.__get__(None, cls), model, state_dict, files, source, *args)
        stored = None
        if Path(source).name in names and kwargs.get("hf_quantizer") is None:
            stored = find_dtype(state_dict, files)
        if stored is None:
            return read(**kwargs)
        asked, kept = kwargs.get("dtype"), kwargs.get("keep_in_fp32_modules") or []
        built = {name: value.dtype for name, value in model.state_dict().items()}  # used if no dtype is asked for
        # built in the dtype that is asked for, on which tables that it computes depend
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
    """Return the narrowest dtype that holds all floating-point weights of a network's files exactly."""
    if isinstance(state_dict, dict):
        dtypes = {tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point()}
    else:
        dtypes = set()
        for path in files or ():
            if not str(path).endswith(".safetensors"):
                return None
            with safe_open(path, framework="pt") as file:
                kinds = {file.get_slice(name).get_dtype() for name in file.keys()}
            dtypes |= {STORED.get(kind) for kind in kinds if kind.startswith(("F", "BF"))}  # others are integers
    if not dtypes or not dtypes <= set(STORED.values()):
        return None
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


# Stand-ins


def hold(network: nn.Module, dtypes: dict[str, torch.dtype] | torch.dtype) -> nn.Module:
    """Hold a network's weights back; weights that are held already are cast to one more dtype when filled in."""
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
    """Return whether a parameter is a stand-in."""
    return hasattr(parameter, WAITING)


def fill(parameters: Iterable[nn.Parameter], is_copied: bool | None = None) -> None:
    """Replace stand-ins by their values."""
    for parameter in parameters:
        if not is_waiting(parameter):
            continue
        copies = parameter.requires_grad if is_copied is None else is_copied
        source, value = getattr(parameter, WAITING)[0], _value(parameter)
        parameter.data = value.clone() if copies and value.data_ptr() == source.data_ptr() else value
        delattr(parameter, WAITING)


def load_held(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Load a state dict; stand-ins stay, but refer to these tensors from now on, which must not be written to."""
    held = {name: parameter for name, parameter in model.named_parameters() if is_waiting(parameter)}
    if any(name not in tensors or tensors[name].shape != held[name].shape for name in held):
        held = {}  # torch reports what is wrong
    for name, parameter in held.items():
        setattr(parameter, WAITING, (tensors[name], [parameter.dtype]))
    rest = {name: tensor for name, tensor in tensors.items() if name not in held}
    result = model.load_state_dict(rest, strict=not held)
    if held and (result.unexpected_keys or set(result.missing_keys) - set(held)):
        model.load_state_dict(tensors)


def copy_held(model: nn.Module) -> nn.Module:
    """Copy a model, but not the weights that it holds back."""
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
