"""Bytes of tensors are counted while they are alive."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusion_grpo.planning.live_bytes import LiveBytes


def test_storages_count_once_and_as_long_as_something_holds_them():
    weight = torch.zeros(1000)
    with LiveBytes([weight]) as live:
        made = weight + 1
        view = made.view(10, 100)
        doubled = view * 2
        assert (live.now, live.peak) == (8000, 8000)
        del made
        assert live.now == 8000  # its view holds it
        del view
        assert live.now == 4000
        weight.mul_(2)  # in place, where it was before
        del doubled
    assert (live.now, live.peak) == (0, 8000)


def test_what_autograd_keeps_counts_until_the_backward_pass():
    weight = torch.ones(1000, requires_grad=True)
    with LiveBytes([weight]) as live:
        loss = (weight * 2).exp().sum()
        assert live.now == 4000 + 4  # the result of exp, and the sum
        loss.backward()
        assert live.now == 4000 + 4  # the gradient instead
        assert live.peak == 2 * 4000 + 8


def test_phases_have_a_peak_each_and_tensors_need_no_values():
    with FakeTensorMode():
        large = torch.empty(1_000_000)
    with LiveBytes([large]) as live:
        live.begin("first")
        kept = large + 1
        (kept + 1).sum()
        live.begin("second")
        del kept
        (large[:10] * 1)
    assert dict(live.peaks) == {"first": 8_000_004, "second": 4_000_000}


def test_what_stays_of_a_part_can_count_several_times():
    with LiveBytes() as live:
        before = torch.zeros(1000)
        start = live.made
        kept, gone = torch.zeros(100), torch.zeros(10)
        stop = live.made
        after = torch.zeros(1)
        del gone
        assert live.count(start, stop) == 400
        live.multiply(start, stop, 5)
        assert live.count(start, stop) == 2000 and live.now == live.peak == 4000 + 2000 + 4
        live.multiply(start, stop, 1)
        assert live.now == 4404
        live.multiply(start, stop, 3)
        del kept
        assert live.now == before.nbytes + after.nbytes
