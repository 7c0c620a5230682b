"""Make the objects that the trainer holds from the settings, and its callbacks; describe the model for `run.json`."""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import TrainerState
from transformers.trainer_callback import CallbackHandler

from ..algorithms.batch import Rows
from ..config.settings import DiffusionGRPOConfig
from ..data.columns import list_given
from ..data.held_out import count_prompts
from ..data.inputs import PipelineInputs
from ..data.prompts import hash_prompts
from ..media.samples import find_sampling_rate
from ..policy.base import Policy
from ..policy.unguided import find_default_guidance
from ..report.record import pipeline_tag
from ..report.samples import SampleWriter
from ..rewards.executor import Executor
from ..rollout.estimator import AdvantageEstimator
from ..rollout.generate import RolloutGenerator, RolloutLoader
from ..rollout.passes import Passes
from ..rollout.runtime import Runtime, UpdateProgress
from ..rollout.score import RewardScorer
from ..rollout.value_model import ValueCallback
from ..weights.files import lora_loader, name_half_dtype
from ..weights.lora import list_kept_adapters
from ..weights.public_names import strip_folders, strip_secrets
from ..weights.quantization import describe_quantization
from .callbacks import (
    GuardCallback,
    LastLogCallback,
    ReportCallback,
    ResumeCallback,
    SampleGridCallback,
    SyncRefModelCallback,
    ValidationCallback,
)
from .checkpoints import Checkpointer
from .evaluation import Evaluator
from .learner import Learner
from .preflight import RunRewards
from .progress import replace_progress
from .step_size import StepSize
from .trackers import patch_trackers
from .update import PolicyUpdate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """The objects of a run that the trainer calls."""

    update: PolicyUpdate
    passes: Passes
    loader: RolloutLoader
    evaluator: Evaluator
    checkpointer: Checkpointer
    step_size: StepSize | None


def build(
    args: DiffusionGRPOConfig,
    rewards: RunRewards,
    learner: Learner,
    policy: Policy,
    inputs: PipelineInputs,
    runtime: Runtime,
    *,
    read_rows: Callable[[list[int]], Rows],
    state: Callable[[], TrainerState],
) -> Built:
    """Make the objects that sample and score, those that train, and those that evaluate and save."""
    backend, rate = runtime.backend, find_sampling_rate(policy.pipe)
    scorer = RewardScorer(
        rewards.trained,
        [reward.name for reward in rewards.all],
        executor=Executor(args.overlap_rewards, lambda: policy.draws_globally),
        fps=inputs.fps,
        sampling_rate=rate,
        state=state,
        failures=Path(args.output_dir) / "failures",
    )
    passes = Passes(
        args,
        policy,
        inputs,
        runtime,
        reference=learner.reference,
        old_policy=learner.old_policy,
        run=learner.run_passes,
    )
    generator = RolloutGenerator(
        args,
        policy,
        inputs,
        scorer=scorer,
        estimator=AdvantageEstimator(args, rewards.names, rewards.weights, learner.values),
        passes=passes,
        writer=SampleWriter(args, inputs, rewards.names, backend.groups, rate),
        runtime=runtime,
    )
    loader = RolloutLoader(generator, args, backend, read_rows)
    update = PolicyUpdate(args, learner, policy, runtime)
    evaluator = Evaluator(args, policy, rewards, learner, runtime, generator=generator, loader=loader, passes=passes)
    checkpointer = Checkpointer(args, policy, learner, loader)
    step_size = None  # the rate is that of the settings
    if args.target_change is not None:
        predict = functools.partial(passes.run, passes.predict_twice)
        step_size = StepSize(args.target_change, predict, backend, runtime.metrics)
    return Built(update, passes, loader, evaluator, checkpointer, step_size)


def warn_of_guidance(
    args: DiffusionGRPOConfig, policy: Policy, inputs: PipelineInputs, dataset: Dataset | None
) -> None:
    """Warn if the rollout is guided by a default of the pipeline, and the loss trains without guidance."""
    columns = () if dataset is None else dataset.column_names
    if not args.is_renoised or not args.should_log or "guidance_scale" in {*inputs.fixed, *columns}:
        return
    default = find_default_guidance(policy.pipe, policy.networks)
    if default is not None:
        logger.warning(
            "loss_type='%s' trains the prediction without guidance, but samples are made with the pipeline's default, "
            "guidance_scale=%g. Set guidance_scale=1.0 to sample without guidance, as DiffusionNFT and AWM do, or set "
            "guidance_scale=%g to keep it.",
            args.loss_type,
            default,
            default,
        )


def describe_model(
    policy: Policy,
    model: nn.Module,
    inputs: PipelineInputs,
    train_dataset: Dataset | None,
    eval_dataset: Dataset | dict[str, Dataset] | None,
) -> dict[str, Any]:
    """Return the entries of run.json about the model and the data once they are loaded."""
    pipe, component = policy.pipe, policy.component
    given = {*inputs.fixed, *(train_dataset.column_names if train_dataset is not None else [])}
    entries = {
        "pipeline": type(pipe).__name__,
        "component": ", ".join(component),
        "prompts": count_prompts(train_dataset, eval_dataset, inputs.accepted),
        "loads_by": lora_loader(pipe, component[0]),
        "pipeline_tag": pipeline_tag(type(pipe), given),
        "evaluation_call": describe_call(inputs, eval_dataset or train_dataset),
    }
    entries |= {"prompts_hash": prompts} if (prompts := hash_prompts(train_dataset)) else {}
    entries |= {"dtype": dtype} if (dtype := name_half_dtype(pipe)) else {}
    entries |= {"quantized": methods} if (methods := describe_quantization(pipe)) else {}
    if hasattr(pipe, "sample_outputs"):
        entries["modular"] = {"output": pipe.sample_outputs[0], "scales": pipe.guidance_scales}
    kept = list_kept_adapters(pipe, model, component)
    return entries | ({"kept_adapters": kept} if kept else {})


def describe_call(inputs: PipelineInputs, data: Dataset | dict[str, Dataset] | None) -> dict[str, Any]:
    """Return how evaluations call the pipeline: names of varying `inputs`, and values of fixed `arguments`."""
    first = next(iter(data.values())) if isinstance(data, dict) else data
    taken = [name for name in ([] if first is None else list_given(first)) if name in inputs.accepted]
    args, arguments = inputs.args, {}
    arguments["num_inference_steps"] = args.eval_num_inference_steps or args.num_inference_steps
    overrides = args.eval_pipeline_kwargs or {}
    taken = [name for name in taken if name not in overrides]
    for name, value in (inputs.fixed | overrides).items():
        if name in taken:
            continue
        try:
            json.dumps(value)
        except TypeError:
            taken.append(name)
        else:
            arguments[name] = strip_folders(strip_secrets(value))
    return {"inputs": taken, "arguments": arguments}


def add_callbacks(
    handler: CallbackHandler,
    args: DiffusionGRPOConfig,
    learner: Learner,
    step_size: StepSize | None,
    *,
    accelerator: Accelerator,
    progress: UpdateProgress,
    run: dict[str, Any],
    write_validation: Callable[[], Path],
) -> None:
    """Add the callbacks of a run, in the order in which they act."""
    handler.add_callback(ResumeCallback)
    if learner.values is not None:
        handler.add_callback(ValueCallback(learner.values, accelerator))
    for callback in filter(None, (step_size, learner.average, learner.old_policy)):
        handler.add_callback(callback)
    if args.sync_ref_model:
        alpha, interval = args.ref_model_mixup_alpha, args.ref_model_sync_steps
        handler.add_callback(SyncRefModelCallback(learner.weights, lambda: learner.reference.weights, alpha, interval))
    handler.add_callback(LastLogCallback)
    patch_trackers(handler)
    handler.add_callback(SampleGridCallback(handler))
    replace_progress(handler, args, progress, run)  # after the grid's callback: it may show the grid
    handler.add_callback(GuardCallback(args.stop_when, run))
    if args.validation_prompts:
        handler.add_callback(ValidationCallback(write_validation, handler))
    handler.add_callback(ReportCallback)
