"""What a checkpoint holds: folders that are whole, and the policy beside its average."""

import contextlib
from types import SimpleNamespace

import pytest
from transformers.trainer import TRAINER_STATE_NAME

from diffusion_grpo.training.checkpoints import Checkpointer, replace_folder
from diffusion_grpo.weights import files


class Log(list):
    """Keeps what is called, in order."""

    def note(self, name):
        return lambda *args, **kwargs: self.append((name, *args))


@pytest.fixture
def log(monkeypatch):
    log = Log()
    monkeypatch.setattr(files, "save_policy", lambda model, pipe, names, *args: log.append(("save", model, *args)))
    monkeypatch.setattr(files, "load_policy", lambda model, names, folder: log.append(("load", model, folder)))
    return log


class Weights:
    """Note when values are shown whole, and which."""

    def __init__(self, log):
        self.log = log

    @contextlib.contextmanager
    def show_whole(self, values=None, is_kept=True):
        self.log.append(("show", values, is_kept))
        yield
        self.log.append(("hide",))

    @contextlib.contextmanager
    def rewrite(self):
        yield

    def exact(self):
        return ["exact"]

    def shard(self, values):
        return values


class Average:
    shares = ["average"]

    def __init__(self, log):
        self.take = log.note("take")

    @contextlib.contextmanager
    def place(self, is_shown):
        yield


class Reference:
    def __init__(self, log):
        moved = log.note("approach")
        self.weights = SimpleNamespace(
            is_sharded=False, exact=lambda: ["reference"], approach=lambda *to: moved(to[1])
        )


class Loader:
    def __init__(self, log):
        self.save, self.resume_from = log.note("save rollout"), log.note("resume")


def make(log, *, has_average=False, has_old_policy=False, has_reference=False, is_writer=True):
    return Checkpointer(
        SimpleNamespace(sync_ref_model=True, should_save=is_writer, push_samples=False),
        SimpleNamespace(pipe=None, component=("transformer",)),
        SimpleNamespace(
            model="model",
            weights=Weights(log),
            average=Average(log) if has_average else None,
            old_policy=Average(log) if has_old_policy else None,
            reference=Reference(log) if has_reference else None,
            values=None,
        ),
        Loader(log),
    )


def test_an_average_is_published_and_the_policy_lies_beside_it(log, tmp_path):
    make(log, has_average=True).save_weights(tmp_path)
    assert [entry for entry in log if entry[0] == "save"] == [
        ("save", "model", tmp_path, False),
        ("save", "model", tmp_path / "policy", False),
    ]
    assert log.index(("show", ["average"], True)) < log.index(("show", None, True))


def test_an_old_policy_lies_beside_the_weights_and_is_read_back_before_the_policy(log, tmp_path):
    checkpointer = make(log, has_old_policy=True)
    checkpointer.save_beside_weights(tmp_path)
    (tmp_path / "old_policy").mkdir()
    assert log == [("show", ["average"], True), ("save", "model", tmp_path / "old_policy", False), ("hide",)]
    log.clear()
    (tmp_path / TRAINER_STATE_NAME).write_text("{}")
    checkpointer.load(tmp_path)
    loads = [("load", "model", tmp_path / "old_policy"), ("take", ["exact"]), ("load", "model", tmp_path)]
    assert log == [*loads, ("resume", tmp_path)]


def test_an_old_policy_that_a_checkpoint_lacks_starts_from_its_policy(log, tmp_path, caplog):
    (tmp_path / TRAINER_STATE_NAME).write_text("{}")
    (tmp_path / "policy").mkdir()  # beside an average, which is no policy
    make(log, has_old_policy=True).load(tmp_path)
    policy = ("load", "model", tmp_path / "policy")
    assert log == [policy, ("take", ["exact"]), policy, ("resume", tmp_path)]
    assert "contains no old policy: it starts from the policy's weights there" in caplog.text


def test_a_moving_reference_is_read_where_there_is_one(log, tmp_path, caplog):
    (tmp_path / TRAINER_STATE_NAME).write_text("{}")
    make(log, has_reference=True).load(tmp_path)
    assert log == [("load", "model", tmp_path), ("resume", tmp_path)]
    assert "contains no reference: it starts from the model as it was before training" in caplog.text
    caplog.clear(), log.clear()
    (tmp_path / "reference").mkdir()
    make(log, has_reference=True).load(tmp_path)
    reference = [("load", "model", tmp_path / "reference"), ("approach", 1.0)]
    assert log == [*reference, ("load", "model", tmp_path), ("resume", tmp_path)] and not caplog.text


def test_a_moving_reference_lies_beside_the_weights(log, tmp_path):
    make(log, has_reference=True).save_beside_weights(tmp_path)
    assert log == [("show", ["reference"], True), ("save", "model", tmp_path / "reference", False), ("hide",)]


def test_processes_that_write_nothing_take_part_in_showing_the_weights(log, tmp_path):
    make(log, is_writer=False).save_weights(tmp_path)
    assert log == [("show", None, False), ("hide",)]


def test_a_folder_is_replaced_and_leaves_nothing_aside(tmp_path):
    for name in ("new", "old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"] and (tmp_path / "old" / "new").exists()
    (tmp_path / "again").mkdir()
    replace_folder(tmp_path / "again", tmp_path / "first")
    assert (tmp_path / "first").is_dir()
