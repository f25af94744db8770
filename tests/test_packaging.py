"""The package as it is laid out: the links, the lazy names, what a build will ship."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import turbo_compile.passes
import turbo_compile.plans.plan

ROOT = Path(__file__).resolve().parents[1]


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter that starts at the root of the repository."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_links_lead_to_the_one_copy() -> None:
    for name in ("passes", "plans"):
        link = ROOT / "turbo_compile" / name
        assert link.is_symlink() and not link.readlink().is_absolute()
        assert link.resolve() == ROOT / name
    assert Path(turbo_compile.passes.__file__).resolve() == ROOT / "passes" / "__init__.py"
    assert Path(turbo_compile.plans.plan.__file__).resolve() == ROOT / "plans" / "plan.py"


def test_importing_the_package_loads_neither_torch_nor_transformers() -> None:
    heavy = "[name for name in ('torch', 'transformers') if name in sys.modules]"
    assert python(f"import sys, turbo_compile; print({heavy})") == "[]"
    assert python(f"import sys; from turbo_compile import Plan, PlanError; Plan(); print({heavy})") == "[]"


def test_the_function_is_not_hidden_by_the_package_of_its_name() -> None:
    """A stand-in for api.py, since the real one imports transformers."""
    code = (
        "import sys, types; api = types.ModuleType('turbo_compile.api'); api.turbo_compile = lambda: 'the function';"
        "sys.modules[api.__name__] = api; from turbo_compile import turbo_compile; print(turbo_compile())"
    )
    assert python(code) == "the function"


def test_an_unknown_name_is_an_attribute_error_and_dir_lists_the_known() -> None:
    assert not hasattr(turbo_compile, "no_such_name")
    assert set(turbo_compile.__all__) <= set(dir(turbo_compile))


def test_errors_are_sorted_by_who_moves_next() -> None:
    from turbo_compile import CaptureError, InvalidProgram, PlanError, TurboCompileError, UnsupportedOp
    from turbo_compile.errors import RankError

    for kind in (CaptureError, InvalidProgram, PlanError, RankError, UnsupportedOp):
        assert issubclass(kind, TurboCompileError)
    assert issubclass(PlanError, ValueError)
    assert issubclass(UnsupportedOp, NotImplementedError)


def test_a_build_ships_every_package() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [ROOT / "turbo_compile", ROOT / "passes", ROOT / "plans"]
    found = set()
    for folder in folders:
        for file in folder.rglob("__init__.py"):
            inside = file.parent.relative_to(ROOT).parts
            found.add(".".join(inside if inside[0] == "turbo_compile" else ("turbo_compile", *inside)))
    assert sorted(found) == sorted(listed)
