"""GenEval with detectors of transformers, and CLIP for colours."""

from pathlib import Path

import pytest
import torch
import transformers as tf
from PIL import Image
from tiny_pipelines import clip_tokenizer
from tiny_scorers import clip
from transformers.utils import ModelOutput

from diffusion_grpo.rewards.geneval import GenEval
from diffusion_grpo.rewards.geneval_detectors import NAMED, ClipColors, Detection, TransformersDetector
from diffusion_grpo.rewards.models.base import ModelReward

SIZES = [(64, 48), (40, 64)]
IMAGES = [Image.effect_noise(size, 90).convert("RGB") for size in SIZES]
LABELS = {0: "cat", 1: "dog", 2: "red car"}
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}


def owlv2(folder):
    tokenizer = clip_tokenizer(16)
    config = tf.Owlv2Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 16},
        vision_config={**TEXT, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    tf.Owlv2ForObjectDetection(config).save_pretrained(folder)
    tf.Owlv2Processor(tf.Owlv2ImageProcessorPil(size={"height": 32, "width": 32}), tokenizer).save_pretrained(folder)


def backbone():
    return tf.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )


def detr(folder, labels=LABELS):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = tf.DetrConfig(
        backbone_config=backbone(), num_queries=6, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes,
        id2label=labels, label2id={name: key for key, name in labels.items()},
    )  # fmt: skip
    tf.DetrForObjectDetection(config).save_pretrained(folder)
    tf.DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder)


def swin(first_stage=1):
    return tf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=[f"stage{stage}" for stage in range(first_stage, 5)],
    )  # fmt: skip


def mask2former(folder):
    config = tf.Mask2FormerConfig(
        backbone_config=swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=6,
        id2label=LABELS, label2id={name: key for key, name in LABELS.items()},
    )  # fmt: skip
    tf.Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    tf.Mask2FormerImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def grounding_dino(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "cat", "dog", "red", "car"]
    tokenizer = tf.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    config = tf.GroundingDinoConfig(
        backbone_config=swin(2), d_model=32, encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_layers=2, decoder_ffn_dim=16, decoder_attention_heads=2, num_queries=6, max_text_len=32,
        text_config=tf.BertConfig(vocab_size=len(words), max_position_embeddings=64, **TEXT),
    )  # fmt: skip
    tf.GroundingDinoForObjectDetection(config).save_pretrained(folder)
    processor = tf.GroundingDinoImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64})
    tf.GroundingDinoProcessor(processor, tokenizer).save_pretrained(folder)


FAMILIES = [owlv2, detr, mask2former, grounding_dino]


@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_detections_of_every_family(make, tmp_path) -> None:
    torch.manual_seed(0)
    make(tmp_path)
    detector = TransformersDetector(str(tmp_path), min_score=0.01, device="cpu")
    found = detector(IMAGES, ["cat", "dog", "red car"])
    assert len(found) == 2 and sum(map(len, found)) > 0
    for (width, height), own in zip(SIZES, found, strict=True):
        side = max(width, height)  # OWLv2 pads to a square; a random model's boxes leave the image
        for detection in own:
            left, top, right, bottom = detection.box
            assert detection.label in ("cat", "dog", "red car") and 0.01 <= detection.score <= 1
            assert -side <= left <= right <= 2 * side and -side <= top <= bottom <= 2 * side  # in pixels
            assert (detection.mask is not None) == (make is mask2former)
            if detection.mask is not None:
                assert detection.mask.shape == (height, width) and detection.mask.any()
    (alone,) = detector(IMAGES[1:], ["cat", "dog", "red car"])
    assert [d.label for d in alone] == [d.label for d in found[1]] or make is detr  # DETR pads a batch
    rewards = GenEval(str(tmp_path), min_score=0.01, device="cpu")(
        images=IMAGES, include=[[{"class": "cat", "count": 1}]] * 2
    )
    assert rewards == [float(len(own) > 0) for own in detector(IMAGES, ["cat"])]


def test_what_is_no_detector_is_refused(tmp_path) -> None:
    tf.BertConfig(vocab_size=10, **TEXT).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a bert, which is not a supported detector"):
        TransformersDetector(str(tmp_path))(IMAGES, ["cat"])
    tf.EomtConfig().save_pretrained(tmp_path)  # of which transformers gives no masks that overlap
    with pytest.raises(ValueError, match="is a eomt, which is not a supported detector"):
        TransformersDetector(str(tmp_path))(IMAGES, ["cat"])


SIDE = 64
SQUARE = Image.new("RGB", (SIDE, SIDE))


def answer(monkeypatch, cls, **outputs) -> None:
    """Let every network of a class answer with these outputs."""
    monkeypatch.setattr(cls, "forward", lambda self, **inputs: ModelOutput(outputs))


def queries(*found) -> dict[str, torch.Tensor]:
    """A segmenter's outputs: per query, the probabilities of cat, dog and red car, and the box that its mask fills."""
    logits, masks = torch.zeros(1, len(found), 4), torch.full((1, len(found), 16, 16), -20.0)
    for query, (probabilities, (left, top, right, bottom)) in enumerate(found):
        logits[0, query] = torch.tensor([*probabilities, 1 - sum(probabilities)]).log()
        masks[0, query, top // 4 : bottom // 4, left // 4 : right // 4] = 20.0
    return {"class_queries_logits": logits, "masks_queries_logits": masks}


@pytest.mark.parametrize(
    ("dog", "cat"),
    [((0, 16, 48, 48), (24, 0, 64, 64)), ((8, 8, 40, 40), (8, 8, 40, 40))],
    ids=["beside", "same"],
)
def test_masks_may_overlap(dog, cat, tmp_path, monkeypatch) -> None:
    mask2former(tmp_path)
    answer(
        monkeypatch,
        tf.Mask2FormerForUniversalSegmentation,
        **queries(([0.0, 0.97, 0.0], dog), ([0.60, 0.0, 0.0], cat)),
    )
    (found,) = TransformersDetector(str(tmp_path), "cpu")([SQUARE], ["cat", "dog"])
    found = {one.label: one for one in found}
    for label, score, box in (("dog", 0.97, dog), ("cat", 0.60, cat)):
        assert found[label].score == pytest.approx(score, abs=0.01)  # the edges are smoothed
        assert found[label].box == pytest.approx(box, abs=1)
        assert found[label].mask.sum() == pytest.approx((box[2] - box[0]) * (box[3] - box[1]), rel=0.05)


def test_one_query_may_stand_for_two_classes_or_for_none(tmp_path, monkeypatch) -> None:
    mask2former(tmp_path)
    box, network = (16, 16, 48, 48), tf.Mask2FormerForUniversalSegmentation
    detector = TransformersDetector(str(tmp_path), "cpu")
    answer(monkeypatch, network, **queries(([0.55, 0.42, 0.0], box), ([0.0, 0.0, 0.0], box)))
    (found,) = detector([SQUARE], ["cat", "dog"])
    assert {one.label: round(one.score, 2) for one in found} == {"cat": 0.55, "dog": 0.42}
    answer(monkeypatch, network, **queries(([0.0, 0.0, 0.0], box)))
    assert detector([SQUARE], ["cat", "dog"]) == [[]]


def boxes(probabilities: torch.Tensor) -> torch.Tensor:
    """One box in the middle per query of `(1, queries, classes)`."""
    return torch.full((*probabilities.shape[:2], 4), 0.5)


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ("computer mouse", "mouse"),
        ("tv remote", "remote"),
        ("couch", "sofa"),
        ("cell phone", "Cell Phone"),
        ("hair drier", "Hair Dryer"),
    ],
)
def test_the_classes_of_geneval_are_found_by_the_names_of_the_detector(asked, known, tmp_path, monkeypatch) -> None:
    detr(tmp_path, {0: "N/A", 1: known, 2: "cat"})
    certain = torch.tensor([[[0.05, 0.9, 0.03, 0.02], [0.05, 0.03, 0.9, 0.02]]])
    answer(monkeypatch, tf.DetrForObjectDetection, logits=certain.log(), pred_boxes=boxes(certain))
    (found,) = TransformersDetector(str(tmp_path), "cpu")([SQUARE], [asked])
    assert [(one.label, round(one.score, 2)) for one in found] == [(asked, 0.9)]
    reward = GenEval(str(tmp_path), device="cpu")
    assert reward([SQUARE], include=[[{"class": asked, "count": 1}]]) == [1]
    assert reward([SQUARE], include=[[]], exclude=[[{"class": asked, "count": 1}]]) == [0]


def test_owlv2s_boxes_are_in_pixels_of_the_image(tmp_path, monkeypatch) -> None:
    """It pads to a square at the right and the bottom, and its boxes are shares of that."""
    owlv2(tmp_path)
    certain = torch.tensor([[[0.02, 0.9], [0.01, 0.02]]])
    answer(monkeypatch, tf.Owlv2ForObjectDetection, logits=certain.logit(), pred_boxes=boxes(certain) / 2)
    (found,) = TransformersDetector(str(tmp_path), "cpu")([SQUARE.resize((64, 32))], ["cat", "dog"])
    assert [(one.label, round(one.score, 2), one.box) for one in found] == [("dog", 0.9, (8, 8, 24, 24))]


def test_a_class_of_its_own_name_goes_before_a_synonym(tmp_path, monkeypatch) -> None:
    detr(tmp_path, {0: "Mouse", 1: "Computer mouse", 2: "cat"})  # the first is an animal
    certain = torch.tensor([[[0.9, 0.05, 0.03, 0.02]]])
    answer(monkeypatch, tf.DetrForObjectDetection, logits=certain.log(), pred_boxes=boxes(certain))
    detector = TransformersDetector(str(tmp_path), "cpu")
    assert detector([SQUARE], ["computer mouse"]) == [[]]
    assert [one.label for one in detector([SQUARE], ["mouse", "cat"])[0]] == ["mouse"]


@pytest.mark.parametrize("make", [detr, mask2former], ids=lambda make: make.__name__)
def test_classes_that_the_detector_does_not_know_are_refused(make, tmp_path) -> None:
    make(tmp_path)
    detector = TransformersDetector(str(tmp_path), "cpu")
    with pytest.raises(ValueError, match="asks for 'computer mouse', 'drum', but .* was trained on other classes"):
        detector([SQUARE], ["cat", "computer mouse", "drum"])
    with pytest.raises(ValueError, match="asks for 'drum'"):
        GenEval(str(tmp_path), device="cpu")([SQUARE], include=[[]], exclude=[[{"class": "drum", "count": 1}]])


def tokens(**probabilities) -> torch.Tensor:
    """Grounding DINO's logits of one query for `[CLS] cat . dog . red car . [SEP]`, at most 32 tokens."""
    places = {"cls": 0, "cat": 1, "dog": 3, "red": 5, "car": 6, "stop": 7}
    found = torch.full((1, 1, 32), 0.0)
    for word, probability in probabilities.items():
        found[0, 0, places[word]] = probability
    return found.logit()


@pytest.mark.parametrize(
    ("probabilities", "expected"),
    [
        ({"dog": 0.80, "red": 0.35, "car": 0.35}, [("dog", 0.80)]),  # and not the longest name above the threshold
        ({"dog": 0.35, "red": 0.80, "car": 0.70}, [("red car", 0.75)]),
        ({"dog": 0.60, "red": 0.90, "car": 0.10}, [("dog", 0.60)]),  # red, but no car
        ({"dog": 0.20, "cls": 0.90, "stop": 0.90}, []),
    ],
)
def test_grounding_dino_gives_the_class_whose_tokens_score_best(
    probabilities, expected, tmp_path, monkeypatch
) -> None:
    grounding_dino(tmp_path)
    logits = tokens(**probabilities)
    answer(monkeypatch, tf.GroundingDinoForObjectDetection, logits=logits, pred_boxes=boxes(logits))
    (found,) = TransformersDetector(str(tmp_path), "cpu", min_score=0.3)([SQUARE], ["cat", "dog", "red car"])
    assert [(one.label, round(one.score, 4)) for one in found] == expected
    assert all(one.box == (16, 16, 48, 48) and one.mask is None for one in found)


def test_models_get_the_settings_of_the_reward(monkeypatch) -> None:
    def note(self):
        found.append((self.model, self.dtype, self.revision, self.device))

    monkeypatch.setattr(ModelReward, "load_once", note)
    options, found = {"dtype": "bfloat16", "revision": "v1", "colors_revision": "v2", "device": "cpu"}, []
    GenEval("a/b", "c/d", **options)(IMAGES[:1], include=[None])
    assert found == [("a/b", "bfloat16", "v1", "cpu"), ("c/d", "bfloat16", "v2", "cpu")]


def test_all_models_are_loaded_at_the_first_call_whatever_its_rows_need(tmp_path, monkeypatch) -> None:
    """Later calls may be made in a thread, and loading changes torch's default dtype for the rollout beside it."""
    detr(tmp_path / "detector")
    clip(tmp_path / "colors")
    options = {"device": "cpu", "dtype": "bfloat16", "offload": True}
    reward = GenEval(str(tmp_path / "detector"), str(tmp_path / "colors"), **options)
    loaded, rested = [], []
    plain = tf.PreTrainedModel.from_pretrained.__func__

    def note(cls, name, *args, **kwargs):
        loaded.append(Path(name).name)
        return plain(cls, name, *args, **kwargs)

    monkeypatch.setattr(tf.PreTrainedModel, "from_pretrained", classmethod(note))
    monkeypatch.setattr(ModelReward, "rest", lambda self: rested.append(type(self)))
    assert reward(IMAGES, include=[None, None]) == [None, None]
    reward(IMAGES, include=[[{"class": "cat", "count": 1, "color": "red"}]] * 2)
    assert loaded == ["detector", "colors"]
    assert rested == 2 * [TransformersDetector, ClipColors]  # once per call, however many times it asks


def test_images_are_resized_with_pillow_whatever_is_installed(tmp_path, monkeypatch) -> None:
    asked = []
    for cls in (tf.AutoProcessor, tf.AutoImageProcessor, tf.CLIPProcessor):
        real = cls.from_pretrained
        monkeypatch.setattr(
            cls, "from_pretrained", lambda *a, real=real, **k: asked.append(k.get("backend")) or real(*a, **k)
        )
    for make in (owlv2, detr, clip):
        (tmp_path / make.__name__).mkdir()
        make(tmp_path / make.__name__)
    asked.clear()  # of making them
    TransformersDetector(str(tmp_path / "owlv2"), device="cpu")(IMAGES, ["cat"])
    TransformersDetector(str(tmp_path / "detr"), device="cpu")(IMAGES, ["cat"])
    ClipColors(str(tmp_path / "clip"), "cpu")(IMAGES[0], [Detection("cat", 0.9, (0, 0, 20, 20))], "cat")
    assert len(asked) >= 3 and set(asked) == {"pil"}  # a processor loads parts


def test_colors_by_clip_are_the_nearest_of_the_averaged_phrases(tmp_path) -> None:
    torch.manual_seed(0)
    model, processor = clip(tmp_path), tf.CLIPProcessor.from_pretrained(tmp_path, backend="pil")
    boxes = [(0, 0, 20, 20), (10, 10, 40, 40), (30, 5, 60, 40)]
    found = ClipColors(str(tmp_path), "cpu")(IMAGES[0], [Detection("cat", 0.9, box) for box in boxes], "cat")
    for box, name in zip(boxes, found, strict=True):
        scores = {}
        with torch.no_grad():
            pixels = processor(images=IMAGES[0].crop(box), return_tensors="pt")["pixel_values"]
            seen = model.get_image_features(pixels).pooler_output[0]
            for color in NAMED:
                text_features = []
                for phrase in (
                    f"a photo of a {color} cat",
                    f"a photo of a {color}-colored cat",
                    f"a photo of a {color} object",
                ):
                    vector = model.get_text_features(**processor(text=phrase, return_tensors="pt")).pooler_output[0]
                    text_features.append(vector / vector.norm())
                mean = sum(text_features) / 3
                scores[color] = float(seen @ mean / mean.norm())
        assert name == max(scores, key=scores.get)
