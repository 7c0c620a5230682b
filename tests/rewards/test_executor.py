"""Rewards beside the rollout: the same results as after it, whoever is ready first, and what may not be overlapped."""

import asyncio
import contextlib
import multiprocessing
import random
import sqlite3
import threading
import time
import weakref

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from tiny_runs import are_equal, brightness, finished_run, logged, trained_weights, trainer_for

from diffusion_grpo.media.samples import as_tensor
from diffusion_grpo.rewards import RemoteReward, RewardError, batchwise, groupwise, load_rewards, takes_tensors
from diffusion_grpo.rewards.call import Batch, run_in_loop, warn_unscored
from diffusion_grpo.rewards.executor import Executor, GroupScoring

IMAGES = [Image.new("RGB", (8, 8), (shade, shade, shade)) for shade in range(0, 240, 20)]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
CALLS = [[0, 1, 2, 3], [4, 6, 5, 7], [8, 9, 11, 10]]  # of the pipeline; they cut groups and change the order


def make_executor(overlaps=True, is_tried=True):
    """An executor that has seen a first scoring, or none."""
    executor = Executor(overlaps, lambda: False)
    with executor.watch_generator() if is_tried else contextlib.nullcontext():
        return executor


def open_rollout(rewards, executor, folder=None):
    def make_batch(places, samples, latents):
        rows = {"prompts": [f"prompt {GROUPS[place]}" for place in places], "columns": {"place": places}}
        groups = [GROUPS[place] for place in places]
        taken = [reward.name for reward in rewards]
        return Batch(images=samples, **rows, groups=groups, indices=places, taken=taken)

    rewards = load_rewards(rewards)
    return GroupScoring(rewards, GROUPS, make_batch, executor, folder)


def add_samples(scoring, between=lambda: None):
    for places in CALLS:
        scoring.add(places, [IMAGES[place] for place in places], None)
        between()


def rollout(rewards, overlaps, folder=None, between=lambda: None, executor=None):
    """Values, metrics and columns of a rollout of three calls."""
    metrics, scored = [], []
    with open_rollout(rewards, executor or make_executor(overlaps), folder) as scoring:
        add_samples(scoring, between)
        values, columns = scoring.finish(lambda *entry: metrics.append(entry), scored.append)
    assert sum(scored) == 12
    return values, metrics, columns


def shade(images, place, log_metric, log_extra):
    time.sleep(random.uniform(0, 0.02))
    log_metric("first", place[0])
    log_extra("is_dark", [image.getpixel((0, 0))[0] < 100 for image in images])
    return [None if p == 5 else image.getpixel((0, 0))[0] for image, p in zip(images, place, strict=True)]


async def slow(images, place, log_metric):
    await asyncio.sleep(random.uniform(0, 0.05))
    log_metric("first", -place[0])
    assert not torch.is_grad_enabled()
    return [float(p) for p in place]


@groupwise
def rank(images, prompts, place):
    assert len(set(prompts)) == 1 and len(images) == 3
    return [sum(p > other for other in place) for p in place]


@batchwise
def share(images, place):
    return [p / sum(place) for p in place]


def test_the_same_values_metrics_and_columns_as_without_overlap() -> None:
    rewards = [shade, slow, rank, share]
    (values, metrics, columns), (others, other_metrics, other_columns) = (
        rollout(rewards, is_wanted) for is_wanted in (True, False)
    )
    torch.testing.assert_close(values, others, rtol=0, atol=0, equal_nan=True)
    assert metrics == other_metrics and columns == other_columns
    assert metrics == [("first", 0), ("first", 0), ("first", 3), ("first", -3), ("first", 6), ("first", -6)]
    assert values[:, 0].isnan().nonzero().flatten().tolist() == [5]
    assert values[:, 1].tolist() == list(range(12)) and values[:, 2].tolist() == [0, 1, 2] * 4
    assert values[:, 3].tolist() == pytest.approx([p / 66 for p in range(12)])
    assert columns["is_dark"] == [True] * 5 + [False] * 7


def test_rewards_run_while_the_next_samples_are_made() -> None:
    """Each waits for something that only happens after its samples were handed over."""
    is_made, is_awaited = threading.Event(), threading.Event()

    def waits(images):
        assert is_made.wait(10)
        return [0.0] * len(images)

    async def awaits(images):
        is_awaited.set()
        return [0.0] * len(images)

    def between():
        is_made.set()
        assert is_awaited.wait(10)

    others = threading.enumerate()
    assert rollout([waits, awaits], True, between=between)[0].shape == (12, 2)
    for _ in range(100):
        left = [thread for thread in threading.enumerate() if thread.name == "rewards" and thread not in others]
        if not left:
            break
        time.sleep(0.05)
    assert not left  # the thread ends with the run, whose `Executor` is gone


def test_failures_are_those_without_overlap(tmp_path) -> None:
    def broken(images, place):
        if 4 in place:
            raise ConnectionError("gone")
        return [float("nan") if p == 10 else 0.0 for p in place]

    async def late(images, place):
        await asyncio.sleep(0.05 if 0 in place else 0)
        return [1.0] * (len(place) - (4 in place))

    errors, files = [], []
    for is_wanted in (True, False):
        folder = tmp_path / str(is_wanted)
        with pytest.raises(RewardError) as error:
            rollout([late, broken], is_wanted, folder)
        errors.append(str(error.value).replace(str(folder), ""))
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert errors[0] == errors[1] and files[0] == files[1]
    assert "'late' returned 2 values, expected 3" in errors[0] and sorted(files[0]) == ["late-3.json", "late-3.png"]


def test_the_first_samples_are_scored_when_all_are_made() -> None:
    seen, executor = [], make_executor(is_tried=False)

    def noted(images, place):
        seen.append((threading.current_thread().name, place))
        return [float(p) for p in place]

    for turn in range(2):
        with open_rollout(noted, executor) as scoring:
            add_samples(scoring)
            assert bool(turn) == executor.may_overlap and (turn or not seen)
            assert scoring.finish(print)[0][:, 0].tolist() == list(range(12))
    assert [place for _, place in seen[: len(seen) // 2]] == [place for _, place in seen[len(seen) // 2 :]]
    assert {name for name, _ in seen} == {"rewards"}


def test_calls_of_one_reward_share_its_requests(monkeypatch) -> None:
    """Three blocks of samples at once make no more requests at a server than one."""
    under_way, most = [], []

    async def ask(self, client, server, rows, write):
        under_way.append(server.url)
        most.append(max(under_way.count(url) for url in under_way))
        await asyncio.sleep(0.01)
        under_way.remove(server.url)
        return [1.0] * len(rows)

    monkeypatch.setattr(RemoteReward, "score_batch", ask)
    reward = RemoteReward(["http://a", "http://b"], "x", batch_size=1, concurrency=2)
    assert rollout([reward], True)[0].sum() == 12 and max(most) == 2
    assert rollout([reward], False)[0].sum() == 12 and max(most) == 2


def test_a_reward_that_ends_the_process_ends_it() -> None:
    def leaves(images):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        rollout([leaves], True)


def test_ctrl_c_in_a_reward_of_the_main_thread_calls_no_other() -> None:
    called = []

    def interrupted(images, place):
        called.append(place)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout([interrupted, shade], False)
    assert called == [[0, 1, 2]]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_tensors_made_for_rewards_do_not_outlive_their_calls(is_wanted, monkeypatch) -> None:
    made = []

    def make(samples):
        tensor = as_tensor(samples)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr("diffusion_grpo.rewards.call.as_tensor", make)

    @takes_tensors
    def plain(images):
        return images.mean((1, 2, 3, 4))

    @takes_tensors
    async def waiting(images):
        await asyncio.sleep(0.01)
        return plain(images)

    with open_rollout([plain, waiting], make_executor(is_wanted)) as scoring:
        add_samples(scoring)
        values, _ = scoring.finish(print)
        assert len(made) == len(scoring.scorings) == 3 and all(tensor() is None for tensor in made)
    assert torch.equal(values[:, 0], values[:, 1])
    assert values[:, 0].tolist() == pytest.approx([image.getpixel((0, 0))[0] / 255 for image in IMAGES])


def test_a_logged_column_may_not_have_the_name_of_a_reward_that_is_called_later() -> None:
    def early(images, log_extra):
        log_extra("share", [0] * len(images))
        return [0.0] * len(images)

    with pytest.raises(RewardError, match="'early'.*log_extra.'share'. has the name of another column"):
        rollout([early, share], True)


def test_what_draws_random_numbers_is_not_overlapped(caplog) -> None:
    def drawing(images):
        return torch.rand(len(images)).tolist()

    found = []
    for overlaps in (True, False):
        executor = make_executor(overlaps, is_tried=False)
        torch.manual_seed(0)
        values = []
        for _ in range(2):
            with torch.random.fork_rng():  # as around a call of the pipeline
                torch.manual_seed(1)
            with open_rollout(drawing, executor) as scoring:
                add_samples(scoring)
                assert len(scoring.waiting) == 3  # nothing was scored during the rollout
                values.append(scoring.finish(print)[0])
        found.append(torch.stack(values))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert "a reward draws from torch's global generator" in caplog.text
    pipeline = Executor(True, lambda: True)
    rollout([shade], True, executor=pipeline)
    assert not pipeline.may_overlap and "the pipeline draws" in caplog.text


def test_a_network_that_makes_room_for_the_rollout_is_not_overlapped() -> None:
    class Offloaded:
        offload = True

        def __call__(self, images):
            assert len(images) == 12
            return [1.0] * len(images)

    assert rollout([Offloaded()], True)[0].sum() == 12


def test_a_run_is_the_same_with_and_without_overlap_and_whatever_rewards_do(tmp_path, monkeypatch) -> None:
    """Weights, tables and metrics; also beside rewards that draw numbers and enable gradients."""

    @groupwise
    async def ranked(images, log_metric):
        log_metric("brightest", max(brightness(images)))
        shades = brightness(images)
        return [sum(shade > other for other in shades) for shade in shades]

    def careless(images):
        torch.manual_seed(len(images))
        torch.rand(3), np.random.rand(), random.random()
        torch.set_grad_enabled(True)
        return [torch.zeros(()) for _ in images]

    made = []

    def note_executor(*args):
        made.append(Executor(*args))
        return made[-1]

    monkeypatch.setattr("diffusion_grpo.training.build.Executor", note_executor)
    runs = {}
    for name, rewards, overlap_rewards in (
        ("beside", {brightness: 1, ranked: 0.1}, True),
        ("after", {brightness: 1, ranked: 0.1}, False),
        ("careless", {brightness: 1, ranked: 0.1, careless: 0}, True),
    ):
        trainer = finished_run(
            tmp_path / name, rewards=rewards, overlap_rewards=overlap_rewards, num_generations=2, num_inference_steps=3
        )
        assert made[-1].may_overlap == (name == "beside") and torch.is_grad_enabled()
        columns = [
            pyarrow.parquet.read_table(path) for path in sorted((tmp_path / name / "samples").glob("*.parquet"))
        ]
        metrics = [logged(trainer, key) for key in ("reward", "brightest", "diversity", "ratio/max_error")]
        tables = [table.drop_columns([c for c in table.column_names if c == "careless"]) for table in columns]
        runs[name] = trained_weights(trainer), tables, metrics
    for name in ("after", "careless"):
        assert are_equal(runs["beside"][0], runs[name][0])
        assert runs["beside"][1:] == runs[name][1:]
    assert runs["beside"][2][3] == [0.0, 0.0]


def test_ordinary_rewards_keep_their_thread_in_rollouts_and_evaluations(tmp_path):
    """A connection to a database works in the thread that opened it, and nowhere else."""
    opened, threads = [], set()

    def connected(images, **columns):
        threads.add(threading.current_thread())
        if not opened:
            opened.append(sqlite3.connect(":memory:"))
        (one,) = opened[0].execute("select 1").fetchone()
        # the thread has an event loop, as the main thread has until something calls asyncio.run
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
        return [shade * one for shade in brightness(images)]

    @batchwise
    def together(images, **columns):
        return connected(images)

    trainer_for(tmp_path, rewards=[connected, together], max_steps=1, eval_strategy="steps", eval_steps=1).train()
    assert len(threads) == 1 and threading.main_thread() not in threads


def test_a_failed_rollout_leaves_the_thread_to_the_next_one():
    """What is queued or awaited is dropped, and the next rollout does not wait for it."""
    executor, begun, let_go, later = make_executor(), threading.Event(), threading.Event(), []

    def slow_reward(images, place):
        begun.set()
        assert let_go.wait(10)
        later.append(place)
        return [0.0] * len(images)

    with pytest.raises(KeyboardInterrupt), open_rollout(slow_reward, executor) as scoring:
        add_samples(scoring)
        assert begun.wait(10)
        raise KeyboardInterrupt
    let_go.set()
    assert rollout([shade], True, executor=executor)[0].shape == (12, 1)
    assert len(later) == 1  # the one that had begun


def test_samples_count_as_unscored_only_if_no_reward_scored_them(recwarn) -> None:
    """Rewards that wait for the rollout are in another part."""
    warn_unscored.cache_clear()
    values, *_ = rollout([lambda images: [None] * len(images), share], True)
    assert values[:, 0].isnan().all() and not values[:, 1].isnan().any() and not recwarn.list


def _answer_in_child(answers) -> None:
    answers.put(run_in_loop(asyncio.sleep(0, "child")).result(10))


def test_a_forked_process_gets_a_loop_of_its_own():
    """The thread of the parent's loop does not exist there."""
    run_in_loop(asyncio.sleep(0)).result(10)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer_in_child, args=(answers,))
    child.start()
    child.join(30)
    is_alive = child.is_alive()
    child.kill()
    assert not is_alive and child.exitcode == 0 and answers.get() == "child"
