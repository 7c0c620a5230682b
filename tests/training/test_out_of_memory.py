"""Where memory runs out, a smaller micro-batch is found, or a message says what to change."""

import pytest
import torch
from command_line import make_config
from tiny_runs import are_equal, finished_run, logged, trained_weights, trainer_for

from diffusion_grpo.data.columns import RowError
from diffusion_grpo.training.memory import format_size, weigh_run
from diffusion_grpo.training.out_of_memory import (
    NotEnoughMemoryError,
    is_out_of_memory,
    list_changes,
)

RUN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "max_steps": 2}
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


def test_memory_may_run_out_outside_of_torchs_allocator():
    for words in (
        "CUDA error: out of memory\nCUDA kernel errors",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
    ):
        assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(ValueError("CUDA error: out of memory"))
    wrapped = RowError("the pipeline fails on a row")
    wrapped.__cause__ = RuntimeError("CUDA error: out of memory")
    assert is_out_of_memory(wrapped)


def run_out(trainer, largest, begin=0):
    """Let the network fail above a number of rows in a call, once there are `begin` updates."""
    network = trainer.policy.network
    forward, seen = network.forward, []

    def run(hidden_states, *args, **kwargs):
        if len(hidden_states) > largest and trainer.state.global_step >= begin:
            raise torch.OutOfMemoryError(MESSAGE)
        seen.append(len(hidden_states))
        return forward(hidden_states, *args, **kwargs)

    network.forward = run
    return seen


def test_the_size_that_fits_is_found_and_trains_what_it_would_have_trained(tmp_path, caplog):
    """Guidance doubles the rows of a call, so 2 of them are one sample."""
    found = trainer_for(tmp_path / "found", auto_find_batch_size=True, **RUN)
    seen = run_out(found, largest=2)
    found.train()
    smaller = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
    chosen = finished_run(tmp_path / "chosen", **RUN | smaller)
    assert set(seen) == {2}
    assert found.args.batch_sizes == chosen.args.batch_sizes
    assert found.args.batch_sizes.samples_per_update == 8 and found.state.global_step == 2
    assert logged(found, "reward") == logged(chosen, "reward")
    assert are_equal(trained_weights(found), trained_weights(chosen))
    assert "per_device_train_batch_size=2 and gradient_accumulation_steps=4" in caplog.text
    assert "per_device_train_batch_size=1 and gradient_accumulation_steps=8" in caplog.text


def test_memory_that_runs_out_later_is_an_error_that_says_what_to_change(tmp_path):
    trainer = trainer_for(tmp_path, auto_find_batch_size=True, gradient_checkpointing=False, **RUN)
    run_out(trainer, largest=2, begin=1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.train()
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(f"Out of memory in the rollout after update 1: {MESSAGE} Always in memory: ")
    for name, count in weigh_run(trainer.model, trainer.pipe, trainer.optimizer, trainer.loader).items():
        assert (f"{name} {format_size(count)}" in message) == (count > 0)
    cheapest = "per_device_train_batch_size: 2 with gradient_accumulation_steps: 4 and steps_per_generation: 4"
    assert message.index(cheapest) < message.index("offload_frozen: cpu")


def test_without_the_search_or_a_smaller_size_the_message_comes_at_once(tmp_path):
    trainer = trainer_for(tmp_path / "plain", **RUN)
    run_out(trainer, largest=2)
    with pytest.raises(torch.OutOfMemoryError, match="after update 0"):
        trainer.train()
    assert trainer.args.per_device_train_batch_size == 4
    smallest = trainer_for(tmp_path / "smallest", auto_find_batch_size=True, **RUN)
    run_out(smallest, largest=1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        smallest.train()
    assert smallest.args.per_device_train_batch_size == 1 and smallest.args.auto_find_batch_size
    assert "per_device_train_batch_size" not in str(raised.value)


def test_an_evaluation_is_as_large_as_a_rollouts_call_unless_it_has_a_size_of_its_own(tmp_path):
    """Guidance doubles the rows of a call; there are two prompts, with four samples each."""
    evaluated = RUN | {"eval_strategy": "steps", "eval_on_start": True, "num_generations_eval": 4}
    trainer = trainer_for(tmp_path / "default", rollout_batch_size=2, **evaluated)
    seen = run_out(trainer, largest=8)
    trainer.evaluate()
    assert set(seen) == {4}
    own = trainer_for(tmp_path / "own", auto_find_batch_size=True, per_device_eval_batch_size=8, **evaluated)
    seen = run_out(own, largest=8)
    own.train()
    assert max(seen) == 8 and (own.args.eval_batch_size, own.args.per_device_train_batch_size) == (4, 2)
    refused = trainer_for(tmp_path / "refused", per_device_eval_batch_size=8, **evaluated)
    run_out(refused, largest=8)
    with pytest.raises(NotEnoughMemoryError) as raised:
        refused.train()
    message = str(raised.value)
    assert message.startswith(f"Out of memory in the evaluation after update 0: {MESSAGE} Always in memory: ")
    assert "per_device_eval_batch_size" in message and "train_batch_size" not in message
    assert message.count("Out of memory") == 1


def test_a_model_that_does_not_fit_says_what_to_change(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError(MESSAGE + "\nGPU 0 has a total capacity")

    monkeypatch.setattr("diffusion_grpo.training.learner.make_algorithm", fail)
    with pytest.raises(NotEnoughMemoryError, match="while the model was loaded: .*cache_prompt_embeds: memory"):
        trainer_for(tmp_path, **RUN)


def test_only_settings_that_are_open_are_named():
    taken = {"cache_prompt_embeds": "memory", "offload_frozen": "cpu", "group_offload": "block_level"}
    assert list_changes(make_config(**taken, load_in_4bit=True), "loading") == []
    args = make_config(gradient_checkpointing=False)
    open_in = {stage: " ".join(list_changes(args, stage)) for stage in ("loading", "evaluation", "training")}
    for name, stages in {
        "per_device_train_batch_size": ["training"],
        "per_device_eval_batch_size": ["evaluation"],
        "gradient_checkpointing": ["training"],
        "offload_trajectories": ["evaluation", "training"],
        "decode_batch_size": ["evaluation", "training"],
        **dict.fromkeys([*taken, "load_in_4bit"], ["loading", "evaluation", "training"]),
    }.items():
        assert [stage for stage in open_in if name in open_in[stage]] == stages, name


def test_losses_that_compare_the_samples_of_a_prompt_keep_them_in_one_micro_batch(tmp_path):
    run = RUN | {"loss_type": "dgpo", "num_generations": 2, "guidance_scale": 1.0, "auto_find_batch_size": True}
    found = trainer_for(tmp_path / "found", **run)
    seen = run_out(found, largest=2)
    found.train()
    assert max(seen) == 2 and found.args.per_device_train_batch_size == 2 and found.state.global_step == 2
    smallest = trainer_for(tmp_path / "smallest", **run)
    run_out(smallest, largest=1)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        smallest.train()
    assert smallest.args.per_device_train_batch_size == 2
    assert "per_device_train_batch_size" not in str(raised.value)


def test_other_errors_pass(tmp_path):
    trainer = trainer_for(tmp_path, auto_find_batch_size=True, **RUN)
    trainer.policy.network.forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(RowError, match="ZeroDivisionError"):
        trainer.train()
