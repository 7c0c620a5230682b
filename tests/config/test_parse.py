"""Read YAML and `--key value` overrides."""

import pytest
import yaml

from diffusion_grpo.config.arguments import LaunchArguments
from diffusion_grpo.config.parse import (
    Yaml12Loader,
    make_script_arguments,
    parse_train_arguments,
    read_overrides,
    read_values,
    read_yaml,
)
from diffusion_grpo.rewards import load_rewards


def test_overrides_win_over_the_file(config_file):
    words = "--beta 0.1 --trained_steps 1 3 --advantage-clip null --reward_funcs text color".split()
    script, lora, settings = parse_train_arguments(
        config_file(beta=0.5, pipeline_kwargs={"a": 1}), [*words, "--use_peft", "--pipeline_kwargs", '{"b": 1e-3}']
    )
    assert (settings.beta, settings.trained_steps, settings.advantage_clip) == (0.1, [1, 3], None)
    assert settings.pipeline_kwargs == {"b": 0.001}
    assert script.reward_funcs == ["text", "color"] and lora.use_peft
    assert parse_train_arguments(config_file(scale_rewards=False), [])[2].scale_rewards == "none"
    assert parse_train_arguments(config_file(), ["--scale_rewards", "true"])[2].scale_rewards == "group"


def test_rewards_with_options_come_from_yaml_and_from_flags(config_file):
    text = {"weight": 0.6, "match": "exact"}
    runs = [({"reward_funcs": {"text": text, "brightness": 0.5}}, [])]
    runs += [({"reward_funcs": [{"text": text}, {"brightness": 0.5}]}, [])]
    runs += [({}, ["--reward_funcs", "{text: {weight: 0.6, match: exact}, brightness: 0.5}"])]
    for changes, words in runs:
        made = load_rewards(parse_train_arguments(config_file(**changes), words)[0].reward_funcs)
        found = sorted((reward.name, reward.weight, reward.arguments) for reward in made)
        assert found == [("brightness", 0.5, {}), ("text", 0.6, {"match": "exact"})]


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", "no"), ("1e-3", 0.001), ("12", 12), ("-.5", -0.5), ("true", True), ("null", None), ("1.2.3", "1.2.3")]
    + [("010", 10), ("1:30", "1:30"), ("0o17", 15), ("0x1F", 31), ("-3", -3), ("1_000", "1_000"), ("0b11", "0b11")],
)
def test_values_are_those_of_yaml_1_2(text, value):
    made = yaml.load(f"a: {text}", Yaml12Loader)["a"]
    assert made == value and type(made) is type(value)


def test_overrides_are_grouped_by_key():
    assert read_overrides(["--a", "1", "2", "--b=x=y", "--c", "--d", "null", "--e-f", "-1"]) == {
        "a": ["1", "2"],
        "b": "x=y",
        "c": True,
        "d": None,
        "e_f": "-1",
    }


def test_settings_of_processes_are_read_apart(config_file):
    words = ["--num_machines", "2", "--beta", "0.1"]
    launch = make_script_arguments(read_values(config_file(num_processes=4), words), LaunchArguments)
    assert (launch.num_processes, launch.num_machines) == (4, 2)
    for wrong in ("two", 0):
        with pytest.raises(ValueError, match="num_processes"):
            make_script_arguments(read_values(config_file(num_processes=wrong), []), LaunchArguments)


def test_a_file_named_by_the_settings_lies_beside_them(config_file, tmp_path):
    (tmp_path / "earlier.json").write_text("{}")
    values = read_values(config_file(report_experiment="earlier.json"), ["--seed", "3"])
    assert values["report_experiment"] == str(tmp_path / "earlier.json") and values["seed"] == "3"


def test_a_key_that_stands_twice_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "twice.yaml"
    for text, message in (
        ("learning_rate: 1e-4\nbeta: 0\nlearning_rate: 3e-2\n", "'learning_rate' in line 3 is already in line 1"),
        ("reward_funcs:\n  text: 1\n  text: 2\n", "'text' in line 3 is already in line 2"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_yaml(str(path))
    path.write_text("a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\n")
    values = read_yaml(str(path))
    assert values["b"] == {"x": 2, "y": 1} and values["c"] == {"x": 2, "y": 3}


def test_a_single_value_of_a_list_is_a_list_of_one(config_file):
    words = ["--validation_prompts", "a cat", "--reward_weights", "0.5", "--watch_rewards=none"]
    settings = parse_train_arguments(config_file(), words)[2]
    assert (settings.validation_prompts, settings.reward_weights) == (["a cat"], [0.5])
    assert settings.watch_rewards == ["none"]
    settings = parse_train_arguments(config_file(validation_prompts="- a cat", reward_weights=1), [])[2]
    assert settings.validation_prompts == ["- a cat"] and settings.reward_weights == [1.0]


@pytest.mark.parametrize("is_word", [False, True])
def test_fsdp_is_switched_on_by_true(is_word, config_file, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it
    values, words = ({}, ["--fsdp", "true"]) if is_word else ({"fsdp": True}, [])
    settings = parse_train_arguments(config_file(**values, fsdp_config={"cpu_offload": True}), words)[2]
    assert settings.fsdp is True and settings.fsdp_plugin_args["cpu_offload"] is True
    assert not parse_train_arguments(config_file(fsdp=False), [])[2].fsdp


def test_a_text_may_start_with_a_bracket():
    words = ["--validation_prompts", "[red] car", "--run_name={a} b", "--watch_rewards", "[text, color]"]
    values = {"validation_prompts": "[red] car", "run_name": "{a} b", "watch_rewards": ["text", "color"]}
    assert read_overrides(words) == values


def test_the_home_folder_may_be_written_short(config_file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = read_values(config_file(model="~/model", dataset="~/prompts.txt"), ["--eval_dataset", "~/held"])
    assert values["model"] == f"{tmp_path}/model" and values["dataset"] == f"{tmp_path}/prompts.txt"
    assert values["eval_dataset"] == f"{tmp_path}/held"


def test_names_of_trl_are_read(config_file):
    words = ["--model_name_or_path", "a/b", "--dataset_name", "c/d"]
    assert read_overrides(words) == {"model": "a/b", "dataset": "c/d"}
    values = read_values(config_file(dataset_name="x/y"), words[:2])
    assert values["model"] == "a/b" and "dataset_name" not in values


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--num_generations", "many"], "num_generations"),
        (["--lora_dropout", "0.5"], "lora_dropout"),
        (["--lora_init", "gauss"], "lora_init"),
        (["--pipeline_kwargs", '{"a": 1'], "pipeline_kwargs"),
    ],
)
def test_names_types_and_values(config_file, words, name):
    with pytest.raises(ValueError, match=name):
        parse_train_arguments(config_file(), words)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="`model`, `reward_funcs`"):
        parse_train_arguments(None, ["--dataset", "tiny"])
