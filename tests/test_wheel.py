"""What a user gets: the built wheel, installed alone into a fresh environment that has no Triton."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Of the packages installed here the fresh environment sees all but these: tilewise itself, in any form of
# installation, and Triton, which the CPU path must not need.
LEFT_OUT = ("tilewise", "_tilewise", "_editable_impl", "__editable__", "triton", "__pycache__")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build the source archive, and the wheel from that archive, as a release does."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=ROOT)
    (wheel,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def fresh_environment(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with this one's packages but for LEFT_OUT, install the wheel, and give the folder."""
    wheel, _ = archives
    folder = tmp_path_factory.mktemp("environment")
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for installed in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for entry in installed.iterdir():
            if not entry.name.startswith(LEFT_OUT) and entry.suffix != ".pth":
                (dependencies / entry.name).symlink_to(entry)
    home = folder / "venv"
    venv.EnvBuilder(with_pip=False, symlinks=True).create(home)
    (site_packages,) = home.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", wheel, cwd=folder)
    return home


def test_the_wheel_is_one_for_every_platform_and_holds_types_and_data(archives: tuple[Path, Path]) -> None:
    wheel, _ = archives
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert {"tilewise/py.typed"} < expected
    assert any(name.startswith("tilewise/data/") for name in expected)
    assert expected == {name for name in names if not name.partition("/")[0].endswith(".dist-info")}


def test_the_source_archive_holds_what_a_packager_needs(archives: tuple[Path, Path]) -> None:
    _, source = archives
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "src/tilewise/__init__.py"} <= names
    assert "tests/test_wheel.py" in names


USE = """
import importlib.util, json, sys
import numpy as np

import tilewise
from tilewise import reference

q, k, v = np.random.default_rng(0).standard_normal((3, 48, 16))
naive = reference.naive_attention(q, k, v, causal=True)
tiled, _ = reference.tiled_attention(q, k, v, causal=True, block_q=16, block_kv=8)
torch_loaded_by_reference = "torch" in sys.modules

import torch

out = tilewise.attention(*(torch.from_numpy(x)[None, None] for x in (q, k, v)), causal=True)[0, 0].numpy()

# A score is a sum of dim terms, and its rounding error is the relative error of its exponential; an output is a sum of
# at most len_kv values, weighted by those.
length, dim = q.shape
size_of_score = np.abs(q) @ np.abs(k).T * dim**-0.5
bound = (dim * size_of_score.max() + length) * np.finfo(np.float64).eps * np.abs(v).max()
print(json.dumps({
    "file": tilewise.__file__,
    "reference file": reference.__file__,
    "version": tilewise.__version__,
    "torch loaded by reference": torch_loaded_by_reference,
    "triton found": importlib.util.find_spec("triton") is not None,
    "tiled error": float(np.abs(tiled - naive).max() / bound),
    "attention error": float(np.abs(out - naive).max() / bound),
}))
"""


def test_the_installed_wheel_computes_attention_with_triton_absent(fresh_environment: Path) -> None:
    # -I: neither the folder this runs in nor PYTHONPATH may lend the checkout.
    said = json.loads(run(fresh_environment / "bin" / "python", "-I", "-c", USE, cwd=fresh_environment))
    assert Path(said["file"]).is_relative_to(fresh_environment)
    assert Path(said["reference file"]).is_relative_to(fresh_environment)
    assert said["version"]
    assert not said["triton found"]
    assert not said["torch loaded by reference"]
    assert said["tiled error"] <= 1
    assert said["attention error"] <= 1


def test_the_installed_command_starts(fresh_environment: Path) -> None:
    python = fresh_environment / "bin" / "python"
    assert "bench" in run(python, "-I", python.with_name("tilewise"), "--help", cwd=fresh_environment)
