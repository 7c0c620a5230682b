"""How prompts, samples, micro-batches and updates relate."""

import dataclasses

from command_line import make_config

from diffusion_grpo.config.batch_sizes import BatchSizes


def test_sizes_of_a_rollout():
    args = make_config(num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=4, best_of_n=4)
    sizes = args.batch_sizes  # 16 of 32 samples are trained on
    assert (args.micro_batches_per_rollout, sizes.prompts_per_rollout, sizes.rollout_share) == (4, 4, 32)
    for alone in ({"reward_baseline": "batch"}, {"advantage_estimator": "gae"}):
        args = make_config(num_generations=1, num_batches_per_step=64, **alone)  # of two samples each
        assert args.batch_sizes.prompts_per_rollout == 128


def test_two_processes_share_a_rollout():
    """4 x 2 x 6 = 48 samples are trained, 8 of each prompt's 16: 6 prompts, 96 samples, 48 per process."""
    sizes = BatchSizes(16, 8, 4, 3, 6, 2, data_processes=2, data_process=1)  # in the order of its fields
    assert (sizes.prompts_per_rollout, sizes.samples_per_rollout, sizes.rollout_share) == (6, 96, 48)
    assert (sizes.update_share, sizes.samples_per_update) == (12, 24)
    assert (sizes.slots, sizes.updates_per_rollout) == (12, 4)
    assert sizes.consecutive_samples == 24  # of which best_of_n leaves the 12 of an update
    assert dataclasses.replace(sizes, data_processes=1).consecutive_samples == 48
    assert dataclasses.replace(sizes, best_of_n=None).trained_per_prompt == 16
