"""Rewards on some of the processes: the values, tables and weights of rewards on all, and errors that end all."""

import json
import re
import signal

import pyarrow.parquet
import pytest
import rank_runs
import ranks_server
import torch
from plain_images import are_alike, random_image
from safetensors.torch import load_file

from diffusion_grpo import DiffusionGRPOConfig
from diffusion_grpo.distributed.context_parallel import ContextGroups
from diffusion_grpo.rewards import RewardError, score
from diffusion_grpo.rewards.answers import Batch
from diffusion_grpo.rewards.calls import Scoring
from diffusion_grpo.rewards.loading import load_rewards
from diffusion_grpo.rewards.overlap import Overlap, RolloutScoring
from diffusion_grpo.rewards.reward_processes import Assignment, SubsetScoring, is_scorer, scoring_process


def test_the_first_of_equal_blocks_score():
    for processes in range(1, 20):
        for count in range(1, processes + 1):
            scorers = [scoring_process(process, processes, count) for process in range(processes)]
            assert len(set(scorers)) == count and scorers[0] == 0 and scorers == sorted(scorers)
            assert all(scorers[own] == own for own in set(scorers))  # none of them sends its own samples away
            sizes = [scorers.count(own) for own in set(scorers)]
            assert max(sizes) - min(sizes) <= 1
    assert [scoring_process(process, 16, 2) for process in range(16)] == [0] * 8 + [8] * 8


def test_groups_stay_together_and_each_sample_is_scored_once():
    """Groups of six on processes that make four samples each, and context-parallel groups of two processes."""
    made = [list(range(4 * process, 4 * process + 4)) for process in range(6)]
    for copies in (1, 2):
        assignments = [Assignment.of(made, 6, 2, rank, copies) for rank in range(6 * copies)]
        assert sorted(position for assignment in assignments for position in assignment.taken) == list(range(24))
        scoring = {
            rank: {p // 6 for p in assignment.taken} for rank, assignment in enumerate(assignments) if assignment.taken
        }
        assert scoring == {0: {0, 1}, 3 * copies: {2, 3}}
        for rank, assignment in enumerate(assignments):
            assert is_scorer(ContextGroups(copies, 6 * copies, rank), 2) == bool(assignment.taken)
            for position, scorer in zip(assignment.own, assignment.scorers, strict=True):
                is_sender = rank % copies == 0
                assert (scorer is not None) == is_sender
                assert not is_sender or position in assignments[scorer].sources[rank]


class Wire:
    """A `SampleChannel` of one process, with packets of the others put in by hand."""

    def __init__(self):
        self.own, self.packets = 0, {}

    def open(self):
        pass

    def receive(self, process, is_waiting):
        waiting = self.packets.get(process)
        assert waiting or not is_waiting
        return waiting.pop(0) if waiting else None


@pytest.mark.parametrize("is_early", [True, False])
def test_calls_come_in_one_order_whoever_is_ahead(is_early):
    """Two groups of each of three processes, of which the second and the third are early or late."""
    assignment = Assignment.of([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], 2, 1, 0, 1)
    calls, wire = [], Wire()

    def noted(images, place):
        calls.append(place)
        return [float(own) for own in place]

    def begin(funcs, places, samples, latents):
        positions = [assignment.taken[place] for place in places]
        batch = Batch(images=samples, prompts=[""] * len(places), columns={"place": positions})
        return Scoring(funcs, batch)

    def others():
        for process in (1, 2):
            first, second = assignment.sources[process][:2], assignment.sources[process][2:]
            wire.packets[process] = [(own, [random_image("L")] * 2, None) for own in (first, second)]

    inner = RolloutScoring(
        load_rewards(noted), [p // 2 for p in assignment.taken], begin, Overlap(False, lambda: False)
    )
    with SubsetScoring(assignment, wire, inner, [0, 0, 1, 1]) as scoring:
        if is_early:
            others()
        scoring.add([0, 1, 2], [random_image("L")] * 3, None)
        assert len(scoring.scoring.parts) == (3 if is_early else 1)
        scoring.add([3], [random_image("L")], None)
        others() if not is_early else None
        scoring.wait()
        values = scoring.result(None, print, print)
    assert calls == [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10, 11]]
    assert values.flatten().tolist() == assignment.taken and scoring.count == 12
    assert are_alike(scoring.samples, [random_image("L")] * 4)


def test_more_scoring_processes_than_processes_are_refused(monkeypatch):
    def config(**settings):
        return DiffusionGRPOConfig("out", use_cpu=True, **settings)

    assert not config(reward_processes=3).scores_on_some  # one process has all to itself
    with pytest.raises(ValueError, match="reward_processes must be at least 1, got 0"):
        config(reward_processes=0)
    monkeypatch.setattr(DiffusionGRPOConfig, "world_size", 4)
    assert config(reward_processes=4).scores_on_some and not config().scores_on_some
    with pytest.raises(ValueError, match="reward_processes=5 is more than the 4 processes of this run; lower it"):
        config(reward_processes=5)
    with pytest.raises(ValueError, match="more than the 2 context-parallel groups of this run"):
        config(reward_processes=3, context_parallel_size=2)


def test_a_reward_without_memory_says_what_to_set():
    def hungry(images):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 15.00 GiB")

    with pytest.raises(RewardError, match="'hungry' ran out of memory .*15.00 GiB.*overlap_rewards: false.*offload"):
        score([hungry], images=[random_image("RGB")], prompts=["a"])


# Two processes

SMALL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "num_generations": 4,
    "num_inference_steps": 3,
    "max_steps": 3,
}
EVALUATED = SMALL | {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "num_generations_eval": 2,
    "held_out": ["a", "b", "c"],
    "rows": {"prompt": ["a red cat", "the sea", "a tree"], "mood": ["calm", "wild", "odd"]},
    "save_samples_steps": 1,
}


def ran(folder, processes, settings, rewards):
    """Its output, its log, its weights, and its tables without what depends on who wrote them."""
    ended = ranks_server.succeed(folder, processes, rank_runs.train, folder / "run", settings, rewards)
    log = json.loads((folder / "run" / "result.json").read_text())["log"]
    times = re.compile("time|memory|_per_second|total_flos")
    log = [{key: value for key, value in entry.items() if not times.search(key)} for entry in log]
    tables = {}
    for path in sorted((folder / "run").glob("*/*.parquet")):
        for row in pyarrow.parquet.read_table(path).to_pylist():
            tables[path.parent.name, row["step"], row["seed"]] = row
    return ended.logs, log, load_file(folder / "run" / "weights.safetensors"), tables


def test_one_process_scores_for_two_and_nothing_changes(tmp_path):
    """Networks, groups, latents, async rewards, logged numbers and columns, evaluation-only rewards and embeddings."""
    settings = EVALUATED | {"held_out": {"prompt": ["a", "b", "c"], "mood": ["x", "yy", "zzz"]}}
    outputs, logs, weights, tables = zip(
        *(
            ran(tmp_path / str(count), 2, settings | {"reward_processes": count}, "SEVERAL_REWARDS")
            for count in (None, 1)
        ),
        strict=True,
    )
    assert ["loaded by process" in own for both in outputs for own in both] == [True, True, True, False]
    assert len(tables[0]) == 2 * 16 + 6 and {"words"} < set(next(iter(tables[0].values())))
    assert tables[0] == tables[1]
    assert all(torch.equal(own, weights[1][name]) for name, own in weights[0].items())
    for one, other in zip(*logs, strict=True):
        assert one == pytest.approx(other, rel=1e-9)
    assert any("eval_diversity/Network" in entry and "eval_rewards/measured/mean" in entry for entry in logs[1])
    assert any("brightest" in entry for entry in logs[1])


@pytest.mark.distributed
def test_groups_on_two_processes_and_comparisons_of_all_samples_are_those_of_one_process(tmp_path):
    settings = SMALL | {"gradient_accumulation_steps": 2, "steps_per_generation": 6, "num_generations": 6}
    (_, logs, weights, tables), (_, other_logs, others, other_tables) = (
        ran(tmp_path / str(count), count, settings | {"reward_processes": 1}, "WHOLE_GROUPS") for count in (1, 2)
    )
    assert tables.keys() == other_tables.keys() and len(tables) == 12
    for key, row in tables.items():
        for name in ("prompt", "ranked", "shared", "words", "advantage"):
            assert row[name] == pytest.approx(other_tables[key][name], abs=1e-6)
    assert max((weights[name] - others[name]).abs().max() for name in weights) < 1e-6


@pytest.mark.parametrize(
    ("where", "codes", "words"),
    [
        ("reward", [1, 1], ["RewardError: .*'scorer' raised ValueError: the scorer is out", "RewardError: Process 0"]),
        pytest.param(
            "rollout",
            [1, 1],
            ["RankError: Process 1 of 2 failed with ValueError: no images", "ValueError: no images today"],
            marks=pytest.mark.distributed,
        ),
        pytest.param(
            "killed",
            [1, -signal.SIGKILL],
            ["RankError: Process 1 (gave no sign of life|broke off)", ""],
            marks=pytest.mark.distributed,
        ),
        pytest.param(
            "slow",
            [0, 0],
            ["", "Waiting for process 0, which computes the reward scorer"],
            marks=pytest.mark.distributed,
        ),
    ],
)
def test_who_fails_ends_both_and_who_is_slow_is_waited_for(tmp_path, where, codes, words):
    settings = SMALL | {"reward_processes": 1, "ddp_timeout": 4 if where in ("slow", "killed") else 30}
    ended = ranks_server.run(tmp_path, 2, rank_runs.fail_of_subset, tmp_path / "run", settings, where)
    assert ended.codes == codes and ended.seconds < 60, [log[-2000:] for log in ended.logs]
    assert all(re.search(word, log) for word, log in zip(words, ended.logs, strict=True)), ended.logs
    if where == "reward":
        assert (tmp_path / "run" / "checkpoint-2" / "trainer_state.json").is_file()
