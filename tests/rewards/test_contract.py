"""What a user may write as `reward_funcs`, and what rewards get and return: groups, tensors, frames, options."""

import functools
import inspect
from functools import partial

import pytest
import torch
from own_rewards import scaled
from plain_images import FOUR, FOUR_PROMPTS

from diffusion_grpo.rewards import (
    REWARDS,
    Reward,
    check_columns,
    check_eval_rewards,
    check_groups,
    groupwise,
    load_rewards,
    reward_weights,
    score,
    takes_tensors,
)
from diffusion_grpo.rewards.contract import list_columns

# what is written


def test_weights_come_from_one_place() -> None:
    rewards = load_rewards({"brightness": 2, "sharpness": {}})
    assert reward_weights(rewards, None) == [2, 1]
    with pytest.raises(ValueError, match="reward_weights"):
        reward_weights(rewards, [1, 1])
    with pytest.raises(ValueError, match="reward_weights"):
        reward_weights(load_rewards("brightness"), [1, 2, 3])
    with pytest.raises(ValueError, match="reward_funcs"):
        reward_weights([], None)


@pytest.mark.parametrize("name", ["text", "tesseract", "text_by_model"])
def test_wanted_texts_that_are_no_text_are_refused(name) -> None:
    rewards = load_rewards({name: {"target_column": "word"}})
    for kind in ("string", "large_string", "int64", "null"):
        check_columns(rewards, ["prompt", "word"], "train", {"word": kind})
    for kind in ("float64", "bool", "timestamp[s]"):
        with pytest.raises(ValueError, match="'word'"):
            check_columns(rewards, ["prompt", "word"], "train", {"word": kind})
    check_columns(load_rewards("ssim"), ["prompt", "target"], "train", {"target": "float64"})


def test_columns_that_the_dataset_lacks_are_refused() -> None:
    def needs(images, mood, **columns): ...
    def single(images, prompt): ...
    def may(images, prompt=None): ...

    check_columns(load_rewards([needs, {"ssim": {"target_column": "goal"}}]), ["prompt", "mood", "goal"], "train")
    with pytest.raises(ValueError, match="'mood'"):
        check_columns(load_rewards(needs), ["prompt"], "train")
    with pytest.raises(ValueError, match="'target'"):
        check_columns(load_rewards("ssim"), ["prompt"], "train")
    check_columns(load_rewards([scaled, "text"]), ["prompt"], "train")
    with pytest.raises(ValueError, match="'single'.*'prompts'"):
        check_columns(load_rewards(single), ["prompt"], "train")
    with pytest.raises(ValueError, match="'may'.*'prompts'"):
        check_columns(load_rewards(may), ["prompt"], "train")
    check_columns(load_rewards([partial(may, prompt="of my own")]), ["prompt"], "train")
    with pytest.raises(ValueError, match="'word'"):
        check_columns(load_rewards({scaled: {"text_column": "word"}}), ["prompt"], "train")
    remote = load_rewards({"remote": {"url": "http://a", "columns": ["goal", "mood"]}})
    judge = load_rewards({"vlm_judge": {"url": "http://a", "model": "m", "template": "Is {prompt} {mood}? {goal}"}})
    for rewards in (remote, judge):
        assert {"goal", "mood"} <= list_columns(*rewards)
        check_columns(rewards, ["prompt", "mood", "goal"], "train")
        with pytest.raises(ValueError, match="'mood'"):
            check_columns(rewards, ["prompt", "goal"], "train")


def test_an_evaluation_only_reward_may_not_take_the_name_of_another() -> None:
    check_eval_rewards(load_rewards({"brightness": 0.5}), load_rewards("brightness"))
    with pytest.raises(ValueError, match="'scaled'"):
        check_eval_rewards(load_rewards(scaled), load_rewards({scaled: {"factor": 2.0}}))


def test_groups_must_lie_on_one_process() -> None:
    @groupwise
    def rank(images): ...

    check_groups(load_rewards(rank), 8, 4)
    check_groups(load_rewards(scaled), 6, 4)
    with pytest.raises(ValueError, match="'rank'.*num_generations"):
        check_groups(load_rewards(rank), 6, 4)


def test_options_for_the_record_leave_tokens_out() -> None:
    def remote(images, *, url: str = "", token: str | None = None): ...

    (reward,) = load_rewards({remote: {"url": "u", "token": "secret", "clip": [0, 1], "weight": 2}})
    assert reward.options() == {"url": "u", "clip": [0, 1]}


# what is done to the values


def test_normalised_then_clipped_then_compared() -> None:
    raw = [0, 0.2, 0.4, 1]

    def values(**options):
        return score(load_rewards({scaled: options}), images=FOUR, prompts=FOUR_PROMPTS)[:, 0].tolist()

    assert values() == pytest.approx(raw)
    assert values(mean=0.4, std=0.2) == pytest.approx([-2, -1, 0, 3])
    assert values(mean=0.4, std=0.2, clip=[-1, 1]) == pytest.approx([-1, -1, 0, 1])
    assert values(threshold=0.3) == [0, 0, 1, 1] and values(threshold=1.0) == [0, 0, 0, 1]
    assert values(mean=0.4, std=0.2, threshold=-1.5) == [0, 1, 1, 1]


def test_none_stays_none_under_every_option() -> None:
    def silent(images):
        return [None] * len(images)

    (reward,) = load_rewards({silent: {"mean": 1, "std": 2, "clip": [0, 1], "threshold": 0}})
    assert score([reward, scaled], images=FOUR, prompts=FOUR_PROMPTS)[:, 0].isnan().all()


# options and columns

OPTIONS_OF_REWARDS = {"scene", "match", "target_column", "engine_kwargs", "fps", "sampling_rate"}


def handed(name: str, columns: dict) -> tuple[dict, dict]:
    """What a reward of the catalogue is called with beside these columns, and its signature."""
    reward, found = REWARDS[name], {}

    @functools.wraps(reward.__call__ if isinstance(reward, type) else reward)
    def spy(*own, **keywords):
        found.update(keywords)
        return [0.0] * len(keywords.get("prompts") or keywords.get("images") or keywords["videos"])

    function = object.__new__(type("Spy", (reward,), {"__call__": spy})) if isinstance(reward, type) else spy
    kind = "videos" if name in ("videoalign", "flicker", "smoothness", "motion") else "images"
    samples = {"images": FOUR[:1], "videos": [FOUR[:2]]}[kind]
    score([Reward(function, name)], **{kind: samples}, prompts=["a"], columns=columns, fps=8.0)
    return found, inspect.signature(spy).parameters


@pytest.mark.parametrize("name", REWARDS)
def test_no_column_is_taken_for_an_option(name) -> None:
    made_with = set(inspect.signature(REWARDS[name]).parameters) if isinstance(REWARDS[name], type) else set()
    options = {key for key, own in inspect.signature(REWARDS[name]).parameters.items() if own.default is not own.empty}
    columns = {key: ["poison"] for key in (OPTIONS_OF_REWARDS | made_with | options) - {"self", "columns"}}
    found, parameters = handed(name, columns)
    for key, own in parameters.items():
        if own.default is not own.empty and own.kind is not own.VAR_KEYWORD:
            assert found.get(key) != ["poison"], key


def test_a_user_s_own_default_is_filled_by_a_column_unless_it_is_set() -> None:
    def lengths(images, word=None, factor=1.0):
        return [factor * len(own) for own in word] if isinstance(word, list) else [-1.0] * len(images)

    class Object:
        def __call__(self, images, word=None):
            return lengths(images, word)

    columns = {"word": ["a", "bb", "ccc", "dddd"], "other": [0] * 4}
    given = {"images": FOUR, "prompts": FOUR_PROMPTS, "columns": columns}
    set_ones = [partial(lengths, word="fixed"), *load_rewards({lengths: {"word": "fixed"}})]
    table = score([lengths, Object(), partial(lengths, factor=2.0), *set_ones], **given)
    assert table.tolist() == [[n, n, 2 * n, -1, -1] for n in (1, 2, 3, 4)]


def test_a_network_is_called_with_what_its_forward_takes() -> None:
    class Long(torch.nn.Module):
        def forward(self, images, word, prompts, factor=1.0):
            return torch.tensor([factor * len(own) for own in word])

    class Shape(torch.nn.Module):
        @takes_tensors
        def forward(self, images):
            return [images.shape[1]] * len(images)

    set_ones = [{Long(): {"name": "twice", "factor": 2.0}}, {partial(Long(), factor=3.0): {"name": "thrice"}}]
    rewards = load_rewards([Long(), Shape(), *set_ones])
    with pytest.raises(ValueError, match="'Long'.*'word'"):
        check_columns(rewards, ["prompt"], "train")
    columns = {"word": ["a", "bb", "ccc", "dddd"], "other": [0] * 4}
    table = score(rewards, images=FOUR, prompts=FOUR_PROMPTS, columns=columns)
    assert table.tolist() == [[n, 1, 2 * n, 3 * n] for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("column", ["match", "images", "prompts"])
def test_a_column_that_cannot_be_passed_is_refused(column) -> None:
    rewards = load_rewards({"text": {"target_column": column}})
    with pytest.raises(ValueError, match=f"'text'.*'{column}'"):
        check_columns(rewards, ["prompt", column], "train_dataset")
