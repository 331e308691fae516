# SPDX-License-Identifier: MIT
"""A queue of slow calls (mapping prefixes, forks, swapping) and the thread that runs them.

Calls run one at a time, in submission order. Queueing a call returns a `concurrent.futures.Future`;
a thread waits for it with ``result()``, an event loop with ``asyncio.wrap_future``.
"""

from __future__ import annotations

import threading
import weakref
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pyvmem.errors import Reentered
from pyvmem.kvcache.events import record
from pyvmem.memory.streams import Kind, work_of

__all__ = ["Background", "CallFuture", "Pending", "work_until_now"]

_T = TypeVar("_T")


class CallFuture(Future[_T]):
    """The future of a queued call."""

    @property
    def given_up(self) -> bool:
        """True if the future was cancelled.

        Does not take a lock, unlike `cancelled`: an exception from a signal handler could leave the
        lock held, and the call would never finish.
        """
        return self._state.startswith("CANCELLED")


@dataclass(eq=False)
class _Queued:
    """A queued call, its future and the object it works on."""

    call: Callable[[], Any]
    future: CallFuture[Any]
    key: object
    over: bool = False  # true once the call has run, even if the future's callbacks are yet to run

    def make(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
            self.over = True
        except BaseException as error:
            self.over = True
            self.future.set_exception(error)
            del self  # breaks the reference cycle between the traceback and the future
        else:
            self.future.set_result(result)


class Pending:
    """A request's record of a call that is queued on it.

    Holds only a weak reference to the call's future; the queue keeps the future alive until the
    call has run.

    Attributes:
        made: true once the call has run.
    """

    __slots__ = ("_future", "made")

    def __init__(self, future: CallFuture[Any]) -> None:
        self._future = weakref.ref(future)
        self.made = False

    @property
    def over(self) -> bool:
        """True once the call has run or was cancelled."""
        if self.made:
            return True
        future = self._future()
        return future is None or future.given_up


class Background:
    """The queue of calls and the thread that runs them.

    Each queued call starts a thread that runs calls until the queue is empty, so no thread is ever
    idle. An exception in the caller cannot corrupt the queue: enqueueing is one atomic operation,
    and so is starting the thread.
    """

    def __init__(self) -> None:
        self._queue: deque[_Queued] = deque()
        self._now: _Queued | None = None
        self._turn = threading.Lock()  # held while running a call
        self._maker = 0  # identifier of the thread that holds `_turn`; 0 if none does

    def begin(
        self,
        call: Callable[[], _T],
        key: object = None,
        future: CallFuture[_T] | None = None,
    ) -> Future[_T]:
        """Queues `call`; the future gets its result or exception.

        Args:
            call: the function to call; it takes no arguments.
            key: the object it works on.
            future: an unused future for the result; None to create one.

        Raises:
            RuntimeError: no thread could be started; the call is dropped.
        """
        if future is None:
            future = CallFuture()
        self._queue.append(_Queued(call, future, key))
        try:
            start_new_thread(self._work, ())
        except RuntimeError:
            if future.cancel():  # otherwise another call's thread is running it
                raise
        return future

    def works_on(self, key: object) -> bool:
        """Returns true if a call on `key` is queued or running."""
        # If calls are queued but none is running, `begin` may have been interrupted before it
        # started a thread.
        if self._queue and not self._turn.locked():
            with suppress(RuntimeError):  # if this fails, the next call's thread runs them
                start_new_thread(self._work, ())
        waiting = self._queue.copy()
        if any(one.key is key and not one.future.given_up for one in waiting):
            return True
        now = self._now
        return now is not None and now.key is key

    def close(self) -> None:
        """Waits for the queued calls; if called from a future's callback, runs them itself.

        Raises:
            Reentered: called by a finalizer during a call, or by the call itself.
        """
        if self._maker == threading.get_ident():
            if self._now is not None and not self._now.over:
                raise Reentered("close", "a call in the background")
            while self._queue:
                self._make_next()
            return
        while self._queue or self._turn.locked():
            done = threading.Lock()
            done.acquire()
            try:
                start_new_thread(self._work, (done,))
            except RuntimeError:  # no thread could be started: run the calls here
                self._work()
                return
            with done:
                pass

    def _work(self, done: threading.Lock | None = None) -> None:
        """Runs queued calls, then releases `done`.

        If a future's callback ends this thread (`SystemExit`), the threads started for later calls
        run the rest of the queue.
        """
        try:
            while True:
                with self._turn:
                    if not self._queue:
                        return
                    self._maker = threading.get_ident()
                    try:
                        self._make_next()
                    finally:
                        self._maker = 0
        finally:
            if done is not None:
                done.release()

    def _make_next(self) -> None:
        self._now = self._queue[0]  # set before the pop, so that `works_on` always sees the call
        self._queue.popleft()
        try:
            self._now.make()
        finally:
            self._now = None


def work_until_now(stream: Any, device: int | None) -> Any:
    """Captures a stream's work in a form that another thread can use later.

    torch's current stream is per thread, and a caller that passes a file descriptor may close it as
    soon as its call returns.

    Args:
        stream: in any form that `KVCache` accepts; None for the calling thread's current stream.
        device: the cache's CUDA ordinal; None for a cache on the host, which has no streams.
    """
    if work_of(stream).kind is Kind.FD:
        return record(stream, device)
    if stream is not None or device is None:
        return stream
    import torch

    return torch.cuda.current_stream(device) if torch.cuda.is_available() else None
