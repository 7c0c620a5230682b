"""`diffusion-grpo rewards`: list and serve."""

from diffusion_grpo import cli
from diffusion_grpo.rewards import REWARDS
from diffusion_grpo.rewards.loading import CATALOGUE


def test_the_list_names_every_reward(capsys) -> None:
    assert cli.main(["rewards", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(REWARDS) and set(CATALOGUE) == set(REWARDS)


def test_a_port_that_does_not_exist_is_refused(capsys) -> None:
    assert cli.main(["rewards", "serve", "brightness", "--port", "99999"]) == 2
    assert "--port" in capsys.readouterr().err


def test_the_command_passes_its_limits_on(monkeypatch) -> None:
    given = []

    def create_app(rewards, token, max_waiting, max_bytes):
        given.append(([reward.name for reward in rewards], token, max_waiting, max_bytes))

    monkeypatch.setattr("diffusion_grpo.rewards.server.serve.create_app", create_app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: [each.close() for each in sockets])
    words = ["brightness", "--port", "0", "--max_megabytes", "3", "--max_waiting", "5"]
    assert cli.main(["rewards", "serve", *words]) == 0
    assert given == [(["brightness"], None, 5, 3 * 2**20)]
