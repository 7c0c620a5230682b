"""Check what a process supports, without heavy imports: noise levels, and forms of the log-probability."""

from collections.abc import Collection

NOISE_UP_TO_1 = ("cps", "ddim", "ancestral")  # processes whose level is a share of the noise in the latent


def check_log_prob(log_prob_type: str, process: str, known: Collection[str]) -> None:
    """Refuse an unknown form of the log-probability, or one that a process does not have."""
    if log_prob_type not in known:
        raise ValueError(f"log_prob_type must be one of {', '.join(known)}, got {log_prob_type!r}.")
    if log_prob_type == "squared_error" and process != "cps":
        raise ValueError(
            f"log_prob_type='squared_error' is Flow-GRPO's form for cps, but the process is {process}; set "
            "sde_type='cps', or leave it out."
        )
