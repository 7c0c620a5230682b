"""What individual pipelines need beyond the defaults; most need nothing.

To add one, write a file with a subclass of `Family` that says only what differs, and a line in `FAMILIES`.
"""

from diffusers import DiffusionPipeline

from .family import Family
from .glm_image import GlmImage

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {"GlmImagePipeline": GlmImage()}


def family_of(pipe: DiffusionPipeline | type[DiffusionPipeline]) -> Family:
    """Return the family of the pipeline's class, or of one it inherits from; otherwise the default family.

    Args:
        pipe: any pipeline, or its class.

    Examples:
        >>> type(family_of(pipe)).__name__
        'Family'
    """
    pipeline = pipe if isinstance(pipe, type) else type(pipe)
    return next((FAMILIES[cls.__name__] for cls in pipeline.__mro__ if cls.__name__ in FAMILIES), Family())
