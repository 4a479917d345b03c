"""Masks to look at, by name: those of `tilewise.mods.masks` with values that suit a length, or one from a file.

>>> print(Blocks.of(*find("sliding_window:100", 512, 512), len_q=512, len_kv=512).draw())
512 queries x 512 keys in tiles of 128 x 128: 0 full (#), 7 partial (+), 9 empty (.)
+...
++..
.++.
..++
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from tilewise.backends.block_lists import Blocks, MaskMod
from tilewise.mods import masks

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["SAMPLES", "Blocks", "Mask", "find"]

Mask: TypeAlias = "tuple[MaskMod, tuple[torch.Tensor, ...]]"


def find(text: str, len_q: int, len_kv: int, device: torch.device | str = "cpu") -> Mask:
    """Give the mask that a text names, and its tensors on a device.

    Args:
        text: a name of SAMPLES, such as "documents", with whole numbers for its function if there are more words, such
            as "sliding_window:256,0"; or "FILE.py:NAME", a mask_mod in that file or a pair of one and its tensors.
        len_q, len_kv: what samples are made for.

    Raises:
        ValueError: there is no such mask, or it does not take these numbers.
    """
    name, _, rest = text.rpartition(":") if ".py:" in text else text.partition(":")
    if name.endswith(".py"):
        made = _in_file(Path(name), rest)
    elif name not in SAMPLES:
        raise ValueError(f"mask must be dense, FILE.py:FUNCTION, or one of {', '.join(SAMPLES)}; got {text!r}")
    elif rest:
        made = _with_numbers(name, rest)
    else:
        made = SAMPLES[name](len_q, len_kv)
    function, tensors = made
    return function, tuple(tensor.to(device) for tensor in tensors)


def _with_numbers(name: str, text: str) -> Mask:
    """Call the function of a mask with the numbers of a text."""
    try:
        return cast("Mask", getattr(masks, name)(*map(int, text.split(","))))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"mask {name} does not take {text!r}: {error}") from None


def _in_file(file: Path, name: str) -> Mask:
    """Load a mask from a file of Python."""
    if not file.is_file():
        raise ValueError(f"cannot read {file}: there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None  # noqa: S101 - a name that ends in .py has one
    assert spec.loader is not None  # noqa: S101
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if callable(found):
        return found, ()
    if isinstance(found, tuple) and len(found) == 2 and callable(found[0]):
        return cast("Mask", found)
    raise ValueError(f"{file} has no mask_mod {name}: it must be a function, or a pair of one and its tensors")


# ---- samples --------------------------------------------------------------------------------------------------------


def _documents(len_q: int, len_kv: int) -> Mask:
    return cast("Mask", masks.documents(_uneven(max(len_q, len_kv))))


def _uneven(length: int, count: int = 6) -> torch.Tensor:
    """Number the positions of documents, each longer than the one before: (length,)."""
    return (torch.arange(length).double() / max(length, 1)).sqrt().mul(count).long()


def _shared_prefix(len_q: int, len_kv: int) -> Mask:
    """One prompt of a quarter, and six answers behind it."""
    length = max(len_q, len_kv)
    start = torch.tensor([0, *(length // 4 + (length - length // 4) * part // 6 for part in range(7))])
    document = torch.searchsorted(start[1:].contiguous(), torch.arange(length), right=True)
    return cast("Mask", masks.shared_prefix(document, start, torch.zeros(7, dtype=torch.int64)))


def _cross_images(len_q: int, len_kv: int) -> Mask:
    """Four images, each seen from when it comes until the next but one."""
    image = torch.arange(len_kv) * 4 // max(len_kv, 1)
    interval = torch.tensor([[len_q * part // 4, -(-len_q * (part + 2) // 4)] for part in range(4)])
    return cast("Mask", masks.cross_images(image, interval))


def _sides(length: int, unit: int = 1) -> tuple[int, int]:
    """Give height and width, multiples of unit, of a picture of about as many positions."""
    height = max(math.isqrt(length) // unit, 1) * unit
    return height, max(length // height // unit, 1) * unit


def _neighbourhood(len_q: int, len_kv: int) -> Mask:
    height, width = _sides(max(len_q, len_kv))
    return cast("Mask", masks.neighbourhood(height, width, 13, 13))


def _tiled_window(len_q: int, len_kv: int) -> Mask:
    """Tiles of 8 x 8 that see three by three, and text behind the picture."""
    length = max(len_q, len_kv)
    height, width = _sides(length, 8)
    canvas = (height, width)
    return cast("Mask", masks.tiled_window(canvas, (24, 24), (8, 8), text=max(length - height * width, 0)))


SAMPLES: dict[str, Callable[[int, int], Mask]] = {
    "causal": lambda *_: cast("Mask", masks.causal()),
    "sliding_window": lambda _, len_kv: cast("Mask", masks.sliding_window(len_kv // 8)),
    "dilated_window": lambda _, len_kv: cast("Mask", masks.dilated_window(len_kv // 8, 4)),
    "global_window": lambda len_q, len_kv: cast(
        "Mask", masks.global_window(len_kv // 16, torch.arange(max(len_q, len_kv)) < len_kv // 64)
    ),
    "prefix_lm": lambda _, len_kv: cast("Mask", masks.prefix_lm(len_kv // 4)),
    "documents": _documents,
    "shared_prefix": _shared_prefix,
    "cross_images": _cross_images,
    "neighbourhood": _neighbourhood,
    "tiled_window": _tiled_window,
}
