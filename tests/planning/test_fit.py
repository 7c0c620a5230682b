"""The settings that are proposed make the run fit, and each is needed."""

from pathlib import Path

import pytest
import yaml
from planned_runs import write_run
from tiny_runs import brightness  # noqa: F401  named by its dotted path below

from diffusion_grpo.planning import fit as fitting
from diffusion_grpo.planning.fit import Choice, count_usable, fit, write_words
from diffusion_grpo.planning.plan import plan


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A run whose activations are larger than its weights."""
    sizes = {"height": 96, "width": 96, "per_device_train_batch_size": 4, "num_generations": 4}
    sizes |= {"samples_per_latent": 1}
    return write_run(tmp_path_factory.mktemp("run"), "flux", **sizes)


CACHE = {}  # of the plans of this one run


def most(config, settings):
    return plan(config, write_words(settings), cache=CACHE).total.accelerator


def search(config, usable, *words):
    return fitting.Search(config, list(words), None, usable, CACHE)


def test_the_cheapest_settings_that_fit_are_found_and_none_of_them_is_idle(config):
    file, before = Path(config), most(config, {})
    text = file.read_text()
    size = int(0.4 * before / (1 - fitting.RESERVE))
    found = fit(config, [], size, cache=CACHE)
    assert found.fits and found.before.accelerator == before
    assert file.read_text() == text  # nothing is changed behind the user's back
    settings = yaml.safe_load(found.to_yaml())
    assert settings == found.settings
    assert {"per_device_train_batch_size", "gradient_accumulation_steps"} < settings.keys()
    file.with_name("pasted.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | settings))
    pasted = plan(str(file.with_name("pasted.yaml")), [], cache=CACHE)
    assert pasted.total.accelerator == found.after.accelerator <= count_usable(size)
    batches = plan(config, [], cache=CACHE).batches
    assert pasted.batches["samples_per_update"] == batches["samples_per_update"]
    assert pasted.batches["updates_per_rollout"] == batches["updates_per_rollout"]
    for choice in found.choices:
        rest = fitting.merge([other for other in found.choices if other is not choice])
        assert most(config, rest) == found.after.accelerator + choice.saved > count_usable(size)


def test_a_run_that_fits_is_left_as_it_is(config):
    found = fit(config, [], 2 * most(config, {}), cache=CACHE)
    assert found.fits and not found.choices and found.to_yaml() == ""


def test_what_cannot_fit_says_how_small_it_became(config, monkeypatch):
    kept = ("smaller micro-batches", "recorded steps on the CPU")
    monkeypatch.setattr(fitting, "STEPS", {name: fitting.STEPS[name] for name in kept})
    found = fit(config, [], 1000, cache=CACHE)
    assert not found.fits and [choice.name for choice in found.choices] == list(kept)
    assert found.after.accelerator == most(config, found.settings) < found.before.accelerator


def test_what_was_built_is_used_again(config):
    """Only what changes the passes of a micro-batch is measured anew."""
    cache = {}
    for words in ([], ["--offload_frozen", "cpu"], ["--optim", "adamw_8bit"], ["--offload_trajectories", "true"]):
        plan(config, words, cache=cache)
    assert len(cache) == 2  # the pipeline, and a measurement
    smaller = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --steps_per_generation 4".split()
    assert plan(config, smaller, cache=cache).memory == plan(config, smaller).memory
    assert len(cache) == 3
    plan(config, ["--gradient_checkpointing", "true"], cache=cache)
    assert len(cache) == 5


def test_decoding_is_measured_only_where_it_takes_most(config, monkeypatch):
    name = "samples decoded one by one"
    monkeypatch.setattr(fitting, "STEPS", {name: fitting.STEPS[name]})
    candidates, plan_settings, searched = [], fitting.Search.plan, search(config, 1000)

    def count(self, settings):
        candidates.append(settings)
        return plan_settings(self, settings)

    monkeypatch.setattr(fitting.Search, "plan", count)
    assert not searched.find() and candidates == [{}]  # and the same plan is not made twice
    monkeypatch.setattr(fitting, "ONLY_DECODING", ())
    assert not searched.find() and candidates == [{}, {"decode_batch_size": 1}]


def test_a_run_whose_memory_is_unknown_is_not_fitted():
    with pytest.raises(
        ValueError, match="cannot be planned, so nothing is fitted. The model .* is not available here"
    ):
        fit("examples/sd35_ocr.yaml", [], 2**30)


@pytest.fixture
def propose(config):
    """Returns what a step proposes on top of some settings."""
    return lambda name, settings: fitting.propose(name, search(config, 0).read(settings))


def test_what_is_set_already_is_not_proposed_again(propose):
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    swap = propose("block swap", {})
    for name, given, expected in (
        ("gradient checkpointing", {}, {"gradient_checkpointing": True}),
        ("gradient checkpointing", {"gradient_checkpointing": True}, {}),
        ("smaller micro-batches", {}, half),
        ("smaller micro-batches", half | {"per_device_train_batch_size": 1}, {}),
        ("smaller micro-batches", {"per_device_eval_batch_size": 8}, half | {"per_device_eval_batch_size": 2}),
        ("smaller micro-batches", {"per_device_eval_batch_size": 2}, half),
        ("smaller rollout calls", {}, {}),  # as large as the micro-batches
        ("smaller rollout calls", {"rollout_batch_size": 6}, {"rollout_batch_size": 3}),
        ("smaller rollout calls", {"rollout_batch_size": 1}, {}),
        ("block swap", swap, {}),
    ):
        assert propose(name, given) == expected, (name, given)
    assert swap["group_offload"] == "block_level"
    odd = propose("smaller micro-batches", {"per_device_train_batch_size": 9, "num_generations": 3})
    assert odd["per_device_train_batch_size"] == 3


def test_settings_that_refuse_each_other_are_no_candidates(config):
    swap = Choice("block swap", {"group_offload": "block_level"}, "")
    assert search(config, 0, "--use_peft", "false").add_up([swap]) is None


def test_quantised_weights_come_before_block_swap_and_not_with_it(config, propose):
    eight = propose("8-bit weights", {})
    assert eight == {"load_in_8bit": True} and propose("8-bit weights", eight) == {}
    four = propose("4-bit weights", eight)
    assert four == {"load_in_4bit": True, "load_in_8bit": False}
    assert propose("8-bit weights", eight | four) == {}
    swap = propose("block swap", eight | four)
    assert not swap["load_in_4bit"] and swap["group_offload"]
    assert propose("4-bit weights", eight | four | swap) == {}
    assert most(config, {"load_in_4bit": True}) < most(config, {"load_in_8bit": True}) < most(config, {})


@pytest.mark.slow
def test_what_a_later_choice_made_unnecessary_is_left_out(config, monkeypatch):
    names = ("recorded steps on the CPU", "smaller micro-batches")  # the first saves little, and is tried first
    monkeypatch.setattr(fitting, "STEPS", {name: fitting.STEPS[name] for name in names})
    half = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
    size = int(most(config, half) / (1 - fitting.RESERVE)) + 2
    assert most(config, half) <= count_usable(size) < most(config, {"offload_trajectories": True})
    found = fit(config, [], size, cache=CACHE)
    assert found.fits and found.settings == half and [choice.name for choice in found.choices] == [names[1]]
