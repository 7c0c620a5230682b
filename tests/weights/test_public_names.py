"""Names without the folders of this machine, and settings without secrets."""

import pytest

from diffusion_grpo.rewards.loading import load_rewards
from diffusion_grpo.weights.public_names import public_model_name, public_source_name, strip_folders, strip_secrets


def test_names_without_this_machines_folders(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    assert public_model_name(str(tmp_path / "my-model")) == "my-model"
    assert public_model_name("someone/some-model") == "someone/some-model" and public_model_name("tiny") == "tiny"
    monkeypatch.chdir(tmp_path)
    assert public_model_name("./my-model") == "my-model"
    cached = tmp_path / "hub" / "models--someone--some--model" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    assert public_model_name(str(cached)) == "someone/some--model"
    assert strip_folders(str(tmp_path / "Jane Doe" / "not there yet.txt")) == "not there yet.txt"
    settings = {"deepspeed": "/home/me/zero.json", "names": ["/x/y", "a/b"], "rate": 0.1}
    assert strip_folders(settings) == {"deepspeed": "zero.json", "names": ["y", "a/b"], "rate": 0.1}


def test_a_network_has_the_name_of_the_model_that_it_came_with(tmp_path):
    (tmp_path / "my-model" / "vae").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    model = str(tmp_path / "my-model")
    assert public_source_name(f"{model}/vae", model) == public_source_name(model, model) == "my-model"
    assert public_source_name(str(tmp_path / "other"), model) == public_source_name("/x/other", None) == "other"
    cached = tmp_path / "models--someone--some-model" / "snapshots" / "abc" / "vae"
    for base in ("someone/some-model", model, None):
        assert public_source_name(str(cached), base) == "someone/some-model"
        assert public_source_name("someone/vae", base) == "someone/vae"


@pytest.mark.parametrize(
    "text",
    ["/imagine ugly, bad/blurry", "/no_think", "/home/sweet\n{prompt}/10", "a/b", "http://host/a/b", ""]
    + [r"A:\s*(\d+)/10", r"\\boxed\{(\d+)\}", "/" + "ugly, " * 1000 + "/bad"],
)
def test_text_that_is_no_path_stays(text):
    assert strip_folders({"negative_prompt": text}) == {"negative_prompt": text}


@pytest.mark.parametrize(
    "path",
    ["/x/jane/model/", "/Users/Jane Doe/My Models/model", r"C:\Users\Jane Doe\model", "c:/Users/Jane Doe/model"]
    + [r"\\jane\Jane's files\a\model", r"\\jane\share\model"],
)
def test_of_a_path_its_last_part_is_left(path):
    assert strip_folders([path]) == ["model"] and public_model_name(path) == "model"


def test_what_is_secret_by_its_name_is_left_out_wherever_it_stands():
    given = {"model_init_kwargs": {"token": "hf_1", "revision": "main"}, "rewards": [{"API_KEY": "sk-1", "key": 1}]}
    assert strip_secrets(given) == {"model_init_kwargs": {"revision": "main"}, "rewards": [{"key": 1}]}
    assert strip_secrets({"token_sampling": 1, "max_tokens": 2}) == {"token_sampling": 1, "max_tokens": 2}


def test_a_dictionary_may_be_written_as_json():
    text = '{"token": "hf_1", "revision": "main", "cache_dir": "/home/me/models", "headers": {"Authorization": "b"}}'
    expected = '{"revision": "main", "cache_dir": "models", "headers": {}}'
    assert strip_folders(strip_secrets({"model_init_kwargs": text})) == {"model_init_kwargs": expected}
    assert strip_secrets([f"[{text}]"]) == ['[{"revision": "main", "cache_dir": "/home/me/models", "headers": {}}]']
    for text in ('{"a":  1}', "{prompt}", "[a fox] in /a", '["x"]', "{"):
        assert strip_folders(strip_secrets(text)) == text


def test_of_a_url_no_password_and_no_value_of_the_query_is_published():
    assert strip_secrets({"url": "https://h/v1?key=abc&token=z/z"}) == {"url": "https://h/v1?key=...&token=..."}
    assert strip_secrets("http://a:b@h?x=1#part=2 and wss://h/?y=2") == "http://h?x=...#part=... and wss://h/?y=..."
    given = {"url": ["http://me:pass@host:8000/v1", "https://me@host"], "extra": {"Authorization": "Bearer 1", "n": 1}}
    assert strip_secrets(given) == {"url": ["http://host:8000/v1", "https://host"], "extra": {"n": 1}}
    assert strip_secrets("either ws://a:b@c or http://p@ss:w@rd@host?a") == "either ws://c or http://host?a"
    for text in ("http://h/v1?", "http://h/a=b", "is it a?b=c", "https://h/@someone", "me@mail.example", "a://b c @d"):
        assert strip_secrets(text) == text


def test_what_a_reward_is_told_is_recorded_without_secrets():
    request = {"api_key": "sk-1", "seed": 0}
    settings = {"url": "http://h", "model": "m", "template": "{prompt}", "extra": request}
    (reward,) = load_rewards({"vlm_judge": settings})
    recorded = strip_secrets(reward.options())
    assert recorded["extra"] == {"seed": 0} and "sk-1" not in str(recorded)
