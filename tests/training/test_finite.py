"""A run stops at a loss or gradient that is NaN or infinite."""

import math

import pytest
import torch

from diffusion_grpo.training.finite import NonFiniteError, refuse_non_finite


def test_only_finite_values_pass(tmp_path):
    value = torch.tensor(-3e38)
    refuse_non_finite(value, "loss", 1, str(tmp_path))
    value *= 10  # beyond float32
    with pytest.raises(NonFiniteError, match="loss of update 1 is -inf.*checkpoint: none"):
        refuse_non_finite(value, "loss", 1, str(tmp_path))
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(NonFiniteError, match="is nan.*checkpoint-2"):
        refuse_non_finite(torch.tensor(math.nan), "gradient norm", 3, str(tmp_path))
