/* SPDX-License-Identifier: MIT */
/* Description: creating pages with copied contents, replacing mapped pages, and moving, which is both together. */
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

#define STRIDE MIB(1)

struct scene {
  vmem_t vm;
  uint64_t va, scratch;
};

/* Maps three pieces of two pages and writes a distinct byte to each page. */
static bool scene_open(struct scene *s) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 2 * PAGE, .count = 3, .stride = STRIDE};
  s->vm = open_vm(PAGE);
  if (vMemReserve(s->vm, MIB(8), NULL, &s->va) || vMemReserve(s->vm, MIB(8), NULL, &s->scratch)) return false;
  op.addr = s->va;
  if (vmem_batch(s->vm, &op, 1, NULL, 0, 0)) return false;
  for (int i = 0; i < 6; i++)
    if (!put_byte(s->vm, s->va + i / 2 * STRIDE + i % 2 * PAGE + 5, 1 + i)) return false;
  return true;
}

static bool holds(const struct scene *s, uint64_t base) {
  for (int i = 0; i < 6; i++)
    if (get_byte(s->vm, base + i / 2 * STRIDE + i % 2 * PAGE + 5) != 1 + i) return false;
  return true;
}

static struct vmem_op copy_to_scratch(const struct scene *s) {
  return (struct vmem_op){.op = VMEM_OP_POPULATE,
                          .flags = VMEM_OP_COPY,
                          .addr = s->scratch,
                          .bytes = 2 * PAGE,
                          .count = 3,
                          .stride = STRIDE,
                          .src = s->va,
                          .src_stride = STRIDE};
}

/* Replaces the pages at va by the scratch pages, and unmaps the scratch range. */
static int swap(const struct scene *s, vmem_handle *h) {
  struct vmem_op ops[] = {
      {.op = VMEM_OP_MAP,
       .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME,
       .addr = s->va,
       .bytes = 2 * PAGE,
       .count = 3,
       .stride = STRIDE},
      {.op = VMEM_OP_UNMAP, .addr = s->scratch, .bytes = 2 * PAGE, .count = 3, .stride = STRIDE},
  };
  int err = vmem_gather(s->vm, s->scratch, 2 * PAGE, 3, STRIDE, h);
  ops[0].handle = *h;
  return err ? err : vmem_batch(s->vm, ops, 2, NULL, 0, 0);
}

static void end(struct scene *s) {
  OK(vmem_check(s->vm));
  OK(vMemFree(s->vm, s->va, VMEM_FREE_UNMAP));
  OK(vMemFree(s->vm, s->scratch, VMEM_FREE_UNMAP));
  EQ(stats_of(s->vm).used_bytes, 0);
  OK(vmem_check(s->vm));
  OK(vmem_close(s->vm));
}

static void copies(void) {
  struct scene s;
  struct vmem_op op;
  CHECK(scene_open(&s));
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  CHECK(holds(&s, s.scratch) && holds(&s, s.va));
  CHECK(put_byte(s.vm, s.scratch + 5, 99)); /* they are separate pages */
  EQ(get_byte(s.vm, s.va + 5), 1);
  /* Both pieces copy the same unaligned source, which is shorter than a piece: the remainder is zero. */
  op.addr = s.scratch + MIB(4);
  op.count = 2;
  op.src = s.va + PAGE + 5;
  op.src_stride = 0;
  op.src_bytes = 3;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 2; i++) {
    EQ(get_byte(s.vm, s.scratch + MIB(4) + i * STRIDE), 2);
    EQ(get_byte(s.vm, s.scratch + MIB(4) + i * STRIDE + 3), 0);
    EQ(get_byte(s.vm, s.scratch + MIB(4) + i * STRIDE + 2 * PAGE - 1), 0);
  }
  end(&s);
}

/* In pages that were used before, the bytes that no copy writes are zeroed. */
static void copies_into_used_pages(void) {
  struct scene s;
  struct vmem_op op;
  CHECK(scene_open(&s));
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_fill(s.vm, s.scratch, 2 * PAGE, 0x77));
  OK(vMemUnmap(s.vm, s.scratch, 2 * PAGE));
  op.count = 1;
  op.src_bytes = 6;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(get_byte(s.vm, s.scratch + 5), 1);
  EQ(get_byte(s.vm, s.scratch + 6), 0);
  EQ(get_byte(s.vm, s.scratch + PAGE + 5), 0);
  end(&s);
}

#define REFUSED(err)                                                                                                   \
  do {                                                                                                                 \
    before = stats_of(s.vm);                                                                                           \
    EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), err);                                                                     \
    after = stats_of(s.vm);                                                                                            \
    CHECK(same_state(&before, &after));                                                                                \
  } while (0)

static void bad_copies(void) {
  struct scene s;
  struct vmem_op op;
  struct vmem_stats before, after;
  CHECK(scene_open(&s));
  OK(vmem_warm(s.vm, MIB(4)));
  op = copy_to_scratch(&s);
  op.src += PAGE; /* its second page is a hole */
  REFUSED(-EFAULT);
  op = copy_to_scratch(&s);
  op.src_bytes = op.bytes + 1;
  REFUSED(-EINVAL);
  op = copy_to_scratch(&s);
  op.src_stride = UINT64_MAX;
  REFUSED(-EOVERFLOW);
  op = copy_to_scratch(&s);
  op.src = 4096;
  REFUSED(-ENXIO);
  op = copy_to_scratch(&s);
  op.src = op.addr; /* a range that the batch itself is about to map */
  REFUSED(-EBUSY);
  op = copy_to_scratch(&s);
  op.op = VMEM_OP_UNMAP;
  REFUSED(-EINVAL);
  op.op = VMEM_OP_POPULATE;
  op.flags = VMEM_OP_REPLACE;
  REFUSED(-EINVAL);
  end(&s);
}

/* A source cannot be unmapped until the batch has finished, but the ranges between its pieces can. */
static void a_source_is_held(void) {
  struct scene s;
  struct vmem_op op, between;
  struct vmem_after after;
  vmem_ticket t;
  int fd = eventfd(0, EFD_CLOEXEC);
  CHECK(fd >= 0 && scene_open(&s));
  between = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = s.va + 2 * PAGE, .bytes = PAGE};
  OK(vmem_batch(s.vm, &between, 1, NULL, 0, 0));
  after = after_fd(fd);
  op = copy_to_scratch(&s);
  OK(vmem_submit(s.vm, &op, 1, &after, 1, 0, &t));
  EQ(vMemUnmap(s.vm, s.va, PAGE), -EBUSY);
  EQ(vMemUnmap(s.vm, s.va + 2 * STRIDE + PAGE, PAGE), -EBUSY);
  OK(vMemUnmap(s.vm, s.va + 2 * PAGE, PAGE));
  between.addr = s.va + 3 * STRIDE; /* where a fourth piece would be */
  OK(vmem_batch(s.vm, &between, 1, NULL, 0, 0));
  OK(vMemUnmap(s.vm, between.addr, PAGE));
  EQ(get_byte(s.vm, s.va + 5), 1); /* the source can still be read */
  OK(vmem_check(s.vm));
  fire(fd);
  OK(vmem_wait(s.vm, t, -1));
  CHECK(holds(&s, s.scratch));
  OK(vMemUnmap(s.vm, s.va, PAGE));
  close(fd);
  end(&s);
}

static void moves(void) {
  struct scene s;
  struct vmem_op op;
  vmem_handle h, old;
  struct vmem_handle_info info = {.size = sizeof(info)};
  uint64_t used;
  CHECK(scene_open(&s));
  OK(vmem_retain(s.vm, s.va, 2 * PAGE, &old));
  used = stats_of(s.vm).used_bytes;
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(stats_of(s.vm).used_bytes, 2 * used);
  OK(swap(&s, &h));
  CHECK(holds(&s, s.va));
  EQ(vmem_handle_query(s.vm, h, &info), -EBADF);  /* consumed */
  EQ(stats_of(s.vm).used_bytes, used + 2 * PAGE); /* `old` keeps its pages */
  EQ(stats_of(s.vm).mapped_bytes, used);
  CHECK(put_byte(s.vm, s.va + 5, 42));
  OK(vMemMap(s.vm, s.scratch, 2 * PAGE, old, 0, 0));
  EQ(get_byte(s.vm, s.scratch + 5), 1);
  OK(vMemRelease(s.vm, old));
  EQ(stats_of(s.vm).used_bytes, used);
  end(&s);
}

/* Replaces parts of one call's mapping, read-only, with a handle that the caller keeps; then replaces those again. */
static void replaces_in_parts(void) {
  struct scene s;
  vmem_handle h;
  struct vmem_handle_info info = {.size = sizeof(info)};
  struct vmem_range_info r = {.size = sizeof(r)};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 4 * PAGE};
  CHECK(scene_open(&s));
  op.addr = s.scratch;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_fill(s.vm, s.scratch, 4 * PAGE, 7));
  OK(vmem_retain(s.vm, s.scratch + PAGE, 2 * PAGE, &h));
  op = (struct vmem_op){.op = VMEM_OP_MAP,
                        .flags = VMEM_OP_REPLACE | VMEM_OP_READONLY,
                        .addr = s.va + PAGE,
                        .bytes = PAGE,
                        .handle = h,
                        .offset = PAGE};
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(get_byte(s.vm, s.va + 5), 1);
  EQ(get_byte(s.vm, s.va + PAGE + 5), 7);
  OK(vmem_range_query(s.vm, s.va + PAGE, &r));
  EQ(r.flags & (VMEM_RANGE_MAPPED | VMEM_RANGE_READONLY), VMEM_RANGE_MAPPED | VMEM_RANGE_READONLY);
  EQ(vmem_fill(s.vm, s.va + PAGE, 1, 0), -EACCES);
  OK(vmem_handle_query(s.vm, h, &info));
  EQ(info.mappings, 1);
  OK(vmem_check(s.vm));
  op.flags = VMEM_OP_REPLACE;
  op.offset = 0;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_fill(s.vm, s.va + PAGE, PAGE, 8));
  EQ(get_byte(s.vm, s.scratch + PAGE), 8);
  EQ(get_byte(s.vm, s.scratch + 2 * PAGE), 7);
  OK(vmem_handle_query(s.vm, h, &info));
  EQ(info.mappings, 1);
  OK(vMemRelease(s.vm, h)); /* unmaps it */
  EQ(get_byte(s.vm, s.va + 5), 1);
  OK(vmem_range_query(s.vm, s.va + PAGE, &r));
  EQ(r.flags & VMEM_RANGE_MAPPED, 0);
  end(&s);
}

static void bad_replaces(void) {
  struct scene s;
  struct vmem_op op;
  struct vmem_stats before, after;
  vmem_handle h;
  CHECK(scene_open(&s));
  OK(vmem_gather(s.vm, s.va, PAGE, 2, STRIDE, &h));
  op = (struct vmem_op){
      .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .addr = s.va + PAGE, .bytes = 2 * PAGE, .handle = h};
  REFUSED(-EFAULT); /* half of the range is a hole */
  op.addr = s.scratch;
  REFUSED(-EFAULT);
  op.addr = s.va;
  op.count = 2;
  op.stride = STRIDE;
  REFUSED(-ERANGE);
  OK(vmem_drop(s.vm, h));
  REFUSED(-EBADF);
  end(&s);
}

/* While a batch is about to map a handle's pages, neither the handle nor any of its pages can be dropped. */
static void a_handle_is_held(void) {
  struct scene s;
  struct vmem_after after;
  struct vmem_op op;
  vmem_handle h;
  vmem_ticket t;
  int fd = eventfd(0, EFD_CLOEXEC);
  CHECK(fd >= 0 && scene_open(&s));
  after = after_fd(fd);
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_gather(s.vm, s.scratch, 2 * PAGE, 3, STRIDE, &h));
  OK(vMemUnmap(s.vm, s.scratch, 2 * PAGE)); /* only the handle refers to these two pages now */
  op = (struct vmem_op){.op = VMEM_OP_MAP,
                        .flags = VMEM_OP_REPLACE,
                        .addr = s.va,
                        .bytes = 2 * PAGE,
                        .count = 3,
                        .stride = STRIDE,
                        .handle = h};
  OK(vmem_submit(s.vm, &op, 1, &after, 1, 0, &t));
  EQ(vmem_drop(s.vm, h), -EBUSY);
  EQ(vMemRelease(s.vm, h), -EBUSY);
  EQ(vmem_drop_range(s.vm, h, 0, PAGE, 1, 0), -EBUSY);
  EQ(vMemUnmap(s.vm, s.va, PAGE), -EBUSY);
  OK(vmem_check(s.vm));
  fire(fd);
  OK(vmem_wait(s.vm, t, -1));
  CHECK(holds(&s, s.va));
  OK(vmem_drop(s.vm, h));
  close(fd);
  end(&s);
}

/* Another batch cannot consume the handle either; only the batch that maps its pages can. */
static void a_held_handle_is_not_consumed(void) {
  struct scene s;
  struct vmem_after after;
  struct vmem_op op, other;
  vmem_handle h;
  vmem_ticket t;
  int fd = eventfd(0, EFD_CLOEXEC);
  CHECK(fd >= 0 && scene_open(&s));
  after = after_fd(fd);
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_gather(s.vm, s.scratch, 2 * PAGE, 3, STRIDE, &h));
  OK(vMemUnmap(s.vm, s.scratch, 2 * PAGE));
  op = (struct vmem_op){.op = VMEM_OP_MAP,
                        .flags = VMEM_OP_REPLACE,
                        .addr = s.va,
                        .bytes = 2 * PAGE,
                        .count = 3,
                        .stride = STRIDE,
                        .handle = h};
  OK(vmem_submit(s.vm, &op, 1, &after, 1, 0, &t));
  other =
      (struct vmem_op){.op = VMEM_OP_MAP, .flags = VMEM_OP_CONSUME, .addr = s.scratch, .bytes = 2 * PAGE, .handle = h};
  EQ(vmem_batch(s.vm, &other, 1, NULL, 0, 0), -EBUSY);
  other.flags = 0;
  OK(vmem_batch(s.vm, &other, 1, NULL, 0, 0));
  OK(vMemUnmap(s.vm, s.scratch, 2 * PAGE));
  fire(fd);
  OK(vmem_wait(s.vm, t, -1));
  CHECK(holds(&s, s.va));
  OK(vmem_drop(s.vm, h));
  close(fd);
  end(&s);
}

/* Several operations of a batch use one handle, and one of them consumes it. In any order, the caller's reference is
 * dropped once, at the end. */
static void one_handle_twice(void) {
  struct scene s;
  struct vmem_op op;
  vmem_handle h;
  CHECK(scene_open(&s));
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_gather(s.vm, s.scratch, 2 * PAGE, 3, STRIDE, &h));
  for (int consume_first = 1; consume_first >= 0; consume_first--) {
    struct vmem_op ops[] = {
        {.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .addr = s.va, .bytes = 2 * PAGE, .handle = h},
        {.op = VMEM_OP_MAP,
         .flags = VMEM_OP_REPLACE,
         .addr = s.va + STRIDE,
         .bytes = 2 * PAGE,
         .handle = h,
         .offset = 2 * PAGE},
        {.op = VMEM_OP_MAP, .addr = s.scratch + MIB(4), .bytes = 6 * PAGE, .handle = h},
        {.op = VMEM_OP_UNMAP, .addr = s.scratch, .bytes = 2 * PAGE, .count = 3, .stride = STRIDE},
    };
    ops[consume_first ? 0 : 2].flags |= VMEM_OP_CONSUME;
    EQ(vmem_batch(s.vm, ops, 4, NULL, 0, 0), consume_first ? -EBUSY : 0);
    OK(vmem_check(s.vm));
  }
  EQ(vmem_drop(s.vm, h), -EBADF);
  CHECK(holds(&s, s.va));
  for (int i = 0; i < 6; i++) EQ(get_byte(s.vm, s.scratch + MIB(4) + i * PAGE + 5), 1 + i);
  end(&s);
}

/* A batch may copy from a range that it unmaps or replaces itself: it copies the old contents. If the unmap or replace
 * comes before the copy in `ops`, the copy fails with -EBUSY. A range can be unmapped or replaced, not both. */
static void copies_from_what_goes(void) {
  struct scene s;
  struct vmem_op ops[2];
  vmem_handle h;
  CHECK(scene_open(&s));
  OK(vmem_gather(s.vm, s.va, 2 * PAGE, 1, 0, &h));
  ops[0] = copy_to_scratch(&s);
  ops[0].src = s.va + STRIDE;
  ops[0].count = 1;
  ops[1] = (struct vmem_op){
      .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .addr = s.va + STRIDE, .bytes = 2 * PAGE, .handle = h};
  OK(vmem_batch(s.vm, ops, 2, NULL, 0, 0));
  EQ(get_byte(s.vm, s.scratch + 5), 3);
  EQ(get_byte(s.vm, s.va + STRIDE + 5), 1);
  ops[0].addr += STRIDE;
  ops[0].src += STRIDE;
  ops[1] = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = s.va + 2 * STRIDE, .bytes = 2 * PAGE};
  OK(vmem_batch(s.vm, ops, 2, NULL, 0, 0));
  EQ(get_byte(s.vm, s.scratch + STRIDE + PAGE + 5), 6);
  ops[1] = ops[0];
  ops[1].addr += STRIDE;
  ops[1].src = s.va;
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = s.va, .bytes = 2 * PAGE};
  EQ(vmem_batch(s.vm, ops, 2, NULL, 0, 0), -EBUSY);
  ops[1] = (struct vmem_op){.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .addr = s.va, .bytes = 2 * PAGE, .handle = h};
  EQ(vmem_batch(s.vm, ops, 2, NULL, 0, 0), -EBUSY);
  ops[0] = ops[1];
  EQ(vmem_batch(s.vm, ops, 2, NULL, 0, 0), -EBUSY);
  OK(vmem_check(s.vm));
  EQ(get_byte(s.vm, s.va + PAGE + 5), 2);
  OK(vmem_drop(s.vm, h));
  end(&s);
}

/* The GPU waits for the dependencies of a batch only if the batch does nothing but fill. A batch that also replaces
 * waits on the worker, and other batches run in the meantime. */
static void fills_beside_replaces(void) {
  struct scene s;
  struct vmem_op ops[2];
  struct vm_plan p;
  struct vm_ctx *c;
  vmem_handle h;
  int err;
  CHECK(scene_open(&s));
  OK(vmem_gather(s.vm, s.va, 2 * PAGE, 1, 0, &h));
  ops[0] = (struct vmem_op){.op = VMEM_OP_FILL, .addr = s.va, .bytes = PAGE};
  ops[1] = (struct vmem_op){
      .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .addr = s.va + STRIDE, .bytes = 2 * PAGE, .handle = h};
  c = vm_get(s.vm, "test", &err);
  for (size_t n = 1; n < 3; n++) {
    OK(vm_plan_make(c, ops, n, &p));
    EQ(vm_plan_only_fills(&p), n == 1);
    vm_plan_cancel(c, &p);
  }
  vm_put(c);
  OK(vmem_drop(s.vm, h));
  end(&s);
}

/* A context is closed with copies and replaces in progress, whether they wait for a descriptor or not. */
static void closed_under_way(void) {
  for (int waits = 0; waits < 2; waits++) {
    struct scene s;
    struct vmem_after after;
    struct vmem_op op;
    vmem_handle h;
    vmem_ticket t;
    int fd = eventfd(0, EFD_CLOEXEC);
    CHECK(fd >= 0 && scene_open(&s));
    after = after_fd(fd);
    OK(vmem_gather(s.vm, s.va, 2 * PAGE, 3, STRIDE, &h));
    op = copy_to_scratch(&s);
    OK(vmem_submit(s.vm, &op, 1, &after, (size_t)waits, 0, &t));
    op = (struct vmem_op){.op = VMEM_OP_MAP,
                          .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME,
                          .addr = s.scratch + MIB(4),
                          .bytes = PAGE,
                          .handle = h};
    EQ(vmem_submit(s.vm, &op, 1, &after, 1, 0, &t), -EFAULT);
    OK(vmem_drop(s.vm, h));
    OK(vmem_retain(s.vm, s.va + STRIDE, PAGE, &h));
    op.addr = s.va + PAGE;
    op.handle = h;
    if (waits) EQ(vmem_submit(s.vm, &op, 1, &after, 1, 0, &t), -EBUSY); /* a source cannot be replaced */
    op.addr = s.scratch + PAGE;                                         /* already mapped, or about to be */
    vmem_submit(s.vm, &op, 1, &after, 1, 0, &t);
    OK(vmem_close(s.vm));
    close(fd);
  }
}

/* Whichever driver call or allocation of a move fails, nothing has changed. */
static void nth_call_fails(void) {
  for (unsigned kind = 0; kind < 4; kind++)
    for (uint64_t nth = 0; nth < (kind < 3 ? 8 : 16); nth++) {
      static const uint32_t kinds[] = {VMEM_INJECT_MAP, VMEM_INJECT_UNMAP, VMEM_INJECT_FILL, VMEM_INJECT_HEAP};
      const int error = kind < 3 ? EIO : ENOMEM;
      struct scene s;
      struct vmem_stats before, after;
      struct vmem_op op;
      vmem_handle h = 0;
      int err;
      CHECK(scene_open(&s));
      OK(vmem_warm(s.vm, MIB(4)));
      op = copy_to_scratch(&s);
      before = stats_of(s.vm);
      OK(vmem_inject(s.vm, kinds[kind], nth, 1, error));
      err = vmem_batch(s.vm, &op, 1, NULL, 0, 0);
      CHECK(!err || err == -error);
      after = stats_of(s.vm);
      if (err) {
        CHECK(same_state(&before, &after));
        OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
      }
      OK(vmem_inject(s.vm, kinds[kind], nth, 1, error));
      before = stats_of(s.vm);
      for (int i = 0; i < 3; i++) CHECK(put_byte(s.vm, s.scratch + i * STRIDE + 6, 1)); /* to tell the pages apart */
      err = swap(&s, &h);
      CHECK(!err || err == -error);
      OK(vmem_inject(s.vm, 0, 0, 0, 0));
      for (int i = 0; i < 3; i++) EQ(get_byte(s.vm, s.va + i * STRIDE + 6), !err);
      if (err) {
        if (h) OK(vmem_drop(s.vm, h));
        after = stats_of(s.vm);
        CHECK(same_state(&before, &after));
        CHECK(holds(&s, s.scratch));
      }
      CHECK(holds(&s, s.va));
      end(&s);
    }
}

static struct vm_backend fake;
static int unmaps_left, maps_left;

static int fake_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                    bool sparse) {
  if (maps_left-- == 0) return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "mapped on some devices only");
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, sparse);
}

static int fake_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  if (unmaps_left-- == 0) return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "unmapped on some devices only");
  return vm_backend_host.unmap(be, addr, bytes, sparse);
}

static bool shown[2 * MIB(8) / PAGE], violated;
static uint64_t shown_from[2];

/* Behaves like a driver that refuses to map over a mapping or to unmap an unmapped page. */
static int strict(uint64_t addr, uint64_t bytes, bool map) {
  for (uint64_t a = addr; a < addr + bytes; a += PAGE) {
    int which = a - shown_from[1] < MIB(8);
    bool *here = &shown[(a - shown_from[which] + which * MIB(8)) / PAGE];
    if (*here == map) violated = true;
    *here = map;
  }
  return violated ? vm_fail_at(-EIO, addr, bytes, 0, "not what the driver expects") : 0;
}

static int strict_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                      bool sparse) {
  int err = strict(addr, bytes, true);
  return err ? err : vm_backend_host.map(be, addr, bytes, slab, offset, flags, sparse);
}

static int strict_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  int err = strict(addr, bytes, false);
  return err ? err : vm_backend_host.unmap(be, addr, bytes, sparse);
}

/* When replacing a piece of several runs fails halfway, the undo unmaps the new runs before it maps the old ones. */
static void replace_fails_within_a_piece(void) {
  ONLY_HOST();
  for (uint64_t nth = 0; nth < 9; nth++) {
    struct scene s;
    struct vmem_op op;
    struct vm_ctx *c;
    struct vmem_stats before, after;
    vmem_handle h;
    int err;
    CHECK(scene_open(&s));
    memset(shown, 0, sizeof(shown));
    shown_from[0] = s.va;
    shown_from[1] = s.scratch;
    for (int i = 0; i < 6; i++) shown[(i / 2 * STRIDE + i % 2 * PAGE) / PAGE] = true;
    violated = false;
    c = vm_get(s.vm, "test", &err);
    fake = vm_backend_host;
    fake.map = strict_map;
    fake.unmap = strict_unmap;
    c->be = &fake;
    vm_put(c);
    OK(vMemCreate(s.vm, 6 * PAGE, NULL, &h));
    for (uint64_t i = 0; i < 6; i++) OK(vMemMap(s.vm, s.scratch + i * PAGE, PAGE, h, (5 - i) * PAGE, 0)); /* six runs */
    OK(vmem_drop(s.vm, h));
    OK(vmem_fill(s.vm, s.scratch, 6 * PAGE, 77));
    OK(vmem_retain(s.vm, s.scratch, 6 * PAGE, &h));
    before = stats_of(s.vm);
    op = (struct vmem_op){.op = VMEM_OP_MAP,
                          .flags = VMEM_OP_REPLACE,
                          .addr = s.va,
                          .bytes = 2 * PAGE,
                          .count = 3,
                          .stride = STRIDE,
                          .handle = h};
    OK(vmem_inject(s.vm, VMEM_INJECT_MAP, nth, 1, EIO));
    EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), nth < 6 ? -EIO : 0);
    OK(vmem_inject(s.vm, 0, 0, 0, 0));
    CHECK(!violated);
    after = stats_of(s.vm);
    if (nth < 6) CHECK(same_state(&before, &after) && holds(&s, s.va));
    if (nth >= 6) EQ(after.mappings, before.mappings + 3); /* one call per run */
    for (int i = 0; i < 6 && nth >= 6; i++) EQ(BYTE(s.va + i / 2 * STRIDE + i % 2 * PAGE), 77);
    OK(vmem_drop(s.vm, h));
    end(&s);
  }
}

/* Ranges in an unknown state are quarantined with their old and new pages; everything else is unchanged. */
static void unknown_state(void) {
  ONLY_HOST();
  for (int map = 0; map < 2; map++)
    for (int nth = 0; nth < 3; nth++) {
      struct scene s;
      struct vmem_op op;
      struct vm_ctx *c;
      vmem_handle h = 0;
      int err;
      CHECK(scene_open(&s));
      op = copy_to_scratch(&s);
      OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
      c = vm_get(s.vm, "test", &err);
      fake = vm_backend_host;
      fake.map = fake_map;
      fake.unmap = fake_unmap;
      c->be = &fake;
      vm_put(c);
      maps_left = map ? nth : 1000;
      unmaps_left = map ? 1000 : nth;
      EQ(swap(&s, &h), -ENOTRECOVERABLE);
      OK(vmem_check(s.vm));
      EQ(stats_of(s.vm).quarantined_bytes, 4 * PAGE);
      for (int i = 0; i < 6; i++)
        if (i / 2 != nth) EQ(BYTE(s.va + i / 2 * STRIDE + i % 2 * PAGE + 5), 1 + i);
      CHECK(holds(&s, s.scratch));
      EQ(vMemUnmap(s.vm, s.va + nth * STRIDE, PAGE), -ENOTRECOVERABLE);
      OK(vmem_drop(s.vm, h));
      OK(vMemUnmap(s.vm, s.scratch, 2 * PAGE));
      OK(vmem_check(s.vm));
      EQ(stats_of(s.vm).quarantined_bytes, 4 * PAGE);
      OK(vmem_close(s.vm));
    }
}

/* Pages with unknown contents cannot replace mapped pages. */
static void never_mapped(void) {
  struct scene s;
  struct vm_ctx *c;
  struct vmem_op op;
  vmem_handle h;
  int err;
  ONLY_HOST();
  CHECK(scene_open(&s));
  c = vm_get(s.vm, "test", &err);
  fake = vm_backend_host;
  fake.discard = NULL;
  c->be = &fake;
  c->info->fresh_is_zero = false;
  vm_put(c);
  OK(vmem_trim(s.vm, 0, NULL));
  OK(vMemCreate(s.vm, MIB(128), NULL, &h));
  op = (struct vmem_op){
      .op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .addr = s.va, .bytes = PAGE, .handle = h, .offset = MIB(127)};
  EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), -EINVAL);
  CHECK(strstr(vmem_last_error(), "never mapped"));
  CHECK(holds(&s, s.va));
  OK(vmem_drop(s.vm, h));
  end(&s);
}

/* With a back end that zeroes nothing itself, a copy to part of a used page leaves no old contents around it. */
static void copies_into_dirty_pages(void) {
  struct scene s;
  struct vm_ctx *c;
  struct vmem_op op;
  int err;
  ONLY_HOST();
  CHECK(scene_open(&s));
  c = vm_get(s.vm, "test", &err);
  fake = vm_backend_host;
  fake.discard = NULL;
  c->be = &fake;
  c->info->fresh_is_zero = false;
  vm_put(c);
  op = copy_to_scratch(&s);
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 3; i++) OK(vmem_fill(s.vm, s.scratch + i * STRIDE, 2 * PAGE, 0x77));
  for (int round = 0; round < 3; round++) {
    OK(vMemUnmap(s.vm, s.scratch, 2 * PAGE));
    op.count = 1;
    op.src_bytes = round == 1 ? 2 * PAGE : 6;
    if (round == 2) { /* a failed copy leaves the pages as dirty as they were */
      OK(vmem_inject(s.vm, VMEM_INJECT_FILL, 0, 1, EIO));
      op.src_bytes = 0;
      EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), -EIO);
      op = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = s.scratch, .bytes = 2 * PAGE};
    }
    OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
    EQ(BYTE(s.scratch + 5), round == 2 ? 0 : 1);
    if (round != 1) EQ(BYTE(s.scratch + 6), 0);
    EQ(BYTE(s.scratch + PAGE + 5), round == 1 ? 2 : 0);
    if (round != 1) EQ(BYTE(s.scratch + 2 * PAGE - 1), 0);
    OK(vmem_fill(s.vm, s.scratch, 2 * PAGE, 0x77));
  }
  end(&s);
}

/* Gathering pages that another batch is changing fails, and leaves no reference to the pages before them. */
static void gathers_beside_a_batch(void) {
  struct scene s;
  struct vmem_after after;
  struct vmem_op op;
  vmem_handle h;
  vmem_ticket t;
  int fd = eventfd(0, EFD_CLOEXEC);
  CHECK(fd >= 0 && scene_open(&s));
  after = after_fd(fd);
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = s.va + PAGE, .bytes = PAGE};
  OK(vmem_submit(s.vm, &op, 1, &after, 1, 0, &t));
  EQ(vmem_retain(s.vm, s.va, 2 * PAGE, &h), -EBUSY);
  EQ(vmem_gather(s.vm, s.va, PAGE, 2, PAGE, &h), -EBUSY);
  OK(vmem_check(s.vm));
  fire(fd);
  OK(vmem_wait(s.vm, t, -1));
  EQ(vmem_retain(s.vm, s.va, 2 * PAGE, &h), -EFAULT);
  close(fd);
  end(&s);
}

/* Pages move between device and host memory at the same address. */
static void between_locations(void) {
  struct scene s;
  struct vmem_op op;
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_handle_info hi = {.size = sizeof(hi)};
  vmem_handle h;
  CHECK(scene_open(&s));
  OK(vmem_query(s.vm, &info));
  op = copy_to_scratch(&s);
  op.location = VMEM_HOST;
  if (!(info.caps & VMEM_CAP_HOST_PAGES)) {
    EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), -EOPNOTSUPP);
    OK(vmem_close(s.vm));
    return;
  }
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(swap(&s, &h));
  CHECK(holds(&s, s.va));
  OK(vmem_retain(s.vm, s.va, 2 * PAGE, &h));
  OK(vmem_handle_query(s.vm, h, &hi));
  EQ(hi.location, VMEM_HOST);
  OK(vmem_drop(s.vm, h));
  op.location = VMEM_DEVICE;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0)); /* a copy back in device memory */
  OK(swap(&s, &h));
  CHECK(holds(&s, s.va));
  end(&s);
}

MAIN(TEST(copies), TEST(copies_into_used_pages), TEST(bad_copies), TEST(a_source_is_held), TEST(moves),
     TEST(replaces_in_parts), TEST(bad_replaces), TEST(a_handle_is_held), TEST(a_held_handle_is_not_consumed),
     TEST(one_handle_twice), TEST(copies_from_what_goes), TEST(fills_beside_replaces), TEST(closed_under_way),
     TEST(nth_call_fails), TEST(unknown_state), TEST(never_mapped), TEST(copies_into_dirty_pages),
     TEST(gathers_beside_a_batch), TEST(replace_fails_within_a_piece), TEST(between_locations))
