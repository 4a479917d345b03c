"""What holds for the package as a whole: what importing costs, which way imports point, and how long a file may be."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import tilewise
from tilewise import dispatch

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tilewise"

# Who may import whom: each row may import the rows below it, and its own unit, never a row above or a neighbour.
ROWS = (
    ("__main__",),
    ("cli",),
    ("lab",),
    ("adapters", "distributed", "bench"),
    ("testing_fp8",),
    ("testing",),
    ("api",),
    ("fp8",),
    ("api_cache", "autograd_mods"),
    ("autograd", "autograd_softmax"),
    ("recall",),
    ("arguments",),
    ("dispatch",),
    ("reference",),
    ("backends",),
    ("mods", "kernels"),
    ("machine",),
    ("problem",),
)
HEIGHT = {unit: len(ROWS) - row for row, units in enumerate(ROWS) for unit in units} | {"version": 0}

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80  # without the docstring


def project_files() -> list[Path]:
    """List the files that git tracks; in an unpacked source archive, all that were not made here."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if git.returncode == 0 and git.stdout:
        return sorted(path for name in git.stdout.split("\0") if (path := ROOT / name).is_file())
    made_here = re.compile(r"(^|/)(\.venv|\.[a-z]+_cache|\.hypothesis|build|dist|site|__pycache__)/")
    files = (path for path in ROOT.rglob("*") if path.is_file())
    return sorted(path for path in files if not made_here.search(path.relative_to(ROOT).as_posix()))


def python_files() -> list[Path]:
    return [path for folder in ("src", "tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that finds this checkout and nothing else beyond the installed packages."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- what importing costs ----


def test_importing_the_package_adds_under_a_twentieth_of_a_second() -> None:
    code = "import time; start = time.perf_counter(); import tilewise; print(time.perf_counter() - start)"
    # The fastest of several: noise on a shared machine only ever adds.
    assert min(float(run_python(code)) for _ in range(7)) < 0.05


def loaded_by(code: str) -> set[str]:
    """Name the third-party packages that running the code loads into a fresh interpreter."""
    program = f"""
before = set(sys.modules)
{code}
import json
# Compiled modules register helpers of their own that come from no file.
new = [name for name in set(sys.modules) - before if getattr(sys.modules[name], "__file__", None)]
names = {{name.partition(".")[0] for name in new}}
print(json.dumps(sorted(names - set(sys.stdlib_module_names))))
"""
    return set(json.loads(run_python(program)))


def test_importing_the_package_loads_nothing_third_party() -> None:
    assert loaded_by("import tilewise; dir(tilewise)") == {"tilewise"}


def test_the_numpy_reference_loads_numpy_alone_even_when_used() -> None:
    code = """
import numpy as np
from tilewise import reference
q, k, v, d_out = np.random.default_rng(0).standard_normal((4, 16, 8))
reference.naive_attention(q, k, v, causal=True)
out, lse = reference.tiled_attention(q, k, v, causal=True, window=(4, 0))
reference.tiled_attention_backward(q, k, v, out, lse, d_out, causal=True, window=(4, 0))
"""
    assert loaded_by(code) == {"numpy", "tilewise"}


def test_every_public_name_is_there_when_asked_for() -> None:
    assert set(dir(tilewise)) == set(tilewise.__all__)
    for name in tilewise.__all__:
        assert getattr(tilewise, name) is not None


def test_a_misspelt_public_name_is_told_apart_and_shown_the_real_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'atention'; it has .*attention"):
        getattr(tilewise, "atention")  # noqa: B009 - the type checker would refuse the plain spelling


# ---- which way imports point ----


def is_type_checking_block(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST) -> Iterator[str]:
    """Yield every dotted name imported below a node, in functions too, except for type checking alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and is_type_checking_block(child):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


def own_imports(path: Path) -> set[tuple[str, ...]]:
    """Give what a file imports of this package, as paths below it: ("problem", "mask", "Band") and the like."""
    names = {tuple(name.split(".")) for name in imports(ast.parse(path.read_text()))}
    return {name[1:] for name in names if name[0] == "tilewise"}


def unit_of_import(name: tuple[str, ...]) -> str:
    """Name the row's unit that an import reaches; the version is nobody's, and so below all."""
    if name == ("__version__",):
        return "version"
    if name and name[0] in HEIGHT:
        return name[0]
    return "api"  # `import tilewise`, and `from tilewise import attention`


def unit_of_file(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_every_module_has_its_place_in_the_order() -> None:
    assert {unit_of_file(path) for path in modules()} <= set(HEIGHT)


def test_imports_point_downwards_only() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {'.'.join(name)}"
        for path in modules()
        for name in own_imports(path)
        if unit_of_import(name) != unit_of_file(path) and HEIGHT[unit_of_import(name)] >= HEIGHT[unit_of_file(path)]
    ]
    assert wrong == []


def test_the_test_of_imports_sees_an_arrow_that_points_upwards(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from tilewise.cli import app\n"
        "else:\n    pass\n"
        "def function():\n    from tilewise.api import attention\n"
        "import tilewise.dispatch\n"
        "from tilewise import __version__, machine, softmax\n"
    )
    assert own_imports(file) == {("api", "attention"), ("dispatch",), ("__version__",), ("machine",), ("softmax",)}
    assert {unit_of_import(name) for name in own_imports(file)} == {"api", "dispatch", "version", "machine"}


def reached_from(backend: str) -> set[str]:
    """Name the modules of backends/ that a backend imports, and those that they import, and so on."""
    reached: set[str] = set()
    ahead = {backend}
    while ahead:
        reached |= ahead
        imported = {name for module in ahead for name in own_imports(PACKAGE / "backends" / f"{module}.py")}
        ahead = {name[1] for name in imported if name[0] == "backends"} - reached
    return reached


def test_no_backend_reaches_another_not_even_through_what_they_share() -> None:
    backends = {*dispatch.BACKENDS, *dispatch.ON_REQUEST, "numpy_tiled"}
    assert {"naive", "torch_tiled", "torch_sdpa"} <= backends
    assert {name: reached_from(name) & backends for name in backends} == {name: {name} for name in backends}


def test_what_is_asked_and_what_it_costs_is_plain_data_without_torch_at_import() -> None:
    named = [".".join(("tilewise", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in modules()]
    plain = [name for name in named if name.startswith(("tilewise.problem.", "tilewise.machine."))]
    loaded = loaded_by("import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in plain))
    assert loaded <= {"numpy", "tilewise"}


# ---- how long a file may be, and what it may say ----


def test_no_file_is_longer_than_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function from its def to its end, without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def test_no_function_is_longer_than_a_screen_or_two() -> None:
    too_long = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": code_lines(node)
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) >= MAX_FUNCTION_LINES
    }
    assert too_long == {}


# Spelt in pieces, so that this file does not find itself.
ONE_MACHINES_WORDS = re.compile(
    "|".join(
        (
            "py" + r"pi\.org",
            "pythonhosted" + r"\.org",
            "npm" + r"js\.(com|org)",
            "deb" + r"ian\.org",
            r"download\.py" + r"torch\.org",
            "--(extra-)?index" + "-url",
            "--find" + "-links",
            r"(?<![\w.])/(work|root|home|tmp|opt|Users)" + r"/\w",
        )
    )
)


def test_no_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    found = []
    for path in project_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # data, not text
            continue
        for number, line in enumerate(lines, start=1):
            if ONE_MACHINES_WORDS.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_the_newest_entry_of_the_changelog_is_the_packages_version() -> None:
    versions = re.findall(r"^## \[(\d[^\]]*)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == tilewise.__version__
