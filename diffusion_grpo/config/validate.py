"""Settings that contradict each other: each of them alone is checked by its annotation (`fields.py`)."""

import logging
from collections.abc import Iterator

from .defaults import Sizes
from .files import check_folder
from .quantization import check_quantization

logger = logging.getLogger(__name__)
WATCHING_SCHEDULES = ("reduce_lr_on_plateau", "greedy")  # which follow the evaluations


def check_conflicts(args: Sizes) -> None:
    """Refuse settings that contradict each other, with the first sentence that says so."""
    if args.output_dir is not None:
        check_folder("output_dir", args.output_dir)
    of_loss = _find_recorded if args.is_recorded else _find_silent
    for find in (_find_unusable, _find_limits, _find_batches, _find_steps, of_loss):
        for message in find(args):
            raise ValueError(message)
    check_quantization(args)


def _find_unusable(args: Sizes) -> Iterator[str]:
    """Settings of transformers and of memory that a run with rollouts cannot follow."""
    if args.remove_unused_columns:
        yield "remove_unused_columns must stay False: every column is passed to the reward functions."
    if args.ignore_data_skip:
        yield "ignore_data_skip=True would pair resumed rollouts with the wrong prompts; leave it False."
    words = (args.save_strategy, args.eval_strategy, args.optim, args.lr_scheduler_type)
    saving, evaluating, optim, schedule = (str(getattr(word, "value", word)) for word in words)
    if saving == "best" and evaluating == "no":
        yield "save_strategy='best' saves after evaluations, and eval_strategy='no' has none; set eval_strategy."
    if optim.startswith("schedule_free") or optim.endswith(("lomo", "_layerwise")):
        yield (
            f"optim={optim!r} trains other weights than rollouts sample with, or changes them within a backward pass; "
            "choose another optimizer, such as adamw_torch or adamw_8bit."
        )
    if args.warmup_steps and schedule in WATCHING_SCHEDULES:
        yield f"warmup_steps has no effect with lr_scheduler_type={schedule!r}, which follows evaluations."
    if args.auto_find_batch_size and args.world_size > 1:
        yield (
            "auto_find_batch_size=True works with one process; set per_device_train_batch_size (`diffusion-grpo plan "
            "--fit` says what fits)."
        )
    if args.sync_ref_model and not args.needs_reference:
        yield "sync_ref_model=True has no reference to synchronise while beta=0; set beta above 0."
    if args.torch_compile_mode in ("reduce-overhead", "max-autotune"):  # pytorch issue 152887
        yield (
            f"torch_compile_mode={args.torch_compile_mode!r} records CUDA graphs, which do not work for blocks that "
            "are compiled one by one; use 'max-autotune-no-cudagraphs', or leave it out."
        )
    if args.world_size % args.context_parallel_size:
        yield (
            f"context_parallel_size={args.context_parallel_size} must divide the number of processes, "
            f"{args.world_size}."
        )
    for name, is_set in (("group_offload", args.group_offload), ("gae", args.advantage_estimator == "gae")):
        if args.context_parallel_size > 1 and is_set:
            yield f"{name} has not been tested with context_parallel_size; leave one of them out."
    trained = str(args.train_component or "").replace(" ", "").split(",")
    if args.cache_prompt_embeds != "off" and any(name.startswith("text_encoder") for name in trained):
        yield (
            f"cache_prompt_embeds={args.cache_prompt_embeds!r} keeps what frozen text encoders return, and "
            f"train_component={args.train_component!r} trains one; leave cache_prompt_embeds out."
        )
    if args.lora_path is not None and args.lora_adapter is not None:
        yield "lora_path and lora_adapter both name a LoRA to train further; leave one of them out."


def _find_limits(args: Sizes) -> Iterator[str]:
    """Limits that no metric could pass."""
    evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
    for name, limit in (args.stop_when or {}).items():
        if name != "diversity" and not name.startswith("eval_"):
            yield f"stop_when: {name!r} is neither diversity nor a metric of evaluations (eval_..., docs/metrics.md)."
        if name.startswith("eval_") and not evaluates:
            yield f"stop_when: {name} is measured in evaluations; set eval_dataset, eval_strategy and eval_steps."
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0:
            yield f"stop_when: the limit of {name} must be a number above 0, got {limit!r}."


def _find_batches(args: Sizes) -> Iterator[str]:
    """Sizes of groups, rollouts and updates that do not divide each other."""
    sizes, generations, count = args.batch_sizes, args.num_generations, args.micro_batches_per_rollout
    if generations < 2 and args.compares_groups:
        yield f"num_generations must be at least 2, got {generations}: a single sample has no group to compare with."
    if args.best_of_n is not None and (args.best_of_n % 2 or not 2 <= args.best_of_n <= generations):
        yield f"best_of_n must be even, at least 2 and at most num_generations={generations}, got {args.best_of_n}."
    if count % args.gradient_accumulation_steps:
        yield (
            f"steps_per_generation={count} must be a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}, so that a rollout holds whole updates."
        )
    trained = args.per_device_train_batch_size * args.data_processes * count
    name, group = ("best_of_n" if args.best_of_n else "num_generations"), sizes.trained_per_prompt
    if trained % group:
        yield (
            f"A rollout trains per_device_train_batch_size x processes x steps_per_generation = "
            f"{args.per_device_train_batch_size} x {args.data_processes} x {count} = {trained} samples, which "
            f"{name}={group} does not divide; change one of them."
        )
    if args.best_of_n and args.data_processes > 1 and sizes.update_share % group:
        yield (
            f"best_of_n={group} must divide per_device_train_batch_size x gradient_accumulation_steps = "
            f"{sizes.update_share} with several processes, each of which chooses among whole groups."
        )
    prompts = sizes.prompts_per_rollout
    if prompts % args.num_batches_per_step:
        yield f"num_batches_per_step={args.num_batches_per_step} does not divide the {prompts} prompts of a rollout."
    if prompts * generations // args.num_batches_per_step < 2 and not args.takes_gradients:
        yield "A batch of one sample cannot be compared with anything; lower num_batches_per_step."
    sharing = args.samples_per_latent
    if sharing not in (None, "group") and (isinstance(sharing, str) or sharing < 1 or generations % sharing):
        yield f"samples_per_latent={sharing!r} must be group or a divisor of num_generations={generations}."
    if not args.recording.whole_groups:
        return
    batch = args.per_device_train_batch_size
    if group < 2:
        yield f"loss_type={args.loss_type!r} compares samples of a prompt, so num_generations must be at least 2."
    if batch % group:
        fewer = ", or best_of_n=2 to train on the best and the worst of them" if name != "best_of_n" else ""
        yield (
            f"loss_type={args.loss_type!r} compares the {group} samples of a prompt with each other, so "
            f"per_device_train_batch_size={batch} must be a multiple of {name}; set it to "
            f"{-(-batch // group) * group}{fewer if batch % 2 == 0 else ''}."
        )


def _find_steps(args: Sizes) -> Iterator[str]:
    """Denoising steps and noise levels that a rollout cannot have."""
    steps, first = args.trained_steps, int(args.is_renoised)
    last, sigmas = args.num_inference_steps - args.is_recorded, args.sigmas
    is_range = isinstance(steps, (list, tuple)) and len(steps) == 2
    if steps not in (None, "all") and not (is_range and first <= steps[0] < steps[1] <= last):
        why = ", step 0 cannot be handed a noised sample" if first else ""
        why = ", the last step has no noise" if args.is_recorded else why
        yield (
            f"trained_steps={steps!r} must be all or [start, stop) with {first} <= start < stop <= {last} (of "
            f"num_inference_steps={args.num_inference_steps}{why})."
        )
    if args.trained_count > len(args.trainable_steps):
        yield (
            f"num_trained_steps={args.num_trained_steps} is more than the {len(args.trainable_steps)} steps that may "
            "be trained; lower it, or widen trained_steps."
        )
    if sigmas is not None and args.eval_num_inference_steps is None:
        yield "sigmas are for rollouts, and evaluations keep the pipeline's spacing; set eval_num_inference_steps."
    if sigmas in (None, "even"):
        return
    if len(sigmas) != args.num_inference_steps:
        yield (
            f"sigmas holds {len(sigmas)} noise levels, one per step, but num_inference_steps="
            f"{args.num_inference_steps}; set num_inference_steps: {len(sigmas)}, or leave sigmas out."
        )
    if sigmas[0] != 1 or any(high <= low for high, low in zip(sigmas, [*sigmas[1:], 0.0], strict=True)):
        yield f"sigmas={sigmas} must be even, or begin with 1.0 (pure noise) and fall with every step, to above 0."


def _find_recorded(args: Sizes) -> Iterator[str]:
    """Settings that contradict each other for losses on recorded steps."""
    loss, uses_gae = args.loss_type, args.advantage_estimator == "gae"
    if loss in ("grpo_guard", "dppo", "fdfo") and args.importance_sampling_level != "token":
        yield f"loss_type={loss!r} judges each step by its own ratio; leave importance_sampling_level='token'."
    if args.recording.finished and (args.latent_sharing < 2 or args.multi_objective_aggregation == "loss_per_reward"):
        yield (
            f"loss_type={loss!r} compares samples of one initial latent by one advantage; leave samples_per_latent "
            "and multi_objective_aggregation='loss_per_reward' out."
        )
    if loss == "fdfo" and (name := _find_changed(args, ["epsilon", "epsilon_high"])):
        yield f"{name} has no effect with loss_type='fdfo', which clips no ratio; leave it out."
    if loss == "grpo_guard" and args.step_weight != "none":
        yield f"loss_type='grpo_guard' weights the steps by itself; leave step_weight={args.step_weight!r} out."
    if args.log_prob_type != "gaussian" and (loss == "grpo_guard" or args.step_weight != "none"):
        yield (
            f"log_prob_type={args.log_prob_type!r} is not Gaussian, as step_weight and loss_type='grpo_guard' need; "
            "leave it out."
        )
    if uses_gae and args.multi_objective_aggregation in ("loss_per_reward", "normalize_then_sum"):
        yield (
            "advantage_estimator='gae' has one value for all rewards; use multi_objective_aggregation="
            "'sum_then_normalize'."
        )
    if uses_gae and args.advantage_fn is not None:
        yield "advantage_estimator='gae' estimates advantages as advantage_fn does; leave one of them out."


def _find_silent(args: Sizes) -> Iterator[str]:
    """Settings of recorded steps for an algorithm whose rollouts draw no noise in the steps."""
    recorded = ["sde_type", "noise_level", "noisy_steps", "log_prob_type", "advantage_estimator", "epsilon"]
    recorded += ["old_log_prob", "step_weight", "importance_sampling_level", "kl_reward", "epsilon_high"]
    if name := _find_changed(args, recorded):
        yield (
            f"{name}={getattr(args, name)!r} is for recorded steps, but loss_type={args.loss_type!r} trains on "
            "finished samples, sampled without noise in the steps; leave it out."
        )
    if args.latent_sharing > 1:
        yield (
            f"samples_per_latent={args.samples_per_latent!r} makes samples identical with loss_type="
            f"{args.loss_type!r}, whose rollouts draw no noise in the steps; leave it out."
        )
    of_groups = ["multi_objective_aggregation", "best_of_n", "drop_zero_advantages"]
    if args.takes_gradients and (name := _find_changed(args, of_groups)):
        yield f"{name} has no meaning for loss_type={args.loss_type!r}, which differentiates a sum; leave it out."
    if args.multi_objective_aggregation == "loss_per_reward":
        yield (
            f"multi_objective_aggregation='loss_per_reward' works on recorded steps only; with loss_type="
            f"{args.loss_type!r} use normalize_then_sum."
        )


def check_token_settings(args: Sizes) -> None:
    """Refuse settings of denoising steps if tokens are trained, and warn about a clip range that is too small."""
    of_steps = ["sde_type", "noise_level", "trained_steps", "num_trained_steps", "sigmas", "step_selection"]
    of_steps += ["noisy_steps", "log_prob_type", "step_weight", "kl_reward", "advantage_estimator"]
    if name := _find_changed(args, of_steps):
        raise ValueError(
            f"{name}={getattr(args, name)!r} is for denoising steps, but a language model draws tokens; leave it out, "
            "or train the denoising network."
        )
    is_named = "." not in args.loss_type
    if (is_named and args.loss_type != "grpo") or not args.is_recorded or args.recording.old == "mean":
        raise ValueError(f"loss_type={args.loss_type!r} is for denoising steps; set loss_type='grpo' to train tokens.")
    if args.epsilon <= type(args).epsilon:
        logger.warning(
            "epsilon=%g is a clip range for denoising steps, whose log-probabilities are means over a latent; the "
            "ratios of tokens leave it at once, and nearly all would be clipped. Set epsilon to about 0.2.",
            args.epsilon,
        )


def _find_changed(args: Sizes, names: list[str]) -> str | None:
    """Return the first of some settings that does not have its default."""
    return next((name for name in names if getattr(args, name) != getattr(type(args), name)), None)
