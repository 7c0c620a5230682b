"""What a user may write as `reward_funcs`, and what rewards get and return: groups, tensors, frames, options."""

import functools
import inspect
import math
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion_grpo.rewards import (
    REWARDS,
    Reward,
    RewardError,
    check_columns,
    check_eval_rewards,
    check_groups,
    groupwise,
    load_rewards,
    reward_weights,
    score,
    takes_tensors,
)

PICTURES = [Image.new("RGB", (8, 8), (shade, shade, shade)) for shade in (0, 51, 102, 255)]
PROMPTS = ["a", "b", "a", "b"]


def scaled(images, *, factor: float = 1.0, text_column: str | None = None, **columns):
    return [factor * image.getpixel((0, 0))[0] / 255 for image in images]


class Judge:
    def __init__(self, model: str, size: int = 3):
        self.model, self.size = model, size

    def __call__(self, images, **columns):
        return [float(self.size)] * len(images)


# what is written


@pytest.mark.parametrize(
    "written",
    [
        {"brightness": 0.6, scaled: {"factor": 2.0, "weight": 0.4}},
        [{"brightness": 0.6}, {scaled: {"factor": 2.0, "weight": 0.4}}],
        [{"brightness": {"weight": 0.6}, f"{__name__}.scaled": {"factor": 2, "weight": 0.4}}],
    ],
    ids=["mapping", "list", "dotted"],
)
def test_forms_of_the_same_two_rewards(written) -> None:
    rewards = load_rewards(written)
    assert [reward.name for reward in rewards] == ["brightness", "scaled"]
    assert reward_weights(rewards, None) == [0.6, 0.4]
    table = score(rewards, images=PICTURES, prompts=PROMPTS)
    torch.testing.assert_close(table, torch.tensor([[0, 0], [0.2, 0.4], [0.4, 0.8], [1, 2.0]]))


def test_plain_forms() -> None:
    assert load_rewards(None) == [] and load_rewards([]) == []
    assert load_rewards("brightness")[0].function is REWARDS["brightness"]
    assert [reward.name for reward in load_rewards(["brightness", scaled])] == ["brightness", "scaled"]
    assert load_rewards({"brightness": None})[0].weight is None
    reward = Reward(scaled, "mine", {"factor": 2.0})
    assert load_rewards([reward]) == [reward]


def test_a_class_is_made_with_its_arguments() -> None:
    (reward,) = load_rewards({f"{__name__}.Judge": {"model": "some/model", "size": 5, "weight": 2}})
    assert (reward.name, reward.weight, reward.function.model) == ("Judge", 2, "some/model")
    assert reward.options() == {"model": "some/model", "size": 5}
    assert score([reward], images=PICTURES, prompts=PROMPTS).tolist() == [[5.0]] * 4


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"brightness": {"wieght": 1}}, "no argument 'wieght'.*Did you mean 'weight'"),
        ({"ssim": {"target_colum": "x"}}, "no argument 'target_colum'; it has target_column, name, weight"),
        ({"ssim": {"target_column": 3}}, "target_column=3; expected str"),
        ({scaled: {"factor": "two"}}, "factor='two'; expected float"),
        ({scaled: {"images": []}}, "no argument 'images'"),
        ({"brigthness": 1}, "Did you mean 'brightness'"),
        ({"brightness": "high"}, "'brightness' has 'high'; give its weight"),
        ({"brightness": True}, "give its weight"),
        ([["brightness", 1]], "in a list"),
        (["brightness", "brightness"], "two rewards called 'brightness'"),
        ({"brightness": {"name": "reward"}}, "'reward' is a column of every table of samples"),
        ({"brightness": {"name": "a/b"}}, "'a/b' may not hold '/'"),
        ({"brightness": {"name": "a\\b"}}, r"may not hold '\\\\'"),
        ({"brightness": {"name": ""}}, "name '' is empty"),
        ({"brightness": {"name": "."}}, "nothing but dots"),
        ({"brightness": {"name": ".."}}, "name '..' holds nothing but dots and spaces"),
        ({"brightness": {"name": "  "}}, "nothing but dots and spaces"),
        ({"brightness": {"name": "a\nb"}}, r"name 'a\\nb' holds a line break"),
        ({"brightness": {"name": "a\u2028b"}}, "holds a line break"),
        ({"brightness": {"name": "a\0b"}}, "another character that cannot be printed"),
        ({"brightness": {"name": "x" * 300}}, "takes 300 bytes, more than 150"),
        ({"brightness": {"name": "好" * 80}}, "takes 240 bytes"),
        ({"brightness": {"name": 3}}, "name 3 is of type int"),
        ({"brightness": {"clip": [1, 0]}}, "low must be below high"),
        ({"brightness": {"clip": 1}}, "two numbers"),
        ({"brightness": {"std": 0}}, "above 0"),
        ({"brightness": {"mean": math.nan}}, "finite"),
        ({"brightness": {"frames": 0}}, "1 or more, or 'all'"),
        ({"motion": {"frames": 1}}, "has frames=1, but gets whole videos"),
        ({f"{__name__}.Judge": {"size": 3}}, "needs the argument 'model'"),
        ({f"{__name__}.Judge": {"model": "m", "size": 0.5}}, "size=0.5; expected int"),
    ],
    ids=lambda value: str(value).split(" at 0x")[0][:60],
)
def test_what_is_wrong_is_refused(written, said) -> None:
    with pytest.raises(ValueError, match=said) as refusal:
        load_rewards(written)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["two words", "<lambda>", "Schärfe", "好"])
def test_names_of_other_scripts_stay(name) -> None:
    assert load_rewards({"brightness": {"name": name}})[0].name == name


def test_the_same_reward_twice_under_two_names() -> None:
    rewards = load_rewards([{scaled: {"factor": 2.0}}, {scaled: {"name": "half", "factor": 0.5}}])
    table = score(rewards, images=PICTURES[-1:], prompts=["a"])
    assert [reward.name for reward in rewards] == ["scaled", "half"] and table.tolist() == [[2.0, 0.5]]


def test_weights_come_from_one_place() -> None:
    rewards = load_rewards({"brightness": 2, "sharpness": {}})
    assert reward_weights(rewards, None) == [2, 1]
    with pytest.raises(ValueError, match="use one of the two"):
        reward_weights(rewards, [1, 1])
    with pytest.raises(ValueError, match="3 entries for 1"):
        reward_weights(load_rewards("brightness"), [1, 2, 3])
    with pytest.raises(ValueError, match="empty"):
        reward_weights([], None)


def test_columns_that_the_dataset_lacks_are_refused() -> None:
    def needs(images, mood, **columns): ...

    check_columns(load_rewards([needs, {"ssim": {"target_column": "goal"}}]), ["prompt", "mood", "goal"], "train")
    with pytest.raises(ValueError, match="'needs' needs the column 'mood', which train lacks; it has prompt"):
        check_columns(load_rewards(needs), ["prompt"], "train")
    with pytest.raises(ValueError, match="'ssim' needs the column 'target'"):
        check_columns(load_rewards("ssim"), ["prompt"], "train")
    check_columns(load_rewards([scaled, "text"]), ["prompt"], "train")
    with pytest.raises(ValueError, match="'word'"):
        check_columns(load_rewards({scaled: {"text_column": "word"}}), ["prompt"], "train")


def test_a_judge_may_not_take_the_name_of_another_reward() -> None:
    check_eval_rewards(load_rewards({"brightness": 0.5}), load_rewards("brightness"))
    with pytest.raises(ValueError, match="different rewards called 'scaled'"):
        check_eval_rewards(load_rewards(scaled), load_rewards({scaled: {"factor": 2.0}}))


def test_groups_must_lie_on_one_process() -> None:
    @groupwise
    def rank(images): ...

    check_groups(load_rewards(rank), 8, 4)
    check_groups(load_rewards(scaled), 6, 4)
    with pytest.raises(ValueError, match="'rank' needs whole groups.*6 samples.*num_generations=4"):
        check_groups(load_rewards(rank), 6, 4)


def test_options_for_the_record_leave_tokens_out() -> None:
    def remote(images, *, url: str = "", token: str | None = None): ...

    (reward,) = load_rewards({remote: {"url": "u", "token": "secret", "clip": [0, 1], "weight": 2}})
    assert reward.options() == {"url": "u", "clip": [0, 1]}


# what is done to the values


def test_normalised_then_clipped_then_compared() -> None:
    raw = [0, 0.2, 0.4, 1]

    def values(**options):
        return score(load_rewards({scaled: options}), images=PICTURES, prompts=PROMPTS)[:, 0].tolist()

    assert values() == pytest.approx(raw)
    assert values(mean=0.4, std=0.2) == pytest.approx([-2, -1, 0, 3])
    assert values(mean=0.4, std=0.2, clip=[-1, 1]) == pytest.approx([-1, -1, 0, 1])
    assert values(threshold=0.3) == [0, 0, 1, 1]
    assert values(mean=0.4, std=0.2, threshold=-1.5) == [0, 1, 1, 1]


def test_none_stays_none_under_every_option() -> None:
    def silent(images):
        return [None] * len(images)

    (reward,) = load_rewards({silent: {"mean": 1, "std": 2, "clip": [0, 1], "threshold": 0}})
    assert score([reward, scaled], images=PICTURES, prompts=PROMPTS)[:, 0].isnan().all()


# groups


def test_a_groupwise_reward_sees_one_group_at_a_time() -> None:
    seen = []

    @groupwise
    def rank(images, prompts, mood):
        seen.append((prompts, mood))
        shades = [image.getpixel((0, 0))[0] for image in images]
        return [sum(shade > other for other in shades) for shade in shades]

    table = score([rank], images=PICTURES, prompts=PROMPTS, columns={"mood": [1, 2, 3, 4]})
    assert seen == [(["a", "a"], [1, 3]), (["b", "b"], [2, 4])]
    assert table.tolist() == [[0], [0], [1], [1]]
    seen.clear()
    table = score([rank], images=PICTURES, prompts=PROMPTS, columns={"mood": [1, 2, 3, 4]}, groups=[7, 7, 7, 5])
    assert [len(prompts) for prompts, _ in seen] == [3, 1] and table[:, 0].tolist() == [0, 1, 2, 0]


def test_a_groupwise_answer_is_checked_by_group(tmp_path) -> None:
    @groupwise
    def broken(images, prompts):
        return [math.nan if prompt == "b" else 0.0 for prompt in prompts]

    with pytest.raises(RewardError, match="returned nan.*prompt 'b'.*broken-1.png"):
        score([broken], images=PICTURES, prompts=PROMPTS, failure_dir=tmp_path)


def test_async_groups_are_awaited_together_without_gradients() -> None:
    @groupwise
    async def first(images):
        assert not torch.is_grad_enabled()
        return [float(len(images))] * len(images)

    assert score([first], images=PICTURES, prompts=PROMPTS, groups=[0, 0, 0, 1]).tolist() == [[3], [3], [3], [1]]


def test_no_gradients() -> None:
    def grad(images):
        return [float(torch.is_grad_enabled())] * len(images)

    assert score([grad], images=PICTURES, prompts=PROMPTS).sum() == 0


# tensors and frames


def test_tensors_are_in_range() -> None:
    seen = []

    @takes_tensors
    def first(images, completions):
        assert images is completions
        seen.append(images)
        return images.mean((1, 2, 3, 4))

    @takes_tensors
    def second(videos):
        seen.append(videos)
        return videos[:, 0, 0, 0, 0]

    table = score([first, partial(second)], images=PICTURES, prompts=PROMPTS)
    torch.testing.assert_close(table, torch.tensor([[0, 0], [0.2, 0.2], [0.4, 0.4], [1, 1.0]]))
    assert torch.equal(seen[0], seen[1]) and seen[0].shape == (4, 1, 3, 8, 8) and seen[0].dtype == torch.float32
    videos = [[picture] * 3 for picture in PICTURES]
    torch.testing.assert_close(score([first, second], videos=videos, prompts=PROMPTS), table)
    assert seen[2].shape == (4, 3, 3, 8, 8)


def test_tensors_keep_pixels_and_channels_in_place() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)

    @takes_tensors
    def compare(images):
        np.testing.assert_allclose(images[0, 0].permute(1, 2, 0).numpy(), pixels / 255, atol=1e-7)
        return [1.0]

    assert score([compare], images=[Image.fromarray(pixels)], prompts=["a"]).item() == 1


def test_tensors_of_several_sizes_are_refused() -> None:
    @takes_tensors
    def any_reward(images):
        return [0.0] * len(images)

    with pytest.raises(RewardError, match=r"\(1, 8, 8\), \(1, 9, 8\); give height and width"):
        score([any_reward], images=[PICTURES[0], Image.new("RGB", (9, 8))], prompts=["a", "b"])


def video(*shades: int) -> list[Image.Image]:
    return [Image.new("RGB", (8, 8), (shade,) * 3) for shade in shades]


def test_a_reward_of_pictures_gets_the_mean_over_frames() -> None:
    videos = [video(0, 51, 102), video(255, 255, 255)]
    for name, wanted in (("all", 0.2), (8, 0.2), (1, 0.0), (2, 0.2)):
        table = score(load_rewards({"brightness": {"frames": name}}), videos=videos, prompts=["a", "b"])
        assert table[:, 0].tolist() == pytest.approx([wanted, 1])


def test_frames_are_evenly_spaced_and_columns_go_with_them() -> None:
    seen = []

    def look(images, prompts, mood, fps):
        seen.append(([image.getpixel((0, 0))[0] for image in images], prompts, mood, fps))
        return [None if shade == 0 else float(shade) for shade in seen[-1][0]]

    videos = [video(*range(9)), video(*range(10, 19))]
    (reward,) = load_rewards({look: {"frames": 3}})
    table = score([reward], videos=videos, prompts=["a", "b"], columns={"mood": [1, 2]}, fps=8)
    assert seen == [([0, 4, 8, 10, 14, 18], ["a"] * 3 + ["b"] * 3, [1, 1, 1, 2, 2, 2], 8)]
    assert table[:, 0].tolist() == [6, 14]  # the frame without a value has no say


def test_a_video_is_scored_alike_whatever_else_is_in_the_batch() -> None:
    short, long = video(0, 51), video(*range(0, 250, 10))
    (reward,) = load_rewards({"brightness": {"frames": 5}})
    alone = [score([reward], videos=[one], prompts=["a"]).item() for one in (short, long)]
    assert score([reward], videos=[short, long], prompts=["a", "b"])[:, 0].tolist() == alone


def test_a_groupwise_reward_of_pictures_compares_frame_with_frame() -> None:
    @groupwise
    def best(images):
        shades = [image.getpixel((0, 0))[0] for image in images]
        return [float(shade == max(shades)) for shade in shades]

    videos = [video(0, 200), video(100, 100), video(50, 250)]
    (reward,) = load_rewards({best: {"frames": "all"}})
    assert score([reward], videos=videos, prompts=["a"] * 3)[:, 0].tolist() == [0, 0.5, 0.5]


def test_arrays_become_pictures() -> None:
    seen = []

    def keep(videos):
        seen.append(videos)
        return [0.0] * len(videos)

    array = np.linspace(0, 1, 2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
    score([keep, partial(keep)], videos=[array, (255 * array).round().astype(np.uint8)], prompts=["a", "b"])
    assert all(isinstance(frame, Image.Image) for samples in seen for video in samples for frame in video)
    assert len({video[1].tobytes() for samples in seen for video in samples}) == 1


def test_a_reward_of_videos_refuses_pictures() -> None:
    with pytest.raises(RewardError, match="'flicker' asks for videos, but the samples are images"):
        score([REWARDS["flicker"]], images=PICTURES, prompts=PROMPTS)


# extra columns


def test_extra_columns_are_put_in_place() -> None:
    @groupwise
    def grouped(images, prompts, log_extra):
        log_extra("heard", [prompt.upper() for prompt in prompts])
        return [0.0] * len(images)

    def partly(images, log_extra):
        log_extra("place", list(range(len(images))))
        return [0.0] * len(images)

    extras = {}
    score([grouped, partly], images=PICTURES, prompts=PROMPTS, log_extra=extras.__setitem__)
    assert extras == {"heard": ["A", "B", "A", "B"], "place": [0, 1, 2, 3]}

    def wrong(images, log_extra):
        log_extra("short", [1])
        return [0.0] * len(images)

    with pytest.raises(RewardError, match="1 values for 4 samples"):
        score([wrong], images=PICTURES, prompts=PROMPTS, log_extra=extras.__setitem__)


def test_what_is_no_picture_reaches_the_reward_as_it_is() -> None:
    """Sound, and a prior's embeddings."""
    seen = []

    def spy(completions):
        seen.append(completions)
        return [0.0] * len(completions)

    for samples in ([np.zeros((2, 480))] * 2, [torch.zeros(16, 24)] * 2, [torch.zeros(4, 8, 24)] * 2):
        score([spy], images=samples, prompts=["a", "b"])
        for own, sample in zip(seen[-1], samples, strict=True):
            assert type(own) is type(sample) and own.dtype == sample.dtype and (own == sample).all()
    grey = np.full((8, 8, 1), 0.5, dtype=np.float32)
    score([spy], images=[grey, grey], prompts=["a", "b"])
    assert seen[-1][0].size == (8, 8) and seen[-1][0].mode == "L"


# options and columns

OPTIONS_OF_REWARDS = {
    "scene",
    "match",
    "target_column",
    "engine",
    "engine_kwargs",
    "ignore_case",
    "fps",
    "sampling_rate",
}


def handed(name: str, columns: dict) -> tuple[dict, dict]:
    """What a reward of the catalogue is called with beside these columns, and its signature."""
    reward, found = REWARDS[name], {}

    @functools.wraps(reward.__call__ if isinstance(reward, type) else reward)
    def spy(*own, **keywords):
        found.update(keywords)
        return [0.0] * len(keywords.get("prompts") or keywords.get("images") or keywords["videos"])

    function = object.__new__(type("Spy", (reward,), {"__call__": spy})) if isinstance(reward, type) else spy
    kind = "videos" if name in ("videoalign", "flicker", "smoothness", "motion") else "images"
    samples = {"images": PICTURES[:1], "videos": [PICTURES[:2]]}[kind]
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


def test_columns_of_such_names_change_no_score() -> None:
    images, prompts = [Image.new("RGB", (24, 24), (shade,) * 3) for shade in (0, 99)], ["a", 'the word "NO"']
    target = {"target": [Image.new("RGB", (24, 24), (9, 9, 9))] * 2}
    poison = target | {key: ["x"] * 2 for key in OPTIONS_OF_REWARDS}
    rewards = load_rewards(["psnr", "ssim", "text"])
    plain = score(rewards, images=images, prompts=prompts, columns=target)
    poisoned = score(rewards, images=images, prompts=prompts, columns=poison)
    torch.testing.assert_close(plain, poisoned, rtol=0, atol=0, equal_nan=True)


def test_a_user_s_own_default_is_filled_by_a_column_unless_it_is_set() -> None:
    def lengths(images, word=None, factor=1.0):
        return [factor * len(own) for own in word] if isinstance(word, list) else [-1.0] * len(images)

    class Object:
        def __call__(self, images, word=None):
            return lengths(images, word)

    columns = {"word": ["a", "bb", "ccc", "dddd"], "other": [0] * 4}
    given = {"images": PICTURES, "prompts": PROMPTS, "columns": columns}
    set_ones = [partial(lengths, word="fixed"), *load_rewards({lengths: {"word": "fixed"}})]
    table = score([lengths, Object(), partial(lengths, factor=2.0), *set_ones], **given)
    assert table.tolist() == [[n, n, 2 * n, -1, -1] for n in (1, 2, 3, 4)]


@pytest.mark.parametrize("column", ["match", "images", "prompts"])
def test_a_column_that_cannot_be_passed_is_refused(column) -> None:
    rewards = load_rewards({"text": {"target_column": column}})
    with pytest.raises(ValueError, match=f"'text' is to read the column '{column}'.*rename the column"):
        check_columns(rewards, ["prompt", column], "train_dataset")
