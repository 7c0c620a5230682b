"""The public API as a typed program uses it, read by mypy in `make lint` and never run.

What `assert_type` names must be exactly what a caller gets. A line with `type: ignore` is wrong use that mypy must
notice; it fails too once mypy no longer does.
"""

from pathlib import Path
from typing import Any, assert_type

import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from PIL import Image

from diffusion_grpo import DiffusionGRPOConfig, DiffusionGRPOTrainer, ReplayReport, check_pipeline, tiny
from diffusion_grpo.algorithms.base import Algorithm, PassOutput, Reference
from diffusion_grpo.algorithms.batch import MicroBatch, Part
from diffusion_grpo.losses import LossInputs, LossOutput, needs_old_mean
from diffusion_grpo.policy.base import Policy
from diffusion_grpo.report.page import write_report, write_summary
from diffusion_grpo.rewards import RemoteReward, batchwise, groupwise, load_rewards, takes_latents
from diffusion_grpo.rewards.contract import Reward


@groupwise
def brightness(images: list[Image.Image], **columns: Any) -> list[float]:
    return [sum(image.convert("L").histogram()[128:]) / (image.width * image.height) for image in images]


async def asked(prompts: list[str], **columns: Any) -> list[float | None]:
    return [None for _ in prompts]


@takes_latents
@batchwise
def quiet(latents: torch.Tensor, **columns: Any) -> torch.Tensor:
    return -latents.flatten(1).pow(2).mean(1)


def use_rewards(images: list[Image.Image], latents: torch.Tensor) -> None:
    assert_type(brightness(images), list[float])  # a mark keeps the type of what it marks
    assert_type(quiet(latents), torch.Tensor)
    assert_type(load_rewards(["text", {"color": 0.5}]), list[Reward])
    RemoteReward(reward="text", url="http://localhost:8000")
    RemoteReward(reward=3, url="http://localhost:8000")  # type: ignore[arg-type]


@needs_old_mean
def my_loss(inputs: LossInputs, strength: float = 1.0) -> LossOutput:
    return LossOutput((inputs.log_prob * inputs.advantages).mean() * -strength, {})


class MyAlgorithm(Algorithm):
    def passes(self, batch: MicroBatch) -> list[list[tuple[Part, int]]]:
        return []

    def loss(self, policy: Policy, reference: Reference | None, part: Part, step: int) -> PassOutput:
        raise NotImplementedError


def use_trainer(pipe: DiffusionPipeline) -> None:
    args = DiffusionGRPOConfig(output_dir="run", num_generations=4, beta=0.1, trained_steps=[0, 2])
    assert_type(args.num_generations, int)
    assert_type(args.trained_steps, list[int] | str | None)
    assert_type(tiny.PATH, Path)
    prompts = tiny.prompts("train", n=4)
    assert_type(prompts, Dataset)
    trainer = DiffusionGRPOTrainer(
        model=pipe, reward_funcs=[brightness, quiet, asked, "text"], args=args, train_dataset=prompts
    )
    DiffusionGRPOTrainer(model=pipe, reward_funcs=3, args=args)  # type: ignore[arg-type]
    DiffusionGRPOTrainer(pipe, brightness, arguments=args)  # type: ignore[call-arg]
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    assert_type(trainer.evaluate(), dict[str, float])
    assert_type(write_report("run"), Path)
    assert_type(write_summary("run"), dict[str, Any])


def use_check(pipe: DiffusionPipeline) -> None:
    report = check_pipeline(pipe, {"prompt": ["a"]}, num_inference_steps=4)
    assert_type(report, ReplayReport)
    check_pipeline(pipe, {"prompt": ["a"]}, sde_type=4)  # type: ignore[arg-type]


MyAlgorithm().passes(3)  # type: ignore[arg-type]
