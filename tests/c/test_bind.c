/* SPDX-License-Identifier: MIT */
/* Description: a back end that accepts a batch in one call. The call is all or nothing; if it is not, pages are
 * quarantined. */
#include "api/api.h"
#include "check.h"

/* The back end host with a bind call built on its map and unmap: a driver that accepts `group` operations per call. */
static struct vm_backend fake;
static size_t group, calls, last_n;
static int fail_at;   /* driver calls that pass before one fails; < 0: none fails */
static int lose_at;   /* like fail_at, but leaves the call's operations in an unknown state */
static uint64_t most; /* bytes of the longest map operation so far */

static int one(void *be, const struct vm_bind_op *op) {
  if (op->kind == VM_BIND_UNMAP) return vm_backend_host.unmap(be, op->addr, op->bytes, op->sparse);
  if (op->bytes > most) most = op->bytes;
  return vm_backend_host.map(be, op->addr, op->bytes, op->slab, op->offset, op->flags, op->sparse);
}

static int fake_bind(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  last_n = n;
  for (size_t i = 0; i < n; i += group) {
    size_t k = n - i < group ? n - i : group;
    calls++;
    r->done = i;
    if (fail_at-- == 0) return vm_fail_at(-ENOMEM, ops[i].addr, ops[i].bytes, 0, "refused");
    for (size_t j = i; j < i + k; j++)
      if (one(be, &ops[j])) return -EIO;
    if (lose_at-- == 0) {
      r->unknown = k;
      return vm_fail_at(-ENOTRECOVERABLE, ops[i].addr, ops[i].bytes, 0, "the GPU failed");
    }
  }
  return 0;
}

static vmem_t open_fake(size_t group_of, bool fresh_is_zero) {
  vmem_t vm = open_host(0);
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  fake = vm_backend_host;
  fake.bind = fake_bind;
  fake.map = NULL;
  fake.unmap = NULL;
  c->be = &fake;
  c->info->fresh_is_zero = fresh_is_zero;
  vm_put(c);
  group = group_of;
  fail_at = lose_at = -1;
  calls = 0;
  most = 0;
  return vm;
}

#define PIECES 5
#define STRIDE MIB(4)

struct scene {
  vmem_t vm;
  uint64_t va, other;
};

static bool scene_open(struct scene *s, size_t group_of, bool fresh_is_zero) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 2 * PAGE, .count = PIECES, .stride = STRIDE};
  s->vm = open_fake(group_of, fresh_is_zero);
  if (vMemReserve(s->vm, MIB(32), NULL, &s->va) || vMemReserve(s->vm, MIB(32), NULL, &s->other)) return false;
  op.addr = s->va;
  if (vmem_batch(s->vm, &op, 1, NULL, 0, 0)) return false;
  for (int i = 0; i < PIECES; i++) BYTE(s->va + i * STRIDE) = (unsigned char)(1 + i);
  calls = 0;
  return true;
}

/* Grows each piece, maps pages in a second reservation, and unmaps the first page of each piece. */
static int scene_run(struct scene *s) {
  struct vmem_op ops[] = {
      {.op = VMEM_OP_UNMAP, .addr = s->va, .bytes = PAGE, .count = PIECES, .stride = STRIDE},
      {.op = VMEM_OP_POPULATE, .addr = s->other, .bytes = PAGE, .count = 3, .stride = STRIDE},
      {.op = VMEM_OP_POPULATE, .addr = s->va + 2 * PAGE, .bytes = PAGE, .count = PIECES, .stride = STRIDE},
  };
  return vmem_batch(s->vm, ops, 3, NULL, 0, 0);
}

static bool untouched(const struct scene *s) {
  for (int i = 0; i < PIECES; i++)
    if (BYTE(s->va + i * STRIDE) != 1 + i) return false;
  return true;
}

static void one_call(void) {
  struct scene s;
  struct vmem_stats before;
  CHECK(scene_open(&s, 1000, true));
  before = stats_of(s.vm);
  OK(scene_run(&s));
  EQ(calls, 1);
  EQ(last_n, PIECES + 3 + PIECES);
  EQ(stats_of(s.vm).map_calls - before.map_calls, 1);
  EQ(stats_of(s.vm).unmap_calls, before.unmap_calls);
  EQ(stats_of(s.vm).mapped_bytes, (2 * PIECES + 3) * PAGE);
  OK(vMemUnmap(s.vm, s.other, PAGE));
  EQ(stats_of(s.vm).unmap_calls - before.unmap_calls, 1);
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

/* New pages are zeroed before the batch's single bind call; an earlier batch created the slab's own mapping. */
static void zeroed_before(void) {
  struct scene s;
  CHECK(scene_open(&s, 1000, false));
  OK(scene_run(&s));
  EQ(calls, 1);
  EQ(last_n, PIECES + 3 + PIECES);
  EQ(BYTE(s.other), 0);
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

/* Runs a batch of maps, fills and unmaps. */
static int run_with_fill(struct scene *s) {
  struct vmem_op ops[] = {
      {.op = VMEM_OP_UNMAP, .addr = s->va, .bytes = PAGE, .count = PIECES, .stride = STRIDE},
      {.op = VMEM_OP_POPULATE, .addr = s->other, .bytes = PAGE, .count = 3, .stride = STRIDE},
      {.op = VMEM_OP_FILL, .addr = s->va + PAGE, .bytes = PAGE, .value = 9},
  };
  return vmem_batch(s->vm, ops, 3, NULL, 0, 0);
}

static void two_calls_with_fills(void) {
  struct scene s;
  CHECK(scene_open(&s, 1000, true));
  OK(run_with_fill(&s));
  EQ(calls, 2);
  EQ(last_n, PIECES);
  EQ(BYTE(s.other), 0);
  EQ(BYTE(s.va + PAGE), 9);
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

#define COPY_OF_ALL                                                                                                    \
  {.op = VMEM_OP_POPULATE,                                                                                             \
   .flags = VMEM_OP_COPY,                                                                                              \
   .bytes = 2 * PAGE,                                                                                                  \
   .count = PIECES,                                                                                                    \
   .stride = STRIDE,                                                                                                   \
   .src_stride = STRIDE}

/* One call replaces pages at their addresses; whichever driver call fails, the old pages are mapped there again. */
static void replaces(void) {
  for (int fail = -1; fail < 10; fail++)
    for (size_t per_call = 1; per_call < 1000; per_call += 998) {
      struct scene s;
      struct vmem_op copy = COPY_OF_ALL;
      struct vmem_op swap[] = {
          {.op = VMEM_OP_MAP,
           .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME,
           .bytes = 2 * PAGE,
           .count = PIECES,
           .stride = STRIDE},
          {.op = VMEM_OP_UNMAP, .bytes = 2 * PAGE, .count = PIECES, .stride = STRIDE},
      };
      struct vmem_stats before, after;
      int err;
      CHECK(scene_open(&s, per_call, true));
      copy.src = swap[0].addr = s.va;
      copy.addr = swap[1].addr = s.other;
      OK(vmem_batch(s.vm, &copy, 1, NULL, 0, 0));
      OK(vmem_gather(s.vm, s.other, 2 * PAGE, PIECES, STRIDE, &swap[0].handle));
      for (int i = 0; i < PIECES; i++) BYTE(s.other + i * STRIDE + 1) = 1; /* to tell the pages apart */
      before = stats_of(s.vm);
      calls = 0;
      fail_at = fail;
      err = vmem_batch(s.vm, swap, 2, NULL, 0, 0);
      CHECK(!err || err == -ENOMEM);
      if (!err && per_call > 1) EQ(calls, 1);
      fail_at = -1;
      CHECK(untouched(&s));
      for (int i = 0; i < PIECES; i++) EQ(BYTE(s.va + i * STRIDE + 1), !err);
      OK(vmem_check(s.vm));
      after = stats_of(s.vm);
      if (err)
        CHECK(same_state(&before, &after));
      else
        EQ(after.used_bytes, 2 * PIECES * PAGE);
      OK(vmem_close(s.vm));
    }
}

/* If the outcome of a replace is unknown, both the old and the new pages are quarantined. */
static void lost_replace(void) {
  struct scene s;
  struct vmem_op copy = COPY_OF_ALL;
  struct vmem_op swap = {
      .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .bytes = 2 * PAGE, .count = PIECES, .stride = STRIDE};
  CHECK(scene_open(&s, 1, true));
  copy.src = swap.addr = s.va;
  copy.addr = s.other;
  OK(vmem_batch(s.vm, &copy, 1, NULL, 0, 0));
  OK(vmem_gather(s.vm, s.other, 2 * PAGE, PIECES, STRIDE, &swap.handle));
  lose_at = 2;
  EQ(vmem_batch(s.vm, &swap, 1, NULL, 0, 0), -ENOTRECOVERABLE);
  EQ(stats_of(s.vm).quarantined_bytes, 4 * PAGE);
  OK(vmem_check(s.vm));
  for (int i = 0; i < PIECES; i++)
    if (i != 2) EQ(BYTE(s.va + i * STRIDE), 1 + i);
  OK(vmem_drop(s.vm, swap.handle));
  OK(vMemUnmap(s.vm, s.va, 2 * PAGE));
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

/* Whichever driver call fails, everything is as it was. */
static void nth_call_fails(void) {
  for (int fresh = 0; fresh < 2; fresh++)
    for (size_t group_of = 1; group_of < 20; group_of += 6)
      for (int nth = 0;; nth++) {
        struct scene s;
        struct vmem_stats before, after;
        int ret;
        CHECK(scene_open(&s, group_of, fresh));
        before = stats_of(s.vm);
        fail_at = nth;
        ret = scene_run(&s);
        fail_at = -1;
        OK(vmem_check(s.vm));
        if (!ret) {
          CHECK(nth > 0);
          OK(vmem_close(s.vm));
          break;
        }
        EQ(ret, -ENOMEM);
        after = stats_of(s.vm);
        CHECK(same_state(&before, &after));
        CHECK(untouched(&s));
        OK(scene_run(&s));
        OK(vmem_check(s.vm));
        OK(vmem_close(s.vm));
      }
}

/* Only the pages of the failing driver call are quarantined. */
static void unknown_state(void) {
  for (int nth = 0; nth < 7; nth++) {
    struct scene s;
    struct vmem_stats st;
    CHECK(scene_open(&s, 2, true));
    lose_at = nth;
    EQ(scene_run(&s), -ENOTRECOVERABLE);
    lose_at = -1;
    st = stats_of(s.vm);
    EQ(st.quarantined_bytes, (nth == 6 ? 1 : 2) * PAGE);
    CHECK(st.mapped_bytes <= 2 * PIECES * PAGE);
    EQ(st.slab_bytes, st.used_bytes + st.free_bytes + st.quarantined_bytes);
    OK(vmem_check(s.vm));
    OK(vmem_close(s.vm));
  }
}

/* The undo fails as well: its pages are quarantined, the error names the range, and the records stay consistent. */
static void undo_fails(void) {
  for (uint64_t nth = 0; nth < 10; nth++) {
    struct scene s;
    struct vmem_error e = {.size = sizeof(e)};
    int ret;
    CHECK(scene_open(&s, 1000, true));
    OK(vmem_inject(s.vm, VMEM_INJECT_UNMAP | VMEM_INJECT_FILL, nth & 1, 64, EIO));
    ret = run_with_fill(&s);
    OK(vmem_get_error(&e));
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    EQ(ret, -ENOTRECOVERABLE);
    CHECK(e.addr >= s.va || e.addr >= s.other);
    EQ(stats_of(s.vm).quarantined_bytes, 3 * PAGE);
    OK(vmem_check(s.vm));
    OK(vmem_close(s.vm));
  }
}

/* A read-only page that must be zeroed is never mapped writable for that. */
static void read_only(void) {
  for (int lost = 0; lost < 2; lost++) {
    vmem_t vm = open_fake(1000, false);
    uint64_t va;
    vmem_handle h;
    OK(vMemReserve(vm, MIB(8), NULL, &va));
    OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
    if (lost) lose_at = 1;
    EQ(vMemMap(vm, va, 2 * PAGE, h, 0, VMEM_MAP_READONLY), lost ? -ENOTRECOVERABLE : 0);
    EQ(calls, 2);
    EQ(stats_of(vm).quarantined_bytes, lost ? 2 * PAGE : 0);
    EQ(vmem_fill(vm, va, PAGE, 1), lost ? -ENOTRECOVERABLE : -EACCES);
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

static void heap_runs_out(void) {
  for (uint64_t nth = 0;; nth++) {
    struct scene s;
    struct vmem_stats before, after;
    int ret;
    CHECK(scene_open(&s, 3, false));
    before = stats_of(s.vm);
    OK(vmem_inject(s.vm, VMEM_INJECT_HEAP, nth, 1, ENOMEM));
    ret = scene_run(&s);
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    OK(vmem_check(s.vm));
    after = stats_of(s.vm);
    if (ret) CHECK(same_state(&before, &after) && untouched(&s));
    OK(vmem_close(s.vm));
    if (!ret) break;
    EQ(ret, -ENOMEM);
  }
}

/* A batch for the worker allocates all its heap memory at submit, which fails if there is none. */
static void heap_runs_out_at_submit(void) {
  for (uint64_t nth = 0;; nth++) {
    struct scene s;
    struct vmem_op ops[2] = {{.op = VMEM_OP_UNMAP, .bytes = PAGE, .count = PIECES, .stride = STRIDE},
                             {.op = VMEM_OP_POPULATE, .bytes = PAGE, .count = 70, .stride = 2 * PAGE}};
    vmem_ticket t;
    int ret;
    CHECK(scene_open(&s, 1000, nth & 1));
    ops[0].addr = s.va;
    ops[1].addr = s.other;
    OK(vmem_inject(s.vm, VMEM_INJECT_HEAP, nth, 1, ENOMEM));
    ret = vmem_submit(s.vm, ops, 2, NULL, 0, 0, &t);
    if (!ret) OK(vmem_wait(s.vm, t, -1));
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    OK(vmem_check(s.vm));
    OK(vmem_close(s.vm));
    if (!ret && nth > 30) break;
    CHECK(!ret || ret == -ENOMEM);
  }
}

/* A driver with a limit on one operation's range never gets a longer range, neither in a batch nor in its undo. */
static void long_runs(void) {
  vmem_t vm = open_fake(1000, true);
  struct vmem_op ops[2] = {{.op = VMEM_OP_UNMAP, .bytes = MIB(4)}, {.op = VMEM_OP_POPULATE, .bytes = MIB(2)}};
  uint64_t va;
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  c->info->bind_bytes = 3 * PAGE;
  vm_put(c);
  OK(vMemReserve(vm, MIB(8), NULL, &va));
  ops[1].addr = va;
  ops[1].bytes = MIB(4);
  OK(vmem_batch(vm, &ops[1], 1, NULL, 0, 0));
  EQ(most, 3 * PAGE);
  for (int i = 0; i < 64; i++) BYTE(va + i * PAGE) = (unsigned char)i;
  ops[0].addr = va;
  ops[1].addr = va + MIB(4);
  group = 1;
  fail_at = 1 + 64 / 3; /* the maps pass, the unmap does not */
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -ENOMEM);
  for (int i = 0; i < 64; i++) EQ(BYTE(va + i * PAGE), i);
  EQ(most, 3 * PAGE);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(one_call), TEST(replaces), TEST(lost_replace), TEST(zeroed_before), TEST(two_calls_with_fills),
     TEST(nth_call_fails), TEST(unknown_state), TEST(undo_fails), TEST(read_only), TEST(heap_runs_out),
     TEST(heap_runs_out_at_submit), TEST(long_runs))
