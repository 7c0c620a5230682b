"""Rewards: the built-in ones by name, and the contract of a reward function.

A reward is called with keywords (`prompts`, `completions`, `images` or `videos`, every dataset column, ...), returns
one `float | None` per sample, and may be async. `contract.py` says what a reward is, `loading.py` reads `reward_funcs`
and has the built-in ones by name, `call.py` calls rewards and checks their answers, and `executor.py` does so beside
the rollout. Nothing heavy is imported before a reward is called.
"""

from .call import RewardError, differentiate, score
from .contract import (
    Reward,
    batchwise,
    check_columns,
    check_eval_rewards,
    check_groups,
    differentiable,
    groupwise,
    needs,
    reward_name,
    reward_weights,
    takes_latents,
    takes_tensors,
)
from .geneval import GenEval
from .loading import REWARDS, check_gradients, check_needs, get_reward, load_rewards
from .models.aesthetic import Aesthetic, NsfwFilter
from .models.clip import ClipScore, ClipSimilarity, DinoSimilarity, PickScore
from .models.hpsv2 import HPSv2
from .models.hpsv3 import HPSv3
from .models.imagereward import ImageReward
from .models.videoalign import VideoAlign
from .ocr import ModelText, tesseract, text
from .pixels import (
    brightness,
    color,
    colorfulness,
    flicker,
    jpeg_compressibility,
    jpeg_incompressibility,
    motion,
    sharpness,
    smoothness,
)
from .server.remote import RemoteReward
from .server.vlm_judge import UnifiedReward, VlmJudge
from .similarity import LPIPS, psnr, ssim

__all__ = [
    "Aesthetic",
    "ClipScore",
    "ClipSimilarity",
    "DinoSimilarity",
    "GenEval",
    "HPSv2",
    "HPSv3",
    "ImageReward",
    "LPIPS",
    "ModelText",
    "NsfwFilter",
    "PickScore",
    "REWARDS",
    "RemoteReward",
    "Reward",
    "RewardError",
    "UnifiedReward",
    "VideoAlign",
    "VlmJudge",
    "batchwise",
    "brightness",
    "check_columns",
    "check_eval_rewards",
    "check_gradients",
    "check_groups",
    "check_needs",
    "color",
    "colorfulness",
    "differentiable",
    "differentiate",
    "flicker",
    "get_reward",
    "groupwise",
    "jpeg_compressibility",
    "jpeg_incompressibility",
    "load_rewards",
    "motion",
    "needs",
    "psnr",
    "reward_name",
    "reward_weights",
    "score",
    "sharpness",
    "smoothness",
    "ssim",
    "takes_latents",
    "takes_tensors",
    "tesseract",
    "text",
]
