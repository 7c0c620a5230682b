"""Every built-in reward has an entry."""

from diffusion_grpo.rewards.catalogue import entry


def test_a_reward_that_is_not_in_the_catalogue_says_what_its_docstring_says() -> None:
    def mood(images, model="owner/mood", **columns):
        """How cheerful it is.

        More.
        """

    assert entry("mood", mood) == ("How cheerful it is", "", "owner/mood")
