/* SPDX-License-Identifier: MIT */
/* The patched driver's ioctls, and what their errors mean to a user of the library. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "backend/uvm/uvm.h"
#include "base/error.h"

#define MEANING(kernel, ours, text) {kernel, #kernel, ours, text}

static const struct {
  int kernel;
  const char *name;
  int ours;
  const char *text;
} meanings[] = {
    MEANING(ENOMEM, ENOMEM, "the kernel has no memory left"),
    MEANING(ENOSPC, ENOMEM, "no physical memory left for pages or page tables"),
    MEANING(EDQUOT, ENOMEM,
            "a limit on pinned pages or page tables is reached, by default 15/16 of the GPU's memory (nvidia-uvm's "
            "parameters uvm_vmem_*limit_mb)"),
    MEANING(ENODEV, ENODEV, "a GPU is not registered with the driver in this process, or is gone"),
    MEANING(EPERM, ECHILD, "the descriptor was initialised by another process"),
    MEANING(EBADFD, ENODEV, "the descriptor is not initialised"),
    MEANING(EXDEV, EOPNOTSUPP, "a GPU of this context cannot access the memory that holds the pages"),
    MEANING(EOPNOTSUPP, EOPNOTSUPP, "the driver or the GPU does not support this"),
    MEANING(EBUSY, EBUSY, "the reservation still has mappings"),
    MEANING(EEXIST, EIO, "the addresses are taken"),
    MEANING(EAGAIN, EAGAIN, "the driver has been suspended for a minute: the machine is going to sleep"),
    MEANING(EIO, EIO, "the GPU failed"),
    /* The errors below mean a bug in the library. */
    MEANING(EINVAL, EIO, "the driver rejects a malformed value"),
    MEANING(EOVERFLOW, EIO, "a range wraps around"),
    MEANING(EMSGSIZE, EIO, "a count is above the driver's limit"),
    MEANING(EADDRINUSE, EIO, "part of a large page would change, and the rest would be invalid for a moment"),
    MEANING(EADDRNOTAVAIL, EIO, "an entry of 2 MiB was requested, but the pages do not fill one"),
    MEANING(ERANGE, EIO, "a range extends beyond the reservation, the object or the GPU's address space"),
    MEANING(ENOENT, EIO, "no such reservation or object"),
    MEANING(ESTALE, EIO, "the object was released"),
    MEANING(E2BIG, EIO, "the driver is too old for a field that is in use"),
    MEANING(EFAULT, EIO, "memory of this process cannot be read or written"),
};

int uvm_fail(int err, uint64_t addr, uint64_t bytes, const char *what) {
  unsigned long long n = bytes;
  char at[32] = "";
  if (addr) snprintf(at, sizeof(at), " at 0x%llx", (unsigned long long)addr);
  for (size_t i = 0; i < sizeof(meanings) / sizeof(meanings[0]); i++)
    if (meanings[i].kernel == -err)
      return vm_fail_at(-meanings[i].ours, addr, bytes, 0, "%s of %llu bytes%s: %s (%s)", what, n, at, meanings[i].text,
                        meanings[i].name);
  return vm_fail_at(-EIO, addr, bytes, 0, "%s of %llu bytes%s: %s", what, n, at, strerror(-err));
}

int uvm_ioctl(int fd, unsigned long request, void *arg, uint64_t addr, uint64_t bytes, const char *what) {
  int err = rm_ioctl(fd, request, arg);
  return err ? uvm_fail(err, addr, bytes, what) : 0;
}

int uvm_query(int fd, struct uvm_vmem_query *query) {
  int err;
  memset(query, 0, sizeof(*query));
  query->size = sizeof(*query);
  err = rm_ioctl(fd, UVM_VMEM_QUERY, query);
  query->out_driver_version[sizeof(query->out_driver_version) - 1] = 0;
  if (!err && query->out_abi_version >= UVM_VMEM_ABI_VERSION && query->out_max_bind_ops > 1 &&
      query->out_max_create_pages)
    return 0;
  if (!err)
    return vm_fail_at(-ENODEV, 0, query->out_abi_version, UVM_VMEM_ABI_VERSION,
                      "nvidia-uvm %s is patched, but for ABI %u; this library uses %u",
                      (const char *)query->out_driver_version, query->out_abi_version, UVM_VMEM_ABI_VERSION);
  /* Which error an unpatched module returns for an unknown ioctl depends on its branch. */
  if (err == -ENOTTY || err == -ENOSYS || err == -EINVAL)
    return vm_fail(-ENODEV, "the loaded nvidia-uvm is not the patched one (\"make load\" loads it)");
  return rm_fail_errno(err, 0, 0, "querying nvidia-uvm's features");
}

int uvm_check_gpu(int fd, const struct nvidia_device *d) {
  static const char *const reasons[] = {
      [UVM_VMEM_GPU_COHERENT] = "its memory is part of the CPU's address space",
      [UVM_VMEM_GPU_MIG] = "it is a MIG instance",
      [UVM_VMEM_GPU_VIRTUAL] = "it is virtual (vGPU or SR-IOV)",
      [UVM_VMEM_GPU_CONFIDENTIAL] = "confidential computing is on",
      [UVM_VMEM_GPU_NO_64K] = "its page tables have no 64 KiB entries",
      [UVM_VMEM_GPU_INTEGRATED] = "it has no memory of its own",
  };
  struct uvm_vmem_query q = {.size = sizeof(q), .flags = UVM_VMEM_QUERY_GPU};
  const char *why;
  int err;
  memcpy(q.gpu_uuid, d->uuid, sizeof(q.gpu_uuid));
  err = uvm_ioctl(fd, UVM_VMEM_QUERY, &q, 0, 0, "QUERY");
  if (err || q.out_gpu_refusal == UVM_VMEM_GPU_OK) return err;
  why = q.out_gpu_refusal < sizeof(reasons) / sizeof(reasons[0]) ? reasons[q.out_gpu_refusal] : NULL;
  return vm_fail(-ENODEV, "%s is a kind of GPU that the patched driver was not tested on: %s", d->name,
                 why ? why : "for a reason that this library does not know");
}
