"""What individual pipelines need beyond the defaults; most need nothing.

To add one, write a file with a subclass of `Family` that says only what differs, and a line in `FAMILIES`.
"""

from diffusers import DiffusionPipeline

from .family import Family
from .glm_image import GlmImage

__all__ = ["FAMILIES", "Family", "family_of", "family_of_class"]

FAMILIES: dict[str, Family] = {"GlmImagePipeline": GlmImage()}


def family_of(pipe: DiffusionPipeline) -> Family:
    """Return the family of the pipeline's class, or of one it inherits from; otherwise the default family.

    Args:
        pipe: any pipeline.

    Examples:
        >>> type(family_of(pipe)).__name__
        'Family'
    """
    return family_of_class(type(pipe))


def family_of_class(pipeline: type[DiffusionPipeline]) -> Family:
    """Return the family of a pipeline's class; see [`family_of`]."""
    return next((FAMILIES[cls.__name__] for cls in pipeline.__mro__ if cls.__name__ in FAMILIES), Family())
