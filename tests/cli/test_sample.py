"""`diffusion-grpo sample`: samples, scores and refusals."""

import pyarrow.parquet
import pytest
from command_line import SIZE, flags, refusal

from diffusion_grpo import cli


def test_sample_writes_images_and_rewards(model, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("a red fox\na blue house\na tree\n")
    words = ["sample", model, "--prompts", str(tmp_path / "prompts.txt"), "--reward_funcs", "brightness"]
    options = {**SIZE, "guidance_scale": 1.0, "max_prompts": 2, "pipeline_kwargs": '{"max_sequence_length": 8}'}
    for batch_size in (1, 2):
        folder = str(tmp_path / f"batch{batch_size}")
        assert cli.main([*words, *flags(output_dir=folder, batch_size=batch_size, **options)]) == 0
    tables = [pyarrow.parquet.read_table(tmp_path / f"batch{size}" / "samples.parquet").to_pylist() for size in (1, 2)]
    assert [row["prompt"] for row in tables[0]] == ["a red fox", "a blue house"]
    assert (tmp_path / "batch1" / "0001.png").is_file()
    assert [row["brightness"] for row in tables[0]] == pytest.approx(
        [row["brightness"] for row in tables[1]], abs=0.01
    )
    assert "brightness" in capsys.readouterr().out


def test_sample_refuses_what_it_cannot_use(model, tmp_path, capsys, no_model):
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    assert "unknown" in refusal(capsys, "sample", model, *prompts, "--reward_funcs", "nothing").lower()
    assert "JSON" in refusal(capsys, "sample", model, *prompts, "--pipeline_kwargs", "[1]")
    assert "float33" in refusal(capsys, "sample", model, *prompts, "--dtype", "float33")
    assert "no device of torch" in refusal(capsys, "sample", model, *prompts, "--device", "cdua")
    assert "model_index.json" in refusal(capsys, "sample", str(tmp_path), *prompts)
