# SPDX-License-Identifier: MIT
"""What keeps ranks together: answers that are compared, and failures that all ranks learn of."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from pyvmem.errors import BadHandle, InvalidArgument, NotSupported, TooManyMappings, VMemError
from pyvmem.info import Location
from pyvmem.kvcache.cache import KVCache
from pyvmem.kvcache.core import Core
from pyvmem.kvcache.leases import PrefixEvicted
from pyvmem.kvcache.lockstep import Failure, Ranks
from pyvmem.kvcache.tiers import Moved

__all__ = ["AgreedCache"]

_CROWDED = 1  # a status below those of `Failure`
_P = ParamSpec("_P")
_T = TypeVar("_T")


class AgreedCache(KVCache):
    """A `KVCache` that keeps every answer, or its failure, for the ranks to compare.

    The cache's own refusals, such as `InvalidArgument`, come before anything changes and on every
    rank alike: they are compared as answers are. Every other exception *poisons*: from then on
    every call raises it, until `recover`, and the other ranks learn of it in `check_step`.

    One kind of shortage depends on where a rank's pages lie: of mappings. A rank whose `step` lacks
    them alone raises TooManyMappings, is *crowded*, and goes on to `check_step`, where every rank
    takes the step back.
    """

    _ranks: Ranks
    _failure: Failure | None
    _crowded: str  # the text of the shortage; "": there is none
    _digest: int  # of the calls and their answers

    def _call(self, method: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Calls, and keeps the answer, or the failure."""
        with self._lock, self._journal:
            core = self._open_core()
            name = method.__name__
            try:
                core.reclaimer.forget_crowding()
                result = method(*args, **kwargs)
                core.reclaimer.forget_crowding()
                core.reclaimer.raise_errors()  # of the background; the answer may be due to them
            except BaseException as error:
                if isinstance(error, TooManyMappings) and name == "step":
                    self._crowded = str(error)
                    self._note(name, 0)  # as on those who could; what they call next differs
                elif _is_refusal(error):
                    self._note(name, type(error).__name__)
                else:
                    self._poison(error, name)
                raise
            self._note(name, result)
            return result

    def _note(self, name: str, answer: Any) -> None:
        self._digest = zlib.crc32(f"{name} {answer}".encode(), self._digest)

    def _poison(self, error: BaseException, where: str) -> None:
        self._failure = Failure.of(self._ranks.rank, error, where)

    def _open_core(self) -> Core:
        if not self._closed and self._failure is not None:
            raise self._failure.error()
        if not self._closed and self._crowded:
            raise _too_many(f"{self._crowded}; call check_step, as the other ranks do")
        return super()._open_core()

    def _take_back(self) -> None:
        """Makes the last step undone, on a rank that could take it and on one that could not."""
        raise NotImplementedError

    def move(
        self,
        reqid: int,
        location: str | Location,
        device: Any = None,
        tokens: Sequence[int] | None = None,
        stream: Any = None,
        wait: bool = True,
    ) -> Moved:
        """NotSupported: a tier may be full on one rank alone, which is no answer for all."""
        raise NotSupported(
            "move: the ranks of a group have agreed on the memory of their devices alone",
            errno=errno.EOPNOTSUPP,
            op="KVCache.move",
        )

    @property
    def failed(self) -> VMemError | None:
        """Why no call can be made; None: all is well, as far as this rank knows."""
        return self._failure.error() if self._failure else None

    def status(self) -> list[int]:
        """Three whole numbers for an all_reduce (MAX) of the engine's own, then for `agree`.

        Below 2**32 in magnitude, or 4096 times the number of ranks: int64 or float64.
        """
        with self._lock, self._journal:
            own = self._failure.status if self._failure else _CROWDED * bool(self._crowded)
            return [own, self._digest, -self._digest]

    def agree(self, maxima: Sequence[int]) -> None:
        """Reads what became of `status` in the all_reduce.

        Raises:
            TooManyMappings: a rank had none left for the last `step`, which every rank has taken
                back: it is as if it had said -1. What no request owns was given up.
            RankFailed: a rank failed; from now on every call raises this.
            RanksDiffer: the calls or the answers of the ranks differ; likewise.
        """
        status, digest, negative = (int(value) for value in maxima)
        with self._lock, self._journal:
            crowded, self._crowded = self._crowded, ""
            if status == _CROWDED:
                if digest == -negative:
                    self._take_back()
                    raise _too_many(
                        crowded or "another rank has no mapping left for the step, which was undone"
                    )
                status = 0
            failure = Failure.from_status(status)
            if failure is None and digest != -negative:
                failure = Failure(-1)
            if failure is None:
                return
            if self._failure is None or self._failure.status != failure.status:
                self._failure = failure  # else the own one, which knows more
            raise self._failure.error()

    def check_step(self) -> None:
        """`status`, one all_reduce of three numbers, and `agree`. A collective.

        Between the calls of an iteration and the launch of the model, unless the engine reduces
        `status` itself.

        Raises:
            TooManyMappings, RankFailed, RanksDiffer: as `agree`, on every rank.
        """
        self.agree(self._ranks.maxima(self.status()))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Ends the block with `check_step` on every rank, also where the block raised.

            with cache.together():
                answer = cache.step(seq_lens)

        An exception inside, of whatever kind, fails the rank; only the cache's own
        `InvalidArgument` and `PrefixEvicted`, which all ranks have alike, come out as they are.

        Raises:
            TooManyMappings, RankFailed, RanksDiffer: as `agree`, on every rank.
        """
        try:
            yield
        except (InvalidArgument, PrefixEvicted):
            raise
        except Exception as error:
            if self._failure is None and not self._crowded:
                self._poison(error, "a block of together()")
        self.check_step()


def _too_many(text: str) -> TooManyMappings:
    return TooManyMappings(text, errno=errno.ENOSPC, op="ParallelKVCache")


def _is_refusal(error: BaseException) -> bool:
    """Whether the cache refused an argument. What libvmem refuses of the cache is a failure."""
    if isinstance(error, (InvalidArgument, NotSupported, BadHandle)):
        return error.op.startswith("KVCache")
    return isinstance(error, TypeError)
