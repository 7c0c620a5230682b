"""What a user adds to a model card: in its header and text, remembered, or refused."""

import pytest
from huggingface_hub import ModelCard

from diffusion_grpo.run.card import write_model_card
from diffusion_grpo.run.card_details import CardDetails

RUN = {
    "model": "a/b",
    "trains_by": "LoRA rank 4",
    "pipeline": "SomePipeline",
    "pipeline_tag": "text-to-image",
    "component": "transformer",
    "reward_funcs": ["brightness"],
    "eval_reward_funcs": [],
    "reward_weights": [1.0],
    "settings": {},
    "versions": {"torch": "2"},
}
OTHER = {"license": "other", "license_name": "flux", "license_link": "https://somewhere"}


def write(folder, **given):
    write_model_card(folder, RUN | {"license": OTHER}, [], updates=1, details=CardDetails().add(**given))
    return ModelCard.load(folder / "README.md")


def test_what_is_given_stands_in_the_header_and_the_text(tmp_path):
    given = {"dataset_name": "me/prompts", "license": "mit", "language": "en", "tasks": "image-to-image"}
    card = write(tmp_path, model_name="My *model*", tags=["anime", "grpo"], finetuned_from="c/d", **given)
    data = card.data.to_dict()
    assert data["datasets"] == ["me/prompts"] and data["language"] == ["en"] and data["license"] == "mit"
    assert "license_name" not in data and "license_link" not in data  # those of the base model's licence
    assert data["tags"] == ["diffusion-grpo", "grpo", "reinforcement-learning", "lora", "anime"]
    assert data["base_model"] == "c/d" and data["base_model_relation"] == "adapter"
    assert data["pipeline_tag"] == "image-to-image" and data["library_name"] == "diffusers"
    assert "# My \\*model\\*" in card.content
    assert "The prompts are from [me/prompts](https://huggingface.co/datasets/me/prompts)." in card.content


def test_without_details_the_run_speaks(tmp_path):
    card = write(tmp_path)
    data = card.data.to_dict()
    assert {name: data[name] for name in OTHER} == OTHER and data["base_model"] == "a/b"
    assert not {"datasets", "language"} & data.keys() and "The prompts are from" not in card.content


def test_datasets_without_a_page_on_the_hub_stand_in_the_text_alone(tmp_path):
    (tmp_path / "prompts.txt").write_text("a")
    card = write(tmp_path, dataset_name=[str(tmp_path / "prompts.txt"), "<all> mine"])
    assert "datasets" not in card.data.to_dict()
    assert "The prompts are from prompts.txt, \\<all\\> mine." in card.content
    card = write(tmp_path, dataset_tags=["me/a", "me/b"], dataset="Signs")
    assert card.data.datasets == ["me/a", "me/b"]
    links = "[me/a](https://huggingface.co/datasets/me/a), [me/b](https://huggingface.co/datasets/me/b)"
    assert f"The prompts are from Signs ({links})." in card.content


def test_what_was_given_before_stays():
    details = CardDetails().add(tags="anime", license="mit").add(license="apache-2.0", model_name="x")
    assert details == CardDetails(title="x", tags=("anime",), license="apache-2.0")
    assert details.add() == details


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset_args": "split=train"}, "dataset_args='split=train' cannot be shown on this card"),
        ({"finetuned_from": "a b/c"}, "finetuned_from='a b/c' is not a model on the Hub; give its id, owner/name"),
        ({"tasks": ["text-to-image", "image-to-image"]}, "tasks=.*: a model card takes only one; choose one"),
        ({"tags": ["a", 1]}, r"tags=\['a', 1\] on a model card must be a text, or a list of texts"),
        ({"license": 5}, "license=5 on a model card must be a text"),
    ],
)
def test_what_a_card_cannot_say_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        CardDetails().add(**given)
