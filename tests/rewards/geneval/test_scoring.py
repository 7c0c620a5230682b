"""GenEval's logic on scenes whose boxes are known, and the wrapper around transformers' detectors."""

import json

import numpy as np
import pytest
from geneval_scenes import Scene, verdicts
from PIL import Image

from diffusion_grpo.rewards.geneval.reward import GenEval
from diffusion_grpo.rewards.geneval.scoring import (
    NAMED,
    Detection,
    find_relations,
    group_by_class,
    iou,
    name_pixel_colors,
)


def one(scene, tag, include, exclude=(), **options) -> float:
    (value,) = verdicts([scene], [{"tag": tag, "include": include, "exclude": list(exclude)}], **options)
    return value


CAT = {"class": "cat", "count": 1}
DOG = {"class": "dog", "count": 1}
LEFT, RIGHT, TOP, BOTTOM = (10, 80, 40, 40), (150, 80, 40, 40), (80, 10, 40, 40), (80, 150, 40, 40)


# the six tasks


def test_single_object() -> None:
    assert one(Scene(("cat", "red", LEFT)), "single_object", [CAT]) == 1
    assert one(Scene(("dog", "red", LEFT)), "single_object", [CAT]) == 0
    assert one(Scene(("cat", "red", LEFT, 0.29)), "single_object", [CAT]) == 0
    assert one(Scene(("cat", "red", LEFT, 0.29)), "single_object", [CAT], min_score=0.2) == 1


def test_two_objects() -> None:
    assert one(Scene(("cat", "red", LEFT), ("dog", "blue", RIGHT)), "two_object", [CAT, DOG]) == 1
    assert one(Scene(("cat", "red", LEFT), ("cat", "blue", RIGHT)), "two_object", [CAT, DOG]) == 0


@pytest.mark.parametrize(("number", "right"), [(1, 0), (2, 1), (3, 0)])
def test_counting_is_exact(number, right) -> None:
    places = [(10, 10, 30, 30), (60, 10, 30, 30), (110, 10, 30, 30)]
    scene = Scene(*[("cat", "red", place) for place in places[:number]])
    assert one(scene, "counting", [{"class": "cat", "count": 2}], [{"class": "cat", "count": 3}]) == right


def test_counting_wants_surer_detections() -> None:
    scene = Scene(("cat", "red", LEFT), ("cat", "red", RIGHT, 0.5))
    two = [{"class": "cat", "count": 2}]
    assert one(scene, "counting", two) == 0 and one(scene, "two_object", two) == 1
    assert one(scene, "counting", two, min_score_counting=0.4) == 1


@pytest.mark.parametrize("color", NAMED)
def test_colors(color) -> None:
    scene = Scene(("cat", color, LEFT))
    assert one(scene, "colors", [{**CAT, "color": color}]) == 1
    assert sum(one(scene, "colors", [{**CAT, "color": other}]) for other in NAMED) == 1


def test_colors_of_the_surest_object() -> None:
    scene = Scene(("cat", "blue", LEFT, 0.7), ("cat", "red", RIGHT, 0.9))
    assert one(scene, "colors", [{**CAT, "color": "red"}]) == 1
    assert one(scene, "colors", [{**CAT, "color": "blue"}]) == 0


def test_attribution_of_colors() -> None:
    scene = Scene(("cat", "red", LEFT), ("dog", "blue", RIGHT))
    assert one(scene, "color_attr", [{**CAT, "color": "red"}, {**DOG, "color": "blue"}]) == 1
    assert one(scene, "color_attr", [{**CAT, "color": "blue"}, {**DOG, "color": "red"}]) == 0


@pytest.mark.parametrize(
    ("side", "place"), [("left of", LEFT), ("right of", RIGHT), ("above", TOP), ("below", BOTTOM)]
)
def test_position(side, place) -> None:
    for asked in ("left of", "right of", "above", "below"):
        scene = Scene(("dog", "blue", (80, 80, 40, 40)), ("cat", "red", place))
        wanted = [DOG, {**CAT, "position": [asked, 0]}]
        assert one(scene, "position", wanted) == float(asked == side)


def test_a_position_needs_the_other_object() -> None:
    wanted = [DOG, {**CAT, "position": ["left of", 0]}]
    assert one(Scene(("cat", "red", LEFT)), "position", wanted) == 0
    wrong_color = [{**DOG, "color": "red"}, {**CAT, "position": ["left of", 0]}]
    assert one(Scene(("cat", "red", LEFT), ("dog", "blue", RIGHT)), "position", wrong_color) == 0


# parts


def detection(box, label="cat", score=0.9, mask=None) -> Detection:
    return Detection(label, score, box, mask)


def test_relations_at_the_margin() -> None:
    still = detection((100, 100, 140, 140))
    assert find_relations(detection((107, 100, 147, 140)), still) == set()  # 7 < 0.1 x (40 + 40)
    assert find_relations(detection((107, 100, 147, 140)), still, margin=0.0) == {"right of"}
    assert find_relations(detection((109, 100, 149, 140)), still) == set()  # 1 of 9 is less than half
    assert find_relations(detection((117, 100, 157, 140)), still) == {"right of"}  # 9 of 17
    assert find_relations(detection((160, 40, 200, 80)), still) == {"right of", "above"}
    assert find_relations(still, still) == set()


def test_overlap_of_known_boxes() -> None:
    assert iou((0, 0, 10, 10), (5, 0, 15, 10)) == pytest.approx(1 / 3)
    assert iou((0, 0, 10, 10), (10, 0, 20, 10)) == 0 and iou((0, 0, 0, 0), (0, 0, 0, 0)) == 0


def test_sorted_limited_and_thinned() -> None:
    found = [detection((0, 0, 10, 10), score=s / 10) for s in (5, 9, 7)] + [detection((50, 0, 60, 10), score=0.6)]
    assert [d.score for d in group_by_class(found, 0.5, 16, 1.0)["cat"]] == [0.9, 0.7, 0.6]
    assert [d.score for d in group_by_class(found, 0.0, 2, 1.0)["cat"]] == [0.9, 0.7]
    assert [d.score for d in group_by_class(found, 0.0, 16, 0.5)["cat"]] == [0.9, 0.6]
    assert group_by_class(found, 0.95, 16, 1.0) == {}


def test_a_mask_says_whose_pixels_they_are() -> None:
    image = Image.new("RGB", (20, 20), NAMED["green"])
    mask = np.zeros((20, 20), dtype=bool)
    mask[:, :4] = True
    image.paste(NAMED["pink"], (0, 0, 4, 20))
    box = (0, 0, 20, 20)
    assert name_pixel_colors(image, [detection(box), detection(box, mask=mask)], "cat") == ["green", "pink"]


def test_what_lies_outside_of_the_image_has_no_color() -> None:
    image = Image.new("RGB", (20, 20), NAMED["green"])
    outside = [(30, 0, 40, 10), (-40, 0, -10, 10), (0, -9, 9, -2), (0, 30, 10, 40)]
    found = [detection(box) for box in [*outside, (5, 5, 5, 5), (19.5, 19.5, 20, 20)]]
    empty = detection((0, 0, 20, 20), mask=np.zeros((20, 20), dtype=bool))
    assert name_pixel_colors(image, [*found, empty], "cat") == [""] * 4 + ["green"] * 2 + [""]


def test_partial_credit_and_reasons() -> None:
    scene = Scene(("cat", "red", LEFT), ("dog", "blue", RIGHT))
    wanted = {"tag": "color_attr", "include": [{**CAT, "color": "red"}, {**DOG, "color": "red"}], "exclude": []}
    assert verdicts([scene], [wanted]) == [0] and verdicts([scene], [wanted], partial=True) == [0.75]
    verdict = GenEval(lambda *_: []).verdict(scene.image, scene.detections, wanted)
    assert verdict.reason == "expected 1 red dog, found blue" and not verdict.is_correct


# Flow-GRPO's dense score: each value worked out by its server's rule, entry by entry


@pytest.mark.parametrize(
    ("objects", "include", "expected"),
    [
        ([], [{"class": "cat", "count": 4}], 0.0),
        (["cat"], [{"class": "cat", "count": 4}], 0.25),
        (["cat"] * 4, [{"class": "cat", "count": 4}], 1.0),
        (["cat"] * 5, [{"class": "cat", "count": 4}], 0.75),  # one too many costs as much as one too few
        (["cat"] * 5, [{"class": "cat", "count": 2}], -0.5),
        (["cat"], [CAT, DOG], 0.5),
        (["cat", "dog"], [CAT, DOG], 1.0),
    ],
)
def test_the_dense_score_of_counts(objects, include, expected) -> None:
    scene = Scene(*((label, "red", (5 + 35 * place, 80, 20, 20)) for place, label in enumerate(objects)))
    assert one(scene, "counting", include, score="dense") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("objects", "include", "expected"),
    [
        ([("cat", "red", LEFT)], [{**CAT, "color": "red"}], 1.0),  # 1, 1
        ([("cat", "blue", LEFT)], [{**CAT, "color": "red"}], 0.5),  # 1, 0
        ([], [{**CAT, "color": "red"}], 0.0),  # 0, 0
        ([("cat", "red", LEFT), ("cat", "blue", RIGHT)], [{**CAT, "color": "red"}], 0.0),  # two of one: 0, 0
        ([("cat", "red", LEFT), ("cat", "blue", RIGHT)], [{"class": "cat", "count": 2, "color": "red"}], 0.75),
        ([("cat", "red", LEFT), ("dog", "red", RIGHT)], [CAT, {**DOG, "position": ["right of", 0]}], 1.0),  # 1, 1, 1
        (
            [("cat", "red", LEFT), ("dog", "red", RIGHT)],
            [CAT, {**DOG, "position": ["left of", 0]}],
            0.75,
        ),  # 1, 1, 0, 1
        ([("dog", "red", RIGHT)], [CAT, {**DOG, "position": ["left of", 0]}], 1 / 3),  # 0, 1, 0
        ([("cat", "red", LEFT)], [CAT, {**DOG, "position": ["left of", 0]}], 1 / 3),  # 1, 0, 0
        (  # the colour is wrong, so the position is not looked at: 1, 1, 0
            [("cat", "red", LEFT), ("dog", "red", RIGHT)],
            [CAT, {**DOG, "color": "blue", "position": ["right of", 0]}],
            2 / 3,
        ),
    ],
)
def test_the_dense_score_of_colours_and_positions(objects, include, expected) -> None:
    assert one(Scene(*objects), "position", include, score="dense") == pytest.approx(expected)


def test_what_is_to_be_absent_has_no_say_in_the_dense_score() -> None:
    scene, exclude = Scene(("cat", "red", LEFT)), [{"class": "cat", "count": 1}]
    assert one(scene, "single_object", [CAT], exclude, score="dense") == 1
    assert one(scene, "single_object", [CAT], exclude) == 0


def test_rows_as_json_or_metadata_and_rows_without() -> None:
    scene = Scene(("cat", "red", LEFT))
    row = {"tag": "single_object", "include": [{**CAT, "color": None}], "exclude": None}

    def detector(images, labels):
        assert labels == ["cat"]
        return [scene.detections for _ in images]

    reward = GenEval(detector)
    images = [scene.image] * 2
    assert reward(images, include=[json.dumps(row["include"]), None]) == [1, None]
    assert reward(images, metadata=[json.dumps(row), {"include": []}]) == [1, None]


@pytest.mark.parametrize(
    "part", [{"class": "cat"}, {"count": 1}, {**CAT, "position": ["left of", 0]}, {**CAT, "position": ["left of", 3]}]
)
def test_rows_of_another_form_are_refused(part) -> None:
    with pytest.raises(ValueError, match="mapping with class and count"):
        GenEval(lambda *_: [])(images=[Image.new("RGB", (8, 8))], include=[[part]])
