"""Check which form of the log-probability fits which process, without heavy imports."""

from collections.abc import Collection


def check_log_prob(log_prob_type: str, process: str, known: Collection[str]) -> None:
    """Refuse an unknown form of the log-probability, or one that a process does not have.

    Args:
        log_prob_type: the setting of that name.
        process: name of the process.
        known: the keys of [`~diffusion_grpo.policy.processes.LOG_PROBS`].

    Raises:
        ValueError: `log_prob_type` is not known, or it is "squared_error" and `process` is not "cps".
    """
    if log_prob_type not in known:
        raise ValueError(f"log_prob_type must be one of {', '.join(known)}, got {log_prob_type!r}.")
    if log_prob_type == "squared_error" and process != "cps":
        raise ValueError(
            f"log_prob_type='squared_error' is Flow-GRPO's form for cps, but the process is {process}; set "
            "sde_type='cps', or leave it out."
        )
