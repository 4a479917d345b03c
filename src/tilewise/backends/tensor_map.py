"""Tensor maps: how a kernel's tensor memory accelerator sees a tensor, as the CUDA driver encodes it.

A map is 128 opaque bytes that hold the tensor's address, shape and strides, and the box that one copy moves. Making one
costs the host more than a launch, and only the address changes from call to call. So a map is made once, and later
calls write the address into it. The driver's own ``cuTensorMapReplaceAddress`` shows, when a map is made, that this is
all that a new address changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.backends.driver import Driver

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}


class TensorMap(NamedTuple):
    """How a kernel sees a tensor.

    ``shape`` and ``strides`` count elements, outermost axis first, at most five axes, the last one dense; they need not
    be the tensor's own. ``box`` is the tile that one copy moves. In shared memory it lies as wgmma wants it, unless
    ``swizzle`` names a width in bytes (0 = as it is).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int | None = None


class Mapped(NamedTuple):
    """An argument of a kernel: a tensor, through a map."""

    tensor: torch.Tensor
    map: TensorMap


def kind_of(kernel: str, name: str, dtype: torch.dtype, how: TensorMap) -> str:
    """Give a map's type in Triton's words.

    Raises:
        ValueError: the tensor memory accelerator cannot take it.
    """
    from tilewise.kernels.gluon.compat import gl

    if dtype not in NAMES:
        known = ", ".join(str(known).removeprefix("torch.") for known in NAMES)
        raise ValueError(f"kernel {kernel} cannot take {name} in {dtype} through a tensor map; maps know {known}")
    unit = 16 // dtype.itemsize
    if not 1 <= len(how.shape) <= 5 or how.strides[-1] != 1 or any(stride % unit for stride in how.strides[:-1]):
        raise ValueError(
            f"kernel {kernel} takes {name} through a tensor map of up to five axes, the last one dense and the other "
            f"strides multiples of 16 bytes; got shape {how.shape}, strides {how.strides} of {dtype.itemsize} bytes"
        )
    if how.swizzle is None:
        layout = gl.NVMMASharedLayout.get_default_for(list(how.box), getattr(gl, _word(dtype)))
    else:
        layout = gl.NVMMASharedLayout(
            swizzle_byte_width=how.swizzle, element_bitwidth=8 * dtype.itemsize, rank=len(how.box)
        )
    return f"tensordesc<{NAMES[dtype]}{list(how.box)!r},{layout!r}>"


def _word(dtype: torch.dtype) -> str:
    return {"float8_e4m3fn": "float8e4nv"}.get(str(dtype).removeprefix("torch."), str(dtype).removeprefix("torch."))


def encoded(driver: Driver, tensor: torch.Tensor, how: TensorMap, shared: tuple[int, ...]) -> bytes:
    """Encode a map, and make sure that its first eight bytes are the address and the others do not depend on it.

    Args:
        driver: what encodes.
        tensor: gives the dtype and an address.
        how: the map.
        shared: what the compiled kernel says of it: the swizzle's number, then the box of one instruction.

    Raises:
        RuntimeError: the driver refuses, or a map is not what this library takes it for.
    """
    swizzle, *box = shared
    address = tensor.data_ptr()
    image = driver.encode_map(tensor.dtype, address, how.shape, how.strides, tuple(box), swizzle)
    other = address + (1 << 12)
    patched = other.to_bytes(8, "little") + image[8:]
    if image[:8] != address.to_bytes(8, "little") or driver.move_map(image, other) != patched:
        raise RuntimeError(
            "this CUDA driver encodes a tensor map's address in a way that is not known here; "
            'choose backend="triton_portable" and tell the maintainers the driver\'s version'
        )
    return image
