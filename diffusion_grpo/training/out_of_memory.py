"""Handle running out of memory: start again with smaller micro-batches, or end with one clear message."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from ..config.quantization import asks_for_quantization
from ..config.settings import DiffusionGRPOConfig
from ..rollout.loader import RolloutLoader
from .memory import count_bytes, format_size
from .progress import UpdateProgress

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
# Errors from outside torch's allocator: library handles, pinned memory, buffers of collectives
OTHER_WORDS = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
PLACES = {"rollout": "in the rollout", "rewards": "in the rewards", "training": "in the update"}


class NotEnoughMemoryError(torch.OutOfMemoryError):
    """Memory ran out; the message says where, and what to change."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the accelerator or the host is out of memory."""
    if isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OTHER_WORDS)


def weigh_run(model: nn.Module, pipe: DiffusionPipeline, optimizer: Any, feed: RolloutLoader) -> dict[str, int]:
    """Return the bytes of a run by kind, named as in `diffusion-grpo plan`, the largest first.

    If the model is on an accelerator, tensors in CPU memory are left out.
    """
    device = next((p.device.type for p in model.parameters() if p.requires_grad), "cpu")
    known = {id(x) for x in list_weights(model)}
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    states = (getattr(optimizer, "state", None) or {}).values()
    samples = [] if feed.buffer is None else feed.buffer.samples
    found = {
        "parameters": list_weights(model),
        "gradients": (p.grad for p in model.parameters()),
        "optimizer": (x for state in states for x in state.values() if torch.is_tensor(x)),
        "frozen parts": (x for part in parts for x in list_weights(part) if id(x) not in known),
        "trajectory": (tensor for sample in samples for tensor in sample.tensors().values()),
    }
    counts = {
        name: count_bytes(x for x in tensors if x is not None and x.device.type == device)
        for name, tensors in found.items()
    }
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def list_weights(module: nn.Module) -> list[Tensor]:
    """Return the weights of a module, and its buffers, which take memory too."""
    return [*module.parameters(), *module.buffers()]


def advise(args: DiffusionGRPOConfig, counts: dict[str, int], is_evaluating: bool) -> list[str]:
    """Return suggestions for settings to change, starting with those that cost the least time."""
    found = []
    if is_evaluating:
        if args.eval_batch_size > 1:
            found.append(
                f"per_device_eval_batch_size: {args.eval_batch_size // smallest_divisor(args.eval_batch_size)}"
            )
    elif (factor := shrink_factor(args)) > 1:
        found.append(
            f"per_device_train_batch_size: {args.per_device_train_batch_size // factor} with "
            f"gradient_accumulation_steps: {args.gradient_accumulation_steps * factor} and steps_per_generation: "
            f"{args.micro_batches_per_rollout * factor} (the same samples per update)"
        )
    elif (args.rollout_batch_size or 1) > 1:
        found.append("rollout_batch_size: 1")
    if not args.activation_checkpointing and not is_evaluating:
        found.append("gradient_checkpointing: true")
    if not args.offload_trajectories and counts.get("trajectory", 0) > sum(counts.values()) / 20:
        found.append(f"offload_trajectories: true (frees {format_size(counts['trajectory'])})")
    if args.offload_frozen is None:
        found.append(f"offload_frozen: cpu (frees up to {format_size(counts['frozen parts'])})")
    if args.decode_batch_size is None and not args.vae_slicing:
        found.append("decode_batch_size: 1, if it happened while samples were decoded")
    if args.group_offload is None and counts["parameters"] > 20 * counts["gradients"] > 0:
        found.append(f"group_offload: block_level (frees most of {format_size(counts['parameters'])})")
    return found


def advise_loading(args: DiffusionGRPOConfig, is_full_training: bool) -> list[str]:
    """Return suggestions for settings with which a model takes less memory, starting with the simplest."""
    found = []
    if args.cache_prompt_embeds == "off":
        found.append("cache_prompt_embeds: memory (frees the text encoders before the run begins)")
    if args.offload_frozen is None:
        found.append("offload_frozen: cpu (keeps the text encoders and the VAE in CPU memory between their uses)")
    if not (args.bf16 or args.fp16 or args.use_cpu):
        found.append("bf16: true, or fp16: true on older GPUs (half the memory of float32)")
    if is_full_training:
        found.append("a LoRA (peft_config) instead of training all weights")
        return found
    if args.group_offload is None:
        found.append("group_offload: block_level (keeps most blocks of the network in CPU memory)")
    if not asks_for_quantization(args):
        found.append("load_in_4bit: true (needs bitsandbytes)")
    return found


def shrink_factor(args: DiffusionGRPOConfig) -> int:
    """Return the divisor that makes the micro-batch smaller; 1 if it cannot be divided.

    Losses that compare the samples of a prompt need all of them in one micro-batch.
    """
    together = (args.best_of_n or args.num_generations) if args.recording.whole_groups else 1
    parts = args.per_device_train_batch_size // together
    return smallest_divisor(parts) if parts > 1 else 1


def smallest_divisor(number: int) -> int:
    """Return the smallest divisor above 1 of a number above 1."""
    return next(divisor for divisor in range(2, number + 1) if number % divisor == 0)


def describe_accelerator(device: torch.device) -> str:
    """Return the size of an accelerator's memory for `plan --fit`; without one, "24GiB" as an example."""
    if device.type != "cuda":
        return "24GiB"
    return f"{torch.cuda.get_device_properties(device).total_memory // 2**20}MiB"


@contextlib.contextmanager
def explain_out_of_memory(
    args: DiffusionGRPOConfig,
    measure: Callable[[], dict[str, int]],
    progress: UpdateProgress,
    updates: Callable[[], int],
    is_evaluating: bool = False,
) -> Iterator[None]:
    """Turn an out-of-memory error inside this context into one message: what uses how much, and what to change."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotEnoughMemoryError) or not is_out_of_memory(error):
            raise
        counts, done = measure(), updates()
        sizes = ", ".join(f"{name} {format_size(count)}" for name, count in counts.items() if count)
        where = "in an evaluation" if is_evaluating else PLACES.get(progress.stage, "in the run")
        raise NotEnoughMemoryError(
            f"Out of memory {where} after {done} update{'' if done == 1 else 's'}: {_first_line(error)} Always in "
            f"memory: {sizes}; the rest comes and goes with each pass. "
            + _suggest(advise(args, counts, is_evaluating), args.device)
        ) from error


@contextlib.contextmanager
def explain_loading(args: DiffusionGRPOConfig, is_full_training: bool) -> Iterator[None]:
    """Turn an out-of-memory error while a model is loaded or prompts are encoded into one message: what to change."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotEnoughMemoryError) or not is_out_of_memory(error):
            raise
        raise NotEnoughMemoryError(
            f"Out of memory while the model was loaded: {_first_line(error)} "
            + _suggest(advise_loading(args, is_full_training), args.device)
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _suggest(changes: list[str], device: torch.device) -> str:
    listed = "; ".join(changes) or "use a card with more memory, or more processes with zero3"
    return (
        f"Try one of these, the cheapest first: {listed}. `diffusion-grpo plan CONFIG --fit "
        f"{describe_accelerator(device)}` says which of them are needed."
    )


def count_updates(checkpoint: str | Path | None) -> int:
    """Return the number of updates before a checkpoint, whatever its folder is called; 0 for None."""
    if checkpoint is None:
        return 0
    return TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME)).global_step


class MicroBatchSearch:
    """Search that restarts a run with smaller micro-batches until it fits in memory (`auto_find_batch_size`).

    An update trains on as many samples as before, in more micro-batches; prompts, groups and seeds stay the same. The
    search ends with the first update: after it the weights have moved, and running out of memory is an error.
    """

    def __init__(self, args: DiffusionGRPOConfig, updates: Callable[[], int], resize: Callable[[], None]):
        self._args, self._updates, self._resize = args, updates, resize

    def run(self, train: Callable[[], Result]) -> Result:
        """Call `train` until it does not run out of memory, and return its result.

        `Trainer` has its own search, which does not know about groups; it is switched off meanwhile.
        """
        is_wanted, self._args.auto_find_batch_size = self._args.auto_find_batch_size, False
        try:
            while (result := self._try(train, is_wanted)) is None:
                self._shrink()  # outside the handler, whose error keeps tensors alive
            return result
        finally:
            self._args.auto_find_batch_size = is_wanted

    def _try(self, train: Callable[[], Result], is_wanted: bool) -> Result | None:
        """Return None if memory ran out before the first update and a smaller size is possible."""
        try:
            return train()
        except Exception as error:
            args = self._args
            is_smallest = (
                max(shrink_factor(args), args.rollout_batch_size or 1, args.per_device_eval_batch_size or 1) == 1
            )
            if not is_wanted or is_smallest or not is_out_of_memory(error) or self._updates() > 0:
                raise
        return None

    def _shrink(self) -> None:
        clear_device_cache(garbage_collection=True)
        args = self._args
        factor = shrink_factor(args)
        args.per_device_train_batch_size //= factor
        args.gradient_accumulation_steps *= factor
        if args.steps_per_generation is not None:
            args.steps_per_generation *= factor
        if (args.rollout_batch_size or 1) > 1:
            args.rollout_batch_size = max(1, args.rollout_batch_size // 2)
        if (args.per_device_eval_batch_size or 1) > 1:
            args.per_device_eval_batch_size = max(1, args.per_device_eval_batch_size // 2)
        self._resize()
        logger.warning(
            "Out of memory: the run starts again with per_device_train_batch_size=%d and "
            "gradient_accumulation_steps=%d, as many samples per update as before.",
            args.per_device_train_batch_size,
            args.gradient_accumulation_steps,
        )
