/* SPDX-License-Identifier: MIT */
/*
 * open.c - opens a back end and tests that it can map a page.
 *
 * The driver interfaces are not guaranteed to be stable, so every open runs the opening test: it maps a page at two
 * addresses, writes through each, reads through the other, and unmaps it. vmem_open and vmem_probe both open here. The
 * test calls the back end directly: no statistics count it, and vmem_inject does not affect it.
 *
 * With a driver of an unknown branch the test also checks memory contents after every call: four different pages,
 * mapped one by one, as one run, read-only, and at an address where another page was mapped before. Finally it checks
 * that freed memory is returned. A kernel's write to a read-only page would destroy this process's CUDA context, so
 * only `vmem selftest` tries it.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/error.h"

#define LEAST_ALIGN (2ull << 20)

static int fill(const struct vm_backend *t, void *be, uint64_t addr, uint64_t bytes, uint8_t value) {
  struct vm_be_range range = {addr, bytes};
  vm_event done = 0;
  int err = t->fill(be, &range, 1, value, NULL, 0, &done);
  if (!err && done) {
    err = t->event_wait(be, done);
    t->event_put(be, done);
  }
  return err;
}

/* Checks both ends of a page. */
static int expect(const struct vm_backend *t, void *be, uint64_t addr, uint64_t bytes, uint8_t value) {
  uint8_t got[64];
  for (unsigned end = 0; end < 2; end++) {
    uint64_t at = end ? addr + bytes - sizeof(got) : addr;
    int err = t->read(be, got, at, sizeof(got));
    if (err) return err;
    for (unsigned i = 0; i < sizeof(got); i++)
      if (got[i] != value)
        return vm_fail_at(-EIO, at + i, 1, 0,
                          "the byte at 0x%llx, in a page of %llu bytes filled with 0x%02x, reads as 0x%02x",
                          (unsigned long long)(at + i), (unsigned long long)bytes, value, got[i]);
  }
  return 0;
}

static int check_contents(const struct vm_backend *t, void *be, uint64_t one, uint64_t other, uint64_t bytes) {
  int err = fill(t, be, one, bytes, 0xa5);
  if (!err) err = expect(t, be, other, bytes, 0xa5);
  if (!err) err = fill(t, be, other, bytes, 0x5a);
  return err ? err : expect(t, be, one, bytes, 0x5a);
}

/* Records only the first failure, which is reported: later calls undo what was done. */
static bool failed(struct vmem_error *first, int err) {
  if (err && !first->code) vm_error_save(first);
  return err != 0;
}

static int map_and_check(const struct vm_backend *t, void *be, const struct vm_be_info *info, uint64_t addr,
                         uint64_t slab, uint64_t offset) {
  uint64_t page = info->pub.granule;
  struct vmem_error first = {0};
  bool alias = info->pub.caps & VMEM_CAP_ALIAS;
  if (failed(&first, t->map(be, addr + page, page, slab, offset, 0, false))) return first.code;
  if (alias && failed(&first, t->map(be, addr, page, slab, offset, 0, false))) alias = false;
  if (!first.code && !info->no_contents)
    failed(&first, check_contents(t, be, addr + page, alias ? addr : addr + page, page));
  if (alias) failed(&first, t->unmap(be, addr, page, false));
  failed(&first, t->unmap(be, addr + page, page, false));
  if (first.code) vm_error_restore(&first);
  return first.code;
}

static int test_page(const struct vm_backend *t, void *be, const struct vm_be_info *info) {
  uint64_t page = info->pub.granule, bytes = info->one_page_slabs ? page : 4 * page, addr, slab, priv;
  uint32_t flags = info->pub.caps & VMEM_CAP_PLAIN ? VMEM_RESERVE_PLAIN : 0, kind;
  struct vmem_error first = {0};
  bool gone = false;
  int err = t->reserve(be, 2 * page, page > LEAST_ALIGN ? page : LEAST_ALIGN, flags, &addr, &kind, &priv);
  if (err) return err;
  if (!failed(&first, t->slab_create(be, bytes, page, VMEM_DEVICE, 0, &slab))) {
    /* Neither address nor offset is aligned to more than the granule, so the driver must use pages of that size. */
    failed(&first, map_and_check(t, be, info, addr, slab, bytes - page));
    failed(&first, t->unreserve(be, addr, 2 * page, priv, &gone));
    failed(&first, t->slab_destroy(be, slab, bytes));
  } else {
    failed(&first, t->unreserve(be, addr, 2 * page, priv, &gone));
  }
  if (first.code) vm_error_restore(&first);
  return first.code;
}

/* ---- drivers of unknown branches ------------------------------------------------------------- */

enum { PAGES = 4, SPAN = 16, TRIES = 8 };
#define LOT (32ull << 20)
#define LITTLE (4ull << 20)

struct page_test {
  const struct vm_backend *t;
  void *be;
  uint64_t page, addr, slab;
  uint8_t *seen; /* buffer of one page */
};

static int map_page(const struct page_test *p, unsigned place, unsigned page, uint32_t flags) {
  return p->t->map(p->be, p->addr + place * p->page, p->page, p->slab, page * p->page, flags, false);
}

static int fill_place(const struct page_test *p, unsigned place, uint8_t value) {
  return fill(p->t, p->be, p->addr + place * p->page, p->page, value);
}

/* Checks every byte of the page at index `place` of the range. */
static int holds(const struct page_test *p, unsigned place, uint8_t value, const char *when) {
  uint64_t addr = p->addr + place * p->page;
  int err = p->t->read(p->be, p->seen, addr, p->page);
  for (uint64_t i = 0; i < p->page && !err; i++)
    if (p->seen[i] != value)
      err = vm_fail_at(-EIO, addr + i, 1, 0, "%s: the byte at 0x%llx reads as 0x%02x, not as 0x%02x", when,
                       (unsigned long long)(addr + i), p->seen[i], value);
  return err;
}

static uint8_t mark(unsigned page) { return (uint8_t)(0x11 * (page + 1)); }

static int pages_are_themselves(const struct page_test *p) {
  int err = 0;
  for (unsigned i = 0; i < PAGES && !err; i++) err = map_page(p, 2 * i, i, 0);
  for (unsigned i = 0; i < PAGES && !err; i++) err = fill_place(p, 2 * i, mark(i));
  for (unsigned i = 0; i < PAGES && !err; i++) err = holds(p, 2 * i, mark(i), "pages mapped one by one");
  if (!err) err = p->t->map(p->be, p->addr + 2 * PAGES * p->page, PAGES * p->page, p->slab, 0, 0, false);
  for (unsigned i = 0; i < PAGES && !err; i++) err = holds(p, 2 * PAGES + i, mark(i), "pages mapped as one run");
  return err;
}

static int read_only_follows(const struct page_test *p) {
  const unsigned place = SPAN - 3, page = 2;
  int err = map_page(p, place, page, VMEM_MAP_READONLY);
  if (!err) err = holds(p, place, mark(page), "a page mapped read-only");
  if (!err) err = fill_place(p, 2 * page, 0x99);
  return err ? err : holds(p, place, 0x99, "a page mapped read-only, written through another address");
}

static int address_changes_page(const struct page_test *p) {
  int err = p->t->unmap(p->be, p->addr, p->page, false);
  if (!err) err = map_page(p, 0, 1, 0);
  if (!err) err = holds(p, 0, mark(1), "an address where another page was mapped");
  if (!err) err = map_page(p, SPAN - 1, 0, 0);
  return err ? err : holds(p, SPAN - 1, mark(0), "a page that was unmapped, at another address");
}

static int test_contents(const struct vm_backend *t, void *be, const struct vm_be_info *info) {
  struct page_test p = {.t = t, .be = be, .page = info->pub.granule};
  struct vmem_error first = {0};
  uint64_t priv;
  uint32_t kind;
  bool gone = false;
  int err;
  if (info->no_contents) return 0;
  p.seen = malloc(p.page);
  if (!p.seen) return vm_fail(-ENOMEM, "heap: %llu bytes", (unsigned long long)p.page);
  err = t->reserve(be, SPAN * p.page, LEAST_ALIGN, VMEM_RESERVE_PLAIN, &p.addr, &kind, &priv);
  if (!err && !failed(&first, t->slab_create(be, PAGES * p.page, p.page, VMEM_DEVICE, 0, &p.slab))) {
    if (!failed(&first, pages_are_themselves(&p)) && !failed(&first, read_only_follows(&p)))
      failed(&first, address_changes_page(&p));
    failed(&first, t->unreserve(be, p.addr, SPAN * p.page, priv, &gone));
    failed(&first, t->slab_destroy(be, p.slab, PAGES * p.page));
  } else if (!err) {
    failed(&first, t->unreserve(be, p.addr, SPAN * p.page, priv, &gone));
  }
  free(p.seen);
  if (first.code) vm_error_restore(&first);
  return err ? err : first.code;
}

/* Creates, maps, unmaps and frees a slab; *lost: the device's free bytes before minus those after. */
static int lose(const struct vm_backend *t, void *be, uint64_t addr, uint64_t bytes, uint64_t page, int64_t *lost) {
  struct vmem_error first = {0};
  uint64_t before, after, total, slab;
  int err = t->mem_info(be, VMEM_DEVICE, 0, &before, &total);
  if (!err) err = t->slab_create(be, bytes, page, VMEM_DEVICE, 0, &slab);
  if (err) return err;
  if (!failed(&first, t->map(be, addr, bytes, slab, 0, 0, false))) failed(&first, t->unmap(be, addr, bytes, false));
  failed(&first, t->slab_destroy(be, slab, bytes));
  if (!failed(&first, t->mem_info(be, VMEM_DEVICE, 0, &after, &total))) *lost = (int64_t)(before - after);
  if (first.code) vm_error_restore(&first);
  return first.code;
}

/* A mapping keeps its memory even after the memory is freed; unmapping must release it. Each try uses other addresses,
 * because a map replaces what was there. Several tries, because other processes may be allocating memory. */
static int test_release(const struct vm_backend *t, void *be, const struct vm_be_info *info) {
  uint64_t page = info->pub.granule, bytes = page > LOT ? page : LOT, addr, priv;
  struct vmem_error first = {0};
  int64_t lost = 0;
  uint32_t kind;
  bool gone = false;
  int err =
      t->reserve(be, TRIES * bytes, page > LEAST_ALIGN ? page : LEAST_ALIGN, VMEM_RESERVE_PLAIN, &addr, &kind, &priv);
  if (err) return err;
  for (unsigned i = 0; i < TRIES; i++)
    if (failed(&first, lose(t, be, addr + i * bytes, bytes, page, &lost)) || lost < (int64_t)LITTLE) break;
  if (!first.code && lost >= (int64_t)LITTLE)
    failed(&first, vm_fail_at(-EIO, addr, bytes, 0,
                              "memory that was unmapped and freed does not come back: %lld bytes or more were lost in "
                              "each of %d tries; unmapping seems to do nothing",
                              (long long)lost, TRIES));
  failed(&first, t->unreserve(be, addr, TRIES * bytes, priv, &gone));
  if (first.code) vm_error_restore(&first);
  return first.code;
}

static int test_back_end(const struct vm_backend *t, void *be, const struct vm_be_info *info) {
  int err = test_page(t, be, info);
  if (!err && info->unknown_branch) err = test_contents(t, be, info);
  return err || !info->unknown_branch ? err : test_release(t, be, info);
}

/* Adds to the error that the opening test failed. Closing the back end cleans up a range in an unknown state. */
static int name_failure(const struct vm_backend *t) {
  struct vmem_error why, named;
  vm_error_save(&why);
  named = why;
  if (why.code == -ENOTRECOVERABLE) named.code = -EIO;
  snprintf(named.text, sizeof(named.text), "back end %s opened, but failed its opening test: %.400s", t->name,
           why.text);
  vm_error_restore(&named);
  return named.code;
}

int vm_backend_open(const struct vm_backend *t, const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  uint64_t begun = vm_now_ns(), opened;
  int err = t->open(opts, info, be);
  if (err) return err;
  opened = vm_now_ns();
  if (!info->table) info->table = t;
  err = test_back_end(info->table, *be, info);
  info->open_ns = opened - begun;
  info->test_ns = vm_now_ns() - opened;
  if (!err) return 0;
  err = name_failure(t);
  VM_UNDO(info->table->close(*be));
  return err;
}

int vm_backend_probe(const struct vm_backend *t, int32_t device, struct vmem_probe_info *found) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .backend = "auto", .num_devices = 1, .devices = {device}};
  struct vm_be_info info = {0};
  struct vmem_error why;
  void *be;
  snprintf(found->backend, sizeof(found->backend), "%s", t->name);
  found->error = vm_backend_open(t, &opts, &info, &be);
  found->usable = !found->error;
  found->caps = info.pub.caps;
  found->page_sizes = info.all_page_sizes ? info.all_page_sizes : info.pub.page_sizes;
  snprintf(found->driver, sizeof(found->driver), "%s", info.pub.driver);
  snprintf(found->device_name, sizeof(found->device_name), "%s", info.pub.device_name);
  if (found->error) {
    vm_error_save(&why);
    snprintf(found->reason, sizeof(found->reason), "%s", why.text);
    return found->error;
  }
  info.table->close(be);
  snprintf(found->reason, sizeof(found->reason),
           "%s%sa page of %llu bytes was mapped%s, written, read and unmapped%s: opened in %.1f ms, tested in %.1f ms",
           info.about, info.about[0] ? ": " : "", (unsigned long long)info.pub.granule, info.how ? info.how : "",
           info.unknown_branch ? ", and the driver behaved like a known driver in every check" : "",
           (double)info.open_ns / 1e6, (double)info.test_ns / 1e6);
  return 0;
}
