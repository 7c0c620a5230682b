"""Losses, under the name that dotted paths in settings use; see [`diffusion_grpo.algorithms.losses`]."""

from .algorithms.losses import *  # noqa: F403
from .algorithms.losses import __all__  # noqa: F401
