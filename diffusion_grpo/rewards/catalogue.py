"""The table that `diffusion-grpo rewards list` prints: one line per built-in reward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import NamedTuple


class Entry(NamedTuple):
    """One built-in reward."""

    measures: str
    values: str
    needs: str = ""


OCR = 'pip install "diffusion-grpo[ocr]"'
TARGET = "a column with images"

CATALOGUE: dict[str, Entry] = {
    "text": Entry("the quoted text can be read in the image (rapidocr, PaddleOCR)", "0 to 1", OCR),
    "text_by_model": Entry("as text, read by a model of transformers", "0 to 1", "microsoft/trocr-base-printed"),
    "color": Entry("the writing has the colour that the prompt names", "0 to 1"),
    "tesseract": Entry("as text, read by Tesseract; meant for evaluation only", "0 to 1", OCR),
    "brightness": Entry("mean luma", "0 to 1"),
    "jpeg_compressibility": Entry("1 - bytes as a JPEG / bytes uncompressed", "0 to 1"),
    "jpeg_incompressibility": Entry("bytes as a JPEG / bytes uncompressed", "above 0"),
    "sharpness": Entry("variance of the Laplacian of the luma", "0 to 16"),
    "colorfulness": Entry("Hasler and Suesstrunk's measure", "0 up"),
    "ssim": Entry("structural similarity to another image", "-1 to 1", TARGET),
    "psnr": Entry("peak signal-to-noise ratio to another image, in dB", "0 to 100", TARGET),
    "flicker": Entry("videos: 1 - mean change from frame to frame", "0 to 1"),
    "smoothness": Entry("videos: 1 - mean distance of a frame to the mean of its neighbours", "0 to 1"),
    "motion": Entry("videos: mean displacement of blocks, percent of the longer side", "0 to 9"),
    "clip_score": Entry("100 max(cos, 0) of image and prompt by CLIP", "0 to 100", "openai/clip-vit-large-patch14"),
    "pickscore": Entry("preferred by users of Pick-a-Pic", "about 15 to 25", "yuvalkirstain/PickScore_v1"),
    "hpsv2": Entry("preferred by people, Human Preference Score v2.1", "-1 to 1, about 0.2 to 0.35", "xswu/HPSv2"),
    "imagereward": Entry("preferred by people, mean 0, std 1", "about -2 to 2", "THUDM/ImageReward"),
    "aesthetic": Entry("LAION's aesthetic score", "about 1 to 10", "trl-lib/ddpo-aesthetic-predictor"),
    "lpips": Entry("1 - LPIPS distance to another image", "up to 1", f"{TARGET}; AlexNet or VGG-16"),
    "dino_similarity": Entry("cosine to another image by DINO", "-1 to 1", f"{TARGET}; facebook/dino-vits16"),
    "clip_similarity": Entry("cosine to another image by CLIP", "-1 to 1", f"{TARGET}; openai/clip-vit-large-patch14"),
    "nsfw_filter": Entry("1 - probability that it is not safe to show", "0 to 1", "Falconsai/nsfw_image_detection"),
    "hpsv3": Entry("preferred by people, Human Preference Score v3", "about 0 to 15", "MizzenAI/HPSv3, 16 GB"),
    "videoalign": Entry(
        "videos: how well they look, move, fit the prompt, or all", "about -3 to 3", "KwaiVGI/VideoReward"
    ),
    "vlm_judge": Entry("what a vision-language model answers to a question", "as asked", "a server with such a model"),
    "unified_reward": Entry(
        "UnifiedReward's score", "1 to 5, videos 1 to 10", "a server with CodeGoat24/UnifiedReward-qwen-7b"
    ),
    "geneval": Entry("objects, counts, colours and positions are as asked", "0 to 1", "a detector, GenEval's columns"),
    "remote": Entry("what a reward server answers", "as the reward there", "a running `diffusion-grpo rewards serve`"),
}


def entry(name: str, reward: Callable) -> Entry:
    """Return a reward's catalogue entry, or one made from the first line of its docstring and its default `model`."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    model = inspect.signature(reward).parameters.get("model")
    needs = model.default if model is not None and isinstance(model.default, str) else ""
    return Entry((inspect.getdoc(reward) or "").partition("\n")[0].rstrip("."), "", needs)
