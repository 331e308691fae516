# SPDX-License-Identifier: MIT
"""Raises exceptions at chosen points of a call, as signal handlers do, and checks the state
afterwards.

A point is a place in a frame of the package where CPython may run a signal handler. The interpreter
looks at its eval breaker

- 3.10: after CALL_FUNCTION, CALL_FUNCTION_KW, CALL_FUNCTION_EX, CALL_METHOD, JUMP_ABSOLUTE and
  POP_JUMP_IF_*, and where a frame starts or resumes;
- 3.11: after CALL and its variants for C functions, CALL_FUNCTION_EX, JUMP_BACKWARD*,
  POP_JUMP_BACKWARD_IF_* and RESUME;
- 3.12 and 3.13: after CALL, CALL_KW, CALL_FUNCTION_EX, JUMP_BACKWARD and RESUME.

The points are the union of these places across all versions: after each of these instructions, even
if it calls a Python function, and wherever a frame starts or resumes. A frame that resumes because
an exception is thrown into its generator does not count. That includes an unfinished generator that
is dropped, for example by `any`.

`Interrupted` is raised before the next instruction runs. If that instruction and the call have
different exception handlers (``return f()`` inside ``with``), the point is skipped: CPython would
enter the call's handler, which tracing cannot do. Finalizers, whose exceptions are lost, and frames
of other packages are skipped too.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import math
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from conftest import open_context
from kvcache_helpers import small_config
from share_helpers import is_zero, read_rows, write_rows

import pyvmem
from pyvmem import BadHandle, Context, InvalidArgument, KVCache
from pyvmem.kvcache import Budget, SwappedRequest
from pyvmem.kvcache.cache import GroupView

LIMIT = 8  # seconds allowed for a call, and for all checks after it
PACKAGE = str(Path(pyvmem.__file__).parent) + "/"


class Interrupted(BaseException):
    """Raised at a point in place of a signal handler's exception."""


class Stuck(BaseException):
    """Raised if a call does not return in time."""


class NotHere(Exception):
    """Raised if a scenario needs a capability that this back end lacks."""


# ---- points --------------------------------------------------------------------------------------


def _checked(name: str) -> bool:
    """Returns true if some CPython version checks its eval breaker after this instruction."""
    if name.startswith("CALL") and not name.startswith("CALL_INTRINSIC"):
        return True
    if name == "JUMP_ABSOLUTE" or "JUMP_BACKWARD" in name or name == "RESUME":
        return True
    return sys.version_info < (3, 11) and name.startswith("POP_JUMP_IF")


class Instructions:
    """A code object's instructions, indexed by offset for the tracer."""

    def __init__(self, code: CodeType, package: str) -> None:
        self.file = code.co_filename.removeprefix(package)
        self.checked: set[int] = set()
        self.prologue: set[int] = set()
        self.handler: dict[int, int] | None = None
        self._lines = dict(dis.findlinestarts(code))
        prefix: list[int] = []
        for one in dis.get_instructions(code):
            prefix.append(one.offset)  # an EXTENDED_ARG counts as the instruction it extends
            if one.opname == "EXTENDED_ARG":
                continue
            if one.opname in ("RESUME", "COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"):
                self.prologue.update(prefix)
            if _checked(one.opname):
                self.checked.update(prefix)
            prefix = []
        parse = getattr(dis, "_parse_exception_table", None)
        if parse is not None:
            self.handler = {
                at: entry.target for entry in parse(code) for at in range(entry.start, entry.end, 2)
            }

    def place(self, offset: int) -> str:
        """Returns the file and line of an instruction."""
        line = max((at for at in self._lines if at <= offset), default=0)
        return f"{self.file}:{self._lines.get(line)}"

    def same_handler(self, one: int, other: int) -> bool:
        table = self.handler
        return table is None or table.get(one) == table.get(other)


class Interrupts:
    """Counts the points of a call; raises `Interrupted` at some of them.

    Attributes:
        places: file and line of each point that raised.
        count: points since the last one that raised, or since the start.
    """

    _known: dict[CodeType, Instructions] = {}  # noqa: RUF012

    def __init__(self, *at: int, package: str = PACKAGE) -> None:
        """`at` gives the number of the first point that raises, counting from 1, then the number of
        points from there to the second one, and so on.
        """
        self._at = list(at)
        self._package = package
        self.places: list[str] = []
        self.count = 0

    def run(self, call: Callable[[], Any]) -> Any:
        """Makes the call and returns its result; exceptions propagate."""
        collecting = gc.isenabled()
        gc.disable()  # a collection would run finalizers at different points each time
        try:
            if sys.version_info >= (3, 12):
                return self._run_monitored(call)
            sys.settrace(self._enter)
            return call()
        finally:
            sys.settrace(None)
            sys.setprofile(None)
            if collecting:
                gc.enable()

    def _run_monitored(self, call: Callable[[], Any]) -> Any:
        """Makes the call under sys.monitoring, because since 3.12 a trace function misses
        instructions the first time that a code object runs.
        """
        monitoring: Any = getattr(sys, "monitoring")  # noqa: B009 - absent from older versions
        events = monitoring.events
        # per frame: the last instruction, and whether the frame has just started
        states: dict[int, list[Any]] = {}
        caller = threading.get_ident()  # monitoring covers all threads, tracing only one

        def begins(code: CodeType, offset: int) -> Any:
            frame = sys._getframe(1)
            if not code.co_filename.startswith(self._package):
                return monitoring.DISABLE
            states[id(frame)] = [-1, True]
            return None

        def ends(code: CodeType, offset: int, value: object) -> None:
            states.pop(id(sys._getframe(1)), None)

        def raises(code: CodeType, offset: int, error: BaseException) -> None:
            # Neither an instruction that raises nor a throw into a generator checks the eval
            # breaker.
            if code.co_filename.startswith(self._package):
                states[id(sys._getframe(1))] = [-1, False]

        def instruction(code: CodeType, offset: int) -> Any:
            if not code.co_filename.startswith(self._package):
                return monitoring.DISABLE
            frame = sys._getframe(1)
            if threading.get_ident() != caller or self._finalizes(frame):
                return None
            known = self._known.get(code)
            if known is None:
                known = self._known[code] = Instructions(code, self._package)
            state = states.setdefault(id(frame), [-1, True])
            last, state[0] = state[0], offset
            if state[1]:
                if offset not in known.prologue:
                    state[1] = False
                    self._point(known, offset)
            elif last in known.checked and known.same_handler(last, offset):
                self._point(known, last)
            return None

        callbacks = {
            events.PY_START: begins,
            events.PY_RESUME: begins,
            events.PY_RETURN: ends,
            events.PY_YIELD: ends,
            events.PY_UNWIND: ends,
            events.RAISE: raises,
            events.INSTRUCTION: instruction,
        }
        tool = monitoring.DEBUGGER_ID
        monitoring.use_tool_id(tool, "interrupts")
        try:
            for event, callback in callbacks.items():
                monitoring.register_callback(tool, event, callback)
            monitoring.set_events(tool, sum(callbacks))
            return call()
        finally:
            monitoring.set_events(tool, 0)
            # for the next run: re-enables the locations that returned DISABLE
            monitoring.restart_events()
            for event in callbacks:
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._package) or self._finalizes(frame):
            return None
        frame.f_trace_opcodes = True
        return self._tracer(code)

    def _finalizes(self, frame: FrameType | None) -> bool:
        for _ in range(4):
            if frame is None:
                return False
            if frame.f_code.co_name == "__del__":
                return True
            frame = frame.f_back
        return False

    def _tracer(self, code: CodeType, begun: bool = False) -> Any:
        known = self._known.get(code)
        if known is None:
            known = self._known[code] = Instructions(code, self._package)
        checked, entry = known.checked, not begun
        last = -1

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last, entry
            if event == "opcode":
                at = frame.f_lasti
                if entry:  # RESUME may or may not have been traced
                    if at not in known.prologue:
                        entry = False
                        self._point(known, at)
                elif last in checked and known.same_handler(last, at):
                    self._point(known, last)
                last = at
            elif event == "exception":
                last, entry = -1, False  # see `raises` above
            return trace

        return trace

    def _point(self, known: Instructions, offset: int) -> None:
        self.count += 1
        if self._at and self.count == self._at[0]:
            self._at.pop(0)
            self.count = 0
            self.places.append(known.place(offset))
            # an exception that the tracer raises disables tracing, but not monitoring
            if sys.version_info < (3, 12):
                sys.setprofile(self._go_on)
            raise Interrupted(self.places[-1])

    def _go_on(self, frame: FrameType, event: str, arg: Any) -> None:
        """Re-enables tracing after the tracer's own exception disabled it."""
        sys.setprofile(None)
        sys.settrace(self._enter)
        here: FrameType | None = frame
        while here is not None:
            if here.f_code.co_filename.startswith(self._package) and not self._finalizes(here):
                here.f_trace_opcodes = True
                here.f_trace = self._tracer(here.f_code, begun=True)
            here = here.f_back


class Handler(Interrupts):
    """Runs a callback at one point of a call, as Python runs a signal handler.

    Attributes:
        came: true if the call reached the point.
    """

    def __init__(self, at: int, handle: Callable[[], None]) -> None:
        super().__init__(at)
        self._handle = handle
        self.came = self._handling = False

    def _point(self, known: Instructions, offset: int) -> None:
        if self._handling:
            return
        self.count += 1
        if self.count in self._at:
            self.came = self._handling = True
            try:
                self._handle()
            finally:
                self._handling = False


class Alarm:
    """Raises an exception in the main thread after a timeout."""

    def __init__(self) -> None:
        self._error: type[BaseException] = Stuck
        self._due = math.inf

    def ring(self, *_: object) -> None:
        # A signal that another thread received may arrive only after the alarm has been set again.
        if time.monotonic() >= self._due:
            raise self._error

    def set(self, seconds: float, error: type[BaseException]) -> None:
        self._due = time.monotonic() + seconds
        self._error = error
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def stop(self) -> None:
        self._due = math.inf
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def alarms() -> Iterator[Alarm]:
    """Borrows the process's interval timer, then restores its handler and remaining time."""
    alarm = Alarm()
    begun = time.monotonic()
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, alarm.ring)
    try:
        yield alarm
    finally:
        alarm.stop()
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1.0, left - (time.monotonic() - begun)))


# ---- an engine whose calls are interrupted -------------------------------------------------------

Cache = KVCache


def is_over(cache: Cache) -> bool:
    """Returns true if a cache is closed, or half closed, so that only close() may be called."""
    return cache._closed or cache._manager._closing


class Engine:
    """Caches over one context, and the contents of their requests' rows.

    Attributes:
        held: contents of each request's rows, by cache and reqid.
        leaving: requests that the interrupted call frees.
        swapped: swapped requests that the interrupted call may swap in.
        orphans: slots that the interrupted call allocated without returning the reqid.
        place: where the call was interrupted last.
        twice: true if it was interrupted more than once.
        forgotten: caches that were created, but lost because the exception replaced the return
            value.
    """

    def __init__(self, backend: str = "host", **options: Any) -> None:
        self.context: Context = open_context(backend, **options)
        self.page = self.context.info.granule
        self.caches: list[Cache] = []
        self.held: dict[tuple[Cache, int], list[int]] = {}
        self.leaving: set[tuple[Cache, int]] = set()
        self.swapped: list[SwappedRequest] = []
        self.orphans = 0
        self.place = ""
        self.twice = False
        self.forgotten = 0
        self._room: dict[Cache, int] = {}
        self._locked = False
        self._tag = 0

    # ---- building blocks of scenarios ------------------------------------------------------------

    def cache(self, budget: Budget | None = None, pages: int = 64, **changes: Any) -> KVCache:
        """Creates a small cache with memory for `pages` pages per tensor.

        If a `budget` is given, `pages` must match its memory, which is left unchanged.
        """
        config = small_config(self.page, **changes)
        tensors = 2 * config.num_layers // config.group_size
        if budget is None:
            config = small_config(
                self.page, **{"memory_limit": pages * tensors * self.page, **changes}
            )
        cache = KVCache(config, self.context, budget=budget)
        self.caches.append(cache)
        self._room[cache] = cache.layout.capacity(pages)
        return cache

    def tags(self, count: int) -> list[int]:
        """Returns new contents for `count` rows."""
        self._tag += count
        return list(range(self._tag - count + 1, self._tag + 1))

    def write(self, cache: Cache, reqid: int, rows: int) -> None:
        """Writes new contents to rows that a step has mapped for the request."""
        held = self.held.setdefault((cache, reqid), [])
        more = self.tags(rows - len(held))
        for part in parts(cache):
            write_rows(part, reqid, len(held), more)
        held.extend(more)

    def start(self, cache: Cache, rows: int) -> int:
        """Allocates a request and grows it to `rows` rows."""
        reqid = cache.alloc_reqid(rows)
        assert reqid is not None, "no slot is free"
        self.held[cache, reqid] = []
        self.grow(cache, reqid, rows)
        return reqid

    def grow(self, cache: Cache, reqid: int, rows: int) -> None:
        assert cache.step(lens(cache, {reqid: rows})) == 0
        self.write(cache, reqid, rows)

    def take(self, cache: Cache, reqid: int | None, of: list[int]) -> None:
        """Records a request that starts with these rows."""
        assert reqid is not None, "the call returned None"
        assert (cache, reqid) not in self.held, f"reqid {reqid} is already in use"
        self.held[cache, reqid] = list(of)
        assert holds(cache, reqid, of), "wrong rows in the new request"

    def fork(self, cache: Cache, parent: int) -> int:
        """Forks a request; the new one shares its rows."""
        child: int | None = cache.fork(parent)
        self.take(cache, child, self.held[cache, parent])
        assert child is not None
        return child

    def free(self, cache: Cache, reqid: int, **options: Any) -> None:
        """Frees a request, unless an interrupted call has already freed it."""
        try:
            cache.free_reqid(reqid, **options)
        except InvalidArgument as error:
            if (cache, reqid) not in self.leaving or "not taken" not in str(error):
                raise
        self.leaving.discard((cache, reqid))
        self.held.pop((cache, reqid), None)

    def leaves(self, cache: Cache, reqid: int) -> None:
        """Records that the call to be interrupted frees this request."""
        self.leaving.add((cache, reqid))

    # ---- checks ----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        for cache in self.caches:
            if not is_over(cache):
                cache.check_integrity()
            elif not cache._closed:  # the cache may have released everything by now
                with pytest.raises(BadHandle, match=r"half closed|is closed"):
                    cache.check_integrity()

    def check_rows(self) -> None:
        """Checks every row of every request; skips a leaving request once its slot is free."""
        for (cache, reqid), tags in self.held.items():
            if is_over(cache):
                continue
            slots = [part.snapshot()[reqid] for part in parts(cache)]
            if (cache, reqid) in self.leaving and any(slot.state != "active" for slot in slots):
                continue
            for slot in slots:
                assert slot.state == "active", f"reqid {reqid} is {slot.state}"
                assert slot.seq_len >= len(tags), f"reqid {reqid} holds {slot.seq_len} rows"
            assert holds(cache, reqid, tags), f"wrong rows in reqid {reqid}"

    def check_lock(self) -> None:
        """Checks that another thread can take the lock."""
        for cache in self.caches:
            if is_over(cache):
                continue
            thread = threading.Thread(target=_touch, args=(cache,), daemon=True)
            thread.start()
            thread.join(LIMIT)
            self._locked = thread.is_alive()
            assert not self._locked, "the lock is still held"

    def unknown(self, cache: Cache) -> list[int]:
        """Returns the taken slots that belong to none of the engine's requests."""
        slots = parts(cache)[0].snapshot()
        return [s.reqid for s in slots if s.state == "active" and (cache, s.reqid) not in self.held]

    def free_unknown(self) -> None:
        for cache in self.caches:
            for reqid in [] if is_over(cache) else self.unknown(cache):
                self.orphans += 1
                cache.free_reqid(reqid)

    def ordinary(self) -> None:
        """Grows a new request in every cache to its full length, freeing all other requests if
        necessary.
        """
        for cache in self.caches:
            if is_over(cache):
                continue
            reqid = cache.alloc_reqid()
            if reqid is None:
                self._free_all(self.caches)
                reqid = cache.alloc_reqid()
            assert reqid is not None, "no slot is free"
            full = parts(cache)[0].config.max_seq_len
            full = min(full, self._room.get(cache, full))
            if cache.step(lens(cache, {reqid: full})) == -1:
                self._free_all(self.caches)
                assert cache.step(lens(cache, {reqid: full})) == 0, "memory is short"
            tags = self.tags(full)
            for part in parts(cache):
                assert is_zero(part, reqid, 0, full), "pages of a new request are not zero"
                write_rows(part, reqid, 0, tags)
                assert read_rows(part, reqid, 0, tags), "wrong rows in a new request"
            cache.free_reqid(reqid)

    def _free_all(self, caches: list[Cache]) -> None:
        for cache, reqid in list(self.held):
            if cache in caches and not is_over(cache):
                self.free(cache, reqid)

    def end(self) -> None:
        """Closes everything and checks that nothing is left."""
        self._free_all(self.caches)
        for swapped in self.swapped:
            swapped.close()
        for cache in self.caches:
            cache.close()
        left = self.context.stats()
        names = ("mapped_bytes", "used_bytes", "handles", "reservations", "pending")
        for name in names[2:3] if self.forgotten else names:
            value = getattr(left, name)
            assert not value, f"after close: {name} is {value}"
        self.context.check()
        self.context.close()

    def abandon(self) -> None:
        """Closes what it can after a failure."""
        with contextlib.suppress(Stuck):
            for cache in [] if self._locked else self.caches:
                with contextlib.suppress(Exception):
                    cache.close()
        with contextlib.suppress(Exception, Stuck):
            self.context.close()


def _touch(cache: Cache) -> None:
    with contextlib.suppress(Exception):
        cache.stats()


def parts(cache: Cache) -> tuple[GroupView, ...]:
    """Returns the cache's layer groups that store keys and values."""
    return tuple(one for one in cache.caches if not one.config.state)


def holds(cache: Cache, reqid: int, tags: list[int]) -> bool:
    """Returns true if a request has these rows in every group, except those outside a window."""
    return all(
        read_rows(part, reqid, low, tags[low:])
        for part in parts(cache)
        for low in part.first_rows([reqid])
    )


def lens(cache: Cache, more: dict[int, int] | None = None) -> list[int]:
    """Returns the lengths of all slots after the last step, with `more` merged in."""
    out = [slot.seq_len for slot in parts(cache)[0].snapshot()]
    for reqid, rows in (more or {}).items():
        out[reqid] = rows
    return out


# ---- runs ----------------------------------------------------------------------------------------

Call = Callable[[], Any]
Steps = Iterator[Call]
Scenario = Callable[[Engine], Steps]
"""A scenario prepares an engine and yields the call to interrupt. It then makes the call again and
checks its effect, whether the first call was interrupted or completed. If the function has a
`context` attribute, that holds options for the engine's context. Failures that a scenario injects
last only until the call ends."""


def again(call: Call) -> Generator[Call, None, Any]:
    """Yields the call, then makes it a second time and returns the second result."""
    yield call
    return call()


def ended(steps: Steps) -> None:
    """Runs the part of a scenario that follows its call."""
    assert list(steps) == [], "a scenario has only one call"


class Outcome:
    """The outcome of one run.

    Attributes:
        places: where the call was interrupted.
        count: points in the call, or after the last interruption.
        broken: describes the first check that failed; empty if none did.
        stuck: true if a call did not return in time.
        orphans: see `Engine`.
    """

    def __init__(self) -> None:
        self.places: list[str] = []
        self.count = 0
        self.broken = ""
        self.stuck = False
        self.orphans = 0


def examine(engine: Engine, again: Call, outcome: Outcome) -> None:
    """Checks everything that must hold after an interruption; records the first failure."""
    steps: list[tuple[str, Call]] = [
        ("integrity", engine.check_integrity),
        ("rows", engine.check_rows),
        ("lock", engine.check_lock),
        ("again", again),
        ("integrity after the repeated call", engine.check_integrity),
        ("rows after the repeated call", engine.check_rows),
        ("slots that no request owns", engine.free_unknown),
        ("ordinary work", engine.ordinary),
        ("integrity after ordinary work", engine.check_integrity),
        ("rows after ordinary work", engine.check_rows),
        ("close", engine.end),
    ]
    for name, step in steps:
        try:
            step()
        except (Exception, Stuck) as error:
            outcome.broken = f"{name}: {_told(error)}"
            outcome.stuck = isinstance(error, Stuck) or name == "lock"
            return


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.160}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silences warnings about the objects that these tests leak on purpose."""
    hook = sys.unraisablehook

    def unraisable(args: Any) -> None:
        if not isinstance(args.exc_value, (Interrupted, Stuck)):
            hook(args)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        sys.unraisablehook = unraisable
        try:
            yield
        finally:
            sys.unraisablehook = hook


def _run(scenario: Scenario, backend: str, act: Callable[[Call], Outcome], alarm: Alarm) -> Outcome:
    outcome = Outcome()
    with _quietly():
        engine = Engine(backend, **getattr(scenario, "context", {}))
        try:
            steps = scenario(engine)
            call = next(steps)
            alarm.set(LIMIT, Stuck)
            outcome = act(call)
            alarm.set(LIMIT, Stuck)
            engine.context.inject(0, count=0)
            engine.place = outcome.places[-1] if outcome.places else ""
            engine.twice = len(outcome.places) > 1
            if not outcome.broken:
                examine(engine, partial(ended, steps), outcome)
            outcome.orphans = engine.orphans
        finally:
            alarm.set(LIMIT / 4, Stuck)
            engine.abandon()
            alarm.stop()
            del engine
    return outcome


def run_at(scenario: Scenario, at: tuple[int, ...], alarm: Alarm, backend: str = "host") -> Outcome:
    """Runs a scenario, interrupted at these points (see `Interrupts`), and checks the outcome."""

    def act(call: Call) -> Outcome:
        outcome, interrupts = Outcome(), Interrupts(*at)
        try:
            interrupts.run(call)
            if interrupts.places:
                outcome.broken = "the exception did not reach the caller"
        except Interrupted:
            pass
        except (Exception, Stuck) as error:
            outcome.stuck = isinstance(error, Stuck)
            what = "instead of the interruption" if interrupts.places else "not interrupted"
            outcome.broken = f"{what}, the caller got {_told(error)}"
        outcome.places, outcome.count = interrupts.places, interrupts.count
        return outcome

    return _run(scenario, backend, act, alarm)


def measure(scenario: Scenario, alarm: Alarm, backend: str = "host") -> int:
    """Counts the points in a scenario's call; also checks that the uninterrupted call succeeds."""
    for _ in range(2):  # the first run loads modules and fills caches
        outcome = run_at(scenario, (), alarm, backend)
        assert not outcome.broken, f"without an interruption: {outcome.broken}"
    return outcome.count


def run_after(
    scenario: Scenario, seconds: float, alarm: Alarm, backend: str = "host"
) -> tuple[Outcome, float]:
    """Runs a scenario, interrupted by a real signal; also returns how long the call took, in
    seconds.
    """
    took = 0.0

    def act(call: Call) -> Outcome:
        nonlocal took
        outcome, done = Outcome(), False
        begun = time.perf_counter()
        try:
            alarm.set(seconds, Interrupted)
            call()
            done = True
            took = time.perf_counter() - begun
            alarm.stop()
        except Interrupted:
            took = time.perf_counter() - begun
            outcome.places = ["after the call" if done else f"after {seconds * 1e6:.0f} us"]
        except Exception as error:
            outcome.broken = f"the caller got {_told(error)}"
        return outcome

    return _run(scenario, backend, act, alarm), took
