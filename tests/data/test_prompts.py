"""Prompts from every source, refusals with the sentence a user reads, and the order of rows."""

import json

import datasets
import pytest

from diffusion_grpo import tiny
from diffusion_grpo.data.prompts import check_dataset, choose_evaluated, load_given, load_prompts, read_prompts
from diffusion_grpo.rewards.geneval import read_requirements

PROMPTS = ["a cat", "snow on the Zugspitze, août", 'the word "RAIN", in red']
COLORS = ["black", "white", "red"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """datasets keeps its copies where the test ends."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def table():
    return datasets.Dataset.from_dict({"prompt": PROMPTS, "color": COLORS})


def write_jsonl(table, path):
    path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")


WRITERS = {
    "prompts.txt": lambda table, path: path.write_text(
        "\n  ".join(["", *table["prompt"], "\n"]), encoding="utf-8-sig"
    ),
    "prompts.jsonl": write_jsonl,
    "prompts.json": lambda table, path: path.write_text(json.dumps(list(table))),
    "prompts.csv": lambda table, path: table.to_csv(path),
    "prompts.parquet": lambda table, path: table.to_parquet(path),
    "saved": lambda table, path: table.save_to_disk(path),
    "splits": lambda table, path: datasets.DatasetDict(train=table, test=table.select([0])).save_to_disk(path),
}


@pytest.mark.parametrize(
    ("train", "test", "columns"),
    [("train.txt", "test.txt", ["prompt"]), ("train_metadata.jsonl", "test_metadata.jsonl", ["prompt", "tag"])],
)
def test_folders_in_flow_grpos_layout(tmp_path, train, test, columns):
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name in (train, test):
        row = json.dumps({"prompt": f"a {name}", "tag": "colors"})
        (folder / name).write_text((row if name.endswith(".jsonl") else f"a {name}") + "\n")
    (folder / "README.md").write_text("not a split")
    for split, name in (("train", train), ("test", test)):
        loaded = load_prompts(str(folder), split)
        assert loaded["prompt"][:] == [f"a {name}"] and loaded.column_names == columns
        check_dataset(loaded)
    with pytest.raises(ValueError, match="has no split 'validation'; it has test, train"):
        load_prompts(str(folder), "validation")
    (folder / f"train{'.jsonl' if train.endswith('.txt') else '.txt'}").write_text("{}")
    with pytest.raises(ValueError, match="for 'train'; keep one of them"):
        load_prompts(str(folder))


@pytest.mark.parametrize("name", WRITERS)
def test_sources(name, table, tmp_path):
    WRITERS[name](table, tmp_path / name)
    loaded = load_prompts(str(tmp_path / name))
    check_dataset(loaded)
    assert list(loaded["prompt"]) == PROMPTS
    if name != "prompts.txt":
        assert list(loaded["color"]) == COLORS


def test_folders_have_splits(table, tmp_path):
    for name in ("files", "texts"):
        (tmp_path / name).mkdir()
    table.to_parquet(tmp_path / "files" / "train-0.parquet")
    table.select([1]).to_parquet(tmp_path / "files" / "test-0.parquet")
    assert list(load_prompts(str(tmp_path / "files"), "test")["prompt"]) == PROMPTS[1:2]
    (tmp_path / "texts" / "words-train.txt").write_text("a cat\na dog\n")  # `datasets` reads them as `text`
    assert load_prompts(str(tmp_path / "texts"))["prompt"][:] == ["a cat", "a dog"]
    WRITERS["splits"](table, tmp_path / "saved")
    assert list(load_prompts(str(tmp_path / "saved"), "test")["prompt"]) == PROMPTS[:1]
    with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
        load_prompts(str(tmp_path / "saved"), "validation")


def test_changed_file_is_read_again(table, tmp_path):
    write_jsonl(table, tmp_path / "prompts.jsonl")
    load_prompts(str(tmp_path / "prompts.jsonl"))
    write_jsonl(table.select([2]), tmp_path / "prompts.jsonl")
    assert list(load_prompts(str(tmp_path / "prompts.jsonl"))["prompt"]) == PROMPTS[2:]


def test_files_are_not_looked_for_on_the_hub_and_all_else_is(tmp_path, monkeypatch, table):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("asked"))
    (tmp_path / "run.yaml").write_text("model: tiny\n")
    for name, message in (("absent.txt", "There is no file"), ("run.yaml", "run.yaml is not a file of prompts")):
        with pytest.raises(ValueError, match=message):
            load_prompts(str(tmp_path / name))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda source, split: asked.append((source, split)) or table)
    assert load_prompts("someone/prompts", "test") is table and asked == [("someone/prompts", "test")]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
def test_an_empty_or_broken_file_is_refused_in_a_sentence(name, tmp_path):
    path = tmp_path / name
    path.touch()
    with pytest.raises(ValueError, match=f"{name} is empty"):
        load_prompts(str(path))
    broken = b'{"prompt": "a"}\n{"prompt": \n' if "js" in name else b"a\nb,c"
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=f"{name} cannot be read as {path.suffix[1:]}: .+"):
        load_prompts(str(path))


def test_the_broken_file_of_a_folder_is_named(tmp_path):
    (tmp_path / "prompts").mkdir()
    for name, end in (("a", ""), ("b", '{"prompt": \n')):
        (tmp_path / "prompts" / f"{name}.jsonl").write_text('{"prompt": "a cat"}\n' + end)
    with pytest.raises(ValueError, match="b.jsonl cannot be read as jsonl: .+"):
        load_prompts(str(tmp_path / "prompts"))


def test_tiny_is_the_embedded_models_prompts():
    assert load_prompts("tiny", "test")["prompt"][:] == tiny.prompts("test")["prompt"][:]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"caption": ["a"], "color": ["b"]}, r"eval_dataset has no column 'prompt', only \['caption', 'color'\]"),
        ({"prompt": []}, "eval_dataset is empty"),
        ({"prompt": ["a", None, "b"]}, "eval_dataset.* row 1 .*: None"),
        ({"prompt": [["a"], ["b"]]}, r"row 0 .*: \['a'\]"),
    ],
)
def test_refusals(columns, message):
    with pytest.raises(ValueError, match=message):
        check_dataset(datasets.Dataset.from_dict(columns), "eval_dataset")


def test_other_types_are_refused(table):
    advice = {"without streaming": table.to_iterable_dataset(), "splits": datasets.DatasetDict(), "a path": ("a", "b")}
    for words, given in advice.items():
        with pytest.raises(ValueError, match=f"of type {type(given).__name__}.*{words}"):
            check_dataset(given)


def test_prompts_are_read_many_at_a_time(monkeypatch):
    """In any order and format the column gives what the rows give, and no row is read by itself."""
    rows = {"prompt": [f"prompt {i}, août" for i in range(2500)], "height": [16] * 2500}
    stored = datasets.Dataset.from_dict(rows)
    stored = datasets.concatenate_datasets([stored, stored.select(range(10))])
    orders = stored, stored.shuffle(seed=0), stored.select([7, 3, 3]), stored.select(range(5, 2000))
    orders = {dataset: [row["prompt"] for row in dataset] for dataset in orders}

    def refuse(*args):
        raise AssertionError("a row was read by itself")

    monkeypatch.setattr(datasets.arrow_dataset.Column, "__iter__", refuse)
    monkeypatch.setattr(datasets.Dataset, "__iter__", refuse)
    for dataset, expected in orders.items():
        for form in (None, "torch", "numpy", "pandas", "arrow"):
            formatted = dataset.with_format(form)
            check_dataset(formatted)
            assert list(read_prompts(formatted)) == expected
    calls = []

    def transform(rows):
        calls.append(len(rows["prompt"]))
        return {"prompt": [prompt.upper() for prompt in rows["prompt"]]}

    transformed = stored.with_transform(transform)
    check_dataset(transformed)
    assert list(read_prompts(transformed))[:2] == ["PROMPT 0, AOÛT", "PROMPT 1, AOÛT"] and len(calls) < 200


def test_the_row_of_a_wrong_prompt_is_counted_as_the_rows_are():
    dataset = datasets.Dataset.from_dict({"prompt": ["a"] * 3000 + [None]})
    for number, given in ((3000, dataset), (0, dataset.select([3000, 1])), (2, dataset.select([1, 2, 3000]))):
        with pytest.raises(ValueError, match=f"in row {number} .*: None"):
            check_dataset(given.with_format("numpy"))


def test_what_an_evaluation_measures():
    dataset, other = (datasets.Dataset.from_dict({"prompt": [prompt]}) for prompt in "ab")
    assert choose_evaluated(None, dataset) == {"eval_dataset": dataset}
    assert choose_evaluated(other, dataset) == {"eval_dataset": other}
    named = {"cats": dataset, "dogs": other}
    assert choose_evaluated(None, named) == named
    assert choose_evaluated("dogs", named) == {"eval_dataset": other}


@pytest.mark.parametrize(
    ("given", "own", "message"),
    [
        (None, {}, "^eval_dataset={} has nothing to evaluate"),
        ("dogs", {"cats": None, "birds": None}, "no evaluation dataset 'dogs'; there are cats, birds"),
        ({"a/b": datasets.Dataset.from_dict({"prompt": ["a"]})}, None, "The evaluation dataset's name"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(given, own, message):
    with pytest.raises(ValueError, match=message):
        choose_evaluated(given, own)


# GenEval's own form: entries of `include` have other keys from row to row, and a position is a list of two types
GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {
        "tag": "counting",
        "include": [{"class": "clock", "count": 2}],
        "exclude": [{"class": "clock", "count": 3}],
        "prompt": "a photo of two clocks",
    },
    {"tag": "colors", "include": [{"class": "car", "count": 1, "color": "red"}], "prompt": "a photo of a red car"},
    {
        "tag": "position",
        "include": [{"class": "cat", "count": 1}, {"class": "dog", "count": 1, "position": ["right of", 0]}],
        "prompt": "a photo of a dog right of a cat",
    },
]


@pytest.mark.parametrize("rows", [GENEVAL, GENEVAL[:3], GENEVAL[::-1]], ids=["all", "no positions", "backwards"])
@pytest.mark.parametrize("form", ["columns", "metadata", "metadata as text"])
def test_geneval_metadata_reaches_the_reward(tmp_path, rows, form):
    if form != "columns":
        wrap = json.dumps if form == "metadata as text" else lambda metadata: metadata
        rows = [{"prompt": row["prompt"], "metadata": wrap(row)} for row in rows]
    (tmp_path / "geneval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load_prompts(str(tmp_path / "geneval.jsonl"))
    check_dataset(dataset)
    given = [dataset[place] for place in range(len(rows))]
    columns = {name: [row[name] for row in given] for name in dataset.column_names if name != "prompt"}
    for place, row in enumerate(given):
        (wanted,) = [known for known in GENEVAL if known["prompt"] == row["prompt"]]
        found = read_requirements(columns, place)
        assert found["include"] == wanted["include"] and found["tag"] == wanted["tag"]
        assert found["exclude"] == wanted.get("exclude", [])


def test_tables_keep_their_columns_and_prompts_are_texts(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text("prompt\na cat, sitting\na dog, running\n")
    with pytest.raises(ValueError, match="prompts.csv cannot be read as csv"):
        load_prompts(path)
    path.write_text('prompt,text,score\n1984,"NA, or\nnone",1.5\n"a ""RAIN"" sign",x,\n')
    assert load_prompts(path)[:] == {
        "prompt": ["1984", 'a "RAIN" sign'],
        "text": ["NA, or\nnone", "x"],
        "score": [1.5, None],
    }


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl", "prompts.csv"])
def test_another_encoding_is_refused_with_file_and_line(name, tmp_path):
    path, row = tmp_path / name, b'{"prompt": "%s"}\n' if name.endswith("jsonl") else b"%s\n"
    path.write_bytes(row % b"prompt" + row % b"a girl\x92s hat")
    with pytest.raises(ValueError, match=f"{name}, line 2: .*UTF-8"):
        load_prompts(path)


VERL = [[{"role": "user", "content": prompt}] for prompt in ("a cat", "a dog")]
VIDEO = {"image_path": None, "num_inference_steps": 40, "height": 480}
CUT = {"prompt_embed_path": "0.pt", "prompt_attention_mask": "0.pt", "length": 1}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.json", ["a cat", "a dog"]),  # as in HPDv2
        ("rows.json", [{"Prompt": "a cat", "Category": "x"}, {"Prompt": "a dog", "Category": "y"}]),
        ("verl.json", [{"prompt": prompt, "data_source": "x"} for prompt in VERL]),
        ("validation.json", {"data": [{"caption": "a cat", **VIDEO}, {"caption": "a dog", **VIDEO}]}),  # FastVideo
        ("videos2caption.json", [{"caption": "a cat", **CUT}, {"caption": "a dog", **CUT}]),  # DanceGRPO
    ],
)
def test_the_forms_of_other_projects_are_read(name, content, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    loaded = load_prompts(str(tmp_path / name))
    check_dataset(loaded)
    assert loaded["prompt"][:] == ["a cat", "a dog"]
    assert "prompt_attention_mask" not in loaded.column_names
    assert ("height" in loaded.column_names) == ("data" in content)


def test_the_column_of_prompts_is_chosen(table):
    rows = table.add_column("words", ["one", "two", "three"])
    assert load_prompts(rows) is rows
    chosen = load_prompts(rows, prompt_column="words")
    assert chosen["prompt"][:] == chosen["words"][:] == ["one", "two", "three"]
    assert load_prompts(chosen, prompt_column="words")[:] == chosen[:]
    assert load_prompts(table.rename_column("prompt", "text").remove_columns("color"))["prompt"][:] == PROMPTS
    with pytest.raises(ValueError, match="prompt_column"):
        load_prompts(rows, prompt_column="wrods")
    unclear = load_prompts(table.rename_column("prompt", "line"))  # two columns of texts
    assert unclear.column_names == ["line", "color"]


def test_several_messages_are_no_prompt():
    with pytest.raises(ValueError, match="not a string.*content"):
        check_dataset(load_prompts([{"prompt": VERL[0]}, {"prompt": VERL[0] * 2}]))


def test_lists_are_datasets():
    assert load_prompts(["a", "b"])["prompt"][:] == ["a", "b"]
    assert load_prompts([{"prompt": "a", "height": 16}])[:] == {"prompt": ["a"], "height": [16]}
    held_out = load_given({"cats": ["a"], "dogs": [{"caption": "b"}]}, "test", None)
    assert {name: dataset["prompt"][:] for name, dataset in held_out.items()} == {"cats": ["a"], "dogs": ["b"]}


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path):
    (tmp_path / "prompts.txt").write_bytes("a cat\u2028on a mat\r\nsecond\x0cpart\n".encode())
    assert load_prompts(str(tmp_path / "prompts.txt"))["prompt"][:] == ["a cat\u2028on a mat", "second\x0cpart"]


def test_the_home_folder_may_be_written_short(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("a cat\n")
    assert load_prompts("~/prompts.txt")["prompt"][:] == ["a cat"]
