"""A pipeline has the family of its class, and a family has defaults."""

import tiny_pipelines
import torch

from diffusion_grpo.pipelines import FAMILIES, Family, family_of
from diffusion_grpo.pipelines.glm_image import GlmImage


def test_every_token_follows_the_recorded_ones():
    """The first sample's prompt is padded by one on the left; the last token needs no position after it."""
    prompt = {
        "input_ids": torch.tensor([[0, 5], [6, 7]]),
        "attention_mask": torch.tensor([[0, 1], [1, 1]]),
        "extra": 1,
    }
    found = Family().scoring(None, prompt, ids=torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert found["input_ids"].tolist() == [[0, 5, 1, 2], [6, 7, 4, 5]] and found["extra"] == 1
    assert found["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert found["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


def test_a_pipeline_has_the_family_of_its_class_or_of_one_that_it_inherits_from():
    assert type(family_of(tiny_pipelines.build("sd3")[0])) is Family
    glm = tiny_pipelines.build("glm_image")[0]
    assert isinstance(family_of(glm), GlmImage) and family_of(glm) is FAMILIES["GlmImagePipeline"]
    glm.__class__ = type("Subclass", (type(glm),), {})
    assert isinstance(family_of(glm), GlmImage)
