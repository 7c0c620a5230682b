"""Arguments of a pipeline's call that the trainer sets are refused, and the message names what sets them."""

import pytest

from diffusion_grpo.config.call_arguments import check_pipeline_kwargs, explain_reserved


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("latents", "latents is set by the trainer"),
        (
            "num_inference_steps",
            "num_inference_steps is set by the trainer (num_inference_steps, eval_num_inference_steps)",
        ),
        ("sigmas", "sigmas is set by the trainer (the setting sigmas)"),
        (
            "num_images_per_prompt",
            "num_images_per_prompt would hide samples from the groups, whose size is num_generations",
        ),
    ],
)
def test_what_the_trainer_sets_is_refused(name, reason):
    assert explain_reserved(name) == reason
    with pytest.raises(ValueError) as refusal:
        check_pipeline_kwargs({"max_sequence_length": 8, name: 1})
    assert str(refusal.value) == f"pipeline_kwargs: {reason}; leave it out."


def test_all_else_is_the_users():
    assert explain_reserved("max_sequence_length") is None
    check_pipeline_kwargs({"max_sequence_length": 8})
    check_pipeline_kwargs(None)


@pytest.mark.parametrize("name", ["negative_prompt", "negative_prompt_2"])
def test_texts_in_a_list_are_refused(name):
    check_pipeline_kwargs({name: "blurry"})
    check_pipeline_kwargs({"prompt_embeds": [1.0, 2.0], "skip_guidance_layers": [7, 8]})
    with pytest.raises(ValueError, match=f"{name} is a list of 2 texts.*give one text, or add a column '{name}'"):
        check_pipeline_kwargs({name: ["blurry", "dark"]})
