/* SPDX-License-Identifier: MIT */
/*
 * Description: 2 MiB entries for small pages: where they are created, what splits and joins them, and what a failure of
 * each driver call does. "host" refuses to change part of an entry, as a GPU's driver does. On host all tests
 * run twice, the second time with a driver that accepts a batch in one call and splits entries itself.
 */
#include <pthread.h>
#include <sys/eventfd.h>

#include "api/api.h"
#include "check.h"

#define BLOCK MIB(2)
#define PAGES 32 /* per block */

static vmem_t vm;
static uint64_t va;
static bool one_call;                 /* the driver accepts a batch in one call */
static bool bound;                    /* host does */
static const struct vm_backend *real; /* the back end that one_call replaces */
static int fail_at = -1;              /* number of bind calls that pass before one fails; < 0: none fails */
static size_t most_ops = SIZE_MAX;    /* per call */

/* Counts the first operations that change adjacent existing mappings; a MAP stands alone. */
static size_t stretch(const struct vm_bind_op *ops, size_t n) {
  size_t k = 1;
  while (k < n && ops[k].kind != VM_BIND_MAP && ops[k].addr == ops[k - 1].addr + ops[k - 1].bytes) k++;
  return ops[0].kind == VM_BIND_MAP ? 1 : k;
}

/* Creates only small entries in a sparse reservation. */
static int map_one(void *be, const struct vm_bind_op *op) {
  uint64_t n = op->sparse && op->bytes >= BLOCK ? op->bytes - PAGE : op->bytes;
  int err = vm_backend_host.map(be, op->addr, n, op->slab, op->offset, op->flags, op->sparse);
  if (err || n == op->bytes) return err;
  return vm_backend_host.map(be, op->addr + n, PAGE, op->slab, op->offset + n, op->flags, true);
}

/* Executes one driver call. Unmaps each stretch in one piece: host refuses that if it covers only part of an entry. */
static int bind_call(void *be, const struct vm_bind_op *ops, size_t n) {
  int err = 0;
  for (size_t i = 0, k; i < n && !err; i += k) {
    uint64_t end;
    k = stretch(ops + i, n - i);
    end = ops[i + k - 1].addr + ops[i + k - 1].bytes;
    if (ops[i].kind != VM_BIND_MAP) err = vm_backend_host.unmap(be, ops[i].addr, end - ops[i].addr, ops[i].sparse);
    for (size_t j = i; j < i + k && !err; j++)
      if (ops[j].kind != VM_BIND_UNMAP) err = map_one(be, &ops[j]);
  }
  return err;
}

static bool in_first(const struct vm_bind_op *op) { return op->addr >= va && op->addr - va < 16 * BLOCK; }

/* Makes one call for consecutive operations in the same reservation, at most most_ops of them. */
static int bind_parts(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  int err = 0;
  for (size_t i = 0, k; i < n && !err; i += k) {
    struct vm_bind_result part;
    for (k = 1; i + k < n && k < most_ops && in_first(&ops[i + k]) == in_first(&ops[i]);) k++;
    r->done = i;
    if (fail_at >= 0 && fail_at-- == 0)
      err = vm_fail_at(-EIO, ops[i].addr, ops[i].bytes, 0, "refused");
    else
      err = bound ? bind_call(be, ops + i, k) : real->bind(be, ops + i, k, &part);
  }
  return err;
}

static int open_it(struct vmem_open_opts *o) {
  static struct vm_backend parted;
  struct vmem_info info = {.size = sizeof(info)};
  struct vm_ctx *c;
  int ignored, err = open_opts(o, &vm);
  if (err) return err;
  if (!(c = vm_get(vm, "test", &ignored))) return ignored;
  if (bound || c->be->bind) {
    real = c->be;
    parted = *c->be;
    parted.bind = bind_parts;
    c->be = &parted;
    c->info->pub.caps |= VMEM_CAP_ONE_CALL;
  }
  vm_put(c);
  if ((err = vmem_query(vm, &info))) return err;
  one_call = info.caps & VMEM_CAP_ONE_CALL;
  return 0;
}

static void open_entries(uint64_t mem_limit, uint32_t flags) {
  struct vmem_open_opts o = {
      .size = sizeof(o), .granule = PAGE, .flags = VMEM_OPEN_LARGE_ENTRIES, .mem_limit = mem_limit};
  struct vmem_reserve_opts r = {.size = sizeof(r), .flags = flags};
  OK(open_it(&o));
  OK(vMemReserve(vm, 16 * BLOCK, &r, &va));
}

static void end(void) {
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  EQ(stats_of(vm).large_entries, 0);
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Checks that a batch was one call or, without one_call, this many map and unmap calls. */
static bool calls_since(const struct vmem_stats *before, uint64_t maps, uint64_t unmaps) {
  struct vmem_stats now = stats_of(vm);
  uint64_t mapped = now.map_calls - before->map_calls, unmapped = now.unmap_calls - before->unmap_calls;
  return one_call ? mapped + unmapped == 1 : mapped == maps && unmapped == unmaps;
}

static uint64_t entry_at(uint64_t offset) {
  struct vmem_range_info r = {.size = sizeof(r)};
  return vmem_range_query(vm, va + offset, &r) ? ~0ull : r.entry_bytes;
}

static int populate_at(uint64_t offset, uint64_t bytes, uint32_t flags) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .flags = flags, .addr = va + offset, .bytes = bytes};
  return vmem_batch(vm, &op, 1, NULL, 0, 0);
}

static int unmap_at(uint64_t offset, uint64_t bytes, uint32_t flags) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .flags = flags, .addr = va + offset, .bytes = bytes};
  return vmem_batch(vm, &op, 1, NULL, 0, 0);
}

/* The byte for a page at this offset. mark writes one into each page of a range, marked checks them. */
static int mark_of(uint64_t offset) { return 1 + (int)(offset / PAGE) % 251; }

static bool mark(uint64_t offset, uint64_t bytes) {
  for (uint64_t at = offset; at < offset + bytes; at += PAGE)
    if (!put_byte(vm, va + at + 7, mark_of(at))) return false;
  return true;
}

static bool marked(uint64_t offset, uint64_t bytes) {
  for (uint64_t at = offset; at < offset + bytes; at += PAGE)
    if (get_byte(vm, va + at + 7) != mark_of(at)) return false;
  return true;
}

/* True if the driver has a large entry there: it refuses to unmap part of it. Otherwise maps the page again. */
static bool driver_has_large(uint64_t offset) {
  uint64_t at = va + offset + PAGE;
  struct vm_pte pte;
  struct vm_ctx *c;
  int err = 0;
  if (!(c = vm_get(vm, "test", &err))) return false;
  pthread_mutex_lock(&c->lock);
  pte = *vm_pte(c, vm_space_find(c, at), at);
  pthread_mutex_unlock(&c->lock);
  err = c->be->unmap(c->bes, at, PAGE, false);
  if (!err && c->be->map(c->bes, at, PAGE, c->phys->slabs[pte.slab]->priv, (uint64_t)pte.unit * PAGE,
                         pte.flags & PTE_READONLY ? VMEM_MAP_READONLY : 0, false))
    failures_here++;
  vm_put(c);
  return err;
}

/* Freed pages keep their contents, as on a GPU. They are zeroed in the background or when they are mapped again. */
static void keep_contents(bool background) {
  static struct vm_backend fake;
  struct vm_ctx *c;
  int err;
  if (!(c = vm_get(vm, "test", &err))) return;
  fake = *c->be;
  fake.discard = NULL;
  c->be = &fake;
  c->phys->clean.background = background;
  vm_put(c);
}

/* Maps two blocks with large entries, and marks them. */
static void two_blocks(void) {
  open_entries(0, 0);
  OK(populate_at(0, 2 * BLOCK, 0));
  EQ(stats_of(vm).large_entries, 2);
  CHECK(mark(0, 2 * BLOCK));
}

static void whole_blocks_get_them(void) {
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_stats before;
  open_entries(0, 0);
  OK(vmem_query(vm, &info));
  CHECK(info.caps & VMEM_CAP_LARGE_ENTRIES && info.caps & VMEM_CAP_JOIN);
  OK(vmem_warm(vm, MIB(64)));
  for (int i = 0; i < 20000 && stats_of(vm).dirty_bytes; i++) usleep(1000);
  before = stats_of(vm);
  OK(populate_at(5 * PAGE, 3 * BLOCK, 0)); /* a head, two blocks, a tail */
  CHECK(calls_since(&before, 3, 0));
  EQ(stats_of(vm).large_entries, 2);
  EQ(entry_at(0), 0);
  EQ(entry_at(5 * PAGE), PAGE);
  EQ(entry_at(BLOCK), BLOCK);
  EQ(entry_at(3 * BLOCK - PAGE), BLOCK);
  EQ(entry_at(3 * BLOCK), PAGE);
  before = stats_of(vm);
  OK(populate_at(8 * BLOCK, 4 * BLOCK, 0));
  CHECK(calls_since(&before, 1, 0));
  EQ(stats_of(vm).large_entries, 6);
  OK(unmap_at(9 * BLOCK, 2 * BLOCK, 0)); /* complete blocks are unmapped without a split */
  EQ(stats_of(vm).large_entries, 4);
  EQ(stats_of(vm).splits, 0);
  end();
}

/* The records match the driver. */
static void as_recorded(void) {
  two_blocks();
  CHECK(driver_has_large(0) && driver_has_large(BLOCK));
  OK(unmap_at(3 * PAGE, PAGE, VMEM_OP_SPLIT));
  CHECK(!driver_has_large(0) && driver_has_large(BLOCK));
  for (uint64_t i = 0; i < PAGES; i++) OK(populate_at(4 * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  CHECK(mark(4 * BLOCK, BLOCK) && !driver_has_large(4 * BLOCK));
  OK(vmem_join(vm, va, 6 * BLOCK, NULL));
  CHECK(!driver_has_large(0) && driver_has_large(BLOCK) && driver_has_large(4 * BLOCK));
  CHECK(marked(0, 3 * PAGE) && marked(4 * PAGE, 2 * BLOCK - 4 * PAGE) && marked(4 * BLOCK, BLOCK));
  end();
}

/* Mappings of a handle get large entries too, at any offset in the handle, unless the alignment of address and memory
 * differs. */
static void handles_get_them(void) {
  vmem_handle h;
  open_entries(0, 0);
  OK(vMemCreate(vm, 3 * BLOCK, NULL, &h));
  OK(vMemMap(vm, va, 3 * BLOCK, h, 0, 0));
  EQ(stats_of(vm).large_entries, 3);
  OK(vMemMap(vm, va + 4 * BLOCK + 3 * PAGE, 2 * BLOCK, h, 3 * PAGE, 0));
  EQ(stats_of(vm).large_entries, 4);
  EQ(entry_at(5 * BLOCK), BLOCK);
  OK(vMemMap(vm, va + 8 * BLOCK, 2 * BLOCK, h, PAGE, 0));
  EQ(stats_of(vm).large_entries, 4);
  OK(vMemUnmap(vm, va + 8 * BLOCK + PAGE, PAGE));
  OK(vmem_drop(vm, h));
  end();
}

static void without_the_flag(void) {
  struct vmem_info info = {.size = sizeof(info)};
  vm = open_vm(PAGE);
  OK(vmem_query(vm, &info));
  EQ(info.caps & VMEM_CAP_LARGE_ENTRIES, 0);
  OK(vMemReserve(vm, 16 * BLOCK, NULL, &va));
  OK(populate_at(0, 2 * BLOCK, 0));
  EQ(stats_of(vm).large_entries, 0);
  EQ(entry_at(0), PAGE);
  OK(vMemUnmap(vm, va + PAGE, PAGE));
  OK(unmap_at(3 * PAGE, PAGE, VMEM_OP_SPLIT)); /* there is nothing to split */
  EQ(stats_of(vm).splits, 0);
  end();
}

static void bad_flags(void) {
  struct vmem_op op = {.op = VMEM_OP_MAP, .flags = VMEM_OP_SPLIT, .bytes = PAGE};
  open_entries(0, 0);
  op.addr = va;
  OK(vMemCreate(vm, PAGE, NULL, &op.handle));
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -EINVAL);
  CHECK(strstr(vmem_last_error(), "VMEM_OP_SPLIT without VMEM_OP_REPLACE"));
  EQ(populate_at(0, PAGE, VMEM_OP_SPLIT), -EINVAL);
  op = (struct vmem_op){.op = VMEM_OP_JOIN, .flags = VMEM_OP_SPLIT, .addr = va, .bytes = PAGE};
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -EINVAL);
  op.flags = 0;
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -EFAULT); /* nothing is mapped */
  op.flags = VMEM_OP_HOLES;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_close(vm));
}

/* Without VMEM_OP_SPLIT, changing part of an entry fails with a message that names the entry, and nothing changes. */
static void never_cut_without_it(void) {
  static const struct {
    uint64_t offset, bytes;
  } cuts[] = {{0, PAGE},
              {PAGE, PAGE},
              {BLOCK - PAGE, PAGE},
              {BLOCK - PAGE, 2 * PAGE},
              {0, BLOCK + PAGE},
              {PAGE, 2 * BLOCK - PAGE}};
  struct vmem_op ops[2] = {{.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE},
                           {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_HOLES}};
  struct vmem_stats before, after;
  vmem_handle h;
  two_blocks();
  OK(populate_at(4 * BLOCK, 4 * PAGE, 0));
  OK(vmem_retain(vm, va + PAGE, PAGE, &h));
  OK(vmem_retain(vm, va + 4 * BLOCK, PAGE, &ops[0].handle));
  for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
    before = stats_of(vm);
    EQ(vMemUnmap(vm, va + cuts[i].offset, cuts[i].bytes), -EINVAL);
    CHECK(strstr(vmem_last_error(), "VMEM_OP_SPLIT"));
    EQ(unmap_at(cuts[i].offset, cuts[i].bytes, VMEM_OP_HOLES), -EINVAL);
    after = stats_of(vm);
    CHECK(same_state(&before, &after) && after.large_entries == 2 && after.map_calls == before.map_calls);
  }
  ops[0].addr = va + 9 * PAGE;
  ops[0].bytes = PAGE;
  EQ(vmem_batch(vm, ops, 1, NULL, 0, 0), -EINVAL);
  ops[0].handle = h; /* the same page, read-only */
  ops[0].addr = va + PAGE;
  ops[0].flags |= VMEM_OP_READONLY;
  EQ(vmem_batch(vm, ops, 1, NULL, 0, 0), -EINVAL);
  /* One operation with the flag and another without it, in one block. */
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .addr = va, .bytes = PAGE};
  ops[1].addr = va + 3 * PAGE;
  ops[1].bytes = PAGE;
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -EINVAL);
  EQ(stats_of(vm).large_entries, 2);
  CHECK(marked(0, 2 * BLOCK));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Pages mapped by a handle become part of a shared entry. */
static void release_splits_nothing(void) {
  vmem_handle whole, half[2];
  open_entries(0, 0);
  OK(vMemCreate(vm, BLOCK, NULL, &whole));
  OK(vMemMap(vm, va + 4 * BLOCK, BLOCK, whole, 0, 0));
  for (uint64_t i = 0; i < 2; i++) {
    OK(vmem_retain(vm, va + 4 * BLOCK + i * BLOCK / 2, BLOCK / 2, &half[i]));
    OK(vMemMap(vm, va + i * BLOCK / 2, BLOCK / 2, half[i], 0, 0));
  }
  EQ(entry_at(0), PAGE);
  OK(vmem_join(vm, va, BLOCK, NULL));
  EQ(entry_at(0), BLOCK);
  EQ(vMemRelease(vm, half[0]), -EINVAL);
  OK(unmap_at(0, BLOCK / 2, VMEM_OP_SPLIT));
  OK(vMemRelease(vm, half[0]));
  OK(vMemRelease(vm, half[1]));
  OK(vMemRelease(vm, whole));
  end();
}

/* A split makes the fewest calls: one to unmap the block, and one to map each remaining part. */
static void split_unmaps(void) {
  static const struct {
    unsigned first, n, maps;
  } cases[] = {{0, 1, 1}, {31, 1, 1}, {5, 1, 2}, {16, 16, 1}, {1, 30, 2}, {0, 31, 1}};
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    uint64_t from = cases[i].first * PAGE, bytes = cases[i].n * PAGE;
    struct vmem_stats before, after;
    two_blocks();
    before = stats_of(vm);
    OK(unmap_at(from, bytes, VMEM_OP_SPLIT));
    after = stats_of(vm);
    CHECK(calls_since(&before, cases[i].maps, 1));
    EQ(before.mapped_bytes - after.mapped_bytes, bytes);
    EQ(after.large_entries, 1);
    EQ(after.splits, 1);
    EQ(entry_at(from), 0);
    EQ(entry_at(BLOCK), BLOCK);
    CHECK(marked(0, from) && marked(from + bytes, 2 * BLOCK - from - bytes));
    if (from + bytes < BLOCK) {
      EQ(entry_at(from + bytes), PAGE);
      OK(vMemUnmap(vm, va + from + bytes, PAGE)); /* its neighbour is now unmapped like any small page */
    }
    end();
  }
}

/* Several parts of one block, parts of adjacent blocks, a range that starts and ends inside blocks: one unmap each. */
static void split_many(void) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .bytes = PAGE, .count = PAGES, .stride = 2 * PAGE};
  struct vmem_stats before, after;
  two_blocks();
  OK(populate_at(2 * BLOCK, 4 * BLOCK, 0));
  CHECK(mark(0, 6 * BLOCK));
  EQ(stats_of(vm).large_entries, 6);
  before = stats_of(vm);
  op.addr = va; /* every other page of two blocks */
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  after = stats_of(vm);
  CHECK(calls_since(&before, PAGES, 1));
  EQ(after.splits, 2);
  for (uint64_t at = 0; at < 2 * BLOCK; at += 2 * PAGE) CHECK(!entry_at(at) && marked(at + PAGE, PAGE));
  before = after;
  OK(unmap_at(2 * BLOCK + 3 * PAGE, 3 * BLOCK, VMEM_OP_SPLIT));
  after = stats_of(vm);
  CHECK(calls_since(&before, 2, 1));
  EQ(after.splits, 4);
  EQ(after.large_entries, 0);
  CHECK(marked(2 * BLOCK, 3 * PAGE) && marked(5 * BLOCK + 3 * PAGE, BLOCK - 3 * PAGE));
  end();
}

/* A batch that covers a whole block, in any number of pieces, splits nothing. */
static void all_of_it(void) {
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .bytes = PAGE, .count = PAGES, .stride = PAGE};
  uint64_t calls;
  two_blocks();
  op.addr = va;
  calls = stats_of(vm).unmap_calls;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  EQ(stats_of(vm).unmap_calls - calls, 1);
  EQ(stats_of(vm).splits, 0);
  EQ(stats_of(vm).large_entries, 1);
  CHECK(!entry_at(0) && marked(BLOCK, BLOCK));
  end();
}

/* New pages, or the same pages read-only, replace part of a block. */
static void split_replaces(void) {
  struct vmem_op ops[2] = {{.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_SPLIT | VMEM_OP_CONSUME},
                           {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT}};
  two_blocks();
  OK(populate_at(8 * BLOCK, BLOCK, 0));
  CHECK(mark(8 * BLOCK, BLOCK));
  OK(vmem_retain(vm, va + 8 * BLOCK + 3 * PAGE, 2 * PAGE, &ops[0].handle));
  ops[0].addr = va + BLOCK - PAGE; /* the last page of one block and the first of the other */
  ops[0].bytes = 2 * PAGE;
  ops[1].addr = va + 8 * BLOCK + 3 * PAGE;
  ops[1].bytes = 2 * PAGE;
  OK(vmem_batch(vm, ops, 2, NULL, 0, 0));
  EQ(stats_of(vm).splits, 3);
  EQ(stats_of(vm).large_entries, 0);
  EQ(get_byte(vm, va + BLOCK - PAGE + 7), mark_of(8 * BLOCK + 3 * PAGE));
  EQ(get_byte(vm, va + BLOCK + 7), mark_of(8 * BLOCK + 4 * PAGE));
  CHECK(marked(0, BLOCK - PAGE) && marked(BLOCK + PAGE, BLOCK - PAGE));
  CHECK(marked(8 * BLOCK, 3 * PAGE) && marked(8 * BLOCK + 5 * PAGE, BLOCK - 5 * PAGE));
  OK(vmem_check(vm));
  OK(populate_at(12 * BLOCK, BLOCK, 0));
  CHECK(mark(12 * BLOCK, BLOCK));
  OK(vmem_retain(vm, va + 12 * BLOCK, 4 * PAGE, &ops[0].handle));
  ops[0].flags |= VMEM_OP_READONLY;
  ops[0].addr = va + 12 * BLOCK;
  ops[0].bytes = 4 * PAGE;
  OK(vmem_batch(vm, ops, 1, NULL, 0, 0));
  EQ(entry_at(12 * BLOCK), PAGE);
  EQ(vmem_fill(vm, va + 12 * BLOCK, PAGE, 1), -EACCES);
  OK(vmem_fill(vm, va + 12 * BLOCK + 4 * PAGE, PAGE, 9));
  CHECK(marked(12 * BLOCK, 4 * PAGE) && marked(12 * BLOCK + 5 * PAGE, BLOCK - 5 * PAGE));
  end();
}

/* The unmapped part of a split entry reads as zeros in a sparse reservation. */
static void split_sparse(void) {
  struct vmem_info info = {.size = sizeof(info)};
  open_entries(0, 0);
  OK(vmem_query(vm, &info));
  OK(vmem_close(vm));
  if (!(info.caps & VMEM_CAP_SPARSE)) return;
  open_entries(0, VMEM_RESERVE_SPARSE);
  OK(populate_at(0, BLOCK, 0));
  CHECK(mark(0, BLOCK));
  OK(unmap_at(4 * PAGE, PAGE, VMEM_OP_SPLIT));
  CHECK(marked(0, 4 * PAGE) && marked(5 * PAGE, BLOCK - 5 * PAGE));
  if (on_host()) EQ(BYTE(va + 4 * PAGE + 7), 0);
  end();
}

static void grown_and_joined(void) {
  uint64_t calls;
  struct vmem_op op = {.op = VMEM_OP_JOIN, .count = 2, .stride = 4 * BLOCK, .bytes = BLOCK};
  open_entries(0, 0);
  for (uint64_t i = 0; i < PAGES + 2; i++) /* two requests in turn */
    for (uint64_t k = 0; k < 2; k++) OK(populate_at(k * 4 * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  CHECK(mark(0, BLOCK + 2 * PAGE) && mark(4 * BLOCK, BLOCK + 2 * PAGE));
  EQ(stats_of(vm).large_entries, 0);
  OK(vmem_join(vm, va, 2 * BLOCK, &calls));
  EQ(calls, one_call ? 1 : 2); /* the block, and the two pages after it if the driver counts calls */
  EQ(stats_of(vm).large_entries, 1);
  EQ(stats_of(vm).joins, 1);
  EQ(entry_at(0), BLOCK);
  EQ(entry_at(BLOCK), PAGE);
  OK(vmem_join(vm, va, 2 * BLOCK, &calls));
  EQ(calls, 0);
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  EQ(stats_of(vm).joins, 2);
  EQ(entry_at(4 * BLOCK), BLOCK);
  CHECK(marked(0, BLOCK + 2 * PAGE) && marked(4 * BLOCK, BLOCK + 2 * PAGE));
  OK(unmap_at(9 * PAGE, PAGE, VMEM_OP_SPLIT));
  OK(populate_at(9 * PAGE, PAGE, 0)); /* may get the old page or another one; only the old page can be joined */
  OK(vmem_join(vm, va, BLOCK, NULL));
  EQ(vMemUnmap(vm, va + PAGE, PAGE), entry_at(PAGE) == BLOCK ? -EINVAL : 0);
  end();
}

/* Pages that are unmapped from a block and populated again get their old memory, even if memory before it is free. */
static void holes_are_filled(void) {
  static const struct {
    unsigned first, n;
  } holes[] = {{0, 1}, {0, 3}, {31, 1}, {7, 1}, {0, 31}, {30, 2}, {12, 9}};
  for (size_t i = 0; i < 2 * sizeof(holes) / sizeof(holes[0]); i++) {
    uint64_t first = holes[i / 2].first * PAGE, bytes = holes[i / 2].n * PAGE;
    open_entries(0, 0);
    OK(populate_at(0, BLOCK, 0));
    OK(populate_at(4 * BLOCK, BLOCK, 0));
    OK(populate_at(8 * BLOCK, BLOCK, 0));
    OK(populate_at(BLOCK, BLOCK, 0)); /* its memory is not adjacent to that of the block to its left */
    CHECK(mark(0, 2 * BLOCK) && mark(8 * BLOCK, BLOCK));
    OK(unmap_at(4 * BLOCK + 3 * PAGE, 9 * PAGE, VMEM_OP_SPLIT));
    for (uint64_t block = BLOCK; block <= 8 * BLOCK; block += 7 * BLOCK) { /* the second has no left neighbour */
      OK(unmap_at(block + first, bytes, VMEM_OP_SPLIT));
      OK(populate_at(block + first, bytes, i % 2 ? VMEM_OP_SPREAD : 0));
      EQ(get_byte(vm, va + block + first + 7), 0);
      OK(vmem_join(vm, va + block, BLOCK, NULL));
      EQ(entry_at(block), BLOCK);
      CHECK(marked(block, first) && marked(block + first + bytes, BLOCK - first - bytes));
    }
    end();
  }
}

/* Splits a block and joins it in place repeatedly, once with a batch that waits for an event. */
static void split_and_joined(void) {
  struct vmem_op ops[2] = {{.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .bytes = PAGE},
                           {.op = VMEM_OP_MAP, .flags = VMEM_OP_CONSUME, .bytes = PAGE}};
  struct vmem_op join = {.op = VMEM_OP_JOIN, .bytes = BLOCK};
  int fd = eventfd(0, EFD_CLOEXEC);
  two_blocks();
  ops[0].addr = ops[1].addr = va + 6 * PAGE;
  join.addr = va;
  for (int round = 0; round < 4; round++) {
    struct vmem_after after = after_fd(fd);
    vmem_ticket t;
    OK(vmem_retain(vm, va + 6 * PAGE, PAGE, &ops[1].handle));
    OK(vmem_submit(vm, ops, 1, &after, 1, 0, &t));
    EQ(vmem_wait(vm, t, 0), -ETIMEDOUT);
    EQ(unmap_at(9 * PAGE, PAGE, VMEM_OP_SPLIT), -EBUSY); /* the whole block is busy with that batch */
    EQ(unmap_at(0, BLOCK, 0), -EBUSY);
    EQ(entry_at(0), BLOCK);
    fire(fd);
    OK(vmem_wait(vm, t, -1));
    OK(vmem_ticket_drop(vm, t));
    EQ(entry_at(0), PAGE);
    EQ(eventfd_read(fd, &(eventfd_t){0}), 0);
    OK(vmem_batch(vm, &ops[1], 1, NULL, 0, 0));
    after = after_fd(fd);
    OK(vmem_submit(vm, &join, 1, &after, 1, 0, &t));
    EQ(entry_at(0), PAGE);
    fire(fd);
    OK(vmem_wait(vm, t, -1));
    OK(vmem_ticket_drop(vm, t));
    EQ(entry_at(0), BLOCK);
    EQ(eventfd_read(fd, &(eventfd_t){0}), 0);
    CHECK(marked(0, 2 * BLOCK));
  }
  EQ(stats_of(vm).splits, 4);
  EQ(stats_of(vm).joins, 4);
  close(fd);
  end();
}

/* Fills of a block that a batch splits, and reads by other calls, are conflicts. */
static void in_the_way(void) {
  struct vmem_op ops[2] = {{.op = VMEM_OP_FILL, .bytes = PAGE, .value = 3},
                           {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .bytes = PAGE}};
  struct vmem_op copy[2] = {{.op = VMEM_OP_POPULATE, .flags = VMEM_OP_COPY, .bytes = PAGE}};
  two_blocks();
  ops[0].addr = va;
  ops[1].addr = va + PAGE;
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -EBUSY);
  EQ(stats_of(vm).large_entries, 2);
  ops[0].addr = va + BLOCK;
  OK(vmem_batch(vm, ops, 2, NULL, 0, 0)); /* another block does not conflict */
  copy[0].addr = va + 8 * BLOCK;
  copy[0].src = va + BLOCK + 5 * PAGE;
  copy[1] = ops[1];
  copy[1].addr = va + BLOCK + PAGE; /* the source stays until it is copied */
  OK(vmem_batch(vm, copy, 2, NULL, 0, 0));
  EQ(get_byte(vm, va + 8 * BLOCK + 7), mark_of(BLOCK + 5 * PAGE));
  CHECK(marked(BLOCK + 2 * PAGE, BLOCK - 2 * PAGE));
  end();
}

/* The library finds complete blocks between used pages, also for a run that starts in the middle of a block. */
static void fragmented(void) {
  struct vmem_open_opts o = {.size = sizeof(o),
                             .granule = PAGE,
                             .flags = VMEM_OPEN_LARGE_ENTRIES,
                             .slab_size = MIB(32),
                             .mem_limit = MIB(32),
                             .pool_high = VMEM_KEEP_ALL};
  OK(open_it(&o));
  OK(vMemReserve(vm, 64 * BLOCK, NULL, &va));
  OK(populate_at(0, 16 * BLOCK, 0));
  EQ(stats_of(vm).large_entries, 16);
  for (uint64_t i = 0; i < 16; i += 4) /* unmap one page of every fourth block, and two of the others */
    OK(unmap_at(i * BLOCK + 4 * PAGE, PAGE, VMEM_OP_SPLIT));
  for (uint64_t i = 1; i < 16; i += 4) OK(unmap_at(i * BLOCK, 2 * BLOCK, 0));
  for (int i = 0; i < 20000 && stats_of(vm).dirty_bytes; i++) usleep(1000);
  EQ(stats_of(vm).large_entries, 4);
  OK(populate_at(20 * BLOCK, 8 * BLOCK, 0));
  EQ(stats_of(vm).large_entries, 12);
  OK(unmap_at(20 * BLOCK, 8 * BLOCK, 0));
  OK(populate_at(20 * BLOCK + 12 * PAGE, 4 * BLOCK, 0));
  CHECK(stats_of(vm).large_entries >= 4 + 3);
  OK(unmap_at(20 * BLOCK + 12 * PAGE, BLOCK - 12 * PAGE, 0));
  OK(populate_at(40 * BLOCK + 31 * PAGE, BLOCK + 2 * PAGE, 0));
  EQ(entry_at(41 * BLOCK), BLOCK);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A context whose memory is one slab of four chunks. */
static int open_four_chunks(void) {
  struct vmem_open_opts o = {.size = sizeof(o),
                             .granule = PAGE,
                             .flags = VMEM_OPEN_LARGE_ENTRIES,
                             .slab_size = 4 * BLOCK,
                             .mem_limit = 4 * BLOCK,
                             .pool_high = VMEM_KEEP_ALL};
  return open_it(&o);
}

/* A complete chunk that must be zeroed is preferred to clean fragments, both for whole blocks and for growth. */
static void dirty_chunks(void) {
  ONLY_HOST();
  OK(open_four_chunks());
  keep_contents(false);
  OK(vMemReserve(vm, 16 * BLOCK, NULL, &va));
  OK(populate_at(0, 2 * BLOCK, 0));
  CHECK(mark(0, 2 * BLOCK));
  OK(populate_at(4 * BLOCK, PAGE, VMEM_OP_SPREAD)); /* in each of the other two chunks */
  OK(populate_at(6 * BLOCK, PAGE, VMEM_OP_SPREAD));
  OK(unmap_at(0, 2 * BLOCK, 0));
  EQ(stats_of(vm).dirty_bytes, 2 * BLOCK);
  OK(populate_at(8 * BLOCK, BLOCK, 0));
  EQ(entry_at(8 * BLOCK), BLOCK);
  for (uint64_t i = 0; i < PAGES; i++) {
    OK(populate_at(10 * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
    EQ(get_byte(vm, va + 8 * BLOCK + i * PAGE + 7), 0);
    EQ(get_byte(vm, va + 10 * BLOCK + i * PAGE + 7), 0);
  }
  OK(vmem_join(vm, va + 10 * BLOCK, BLOCK, NULL));
  EQ(entry_at(10 * BLOCK), BLOCK);
  CHECK(mark(10 * BLOCK, BLOCK));
  OK(unmap_at(10 * BLOCK + 20 * PAGE, 12 * PAGE, VMEM_OP_SPLIT)); /* shrink, then grow again with the same pages */
  for (uint64_t i = 20; i < PAGES; i++) OK(populate_at(10 * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  EQ(get_byte(vm, va + 10 * BLOCK + 21 * PAGE + 7), 0);
  OK(vmem_join(vm, va + 10 * BLOCK, BLOCK, NULL));
  EQ(entry_at(10 * BLOCK), BLOCK);
  CHECK(marked(10 * BLOCK, 20 * PAGE));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* If no chunk is empty, all new stretches share one chunk. A stretch that has pages there does not use a chunk that
 * becomes empty: it stays free for stretches that may get a large entry. */
static void strays_share_a_chunk(void) {
  ONLY_HOST();
  OK(open_four_chunks());
  OK(vMemReserve(vm, 16 * BLOCK, NULL, &va));
  for (uint64_t k = 0; k < 4; k++) OK(populate_at(2 * k * BLOCK, PAGE, VMEM_OP_SPREAD));
  for (uint64_t i = 0; i < 12; i++)
    for (uint64_t k = 4; k < 6; k++) OK(populate_at(2 * k * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  OK(unmap_at(2 * BLOCK, PAGE, 0));
  OK(populate_at(8 * BLOCK + 12 * PAGE, PAGE, VMEM_OP_SPREAD));
  for (uint64_t i = 0; i < PAGES; i++) OK(populate_at(14 * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  for (uint64_t k = 2; k < 4; k++)
    for (uint64_t i = 1; i < PAGES; i++) OK(populate_at(2 * k * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  OK(vmem_join(vm, va + 4 * BLOCK, BLOCK, NULL));
  OK(vmem_join(vm, va + 6 * BLOCK, BLOCK, NULL));
  OK(vmem_join(vm, va + 14 * BLOCK, BLOCK, NULL));
  EQ(stats_of(vm).large_entries, 3);
  OK(vmem_check(vm));
  for (uint64_t k = 4; k < 6; k++) OK(unmap_at(2 * k * BLOCK, BLOCK, VMEM_OP_HOLES));
  OK(unmap_at(0, PAGE, 0)); /* the chunk is empty again */
  OK(populate_at(0, BLOCK, VMEM_OP_SPREAD));
  EQ(entry_at(0), BLOCK);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* The last part of a slab whose size is not a multiple of 2 MiB gets small entries; so does host memory. */
static void odd_slabs(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = BLOCK, .location = VMEM_HOST};
  struct vmem_info info = {.size = sizeof(info)};
  open_entries(BLOCK + 5 * PAGE, 0);
  OK(populate_at(0, BLOCK + 5 * PAGE, 0));
  CHECK(mark(0, BLOCK + 5 * PAGE));
  EQ(vMemUnmap(vm, va + PAGE, PAGE), entry_at(0) == BLOCK ? -EINVAL : 0);
  EQ(vMemUnmap(vm, va + BLOCK + PAGE, PAGE), 0);
  end();
  open_entries(0, 0);
  OK(vmem_query(vm, &info));
  op.addr = va;
  if (info.caps & VMEM_CAP_HOST_PAGES) {
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    EQ(stats_of(vm).large_entries, 0);
    OK(vMemUnmap(vm, va + PAGE, PAGE));
  }
  end();
}

/* Large pages stay whole even with VMEM_OP_SPLIT. */
static void large_pages(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = BLOCK, .page_size = BLOCK};
  struct vmem_range_info r = {.size = sizeof(r)};
  open_entries(0, 0);
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_range_query(vm, va, &r));
  EQ(r.flags & VMEM_RANGE_LARGE, VMEM_RANGE_LARGE);
  EQ(unmap_at(PAGE, PAGE, VMEM_OP_SPLIT), -EINVAL);
  CHECK(strstr(vmem_last_error(), "cuts the page of 2097152 bytes"));
  OK(populate_at(BLOCK, BLOCK, 0));
  OK(vmem_range_query(vm, va + BLOCK, &r));
  EQ(r.flags & VMEM_RANGE_LARGE, 0);
  EQ(r.entry_bytes, BLOCK);
  EQ(stats_of(vm).large_entries, 2);
  end();
}

/* Large entries move as a unit; split blocks stay split. */
static void compaction(void) {
  struct vmem_open_opts o = {.size = sizeof(o),
                             .granule = PAGE,
                             .flags = VMEM_OPEN_LARGE_ENTRIES,
                             .slab_size = 8 * BLOCK,
                             .pool_high = VMEM_KEEP_ALL};
  uint64_t freed = 0, small;
  OK(open_it(&o));
  OK(vMemReserve(vm, 64 * BLOCK, NULL, &va));
  for (uint64_t i = 0; i < 24; i++) OK(populate_at(i * BLOCK, BLOCK, 0));
  EQ(stats_of(vm).slabs, 3);
  CHECK(mark(0, 24 * BLOCK));
  for (uint64_t i = 0; i < 24; i++)
    if (i % 8 > 2) OK(vMemUnmap(vm, va + i * BLOCK, BLOCK));
  OK(unmap_at(BLOCK + 3 * PAGE, PAGE, VMEM_OP_SPLIT));
  OK(unmap_at(9 * BLOCK + 3 * PAGE, PAGE, VMEM_OP_SPLIT));
  OK(unmap_at(17 * BLOCK + 3 * PAGE, PAGE, VMEM_OP_SPLIT));
  EQ(stats_of(vm).large_entries, 6);
  OK(vmem_compact(vm, UINT64_MAX, NULL, 0, 0, &freed));
  CHECK(freed >= 8 * BLOCK);
  EQ(stats_of(vm).large_entries, 6);
  OK(vmem_check(vm));
  for (uint64_t i = 0; i < 24; i += 8) {
    CHECK(marked(i * BLOCK, BLOCK) && marked((i + 2) * BLOCK, BLOCK) && marked((i + 1) * BLOCK, 3 * PAGE));
    CHECK(marked((i + 1) * BLOCK + 4 * PAGE, BLOCK - 4 * PAGE));
    EQ(entry_at(i * BLOCK), BLOCK);
    small = (i + 1) * BLOCK + 9 * PAGE;
    EQ(entry_at(small), PAGE);
    OK(vMemUnmap(vm, va + small, PAGE));
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Even if no chunk is free for an entry, slabs of small pages are emptied. */
static void compaction_without_chunks(void) {
  static const unsigned keep[] = {17, 13}; /* pages to keep in each block: the first slab is too full to be emptied */
  struct vmem_open_opts o = {.size = sizeof(o),
                             .granule = PAGE,
                             .flags = VMEM_OPEN_LARGE_ENTRIES,
                             .slab_size = 8 * BLOCK,
                             .pool_high = VMEM_KEEP_ALL};
  uint64_t freed = 0;
  OK(open_it(&o));
  OK(vMemReserve(vm, 64 * BLOCK, NULL, &va));
  OK(populate_at(16 * BLOCK, 8 * BLOCK, 0));
  for (unsigned s = 0; s < 2; s++) {
    OK(populate_at(s * 8 * BLOCK, 8 * BLOCK, 0));
    for (uint64_t b = s * 8; b < s * 8 + 8; b++)
      OK(unmap_at(b * BLOCK + keep[s] * PAGE, BLOCK - keep[s] * PAGE, VMEM_OP_SPLIT));
  }
  OK(unmap_at(17 * BLOCK, 7 * BLOCK, 0));
  EQ(stats_of(vm).slabs, 3);
  EQ(stats_of(vm).large_entries, 1);
  for (uint64_t b = 0; b < 17; b++) CHECK(mark(b * BLOCK, b < 16 ? keep[b / 8] * PAGE : BLOCK));
  OK(vmem_compact(vm, UINT64_MAX, NULL, 0, 0, &freed));
  EQ(freed, 8 * BLOCK);
  EQ(entry_at(16 * BLOCK), BLOCK);
  for (uint64_t b = 0; b < 17; b++) CHECK(marked(b * BLOCK, b < 16 ? keep[b / 8] * PAGE : BLOCK));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* ---- failures ---------------------------------------------------------------------------------- */

static int split_batch(void) {
  struct vmem_op ops[] = {
      {.op = VMEM_OP_POPULATE, .addr = va + 12 * BLOCK, .bytes = BLOCK},
      {.op = VMEM_OP_UNMAP,
       .flags = VMEM_OP_SPLIT,
       .addr = va + 4 * PAGE,
       .bytes = PAGE,
       .count = 2,
       .stride = 7 * PAGE},
      {.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_SPLIT, .addr = va + BLOCK - PAGE, .bytes = 3 * PAGE},
      {.op = VMEM_OP_JOIN, .addr = va + 4 * BLOCK, .bytes = BLOCK},
      {.op = VMEM_OP_UNMAP, .addr = va + 6 * BLOCK, .bytes = BLOCK},
      {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .addr = va + 10 * BLOCK, .bytes = PAGE},
  };
  int err = vmem_retain(vm, va + 8 * BLOCK, 3 * PAGE, &ops[2].handle);
  if (err) return err;
  err = vmem_batch(vm, ops, sizeof(ops) / sizeof(ops[0]), NULL, 0, 0);
  return vmem_drop(vm, ops[2].handle) ? 1 : err;
}

/* Maps two large entries, a block mapped page by page, and two blocks with small entries that one call could map. */
static void before_split(void) {
  two_blocks();
  for (uint64_t i = 0; i < PAGES; i++) OK(populate_at(4 * BLOCK + i * PAGE, PAGE, VMEM_OP_SPREAD));
  OK(populate_at(6 * BLOCK, BLOCK, 0));
  OK(unmap_at(6 * BLOCK + PAGE, PAGE, VMEM_OP_SPLIT));
  OK(populate_at(6 * BLOCK + PAGE, PAGE, 0));
  OK(populate_at(8 * BLOCK, 3 * PAGE, 0));
  OK(populate_at(10 * BLOCK, BLOCK, 0));
  CHECK(mark(4 * BLOCK, BLOCK) && mark(6 * BLOCK, BLOCK) && mark(8 * BLOCK, 3 * PAGE) && mark(10 * BLOCK, BLOCK));
  EQ(stats_of(vm).large_entries, 3);
}

static bool as_before_split(void) {
  return marked(0, 2 * BLOCK) && marked(4 * BLOCK, BLOCK) && marked(6 * BLOCK, BLOCK) && marked(8 * BLOCK, 3 * PAGE) &&
         marked(10 * BLOCK, BLOCK) && entry_at(0) == BLOCK && entry_at(BLOCK) == BLOCK && entry_at(4 * BLOCK) == PAGE &&
         entry_at(6 * BLOCK) == PAGE && entry_at(10 * BLOCK) == BLOCK && entry_at(12 * BLOCK) == 0;
}

static void each_call_fails(void) {
  static const uint32_t kinds[] = {VMEM_INJECT_MAP, VMEM_INJECT_UNMAP, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP,
                                   VMEM_INJECT_HEAP, VMEM_INJECT_SLAB};
  unsigned failed = 0;
  for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
    for (uint64_t skip = 0, err = 1; err; skip++) {
      struct vmem_stats before, after;
      before_split();
      before = stats_of(vm);
      OK(vmem_inject(vm, kinds[k], skip, 1, EIO));
      err = split_batch() != 0;
      OK(vmem_inject(vm, 0, 0, 0, 0));
      after = stats_of(vm);
      if (err) {
        failed++;
        CHECK(as_before_split());
        CHECK(before.mapped_bytes == after.mapped_bytes && before.used_bytes == after.used_bytes);
        EQ(after.large_entries, 3);
        EQ(after.splits, before.splits);
        EQ(after.quarantined_bytes, 0);
        OK(vmem_check(vm));
        OK(vMemUnmap(vm, va + 6 * BLOCK + 9 * PAGE, PAGE)); /* it was mapped again with small entries */
        EQ(vMemUnmap(vm, va, PAGE), -EINVAL);
        OK(vMemUnmap(vm, va, BLOCK));
      }
      OK(vmem_check(vm));
      OK(vmem_close(vm));
    }
  CHECK(failed > 20);
}

/* If the undo fails too, only the range in its error is lost. */
static void undo_fails(void) {
  unsigned lost = 0;
  if (one_call) return; /* there is nothing to undo */
  for (uint64_t skip = 0; skip < 14; skip++)
    for (uint64_t count = 2; count < 6; count++) {
      int err;
      before_split();
      OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, skip, count, EIO));
      err = split_batch();
      OK(vmem_inject(vm, 0, 0, 0, 0));
      OK(vmem_check(vm));
      if (err == -ENOTRECOVERABLE) {
        lost++;
        CHECK(stats_of(vm).quarantined_bytes > 0);
      } else {
        EQ(stats_of(vm).quarantined_bytes, 0);
      }
      for (uint64_t at = 0; err && at < 11 * BLOCK; at += PAGE) {
        struct vmem_range_info r = {.size = sizeof(r)};
        OK(vmem_range_query(vm, va + at, &r));
        if (r.flags & VMEM_RANGE_MAPPED) CHECK(marked(at, PAGE));
      }
      OK(vmem_close(vm));
    }
  CHECK(lost > 5);
}

/* A batch over two reservations splits, joins, replaces and unmaps in each. */
static void two_reservations(uint64_t other, struct vmem_op ops[8]) {
  static const uint64_t at[] = {4 * PAGE, 4 * BLOCK, BLOCK - PAGE, 10 * BLOCK};
  struct vmem_op page = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_SPREAD, .addr = other + 4 * BLOCK, .bytes = PAGE};
  struct vmem_op blocks = {.op = VMEM_OP_POPULATE, .addr = other, .bytes = 2 * BLOCK};
  OK(vmem_batch(vm, &blocks, 1, NULL, 0, 0));
  for (; page.addr < other + 5 * BLOCK; page.addr += PAGE) OK(vmem_batch(vm, &page, 1, NULL, 0, 0));
  OK(vmem_retain(vm, va + 8 * BLOCK, 3 * PAGE, &ops[2].handle));
  for (size_t i = 0; i < 4; i++) {
    ops[i].addr = va + at[i];
    ops[4 + i] = ops[i];
    ops[4 + i].addr = other + at[i];
  }
  ops[6].addr = other + 20 * PAGE; /* all in one block; the next block is unmapped */
  ops[7].addr = other + BLOCK;
}

/* Lets the first `skip` driver calls of the batch succeed and the next one fail. False: the batch succeeded. */
static bool later_call(int skip) {
  struct vmem_op ops[8] = {
      {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .bytes = PAGE, .count = 2, .stride = 9 * PAGE},
      {.op = VMEM_OP_JOIN, .bytes = BLOCK},
      {.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_SPLIT, .bytes = 3 * PAGE},
      {.op = VMEM_OP_UNMAP, .bytes = BLOCK},
  };
  struct vmem_stats before, after;
  uint64_t other = 0;
  int err;
  before_split();
  if (failures_here || vMemReserve(vm, 16 * BLOCK, NULL, &other)) return false;
  two_reservations(other, ops);
  before = stats_of(vm);
  fail_at = skip;
  err = vmem_batch(vm, ops, 8, NULL, 0, 0);
  fail_at = -1;
  after = stats_of(vm);
  if (err) {
    if (!same_state(&before, &after) || before.large_entries != after.large_entries || !as_before_split())
      failures_here++;
  } else if (after.splits != before.splits + 3 || after.joins != before.joins + 2) {
    failures_here++;
  }
  for (uint64_t at = 0; at < 16 * BLOCK; at += BLOCK) {
    uint64_t entry = entry_at(at + 30 * PAGE);
    if (entry && driver_has_large(at + 29 * PAGE) != (entry == BLOCK)) failures_here++;
  }
  if (vmem_check(vm) || vmem_close(vm)) failures_here++;
  return err && !failures_here;
}

static void later_call_fails(void) {
  static const size_t most[] = {SIZE_MAX, 5, 2, 1};
  for (size_t i = 0; i < sizeof(most) / sizeof(most[0]); i++) {
    int skip = 0;
    before_split(); /* sets one_call */
    OK(vmem_close(vm));
    if (!one_call || (bound && i)) return;
    most_ops = most[i];
    while (later_call(skip)) skip++;
    most_ops = SIZE_MAX;
    if (failures_here) printf("call %d, %zu operations a call: %s\n", skip, most[i], vmem_last_error());
    CHECK(!failures_here && skip > 1);
  }
}

/* ---- several threads --------------------------------------------------------------------------- */

enum { THREADS = 4, ROUNDS = 60 };

struct lane {
  uint64_t at; /* offset of this thread's two blocks */
  unsigned seed;
  bool failed;
};

static bool lane_round(struct lane *l) {
  unsigned page = 1 + (unsigned)rand_r(&l->seed) % (PAGES - 2);
  uint64_t gone = l->at + page * PAGE;
  struct vmem_op ops[] = {
      {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .addr = va + gone, .bytes = PAGE},
      {.op = VMEM_OP_POPULATE, .addr = va + gone, .bytes = PAGE},
      {.op = VMEM_OP_JOIN, .addr = va + l->at, .bytes = 2 * BLOCK},
  };
  vmem_ticket t;
  if (populate_at(l->at, 2 * BLOCK, 0) || !mark(l->at, 2 * BLOCK)) return false;
  if (vmem_submit(vm, ops, 1, NULL, 0, 0, &t) || vmem_wait(vm, t, -1) || vmem_ticket_drop(vm, t)) return false;
  if (!marked(l->at, page * PAGE) || !marked(gone + PAGE, 2 * BLOCK - (page + 1) * PAGE)) return false;
  if (vmem_batch(vm, &ops[1], 1, NULL, 0, 0) || vmem_batch(vm, &ops[2], 1, NULL, 0, 0)) return false;
  if (!marked(l->at, page * PAGE) || !marked(gone + PAGE, 2 * BLOCK - (page + 1) * PAGE)) return false;
  return !unmap_at(l->at, 2 * BLOCK, 0) && !vmem_check(vm);
}

static void *run_lane(void *arg) {
  struct lane *l = arg;
  for (int i = 0; i < ROUNDS && !l->failed; i++) {
    l->failed = !lane_round(l);
    if (l->failed) printf("thread at %llu, round %d: %s\n", (unsigned long long)l->at, i, vmem_last_error());
  }
  return NULL;
}

static void in_threads(void) {
  struct lane lanes[THREADS];
  pthread_t threads[THREADS];
  open_entries(0, 0);
  for (unsigned i = 0; i < THREADS; i++) {
    lanes[i] = (struct lane){.at = 4 * i * BLOCK, .seed = i};
    EQ(pthread_create(&threads[i], NULL, run_lane, &lanes[i]), 0);
  }
  for (unsigned i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  for (unsigned i = 0; i < THREADS; i++) CHECK(!lanes[i].failed);
  CHECK(stats_of(vm).splits > 0);
  end();
}

/* ---- at random --------------------------------------------------------------------------------- */

#ifdef __SANITIZE_THREAD__
enum { STEPS = 50 }; /* one thread only, and each step takes 60 times as long */
#else
enum { STEPS = 700 };
#endif
enum { BLOCKS = 6, SPAN = BLOCKS * PAGES };

struct model {
  unsigned seed;
  int what[SPAN]; /* value of every byte; -1: not mapped, -2: quarantined */
  bool readonly[SPAN];
  unsigned splits, refusals, failures, joins;
};

static unsigned pick(struct model *m, unsigned n) { return (unsigned)rand_r(&m->seed) % n; }

static bool same_bytes(uint64_t addr, int value) {
  static unsigned char got[PAGE];
  return !vmem_read(vm, got, addr, PAGE) && got[0] == value && !memcmp(got, got + 1, PAGE - 1);
}

static bool agrees(struct model *m, unsigned first, unsigned n) {
  for (unsigned i = first; i < first + n; i++) {
    struct vmem_range_info r = {.size = sizeof(r)};
    if (vmem_range_query(vm, va + i * PAGE, &r)) return false;
    if (r.flags & VMEM_RANGE_QUARANTINED) m->what[i] = -2;
    if (m->what[i] == -2) continue;
    if (!!(r.flags & VMEM_RANGE_MAPPED) != (m->what[i] >= 0) || r.flags & VMEM_RANGE_BUSY) return false;
    if (m->what[i] >= 0 && (!!(r.flags & VMEM_RANGE_READONLY) != m->readonly[i])) return false;
    if (m->what[i] >= 0 && !same_bytes(va + i * PAGE, m->what[i])) return false;
  }
  return true;
}

static bool mapped(const struct model *m, unsigned first, unsigned n) {
  for (unsigned i = first; i < first + n; i++)
    if (m->what[i] < 0) return false;
  return true;
}

static bool empty(const struct model *m, unsigned first, unsigned n) {
  for (unsigned i = first; i < first + n; i++)
    if (m->what[i] != -1) return false;
  return true;
}

/* True if a large entry crosses an end of the range. */
static bool cut(unsigned first, unsigned n) {
  return (first % PAGES && entry_at((uint64_t)first * PAGE) == BLOCK) ||
         ((first + n) % PAGES && entry_at((uint64_t)(first + n) * PAGE) == BLOCK);
}

static int go(struct model *m, const struct vmem_op *ops, size_t n) {
  vmem_ticket t;
  int err;
  if (pick(m, 3)) return vmem_batch(vm, ops, n, NULL, 0, 0);
  if ((err = vmem_submit(vm, ops, n, NULL, 0, pick(m, 2) ? VMEM_SUBMIT_LATE : 0, &t))) return err;
  err = vmem_wait(vm, t, -1);
  return vmem_ticket_drop(vm, t) ? 1 : err;
}

static int fill_new(struct model *m, unsigned first, unsigned n) {
  int value = (int)pick(m, 256), err = vmem_fill(vm, va + first * PAGE, n * PAGE, (uint8_t)value);
  for (unsigned i = first; i < first + n; i++) m->what[i] = err ? 0 : value, m->readonly[i] = false;
  return err;
}

/* Unmaps a page and populates it again, like a request that shrinks and grows; then joins the block, which succeeds if
 * the new page is the old one. */
static bool come_and_go(struct model *m) {
  unsigned block = pick(m, BLOCKS), page = block * PAGES + pick(m, PAGES);
  struct vmem_op ops[] = {
      {.op = VMEM_OP_UNMAP, .flags = VMEM_OP_SPLIT, .addr = va + page * PAGE, .bytes = PAGE},
      {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_SPREAD, .addr = va + page * PAGE, .bytes = PAGE},
      {.op = VMEM_OP_JOIN, .addr = va + block * BLOCK, .bytes = BLOCK},
  };
  if (!mapped(m, block * PAGES, PAGES)) return true;
  m->splits += entry_at(block * BLOCK) == BLOCK;
  for (size_t i = 0; i < 3; i++)
    if (go(m, &ops[i], 1)) return false;
  m->joins += entry_at(block * BLOCK) == BLOCK;
  return !fill_new(m, page, 1);
}

/* Replaces all pages of a few blocks. */
static bool renew(struct model *m) {
  unsigned first = pick(m, BLOCKS), n = 1 + pick(m, BLOCKS - first > 3 ? 3 : BLOCKS - first);
  for (unsigned i = first * PAGES; i < (first + n) * PAGES; i++)
    if (m->what[i] == -2) return true;
  return !unmap_at(first * BLOCK, n * BLOCK, VMEM_OP_HOLES) && !populate_at(first * BLOCK, n * BLOCK, 0) &&
         !fill_new(m, first * PAGES, n * PAGES);
}

/* Makes one random step; `failing`: driver calls fail during it. False: something is wrong. */
static bool random_step(struct model *m, bool failing) {
  unsigned n = pick(m, 4) ? 1 + pick(m, 5) : 1 + pick(m, 3 * PAGES), first, from;
  uint32_t split = pick(m, 3) ? VMEM_OP_SPLIT : 0;
  struct vmem_op op = {0};
  bool can, cuts;
  int err;
  first = pick(m, SPAN - n + 1);
  if (pick(m, 3) == 0 && first / PAGES * PAGES + n <= SPAN) first = first / PAGES * PAGES;
  op.addr = va + first * PAGE;
  op.bytes = n * PAGE;
  cuts = cut(first, n);
  switch (pick(m, 8)) {
  case 7:
    return failing || renew(m);
  case 6:
    return failing || come_and_go(m);
  case 0:
  case 1:
    op.op = VMEM_OP_POPULATE;
    op.flags = pick(m, 2) ? VMEM_OP_SPREAD : 0;
    can = empty(m, first, n);
    err = go(m, &op, 1);
    if (!can) return err == -EEXIST || err == -ENOTRECOVERABLE || (failing && err);
    if (!err && !failing) return !fill_new(m, first, n);
    for (unsigned i = first; !err && i < first + n; i++) m->what[i] = 0, m->readonly[i] = false;
    return !err || failing;
  case 2:
    op.op = VMEM_OP_UNMAP;
    op.flags = split | (pick(m, 2) ? VMEM_OP_HOLES : 0);
    can = mapped(m, first, n) || (op.flags & VMEM_OP_HOLES);
    for (unsigned i = first; i < first + n; i++)
      if (m->what[i] == -2) can = false;
    err = go(m, &op, 1);
    if (!err) {
      m->splits += cuts;
      for (unsigned i = first; i < first + n; i++) m->what[i] = -1;
      return can && (split || !cuts);
    }
    m->refusals += err == -EINVAL;
    if (failing) return true;
    return can ? cuts && !split && err == -EINVAL
               : err == -EFAULT || err == -ENOTRECOVERABLE || (cuts && !split && err == -EINVAL);
  case 3: /* replace them by pages from elsewhere, or by the same pages with another protection */
    n = n > 8 ? 8 : n;
    first = pick(m, SPAN - 8);
    from = pick(m, 2) ? first : pick(m, SPAN - 8);
    if (!mapped(m, first, n) || !mapped(m, from, n)) return true;
    if (from != first && from < first + n && first < from + n) return true;
    cuts = cut(first, n);
    if (vmem_retain(vm, va + from * PAGE, n * PAGE, &op.handle)) return failing;
    op = (struct vmem_op){.op = VMEM_OP_MAP,
                          .handle = op.handle,
                          .flags = VMEM_OP_REPLACE | split | (pick(m, 2) ? VMEM_OP_READONLY : 0),
                          .addr = va + first * PAGE,
                          .bytes = n * PAGE};
    if (from == first) {
      err = go(m, &op, 1);
      if (!err)
        for (unsigned i = first; i < first + n; i++) m->readonly[i] = op.flags & VMEM_OP_READONLY;
    } else {
      struct vmem_op both[2] = {op, {.op = VMEM_OP_UNMAP, .flags = split, .addr = va + from * PAGE, .bytes = n * PAGE}};
      bool other = cut(from, n);
      /* Together the operations may cover a whole block. */
      if (!split && (cuts || other)) {
        err = go(m, both, 2);
        m->refusals += err == -EINVAL;
        if (err != -EINVAL && !failing && err) return false;
      } else {
        err = go(m, both, 2);
      }
      for (unsigned i = 0; !err && i < n; i++) {
        m->what[first + i] = m->what[from + i];
        m->readonly[first + i] = op.flags & VMEM_OP_READONLY;
        m->what[from + i] = -1;
      }
      cuts = cuts || other;
    }
    if (vmem_drop(vm, op.handle)) return false;
    m->splits += !err && cuts;
    return !err || failing || (err == -EINVAL && cuts && !split);
  case 4:
    op.op = VMEM_OP_JOIN;
    op.flags = VMEM_OP_HOLES;
    if (pick(m, 2))
      err = vmem_join(vm, op.addr, op.bytes, NULL);
    else
      err = go(m, &op, 1);
    if (!err) return true;
    return failing || (err == -ENOTRECOVERABLE && !empty(m, first, n));
  default:
    if (pick(m, 4) == 0) {
      uint64_t freed;
      err = vmem_compact(vm, UINT64_MAX, NULL, 0, 0, &freed);
    } else {
      for (unsigned i = first; i < first + n; i++)
        if (m->what[i] < 0 || m->readonly[i]) return true;
      err = failing ? 0 : fill_new(m, first, n);
    }
    return !err || failing;
  }
}

static void at_random(void) {
  const char *given = getenv("ENTRIES_SEED"), *count = getenv("ENTRIES_STEPS");
  struct model m = {.seed = given ? (unsigned)strtoul(given, NULL, 0) : 20261127};
  unsigned steps = count ? (unsigned)strtoul(count, NULL, 0) : STEPS;
  printf("ENTRIES_SEED=%u\n", m.seed);
  for (int round = 0; round < 4; round++) {
    struct vmem_open_opts o = {.size = sizeof(o),
                               .granule = PAGE,
                               .flags = VMEM_OPEN_LARGE_ENTRIES,
                               .slab_size = round == 1 ? 2 * BLOCK : 0,
                               .mem_limit = round == 2 ? 12 * BLOCK + 3 * PAGE : 0,
                               .pool_high = round ? VMEM_KEEP_ALL : 0};
    OK(open_it(&o));
    if (round == 3 && on_host()) keep_contents(true);
    OK(vMemReserve(vm, BLOCKS * BLOCK, NULL, &va));
    for (unsigned i = 0; i < SPAN; i++) m.what[i] = -1;
    for (unsigned step = 0; step < steps; step++) {
      bool failing = pick(&m, 5) == 0, fine;
      char why[256];
      if (failing)
        OK(vmem_inject(vm, pick(&m, 2) ? VMEM_INJECT_MAP | VMEM_INJECT_UNMAP : VMEM_INJECT_HEAP | VMEM_INJECT_SLAB,
                       pick(&m, 8), pick(&m, 12) ? 1 : 1 + pick(&m, 2), EIO));
      fine = random_step(&m, failing);
      snprintf(why, sizeof(why), "%.250s", vmem_last_error());
      OK(vmem_inject(vm, 0, 0, 0, 0));
      m.failures += failing;
      if (!fine) printf("round %d, step %u%s: %s\n", round, step, failing ? ", calls fail" : "", why);
      CHECK(fine);
      OK(vmem_check(vm));
      if (step % 10 == 0 || failing) CHECK(agrees(&m, 0, SPAN));
    }
    CHECK(agrees(&m, 0, SPAN));
    for (unsigned i = 0; i < BLOCKS; i++)
      if (mapped(&m, i * PAGES + 1, 1)) EQ(driver_has_large(i * BLOCK), entry_at(i * BLOCK + PAGE) == BLOCK);
    CHECK(agrees(&m, 0, SPAN));
    OK(vmem_close(vm));
  }
  printf("%u splits, %u refusals, %u failing steps, %u joins\n", m.splits, m.refusals, m.failures, m.joins);
  CHECK(m.splits * 35 > steps && m.refusals * 35 > steps && (m.joins * 140 > steps || !on_host()));
}

static const struct test tests[] = {TEST(whole_blocks_get_them),
                                    TEST(as_recorded),
                                    TEST(handles_get_them),
                                    TEST(without_the_flag),
                                    TEST(bad_flags),
                                    TEST(never_cut_without_it),
                                    TEST(release_splits_nothing),
                                    TEST(split_unmaps),
                                    TEST(split_many),
                                    TEST(all_of_it),
                                    TEST(split_replaces),
                                    TEST(split_sparse),
                                    TEST(grown_and_joined),
                                    TEST(holes_are_filled),
                                    TEST(split_and_joined),
                                    TEST(in_the_way),
                                    TEST(fragmented),
                                    TEST(dirty_chunks),
                                    TEST(strays_share_a_chunk),
                                    TEST(odd_slabs),
                                    TEST(large_pages),
                                    TEST(compaction),
                                    TEST(compaction_without_chunks),
                                    TEST(each_call_fails),
                                    TEST(undo_fails),
                                    TEST(later_call_fails),
                                    TEST(in_threads),
                                    TEST(at_random)};

int main(void) {
  int failed = run_tests(tests, sizeof(tests) / sizeof(tests[0]));
  if (!on_host()) return failed;
  printf("one call for a batch:\n");
  bound = true;
  return run_tests(tests, sizeof(tests) / sizeof(tests[0])) | failed;
}
