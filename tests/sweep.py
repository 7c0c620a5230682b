"""Which pipelines of diffusers train? Asks `check_pipeline` about every class in diffusers' own test suite.

    make sweep ARGS="--diffusers PATH"      # PATH: a checkout of huggingface/diffusers

In: a checkout of diffusers, of which only `tests/` is used: its tiny components and inputs. Out: a table, class by
class, and docs/supported_pipelines.md. A modular class is examined around the components of the classic classes of the
same model, or around those of tests/tiny_pipelines. Each class runs in a worker process under a time limit; a worker
that hangs or dies is replaced, and the sweep goes on.
"""

import argparse
import ast
import contextlib
import functools
import importlib.machinery
import importlib.util
import inspect
import io
import json
import math
import multiprocessing
import re
import sys
import time
import traceback
import unittest.mock
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING
from diffusers.pipelines.auto_pipeline import _get_model

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import tiny_pipelines  # noqa: E402
from stand_ins import offline  # noqa: E402

from diffusion_grpo import check_pipeline  # noqa: E402
from diffusion_grpo.policy.modular import as_pipeline  # noqa: E402

PAGE = ROOT / "docs" / "supported_pipelines.md"
WHERE = "--diffusers must name a checkout of diffusers' sources: git clone https://github.com/huggingface/diffusers"
MODULAR_TITLE = "## Modular pipelines"
TINY = "tiny_pipelines"  # in place of a module of diffusers' tests
SKIPPED = re.compile("Slow|Nightly|Integration|Dummies")
SET_BY_CHECK = ("generator", "num_inference_steps", "output_type", "return_dict")


def modular_cases() -> list[tuple[str, str]]:
    """(module, name) of the tiny pipelines of models that have no classic form."""
    return [(TINY, name) for name in tiny_pipelines.MODULAR if not name.startswith("modular_")]


def cases(checkout: Path) -> list[tuple[str, str]]:
    """(module, class) of every test class that defines tiny components, found without importing anything."""
    found = []
    for path in sorted((checkout / "tests" / "pipelines").glob("*/**/test_*.py")):
        module = ".".join(path.relative_to(checkout).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body:
            if (
                isinstance(node, ast.ClassDef)
                and {"pipeline_class", "get_dummy_components"} & _defined(node)
                and not SKIPPED.search(node.name)
            ):
                found.append((module, node.name))
    return found


def _defined(node: ast.ClassDef) -> set[str]:
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    targets = [target for item in node.body if isinstance(item, ast.Assign) for target in item.targets]
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def load_case(module: str, name: str) -> type | None:
    """The test class, if it is one that builds a pipeline from components."""
    cls = getattr(importlib.import_module(module), name)
    wanted = ("pipeline_class", "get_dummy_components", "get_dummy_inputs")
    if not all(hasattr(cls, attribute) for attribute in wanted) or isinstance(cls.pipeline_class, property):
        return None
    return cls


def build(cls: type) -> tuple[DiffusionPipeline, dict[str, Any]]:
    """The pipeline of a test class and the inputs of a call, with random numbers where weights are all zero."""
    try:
        case = cls()
    except TypeError:
        case = cls("run")
    for setup in ("setUp", "setup_method"):
        if setup in cls.__dict__:
            with contextlib.suppress(Exception):
                getattr(case, setup)()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = cls.pipeline_class(**case.get_dummy_components())
        parameters = inspect.signature(case.get_dummy_inputs).parameters
        inputs = case.get_dummy_inputs(*(["cpu"] if "device" in parameters else []))
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                fill_blanks(component)
                shorten_head(component)
    pipe.set_progress_bar_config(disable=True)
    inputs = {key: value for key, value in inputs.items() if key not in SET_BY_CHECK}
    if "intermediate_timesteps" in inspect.signature(type(pipe).__call__).parameters:
        inputs["intermediate_timesteps"] = None  # Sana-Sprint's default allows for two steps only
    return pipe, inputs


@torch.no_grad()
def fill_blanks(module: torch.nn.Module) -> None:
    """Random numbers for zeros, which would hide errors, and for what `torch.empty` left uninitialised."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not (parameter.any() and parameter.isfinite().all()):
            noise = torch.randn_like(parameter)
            # a negative bias before a last ReLU (a depth estimator's) would leave one and the same value everywhere
            parameter.copy_(0.1 * noise.abs() if parameter.ndim < 2 else noise * parameter[0].numel() ** -0.5)


def shorten_head(module: torch.nn.Module) -> None:
    """Logits over a vocabulary cost seconds, and a pipeline that conditions on hidden states never reads them."""
    head = getattr(module, "lm_head", None)
    if isinstance(head, torch.nn.Linear) and head.out_features > 10_000:
        module.lm_head = torch.nn.Linear(head.in_features, 8, bias=head.bias is not None)


def modular_class(pipeline: type[DiffusionPipeline], config: dict[str, Any]) -> type | None:
    """The modular class of the same model: as diffusers chooses it, or by its name; None where there is none."""
    choose = MODULAR_PIPELINE_MAPPING.get(_get_model(pipeline.__name__))
    name = pipeline.__name__.replace("Pipeline", "ModularPipeline") if choose is None else choose(config)
    return getattr(diffusers, name, None)


def as_modular(pipe: DiffusionPipeline, inputs: dict[str, Any]) -> tuple[DiffusionPipeline, dict[str, Any]]:
    """The modular pipeline of the same model around the same components."""
    modular = modular_class(type(pipe), dict(pipe.config))()
    if hasattr(modular, "disable_safety_checker"):
        modular.disable_safety_checker()
    parts = {k: v for k, v in pipe.components.items() if k in modular.component_names and v is not None}
    modular.update_components(**parts, **{k: v for k, v in pipe.config.items() if k in modular._config_specs})
    parameters = inspect.signature(type(as_pipeline(modular)).__call__).parameters
    scale = inputs.get("true_cfg_scale", inputs.get("guidance_scale"))
    inputs = {"guidance_scale": scale, "negative_prompt": "", **inputs} if scale else inputs
    return modular, {name: value for name, value in inputs.items() if name in parameters}


def examine(module: str, name: str, is_modular: bool, verbose: bool) -> dict[str, Any] | None:
    """One row of the table, or None where the class builds no pipeline."""
    if module == TINY:
        row, make = {"case": name, "pipeline": name}, functools.partial(tiny_pipelines.build, name)
    elif (cls := load_case(module, name)) is not None:
        row = {"case": f"{module.removeprefix('tests.pipelines.')}.{name}", "pipeline": cls.pipeline_class.__name__}
        make = functools.partial(build, cls)
        if is_modular and modular_class(cls.pipeline_class, {}) is None:
            return None
    else:
        return None
    start = time.perf_counter()
    try:
        with offline():
            pipe, inputs = make()
            if is_modular and module != TINY:
                pipe, inputs = as_modular(pipe, inputs)
            row["pipeline"] = type(pipe).__name__
    except Exception as error:
        trace = traceback.format_exc() if verbose else None
        return row | {"not_built": f"{type(error).__name__}: {error}"[:300], "trace": trace}
    try:
        with offline():
            # image-to-image takes `strength` of the steps
            report = check_pipeline(pipe, inputs, num_inference_steps=math.ceil(4 / inputs.get("strength", 1.0)))
    except Exception as error:
        trace = traceback.format_exc() if verbose else None
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"ESCAPED {type(error).__name__}: {error}"[:300] + f" [{Path(last.filename).name}:{last.lineno}]"
        return row | {"trains": False, "reason": reason, "trace": trace}
    return row | vars(report) | {"seconds": time.perf_counter() - start}


def work(connection, verbose: bool) -> None:
    """Worker: takes (module, class) until it is told to stop."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (case := connection.recv()) is not None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                row = examine(*case, verbose)
            except BaseException as error:
                row = {"case": ".".join(case[:2]), "not_built": f"{type(error).__name__}: {error}"[:300]}
        connection.send(row)


class Worker:
    """A process that examines classes one after the other; a new one takes over when it hangs or dies."""

    def __init__(self, verbose: bool):
        self.verbose, self.process = verbose, None

    def examine(self, case: tuple[str, str, bool], limit: float) -> dict[str, Any] | None:
        """The row of one class, within `limit` seconds."""
        if self.process is None:
            context = multiprocessing.get_context("fork")  # what is imported already need not be imported again
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, self.verbose), daemon=True)
            self.process.start()
            theirs.close()
        self.connection.send(case)
        try:
            if self.connection.poll(limit):
                return self.connection.recv()
            problem = f"no answer within {limit:.0f} seconds"
        except (EOFError, ConnectionError):
            problem = "the process died"
        self.process.kill()
        self.process.join()
        self.process = None
        return {"case": ".".join(case[:2]), "not_built": problem}


def prepare(checkout: Path) -> None:
    """Makes `tests.pipelines` importable, without packages that the components do not need."""
    sys.path.insert(0, str(checkout))
    for name in ("parameterized", "requests_mock"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = unittest.mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None))


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    verdict = "trains" if row.get("trains") else "not built" if "not_built" in row else "no"
    numbers = f"{row.get('steps', 0)} {row.get('max_ratio_error', float('nan')):8.1e} {row.get('grad_norm', 0):8.1e}"
    reason = row.get("reason") or row.get("not_built") or ""
    names = f"{row.get('scheduler', ''):32} {str(row.get('policy') or ''):26}"
    return f"{row.get('pipeline', row['case']):48} {names} {numbers} {verdict:9} {reason}"


def best_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a pipeline class: a class counts as its best test configuration."""
    rank = lambda row: (bool(row.get("trains")), "not_built" not in row)  # noqa: E731
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row.get("pipeline", row["case"])
        if name not in best or rank(row) > rank(best[name]):
            best[name] = row
    return [best[name] for name in sorted(best)]


def modular_section(rows: list[dict[str, Any]]) -> str:
    """The part of docs/supported_pipelines.md on modular pipelines, in which every class of diffusers has a row."""
    by_name = {row.get("pipeline", row["case"]): row for row in rows}
    kinds = [name for name in dir(diffusers) if name.endswith("ModularPipeline") and name != "ModularPipeline"]
    lines = []
    for kind in kinds:
        row = by_name.get(kind, {"not_built": "no tiny components"})
        is_missing = "not_built" in row or has_inner_error(row)
        verdict = "trains" if row.get("trains") else "not examined" if is_missing else "refused"
        why = _cell(row.get("reason") or row.get("not_built")).removeprefix(kind).strip()
        lines.append(f"| {kind} | {verdict} | {row.get('scheduler', '') if row.get('trains') else why} |")
    trained = sum(" | trains | " in line for line in lines)
    return (
        f"{MODULAR_TITLE}\n\n**{trained} of {len(kinds)}** modular classes train with tiny components of the classic "
        "classes of the same model, or of their own; see [modular pipelines](models/modular.md).\n\n"
        "| class | | scheduler, or reason |\n|---|---|---|\n" + "\n".join(lines) + "\n"
    )


def page(rows: list[dict[str, Any]]) -> str:
    """docs/supported_pipelines.md, without the part on modular pipelines."""
    missing = [row for row in rows if "not_built" in row or has_inner_error(row)]
    built = [row for row in rows if row not in missing]
    trained = [row for row in built if row["trains"]]
    refused = [row for row in built if not row["trains"]]
    parts = [
        "# Supported pipelines",
        f"What `check_pipeline` says about each pipeline class that has tiny components in diffusers' own test suite, "
        f"with diffusers {diffusers.__version__} in float32 on a CPU: **{len(trained)} of {len(rows)} train**, "
        f"{len(refused)} are refused, {len(missing)} could not be examined. The first ratio is 1 within "
        f"{max((row['max_ratio_error'] for row in trained), default=0):.0e}. `diffusion-grpo check MODEL` examines a "
        "model of yours. Written by `make sweep`; do not edit.",
        "| scheduler | pipelines that train |\n|---|---|",
    ]
    by_scheduler = defaultdict(list)
    for row in trained:
        by_scheduler[row["scheduler"]].append(row["pipeline"])
    parts[-1] += "".join(
        f"\n| {scheduler} | {', '.join(by_scheduler[scheduler])} |" for scheduler in sorted(by_scheduler)
    )
    by_reason = defaultdict(list)
    for row in refused:
        by_reason[_cell(row["reason"]).removeprefix(row["pipeline"]).strip()].append(row["pipeline"])
    parts += ["## Refused", "| pipelines | reason |\n|---|---|"]
    parts[-1] += "".join(f"\n| {', '.join(names)} | {reason} |" for reason, names in by_reason.items())
    if missing:
        parts += [
            "## Not examined",
            "Their test components could not be built or called here.",
            "| pipeline | why |\n|---|---|"
            + "".join(
                f"\n| {row.get('pipeline', row['case'])} | {_cell(row.get('not_built') or row['reason'])} |"
                for row in missing
            ),
        ]
    return "\n\n".join(parts) + "\n"


def has_inner_error(row: dict[str, Any]) -> bool:
    """Whether the pipeline's own call failed: that says nothing about its steps."""
    return (row.get("reason") or "").startswith(("The call ended with", "ESCAPED"))


def _cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|")


def main() -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--diffusers", type=Path, help="checkout of diffusers' sources")
    parser.add_argument("--only", default="", help="regular expression on module.class")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one class")
    parser.add_argument("--trace", action="store_true", help="print stack traces")
    parser.add_argument("--rows", type=Path, help="also write the rows as JSON lines to this file")
    parser.add_argument("--modular", action="store_true", help="examine modular pipelines only")
    parser.add_argument("--resume", action="store_true", help="examine only what does not train in --rows yet")
    parser.add_argument("--no-page", action="store_true", help="leave docs/supported_pipelines.md alone")
    args = parser.parse_args()
    if args.diffusers is None or not (args.diffusers / "tests" / "pipelines").is_dir():
        sys.exit(WHERE)
    prepare(args.diffusers.resolve())
    classic = cases(args.diffusers.resolve())
    every = [(*case, False) for case in ([] if args.modular else classic)]
    every += [(*case, True) for case in (*classic, *modular_cases())]
    wanted = [case for case in every if re.search(args.only, ".".join(case[:2]))]
    worker, rows = Worker(args.trace), []
    if args.resume and args.rows.exists():
        rows = [row for row in map(json.loads, args.rows.read_text().splitlines()) if row.get("trains")]
        done = {row["case"] for row in rows}
        wanted = [case for case in wanted if ".".join(case[:2]).removeprefix("tests.pipelines.") not in done]
    for case in wanted:
        row = worker.examine(case, args.limit)
        if row is None:
            continue
        rows.append(row)
        print(line(row), flush=True)
        if row.get("trace"):
            print(row["trace"])
        if args.rows:
            args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = best_rows(rows)
    trained, missing = sum(bool(row.get("trains")) for row in best), sum("not_built" in row for row in best)
    print(f"{trained} train, {len(best) - trained - missing} refused, {missing} not built, of {len(best)} classes")
    if not args.only and not args.no_page:
        is_modular = lambda row: "ModularPipeline" in row.get("pipeline", "")  # noqa: E731
        first, _, _ = PAGE.read_text().partition(MODULAR_TITLE)
        if not args.modular:
            first = page([row for row in best if not is_modular(row)])
        PAGE.write_text(first.rstrip() + "\n\n" + modular_section([row for row in best if is_modular(row)]))


if __name__ == "__main__":
    main()
