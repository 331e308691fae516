/* SPDX-License-Identifier: MIT */
/*
 * UVM's ioctls. Each must be checked twice: what ioctl returns says whether the driver took the
 * call, the status in the structure whether it did the work.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"
#include "stock.h"

#define UVM_NODE "/dev/nvidia-uvm"

static int result(int err, uint32_t status, uint64_t addr, uint64_t bytes, const char *what) {
  return err ? rm_fail_errno(err, addr, bytes, what) : rm_fail(status, addr, bytes, what);
}

int uvm_create(const struct stock *s, uint64_t addr, uint64_t bytes) {
  struct uvm_create_range p = {.base = addr, .length = bytes};
  int err = rm_ioctl(s->uvm_fd, UVM_CREATE_EXTERNAL_RANGE, &p);

  return result(err, p.status, addr, bytes, "UVM_CREATE_EXTERNAL_RANGE");
}

int uvm_free(const struct stock *s, uint64_t addr, uint64_t bytes) {
  uint32_t status;
  int err;

  if (s->rm.abi.free_has_length) {
    struct uvm_free_580 p = {.base = addr, .length = bytes};

    err = rm_ioctl(s->uvm_fd, UVM_FREE, &p);
    status = p.status;
  } else {
    struct uvm_free_590 p = {.base = addr};

    err = rm_ioctl(s->uvm_fd, UVM_FREE, &p);
    status = p.status;
  }
  return result(err, status, addr, bytes, "UVM_FREE");
}

static void fill_records(const struct stock *s, struct uvm_gpu_record *records, uint32_t type) {
  const struct gpu *g = s->base.gpu;

  for (uint32_t i = 0; i < g->num_devices; i++) {
    memcpy(records[i].uuid, g->devices[i].uuid.bytes, sizeof(records[i].uuid));
    records[i].mapping_type = type;
  }
}

int uvm_map(const struct stock *s, uint64_t addr, uint64_t bytes, uint32_t memory, uint64_t offset,
            uint32_t mapping_type) {
  const struct uvm_map_head head = {addr, bytes, offset};
  const struct uvm_map_tail tail = {s->base.gpu->num_devices, s->rm.fd, s->rm.client, memory, 0};
  uint32_t status;
  int err;

  if (s->rm.abi.map_records == 256) {
    struct uvm_map_256 p;

    memset(&p, 0, sizeof(p));
    p.head = head;
    fill_records(s, p.gpus, mapping_type);
    p.tail = tail;
    err = rm_ioctl(s->uvm_fd, UVM_MAP_EXTERNAL_ALLOCATION, &p);
    status = p.tail.status;
  } else {
    struct uvm_map_32 p;

    memset(&p, 0, sizeof(p));
    p.head = head;
    fill_records(s, p.gpus, mapping_type);
    p.tail = tail;
    err = rm_ioctl(s->uvm_fd, UVM_MAP_EXTERNAL_ALLOCATION, &p);
    status = p.tail.status;
  }
  if (!err && status == NV_ERR_INSUFFICIENT_RESOURCES) {
    vm_fail_at(
        -ENOSPC, addr, bytes, STOCK_MAX_MAPPINGS,
        "the driver has no handle left for another mapping (all processes together have %d): "
        "map longer runs, or consolidate",
        RM_HANDLES);
    return vm_fail_status(status, rm_status_name(status));
  }
  return result(err, status, addr, bytes, "UVM_MAP_EXTERNAL_ALLOCATION");
}

static int each_device(const struct stock *s, uint64_t addr, uint64_t bytes, unsigned long request,
                       const char *what) {
  for (uint32_t i = 0; i < s->base.gpu->num_devices; i++) {
    struct uvm_gpu_range p = {.base = addr, .length = bytes};
    int err;

    memcpy(p.uuid, s->base.gpu->devices[i].uuid.bytes, sizeof(p.uuid));
    err = rm_ioctl(s->uvm_fd, request, &p);
    err = result(err, p.status, addr, bytes, what);
    if (err && i > 0)
      return vm_fail_at(-ENOTRECOVERABLE, addr, bytes, 0, "%s was done on %u of %u devices only",
                        what, i, s->base.gpu->num_devices);
    if (err)
      return err;
  }
  return 0;
}

int uvm_unmap(const struct stock *s, uint64_t addr, uint64_t bytes) {
  return each_device(s, addr, bytes, UVM_UNMAP_EXTERNAL, "UVM_UNMAP_EXTERNAL");
}

int uvm_sparse(const struct stock *s, uint64_t addr, uint64_t bytes) {
  return each_device(s, addr, bytes, UVM_MAP_EXTERNAL_SPARSE, "UVM_MAP_EXTERNAL_SPARSE");
}

/* Creates a range and maps a page through candidate `fd`: only the descriptor in which CUDA
 * registered this process's GPU address space does both. */
static int trial(struct stock *s, int fd, uint64_t addr, uint64_t bytes, uint32_t memory) {
  int err, undo;

  s->uvm_fd = fd;
  err = uvm_create(s, addr, bytes);
  if (err)
    return err;
  err = uvm_map(s, addr, bytes, memory, 0, UVM_MAPPING_DEFAULT);
  undo = uvm_free(s, addr, bytes);
  return err ? err : undo;
}

/* By device number, since a container may show the node under another path; by name where the node
 * itself is not in sight. */
static bool is_uvm(int fd, const char *link, bool have_node, dev_t node) {
  struct stat st;

  if (have_node && fstat(fd, &st) == 0)
    return S_ISCHR(st.st_mode) && st.st_rdev == node;
  return strcmp(link, UVM_NODE) == 0;
}

static int try_all(struct stock *s, uint64_t addr, uint64_t bytes, uint32_t memory) {
  DIR *dir = opendir("/proc/self/fd");
  int err = -ENODEV;
  bool tried = false;
  struct dirent *entry;
  struct stat st;
  bool have_node = stat(UVM_NODE, &st) == 0 && S_ISCHR(st.st_mode);

  if (!dir)
    return vm_fail(-ENODEV, "/proc/self/fd: %s", strerror(errno));
  while ((entry = readdir(dir))) {
    char link[64];
    ssize_t n;
    int fd = (int)strtol(entry->d_name, NULL, 10);

    n = readlinkat(dirfd(dir), entry->d_name, link, sizeof(link) - 1);
    if (n <= 0 || fd == dirfd(dir))
      continue;
    link[n] = 0;
    if (!is_uvm(fd, link, have_node, st.st_rdev))
      continue;
    tried = true;
    /* Duplicated before it is tried, so that it stays what was tried if its owner closes it. */
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) {
      err = vm_fail(-ENOMEM, "duplicating a descriptor: %s", strerror(errno));
      continue;
    }
    err = trial(s, fd, addr, bytes, memory);
    if (!err)
      break;
    close(fd);
    s->uvm_fd = -1;
  }
  closedir(dir);
  return tried ? err
               : vm_fail(-ENODEV,
                         "this process has no open " UVM_NODE ": CUDA runs without UVM here");
}

int uvm_check_node(void) {
  if (access(UVM_NODE, R_OK | W_OK) == 0)
    return 0;
  if (errno == EACCES || errno == EPERM)
    return vm_fail(-EACCES, "no permission to open " UVM_NODE);
  return vm_fail(-ENODEV, UVM_NODE " is missing: the nvidia-uvm module is not loaded, or this "
                                   "container was not given the node");
}

int uvm_find(struct stock *s) {
  uint64_t bytes = 64 << 10, addr, slab;
  int err;

  err = uvm_check_node();
  if (err)
    return err;
  err = stock_slab_create(s, bytes, bytes, VMEM_DEVICE, 0, &slab);
  if (err)
    return err;
  err = stock_host_range(bytes, 2 << 20, &addr);
  if (!err) {
    err = try_all(s, addr, bytes, stock_slab_object(slab));
    munmap((void *)(uintptr_t)addr, bytes);
  }
  if (err) {
    struct vmem_error why;

    vm_error_save(&why);
    stock_slab_destroy(s, slab, bytes);
    vm_error_restore(&why);
    return err;
  }
  return stock_slab_destroy(s, slab, bytes);
}
