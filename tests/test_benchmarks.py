"""The benchmarks run and read what they measure; no time is asserted."""

import json
import sys
from pathlib import Path

import pytest
import ranks_server
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import compiled
import distributed
import eval_steps
import half_precision

from benchmarks import attention, weight_sizes
from diffusion_grpo.policy.trajectory import ROUNDING_OF_TWO

DOCS = Path(__file__).parent.parent / "docs"


def test_time_in_several_collectives_at_once_counts_once():
    assert distributed.covered([(0, 2), (1, 3), (10, 11), (1, 2)]) == 4
    assert distributed.covered([]) == 0


def test_two_processes_are_timed_and_their_collectives_seen(tmp_path):
    ranks_server.succeed(tmp_path, 2, distributed.work, tmp_path, "DDP", True, 8, 1)
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["wrapper"] == "DistributedDataParallel"
    assert 0 < found["share"] < 1
    # the parts are means over both processes, which do not begin and end a step together
    assert 0 < found["rollout"] + found["update"] < 1.2 * found["step"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "wrapper"), [("DDP", "DistributedDataParallel"), ("ZeRO-3", "DeepSpeedEngine"), ("FSDP2", "FSDP")]
)
def test_each_mode_is_what_it_is_called(mode, wrapper):
    found = distributed.measured(mode, is_lora=True, samples=8, rounds=1)
    assert found["wrapper"].startswith(wrapper) and 0 < found["share"] < 1


def test_ratios_are_those_to_one_process_and_to_ddp():
    step = {"rollout": 1.0, "update": 1.0, "share": 0.25}
    found = {"one process": step | {"step": 4.0}, "DDP": step | {"step": 2.0}, "ZeRO-3": step | {"step": 5.0}}
    assert [distributed.row("LoRA", mode, found).split(" | ")[5:] for mode in found] == [
        ["1.00", "", " |"],
        ["0.50", "", "25% |"],
        ["1.25", "2.50", "25% |"],
    ]


def test_half_precision_is_compared_with_itself_on_re_noised_samples():
    found = half_precision.measure_renoised("sd3", steps=4)
    bound = ROUNDING_OF_TWO
    assert found["alone"].max() < bound / 3 and found["alone"].any()
    assert found["prompts"].max() > 3 * bound and found["dropout"].max() > bound
    assert half_precision.make_renoised_row("sd3", steps=2).count("|") == 6


def test_half_precision_is_compared_with_float32_and_with_batches_of_one():
    same = half_precision.measure("sd3", torch.float32, is_guided=True, steps=2)
    assert not same["error"].any() and not same["drift"].any() and len(same["drift_alone"]) == half_precision.SAMPLES
    half = half_precision.measure("sd3", torch.bfloat16, is_guided=False, steps=2)
    assert 1e-3 < half["error"].median() < 0.1 and 0 < half["drift"].max() and half["share"].max() < 1
    assert half_precision.find_guidance({"true_cfg_scale": 4.0, "guidance_scale": 1.0}) == "true_cfg_scale"
    assert [half_precision.format_share(torch.tensor(x)) for x in (0.0061, 0.25, 0.0)] == ["0.61 %", "25 %", "0 %"]


def test_a_model_trained_with_few_steps_is_evaluated_with_several_numbers_of_steps():
    words = ["--eval_max_prompts=4", "--max_steps=1", "--warmup_steps=0", "--per_device_train_batch_size=16"]
    untrained, trained = (eval_steps.measure(steps, [1, 2], words) for steps in (0, 2))
    assert len({*untrained, *trained}) == 4 and all(0 < reward < 1 for reward in untrained + trained)


def test_compiled_blocks_are_compared_with_others():
    limit = torch._dynamo.config.cache_size_limit  # pytest's monkeypatch would delete it: it is an alias
    try:
        case = compiled.Case("wan", "eager", heights=(32,))
        assert compiled.make_row(case, steps=2) == "| wan | `eager` | float32 | 4 | 0 | 0 | 0 |"
    finally:
        torch._dynamo.config.cache_size_limit = limit
        torch._dynamo.reset()


def test_sizes_of_weights_on_the_pages_are_those_of_the_configurations():
    rows = (DOCS / "rewards" / "built_in.md").read_text(encoding="utf-8").splitlines()
    with torch.device("meta"):
        for names, network in weight_sizes.list_rewards():
            size = weight_sizes.format_bytes(4 * weight_sizes.count_weights(network))
            for name in names.partition(" (")[0].split(", "):
                assert any(row.startswith(f"| `{name}` |") and size in row.split("|")[-2] for row in rows), (
                    name,
                    size,
                )
    page = (DOCS / "memory.md").read_text(encoding="utf-8")
    encoders = weight_sizes.count_weights(*weight_sizes.list_encoders("Wan2.1-1.3B"))
    assert f"{weight_sizes.format_bytes(2 * encoders)} for Wan" in page.replace("\n", " ")
    for optim, name in (("adamw_torch_8bit", "AdamW8bit"), ("adamw_torch_4bit", "AdamW4bit")):
        assert f"| `{optim}` | torchao | {weight_sizes.count_states(name):.2f} |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_attention_is_measured_on_a_gpu_only(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention.py"])
    assert attention.main() == 2 and "torch sees none" in capsys.readouterr().err


def test_attention_has_the_gradients_of_its_definition():
    inputs = [torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(2, 5, 12, dtype=torch.float64)
    found = attention.compute_gradients(inputs, gradient, torch.nn.attention.SDPBackend.MATH)
    weights = (torch.einsum("bihc,bjhc->bhij", *inputs[:2]) / 2).softmax(-1)
    out = torch.einsum("bhij,bjhc->bihc", weights, inputs[2]).flatten(2)
    for one, expected in zip(found, torch.autograd.grad(out, inputs, gradient), strict=True):
        torch.testing.assert_close(one, expected)
