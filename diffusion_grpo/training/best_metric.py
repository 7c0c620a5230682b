"""Check `metric_for_best_model` before training; transformers notices a wrong name only at the first evaluation."""

import difflib
import inspect
from collections.abc import Iterable

from ..config.settings import DiffusionGRPOConfig
from ..rewards import Reward
from ..rewards.contract import is_run_metric

PLAIN = ("reward", "reward_std_error", "kl", "velocity/ratio_to_ref", "runtime")
NEAR = 0.9  # a name as similar as this to that of a metric is taken for a misspelling
OPEN = ("diversity", "rollouts/")  # prefixes of metrics named after embedders or training metrics


def check_best_metric(
    args: DiffusionGRPOConfig, measured: list[Reward], watched: list[Reward], datasets: Iterable[str]
) -> None:
    """Refuse a `metric_for_best_model` that no evaluation logs.

    A reward that may log its own metrics (`log_metric`) can give them any name except those of the run's metrics. If
    there is such a reward, only names of the run's metrics are checked. If no reward names `log_metric`, and some take
    `**columns`, a name that is nearly one of the run's metrics is refused too.

    Args:
        args: configuration of the run.
        measured: trained and evaluation-only rewards.
        watched: rewards of `watch_rewards`.
        datasets: names of several evaluation datasets; empty for a single one.

    Raises:
        ValueError: no evaluation logs the metric; the message names the nearest one.
    """
    metric = args.metric_for_best_model
    if metric is None or args.eval_strategy == "no":
        return
    names = [*PLAIN, *_name_means("rewards", measured), *_name_means("watch", watched)]
    prefixes = ["eval_", *(f"eval_{name}_" for name in datasets)]
    full = metric if metric.startswith("eval_") else f"eval_{metric}"
    known = [prefix + name for prefix in prefixes for name in names]
    opening = (*OPEN, "watch/") if "auto" in (args.watch_rewards or []) else OPEN  # depends on the kind of samples
    if full in known or full.startswith(tuple(prefix + name for prefix in prefixes for name in opening)):
        return
    is_ours = any(full.startswith(prefix) and is_run_metric(full.removeprefix(prefix)) for prefix in prefixes)
    rewards = [*measured, *watched]
    is_near = bool(difflib.get_close_matches(full, known, n=1, cutoff=NEAR))
    if not is_ours and any(map(_logs if not is_near else _names_log_metric, rewards)):
        return
    nearest = difflib.get_close_matches(full, known, n=1, cutoff=0.0)[0]
    raise ValueError(f"metric_for_best_model={metric!r} is not logged by any evaluation; did you mean {nearest!r}?")


def _name_means(kind: str, rewards: list[Reward]) -> list[str]:
    return [f"{kind}/{reward.name}/{end}" for reward in rewards for end in ("mean", "std_error")]


def _names_log_metric(reward: Reward) -> bool:
    return "log_metric" in reward.parameters


def _logs(reward: Reward) -> bool:
    """Return whether a reward may log metrics."""
    function = reward.function
    kind = function if inspect.isroutine(function) else type(function)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in reward.parameters.values())
    is_ours = kind.__module__.startswith(__package__.partition(".")[0] + ".")  # ours ask for log_metric by name
    return _names_log_metric(reward) or (takes_all and not is_ours)
