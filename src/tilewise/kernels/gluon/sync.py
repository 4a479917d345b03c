"""The tricks below Gluon's level, each in one function with its reason.

Barriers. Gluon's own arrive and wait put a ``bar.sync`` of the whole partition around each call. Those of this file do
not: one lane of each warp arrives, so a barrier that a partition of four warps releases counts four. A barrier is known
by its ``slot``: a kernel allocates ONE array ``bars`` of int64, shape (slots, 1), for all its barriers, and behind them
for the words of `put`. BAR_OFF is where that array lies in shared memory, in bytes. Only the compiler knows, so a
kernel is compiled with a guess, `bar_offset` reads the place from the result, and a wrong guess is compiled once more.
A kernel that runs with a wrong one hangs the GPU.

Predicates come from ``%laneid``, never from ``%tid``: with that ptxas no longer knows that a loop is the same for all
lanes, and leaves the uniform registers. Arithmetic is not held by its place in the source: only volatile assembly
(``is_pure=False``) keeps its order, and only against its like.
"""
# mypy: ignore-errors
# Triton's values have no types that a checker knows.

import re

from tilewise.kernels.gluon.compat import gl, gluon

# ---- barriers in shared memory --------------------------------------------------------------------------------------


@gluon.jit
def arrive(slot, lane, BAR_OFF: gl.constexpr):
    """Arrive at a barrier, once for each warp, with no barrier of the partition before it.

    A warp's own reads of a buffer are over when it arrives: `warpgroup_mma_wait` is for the warp. So no warp has to
    wait for the other three, and the barrier counts warps.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 place;
        setp.eq.u32 first, $2, 0;
        mov.u32 place, global_smem; add.u32 place, place, $1;
        @first mbarrier.arrive.shared::cta.b64 _, [place];
        mov.b32 $0, $1;
        }""",
        "=r,r,r",
        [gl.to_tensor(slot) * 8 + BAR_OFF, lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def arrive_if(condition, slot, lane, BAR_OFF: gl.constexpr):
    """Arrive where ``condition`` holds, without a branch: otherwise no lane is the first."""
    arrive(slot, gl.where(condition, lane, 1), BAR_OFF)


@gluon.jit
def wait(slot, phase, BAR_OFF: gl.constexpr):
    """Wait until the barrier's phase of this parity (0 or 1) is complete, with no barrier of the partition around it.

    Each warp goes on as soon as it may. On a fresh barrier parity 1 counts as complete: so a producer starts with
    ``phase ^ 1`` and finds every buffer empty.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred done; .reg .b32 place;
        mov.u32 place, global_smem; add.u32 place, place, $1;
        AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [place], $2;
        @!done bra.uni AGAIN;
        mov.b32 $0, $1;
        }""",
        "=r,r,r",
        [gl.to_tensor(slot) * 8 + BAR_OFF, gl.to_tensor(phase)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_if(condition, slot, phase, BAR_OFF: gl.constexpr):
    """Wait where ``condition``, the same for the whole partition, holds; the branch stays inside the assembly.

    A branch that the compiler sees would end the block in which it may move instructions under a product in flight.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred done, asked; .reg .b32 place;
        setp.ne.u32 asked, $3, 0;
        mov.u32 place, global_smem; add.u32 place, place, $1;
        @!asked bra.uni ON;
        AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [place], $2;
        @!done bra.uni AGAIN;
        ON: mov.b32 $0, $1;
        }""",
        "=r,r,r,r",
        [gl.to_tensor(slot) * 8 + BAR_OFF, gl.to_tensor(phase), gl.to_tensor(condition).to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


def bar_offset(ptx: str) -> int:
    """Read from a kernel's PTX where its barriers begin in dynamic shared memory, in bytes: the true BAR_OFF.

    Raises:
        ValueError: there is no barrier, its address is not written in a way that is known here, or the barriers do not
            lie side by side, as those of one array do.

    >>> bar_offset("mov.b32 %r1, global_smem; add.s32 %r2, %r1, 512; mbarrier.init.shared::cta.b64 [%r2], 1;")
    512
    """
    inits = re.finditer(r"mbarrier\.init\.[\w:.]+ \[([^\]]+)\]", ptx)
    places = sorted({_place(init[1], ptx[: init.start()]) for init in inits})
    if not places:
        raise ValueError("the PTX initialises no barrier. A kernel that uses sync.wait must call mbarrier.init")
    if places != list(range(places[0], places[-1] + 1, 8)):
        raise ValueError(f"barriers lie at {places}; allocate one array for all, with the words of `put` behind them")
    return places[0]


def _place(address: str, before: str) -> int:
    """Resolve an address that is global_smem, or a register set from it with a known distance."""
    distance = 0
    while True:
        name, plus, more = address.strip().partition("+")
        distance += int(more) if plus else 0
        name = name.strip()
        if name == "global_smem":
            return distance
        set_by = re.findall(rf"(?:add|mov)\.[a-z]\d+\s+{re.escape(name)}, ([^;]+);", before)
        if not set_by:
            raise ValueError(f"the place of a barrier, {address!r}, cannot be followed to global_smem in the PTX")
        address = "+".join(part.strip() for part in set_by[-1].split(","))


# ---- barriers of threads --------------------------------------------------------------------------------------------


@gluon.constexpr_function
def _barrier_asm(operation, barrier_id, threads):
    return "{ bar." + operation + " " + str(barrier_id) + ", " + str(threads) + "; mov.b32 $0, $1; }"


@gluon.jit
def named_sync(ID: gl.constexpr, THREADS: gl.constexpr):
    """Wait at the hardware's barrier ID until THREADS threads (of several partitions) are there or have arrived.

    Gluon has a barrier for one partition or for all, none for some. Triton itself takes one id for each partition from
    0 on; those from 8 to 15 are free.
    """
    ASM: gl.constexpr = _barrier_asm("sync", ID, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def named_arrive(ID: gl.constexpr, THREADS: gl.constexpr):
    """Count this partition's threads at the hardware's barrier ID, without waiting there."""
    ASM: gl.constexpr = _barrier_asm("arrive", ID, THREADS)
    gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


# ---- one value for all ----------------------------------------------------------------------------------------------


@gluon.jit
def lane_id():
    """Give the thread's place in its warp, 0 to 31."""
    return gl.inline_asm_elementwise(
        "{ mov.u32 $0, %laneid; add.u32 $0, $0, $1; }",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def put(slot, x, y, lane, BAR_OFF: gl.constexpr):
    """Leave two int32 in a slot of ``bars``, for partitions that `get` them after a barrier.

    Scalars have no other way from one partition to another: Gluon stores tensors, with a layout and a fence of its own.
    The warp that puts also arrives; its lane 0 does both, so that the barrier orders them.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .b32 place;
        setp.eq.u32 first, $4, 0;
        mov.u32 place, global_smem; add.u32 place, place, $1;
        @first st.shared.v2.u32 [place], {$2, $3};
        mov.b32 $0, $2;
        }""",
        "=r,r,r,r,r",
        [gl.to_tensor(slot) * 8 + BAR_OFF, gl.to_tensor(x), gl.to_tensor(y), lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _get_word(word, BAR_OFF: gl.constexpr):
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 place, value;
        mov.u32 place, global_smem; add.u32 place, place, $1;
        ld.shared.u32 value, [place];
        shfl.sync.idx.b32 $0, value, 0, 31, 0xffffffff;
        }""",
        "=r,r",
        [gl.to_tensor(word) * 4 + BAR_OFF],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def get(slot, BAR_OFF: gl.constexpr):
    """Read the two int32 of a slot as (x, y).

    The shuffle changes no value: it tells ptxas that all lanes hold the same one, so that loops and addresses that
    depend on it stay uniform.
    """
    return _get_word(gl.to_tensor(slot) * 2, BAR_OFF), _get_word(gl.to_tensor(slot) * 2 + 1, BAR_OFF)


@gluon.jit
def count(counter):
    """Take a ticket: lane 0 adds one to the int32 at ``counter`` and gets what was there; other lanes get 0.

    `first_lane` gives it to all lanes, and is a function of its own so that it can be called a tile later: nothing
    waits for the atomic until then. For a partition of one warp.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first; .reg .u32 lane;
        mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l",
        [counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def first_lane(x):
    """Give the int32 of lane 0 to all lanes of its warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


# ---- arithmetic -----------------------------------------------------------------------------------------------------


@gluon.jit
def pack(x, DTYPE: gl.constexpr):
    """Round float32 to float16 or bfloat16, two neighbours in one instruction, to a register that stays packed.

    ``x.to(DTYPE)`` rounds alike; but carried over a loop, its halves are taken apart and put together again, 64 PRMT
    for each step of a tile of 64 x 128. PTX names the upper half first.
    """
    gl.static_assert(DTYPE.is_bf16() or DTYPE.is_fp16())
    if DTYPE.is_bf16():  # a dtype handed on as a constant is not understood: so both are spelt out
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    return packed


@gluon.jit
def pack_e4m3(a, b, c, d):
    """Round four float32 to float8e4nv, the four bytes of an int32, lowest first; what is too large becomes 448."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def bytes_of(x):
    """See int32 as float8e4nv: ``x`` has each int32 four times, as neighbours of a thread, and they become its bytes.

    So p crosses a loop as int32: as bytes it is taken apart and put together again, 180 instructions for 64 x 128. And
    `warpgroup_mma_wait` takes no bytes among its deps; the copy that is made here is the product's own, and lasts.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [x], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.constexpr_function
def _exp2_asm(soft):
    # The last value: its integer part by adding 1.5 * 2**23 and taking that off again, and for what is left of it, from
    # -1/2 to 1/2, 0.99992809 + f (0.69326099 + f (0.24261081 + f 0.05517144)), off by 8e-5 of itself at most.
    c = ["0f3F7FFB4A", "0f3F31798D", "0f3E786EF8", "0f3D61FB71"]
    y, p = f"${2 * soft - 1}", f"${soft - 1}"
    lines = [f"ex2.approx.ftz.f32 ${i}, ${soft + i};" for i in range(soft - 1)]
    lines += [".reg .f32 y, n, f, p; .reg .b32 e;", f"max.f32 y, {y}, 0fC2FC0000;"]
    lines += ["add.rn.f32 n, y, 0f4B400000;", "sub.rn.f32 f, n, 0f4B400000;", "sub.rn.f32 f, y, f;"]
    lines += [f"fma.rn.f32 p, f, {c[3]}, {c[2]};", f"fma.rn.f32 p, f, p, {c[1]};", f"fma.rn.f32 p, f, p, {c[0]};"]
    lines += ["mov.b32 e, n; shl.b32 e, e, 23;", ".reg .b32 q; mov.b32 q, p; add.s32 q, q, e;", f"mov.b32 {p}, q;"]
    return "{ " + "\n".join(lines) + " }"


@gluon.constexpr_function
def _exp2_constraints(soft):
    return ",".join(["=&f"] * soft + ["f"] * soft)


@gluon.jit
def exp2_shared(y, SOFT: gl.constexpr):
    """Give 2**y in float32, of each SOFT values of a thread one by multiplications, which have a unit of their own.

    A multiprocessor gives 16 special functions a cycle and 128 multiplications: beside 8-bit products it is the special
    functions that everything waits for. Below 2**-126 the values by multiplications are 2**-126 instead of 0.
    """
    ASM: gl.constexpr = _exp2_asm(SOFT)
    CONSTRAINTS: gl.constexpr = _exp2_constraints(SOFT)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [y], dtype=gl.float32, is_pure=True, pack=SOFT)


@gluon.jit
def log2_of_power(x):
    """Give the exponent of a power of two, a normal float32, by its bits: two instructions and no special function."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 e; shr.u32 e, $1, 23; or.b32 e, e, 0x4B000000; add.f32 $0, e, 0fCB00007F; }",
        "=f,r",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def inverse_of_power(x):
    """Give 1 / x for a power of two, a normal float32 below 2**127, by its bits."""
    return gl.inline_asm_elementwise("sub.u32 $0, 0x7F000000, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.constexpr_function
def _values_of_thread(acc):
    return acc.shape[0] * acc.shape[1] // 128


@gluon.constexpr_function
def _rescale_asm(n):
    # Outputs $0 .. $n-1, then acc, then rescale. Of four values in a row two are of one row of acc and two of another.
    lines = [".reg .pred moved;"] + [f"mov.b32 ${i}, ${n + i};" for i in range(n)]
    for first, label in ((0, "UPPER"), (2, "LOWER")):
        lines += [f"setp.neu.f32 moved, ${2 * n + first}, 0f3F800000; vote.sync.any.pred moved, moved, 0xffffffff;"]
        lines += [f"@!moved bra.uni {label};"]
        lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n) if i % 4 // 2 == first // 2]
        lines += [f"{label}:"]
    return "{ " + "\n".join(lines) + " }"


@gluon.constexpr_function
def _rescale_constraints(n):
    return ",".join(["=&f"] * n + ["f"] * (2 * n))


@gluon.jit
def rescale_if_moved(acc, rescale):
    """Give ``acc * rescale[:, None]``, without the products for eight rows all of which have a rescale of exactly 1.

    ``acc`` is (64, dim) in the layout of a product's accumulator and belongs to four warps; ``rescale`` is (64,) in its
    row layout. A warp holds eight rows in the upper half of its values and eight in the other. The more keys were seen,
    the more seldom a row_max moves, and the less often these dim / 4 multiplications of each thread are due. Gluon's
    ``if`` would ask all four warps; the votes inside the assembly ask one, and ptxas sees uniform branches.
    """
    N: gl.constexpr = _values_of_thread(acc)
    ASM: gl.constexpr = _rescale_asm(N)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(N)
    return gl.inline_asm_elementwise(ASM, CONSTRAINTS, [acc, rescale[:, None]], dtype=gl.float32, is_pure=False, pack=N)


@gluon.jit
def one_beyond(x, border):
    """Give 1.0 where abs(x) > border, else 0.0, for borders from 2**-40 on: by saturation, so that no predicate waits.

    Neighbours around the border lie 2**-24 of it apart, so that their difference, 2**64 times, is 1 or more.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 more; abs.f32 more, $1; sub.f32 more, more, $2; mul.sat.f32 $0, more, 0f5F800000; }",
        "=f,f,f",
        [x, border],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def opaque_zero(x):
    """Give 0 for any int32 from 0 on, in a way that no compiler sees through.

    Index a shared buffer by it inside a loop whose counter is ``x``: the addresses that a product takes then depend on
    the loop. Otherwise they are all computed ahead of it and held in up to 48 registers, which end up spilled.
    """
    return x >> 31
