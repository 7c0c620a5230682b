"""Which settings and rows a run that is resumed within a rollout has to share with its checkpoint."""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import make_config
from PIL import Image

from diffusion_grpo.report.record import ResumeError, find_difference
from diffusion_grpo.rollout.restore import check_rollout, check_rows, describe_rollout, hash_rows


def call(prompt, guidance_scale=7.0, max_sequence_length=256, image=None, seed=None):
    """Take what a pipeline's call takes."""


def inputs_of(pipeline_kwargs=None, **settings):
    args = make_config(pipeline_kwargs=pipeline_kwargs, **settings)
    given = {} if args.guidance_scale is None else {"guidance_scale": args.guidance_scale}
    parameters = inspect.signature(call).parameters
    fixed = given | (args.pipeline_kwargs or {})
    return SimpleNamespace(args=args, parameters=parameters, accepted=set(parameters), fixed=fixed)


def difference(**settings):
    """Between a run with the default settings and another one, as it is read from a file."""
    there = json.loads(json.dumps(describe_rollout(inputs_of())))
    return find_difference(there, describe_rollout(inputs_of(**settings)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_scale": 9.0}, "guidance_scale is 7.0 there and 9.0 here"),
        ({"pipeline_kwargs": {"max_sequence_length": 3}}, "max_sequence_length is 256 there and 3 here"),
        ({"pipeline_kwargs": {"seed": 1}}, "pipeline_kwargs: seed is the default there and 1 here"),
        ({"seed": 1}, "seed is 42 there and 1 here"),
        ({"loss_type": "nft"}, "loss_type is 'grpo' there and 'nft' here"),
        ({"num_trained_steps": 2}, "num_trained_steps is 1 there and 2 here"),
        ({"step_selection": "sample"}, "step_selection is 'rollout' there and 'sample' here"),
        ({"trained_steps": [0, 2]}, r"trained_steps is [0, 5] there and [0, 2] here"),
        ({"data_seed": 5}, "data_seed is 42 there and 5 here"),
        ({"shuffle_dataset": False}, "shuffle_dataset is True there and False here"),
        ({"temperature": 0.5}, "temperature is the default there and 0.5 here"),
        ({"bf16": True}, "bf16 is False there and True here"),
        ({"steps_per_generation": 64}, "updates per rollout is 1 there and 2 here"),
    ],
)
def test_what_a_replay_depends_on_is_compared(settings, message):
    assert difference(**settings) == message


@pytest.mark.parametrize(
    "settings",
    [
        {"guidance_scale": 7.0},
        {"pipeline_kwargs": {"guidance_scale": 7.0, "image": None}},
        {"data_seed": 42},
        {"rollout_batch_size": 2},
        {"learning_rate": 0.5, "beta": 0.1, "scale_rewards": "batch"},
    ],
)
def test_defaults_and_what_no_replay_depends_on_may_change(settings):
    assert difference(**settings) is None


def test_tensors_among_the_arguments_are_compared_by_what_they_hold():
    one, other = (inputs_of({"image": torch.full((2, 3), value)}) for value in (0.0, 1.0))
    assert find_difference(describe_rollout(one), describe_rollout(one)) is None
    assert find_difference(describe_rollout(one), describe_rollout(other)).startswith("image is 'Tensor (2, 3) ")


def test_a_rollout_under_other_settings_is_refused(tmp_path):
    made_under = describe_rollout(inputs_of())
    check_rollout(tmp_path, made_under, inputs_of())
    check_rollout(tmp_path, made_under | {"setting of another version": 1}, inputs_of())
    with pytest.raises(ResumeError, match="guidance_scale"):
        check_rollout(tmp_path, made_under, inputs_of(guidance_scale=9.0))


def test_rows_are_compared_by_what_the_pipeline_gets(tmp_path):
    row = {"prompt": "a cat", "image": Image.new("RGB", (4, 4)), "answer": 1}
    hashes = hash_rows([row, row | {"prompt": "a dog"}, row], inputs_of())
    assert hashes[0] == hashes[2] != hashes[1]
    check_rows(tmp_path, hashes[:1], [row | {"answer": 2, "image": Image.new("RGB", (4, 4), "red")}], inputs_of())
    changes = [{"prompt": "a sea"}, {"image": Image.new("RGB", (4, 5))}, {"image": torch.ones(2)}, {"image": None}]
    for change in changes:
        with pytest.raises(ResumeError, match="other dataset rows"):
            check_rows(tmp_path, hashes[:1], [row | change], inputs_of())
    arrays = [row | {"image": array} for array in (np.zeros(2), np.ones(2), torch.zeros(2), torch.tensor(0.0))]
    assert len(set(hash_rows(arrays, inputs_of()))) == 4
