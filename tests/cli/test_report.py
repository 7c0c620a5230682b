"""`diffusion-grpo report` rewrites the page."""

from command_line import refusal
from run_folders import make_run

from diffusion_grpo import cli


def test_report_writes_the_page_again(tmp_path, capsys):
    run = make_run(tmp_path / "run", updates=2, eval_every=1, prompts=2)
    assert cli.main(["report", str(run)]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert (run / "summary.json").is_file()
    assert "run.json" in refusal(capsys, "report", str(tmp_path))
