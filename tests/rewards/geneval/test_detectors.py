"""transformers' detectors and CLIP behind GenEval, on tiny random models of the real classes: what comes out fits."""

from pathlib import Path

import pytest
import torch
import transformers as tf
from PIL import Image
from tiny_pipelines import clip_tokenizer
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

from diffusion_grpo.rewards.geneval.detectors import ClipColors, TransformersDetector
from diffusion_grpo.rewards.geneval.reward import GenEval
from diffusion_grpo.rewards.geneval.scoring import NAMED, Detection
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


def detr(folder):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = tf.DetrConfig(
        backbone_config=backbone(), num_queries=6, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes,
        id2label=LABELS, label2id={name: key for key, name in LABELS.items()},
    )  # fmt: skip
    tf.DetrForObjectDetection(config).save_pretrained(folder)
    tf.DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder)


def mask2former(folder):
    swin = tf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = tf.Mask2FormerConfig(
        backbone_config=swin, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16,
        dim_feedforward=16, encoder_layers=1, decoder_layers=2, num_attention_heads=2, num_queries=6,
        id2label=LABELS, label2id={name: key for key, name in LABELS.items()},
    )  # fmt: skip
    tf.Mask2FormerForUniversalSegmentation(config).save_pretrained(folder)
    tf.Mask2FormerImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


def grounding_dino(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "?", "cat", "dog", "red", "car"]
    tokenizer = tf.BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    swin = tf.SwinConfig(
        image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = tf.GroundingDinoConfig(
        backbone_config=swin, d_model=32, encoder_layers=1, encoder_ffn_dim=16, encoder_attention_heads=2,
        decoder_layers=2, decoder_ffn_dim=16, decoder_attention_heads=2, num_queries=6, max_text_len=32,
        text_config=tf.BertConfig(vocab_size=len(words), max_position_embeddings=64, **TEXT),
    )  # fmt: skip
    tf.GroundingDinoForObjectDetection(config).save_pretrained(folder)
    processor = tf.GroundingDinoImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64})
    tf.GroundingDinoProcessor(processor, tokenizer).save_pretrained(folder)


@pytest.mark.parametrize("make", [owlv2, detr, mask2former, grounding_dino], ids=lambda make: make.__name__)
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
    with pytest.raises(ValueError, match="is a bert, which is no detector"):
        TransformersDetector(str(tmp_path))(IMAGES, ["cat"])


@pytest.mark.parametrize("make", [owlv2, detr, mask2former], ids=lambda make: make.__name__)
def test_in_bfloat16_the_detections_are_near(make, tmp_path) -> None:
    torch.manual_seed(0)
    make(tmp_path)
    found = {}
    for dtype in ("float32", "bfloat16"):
        detector = TransformersDetector(str(tmp_path), device="cpu", dtype=dtype, min_score=0.0)
        (own,) = detector(IMAGES[:1], ["cat", "dog", "red car"])
        with detector.network() as network:
            assert network.dtype == getattr(torch, dtype)
        found[dtype] = max(detection.score for detection in own)
    assert found["float32"] == pytest.approx(found["bfloat16"], abs=0.05)


def test_models_are_loaded_and_kept_as_those_of_other_rewards(tmp_path, monkeypatch) -> None:
    """Not sharded, in the asked revision and dtype, without a change of the random state; offloaded at the end."""
    torch.manual_seed(0)
    detr(tmp_path / "detector")
    clip_model(tmp_path / "colors")
    seen = []

    def loading(cls, name, *args, **kwargs):
        torch.rand(1)
        seen.append((Path(name).name, kwargs["revision"], kwargs["dtype"], is_deepspeed_zero3_enabled()))
        return plain(cls, name, *args, **kwargs)

    plain = tf.PreTrainedModel.from_pretrained.__func__
    monkeypatch.setattr(tf.PreTrainedModel, "from_pretrained", classmethod(loading))
    options = {"dtype": "bfloat16", "revision": "v1", "colors_revision": "v2", "offload": True, "device": "cpu"}
    reward = GenEval(str(tmp_path / "detector"), str(tmp_path / "colors"), min_score=0.0, **options)
    rested, include = [], [[{"class": label, "count": 1, "color": "red"} for label in LABELS.values()]] * 2
    monkeypatch.setattr(ModelReward, "rest", lambda self: rested.append(type(self)))
    state, config = torch.get_rng_state(), HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert is_deepspeed_zero3_enabled() and config is not None
    try:
        reward(IMAGES, include=include)
    finally:
        unset_hf_deepspeed_config()
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == [("detector", "v1", torch.bfloat16, False), ("colors", "v2", torch.bfloat16, False)]
    assert rested == [TransformersDetector, ClipColors]
    rested.clear()
    reward.offload = False
    reward(IMAGES, include=include)
    assert rested == []


def clip_model(folder):
    tokenizer = clip_tokenizer()
    config = tf.CLIPConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id},
        vision_config={**TEXT, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    model = tf.CLIPModel(config).eval()
    model.save_pretrained(folder)
    size = {"height": 32, "width": 32}
    processor = tf.CLIPProcessor(tf.CLIPImageProcessorPil(size=size, crop_size=size, do_center_crop=False), tokenizer)
    processor.save_pretrained(folder)
    return model, processor


def test_colors_by_clip_are_the_nearest_of_the_averaged_phrases(tmp_path) -> None:
    torch.manual_seed(0)
    model, processor = clip_model(tmp_path)
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
