"""`diffusion-grpo sample`: samples, scores and refusals."""

import pytest
import torch
from command_line import refusal

from diffusion_grpo import cli
from diffusion_grpo.sampling.settings import read_settings


def test_sample_refuses_what_it_cannot_use(model, tmp_path, capsys, no_model):
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    prompts = ["--prompts", str(tmp_path / "prompts.txt")]
    assert "unknown" in refusal(capsys, "sample", model, *prompts, "--reward_funcs", "nothing").lower()
    texts = '{"negative_prompt": ["blurry", "dark"]}'
    assert "is a list of texts" in refusal(capsys, "sample", model, *prompts, "--pipeline_kwargs", texts)
    assert "float33" in refusal(capsys, "sample", model, *prompts, "--dtype", "float33")
    assert "not a torch device" in refusal(capsys, "sample", model, *prompts, "--device", "cdua")
    assert "model_index.json" in refusal(capsys, "sample", str(tmp_path), *prompts)


@pytest.mark.parametrize("part", ["load_pipeline_to_sample", "write_samples"])
def test_memory_that_runs_out_is_a_sentence(model, tmp_path, capsys, monkeypatch, part):
    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    (tmp_path / "prompts.txt").write_text("a red fox\n")
    monkeypatch.setattr(f"diffusion_grpo.sampling.sample.{part}", run_out)
    words = ["sample", model, "--prompts", str(tmp_path / "prompts.txt"), "--output_dir", str(tmp_path / "out")]
    for option in ([], ["--offload_frozen", "cpu"]):
        assert cli.main([*words, *option]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: ") and "and 4 samples at a time do not fit into memory" in line
        assert ("set --offload_frozen cpu, a smaller --batch_size" in line) == (option == [])


def test_files_of_the_prompts_are_checked_before_the_model_is_loaded(tmp_path, capsys, no_model):
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableDiffusionImg2ImgPipeline"}')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a fox", "image": "gone.png"}\n')
    words = ["sample", str(tmp_path), "--prompts", str(tmp_path / "rows.jsonl")]
    assert "row 0" in refusal(capsys, *words, "--output_dir", str(tmp_path / "out"))


def test_sample_writes_into_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("a red fox\n")
    (tmp_path / "lora").mkdir()
    words = ["sample", "tiny", "--prompts", "~/prompts.txt", "--lora", "~/lora", "--output_dir", "~/out"]
    settings = read_settings(*cli.build_parser().parse_known_args(words))
    assert settings.output_dir == tmp_path / "out"
    assert settings.prompts == f"{tmp_path}/prompts.txt" and settings.lora == f"{tmp_path}/lora"
