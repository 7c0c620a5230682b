"""Context parallelism: a group of processes that share each sample's sequence does what one process does."""

import pytest
import rank_runs
import ranks_server
import tiny_pipelines
import torch
from tiny_runs import difference, finished_run, logged, trained_weights

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.config.defaults import BatchSizes
from diffusion_grpo.data.sampler import GroupSampler
from diffusion_grpo.distributed.choose import choose_backend
from diffusion_grpo.distributed.context_parallel import ContextGroups, check_context

SETTINGS = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "num_generations": 4, "max_steps": 2}

LORA = {"name": "wan", "gradient_checkpointing": True, "num_iterations": 2, "epsilon": 0.2}
# SGD: AdamW would make whole steps of the rounding of gradients that are 0 but for it
FULL = {"name": "flux", "lora": False, "beta": 0.1, "optim": "sgd", "learning_rate": 1e-2}


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        (LORA, 2),
        pytest.param(FULL, 2, marks=pytest.mark.distributed),
        pytest.param(LORA, 4, marks=pytest.mark.distributed),
        pytest.param(FULL, 4, marks=pytest.mark.distributed),
        pytest.param({"name": "wan"}, 2, marks=pytest.mark.distributed),
    ],
    ids=["lora", "full", "lora, two groups", "full, two groups", "video"],
)
def test_a_group_trains_what_one_process_trains(tmp_path, settings, processes):
    """By Ulysses over groups of two processes: the same samples, ratio 1, and the same weights; each file once."""
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    settings = SETTINGS | saving | settings
    rewards = "video" if settings["name"] == "wan" else "brightness"
    alone = finished_run(tmp_path / "1" / "run", rewards=rank_runs.REWARDS[rewards], **settings)
    own = settings | {"context_parallel_size": 2}
    wrapper, group, together = rank_runs.trained(tmp_path / "2", processes, own, rewards)
    assert wrapper == "DistributedDataParallel"
    assert max(entry.get("ratio/max_error", 0.0) for entry in group) == 0.0
    found = [entry["reward"] for entry in group if "reward" in entry]
    assert found == pytest.approx(logged(alone, "reward")[: len(found)], abs=1e-6)
    assert [entry["grad_norm"] for entry in group] == pytest.approx(logged(alone, "grad_norm"), rel=1e-4)
    assert difference(trained_weights(alone), together) < 1e-6
    if processes > 2:  # each group writes files of its own
        return
    for pattern in ("samples/*.parquet", "evaluations/*.parquet", "checkpoint-1/rollout-rank*"):
        files = [sorted(path.name for path in (tmp_path / number / "run").glob(pattern)) for number in "12"]
        assert files[0] == files[1] and (files[0] or settings.get("num_iterations") is None)


@pytest.mark.distributed
@pytest.mark.parametrize("processes", [2, 4])
def test_a_ring_trains_what_one_process_trains(tmp_path, processes):
    """One of two processes, or two such: the exchange is diffusers', over gloo; attention itself is written out."""
    settings = SETTINGS | {"name": "flux", "gradient_checkpointing": True, "num_iterations": 2, "epsilon": 0.2}
    own = settings | {"context_parallel_size": 2}
    _, alone, one = rank_runs.trained(tmp_path / "one", 1, settings)
    _, together, rings = rank_runs.trained(tmp_path / "rings", processes, own, by=rank_runs.train_in_rings)
    assert difference(one, rings) < 1e-6
    found = [entry["ratio/max_error"] for entry in (*alone, *together) if "ratio/max_error" in entry]
    assert found == [0.0] * 2


def test_a_group_counts_as_one_process(monkeypatch):
    monkeypatch.setattr(DiffusionGRPOConfig, "world_size", 4)
    monkeypatch.setattr(DiffusionGRPOConfig, "process_index", 3)
    own = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "use_cpu": True}
    args = DiffusionGRPOConfig("out", context_parallel_size=2, **own)
    assert (args.data_processes, args.data_process) == (2, 1)
    assert (
        args.batch_sizes.prompts_per_rollout,
        args.batch_sizes.rollout_share,
        args.batch_sizes.samples_per_update,
    ) == (4, 32, 64)
    groups = choose_backend(args).groups
    assert groups == ContextGroups(size=2, processes=4, process=3)
    assert (groups.count, groups.index, groups.is_first) == (2, 1, False)
    with pytest.raises(ValueError, match="context_parallel_size=3"):
        DiffusionGRPOConfig("out", context_parallel_size=3, **own)
    with pytest.raises(ValueError, match="context_parallel_type.*'ring'"):
        DiffusionGRPOConfig("out", context_parallel_type="rings", **own)


def test_processes_of_a_group_get_the_same_rows():
    """Batches are dealt out one after the other: each comes twice, and the same rows come in all."""
    sizes = BatchSizes(2, None, 4, 1, 1, 1, data_processes=2)
    alone, copied = (list(GroupSampler(8, sizes, copies=copies)) for copies in (1, 2))
    batches = [copied[start : start + 4] for start in range(0, len(copied), 4)]
    assert batches[::2] == batches[1::2] == [alone[start : start + 4] for start in range(0, len(alone), 4)]
    assert len(GroupSampler(8, sizes, copies=2)) == len(copied)


def test_a_network_that_cannot_be_spread_is_refused():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    networks = {name: tiny_pipelines.policy(tiny_pipelines.build(name)[0]) for name in ("sd3", "wan")}
    with pytest.raises(ValueError, match="no plan for splitting the sequence of SD3Transformer2DModel"):
        check_context(networks["sd3"], 2, False, gpu)
    heads = networks["wan"].config.num_attention_heads
    with pytest.raises(ValueError, match=f"context_parallel_size=3 does not divide the {heads} attention heads"):
        check_context(networks["wan"], 3, False, gpu)
    with pytest.raises(ValueError, match="'ring' needs cuDNN's attention and thus a CUDA device; use ulysses"):
        check_context(networks["wan"], 2, True, cpu)
    check_context(networks["wan"], 3, True, gpu)


@pytest.mark.distributed
def test_a_group_ends_if_a_sequence_cannot_be_cut(tmp_path):
    settings = {"name": "wan", "context_parallel_size": 2, "height": 16, "width": 48, "num_frames": 1, "max_steps": 1}
    ended = ranks_server.run(tmp_path, 2, rank_runs.train, tmp_path / "run", settings)
    assert ended.codes == [1, 1]
    assert all("divisible by mesh size" in log for log in ended.logs)
