"""Tensor maps: encoded once, moved by writing an address, refused where the hardware cannot take them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from recorder import Recorder, integer
from tilewise.backends import launch
from tilewise.backends.bound import Bound
from tilewise.backends.compile import Binary
from tilewise.backends.tensor_map import kind_of

MAPS = (8, *[128, 4, 4, 8, 8] * 2, 4)  # a pointer, two maps of two axes, a number


def mapped(driver: Recorder, slots: tuple[int, int] = (1, 2)) -> launch.Prepared:
    binary = Binary("name", b"", 128, 0, parameters=MAPS, hidden=0, maps=((3, 64, 64), (0, 8, 8)))
    kinds = ["*fp32", "tensordesc<bf16[64, 128],Layout()>", "tensordesc<fp32[8, 8],Layout()>", "i32"]
    x, y = torch.empty(4, 256, dtype=torch.bfloat16), torch.empty(4, 8)
    how = launch.TensorMap((4, 256), (256, 1), (64, 128)), launch.TensorMap((4, 8), (8, 1), (8, 8))
    maps = [(slots[0], x, how[0]), (slots[1], y, how[1])]
    return Bound(driver, -1, binary, kinds).prepare((1,), [7], [0], maps)


def test_a_prepared_launch_writes_addresses_into_its_tensor_maps() -> None:
    driver = Recorder()
    call = mapped(driver, slots=(2, 1))
    bfloat, full = torch.bfloat16, torch.float32
    assert driver.maps == [(bfloat, (4, 256), (256, 1), (64, 64), 3), (full, (4, 8), (8, 1), (8, 8), 0)]
    for _ in range(2):
        pointer, second, first = torch.empty(4), torch.empty(4, 8), torch.empty(4, 256, dtype=torch.bfloat16)
        call([pointer, second, first])
        _, _, read = driver.launches[-1]
        assert integer(read[0]) == pointer.data_ptr()
        assert read[1] == first.data_ptr().to_bytes(8, "little") + bytes([1] * 120)
        assert read[6] == second.data_ptr().to_bytes(8, "little") + bytes([2] * 120)
        assert integer(read[11]) == 7
        assert all(address % 64 == 0 for address in driver.map_places)


def test_a_driver_that_keeps_addresses_elsewhere_in_a_map_is_not_trusted() -> None:
    driver = Recorder()
    driver.moves_wrongly = 1
    with pytest.raises(RuntimeError, match="encodes a tensor map's address in a way that is not known"):
        mapped(driver)


def test_what_the_tensor_memory_accelerator_cannot_take_is_refused() -> None:
    fine = launch.TensorMap((4, 256), (256, 1), (64, 128))
    with pytest.raises(ValueError, match="int32 through a tensor map; maps know float16"):
        kind_of("f", "x", torch.int32, fine)
    for wrong in (fine._replace(strides=(256, 2)), fine._replace(strides=(250, 1)), fine._replace(shape=(1,) * 6)):
        with pytest.raises(ValueError, match="f takes x through a tensor map of up to five axes, the last one dense"):
            kind_of("f", "x", torch.bfloat16, wrong)
