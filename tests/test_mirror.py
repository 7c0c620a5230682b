"""Tests mirror the folders: `diffusion_grpo/policy/drivers.py` is tested in `tests/policy/test_drivers.py`."""

import ast
from pathlib import Path

ROOT, TESTS = Path(__file__).parent.parent / "diffusion_grpo", Path(__file__).parent
# module with functions but without a test file of its own: why
EXCEPTIONS = {"__init__.py": "names what lies below when it is asked for; tests/config/test_settings.py times it"}


def has_logic(path: Path) -> bool:
    """Whether a module has a function; without one it is constants, dataclasses, or names of other modules."""
    return any(
        isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(ast.parse(path.read_text()))
    )


def find_test(path: Path) -> Path:
    """Return where the tests of a module belong; those of a package's own code are named after the package."""
    relative = path.relative_to(ROOT)
    name = relative.parent.name if path.name == "__init__.py" else path.stem
    return TESTS / relative.parent / f"test_{name}.py"


def test_every_module_with_logic_has_its_test_file():
    modules = {str(path.relative_to(ROOT)): path for path in ROOT.rglob("*.py") if has_logic(path)}
    missing = {name: find_test(path) for name, path in modules.items() if not find_test(path).is_file()}
    wanted = [
        f"{name}: write {test.relative_to(TESTS.parent)}" for name, test in missing.items() if name not in EXCEPTIONS
    ]
    assert not wanted, "\n".join(sorted(wanted))
    assert missing.keys() == EXCEPTIONS.keys(), "an exception is no longer one: take it out of the table"
