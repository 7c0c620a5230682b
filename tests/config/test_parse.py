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


def test_overrides_win_over_the_file(config_file):
    words = "--beta 0.1 --trained_steps 1 3 --advantage-clip null --reward_funcs text color".split()
    script, lora, settings = parse_train_arguments(
        config_file(beta=0.5, pipeline_kwargs={"a": 1}), [*words, "--use_peft", "--pipeline_kwargs", '{"b": 1e-3}']
    )
    assert settings.beta == 0.1
    assert settings.trained_steps == [1, 3]
    assert settings.advantage_clip is None
    assert settings.pipeline_kwargs == {"b": 0.001}
    assert script.reward_funcs == ["text", "color"]
    assert lora.use_peft
    assert parse_train_arguments(config_file(scale_rewards=False), [])[2].scale_rewards == "none"
    assert parse_train_arguments(config_file(), ["--scale_rewards", "true"])[2].scale_rewards == "group"


def test_rewards_with_options_come_from_yaml_and_from_flags(config_file):
    from diffusion_grpo.rewards import load_rewards

    wanted = [("text", 0.6, {"match": "exact"}), ("brightness", 0.5, {})]
    for value in (
        {"text": {"weight": 0.6, "match": "exact"}, "brightness": 0.5},
        [{"text": {"weight": 0.6, "match": "exact"}}, {"brightness": 0.5}],
    ):
        script = parse_train_arguments(config_file(reward_funcs=value), [])[0]
        found = [(reward.name, reward.weight, reward.arguments) for reward in load_rewards(script.reward_funcs)]
        assert sorted(found, reverse=True) == wanted  # the file's keys are sorted
    words = ["--reward_funcs", "{text: {weight: 0.6, match: exact}, brightness: 0.5}"]
    script = parse_train_arguments(config_file(), words)[0]
    found = [(reward.name, reward.weight, reward.arguments) for reward in load_rewards(script.reward_funcs)]
    assert found == wanted


def test_yaml_reads_no_as_a_word_and_1e_3_as_a_number(tmp_path, config_file):
    values = yaml.load("a: no\nb: 1e-3\nc: 12\nd: -.5\ne: true\nf: null\ng: 1.2.3", Yaml12Loader)
    assert values == {"a": "no", "b": 0.001, "c": 12, "d": -0.5, "e": True, "f": None, "g": "1.2.3"}
    assert isinstance(values["c"], int)
    path = config_file()
    with open(path, "a") as file:
        file.write("eval_strategy: no\nlearning_rate: 1e-3\n")
    settings = parse_train_arguments(path, [])[2]
    assert settings.eval_strategy == "no" and settings.learning_rate == 1e-3


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


def test_the_embedded_model_brings_its_own_defaults(config_file):
    values = read_values(config_file(model="tiny", height=64), [])
    assert values["height"] == 64 and "width" not in values and values["guidance_scale"] == 1.0


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


def test_whole_numbers_are_those_of_yaml_1_2():
    values = yaml.load("a: 010\nb: 1:30\nc: 0o17\nd: 0x1F\ne: -3\nf: 1_000\ng: 0b11", Yaml12Loader)
    assert values == {"a": 10, "b": "1:30", "c": 15, "d": 31, "e": -3, "f": "1_000", "g": "0b11"}


def test_a_single_value_of_a_list_is_a_list_of_one(config_file):
    words = ["--validation_prompts", "a cat", "--reward_weights", "0.5", "--watch_rewards=none"]
    settings = parse_train_arguments(config_file(), words)[2]
    assert settings.validation_prompts == ["a cat"] and settings.reward_weights == [0.5]
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
        (["--learning_rat", "1"], "learning_rate"),
        (["--num_generations", "many"], "num_generations"),
        (["--beta", "[]"], "beta"),
        (["--lora_dropout", "0.5"], "lora_dropout"),
        (["--lora_init", "gauss"], "lora_init"),
        (["--pipeline_kwargs", '{"a": 1'], "pipeline_kwargs"),
        (["--num_generations", "7"], "num_generations"),
    ],
)
def test_names_types_and_values(config_file, words, name):
    with pytest.raises(ValueError, match=name):
        parse_train_arguments(config_file(), words)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="`model`, `reward_funcs`"):
        parse_train_arguments(None, ["--dataset", "tiny"])
