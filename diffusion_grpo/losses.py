"""Public name of the losses, for dotted paths in settings; see [`diffusion_grpo.algorithms.losses`]."""

from .algorithms.losses import *  # noqa: F403
from .algorithms.losses import __all__  # noqa: F401
