"""What the denoising policy records and replays, and which steps pass its networks."""

import pytest
import tiny_pipelines

from diffusion_grpo.policy.denoising import DenoisingPolicy

SEEDS = [1, 2]


def count_calls(pipe):
    """Count how often each network of a pipeline runs from here on, by its first block: gates leave hooks in place."""
    calls = dict.fromkeys(("transformer", "transformer_2"), 0)

    def count(name):
        calls[name] += 1

    for name in calls:
        getattr(pipe, name).blocks[0].register_forward_hook(lambda *_, name=name: count(name))
    return calls


@pytest.mark.parametrize("boundary", [0.2, 0.6, 0.9])
def test_the_steps_of_each_expert_are_those_in_which_the_pipeline_calls_it(boundary):
    pipe, inputs = tiny_pipelines.build("wan_experts")
    pipe.register_to_config(boundary_ratio=boundary)
    calls, seen = count_calls(pipe), {"transformer": set(), "transformer_2": set()}

    def note(pipe, index, timestep, arguments):
        for name, count in calls.items():
            seen[name] |= {index} if count else set()
            calls[name] = 0
        return {}

    one = inputs | {"prompt": ["a"]}
    pipe(**one, num_inference_steps=6, callback_on_step_end=note)
    assert seen["transformer"] | seen["transformer_2"] == set(range(6))
    for name, steps in seen.items():
        policy = DenoisingPolicy(pipe, name)
        calls.update(transformer=0, transformer_2=0)
        assert policy.find_passing_steps(one, 6) == {name: steps}
        assert all(count <= 1 for count in calls.values())  # for the shape of its output
    assert policy.frozen_experts == ["transformer"] and not {"forward"} & {*vars(pipe.transformer)}
