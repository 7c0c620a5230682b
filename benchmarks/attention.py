"""
Time attention with gradients by cuDNN's kernels and by FlashAttention on one GPU: `python benchmarks/attention.py`.

Each line is one size: milliseconds of one forward and backward pass in bfloat16, and their ratio. Then cuDNN's
gradients are searched for NaN, at sizes from 20 tokens to those of an image of 1024 px.
"""

import argparse
import sys

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

SIZES = {  # tokens, heads, channels of a head
    "FLUX.1, 512 px": (1536, 24, 128),
    "FLUX.1, 1024 px": (4608, 24, 128),
    "SD3.5-M, 1024 px": (4429, 24, 64),
    "Wan 2.1 1.3B, 33 frames of 480p": (14040, 12, 128),
}
TOKENS = (20, 36, 48, 64, 93, 128, 192, 320, 1357, 1536, 4173)
HEADS = ((2, 16), (4, 64), (4, 128))
BATCH, ROUNDS, WARM = 2, 10, 2


def draw(tokens: int, heads: int, channels: int, scale: float = 1.0) -> list[Tensor]:
    """Draw queries, keys and values, laid out as diffusers' networks have them; `scale` is that of the first two."""
    drawn = (torch.randn(BATCH, tokens, heads, channels, device="cuda") * s for s in (scale, scale, 1.0))
    return [x.bfloat16().requires_grad_() for x in drawn]


def compute_gradients(inputs: list[Tensor], gradient: Tensor, backend: SDPBackend) -> tuple[Tensor, ...]:
    """Attend with one of torch's back ends, and return the gradients of the inputs."""
    with sdpa_kernel(backend):
        out = scaled_dot_product_attention(*(x.permute(0, 2, 1, 3) for x in inputs)).permute(0, 2, 1, 3).flatten(2)
    return torch.autograd.grad(out, inputs, gradient)


def measure(tokens: int, heads: int, channels: int, backend: SDPBackend) -> float:
    """Return the median milliseconds of a forward and backward pass."""
    inputs, found = draw(tokens, heads, channels), []
    gradient = torch.randn(BATCH, tokens, heads * channels, device="cuda").bfloat16()
    for _ in range(WARM + ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        compute_gradients(inputs, gradient, backend)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return sorted(found[WARM:])[ROUNDS // 2]


def count_not_finite(tokens: int, heads: int, channels: int, tries: int) -> int:
    """Return how many of some tries gave a gradient that is not finite."""
    count = 0
    for number in range(tries):
        torch.manual_seed(number)
        inputs = draw(tokens, heads, channels, scale=(0.1, 1.0, 4.0)[number % 3])
        wide = torch.randn(BATCH, tokens, 5 * heads * channels, device="cuda").bfloat16()  # as in FLUX's single blocks
        gradients = compute_gradients(inputs, wide[..., : heads * channels], SDPBackend.CUDNN_ATTENTION)
        count += not all(x.isfinite().all() for x in gradients)
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=18, help="for each size of the search; default: %(default)s")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention: this measures a GPU, and torch sees none.", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    for name, size in SIZES.items():
        cudnn, flash = (measure(*size, kind) for kind in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION))
        print(f"{name:<32} cuDNN {cudnn:6.2f} ms, flash {flash:6.2f} ms, ratio {flash / cudnn:.2f}", flush=True)
    for heads, channels in HEADS:
        for tokens in TOKENS:
            count = count_not_finite(tokens, heads, channels, options.tries)
            print(f"{tokens:5} tokens, {heads} heads of {channels}: {count} of {options.tries} not finite", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
