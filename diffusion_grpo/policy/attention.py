"""Choice of the attention kernels that train."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def avoid_cudnn_attention() -> Iterator[None]:
    """Keep cuDNN's kernels out of `scaled_dot_product_attention`, and allow them again on leaving.

    On GPUs of compute capability 9 and 10 (H100, B200), PyTorch 2.11 and newer prefer them in half precision. On an
    H100, their backward pass returned gradients that are not finite for tiny FLUX models. PyTorch takes its own
    FlashAttention instead.

    Only PyTorch's default is changed. If some of its kernels have already been disabled, as inside
    `torch.nn.attention.sdpa_kernel`, this choice is kept. A backend that was set with diffusers'
    `set_attention_backend` stays in use too, `_native_cudnn` included.

    Rollouts need this as well as updates: a replay reproduces their predictions only with the same kernels.
    """
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    if not (cuda.cudnn_sdp_enabled() and all(enabled)):
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)
