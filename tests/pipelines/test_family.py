"""A pipeline has the family of its class, and a family has defaults."""

import tiny_pipelines

from diffusion_grpo.pipelines import FAMILIES, Family, family_of
from diffusion_grpo.pipelines.glm_image import GlmImage


def test_a_pipeline_has_the_family_of_its_class_or_of_one_that_it_inherits_from():
    assert type(family_of(tiny_pipelines.build("sd3")[0])) is Family
    glm = tiny_pipelines.build("glm_image")[0]
    assert isinstance(family_of(glm), GlmImage) and family_of(glm) is FAMILIES["GlmImagePipeline"]
    glm.__class__ = type("Subclass", (type(glm),), {})
    assert isinstance(family_of(glm), GlmImage)
