"""Rows that differ in texts and numbers are told apart; files count by whether they are there."""

import tiny_pipelines
from datasets import Dataset, Image
from tiny_runs import SETTINGS

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.data.distinct import describe_text, find_distinct
from diffusion_grpo.data.inputs import PipelineInputs


def inputs_of(name, tmp_path):
    return PipelineInputs(tiny_pipelines.build(name)[0], DiffusionGRPOConfig(str(tmp_path), **SETTINGS))


def test_equal_rows_are_found_once(tmp_path):
    inputs = inputs_of("sd3", tmp_path)
    columns = {"prompt": ["a", "b", "a", "a"], "height": [16, 16, 16, 32], "mood": ["x", "y", "z", "x"]}
    dataset = Dataset.from_dict(columns)
    assert list(find_distinct(dataset, inputs).values()) == [0, 1, 3]
    assert list(find_distinct(dataset.with_format("torch"), inputs).values()) == [0, 1, 3]
    assert describe_text(dataset[3], inputs.accepted) == (("prompt", "a"), ("height", 32))


def test_a_transform_decides_what_is_equal(tmp_path):
    dataset = Dataset.from_dict({"prompt": ["a", "A", "a"], "height": [16, 32, 64]})

    def transform(rows):
        negative = ["grey" if height == 16 else "blurred" for height in rows["height"]]
        return {"prompt": [prompt.lower() for prompt in rows["prompt"]], "negative_prompt": negative}

    dataset.set_transform(transform)
    found = find_distinct(dataset, inputs_of("sd3", tmp_path))
    assert found == {(("prompt", "a"), ("negative_prompt", text)): row for row, text in enumerate(("grey", "blurred"))}


def test_files_count_by_whether_they_are_there(tmp_path):
    path = str(tmp_path / "a.png")
    tiny_pipelines.conditioned.draw_images()[0].save(path)
    inputs = inputs_of("flux_kontext", tmp_path)
    dataset = Dataset.from_dict({"prompt": ["a", "a", "a"], "image": [path, None, path]})
    for given in (dataset, dataset.cast_column("image", Image())):
        assert list(find_distinct(given, inputs).values()) == [0, 1]
