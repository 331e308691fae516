# SPDX-License-Identifier: MIT
"""Description: large pages for whole parts of a request, small ones for the rest."""

from __future__ import annotations

import pytest
from conftest import open_context
from kvcache_helpers import ROWS, firing_later, lens, pending, small_cache, small_config
from move_helpers import MIB2, PART, TENSORS, UNIT, two_mebibytes
from share_helpers import grow, is_zero, read_rows, start, whole, write_rows

from pyvmem import (
    Context,
    FdEvent,
    Inject,
    InvalidArgument,
    KVCache,
    KVCacheConfig,
    RangeFlags,
    VMemError,
)
from pyvmem.kvcache import Budget
from pyvmem.kvcache.pages import DEVICE, PLAIN, Kind, Places, Tier
from pyvmem.memory.info import Location

LARGE = Kind(UNIT, DEVICE)
DRIVER = Inject.MAP | Inject.UNMAP | Inject.SLAB | Inject.FILL


def mixed(context: Context, **changes: object):  # type: ignore[no-untyped-def]
    """Slots of up to eleven pages, four of which are a large one."""
    changes.setdefault("max_seq_len", 11 * ROWS)
    require(context)
    return small_cache(context, large_page_size=UNIT * context.info.granule, **changes)


def require(context: Context) -> None:
    if UNIT * context.info.granule not in context.info.page_sizes:
        pytest.skip("no such page size")


# ---- the notes -----------------------------------------------------------------------------------


def test_places() -> None:
    places, host = Places([], lambda: None), Kind(1, Tier(Location.HOST))
    assert not places
    assert list(places.stretches(2, 9)) == [(2, 9, PLAIN)]
    places.put(4, 8, LARGE)
    places.put(8, 12, LARGE)
    places.put(13, 15, host)
    assert list(places.stretches(2, 16)) == [
        (2, 4, PLAIN),
        (4, 12, LARGE),
        (12, 13, PLAIN),
        (13, 15, host),
        (15, 16, PLAIN),
    ]
    assert list(places.stretches(9, 9)) == list(places.stretches(9, 7)) == []
    assert [places.floor(page) for page in (3, 4, 5, 8, 11, 12, 14)] == [3, 4, 4, 8, 8, 12, 14]
    assert [places.ceil(page) for page in (3, 4, 5, 8, 9, 12, 14)] == [3, 4, 8, 8, 12, 12, 14]
    assert (places.large(0, 20), places.large(0, 8)) == (8, 4)
    assert places.away(0, 14) == {Tier(Location.HOST): 1}
    assert places.away_end == 15
    taken = places.take(8, 14)
    assert taken == [(8, 12, LARGE), (13, 14, host)]
    assert list(places.stretches(0, 16)) == [
        (0, 4, PLAIN),
        (4, 8, LARGE),
        (8, 14, PLAIN),
        (14, 15, host),
        (15, 16, PLAIN),
    ]
    places.put_all(taken)
    places.put(4, 12, PLAIN)
    assert list(places.stretches(0, 16)) == [(0, 13, PLAIN), (13, 15, host), (15, 16, PLAIN)]
    assert str(Tier(Location.PEER, 3)) == "peer 3"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"large_page_size": 3 << 20}, "large_page_size 3145728 is not a power of two"),
        ({"large_page_size": -1}, "large_page_size is -1"),
        ({"promote_tokens": 5}, "promote_tokens 5 without a large_page_size"),
        ({"large_page_size": MIB2, "promote_tokens": -1}, "promote_tokens is -1"),
        ({"host_limit": -1}, "host_limit is -1"),
        ({"peer_limit": 1 << 63}, "peer_limit is 9223372036854775808"),
    ],
)
def test_bad_configurations(changes: dict[str, int], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        KVCacheConfig(num_layers=1, num_kv_heads=1, head_dim=64, **changes)  # type: ignore[arg-type]


def test_large_pages_that_cannot_be(context: Context, page: int) -> None:
    require(context)
    before = context.stats().reserved_bytes
    with pytest.raises(InvalidArgument, match=f"large_page_size {page} is not more than page_size"):
        KVCache(small_config(page, large_page_size=page), context)
    if 1 << 30 not in context.info.page_sizes:
        with pytest.raises(InvalidArgument, match="large_page_size 1073741824 is none of this"):
            KVCache(small_config(page, large_page_size=1 << 30), context)
    with pytest.raises(InvalidArgument, match="not a multiple of large_page_size"):
        KVCache(small_config(page, large_page_size=UNIT * page, packed_slots=True), context)
    with (
        small_cache(context) as cache,
        pytest.raises(InvalidArgument, match="has no large_page_size"),
    ):
        cache.promote(start(cache, 1))
    assert context.stats().reserved_bytes == before


# ---- growing and giving back ---------------------------------------------------------------------


def test_whole_parts_get_large_pages(context: Context) -> None:
    with mixed(context) as cache:
        first = start(cache, PART + 1)
        assert cache.snapshot()[first].large_pages == UNIT
        assert cache.snapshot()[first].mapped_pages == UNIT + 1
        grow(cache, first, PART + 1, 3 * PART - ROWS)
        assert cache.snapshot()[first].large_pages == UNIT, "the second part began with small pages"
        assert whole(cache, first, 3 * PART - ROWS)
        second = start(cache, 2 * PART, 100)
        assert cache.stats().large_pages == 3 * UNIT * TENSORS
        assert whole(cache, second, 2 * PART, 100)
        cache.free_reqid(second)
        again = start(cache, 1, 200)
        assert again == second
        assert cache.step([slot.seq_len + (slot.reqid == again) for slot in cache.snapshot()]) == 0
        assert is_zero(cache, again, 1, 1), "nothing of the earlier owner"


def test_pages_of_two_mebibytes(backend: str) -> None:
    with open_context(backend) as context:
        page = context.info.granule
        with KVCache(two_mebibytes(page, 10), context) as cache:
            reqid = start(cache, 1100)
            small = -(-(1100 * 4096 - 2 * MIB2) // page)
            assert cache.snapshot()[reqid].large_pages == 2 * MIB2 // page
            assert cache.snapshot()[reqid].mapped_pages == 2 * MIB2 // page + small
            for tensor in range(2):
                at = cache.reservation.addr + cache.layout.offset(reqid, 0, tensor)
                assert at % MIB2 == 0
                assert RangeFlags.LARGE in context.query(at + MIB2).flags
                assert RangeFlags.LARGE not in context.query(at + 2 * MIB2).flags
            assert whole(cache, reqid, 1100)
            child = cache.fork(reqid, 700)
            assert child is not None
            assert cache.snapshot()[child].shared_pages == MIB2 // page
            assert whole(cache, child, 700)
            cache.free_reqid(reqid)
            cache.check_integrity()
            assert whole(cache, child, 700)
            assert cache.match([0]).length == 0
            cache.free_reqid(child, tokens=range(600))
            taken = cache.alloc_prefix([*range(600), 5])
            assert taken is not None
            assert taken[1] == 600 // cache.sharing_unit * cache.sharing_unit
            assert whole(cache, *taken)
            cache.free_reqid(taken[0])
            cache.trim(prefixes=True)
            cache.check_integrity()
            assert cache.stats().mapped_bytes == 0


def test_small_pages_where_no_large_one_can_be_had(backend: str) -> None:
    with open_context(backend) as probe:
        page = probe.info.granule
        if page >= MIB2:
            pytest.skip("no smaller pages")
    slab = 8 * MIB2
    with open_context(backend, slab_size=slab, mem_limit=slab, pool_high=slab) as context:
        config = KVCacheConfig(
            num_layers=1,
            num_kv_heads=8,
            head_dim=128,
            dtype="float32",
            max_batch=2,
            max_seq_len=1024,
            page_size=page,
            large_page_size=MIB2,
            memory_limit=slab,
        )
        with KVCache(config, context) as cache:
            first = start(cache, 1)  # the only slab is cut into small pages
            for background in (False, True):
                want = [0, 0]
                want[first] = 1
                second = cache.alloc_reqid(1024)
                assert second is not None
                want[second] = 1024
                if background:
                    assert cache.step_async(want) == 0
                assert cache.step(want) == 0
                assert cache.snapshot()[second].large_pages == 0
                write_rows(cache, second, 0, list(range(1, 1025)))
                assert whole(cache, second, 1024)
                cache.check_integrity()
                cache.free_reqid(second)
                cache.trim()


def test_what_is_reclaimed_is_whole_pages(context: Context) -> None:
    limit = 12 * TENSORS * context.info.granule
    with mixed(context, memory_limit=limit, zero_fill=False) as cache:
        old = start(cache, 2 * PART + 1)
        cache.free_reqid(old)
        assert cache.snapshot()[old].mapped_pages == 2 * UNIT + 1
        busy = cache.alloc_reqid()
        assert busy == 0
        if busy == old:
            busy = cache.alloc_reqid()
        assert busy is not None
        want = [0] * 4
        want[busy] = 4 * ROWS + 1  # five pages: three are free, one small and one large go
        assert cache.step(want) == 0
        assert cache.snapshot()[old].mapped_pages == UNIT
        assert cache.snapshot()[old].large_pages == UNIT
        cache.check_integrity()


def test_a_large_page_stays_while_its_owner_has_a_part_of_it(context: Context) -> None:
    limit = 6 * TENSORS * context.info.granule
    with mixed(context, memory_limit=limit) as cache:
        cache.free_reqid(start(cache, PART))
        reqid = start(cache, 1)
        assert cache.snapshot()[reqid].mapped_pages == UNIT
        cache.trim()
        assert cache.snapshot()[reqid].mapped_pages == UNIT, "never cut"
        assert cache.stats().cached_pages == (UNIT - 1) * TENSORS
        assert cache.can_admit([2 * ROWS])
        assert not cache.can_admit([2 * ROWS + 1]), "the rest of the large page cannot be had"
        other = cache.alloc_reqid()
        assert other is not None
        want = [0] * 4
        want[reqid], want[other] = 1, 3 * ROWS
        assert cache.step(want) == -1
        want[other] = 2 * ROWS
        assert cache.step(want) == 0


def test_a_window_slides_by_whole_pages(context: Context) -> None:
    with mixed(context, window=ROWS, window_tile=0) as cache:
        reqid = start(cache, PART)
        heads = []
        for rows in range(PART, 2 * PART, 3):
            want = [0] * 4
            want[reqid] = rows
            assert cache.step(want) == 0
            cache._groups[0].reclaimer.finish_all()
            heads.append(cache._groups[0].table[reqid].head)
            assert heads[-1] <= max(0, rows - 3 - ROWS) // ROWS
        assert set(heads) == {0, UNIT, UNIT + 1, UNIT + 2}, "one large page, then small ones"
        cache.free_reqid(reqid)
        cache.trim()
        assert cache.stats().mapped_bytes == 0


def test_caches_of_a_budget_count_bytes(context: Context) -> None:
    require(context)
    page = context.info.granule
    budget = Budget(context, 12 * TENSORS * page)
    options = {"max_seq_len": 11 * ROWS, "large_page_size": UNIT * page}
    with (
        KVCache(small_config(page, **options), budget=budget) as one,
        KVCache(small_config(page, max_seq_len=11 * ROWS), budget=budget) as two,
    ):
        one.free_reqid(start(one, 2 * PART))
        assert budget.stats().caches[0].used_bytes == 2 * UNIT * TENSORS * page
        start(two, 5 * ROWS)
        assert budget.stats().caches[0].used_bytes == UNIT * TENSORS * page
        one.check_integrity()
        two.check_integrity()


# ---- sharing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, ROWS, PART - 1, PART, PART + 3, 2 * PART, 2 * PART + 5])
def test_a_fork_shares_whole_pages_and_copies_the_rest(context: Context, length: int) -> None:
    with mixed(context) as cache:
        parent = start(cache, 2 * PART + 5)
        calls = context.stats().batches
        forked = cache.fork_many(parent, 2, length)
        assert forked is not None
        # Unmap and map of what becomes shared, and of the children: no call for each tensor.
        assert context.stats().batches - calls <= 4
        for child in forked:
            large = min(length // PART * UNIT, 2 * UNIT)
            assert cache.snapshot()[child].shared_pages == large
            assert whole(cache, child, length)
            grow(cache, child, length, length + ROWS, 1000)
        cache.check_integrity()
        assert whole(cache, parent, 2 * PART + 5)
        cache.free_reqid(parent)
        for child in forked:
            assert whole(cache, child, length)


def test_a_record_leaves_out_a_large_page_that_is_written(context: Context) -> None:
    with mixed(context) as cache:
        reqid = start(cache, 2 * PART - 3)
        assert cache.snapshot()[reqid].large_pages == 2 * UNIT
        assert cache.record(reqid, range(2 * PART - 3)) == PART
        assert cache.record(reqid, range(2 * PART - 3)) == PART
        grow(cache, reqid, 2 * PART - 3, 2 * PART)
        assert cache.record(reqid, range(2 * PART)) == 2 * PART
        assert whole(cache, reqid, 2 * PART)


def test_a_match_that_ends_in_a_large_page_is_copied(context: Context) -> None:
    with mixed(context) as cache, FdEvent.create() as work:
        tokens = list(range(2 * PART))
        cache.free_reqid(start(cache, 2 * PART), work, tokens)
        prompt = [*tokens[: PART + 2 * ROWS], 777]
        with firing_later(work) as fired:
            taken = cache.alloc_prefix(prompt)
            assert fired, "the copy follows the work that wrote the rows"
        assert taken is not None
        reqid, length = taken
        assert length == PART + 2 * ROWS
        info = cache.snapshot()[reqid]
        assert (info.shared_pages, info.granted_pages) == (UNIT, UNIT + 2)
        assert whole(cache, reqid, length)
        grow(cache, reqid, length, length + ROWS, 1000)
        cache.check_integrity()
        assert whole(cache, reqid, length)


def test_turns_after_a_common_beginning_are_shared(context: Context) -> None:
    """The second conversation's own copy of the common pages goes with it into the tree."""
    common, rows = PART + ROWS, 2 * PART + 2 * ROWS
    with mixed(context) as cache:
        tokens = list(range(rows))
        cache.free_reqid(start(cache, 2 * PART), tokens=tokens[: 2 * PART])
        other = [*tokens[:common], *range(500, 500 + rows - common)]
        taken = cache.alloc_prefix(other)
        assert taken is not None
        assert taken[1] == common
        grow(cache, taken[0], common, rows, 900)
        cache.free_reqid(taken[0], tokens=other)
        cache.check_integrity()
        again = cache.alloc_prefix([*other, 1])
        assert again is not None
        assert again[1] == rows
        assert cache.snapshot()[again[0]].shared_pages == rows // ROWS, "nothing is copied"
        assert whole(cache, again[0], common)
        assert read_rows(cache, again[0], common, list(range(900 + common, 900 + rows)))
        first = cache.alloc_prefix([*tokens[: 2 * PART], 1])
        assert first is not None
        assert first[1] == 2 * PART
        assert cache.snapshot()[first[0]].shared_pages == 2 * UNIT
        assert whole(cache, first[0], 2 * PART)
        cache.free_reqid(again[0])
        cache.free_reqid(first[0])
        cache.trim(prefixes=True)
        assert cache.stats().mapped_bytes == 0


def test_a_large_page_goes_with_its_last_prefix(context: Context) -> None:
    with mixed(context) as cache:
        cache.free_reqid(start(cache, PART), tokens=range(PART))
        taken = cache.alloc_prefix([*range(2 * ROWS), 9])  # splits the run, and copies
        assert taken is not None
        cache.free_reqid(taken[0])
        cache.trim()
        prefixes, held = cache._groups[0].prefixes, UNIT * TENSORS
        assert cache._groups[0].reclaimer.held == held
        assert cache.stats().large_pages == held
        assert prefixes.evict(0, 1) >= 1, "all of it, since a part gives nothing back"
        assert cache._groups[0].reclaimer.held == 0
        cache.check_integrity()


@pytest.mark.parametrize("leased", [ROWS, 2 * ROWS, PART])
def test_a_lease_of_a_part_keeps_the_whole_page(context: Context, leased: int) -> None:
    """None of it is promised to others."""
    limit = 2 * UNIT * TENSORS * context.info.granule
    with mixed(context, memory_limit=limit) as cache:
        cache.free_reqid(start(cache, PART), tokens=range(PART))
        other = cache.alloc_reqid()
        with cache.match([*range(leased), 99]) as match:
            assert match.length == leased
            assert cache.obtainable_pages()[0] == UNIT * TENSORS
            assert cache.can_admit([PART])
            assert not cache.can_admit([PART + 1])
            want = [0] * cache.config.max_batch
            want[other] = PART + 1
            assert cache.step_async(want) == cache.step(want) == -1
        assert cache.obtainable_pages()[0] == 2 * UNIT * TENSORS
        assert cache.step_async(want) == cache.step(want) == 0
        cache.check_integrity()


def test_leases_that_name_a_page_twice_keep_it_once(context: Context) -> None:
    """Two prefixes begin with the same pages of their own, where a third has a large page."""
    with mixed(context) as cache:
        cache.free_reqid(start(cache, PART), tokens=range(PART))
        small = start(cache, ROWS, by=1)
        grow(cache, small, ROWS, 3 * ROWS, by=1)
        child = cache.fork(small)
        for one, last in ((small, 7), (child, 8)):
            grow(cache, one, 3 * ROWS, 4 * ROWS, by=1)
            assert cache.record(one, [*range(3 * ROWS), *[last] * ROWS]) == 4 * ROWS
            cache.free_reqid(one)
        cache.trim()
        held = cache.stats().mapped_bytes
        leases = [cache.match([*range(3 * ROWS), *[last] * ROWS, 9]) for last in (7, 8)]
        assert [one.length for one in leases] == [4 * ROWS] * 2
        some, every = cache.obtainable_pages()
        assert some == every - held // cache.layout.page_size
        for one in leases:
            one.release()
        assert cache.obtainable_pages()[0] == every


def test_without_memory_for_the_copy_nothing_is_taken(context: Context) -> None:
    limit = 6 * TENSORS * context.info.granule
    with mixed(context, memory_limit=limit) as cache:
        cache.free_reqid(start(cache, PART), tokens=range(PART))
        start(cache, 2 * ROWS, 50)
        before = [slot.state for slot in cache.snapshot()].count("active")
        assert cache.alloc_prefix([*range(ROWS), 9]) is None
        assert [slot.state for slot in cache.snapshot()].count("active") == before
        cache.check_integrity()


def test_copies_wait_for_no_other_request(context: Context) -> None:
    """Pages of a third request cannot be zeroed yet: neither a match nor a fork needs that."""
    with mixed(context) as cache, pending() as work:
        cache.free_reqid(start(cache, PART), tokens=range(PART))
        other = start(cache, ROWS)
        cache.free_reqid(other, work)
        assert cache.alloc_reqid(ROWS) == other
        assert cache.step_async(lens(cache, **{f"r{other}": ROWS})) == 0
        found = cache.alloc_prefix([*range(2 * ROWS), 99])
        assert found is not None
        assert found[1] == 2 * ROWS
        assert cache.fork(found[0], ROWS + 1) is not None
        assert cache.snapshot()[other].in_flight


def test_a_swapped_request_comes_back_to_large_pages(context: Context) -> None:
    with mixed(context) as cache:
        swapped = cache.swap_out(start(cache, PART + 3))
        cache.trim()
        back = cache.swap_in(swapped)
        assert back is not None
        assert cache.snapshot()[back].large_pages == UNIT
        assert whole(cache, back, PART + 3)


def test_every_driver_call_of_a_shared_beginning_fails_once(backend: str) -> None:
    """Forks and matches that end in the middle of a large page."""
    survived, skip = False, 0
    while not survived:
        with open_context(backend) as context:
            with mixed(context, max_batch=5) as cache:
                parent = start(cache, 2 * PART)
                cache.free_reqid(start(cache, 2 * PART, 300), tokens=range(2 * PART))
                cache.trim()
                context.inject(DRIVER, skip=skip)
                survived = True
                for fork, rows in ((True, PART + ROWS + 1), (False, PART + 2 * ROWS), (False, 9)):
                    try:
                        if fork:
                            survived &= cache.fork_many(parent, 2, rows) is not None
                        else:
                            survived &= cache.alloc_prefix([*range(rows), 999]) is not None
                    except VMemError:
                        survived = False
                    cache.check_integrity()
                    assert whole(cache, parent, 2 * PART)
                context.inject(DRIVER, count=0)
                for slot in cache.snapshot():
                    if slot.state == "active" and slot.reqid != parent:
                        rows = slot.seq_len
                        assert whole(cache, slot.reqid, rows, 1 if rows == PART + ROWS + 1 else 300)
                        cache.free_reqid(slot.reqid)
                for _ in range(2):
                    try:
                        cache.step([slot.seq_len for slot in cache.snapshot()])
                    except VMemError:
                        survived = False
                forked = cache.fork(parent, PART + 1)
                assert forked is not None
                assert whole(cache, forked, PART + 1)
                again = cache.alloc_prefix([*range(PART + ROWS), 999])
                assert again is not None
                assert whole(cache, *again, 300)
                for reqid in (parent, forked, again[0]):
                    cache.free_reqid(reqid)
                cache.trim(prefixes=True)
                assert cache.stats().mapped_bytes == 0
            assert context.stats().used_bytes == 0
        skip += 1
    assert skip > 10, "the run makes more driver calls than that"


def test_a_fork_takes_small_pages_where_no_large_one_is_left() -> None:
    large, page = 2 << 20, 64 << 10
    slab = 4 * large
    sizes = {"granule": page, "slab_size": slab, "mem_limit": 2 * slab, "pool_high": 2 * slab}
    with Context("host", **sizes) as context:
        config = KVCacheConfig(
            num_layers=1,
            num_kv_heads=8,
            head_dim=128,
            dtype="float32",
            max_batch=5,
            max_seq_len=1024,  # 4 KiB each in K and V
            page_size=page,
            large_page_size=large,
            memory_limit=2 * slab,
            low_watermark=0.0,
            growth_fraction=0.0,
        )
        with KVCache(config, context) as cache:
            lens = [0] * 5
            for tokens in (510, 510, 1):  # one slab is full of large pages, the other is cut
                lens[cache.alloc_reqid(tokens) or 0] = tokens
                assert cache.step(lens) == 0
            assert [slot.large_pages for slot in cache.snapshot()[:3]] == [32, 32, 0]
            assert cache.can_admit([510])
            child = cache.fork(0)
            assert child is not None
            assert cache.snapshot()[child].large_pages == 0
            assert cache.snapshot()[child].granted_pages == 32
            cache.check_integrity()
