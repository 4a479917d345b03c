"""Attention over several ranks gives what one process gives, forward and backward; and what goes wrong is said."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise
from distributed_ranks import Failures, Spread, check, collect, options, run_ranks
from tilewise import autograd, dispatch, testing
from tilewise.distributed import (
    context_parallel_attention,
    context_parallel_decode,
    positions,
    ring,
    split,
    unsplit,
)
from tilewise.distributed.context_parallel import METHODS, Method
from tilewise.distributed.cost import Way, way
from tilewise.machine.shape import Shape
from tilewise.problem.problem import Tensors
from tilewise.testing import Case

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")

ROOT = Path(__file__).parents[1]
DOCUMENTS = (5, 0, 41, 1, 17)
CAUSAL = options(causal=True)

SPREADS = (
    Spread(Case("plain", options=options())),
    Spread(Case("causal", options=CAUSAL)),
    Spread(Case("causal, contiguous", options=CAUSAL), order="contiguous"),
    Spread(Case("causal, half precision", len_q=130, len_kv=130, options=CAUSAL), dtype="float16"),
    Spread(Case("causal, bfloat16, grouped", heads_q=8, heads_kv=2, options=CAUSAL), dtype="bfloat16"),
    Spread(Case("causal, double", options=CAUSAL), dtype="float64"),
    Spread(Case("fewer rows than chunks", len_q=3, len_kv=3, options=CAUSAL)),
    Spread(Case("more keys than queries", len_q=21, len_kv=50, options=CAUSAL)),
    Spread(Case("more queries than keys: empty rows", len_q=50, len_kv=21, options=CAUSAL)),
    Spread(Case("top-left", len_q=21, len_kv=50, options=options(causal=True, align="top_left"))),
    Spread(Case("one key head", heads_q=6, heads_kv=1, options=CAUSAL)),
    Spread(Case("other head dim for v", dim_qk=24, dim_v=8, options=CAUSAL)),
    Spread(Case("softcap and scale", options=options(causal=True, softcap=1.5, scale=-0.3))),
    Spread(Case("window", options=options(window_left=7, window_right=3))),
    Spread(Case("causal window", options=options(causal=True, window_left=9))),
    Spread(Case("causal window", options=options(causal=True, window_left=9)), order="contiguous", dtype="bfloat16"),
    Spread(Case("window of the diagonal alone", options=options(window_left=0, window_right=0))),
    Spread(Case("packed", lengths_q=DOCUMENTS, options=options())),
    Spread(Case("packed causal with a tail", lengths_q=DOCUMENTS, tail=3, heads_q=4, options=CAUSAL)),
    Spread(Case("packed causal, contiguous", lengths_q=DOCUMENTS, options=CAUSAL), order="contiguous"),
    Spread(Case("packed, window", lengths_q=DOCUMENTS, options=options(window_left=4, window_right=2))),
    Spread(Case("causal", heads_q=8, heads_kv=4, options=CAUSAL), method="all_to_all", dtype="bfloat16"),
    Spread(Case("window", heads_q=4, heads_kv=4, options=options(window_left=7)), method="all_to_all"),
    Spread(Case("packed causal", lengths_q=DOCUMENTS, heads_q=4, heads_kv=4, options=CAUSAL), method="all_to_all"),
    Spread(Case("chosen by the rule", heads_q=4, heads_kv=4, options=CAUSAL), method=None),
)
COMBINED = (
    Spread(Case("plain", heads_q=4, options=options()), None, (2, 2)),
    Spread(Case("causal", heads_q=8, heads_kv=2, options=CAUSAL), None, (2, 2), dtype="bfloat16"),
    Spread(Case("causal window", options=options(causal=True, window_left=9)), None, (2, 2), order="contiguous"),
    Spread(Case("packed causal", lengths_q=DOCUMENTS, options=CAUSAL), None, (2, 2)),
    Spread(Case("causal", options=CAUSAL), None, (4, 1)),
)


def told(failures: Failures) -> str:
    """Show failures as the ranks told them."""
    return "\n".join(f"{name}\n{text}" for name, text in failures)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_give_what_one_process_gives_and_refuse_what_is_wrong(world: int, tmp_path: Path) -> None:
    failures = run_ranks(_cases, world, tmp_path)
    assert not failures, told(failures)


def _cases(rank: int, world: int) -> Failures:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    meshes: dict[tuple[int, ...], DeviceMesh] = {(): mesh}
    if world == 4:
        meshes |= {sizes: init_device_mesh("cpu", sizes) for sizes in ((2, 2), (4, 1))}
    cases: dict[str, Callable[[], None]] = {
        f"{spread}": partial(check, spread, meshes[spread.sizes])
        for spread in (*SPREADS, *COMBINED)
        if spread.sizes in meshes
    }
    cases |= {
        "head groups": partial(_head_groups, mesh),
        "bytes": partial(_bytes, meshes),
        "skipped hops": partial(_skipped_hops, mesh),
        "overlap": partial(_overlap, mesh),
        "layout": partial(_layout, mesh),
        "splitting": partial(_splitting, meshes),
        "decoding": partial(_decoding, mesh),
        **{f"fault: {name}": partial(_fault, fault, says, mesh) for name, (fault, says) in FAULTS.items()},
    }
    if world == 2:  # the compiler takes seconds to import, in each rank
        cases["transforms"] = partial(_transforms, mesh)
    if world == 4:
        cases["FSDP"] = _fsdp
        cases["another mesh of the same ranks"] = partial(_other_mesh, meshes[2, 2], mesh)
        cases["another mesh, never met"] = _other_new_mesh
    return collect(cases)


# ---- how it is done -------------------------------------------------------------------------------------------------


def _head_groups(mesh: DeviceMesh) -> None:
    """Several groups of heads, one behind the other, give the same bits as all at once."""
    call = Case("grouped", heads_q=8, heads_kv=4, options=CAUSAL).build("cpu", "float32")
    parts = [split(x, mesh, dim=2) for x in call.tensors[:3]]

    def run(method: Method) -> list[torch.Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in parts)
        out = context_parallel_attention(q, k, v, mesh=mesh, causal=True, method=method)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))]

    for method in METHODS:
        together = run(method)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring, "HOP_BYTES", 1)
            apart = run(method)
        assert all(map(torch.equal, together, apart)), method


class _Counted:
    """Counts the bytes that this rank receives while it lives."""

    def __init__(self) -> None:
        self.received = self.messages = 0

    def __enter__(self) -> Self:
        self.before = dist.P2POp, dist.all_to_all_single
        dist.P2POp, dist.all_to_all_single = self.point_to_point, self.all_to_all  # type: ignore[assignment,misc]
        return self

    def __exit__(self, *_: object) -> None:
        dist.P2POp, dist.all_to_all_single = self.before  # type: ignore[misc]

    def point_to_point(self, op: object, tensor: torch.Tensor, *args: object) -> object:
        if op is dist.irecv:
            self.received += tensor.nbytes
            self.messages += 1
        return self.before[0](op, tensor, *args)  # type: ignore[arg-type]

    def all_to_all(
        self, output: torch.Tensor, given: torch.Tensor, sizes: list[int], *args: object, **rest: object
    ) -> None:
        place = dist.get_rank(rest["group"])  # type: ignore[arg-type]
        self.received += (output.numel() - sizes[place]) * output.element_size()
        self.before[1](output, given, sizes, *args, **rest)  # type: ignore[arg-type]


def _bytes(meshes: dict[tuple[int, ...], DeviceMesh]) -> None:
    """What travels is what the cost model counts."""
    world = dist.get_world_size()
    call = Case("even", batch=1, heads_q=8, heads_kv=4, len_q=64, len_kv=64, options=CAUSAL).build("cpu", "bfloat16")
    shape = Shape(1, 8, 4, 64, 64, 16, 16, 2, None, 0)
    ways: list[tuple[tuple[int, ...], Method | None, Way]]
    ways = [((), "ring", way(shape, world, rate=1.0)), ((), "all_to_all", way(shape, 1, world, rate=1.0))]
    ways += [((2, 2), None, way(shape, 2, 2, rate=1.0))] if world == 4 else []
    for sizes, method, expected in ways:
        mesh = meshes[sizes]
        q, k, v = (split(x, mesh, dim=2).requires_grad_() for x in call.tensors[:3])
        with _Counted() as forward:
            out = context_parallel_attention(q, k, v, mesh=mesh, causal=True, method=method)
        with _Counted() as backward:
            out.backward(out.detach())
        counts = torch.tensor([forward.received, backward.received])
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        assert counts.tolist() == [expected.forward_bytes, expected.backward_bytes], expected.name


def _skipped_hops(mesh: DeviceMesh) -> None:
    """A window that reaches into the neighbour alone fetches those few keys and nothing else."""
    rank, reach = dist.get_rank(), 3
    call = Case("long", batch=1, heads_q=1, heads_kv=1, len_q=64, len_kv=64, options=CAUSAL).build("cpu", "float32")
    q, k, v = (split(x, mesh, dim=2, order="contiguous") for x in call.tensors[:3])
    with _Counted() as counted:
        context_parallel_attention(
            q, k, v, mesh=mesh, causal=True, window=(reach, 0), order="contiguous", method="ring"
        )
    assert counted.received == (reach * 2 * 16 * 4 if rank else 0)
    assert counted.messages == (2 if rank else 0)


def _overlap(mesh: DeviceMesh) -> None:
    """The keys of a step are under way before the step ahead of it computes, and are waited for behind it."""
    world = dist.get_world_size()
    told: list[str] = []
    call = Case("causal", options=CAUSAL).build("cpu", "float32")
    q, k, v = (split(x, mesh, dim=2).requires_grad_() for x in call.tensors[:3])
    compute, post, wait = autograd.run, dist.batch_isend_irecv, ring.Transfer.wait
    differentiate = dispatch.backward

    def noted(word: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            told.append(word)
            return function(*args, **options)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "run", noted("compute", compute))
        patch.setattr(dispatch, "backward", noted("differentiate", differentiate))
        patch.setattr(dist, "batch_isend_irecv", noted("post", post))
        patch.setattr(ring.Transfer, "wait", noted("wait", wait))
        out = context_parallel_attention(q, k, v, mesh=mesh, causal=True, method="ring")
        forward, told = told, []
        out.backward(out.detach())
    steps = ["wait", "compute"] * (world - 1)
    for step in range(world - 2):  # the transfer of the next step, before this one's is waited for
        steps.insert(3 * step, "post")
    assert forward == ["post", "compute", *steps]
    assert told[:4] == ["post", "differentiate", *(["post", "wait"] if world > 2 else ["wait", "differentiate"])]
    assert told.count("differentiate") == world
    assert told.count("post") == told.count("wait") == 2 * (world - 1)


def _layout(mesh: DeviceMesh) -> None:
    """The other order of axes gives the same bits."""
    call = Case("layout", options=CAUSAL).build("cpu", "float32")
    q, k, v = (split(x, mesh, dim=2) for x in call.tensors[:3])
    out = context_parallel_attention(q, k, v, mesh=mesh, causal=True)
    turned = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    other, lse = context_parallel_attention(*turned, mesh=mesh, causal=True, layout="bshd", return_lse=True)
    assert torch.equal(other.transpose(1, 2), out)
    assert lse.shape == out.shape[:3]


def _transforms(mesh: DeviceMesh) -> None:
    """Compiled models and activation checkpoints give the same gradients; a second derivative is refused."""
    whole = Case("causal", heads_q=4, heads_kv=4, options=CAUSAL).build("cpu", "float32").tensors.q
    q = split(whole, mesh, dim=2).requires_grad_()

    def attend(x: torch.Tensor) -> torch.Tensor:
        y = 2 * x
        return context_parallel_attention(y, y, y, mesh=mesh, causal=True) + 1

    (expected,) = torch.autograd.grad(attend(q).square().sum(), q)
    compiled = torch.compile(attend, backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(q).square().sum(), q)[0], expected)
    out = torch.utils.checkpoint.checkpoint(attend, q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(out.square().sum(), q)[0], expected)
    with pytest.raises(NotImplementedError, match=r"no second derivative; got create_graph=True"):
        torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)


def _splitting(meshes: dict[tuple[int, ...], DeviceMesh]) -> None:
    """What is split is joined again, on any axis, in any order, and positions say which rows are whose."""
    x = torch.arange(2 * 13 * 3).reshape(2, 13, 3)
    for mesh in meshes.values():
        for order in ("zigzag", "contiguous"):
            part = split(x, mesh, dim=1, order=order)
            assert torch.equal(part, x[:, positions(13, mesh, order=order)])
            assert torch.equal(unsplit(part, mesh, dim=1, order=order), x)


def _decoding(mesh: DeviceMesh) -> None:
    """A cache spread over ranks, one of them without a token, decodes as one cache does; ranks append in turn."""
    world, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    keys, values, sink = draw(2, 40, 2, 16), draw(2, 40, 2, 16), draw(4)
    held = [0, 11, 7, 5][:world]  # tokens of each rank at the start
    start = sum(held[:rank])
    k_cache, v_cache = torch.full((2, 2, 40, 2, 16), float("nan"))
    k_cache[:, : held[rank]], v_cache[:, : held[rank]] = (x[:, start : start + held[rank]] for x in (keys, values))
    total = sum(held)
    for step, writer in enumerate((0, world - 1, 1)):
        count = 3 if step == 1 else 1
        q, k, v = draw(2, count, 4, 16), keys[:, total : total + count], values[:, total : total + count]
        out, lse = context_parallel_decode(
            q,
            k_cache,
            v_cache,
            mesh=mesh,
            k=k,
            v=v,
            writer=writer,
            cache_seqlens=held[rank],
            sink=sink,
            return_lse=True,
        )
        held[writer] += count
        total += count
        heads = [x.transpose(1, 2).contiguous() for x in (q, keys[:, :total], values[:, :total])]
        call = testing.Call(
            Tensors(heads[0], heads[1], heads[2], sink=sink), CAUSAL, torch.zeros_like(heads[0]), torch.zeros(())
        )
        testing.check(testing.Results(out.transpose(1, 2), lse), call)


# ---- faults ---------------------------------------------------------------------------------------------------------

X = (1, 4, 8, 16)


def _attend(mesh: DeviceMesh, shape: tuple[int, ...] = X, **given: object) -> None:
    dtype = given.pop("dtype", torch.float32)
    k_shape = given.pop("k_shape", shape)
    q, k = torch.zeros(shape, dtype=dtype), torch.zeros(k_shape, dtype=dtype)  # type: ignore[call-overload]
    q.requires_grad_(bool(given.pop("grad", False)))
    context_parallel_attention(q, k, k, mesh=mesh, **{"causal": True, "method": "ring", **given})  # type: ignore[call-overload]


FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "dtype": ({"dtype": torch.float16}, "same dtype; got torch.float16 on rank 0; torch.float32 on rank"),
    "heads": (
        {"shape": (1, 2, 8, 16)},
        "same batch, heads and head dim of q; got (1, 2, 16) on rank 0; (1, 4, 16) on rank",
    ),
    "axes": ({"shape": (4, 8, 16)}, "rank 0: q must have 4 axes"),
    "heads of k": ({"k_shape": (1, 3, 8, 16)}, "rank 0: heads_q must be a multiple of heads_kv"),
    "rows": (
        {"shape": (1, 4, 10, 16)},
        "ranks must hold the queries that split gives them in zigzag order; got [10, 8",
    ),
    "mask": ({"causal": False}, "same options"),
    "gradient": ({"grad": True}, "same tensors that want a gradient; got ['q'] on rank 0; [] on rank"),
    "order": ({"order": "contiguous"}, "same order; got contiguous on rank 0; zigzag on rank"),
    "unknown order": ({"order": "random"}, "rank 0: order must be one of zigzag, contiguous"),
    "unknown method": ({"method": "star"}, "rank 0: method must be None or"),
    "unknown backend": ({"backend": "none"}, "rank 0: backend must be one of"),
    "documents": ({"shape": (8, 4, 16), "cu_seqlens": [0, 9, 3]}, "rank 0: cu_seqlens must start at 0 and never fall"),
    "window": ({"window": (-2, 0)}, "rank 0: window's left side counts keys"),
}


def _fault(given: dict[str, object], says: str, mesh: DeviceMesh) -> None:
    """One rank's mistake is an error on all ranks, and the next call works."""
    with pytest.raises(ValueError, match=r".") as caught:
        _attend(mesh, **(given if dist.get_rank() == 0 else {}))  # type: ignore[arg-type]
    assert says in str(caught.value), caught.value
    _attend(mesh)


def _other_mesh(mine: DeviceMesh, theirs: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"same mesh; .* as 2 x 2 on rank 0; .* as 4 on ranks 1, 2, 3"):
        _attend(mine if dist.get_rank() == 0 else theirs, method=None)


def _other_new_mesh() -> None:
    """Ranks that come to their first meeting with meshes that do not fit hear of it, all of them."""
    rank, few, more = dist.get_rank(), DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    if rank < 3:
        with pytest.raises(ValueError, match=r"must use the same mesh; got .*ranks \[0, 1(, 2)?\], rank . with ranks"):
            _attend(few if rank == 0 else more, method=None)


def test_a_call_that_makes_no_sense_is_refused_without_asking_anybody() -> None:
    q = torch.zeros(X)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh; got str"):
        context_parallel_attention(q, q, q, mesh="cp")  # type: ignore[call-overload]


def test_a_rank_that_dies_or_stays_away_ends_the_call_within_the_groups_timeout(tmp_path: Path) -> None:
    failures = run_ranks(_gone, 4, tmp_path, dying=(1, 3))
    assert not failures, told(failures)


def _gone(rank: int, world: int) -> Failures:
    """Rank 1 dies while rank 0 waits for it; rank 3 stays away from rank 2."""
    groups = [dist.new_group(ranks, timeout=timedelta(seconds=2)) for ranks in ([0, 1], [2, 3])]
    mesh = DeviceMesh.from_group(groups[rank // 2], "cpu")

    def case() -> None:
        _attend(mesh)
        if rank == 1:
            os._exit(7)
        if rank == 3:
            time.sleep(200)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=rf"rank {rank}: another of ranks \[{rank}, {rank + 1}\] did not answer"):
            _attend(mesh)
        assert time.monotonic() - start < 30  # the timeout is 2, the machine may be busy

    return collect({"gone": case})


# ---- scripts --------------------------------------------------------------------------------------------------------


def torchrun(script: str, *words: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a script of this project in several ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = [*command, str(ROOT / script), *words]
    return subprocess.run(done, capture_output=True, text=True, check=False, env=environment)


needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@needs_transformers
def test_a_llama_trains_on_one_rank_as_on_many() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples/train_long_llama.py"), "--device=cpu", "--length=200", "--steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "200 tokens over 1 ranks" in done.stdout


@pytest.mark.slow
@needs_transformers
def test_a_llama_trains_on_four_ranks_in_two_rows() -> None:
    script = "examples/train_long_llama.py"
    done = torchrun(script, "--device=cpu", "--length=201", "--steps=2", "--data-parallel=2", ranks=4)
    assert done.returncode == 0, done.stderr
    assert "2 x 201 tokens over 2 ranks each" in done.stdout


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_gives(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    done = torchrun("benchmarks/gpu_distributed.py", "--sections=check", f"--json={file}", ranks=2)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))["check"]
    assert isinstance(found, list), found
    assert {one["case"]: one["bad"] for one in found if one["bad"]} == {}


# ---- beside FSDP ----------------------------------------------------------------------------------------------------


class _Layer(torch.nn.Module):
    """Projections around attention; with a mesh, attention over its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 48)
        self.outer = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if mesh is None:
            out = tilewise.attention(q, k, v, causal=True)
        else:
            out = context_parallel_attention(q, k, v, mesh=mesh, causal=True)
        result: torch.Tensor = x + self.outer(out.transpose(1, 2).flatten(2))
        return result


def _fsdp() -> None:
    """Parameters sharded over one axis of a mesh and sequences over the other give the gradients of one process."""
    from torch.distributed.fsdp import fully_shard  # a heavy import, which one case needs

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 21, 16, generator=generator)
    torch.manual_seed(0)
    plain, sharded = _Layer(), _Layer()
    sharded.load_state_dict(plain.state_dict())
    plain(x, None).square().mean().backward()
    fully_shard(sharded, mesh=mesh)  # over dp, with copies over cp
    mine = x[mesh.get_local_rank("dp")][None]
    part = split(mine, mesh["cp"], dim=1)
    (2 * sharded(part, mesh["cp"]).square().sum() / mine.numel()).backward()  # gradients are averaged over all ranks
    for (name, parameter), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        whole = parameter.grad.full_tensor()  # type: ignore[union-attr]
        torch.testing.assert_close(whole, other.grad, msg=name)
