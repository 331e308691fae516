/* SPDX-License-Identifier: MIT */
/* Description: pages move out of nearly empty slabs; contents, aliases, handles and protection stay the same. */
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "api/api.h"
#include "check.h"

static vmem_t vm;
static uint64_t va;

static uint64_t seed = 88172645463325252ull;
static uint32_t rnd(uint32_t n) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (uint32_t)(seed >> 33) % n;
}

static bool open_slabs(uint64_t slab, uint64_t limit, uint64_t reserve) {
  struct vmem_open_opts o = {.size = sizeof(o), .slab_size = slab, .mem_limit = limit, .pool_high = VMEM_KEEP_ALL};
  return !open_opts(&o, &vm) && !vMemReserve(vm, reserve, NULL, &va);
}

static int change(uint32_t kind, uint64_t addr, uint64_t bytes, uint32_t flags) {
  struct vmem_op op = {.op = kind, .flags = flags, .addr = addr, .bytes = bytes};
  return vmem_batch(vm, &op, 1, NULL, 0, 0);
}

static int compact(uint64_t *freed) { return vmem_compact(vm, UINT64_MAX, NULL, 0, 0, freed); }

/* Writes a word that identifies the contents of a page. */
static int sign(uint64_t page, uint64_t word) {
  uint64_t w[2] = {word, ~word};
  int err = vmem_write(vm, page, w, sizeof(w));
  return err ? err : vmem_write(vm, page + PAGE - sizeof(w), w, sizeof(w));
}

static bool signed_with(uint64_t page, uint64_t word) {
  uint64_t w[2];
  if (vmem_read(vm, w, page, sizeof(w)) || w[0] != word || w[1] != ~word) return false;
  return !vmem_read(vm, w, page + PAGE - sizeof(w), sizeof(w)) && w[0] == word && w[1] == ~word;
}

/* On a GPU freed pages are zeroed in the background; until then moves prefer other pages. */
static void wait_until_clean(void) {
  for (int i = 0; i < 20000 && stats_of(vm).dirty_bytes; i++) usleep(1000);
}

/* Maps n pages, then unmaps all but every k-th, which leaves nearly empty slabs of 16 pages. */
static bool scatter(unsigned n, unsigned k) {
  for (unsigned i = 0; i < n; i += 16) /* a larger piece would get its own slab */
    if (change(VMEM_OP_POPULATE, va + i * PAGE, 16 * PAGE, 0)) return false;
  for (unsigned i = 0; i < n; i++)
    if (i % k ? change(VMEM_OP_UNMAP, va + i * PAGE, PAGE, 0) : sign(va + i * PAGE, i)) return false;
  wait_until_clean();
  return true;
}

static bool all_there(uint64_t base, unsigned n, unsigned k) {
  for (unsigned i = 0; i < n; i += k)
    if (!signed_with(base + i * PAGE, i)) return false;
  return true;
}

static void empties_slabs(void) {
  struct vmem_stats before, after;
  uint64_t freed;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  CHECK(scatter(160, 8));
  before = stats_of(vm);
  EQ(before.slab_bytes, MIB(10));
  OK(compact(&freed));
  after = stats_of(vm);
  EQ(after.slab_bytes, MIB(2)); /* 20 pages */
  EQ(freed, MIB(8));
  EQ(after.used_bytes, before.used_bytes);
  EQ(after.mapped_bytes, before.mapped_bytes);
  CHECK(all_there(va, 160, 8));
  OK(vmem_check(vm));
  OK(compact(&freed));
  EQ(freed, 0);
  OK(vmem_close(vm));
}

/* Compaction moves no more than was requested, and returns empty slabs first. */
static void as_much_as_wanted(void) {
  uint64_t freed, fills;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  CHECK(scatter(160, 8));
  OK(vmem_compact(vm, 0, NULL, 0, 0, &freed));
  EQ(freed, 0);
  OK(change(VMEM_OP_UNMAP, va + 16 * PAGE, 16 * PAGE, VMEM_OP_HOLES));
  wait_until_clean();
  fills = stats_of(vm).fill_calls;
  OK(vmem_compact(vm, MIB(1), NULL, 0, 0, &freed));
  EQ(freed, MIB(1));
  EQ(stats_of(vm).fill_calls, fills); /* nothing was copied */
  OK(vmem_compact(vm, MIB(2) + 1, NULL, 0, 0, NULL));
  EQ(stats_of(vm).slab_bytes, MIB(6));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Free host memory does not count towards pool_low, which is device memory. */
static void keeps_pool_low(void) {
  struct vmem_create_opts host = {.size = sizeof(host), .location = VMEM_HOST};
  vmem_handle d[8][2], h[16][2];
  uint64_t freed;
  struct vm_ctx *c;
  int err;
  CHECK(open_slabs(MIB(2), 0, MIB(2)));
  c = vm_get(vm, "test", &err);
  for (int i = 0; i < 8; i++)
    for (int k = 0; k < 2; k++) OK(vMemCreate(vm, MIB(1), NULL, &d[i][k]));
  for (int i = 0; i < 16; i++) {
    OK(vMemCreate(vm, MIB(2) - MIB(1) / 2, &host, &h[i][0]));
    OK(vMemCreate(vm, MIB(1) / 2, &host, &h[i][1]));
  }
  OK(vmem_trim(vm, 0, NULL));
  for (int i = 0; i < 8; i++) OK(vMemRelease(vm, d[i][0]));
  for (int i = 0; i < 16; i++) OK(vMemRelease(vm, h[i][1])); /* these slabs are too full to be emptied */
  c->opts.pool_low = MIB(8);
  OK(compact(&freed));
  EQ(freed, 0);
  EQ(c->phys->pools[0].free_units, MIB(8) / PAGE);
  c->opts.pool_low = MIB(4);
  OK(compact(&freed));
  EQ(freed, MIB(4));
  EQ(c->phys->pools[0].free_units, MIB(4) / PAGE);
  vm_put(c);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void handle_in_pieces(void) {
  static const unsigned places[] = {0, 32, 2, 48, 34, 4, 50, 36};
  enum { N = sizeof(places) / sizeof(places[0]) };
  uint64_t other, freed;
  vmem_handle all;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  OK(vMemReserve(vm, MIB(64), NULL, &other));
  CHECK(scatter(160, 2));
  for (unsigned i = 0; i < N; i++) {
    vmem_handle one;
    OK(vmem_retain(vm, va + places[i] * PAGE, PAGE, &one));
    OK(vMemMap(vm, other + i * PAGE, PAGE, one, 0, 0));
    OK(vmem_drop(vm, one));
  }
  OK(vmem_gather(vm, other, N * PAGE, 1, 0, &all));
  OK(vMemUnmap(vm, other, N * PAGE));
  OK(change(VMEM_OP_UNMAP, va, 160 * PAGE, VMEM_OP_HOLES));
  OK(compact(&freed));
  EQ(stats_of(vm).slab_bytes, MIB(1));
  OK(vmem_check(vm));
  OK(vMemMap(vm, va, N * PAGE, all, 0, 0));
  for (unsigned i = 0; i < N; i++) CHECK(signed_with(va + i * PAGE, places[i]));
  OK(vmem_drop(vm, all));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Every address, read-only ones too, and every handle refers to the moved pages. */
static void aliases_and_handles(void) {
  struct vmem_handle_info info = {.size = sizeof(info)};
  vmem_handle all, one, never;
  uint64_t other, freed;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  OK(vMemReserve(vm, MIB(64), NULL, &other));
  CHECK(scatter(160, 8));
  OK(vmem_gather(vm, va, PAGE, 20, 8 * PAGE, &all));
  OK(vMemMap(vm, other, 20 * PAGE, all, 0, VMEM_MAP_READONLY));
  OK(vmem_retain(vm, va + 80 * PAGE, PAGE, &one));
  OK(vMemUnmap(vm, va + 80 * PAGE, PAGE));
  OK(vMemCreate(vm, 2 * PAGE, NULL, &never));
  OK(vmem_drop_range(vm, all, 3 * PAGE, PAGE, 1, 0));
  OK(compact(&freed));
  CHECK(freed >= MIB(7));
  OK(vmem_check(vm));
  for (unsigned i = 0; i < 20; i++) CHECK(signed_with(other + i * PAGE, 8 * i));
  EQ(vmem_fill(vm, other + 5 * PAGE, PAGE, 1), -EACCES);
  OK(sign(va + 8 * PAGE, 4711));
  CHECK(signed_with(other + PAGE, 4711)); /* still the same page */
  OK(sign(va + 8 * PAGE, 8));
  OK(vMemMap(vm, va + 80 * PAGE, PAGE, one, 0, 0));
  CHECK(all_there(va, 160, 8));
  OK(vmem_handle_query(vm, one, &info));
  EQ(info.mappings, 1);
  OK(vMemRelease(vm, one));
  EQ(vMemMap(vm, va + MIB(20), 20 * PAGE, all, 0, 0), -ERANGE); /* dropped pages are not revived */
  OK(vMemMap(vm, va + MIB(20), 3 * PAGE, all, 0, 0));
  for (unsigned i = 0; i < 3; i++) CHECK(signed_with(va + MIB(20) + i * PAGE, 8 * i));
  OK(vMemMap(vm, va + MIB(30), 2 * PAGE, never, 0, 0));
  EQ(GET(va + MIB(30)), 0);
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vMemFree(vm, other, VMEM_FREE_UNMAP));
  OK(vmem_drop(vm, all));
  OK(vmem_drop(vm, never));
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Slabs in use by an unfinished batch, a call or a read stay; the others are emptied. */
static void what_is_busy_stays(void) {
  int fd = eventfd(0, EFD_CLOEXEC), err;
  struct vmem_after after = after_fd(fd);
  struct vmem_op op = {.op = VMEM_OP_UNMAP, .bytes = PAGE};
  struct vm_access access = {.bytes = 1, .count = 1};
  struct vm_ctx *c;
  uint64_t one = 1, freed;
  vmem_ticket t;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  CHECK(scatter(160, 8));
  op.addr = va + 64 * PAGE;
  OK(vmem_submit(vm, &op, 1, &after, 1, 0, &t));
  c = vm_get(vm, "test", &err);
  access.addr = va + 96 * PAGE + 5;
  pthread_mutex_lock(&c->lock);
  c->virt->accesses = &access;
  pthread_mutex_unlock(&c->lock);
  vm_put(c);
  OK(compact(&freed));
  EQ(freed, MIB(7)); /* the two busy slabs remain, and one for the other 16 pages */
  pthread_mutex_lock(&c->lock);
  c->virt->accesses = NULL;
  pthread_mutex_unlock(&c->lock);
  EQ(write(fd, &one, 8), 8);
  OK(vmem_wait(vm, t, -1));
  op = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = va + 64 * PAGE, .bytes = PAGE};
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(sign(va + 64 * PAGE, 64));
  CHECK(all_there(va, 160, 8));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  close(fd);
}

static void *signal_later(void *arg) {
  uint64_t one = 1;
  usleep(20000);
  return write(*(int *)arg, &one, 8) == 8 ? arg : NULL;
}

/* Nothing moves before the work in `after` has completed. */
static void waits_for_work(void) {
  int fd = eventfd(0, EFD_CLOEXEC);
  struct vmem_after after = after_fd(fd);
  pthread_t thread;
  uint64_t freed, word;
  void *done;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  CHECK(scatter(160, 8));
  EQ(pthread_create(&thread, NULL, signal_later, &fd), 0);
  OK(vmem_compact(vm, UINT64_MAX, &after, 1, 0, &freed));
  EQ(read(fd, &word, 8), 8); /* proof that it was signalled before the call returned */
  EQ(freed, MIB(8));
  pthread_join(thread, &done);
  CHECK(done);
  CHECK(all_there(va, 160, 8));
  EQ(vmem_compact(vm, 1, NULL, 1, 0, NULL), -EINVAL);
  EQ(vmem_compact(vm, 1, NULL, 0, 1, NULL), -EINVAL);
  EQ(vmem_compact(vm + 77, 1, NULL, 0, 0, NULL), -EBADF);
  OK(vmem_close(vm));
  close(fd);
}

/* Large pages move as a unit and stay large pages. */
static void large_pages(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(8), .page_size = MIB(2)};
  struct vmem_range_info r = {.size = sizeof(r)};
  uint64_t freed;
  CHECK(open_slabs(MIB(8), 0, MIB(64)));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  op.addr = va + MIB(8);
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  for (int i = 0; i < 8; i++)
    if (i == 1 || i == 6)
      OK(sign(va + i * MIB(2) + 9 * PAGE, i));
    else
      OK(vMemUnmap(vm, va + i * MIB(2), MIB(2)));
  EQ(stats_of(vm).slab_bytes, MIB(16));
  OK(compact(&freed));
  EQ(freed, MIB(8));
  for (int i = 1; i < 8; i += 5) {
    CHECK(signed_with(va + i * MIB(2) + 9 * PAGE, i));
    OK(vmem_range_query(vm, va + i * MIB(2) + PAGE, &r));
    CHECK(r.flags & VMEM_RANGE_LARGE);
    EQ(vMemUnmap(vm, va + i * MIB(2), PAGE), -EINVAL);
  }
  OK(vmem_check(vm));
  OK(vMemUnmap(vm, va + MIB(2), MIB(2)));
  OK(vMemUnmap(vm, va + MIB(12), MIB(2)));
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_close(vm));
}

/* Compaction creates no slab, and slabs that are more than half full stay. */
static void without_new_memory(void) {
  uint64_t freed;
  CHECK(open_slabs(MIB(1), MIB(4), MIB(64)));
  CHECK(scatter(64, 1));
  for (int i = 0; i < 64; i++)
    if (i % 16 >= 10) OK(vMemUnmap(vm, va + i * PAGE, PAGE));
  OK(compact(&freed));
  EQ(freed, 0);
  for (int i = 0; i < 16; i++)
    if (i < 10 && i >= 5) OK(vMemUnmap(vm, va + i * PAGE, PAGE));
  OK(compact(&freed));
  EQ(freed, MIB(1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A KV cache's pattern: tensors grow in runs of 8 pages, then 90% of the pages are freed at random. */
static void a_fragmented_cache(void) {
  enum { TENSORS = 12, BLOCKS = 200, RUN = 8 };
  static bool live[TENSORS * BLOCKS];
  uint64_t freed;
  struct vmem_stats s;
  unsigned left = 0;
  ONLY_HOST(); /* more memory than a software GPU has */
  memset(live, 0, sizeof(live));
  CHECK(open_slabs(MIB(16), 0, TENSORS * MIB(16)));
  for (unsigned b = 0; b < BLOCKS; b += RUN)
    for (unsigned t = 0; t < TENSORS; t++)
      OK(change(VMEM_OP_POPULATE, va + t * MIB(16) + b * PAGE, RUN * PAGE, VMEM_OP_SPREAD));
  for (unsigned i = 0; i < TENSORS * BLOCKS; i++) {
    uint64_t page = va + i / BLOCKS * MIB(16) + i % BLOCKS * PAGE;
    live[i] = !rnd(10);
    left += live[i];
    if (live[i])
      OK(sign(page, i));
    else
      OK(vMemUnmap(vm, page, PAGE));
  }
  OK(vmem_trim(vm, 0, NULL));
  CHECK(stats_of(vm).slab_bytes > 5 * left * PAGE);
  OK(compact(&freed));
  s = stats_of(vm);
  EQ(s.used_bytes, left * PAGE);
  CHECK(s.slab_bytes <= s.used_bytes + s.used_bytes / 10 + MIB(16));
  for (unsigned i = 0; i < TENSORS * BLOCKS; i++)
    if (live[i]) CHECK(signed_with(va + i / BLOCKS * MIB(16) + i % BLOCKS * PAGE, i));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* ---- failures -------------------------------------------------------------------------------- */

static bool scene(bool handles, vmem_handle *h) {
  uint64_t other;
  if (!open_slabs(MIB(1), 0, MIB(64)) || !scatter(48, 8)) return false;
  if (!handles) return true;
  return !vMemReserve(vm, MIB(8), NULL, &other) && !vmem_gather(vm, va, PAGE, 6, 8 * PAGE, h) &&
         !vMemMap(vm, other, 6 * PAGE, *h, 0, VMEM_MAP_READONLY);
}

/* Whichever driver call or allocation fails, contents are unchanged, slabs emptied before the failure are freed, and
 * the call can be repeated. */
static void each_call_fails(void) {
  static const uint32_t kinds[] = {VMEM_INJECT_MAP | VMEM_INJECT_UNMAP | VMEM_INJECT_FILL | VMEM_INJECT_SLAB,
                                   VMEM_INJECT_HEAP};
  for (int handles = 0; handles < 2; handles++)
    for (int k = 0; k < 2; k++)
      for (uint64_t nth = 0;; nth++) {
        struct vmem_stats before, after;
        uint64_t freed = 77;
        vmem_handle h;
        int ret;
        CHECK(scene(handles, &h));
        before = stats_of(vm);
        OK(vmem_inject(vm, kinds[k], nth, 1, k ? ENOMEM : EIO));
        ret = compact(&freed);
        OK(vmem_inject(vm, 0, 0, 0, 0));
        after = stats_of(vm);
        OK(vmem_check(vm));
        EQ(after.slab_bytes + freed, before.slab_bytes);
        EQ(after.used_bytes, before.used_bytes);
        EQ(after.mapped_bytes, before.mapped_bytes);
        EQ(after.quarantined_bytes, 0);
        CHECK(all_there(va, 48, 8));
        if (ret) {
          EQ(ret, k ? -ENOMEM : -EIO);
          OK(compact(&freed));
          EQ(stats_of(vm).slab_bytes, MIB(1));
          CHECK(all_there(va, 48, 8));
          OK(vmem_check(vm));
        }
        OK(vMemUnmap(vm, va + 8 * PAGE, PAGE));
        OK(vmem_close(vm));
        if (!ret && freed == MIB(2)) break;
        CHECK(nth < 200);
      }
}

/* If the undo fails too, the lost pages are quarantined and reported; everything else keeps working. */
static void undo_fails(void) {
  for (uint64_t nth = 0; nth < 12; nth++) {
    vmem_handle h;
    uint64_t freed;
    int ret;
    CHECK(scene(true, &h));
    OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, nth, 1000, EIO));
    ret = compact(&freed);
    OK(vmem_inject(vm, 0, 0, 0, 0));
    CHECK(ret == -EIO || ret == -ENOTRECOVERABLE);
    CHECK((ret == -ENOTRECOVERABLE) == (stats_of(vm).quarantined_bytes != 0));
    OK(vmem_check(vm));
    OK(compact(&freed));
    OK(vmem_check(vm));
    OK(vmem_drop(vm, h));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* A back end that accepts a batch in one call. */
static struct vm_backend fake;
static int fail_at;

static int fake_bind(void *be, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *r) {
  for (r->done = 0; r->done < n; r->done++) {
    const struct vm_bind_op *op = &ops[r->done];
    if (fail_at-- == 0) return vm_fail(-EIO, "refused");
    if (op->kind == VM_BIND_UNMAP
            ? vm_backend_host.unmap(be, op->addr, op->bytes, op->sparse)
            : vm_backend_host.map(be, op->addr, op->bytes, op->slab, op->offset, op->flags, op->sparse))
      return -EIO;
  }
  return 0;
}

static void in_one_call(void) {
  ONLY_HOST();
  for (int nth = -1; nth < 24; nth++) {
    uint64_t freed;
    vmem_handle h;
    int err;
    struct vm_ctx *c;
    CHECK(scene(true, &h));
    c = vm_get(vm, "test", &err);
    fake = vm_backend_host;
    fake.bind = fake_bind;
    c->be = &fake;
    vm_put(c);
    fail_at = nth;
    err = compact(&freed);
    CHECK(!err || err == -EIO);
    fail_at = -1;
    CHECK(all_there(va, 48, 8));
    OK(vmem_check(vm));
    OK(compact(&freed));
    EQ(stats_of(vm).slab_bytes, MIB(1));
    CHECK(all_there(va, 48, 8));
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* ---- a model --------------------------------------------------------------------------------- */

enum { GRANULES = 384, HANDLES = 24 };

static struct {
  uint64_t page[GRANULES]; /* the mapped page, as an index in word; 0: none */
  bool read_only[GRANULES];
  struct {
    vmem_handle h;
    uint32_t n;
    uint64_t page[8]; /* 0 = given back */
  } hdl[HANDLES];
  uint64_t word[1 << 16]; /* contents of each page; 0: never written */
  uint64_t pages, freed;
} model;

static bool model_holds(void) {
  for (uint32_t i = 0; i < GRANULES; i++) {
    uint64_t p = model.page[i];
    if (!p) continue;
    if (model.word[p] ? !signed_with(va + i * PAGE, model.word[p]) : GET(va + i * PAGE) != 0) {
      printf("granule %u does not show page %llu\n", i, (unsigned long long)p);
      return false;
    }
  }
  return true;
}

static bool free_at(uint32_t i, uint32_t n) {
  for (uint32_t k = 0; k < n; k++)
    if (i + k >= GRANULES || model.page[i + k]) return false;
  return true;
}

static void model_step(void) {
  uint32_t i = rnd(GRANULES), n = 1 + rnd(8), k = rnd(HANDLES), j;
  uint64_t freed;
  if (i + n > GRANULES) n = GRANULES - i;
  switch (rnd(12)) {
  case 0:
  case 1:
  case 2: /* populate */
    if (!free_at(i, n)) break;
    if (change(VMEM_OP_POPULATE, va + i * PAGE, n * PAGE, rnd(2) ? VMEM_OP_SPREAD : 0)) break;
    for (j = i; j < i + n; j++) {
      model.page[j] = ++model.pages;
      model.word[model.pages] = 0;
      model.read_only[j] = false;
    }
    break;
  case 3:
  case 4:
  case 5: /* unmap */
    OK(change(VMEM_OP_UNMAP, va + i * PAGE, n * PAGE, VMEM_OP_HOLES));
    for (j = i; j < i + n; j++) model.page[j] = 0;
    break;
  case 6: /* write */
    for (j = i; j < i + n; j++)
      if (model.page[j] && !model.read_only[j]) {
        model.word[model.page[j]] = ((uint64_t)rnd(1u << 30) << 8) + 1;
        OK(sign(va + j * PAGE, model.word[model.page[j]]));
      }
    break;
  case 7: /* retain what is mapped, or drop such a handle */
    if (model.hdl[k].h) {
      OK(vmem_drop(vm, model.hdl[k].h));
      model.hdl[k].h = 0;
      break;
    }
    for (j = i; j < i + n; j++)
      if (!model.page[j]) return;
    OK(vmem_retain(vm, va + i * PAGE, n * PAGE, &model.hdl[k].h));
    model.hdl[k].n = n;
    for (j = 0; j < n; j++) model.hdl[k].page[j] = model.page[i + j];
    break;
  case 8: /* create pages without mapping them */
    if (model.hdl[k].h || vMemCreate(vm, n * PAGE, NULL, &model.hdl[k].h)) break;
    model.hdl[k].n = n;
    for (j = 0; j < n; j++) {
      model.hdl[k].page[j] = ++model.pages;
      model.word[model.pages] = 0;
    }
    break;
  case 9: /* a second address */
    if (!model.hdl[k].h || !free_at(i, model.hdl[k].n)) break;
    for (j = 0; j < model.hdl[k].n; j++)
      if (!model.hdl[k].page[j]) return;
    n = rnd(2) ? VMEM_MAP_READONLY : 0;
    OK(vMemMap(vm, va + i * PAGE, model.hdl[k].n * PAGE, model.hdl[k].h, 0, n));
    for (j = 0; j < model.hdl[k].n; j++) {
      model.page[i + j] = model.hdl[k].page[j];
      model.read_only[i + j] = n;
    }
    break;
  case 10: /* drop part of a handle */
    if (!model.hdl[k].h || !model.hdl[k].page[j = rnd(model.hdl[k].n)]) break;
    OK(vmem_drop_range(vm, model.hdl[k].h, j * PAGE, PAGE, 1, 0));
    model.hdl[k].page[j] = 0;
    break;
  default: /* compact, sometimes with a failure */
    if (rnd(3) == 0) OK(vmem_inject(vm, rnd(2) ? VMEM_INJECT_HEAP : VMEM_INJECT_HEAP - 1, rnd(40), 1, ENOMEM));
    j = (uint32_t)-vmem_compact(vm, rnd(2) ? UINT64_MAX : MIB(1), NULL, 0, 0, &freed);
    OK(vmem_inject(vm, 0, 0, 0, 0));
    CHECK(j == 0 || j == ENOMEM);
    model.freed += freed;
    CHECK(model_holds());
  }
}

static void random_model(void) {
  const char *from = getenv("COMPACT_SEED");
  const int steps = on_host() ? 6000 : 1500;
  for (int background = 0; background < 1 + on_host(); background++) {
    seed = from ? strtoull(from, NULL, 0) : 88172645463325252ull + (uint64_t)getpid() * 7919;
    printf("COMPACT_SEED=%llu\n", (unsigned long long)seed);
    memset(&model, 0, sizeof(model));
    CHECK(open_slabs(MIB(1), MIB(24), GRANULES * PAGE));
    if (background) { /* freed pages are dirty, as on a GPU */
      int err;
      struct vm_ctx *c = vm_get(vm, "test", &err);
      fake = vm_backend_host;
      fake.discard = NULL;
      c->be = &fake;
      c->phys->clean.background = true;
      vm_put(c);
    }
    for (int step = 0; step < steps; step++) {
      model_step();
      if (failures_here) return;
      OK(vmem_check(vm));
    }
    CHECK(model_holds());
    CHECK(model.freed > (uint64_t)steps * MIB(20) / 6000);
    for (int k = 0; k < HANDLES; k++)
      if (model.hdl[k].h) OK(vmem_drop(vm, model.hdl[k].h));
    OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
    EQ(stats_of(vm).used_bytes, 0);
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

/* ---- threads --------------------------------------------------------------------------------- */

static bool stop;
static int bad;

/* Maps and unmaps in its own address range; tolerates -EBUSY while one of its pages is being moved. */
static void *user(void *arg) {
  uint64_t base = va + (uint64_t)(uintptr_t)arg * MIB(8), r = 12345 + (uint64_t)(uintptr_t)arg;
  uint64_t word[128] = {0};
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
    uint32_t i = (uint32_t)((r = r * 6364136223846793005ull + 1442695040888963407ull) >> 40) % 128;
    int err = 0;
    if (!word[i]) {
      do err = change(VMEM_OP_POPULATE, base + i * PAGE, PAGE, 0);
      while (err == -EBUSY);
      if (!err) {
        do err = sign(base + i * PAGE, r);
        while (err == -EBUSY);
        word[i] = r;
      }
    } else {
      uint64_t w[2];
      do err = vmem_read(vm, w, base + i * PAGE, sizeof(w));
      while (err == -EBUSY);
      if (err || w[0] != word[i]) bad = 1;
      do err = change(VMEM_OP_UNMAP, base + i * PAGE, PAGE, 0);
      while (err == -EBUSY);
      word[i] = 0;
    }
    if (err) bad = err;
  }
  return NULL;
}

static void among_threads(void) {
  pthread_t t[3];
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  stop = false;
  bad = 0;
  for (uintptr_t i = 0; i < 3; i++) EQ(pthread_create(&t[i], NULL, user, (void *)i), 0);
  for (int i = 0; i < 300; i++) {
    int err = compact(NULL);
    if (err) bad = err;
    if (i % 50 == 0 && vmem_check(vm)) bad = -EIO;
    usleep(300);
  }
  __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
  for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
  EQ(bad, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void *compacts(void *arg) {
  uint64_t freed;
  (void)arg;
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) vmem_compact(vm, UINT64_MAX, NULL, 0, 0, &freed);
  return NULL;
}

static void *trims(void *arg) {
  uint64_t freed;
  (void)arg;
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) vmem_trim(vm, 0, &freed);
  return NULL;
}

/* Maps its own pages and unmaps three of four immediately, so that slabs of two pages become half empty or empty. */
static void *churns(void *arg) {
  uint64_t base = va + (uint64_t)(uintptr_t)arg * MIB(4);
  unsigned r = (unsigned)(uintptr_t)arg + 1;
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
    uint64_t page = base + (uint64_t)(rand_r(&r) % 60) * PAGE;
    bool stays = !change(VMEM_OP_POPULATE, page, PAGE, 0) && rand_r(&r) % 4 == 0;
    if (!stays) change(VMEM_OP_UNMAP, page, PAGE, 0); /* -EBUSY while the page is being moved */
  }
  return NULL;
}

/* Another thread frees a slab that compact has chosen but not reserved yet. */
static void while_slabs_go(void) {
  void *(*roles[])(void *) = {churns, churns, churns, churns, churns, compacts, compacts, trims};
  pthread_t t[8];
  CHECK(open_slabs(2 * PAGE, 0, MIB(64)));
  stop = false;
  for (uintptr_t i = 0; i < 8; i++) EQ(pthread_create(&t[i], NULL, roles[i], (void *)i), 0);
  usleep(3000000);
  __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
  for (int i = 0; i < 8; i++) pthread_join(t[i], NULL);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* ---- memory that the driver has allocated ------------------------------------------------------- */

static uint64_t held, most;
static bool holding_up;

static int counted_create(void *be, uint64_t bytes, uint64_t page, uint32_t location, int32_t device, uint64_t *slab) {
  int err = vm_backend_host.slab_create(be, bytes, page, location, device, slab);
  if (!err && (held += bytes) > most) most = held;
  return err;
}

static int counted_destroy(void *be, uint64_t slab, uint64_t bytes) {
  if (__atomic_load_n(&holding_up, __ATOMIC_RELAXED)) {
    __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
    usleep(100000);
  }
  held -= bytes;
  return vm_backend_host.slab_destroy(be, slab, bytes);
}

static void *compacts_once(void *arg) {
  *(int *)arg = compact(NULL);
  return NULL;
}

/* A slab that is being freed still counts against mem_limit: a call that needs the memory waits. */
static void within_the_limit(void) {
  ONLY_HOST(); /* the test counts its slabs */
  pthread_t t;
  int err;
  struct vm_ctx *c;
  CHECK(open_slabs(MIB(1), MIB(3), MIB(64)));
  c = vm_get(vm, "test", &err);
  fake = vm_backend_host;
  fake.slab_create = counted_create;
  fake.slab_destroy = counted_destroy;
  c->be = &fake;
  vm_put(c);
  held = most = 0;
  for (uint64_t at = 0; at < MIB(3); at += MIB(1)) OK(change(VMEM_OP_POPULATE, va + at, MIB(1), 0));
  OK(change(VMEM_OP_UNMAP, va + 4 * PAGE, 12 * PAGE, 0));
  OK(change(VMEM_OP_UNMAP, va + 20 * PAGE, 12 * PAGE, 0));
  stop = false;
  holding_up = true;
  EQ(pthread_create(&t, NULL, compacts_once, &bad), 0);
  while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) usleep(100);
  __atomic_store_n(&holding_up, false, __ATOMIC_RELAXED);
  OK(change(VMEM_OP_POPULATE, va + MIB(8), MIB(1), 0));
  pthread_join(t, NULL);
  EQ(bad, 0);
  EQ(most, MIB(3));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  EQ(held, 0);
}

/* A driver that is suspended for too long is reported as an error, not treated as a slab that cannot move. */
static void suspended(void) {
  uint64_t freed = 1;
  CHECK(open_slabs(MIB(1), 0, MIB(64)));
  CHECK(scatter(160, 8));
  OK(vmem_inject(vm, VMEM_INJECT_FILL, 0, 1, EAGAIN)); /* the first slab's copies */
  EQ(compact(&freed), -EAGAIN);
  EQ(freed, 0);
  EQ(stats_of(vm).slab_bytes, MIB(10));
  CHECK(all_there(va, 160, 8));
  OK(vmem_check(vm));
  OK(compact(&freed));
  EQ(freed, MIB(8));
  CHECK(all_there(va, 160, 8));
  OK(vmem_close(vm));
}

MAIN(TEST(empties_slabs), TEST(as_much_as_wanted), TEST(keeps_pool_low), TEST(aliases_and_handles),
     TEST(handle_in_pieces), TEST(what_is_busy_stays), TEST(waits_for_work), TEST(large_pages),
     TEST(without_new_memory), TEST(a_fragmented_cache), TEST(each_call_fails), TEST(undo_fails), TEST(suspended),
     TEST(in_one_call), TEST(random_model), TEST(among_threads), TEST(while_slabs_go), TEST(within_the_limit))
