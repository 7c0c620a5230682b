"""What a run writes about itself, and whose folder it is."""

import json

import pyarrow.parquet
import pytest
from command_line import make_config
from peft import LoraConfig
from PIL import Image

from diffusion_grpo.run.records import (
    check_extra_column,
    check_same_run,
    list_changed_settings,
    make_record,
    write_files,
    write_inputs,
    write_json,
    write_samples,
)


def record(model="owner/name", peft_config=None, **settings):
    return make_record(model, make_config(**settings), peft_config, ["text"], [], [1.0])


def test_the_record_says_what_is_trained_and_how():
    secrets = {"hub_token": "secret", "model_init_kwargs": {"token": "secret"}}
    made = record(peft_config=LoraConfig(r=4), beta=0.5, loss_kwargs=None, **secrets)
    assert (made["model"], made["trains_by"], made["reward_funcs"]) == ("owner/name", "LoRA rank 4", ["text"])
    assert made["settings"]["beta"] == 0.5 and "secret" not in json.dumps(made) and "torch" in made["versions"]
    assert record()["trains_by"] == "full"
    assert record(lora_adapter="style")["trains_by"] == "LoRA style, trained further"
    assert record(lora_path="/somebody/folder/owner/lora")["trains_by"].endswith("trained further")


def test_only_changed_settings_are_listed():
    assert "learning_rate" not in list_changed_settings(make_config())
    assert list_changed_settings(make_config(learning_rate=0.25))["learning_rate"] == 0.25
    assert "output_dir" not in list_changed_settings(make_config())


def test_another_run_is_refused_and_the_same_one_may_go_on(tmp_path):
    write_json(tmp_path / "run.json", record(seed=3))
    check_same_run(str(tmp_path), record(seed=3, beta=0.5))  # beta may change on the way
    with pytest.raises(ValueError, match="contains another run .seed is 3 there and 42 here.; choose another"):
        check_same_run(str(tmp_path), record())
    with pytest.raises(ValueError, match="seed is 3 there and 42 here.; go elsewhere[.]$"):
        check_same_run(tmp_path, record(), "go elsewhere")
    with pytest.raises(ValueError, match="model is 'owner/name' there and 'owner/other' here"):
        check_same_run(str(tmp_path), record("owner/other", seed=3))
    with pytest.raises(ValueError, match="prompts per rollout is"):
        check_same_run(str(tmp_path), record(seed=3, steps_per_generation=64))
    with pytest.raises(ValueError, match="updates per rollout is 1 there and 2 here"):  # with the same prompts
        check_same_run(str(tmp_path), record(seed=3, gradient_accumulation_steps=16, steps_per_generation=32))
    for name, there, here in (
        ("noisy_steps", "'trained'", "'all'"),
        ("samples_per_latent", 16, 2),
        ("noise_level", "the default", 0.5),
        ("sde_type", "'auto'", "'cps'"),
    ):
        value = here.strip("'") if isinstance(here, str) else here
        with pytest.raises(ValueError, match=f"{name} is {there} there and {here} here"):
            check_same_run(str(tmp_path), record(seed=3, **{name: value}))


def test_other_lengths_of_the_steps_are_another_run(tmp_path):
    write_json(tmp_path / "run.json", record(num_inference_steps=3, eval_num_inference_steps=3))
    spaced = {"num_inference_steps": 3, "eval_num_inference_steps": 3, "sigmas": [1.0, 0.6, 0.3]}
    with pytest.raises(ValueError, match=r"sigmas is the default there and \[1.0, 0.6, 0.3\] here"):
        check_same_run(tmp_path, record(**spaced))


def test_defaults_that_are_written_out_are_no_other_run(tmp_path):
    write_json(tmp_path / "run.json", record())
    same = {"samples_per_latent": "group", "noisy_steps": "trained", "sde_type": "flow_sde"}
    check_same_run(tmp_path, record(**same, trained_steps=[0, 5], num_trained_steps=1))
    with pytest.raises(ValueError, match=r"trained_steps is \[0, 5\] there and \[0, 9\] here"):
        check_same_run(tmp_path, record(trained_steps="all"))
    check_same_run(tmp_path, record(loss_type="nft"))  # whose windows are of something else


def test_what_is_trained_is_compared_as_far_as_it_is_known(tmp_path):
    def lora(**settings):
        return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_v"]} | settings)

    write_json(tmp_path / "run.json", record(peft_config=lora()) | {"component": "transformer"})
    check_same_run(tmp_path, record(peft_config=lora(target_modules=["to_v", "to_q"])))  # the network: not yet known
    check_same_run(tmp_path, record(peft_config=lora(), train_component="transformer"))
    with pytest.raises(ValueError, match="train_component is 'transformer' there and 'transformer_2' here"):
        check_same_run(tmp_path, record(peft_config=lora(), train_component="transformer_2"))
    with pytest.raises(ValueError, match="lora_alpha is 8 there and 16 here"):
        check_same_run(tmp_path, record(peft_config=lora(lora_alpha=16)))
    with pytest.raises(ValueError, match=r"target_modules is \['to_q', 'to_v'\] there and \['to_q'\] here"):
        check_same_run(tmp_path, record(peft_config=lora(target_modules=["to_q"])))
    with pytest.raises(ValueError, match="trains_by is 'LoRA rank 4' there and 'full' here"):
        check_same_run(tmp_path, record())


def test_files_and_tables(tmp_path):
    images = [Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4))]
    columns = write_files(images, [tmp_path / "a" / "0000", None], tmp_path, 8.0, None)
    assert columns == {"image": ["a/0000.png", None], "file": ["a/0000.png", None]}
    write_samples(tmp_path / "a.parquet", columns | {"reward": [1.0, 2.0]})
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pydict()["reward"] == [1.0, 2.0]
    assert not list(tmp_path.glob("tmp-*"))


def test_a_column_has_one_value_per_sample():
    assert check_extra_column("mood", (1, 2), 2) == [1, 2]
    with pytest.raises(ValueError, match=r"log_extra\('mood', ...\) got 2 values for 3 samples"):
        check_extra_column("mood", [1, 2], 3)


def test_an_image_that_is_shown_small_stays_large_for_the_replay(tmp_path):
    picture = Image.new("RGB", (1024, 768), "red")
    column = write_inputs([[picture], []], [tmp_path / "a", tmp_path / "b"], tmp_path)
    assert column == {"input": ["a.png", None]} and picture.size == (1024, 768)
    with Image.open(tmp_path / "a.png") as small:
        assert small.size == (512, 384)
