# SPDX-License-Identifier: MIT
"""Tests tickets: results are kept until read, and dropped once no caller can ask for them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
from conftest import open_context
from interrupts_helpers import Interrupted, Interrupts

import pyvmem
from pyvmem import _native


def empty(context: pyvmem.Context, after: Any = ()) -> pyvmem.Ticket:
    return context.submit(pyvmem.OpBatch(1), after=after)


def failing(context: pyvmem.Context, addr: int, pages: pyvmem.Pages) -> pyvmem.Ticket:
    """Returns the ticket of a finished batch that was supposed to consume `pages`, but whose only
    map call failed.
    """
    batch = pyvmem.OpBatch(1)
    batch.map(addr, context.info.granule, pages, consume=True)
    context.inject(pyvmem.Inject.MAP, count=1)
    ticket = context.submit(batch)
    finish(context)
    context.inject(pyvmem.Inject.MAP, count=0)
    return ticket


def finish(context: pyvmem.Context, all_but: int = 0) -> None:
    """Waits for the batches without querying a result."""
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
        assert not pages._done  # the reference belongs to the caller again
        assert context.stats().tickets == 0


def test_a_ticket_is_for_one_batch_of_its_context(
    context: pyvmem.Context, host: pyvmem.Context
) -> None:
    with pyvmem.FdEvent.create() as event:
        ticket = pyvmem.Ticket(context)
        context.submit(pyvmem.OpBatch(1), [event], ticket)
        for owner, whose in ((context, "used already"), (host, "another context's")):
            before = owner.stats().tickets
            with pytest.raises(pyvmem.InvalidArgument, match=f"ticket: <Ticket .*> is {whose}"):
                owner.submit(pyvmem.OpBatch(1), ticket=ticket)
            assert owner.stats().tickets == before
        assert not ticket.done()
        event.set()
        ticket.wait(60)
    assert context.stats().tickets == 0
    page = context.info.granule
    with context.reserve(page) as reservation:
        batch, ticket = pyvmem.OpBatch(2), pyvmem.Ticket(context)
        batch.unmap(reservation.addr, page)
        with pytest.raises(pyvmem.NotMapped):
            context.submit(batch, ticket=ticket)
        context.submit(pyvmem.OpBatch(1), ticket=ticket).wait(60)  # the ticket was never submitted


@pytest.mark.parametrize("call", ["batch", "compact"])
def test_closing_ends_a_wait_for_a_descriptor(backend: str, call: str) -> None:
    failed: list[BaseException] = []
    context, event = open_context(backend), pyvmem.FdEvent.create()

    def waits() -> None:
        with pytest.raises(pyvmem.BadHandle) as caught:
            context.batch(pyvmem.OpBatch(1), [event]) if call == "batch" else context.compact(
                1, [event]
            )
        failed.append(caught.value)

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    time.sleep(0.05)
    context.close()
    thread.join(60)
    assert len(failed) == 1
    event.close()


def test_a_dropped_descriptor_is_closed() -> None:
    fd = pyvmem.FdEvent.create().fd
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    with pyvmem.FdEvent.create() as event:
        pyvmem.FdEvent(event.fd)
        gc.collect()
        event.set()  # the caller's descriptor stays open


def test_known_results_are_dropped_in_libvmem(context: pyvmem.Context) -> None:
    tickets = [empty(context) for _ in range(10)]
    assert context.stats().tickets == 10
    for ticket in tickets:
        ticket.wait(60)
        ticket.wait()
        assert ticket.done()
    assert context.stats().tickets == 0


def test_closed_and_dropped_tickets(context: pyvmem.Context) -> None:
    with pyvmem.FdEvent.create() as gate:
        closed, forgotten = empty(context, [gate]), empty(context, [gate])
        closed.close()
        closed.close()
        with pytest.raises(pyvmem.BadHandle, match="dropped"):
            closed.wait(0)
        del forgotten
        gc.collect()
        last = empty(context)  # this submission drops lost tickets
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
    """Later threads find that the ticket was dropped, and read the result from the object."""
    for _ in range(50):
        with pyvmem.FdEvent.create() as gate:
            ticket = empty(context, [gate])
            errors: list[BaseException] = []

            def wait(one: pyvmem.Ticket = ticket, errors: list[BaseException] = errors) -> None:
                try:
                    one.wait(60)
                except BaseException as error:  # a thread's errors would be lost otherwise
                    errors.append(error)

            threads = [threading.Thread(target=wait) for _ in range(4)]
            for thread in threads:
                thread.start()
            gate.set()
            for thread in threads:
                thread.join()
            assert not errors


@pytest.mark.parametrize("fails", [False, True])
def test_interrupted_anywhere(context: pyvmem.Context, fails: bool) -> None:
    """After an exception at any point of wait, the next wait returns the same result."""
    page = context.info.granule
    result = pytest.raises(pyvmem.DriverError) if fails else contextlib.nullcontext()
    with context.reserve(page) as reservation, context.create(page) as pages:

        def finished() -> pyvmem.Ticket:
            ticket = failing(context, reservation.addr, pages) if fails else empty(context)
            finish(context)
            return ticket

        counter = Interrupts()
        with result:
            counter.run(finished().wait)
        assert counter.count > 5
        for at in range(1, counter.count + 1):
            ticket = finished()
            with pytest.raises(Interrupted):
                Interrupts(at).run(ticket.wait)
            with result:
                ticket.wait()
            assert not pages._done
            assert context.stats().tickets == 0


def test_signal_while_waiting(context: pyvmem.Context) -> None:
    """A signal handler that interrupts a wait leaves the ticket unchanged."""

    def ring(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with pyvmem.FdEvent.create() as gate:
            ticket = empty(context, [gate])
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Interrupted):
                ticket.wait()
            assert context.stats().tickets == 1
            gate.set()
            ticket.wait(60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
