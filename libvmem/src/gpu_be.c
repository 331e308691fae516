/* SPDX-License-Identifier: MIT */
/* Table entries that are the same for every back end on a GPU. */
#include "gpu_be.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

static struct gpu *gpu_of(void *be) { return ((struct gpu_be *)be)->gpu; }

int gpu_be_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes,
                    uint64_t *total_bytes) {
  return gpu_mem_info(gpu_of(be), location, device, free_bytes, total_bytes);
}

int gpu_be_fill(void *be, const struct vm_be_range *ranges, size_t n, uint8_t value,
                const vm_event *after, size_t num_after, vm_event *done) {
  return gpu_fill(gpu_of(be), ranges, n, value, after, num_after, done);
}

int gpu_be_read(void *be, void *dst, uint64_t addr, uint64_t bytes) {
  return gpu_read(gpu_of(be), dst, addr, bytes);
}

int gpu_be_write(void *be, uint64_t addr, const void *src, uint64_t bytes) {
  return gpu_write(gpu_of(be), addr, src, bytes);
}

int gpu_be_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after,
                size_t num_after, vm_event *done) {
  return gpu_copy(gpu_of(be), copies, n, after, num_after, done);
}

int gpu_be_event_from(void *be, uint32_t kind, uint64_t handle, vm_event *event) {
  return gpu_event_from(gpu_of(be), kind, handle, event);
}

int gpu_be_event_query(void *be, vm_event event) { return gpu_event_query(gpu_of(be), event); }

int gpu_be_event_wait(void *be, vm_event event) { return gpu_event_wait(gpu_of(be), event); }

int gpu_be_stream_wait(void *be, uint64_t stream, vm_event event) {
  return gpu_stream_wait(gpu_of(be), stream, event);
}

void gpu_be_event_put(void *be, vm_event event) { gpu_event_put(gpu_of(be), event); }

/* ---- probe ---- */

/* Fills a mapped range and looks at both ends. -EIO on difference. */
static int check_range(const struct vm_backend *t, void *be, uint64_t addr, uint64_t bytes) {
  struct vm_be_range range = {addr, bytes};
  uint8_t got[64];

  for (unsigned round = 0; round < 2; round++) {
    uint8_t value = round ? 0x5a : 0xa5;
    vm_event done = 0;
    int err = t->fill(be, &range, 1, value, NULL, 0, &done);

    if (!err && done) {
      err = t->event_wait(be, done);
      t->event_put(be, done);
    }
    for (unsigned end = 0; end < 2 && !err; end++) {
      err = t->read(be, got, end ? addr + bytes - sizeof(got) : addr, sizeof(got));
      for (unsigned i = 0; i < sizeof(got) && !err; i++)
        if (got[i] != value)
          err = vm_fail_at(-EIO, addr, bytes, 0,
                           "a page that was filled with 0x%02x reads as 0x%02x", value, got[i]);
    }
    if (err)
      return err;
  }
  return 0;
}

static int note(struct vmem_error *first, int err) {
  if (err && !first->code)
    vm_error_save(first);
  return err;
}

/* Leaves nothing behind, whatever fails; the first failure is the one reported. */
static int prove(const struct vm_backend *t, void *be, const struct vm_be_info *info) {
  uint64_t page = info->pub.granule, bytes = info->one_page_slabs ? page : 4 * page;
  uint64_t addr, slab, priv;
  struct vmem_error first = {0};
  uint32_t kind;
  bool made;
  int err = t->reserve(be, 2 * page, 0, VMEM_RESERVE_PLAIN, &addr, &kind, &priv);

  if (err)
    return err;
  made = !note(&first, t->slab_create(be, bytes, page, VMEM_DEVICE, 0, &slab));
  /* Neither the address nor the offset aligned to more than the granule: a page of that size. */
  if (made && !note(&first, t->map(be, addr + page, page, slab, bytes - page, 0, false))) {
    note(&first, check_range(t, be, addr + page, page));
    note(&first, t->unmap(be, addr + page, page, false));
  }
  note(&first, t->unreserve(be, addr, 2 * page, priv));
  if (made)
    note(&first, t->slab_destroy(be, slab, bytes));
  if (first.code)
    vm_error_restore(&first);
  return first.code;
}

int gpu_be_probe(const struct vm_backend *t, const char *how, int32_t device, uint32_t flags,
                 struct vmem_probe_info *info) {
  struct vmem_open_opts opts = {
      .size = sizeof(opts), .backend = "auto", .flags = flags, .num_devices = 1, .devices = {device}};
  struct vm_be_info be_info = {0};
  char abi[40] = "";
  void *be;
  int err = t->open(&opts, &be_info, &be);

  if (err)
    return err;
  if (be_info.table)
    t = be_info.table;
  info->caps = be_info.pub.caps;
  info->page_sizes = be_info.pub.page_sizes;
  memcpy(info->driver, be_info.pub.driver, sizeof(info->driver));
  memcpy(info->device_name, be_info.pub.device_name, sizeof(info->device_name));
  if (((struct gpu_be *)be)->abi)
    snprintf(abi, sizeof(abi), "patched driver, ABI %u: ", ((struct gpu_be *)be)->abi);
  err = prove(t, be, &be_info);
  if (!err)
    snprintf(info->reason, sizeof(info->reason),
             "%sa page of %llu bytes was mapped%s, written, read and unmapped", abi,
             (unsigned long long)be_info.pub.granule, how);
  t->close(be);
  return err;
}
