"""Exact attention, computed tile by tile, in Python alone.

Importing this package loads neither NumPy nor torch: each public name is fetched from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise import fp8, reference
    from tilewise.api import (
        attention,
        attention_varlen,
        attention_with_kvcache,
        explain,
        merge,
        softmax,
        use_backend,
    )
    from tilewise.backends.block_lists import Blocks

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "__version__",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "fp8",
    "merge",
    "reference",
    "softmax",
    "use_backend",
]

if not TYPE_CHECKING:  # hidden from the type checker, which would otherwise accept any misspelt name

    def __getattr__(name):
        """Fetch a public name on first use and keep it, so that this function runs once for each."""
        if name not in __all__:
            raise AttributeError(f"module 'tilewise' has no attribute {name!r}; it has {', '.join(__all__)}")
        from importlib import import_module

        homes = {"reference": "tilewise.reference", "fp8": "tilewise.fp8", "Blocks": "tilewise.backends.block_lists"}
        module = import_module(homes.get(name, "tilewise.api"))
        value = module if name in ("reference", "fp8") else getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        """List the public names, fetched or not."""
        return sorted(__all__)
