"""Every built-in reward has an entry, and is on a page."""

from pathlib import Path

from diffusion_grpo.rewards import REWARDS
from diffusion_grpo.rewards.catalogue import entry
from diffusion_grpo.rewards.models.base import ModelReward


def test_a_reward_that_is_not_in_the_catalogue_says_what_its_docstring_says() -> None:
    def mood(images, model="owner/mood", **columns):
        """How cheerful it is.

        More.
        """

    assert entry("mood", mood) == ("How cheerful it is", "", "owner/mood")


def test_the_pages_have_every_reward_and_its_weights() -> None:
    page = "".join(path.read_text() for path in (Path(__file__).parents[2] / "docs" / "rewards").glob("*.md"))
    for name, reward in REWARDS.items():
        assert f"`{name}`" in page or f"- {name}:" in page, name
        if isinstance(reward, type) and issubclass(reward, ModelReward):
            assert f"`{reward.model}`" in page or reward.model == "official", name
