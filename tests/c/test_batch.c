/* SPDX-License-Identifier: MIT */
/* Description: batches are all or nothing, whichever driver call or allocation fails; quarantine. */
#include "check.h"

/* A context with a tensor-like layout: 4 pieces 8 MiB apart, 2 pages of each mapped and filled. */
struct scene {
  vmem_t vm;
  uint64_t va;
  vmem_handle h;
};

#define PIECES 4
#define STRIDE MIB(8)

static bool scene_open(struct scene *s) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 2 * PAGE, .count = PIECES, .stride = STRIDE};
  s->vm = open_vm(0);
  if (vMemReserve(s->vm, MIB(64), NULL, &s->va)) return false;
  op.addr = s->va;
  if (vmem_batch(s->vm, &op, 1, NULL, 0, 0) || vMemCreate(s->vm, 8 * PAGE, NULL, &s->h)) return false;
  for (int i = 0; i < PIECES; i++)
    if (vmem_fill(s->vm, s->va + i * STRIDE, 2 * PAGE, (uint8_t)(1 + i))) return false;
  return true;
}

/* Maps new pages after each piece, maps a handle elsewhere, fills, and unmaps the first page of each piece. */
static size_t scene_ops(const struct scene *s, struct vmem_op *ops) {
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = s->va, .bytes = PAGE, .count = PIECES, .stride = STRIDE};
  ops[1] = (struct vmem_op){
      .op = VMEM_OP_POPULATE, .addr = s->va + 2 * PAGE, .bytes = 3 * PAGE, .count = PIECES, .stride = STRIDE};
  ops[2] = (struct vmem_op){.op = VMEM_OP_MAP,
                            .addr = s->va + MIB(4),
                            .bytes = PAGE,
                            .count = PIECES,
                            .stride = STRIDE,
                            .handle = s->h,
                            .flags = VMEM_OP_CONSUME};
  ops[3] = (struct vmem_op){
      .op = VMEM_OP_FILL, .addr = s->va + PAGE, .bytes = PAGE, .count = PIECES, .stride = STRIDE, .value = 99};
  return 4;
}

static bool untouched(const struct scene *s, bool filled) {
  for (int i = 0; i < PIECES; i++) {
    if (get_byte(s->vm, s->va + i * STRIDE) != 1 + i) return false;
    if (get_byte(s->vm, s->va + i * STRIDE + PAGE) != (filled ? 99 : 1 + i)) return false;
  }
  return true;
}

static void success(void) {
  struct scene s;
  struct vmem_op ops[4];
  struct vmem_stats st;
  CHECK(scene_open(&s));
  OK(vmem_batch(s.vm, ops, scene_ops(&s, ops), NULL, 0, 0));
  st = stats_of(s.vm);
  EQ(st.mapped_bytes, (8 - 4 + 12 + 4) * PAGE);
  EQ(st.handles, 0);                          /* consumed */
  EQ(st.used_bytes, (8 - 4 + 12 + 4) * PAGE); /* the 4 pages of the handle that were not mapped are free */
  for (int i = 0; i < PIECES; i++) {
    EQ(get_byte(s.vm, s.va + i * STRIDE + PAGE), 99);
    EQ(get_byte(s.vm, s.va + i * STRIDE + 4 * PAGE), 0);
    CHECK(put_byte(s.vm, s.va + i * STRIDE + 4 * PAGE, 1));
    CHECK(put_byte(s.vm, s.va + i * STRIDE + MIB(4), 1));
  }
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

/* Fails every call of one kind in turn; the batch must undo itself completely, then succeed. */
static void sweep(uint32_t kinds, bool fills_run) {
  for (uint64_t nth = 0;; nth++) {
    struct scene s;
    struct vmem_op ops[4];
    struct vmem_stats before, after;
    int ret;
    CHECK(scene_open(&s));
    before = stats_of(s.vm);
    OK(vmem_inject(s.vm, kinds, nth, 1, ENOMEM));
    ret = vmem_batch(s.vm, ops, scene_ops(&s, ops), NULL, 0, 0);
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    OK(vmem_check(s.vm));
    if (!ret) {
      CHECK(nth > 0);
      OK(vmem_close(s.vm));
      return;
    }
    EQ(ret, -ENOMEM);
    after = stats_of(s.vm);
    CHECK(same_state(&before, &after));
    CHECK(untouched(&s, false) || (fills_run && untouched(&s, true)));
    OK(vmem_batch(s.vm, ops, scene_ops(&s, ops), NULL, 0, 0));
    OK(vmem_check(s.vm));
    OK(vmem_close(s.vm));
  }
}

static void nth_map(void) { sweep(VMEM_INJECT_MAP, false); }
static void nth_unmap(void) { sweep(VMEM_INJECT_UNMAP, true); }
static void nth_fill(void) { sweep(VMEM_INJECT_FILL, true); }
static void nth_heap(void) { sweep(VMEM_INJECT_HEAP, false); }

/* A call fails, and every step of the undo fails too: what could not be undone is quarantined, everything else is as
 * before, and close frees everything. */
static void undo_fails(uint32_t first, uint32_t undo) {
  for (uint64_t nth = 0; nth < 6; nth++) {
    struct scene s;
    struct vmem_op ops[4];
    struct vmem_error e = {.size = sizeof(e)};
    struct vmem_stats st;
    CHECK(scene_open(&s));
    OK(vmem_inject(s.vm, first | undo, nth, 64, EIO));
    int ret = vmem_batch(s.vm, ops, scene_ops(&s, ops), NULL, 0, 0);
    OK(vmem_get_error(&e));
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    OK(vmem_check(s.vm));
    st = stats_of(s.vm);
    if (ret == -ENOTRECOVERABLE) {
      CHECK(st.quarantined_bytes > 0);
      CHECK(e.addr >= s.va && e.bytes > 0);
      /* Neither the addresses nor the pages can be used again. */
      EQ(vMemUnmap(s.vm, e.addr, PAGE), -ENOTRECOVERABLE);
      EQ(vMemFree(s.vm, s.va, VMEM_FREE_UNMAP), -ENOTRECOVERABLE);
      struct vmem_op again = {.op = VMEM_OP_POPULATE, .addr = e.addr, .bytes = PAGE};
      EQ(vmem_batch(s.vm, &again, 1, NULL, 0, 0), -ENOTRECOVERABLE);
    } else {
      EQ(ret, -EIO);
      EQ(st.quarantined_bytes, 0);
      CHECK(untouched(&s, false) || untouched(&s, true));
    }
    EQ(st.slab_bytes, st.used_bytes + st.free_bytes + st.quarantined_bytes);
    OK(vmem_close(s.vm));
  }
}

static void undo_of_maps_fails(void) { undo_fails(VMEM_INJECT_MAP, VMEM_INJECT_UNMAP); }
static void undo_of_unmaps_fails(void) { undo_fails(VMEM_INJECT_UNMAP, VMEM_INJECT_MAP); }

/* vMemMap and vMemRelease are batches of one operation. */
static void single_calls(void) {
  struct scene s;
  struct vmem_stats before, after;
  CHECK(scene_open(&s));
  before = stats_of(s.vm);
  OK(vmem_inject(s.vm, VMEM_INJECT_MAP, 0, 1, ENOMEM));
  EQ(vMemMap(s.vm, s.va + MIB(2), 8 * PAGE, s.h, 0, 0), -ENOMEM);
  after = stats_of(s.vm);
  CHECK(same_state(&before, &after));
  OK(vMemMap(s.vm, s.va + MIB(2), 8 * PAGE, s.h, 0, 0));
  CHECK(put_byte(s.vm, s.va + MIB(2), 3));
  before = stats_of(s.vm);
  OK(vmem_inject(s.vm, VMEM_INJECT_UNMAP, 0, 1, EIO));
  EQ(vMemRelease(s.vm, s.h), -EIO);
  after = stats_of(s.vm);
  CHECK(same_state(&before, &after));
  EQ(get_byte(s.vm, s.va + MIB(2)), 3);
  OK(vMemRelease(s.vm, s.h));
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

static void reserve_fails(void) {
  vmem_t vm = open_vm(0);
  for (uint64_t nth = 0; nth < 4; nth++) {
    struct vmem_stats before = stats_of(vm), after;
    uint64_t va = 0;
    OK(vmem_inject(vm, VMEM_INJECT_RESERVE | VMEM_INJECT_HEAP, nth, 1, ENOMEM));
    int ret = vMemReserve(vm, MIB(8), NULL, &va);
    OK(vmem_inject(vm, 0, 0, 0, 0));
    after = stats_of(vm);
    if (!ret) OK(vMemFree(vm, va, 0));
    if (ret) CHECK(same_state(&before, &after));
    CHECK(ret || nth > 2);
  }
  OK(vmem_close(vm));
}

/* A reservation that the driver fails to free stays as it was, mappings and contents included. */
static void free_fails(void) {
  struct scene s;
  struct vmem_stats before, after;
  CHECK(scene_open(&s));
  before = stats_of(s.vm);
  OK(vmem_inject(s.vm, VMEM_INJECT_RESERVE, 0, 1, EIO));
  EQ(vMemFree(s.vm, s.va, VMEM_FREE_UNMAP), -EIO);
  after = stats_of(s.vm);
  CHECK(same_state(&before, &after));
  CHECK(untouched(&s, false));
  OK(vmem_check(s.vm));
  OK(vMemFree(s.vm, s.va, VMEM_FREE_UNMAP));
  EQ(stats_of(s.vm).mapped_bytes, 0);
  EQ(stats_of(s.vm).used_bytes, 8 * PAGE); /* the handle's */
  OK(vmem_check(s.vm));
  OK(vmem_close(s.vm));
}

static void create_fails(void) {
  for (uint64_t nth = 0; nth < 12; nth++) {
    vmem_t vm = open_vm(0);
    struct vmem_stats before = stats_of(vm), after;
    vmem_handle h;
    OK(vmem_inject(vm, VMEM_INJECT_SLAB | VMEM_INJECT_HEAP, nth, 1000, ENOMEM));
    int ret = vMemCreate(vm, MIB(1), NULL, &h);
    OK(vmem_inject(vm, 0, 0, 0, 0));
    OK(vmem_check(vm));
    after = stats_of(vm);
    if (ret) {
      EQ(ret, -ENOMEM);
      EQ(after.used_bytes, before.used_bytes);
      EQ(after.handles, 0);
    }
    OK(vMemCreate(vm, MIB(1), NULL, &h));
    OK(vmem_close(vm));
  }
}

MAIN(TEST(success), TEST(nth_map), TEST(nth_unmap), TEST(nth_fill), TEST(nth_heap), TEST(undo_of_maps_fails),
     TEST(undo_of_unmaps_fails), TEST(single_calls), TEST(reserve_fails), TEST(free_fails), TEST(create_fails))
