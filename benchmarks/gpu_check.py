"""
What a GPU has to say, in one command of at most nine minutes: `make gpu-check`.

    a  ratio and drift of a short run in each precision, with compilation, attention back ends, offloading and 4 bits
    b  one update by DDP, ZeRO-2, ZeRO-3 and FSDP2 in a group of one, against one plain process
    c  seconds and peak memory at real sizes with random weights, beside the bare network and what `plan` said
    d  the demo at reduced length

Each case runs in its own process with a time limit. Its line is printed and its result stored as it ends, so a run
that is cut off leaves what it found: `results.jsonl` and `table.md` under `--out`. Cases that are timed run one after
the other; the others run side by side before them. What no longer fits into `--minutes` is listed as not run. The exit
code is 1 if a case failed.

`--tiny` runs every case with tiny networks on a CPU: whether it works, not what it takes. A machine whose packages are
too old is prepared by `benchmarks/gpu_requirements.py`.
"""

import argparse
import concurrent.futures
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SECTIONS = {
    "a": "Ratio and drift: a LoRA, two updates; `max error` is the largest distance of a first ratio from 1",
    "b": "One update in a group of one process, against one plain process",
    "c": "Real sizes with random weights: medians of two updates; `overhead` is (rollout + update) / bare network",
    "d": "The demo at reduced length",
}


@dataclass
class Case:
    """One thing to find out.

    Attributes:
        name: section and name, `a/bf16`.
        expected: seconds that it takes, about; with less left it is not begun.
        needs: another case that must have succeeded before.
        is_alone: whether it has the machine to itself.
        limit: seconds after which it is stopped.
    """

    name: str
    expected: float = 20
    needs: str | None = None
    is_alone: bool = False
    limit: float = 120

    @property
    def section(self) -> str:
        """Letter of its section."""
        return self.name[0]


@dataclass
class Result:
    """What a case left.

    Attributes:
        case: its name.
        status: ok, failed, or not run.
        seconds: it took, with its start.
        values: what it found, by column of the table.
        error: the last lines of what it printed, or why it was not run.
    """

    case: str
    status: str
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)
    error: str = ""


RATIO = (  # what compiles comes last: it takes three times as long
    "bf16 float32 fp16 nf4 int8 bf16-rollout-1 bf16-nft bf16-checkpointing bf16-group-offload bf16-offload-frozen "
    "torchao-int8 bf16-adamw-8bit bf16-sdpa-flash bf16-sdpa-efficient bf16-sdpa-cudnn bf16-sdpa-math "
    "float32-rollout-1 float32-tf32 bf16-leaf-offload bf16-nft-compile bf16-compile float32-compile fp16-compile "
    "nf4-compile"
).split()
MODES = ("DDP", "ZeRO-2", "ZeRO-3", "FSDP2")
SIZES = (  # seconds on an H100, with the start; the last two were not measured
    ("flux-bf16", 48),
    ("sd35m-lora", 40),
    ("flux-nf4", 62),
    ("sdxl", 61),
    ("sd35m-full", 38),
    ("qwen-nf4", 70),
    ("wan21", 120),
)


def list_cases() -> list[Case]:
    """Return all cases, the most telling first."""
    cases = [Case("a/model", needs=None)] + [Case(f"a/{name}", 30, "a/model") for name in RATIO]
    for trains in ("lora", "full"):
        plain = f"b/one process {trains}"
        cases += [Case(plain, needs="a/model")]
        cases += [Case(f"b/{mode} {trains}", needs=plain, limit=240) for mode in MODES]  # on a CPU ZeRO is compiled
    cases += [Case("d/demo", expected=60, limit=180)]
    cases += [Case(f"c/plan {name}", limit=180) for name, _ in SIZES]
    cases += [Case(f"c/{name}", seconds, f"c/plan {name}", True, limit=300) for name, seconds in SIZES]
    return cases


def select_cases(cases: list[Case], sections: str, names: list[str]) -> list[Case]:
    """Return the cases of some sections, or some by name, with those that they need.

    Raises:
        ValueError: there is no such section or case.
    """
    chosen = [part for part in sections.split(",") if part]
    known = {case.name: case for case in cases}
    unknown = [part for part in chosen if part not in SECTIONS] + [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no {unknown[0]!r}; sections are {', '.join(SECTIONS)}; --list names the cases.")
    wanted = {case.name for case in cases if (case.name in names if names else case.section in chosen)}
    while missing := {known[name].needs for name in wanted} - wanted - {None}:
        wanted |= missing
    return [case for case in cases if case.name in wanted]


class Check:
    """Runs cases and stores what they find.

    Args:
        out: folder of the results.
        command: makes the command line of a case from its name and the file that it writes its values to.
        seconds: for all cases together.
        machine: in words, for the head of the table.
    """

    def __init__(self, out: Path, command: Callable[[str, Path], list[str]], seconds: float, machine: str = ""):
        self.out, self.command, self.machine = out, command, machine
        self.start, self.seconds = time.monotonic(), seconds
        self.results: dict[str, Result] = {}
        self._lock = threading.Lock()
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.jsonl").write_text("")

    @property
    def left(self) -> float:
        """Seconds until the time is used up."""
        return self.start + self.seconds - time.monotonic()

    def run(self, cases: list[Case], jobs: int) -> list[Result]:
        """Run cases in their order, `jobs` side by side, then those that are alone one by one."""
        ended = {case.name: threading.Event() for case in cases}

        def run_one(case: Case) -> None:
            if case.needs is not None:
                ended[case.needs].wait()
            try:
                self._keep(self._run(case))
            finally:
                ended[case.name].set()

        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run_one, [case for case in cases if not case.is_alone]))
        for case in cases:
            if case.is_alone:
                run_one(case)
        return [self.results[case.name] for case in cases]

    def _run(self, case: Case) -> Result:
        if case.needs is not None and self.results[case.needs].status != "ok":
            return Result(case.name, "not run", error=f"needs {case.needs}, which did not end well")
        if self.left < case.expected:
            return Result(case.name, "not run", error="no time left")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            values, log = Path(folder) / "values.json", Path(folder) / "log"
            code = run_process(self.command(case.name, values), log, min(case.limit, self.left))
            took, printed = time.monotonic() - began, log.read_text(errors="replace")
            if code == 0 and values.is_file():
                found = json.loads(values.read_text())
                if "not run" in found:
                    return Result(case.name, "not run", took, error=found["not run"])
                return Result(case.name, "ok", took, found)
        ending = "stopped at its time limit" if code is None else f"exit code {code}"
        lines = [line for line in printed.splitlines() if line.strip()][-12:]
        return Result(case.name, "failed", took, error="\n".join([ending, *lines]))

    def _keep(self, result: Result) -> None:
        with self._lock:
            self.results[result.case] = result
            with (self.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(vars(result)) + "\n")
            (self.out / "table.md").write_text(write_table(list(self.results.values()), self.machine))
            print(write_line(result), flush=True)


def run_process(command: list[str], log: Path, limit: float) -> int | None:
    """Run a command, its output in a file; return its exit code, or None if it was stopped at the limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def write_line(result: Result) -> str:
    """Return one line for the terminal, and the error's below it."""
    found = ", ".join(f"{name} {_show(value)}" for name, value in result.values.items())
    line = f"{result.case:<24} {result.status:<8} {result.seconds:6.1f} s  {found}"
    return line + "".join(f"\n    {text}" for text in result.error.splitlines())


def write_table(results: list[Result], machine: str) -> str:
    """Return Markdown: a table for each section, then what failed or was not run."""
    text = f"{machine}\n"
    for section, title in SECTIONS.items():
        rows = [result for result in results if result.case[0] == section and result.status == "ok"]
        columns = list(dict.fromkeys(name for row in rows for name in row.values))
        if not columns:
            continue
        text += f"\n{title}:\n\n| case | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
        for row in rows:
            cells = [_show(row.values[name]) if name in row.values else "" for name in columns]
            text += f"| {row.case[2:]} | {' | '.join(cells)} |\n"
    for status in ("failed", "not run"):
        named = [result for result in results if result.status == status]
        text += "".join(f"\n* {status}: {row.case}: {' / '.join(row.error.splitlines())}" for row in named)
    return text + "\n"


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if value == 0 or 0.01 <= abs(value) < 1e4 else f"{value:.1e}"
    return str(value)


def describe_machine() -> str:
    """Return the GPU, or the processor, and the versions that matter."""
    code = "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    version, _, device = found.stdout.strip().partition(" ")
    return f"{device or f'{os.cpu_count()} cores of {platform.machine()}'}, PyTorch {version or 'not found'}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line, that of this process by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default="a,b,c,d", help="default: %(default)s")
    parser.add_argument("--cases", default="", help="names, separated by commas, instead of sections")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all cases together; default: %(default)s")
    parser.add_argument(
        "--jobs", type=int, help="cases that run side by side if they are not timed; default: by the cores"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_check"), help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny networks, on a CPU too: whether it works")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    names = [name for name in options.cases.split(",") if name]
    try:
        cases = select_cases(list_cases(), options.sections, names)
    except ValueError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{case.name:<24} {case.expected:3.0f} s" for case in cases))
        return 0
    machine = describe_machine()
    print(machine, flush=True)
    work = Path(tempfile.mkdtemp())

    def command(name: str, values: Path) -> list[str]:
        file = ROOT / "benchmarks" / "gpu_cases.py"
        own = [sys.executable, str(file), name, "--values", str(values), "--work", str(work)]
        return [*own, "--tiny"] if options.tiny else own

    jobs = options.jobs or max(1, min(4, (os.cpu_count() or 1) // 4))
    try:
        check = Check(options.out, command, 60 * options.minutes, machine)
        results = check.run(cases, jobs)
    finally:
        shutil.rmtree(work)
    counts = {status: sum(result.status == status for result in results) for status in ("ok", "failed", "not run")}
    took = time.monotonic() - check.start
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f", {took:.0f} s; see {options.out}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
