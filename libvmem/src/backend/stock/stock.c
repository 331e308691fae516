/* SPDX-License-Identifier: MIT */
/* The back end "stock": opens it, or refuses with the reason. See stock.h for how it works. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "backend/stock/stock.h"
#include "base/error.h"

enum { SMALLEST_GRANULE = 4 << 10, DEFAULT_GRANULE = 64 << 10, LARGEST_PAGE = 2 << 20 };
#define DEFAULT_SLAB (64ull << 20)

struct trial {
  uint64_t addr, bytes;
  uint32_t memory;
};

/* Creates a range and maps a page through a candidate: only the descriptor in which CUDA
 * registered this process's GPU address space does both. */
static int trial(struct nvidia *s, void *arg) {
  const struct trial *t = arg;
  int err = ext_create(s, t->addr, t->bytes), undo;
  if (err) return err;
  err = ext_map(s, t->addr, t->bytes, t->memory, 0, UVM_MAPPING_DEFAULT);
  undo = ext_free(s, t->addr, t->bytes);
  return err ? err : undo;
}

static int find_uvm(struct nvidia *s) {
  struct trial t = {.bytes = 64 << 10};
  uint64_t slab;
  int err;
  err = nvidia_check_uvm_node();
  if (err) return err;
  err = stock_slab_create(s, t.bytes, t.bytes, VMEM_DEVICE, 0, &slab);
  if (err) return err;
  t.memory = stock_slab_object(slab);
  err = nvidia_host_range(t.bytes, NVIDIA_VA_ALIGN, &t.addr);
  if (!err) {
    err = nvidia_find_uvm(s, trial, &t);
    munmap((void *)(uintptr_t)t.addr, t.bytes);
  }
  if (err) {
    VM_UNDO(stock_slab_destroy(s, slab, t.bytes));
    return err;
  }
  return stock_slab_destroy(s, slab, t.bytes);
}

static void stock_close(void *be) {
  nvidia_close(be);
  free(be);
}

static int stock_open(const struct vmem_open_opts *opts, struct vm_be_info *info, void **be) {
  struct nvidia *s = calloc(1, sizeof(*s));
  struct vmem_error before;
  int err;
  vm_error_save(&before); /* the attempts below may record errors that do not concern the caller */
  if (!s) return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*s));
  nvidia_init(s);
  s->granule = opts->granule ? opts->granule : DEFAULT_GRANULE;
  if (s->granule < SMALLEST_GRANULE)
    err = vm_fail_at(-EOPNOTSUPP, 0, s->granule, SMALLEST_GRANULE,
                     "granule of %llu bytes: the GPU's smallest page is 4 KiB", (unsigned long long)s->granule);
  else if (s->granule > LARGEST_PAGE)
    err = vm_fail_at(-EOPNOTSUPP, 0, s->granule, LARGEST_PAGE, "granule of %llu bytes: the GPU's largest page is 2 MiB",
                     (unsigned long long)s->granule);
  else
    err = nvidia_open(s, opts, stock_trial);
  if (!err) err = find_uvm(s);
  if (err) {
    stock_close(s);
    return err;
  }
  gpu_describe(s->base.gpu, &info->pub);
  memcpy(info->pub.driver, s->rm.version_text, sizeof(info->pub.driver));
  info->pub.caps = VMEM_CAP_ALIAS | VMEM_CAP_READONLY | VMEM_CAP_HOST_PAGES | VMEM_CAP_VISIBLE | VMEM_CAP_PLAIN |
                   VMEM_CAP_JOIN | (s->granule >= 64 << 10 ? VMEM_CAP_SPARSE : 0) |
                   (s->num_devices > 1 ? VMEM_CAP_PEER : 0);
  info->pub.granule = s->granule;
  info->pub.page_sizes = s->granule;
  for (uint64_t size = s->granule; size <= LARGEST_PAGE; size <<= 1) info->pub.page_sizes |= size;
  info->all_page_sizes = 2 * LARGEST_PAGE - SMALLEST_GRANULE;
  info->how = " through UVM";
  rm_describe(&s->rm, info->about, sizeof(info->about));
  info->unknown_branch = s->rm.careful;
  info->pub.slab_size = DEFAULT_SLAB;
  info->most_mappings = STOCK_MAX_MAPPINGS / s->num_devices;
  info->pub.max_mappings = info->most_mappings / 2; /* other processes need handles of the same range */
  info->pool_high = 1ull << 30;
  info->pool_delay = VM_POOL_DELAY;
  info->fresh_is_zero = false; /* RM scrubs freed memory, but does not promise to */
  info->one_page_slabs = false;
  info->unreserve_unmaps = true;
  vm_error_restore(&before);
  *be = s;
  return 0;
}

const struct vm_backend vm_backend_stock = {
    .name = "stock",
    .open = stock_open,
    .close = stock_close,
    .reserve = stock_reserve,
    .unreserve = stock_unreserve,
    .slab_create = stock_slab_create,
    .slab_destroy = stock_slab_destroy,
    .map = stock_map,
    .unmap = stock_unmap,
    .remap = stock_remap,
    GPU_BE_ENTRIES,
};
