/* SPDX-License-Identifier: MIT */
/* Reservations: addresses, and the driver's object that holds their page tables. */
#include <errno.h>
#include <string.h>

#include "backend/uvm/uvm.h"
#include "base/error.h"

/* The length of a kernel reservation is a multiple of this. */
#define SLOT (1ull << UVM_VMEM_SLOT_SHIFT)

static uint64_t whole_slots(uint64_t bytes) { return (bytes + SLOT - 1) & ~(SLOT - 1); }

/*
 * BIG gives entries of 2 MiB to large pages and, with VMEM_OPEN_LARGE_ENTRIES, to complete blocks of small ones. Sparse
 * reservations do not use it: kernels may read there while anything changes (VMEM_CAP_SPARSE_ATOMIC), and an entry
 * cannot change its size under them.
 */
int uvm_take(const struct uvm *u, uint64_t addr, uint64_t bytes, uint32_t flags) {
  bool large = flags & VMEM_RESERVE_LARGE || u->entries || u->nv.granule == SLOT;
  uint8_t uuids[VMEM_MAX_DEVICES][UVM_VMEM_UUID_BYTES];
  struct uvm_vmem_reserve r = {.size = sizeof(r),
                               .start = addr,
                               .length = whole_slots(bytes),
                               .page_shift = u->shift,
                               .gpu_count = u->nv.num_devices,
                               .gpus = (uint64_t)(uintptr_t)uuids};
  if (large && !(flags & VMEM_RESERVE_SPARSE) && (u->query.out_capabilities & UVM_VMEM_CAP_BIG))
    r.flags = UVM_VMEM_RESERVE_BIG;
  for (uint32_t i = 0; i < u->nv.num_devices; i++) memcpy(uuids[i], u->nv.devices[i].uuid, sizeof(uuids[i]));
  return uvm_ioctl(u->nv.uvm_fd, UVM_VMEM_RESERVE, &r, addr, r.length, "RESERVE");
}

int uvm_give_back(const struct uvm *u, uint64_t addr, uint64_t bytes, uint32_t flags) {
  struct uvm_vmem_free f = {.size = sizeof(f), .flags = flags, .start = addr};
  return uvm_ioctl(u->nv.uvm_fd, UVM_VMEM_FREE, &f, addr, whole_slots(bytes), "FREE");
}

static int make_reservation(struct uvm *u, const struct nvidia_range *r, uint64_t bytes, uint32_t flags) {
  int err = uvm_take(u, r->addr, bytes, flags);
  if (err || !(flags & VMEM_RESERVE_SPARSE)) return err;
  err = uvm_unmap(u, r->addr, bytes, true);
  if (err) {
    struct vmem_error why;
    vm_error_save(&why);
    VM_UNDO(uvm_give_back(u, r->addr, bytes, UVM_VMEM_FREE_UNMAP));
    if (err == -ENOTRECOVERABLE) /* the range is freed: nothing to quarantine */
      err = vm_fail_at(-EIO, r->addr, bytes, 0, "%.400s", why.text);
  }
  return err;
}

int uvm_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                uint64_t *priv) {
  struct uvm *u = be;
  struct nvidia_range *r;
  int err;
  if (u->query.out_max_reserve_bytes && whole_slots(bytes) > u->query.out_max_reserve_bytes)
    return vm_fail_at(-ENOMEM, 0, bytes, u->query.out_max_reserve_bytes,
                      "a reservation of %llu bytes exceeds the driver's limit of %llu", (unsigned long long)bytes,
                      (unsigned long long)u->query.out_max_reserve_bytes);
  /* Only CUDA can make addresses valid for its own copies. */
  if (!u->nv.base.gpu) flags |= VMEM_RESERVE_PLAIN;
  err = nvidia_addresses_get(&u->nv, whole_slots(bytes), align, flags, &r);
  if (err) return err;
  err = make_reservation(u, r, bytes, flags);
  if (err) {
    VM_UNDO(nvidia_addresses_put(&u->nv, r));
    return err;
  }
  *addr = r->addr;
  *kind = (r->visible ? VMEM_RANGE_VISIBLE : 0) | (flags & VMEM_RESERVE_SPARSE ? VMEM_RANGE_SPARSE : 0);
  *priv = (uint64_t)(uintptr_t)r;
  return 0;
}

int uvm_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone) {
  struct uvm *u = be;
  struct nvidia_range *r = (struct nvidia_range *)(uintptr_t)priv;
  int err = r->freed ? 0 : uvm_give_back(u, addr, bytes, UVM_VMEM_FREE_UNMAP);
  if (err) return err;
  r->freed = *gone = true;
  return nvidia_addresses_put(&u->nv, r);
}
