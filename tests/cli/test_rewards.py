"""`diffusion-grpo rewards`: list, verify and serve."""

import dataclasses

import pytest
from tiny_scorers import clip, trocr

from diffusion_grpo import cli
from diffusion_grpo.rewards import REWARDS, load_rewards, score, verify
from diffusion_grpo.rewards.catalogue import CATALOGUE


def test_the_list_names_every_reward(capsys) -> None:
    assert cli.main(["rewards", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(REWARDS) and set(CATALOGUE) == set(REWARDS)
    (line,) = [line for line in lines if line.startswith("pickscore ")]
    assert "Pick-a-Pic" in line and "yuvalkirstain/PickScore_v1" in line and "[about 15 to 25]" in line


def published(monkeypatch, name, **changes):
    monkeypatch.setitem(verify.PUBLISHED, name, dataclasses.replace(verify.PUBLISHED[name], **changes))


@pytest.mark.parametrize("shift", [0.0, 0.009, 0.011])
def test_scores_of_images_that_are_made_here(shift, tmp_path, monkeypatch, capsys) -> None:
    clip(tmp_path)
    (reward,) = load_rewards({"clip_similarity": {"model": str(tmp_path)}})
    value = score([reward], images=[verify.noise(42)], prompts=[""], columns={"target": [verify.noise(43)]}).item()
    published(monkeypatch, "clip_similarity", scores=(100 * value + shift,))
    code = cli.main(["rewards", "verify", "clip_similarity", "--model", str(tmp_path)])
    written = capsys.readouterr().out
    assert code == (shift > verify.PUBLISHED["clip_similarity"].tolerance)
    assert "published" in written and ("DIFFERS" if code else "agrees") in written and f"{100 * value:.4f}" in written
    assert (
        "torchmetrics" in written
        and "with model: openai/clip-vit-base-patch16" in written
        and "red circle         1.0000" in written
    )


def test_where_nothing_is_published_it_says_so(capsys, tmp_path) -> None:
    assert cli.main(["rewards", "verify", "brightness"]) == 2
    written = capsys.readouterr().out
    assert "has been published for" in written and "noise" in written.splitlines()[-1]
    assert cli.main(["rewards", "verify", "motion"]) == 2  # of videos
    trocr(tmp_path)
    assert cli.main(["rewards", "verify", f"{{text_by_model: {{model: {tmp_path}}}}}"]) == 2
    assert "none  a red circle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pikscore"], "'pikscore' is not the name of a single built-in reward"),
        (["[brightness, color]"], "is not the name of a single built-in reward"),
        (["{clip_score: {modell: here}}"], "no argument 'modell'"),
        (["lpips", "--model", "./missing"], "no folder ./missing"),
        (["pickscore", "--model", "owner/name"], "The reward 'pickscore' raised"),
    ],
)
def test_what_cannot_be_verified_is_refused(words, expected, capsys) -> None:
    assert cli.main(["rewards", "verify", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_port_that_does_not_exist_is_refused(port, capsys) -> None:
    assert cli.main(["rewards", "serve", "brightness", "--port", port]) == 2
    assert f"--port must lie between 0 and 65535, got {port}." in capsys.readouterr().err


def test_the_command_passes_its_limits_on(monkeypatch) -> None:
    given = []

    def create_app(rewards, token, max_waiting, max_bytes):
        given.append(([reward.name for reward in rewards], token, max_waiting, max_bytes))

    monkeypatch.setattr("diffusion_grpo.rewards.server.serve.create_app", create_app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [each.close() for each in sockets])
    words = ["brightness", "--port", "0", "--max_megabytes", "3", "--max_waiting", "5"]
    assert cli.main(["rewards", "serve", *words]) == 0
    assert given == [(["brightness"], None, 5, 3 * 2**20)]
