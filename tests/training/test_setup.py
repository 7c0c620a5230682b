"""Set up what a run needs from its settings."""

from command_line import make_config

from diffusion_grpo.training.setup import make_sampling_plan


def test_a_smaller_window_wanders_within_the_larger_one():
    args = make_config(sde_window=[1, 6], sde_window_size=2)
    windows = [make_sampling_plan(args).draw_window(generation) for generation in range(200)]
    assert {start for start, _ in windows} == {1, 2, 3, 4} and all(stop == start + 2 for start, stop in windows)
    assert windows == [
        make_sampling_plan(make_config(sde_window=[1, 6], sde_window_size=2)).draw_window(g) for g in range(200)
    ]
    assert windows != [
        make_sampling_plan(make_config(sde_window=[1, 6], sde_window_size=2, seed=1)).draw_window(g)
        for g in range(200)
    ]
    assert make_sampling_plan(make_config(sde_window=[1, 6])).draw_window(3) == (1, 6)
