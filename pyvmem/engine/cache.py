# SPDX-License-Identifier: MIT
"""`RequestCache`: admission, growth, sharing and preemption of requests."""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count as count_up
from typing import TYPE_CHECKING, Any, TypeVar

from pyvmem.engine.background import Background, CallFuture, Pending, work_until_now
from pyvmem.engine.config import Model, Policy, make_cache
from pyvmem.engine.prefix import Namespace, Prefix, key_of
from pyvmem.engine.request import Request, State
from pyvmem.engine.shortage import Shortage
from pyvmem.errors import BadHandle, NotSupported, VMemError
from pyvmem.kvcache import KVCache, PrefixEvicted, PrefixMatch, TokenIds, waits
from pyvmem.kvcache.events import PriorWork
from pyvmem.memory.streams import check, work_of
from pyvmem.plumbing.closing import Closable
from pyvmem.plumbing.reentry import call_part, reentrant_lock
from pyvmem.plumbing.units import counted
from pyvmem.plumbing.validation import invalid

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["RequestCache"]

_T = TypeVar("_T")

_FEW = 16  # closed namespaces are removed once there are at least this many namespaces


class RequestCache(Closable):
    """Admits, grows, shares and preempts the requests of one cache.

    A call that does not find enough memory, slots or mappings returns a `Shortage`. Invalid input
    raises an error that names the value and the limit, and changes nothing. Thread-safe, like the
    cache; calls, including background calls, run one at a time. Streams are passed as in `KVCache`:
    None is the calling thread's current torch stream.

    A call and the cache calls that it makes form one section of the cache's journal, which records
    requests as well as slots. An asynchronous exception (Ctrl-C) therefore leaves requests and
    slots either both unchanged or both with all of the call's changes. If the interrupted call
    cannot ensure this, the next call does.

    Args:
        cache: the cache that holds the requests, which may be changed only through this object. The
            caller closes it after this object; if `open` made it, `close` closes it.

    Attributes:
        cache: the cache, for its tensors, statistics and layout.
    """

    def __init__(self, cache: KVCache) -> None:
        # KVCache, LayeredCache and ParallelKVCache all have this method.
        if not hasattr(cache, "layer_views"):
            raise TypeError(f"cache: expected a KVCache, not {cache!r:.80}")
        self.cache = cache
        self._owns = False
        config = cache.config
        self.max_batch = config.max_batch
        self.max_seq_len = config.max_seq_len
        self._device = cache.context.cuda_device
        self._turns, self._journal = cache.internals.lock, cache.internals.journal
        self._background = Background()
        self._numbers = count_up()
        self._requests: dict[Request, None] = {}
        self._spaces: dict[Hashable, Namespace] = {}
        self._generations = count_up()
        self._most_spaces = _FEW
        self._lock = reentrant_lock()  # guards the namespaces
        cache.internals.users.add(self)

    def __repr__(self) -> str:
        return f"<RequestCache of {counted(len(self._requests), 'request')} in {self.cache!r}>"

    @classmethod
    def open(
        cls, model: Model, policy: Policy | None = None, backend: str = "auto", device: Any = 0
    ) -> Self:
        """Opens a cache for a model and a `RequestCache` on top of it; `close` closes both.

        Args:
            model: the model's shape: ``Model.of(model.config)``.
            policy: see `Policy`; None for the defaults.
            backend: "auto" or a back end's name.
            device: CUDA ordinal, torch or cuda.core device.

        Raises:
            InvalidArgument: the model or the back end does not support a value. VMemError: the back
                end could not be opened, or has too little memory or address space.
        """
        found = cls(make_cache(model, policy or Policy(), backend, device))
        found._owns = True
        return found

    # ---- admission -------------------------------------------------------------------------------

    def namespace(self, name: Hashable) -> Namespace:
        """Returns the open namespace with this name, or creates it.

        Raises:
            InvalidArgument: the name cannot be hashed.
        """
        try:
            hash(name)
        except TypeError:
            raise invalid(f"namespace {name!r:.80} cannot be hashed", op="RequestCache") from None
        with self._lock:
            found = self._spaces.get(name)
            if found is None or not found.is_open:
                if len(self._spaces) >= self._most_spaces:  # drop closed namespaces
                    self._spaces = {key: one for key, one in self._spaces.items() if one.is_open}
                    self._most_spaces = 2 * len(self._spaces) + _FEW
                found = self._spaces[name] = Namespace(name, next(self._generations))
            return found

    def match(self, prompt: Any, namespace: Namespace | None = None) -> Prefix:
        """Leases a prompt's recorded prefix, excluding the last token, which must be computed.

        Args:
            prompt: token ids, in any form that `pyvmem.kvcache.TokenIds` allows.
            namespace: the namespace to search; None for the default namespace.

        Raises:
            InvalidArgument: the tokens are invalid. BadHandle: the namespace is closed.
        """
        tokens = TokenIds(prompt, key_of(namespace))
        return Prefix(tokens, namespace, self.cache, self.cache.match(tokens))

    def admit(
        self,
        prompt: Any,
        namespace: Namespace | None = None,
        room: int = 1,
        stream: Any = None,
        *,
        reserve: bool = True,
    ) -> Request | Shortage:
        """Allocates a slot and memory for a prompt and maps its recorded prefix read-only.

        The request then holds the prefix's rows (`Request.length`); the engine computes the rows
        after them. Pages for the remaining prompt and for `room` more tokens are mapped in the
        background. An `extend` to that length succeeds if it is the very next call; calls in
        between, and other users of the device, may take pages that are not mapped yet (see
        `KVCache.step_async`). Growth of running requests is not taken into account.

        Args:
            prompt: token ids, or their `Prefix`, whose lease ends when the request is admitted.
            namespace: as in `match`; ignored for a `Prefix`.
            room: number of tokens beyond the prompt to map pages for, up to the end of the slot.
            stream: the stream that will read the prefix; it will wait for the work that wrote the
                prefix.
            reserve: if False, this call still checks that everything fits now, but allocates only
                the slot and the prefix; each `extend` then maps the pages it needs and may return a
                `Shortage`. Use this for prompts that are computed in chunks while other requests
                finish.

        Returns:
            The request, or a `Shortage` if nothing was allocated; a `Prefix` then keeps its lease.

        Raises:
            InvalidArgument: the tokens are invalid or more than a slot holds, `room` is negative,
                or `stream` is not a stream (`NotGpuWork`). VMemError: the driver failed; nothing is
                allocated.
        """
        check(stream)
        room = operator.index(room)
        if room < 0:
            raise invalid(f"room is {room}; it must not be negative", op="RequestCache")
        if isinstance(prompt, Prefix):
            return self._admit(prompt, room, stream, reserve)
        with self.match(prompt, namespace) as prefix:
            return self._admit(prefix, room, stream, reserve)

    def admit_async(
        self,
        prompt: Any,
        namespace: Namespace | None = None,
        room: int = 1,
        stream: Any = None,
        *,
        reserve: bool = True,
    ) -> Future[Request | Shortage]:
        """Runs `admit` in the background, because mapping a long prefix takes milliseconds.

        Raises the same errors as `admit` for a bad prompt, namespace or stream; other errors are
        set on the future.
        """
        self._alone("admit_async")
        check(stream)
        prefix = prompt if isinstance(prompt, Prefix) else self.match(prompt, namespace)
        stream = work_until_now(stream, self._device)

        def call() -> Request | Shortage:
            try:
                return self.admit(prefix, None, room, stream, reserve=reserve)
            finally:
                if prefix is not prompt:
                    prefix.release()

        return self._background.begin(call)

    def _admit(self, prefix: Prefix, room: int, stream: Any, reserve: bool) -> Request | Shortage:
        cache, length = self.cache, len(prefix.tokens)
        if length > self.max_seq_len:
            raise invalid(
                f"a prompt of {length} tokens; a slot holds {self.max_seq_len}",
                limit=self.max_seq_len,
                op="RequestCache",
            )
        want = min(length + room, self.max_seq_len)
        self._clear_prefix(prefix, stream)
        with self._turns, self._journal:
            key_of(prefix.namespace)  # raises if the namespace is closed
            try:
                fits = cache.can_admit([want], [prefix.match])
            except PrefixEvicted:
                prefix.renew()
                fits = cache.can_admit([want], [prefix.match])
            if not fits:
                return self._shortage({}, want, match=prefix.match)
            begun = self._take_slot(prefix, stream)
            if begun is None:
                return self._shortage({}, want, match=prefix.match)
            slot, held = begun
            short = None
            try:
                want = want if reserve else held
                if want > held and cache.step_async(self._lengths({slot: want})) != 0:
                    short = self._shortage({slot: want})
            except VMemError:
                cache.free_reqid(slot, stream)
                cache.internals.withdraw_prompt()
                raise
            if short is not None:  # recording the tokens keeps the prefix mapped in the slot
                cache.free_reqid(slot, stream, prefix.tokens if held else None)
                cache.internals.withdraw_prompt()
                prefix.renew()
                return short
            return self._begun(slot, held, prefix.namespace)

    def begin(
        self, prompt: Prefix | int, namespace: Namespace | None = None, stream: Any = None
    ) -> Request | Shortage:
        """Allocates only a slot, for schedulers that decide for themselves what fits.

        Maps at most a recorded prefix and reserves no memory, so each `extend` may return a
        `Shortage`.

        Args:
            prompt: a `Prefix`, as for `admit`; or the number of tokens of a prompt whose prefix is
                not looked up, which gets the best-fitting slot.
            namespace: the request's namespace if `prompt` is a number of tokens.
            stream: the stream that will read the prefix, as in `admit`.

        Returns:
            The request, which holds the prefix's rows; or a `Shortage`, as from `admit`.

        Raises:
            InvalidArgument: the number of tokens is negative or more than a slot holds, or `stream`
                is not a stream (`NotGpuWork`). BadHandle: the namespace is closed. VMemError: the
                driver failed; nothing is allocated.
        """
        check(stream)
        if isinstance(prompt, Prefix):
            namespace = prompt.namespace
            self._clear_prefix(prompt, stream)
            with self._turns, self._journal:
                key_of(namespace)  # raises if the namespace is closed
                begun = self._take_slot(prompt, stream)
                if begun is None:
                    return self._shortage({}, prompt.length, match=prompt.match)
                return self._begun(*begun, namespace)
        key_of(namespace)
        tokens = operator.index(prompt)
        with self._turns, self._journal:
            slot = self.cache.alloc_reqid(tokens)
            return self._shortage({}) if slot is None else self._begun(slot, 0, namespace)

    def _take_slot(self, prefix: Prefix, stream: Any) -> tuple[int, int] | None:
        """Allocates a slot with a prompt's prefix; returns the slot and its number of rows.

        Returns None, and keeps the lease, if there is a shortage.
        """
        begun = self.cache.alloc_prefix(prefix.match, stream=stream)
        if begun is None:
            prefix.renew()
        return begun

    # ---- rows and pages --------------------------------------------------------------------------

    def extend(self, lengths: Mapping[Request, int], stream: Any = None) -> Shortage | None:
        """Grows requests to these lengths, for the work that will be launched next.

        Requests not in `lengths` are unchanged. Cheap if nothing needs to be mapped.

        Args:
            lengths: total number of tokens of each request, at least its current length.
            stream: the stream that will use the pages.

        Returns:
            None if every row is mapped; otherwise a `Shortage`, and no request has changed.

        Raises:
            InvalidArgument: a request belongs to another cache or has no slot; or its number of
                tokens is below its current length (`truncate` removes rows) or above what a slot
                holds. BadHandle, Busy: as for `Request.slot`. VMemError: as for `KVCache.step`; no
                request has changed.
        """
        self._refuse_lengths(lengths)
        with self._turns, self._journal:
            wanted = self._wanted(lengths)
            self._journal.on_abort(partial(self._settle, *lengths))
            if self.cache.step(self._lengths(wanted), stream) != 0:
                return self._shortage(wanted)
            self._journal.change([[list(lengths), "length", list(wanted.values())]])
            return None

    def prepare(self, lengths: Mapping[Request, int]) -> Shortage | None:
        """Starts mapping pages in the background, for a later `extend` to these lengths.

        Requests get pages, not rows. Call it for the next iteration's tokens while the model
        computes the current one. Arguments, result and errors are those of `extend`; a driver
        failure in the background is raised by the next `extend`.
        """
        self._refuse_lengths(lengths)
        with self._turns, self._journal:
            wanted = self._wanted(lengths)
            if self.cache.step_async(self._lengths(wanted)) != 0:
                return self._shortage(wanted)
            return None

    def capacity(self, request: Request) -> int:
        """Returns how many tokens fit in the request's pages.

        An `extend` up to this length maps no memory. Pages that `prepare` and `admit`
        requested count once they are mapped. Raises the same errors as `Request.slot`.
        """
        self._refuse_busy(request)
        with self._turns, self._journal:
            return self.cache.slots.capacity(self._slot(request))

    def truncate(self, request: Request, length: int, stream: Any = None) -> Shortage | None:
        """Drops a request's rows from `length` on, such as rejected draft tokens.

        Behaves like `KVCache.truncate`, and raises the same errors; returns a `Shortage` only if a
        shared page must be copied.
        """
        self._refuse_busy(request)
        rows, work = operator.index(length), self._work(stream)
        self._clear(request, partial(waits.before_truncate, length=rows, work=work))
        with self._turns, self._journal:
            slot = self._slot(request)
            self._journal.on_abort(partial(self._settle, request))
            if self.cache.truncate(slot, rows, work) != 0:
                needed = self.cache.memory.for_truncate(slot, rows)
                return self._shortage({slot: request.length}, needed=needed)
            self._journal.change([[request, "length", rows]])
            return None

    # ---- sharing ---------------------------------------------------------------------------------

    def fork(
        self, request: Request, count: int = 1, length: int | None = None, stream: Any = None
    ) -> list[Request] | Shortage:
        """Creates new requests that begin with a request's rows, for sampling or beam search.

        Creates all of them or none, and raises the same errors as `KVCache.fork_many`. Full pages
        are shared, read-only. The new requests have the parent's namespace.

        Args:
            request: the parent, which continues unchanged.
            count: number of new requests.
            length: number of the parent's tokens that the new requests begin with; None for all.
            stream: the stream of the request's last work.
        """
        self._refuse_busy(request)
        work = self._work(stream)
        blockers = partial(waits.before_fork, count=count, length=length, work=work, into=None)
        self._clear(request, blockers)
        with self._turns, self._journal:
            return self._fork(request, self._slot(request), count, length, work)

    def fork_async(
        self, request: Request, count: int = 1, length: int | None = None, stream: Any = None
    ) -> Future[list[Request] | Shortage]:
        """Runs `fork` in the background; the request is busy until the call is done."""
        self._refuse_busy(request)
        self._require(request, State.RUNNING)
        work, slot = self._work(stream), request.slot
        work.record()
        wanted: dict[str, Any] = {"count": count, "length": length, "work": work}
        blockers = partial(waits.before_fork, reqid=slot, into=None, **wanted)
        call = partial(self._fork, request, **wanted)
        return self._begin("fork_async", request, State.RUNNING, call, blockers)

    def _fork(
        self, request: Request, slot: int, count: int, length: int | None, work: PriorWork
    ) -> list[Request] | Shortage:
        rows = request.length if length is None else operator.index(length)
        slots = self.cache.fork_many(slot, count, rows, work)
        if slots is None:
            needed = self.cache.memory.for_fork(slot, count, rows)
            return self._shortage({}, rows, count, needed=needed)
        return [self._begun(one, rows, request.namespace) for one in slots]

    def record(self, request: Request, tokens: Any, stream: Any = None) -> int:
        """Records a running request's rows under their tokens, in its namespace.

        Returns the number of tokens now recorded. Raises the same errors as `KVCache.record`, and
        BadHandle if the namespace is closed.
        """
        self._refuse_busy(request)
        work = self._work(stream)
        space = request.namespace
        if space is None or space.is_open:
            blockers = partial(
                waits.before_record, tokens=tokens, work=work, namespace=key_of(space)
            )
            self._clear(request, blockers)
        with self._turns, self._journal:
            slot, key = self._slot(request), key_of(request.namespace)
            return self.cache.record(slot, tokens, work, key)

    # ---- release and preemption ------------------------------------------------------------------

    def release(self, request: Request, tokens: Any = None, stream: Any = None) -> None:
        """Ends a request without waiting; its memory becomes available once its GPU work is done.

        Args:
            request: a running or swapped-out request.
            tokens: the token ids under which to record the request's rows in its namespace, for a
                later request that continues this one; there may be more tokens than rows. Ignored
                if the request is swapped out or its namespace is closed. None to record nothing.
            stream: the stream of the request's last work.

        Raises:
            InvalidArgument: the request belongs to another cache, or the tokens are invalid.
                BadHandle: the request has ended. Busy: a background call is using it. VMemError:
                recording failed; the request continues.
        """
        self._refuse_busy(request)
        with self._turns, self._journal:
            self._own(request)
            if request.state is not State.SWAPPED:
                space, slot = request.namespace, self._slot(request)
                if space is not None and not space.is_open:
                    tokens = None
                key = None if tokens is None else key_of(space)
                self._journal.on_abort(partial(self._settle, request))
                self.cache.free_reqid(slot, stream, tokens, key)
            self._end(request)

    def swap_out(self, request: Request, stream: Any = None) -> None:
        """Moves a request's rows to host memory and frees its slot and pages.

        Waits for the work on `stream`, then for the copy. The request keeps its length. (To preempt
        by recomputation, `release` it with its tokens and `admit` them later.)

        Raises:
            MemoryError: there is not enough host memory. OutOfMemory, VMemError: as for
                `KVCache.swap_out`. Nothing has changed.
        """
        self._refuse_busy(request)
        work = self._work(stream)
        self._clear(request, partial(waits.before_swap_out, work=work))
        with self._turns, self._journal:
            self._swap_out(request, self._slot(request), work)

    def swap_out_async(self, request: Request, stream: Any = None) -> Future[None]:
        """Runs `swap_out` in the background; the request is busy until the call is done."""
        self._refuse_busy(request)
        self._require(request, State.RUNNING)
        work, slot = self._work(stream), request.slot
        work.record()
        blockers = partial(waits.before_swap_out, reqid=slot, work=work)
        call = partial(self._swap_out, request, work=work)
        return self._begin("swap_out_async", request, State.RUNNING, call, blockers)

    def _swap_out(self, request: Request, slot: int, work: PriorWork) -> None:
        self._journal.on_abort(partial(self._settle, request))
        rows = self.cache.swap_out(slot, work)
        self._change(request, _slot=None, rows=rows, base_state=State.SWAPPED)

    def swap_in(self, request: Request, stream: Any = None) -> Shortage | None:
        """Restores a swapped-out request, possibly into a different slot.

        Args:
            request: a swapped-out request; on success, it is running again, with its rows.
            stream: the stream that will use the rows. The call waits for its work and for the copy.

        Returns:
            None, or a `Shortage` if the request stays swapped out.

        Raises:
            InvalidArgument: the request belongs to another cache or is not swapped out. VMemError:
                the driver failed; the request stays swapped out.
        """
        self._refuse_busy(request)
        blockers = partial(waits.before_swap_in, length=request.length, work=self._work(stream))
        self.cache.internals.wait_before(blockers)
        with self._turns, self._journal:
            self._require(request, State.SWAPPED)
            return self._swap_in(request, stream)

    def swap_in_async(self, request: Request, stream: Any = None) -> Future[Shortage | None]:
        """Runs `swap_in` in the background; the request is busy until the call is done."""
        self._refuse_busy(request)
        self._require(request, State.SWAPPED)
        stream = work_until_now(stream, self._device)
        blockers = partial(waits.before_swap_in, length=request.length, work=self._work(stream))
        call = lambda _: self._swap_in(request, stream)  # noqa: E731
        return self._begin("swap_in_async", request, State.SWAPPED, call, blockers)

    def _swap_in(self, request: Request, stream: Any) -> Shortage | None:
        assert request.rows is not None
        slot = self.cache.swap_in(request.rows, stream)
        if slot is None:
            return self._shortage({}, request.length)
        owner = self.cache.slots.owner(slot)
        self._change(request, _slot=slot, rows=None, base_state=State.RUNNING, owner=owner)
        return None

    # ---- reports and closing ---------------------------------------------------------------------

    @property
    def requests(self) -> list[Request]:
        """The requests that have not ended, in order of admission."""
        with self._turns, self._journal:
            for request in list(self._requests):
                self._look(request)
            return list(self._requests)

    def close(self, stream: Any = None) -> None:
        """Waits for background calls to finish, then releases every request.

        Also closes the cache if `open` made it; this raises Busy while any of its tensors is alive.
        If it raises, call it again to release the remaining requests.

        Args:
            stream: the stream of the requests' last work.
        """
        self._background.close()
        failure: VMemError | None = None
        for request in self.requests:
            with self._turns, self._journal:
                if request not in self._requests:
                    continue
                try:
                    # call_part: a subclass's `release` may call back into the cache
                    call_part(partial(self.release, request, stream=stream))
                except VMemError as error:
                    if isinstance(error, BadHandle) or getattr(self.cache, "failed", None):
                        self._end(request)  # closing the cache, or `recover`, frees the slots
                    else:
                        failure = failure or error
        if self._owns and not self.cache.is_closed:
            self.cache.close(stream)
        if failure is not None:
            raise failure

    # ---- requests and slots ----------------------------------------------------------------------
    # All except `_own`, `_require` and `_refuse_busy` are called within a journal section.

    def _has(self, request: Request) -> bool:
        """Returns true if the request still owns its slot."""
        slot = request._slot
        return slot is not None and self.cache.slots.owner(slot) == request.owner

    def _look(self, request: Request) -> None:
        """Updates a request's state from the cache.

        The request has ended if the cache reclaimed its slot, as `ParallelKVCache.recover` does. It
        is no longer busy if its call was never queued.
        """
        if request.calls and not (request.pending and self._background.works_on(request)):
            request.calls = ()
        if request.base_state is State.RUNNING and not self._has(request):
            self._end(request)

    def _settle(self, *requests: Request) -> None:
        """Reconciles requests with the cache after a call on them has been interrupted.

        Runs before another call can reuse their slots, so each slot either still belongs to its
        request or is free.
        """
        for request in requests:
            rows, slot = request.rows, request._slot
            if rows is not None and rows.is_open:
                request.base_state = State.SWAPPED
            elif slot is not None and (owner := self.cache.slots.owner(slot)) is not None:
                request.length, request.owner = self.cache.seq_len(slot), owner
                request.base_state = State.RUNNING
            else:
                self._end(request)

    def _own(self, request: Request) -> None:
        """Raises unless `request` belongs to this cache and has not ended."""
        if not isinstance(request, Request):
            raise _no_request(request)
        if request not in self._requests:
            if request.state is State.ENDED:
                request.require(State.RUNNING)
            raise invalid(f"{request!r} belongs to another cache", op="RequestCache")

    def _require(self, request: Request, state: State) -> None:
        """Raises unless `request` belongs to this cache and is in `state`."""
        self._own(request)
        request.require(state)

    def _refuse_lengths(self, lengths: Mapping[Request, int]) -> None:
        """Raises TypeError if `lengths` is not a mapping, and whatever `_refuse_busy` raises."""
        if not hasattr(lengths, "values"):
            raise TypeError(f"lengths: expected tokens by Request, not {lengths!r:.80}")
        self._refuse_busy(*lengths)

    def _refuse_busy(self, *requests: Request) -> None:
        """Raises Busy if a call on a request is in progress, without waiting for its lock."""
        for request in requests:
            if not isinstance(request, Request):
                raise _no_request(request)
            if not request.calls or request.state is not State.BUSY:
                continue
            self._own(request)
            if self._background.works_on(request):
                raise request.refusal(State.BUSY, State.RUNNING)
            with self._turns, self._journal:
                self._look(request)

    def _slot(self, request: Request) -> int:
        self._own(request)
        self._look(request)
        return request.slot

    def _slots(self, requests: Collection[Request]) -> list[int]:
        """Returns the requests' slots.

        If all of them are running, as in a regular step, one check covers them all.
        """
        if self._requests.keys() >= set(requests):
            running = State.RUNNING
            slots = [
                one._slot
                for one in requests
                if one.base_state is running and not one.calls and one._slot is not None
            ]
            owners = [one.owner for one in requests]
            if len(slots) == len(owners) and self.cache.slots.owners(slots) == owners:
                return slots
        return list(map(self._slot, requests))

    def _change(self, request: Request, **values: Any) -> None:
        """Changes fields of a request through the journal."""
        self._journal.change([[request, name, value] for name, value in values.items()])

    def _begun(self, slot: int, length: int, namespace: Namespace | None) -> Request:
        number = next(self._numbers)
        request = Request(number, namespace, length, owner=self.cache.slots.owner(slot), _slot=slot)
        self._journal.change([[self._requests, request, None]])
        return request

    def _end(self, request: Request) -> None:
        rows = request.rows
        self._journal.change([[self._requests, request, ...]])
        self._change(request, base_state=State.ENDED, _slot=None, rows=None)
        if rows is not None:
            rows.close(self._journal)

    # ---- numbers ---------------------------------------------------------------------------------

    def _wanted(self, lengths: Mapping[Request, int]) -> dict[int, int]:
        """Checks `lengths`; returns the number of tokens for each slot."""
        slots, numbers = self._slots(lengths), list(map(operator.index, lengths.values()))
        longest = self.max_seq_len
        held = [request.length for request in lengths]
        if any(map(operator.gt, held, numbers)) or max(numbers, default=0) > longest:
            for request, length in zip(lengths, numbers, strict=True):
                why = f"a slot holds at most {longest}" if length > longest else ""
                if length < request.length:
                    why = "use truncate to remove rows"
                if why:
                    raise invalid(
                        f"{length} tokens: {request!r}; {why}", limit=longest, op="RequestCache"
                    )
        return dict(zip(slots, numbers, strict=True))

    def _lengths(self, wanted: Mapping[int, int]) -> list[int]:
        """Returns a length for every slot, as `KVCache.step` expects; 0 leaves a slot unchanged."""
        lengths = [0] * self.max_batch
        for slot, length in wanted.items():
            lengths[slot] = length
        return lengths

    def _shortage(
        self,
        wanted: Mapping[int, int],
        new: int = 0,
        count: int = 1,
        *,
        match: PrefixMatch | None = None,
        needed: int | None = None,
    ) -> Shortage:
        """Returns the `Shortage` for a call that did not find enough memory or slots.

        The call would have grown slots to the `wanted` tokens, or created `count` requests of `new`
        tokens that begin with `match`. `needed` is in bytes; if None, it is computed from the
        tokens.
        """
        size = self.cache.memory.for_request
        if needed is None:
            lengths = self._lengths(wanted)
            needed = self.cache.memory.for_step(lengths) if wanted else size(None, new, match)
        slots = 0 if wanted else max(0, count - self.cache.slots.num_free)
        largest = max(new, *wanted.values(), 0)
        available, limit = self.cache.memory.obtainable()
        return Shortage(needed, available, limit, size(None, largest), slots)

    # ---- the background --------------------------------------------------------------------------

    def _alone(self, what: str) -> None:
        """Raises NotSupported if all ranks must get the same results.

        Called by methods whose result depends on timing.
        """
        if self.cache.lockstep:
            raise NotSupported(
                f"{what}: the cache's results must be equal on all ranks",
                errno=errno.EOPNOTSUPP,
                op="RequestCache",
            )

    def _work(self, stream: Any) -> PriorWork:
        """Captures the work submitted to a stream so far."""
        return PriorWork(stream, self._device)

    def _clear(self, request: Request, blockers: Callable[..., waits.Blockers]) -> None:
        """Waits, without holding the lock, for whatever blocks a call on a request's slot."""
        if request._slot is not None:
            self.cache.internals.wait_before(partial(blockers, reqid=request._slot))

    def _clear_prefix(self, prefix: Prefix, stream: Any) -> None:
        """Waits, without holding the lock, for whatever blocks admission with this prefix."""
        blockers = partial(
            waits.before_prefix,
            tokens=prefix.match,
            leave=0,
            reader=work_of(stream),
            namespace=None,
        )
        self.cache.internals.wait_before(blockers)

    def _begin(
        self,
        what: str,
        request: Request,
        state: State,
        call: Callable[[int], _T],
        blockers: waits.FindBlockers,
    ) -> Future[_T]:
        """Queues a call on a request, which is busy until the call is complete.

        Args:
            what: name of the call.
            request: the request.
            state: the state that the request must be in when the call runs, since another thread's
                call may run first.
            call: the function to call, with the request's slot, or -1 if it is swapped out.
            blockers: returns the blockers to wait for before the call.
        """
        self._alone(what)
        future: CallFuture[_T] = CallFuture()
        pending = Pending(future)

        def finish() -> _T:
            try:
                self.cache.internals.wait_before(blockers)
                with self._turns, self._journal:
                    self._look(request)
                    if request.base_state is not state:
                        raise request.refusal(request.base_state, state)
                    self._journal.on_abort(partial(self._settle, request))
                    return call(-1 if request._slot is None else request._slot)
            finally:
                pending.made = True

        request.calls = (*(one for one in request.calls if not one.over), pending)
        self._background.begin(finish, request, future)
        if pending not in request.calls:  # `_look` dropped it before the call was queued
            request.calls = (*request.calls, pending)
        return future


def _no_request(given: Any) -> TypeError:
    return TypeError(f"expected a Request, not {given!r:.80}")
