"""What a run writes about itself, and whose folder it is."""

import json
from pathlib import Path

import diffusers
import pytest
import yaml
from command_line import make_config
from peft import LoraConfig

from diffusion_grpo.config.arguments import LAUNCH_VARIABLE
from diffusion_grpo.config.parse import parse_train_arguments, read_values, resolve_values
from diffusion_grpo.report.record import (
    check_same_run,
    describe_script,
    find_license,
    make_record,
    pipeline_tag,
    read_launch,
    refuse_own_settings,
    save_settings,
    write_json,
)

DEMO = str(Path(__file__).parents[2] / "examples" / "demo.yaml")
WORDS = ["--learning_rate", "1e-3", "--max_steps", "2", "--loss_type", "dppo", "--use_cpu", "true"]


def record(model="owner/name", peft_config=None, **settings):
    return make_record(model, make_config(**settings), peft_config, ["text"], [], [1.0])


def test_the_record_says_what_is_trained_and_how():
    secrets = {"hub_token": "secret", "model_init_kwargs": {"token": "secret"}}
    made = record(peft_config=LoraConfig(r=4), beta=0.5, loss_kwargs=None, **secrets)
    assert (made["model"], made["trains_by"], made["reward_funcs"]) == ("owner/name", "LoRA rank 4", ["text"])
    assert made["settings"].keys() == {"beta", "model_init_kwargs"} and made["settings"]["beta"] == 0.5
    assert "secret" not in json.dumps(made) and "torch" in made["versions"]
    assert record()["trains_by"] == "full"
    assert record(lora_adapter="style")["trains_by"] == "LoRA style, trained further"
    assert record(lora_path="/somebody/folder/owner/lora")["trains_by"].endswith("trained further")


def test_another_run_is_refused_and_the_same_one_may_go_on(tmp_path):
    write_json(tmp_path / "run.json", record(seed=3))
    check_same_run(str(tmp_path), record(seed=3, beta=0.5))  # beta may change on the way
    same_prompts = {"gradient_accumulation_steps": 16, "steps_per_generation": 32}
    spaced = {"num_inference_steps": 10, "eval_num_inference_steps": 10}
    spaced["sigmas"] = [1 - step / 10 for step in range(10)]
    for message, other in (
        ("seed is 3", {"seed": 4}),
        ("model is", {"model": "owner/other"}),
        ("prompts_per_rollout is", {"steps_per_generation": 64}),
        ("updates_per_rollout is 1", same_prompts),
        ("sigmas is the default there and .1.0, 0.9", spaced),
        ("noisy_steps is 'trained' there and 'all' here", {"noisy_steps": "all"}),
        ("samples_per_latent is 16 there and 2 here", {"samples_per_latent": 2}),
        ("noise_level is the default there and 0.5 here", {"noise_level": 0.5}),
        ("sde_type is 'auto' there and 'cps' here", {"sde_type": "cps"}),
    ):
        with pytest.raises(ValueError, match=message):
            check_same_run(str(tmp_path), record(**{"seed": 3} | other))


def test_defaults_that_are_written_out_are_no_other_run(tmp_path):
    write_json(tmp_path / "run.json", record())
    same = {"samples_per_latent": "group", "noisy_steps": "trained", "sde_type": "flow_sde"}
    check_same_run(tmp_path, record(**same, trained_steps=[0, 5], num_trained_steps=1))
    with pytest.raises(ValueError, match=r"trained_steps is \[0, 5\] there and \[0, 9\] here"):
        check_same_run(tmp_path, record(trained_steps="all"))
    check_same_run(tmp_path, record(loss_type="dppo"))
    write_json(tmp_path / "run.json", record(sde_type="cps"))
    check_same_run(tmp_path, record(sde_type="cps", noise_level=0.8))


def test_what_is_trained_is_compared_as_far_as_it_is_known(tmp_path):
    def lora(**settings):
        return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_v"]} | settings)

    write_json(tmp_path / "run.json", record(peft_config=lora()) | {"component": "transformer"})
    check_same_run(tmp_path, record(peft_config=lora(target_modules=["to_v", "to_q"])))  # the network: not yet known
    check_same_run(tmp_path, record(peft_config=lora(), train_component="transformer"))
    with pytest.raises(ValueError, match="component is"):
        check_same_run(tmp_path, record(peft_config=lora(), train_component="transformer_2"))
    with pytest.raises(ValueError, match="lora_alpha is 8 there and 16 here"):
        check_same_run(tmp_path, record(peft_config=lora(lora_alpha=16)))
    with pytest.raises(ValueError, match="use_rslora is"):
        check_same_run(tmp_path, record(peft_config=lora(use_rslora=True)))
    with pytest.raises(ValueError, match=r"target_modules is \['to_q', 'to_v'\] there and \['to_q'\] here"):
        check_same_run(tmp_path, record(peft_config=lora(target_modules=["to_q"])))
    with pytest.raises(ValueError, match="trains_by is 'LoRA rank 4' there and 'full' here"):
        check_same_run(tmp_path, record())


def test_the_file_says_what_the_run_was_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "one"
    words = [*WORDS, "--output_dir", "outputs/one", "--resume_from_checkpoint", "true"]
    save_settings(run, resolve_values(read_values(DEMO, words)))
    again = parse_train_arguments(str(run / "train.yaml"), [])
    first = parse_train_arguments(DEMO, [*WORDS, "--output_dir", "outputs/one"])
    assert again[0].report_experiment is None  # an earlier experiment is no part of the run
    first[0].report_experiment = None
    assert again[:2] == first[:2] and again[2].to_dict() == first[2].to_dict()


def test_the_file_holds_no_secret_and_no_folder(tmp_path):
    values = {
        "dataset": "/home/me/words.txt",
        "hub_token": "hf_1",
        "hub_model_id": "me/mine",
        "reward_funcs": [{"remote": {"url": "http://me:pass@a", "token": "abc", "token_env": "TOKEN"}}],
        "pipeline_kwargs": {"negative_prompt": "/imagine ugly, bad/blurry"},
        "model_init_kwargs": '{"token": "hf_1", "revision": "main"}',
    }
    save_settings(tmp_path / "run", values)
    text = (tmp_path / "run" / "train.yaml").read_text()
    assert yaml.safe_load(text) == {
        "dataset": "words.txt",
        "reward_funcs": [{"remote": {"url": "http://a", "token_env": "TOKEN"}}],
        "pipeline_kwargs": {"negative_prompt": "/imagine ugly, bad/blurry"},
        "model_init_kwargs": '{"revision": "main"}',
        "output_dir": "outputs/run",
    }


def test_settings_that_somebody_wrote_are_not_written_over(tmp_path):
    file = tmp_path / "run" / "train.yaml"
    save_settings(file.parent, {"model": "tiny", "learning_rate": 1e-5, "rewards": [{"text": None}]})
    refuse_own_settings(file, file.parent)
    written = file.read_text()
    for text in (f"# mine\n{written}", "model: tiny\n", ""):
        file.write_text(text)
        with pytest.raises(ValueError, match="train.yaml"):
            refuse_own_settings(file, file.parent)
        refuse_own_settings(file, tmp_path / "other")


def test_processes_are_part_of_the_settings(monkeypatch):
    assert read_launch({"num_processes": None}, 1) == {} and read_launch({}, 2) == {"num_processes": 2}
    monkeypatch.setenv(LAUNCH_VARIABLE, json.dumps({"accelerate_config": "fsdp2", "num_processes": 2}))
    assert read_launch({"num_processes": None}, 2) == {"accelerate_config": "fsdp2", "num_processes": 2}


def test_the_command_of_a_script_is_published_without_its_arguments():
    assert describe_script(["/home/me/my run.py", "--hub_token", "hf_1"], 1) == "python 'my run.py'"
    assert describe_script(["train.py"], 4) == "accelerate launch --num_processes 4 train.py"
    for argv in ([], [""], ["/x/ipykernel_launcher.py", "-f"], ["/x/pytest/__main__.py"], ["/bin/pytest"], ["-c"]):
        assert describe_script(argv, 1) is None


@pytest.mark.parametrize(
    ("pipeline", "given", "tag"),
    [
        ("StableDiffusion3Pipeline", ["prompt"], "text-to-image"),
        ("FluxKontextPipeline", ["prompt", "image"], "image-to-image"),
        ("WanPipeline", ["prompt"], "text-to-video"),
        ("WanImageToVideoPipeline", ["prompt", "image"], "image-to-video"),
        ("WanVideoToVideoPipeline", ["prompt", "video"], "video-to-video"),
        ("WanVACEPipeline", ["prompt"], "text-to-video"),
        ("StableAudioPipeline", ["prompt"], "text-to-audio"),
        ("DDPMPipeline", [], "unconditional-image-generation"),
        ("KandinskyPriorPipeline", ["prompt"], None),
    ],
)
def test_the_pipeline_tag(pipeline, given, tag):
    assert pipeline_tag(getattr(diffusers, pipeline), given) == tag


def test_the_licence_of_the_base_model(tmp_path):
    assert find_license("tiny") == {"license": "apache-2.0"} and find_license("someone/unknown") == {}
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_name: theirs\ntags: [a]\n---\nText\n")
    assert find_license(str(tmp_path)) == {"license": "other", "license_name": "theirs"}
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert find_license(str(tmp_path)) == {}
