"""Outside an update the network is called with its weights gathered."""

import contextlib
from types import SimpleNamespace

import pytest

from diffusion_grpo.distributed.backend import NetworkPasses


def make(log, meets):
    @contextlib.contextmanager
    def gather_for_passes(networks, reference):
        log.append(("gather", networks, reference))
        yield lambda method, *args: method(*args)
        log.append("release")

    @contextlib.contextmanager
    def propagate_errors():
        log.append("meet")
        yield

    groups = SimpleNamespace(size=1)
    backend = SimpleNamespace(gather_for_passes=gather_for_passes, passes_together=meets, groups=groups)
    reference = ["first", "second"]
    return NetworkPasses(
        backend, SimpleNamespace(propagate_errors=propagate_errors), ["net"], lambda: reference.pop(0)
    )


@pytest.mark.parametrize("meets", [False, True])
def test_a_method_runs_between_gathering_and_releasing(meets):
    log = []
    passes = make(log, meets)
    assert passes(lambda one, two: log.append("method") or one - two, 5, 3) == 2
    meeting = ["meet"] if meets else []
    assert log == [*meeting, ("gather", ["net"], "first"), "method", "release"]
    passes(lambda: None)
    assert ("gather", ["net"], "second") in log  # the reference of now, not of the construction
