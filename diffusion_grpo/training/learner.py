"""The weights that a run trains, their algorithm, and the weights beside them; a user's own optimizer is checked."""

from dataclasses import dataclass

import torch
from torch import nn

from ..algorithms.base import Algorithm
from ..algorithms.registry import load_algorithm
from ..config.settings import DiffusionGRPOConfig
from ..distributed.backend import DistributedBackend, NetworkPasses
from ..distributed.context_parallel import spread_over_context
from ..distributed.trained_weights import TrainedWeights
from ..policy.base import Policy
from ..rollout.reference import AdapterReference, CopiedReference
from ..rollout.runtime import Runtime
from ..rollout.value_model import ValueModel
from .average import OldPolicy, PolicyAverage
from .offload import FrozenOffload, place_frozen_parts
from .preflight import RunRewards


@dataclass(frozen=True)
class Learner:
    """The trained weights of a run, their algorithm, and the weights that accompany them."""

    model: nn.Module
    weights: TrainedWeights
    algorithm: Algorithm
    reference: AdapterReference | CopiedReference | None
    values: ValueModel | None
    average: PolicyAverage | None
    old_policy: OldPolicy | None
    offload: FrozenOffload | None
    run_passes: NetworkPasses


def make_learner(
    args: DiffusionGRPOConfig,
    policy: Policy,
    model: nn.Module,
    runtime: Runtime,
    *,
    rewards: RunRewards,
    is_full_training: bool,
) -> Learner:
    """Move the policy to its device, and make the weights that accompany it."""
    # a reference is copied before the pipeline is on the accelerator, and an average after that, to save memory
    networks, backend, has_values = policy.networks, runtime.backend, args.advantage_estimator == "gae"
    weights = backend.trained_weights(model, take_turns=len(policy.component) > 1)
    reference = make_reference(args, policy, model, backend, is_full_training)
    copies = [] if reference is None or reference.module is None else [reference.module]
    if backend.groups.size > 1:
        spread_over_context([*networks, *copies], backend.groups, args.device)
    offload = None
    if args.offload_frozen is None and args.group_offload is None and not backend.shards_weights:
        policy.pipe.to(args.device)
    else:  # the networks go there later, or a block at a time
        offload = place_frozen_parts(policy.pipe, networks, args.device, args.offload_frozen)
    algorithm = make_algorithm(args, networks, rewards)
    decay = algorithm.old_decay
    return Learner(
        model=model,
        weights=weights,
        algorithm=algorithm,
        reference=reference,
        values=ValueModel(args.seed, learning_rate=args.value_learning_rate).to(args.device) if has_values else None,
        average=make_average(args, weights, runtime),
        old_policy=None if decay is None else OldPolicy(weights, args.batch_sizes.updates_per_rollout, decay),
        offload=offload,
        run_passes=NetworkPasses(
            backend, runtime.monitor, networks, lambda: None if reference is None else reference.module
        ),
    )


def make_algorithm(args: DiffusionGRPOConfig, networks: list[nn.Module], rewards: RunRewards) -> Algorithm:
    return load_algorithm(
        args.loss_type,
        args.loss_kwargs,
        epsilon=args.epsilon,
        epsilon_high=args.upper_epsilon,
        beta=args.beta,
        anchor=args.anchor,
        max_ratio_error=args.max_ratio_error,
        is_half_precision=args.bf16 or args.fp16 or any(map(is_half_precision, networks)),
        take_turns=len(networks) > 1,
        warns=args.process_index == 0,
        score_pixels=rewards.differentiate,
        reward_weights=rewards.weights if args.multi_objective_aggregation == "loss_per_reward" else None,
    )


def is_half_precision(network: nn.Module) -> bool:
    return any(weight.dtype in (torch.bfloat16, torch.float16) for weight in network.parameters())


def make_reference(
    args: DiffusionGRPOConfig, policy: Policy, model: nn.Module, backend: DistributedBackend, is_full_training: bool
) -> AdapterReference | CopiedReference | None:
    """Make the frozen reference; return None if full training needs no second copy of the weights."""
    if not is_full_training:
        return AdapterReference(policy, model, backend)
    if not args.needs_reference:
        return None
    return CopiedReference(policy, model, backend, args.device, args.offload_ref_model)


def make_average(args: DiffusionGRPOConfig, weights: TrainedWeights, runtime: Runtime) -> PolicyAverage | None:
    """Make the moving average of the policy, if the settings ask for one; its distance to the policy is logged."""
    if args.ema_decay is None:
        return None

    def note(squares: torch.Tensor) -> None:
        # unsharded copies are counted once per process in both
        distance, size = runtime.backend.accelerator.reduce(squares, "sum").tolist()
        runtime.metrics.add("ema/distance", (distance / size) ** 0.5 if size else 0.0)

    return PolicyAverage(weights, args.ema_decay, args.ema_update_interval, note)


def check_own_optimizer(
    optimizer: torch.optim.Optimizer | None, schedule: torch.optim.lr_scheduler.LRScheduler | None, model: nn.Module
) -> None:
    """Refuse a user's own optimizer or schedule that would change nothing."""
    if schedule is not None and getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "optimizers: the schedule was made for another optimizer than the one that trains; pass that one too, or "
            "leave the schedule out and set lr_scheduler_type."
        )
    groups = [] if optimizer is None else optimizer.param_groups
    held = {id(weight) for group in groups for weight in group["params"]}
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    if optimizer is not None and not held & trained:
        raise ValueError(
            "optimizers: the optimizer holds none of the weights that are trained, and would change nothing. The "
            "weights of a LoRA are created by the trainer; leave the optimizer out, and set optim and learning_rate."
        )
