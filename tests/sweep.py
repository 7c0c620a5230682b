"""Which pipelines of diffusers train? Asks `check_pipeline` about every class that diffusers exports.

    make sweep ARGS="--diffusers PATH"      # PATH: a checkout of huggingface/diffusers

In: a checkout of diffusers, of which only `tests/` is used: its tiny components and inputs. Out: a table, class by
class, and docs/supported_pipelines.md. Classes without components there, such as modular ones, are built in
sweep_builders.py. Each class runs in a worker process under a time limit; a worker that hangs or dies is replaced, and
the sweep goes on. After a change, `--rows FILE --resume --only CLASS` examines some classes again and keeps the other
rows.
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
import tempfile
import time
import traceback
import unittest.mock
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING
from diffusers.pipelines.auto_pipeline import _get_model
from diffusers.pipelines.pipeline_utils import DeprecatedPipelineMixin
from diffusers.utils.import_utils import DummyObject

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))

import tiny_pipelines  # noqa: E402
from stand_ins import offline  # noqa: E402
from sweep_builders import BUILDERS, as_modular, build, build_ours, load_case  # noqa: E402
from tiny_runs import train_briefly  # noqa: E402

from diffusion_grpo import check_pipeline  # noqa: E402

PAGE = ROOT / "docs" / "supported_pipelines.md"
WHERE = "--diffusers must name a checkout of diffusers' sources: git clone https://github.com/huggingface/diffusers"
TINY, OURS = "tiny_pipelines", "sweep_builders"  # in place of a module of diffusers' tests
SKIPPED = re.compile("Slow|Nightly|Integration|Dummies")


def modular_cases() -> list[tuple[str, str]]:
    """(module, name) of the tiny pipelines of models that have no classic form, and of our modular ones."""
    tiny = [(TINY, name) for name in tiny_pipelines.MODULAR if not name.startswith("modular_")]
    return tiny + [(OURS, name) for name in BUILDERS if name.endswith("ModularPipeline")]


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


def modular_class(pipeline: type[DiffusionPipeline], config: dict[str, Any]) -> type | None:
    """The modular class of the same model: as diffusers chooses it, or by its name; None where there is none."""
    choose = MODULAR_PIPELINE_MAPPING.get(_get_model(pipeline.__name__))
    name = pipeline.__name__.replace("Pipeline", "ModularPipeline") if choose is None else choose(config)
    return getattr(diffusers, name, None)


def examine(module: str, name: str, is_modular: bool, verbose: bool, updates: int) -> dict[str, Any] | None:
    """One row of the table, after some updates, or None where the class builds no pipeline."""
    row, start = {"case": [module, name, is_modular], "pipeline": name}, time.perf_counter()
    wraps = is_modular and module != TINY and not name.endswith("ModularPipeline")
    if module in (TINY, OURS):
        make = functools.partial(tiny_pipelines.build if module == TINY else build_ours, name)
        pipeline = getattr(diffusers, name, None)
    elif (cls := load_case(module, name)) is not None:
        make, pipeline = functools.partial(build, cls), cls.pipeline_class
    else:
        return None
    if wraps and modular_class(pipeline, {}) is None:
        return None
    try:
        with offline():
            pipe, inputs = make()
            if wraps:
                pipe, inputs = as_modular(
                    modular_class(type(pipe), dict(pipe.config)).__name__, lambda: (pipe, inputs)
                )
            # the tests of some classes derive one of their own
            row["pipeline"] = next(cls.__name__ for cls in type(pipe).__mro__ if hasattr(diffusers, cls.__name__))
    except Exception as error:
        trace = traceback.format_exc() if verbose else None
        return row | {"not_built": f"{type(error).__name__}: {error}"[:300], "trace": trace}
    try:
        with offline():
            # image-to-image takes `strength` of the steps
            report = check_pipeline(pipe, inputs, num_inference_steps=math.ceil(4 / inputs.get("strength", 1.0)))
            if updates and report.trains:
                with tempfile.TemporaryDirectory() as folder:
                    train_briefly(pipe, inputs, folder, report.steps, updates)
    except Exception as error:
        trace = traceback.format_exc() if verbose else None
        last = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"ESCAPED {type(error).__name__}: {error}"[:300] + f" [{Path(last.filename).name}:{last.lineno}]"
        return row | {"trains": False, "reason": reason, "trace": trace}
    if has_inner_error(vars(report)):
        try:
            with offline():
                pipe, inputs = make() if not wraps else (pipe, inputs)
                pipe(**inputs, num_inference_steps=4)
        except Exception:
            row["is_broken"] = True  # without us as well
    row |= vars(report) | {"pipeline": row["pipeline"], "seconds": time.perf_counter() - start}
    return row | ({"updates": updates} if report.trains else {})


def work(connection, verbose: bool, updates: int) -> None:
    """Worker: takes (module, class) until it is told to stop."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while (case := connection.recv()) is not None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                row = examine(*case, verbose, updates)
            except BaseException as error:
                row = {"case": list(case), "not_built": f"{type(error).__name__}: {error}"[:300]}
        connection.send(row)


class Worker:
    """A process that examines classes one after the other; a new one takes over when it hangs or dies."""

    def __init__(self, verbose: bool, updates: int):
        self.options, self.process = (verbose, updates), None

    def examine(self, case: tuple[str, str, bool], limit: float) -> dict[str, Any] | None:
        """The row of one class, within `limit` seconds."""
        if self.process is None:
            context = multiprocessing.get_context("fork")  # what is imported already need not be imported again
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, *self.options), daemon=True)
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
        return {"case": list(case), "not_built": problem}


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
    return f"{row.get('pipeline', row['case'][1]):48} {names} {numbers} {verdict:9} {reason}"


def best_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a pipeline class: a class counts as its best test configuration."""
    rank = lambda row: (bool(row.get("trains")), "not_built" not in row)  # noqa: E731
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        name = row.setdefault("pipeline", row["case"][1])
        if name not in best or rank(row) > rank(best[name]):
            best[name] = row
    return [best[name] for name in sorted(best)]


def exported(is_modular: bool) -> list[str]:
    """The names of all pipeline classes that diffusers exports, classic or modular."""
    names = [name for name in dir(diffusers) if "Pipeline" in name and not re.search("(Output|Blocks|Config)$", name)]
    return [name for name in names if ("ModularPipeline" in name) == is_modular]


def why_not_counted(name: str, row: dict[str, Any]) -> str | None:
    """Why an exported class has a row only if it trains; None if it always has one."""
    if row.get("is_broken"):
        return f"its call fails in diffusers {diffusers.__version__} itself"
    if re.fullmatch("(Diffusion|Modular)Pipeline|AutoPipelineFor.*", name):
        return "a base class, or one that chooses another class"
    if "Onnx" in name:
        return "runs in ONNX Runtime, without gradients"
    cls = getattr(diffusers, name)
    if isinstance(cls, DummyObject) or "deprecated" in cls.__module__ or issubclass(cls, DeprecatedPipelineMixin):
        return "deprecated by diffusers"
    if name == "LTX2VideoDiffusionDecodePipeline":
        return "denoises within one call of its network"
    if "Modular" not in name and not any("scheduler" in key for key in inspect.signature(cls.__init__).parameters):
        return "has no denoising loop"
    return None


def why_not_trained(row: dict[str, Any]) -> str:
    """The reason that docs/supported_pipelines.md gives for a class that does not train."""
    why = _cell(row.get("reason") or row.get("not_built")).removeprefix(row["pipeline"]).strip()
    return f"not examined: {why}" if "not_built" in row or has_inner_error(row) else why


def table(head: str, names: dict[str, list[str]]) -> str:
    """A table with the classes of each key, the key with most classes first."""
    lines = [f"| {key} | {', '.join(classes)} |" for key, classes in sorted(names.items(), key=lambda it: -len(it[1]))]
    return "\n".join([f"| {head} | classes |", "|---|---|", *lines])


def page(rows: Iterable[dict[str, Any]]) -> str:
    """docs/supported_pipelines.md, in which every exported class has its place."""
    by_name = {row["pipeline"]: row for row in best_rows(rows)}
    left_out, counts, tables = defaultdict(list), [], []
    for is_modular in (False, True):
        trained, refused = defaultdict(list), defaultdict(list)
        for name in exported(is_modular):
            row = by_name.get(name, {"pipeline": name, "not_built": "no tiny components"})
            if row.get("trains"):
                trained[row["scheduler"]].append(name)
            elif why := why_not_counted(name, row):
                left_out[why].append(name)
            else:
                refused[why_not_trained(row)].append(name)
        number, others = (sum(map(len, names.values())) for names in (trained, refused))
        counts.append(f"{number} of {number + others}")
        tables += [table("trained with", trained), table("not trained, because", refused)]
    inexact = {name: row["max_ratio_error"] for name, row in by_name.items() if row.get("max_ratio_error")}
    errors = " and ".join(f"{error:.0e} ({name})" for name, error in inexact.items() if by_name[name].get("trains"))
    modular = [row for name, row in by_name.items() if "ModularPipeline" in name and row.get("trains")]
    updates = min((row.get("updates", 0) for row in modular), default=0)
    parts = [
        "# Supported pipelines",
        "Run `diffusion-grpo check MODEL` to examine a model of yours. This page says what it finds for each pipeline "
        f"class of diffusers {diffusers.__version__} with a denoising loop, around tiny random components in float32 "
        f"on a CPU: **{counts[0]} classic and {counts[1]} [modular](models/modular.md) classes train**. The first "
        f"ratio is exactly 1{f', but for {errors}' if errors else ''}. Written by `make sweep`; do not edit.",
        *tables[:2],
        "## Modular pipelines",
        *([f"Each class that trains made {updates} updates with a LoRA."] if updates else []),
        *tables[2:],
        "## Not counted",
        table("why", left_out),
    ]
    return "\n\n".join(parts) + "\n"


def has_inner_error(row: dict[str, Any]) -> bool:
    """Whether the pipeline's own call failed: that says nothing about its steps."""
    return (row.get("reason") or "").startswith(("The call ended with", "ESCAPED"))


def _cell(text: str | None) -> str:
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|")


def main(words: list[str] | None = None) -> None:
    """Runs the sweep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--diffusers", type=Path, help="checkout of diffusers' sources")
    parser.add_argument("--only", default="", help="regular expression on module.class")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one class")
    parser.add_argument("--trace", action="store_true", help="print stack traces")
    parser.add_argument("--rows", type=Path, help="also write the rows as JSON lines to this file")
    parser.add_argument("--modular", action="store_true", help="examine modular pipelines only")
    parser.add_argument("--resume", action="store_true", help="keep --rows; without --only, skip what trains there")
    parser.add_argument(
        "--train", type=int, default=0, metavar="N", help="also make N updates with each class that trains"
    )
    parser.add_argument("--no-page", action="store_true", help="leave docs/supported_pipelines.md alone")
    args = parser.parse_args(words)
    if args.resume and args.rows is None:
        sys.exit("--resume needs --rows, the file of an earlier sweep")
    if args.diffusers is None or not (args.diffusers / "tests" / "pipelines").is_dir():
        sys.exit(WHERE)
    prepare(args.diffusers.resolve())
    classic = [*cases(args.diffusers.resolve()), *((OURS, name) for name in BUILDERS if "Modular" not in name)]
    every = [(*case, False) for case in ([] if args.modular else classic)]
    every += [(*case, True) for case in (*classic, *modular_cases())]
    wanted = [case for case in every if re.search(args.only, ".".join(case[:2]))]
    worker, rows = Worker(args.trace, args.train), {}
    if args.resume and args.rows.exists():
        rows = {tuple(row["case"]): row for row in map(json.loads, args.rows.read_text().splitlines())}
        wanted = [case for case in wanted if args.only or not rows.get(case, {}).get("trains")]
    for case in wanted:
        row = worker.examine(case, args.limit)
        if row is None:
            continue
        rows[case] = row
        print(line(row), flush=True)
        if row.get("trace"):
            print(row["trace"])
        if args.rows:
            args.rows.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    best = best_rows(rows.values())
    trained, missing = sum(bool(row.get("trains")) for row in best), sum("not_built" in row for row in best)
    print(f"{trained} train, {len(best) - trained - missing} refused, {missing} not built, of {len(best)} classes")
    if not args.no_page and (args.resume or not (args.only or args.modular)):
        PAGE.write_text(page(rows.values()))


if __name__ == "__main__":
    main()
