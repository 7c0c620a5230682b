"""Refuse settings that are out of range, unknown, or contradict each other.

These are the messages that a user reads first. The checks need no model.
"""

import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from ..algorithms import ALGORITHMS
from ..algorithms.advantages import AGGREGATIONS
from ..policy.sde import LOG_PROBS, NOISE_UP_TO_1, SDES, check_log_prob
from ..policy.step_weights import STEP_WEIGHTS
from .defaults import DICTIONARIES, Sizes
from .early_checks import check_folder
from .fields import list_fields
from .names import RENAMED_LOSSES, suggest
from .quantization import check_quantization
from .step_checks import check_steps

logger = logging.getLogger(__name__)

TYPES = {"bool": bool, "int": numbers.Integral, "float": numbers.Real}  # annotation -> accepted type

AT_LEAST = {
    0: "seed learning_rate value_learning_rate kl_reward beta epsilon epsilon_high top_k num_completions_to_log",
    1: "num_generations num_generations_eval height width num_frames eval_num_inference_steps num_batches_per_step "
    "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps steps_per_generation "
    "rollout_batch_size decode_batch_size num_iterations num_trained_steps step_interval context_parallel_size "
    "group_offload_blocks ema_update_interval ref_model_sync_steps save_samples_steps log_samples_steps "
    "validation_steps",
    2: "num_inference_steps",
}
ABOVE_0 = ("noise_level", "advantage_clip", "value_clip", "max_ratio_error", "fps", "temperature")
SHARES = ("selective_checkpointing", "top_p")

OWN_CLIPS = ("grpo_guard", "dppo")  # losses with a limit of their own


def check_settings(args: Sizes) -> None:
    """Refuse settings that are out of range, unknown, or contradict each other."""
    check_types(args)
    if args.output_dir is not None:
        check_folder("output_dir", args.output_dir)
    _check_choices(args)
    _check_combinations(args)
    _check_trainer_settings(args)
    _check_numbers(args)
    if args.is_renoised:
        _check_renoised(args)
    check_steps(args)
    _check_context(args)
    _check_batches(args)
    _check_compile_mode(args)
    _check_group_offload(args)
    check_quantization(args)
    _check_prompt_embeds(args)


def check_types(args: Sizes) -> None:
    """Refuse values of the wrong type: the string `"False"` would count as true, and a string as a list of letters."""
    for name, setting in list_fields(type(args)).items():
        kind, value = setting.type.removesuffix(" | None"), getattr(args, name, None)
        if value is None and (kind != setting.type or setting.default is None):
            continue
        if kind.startswith("list[") and name not in ("sigmas", "trained_steps"):  # of which `check_steps` says more
            of = kind[len("list[") : -1]
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            if not is_list or of in TYPES and not all(_is_of(item, of) for item in value):
                raise ValueError(f"{name}={value!r} must be a list of {of}.")
        elif name in DICTIONARIES and not isinstance(value, (Mapping, str)):
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__} where a mapping is expected.")
        elif kind in TYPES and not _is_of(value, kind):
            raise ValueError(f"{name}={value!r} is of type {type(value).__name__}, but must be of type {kind}.")
        elif kind == "float" and math.isnan(value):
            raise ValueError(f"{name} is not a number; give a finite one.")


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "bool" or not isinstance(value, bool))


def _check_prompt_embeds(args: Sizes) -> None:
    trained = str(args.train_component or "").replace(" ", "").split(",")
    if args.cache_prompt_embeds != "off" and any(name.startswith("text_encoder") for name in trained):
        raise ValueError(
            f"cache_prompt_embeds={args.cache_prompt_embeds!r} keeps what frozen text encoders return, and "
            f"train_component={args.train_component!r} trains one; leave cache_prompt_embeds out."
        )


def _check_choices(args: Sizes) -> None:
    """Refuse names that are not among the known ones."""
    choices = {name: setting.choices for name, setting in list_fields(type(args)).items() if setting.choices}
    choices |= {"sde_type": ("auto", *SDES), "log_prob_type": LOG_PROBS, "step_weight": STEP_WEIGHTS}
    choices |= {"multi_objective_aggregation": AGGREGATIONS}
    for name, known in choices.items():
        value = getattr(args, name)
        if value not in known and not (value is None and getattr(type(args), name) is None):
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}.{suggest(value, known)}")
    if args.sde_type != "auto":  # "auto" is resolved once the pipeline is known
        check_log_prob(args.log_prob_type, args.sde_type)
    check_loss(args.loss_type)


def _check_combinations(args: Sizes) -> None:
    """Refuse settings that contradict another setting, or that have no effect because of it."""
    if args.loss_type in OWN_CLIPS:
        _check_own_clip(args)
    _check_advantage_fn(args)
    if args.sync_ref_model and not args.needs_reference:
        raise ValueError("sync_ref_model=True has no reference to synchronise while beta=0; set beta above 0.")
    if args.advantage_estimator == "gae" and args.multi_objective_aggregation in (
        "loss_per_reward",
        "normalize_then_sum",
    ):
        raise ValueError(
            "advantage_estimator='gae' has one value for all rewards, so multi_objective_aggregation cannot be "
            f"{args.multi_objective_aggregation!r}; use sum_then_normalize."
        )
    if args.step_weight != "none" and args.log_prob_type != "gaussian":
        raise ValueError(
            f"step_weight={args.step_weight!r} balances the gradients of Gaussian log-probabilities; leave "
            "log_prob_type='squared_error' out, or step_weight."
        )
    if args.lora_path is not None and args.lora_adapter is not None:
        raise ValueError(
            "lora_path loads a LoRA to train further and lora_adapter names a loaded one; leave one of them out."
        )


def _check_trainer_settings(args: Sizes) -> None:
    """Refuse settings of transformers' `Trainer` that rollouts cannot follow."""
    if args.remove_unused_columns:
        raise ValueError("remove_unused_columns must stay False: every column is passed to the reward functions.")
    if args.ignore_data_skip:
        raise ValueError("ignore_data_skip=True would pair resumed rollouts with the wrong prompts; leave it False.")
    saving, evaluating = (str(getattr(value, "value", value)) for value in (args.save_strategy, args.eval_strategy))
    if saving == "best" and evaluating == "no":
        raise ValueError(
            "save_strategy='best' saves after evaluations, but with eval_strategy='no' there are none; set "
            "eval_strategy='steps', or another save_strategy."
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim.startswith("schedule_free"):
        raise ValueError(
            f"optim={optim!r} uses different weights for training and for sampling, but rollouts sample between two "
            "updates; choose another optimizer, such as adamw_torch."
        )
    if optim in ("lomo", "adalomo"):
        raise ValueError(
            f"optim={optim!r} changes the weights within each backward pass, so it accumulates no gradients and "
            "ignores schedule, warm-up and clipping; choose another optimizer, such as adamw_8bit."
        )
    if args.auto_find_batch_size and args.world_size > 1:
        raise ValueError(
            "auto_find_batch_size=True works with one process: with several, memory may run out in one while the "
            "others wait. Set per_device_train_batch_size; `diffusion-grpo plan --fit` says what fits."
        )


def check_loss(loss: Any) -> None:
    """Refuse an unknown name; a dotted path or a function is checked when it is needed."""
    known = list(ALGORITHMS)
    if isinstance(loss, str) and "." not in loss and loss not in known:
        if found := RENAMED_LOSSES.get(loss.lower().replace("-", "_")):
            raise ValueError(f"loss_type={loss!r} {found}.")
        raise ValueError(
            f"loss_type={loss!r} is unknown; choose one of {', '.join(known)}, or a dotted path such as "
            f"my_package.my_loss.{suggest(loss, known)}"
        )


def _check_own_clip(args: Sizes) -> None:
    """Refuse settings without meaning for losses that limit a step by something other than epsilon."""
    loss = args.loss_type
    if args.importance_sampling_level != "token":
        raise ValueError(
            f"loss_type={loss!r} judges each step by its own ratio, so importance_sampling_level must be 'token', not "
            f"{args.importance_sampling_level!r}."
        )
    if loss == "grpo_guard" and args.step_weight != "none":
        raise ValueError(
            f"loss_type='grpo_guard' weights the steps by itself; leave step_weight={args.step_weight!r} out."
        )
    if loss == "grpo_guard" and args.log_prob_type != "gaussian":
        raise ValueError(
            "loss_type='grpo_guard' corrects the ratio of Gaussians; leave log_prob_type='squared_error' out."
        )


def _check_advantage_fn(args: Sizes) -> None:
    """Refuse a name without a module, and a second estimator; the function itself is checked when imported."""
    path = args.advantage_fn
    if isinstance(path, str) and "." not in path:
        raise ValueError(f"advantage_fn={path!r} is not a dotted path; include the module, as in my_package.{path}.")
    if path is not None and args.advantage_estimator == "gae":
        raise ValueError("advantage_estimator='gae' estimates advantages as advantage_fn does; leave one of them out.")


def _takes_single_samples(args: Sizes) -> bool:
    """Return whether a prompt may have a single sample, because rewards are not compared within a group."""
    compares = args.reward_baseline == "group" and args.advantage_estimator == "group"
    return not compares or args.advantage_fn is not None


def _check_numbers(args: Sizes) -> None:
    values = {name: value for name in list_fields(type(args)) if (value := getattr(args, name, None)) is not None}
    if args.num_generations < 2 and not _takes_single_samples(args):
        raise ValueError(
            f"num_generations must be at least 2, got {args.num_generations}; a single sample has no group to be "
            "compared with."
        )
    for least, names in AT_LEAST.items():
        for name in names.split():
            if values.get(name, least) < least:
                raise ValueError(f"{name} must be at least {least}, got {values[name]}.")
    for name in ABOVE_0:
        if values.get(name, 1) <= 0:
            raise ValueError(f"{name} must be above 0, got {values[name]}.")
    for name in SHARES:
        if not 0 < values.get(name, 1) <= 1:
            raise ValueError(f"{name} must lie in (0, 1], got {values[name]}.")
    for name in ("gamma", "gae_lambda"):
        if not 0 <= values[name] <= 1:
            raise ValueError(f"{name} must lie in [0, 1], got {values[name]}.")
    if args.seed >= 2**32:  # NumPy's limit
        raise ValueError(f"seed must be below 2**32, got {args.seed}.")
    if not all(math.isfinite(weight) for weight in args.reward_weights or []):
        raise ValueError(f"reward_weights must be finite numbers, got {args.reward_weights}.")
    if args.ema_decay is not None and not 0 < args.ema_decay < 1:
        raise ValueError(f"ema_decay must lie between 0 and 1, got {args.ema_decay}.")
    if args.sde_type in NOISE_UP_TO_1 and args.noise_level is not None and args.noise_level > 1:
        raise ValueError(f"noise_level must lie in (0, 1] for sde_type={args.sde_type!r}, got {args.noise_level}.")


def _check_renoised(args: Sizes) -> None:
    """Refuse settings of recorded steps for an algorithm that noises finished samples again."""
    recorded = ["sde_type", "noise_level", "noisy_steps", "log_prob_type", "advantage_estimator"]
    recorded += ["epsilon", "epsilon_high", "old_log_prob", "step_weight", "importance_sampling_level", "kl_reward"]
    usual = {name: getattr(type(args), name) for name in recorded}
    usual |= {"epsilon_high": args.epsilon}
    for name in recorded:
        if getattr(args, name) not in (getattr(type(args), name), usual[name]):
            raise ValueError(
                f"{name}={getattr(args, name)!r} is for recorded steps, but loss_type={args.loss_type!r} trains on "
                "finished samples, sampled without noise in the steps; leave it out."
            )
    if args.latent_sharing > 1:
        raise ValueError(
            f"samples_per_latent={args.samples_per_latent!r} makes samples identical with loss_type="
            f"{args.loss_type!r}, whose rollouts draw no noise in the steps; leave it out."
        )
    if args.multi_objective_aggregation == "loss_per_reward":
        raise ValueError(
            f"multi_objective_aggregation='loss_per_reward' works on recorded steps only; with loss_type="
            f"{args.loss_type!r} use normalize_then_sum."
        )
    if args.loss_type == "dpo" and args.drop_zero_advantages:
        raise ValueError(
            "drop_zero_advantages=True weighs samples, but loss_type='dpo' compares only the best and the worst "
            "sample of each prompt, and ignores prompts whose samples have equal advantages; leave it out."
        )
    group = args.best_of_n or args.num_generations
    if args.recording.whole_groups and group < 2:
        raise ValueError(
            f"loss_type={args.loss_type!r} compares the samples of a prompt with each other, so num_generations must "
            f"be at least 2, got {group}."
        )
    if args.recording.whole_groups and args.per_device_train_batch_size % group:
        name, batch = ("best_of_n" if args.best_of_n else "num_generations"), args.per_device_train_batch_size
        fewer = ", or best_of_n=2 to train on the best and the worst of them" if not args.best_of_n else ""
        raise ValueError(
            f"loss_type={args.loss_type!r} compares the {group} samples of a prompt with each other, so "
            f"per_device_train_batch_size={batch} must be a multiple of {name}; set it to "
            f"{-(-batch // group) * group}{fewer if batch % 2 == 0 else ''}."
        )


def _check_context(args: Sizes) -> None:
    if args.world_size % args.context_parallel_size:
        raise ValueError(
            f"context_parallel_size={args.context_parallel_size} does not divide the number of processes, "
            f"{args.world_size}; set the number of processes to a multiple of it."
        )
    if args.context_parallel_size > 1 and args.advantage_estimator == "gae":
        raise ValueError(
            "advantage_estimator='gae' has not been tested with context_parallel_size; leave one of them out."
        )


def _check_batches(args: Sizes) -> None:
    group, generations = args.batch_sizes.trained_per_prompt, args.num_generations
    if args.best_of_n is not None and (args.best_of_n % 2 or not 2 <= args.best_of_n <= generations):
        raise ValueError(
            f"best_of_n must be even, at least 2 and at most num_generations={generations}, got {args.best_of_n}."
        )
    if args.micro_batches_per_rollout % args.gradient_accumulation_steps:
        raise ValueError(
            f"steps_per_generation={args.micro_batches_per_rollout} must be a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}, so that a rollout holds whole updates."
        )
    trained = args.per_device_train_batch_size * args.data_processes * args.micro_batches_per_rollout
    if trained % group:
        name = "best_of_n" if args.best_of_n else "num_generations"
        raise ValueError(
            f"A rollout trains per_device_train_batch_size x processes x steps_per_generation = "
            f"{args.per_device_train_batch_size} x {args.data_processes} x {args.micro_batches_per_rollout} = "
            f"{trained} samples, which {name}={group} does not divide; change one of them."
        )
    if args.best_of_n and args.data_processes > 1 and args.batch_sizes.update_share % group:
        raise ValueError(
            f"best_of_n={group} chooses among whole groups on each of several processes: per_device_train_batch_size "
            f"x gradient_accumulation_steps = {args.per_device_train_batch_size} x {args.gradient_accumulation_steps} "
            "must be a multiple of it; change one of them."
        )
    if args.batch_sizes.prompts_per_rollout % args.num_batches_per_step:
        raise ValueError(
            f"num_batches_per_step={args.num_batches_per_step} does not divide the "
            f"{args.batch_sizes.prompts_per_rollout} prompts of a rollout; change it, or steps_per_generation."
        )
    if args.batch_sizes.prompts_per_rollout * generations // args.num_batches_per_step < 2:
        raise ValueError("A batch of one sample cannot be compared with anything; lower num_batches_per_step.")


def _check_compile_mode(args: Sizes) -> None:
    """Refuse the modes of `torch.compile` that record CUDA graphs: each block is compiled by itself.

    torch frees the output of one recorded block when the next block, which reads it, begins (pytorch issue 152887).
    """
    if args.torch_compile_mode in ("reduce-overhead", "max-autotune"):
        raise ValueError(
            f"torch_compile_mode={args.torch_compile_mode!r} records CUDA graphs, which do not work for blocks "
            "that are compiled one by one; use 'max-autotune-no-cudagraphs', or leave it out."
        )


def _check_group_offload(args: Sizes) -> None:
    if args.group_offload is None:
        return
    if args.group_offload_blocks > 1 and args.group_offload_stream:
        raise ValueError(
            f"group_offload_stream=True fetches blocks one by one; leave group_offload_blocks="
            f"{args.group_offload_blocks} out."
        )
    if args.torch_compile and args.group_offload == "leaf_level":
        raise ValueError(
            "torch_compile compiles whole blocks, which group_offload='leaf_level' takes apart; use 'block_level'."
        )
    if args.context_parallel_size > 1:
        raise ValueError("group_offload has not been tested with context_parallel_size; leave one of them out.")
    kwargs = args.activation_checkpointing_kwargs
    if isinstance(kwargs, dict) and kwargs.get("use_reentrant"):
        raise ValueError(
            "group_offload must fetch the weights of a block that is recomputed, and use_reentrant=True hides the "
            "recomputation from it; leave use_reentrant out of activation_checkpointing_kwargs."
        )


def check_token_settings(args: Sizes) -> None:
    """Refuse settings of denoising steps if tokens are trained, and warn about a clip range that is too small."""
    usual = {"sde_type": "auto", "noise_level": None, "trained_steps": None, "num_trained_steps": None, "sigmas": None}
    usual |= {"step_selection": "rollout", "step_interval": type(args).step_interval, "noisy_steps": "trained"}
    usual |= {"log_prob_type": "gaussian", "step_weight": "none", "kl_reward": 0.0, "advantage_estimator": "group"}
    for name, default in usual.items():
        if getattr(args, name) not in (default, False):
            raise ValueError(
                f"{name}={getattr(args, name)!r} is for denoising steps, but a language model draws tokens; leave it "
                "out, or train the denoising network."
            )
    if ("." not in args.loss_type and args.loss_type != "grpo") or args.is_renoised:
        raise ValueError(f"loss_type={args.loss_type!r} is for denoising steps; set loss_type='grpo' to train tokens.")
    if args.epsilon <= type(args).epsilon:
        logger.warning(
            "epsilon=%g is a clip range for denoising steps, whose log-probabilities are means over a latent; the "
            "ratios of tokens leave it at once, and nearly all would be clipped. Set epsilon to about 0.2.",
            args.epsilon,
        )
