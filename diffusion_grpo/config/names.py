"""Check names: of settings that a user mistyped, and of rewards and datasets, which go into file names and metrics."""

import difflib
from typing import Any

# what to write instead of settings that TRL or transformers has and this package has not
RENAMED = {
    "warmup_ratio": "write it as `warmup_steps`, below 1 a share of all updates",
    "generation_batch_size": "set `steps_per_generation`, or `rollout_batch_size` for one pipeline call",
    "generation_kwargs": "write arguments of the pipeline's call into `pipeline_kwargs`",
    "max_completion_length": "samples are not texts; set `height`, `width` or `num_frames`",
    "max_prompt_length": "set `max_sequence_length` in `pipeline_kwargs` if the pipeline takes it",
    "num_completions_to_print": "no samples are printed; `num_completions_to_log` is the number of saved ones",
    "disable_dropout": "leave it out, there is no dropout in training",
    "use_vllm": "leave it out, the diffusers pipeline makes the samples",
}
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
    "mixgrpo": "is loss_type='grpo' with sde_window_size and sde_window_order='sliding'",
    "flash_grpo": "is loss_type='grpo' with sde_window_order='per_prompt'",
    "tempflow_grpo": "is loss_type='grpo' with branches and step_weight='noise'",
    "diffusion_nft": "is loss_type='nft'",
    "flow_dppo": "is loss_type='dppo'",
}
LONGEST = 150  # bytes; a file name has at most 255 and holds more than this name


def check_name(name: Any, what: str, remedy: str) -> None:
    """Refuse a name that cannot be part of a file name and of a metric.

    Args:
        name: the name.
        what: what has this name, for the message.
        remedy: what to change, for the message.

    Raises:
        ValueError: the name is empty or too long, or holds a path separator or characters that cannot be printed.
    """
    wrong = None
    if not isinstance(name, str):
        wrong = f"is of type {type(name).__name__}"
    elif not name.strip(". "):
        wrong = "consists only of dots and spaces" if name else "is empty"
    elif "/" in name or "\\" in name:
        wrong = f"must not contain {'/' if '/' in name else chr(92)!r}"
    elif not name.isprintable():
        wrong = "contains a line break or another unprintable character"
    elif len(name.encode()) > LONGEST:
        wrong = f"takes {len(name.encode())} bytes, more than {LONGEST}"
    if wrong is not None:
        shown = repr(name) if len(repr(name)) <= 60 else f"{repr(name)[:60]}..."
        raise ValueError(f"{what} {shown} {wrong}, but it is used in file names and metrics; {remedy}.")


def explain_unknown(name: str, known: list[str]) -> str:
    """Return what to write instead of a setting that does not exist; empty if no known one is near."""
    if name.startswith("vllm_"):
        name = "use_vllm"
    near = difflib.get_close_matches(name, known, n=1)
    return RENAMED.get(name) or (f"did you mean `{near[0]}`?" if near else "")


def refuse_unknown(values: dict[str, Any], known: list[str]) -> None:
    """Raise ValueError for the first key that is not known, and say what to write instead."""
    for key in values:
        if key not in known:
            advice = explain_unknown(key, known) or "`diffusion-grpo train --list-settings` lists those that there are"
            raise ValueError(f"unknown setting `{key}`; {advice}{'' if advice.endswith('?') else '.'}")
