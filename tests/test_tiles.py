"""Tile sizes: the torch engine's budget, defaults that fit every target, and tuned tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.machine.device import DEVICES, KIB, MIB, Capability
from tilewise.machine.tiles import (
    SHARED_MEMORY,
    Kind,
    Tiles,
    default_tiles,
    estimate_shared_memory,
    load_table,
    padded_dim,
    shared_memory_limit,
    torch_tiles,
)

TARGETS: dict[str, Capability] = {
    "sm_75": (7, 5),
    "sm_80": (8, 0),
    "sm_86": (8, 6),
    "sm_89": (8, 9),
    "sm_90": (9, 0),
    "sm_100": (10, 0),
    "sm_120": (12, 0),
    "sm_121": (12, 1),
    "gfx942": "gfx942:sramecc+:xnack-",
}
KINDS: tuple[Kind, ...] = ("forward", "backward_kv", "backward_q", "decode")
NO_TABLES = Path("a folder without tables")  # the rule alone, whatever has been tuned
ROW: dict[str, object] = {
    "kind": "forward",
    "dim_qk": 128,
    "dim_v": 128,
    "itemsize": 2,
    "block_q": 64,
    "block_kv": 256,
    "num_warps": 2,
    "num_stages": 3,
    "provenance": {"device": "made up", "date": "2026-01-01", "triton": "3.6.0", "command": "none"},
}


@given(batch_heads=st.integers(0, 100_000), itemsize=st.sampled_from([2, 4, 8]), budget=st.integers(1, 64 * MIB))
def test_torch_tiles_are_powers_of_two_within_the_budget(batch_heads: int, itemsize: int, budget: int) -> None:
    tiles = torch_tiles(batch_heads, itemsize, budget)
    for block, most in ((tiles.block_q, 512), (tiles.block_kv, 1024)):
        assert 16 <= block <= most
        assert block & (block - 1) == 0
    size = batch_heads * tiles.block_q * tiles.block_kv * itemsize
    assert size <= budget or (tiles.block_q, tiles.block_kv) == (16, 16)
    assert size * 2 > budget or (tiles.block_q, tiles.block_kv) == (512, 1024)  # no smaller than it must be


def test_one_head_gets_the_largest_torch_tiles_and_a_default_launch() -> None:
    assert torch_tiles(1, 4) == torch_tiles(8, 4) == Tiles(512, 1024) == Tiles(512, 1024, num_warps=4, num_stages=1)
    assert torch_tiles(16, 4) == Tiles(512, 512)


@pytest.mark.parametrize("batch_heads", [1, 8, 32, 128])
def test_a_score_tile_of_usual_calls_takes_16_mib_at_most_and_2_at_least(batch_heads: int) -> None:
    tiles = torch_tiles(batch_heads, 4)
    assert 2 * MIB <= batch_heads * tiles.block_q * tiles.block_kv * 4 <= 16 * MIB


def test_every_target_has_the_shared_memory_of_its_data_sheet() -> None:
    assert set(TARGETS) == set(SHARED_MEMORY)
    for device in DEVICES:
        if device.target in SHARED_MEMORY:
            assert device.shared_per_block == shared_memory_limit(device.capability)


def test_an_unknown_target_gets_what_every_gpu_has() -> None:
    assert shared_memory_limit((13, 7)) == shared_memory_limit("gfx1200") == 64 * KIB


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_default_fits_its_target_by_estimate(target: str, kind: Kind) -> None:
    capability = TARGETS[target]
    for itemsize in (1, 2, 4):
        for dim_qk in (1, 32, 64, 80, 128, 192, 256, 300, 512):
            for dim_v in (dim_qk, 128):
                if kind == "decode" and itemsize == 4 and dim_qk > 256 and SHARED_MEMORY[target] == 64 * KIB:
                    continue  # refused: see below
                tiles = default_tiles(capability, dim_qk, dim_v, itemsize, kind)
                assert estimate_shared_memory(tiles, dim_qk, dim_v, itemsize, kind) <= SHARED_MEMORY[target]
                assert min(tiles.block_q, tiles.block_kv) >= 16


@pytest.mark.parametrize("capability", [(7, 5), "gfx942"])
def test_tiles_that_fit_nowhere_are_refused_with_the_numbers(capability: Capability) -> None:
    with pytest.raises(ValueError, match="no backward_kv tiles with head dims 513 and 513 of 4 bytes fit the 64 KiB"):
        default_tiles(capability, 513, 513, 4, "backward_kv")
    with pytest.raises(ValueError, match="no decode tiles with head dims 512 and 512 of 4 bytes fit the 64 KiB"):
        default_tiles(capability, 512, 512, 4, "decode")


@pytest.mark.parametrize("kind", ["forward", "backward_kv", "backward_q"])
def test_head_dims_come_in_pieces_only_where_nothing_else_fits(kind: Kind) -> None:
    for capability in TARGETS.values():
        for dim_qk, dim_v in ((512, 512), (512, 64), (64, 512), (256, 256), (128, 128)):
            for itemsize in (2, 4):
                tiles = default_tiles(capability, dim_qk, dim_v, itemsize, kind, NO_TABLES)
                least = estimate_shared_memory(Tiles(16, 16), dim_qk, dim_v, itemsize, kind)
                assert (tiles.max_dim is not None) == (least > shared_memory_limit(capability))


def test_a_limit_of_columns_cuts_head_dims_into_pieces() -> None:
    tiles = Tiles(16, 16, max_dim=256)
    assert [tiles.piece(dim) for dim in (1, 80, 256, 257, 512)] == [16, 128, 256, 256, 256]
    assert [tiles.pieces(dim) for dim in (0, 1, 80, 256, 257, 512)] == [1, 1, 1, 1, 2, 2]
    assert Tiles(16, 16).piece(512) == 512
    assert Tiles(16, 16).pieces(512) == 1


@pytest.mark.parametrize("most", [0, 8, 100, 128.0, True])
def test_a_limit_of_columns_is_a_width_that_a_tile_can_have(most: int) -> None:
    with pytest.raises(ValueError, match="max_dim must be None or a power of two from 16"):
        Tiles(64, 64, max_dim=most)


def test_a_default_is_the_largest_that_fits() -> None:
    for target, capability in TARGETS.items():
        tiles = default_tiles(capability, 128, 128, 2, "forward", NO_TABLES)
        for larger in (
            Tiles(2 * tiles.block_q, tiles.block_kv, 8, tiles.num_stages),
            Tiles(tiles.block_q, 2 * tiles.block_kv, 8, tiles.num_stages),
        ):
            too_large = max(larger.block_q, larger.block_kv) > 128
            bytes_needed = estimate_shared_memory(larger, 128, 128, 2, "forward")
            assert too_large or bytes_needed > SHARED_MEMORY[target]


@pytest.mark.parametrize(
    ("target", "kind", "dim", "itemsize", "expected"),
    [
        ("sm_90", "forward", 128, 2, Tiles(128, 128, 8, 2)),
        ("sm_90", "forward", 256, 2, Tiles(64, 64, 4, 2)),  # more queries would need more than half of the registers
        ("sm_80", "forward", 128, 2, Tiles(128, 64, 8, 2)),
        ("sm_75", "forward", 128, 2, Tiles(64, 32, 4, 2)),
        ("sm_75", "forward", 256, 2, Tiles(32, 32, 4, 1)),  # one stage, rather than fewer than 32 of either
        ("sm_89", "forward", 256, 4, Tiles(32, 16, 4, 2)),
        ("sm_89", "forward", 512, 4, Tiles(16, 16, 4, 1)),
        ("sm_89", "backward_kv", 512, 4, Tiles(16, 16, 4, 1, max_dim=256)),
        ("gfx942", "backward_q", 512, 2, Tiles(16, 16, 4, 1, max_dim=256)),
        ("sm_75", "backward_q", 256, 4, Tiles(16, 16, 4, 1, max_dim=128)),
        ("sm_100", "backward_q", 128, 2, Tiles(128, 64, 8, 2)),  # shared memory allows no square
        ("sm_90", "backward_kv", 256, 2, Tiles(64, 32, 4, 2)),
        ("sm_86", "backward_kv", 128, 2, Tiles(64, 32, 4, 2)),
        ("sm_80", "decode", 128, 2, Tiles(16, 32, 4, 3)),
        ("sm_80", "decode", 256, 2, Tiles(16, 32, 4, 2)),
        ("gfx942", "decode", 128, 2, Tiles(16, 16, 4, 3)),
    ],
)
def test_defaults_follow_the_rule(target: str, kind: Kind, dim: int, itemsize: int, expected: Tiles) -> None:
    assert default_tiles(TARGETS[target], dim, dim, itemsize, kind, NO_TABLES) == expected


def test_narrow_targets_get_smaller_tiles_than_wide_ones() -> None:
    areas = [
        tiles.block_q * tiles.block_kv
        for tiles in (
            default_tiles(TARGETS[name], 128, 128, 2, "forward", NO_TABLES)
            for name in ("sm_75", "sm_89", "sm_80", "sm_90")
        )
    ]
    assert areas == sorted(areas)
    assert areas[0] < areas[-1]


def test_decoding_packs_query_heads_into_16_rows() -> None:
    assert {default_tiles(c, d, d, 2, "decode").block_q for c in TARGETS.values() for d in (64, 128, 256)} == {16}


def test_the_estimate_counts_every_operand_tile() -> None:
    tiles, both = Tiles(64, 32, 4, 3), 128 + 64
    forward = 64 * 128 + 3 * 32 * both + 64 * 32  # q, three stages of k and v, p
    assert estimate_shared_memory(tiles, 128, 64, 2, "forward") == 2 * forward
    assert estimate_shared_memory(tiles, 100, 50, 2, "forward") == 2 * forward  # padded
    keys_outside = (32 + 3 * 64) * both + 2 * 64 * 32  # k and v, three stages of q and d_out, p and ds
    assert estimate_shared_memory(tiles, 128, 64, 2, "backward_kv") == 2 * keys_outside + 3 * 64 * 4 * 4
    in_pieces = 16 * 256 + 16 * (256 + 64) + 32 * 256 + 16 * 16  # the first pieces, v, two more pieces, p
    assert estimate_shared_memory(Tiles(16, 16, max_dim=256), 512, 64, 2, "forward") == 2 * in_pieces
    queries_outside = (64 + 3 * 128) * both + 2 * 64 * 128
    assert (
        estimate_shared_memory(Tiles(64, 128, 4, 3), 128, 64, 2, "backward_q") == 2 * queries_outside + 3 * 128 * 4 * 4
    )


def test_head_dims_are_padded_to_powers_of_two() -> None:
    assert [padded_dim(dim) for dim in (1, 16, 17, 64, 65, 512)] == [16, 16, 32, 64, 128, 512]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((128, 128, 2, "sideways"), "kind must be one of forward, backward_kv, backward_q, decode; got 'sideways'"),
        ((0, 128, 2, "forward"), "dim_qk, dim_v and itemsize must be 1 or more; got 0, 128 and 2"),
    ],
)
def test_bad_questions_are_refused(arguments: tuple[int, int, int, Kind], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        default_tiles((9, 0), *arguments)


@pytest.mark.parametrize("field", ["block_q", "block_kv", "num_warps", "num_stages"])
@pytest.mark.parametrize("value", [0, -16, 1.5, True])
def test_tiles_are_whole_numbers_above_zero(field: str, value: float) -> None:
    sizes = {"block_q": 16, "block_kv": 16, "num_warps": 4, "num_stages": 1, field: value}
    with pytest.raises(ValueError, match=f"{field} must be a whole number of 1 or more"):
        Tiles(**sizes)  # type: ignore[arg-type]


def write(folder: Path, *rows: object, target: str = "sm_90") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "sm_90.json").write_text(json.dumps({"target": target, "rows": rows}), encoding="utf-8")
    return folder


def test_a_tuned_row_goes_before_the_default(tmp_path: Path) -> None:
    folder = write(tmp_path, ROW, {**ROW, "kind": "decode", "block_q": 16})
    assert default_tiles((9, 0), 128, 100, 2, "forward", folder) == Tiles(64, 256, 2, 3)
    assert default_tiles((9, 0), 128, 128, 2, "decode", folder) == Tiles(16, 256, 2, 3)
    pieces = write(tmp_path / "pieces", {**ROW, "dim_qk": 512, "max_dim": 256, "max_registers": 128})
    assert default_tiles((9, 0), 500, 128, 2, "forward", pieces) == Tiles(64, 256, 2, 3, 128, 256)
    assert len(load_table("sm_90", folder)) == 2
    wide = write(tmp_path / "wide", {**ROW, "itemsize": 8, "num_warps": 1})
    assert default_tiles((9, 0), 128, 128, 8, "forward", wide) == Tiles(64, 256, 1, 3)
    for other in (
        default_tiles((9, 0), 64, 128, 2, "forward", folder),
        default_tiles((9, 0), 128, 128, 4, "forward", folder),
        default_tiles((8, 0), 128, 128, 2, "forward", folder),
    ):
        assert other != Tiles(64, 256, 2, 3)


def test_every_shipped_table_can_be_read() -> None:
    for target in TARGETS:
        for (kind, _, _, itemsize), tiles in load_table(target).items():
            assert kind in KINDS
            assert itemsize in {1, 2, 4, 8}
            assert isinstance(tiles, Tiles)


PROVENANCE = ROW["provenance"]
assert isinstance(PROVENANCE, dict)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("text", "must have exactly the keys"),
        ({key: value for key, value in ROW.items() if key != "block_q"}, "must have exactly the keys"),
        ({**ROW, "speed": 1}, "must have exactly the keys"),
        ({**ROW, "provenance": "my desk"}, "provenance must have exactly the keys command, date, device, triton"),
        ({**ROW, "provenance": {**PROVENANCE, "device": ""}}, "provenance must say where each figure was measured"),
        ({**ROW, "kind": "sideways"}, "kind must be one of forward, backward_kv, backward_q, decode; got 'sideways'"),
        ({**ROW, "dim_qk": 80}, "dim_qk and dim_v must be powers of two from 16; got 80 and 128"),
        ({**ROW, "dim_v": "128"}, "dim_qk and dim_v must be powers of two from 16; got 128 and '128'"),
        ({**ROW, "dim_v": 0}, "dim_qk and dim_v must be powers of two from 16; got 128 and 0"),
        ({**ROW, "itemsize": 3}, "itemsize must be 1, 2, 4 or 8 bytes; got 3"),
        ({**ROW, "block_q": "64"}, "block_q must be a whole number of 1 or more, got '64'"),
        ({**ROW, "block_kv": 8}, "blocks must be 16 or more; got 64 and 8"),
        ({**ROW, "block_kv": 48}, "blocks and num_warps must be powers of two"),
        ({**ROW, "num_warps": 3}, "blocks and num_warps must be powers of two"),
    ],
)
def test_a_malformed_row_is_refused_by_file_and_number(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"sm_90\.json, row 1: .*{message}"):
        load_table("sm_90", write(tmp_path, {**ROW, "itemsize": 4}, row))


def test_a_second_row_for_the_same_case_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 1: a second row for \('forward', 128, 128, 2\)"):
        load_table("sm_90", write(tmp_path, ROW, {**ROW, "block_q": 128}))


def test_a_file_for_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sm_90\.json must hold"):
        load_table("sm_90", write(tmp_path, ROW, target="sm_80"))


@pytest.mark.parametrize("most", [0, 256, 128.0, True])
def test_a_limit_of_registers_is_a_number_that_a_thread_can_have(most: int) -> None:
    with pytest.raises(ValueError, match="max_registers must be None or a whole number from 16 to 255"):
        Tiles(64, 64, max_registers=most)
    assert Tiles(64, 64, max_registers=128).max_registers == 128
