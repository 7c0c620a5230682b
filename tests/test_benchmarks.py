"""The benchmarks run and read what they measure; no time is asserted."""

import json
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import ranks_server
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import compiled
import distributed
import eval_steps
import half_precision
import recipe_results
import recipe_run
import recipe_settings
import recipes
from recipe_settings import LEARNING_RATES, LOWER_RATE, RECIPES, Recipe

from benchmarks import attention, weight_sizes
from diffusion_grpo.policy.trajectory import ROUNDING_OF_TWO
from diffusion_grpo.run.records import write_json

DOCS = Path(__file__).parent.parent / "docs"


def test_time_in_several_collectives_at_once_counts_once():
    assert distributed.covered([(0, 2), (1, 3), (10, 11), (1, 2)]) == 4
    assert distributed.covered([]) == 0


def test_two_processes_are_timed_and_their_collectives_seen(tmp_path):
    ranks_server.succeed(tmp_path, 2, distributed.work, tmp_path, "DDP", True, 8, 1)
    found = json.loads((tmp_path / "times.json").read_text())
    assert found["wrapper"] == "DistributedDataParallel"
    assert 0 < found["share"] < 1
    # the parts are means over both processes, which do not begin and end a step together
    assert 0 < found["rollout"] + found["update"] < 1.2 * found["step"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "wrapper"), [("DDP", "DistributedDataParallel"), ("ZeRO-3", "DeepSpeedEngine"), ("FSDP2", "FSDP")]
)
def test_each_mode_is_what_it_is_called(mode, wrapper):
    found = distributed.measured(mode, is_lora=True, samples=8, rounds=1)
    assert found["wrapper"].startswith(wrapper) and 0 < found["share"] < 1


def test_ratios_are_those_to_one_process_and_to_ddp():
    step = {"rollout": 1.0, "update": 1.0, "share": 0.25}
    found = {"one process": step | {"step": 4.0}, "DDP": step | {"step": 2.0}, "ZeRO-3": step | {"step": 5.0}}
    assert [distributed.row("LoRA", mode, found).split(" | ")[5:] for mode in found] == [
        ["1.00", "", " |"],
        ["0.50", "", "25% |"],
        ["1.25", "2.50", "25% |"],
    ]


SMALL = {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2}
SMALL |= {"eval_max_prompts": 2}
BUDGET = {"max_passes": 100.0, "max_updates": 2, "eval_passes": 9.0}


def train_small(settings, **budget):
    recipe = Recipe("mine", "", settings)
    return recipe_run.train_row(recipe, 1.1e-3, 0, **{**BUDGET, **budget}, sizes=SMALL)


def entry(passes, reward):
    """An evaluation as a row has it."""
    cell = {"mean": reward, "std_error": 0.01}
    return {"passes": passes, "cpu_seconds": 2 * passes, "reward": cell, "rewards": {"tesseract": cell}}


def made_row(recipe, rate, seed, rewards, to_target=None):
    """A row of a run of 100 passes, with evaluations evenly spread over them."""
    evaluations = [entry(100 * at / (len(rewards) - 1), reward) for at, reward in enumerate(rewards)]
    return {"recipe": recipe, "settings": RECIPES[recipe].settings, "learning_rate": rate, "seed": seed} | {
        "phase": recipe_settings.find_phase(seed),
        "max_passes": 100.0,
        "passes": 99.0,
        "max_updates": None,
        "eval_passes": 9.0,
        "passes_per_sample": 9.0,
        "updates": 11,
        "cpu_seconds": 200,
        "target": 0.86,
        "passes_to_target": to_target,
        "evaluations": evaluations,
        "machine": "a machine",
        "commit": "a commit",
        "versions": {"torch": "2"},
    }


CLEAN = {key: value for key, value in recipe_settings.CLEAN.items() if key != "num_inference_steps"}
FIRST = 1 / 4  # the first call is made once for the four samples of an initial latent


# rollout + 3 per trained step (4 with checkpointing), all twice with guidance; a reference adds 1 per trained step
@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        pytest.param({"sde_window": [0, 3]}, FIRST + 5 + 3 * (FIRST + 2), marks=pytest.mark.slow),
        ({"sde_window": [0, 1]}, FIRST + 5 + 3 * FIRST),
        pytest.param({"sde_window": [0, 1], "same_initial_noise": False}, 6 + 3, marks=pytest.mark.slow),
        ({"sde_window": [0, 1], "gradient_checkpointing": True}, FIRST + 5 + 4 * FIRST),
        ({"sde_window": [0, 1], "guidance_scale": 2.0}, 2 * (FIRST + 5 + 3 * FIRST)),
        ({"sde_window": [0, 2], "beta": 0.01}, FIRST + 5 + 3 * (FIRST + 1) + FIRST + 1),
        ({"sde_window": [0, 1], "num_iterations": 2}, (FIRST + 5) / 2 + 3 * FIRST),
        (CLEAN | {"loss_type": "dpo", "timestep_fraction": 0.6}, 6 + 3 * (3 + 1)),
        (CLEAN | {"loss_type": "dpo", "timestep_fraction": 0.6, "best_of_n": 2}, 6 + 3 * (3 + 1) / 2),
    ],
)
def test_network_passes_are_those_counted_by_hand(settings, passes):
    row = train_small({"num_inference_steps": 6} | settings, max_updates=settings.get("num_iterations", 1))
    assert row["passes_per_sample"] == row["passes"] / row["updates"] == passes
    # 2 prompts in 8 steps beside 8 samples an update, and with guidance once more in twice the rows
    assert row["evaluations"][-1]["passes_evaluating"] == 2 * 8 / 8 * (3 if "guidance_scale" in settings else 1)
    assert {"guided" in evaluation for evaluation in row["evaluations"]} == {"guidance_scale" in settings}


def test_a_row_says_what_was_measured_and_is_not_made_again(tmp_path, capsys, monkeypatch):
    recipe = RECIPES["first_of_6"]
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    row = recipe_run.train_row(recipe, 1.1e-3, 0, **BUDGET, sizes=SMALL)
    assert row["preload"] == "libm.so.6"
    assert (row["updates"], row["passes"], row["phase"]) == (2, 12, "tune")
    assert [(point["update"], point["passes"]) for point in row["evaluations"]] == [(0, 0), (2, 12)]
    assert all(point["rewards"].keys() == {"text", "color", "tesseract"} for point in row["evaluations"])
    assert row["evaluations"][0]["reward"] != row["evaluations"][1]["reward"]
    monkeypatch.setattr(recipes.subprocess, "run", lambda *args: pytest.fail("the row was made again"))
    path = recipes.row_path(tmp_path, recipe.name, 1.1e-3, 0)
    write_json(path, row)
    for often in ("9", "12"):  # evaluations change nothing in a run
        given = recipes.parse([f"--out={tmp_path}", "--max-passes=100", "--max-updates=2", f"--eval-passes={often}"])
        assert recipes.run_row(recipe, 1.1e-3, 0, given) == []
    (line,) = recipes.run_row(Recipe(recipe.name, "", {}), 1.1e-3, 0, given)
    assert str(path) in line and "settings" in line
    recipes.show_results(given, table=True, plot=True)
    assert "`first_of_6`" in capsys.readouterr().out and (tmp_path / "race.png").stat().st_size > 10_000


def test_a_run_ends_before_it_exceeds_its_budget_and_evaluations_change_nothing():
    often, rarely = (train_small({}, max_passes=28, max_updates=None, eval_passes=passes) for passes in (12, 1000))
    assert (often["updates"], often["passes"]) == (rarely["updates"], rarely["passes"]) == (2, 24)
    assert (len(often["evaluations"]), len(rarely["evaluations"])) == (3, 2)
    assert often["evaluations"][-1]["reward"] == rarely["evaluations"][-1]["reward"]


def test_learning_rate_warms_up_and_falls_to_0_with_the_budget():
    counter = recipe_run.PassCounter()
    race = recipe_run.Race(
        lambda kwargs: {}, counter, samples=4, max_passes=100, max_updates=None, eval_passes=9, guidance=1
    )
    assert [race.scale_learning_rate(update) for update in range(4)] == [0.25, 0.5, 0.75, 1]
    counter.rows["training", "gradient"] = 4 * 10  # 30 passes per sample
    assert race.scale_learning_rate(9) == pytest.approx(0.7)
    counter.rows["evaluation", "forward"] = 1000  # not from the budget
    counter.rows["training", "forward"] = 4 * 90
    assert race.scale_learning_rate(9) == 0


def test_passes_to_a_reward_are_interpolated_at_its_first_crossing():
    points = [entry(0, 0.7), entry(10, 0.8), entry(30, 0.9), entry(40, 0.85), entry(50, 0.95)]
    assert recipe_run.find_crossing(points, 0.86) == pytest.approx(10 + 20 * 0.6)
    assert recipe_run.find_crossing(points, 0.96) is None
    assert recipe_run.find_crossing(points, 0.5) == 0


def tuning_row(rate, seed, mean):
    """A row of `demo` whose score is this mean."""
    return made_row("demo", rate, seed, [mean, mean])


def test_the_learning_rate_with_the_largest_area_over_the_tuning_seeds_is_reported():
    low, middle, high = LEARNING_RATES
    rows = [made_row("demo", low, 0, [0.7, 0.7, 0.9]), made_row("demo", middle, 0, [0.7, 0.9, 0.9])]
    assert recipe_results.score(rows[1]) == pytest.approx((0.8 + 0.9) / 2)
    short = made_row("demo", 1.0, 0, [0.7, 0.9]) | {"max_passes": 200.0}  # what is left counts at the last reward
    assert recipe_results.score(short) == pytest.approx((0.8 + 0.9) / 2)

    assert recipe_results.choose_learning_rate(rows, "demo") is None and not recipe_results.is_tuned(rows, "demo")
    rows = [tuning_row(low, 0, 0.84), tuning_row(middle, 0, 0.85), tuning_row(high, 0, 0.80)]
    assert recipe_results.find_contenders(rows, "demo") == [low, middle]  # the highest is left behind
    assert recipe_results.choose_learning_rate(rows, "demo") == middle and not recipe_results.is_tuned(rows, "demo")
    rows += [tuning_row(low, 1, 0.84), tuning_row(middle, 1, 0.82)]
    assert recipe_results.choose_learning_rate(rows, "demo") == low
    rows += [tuning_row(low, 2, 0.60)]  # counts once the other contender has run on this seed too
    assert recipe_results.choose_learning_rate(rows, "demo") == low and not recipe_results.is_tuned(rows, "demo")
    behind = [*rows[:3], tuning_row(low, 1, 0.84), tuning_row(middle, 1, 0.79)]
    assert recipe_results.find_contenders(behind, "demo") == [low]  # the other is left behind over two seeds
    assert recipe_results.is_tuned(behind, "demo")
    behind.append(tuning_row(middle, 2, 0.99))  # has run on all seeds, so it counts
    assert recipe_results.find_contenders(behind, "demo") == [low, middle]
    assert not recipe_results.is_tuned(behind, "demo")
    rows += [tuning_row(middle, 2, 0.66), tuning_row(high, 1, 0.99)]
    assert recipe_results.choose_learning_rate(rows, "demo") == middle and recipe_results.is_tuned(rows, "demo")
    alone = [tuning_row(rate, 0, mean) for rate, mean in zip(LEARNING_RATES, (0.7, 0.85, 0.9), strict=True)]
    assert recipe_results.find_contenders(alone, "demo") == [high] and recipe_results.is_tuned(alone, "demo")


def test_a_recipe_that_does_best_at_the_lowest_rate_is_tried_at_a_lower_one():
    rows = [tuning_row(rate, 0, mean) for rate, mean in zip(LEARNING_RATES, (0.9, 0.8, 0.7), strict=True)]
    assert recipe_results.choose_learning_rate(rows, "demo") == LEARNING_RATES[0]
    assert not recipe_results.is_tuned(rows, "demo")  # the lower one is lacking
    better, worse = tuning_row(LOWER_RATE, 0, 0.95), tuning_row(LOWER_RATE, 0, 0.85)
    assert recipe_results.choose_learning_rate([*rows, better], "demo") == LOWER_RATE
    assert recipe_results.choose_learning_rate([*rows, worse], "demo") == LEARNING_RATES[0]
    assert recipe_results.is_tuned([*rows, better], "demo") and recipe_results.is_tuned([*rows, worse], "demo")
    assert recipe_results.choose_grid(rows[:2], "demo") == LEARNING_RATES
    rows = [tuning_row(rate, 0, mean) for rate, mean in zip(LEARNING_RATES, (0.8, 0.9, 0.7), strict=True)]
    assert recipe_results.choose_learning_rate([*rows, better], "demo") == LEARNING_RATES[1]  # not in its grid


def test_recipes_with_guidance_are_scored_with_it():
    row = made_row("dgpo", LEARNING_RATES[0], 0, [0.7, 0.7, 0.6])
    for point, reward in zip(row["evaluations"], (0.9, 0.96, 0.94), strict=True):
        point["guided"] = entry(point["passes"], reward)
    assert recipe_results.score(row) == pytest.approx((0.93 + 0.95) / 2)
    assert "| `dgpo` | – | *0.940 (0.940)* | – | – | – |" in recipe_results.format_tables([row], {})


def test_tuning_runs_what_the_first_seed_left_in_the_race_and_reports_follow_it(tmp_path, monkeypatch):
    low, middle, high = LEARNING_RATES
    scores = {low: 0.84, middle: 0.85, high: 0.80}
    made = []

    def make(recipe, rate, seed, arguments):
        made.append((rate, seed))
        write_json(recipes.row_path(tmp_path, "demo", rate, seed), tuning_row(rate, seed, scores[rate]))
        return []

    monkeypatch.setattr(recipes, "run_row", make)
    run = lambda phase, seeds: recipes.run_phase(  # noqa: E731
        phase,
        [RECIPES["demo"]],
        recipes.parse([f"--out={tmp_path}", "--max-passes=100", f"--seeds={seeds}"]),
    )
    (line,) = run("tune", "1")
    assert "demo, seed 1: not run, its tuning is not finished" in line and made == []
    assert run("tune", "0,1") == [] and made == [*((rate, 0) for rate in LEARNING_RATES), (low, 1), (middle, 1)]
    (line,) = run("report", "3")
    assert "demo, seed 3: not run" in line
    assert run("tune", "2") == run("report", "3") == [] and made[5:] == [(low, 2), (middle, 2), (middle, 3)]
    # where one rate is left, there is nothing to decide on other seeds
    write_json(recipes.row_path(tmp_path, "demo", low, 0), tuning_row(low, 0, 0.5))
    recipes.row_path(tmp_path, "demo", low, 2).unlink()
    assert run("tune", "1") == [] and len(made) == 8
    # where the lowest is the best, a lower one is tried in the same call
    shutil.rmtree(tmp_path / "demo")
    scores |= {low: 0.87, LOWER_RATE: 0.86}
    assert run("tune", "0") == [] and made[8:] == [*((rate, 0) for rate in LEARNING_RATES), (LOWER_RATE, 0)]
    # where one rate is left after two seeds, the third has nothing to decide
    scores[low], made[:] = 0.91, []
    assert run("tune", "1,2") == run("report", "3") == []
    assert made == [(LOWER_RATE, 1), (low, 1), (middle, 1), (low, 3)]


def test_the_tuning_table_says_on_which_seeds_its_numbers_rest(tmp_path):
    low, middle, high = LEARNING_RATES
    rows = [tuning_row(low, 0, 0.84), tuning_row(middle, 0, 0.85), tuning_row(high, 0, 0.80)]
    rows += [tuning_row(low, 1, 0.86), tuning_row(middle, 1, 0.83), tuning_row(low, 2, 0.1)]
    lines = recipe_results.format_tables(rows, {})
    assert "| `demo` | – | **0.850 (0.850)** | 0.840 (0.840) | *0.800 (0.800)* | 0, 1 |" in lines
    lines = recipe_results.format_tables(rows[:2], {})
    assert "| `demo` | – | *0.840 (0.840)* | *0.850 (0.850)* | – | – |" in lines
    rows[4] = tuning_row(middle, 1, 0.80)  # is left behind over two seeds, and is not tried on the third
    lines = recipe_results.format_tables(rows, {})
    assert "| `demo` | – | **0.600 (0.600)** | *0.825 (0.825)* | *0.800 (0.800)* | 0, 1, 2 |" in lines


def test_rows_of_other_settings_and_files_that_are_being_written_are_left_out(tmp_path, capsys):
    for name, settings in (("demo", {}), ("demo", {"sde_window": [0, 2]}), ("no_longer_there", {})):
        row = made_row("demo", LEARNING_RATES[0], 0, [0.7, 0.9]) | {"recipe": name, "settings": settings}
        write_json(recipes.row_path(tmp_path, name, LEARNING_RATES[0], len(settings)), row)
    (tmp_path / "demo" / "tmp-lr-0.0011-seed-0.json").write_text('{"half": ')
    (row,) = recipe_results.read_rows(tmp_path, 100, None)
    assert (row["recipe"], row["settings"]) == ("demo", {})
    recipes.show_results(recipes.parse([f"--out={tmp_path}", "--max-passes=100"]), table=False, plot=False)
    assert ": 1; rows of other budgets or settings that are left out: 2." in capsys.readouterr().out


def test_a_finished_row_is_not_overwritten_and_its_rate_and_seed_are_numbers(tmp_path, capsys, monkeypatch):
    path = recipes.row_path(tmp_path, "demo", 1.1e-3, 0)
    write_json(path, {})
    monkeypatch.setattr(recipe_run, "train_row", lambda *args, **kwargs: pytest.fail("the row was made again"))
    with pytest.raises(SystemExit, match="is there already; delete it, or write the new row to another folder"):
        recipes.make_row(recipes.parse(["--row", "demo", "1.1e-3", "0", f"--out={tmp_path}"]))
    assert json.loads(path.read_text()) == {}
    for words in (("demo", "fast", "0"), ("demo", "1e-3", "0.5")):
        with pytest.raises(SystemExit):
            recipes.parse(["--row", *words])
        assert "got " + " ".join(words) in capsys.readouterr().err


def test_rows_without_tesseract_and_in_float32_on_a_gpu(tmp_path, monkeypatch):
    made = {}
    monkeypatch.setattr(recipe_run, "train_row", lambda *args, **kwargs: made.update(kwargs) or {"command": "python"})
    words = ["--row", "demo", "1.1e-3", "0", f"--out={tmp_path}"]
    recipes.make_row(recipes.parse([*words, "--without-tesseract"]))
    row = json.loads(recipes.row_path(tmp_path, "demo", 1.1e-3, 0).read_text())
    assert row["command"] == "python --without-tesseract"
    monkeypatch.setattr("diffusion_grpo.config.settings.computes_in_bf16", lambda: True)
    script, _, config = recipe_run.parse_recipe(RECIPES["demo"], 1.1e-3, 0, str(tmp_path), made["sizes"])
    assert script.eval_reward_funcs is None and not config.bf16
    script, *_ = recipe_run.parse_recipe(RECIPES["demo"], 1.1e-3, 0, str(tmp_path))
    assert script.eval_reward_funcs == ["tesseract"]
    asked = []
    monkeypatch.setattr(recipes.subprocess, "run", lambda words: asked.append(words) or Namespace(returncode=0))
    arguments = recipes.parse([f"--out={tmp_path / 'new'}", "--without-tesseract"])
    assert (
        recipes.run_row(RECIPES["demo"], 1.1e-3, 0, arguments)
        == recipes.make_costs([RECIPES["demo"]], arguments)
        == []
    )
    assert all("--without-tesseract" in words for words in asked) and len(asked) == 2


def test_a_reward_that_was_not_measured_is_a_dash():
    row = made_row("demo", LEARNING_RATES[0], 3, [0.7, 0.9])
    del row["evaluations"][-1]["rewards"]["tesseract"]
    assert any("| 0.900 | – |" in line for line in recipe_results.format_tables([row], {}))


def test_the_page_of_a_folder_with_a_dot_is_named_after_all_of_it(tmp_path, capsys):
    folder = tmp_path / "run.v1"
    write_json(recipes.row_path(folder, "demo", 1e-3, 0), made_row("demo", 1e-3, 0, [0.7, 0.9]))
    recipes.show_results(recipes.parse([f"--out={folder}", "--max-passes=100"]), table=True, plot=False)
    assert "`demo`" in (tmp_path / "run.v1.md").read_text()


def test_rows_of_another_budget_are_left_out(tmp_path):
    """What papers publish has ten times the budget of the others, unless the command line gives one for all."""
    for seed, passes in ((0, 148.0), (1, 1480.0), (3, 100.0)):
        row = made_row("demo", 1e-3, seed, [0.7, 0.9]) | {"max_passes": passes, "phase": None}
        write_json(recipes.row_path(tmp_path, "demo", 1e-3, seed), row)
    (row,) = recipe_results.read_rows(tmp_path, None, None)
    assert (row["seed"], row["phase"]) == (0, "tune")  # whatever the phase was when the row was made
    assert [row["seed"] for row in recipe_results.read_rows(tmp_path, 100, None)] == [3]
    own, same = recipes.parse([]), recipes.parse(["--max-passes=100"])
    assert [recipes.budget(own, RECIPES[name], 0)["max_passes"] for name in ("demo", "flow_grpo")] == [148, 1480]
    assert [recipes.budget(own, RECIPES["flow_grpo"], seed)["eval_passes"] for seed in (0, 3)] == [185, 74]
    assert recipes.budget(same, RECIPES["flow_grpo"], 3) == {
        "max_passes": 100,
        "max_updates": None,
        "eval_passes": 12.5,
    }


def test_tables_compare_each_seed_with_flow_grpo(tmp_path):
    rows = [made_row(recipe_results.BASELINE, 1e-3, seed, [0.7, 0.87], 80.0) for seed in (3, 4)]
    rows += [made_row(recipe_results.BASELINE, 1e-3, 5, [0.7, 0.8])]
    # another rate does not count: it is worse on the whole, though better on one seed
    rows += [
        made_row(recipe_results.BASELINE, 2e-3, seed, [0.7, end], 40.0)
        for seed, end in ((3, 0.88), (4, 0.3), (5, 0.3))
    ]
    rows += [made_row("demo", 1e-3, seed, [0.7, 0.9], passes) for seed, passes in ((3, 8.0), (4, None), (5, 10.0))]
    assert recipe_results.choose_shown(rows, recipe_results.BASELINE) == rows[:3]
    assert recipe_results.choose_shown([made_row("demo", 1e-3, 0, [0.7, 0.99]), *rows], "demo") == rows[6:]
    rows[6] |= {"eval_passes": 18.5, "updates": 9, "passes_per_sample": 10.5, "passes": 94.5}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{recipe_results.START}\na stale row\n{recipe_results.END}\nafter\n")
    recipe_results.write_tables(page, rows, {}, tmp_path / "none.png")
    text = page.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("| `demo` | 0.001 |"))
    assert "| 8, –, 10 | 9 to 18.5 | 0.100, –, < 0.100 | – |" in line
    assert "| 9 to 10.5 | 9 to 11 | 94 to 99 |" in line  # numbers of all seeds, not of the first
    assert recipe_results.choose_shown(rows, "nft") == []  # a table without the baseline has no shares
    assert text.startswith("before\n") and text.endswith("after\n") and "stale" not in text


def test_how_far_the_seeds_of_a_recipe_end_apart_says_what_chance_can_do():
    names = list(RECIPES)[: recipe_results.ENOUGH_RECIPES]
    ends = {name: [0.8, 0.8 + 0.01 * place, 0.9] for place, name in enumerate(names)}
    rows = [
        made_row(name, rate, seed, [0.7, end - worse * seed])
        for name in names
        for rate, worse in ((1e-3, 0.0), (2e-3, 0.1))  # only the better rate is shown, so only it counts
        for seed, end in zip((3, 4, 5), ends[name], strict=True)
    ]
    rows += [made_row(names[0], 1e-3, 0, [0.7, 0.1])]  # not a reported seed
    rows += [made_row(list(RECIPES)[-1], 1e-3, seed, [0.7, end]) for seed, end in ((0, 0.2), (1, 0.9))]  # not reported
    expected = np.sqrt(np.mean([np.var(own, ddof=1) for own in ends.values()]))
    (budget,) = {row["max_passes"] for row in rows}
    assert recipe_results.spread_of_seeds(rows, budget) == (len(names), pytest.approx(expected))
    assert recipe_results.spread_of_seeds(rows, 2 * budget)[0] == 0
    text = " ".join(recipe_results.format_tables(rows, {}))
    assert f"standard deviation of {expected:.3f} (pooled over {len(names)} recipes" in text
    assert f"differ by less than {1.96 * expected * np.sqrt(1 / 3 + 1 / 3):.3f} in 95" in text
    fewer = [row for row in rows if row["recipe"] != names[-1]]
    assert "standard deviation" not in " ".join(recipe_results.format_tables(fewer, {}))


def test_a_recipe_that_is_tuned_as_another_has_its_learning_rate_and_no_tuning_of_its_own(monkeypatch):
    low, middle, high = LEARNING_RATES
    monkeypatch.setitem(RECIPES, "longer", Recipe("longer", "", {}, 200.0, tuned_as="demo"))
    rows = [tuning_row(rate, 0, mean) for rate, mean in zip(LEARNING_RATES, (0.7, 0.9, 0.8), strict=True)]
    assert recipe_results.is_tuned(rows, "longer") and recipes.choose_rates(rows, "longer", 3) == [middle]
    reported = [made_row("longer", rate, 3, [0.7, end]) for rate, end in ((middle, 0.8), (high, 0.9))]
    shown = recipe_results.choose_shown([*rows, *reported], "longer")
    assert shown == reported[1:]  # another budget may have another best rate, and the better one is fair to it
    monkeypatch.setattr(recipes, "run_seed", lambda recipe, seed, arguments: [f"{recipe.name} {seed}"])
    chosen, arguments = [RECIPES["longer"], RECIPES["demo"]], recipes.parse(["--seeds=0,3"])
    assert recipes.run_phase("tune", chosen, arguments) == ["demo 0"]
    assert recipes.run_phase("report", chosen, arguments) == ["longer 3", "demo 3"]
    tables = recipe_results.format_tables([*rows, *reported], {})
    first = [line.split(" | ")[0] for line in tables[tables.index("## Tuning") :]]
    assert first.count("| `longer`") == 1 and first.count("| `demo`") == 2  # one each in the table of recipes


def test_what_a_pass_costs_is_measured_after_two_updates():
    settings = {"num_inference_steps": 6, "sde_window": [0, 1], "num_iterations": 2}  # every second update is short
    cost = recipe_run.measure_cost(Recipe("mine", "", settings), SMALL)
    assert cost["passes"] == FIRST + 5 + 2 * 3 * FIRST and 0 < cost["cpu_seconds_per_pass"] < 10


def test_what_a_pass_costs_is_of_one_machine_and_of_the_settings_of_now(tmp_path, capsys, monkeypatch):
    measured = {"settings": RECIPES["demo"].settings, "cpu_seconds_per_pass": 30.0, "passes": 36.0}
    made = []
    monkeypatch.setattr(recipe_run, "measure_cost", lambda recipe, sizes: made.append(recipe.name) or measured)
    arguments = recipes.parse(["--cost=demo", f"--out={tmp_path}"])
    recipes.make_cost(arguments)
    found = json.loads((tmp_path / "costs.json").read_text())
    assert found == recipe_run.describe_machine() | {"recipes": {"demo": measured}} and made == ["demo"]
    assert recipe_results.read_costs(tmp_path) == {"demo": 0.5} and recipe_results.read_costs(tmp_path / "none") == {}
    ran = []
    monkeypatch.setattr(recipes.subprocess, "run", lambda words: ran.append(words) or Namespace(returncode=1))
    assert recipes.make_costs([RECIPES["demo"]], arguments) == ran == []
    assert recipes.make_costs([RECIPES["dpo"]], arguments) == ["dpo, cost of a pass: ended with exit code 1"]
    assert ran[0][2:] == ["--cost", "dpo", "--out", str(tmp_path)]
    rows, page = [made_row("demo", 1e-3, 3, [0.7, 0.9]), made_row("dpo", 1e-3, 3, [0.7, 0.9])], tmp_path / "page.md"
    recipe_results.write_tables(page, rows, recipe_results.read_costs(tmp_path), tmp_path / "none.png")
    demo, dpo = page.read_text().splitlines()[6:8]
    assert demo.endswith("| 49.5 |") and dpo.endswith("| – |")  # 99 passes
    monkeypatch.setattr(recipe_run, "machine", lambda: "another machine")
    with pytest.raises(SystemExit, match="now another machine; delete it to measure all here"):
        recipes.make_cost(arguments)
    assert made == ["demo"]
    monkeypatch.setitem(RECIPES, "demo", Recipe("demo", "", {"beta": 0.5}))
    assert recipe_results.read_costs(tmp_path) == {}


def write_whole(page, rows):
    """Write the page of all rows."""
    recipe_results.write_tables(page, rows, {}, page.with_suffix(".png"))


def test_short_tables_on_other_pages_are_of_the_recipes_that_they_name(tmp_path):
    rows = [made_row("flow_grpo", 1e-3, 0, [0.7, 0.8]), made_row("demo", 1e-3, 0, [0.7, 0.9], 80.0)]
    rows += [made_row("nft", 1e-3, 0, [0.7, 0.85])]
    page, mark, end = tmp_path / "page.md", recipe_results.SOME, recipe_results.SOME_END
    page.write_text(f"a\n{mark}flow_grpo, dpo, demo -->\nstale\n{end}\nb\n{mark}nft -->\n{end}\nc\n")
    for _ in range(2):  # a page that is written again stays as it is
        recipe_results.write_summaries(page, rows)
        first, second = page.read_text().split("\nb\n")
        named = [line.split("`")[1] for line in first.splitlines() if line.startswith("| `")]
        assert named == ["demo", "flow_grpo"] and "| `nft` |" in second and "`demo`" not in second
        assert "| 9 | 0.001 | 0 | 0.900 | 99 | 80 | 9 |" in first and "stale" not in first
        assert first.startswith("a\n") and second.endswith(f"{end}\nc\n")
    for write, text in ((recipe_results.write_summaries, f"{mark}nft -->\nc\n"), (write_whole, recipe_results.START)):
        page.write_text(text)
        with pytest.raises(ValueError, match="where the tables end"):  # what follows would be lost
            write(page, rows)
        assert page.read_text() == text


def test_pages_have_the_tables_of_the_rows(tmp_path):
    shutil.copytree(recipes.ROOT / "docs" / "recipes", tmp_path / "recipes")
    (tmp_path / "algorithms").mkdir()
    pages = ("recipes.md", *recipe_results.SUMMARIES)
    table = re.compile(f"({recipe_results.SOME}.*? -->).*?({recipe_results.SOME_END})", re.DOTALL)
    for page in pages:
        text, tables = table.subn(r"\1\n\2", (recipes.ROOT / "docs" / page).read_text())
        assert tables
        (tmp_path / page).write_text(text)  # each table has to be written again
    trained_some = recipes.parse([f"--out={tmp_path / 'recipes'}", "--recipes=demo"])  # the tables are of all
    recipes.show_results(trained_some, table=True, plot=False)
    for page in pages:
        assert (tmp_path / page).read_text() == (recipes.ROOT / "docs" / page).read_text(), "run recipes.py --table"


def test_recipes_leave_alone_what_all_share():
    for recipe in RECIPES.values():
        assert not recipe.settings.keys() & recipe_settings.SHARED, recipe.name
    assert 1.1e-3 in LEARNING_RATES


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_each_recipe_that_this_package_knows_has_valid_settings(recipe, tmp_path):
    if recipe_settings.find_unknown(recipe) is None:
        *_, config = recipe_run.parse_recipe(recipe, 1e-3, 0, str(tmp_path))
        assert recipe_run.count_samples(config) == 128


def test_recipes_that_this_package_cannot_train_are_named(capsys, monkeypatch):
    lacking = {
        "no setting no_such": {"no_such": 1},
        "no loss_type no_such": {"loss_type": "no_such"},
        "no sde_type no_such": {"sde_type": "no_such"},
        "no no_such in the loss_kwargs of grpo": {"loss_kwargs": {"no_such": 1}},
    }
    for words, settings in lacking.items():
        assert recipe_settings.find_unknown(Recipe("mine", "", settings)) == words
    assert recipe_settings.find_unknown(RECIPES["demo"]) is None
    monkeypatch.setitem(RECIPES, "mine", Recipe("mine", "", {"no_such": 1}))
    monkeypatch.setattr(sys, "argv", ["recipes.py", "--recipes=mine", "--max-updates=1"])
    recipes.main()
    assert "mine: skipped, this package has no setting no_such\n" in capsys.readouterr().out


def test_half_precision_is_compared_with_itself_on_re_noised_samples():
    found = half_precision.measure_renoised("sd3", steps=4)
    bound = ROUNDING_OF_TWO
    assert found["alone"].max() < bound / 3 and found["alone"].any()
    assert found["prompts"].max() > 3 * bound and found["dropout"].max() > bound
    assert half_precision.make_renoised_row("sd3", steps=2).count("|") == 6


def test_half_precision_is_compared_with_float32_and_with_batches_of_one():
    same = half_precision.measure("sd3", torch.float32, is_guided=True, steps=2)
    assert not same["error"].any() and not same["drift"].any() and len(same["drift_alone"]) == half_precision.SAMPLES
    half = half_precision.measure("sd3", torch.bfloat16, is_guided=False, steps=2)
    assert 1e-3 < half["error"].median() < 0.1 and 0 < half["drift"].max() and half["share"].max() < 1
    assert half_precision.find_guidance({"true_cfg_scale": 4.0, "guidance_scale": 1.0}) == "true_cfg_scale"
    assert [half_precision.format_share(torch.tensor(x)) for x in (0.0061, 0.25, 0.0)] == ["0.61 %", "25 %", "0 %"]


def test_a_model_trained_with_few_steps_is_evaluated_with_several_numbers_of_steps():
    words = ["--eval_max_prompts=4", "--max_steps=1", "--warmup_steps=0", "--per_device_train_batch_size=16"]
    untrained, trained = (eval_steps.measure(steps, [1, 2], words) for steps in (0, 2))
    assert len({*untrained, *trained}) == 4 and all(0 < reward < 1 for reward in untrained + trained)


def test_compiled_blocks_are_compared_with_others():
    limit = torch._dynamo.config.cache_size_limit  # pytest's monkeypatch would delete it: it is an alias
    try:
        case = compiled.Case("wan", "eager", heights=(32,))
        assert compiled.make_row(case, steps=2) == "| wan | `eager` | float32 | 4 | 0 | 0 | 0 |"
    finally:
        torch._dynamo.config.cache_size_limit = limit
        torch._dynamo.reset()


def test_sizes_of_weights_on_the_pages_are_those_of_the_configurations():
    rows = (DOCS / "rewards" / "built_in.md").read_text(encoding="utf-8").splitlines()
    with torch.device("meta"):
        for names, network in weight_sizes.list_rewards():
            size = weight_sizes.format_bytes(4 * weight_sizes.count_weights(network))
            for name in names.partition(" (")[0].split(", "):
                assert any(row.startswith(f"| `{name}` |") and size in row.split("|")[-2] for row in rows), (
                    name,
                    size,
                )
    page = (DOCS / "memory.md").read_text(encoding="utf-8")
    encoders = weight_sizes.count_weights(*weight_sizes.list_encoders("Wan2.1-1.3B"))
    assert f"{weight_sizes.format_bytes(2 * encoders)} for Wan" in page.replace("\n", " ")
    for optim, name in (("adamw_torch_8bit", "AdamW8bit"), ("adamw_torch_4bit", "AdamW4bit")):
        assert f"| `{optim}` | torchao | {weight_sizes.count_states(name):.2f} |" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_attention_is_measured_on_a_gpu_only(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention.py"])
    assert attention.main() == 2 and "torch sees none" in capsys.readouterr().err


def test_attention_has_the_gradients_of_its_definition():
    inputs = [torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(2, 5, 12, dtype=torch.float64)
    found = attention.compute_gradients(inputs, gradient, torch.nn.attention.SDPBackend.MATH)
    weights = (torch.einsum("bihc,bjhc->bhij", *inputs[:2]) / 2).softmax(-1)
    out = torch.einsum("bhij,bjhc->bihc", weights, inputs[2]).flatten(2)
    for one, expected in zip(found, torch.autograd.grad(out, inputs, gradient), strict=True):
        torch.testing.assert_close(one, expected)
