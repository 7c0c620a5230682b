"""Frozen weights come for each block and leave after it, also in the backward pass, and nothing else changes.

Without an accelerator both sides are the CPU, so here weights that have left are float64: whatever uses them while
they are away fails, as it would on another device.
"""

import weakref

import pytest
import tiny_pipelines
import torch
from diffusers.hooks.group_offloading import ModuleGroup
from peft import LoraConfig, get_peft_model
from tiny_runs import (
    LORA,
    are_equal,
    brightness,
    difference,
    finished_run,
    first_frame_brightness,
    logged,
    trained_weights,
    trainer_for,
)
from torch.nn.parallel import DistributedDataParallel

from diffusion_grpo.policy.rollout import DenoisingPolicy, replay, rollout
from diffusion_grpo.training.block_swap import BlockSwap, check_network
from diffusion_grpo.training.model import checkpoint_share

CPU = torch.device("cpu")
SEEDS = [1, 2]


def values(group):
    """The frozen weights and buffers that diffusers moves together."""
    found = [*group.parameters, *group.buffers, *(x for m in group.modules for x in (*m.parameters(), *m.buffers()))]
    return [value for value in found if not value.requires_grad]


@pytest.fixture
def moves(monkeypatch):
    """(what, group) of every move, "on" or "off"; weights are float64 while they are away."""
    found = []

    def move(what, dtype):
        def moved(group):
            found.append((what, group))
            for value in values(group):
                if value.is_floating_point():
                    value.data = value.data.to(dtype)

        return moved

    monkeypatch.setattr(ModuleGroup, "onload_", move("on", torch.float32))
    monkeypatch.setattr(ModuleGroup, "offload_", move("off", torch.float64))
    return found


def adapted(name):
    """A policy whose network has a LoRA that does something, and the inputs of its pipeline."""
    pipe, inputs = tiny_pipelines.build(name)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    policy = DenoisingPolicy(pipe)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        get_peft_model(policy.network, LoraConfig(**LORA, init_lora_weights=False))
    return policy, inputs


def install(policy, checkpoints=0.0, **settings):
    """Swap the blocks of a policy's network; `checkpoints` is the share of those that are computed again."""
    swap = BlockSwap(CPU, **{"level": "block_level"} | settings)
    if checkpoints:
        checkpoint(policy, checkpoints, swap.contexts)
    swap.install(policy.network)
    return swap


def checkpoint(policy, share, contexts=None):
    def run(*args, **kwargs):
        return torch.utils.checkpoint.checkpoint(*args, use_reentrant=False, **kwargs)

    policy.network.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint_share(run, share, contexts))


def step(policy, inputs):
    """Roll out, replay a step and take the gradient; return latents, log-probabilities and gradients."""
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=3)
    with torch.enable_grad():
        scored = replay(policy, inputs, trajectory, 1)
        scored.log_prob.sum().backward()
    named = policy.network.named_parameters()
    return trajectory.latents, scored.log_prob.detach(), {n: p.grad for n, p in named if p.grad is not None}


def assert_same(found, expected):
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2].keys() == expected[2].keys() and all("lora" in name for name in found[2])
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())


WAYS = {
    "blocks": {},
    "blocks, computed again": {"checkpoints": 1.0},
    "some computed again, next one fetched": {"checkpoints": 0.5, "prefetches": True},
    "pairs of blocks, computed again": {"checkpoints": 1.0, "blocks": 2},
    "layers": {"level": "leaf_level", "prefetches": True},
    "layers, computed again": {"level": "leaf_level", "checkpoints": 1.0},
}


# of SDXL's blocks, parts are computed again
@pytest.mark.parametrize(("name", "way"), [("sdxl", way) for way in WAYS] + [("sd3", "layers"), ("flux", "blocks")])
def test_weights_are_there_whenever_they_are_used_and_away_otherwise_and_results_are_the_same(moves, name, way):
    expected = step(*adapted(name))
    policy, inputs = adapted(name)
    swap = install(policy, **WAYS[way])
    trained = [parameter for parameter in policy.network.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in policy.network.parameters() if not parameter.requires_grad]
    assert all(parameter.dtype == torch.float64 for parameter in frozen) and len(swap.groups) > 1
    moves.clear()
    assert_same(step(policy, inputs), expected)
    assert not swap.present and all(parameter.dtype == torch.float64 for parameter in frozen)
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in trained)
    for group in {id(group): group for _, group in moves}.values():
        own = [what for what, other in moves if other is group]
        assert own == ["on", "off"] * (len(own) // 2)


@pytest.mark.parametrize(("checkpoints", "prefetches", "most"), [(0, False, 2), (1, False, 2), (1, True, 3)])
def test_few_groups_are_present_at_once(moves, checkpoints, prefetches, most):
    """The block at work, the next one where it is fetched ahead, and what stands around the blocks."""
    policy, inputs = adapted("sd3")
    swap = install(policy, checkpoints=float(checkpoints), prefetches=prefetches)
    counts = []
    for module in policy.network.transformer_blocks:
        module.attn.register_forward_pre_hook(lambda *_: counts.append(len(swap.present)))
    moves.clear()
    step(policy, inputs)
    assert max(counts) == most and len(swap.groups) == 3
    passes = 3 + 1  # rollout and replay
    again = 2 if checkpoints else 0  # both blocks
    assert len(moves) == 2 * (passes * 3 + again)


@pytest.mark.parametrize("level", ["block_level", "leaf_level"])
def test_nothing_is_fetched_before_the_memory_of_what_left_is_free(moves, level, monkeypatch):
    """A device computes later than it is asked to, and keeps weights until then."""

    class Event:
        def synchronize(self):
            moves.append(("computed", self))

    monkeypatch.setattr("diffusion_grpo.training.block_swap.record_event", lambda device: Event())
    policy, inputs = adapted("sd3")
    install(policy, checkpoints=1.0, prefetches=True, level=level)
    moves.clear()
    step(policy, inputs)
    step(policy, inputs)
    is_free, waits = True, 0
    for what, _ in moves:
        assert what != "on" or is_free
        is_free, waits = what == "computed" or (is_free and what == "on"), waits + (what == "computed")
    assert waits > 10


def test_blocks_are_fetched_ahead_in_both_directions(moves):
    policy, inputs = adapted("flux")
    swap = install(policy, checkpoints=1.0, prefetches=True)
    names = {id(group): number for number, group in enumerate(dict.fromkeys(group for _, group in moves))}
    step(policy, inputs)
    moves.clear()
    step(policy, inputs)  # the order is known by now
    order = [names[id(group)] for what, group in moves if what == "on"]
    root = len(swap.groups) - 1
    ahead = [what for what, group in moves if names[id(group)] != root][-2 * root :]
    assert order[-root:] == list(range(root))[::-1] and order[: root + 1] == [root, *range(root)]
    assert ahead == ["on", "on", *["off", "on"] * (root - 2), "off", "off"]


@pytest.mark.parametrize("checkpoints", [0.0, 1.0])
def test_autograd_keeps_no_weight_that_left(monkeypatch, checkpoints):
    """Else all blocks would stay on the accelerator until the backward pass."""
    copies = []

    def onload(group):
        for value in values(group):
            value.data = value.data.clone()
            copies.append(weakref.ref(value.untyped_storage()))

    def offload(group):
        for value in values(group):
            value.data = value.data.clone()

    monkeypatch.setattr(ModuleGroup, "onload_", onload)
    monkeypatch.setattr(ModuleGroup, "offload_", offload)
    policy, inputs = adapted("sdxl")
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=3)
    install(policy, checkpoints)
    with torch.enable_grad():
        scored = replay(policy, inputs, trajectory, 1)
    assert copies and not any(copy() is not None for copy in copies)
    scored.log_prob.sum().backward()
    assert not any(copy() is not None for copy in copies)


def test_a_second_run_and_plain_calls_find_the_network_in_order(moves):
    policy, inputs = adapted("sd3")
    install(policy, checkpoints=1.0)
    expected = step(policy, inputs)
    swap = install(policy, checkpoints=1.0, level="leaf_level")
    policy.network.zero_grad()
    assert_same(step(policy, inputs), expected)
    images = policy.pipe(**inputs, num_inference_steps=2).images
    assert len(images) == 2 and not swap.present


def test_a_pass_that_fails_leaves_the_network_in_order(moves):
    policy, inputs = adapted("flux")
    swap = install(policy, checkpoints=1.0, prefetches=True)
    expected = step(policy, inputs)  # the order is known by now, and the next block on its way
    policy.network.zero_grad()
    middle = policy.network.transformer_blocks[-1].attn

    def fail(*_):
        raise ArithmeticError("no luck")

    handle = middle.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        rollout(policy, inputs, seeds=SEEDS, num_inference_steps=3)
    assert not swap.present
    handle.remove()
    _, trajectory = rollout(policy, inputs, seeds=SEEDS, num_inference_steps=3)
    with torch.enable_grad():
        scored = replay(policy, inputs, trajectory, 1)
    handle = middle.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        scored.log_prob.sum().backward()  # while it is computed again
    handle.remove()
    policy.network.zero_grad()
    assert_same(step(policy, inputs), expected)
    assert not swap.present


EVERYTHING = {"beta": 0.1, "ema_decay": 0.5, "ema_update_interval": 1, "offload_frozen": "cpu"}
EVERYTHING |= {"gradient_checkpointing": True, "group_offload": "block_level", "group_offload_stream": True}


def test_runs_are_the_same_beside_reference_average_and_frozen_parts(tmp_path, moves):
    """Evaluations and checkpoints too."""
    settings = {"beta": 0.1, "ema_decay": 0.5, "ema_update_interval": 1, "eval_strategy": "steps", "eval_steps": 1}
    plain = finished_run(tmp_path / "plain", **settings)
    spared = finished_run(tmp_path / "spared", **settings | EVERYTHING, save_strategy="steps", save_steps=1)
    assert len(moves) > 100 and max(logged(spared, "ratio/max_error")) == 0
    assert difference(trained_weights(spared), trained_weights(plain)) <= 1e-6
    torch.testing.assert_close(logged(spared, "eval_reward"), logged(plain, "eval_reward"), rtol=0, atol=1e-6)
    more = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3, "resume_from_checkpoint": "True"}
    resumed = finished_run(tmp_path / "spared", **settings | EVERYTHING | more)
    assert resumed.state.global_step == 3


def test_a_swapped_network_is_saved_with_its_lora_merged(tmp_path):
    """On an accelerator, the LoRA is there, and weights and reference are in CPU memory."""
    settings = {"beta": 0.1, "sync_ref_model": True, "max_steps": 1, "learning_rate": 0.02}
    trainer = finished_run(tmp_path, group_offload="block_level", **settings)
    network, accelerator = trainer.pipe.transformer, trainer.args.device.type
    before = {name: value.device.type for name, value in network.named_parameters()}
    assert {where for name, where in before.items() if "_B.default" in name} == {accelerator}
    assert {where for name, where in before.items() if "_B.grpo_reference" in name} == {"cpu"}
    network.save_pretrained(tmp_path / "merged")
    assert before == {name: value.device.type for name, value in network.named_parameters()}
    saved, layer = type(network).from_pretrained(tmp_path / "merged"), "transformer_blocks.0.attn.to_q"
    wrapped = network.get_submodule(layer)
    expected = wrapped.get_base_layer().weight + wrapped.get_delta_weight("default").cpu()
    torch.testing.assert_close(saved.get_submodule(layer).weight, expected, rtol=0, atol=1e-6)


def test_experts_that_take_turns_are_swapped_each_by_itself(tmp_path, monkeypatch):
    settings = {"name": "wan_experts", "rewards": first_frame_brightness, "max_steps": 1}
    plain = finished_run(tmp_path / "plain", **settings)
    moved, real = set(), ModuleGroup.onload_
    monkeypatch.setattr(ModuleGroup, "onload_", lambda group: (moved.update(map(id, values(group))), real(group)))
    spared = finished_run(tmp_path / "spared", group_offload="block_level", group_offload_blocks=2, **settings)
    frozen = {id(parameter) for parameter in spared.model.parameters() if not parameter.requires_grad}
    assert len(spared.policy.networks) == 2 and frozen <= moved
    assert are_equal(trained_weights(spared), trained_weights(plain))


def test_trainer_leaves_the_network_where_it_is(tmp_path):
    trainer = trainer_for(tmp_path, group_offload="block_level", rewards=brightness)
    assert trainer.model.to("meta") is trainer.model
    assert all(parameter.device.type == "cpu" for parameter in trainer.model.parameters())
    parameters = {id(parameter) for parameter in DistributedDataParallel._get_data_parallel_params(trainer.model)}
    assert parameters == {id(parameter) for parameter in trainer.model.parameters() if parameter.requires_grad}


@pytest.mark.slow
def test_compiled_blocks_are_swapped(tmp_path):
    plain = finished_run(tmp_path / "plain", max_steps=1)
    settings = {"torch_compile_backend": "eager", "group_offload": "block_level"}
    both = trainer_for(tmp_path / "both", max_steps=1, **settings)
    torch._dynamo.utils.counters.clear()
    both.train()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 2 and counters["frames"]["total"] == counters["frames"]["ok"]
    assert difference(trained_weights(both), trained_weights(plain)) <= 1e-6


def test_networks_that_cannot_be_swapped_are_refused(tmp_path):
    network = adapted("sd3")[0].network
    check_network(network)
    kind = type("Int8", (torch.nn.Parameter,), {})  # as quantisers have one
    network.proj_out.weight = kind(network.proj_out.weight.data)
    with pytest.raises(ValueError, match="cannot move quantised weights.*leave one of them out"):
        check_network(network)
