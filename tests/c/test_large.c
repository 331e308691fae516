/* SPDX-License-Identifier: MIT */
/* Description: 2 MiB pages next to small ones in one context: they are never split and have their own slabs. */
#include <unistd.h>

#include "api/api.h"
#include "check.h"

#define LARGE MIB(2)

struct scene {
  vmem_t vm;
  uint64_t va;
};

/* Maps two large pages, then three small ones, and writes a byte to each granule. */
static bool scene_open(struct scene *s) {
  struct vmem_reserve_opts o = {.size = sizeof(o), .flags = VMEM_RESERVE_LARGE};
  struct vmem_op ops[] = {
      {.op = VMEM_OP_POPULATE, .bytes = 2 * LARGE, .page_size = LARGE},
      {.op = VMEM_OP_POPULATE, .bytes = 3 * PAGE},
  };
  s->vm = open_vm(PAGE);
  if (vMemReserve(s->vm, 16 * LARGE, &o, &s->va)) return false;
  ops[0].addr = s->va;
  ops[1].addr = s->va + 2 * LARGE;
  if (vmem_batch(s->vm, ops, 2, NULL, 0, 0)) return false;
  for (uint64_t a = 0; a < 2 * LARGE + 3 * PAGE; a += PAGE)
    if (!put_byte(s->vm, s->va + a, 1 + (int)(a / PAGE))) return false;
  /* Background zeroing uses the slab's own mapping, which must not be counted as the batch's. */
  for (int i = 0; i < 20000 && stats_of(s->vm).dirty_bytes; i++) usleep(1000);
  return !stats_of(s->vm).dirty_bytes;
}

static bool holds(const struct scene *s, uint64_t from, uint64_t to) {
  for (uint64_t a = from; a < to; a += PAGE)
    if (get_byte(s->vm, s->va + a) != 1 + (int)(a / PAGE)) return false;
  return true;
}

static uint32_t flags_at(const struct scene *s, uint64_t offset) {
  struct vmem_range_info r = {.size = sizeof(r)};
  return vmem_range_query(s->vm, s->va + offset, &r) ? ~0u : r.flags;
}

static void end(struct scene *s) {
  OK(vmem_check(s->vm));
  OK(vMemFree(s->vm, s->va, VMEM_FREE_UNMAP));
  EQ(stats_of(s->vm).used_bytes, 0);
  OK(vmem_check(s->vm));
  OK(vmem_close(s->vm));
}

static void never_cut(void) {
  static const struct {
    uint64_t offset, bytes;
  } cuts[] = {{0, PAGE},
              {PAGE, PAGE},
              {LARGE - PAGE, 2 * PAGE},
              {0, LARGE + PAGE},
              {2 * LARGE - PAGE, 2 * PAGE},
              {PAGE, 2 * LARGE - PAGE}};
  struct scene s;
  CHECK(scene_open(&s));
  for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
    struct vmem_stats before = stats_of(s.vm), after;
    EQ(vMemUnmap(s.vm, s.va + cuts[i].offset, cuts[i].bytes), -EINVAL);
    CHECK(strstr(vmem_last_error(), "cuts the page of 2097152 bytes"));
    after = stats_of(s.vm);
    CHECK(same_state(&before, &after));
  }
  EQ(flags_at(&s, PAGE) & VMEM_RANGE_LARGE, VMEM_RANGE_LARGE);
  EQ(flags_at(&s, 2 * LARGE) & VMEM_RANGE_LARGE, 0);
  OK(vmem_fill(s.vm, s.va + 3 * PAGE, PAGE, 4));
  CHECK(holds(&s, 0, 2 * LARGE + 3 * PAGE));
  OK(vMemUnmap(s.vm, s.va + 2 * LARGE + PAGE, PAGE)); /* small pages can be unmapped in part of their run */
  OK(vMemUnmap(s.vm, s.va, LARGE));
  EQ(flags_at(&s, 0) & (VMEM_RANGE_MAPPED | VMEM_RANGE_LARGE), 0);
  CHECK(holds(&s, LARGE, 2 * LARGE + PAGE));
  end(&s);
}

/* Part of a large page, or all of it at an unaligned address, can be mapped elsewhere, with small entries. */
static void parts_elsewhere(void) {
  struct scene s;
  struct vmem_op op = {.op = VMEM_OP_MAP, .flags = VMEM_OP_READONLY};
  uint64_t at, calls;
  CHECK(scene_open(&s));
  at = s.va + 8 * LARGE;
  OK(vmem_retain(s.vm, s.va, 2 * LARGE + PAGE, &op.handle));
  op.addr = at;
  op.bytes = LARGE + 5 * PAGE; /* a large page and part of the next */
  calls = stats_of(s.vm).mappings;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(stats_of(s.vm).mappings - calls, 2);
  EQ(flags_at(&s, 8 * LARGE) & VMEM_RANGE_LARGE, VMEM_RANGE_LARGE);
  EQ(flags_at(&s, 9 * LARGE) & (VMEM_RANGE_MAPPED | VMEM_RANGE_LARGE), VMEM_RANGE_MAPPED);
  EQ(get_byte(s.vm, at + LARGE + 4 * PAGE), 1 + 32 + 4);
  OK(vMemUnmap(s.vm, at + LARGE + PAGE, PAGE));
  EQ(vMemUnmap(s.vm, at + PAGE, PAGE), -EINVAL);
  op.addr = s.va + 12 * LARGE + PAGE;
  op.bytes = LARGE;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(flags_at(&s, 12 * LARGE + PAGE) & VMEM_RANGE_LARGE, 0);
  OK(vMemUnmap(s.vm, op.addr + PAGE, LARGE - 2 * PAGE));
  EQ(get_byte(s.vm, op.addr + LARGE - PAGE), 32);
  OK(vMemUnmap(s.vm, op.addr, PAGE));
  OK(vMemUnmap(s.vm, op.addr + LARGE - PAGE, PAGE));
  op.bytes = 2 * LARGE; /* the same for everything between two boundaries */
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(flags_at(&s, 13 * LARGE) & VMEM_RANGE_LARGE, 0);
  OK(vMemUnmap(s.vm, s.va + 13 * LARGE + PAGE, PAGE));
  /* From the middle of a large page: one call maps its remainder, another the next page, each with its own entries. */
  op.addr = at + 2 * LARGE + 30 * PAGE;
  op.offset = 30 * PAGE;
  op.bytes = 2 * PAGE + LARGE + PAGE;
  calls = stats_of(s.vm).mappings;
  OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  EQ(stats_of(s.vm).mappings - calls, 3);
  EQ(flags_at(&s, 10 * LARGE + 30 * PAGE) & VMEM_RANGE_LARGE, 0);
  EQ(flags_at(&s, 11 * LARGE) & VMEM_RANGE_LARGE, VMEM_RANGE_LARGE);
  for (unsigned i = 30; i < 65; i++) EQ(get_byte(s.vm, at + 2 * LARGE + i * PAGE), 1 + i);
  OK(vMemUnmap(s.vm, at + 2 * LARGE + 31 * PAGE, PAGE));
  EQ(stats_of(s.vm).mappings - calls, 3); /* the large page is not part of the call that was split */
  OK(vmem_drop(s.vm, op.handle));
  CHECK(holds(&s, 0, 2 * LARGE + 3 * PAGE));
  end(&s);
}

/* A large page mapped by two calls has small entries, and its two handles can be released separately. Mapped again by
 * one call, it is a large page. */
static void halves(void) {
  struct scene s;
  vmem_handle h[2];
  uint64_t at;
  CHECK(scene_open(&s));
  at = s.va + 8 * LARGE;
  for (uint64_t round = 0; round < 2; round++) {
    for (uint64_t i = 0; i < 2; i++) {
      OK(vmem_retain(s.vm, s.va + i * LARGE / 2, LARGE / 2, &h[i]));
      OK(vMemMap(s.vm, at + i * LARGE / 2, LARGE / 2, h[i], 0, 0));
    }
    EQ(flags_at(&s, 8 * LARGE) & VMEM_RANGE_LARGE, 0);
    if (!round) {
      OK(vMemRelease(s.vm, h[1]));
      EQ(get_byte(s.vm, at + LARGE / 2 - PAGE), 16);
      OK(vMemRelease(s.vm, h[0]));
      continue;
    }
    for (uint64_t i = 0; i < 2; i++) OK(vmem_drop(s.vm, h[i]));
  }
  OK(vMemUnmap(s.vm, at, LARGE));
  OK(vmem_retain(s.vm, s.va, LARGE, &h[0]));
  OK(vMemMap(s.vm, at, LARGE, h[0], 0, 0));
  EQ(flags_at(&s, 8 * LARGE) & VMEM_RANGE_LARGE, VMEM_RANGE_LARGE);
  EQ(vMemUnmap(s.vm, at, LARGE / 2), -EINVAL);
  OK(vMemRelease(s.vm, h[0]));
  end(&s);
}

static void misaligned(void) {
  struct scene s;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = LARGE, .page_size = LARGE};
  CHECK(scene_open(&s));
  op.addr = s.va + 8 * LARGE + PAGE;
  EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), -EINVAL);
  op.addr = s.va + 8 * LARGE;
  op.bytes = LARGE + PAGE;
  EQ(vmem_batch(s.vm, &op, 1, NULL, 0, 0), -EINVAL);
  end(&s);
}

/* Small pages are replaced at their address by a large one, and a large one by small ones. */
static void promotion(void) {
  struct scene s;
  struct vmem_op up[] = {{.op = VMEM_OP_POPULATE, .bytes = LARGE, .page_size = LARGE, .flags = VMEM_OP_COPY}};
  struct vmem_op swap[] = {{.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .bytes = LARGE},
                           {.op = VMEM_OP_UNMAP, .bytes = LARGE}};
  struct vmem_op small = {.op = VMEM_OP_POPULATE, .bytes = 29 * PAGE};
  uint64_t used;
  CHECK(scene_open(&s));
  small.addr = s.va + 2 * LARGE + 3 * PAGE;
  OK(vmem_batch(s.vm, &small, 1, NULL, 0, 0));
  for (unsigned i = 67; i < 96; i++) CHECK(put_byte(s.vm, s.va + i * PAGE, 1 + (int)i));
  used = stats_of(s.vm).used_bytes;
  for (int round = 0; round < 2; round++) {
    swap[0].addr = up[0].src = s.va + 2 * LARGE;
    swap[1].addr = up[0].addr = s.va + 8 * LARGE;
    up[0].page_size = round ? PAGE : LARGE;
    OK(vmem_batch(s.vm, up, 1, NULL, 0, 0));
    OK(vmem_retain(s.vm, up[0].addr, LARGE, &swap[0].handle));
    swap[0].addr += PAGE; /* a replace does not cut either */
    swap[0].bytes -= PAGE;
    if (round) EQ(vmem_batch(s.vm, swap, 2, NULL, 0, 0), -EINVAL);
    swap[0].addr -= PAGE;
    swap[0].bytes += PAGE;
    OK(vmem_batch(s.vm, swap, 2, NULL, 0, 0));
    CHECK(holds(&s, 0, 3 * LARGE));
    EQ(flags_at(&s, 2 * LARGE) & VMEM_RANGE_LARGE, round ? 0 : VMEM_RANGE_LARGE);
    EQ(stats_of(s.vm).used_bytes, used);
    OK(vmem_check(s.vm));
  }
  OK(vMemUnmap(s.vm, s.va + 2 * LARGE + PAGE, PAGE));
  end(&s);
}

/* Empty slabs of one page size are returned to the driver if memory for the other page size is short. */
static void memory_goes_over(void) {
  struct vmem_open_opts o = {
      .size = sizeof(o), .granule = PAGE, .mem_limit = MIB(64), .slab_size = MIB(16), .pool_high = VMEM_KEEP_ALL};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(48)}, more;
  vmem_t vm;
  OK(open_opts(&o, &vm));
  OK(vMemReserve(vm, MIB(128), NULL, &op.addr));
  for (int round = 0; round < 4; round++) {
    op.page_size = round & 1 ? LARGE : PAGE;
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    more = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = op.addr + MIB(48), .bytes = MIB(18), .page_size = LARGE};
    EQ(vmem_batch(vm, &more, 1, NULL, 0, 0), -ENOMEM);
    OK(vMemUnmap(vm, op.addr, op.bytes));
    OK(vmem_check(vm));
  }
  OK(vmem_close(vm));
}

/* A handle made of large pages. */
static void handles(void) {
  struct scene s;
  struct vmem_create_opts o = {.size = sizeof(o), .page_size = LARGE};
  vmem_handle h;
  CHECK(scene_open(&s));
  OK(vMemCreate(s.vm, 2 * LARGE, &o, &h));
  EQ(vMemMap(s.vm, s.va + 8 * LARGE + PAGE, LARGE, h, 0, 0), -EINVAL);
  EQ(vMemMap(s.vm, s.va + 8 * LARGE, LARGE, h, PAGE, 0), -EINVAL);
  OK(vMemMap(s.vm, s.va + 8 * LARGE, 2 * LARGE, h, 0, 0));
  EQ(flags_at(&s, 8 * LARGE) & VMEM_RANGE_LARGE, VMEM_RANGE_LARGE);
  EQ(vMemUnmap(s.vm, s.va + 8 * LARGE, PAGE), -EINVAL);
  OK(vMemUnmap(s.vm, s.va + 9 * LARGE, LARGE));
  OK(vMemRelease(s.vm, h));
  end(&s);
}

static struct vm_backend fake;
static uint64_t remapped, longest; /* calls, bytes */
static bool cuts;

static int fake_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags) {
  cuts |= (addr | bytes) & (LARGE - 1);
  remapped++;
  if (bytes > longest) longest = bytes;
  return vm_backend_host.map(be, addr, bytes, slab, offset, flags, false);
}

/* Wherever the range starts and ends, joining never splits a large page, not even if a batch is filling part of it,
 * and makes no call longer than the back end accepts. */
static void joined_whole(void) {
  struct scene s;
  struct vm_ctx *c;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = LARGE, .page_size = LARGE};
  struct vmem_op fill = {.op = VMEM_OP_FILL, .bytes = 3 * PAGE};
  struct vm_plan p;
  uint64_t at;
  int err;
  ONLY_HOST();
  CHECK(scene_open(&s));
  c = vm_get(s.vm, "test", &err);
  fake = vm_backend_host;
  fake.remap = fake_remap;
  c->be = &fake;
  c->info->bind_bytes = 4 * LARGE;
  remapped = longest = 0;
  cuts = false;
  at = s.va + 8 * LARGE;
  for (op.addr = at; op.addr < at + 6 * LARGE; op.addr += LARGE) OK(vmem_batch(s.vm, &op, 1, NULL, 0, 0));
  OK(vmem_join(s.vm, at + PAGE, LARGE, NULL));
  EQ(remapped, 0);
  OK(vmem_join(s.vm, at + PAGE, 3 * LARGE, NULL));
  EQ(remapped, 1);
  EQ(longest, 2 * LARGE);
  fill.addr = at + 4 * LARGE - 2 * PAGE;
  OK(vm_plan_make(c, &fill, 1, &p)); /* in the fourth and the fifth page */
  OK(vmem_join(s.vm, at, 6 * LARGE, NULL));
  EQ(remapped, 2);
  EQ(longest, 3 * LARGE);
  vm_plan_cancel(c, &p);
  OK(vmem_join(s.vm, at, 6 * LARGE, NULL));
  EQ(remapped, 4);
  EQ(longest, 4 * LARGE);
  CHECK(!cuts);
  OK(vmem_join(s.vm, at, 6 * LARGE, NULL));
  EQ(remapped, 4);
  OK(vmem_check(s.vm));
  vm_put(c);
  end(&s);
}

MAIN(TEST(never_cut), TEST(parts_elsewhere), TEST(halves), TEST(misaligned), TEST(promotion), TEST(memory_goes_over),
     TEST(handles), TEST(joined_whole))
