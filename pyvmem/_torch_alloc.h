/* SPDX-License-Identifier: MIT */
/* Functions of _torch_alloc.c for torch_pool/pool.py; cffi reads the part after the includes (see _build.py).
 * Functions return 0 or a negative errno as in vmem.h, with the thread's error set. Thread-safe. */
#include <vmem.h>

#define PYVMEM_TORCH_ALL 4294967295u /* every tag */

struct pyvmem_torch_stats {
  /* totals for the tag; saved_bytes: paused bytes whose contents are saved */
  uint64_t blocks, mapped_bytes, paused_bytes, saved_bytes;
  uint64_t mallocs, frees, failures; /* counts for the device since the pool was opened */
  char error[640];                   /* the last failure; "" = none */
};

/* A device's primary context and the addresses of libcuda functions. */
struct pyvmem_torch_gpu {
  uint64_t context, push, synchronize, pop;
};

/* Makes `vm` the context of a device. Until the pool is closed, frees in any thread use `gpu` to wait for GPU work;
 * NULL = there is no GPU work. Returns -EBUSY if the device already has a context. */
int pyvmem_torch_open(struct pyvmem_outcome *outcome, int device, vmem_t vm, uint64_t page, uint32_t reserve_flags,
                      const struct pyvmem_torch_gpu *gpu);
/* Returns -EBUSY if torch still holds blocks. */
int pyvmem_torch_close(struct pyvmem_outcome *outcome, int device);
/* Sets the tag of the calling thread's next allocations; returns the previous tag. */
uint32_t pyvmem_torch_tag(uint32_t tag);
/* Returns the tag of the calling thread. */
uint32_t pyvmem_torch_tag_now(void);
/* Unmaps the mapped blocks of a tag, all or none. The GPU must be idle. `save` points to `room` bytes for their
 * contents, which the caller keeps until the blocks are resumed or freed; NULL = contents are discarded. Returns
 * -EAGAIN if `room` is too small. */
int pyvmem_torch_pause(struct pyvmem_outcome *outcome, int device, uint32_t tag, void *save, uint64_t room);
/* Maps the paused blocks of a tag again, all or none, with their saved contents or zeros. */
int pyvmem_torch_resume(int device, uint32_t tag);
/* Returns 1 if a range is within one block, else 0. */
int pyvmem_torch_owns(int device, uint64_t addr, uint64_t bytes);
/* Returns the address of the saved contents of a range in a paused block, or 0 if they are not saved. */
uint64_t pyvmem_torch_saved(int device, uint64_t addr, uint64_t bytes);
int pyvmem_torch_stats(int device, uint32_t tag, struct pyvmem_torch_stats *stats);
