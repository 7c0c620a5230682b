"""Read names and types from source files without importing them, since torch and transformers take seconds."""

import ast
import functools
import importlib.util
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Setting:
    """A field of a dataclass.

    Attributes:
        type: its annotation as written: `float | None`.
        default: `dataclasses.MISSING` if there is none, None if it is not a literal.
    """

    type: str
    default: Any


@functools.cache
def parse_module(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def read_fields(path: Path, name: str) -> dict[str, Setting]:
    """Read the fields of the dataclass `name` in a file, without those it inherits."""
    body = next(node.body for node in parse_module(path).body if isinstance(node, ast.ClassDef) and node.name == name)
    lines = [
        node for node in body if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
    ]
    return {node.target.id: Setting(ast.unparse(node.annotation), _default(node.value)) for node in lines}


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):  # field(...)
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if "default_factory" in given:
            return None
        value = given.get("default")
    if value is None:
        return MISSING
    try:
        return ast.literal_eval(value)
    except ValueError:
        return None


def read_names(path: Path, variable: str) -> list[str]:
    """Read the keys of a dict, or the items of a list, that a file assigns to a variable; `**other` is followed."""
    for node in parse_module(path).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(target, ast.Name) and target.id == variable for target in targets):
            continue
        if not isinstance(node.value, ast.Dict):
            return list(ast.literal_eval(node.value))
        pairs = zip(node.value.keys, node.value.values, strict=True)
        return [name for key, value in pairs for name in ([key.value] if key else read_names(path, value.id))]
    raise LookupError(f"{path.name} assigns nothing to {variable}.")


@functools.cache
def config_fields() -> dict[str, Setting]:
    """Return the settings of `DiffusionGRPOConfig`, including those of transformers' `TrainingArguments`."""
    (transformers,) = importlib.util.find_spec("transformers").submodule_search_locations
    settings = read_fields(Path(transformers, "training_args.py"), "TrainingArguments")
    for file, name in (
        ("sampling.py", "SamplingSettings"),
        ("update.py", "UpdateSettings"),
        ("run.py", "RunSettings"),
        ("quantization.py", "QuantizationSettings"),
        ("settings.py", "DiffusionGRPOConfig"),
    ):
        settings = settings | read_fields(PACKAGE / "config" / file, name)
    return settings


def loss_names() -> list[str]:
    """Return the keys of `algorithms.ALGORITHMS`."""
    return read_names(PACKAGE / "algorithms" / "__init__.py", "ALGORITHMS")


PROCESSES = PACKAGE / "policy" / "processes.py"


def process_names() -> list[str]:
    """Return the keys of `processes.PROCESSES`, including added ones once that module is imported."""
    imported = sys.modules.get("diffusion_grpo.policy.processes")
    return read_names(PROCESSES, "PROCESSES") if imported is None else list(imported.PROCESSES)


def log_prob_names() -> list[str]:
    """Return the keys of `processes.LOG_PROBS`."""
    return read_names(PROCESSES, "LOG_PROBS")


def silent_last_step() -> list[str]:
    """Return the names of the processes without noise in their last step, including added ones."""
    if imported := sys.modules.get("diffusion_grpo.policy.processes"):
        return [name for name, process in imported.PROCESSES.items() if process.is_silent_at_end]
    (table,) = (
        node.value
        for node in parse_module(PROCESSES).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PROCESSES"
    )
    return [
        key.value
        for key, call in zip(table.keys, table.values, strict=True)
        if any(keyword.arg == "is_silent_at_end" for keyword in call.keywords)
    ]


def step_weight_names() -> list[str]:
    """Return the keys of `step_weights.STEP_WEIGHTS`."""
    return read_names(PACKAGE / "policy" / "step_weights.py", "STEP_WEIGHTS")


def aggregation_names() -> list[str]:
    """Return `advantages.AGGREGATIONS`."""
    return read_names(PACKAGE / "algorithms" / "advantages.py", "AGGREGATIONS")


def reward_names() -> list[str]:
    """Return the keys of `rewards.REWARDS`."""
    return read_names(PACKAGE / "rewards" / "builtin.py", "REWARDS")
