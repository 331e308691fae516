# SPDX-License-Identifier: MIT
"""Runs random engines over a KVCache against a plain Python model, row by row."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import open_context, usable_backends
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kvcache_helpers import LAYERS, ROWS, Model, policy_cache

from pyvmem import Context

pytestmark = pytest.mark.needs_tensors

POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "short of memory": {"limit": 14},
    "nothing kept": {"deferred_reclaim": False},
    "eager": {"eager_pages": 2, "limit": 16},
    "ahead": {"ahead_tokens": 5, "limit": 16},
    "watermark": {"low_watermark": 0.4, "limit": 16, "reclaim_steps": 5},
    "over-read": {"overread_rows": 3, "limit": 18},
    "over-read in decoding": {"overread_rows": 3, "overread_decode": True, "limit": 18},
    "one tensor": {"group_size": LAYERS, "limit": 20},
    "odd rows": {"num_kv_heads": 3, "head_dim": 5, "max_seq_len": 100},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_random_engine(context: Context, policy: str, seed: int) -> None:
    with policy_cache(context, POLICIES[policy], 64) as cache:
        model = Model(cache, seed)
        for count in range(250):
            model.any_step()
            if count % 10 == 0:
                model.check()
        model.check()
        model.fire()


class Engine(RuleBasedStateMachine):
    """One engine over one cache; hypothesis chooses its calls."""

    @initialize(
        backend=st.sampled_from(usable_backends()), policy=st.sampled_from(sorted(POLICIES))
    )
    def start(self, backend: str, policy: str) -> None:
        self.context = open_context(backend)
        self.model = Model(policy_cache(self.context, POLICIES[policy], 64), 0)

    @rule(length=st.integers(1, 6 * ROWS))
    def alloc(self, length: int) -> None:
        self.model.alloc(length)

    @rule(more=st.lists(st.integers(0, ROWS + 1), min_size=4, max_size=4), ahead=st.booleans())
    def grow(self, more: list[int], ahead: bool) -> None:
        self.model.grow({reqid: more[reqid] for reqid in list(self.model.rows)}, ahead)

    @rule(which=st.integers(0, 3), wait=st.booleans())
    def free(self, which: int, wait: bool) -> None:
        taken = sorted(self.model.rows)
        if taken:
            self.model.free(taken[which % len(taken)], wait)

    @rule()
    def fire(self) -> None:
        self.model.fire()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.fire()
            self.model.cache.close()
            self.context.close()


TestEngine = Engine.TestCase
TestEngine.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
