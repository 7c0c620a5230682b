"""Handle running out of memory: start again with smaller micro-batches, or end with one clear message.

The message says what uses memory and which settings to change.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from ..config.quantization import asks_for_quantization
from ..config.settings import DiffusionGRPOConfig
from .memory import format_size

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
# Errors from outside torch's allocator: library handles, pinned memory, buffers of collectives
OTHER_WORDS = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")


class NotEnoughMemoryError(torch.OutOfMemoryError):
    """Memory ran out; the message says where, and what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what caused it, means that the accelerator or the host is out of memory."""
    if error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    if isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OTHER_WORDS)


def list_changes(args: DiffusionGRPOConfig, stage: str) -> list[str]:
    """Return the settings that would take less memory, starting with those that cost the least time."""
    factor, is_training, is_loaded = shrink_factor(args), stage == "training", stage != "loading"
    smaller = (
        f"per_device_train_batch_size: {args.per_device_train_batch_size // factor} with gradient_accumulation_steps: "
        f"{args.gradient_accumulation_steps * factor} and steps_per_generation: "
        f"{args.micro_batches_per_rollout * factor} (the same samples per update)"
    )
    changes = {
        "a smaller per_device_eval_batch_size": stage == "evaluation" and args.eval_batch_size > 1,
        smaller: is_training and factor > 1,
        "rollout_batch_size: 1": is_training and (args.rollout_batch_size or 1) > 1,
        "bf16: true, or fp16: true on older GPUs": not (args.bf16 or args.fp16 or args.use_cpu),
        "gradient_checkpointing: true": is_training and not args.activation_checkpointing,
        "cache_prompt_embeds: memory": args.cache_prompt_embeds == "off",
        "offload_trajectories: true": is_loaded and not args.offload_trajectories,
        "offload_frozen: cpu": args.offload_frozen is None,
        "decode_batch_size: 1": is_loaded and args.decode_batch_size is None and not args.vae_slicing,
        "a LoRA with group_offload: block_level": args.group_offload is None,
        "load_in_4bit: true (a LoRA, with bitsandbytes)": not asks_for_quantization(args),
    }
    return [change for change, is_open in changes.items() if is_open]


def shrink_factor(args: DiffusionGRPOConfig) -> int:
    """Return the divisor that makes the micro-batch smaller; 1 if it cannot be divided."""
    # losses that compare the samples of a prompt need all of them in one micro-batch
    together = (args.best_of_n or args.num_generations) if args.recording.whole_groups else 1
    parts = args.per_device_train_batch_size // together
    return smallest_divisor(parts) if parts > 1 else 1


def smallest_divisor(number: int) -> int:
    return next(divisor for divisor in range(2, number + 1) if number % divisor == 0)


@contextlib.contextmanager
def explain_out_of_memory(
    args: DiffusionGRPOConfig,
    place: Callable[[], str],
    measure: Callable[[], dict[str, int]] = dict,
    stage: str = "loading",
) -> Iterator[None]:
    """Turn an out-of-memory error inside this context into one message: what uses how much, and what to change."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotEnoughMemoryError) or not is_out_of_memory(error):
            raise
        first_line = next(iter(str(error).strip().splitlines()), "")
        sizes = ", ".join(f"{name} {format_size(count)}" for name, count in measure().items() if count)
        always = f" Always in memory: {sizes}; the rest comes and goes with each pass." if sizes else ""
        changes = "; ".join(list_changes(args, stage)) or "a larger card, or more processes with zero3"
        raise NotEnoughMemoryError(
            f"Out of memory {place()}: {first_line}{always} Try one of these, the cheapest first: {changes}. "
            "`diffusion-grpo plan CONFIG --fit 24GiB`, with the size of your card, says which of them are needed."
        ) from error


def train_with_smaller_batches(
    args: DiffusionGRPOConfig, train: Callable[[], Result], updates: Callable[[], int], resize: Callable[[], None]
) -> Result:
    """Call `train` until it does not run out of memory, and return its result (`auto_find_batch_size`).

    An update trains on as many samples as before, in more micro-batches; prompts, groups and seeds stay the same. The
    search ends with the first update: after it the weights have moved, and running out of memory is an error.
    """
    # Trainer's own search does not know about groups
    is_wanted, args.auto_find_batch_size = args.auto_find_batch_size, False
    try:
        while True:
            try:
                return train()
            except Exception as error:
                sizes = (shrink_factor(args), args.rollout_batch_size or 1, args.per_device_eval_batch_size or 1)
                if not is_wanted or max(sizes) == 1 or not is_out_of_memory(error) or updates() > 0:
                    raise
            _shrink(args)  # outside the handler, whose error keeps tensors alive
            resize()
    finally:
        args.auto_find_batch_size = is_wanted


def _shrink(args: DiffusionGRPOConfig) -> None:
    clear_device_cache(garbage_collection=True)
    factor = shrink_factor(args)
    args.per_device_train_batch_size //= factor
    args.gradient_accumulation_steps *= factor
    if args.steps_per_generation is not None:
        args.steps_per_generation *= factor
    for name in ("rollout_batch_size", "per_device_eval_batch_size"):
        if (size := getattr(args, name) or 1) > 1:
            setattr(args, name, size // 2)
    logger.warning(
        "Out of memory: the run starts again with per_device_train_batch_size=%d and "
        "gradient_accumulation_steps=%d, as many samples per update as before.",
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
    )
