"""What several tests of policies start from."""

import pytest
from painter import PainterFamily, make_painter

from diffusion_grpo.pipelines import FAMILIES


@pytest.fixture
def painter(monkeypatch):
    """A pipeline that only writes tokens, whose family is known."""
    monkeypatch.setitem(FAMILIES, "Painter", PainterFamily())
    return make_painter()
