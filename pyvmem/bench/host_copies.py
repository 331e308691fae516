# SPDX-License-Identifier: MIT
"""Copies scattered pages to host memory and back, as KV offloading and `KVCache.swap_out` do.

Runs the kernel of `pyvmem.memory.host_copies` with different numbers of thread blocks, on plain
addresses and pinned host memory. Times come from GPU events around the copy, so they include
sending the descriptors to the GPU. On the CPU, memcpy makes the same copies. For comparison,
libvmem's own copies of the whole range, which are the fallback when the kernel is not available,
are timed with the host clock.
"""

from __future__ import annotations

import ctypes
import random
import time
from functools import partial

from pyvmem.bench.record import Book, Part
from pyvmem.bench.setting import GB, MB, Setting, label
from pyvmem.bench.timing import Deadline, Samples, interleave, quiet
from pyvmem.memory.context import Context
from pyvmem.memory.info import Caps
from pyvmem.memory.ops import OpBatch

__all__ = ["run"]

_BLOCKS = (4, 8, 16, 64)


def run(setting: Setting, part: Part, deadline: Deadline) -> None:
    """Measures the rows hostcopy/WAY/SYSTEM/BLOCKS: all pages of a range, in random order.

    Rows ending in /library measure libvmem's own copies.
    """
    try:
        import numpy as np
        import torch

        from pyvmem.memory.host_copies import (
            Copies,
            HostMemory,
            Pieces,
            StreamCopies,
            ThreadCopies,
        )
    except ImportError as error:
        part.not_run("*", str(error))
        return
    size, page = setting.count(1 * GB, 8 * MB), setting.single
    count, book = size // page, Book(part)
    order = list(range(count))
    random.Random(1).shuffle(order)
    with setting.open() as context:
        number = context.cuda_device
        gpu = number is not None
        device = torch.device("cpu") if number is None else torch.device("cuda", number)
        plain = gpu and Caps.PLAIN in context.info.caps
        reservation = context.reserve(size, visible=False if plain else None)
        ops = OpBatch(count)
        for at in order:
            ops.populate(reservation.addr + at * page, page, 1, page)
        context.batch(ops)
        host = HostMemory(size, locked=gpu)
        pieces = Pieces(
            reservation.addr + np.array(order, dtype=np.int64) * page,
            host.addr + np.arange(count, dtype=np.int64) * page,
            np.full(count, page, dtype=np.int64),
        )
        every: list[Copies] = []
        turns = []
        for way, to_host in (("to_host", True), ("from_host", False)):
            for blocks in _BLOCKS if gpu else (1,):
                copies: Copies
                if gpu:
                    copies = streamed = StreamCopies(context, to_host, device, blocks)
                    streamed.load()
                else:
                    copies = ThreadCopies(context, to_host)
                every.append(copies)
                samples = book.samples(
                    f"{way}/{setting.system}/{blocks}",
                    f"{count} pages of {label(page)}{f', {blocks} thread blocks' * gpu}",
                    setting.system,
                    unit="ms",
                    nbytes=size,
                )
                turns.append(partial(_turn, copies, pieces, samples))
            samples = book.samples(
                f"{way}/{setting.system}/library",
                f"{count} pages of {label(page)}, libvmem's copies",
                setting.system,
                unit="ms",
                nbytes=size,
            )
            view = (ctypes.c_char * size).from_address(host.addr)
            turns.append(partial(_by_library, context, to_host, reservation.addr, view, samples))
        with quiet():
            interleave(turns, setting.count(20, 2), deadline)
        for copies in every:
            copies.close()
        host.close()
        context.batch(_unmap(reservation.addr, size))
        reservation.close()
    book.close()


def _turn(copies: object, pieces: object, samples: Samples) -> None:
    copy = copies.start(pieces)  # type: ignore[attr-defined]
    copy.wait()
    samples.new_round().append(copy.seconds() * 1e9)


def _by_library(context: Context, to_host: bool, addr: int, view: object, to: Samples) -> None:
    start = time.perf_counter_ns()
    if to_host:
        context.read_into(addr, view)
    else:
        context.write(addr, view)
    to.new_round().append(time.perf_counter_ns() - start)


def _unmap(addr: int, size: int) -> OpBatch:
    ops = OpBatch(1)
    ops.unmap(addr, size, 1, size)
    return ops
