"""Which networks a run trains, found and checked before the model is loaded."""

from collections.abc import Collection, Mapping
from typing import Any

from diffusers import DiffusionPipeline

from ..algorithms.choose import find_algorithm
from ..config.checks import check_token_settings
from ..config.settings import DiffusionGRPOConfig
from ..distributed.backend import DistributedBackend
from ..pipelines import family_of_class
from ..policy.base import POLICY_COMPONENTS, split_component


def list_components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return library and class of each component that a `model_index.json` names."""
    return {
        name: tuple(entry)
        for name, entry in index.items()
        if isinstance(entry, (list, tuple)) and len(entry) == 2 and None not in entry
    }


def choose_networks(components: Collection[str], train_component: str | None) -> tuple[str, ...]:
    """Name the networks that are trained, from the names of a pipeline's components.

    Args:
        components: of the pipeline.
        train_component: the setting; by default as in [`~diffusion_grpo.policy.base.policy_component`].
    """
    if train_component:
        return split_component(train_component)
    found = (name for name in POLICY_COMPONENTS if name in components or f"{name}_2" in components)
    first = next(found, POLICY_COMPONENTS[0])
    return tuple(name for name in (first, f"{first}_2") if name in components)


def check_trained_networks(
    networks: tuple[str, ...],
    pipeline: type[DiffusionPipeline],
    args: DiffusionGRPOConfig,
    backend: DistributedBackend,
) -> None:
    """Refuse networks that the settings or the processes cannot train.

    Args:
        networks: names of the trained ones.
        pipeline: class of their pipeline.
        args: of the run.
        backend: of the processes.

    Raises:
        ValueError: one sentence with what to change.
    """
    draws_tokens = networks == (family_of_class(pipeline).language_model,)
    check_processes(args, networks, draws_tokens, backend)
    if draws_tokens:
        check_tokens(args)


def check_processes(
    args: DiffusionGRPOConfig, networks: tuple[str, ...], draws_tokens: bool, backend: DistributedBackend
) -> None:
    """Refuse networks that the processes cannot train.

    Args:
        args: of the run.
        networks: names of the trained ones.
        draws_tokens: whether the policy writes tokens.
        backend: of the processes.

    Raises:
        ValueError: see [`~diffusion_grpo.distributed.backend.DistributedBackend.check_run`].
    """
    backend.check_run(
        networks,
        processes=args.world_size,
        own_steps=args.trains_own_steps,
        draws_tokens=draws_tokens,
        has_values=args.advantage_estimator == "gae",
    )


def check_tokens(args: DiffusionGRPOConfig) -> None:
    """Refuse settings of denoising steps where tokens are trained.

    Raises:
        ValueError: such a setting, or a loss that compares means.
    """
    check_token_settings(args)
    if getattr(find_algorithm(args.loss_type), "needs_old_mean", False):
        raise ValueError(
            f"loss_type={args.loss_type!r} compares means of denoising steps, which tokens lack; use a loss "
            "without @needs_old_mean, or train the denoising network."
        )
