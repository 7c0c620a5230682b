"""Every process gets what each process has: threads stand for processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from diffusion_grpo.distributed.collectives import broadcast_bytes, gather_bytes, gather_json, gather_means


class Threads:
    """As many accelerators as threads, whose `gather` joins the tensors of all."""

    device = torch.device("cpu")

    def __init__(self, count):
        self.num_processes, self.meet = count, threading.Barrier(count, timeout=20)
        self.parts, self.own = [None] * count, threading.local()

    def gather(self, tensor):
        self.parts[self.own.rank] = tensor
        self.meet.wait()
        joined = torch.cat(self.parts)
        self.meet.wait()
        return joined

    def run(self, function, values):
        def begin(rank):
            self.own.rank = rank
            return function(self, values[rank])

        with ThreadPoolExecutor(self.num_processes) as pool:
            return list(pool.map(begin, range(self.num_processes)))


@pytest.mark.parametrize("values", [[b"alone"], [b"", b"ab", b"abcdef"], [b"", b""]])
def test_bytes_of_any_length_reach_all(values):
    assert Threads(len(values)).run(gather_bytes, values) == [values] * len(values)


def test_json_reaches_all():
    values = [{"a": [1, 2.5, None]}, "text"]
    assert Threads(2).run(gather_json, values) == [values] * 2


def test_means_are_over_all_values_wherever_they_were_measured():
    values = [
        {"loss": [1.0, 2.0], "top": [3.0, 9.0], "low": [3.0]},
        {"loss": [6.0], "top": [4.0], "low": [1.0], "own": [5.0], "no": []},
    ]

    def gather(accelerator, metrics):
        return gather_means(accelerator, metrics, largest=("top",), smallest=("low",))

    found = Threads(2).run(gather, values)
    assert found == [{"loss": 3.0, "low": 1.0, "own": 5.0, "top": 9.0}] * 2


def test_means_are_weighted_over_all_processes():
    """One process measured a part of three samples and one of one, the other a part of four."""
    values, weights = [{"loss": [1.0, 5.0], "kl": [1.0]}, {"loss": [3.0]}], [{"loss": [3, 1]}, {"loss": [4]}]

    def gather(accelerator, own):
        return gather_means(accelerator, own[0], weights=own[1])

    assert Threads(2).run(gather, list(zip(values, weights, strict=True))) == [{"kl": 1.0, "loss": 2.5}] * 2


def test_one_process_keeps_what_it_broadcasts():
    own = torch.tensor([1, 2, 3], dtype=torch.uint8)
    assert torch.equal(broadcast_bytes(Threads(1), own, 0), own)
