"""The packages stand on each other in one order, and no module imports itself round a circle."""

import ast
import graphlib
from pathlib import Path

import diffusion_grpo

ROOT = Path(__file__).parent.parent / "diffusion_grpo"
# lowest first: a package imports only those before it
ORDER = ["tiny", "media", "pipelines", "policy", "algorithms", "config", "distributed", "rewards", "data"]
ORDER += ["weights", "report", "rollout", "training", "trainer", "sampling", "planning", "cli"]
ALIASES = {"__init__", "losses", "quiet"}  # the root's names for what lies below, and what it does before all else


def modules():
    """Each module's dotted name below the root, and its file."""
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def imports(name, path, known):
    """The modules of this package that a module imports anywhere, also under TYPE_CHECKING and in functions."""
    package = name.split(".") if path.name == "__init__.py" and name != "__init__" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
        elif (node.module or "").split(".")[0] == "diffusion_grpo":
            base = node.module.split(".")[1:]
        else:
            continue
        for alias in node.names:
            full = ".".join([*base, alias.name])
            yield full if full in known else ".".join(base)


def graph():
    known = dict(modules())
    return {name: {found for found in imports(name, path, known) if found} for name, path in known.items()}


def test_a_package_imports_only_those_below_it():
    edges = [(name.split(".")[0], found.split(".")[0], name) for name, others in graph().items() for found in others]
    inside = [(own, other, name) for own, other, name in edges if not {own, other} & ALIASES]
    wrong = [f"{name} imports {other}" for own, other, name in inside if ORDER.index(other) > ORDER.index(own)]
    assert not wrong, "\n".join(sorted(wrong))


def test_no_module_imports_itself_round_a_circle():
    assert list(graphlib.TopologicalSorter(graph()).static_order())  # the error names the circle


def test_every_package_is_in_the_order():
    assert {name.split(".")[0] for name, _ in modules()} - ALIASES == set(ORDER)


def test_the_root_lists_its_names_though_it_imports_them_late():
    assert {"DiffusionGRPOTrainer", "__version__"} <= {*dir(diffusion_grpo)}
