"""From the settings `loss_type` and `loss_kwargs`, checked, to the algorithm: ours or one of the user's own."""

import difflib
import functools
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from . import ALGORITHMS
from .base import Algorithm, Anchor, Recording, check_number
from .grpo import GRPO, record_for_loss
from .losses import Loss

# what to write instead of losses that TRL or a paper has and this package has not, or has under another name
AVERAGED_OVER_TOKENS = (
    "differs from grpo only in how it averages over texts of different lengths; set loss_type='grpo'"
)
WRITE_YOUR_OWN = "is not included; use 'grpo', or write a loss of your own (docs/algorithms/own.md)"
RENAMED_LOSSES = {
    "dapo": f"{AVERAGED_OVER_TOKENS}, and epsilon_high for its higher clip",
    "bnpo": AVERAGED_OVER_TOKENS,
    "dr_grpo": f"{AVERAGED_OVER_TOKENS} and scale_rewards='none'",
    "gspo": "is loss_type='grpo' with importance_sampling_level='sequence'",
    **dict.fromkeys(("cispo", "sapo", "luspo", "vespo"), WRITE_YOUR_OWN),
    **dict.fromkeys(("ddpo", "flow_grpo", "dance_grpo"), "is loss_type='grpo'"),
    "mixgrpo": "is loss_type='grpo' with num_trained_steps and step_selection='sliding'",
    "flash_grpo": "is loss_type='grpo' with step_selection='prompt'",
    "tempflow_grpo": "is loss_type='grpo' with samples_per_latent and step_weight='noise'",
    "diffusion_nft": "is loss_type='nft'",
    **dict.fromkeys(("alignprop", "align_prop", "refl"), "is loss_type='draft' (docs/algorithms/draft.md)"),
    "flow_dppo": "is loss_type='dppo'",
}


def find_algorithm(loss_type: str | Loss | type[Algorithm]) -> type[Algorithm] | Loss:
    """Return the algorithm's class, or the loss function, that `loss_type` names."""
    algorithm = _import_algorithm(loss_type) if isinstance(loss_type, str) else loss_type
    if not callable(algorithm):
        raise ValueError(f"The loss '{loss_type}' is a {type(algorithm).__name__}, but a loss must be callable.")
    if inspect.isclass(algorithm) and Algorithm not in algorithm.__mro__:  # a protocol, which issubclass does not take
        raise ValueError(
            f"The class '{loss_type}' does not inherit from diffusion_grpo.algorithms.base.Algorithm; inherit from it "
            "and define passes and loss, or give the path of a loss function."
        )
    return algorithm


def _import_algorithm(name: str) -> Any:
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    known = ", ".join(sorted(ALGORITHMS))
    if renamed := RENAMED_LOSSES.get(name.lower().replace("-", "_")):
        raise ValueError(f"loss_type={name!r} {renamed}.")
    if "." not in name:
        nearest = difflib.get_close_matches(name, ALGORITHMS, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"loss_type={name!r} is unknown; choose one of {known}, or a dotted path such as my_package.my_loss.{hint}"
        )
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"The loss '{name}' cannot be imported ({error}); known are {known}.") from error


def find_recording(loss_type: str | Loss | type[Algorithm]) -> Recording:
    """Return what the algorithm or loss that `loss_type` names needs recorded of a rollout."""
    algorithm = find_algorithm(loss_type)
    return algorithm.recording if inspect.isclass(algorithm) else record_for_loss(algorithm)


def check_loss_kwargs(
    loss_type: str | Loss | type[Algorithm], loss_kwargs: dict[str, Any] | None, anchor: Anchor = "own"
) -> None:
    """Refuse settings that the algorithm or loss does not have, and require those that it needs."""
    given, parameters = loss_kwargs or {}, _own_parameters(find_algorithm(loss_type))
    known = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    for name in given:
        if name in _run_settings() and name not in known:
            raise ValueError(f"loss_kwargs: {name} comes from the run's own settings; leave it out here.")
        if name not in known and len(known) == len(parameters):  # otherwise it takes any name
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            listed = f"it has {', '.join(known)}" if known else "it has none, so leave loss_kwargs out"
            raise ValueError(f"loss_kwargs: {loss_type} has no setting {name!r}; {listed}.{hint}")
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in given]
    if missing:
        raise ValueError(f"loss_kwargs: {loss_type} needs {', '.join(missing)}; give {{{missing[0]}: ...}}.")
    if not given or loss_type not in ALGORITHMS:
        return
    if inspect.isclass(ALGORITHMS[loss_type]):
        algorithm = ALGORITHMS[loss_type]
        named = inspect.signature(algorithm).parameters.keys() & {"anchor"}
        algorithm(**given, **dict.fromkeys(named, anchor))  # its constructor refuses invalid values
        return
    for name, value in given.items():  # the settings of losses are limits
        check_number(name, value, lambda x: x > 0, "above 0")


def check_run_settings(loss_type: str | Loss | type[Algorithm], changed: dict[str, str]) -> None:
    """Refuse settings of the run that a class of the user's own does not take and would silently ignore."""
    algorithm = find_algorithm(loss_type)
    if not inspect.isclass(algorithm):
        return
    taken = inspect.signature(algorithm).parameters
    for name, setting in changed.items():
        if name not in taken:
            raise ValueError(
                f"{setting} would have no effect: the constructor of {loss_type} has no argument {name}; add it "
                "there, or leave the setting out."
            )


def load_algorithm(
    loss_type: str | Loss | type[Algorithm], loss_kwargs: dict[str, Any] | None = None, **run: Any
) -> Algorithm:
    """Make the algorithm: [`~diffusion_grpo.algorithms.grpo.GRPO`] around a loss function, or the class itself."""
    check_loss_kwargs(loss_type, loss_kwargs, run.get("anchor", "own"))
    algorithm, given = find_algorithm(loss_type), loss_kwargs or {}
    make: Callable[..., Any] = functools.partial(algorithm, **given)
    if not inspect.isclass(algorithm):
        make = functools.partial(GRPO, make if given else algorithm)
    named = inspect.signature(make).parameters
    return make(**{name: value for name, value in run.items() if name in named})


def _run_settings() -> set[str]:
    """Return the names of the arguments that any algorithm may ask for; their values follow from other settings."""
    run = {name for name, each in inspect.signature(GRPO).parameters.items() if each.kind is each.KEYWORD_ONLY}
    return run | {"score_pixels"}


def _own_parameters(found: Callable) -> dict[str, inspect.Parameter]:
    """Return what `loss_kwargs` may set: a class's parameters but for the run's, or a function's but for its input."""
    parameters = list(inspect.signature(found).parameters.values())
    parameters = parameters if inspect.isclass(found) else parameters[1:]
    left_out = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    run = _run_settings() if inspect.isclass(found) else set()
    return {each.name: each for each in parameters if each.kind not in left_out and each.name not in run}
