"""The reward `geneval`: scenes whose objects are known, and what its rules make of them."""

import json

import numpy as np
import pytest
import torch
import transformers as tf
from geneval_scenes import Scene, verdicts
from PIL import Image, ImageDraw
from tiny_pipelines import clip_tokenizer

from diffusion_grpo.rewards import check_eval_rewards, load_rewards, score
from diffusion_grpo.rewards.geneval import GenEval, find_relations, group_by_class, iou
from diffusion_grpo.rewards.geneval_detectors import NAMED, Detection, TransformersDetector, name_pixel_colors

CELL, CELLS = 16, 5  # pixels of a patch, and patches a side: an object lies in one, not in the last of a side
SHAPES = ("circle", "square")
WIDTH = 16


def scene(*objects) -> Image.Image:
    """Objects (shape, colour, column, row) on black."""
    image = Image.new("RGB", (CELL * CELLS,) * 2, "black")
    draw = ImageDraw.Draw(image)
    for shape, color, column, row in objects:
        box = [CELL * column + 2, CELL * row + 2, CELL * column + 13, CELL * row + 13]
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=NAMED[color])
    return image


def weights(model) -> dict[str, torch.Tensor]:
    """What makes an OWLv2 of no vision layers a detector of circles and squares of any colour on black.

    A patch gives three numbers, each with its negative, so that the norms on the way only scale them: the brightness
    of the middle above that of the corners (a circle), that of the corners (a square), and a constant for neither.
    """
    state = {name: torch.zeros_like(each) for name, each in model.state_dict().items() if "text" not in name}
    middle, corners = torch.zeros(CELL, CELL), torch.zeros(CELL, CELL)
    middle[6:10, 6:10] = 1 / 48
    for rows in (slice(2, 4), slice(12, 14)):
        for columns in (slice(2, 4), slice(12, 14)):
            corners[rows, columns] = 1 / 48
    kernel, signs = state["owlv2.vision_model.embeddings.patch_embedding.weight"], torch.ones(WIDTH)
    for place, part in ((0, middle - corners), (2, corners)):
        kernel[place], kernel[place + 1] = part, -part
    signs[WIDTH // 2 :] = -1
    state["owlv2.vision_model.embeddings.class_embedding"] = signs
    constant = torch.zeros(WIDTH)
    constant[4], constant[5] = 0.02, -0.02
    state["owlv2.vision_model.embeddings.position_embedding.weight"][1:] = constant
    for name in state:
        if "norm" in name.lower() and name.endswith("weight"):
            state[name] = torch.ones_like(state[name])
    for place in range(3):
        state["class_head.dense0.weight"][place, 2 * place] = 1
    # a box starts out at its patch's last corner, in logits; this brings it back by about half a patch
    state["box_head.dense2.bias"][:] = torch.tensor([-0.5, -0.5, -0.35, -0.35])
    state["class_head.logit_shift.bias"][:], state["class_head.logit_scale.bias"][:] = -0.8, 49.0
    return state


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> str:
    """The folder of that OWLv2; its texts are turned so that each shape's name asks for its own number."""
    torch.manual_seed(0)
    tokenizer = clip_tokenizer(16)
    sizes = {"num_attention_heads": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH}
    text = {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    side = CELL * CELLS
    config = tf.Owlv2Config(
        text_config={**sizes, **text, "num_hidden_layers": 1, "initializer_range": 0.5},
        vision_config={**sizes, "num_hidden_layers": 0, "image_size": side, "patch_size": CELL},
        projection_dim=WIDTH,
    )
    model = tf.Owlv2ForObjectDetection(config).eval()
    model.load_state_dict(weights(model), strict=False)
    # colours as they are in [0, 1], so that black is nothing
    images = tf.Owlv2ImageProcessorPil(size={"height": side, "width": side}, image_mean=[0] * 3, image_std=[1] * 3)
    processor = tf.Owlv2Processor(images, tokenizer)
    with torch.no_grad():
        text_features = processor(text=[list(SHAPES)], return_tensors="pt")
        text_features = model.owlv2.text_model(**text_features).pooler_output
        wanted = torch.eye(WIDTH)[: len(SHAPES)]
        model.owlv2.text_projection.weight.copy_((torch.linalg.pinv(text_features) @ wanted).T)
    folder = tmp_path_factory.mktemp("detector")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def part(shape, count=1, **more):
    return {"class": shape, "count": count, **more}


RED, TWO = ("circle", "red", 0, 1), (("circle", "blue", 0, 0), ("circle", "green", 3, 1))
BESIDE = (("circle", "yellow", 0, 2), ("square", "blue", 3, 2))


@pytest.mark.parametrize(
    ("objects", "wanted", "expected"),
    [
        ([RED], {"include": [part("circle")]}, 1),
        ([RED], {"include": [part("square")]}, 0),
        ([], {"include": [part("circle")]}, 0),
        (BESIDE, {"include": [part("circle"), part("square")]}, 1),
        (TWO, {"include": [part("circle"), part("square")]}, 0),
        (TWO, {"include": [part("circle", 2)], "exclude": [part("circle", 3)], "tag": "counting"}, 1),
        ((*TWO, RED), {"include": [part("circle", 2)], "exclude": [part("circle", 3)], "tag": "counting"}, 0),
        ((*TWO, RED), {"include": [part("circle", 3)], "exclude": [part("circle", 4)], "tag": "counting"}, 1),
        ([RED], {"include": [part("circle", color="red")]}, 1),
        ([RED], {"include": [part("circle", color="blue")]}, 0),
        (BESIDE, {"include": [part("circle", color="yellow"), part("square", color="blue")]}, 1),
        (BESIDE, {"include": [part("circle", color="blue"), part("square", color="yellow")]}, 0),
        (BESIDE, {"include": [part("circle"), part("square", position=["right of", 0])]}, 1),
        (BESIDE, {"include": [part("circle"), part("square", position=["above", 0])]}, 0),
        (BESIDE[::-1], {"include": [part("square"), part("circle", position=["left of", 0])]}, 1),
    ],
)
def test_scenes_of_every_task(objects, wanted, expected, detector) -> None:
    (reward,) = load_rewards({"geneval": {"detector": detector, "device": "cpu"}})
    columns = {name: [wanted.get(name)] for name in ("include", "exclude", "tag")}
    assert score([reward], images=[scene(*objects)], prompts=[""], columns=columns).item() == expected


@pytest.mark.parametrize("color", [name for name in NAMED if name != "black"])
def test_shapes_of_every_color_are_found_where_they_are(color, detector) -> None:
    objects = [("circle", color, 1, 0), ("square", color, 3, 3), ("square", color, 0, 2)]
    (found,) = TransformersDetector(detector, "cpu", min_score=0.5)([scene(*objects)], list(SHAPES))
    assert [one.label for one in found] == ["circle", "square", "square"] and all(one.score > 0.9 for one in found)
    for one, (_, _, column, row) in zip(found, sorted(objects, key=lambda each: each[3]), strict=True):
        centre = [(one.box[0] + one.box[2]) / 2, (one.box[1] + one.box[3]) / 2]
        assert centre == pytest.approx([CELL * (column + 0.5), CELL * (row + 0.5)], abs=3)
    assert set(name_pixel_colors(scene(*objects), found, "")) == {color}


CAT = {"class": "cat", "count": 1}
DOG = {"class": "dog", "count": 1}
LEFT, RIGHT = (10, 80, 40, 40), (150, 80, 40, 40)


def test_ways_to_score_are_named_or_refused() -> None:
    scene, wanted = Scene(("cat", "red", LEFT)), {"tag": "", "include": [CAT, DOG], "exclude": [{**CAT, "count": 2}]}
    found = {way: verdicts([scene], [wanted], **options)[0] for way, options in (
        ("correct", {}), ("also", {"score": "correct"}), ("partial", {"partial": True}), ("p", {"score": "partial"}),
        ("dense", {"score": "dense"}))}  # fmt: skip
    assert found == {"correct": 0, "also": 0, "partial": pytest.approx(2 / 3), "p": pytest.approx(2 / 3), "dense": 0.5}
    assert GenEval("a/b", partial=True) == GenEval("a/b", score="partial") != GenEval("a/b", score="dense")
    with pytest.raises(ValueError, match="partial and score: dense are both set"):
        GenEval("a/b", partial=True, score="dense")
    with pytest.raises(ValueError, match="score='sparse'"):
        load_rewards({"geneval": {"detector": "a/b", "score": "sparse"}})


def test_equal_settings_make_it_the_same_evaluation_only_reward() -> None:
    spec = {"geneval": {"detector": "owner/one"}}
    check_eval_rewards(load_rewards(spec), load_rewards(spec))
    assert hash(GenEval("owner/one")) == hash(GenEval("owner/one")) and GenEval("owner/one") != object()
    used = GenEval(lambda images, labels: [[]])
    spare = GenEval(used.detector)
    used([Image.new("RGB", (8, 8))], include=[[{"class": "cat", "count": 1}]])
    assert used == spare  # what it has loaded does not count
    with pytest.raises(ValueError, match="different rewards called 'geneval'"):
        check_eval_rewards(load_rewards(spec), load_rewards({"geneval": {**spec["geneval"], "partial": True}}))


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


def test_partial_credit() -> None:
    scene = Scene(("cat", "red", LEFT), ("dog", "blue", RIGHT))
    wanted = {"tag": "color_attr", "include": [{**CAT, "color": "red"}, {**DOG, "color": "red"}], "exclude": []}
    assert verdicts([scene], [wanted]) == [0] and verdicts([scene], [wanted], partial=True) == [0.75]


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
