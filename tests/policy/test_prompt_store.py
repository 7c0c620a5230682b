"""A store answers `encode_prompt` prompt by prompt, and encodes what it lacks."""

import contextlib
import json
import os

import pytest
import torch

from diffusion_grpo.policy.prompt_calls import CannotJoin
from diffusion_grpo.policy.prompt_store import DiskShelf, MemoryShelf, PromptStore


class Pipe:
    """Encodes prompts by their length, and remembers what it was asked for."""

    _execution_device = torch.device("cpu")

    def __init__(self, lengths=False):
        self.asked, self.lengths, self.calls = [], lengths, 0

    def encode_prompt(self, prompt=None, negative_prompt=None, prompt_embeds=None):
        self.calls += 1
        if prompt_embeds is None:
            self.asked.append(list(prompt))
            prompt_embeds = torch.tensor([[float(len(text))] for text in prompt]).bfloat16()
        ends = torch.arange(len(prompt_embeds) + 1)
        return (prompt_embeds, ends) if self.lengths else (prompt_embeds, None, [torch.zeros(2)])


def make_store(pipe, shelf=None):
    @contextlib.contextmanager
    def watch():
        before, found = len(pipe.asked), [False]
        yield found
        found[0] = len(pipe.asked) > before

    return PromptStore(MemoryShelf() if shelf is None else shelf, watch)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_every_prompt_is_encoded_once(kind, tmp_path):
    pipe = Pipe()
    store = make_store(pipe, DiskShelf(tmp_path) if kind == "disk" else None)
    with store.serve(pipe):
        both, nothing, _ = pipe.encode_prompt(["cat", "horse"])
        store.clear()  # as at the next rollout
        again = pipe.encode_prompt(prompt=["horse", "cat", "cat"])[0]
    assert pipe.asked == [["cat"], ["horse"], ["cat", "cat"]]  # the last to see how two lie in memory
    assert both.flatten().tolist() == [3, 5] and again.flatten().tolist() == [5, 3, 3] and nothing is None
    assert both.dtype == torch.bfloat16 and store.encoded == 2
    assert pipe.encode_prompt(["cat"])[0].item() == 3 and len(pipe.asked) == 4  # outside as ever


def test_an_encoder_of_the_users_own_stays_on_the_pipeline():
    pipe = Pipe()
    pipe.encode_prompt = own = lambda prompt: (torch.zeros(len(prompt), 1),)
    with make_store(pipe).serve(pipe):
        assert pipe.encode_prompt(["cat"])[0].item() == 0
    assert pipe.encode_prompt is own


def test_equal_tensors_are_in_memory_once():
    pipe = Pipe()
    store = make_store(pipe)
    with store.serve(pipe):
        pipe.encode_prompt(["cat"]), pipe.encode_prompt(["horse"]), pipe.encode_prompt(["dog"])
    (cat, _, [ends]), (horse, _, [same]), (dog, _, _) = store.shelf.values()
    assert ends is same and cat is dog and cat is not horse


def test_a_folder_serves_later_runs(tmp_path):
    pipe = Pipe()
    with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
        pipe.encode_prompt(["cat", "horse"])
    names = sorted(path.name for path in (tmp_path / "prompts").iterdir())
    texts = [json.loads((tmp_path / "prompts" / name).read_text())["text"] for name in names]
    assert {text["prompt"] for text in texts} == {"cat", "horse"}
    assert len(list((tmp_path / "tensors").iterdir())) == 3  # what both share is there once
    later = Pipe()
    store = make_store(later, DiskShelf(tmp_path))
    with store.serve(later):
        assert later.encode_prompt(["horse", "cat"])[0].flatten().tolist() == [5, 3]
        store.clear()
        store.is_ahead = True  # only shapes count
        assert later.encode_prompt(["cat"])[0].shape == (1, 1)
    assert later.asked == [] and not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("damage", ["{", '{"text": {}}', '{"result": {"tensor": {"name": "gone"}}}'])
def test_a_damaged_file_counts_as_missing(damage, tmp_path):
    pipe = Pipe()
    with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
        pipe.encode_prompt(["cat"])
    (path,) = (tmp_path / "prompts").iterdir()
    path.write_text(damage)
    with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
        assert pipe.encode_prompt(["cat"])[0].item() == 3
    assert pipe.asked == [["cat"], ["cat"]]


def test_what_is_not_written_to_its_end_is_not_there(tmp_path, monkeypatch):
    shelf, real = DiskShelf(tmp_path), os.replace
    shelf.put("before", torch.ones(2), {})

    def fail(source, target):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="No space left"):
        shelf.put("key", torch.ones(2), {})  # of which the tensor is there
    with pytest.raises(OSError, match="No space left"):
        shelf.put("other", torch.zeros(2), {})
    monkeypatch.setattr("os.replace", real)
    assert "before" in shelf and "key" not in shelf and "other" not in shelf
    assert len(list(tmp_path.rglob("*.*"))) == 2  # a prompt and a tensor, and nothing half written


def test_a_tensor_of_the_right_size_that_cannot_be_read_is_written_anew(tmp_path):
    pipe = Pipe()
    with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
        pipe.encode_prompt(["cat"])
    for path in (tmp_path / "tensors").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    for _ in range(2):
        with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
            assert pipe.encode_prompt(["cat"])[0].item() == 3
    assert pipe.asked == [["cat"], ["cat"]]


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_truncated_tensor_counts_as_missing(is_ahead, tmp_path):
    pipe = Pipe()
    with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
        pipe.encode_prompt(["cat"])
    for path in (tmp_path / "tensors").iterdir():
        path.write_bytes(b"")
    store = make_store(pipe, DiskShelf(tmp_path))
    store.is_ahead = is_ahead
    with store.serve(pipe):
        assert pipe.encode_prompt(["cat"])[0].item() == 3
    with make_store(pipe, DiskShelf(tmp_path)).serve(pipe):
        assert pipe.encode_prompt(["cat"])[0].item() == 3
    assert pipe.asked == [["cat"], ["cat"]]


def test_embeddings_that_are_given_are_passed_through():
    pipe = Pipe()
    store, given = make_store(pipe), torch.ones(2, 1)
    with store.serve(pipe):
        for _ in range(2):
            assert pipe.encode_prompt(prompt_embeds=given)[0] is given
    assert pipe.calls == 3  # the first time it was not known what would come
    assert pipe.asked == [] and not store.shelf and store.encoded == 0


def test_results_that_cannot_be_joined_are_for_one_prompt_per_call():
    pipe = Pipe(lengths=True)
    store = make_store(pipe)
    with store.serve(pipe):
        assert pipe.encode_prompt(["cat"])[1].tolist() == [0, 1]
        with pytest.raises(CannotJoin, match="Pipe: encode_prompt does not return one result per prompt"):
            pipe.encode_prompt(["cat", "dog"])


def test_a_pipeline_may_change_the_lists_it_gets():
    pipe = Pipe()
    store = make_store(pipe)
    with store.serve(pipe):
        pipe.encode_prompt(["cat"])[2].clear()
        assert len(pipe.encode_prompt(["cat"])[2]) == 1
