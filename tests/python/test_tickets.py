# SPDX-License-Identifier: MIT
"""Tickets: results are kept until they are known, and given up when nobody can ask any more."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest

import pyvmem
from pyvmem import _native


def empty(context: pyvmem.Context, after: Any = ()) -> pyvmem.Ticket:
    return context.submit(pyvmem.OpBatch(1), after=after)


def failing(context: pyvmem.Context, addr: int, pages: pyvmem.Pages) -> pyvmem.Ticket:
    """A finished batch that was to consume `pages`, and whose one map call failed."""
    batch = pyvmem.OpBatch(1)
    batch.map(addr, context.info.granule, pages, consume=True)
    context.inject(pyvmem.Inject.MAP, count=1)
    ticket = context.submit(batch)
    finish(context)
    context.inject(pyvmem.Inject.MAP, count=0)
    return ticket


def finish(context: pyvmem.Context, all_but: int = 0) -> None:
    """Waits for the batches without asking for a result."""
    while context.stats().pending > all_but:
        time.sleep(0.0005)


def test_results_outlive_later_batches(context: pyvmem.Context) -> None:
    page = context.info.granule
    with context.reserve(page) as reservation, context.create(page) as pages:
        good, bad = empty(context), failing(context, reservation.addr, pages)
        for _ in range(6000):
            empty(context).wait(60)
        good.wait(60)
        for _ in range(2):
            with pytest.raises(pyvmem.DriverError, match="injected"):
                bad.wait()
        assert bad.done()
        assert not pages._done  # the reference is the caller's again
        assert context.stats().tickets == 0


def test_known_results_are_dropped_in_libvmem(context: pyvmem.Context) -> None:
    tickets = [empty(context) for _ in range(10)]
    assert context.stats().tickets == 10
    for ticket in tickets:
        ticket.wait(60)
        ticket.wait()
        assert ticket.done()
    assert context.stats().tickets == 0


def test_closed_and_forgotten_tickets(context: pyvmem.Context) -> None:
    with pyvmem.FdEvent.create() as gate:
        closed, forgotten = empty(context, [gate]), empty(context, [gate])
        closed.close()
        closed.close()
        with pytest.raises(pyvmem.BadHandle, match="dropped"):
            closed.wait(0)
        del forgotten
        gc.collect()
        last = empty(context)  # drops what was forgotten
        assert context.stats().tickets == 1
        last.wait(60)
        assert context.stats().pending == 2
        gate.set()
    finish(context)
    assert context.stats().tickets == 0


def test_limit_names_the_oldest(context: pyvmem.Context) -> None:
    limit = _native.constant("VMEM_MAX_TICKETS")
    with pyvmem.FdEvent.create() as gate:
        tickets = [empty(context, [gate])]
        while len(tickets) < limit:
            tickets.append(empty(context))
            if len(tickets) % 2000 == 0:
                finish(context, all_but=1)
        finish(context, all_but=1)
        with pytest.raises(pyvmem.TooManyTickets, match=f"ticket {tickets[1].handle}") as caught:
            empty(context)
        assert caught.value.limit == limit
        assert caught.value.bytes == tickets[1].handle
        tickets[1].wait()
        empty(context).wait(60)
        gate.set()
    for ticket in tickets:
        ticket.wait(60)
    assert context.stats().tickets == 0


def test_waits_of_several_threads(context: pyvmem.Context) -> None:
    """Whoever comes second finds the ticket dropped, and the result in the object."""
    for _ in range(50):
        with pyvmem.FdEvent.create() as gate:
            ticket = empty(context, [gate])
            errors: list[BaseException] = []

            def wait(one: pyvmem.Ticket = ticket, errors: list[BaseException] = errors) -> None:
                try:
                    one.wait(60)
                except BaseException as error:  # a thread's errors are lost otherwise
                    errors.append(error)

            threads = [threading.Thread(target=wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            gate.set()
            for thread in threads:
                thread.join()
            assert not errors


class Interrupt(Exception):
    """Stands for KeyboardInterrupt."""


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from Python 3.12 on, opcode tracing misses some points"
)
@pytest.mark.parametrize("fails", [False, True])
def test_interrupted_anywhere(context: pyvmem.Context, fails: bool) -> None:
    """An exception before any opcode of wait: the next wait says the same as ever."""
    page = context.info.granule
    with context.reserve(page) as reservation, context.create(page) as pages:
        at = 0
        while True:
            ticket = failing(context, reservation.addr, pages) if fails else empty(context)
            finish(context)
            interrupted = wait_interrupted(ticket, at)
            if fails:
                with pytest.raises(pyvmem.DriverError):
                    ticket.wait()
                assert not pages._done
            else:
                ticket.wait()
            assert context.stats().tickets == 0
            at += 1
            if not interrupted:
                break
        assert at > 20


def wait_interrupted(ticket: pyvmem.Ticket, at: int) -> bool:
    """Waits, with an exception before opcode number `at`; whether there was one so late."""
    left = at
    names = (sys.modules["pyvmem.pages"].__file__, sys.modules[_native.wait.__module__].__file__)

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in names:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ticket.wait()
    except (Interrupt, pyvmem.DriverError) as error:
        return isinstance(error, Interrupt)
    finally:
        sys.settrace(before)
    return False


def test_signal_while_waiting(context: pyvmem.Context) -> None:
    """A wait that a signal's handler ends leaves the ticket as it was."""

    def ring(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pyvmem.FdEvent.create() as gate:
            ticket = empty(context, [gate])
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupt):
                ticket.wait()
            assert context.stats().tickets == 1
            gate.set()
            ticket.wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
