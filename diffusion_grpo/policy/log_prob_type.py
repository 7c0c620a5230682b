"""Which form of the log-probability goes with which process; nothing heavy is imported to tell."""

from ..config.source import log_prob_names


def check_log_prob(log_prob_type: str, process: str) -> None:
    """Refuse an unknown form of the log-probability, or one that a process does not have.

    Raises:
        ValueError: `log_prob_type` is not in `processes.LOG_PROBS`, or it is "squared_error" and `process` is another
            one than "cps".
    """
    if log_prob_type not in log_prob_names():
        raise ValueError(f"log_prob_type must be one of {', '.join(log_prob_names())}, got {log_prob_type!r}.")
    if log_prob_type == "squared_error" and process != "cps":
        raise ValueError(
            f"log_prob_type='squared_error' is Flow-GRPO's form for cps, but the process is {process}; set "
            "sde_type='cps', or leave it out."
        )
