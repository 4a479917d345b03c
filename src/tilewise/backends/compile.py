"""Compile a kernel for a GPU that need not be present, and keep the result on disk.

Triton compiles without a GPU and without a C compiler as long as it is told the target. Only its own launcher builds C
code when it runs, and nothing here touches that.

Triton has a cache on disk too, but asking it costs about half a second in each new process, since it hashes its own
library of 400 MB; and processes that start together all compile. So results are kept here once more: one file for each
kernel, written whole or not at all, made by one process while others wait for it. The folder is TILEWISE_CACHE_DIR, or
``tilewise`` in the user's cache folder. Files may be deleted at any time; a damaged one is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tilewise.kernels.share import Jitted, source_of

if TYPE_CHECKING:
    from types import ModuleType

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: processes that start together may each compile
    fcntl = None

Constant = bool | int | float | str | Jitted | None  # a function is inlined wherever the kernel calls its parameter
Kind = str | tuple["Kind", ...]  # a parameter's type in Triton's words; a tuple's parts have types of their own
Target = int | str  # an NVIDIA capability such as 90, or an AMD architecture such as "gfx942"

BARRIERS = "BAR_OFF"  # the constant in which a kernel is told where in shared memory its barriers lie
FORMAT = 2  # of the files; part of their names, so that another release never reads them
PTX_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
SIZES = {"i1": 1, "i8": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8, "fp32": 4, "fp64": 8}


class Options(NamedTuple):
    """How to compile a kernel: what Triton calls options, one field each, all of them part of the result's identity."""

    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    launch_pdl: bool = False
    launch_cooperative_grid: bool = False


@dataclass(frozen=True)
class Binary:
    """A compiled kernel and what a launch must know of it.

    ``parameters`` are the sizes in bytes of the kernel's parameters, in order. The last ``hidden`` of them are pointers
    that Triton adds: the first is to ``scratch`` bytes for each program, the others are null. ``maps`` holds for each
    tensor map the swizzle's number and the box of one copy, as the kernel's instructions expect them.
    """

    name: str
    code: bytes
    threads: int
    shared: int
    parameters: tuple[int, ...]
    hidden: int
    scratch: int = 0
    maps: tuple[tuple[int, ...], ...] = ()
    pdl: bool = False
    cooperative: bool = False


class Parameter(Protocol):
    """What Triton knows of a kernel's parameter; ``annotation_type`` is "" where the kernel does not say."""

    name: str
    annotation: str
    annotation_type: str
    is_constexpr: bool
    has_default: bool
    default: object


class Kernel(Protocol):
    """The parts of Triton's JITFunction that are used here."""

    params: list[Parameter]
    fn: FunctionType
    __name__: str

    def is_gluon(self) -> bool:
        """Say whether the kernel is written in Gluon."""


class Compiled(Protocol):
    """The parts of Triton's CompiledKernel that are used here."""

    asm: Mapping[str, str | bytes]


def compiled_kernel(kernel: Jitted) -> Kernel:
    """Give the kernel as what it is to the compiler.

    Raises:
        TypeError: it is not compiled but interpreted, or not a kernel.
    """
    if not isinstance(kernel, triton.JITFunction):
        raise TypeError(
            f"a kernel made by triton.jit is needed; got {kernel!r}, which is interpreted or a plain function"
        )
    return cast("Kernel", kernel)


# ---- compiling ------------------------------------------------------------------------------------------------------


def signature(
    kernel: Kernel, types: Mapping[str, Kind | None], constants: Mapping[str, Constant]
) -> tuple[dict[str, Kind], dict[str, Constant]]:
    """Give each parameter's type in Triton's words, and the values of those that are fixed.

    ``types`` holds what the kernel does not say of its parameters: "*fp16" for a pointer, None for an argument that is
    None, which the compiler then knows, and for a tuple the types of its parts; none for one that is empty.

    Raises:
        ValueError: a parameter without a type or a value, or a constant that is no parameter.
    """
    kinds: dict[str, Kind] = {}
    fixed: dict[str, Constant] = {}
    for param in kernel.params:
        if param.is_constexpr:
            if param.name not in constants and not param.has_default:
                raise ValueError(f"kernel {kernel.__name__} needs the constant {param.name}; got {sorted(constants)}")
            kinds[param.name] = "constexpr"
            fixed[param.name] = constants.get(param.name, cast("Constant", param.default))
        elif param.name in types and types[param.name] is None:
            kinds[param.name] = "constexpr"
            fixed[param.name] = None
        elif is_tuple(param):
            kinds[param.name] = types.get(param.name) or ()
        else:
            kind = param.annotation_type or types.get(param.name)
            if not kind:
                raise ValueError(f"kernel {kernel.__name__}: no type is known for its argument {param.name}")
            kinds[param.name] = "i1" if kind == "u1" else kind
    unknown = set(constants) - fixed.keys()
    if unknown:
        raise ValueError(f"kernel {kernel.__name__} has no constants {sorted(unknown)}; it has {sorted(fixed)}")
    return kinds, fixed


def is_tuple(param: Parameter) -> bool:
    """Say whether a kernel takes a tuple of arguments for this parameter."""
    return param.annotation == "tuple"


def flat(kinds: Iterable[Kind]) -> Iterator[str]:
    """List types with those of tuples' parts in their places; what is fixed is not passed.

    >>> list(flat(["*fp16", ("i32", ("fp32",)), "constexpr", ()]))
    ['*fp16', 'i32', 'fp32']
    """
    for kind in kinds:
        if isinstance(kind, tuple):
            yield from flat(kind)
        elif kind != "constexpr":
            yield kind


def compile_for(
    kernel: Jitted,
    types: Mapping[str, Kind | None],
    constants: Mapping[str, Constant],
    target: Target,
    options: Options,
) -> Compiled:
    """Compile with Triton, through its own cache; gives Triton's CompiledKernel, with every stage in ``.asm``."""
    source = compiled_kernel(kernel)
    kinds, fixed = signature(source, types, constants)
    places = {param.name: (index,) for index, param in enumerate(source.params)}
    make = ASTSource
    if source.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource

        make = GluonASTSource
    tree = make(fn=kernel, signature=kinds, constexprs={places[name]: value for name, value in fixed.items()}, attrs={})
    where = GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64)
    chosen = {name: value for name, value in options._asdict().items() if value is not None}
    if not isinstance(target, int):
        chosen = {name: chosen[name] for name in ("num_warps", "num_stages")}
    return cast("Compiled", triton.compile(tree, target=where, options={**chosen, "enable_fp_fusion": True}))


def compile_settled(
    kernel: Jitted,
    types: Mapping[str, Kind | None],
    constants: Mapping[str, Constant],
    target: Target,
    options: Options,
) -> Compiled:
    """Compile as `compile_for`; a kernel that is told where its barriers lie (BAR_OFF) again, until that is so.

    Raises:
        RuntimeError: their place changes with every attempt.
    """
    compiled = compile_for(kernel, types, constants, target, options)
    if BARRIERS not in constants:
        return compiled
    from tilewise.kernels.gluon.sync import bar_offset

    for _ in range(3):
        found = bar_offset(cast("str", compiled.asm["ptx"]))
        if found == constants[BARRIERS]:
            return compiled
        constants = {**constants, BARRIERS: found}
        compiled = compile_for(kernel, types, constants, target, options)
    raise RuntimeError(f"kernel {compiled_kernel(kernel).__name__}: the place of its barriers does not settle")


def binary_of(kernel: Kernel, kinds: Mapping[str, Kind], compiled: Compiled) -> Binary:
    """Take from a kernel compiled for NVIDIA what a launch needs, and hold its parameters to what will be passed.

    Raises:
        RuntimeError: Triton made other parameters than its signature says, so that a launch would pass nonsense.
    """
    ptx = cast("str", compiled.asm["ptx"])
    metadata = compiled.metadata  # type: ignore[attr-defined]  # a named tuple that Triton makes at run time
    sizes = ptx_parameters(ptx)
    passed = [size for kind in flat(kinds.values()) for size in _sizes(kind)]
    hidden = sizes[len(passed) :]
    if sizes[: len(passed)] != passed or any(size != 8 for size in hidden):
        raise RuntimeError(
            f"kernel {kernel.__name__} takes parameters of {sizes} bytes where {passed} and pointers were expected; "
            f"Triton {triton.__version__} passes arguments in a way that is not known here"
        )
    return Binary(
        name=metadata.name,
        code=cast("bytes", compiled.asm["cubin"]),
        threads=threads_of(ptx),
        shared=metadata.shared,
        parameters=tuple(sizes),
        hidden=len(hidden),
        scratch=metadata.global_scratch_size,
        maps=tuple((meta["swizzle"], *meta["block_size"]) for meta in metadata.tensordesc_meta or ()),
        pdl=bool(metadata.launch_pdl),
        cooperative=bool(metadata.launch_cooperative_grid),
    )


def _sizes(kind: str) -> list[int]:
    """Give the sizes in bytes of the parameters that one argument becomes."""
    if kind.startswith("tensordesc"):  # the map, then its sizes and strides
        return [128, *[4] * rank_of(kind), *[8] * rank_of(kind)]
    return [8 if kind[0] == "*" else SIZES[kind]]


def rank_of(kind: str) -> int:
    """Count the axes of a tensor map's type.

    >>> rank_of("tensordesc<bf16[1, 1, 64, 128],NVMMASharedLayout(swizzle_byte_width=128)>")
    4
    """
    return kind.partition("[")[2].partition("]")[0].count(",") + 1


def ptx_parameters(ptx: str) -> list[int]:
    """Read the sizes in bytes of a kernel's parameters from its PTX, in order.

    >>> ptx_parameters(".visible .entry f(.param .u64 .ptr .global .align 1 f_0, .param .f32 f_1) .reqntid 128 {}")
    [8, 4]
    """
    found = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)", ptx)
    if found is None:
        raise RuntimeError("the PTX has no kernel in it")
    declared = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", found[1])
    return [PTX_SIZES[bits] * int(count or 1) for bits, count in declared]


def threads_of(ptx: str) -> int:
    """Read the size of a block from the PTX: warps that specialise are more than the kernel was asked to have.

    >>> threads_of(".reqntid 384")
    384
    """
    found = re.search(r"\.reqntid\s+(\d+)", ptx)
    if found is None:
        raise RuntimeError("the PTX does not say how many threads a block has")
    return int(found[1])


class Resources(NamedTuple):
    """What one thread and one block of a compiled kernel take; ``spilled`` is what registers could not hold."""

    registers: int
    spilled: int  # bytes a thread
    shared: int  # bytes a block


def resources(compiled: Compiled) -> Resources:
    """Read what a kernel takes from its compiled form, with the tools that come with Triton."""
    shared = int(compiled.metadata.shared)  # type: ignore[attr-defined]  # a named tuple that Triton makes at run time
    if "amdgcn" in compiled.asm:
        text = cast("str", compiled.asm["amdgcn"])
        vector, spilled = (int(_number(rf"\.{name}:\s+(\d+)", text)) for name in ("vgpr_count", "vgpr_spill_count"))
        return Resources(vector, 4 * spilled, shared)
    from triton.backends import nvidia

    tool = Path(str(nvidia.__file__)).parent / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cast("bytes", compiled.asm["cubin"]))
        command = [str(tool), "-res-usage", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - Triton's own tool
    text = done.stdout + done.stderr
    return Resources(int(_number(r"REG:(\d+)", text)), int(_number(r"STACK:(\d+)", text)), shared)


def _number(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"no {pattern} in what Triton's tools say of a kernel: {text[:500]}")
    return found[1]


# ---- keeping --------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Give the folder that compiled kernels are kept in."""
    chosen = os.environ.get("TILEWISE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewise"


def binary_for(
    kernel: Jitted,
    types: Mapping[str, Kind | None],
    constants: Mapping[str, Constant],
    capability: int,
    options: Options,
) -> Binary:
    """Give the kernel compiled for an NVIDIA GPU of this capability (90 = 9.0), from disk where it is kept.

    Raises:
        ValueError: an argument without a type, or constants that the kernel does not have.
        Whatever Triton raises for a kernel that does not compile.
    """
    source = compiled_kernel(kernel)
    kinds, fixed = signature(source, types, constants)
    key = _key(source, kinds, fixed, capability, options)

    def make() -> Binary:
        return binary_of(source, kinds, compile_settled(kernel, types, constants, capability, options))

    return kept(cache_folder() / f"{source.__name__}-{key}.bin", make)


def _key(
    kernel: Kernel, kinds: Mapping[str, Kind], fixed: Mapping[str, Constant], capability: int, options: Options
) -> str:
    """Hash all that the result depends on: source, compiler, target, types, constants, options, Triton's settings."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    parts = [
        FORMAT,
        triton.__version__,
        Path(__file__).read_text(encoding="utf-8"),  # how the compiler is asked
        kernel.__name__,
        _sources(kernel.fn.__code__.co_filename),
        sorted(kinds.items()),
        sorted((name, source_of(value) or repr(value)) for name, value in fixed.items()),
        capability,
        sorted(options._asdict().items()),
        sorted(get_cache_invalidating_env_vars().items()),
        os.environ.get("TRITON_PTXAS_PATH", ""),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


@cache
def _sources(own: str) -> str:
    """Hash the files that a kernel may be made of: its own, and all that kernels of this package share.

    Triton's own key of a kernel changes with which kernels were asked for before: what one process keeps, another would
    not find. And it is made by parsing every function, which takes longer than reading files.
    """
    package = Path(__file__).parents[1]
    files = sorted({Path(own), *(package / "kernels").rglob("*.py"), *(package / "problem").rglob("*.py")})
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files if file.is_file())).hexdigest()


def kept(path: Path, make: Callable[[], Binary]) -> Binary:
    """Read a binary from its file, or make it and write the file, once for all processes that ask together.

    A folder that cannot be written costs the cache, not the call.
    """
    found = _read(path)
    if found is not None:
        return found
    with _alone(path):
        found = _read(path)  # another process may have been at work while this one waited
        if found is None:
            found = make()
            with contextlib.suppress(OSError):
                _write(path, found)
    return found


def _read(path: Path) -> Binary | None:
    """Read a binary; None where there is none or where the file is damaged."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        fields = json.loads(head)
        if fields.pop("sha256") != hashlib.sha256(code).hexdigest():
            return None
        fields["parameters"] = tuple(fields["parameters"])
        fields["maps"] = tuple(map(tuple, fields["maps"]))
        return Binary(code=code, **fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write(path: Path, binary: Binary) -> None:
    """Write beside the file and rename, so that a reader finds all of it or nothing."""
    fields: dict[str, object] = {name: value for name, value in asdict(binary).items() if name != "code"}
    fields["sha256"] = hashlib.sha256(binary.code).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(json.dumps(fields).encode() + b"\n" + binary.code)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock between processes and threads on one file's making; a lock dies with its process."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("a"))
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
