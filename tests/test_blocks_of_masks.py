"""Lists of empty, partial and full tiles: held to the mask evaluated pair by pair, kept, taken from PyTorch, drawn."""
# ruff: noqa: ARG005 - masks take what they are given

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewise.api import attention
from tilewise.backends import block_lists
from tilewise.backends.block_lists import EMPTY, FULL, PARTIAL, Blocks, TileLists
from tilewise.lab.masks import SAMPLES, find
from tilewise.problem.blocks import is_visible

DOCUMENTS = torch.tensor([[0] * 100 + [1] * 156 + [2] * 44, [0] * 290 + [1] * 10])
SLOPES = torch.tensor([1.0, 2.0, 4.0])

# Each mask, and how many sequences and heads it tells apart of 2 and 3.
MASKS: dict[str, tuple[Callable[..., Any] | None, int, int]] = {
    "none": (None, 1, 1),
    "causal": (lambda b, h, q, kv: q >= kv, 1, 1),
    "window": (lambda b, h, q, kv: (q >= kv) & (q - kv <= 70), 1, 1),
    "prefix": (lambda b, h, q, kv: (kv < 90) | (q >= kv), 1, 1),
    "dilated": (lambda b, h, q, kv: (q - kv) % 3 == 0, 1, 1),
    "documents": (lambda b, h, q, kv: DOCUMENTS[b, q] == DOCUMENTS[b, kv], 2, 1),
    "wider by head": (lambda b, h, q, kv: (q - kv).abs() < 40 * SLOPES[h], 1, 3),
    "both": (lambda b, h, q, kv: (kv < 100 * (b + 1)) & (q < 90 * (h + 1)), 2, 3),
    "of the key alone": (lambda b, h, q, kv: kv < 128, 1, 1),
    "of the query alone": (lambda b, h, q, kv: q < 128, 1, 1),
    "nothing": (lambda b, h, q, kv: kv < 0, 1, 1),
    "one pair": (lambda b, h, q, kv: (q == 130) & (kv == 5), 1, 1),
}
BANDS = ((None, None, 0), (None, 0, 0), (50, 20, -30))


def pairs(mask: Callable[..., Any] | None, batch: int, heads: int, len_q: int, len_kv: int) -> torch.Tensor:
    """Evaluate a mask for every pair, one at a time as far as it can tell: (batch, heads, len_q, len_kv)."""
    if mask is None:
        return torch.ones(batch, heads, len_q, len_kv, dtype=torch.bool)
    for dim in (3, 2, 1, 0):
        mask = torch.vmap(mask, tuple(0 if axis == dim else None for axis in range(4)))
    result: torch.Tensor = mask(*(torch.arange(size) for size in (batch, heads, len_q, len_kv)))
    return result


def kinds_of(visible: torch.Tensor, block_q: int, block_kv: int) -> torch.Tensor:
    """Say of each tile what it is, from every pair."""
    rows = []
    for queries in visible.split(block_q, 2):
        row = []
        for tile in queries.split(block_kv, 3):
            full = tile.all(-1).all(-1) & torch.tensor(tile.shape[-2:] == (block_q, block_kv))
            row.append(torch.where(full, FULL, torch.where(tile.any(-1).any(-1), PARTIAL, EMPTY)))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def tiles_of(lists: TileLists, tiles: int) -> list[tuple[list[int], list[int]]]:
    """Spell out each row's partial and full tiles."""
    found = []
    for row in range(lists.partial_start.numel() - 1):
        partial = lists.partial[lists.partial_start[row] : lists.partial_start[row + 1]].tolist()
        full = lists.full[lists.full_start[row] : lists.full_start[row + 1]].tolist()
        assert max([*partial, *full], default=0) < tiles
        found.append((partial, full))
    return found


def assert_lists(blocks: Blocks, kinds: torch.Tensor) -> None:
    """Hold both lists to the kinds of all tiles; rows must rise."""
    for lists, tiles, table in (
        (blocks.by_query, blocks.tiles_kv, kinds),
        (blocks.by_key, blocks.tiles_q, kinds.transpose(-1, -2)),
    ):
        rows = table.flatten(0, -2)
        wanted = [tuple((row == kind).nonzero()[:, 0].tolist() for kind in (PARTIAL, FULL)) for row in rows]
        assert tiles_of(lists, tiles) == wanted
        assert {x.dtype for x in lists} == {torch.int32}
        assert all(x.is_contiguous() for x in lists)


# ---- right ----


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_tile_is_what_its_pairs_say(name: str, band: tuple[int | None, int | None, int]) -> None:
    mask, batch, heads = MASKS[name]
    left, right, offset = band
    visible = pairs(mask, 2, 3, 300, 280)
    q_pos, kv_pos = torch.arange(300)[:, None], torch.arange(280)[None, :]
    visible = visible & is_visible(q_pos, kv_pos, 0, 280, left, right, offset)
    blocks = Blocks.of(
        mask, batch=2, heads=3, len_q=300, len_kv=280, left=left, right=right, offset=offset, block_q=64, block_kv=32
    )
    assert (blocks.batch, blocks.heads) == (batch, heads)
    kinds = kinds_of(visible, 64, 32)
    assert torch.equal(blocks.kinds.expand_as(kinds), kinds)
    assert_lists(blocks, kinds[:batch, :heads])


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1), (128, 128), (129, 127), (1, 1000)])
def test_any_lengths_will_do(lengths: tuple[int, int]) -> None:
    len_q, len_kv = lengths
    blocks = Blocks.of(MASKS["causal"][0], len_q=len_q, len_kv=len_kv)
    if min(lengths):
        assert_lists(blocks, kinds_of(pairs(MASKS["causal"][0], 1, 1, len_q, len_kv), 128, 128))
    else:
        assert blocks.counts() == (0, 0, 0)
        assert blocks.density() == 0.0


def test_no_sequences_and_no_heads_have_no_lists() -> None:
    assert Blocks.of(MASKS["both"][0], batch=0, heads=2, len_q=300, len_kv=300).counts() == (0, 0, 0)
    assert Blocks.of(MASKS["both"][0], batch=2, heads=0, len_q=300, len_kv=300).counts() == (0, 0, 0)


def test_tensors_may_be_given_beside_the_function() -> None:
    blocks = Blocks.of(
        lambda b, h, q, kv, documents: documents[b, q] == documents[b, kv], (DOCUMENTS,), batch=2, len_q=300, len_kv=300
    )
    assert blocks.mask_tensors == (DOCUMENTS,)
    assert torch.equal(blocks.kinds, kinds_of(pairs(MASKS["documents"][0], 2, 1, 300, 300), 128, 128))


def test_pairs_are_visible_as_their_tiles_and_the_mask_say() -> None:
    mask = MASKS["documents"][0]
    assert mask is not None
    visible = pairs(mask, 2, 1, 300, 300)
    blocks = Blocks.of(mask, batch=2, heads=3, len_q=300, len_kv=300)
    q_pos, kv_pos = torch.arange(300)[:, None], torch.arange(300)[None, :]
    assert torch.equal(blocks.visible(q_pos, kv_pos, visible), visible)
    loose = blocks.visible(q_pos, kv_pos)
    spread = blocks.kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :300, :300]
    assert torch.equal(loose, spread > 0)


class Largest(TorchDispatchMode):
    """Notes the most bytes that any tensor had which was made meanwhile."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self.bytes = max([self.bytes, *sizes])
        return results


def test_memory_grows_with_the_length_and_not_with_its_square() -> None:
    peaks = []
    for length in (4096, 8192):
        with Largest() as largest:  # type: ignore[no-untyped-call]
            Blocks.of(lambda b, h, q, kv: (q - kv).abs() < 300, len_q=length, len_kv=length)
        peaks.append(largest.bytes)
    assert peaks[1] <= 2 * peaks[0]
    assert peaks[1] <= 8 * 128 * 8192  # a row of tiles, of positions at the most


# ---- kept ----


def window(size: int) -> Callable[..., Any]:
    return lambda b, h, q, kv: (q - kv).abs() <= size


def test_the_same_question_gets_the_same_lists() -> None:
    mask = window(30)
    first = Blocks.of(mask, len_q=500, len_kv=500)
    assert Blocks.of(mask, len_q=500, len_kv=500) is first
    for other in (
        Blocks.of(window(31), len_q=500, len_kv=500),
        Blocks.of(window(30), len_q=501, len_kv=500),
        Blocks.of(window(30), len_q=500, len_kv=501),
        Blocks.of(window(30), len_q=500, len_kv=500, right=0),
        Blocks.of(window(30), len_q=500, len_kv=500, offset=1),
        Blocks.of(window(30), len_q=500, len_kv=500, block_q=64),
        Blocks.of(window(30), len_q=500, len_kv=500, block_kv=64),
    ):
        assert other.by_query is not first.by_query


def test_a_function_defined_anew_gets_the_same_lists_with_itself_beside_them() -> None:
    first, mask = Blocks.of(window(30), len_q=500, len_kv=500), window(30)
    again = Blocks.of(mask, len_q=500, len_kv=500)
    assert again.by_query is first.by_query
    assert again.by_key is first.by_key
    assert again.mask_mod is mask


def test_lists_made_in_inference_mode_serve_later_calls_with_gradients() -> None:
    with torch.inference_mode():
        made = Blocks.of(window(29), len_q=40, len_kv=40)
        taken = Blocks.from_torch(create_block_mask(window(29), None, None, 40, 40, device="cpu"))
    q = torch.randn(1, 1, 40, 8, requires_grad=True)
    grads = [torch.autograd.grad(attention(q, q, q, blocks=x).sum(), q)[0] for x in (made, taken)]
    want = torch.autograd.grad(attention(q, q, q, window=(29, 29)).sum(), q)[0]
    for got in grads:
        torch.testing.assert_close(got, want)


def test_a_tensor_that_was_written_to_is_another_question() -> None:
    limit = torch.tensor([100])
    mask = lambda b, h, q, kv: kv < limit[0]
    before = Blocks.of(mask, len_q=500, len_kv=500)
    assert Blocks.of(mask, len_q=500, len_kv=500) is before
    limit.fill_(300)
    after = Blocks.of(mask, len_q=500, len_kv=500)
    assert (before.counts(), after.counts()) == ((12, 4, 0), (4, 6, 6))


def test_a_tensor_that_cannot_tell_whether_it_was_written_to_is_asked_anew() -> None:
    with torch.inference_mode():
        limit = torch.tensor([100])
        mask = lambda b, h, q, kv: kv < limit[0]
        first = Blocks.of(mask, len_q=500, len_kv=500)
        limit.fill_(300)
        assert Blocks.of(mask, len_q=500, len_kv=500).counts() != first.counts()


def test_few_lists_are_kept() -> None:
    for size in range(2 * block_lists.MOST_KEPT):
        Blocks.of(window(size), len_q=10, len_kv=10)
    assert len(block_lists._lists) == block_lists.MOST_KEPT


# ---- taken from PyTorch ----


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
@pytest.mark.parametrize("size", [128, (64, 32)], ids=str)
def test_a_block_mask_of_pytorch_says_the_same(name: str, size: Any) -> None:
    mask, batch, heads = MASKS[name]
    assert mask is not None
    theirs = create_block_mask(mask, batch, heads, 300, 280, device="cpu", BLOCK_SIZE=size)
    block_q, block_kv = theirs.BLOCK_SIZE
    ours = Blocks.of(mask, batch=batch, heads=heads, len_q=300, len_kv=280, block_q=block_q, block_kv=block_kv)
    taken = Blocks.from_torch(theirs)
    for x, y in zip((*ours.by_query, *ours.by_key), (*taken.by_query, *taken.by_key), strict=True):
        assert torch.equal(x, y)
    assert (taken.mask_mod, taken.len_q, taken.len_kv) == (mask, 300, 280)


def test_lists_that_somebody_made_by_hand_count() -> None:
    number = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 1], [2, 0, 1]]]], dtype=torch.int32)
    full_number = torch.tensor([[[1, 1]]], dtype=torch.int32)
    full_indices = torch.tensor([[[[0, 0, 0], [1, 0, 0]]]], dtype=torch.int32)
    theirs = BlockMask.from_kv_blocks(number, indices, full_number, full_indices, 64)
    blocks = Blocks.from_torch(theirs)
    assert blocks.mask_mod is None
    assert blocks.kinds.tolist() == [[[[FULL, EMPTY, PARTIAL], [PARTIAL, FULL, PARTIAL]]]]
    assert tiles_of(blocks.by_key, 2) == [([1], [0]), ([], [1]), ([0, 1], [])]


def test_full_tiles_of_a_block_mask_that_reach_beyond_the_lengths_are_partial() -> None:
    number, indices = torch.zeros(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    full, tiles = (
        torch.full((1, 1, 2), 2, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32).expand(1, 1, 2, 2),
    )
    theirs = BlockMask.from_kv_blocks(number, indices, full, tiles, 64, seq_lengths=(100, 90))
    assert Blocks.from_torch(theirs).kinds.tolist() == [[[[FULL, PARTIAL], [PARTIAL, PARTIAL]]]]


# ---- looked at ----


def test_a_picture_tells_every_tile() -> None:
    blocks = Blocks.of(MASKS["prefix"][0], len_q=300, len_kv=300, block_q=64, block_kv=64)
    assert blocks.draw().splitlines() == [
        "300 queries x 300 keys in tiles of 64 x 64: 7 full (#), 9 partial (+), 9 empty (.)",
        "#+...",
        "#+...",
        "##+..",
        "###+.",
        "+++++",
    ]
    assert blocks.density() == 16 / 25


def test_a_picture_shows_the_head_and_sequence_asked_for() -> None:
    blocks = Blocks.of(MASKS["documents"][0], batch=2, heads=3, len_q=300, len_kv=300)
    assert blocks.draw(0, 2).splitlines()[1:] == ["++.", "+#.", "..+"]
    assert blocks.draw(1, 0).splitlines()[1:] == ["##+", "##+", "+++"]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_known_mask_has_a_sample_of_any_length(name: str) -> None:
    for len_q, len_kv in ((1, 1), (300, 500), (1500, 1500)):
        blocks = Blocks.of(*find(name, len_q, len_kv), len_q=len_q, len_kv=len_kv)
        empty, partial, full = blocks.counts()
        assert partial + full > 0
        assert len(blocks.draw().splitlines()) == 1 + blocks.tiles_q
    assert empty > 0


def test_a_mask_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def first(batch, head, q_pos, kv_pos):\n    return kv_pos < 128\n"
        "pair = (lambda batch, head, q_pos, kv_pos, limit: kv_pos < limit[0], (torch.tensor([256]),))\n"
    )
    counts = [
        Blocks.of(*find(f"{file}:{name}", 512, 512), len_q=512, len_kv=512).counts() for name in ("first", "pair")
    ]
    assert counts == [(12, 0, 4), (8, 0, 8)]
    with pytest.raises(ValueError, match="has no mask_mod torch: it must be a function"):
        find(f"{file}:torch", 512, 512)


# ---- refused ----


def test_blocks_that_no_kernel_can_walk_are_refused() -> None:
    with pytest.raises(ValueError, match="block_kv must be a multiple of 16, got 24"):
        Blocks.of(None, len_q=10, len_kv=10, block_kv=24)
    with pytest.raises(ValueError, match="len_q must not be negative, got -1"):
        Blocks.of(None, len_q=-1, len_kv=10)


def test_a_mask_that_is_no_function_or_has_tensors_elsewhere_is_refused() -> None:
    with pytest.raises(TypeError, match="mask_mod must be a function of positions; got 3"):
        Blocks.of(3, len_q=10, len_kv=10)  # type: ignore[arg-type]
    elsewhere = torch.zeros(10, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"must be on cpu; got one of shape \(10,\) on meta"):
        Blocks.of(lambda b, h, q, kv: elsewhere[kv] == 0, len_q=10, len_kv=10)


def test_a_block_mask_whose_tiles_do_not_cover_its_lengths_is_refused() -> None:
    number, indices = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    theirs = BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=64, seq_lengths=(300, 128))
    with pytest.raises(ValueError, match=r"300 queries and 128 keys are \(5, 2\) tiles"):
        Blocks.from_torch(theirs)


# ---- the kernel ----

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
compiled = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter leaves nothing to compile"
)
CPU = torch.device("cpu")


def asked(mask: Callable[..., Any] | None, **options: Any) -> block_lists._Asked:
    usual = {"mask_tensors": (), "left": None, "right": None, "offset": 0, "block_q": 64, "block_kv": 32}
    return block_lists._Asked(mask_mod=mask, **{**usual, **options})


@pytest.mark.interpreter
@interpreted
@pytest.mark.parametrize("name", MASKS)
def test_the_kernel_lists_what_torch_finds(name: str) -> None:
    mask, batch, heads = MASKS[name]
    left, right, offset = BANDS[len(name) % 3]
    assert_kernel_agrees(asked(mask, len_q=140, len_kv=129, left=left, right=right, offset=offset), batch, heads)


@pytest.mark.interpreter
@interpreted
def test_the_kernel_takes_tiles_that_are_no_powers_of_two_in_pieces() -> None:
    for mask in (None, MASKS["documents"][0]):
        assert_kernel_agrees(asked(mask, len_q=100, len_kv=170, left=60, block_q=96, block_kv=48), 1, 1)


def assert_kernel_agrees(question: block_lists._Asked, batch: int, heads: int) -> None:
    found = question.listed(batch, heads, CPU)
    wanted = block_lists._compressed(question.kinds(batch, heads, CPU))
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)
        assert x.dtype == y.dtype


@pytest.mark.compile
@compiled
def test_another_length_window_or_tensor_needs_no_other_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from recorder import Recorder
    from tilewise.backends import launch

    driver = Recorder()
    monkeypatch.setattr(launch, "_default", launch.Launcher(driver))
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path))

    def within(size: int, documents: torch.Tensor) -> Callable[..., Any]:
        return lambda b, h, q, kv: (documents[b, q] == documents[b, kv]) & (q - kv <= size)

    asked(within(40, DOCUMENTS), len_q=300, len_kv=300, right=0).listed(2, 1, CPU)
    assert [len(driver.loaded), len(driver.launches)] == [2, 2]  # counting and filling are two kernels
    asked(within(70, DOCUMENTS + 1), len_q=301, len_kv=77, right=5, offset=3).listed(2, 1, CPU)
    asked(within(1, DOCUMENTS[:1, :16]), len_q=16, len_kv=16, right=-1).listed(1, 1, CPU)
    assert [len(driver.loaded), len(driver.launches)] == [2, 6]
    asked(window(3), len_q=300, len_kv=300, right=0).listed(1, 1, CPU)
    assert len(driver.loaded) == 4  # another function is another kernel
