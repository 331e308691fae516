# SPDX-License-Identifier: MIT
"""Tests arrays and tensors over a reservation: layout, protocols and lifetimes. None of their
operations touches memory.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
from conftest import open_context

import pyvmem
from pyvmem._native import Outcome
from pyvmem.memory.dtypes import find_dtype

torch = pytest.importorskip("torch")

FLOAT8 = [
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
DTYPES = (
    ["bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
    + ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
    + FLOAT8
)

pytestmark = pytest.mark.needs_tensors


@pytest.fixture
def rsv(context: pyvmem.Context) -> Any:
    """Yields a reservation of 16 pages, the first four of which are mapped."""
    page = context.info.granule
    reservation = context.reserve(16 * page)
    pages = context.create(4 * page)
    reservation.map(0, pages)
    pages.drop()
    yield reservation
    gc.collect()
    if reservation.is_open:
        reservation.close(unmap=True)


def settle(context: pyvmem.Context) -> None:
    """Waits for work on torch's stream, because our library uses other streams."""
    if context.cuda_device is not None:
        torch.cuda.synchronize()


def counts(context: pyvmem.Context) -> tuple[int, ...]:
    stats = context.stats()
    return (stats.mapped_bytes, stats.used_bytes, stats.slab_bytes, stats.segments)


def test_no_memory_is_touched(backend: str) -> None:
    """Uses a terabyte of address space with no pages behind it, so reading a byte would crash."""
    with open_context(backend) as context:
        size = 1 << 40
        plain = pyvmem.Caps.PLAIN in context.info.caps and backend != "host"
        rsv = context.reserve(size, visible=False if plain else None)
        before = counts(context)
        t = rsv.tensor((size // 2,), torch.bfloat16)
        assert t.numel() == size // 2
        assert t.data_ptr() == rsv.addr
        assert counts(context) == before
        view = t.view(1 << 20, -1)[5:, 7]
        assert view.data_ptr() == rsv.addr + 2 * (5 * (size >> 21) + 7)
        del t, view
        rsv.close()


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(context: pyvmem.Context, rsv: pyvmem.Reservation, name: str) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    size = find_dtype(name).itemsize
    assert torch.empty(0, dtype=dtype).element_size() == size
    for spelled in (name, dtype):
        t = rsv.tensor((3, 5), spelled, offset=size * 2)
        assert t.dtype is dtype
        assert t.shape == (3, 5)
        assert t.stride() == (5, 1)
        assert t.device.type == ("cpu" if context.info.backend == "host" else "cuda")
        t.zero_()
        settle(context)
        rsv.write(size * 2, bytes([0x3C]) * (15 * size))
        expected = torch.full((15 * size,), 0x3C, dtype=torch.uint8)
        assert torch.equal(t.contiguous().view(torch.uint8).flatten().cpu(), expected)
        del t


def test_writes_through_a_tensor_reach_the_pages(
    context: pyvmem.Context, rsv: pyvmem.Reservation
) -> None:
    t = rsv.tensor((8, 16), "int32")
    t.copy_(torch.arange(128, dtype=torch.int32).view(8, 16))
    settle(context)
    assert rsv.read(0, 512) == b"".join(k.to_bytes(4, "little") for k in range(128))
    rsv.fill(0, context.info.granule, 0)
    assert int(t.sum()) == 0


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((), None, 0),
        ((0,), None, 0),
        ((4, 0, 3), None, 64),
        ((4, 3), (3, 1), 0),
        ((4, 3), (1, 4), 8),
        ((4, 3), (100, 7), 4),
        ((4, 3), (0, 1), 4),
        ((1,), (1 << 40,), 0),
        ((2, 3, 4, 5), (1, 2, 6, 24), 4),
    ],
)
def test_strides_and_offsets(
    rsv: pyvmem.Reservation, shape: tuple[int, ...], strides: tuple[int, ...] | None, offset: int
) -> None:
    t = rsv.tensor(shape, "float32", strides, offset)
    assert tuple(t.shape) == shape
    if strides is not None and t.numel():
        assert t.stride() == strides
    if t.numel():
        assert t.data_ptr() == rsv.addr + offset
    rsv.fill(0, 4 * rsv.context.info.granule, 0)
    reference = torch.zeros(1024).as_strided(shape, t.stride(), offset // 4)
    values = torch.rand(shape)
    if 0 not in t.stride():
        t.copy_(values)
        reference.copy_(values)
        assert torch.equal(t.cpu(), reference)


@pytest.mark.parametrize("shape", [(1 << 32, 1 << 32), (1 << 62, 2), (1 << 62, 2, 0), (1 << 61,)])
def test_more_elements_than_can_be_counted(rsv: pyvmem.Reservation, shape: tuple[int, ...]) -> None:
    """torch deletes a capsule that it rejects, and our code must not delete it again."""
    with pytest.raises(pyvmem.InvalidArgument, match=r"more than 2\*\*63 - 1 bytes"):
        rsv.tensor(shape, "float32", [0] * len(shape))
    assert rsv.tensor(((1 << 61) - 1,), "float32", (0,)).numel() == (1 << 61) - 1


def test_same_size_as_the_reservation(rsv: pyvmem.Reservation) -> None:
    n = rsv.nbytes // 2
    t = rsv.tensor((n,), "float16")
    assert t.numel() == n
    assert rsv.tensor((2, n // 4), "float16", (n - n // 4, 1)).shape == (2, n // 4)


# ---- lifetimes ---------------------------------------------------------------------------------


def test_close_with_a_live_tensor(context: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    before = counts(context)
    a, b = rsv.tensor((4,), "float32"), rsv.tensor((4,), "float8_e5m2")
    view = a[1:]
    assert rsv.live_arrays == 2
    with pytest.raises(pyvmem.Busy, match="2"):
        rsv.close(unmap=True)
    with pytest.raises(pyvmem.Busy, match="2"):
        context.close()
    assert rsv.is_open
    assert context.is_open
    assert counts(context) == before
    view.fill_(3)
    del a, b
    assert rsv.live_arrays == 1  # the view keeps the storage alive
    with pytest.raises(pyvmem.Busy, match="1"):
        rsv.close(unmap=True)
    del view
    if context.cuda_device is not None:
        torch.cuda.synchronize()  # unmapping memory under a running kernel would cause a fault
    rsv.close(unmap=True)
    assert context.stats().reserved_bytes == 0


def test_tensor_keeps_reservation_and_context_alive(backend: str) -> None:
    context = open_context(backend)
    page = context.info.granule
    rsv = context.reserve(page)
    pages = context.create(page)
    rsv.map(0, pages)
    pages.drop()
    t = rsv.tensor((page,), "uint8")
    alive_context, alive_rsv = weakref.ref(context), weakref.ref(rsv)
    del context, rsv, pages
    gc.collect()
    assert alive_rsv() is not None
    assert alive_context() is not None
    t.fill_(5)
    assert int(t[-1]) == 5
    same = alive_context()
    assert same is not None
    with pytest.raises(pyvmem.Busy):
        same.close()
    with pytest.warns(ResourceWarning, match="reservation never closed"):
        del t
        gc.collect()
    same.close()


def test_a_reservation_whose_making_was_interrupted_warns(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception comes after the addresses are reserved, but before the length is known."""

    def interrupted(handle: object, addr: int) -> None:
        raise KeyboardInterrupt

    with open_context(backend) as context:
        page = context.info.granule
        made = pyvmem.Reservation(context, Outcome())
        assert repr(made) == "<Reservation 0x0, length not known>"
        with monkeypatch.context() as patched:
            patched.setattr("pyvmem.memory.context._native.range_query", interrupted)
            with pytest.raises(KeyboardInterrupt):
                context.reserve(page, into=made)
        assert made.addr
        assert repr(made) == f"<Reservation {made.addr:#x}, length not known>"
        with pytest.warns(ResourceWarning, match="reservation never closed: .* not known"):
            del made
            gc.collect()


def test_dropped_objects_warn_and_stay_open(backend: str) -> None:
    with open_context(backend) as context:
        page = context.info.granule
        context.reserve(page).close()  # performs one-time initialization
        with pytest.warns(ResourceWarning, match="reservation never closed"):
            context.reserve(page)
            gc.collect()
        with pytest.warns(ResourceWarning, match="pages never released"):
            context.create(page)
            gc.collect()
        stats = context.stats()
        assert (stats.reserved_bytes, stats.used_bytes) == (page, page)
    for full in (True, False):
        context = open_context(backend)
        handle = context.handle
        if full:
            context.reserve(page).leave()
        with pytest.warns(ResourceWarning, match="context never closed"):
            del context
            gc.collect()
        assert pyvmem._native.get_stats(handle)
        pyvmem.Context("host").close()  # a new context closes empty contexts whose owner was lost
        if full:
            pyvmem._native.close(handle)
        with pytest.raises(pyvmem.BadHandle):
            pyvmem._native.get_stats(handle)


def test_leaving_a_block_under_an_error_keeps_that_error(backend: str) -> None:
    with open_context(backend) as context:
        page = context.info.granule
        with pytest.raises(ZeroDivisionError), context.reserve(page) as rsv:
            t = rsv.tensor((1,), "uint8")
            raise ZeroDivisionError
        assert rsv.is_open
        with pytest.raises(pyvmem.Busy), rsv:
            pass
        del t
        rsv.close()


def test_freed_in_another_thread(rsv: pyvmem.Reservation) -> None:
    box = [rsv.tensor((4,), "float32")]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert rsv.live_arrays == 0


def test_tensors_do_not_leak(rsv: pyvmem.Reservation) -> None:
    for _ in range(1000):
        rsv.tensor((4,), "float32")
        rsv.array((4,), "float32").__dlpack__(max_version=(1, 0))
    assert rsv.live_arrays == 0
    assert not [one for one in gc.get_objects() if type(one) is pyvmem.VirtualArray]


EXIT = """
import sys, torch, pyvmem
context = pyvmem.Context(sys.argv[1])
page = context.info.granule
reservation = context.reserve(page)
pages = context.create(page)
reservation.map(0, pages)
torch.stray = reservation.tensor((4,), "bfloat16")
array = reservation.array((1,), "uint8")
sys.stray = (reservation.tensor((4,), "float32"), array, array.__dlpack__())
gate = pyvmem.FdEvent.create()
ticket = context.submit(pyvmem.OpBatch(1), after=[gate])
"""


def test_process_exits_with_everything_open(backend: str) -> None:
    """Tensors that outlive the interpreter's modules and a batch that never runs must not crash the
    process."""
    done = subprocess.run(
        [sys.executable, "-c", EXIT, backend], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


SIGNALS = """
import gc, random, signal, sys, pyvmem

sys.unraisablehook = lambda _: None  # what a signal raises where a tensor ends

class Interrupted(BaseException):
    pass

def interrupt(*_):
    raise Interrupted

context = pyvmem.Context("host")
reservation = context.reserve(context.info.granule)
array = reservation.array((4,), "float32")
array.__dlpack__()
reservation.tensor((4,), "float32")  # torch is imported
signal.signal(signal.SIGALRM, interrupt)
interrupted = 0
while interrupted < 3000:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(5e-6, 6e-5))
        for _ in range(20):
            array.__dlpack__(max_version=(interrupted % 2, 0))
            reservation.tensor((4,), "float32")
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        interrupted += 1
del array
gc.collect()
print(reservation.live_arrays)
"""


def test_a_signal_neither_leaks_a_tensor_nor_frees_it_twice(host: pyvmem.Context) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# ---- protocols ---------------------------------------------------------------------------------


def capsule_name(capsule: Any) -> str:
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.py_object]
    name = get(capsule)
    assert name is not None
    return str(name.decode())


def test_dlpack_versions(context: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    array = rsv.array((2, 3), "float32")
    for version, name in (
        (None, "dltensor"),
        ((0, 8), "dltensor"),
        ((1, 0), "dltensor_versioned"),
        ((1, 3), "dltensor_versioned"),
    ):
        capsule = array.__dlpack__(max_version=version)
        assert capsule_name(capsule) == name
        t = torch.utils.dlpack.from_dlpack(capsule)
        assert capsule_name(capsule) == "used_" + name
        assert (tuple(t.shape), t.data_ptr()) == ((2, 3), rsv.addr)
        del capsule, t
    assert torch.from_dlpack(array).data_ptr() == rsv.addr
    device = (1, 0) if context.cuda_device is None else (2, context.cuda_device)
    assert array.__dlpack_device__() == rsv.__dlpack_device__() == device
    array.__dlpack__(dl_device=device, copy=False)
    with pytest.raises(BufferError):
        array.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(10, 0))
    del array
    whole = torch.from_dlpack(rsv)
    assert (whole.dtype, whole.numel()) == (torch.uint8, rsv.nbytes)
    assert rsv.live_arrays == 1
    del whole
    assert rsv.live_arrays == 0


def test_an_array_whose_cleanup_was_interrupted_is_not_counted(
    rsv: pyvmem.Reservation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception is lost, and the dead array's entry stays in the reservation's table."""

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    lost: list[object] = []
    monkeypatch.setattr(rsv._arrays, "_remove", interrupted)
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    array = rsv.array((4,), "uint8")
    assert rsv.live_arrays == 1
    del array
    assert len(lost) == 1
    assert rsv.live_arrays == 0
    rsv.close(unmap=True)


def test_dlpack_float8_code(rsv: pyvmem.Reservation) -> None:
    """A consumer that supports DLPack 1.1 gets the type itself, not bytes."""
    t = torch.utils.dlpack.from_dlpack(rsv.array((4,), "float8_e4m3fn").__dlpack__())
    assert t.dtype is torch.float8_e4m3fn


def test_buffer(host: pyvmem.Context) -> None:
    with host.reserve(16384) as rsv:
        pages = host.create(4096)
        rsv.map(4096, pages)
        pages.drop()
        view = rsv.buffer(4096, 4096)
        assert (view.nbytes, view.format, view.readonly) == (4096, "B", False)
        view[:3] = b"abc"
        assert rsv.read(4096, 3) == b"abc"
        part = view[1:2]
        del view
        assert rsv.live_arrays == 1
        with pytest.raises(pyvmem.Busy):
            rsv.close(unmap=True)
        assert bytes(part) == b"b"
        del part
        assert rsv.live_arrays == 0
        assert rsv.buffer().nbytes == 16384


def test_sparse_reads_zeros_from_unmapped_pages(host: pyvmem.Context) -> None:
    with host.reserve(1 << 20, sparse=True) as rsv:
        assert rsv.sparse
        t = rsv.tensor((1 << 20,), "uint8")
        assert int(t.sum()) == 0
        pages = host.create(4096)
        rsv.map(8192, pages)
        t[8192:12288] = 1
        assert int(t.sum()) == 4096
        pages.release()
        assert int(t.sum()) == 0
        del t


def test_numpy(host: pyvmem.Context) -> None:
    numpy = pytest.importorskip("numpy")
    with host.reserve(16384) as rsv:
        pages = host.create(16384)
        rsv.map(0, pages)
        for make in (numpy.from_dlpack, numpy.asarray):
            array = make(rsv.array((4, 8), numpy.dtype("float32"), (16, 2), 64))
            assert array.shape == (4, 8)
            assert array.strides == (64, 8)
            assert array.__array_interface__["data"][0] == rsv.addr + 64
            array[:] = 2.5
            assert rsv.tensor((1,), torch.float32, offset=64).item() == 2.5
            assert rsv.live_arrays == 1
            with pytest.raises(pyvmem.Busy):
                rsv.close(unmap=True)
            del array
            assert rsv.live_arrays == 0
        assert numpy.asarray(rsv.array((2,), numpy.int16)).dtype == numpy.int16
        with pytest.raises(pyvmem.InvalidArgument, match="in this machine's byte order"):
            rsv.array((2,), numpy.dtype("int16").newbyteorder())
        pages.drop()


def test_array_interfaces(context: pyvmem.Context, rsv: pyvmem.Reservation) -> None:
    array = rsv.array((2, 3), "float32", (4, 1), 8)
    mine, other = "__array_interface__", "__cuda_array_interface__"
    if context.cuda_device is not None:
        mine, other = other, mine
    assert not hasattr(array, other)
    record = getattr(array, mine)
    assert record["data"] == (rsv.addr + 8, False)
    assert record["strides"] == (16, 4)
    assert record["typestr"] == "<f4"
    assert record["version"] == 3
    assert not hasattr(rsv.array((2,), "bfloat16"), mine)


def test_buffer_without_cpu_access(context: pyvmem.Context) -> None:
    if pyvmem.Caps.CPU_ACCESS in context.info.caps:
        pytest.skip("the CPU reaches this back end's memory")
    with context.reserve(context.info.granule) as rsv, pytest.raises(pyvmem.NotSupported):
        rsv.buffer()


def test_plain_reservation_warns_once(context: pyvmem.Context) -> None:
    if pyvmem.Caps.PLAIN not in context.info.caps or context.info.backend == "host":
        pytest.skip("every reservation of this back end is visible")
    with pytest.warns(pyvmem.PlainReservationWarning, match="cudaMemcpy"):
        first = context.reserve(1 << 44)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = context.reserve(1 << 44)
        third = context.reserve(1 << 46, visible=False)
    for one in (first, second, third):
        assert not one.visible
        one.close()
