"""Attention written out, in place of the kernel that diffusers uses for rings, which CPUs do not have.

Passing the parts around and joining them stays diffusers' own; the rings themselves are ours.
"""

import torch
from diffusers.models import attention_dispatch

from diffusion_grpo.distributed import context_parallel as context


def scores(query, key, scale):
    """(batch, heads, queries, keys) of (batch, tokens, heads, channels)."""
    return torch.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)


def forward(ctx, query, key, value, attn_mask, dropout_p, is_causal, scale, *rest, _save_ctx=True, **more):
    """Output and log-sum-exps over these keys, (batch, tokens, heads)."""
    assert attn_mask is None and not dropout_p and not is_causal
    found = scores(query, key, scale)
    lse = found.logsumexp(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", (found - lse[..., None]).exp(), value)
    lse = lse.transpose(1, 2)
    if _save_ctx:
        ctx.scale = scale
        ctx.save_for_backward(query, key, value, out, lse)
    return out, lse


def backward(ctx, grad_out, *rest, query, key, value, out, lse):
    """Gradients of queries, keys and values; `out` and `lse` are those over the keys of the whole ring."""
    scale = query.shape[-1] ** -0.5 if ctx.scale is None else ctx.scale
    shares = (scores(query, key, ctx.scale) - lse.transpose(1, 2)[..., None]).exp()
    of_shares = torch.einsum("bqhd,bkhd->bhqk", grad_out, value)
    of_scores = shares * (of_shares - (grad_out * out).sum(-1).transpose(1, 2)[..., None]) * scale
    grad_query = torch.einsum("bhqk,bkhd->bqhd", of_scores, key)
    grad_key = torch.einsum("bhqk,bqhd->bkhd", of_scores, query)
    return grad_query, grad_key, torch.einsum("bhqk,bqhd->bkhd", shares, grad_out)


def install():
    """Let rings compute with these functions, and do not refuse them on a CPU."""
    attention_dispatch._cudnn_attention_forward_op = forward
    attention_dispatch._cudnn_attention_backward_op = backward
    context.check_context = lambda *args: None
