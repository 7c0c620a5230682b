"""Typing errors are refused before torch is imported."""

import huggingface_hub
import pytest
from command_line import make_config
from huggingface_hub import constants

from diffusion_grpo.config.defaults import Sizes
from diffusion_grpo.config.early_checks import (
    EarlySettings,
    check_hub_access,
    check_names,
    check_resume_folder,
    check_values,
    processes_here,
    read_value,
)
from diffusion_grpo.config.source import config_fields


def test_the_early_settings_are_those_of_the_config():
    given = {
        "num_generations": 8,
        "gradient_checkpointing": False,
        "pipeline_kwargs": '{"a": 1}',
        "sde_window": [0, 5],
    }
    early, built = EarlySettings(given, world_size=1), make_config(**given)
    names = [name for name, setting in config_fields().items() if setting.default is not None or name in given]
    # what the config takes from elsewhere, or turns into a type of transformers
    names = [name for name in names if "Strategy" not in config_fields()[name].type]
    others = (
        "output_dir",
        "use_cpu",
        "optim",
        "lr_scheduler_type",
        "bf16",
        "report_to",
        "debug",
        "gradient_checkpointing",
    )
    assert {name: getattr(early, name) for name in names if name not in others} == {
        name: getattr(built, name) for name in names if name not in others
    }
    sizes = [name for name, value in vars(Sizes).items() if isinstance(value, property)]
    assert len(sizes) >= 7 and {n: getattr(early, n) for n in sizes} == {n: getattr(built, n) for n in sizes}


GOOD = {"model": "tiny", "dataset": "tiny", "reward_funcs": ["text"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learning_rat": 1}, "unknown setting `learning_rat`; did you mean `learning_rate`"),
        ({"num_generations": "many"}, "`num_generations`: invalid int value: 'many'"),
        ({"beta": []}, r"`beta` is \[\], expected one float"),
        ({"lora_dropout": 0.5}, "lora_dropout is 0.5; set it to 0"),
        ({"num_processes": 0}, "num_processes is 0"),
    ],
)
def test_names_types_and_values(values, message):
    check_values(GOOD, world_size=1)
    with pytest.raises(ValueError, match=message):
        check_values(GOOD | values, world_size=1)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="required: `model`, `reward_funcs`"):
        check_values({"dataset": "tiny"}, world_size=1)


def test_an_unknown_number_of_processes_leaves_the_sizes_unchecked():
    odd = GOOD | {"num_generations": 7}
    check_values(odd, world_size=None)
    with pytest.raises(ValueError, match="num_generations=7 does not divide"):
        check_values(odd, world_size=1)


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", "int", 3),
        ("1e-3", "float | None", 1e-3),
        ("Yes", "bool", True),
        ("f", "bool", False),
        (["1", "2"], "list[int] | None", [1, 2]),
        (None, "int | None", None),
        ("a", "str | dict", "a"),
    ],
)
def test_words_become_values_of_their_type(value, kind, expected):
    assert read_value("setting", value, kind) == expected


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("perhaps", "bool", "invalid bool value: 'perhaps'"),
        ("3.5", "int", "invalid int value"),
        (None, "int", "is None, expected one int"),
        (True, "int", "is True, expected one int"),
        ({"a": 1}, "str", "expected one str"),
    ],
)
def test_values_of_another_type_are_refused(value, kind, message):
    with pytest.raises(ValueError, match=message):
        read_value("setting", value, kind)


def test_rewards_and_files_that_do_not_exist(tmp_path):
    check_names({"reward_funcs": {"text": 1, "my.own": None}, "dataset": "owner/name", "eval_dataset": None})
    with pytest.raises(ValueError, match="Unknown reward 'tesxt'.*Did you mean 'text'"):
        check_names({"reward_funcs": ["text"], "eval_reward_funcs": [{"tesxt": 1}]})
    with pytest.raises(ValueError, match="eval_dataset: there is no file gone.jsonl .*working directory"):
        check_names({"eval_dataset": "gone.jsonl"})
    settings = tmp_path / "train.yaml"
    settings.touch()
    with pytest.raises(ValueError, match="^dataset: .*train.yaml is not a file of prompts; .*.parquet or .csv"):
        check_names({"dataset": str(settings)})


def test_a_launcher_says_how_many_processes_there_are(monkeypatch):
    assert processes_here() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert processes_here() == 4
    monkeypatch.setenv("PMI_SIZE", "2")
    assert processes_here() is None


def test_pushing_needs_a_token_and_the_hub(monkeypatch):
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set; unset it, or set push_to_hub=False"):
        check_hub_access("hf_mine")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    check_hub_access("hf_mine")
    with pytest.raises(ValueError, match="a token of the Hub, and none was found; run `hf auth login`"):
        check_hub_access(None)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_mine")
    check_hub_access(None)


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path):
    for wanted in (None, True, False, "true", "False", str(tmp_path)):
        check_resume_folder(wanted, tmp_path)
    with pytest.raises(ValueError, match="no folder nothere/checkpoint-5; give that of a checkpoint, or true"):
        check_resume_folder("nothere/checkpoint-5", tmp_path)
    with pytest.raises(ValueError, match="there is no folder 500"):
        check_resume_folder(500, tmp_path)
    (tmp_path / "tmp-checkpoint-20-old").mkdir()  # was being replaced when the run was killed
    check_resume_folder(tmp_path / "checkpoint-20", tmp_path)
    for number in (9, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
    with pytest.raises(ValueError, match="no folder nothere; the newest checkpoint in output_dir is .*-10[.]"):
        check_resume_folder("nothere", tmp_path)
