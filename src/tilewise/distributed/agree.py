"""Ranks agree before they send: whom a mesh holds, and that every rank makes the same call.

A collective that one rank enters with other shapes than its neighbours hangs, or worse, returns. So each call starts
with eight bytes from every rank: a digest of what it is about to do. Digests that were seen together before have been
agreed on; others are followed by the descriptions themselves, and by one error on every rank if they do not fit.
Nothing of this touches the device: it goes over gloo, between hosts.

A mesh is met once, through the job's store. Two ranks that wait for each other in different meshes would wait for
ever; here each sees in the store where the other waits.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tilewise.problem.problem import fail, mismatch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_POLL = 0.01  # seconds between two looks into the store
_AGREEMENTS_KEPT = 1024


class Description(NamedTuple):
    """What one rank is about to do.

    ``common`` pairs names with values that must be the same everywhere; ``own`` pairs names with values that may
    differ. ``failure`` is the error that this rank met in its own arguments, and then all that counts.
    """

    common: tuple[tuple[str, str], ...] = ()
    own: tuple[tuple[str, int], ...] = ()
    failure: str = ""


@dataclass
class Member:
    """This rank's place in a mesh, and the groups to talk over.

    ``ranks`` are global and in the mesh's order, row by row; ``index`` is this rank's place among them. ``groups`` are
    those of the mesh's axes, ``control`` joins all ranks over gloo. ``agreed`` keeps what they agreed on.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    groups: list[dist.ProcessGroup]
    control: dist.ProcessGroup
    agreed: dict[tuple[int, ...], tuple[Description, ...]] = field(default_factory=dict)


def outside_graphs(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keep a function out of compiled graphs, which break before it: ranks must talk, and the host plans."""
    kept: Callable[_P, _T] = torch.compiler.disable(function)
    return kept


# ---- a mesh ---------------------------------------------------------------------------------------------------------

_members: dict[tuple[str, ...], Member] = {}  # by the names of the mesh's groups
_controls: dict[tuple[int, ...], tuple[object, dist.ProcessGroup]] = {}  # by ranks, with the world they belong to


def join(mesh: object) -> Member:
    """Give this rank's place in a mesh; the first time, meet the others there.

    Args:
        mesh: 1-D, or 2-D as (ring, all-to-all).

    Raises:
        TypeError, ValueError: no such mesh, or ranks that came with meshes that do not fit together.
        RuntimeError: a rank did not come within the group's timeout.
    """
    if not isinstance(mesh, DeviceMesh):
        mend = "Make one with torch.distributed.device_mesh.init_device_mesh"
        raise mismatch("mesh must be a DeviceMesh", type(mesh).__name__, mend)
    if mesh.ndim not in (1, 2):
        mend = f"Slice one out of it by name, such as mesh[{(mesh.mesh_dim_names or ('cp',))[0]!r}]"
        raise fail("mesh must have one axis, or two: (ring, all-to-all)", f"{mesh.ndim} axes", mend)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    key = tuple(str(one.group_name) for one in groups)
    known = _members.get(key)
    if known is not None and known.groups == groups:  # names come again where a job starts its groups anew
        return known
    ranks = tuple(mesh.mesh.flatten().tolist())
    if dist.get_rank() not in ranks:
        raise fail(f"rank {dist.get_rank()} is not in the mesh", ranks, "Call only on ranks of the mesh")
    if list(ranks) != sorted(ranks):
        mend = "init_device_mesh and slices of its meshes give such; groups count their ranks so"
        raise fail("a mesh's ranks must ascend", list(ranks), mend)
    control = _control(groups[0], ranks, mesh.device_type)
    for group in groups if mesh.device_type != "cpu" else []:
        # NCCL connects a group in its first collective call, which all ranks must make; a hop need not have them all.
        dist.all_reduce(torch.zeros(1, device=mesh.device_type), group=group)
    name = f"{list(ranks)} as {' x '.join(map(str, mesh.mesh.shape))}"
    member = Member(name, ranks, ranks.index(dist.get_rank()), groups, control)
    _members[key] = member
    return member


def _control(group: dist.ProcessGroup, ranks: tuple[int, ...], device_type: str) -> dist.ProcessGroup:
    """Give a group that joins the hosts of all ranks of the mesh: its own where that can, else a new one over gloo.

    Meshes of the same ranks share it, so that a rank that takes the wrong one of them is heard.
    """
    world = dist.group.WORLD
    kept = _controls.get(ranks)
    if kept is not None and kept[0] is world:
        return kept[1]
    _meet(ranks, _timeout(group, device_type))
    control = _control_of(group, ranks, device_type)
    _controls[ranks] = world, control
    return control


def _control_of(group: dist.ProcessGroup, ranks: tuple[int, ...], device_type: str) -> dist.ProcessGroup:
    try:
        group._get_backend(torch.device("cpu"))  # noqa: SLF001  # the only way to ask
        if dist.get_process_group_ranks(group) == list(ranks):
            return group
    except RuntimeError:  # a group for GPUs alone
        pass
    timeout = _timeout(group, device_type)
    made = dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
    if not isinstance(made, dist.ProcessGroup):
        raise TypeError("torch.distributed gave no group for ranks that it holds")
    return made


def _timeout(group: dist.ProcessGroup, device_type: str) -> timedelta:
    backend = group._get_backend(torch.device(device_type))  # noqa: SLF001  # no public way to a group's timeout
    options = getattr(backend, "options", None)
    timeout: timedelta = dist.constants.default_pg_timeout if options is None else options._timeout  # noqa: SLF001
    return timeout


def _meet(ranks: tuple[int, ...], timeout: timedelta) -> None:
    """Wait until every rank of a mesh has come with a mesh of these ranks.

    Each rank leaves two notes in the store: that it came here, and where it is now. A rank that is missing here and
    waits elsewhere for this one, which has never been there, will not come.
    """
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch has no public name for it
    me, here = dist.get_rank(), f"{list(ranks)}"
    store.set(f"tilewise/met/{here}/{me}", "")
    store.set(f"tilewise/at/{me}", here)
    deadline = time.monotonic() + timeout.total_seconds()
    absent = list(ranks)
    while True:
        absent = [rank for rank in absent if not store.check([f"tilewise/met/{here}/{rank}"])]
        if not absent:
            store.set(f"tilewise/at/{me}", "")
            return
        for rank in absent:
            at = store.get(f"tilewise/at/{rank}").decode() if store.check([f"tilewise/at/{rank}"]) else ""
            failed = at.startswith("!") and here in at
            waits_for_me = f"{me}" in at.strip("[]").split(", ") and not store.check([f"tilewise/met/{at}/{me}"])
            if failed or waits_for_me:
                message = at if failed else f"!rank {me} came with ranks {here}, rank {rank} with ranks {at}"
                store.set(f"tilewise/at/{me}", message)
                raise fail("every rank must use the same mesh", message[1:], "Make it once, by the same call")
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"rank {me} waited {timeout} for ranks {absent} to call with a mesh of ranks {here}. They died, or "
                "never came to this call: look for the first error among their messages"
            )
        time.sleep(_POLL)


# ---- a call ---------------------------------------------------------------------------------------------------------


def agree(member: Member, mine: Description) -> tuple[Description, ...]:
    """Give every rank's description of this call, in the mesh's order, once they fit together.

    Raises:
        ValueError: on every rank alike: one rank's arguments are wrong, or ranks differ.
        RuntimeError: a rank did not answer.
    """
    mine = mine._replace(common=(("mesh", member.name), *mine.common))
    digests = _gather_digests(member, mine)
    found = member.agreed.get(digests)
    if found is not None:
        return found
    gathered: list[Description | None] = [None] * len(member.ranks)
    with answers(member):
        dist.all_gather_object(gathered, mine, group=member.control)
    found = tuple(one for one in gathered if one is not None)
    _compare(member, found)
    if len(member.agreed) >= _AGREEMENTS_KEPT:  # on all ranks at once: they agreed on the same calls
        member.agreed.clear()
    member.agreed[digests] = found
    return found


def _gather_digests(member: Member, mine: Description) -> tuple[int, ...]:
    digest = int.from_bytes(hashlib.blake2b(repr(mine).encode(), digest_size=8).digest(), "big", signed=True)
    gathered = [torch.empty(1, dtype=torch.int64) for _ in member.ranks]
    with answers(member):
        dist.all_gather(gathered, torch.tensor([digest]), group=member.control)
    return tuple(int(one) for one in gathered)


def _compare(member: Member, found: tuple[Description, ...]) -> None:
    for rank, one in zip(member.ranks, found, strict=True):
        if one.failure:
            raise ValueError(f"rank {rank}: {one.failure}")
    names = list(dict.fromkeys(name for one in found for name, _ in one.common))
    for name in names:
        values = [dict(one.common).get(name, "none") for one in found]
        if len(set(values)) > 1:
            groups = {value: [r for r, v in zip(member.ranks, values, strict=True) if v == value] for value in values}
            told = "; ".join(f"{value} on {_some(ranks)}" for value, ranks in groups.items())
            raise fail(f"every rank of the mesh must call with the same {name}", told, "Give all ranks the same")


def _some(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + ("" if len(ranks) <= 8 else f" and {len(ranks) - 8} more")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


@contextmanager
def answers(member: Member) -> Iterator[None]:
    """Turn what a collective says of a rank that is gone into a message that names the ranks."""
    try:
        yield
    except RuntimeError as error:
        me = member.ranks[member.index]
        raise RuntimeError(
            f"rank {me}: another of ranks {list(member.ranks)} did not answer: it died, failed, or did not come to "
            f"this call within the group's timeout. Look for the first error among theirs. ({error})"
        ) from error
