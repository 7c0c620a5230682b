"""What several processes kept of a rollout is read back by fewer or more of them, bit for bit."""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import make_config
from PIL import Image

from diffusion_grpo.policy.token_process import TokenTrajectory
from diffusion_grpo.policy.trajectory import Trajectory
from diffusion_grpo.report.record import ResumeError, find_difference
from diffusion_grpo.rollout.buffer import RolloutBuffer
from diffusion_grpo.rollout.estimator import SampleAdvantages
from diffusion_grpo.rollout.restore import (
    check_rows,
    describe_rollout,
    hash_rows,
    restore_buffer,
    rollout_file,
    save_buffer,
)
from diffusion_grpo.rollout.value_model import ValueTargets
from tests.rollout.test_plan import order_of


def inputs_of(**settings):
    """Inputs of a pipeline that takes a prompt alone."""
    return SimpleNamespace(args=make_config(**settings), parameters={}, accepted=set(), fixed={})


def sample(position):
    """A trajectory of one sample whose numbers say where it is in the generation."""
    drawn = torch.Generator().manual_seed(position)
    size = 3 + position % 2  # of two shapes
    noise = [torch.randn(1, 2, size, generator=drawn) for _ in range(2)]
    seeds = torch.tensor([position])
    steps, log_probs = torch.tensor([[0, 1]]), torch.randn(1, 2, generator=drawn)
    return Trajectory(*noise, log_probs, steps, seeds, seeds + 1, num_inference_steps=3, noise_level=0.7)


def buffer_of(order, ranking):
    positions = order.own(order.trained(ranking))
    numbers = positions.float()[:, None].expand(-1, 2)
    targets = ValueTargets(numbers[..., None], numbers, numbers + 1)
    rows = [{"prompt": str(position)} for position in positions.tolist()]
    samples = [sample(position) for position in positions.tolist()]
    advantages = SampleAdvantages(numbers / 7, targets, positions / 3)
    return RolloutBuffer(rows, samples, advantages, inputs_of(), order, positions)


def restore(folder, order, shift=0, **settings):
    def read_rows(indices):
        return [{"prompt": str(index + shift)} for index in indices]

    return restore_buffer(folder, order, inputs_of(**settings), read_rows, "cpu")


@pytest.mark.parametrize("best_of_n", [None, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (2, 4)])
def test_any_number_of_processes_goes_on_with_the_rollout_of_any_other(tmp_path, before, after, best_of_n):
    ranking = torch.randn(32, generator=torch.Generator().manual_seed(0))
    own = {"best_of_n": best_of_n, "generations": 4, "batch": 2, "accumulation": 4, "steps": 8}
    for process in range(before):
        buffer = buffer_of(order_of(before, 3, process=process, **own), ranking)
        buffer.old_log_probs = buffer.old_log_probs + 1
        save_buffer(buffer, rollout_file(tmp_path, process))
    for process in range(after):
        order = order_of(after, 3, process=process, **own)
        found, expected = restore(tmp_path, order), buffer_of(order, ranking)
        assert found.rows == expected.rows and torch.equal(found.positions, expected.positions)
        assert torch.equal(found.advantages.values, expected.advantages.values)
        assert torch.equal(found.advantages.weights, expected.advantages.weights)
        assert torch.equal(found.old_log_probs, expected.old_log_probs + 1)
        assert torch.equal(found.advantages.targets.returns, expected.advantages.targets.returns)
        for one, other in zip(found.samples, expected.samples, strict=True):
            assert all(torch.equal(tensor, other.tensors()[name]) for name, tensor in one.tensors().items())
        assert [found.range_of(slot) for slot in range(8)] == [expected.range_of(slot) for slot in range(8)]


def text(position, length):
    """A trajectory of one text of this length."""
    ids, log_probs = torch.full((1, length), position), torch.full((1, 1, length), -float(position + 1))
    zeros, seeds = torch.zeros(1, 1, dtype=torch.int64), torch.tensor([position])
    support = torch.zeros(1, length, 0, dtype=torch.uint8)
    return TokenTrajectory(ids, ids >= 0, support, log_probs, log_probs[:, 0] * 0, zeros, seeds, seeds + 1, 3, 1.0)


def test_one_process_goes_on_with_texts_of_different_lengths(tmp_path):
    for process in range(2):
        order = order_of(2, 0, process=process)
        positions = order.own(order.trained(torch.zeros(16)))
        samples = [text(position, 5 + process) for position in positions.tolist()]
        rows = [{"prompt": str(position)} for position in positions.tolist()]
        args = (SampleAdvantages(torch.zeros(8)), inputs_of(), order, positions)
        save_buffer(RolloutBuffer(rows, samples, *args), rollout_file(tmp_path, process))
    found = restore(tmp_path, order_of(1, 0))
    assert found.old_log_probs.shape == (16, 1, 6) and {sample.ids.shape[1] for sample in found.samples} == {6}
    for position, own in zip(found.positions.tolist(), found.old_log_probs[:, 0], strict=True):
        assert own[:5].eq(-(position + 1)).all() and own[5] in (0, -(position + 1))


def test_a_rollout_that_is_missing_or_of_other_settings_or_prompts_is_refused(tmp_path):
    order, path = order_of(1, 0), rollout_file(tmp_path, 0)
    with pytest.raises(ResumeError, match="rollout-rank0.safetensors is missing"):
        restore(tmp_path, order)
    save_buffer(buffer_of(order, torch.zeros(16)), path)
    with pytest.raises(ResumeError, match="step_selection"):
        restore(tmp_path, order, step_selection="sample")
    with pytest.raises(ResumeError, match="multi_objective_aggregation"):
        restore(tmp_path, order, multi_objective_aggregation="loss_per_reward")
    with pytest.raises(ResumeError, match="other dataset rows"):
        restore(tmp_path, order, shift=1)


# settings and rows that a run has to share with its checkpoint


def call(prompt, guidance_scale=7.0, max_sequence_length=256, image=None, seed=None):
    """Take what a pipeline's call takes."""


def call_inputs(pipeline_kwargs=None, **settings):
    args = make_config(pipeline_kwargs=pipeline_kwargs, **settings)
    given = {} if args.guidance_scale is None else {"guidance_scale": args.guidance_scale}
    parameters = inspect.signature(call).parameters
    fixed = given | (args.pipeline_kwargs or {})
    return SimpleNamespace(args=args, parameters=parameters, accepted=set(parameters), fixed=fixed)


def difference(**settings):
    """Between a run with the default settings and another one, as it is read from a file."""
    there = json.loads(json.dumps(describe_rollout(call_inputs())))
    return find_difference(there, describe_rollout(call_inputs(**settings)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_scale": 9.0}, "guidance_scale is 7.0 there and 9.0 here"),
        ({"pipeline_kwargs": {"max_sequence_length": 3}}, "max_sequence_length is 256 there and 3 here"),
        ({"pipeline_kwargs": {"seed": 1}}, "pipeline_kwargs: seed is the default there and 1 here"),
        ({"loss_type": "nft"}, "loss_type is 'grpo' there and 'nft' here"),
        ({"trained_steps": [0, 2]}, r"trained_steps is [0, 5] there and [0, 2] here"),
        ({"data_seed": 5}, "data_seed is 42 there and 5 here"),
        ({"shuffle_dataset": False}, "shuffle_dataset is True there and False here"),
        ({"bf16": True}, "bf16 is False there and True here"),
        ({"steps_per_generation": 64}, "updates per rollout is 1 there and 2 here"),
    ],
)
def test_what_a_replay_depends_on_is_compared(settings, message):
    assert difference(**settings) == message


def test_defaults_and_what_no_replay_depends_on_may_change():
    same = {"pipeline_kwargs": {"guidance_scale": 7.0, "image": None}, "data_seed": 42}
    other = {"rollout_batch_size": 2, "learning_rate": 0.5, "beta": 0.1, "scale_rewards": "batch"}
    assert difference(guidance_scale=7.0) is None and difference(**same, **other) is None


def test_tensors_among_the_arguments_are_compared_by_what_they_hold():
    one, other = (call_inputs({"image": torch.full((2, 3), value)}) for value in (0.0, 1.0))
    assert find_difference(describe_rollout(one), describe_rollout(one)) is None
    assert find_difference(describe_rollout(one), describe_rollout(other)).startswith("image is 'Tensor (2, 3) ")


def test_rows_are_compared_by_what_the_pipeline_gets(tmp_path):
    row = {"prompt": "a cat", "image": Image.new("RGB", (4, 4)), "answer": 1}
    hashes = hash_rows([row, row | {"prompt": "a dog"}, row], call_inputs())
    assert hashes[0] == hashes[2] != hashes[1]
    check_rows(tmp_path, hashes[:1], [row | {"answer": 2, "image": Image.new("RGB", (4, 4), "red")}], call_inputs())
    changes = [{"prompt": "a sea"}, {"image": Image.new("RGB", (4, 5))}, {"image": torch.ones(2)}, {"image": None}]
    for change in changes:
        with pytest.raises(ResumeError, match="other dataset rows"):
            check_rows(tmp_path, hashes[:1], [row | change], call_inputs())
    arrays = [row | {"image": array} for array in (np.zeros(2), np.ones(2), torch.zeros(2), torch.tensor(0.0))]
    assert len(set(hash_rows(arrays, call_inputs()))) == 4
