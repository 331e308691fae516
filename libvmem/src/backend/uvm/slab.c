/* SPDX-License-Identifier: MIT */
/* Physical memory: a slab is one or more objects of CREATE. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "backend/uvm/uvm.h"
#include "base/error.h"

#define SLOT (1ull << UVM_VMEM_SLOT_SHIFT)

struct slab {
  bool on_device;        /* in the memory of devices[0] */
  bool contiguous;       /* within each 2 MiB */
  uint64_t object_bytes; /* size of each object but the last */
  uint32_t count;
  uint32_t handles[];
};

static struct slab *slab_of(uint64_t slab) { return (struct slab *)(uintptr_t)slab; }

uint32_t uvm_slab_handle(uint64_t slab, uint64_t offset) {
  return slab_of(slab)->handles[offset / slab_of(slab)->object_bytes];
}

uint64_t uvm_slab_object_bytes(uint64_t slab) { return slab_of(slab)->object_bytes; }

bool uvm_slab_is_contiguous(uint64_t slab) { return slab_of(slab)->contiguous; }

/* Objects that cannot be released now are freed when the descriptor is closed. Reports the first failure. */
static int release_all(struct uvm *u, struct slab *s, uint64_t bytes) {
  int err = 0;
  while (s->count) {
    struct uvm_vmem_release r = {.size = sizeof(r), .handle = s->handles[--s->count]};
    int one = uvm_ioctl(u->nv.uvm_fd, UVM_VMEM_RELEASE, &r, 0, bytes, "RELEASE");
    if (!err) err = one;
  }
  free(s);
  return err;
}

int uvm_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device, uint64_t *slab) {
  struct uvm *u = be;
  /* Each 2 MiB is one run of smaller granules, parts of which may be mapped too. The kernel's host memory is contiguous
   * only within 64 KiB. */
  bool contiguous = page_size >= SLOT && u->nv.granule < SLOT && location != VMEM_HOST;
  uint64_t object_bytes = contiguous ? u->run_bytes : u->object_bytes;
  uint64_t objects = (bytes + object_bytes - 1) / object_bytes;
  uint32_t index = 0;
  struct slab *s;
  int err = 0;
  if (location == VMEM_PEER) {
    err = nvidia_find(&u->nv, device, &index);
    if (err) return err;
  }
  s = calloc(1, sizeof(*s) + objects * sizeof(s->handles[0]));
  if (!s) return vm_fail(-ENOMEM, "heap: %llu handles", (unsigned long long)objects);
  s->on_device = location != VMEM_HOST && index == 0;
  s->contiguous = contiguous;
  s->object_bytes = object_bytes;
  for (uint64_t at = 0; at < bytes && !err; at += object_bytes) {
    uint64_t part = bytes - at < object_bytes ? bytes - at : object_bytes;
    struct uvm_vmem_create c = {.size = sizeof(c),
                                .flags = (location == VMEM_HOST ? UVM_VMEM_CREATE_HOST : 0) |
                                         (contiguous ? UVM_VMEM_CREATE_CONTIGUOUS : 0),
                                .page_shift = u->shift,
                                .count = (uint32_t)(part >> u->shift)};
    memcpy(c.gpu_uuid, u->nv.devices[index].uuid, sizeof(c.gpu_uuid));
    err = uvm_ioctl(u->nv.uvm_fd, UVM_VMEM_CREATE, &c, 0, part,
                    location == VMEM_HOST ? "CREATE in host memory" : "CREATE");
    if (!err) s->handles[s->count++] = c.out_handle;
  }
  if (err) {
    VM_UNDO(release_all(u, s, bytes));
    return err;
  }
  if (s->on_device) atomic_fetch_add(&u->nv.device_slab_bytes, bytes);
  *slab = (uint64_t)(uintptr_t)s;
  return 0;
}

int uvm_slab_destroy(void *be, uint64_t slab, uint64_t bytes) {
  struct uvm *u = be;
  if (slab_of(slab)->on_device) atomic_fetch_sub(&u->nv.device_slab_bytes, bytes);
  return release_all(u, slab_of(slab), bytes);
}
