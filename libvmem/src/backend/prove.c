/* SPDX-License-Identifier: MIT */
/*
 * prove.c - opening a back end, with a proof that it can map a page.
 *
 * The interfaces below are not promised to be stable, so none is trusted: each time one is opened,
 * a page is mapped at two addresses, written through each, read through the other, and unmapped.
 * vmem_open and vmem_probe both open here. The proof calls the back end directly: no statistics
 * count it, and vmem_inject does not affect it.
 */
#include <errno.h>
#include <stdio.h>

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

/* Both ends of a page. */
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

/* The first failure is the one reported; what follows it takes back what was done. */
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

static int prove(const struct vm_backend *t, void *be, const struct vm_be_info *info) {
  uint64_t page = info->pub.granule, bytes = info->one_page_slabs ? page : 4 * page, addr, slab, priv;
  uint32_t flags = info->pub.caps & VMEM_CAP_PLAIN ? VMEM_RESERVE_PLAIN : 0, kind;
  struct vmem_error first = {0};
  bool gone = false;
  int err = t->reserve(be, 2 * page, page > LEAST_ALIGN ? page : LEAST_ALIGN, flags, &addr, &kind, &priv);
  if (err) return err;
  if (!failed(&first, t->slab_create(be, bytes, page, VMEM_DEVICE, 0, &slab))) {
    /* Neither the address nor the offset is aligned to more than the granule: a page of just that size. */
    failed(&first, map_and_check(t, be, info, addr, slab, bytes - page));
    failed(&first, t->unreserve(be, addr, 2 * page, priv, &gone));
    failed(&first, t->slab_destroy(be, slab, bytes));
  } else {
    failed(&first, t->unreserve(be, addr, 2 * page, priv, &gone));
  }
  if (first.code) vm_error_restore(&first);
  return first.code;
}

/* Says that it was the proof that failed. A range in an unknown state goes with the back end. */
static int name_failure(const struct vm_backend *t) {
  struct vmem_error why, named;
  vm_error_save(&why);
  named = why;
  if (why.code == -ENOTRECOVERABLE) named.code = -EIO;
  snprintf(named.text, sizeof(named.text), "back end %s opened, but failed its proof: %.400s", t->name, why.text);
  vm_error_restore(&named);
  return named.code;
}

int vm_backend_open(const struct vm_backend *t, const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  uint64_t begun = vm_now_ns(), opened;
  int err = t->open(opts, info, be);
  if (err) return err;
  opened = vm_now_ns();
  if (!info->table) info->table = t;
  err = prove(info->table, *be, info);
  info->open_ns = opened - begun;
  info->prove_ns = vm_now_ns() - opened;
  if (!err) return 0;
  err = name_failure(t);
  VM_UNDO(info->table->close(*be));
  return err;
}

int vm_backend_probe(const struct vm_backend *t, int32_t device, uint32_t flags, struct vmem_probe_info *found) {
  struct vmem_open_opts opts = {
      .size = sizeof(opts), .backend = "auto", .flags = flags, .num_devices = 1, .devices = {device}};
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
           "%sa page of %llu bytes was mapped%s, written, read and unmapped: opened in %.1f ms, proved in %.1f ms",
           info.patched, (unsigned long long)info.pub.granule, info.how ? info.how : "", (double)info.open_ns / 1e6,
           (double)info.prove_ns / 1e6);
  return 0;
}
