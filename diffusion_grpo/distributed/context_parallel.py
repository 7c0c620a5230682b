"""Context parallelism: the sequence of each sample is spread over a group of processes, for videos too long for one.

In: networks and settings. Out: the same networks, whose attention runs over such a group (diffusers'
`enable_parallelism`), and the rows of a gathered tensor that the groups have, each once. A module of its own because
all else sees a group as one process: its processes get the same samples, seeds and rewards.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from diffusers import ContextParallelConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ..config.settings import DiffusionGRPOConfig

UNEQUAL = "divisible by mesh size"  # in diffusers' assertion
RING_BACKEND = "_native_cudnn"  # of torch's own: it gives the log-sum-exps by which the parts of a ring are joined


def spread_over_context(networks: list[nn.Module], args: DiffusionGRPOConfig) -> None:
    """Lets each network's attention run over groups of `context_parallel_size` processes, in place.

    Each process computes its part of the tokens and gets the whole output, so that rollout and replay stay as they
    are. What reaches its weights in the backward pass is the share of its tokens: the sum over a group is the
    gradient. Ulysses (https://huggingface.co/papers/2309.14509) exchanges heads for tokens, a ring
    (https://huggingface.co/papers/2310.01889) passes keys and values on.

    Args:
        networks: diffusers' models, as the pipeline calls them.
        args: of the run; torch.distributed has been initialised.

    Raises:
        ValueError: a network that diffusers does not know how to split, or a number of heads that is no multiple.
    """
    size, is_ring = args.context_parallel_size, args.context_parallel_type == "ring"
    for network in networks:
        check_context(network, size, is_ring, args.device)
    shape = (args.data_processes, size, 1) if is_ring else (args.data_processes, 1, size)
    mesh = init_device_mesh(args.device.type, shape, mesh_dim_names=("data", "ring", "ulysses"))["ring", "ulysses"]
    for network in networks:
        if is_ring:
            network.set_attention_backend(RING_BACKEND)
        config = ContextParallelConfig(ring_degree=shape[1], ulysses_degree=shape[2], mesh=mesh)
        with _an_accelerator(), _quiet("diffusers.models.modeling_utils"):
            network.enable_parallelism(config=config)
        network.forward = says_what_does_not_divide(network, size)


def check_context(network: nn.Module, size: int, is_ring: bool, device: torch.device) -> None:
    """Refuses a network whose sequence cannot be spread.

    Raises:
        ValueError: diffusers has no plan for it, its heads cannot be dealt out, or a ring on a CPU.
    """
    name = type(network).__name__
    if getattr(network, "_cp_plan", None) is None:
        raise ValueError(
            f"context_parallel_size={size}: diffusers has no plan how to split the sequence of {name}; leave the "
            "setting out, and shard the weights instead (DeepSpeed) or make shorter videos."
        )
    if is_ring and device.type != "cuda":
        raise ValueError("context_parallel_type='ring' needs cuDNN's attention, so a CUDA device; take ulysses.")
    heads = getattr(network.config, "num_attention_heads", None)
    if not is_ring and heads is not None and heads % size:
        raise ValueError(
            f"context_parallel_size={size} does not divide the {heads} attention heads of {name}, which Ulysses deals "
            "out; choose a divisor, or context_parallel_type='ring'."
        )


def says_what_does_not_divide(network: nn.Module, size: int) -> Callable:
    """The network's forward, which says in a sentence that a sequence cannot be cut into `size` equal parts.

    Which inputs are cut, and where, stands in diffusers' plan of the network, and how long they are there is known at
    the call alone: diffusers refuses it then, by an assertion without numbers.
    """
    real, name = network.forward, type(network).__name__

    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except AssertionError as error:
            if UNEQUAL not in str(error):
                raise
            given = [f"{key} {tuple(value.shape)}" for key, value in kwargs.items() if torch.is_tensor(value)]
            raise ValueError(
                f"context_parallel_size={size} does not divide the tokens of a sample, so that no equal parts can "
                f"be made: {name} was given {', '.join(given)}; choose another height, "
                "width, num_frames or max_sequence_length, or a size that divides them."
            ) from error

    return forward


def one_a_group(gathered: Tensor, args: DiffusionGRPOConfig) -> Tensor:
    """Of what all processes have gathered, (processes x rows, ...), the rows of the first process of each group."""
    if args.context_parallel_size == 1:
        return gathered
    return gathered.unflatten(0, (args.world_size, -1))[:: args.context_parallel_size].flatten(0, 1)


@contextlib.contextmanager
def _an_accelerator():
    """diffusers 0.42 divides by the number of accelerators, of which a CPU has none."""
    count = torch.accelerator.device_count
    if count() == 0:
        torch.accelerator.device_count = lambda: 1
    try:
        yield
    finally:
        torch.accelerator.device_count = count


@contextlib.contextmanager
def _quiet(name: str):
    """Without a logger's warnings: this one says at every network that the feature is an experiment."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
