"""The names of Gluon that the kernels use, alike in every Triton that has been checked.

Gluon is experimental: between releases its functions change names and parameters. Only this file imports it. Ask
`refusal` before importing anything else of this folder: where it gives a reason, the names below do not exist.

What differs: loads and stores by TMA are called ``async_copy_*`` up to 3.7; adding by TMA has a name in Python from 3.8
on, though the compiler had it before; ``thread_barrier`` became ``barrier`` in 3.7. Pass the bytes of
``mbarrier.expect`` by position, for that parameter was renamed, and give ``warp_specialize`` the registers of its
workers, which 3.6 insists on.
"""
# mypy: ignore-errors
# Triton ships neither annotations nor stubs.

from __future__ import annotations

CHECKED = ("3.6", "3.7", "3.8", "3.9")  # releases of Triton that the kernels were compiled with

_refusal: str | None = None


def refusal() -> str | None:
    """Say why kernels in Gluon cannot be used here; None where they can.

    >>> refusal() is None or isinstance(refusal(), str)
    True
    """
    return _refusal


def _refusal_of(version: str) -> str | None:
    """Judge a version of Triton.

    >>> _refusal_of("3.6.0")
    >>> _refusal_of("3.5.1")
    'kernels in Gluon are checked with Triton 3.6, 3.7, 3.8, 3.9; this is 3.5.1'
    """
    if ".".join(version.split(".")[:2]) in CHECKED:
        return None
    return f"kernels in Gluon are checked with Triton {', '.join(CHECKED)}; this is {version}"


try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
except ImportError as error:
    _refusal = f"Triton with Gluon for Hopper is not installed: {error}"
else:
    _refusal = _refusal_of(triton.__version__)

if _refusal is None:
    warp_specialize = gl.warp_specialize
    thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
    tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    tma_store_wait = tma.store_wait

    if hasattr(tma, "async_atomic_add"):
        tma_add = tma.async_atomic_add
    else:
        from triton._C.libtriton import ir
        from triton.experimental.gluon.language._core import builtin

        @builtin
        def tma_add(tensor_desc, coord, src, _semantic=None):
            """Add a tile of shared memory to global memory, element by element: what 3.8 calls async_atomic_add."""
            coord = _semantic._convert_to_ir_values(coord, require_i64=False)  # noqa: SLF001 - as Triton's own do
            add = ir.DESCRIPTOR_REDUCE_KIND.ADD
            _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


__all__ = [
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "refusal",
    "thread_barrier",
    "tma_add",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warp_specialize",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
