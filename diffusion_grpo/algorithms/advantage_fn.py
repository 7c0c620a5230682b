"""A user's own advantage function, `advantage_fn`, in place of the normalisation relative to the group."""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AdvantageFunction = Callable[..., Tensor]


def load_advantage_fn(path: str | AdvantageFunction | None) -> AdvantageFunction | None:
    """Import an advantage function, and check that it takes the arguments of one.

    It is called as `advantage_fn(rewards, groups, weights=weights, batches=batches)`, once per rollout:

        def my_advantages(rewards, groups, *, weights, batches):
            total = (rewards * weights).nansum(1)
            best = torch.stack([total[groups == group].max() for group in groups])
            return (total == best).double() - 0.5

    rewards: (samples, functions) float64 on the CPU, NaN where a function left a sample out; with `kl_reward` the
        penalty is subtracted from each.
    groups: (samples,) int64, the index of each sample's group: samples of one prompt share it.
    weights: (functions,) float64, `reward_weights`.
    batches: (samples,) int64, the index of each sample's batch (`num_batches_per_step`); each batch holds whole
    groups.

    It returns (samples,) finite numbers, which are clamped to `advantage_clip`. Every process calls it with the same
    values and must get the same result, so it must not draw random numbers of its own. A sample that no function
    scored has the advantage 0, whatever is returned for it.
    """
    if path is None:
        return None
    found: Any = path
    if isinstance(path, str):
        try:
            found = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"advantage_fn={path!r} cannot be imported ({error}); give the dotted path of a function, "
                "my_package.my_advantages."
            ) from error
    if not callable(found):
        raise ValueError(f"advantage_fn={path!r} is a {type(found).__name__}; give the path of a function.")
    try:
        signature = inspect.signature(found)
    except ValueError:  # a function that is not written in Python; it reports wrong arguments itself
        return found
    try:
        signature.bind(None, None, weights=None, batches=None)
    except TypeError as error:
        raise ValueError(
            f"advantage_fn={path!r} is called with (rewards, groups, weights=..., batches=...), which "
            f"{getattr(found, '__name__', 'it')}{signature} does not take ({error}); write "
            "def my_advantages(rewards, groups, *, weights, batches)."
        ) from error
    return found


def apply_advantage_fn(
    function: AdvantageFunction, rewards: Tensor, groups: Tensor, weights: Tensor, batches: Tensor
) -> Tensor:
    """Call an advantage function; see [`load_advantage_fn`].

    Returns:
        (samples,) float64 advantages, 0 for samples that no function scored.
    """
    name = getattr(function, "__name__", type(function).__name__)
    is_scored = ~rewards.isnan().all(1)
    found = function(rewards.clone(), groups.clone(), weights=weights.clone(), batches=batches.clone())
    try:
        found = torch.as_tensor(found, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"advantage_fn {name} returned a {type(found).__name__}, not a tensor of one number per sample ({error})."
        ) from error
    if found.shape != groups.shape:
        raise ValueError(
            f"advantage_fn {name} returned the shape {tuple(found.shape)} for {len(groups)} samples; return one "
            f"number per sample, ({len(groups)},)."
        )
    wrong = is_scored & ~found.isfinite()
    if wrong.any():
        index = int(wrong.nonzero()[0])
        raise ValueError(
            f"advantage_fn {name} returned {found[index].item()} for sample {index}, whose rewards are "
            f"{rewards[index].tolist()}; return finite numbers. NaN among the rewards is a function that left the "
            "sample out."
        )
    return found.masked_fill(~is_scored, 0.0)
