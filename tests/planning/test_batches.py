"""The planned batches are those of the trainer."""

import pytest
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below

from diffusion_grpo.cli.train import build_trainer
from diffusion_grpo.config.parse import parse_train_arguments
from diffusion_grpo.planning.batches import count_batches
from diffusion_grpo.planning.plan import make_planned_config


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_batches_are_the_trainers(processes, tmp_path):
    config = write_run(
        tmp_path, "sd3", num_generations=4, steps_per_generation=4, num_iterations=3, rollout_batch_size=1
    )
    _, _, args = parse_train_arguments(config, [], make_planned_config(processes))
    batches = count_batches(args, prompts=100)
    assert batches["samples_per_rollout"] == 2 * processes * 4 == batches["prompts_per_rollout"] * 4
    assert batches["samples_per_process"] * processes == batches["samples_per_rollout"]
    assert batches["pipeline_calls"] == 8
    assert (batches["updates_per_rollout"], batches["samples_per_update"]) == (6, 4 * processes)
    assert batches["rollouts_per_epoch"] == -(-100 // (2 * processes))
    assert batches["updates"] == (args.max_steps if args.max_steps > 0 else 3 * batches["updates_per_epoch"])
    if processes == 1:  # as the dataloader counts them
        script, lora, args = parse_train_arguments(config, [])
        trainer = build_trainer(script, lora, args)
        slots = len(trainer.get_train_dataloader())  # one per micro-batch
        counted = count_batches(args, prompts=3)
        assert counted["updates_per_epoch"] == slots // args.gradient_accumulation_steps
