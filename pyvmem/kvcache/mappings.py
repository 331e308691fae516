# SPDX-License-Identifier: MIT
"""Reports who holds driver mappings, for a step that runs out of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pyvmem.kvcache.group import Group
from pyvmem.kvcache.prefix_cache import PrefixCache
from pyvmem.plumbing.logs import warn

__all__ = ["warn_out_of_mappings", "who_has_mappings"]

_log = logging.getLogger(__name__)


def who_has_mappings(groups: Sequence[Group]) -> str:
    """Describes who holds mappings, as far as the context, the budget and the ledger know.

    A cache's mappings are estimated from its map calls, so the numbers are slightly high. If the
    limit is the machine's rather than the driver's, only the context's total is reported.
    """
    context, journal = groups[0].context, groups[0].journal
    total, known, texts = context.stats().mappings, 0, []
    if not context.info.max_mappings:
        return f"the context has {total}"
    caches: dict[PrefixCache, list[Group]] = {}  # groups of the same cache share a PrefixCache
    for one in journal.recoverables:
        if isinstance(one, Group) and one.context is context:
            caches.setdefault(one.prefixes, []).append(one)
    for number, parts in enumerate(caches.values(), 1):
        taken, idle = map(sum, zip(*[one.pager.runs.holders() for one in parts], strict=True))
        own = parts[0].prefixes is groups[0].prefixes
        name = "this cache" if own else f"cache {number} of the budget"
        texts.append(f"{name} has about {taken} for requests and {idle} for free slots")
        known += taken + idle
    if total > known:
        texts.append(f"other users of the context and recorded prefixes have {total - known}")
    share = groups[0].reclaimer.share
    engines = [] if share is None else share.engines()
    texts += [f"{name} has {count}" for name, count in sorted(engines, key=lambda one: -one[1])]
    if len(caches) == 1 and not engines:
        texts.append("no other holder is known")
    return f"of {total} in the context, " + ", ".join(texts)


def warn_out_of_mappings(groups: Sequence[Group], reason: str) -> None:
    """Logs why a step ran out of mappings, and who holds them."""
    for group in groups:
        group.pager.runs.refused = ""
    warn(
        _log,
        "mappings",
        "no mapping is left, so requests cannot grow until some end: %s; %s; larger pages need "
        "fewer mappings",
        reason,
        who_has_mappings(groups),
    )
