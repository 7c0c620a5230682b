"""The built-in rewards by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..config.names import RENAMED_REWARDS, suggest
from .geneval.reward import GenEval
from .images.brightness import brightness
from .images.color import color
from .images.jpeg import jpeg_compressibility, jpeg_incompressibility
from .images.sharpness import colorfulness, sharpness
from .images.similarity import psnr, ssim
from .images.video import flicker, motion, smoothness
from .models.aesthetic import Aesthetic
from .models.clip import ClipScore, ClipSimilarity, PickScore
from .models.dino import DinoSimilarity
from .models.hpsv2 import HPSv2
from .models.hpsv3 import HPSv3
from .models.imagereward import ImageReward
from .models.lpips import LPIPS
from .models.safety import NsfwFilter
from .models.videoalign import VideoAlign
from .ocr.model_text import ModelText
from .ocr.tesseract import tesseract
from .ocr.text import text
from .server.remote import RemoteReward
from .server.vlm_judge import UnifiedReward, VlmJudge

REWARDS: dict[str, Callable] = {
    "text": text,
    "text_by_model": ModelText,
    "color": color,
    "tesseract": tesseract,
    "brightness": brightness,
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
    "sharpness": sharpness,
    "colorfulness": colorfulness,
    "ssim": ssim,
    "psnr": psnr,
    "flicker": flicker,
    "smoothness": smoothness,
    "motion": motion,
    "clip_score": ClipScore,
    "pickscore": PickScore,
    "hpsv2": HPSv2,
    "imagereward": ImageReward,
    "aesthetic": Aesthetic,
    "lpips": LPIPS,
    "dino_similarity": DinoSimilarity,
    "clip_similarity": ClipSimilarity,
    "nsfw_filter": NsfwFilter,
    "geneval": GenEval,
    "hpsv3": HPSv3,
    "videoalign": VideoAlign,
    "vlm_judge": VlmJudge,
    "unified_reward": UnifiedReward,
    "remote": RemoteReward,
}


def get_reward(reward: str | Callable) -> Callable:
    """Return the reward of a built-in name or a dotted path (`"my_package.rewards.sharpness"`), or a callable as it
    is.

    Args:
        reward: the name, path or callable.

    Raises:
        ValueError: the name is unknown (the message lists the known ones and suggests the nearest), or the path does
            not lead to a callable.

    Examples:
        >>> get_reward("brightness")(images).__class__.__name__
        'list'
    """
    if callable(reward):
        return reward
    if reward in REWARDS:
        return REWARDS[reward]
    known = ", ".join(REWARDS)
    module_name, _, attribute = str(reward).rpartition(".")
    if not module_name:
        raise ValueError(
            f"Unknown reward {reward!r}: use one of {known}, a dotted path to a function, or a callable."
            f"{suggest(RENAMED_REWARDS.get(str(reward), reward), REWARDS)}"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The reward {reward!r} was not found ({error}); name a function that Python can import, such as "
            "`my_rewards.score` of my_rewards.py in the working directory."
        ) from error
    if not callable(found):
        raise ValueError(f"The reward {reward!r} is a {type(found).__name__}, which cannot be called.")
    return found
