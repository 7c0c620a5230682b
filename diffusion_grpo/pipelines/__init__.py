"""What single pipelines need beyond the defaults; most need nothing.

To add one, write a file with a subclass of `Family` that says only what differs, and a line in `FAMILIES`.
"""

from diffusers import DiffusionPipeline

from .family import Family
from .glm_image import GlmImage

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {"GlmImagePipeline": GlmImage()}


def family_of(pipe: DiffusionPipeline) -> Family:
    """Return the family of the pipeline's class, or of one it inherits from; by default one without demands.

    Args:
        pipe: any pipeline.

    Examples:
        >>> type(family_of(pipe)).__name__
        'Family'
    """
    return next((FAMILIES[cls.__name__] for cls in type(pipe).__mro__ if cls.__name__ in FAMILIES), Family())
