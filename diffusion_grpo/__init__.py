"""GRPO for diffusers pipelines: `DiffusionGRPOTrainer`, `DiffusionGRPOConfig`, `check_pipeline`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config.settings import DiffusionGRPOConfig
    from .policy.check import ReplayReport, check_pipeline
    from .trainer import DiffusionGRPOTrainer

from .quiet import quiet_imports

quiet_imports()

__version__ = "0.1.0"
__all__ = ["DiffusionGRPOConfig", "DiffusionGRPOTrainer", "ReplayReport", "check_pipeline"]

_HOMES = {
    "DiffusionGRPOConfig": "config.settings",
    "DiffusionGRPOTrainer": "trainer",
    "ReplayReport": "policy.check",
    "check_pipeline": "policy.check",
}


def __getattr__(name: str) -> Any:
    # lazily, so that `diffusion-grpo --help` does not wait for torch
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
