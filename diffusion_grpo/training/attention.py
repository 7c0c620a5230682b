"""Choice of the attention kernels that train."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def avoid_cudnn_attention() -> Iterator[None]:
    """Keep cuDNN's kernels out of `scaled_dot_product_attention`, and allow them again at the end.

    On Hopper and Blackwell, PyTorch 2.11 and newer prefer them in half precision. Their backward pass returns NaN for
    some inputs (https://github.com/pytorch/pytorch/issues/196678); on an H100 it did so for tiny FLUX models. PyTorch
    chooses its own FlashAttention instead. A backend that was chosen with diffusers' `set_attention_backend`,
    `_native_cudnn` included, stays in use.

    Rollouts need this too: a replay reproduces their predictions only if it uses the same kernels.
    """
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
