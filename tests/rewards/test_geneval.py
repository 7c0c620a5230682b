"""The reward `geneval`: scenes whose objects are known, and what its rules make of them."""

import json

import numpy as np
import pytest
from geneval_scenes import Scene, verdicts
from PIL import Image

from diffusion_grpo.rewards import check_eval_rewards, load_rewards
from diffusion_grpo.rewards.geneval import GenEval, find_relations, group_by_class, iou
from diffusion_grpo.rewards.geneval_detectors import NAMED, Detection, name_pixel_colors

CAT = {"class": "cat", "count": 1}
DOG = {"class": "dog", "count": 1}
LEFT, RIGHT = (10, 80, 40, 40), (150, 80, 40, 40)
TWO = [("cat", "blue", LEFT), ("cat", "green", RIGHT)]
BESIDE = [("cat", "yellow", LEFT), ("dog", "blue", RIGHT)]


def part(label, count=1, **more) -> dict:
    return {"class": label, "count": count, **more}


@pytest.mark.parametrize(
    ("tag", "objects", "include", "expected"),
    [
        ("single_object", TWO[:1], [CAT], 1),
        ("single_object", TWO[:1], [DOG], 0),
        ("single_object", [], [CAT], 0),
        ("two_object", BESIDE, [CAT, DOG], 1),
        ("two_object", TWO, [CAT, DOG], 0),
        ("counting", TWO, [part("cat", 2)], 1),
        ("counting", [*TWO, ("cat", "red", (80, 10, 40, 40))], [part("cat", 2)], 0),
        ("color_attr", BESIDE, [part("cat", color="yellow"), part("dog", color="blue")], 1),
        ("color_attr", BESIDE, [part("cat", color="blue"), part("dog", color="yellow")], 0),
        ("position", BESIDE, [CAT, part("dog", position=["right of", 0])], 1),
        ("position", BESIDE, [CAT, part("dog", position=["above", 0])], 0),
        ("position", BESIDE, [DOG, part("cat", position=["left of", 0])], 1),
        *(("colors", [("cat", color, LEFT)], [part("cat", color=color)], 1) for color in NAMED),
        ("colors", TWO[:1], [part("cat", color="red")], 0),
    ],
)
def test_scenes_of_every_task(tag, objects, include, expected) -> None:
    exclude = [part("cat", 3)] if tag == "counting" else []
    assert one(Scene(*objects), tag, include, exclude) == expected


def test_ways_to_score_are_named_or_refused() -> None:
    scene, wanted = Scene(("cat", "red", LEFT)), {"tag": "", "include": [CAT, DOG], "exclude": [{**CAT, "count": 2}]}
    ways = ({}, {"score": "correct"}, {"partial": True}, {"score": "partial"}, {"score": "dense"})
    found = [verdicts([scene], [wanted], **options)[0] for options in ways]
    assert found == pytest.approx([0, 0, 2 / 3, 2 / 3, 0.5])
    assert GenEval("a/b", partial=True) == GenEval("a/b", score="partial") != GenEval("a/b", score="dense")
    with pytest.raises(ValueError, match="partial and score: dense are both set"):
        GenEval("a/b", partial=True, score="dense")
    with pytest.raises(ValueError, match="score='sparse'"):
        load_rewards({"geneval": {"detector": "a/b", "score": "sparse"}})


def test_equal_settings_make_it_the_same_evaluation_only_reward() -> None:
    spec = {"geneval": {"detector": "owner/one"}}
    check_eval_rewards(load_rewards(spec), load_rewards(spec))
    with pytest.raises(ValueError, match="different rewards called 'geneval'"):
        check_eval_rewards(load_rewards(spec), load_rewards({"geneval": {**spec["geneval"], "partial": True}}))
    assert hash(GenEval("owner/one")) == hash(GenEval("owner/one"))
    used = GenEval(lambda images, labels: [[]])
    used([Image.new("RGB", (8, 8))], include=[[CAT]])
    assert used == GenEval(used.detector)  # what it has loaded does not count


def one(scene, tag, include, exclude=(), **options) -> float:
    (value,) = verdicts([scene], [{"tag": tag, "include": include, "exclude": list(exclude)}], **options)
    return value


def test_thresholds_and_settings() -> None:
    assert one(Scene(("cat", "red", LEFT, 0.29)), "single_object", [CAT]) == 0
    assert one(Scene(("cat", "red", LEFT, 0.29)), "single_object", [CAT], min_score=0.2) == 1
    with pytest.raises(ValueError, match="'detector'"):
        load_rewards("geneval")
    with pytest.raises(ValueError, match="min_score is 2"):
        load_rewards({"geneval": {"detector": "some/model", "min_score": 2}})


def test_counting_wants_surer_detections() -> None:
    scene = Scene(("cat", "red", LEFT), ("cat", "red", RIGHT, 0.5))
    two = [{"class": "cat", "count": 2}]
    assert one(scene, "counting", two) == 0 and one(scene, "two_object", two) == 1
    assert one(scene, "counting", two, min_score_counting=0.4) == 1


def test_colors_of_the_surest_object() -> None:
    scene = Scene(("cat", "blue", LEFT, 0.7), ("cat", "red", RIGHT, 0.9))
    assert one(scene, "colors", [{**CAT, "color": "red"}]) == 1
    assert one(scene, "colors", [{**CAT, "color": "blue"}]) == 0


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
    assert find_relations(detection((100, 160, 140, 200)), still) == {"below"}
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
            [CAT, part("dog", position=["left of", 0])],
            0.75,
        ),  # 1, 1, 0, 1
        ([("dog", "red", RIGHT)], [CAT, {**DOG, "position": ["left of", 0]}], 1 / 3),  # 0, 1, 0
        ([("cat", "red", LEFT)], [CAT, {**DOG, "position": ["left of", 0]}], 1 / 3),  # 1, 0, 0
        # the colour is wrong, so the position is not looked at: 1, 1, 0
        (BESIDE, [CAT, part("dog", color="red", position=["right of", 0])], 2 / 3),
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
