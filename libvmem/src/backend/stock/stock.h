/* SPDX-License-Identifier: MIT */
/*
 * stock.h - the parts of the back end "stock": NVIDIA's unmodified driver below 2 MiB.
 *
 * Physical memory is allocated from the resource manager (rm.h) as a client of our own; addresses
 * are external ranges in the address space that CUDA's own /dev/nvidia-uvm descriptor holds, and
 * pages are mapped into them with UVM's ioctls. One ioctl maps a run on all devices of the context.
 *
 * RM promises nothing about the contents of new memory, so the core zeroes new pages as it zeroes
 * freed ones: through a mapping of the whole slab in a plain range of its own, which takes one more
 * driver handle per slab and device.
 */
#ifndef VMEM_STOCK_H
#define VMEM_STOCK_H

#include "backend/nvidia/nvidia.h"

/* Limit on the live mappings of one context, over all devices: the driver's handle range minus a
 * reserve for the other users of UVM on the machine, whose calls would otherwise fail too. */
enum { STOCK_MAX_MAPPINGS = RM_HANDLES - (48 << 10) };

/* ---- ranges.c: UVM's calls on external ranges, on every device of the context ---- */

int ext_create(const struct nvidia *s, uint64_t addr, uint64_t bytes);
int ext_free(const struct nvidia *s, uint64_t addr, uint64_t bytes);
/* Replaces existing mappings. mapping_type: UVM_MAPPING_*. On failure the range is unmapped. */
int ext_map(const struct nvidia *s, uint64_t addr, uint64_t bytes, uint32_t memory, uint64_t offset,
            uint32_t mapping_type);
int ext_unmap(const struct nvidia *s, uint64_t addr, uint64_t bytes);
/* Makes reads of a range return zeros and discards writes to it; replaces the mappings there. Both arguments must be
 * multiples of 64 KiB. */
int ext_sparse(const struct nvidia *s, uint64_t addr, uint64_t bytes);

/* ---- trial.c: tries a driver of an unknown branch in a child process ---- */

/* Runs the trial. Returns 0, or an error that describes the deviation. */
int stock_trial(const struct nvidia *n);

/* ---- reserve.c: reservations ---- */

int stock_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                  uint64_t *priv);
int stock_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone);

/* ---- slab.c: physical memory and mappings ---- */

int stock_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device, uint64_t *slab);
int stock_slab_destroy(void *be, uint64_t slab, uint64_t bytes);
int stock_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags, bool sparse);
int stock_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse);
int stock_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags);
uint32_t stock_slab_object(uint64_t slab);

#endif
