"""`diffusion-grpo report` rewrites the page."""

import pytest
from command_line import refusal
from run_folders import make_run

from diffusion_grpo import cli
from diffusion_grpo.config.arguments import ScriptArguments


def test_report_writes_the_page_again(tmp_path, capsys):
    run = make_run(tmp_path / "run", updates=2, eval_every=1, prompts=2)
    assert cli.main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert (run / "summary.json").is_file()
    assert "run.json" in refusal(capsys, "report", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{}", "`columns` and `rows`"),
    ],
)
def test_a_file_that_holds_no_experiment_is_refused(tmp_path, capsys, content, message):
    run = make_run(tmp_path / "run", updates=2, eval_every=1, prompts=2)
    path = tmp_path / "experiment.json"
    if content is not None:
        path.write_text(content)
    assert message in refusal(capsys, "report", str(run), "--experiment", str(path))
    with pytest.raises(ValueError, match="^report_experiment: "):
        ScriptArguments(model="tiny", dataset="tiny", reward_funcs=["color"], report_experiment=str(path))
