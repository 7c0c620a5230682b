"""Modules as a new process finds them."""

import importlib.util
from types import ModuleType


def load_again(name: str) -> ModuleType:
    """Load a module a second time, beside the one in use: what it remembers per process is forgotten."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
