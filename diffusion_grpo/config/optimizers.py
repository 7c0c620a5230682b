"""What optimizers with compressed states need, under transformers' names."""

import importlib.util

TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
# 8 or 32 bits per value; paged optimizers move states between GPU and CPU memory
BITSANDBYTES = (
    *("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("ademamix", "ademamix_8bit", "paged_ademamix_8bit", "paged_ademamix_32bit"),
    *("lion_32bit", "lion_8bit", "paged_lion_8bit", "paged_lion_32bit"),
    *("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
)


def check_optimizer(name: str, has_gpu: bool) -> None:
    """Refuse an optimizer whose package or GPU is missing; transformers would notice only once a model is loaded."""
    package = "torchao" if name in TORCHAO else "bitsandbytes" if name in BITSANDBYTES else None
    if package is not None and importlib.util.find_spec(package) is None:
        raise ImportError(f"optim={name!r} needs the package {package}: pip install {package}.")
    if package == "bitsandbytes" and name.startswith("paged_") and not has_gpu:
        raise ValueError(
            f"optim={name!r} keeps its states in memory that a GPU and the CPU share, and there is no GPU; use "
            f"{name.removeprefix('paged_')!r} or 'adamw_torch_8bit'."
        )
