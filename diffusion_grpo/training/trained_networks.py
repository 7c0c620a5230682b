"""Find and check the networks that a run trains, before the model is loaded."""

from collections.abc import Collection, Mapping
from typing import Any

from diffusers import DiffusionPipeline

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
    """Return the names of the networks to train, from the names of a pipeline's components."""
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
    """Refuse networks that the settings or the processes cannot train."""
    draws_tokens = networks == (family_of_class(pipeline).language_model,)
    check_processes(args, networks, draws_tokens, backend)
    if draws_tokens:
        check_tokens(args)


def check_processes(
    args: DiffusionGRPOConfig, networks: tuple[str, ...], draws_tokens: bool, backend: DistributedBackend
) -> None:
    """Refuse networks that the processes cannot train."""
    backend.check_run(networks, processes=args.world_size, own_steps=args.trains_own_steps, draws_tokens=draws_tokens)


def check_tokens(args: DiffusionGRPOConfig) -> None:
    """Refuse settings of denoising steps if tokens are trained."""
    check_token_settings(args)
    if args.recording.old == "mean":
        raise ValueError(
            f"loss_type={args.loss_type!r} compares means of denoising steps, which tokens lack; use a loss "
            "without @needs_old_mean, or train the denoising network."
        )
