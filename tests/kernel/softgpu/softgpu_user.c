// SPDX-License-Identifier: MIT OR GPL-2.0
// softgpu_user.c - see softgpu_user.h.
//
// The structs of UVM's own ioctls are repeated here (each names its source), because they differ between driver
// branches, but one test binary serves all branches: the software GPU reports the branch.

#define _GNU_SOURCE
#include "softgpu_user.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static int call(int fd, unsigned long request, void *argument) {
  int result;

  do {
    result = ioctl(fd, request, argument);
  } while (result < 0 && errno == EINTR);
  return result < 0 ? -errno : 0;
}

// ---- device nodes ------------------------------------------------------------------------------

// The device number of name in /proc/devices or /proc/misc, or -1.
static int number_of(const char *table, const char *name) {
  char line[256], found[128];
  int number, result = -1;
  FILE *file = fopen(table, "re");

  if (!file)
    return -1;
  while (result < 0 && fgets(line, sizeof(line), file))
    if (sscanf(line, "%d %127s", &number, found) == 2 && strcmp(found, name) == 0)
      result = number;
  fclose(file);
  return result;
}

static int open_node(const char *path, int major, int minor) {
  int fd = open(path, O_RDWR | O_CLOEXEC);

  if (fd >= 0)
    return fd;
  if (errno != ENOENT && errno != ENXIO)
    return -errno;
  if (major < 0 || minor < 0)
    return -ENODEV;
  if (mknod(path, S_IFCHR | 0666, makedev((unsigned)major, (unsigned)minor)) && errno != EEXIST)
    return -errno;
  fd = open(path, O_RDWR | O_CLOEXEC);
  return fd < 0 ? -errno : fd;
}

int softgpu_open(void) {
  enum { MISC_MAJOR = 10 };

  return open_node(SOFTGPU_DEVICE, MISC_MAJOR, number_of("/proc/misc", "softgpu"));
}

int softgpu_uvm_open(void) {
  return open_node("/dev/nvidia-uvm", number_of("/proc/devices", "nvidia-uvm"), 0);
}

// ---- looking ---------------------------------------------------------------------------------------

int softgpu_info(int dev, unsigned gpu, struct softgpu_info *out) {
  *out = (struct softgpu_info){.gpu = gpu};
  return call(dev, SOFTGPU_INFO, out);
}

int softgpu_counters(int dev, unsigned gpu, struct softgpu_counters *out) {
  *out = (struct softgpu_counters){.gpu = gpu};
  return call(dev, SOFTGPU_COUNTERS, out);
}

struct softgpu_counters softgpu_counters_since(const struct softgpu_counters *before, const struct softgpu_counters *now) {
  struct softgpu_counters d = *now;

#define SINCE(member) d.member = now->member - before->member
  SINCE(pushes);
  SINCE(methods);
  SINCE(semaphore_releases);
  SINCE(semaphore_acquires);
  SINCE(wfi);
  SINCE(membar_sys);
  SINCE(membar_gpu);
  SINCE(invalidates);
  SINCE(invalidates_all);
  SINCE(memsets);
  SINCE(memset_bytes);
  SINCE(copies);
  SINCE(copy_bytes);
  SINCE(reordered);
  SINCE(pte_writes);
  SINCE(pte_changes);
  SINCE(pde_writes);
  SINCE(pma_alloc_calls);
  SINCE(pma_free_calls);
  SINCE(poison_reads);
  SINCE(tlb_hits);
  SINCE(tlb_misses);
  SINCE(faults_cancelled);
  SINCE(faults);
  SINCE(stale);
  SINCE(reader_binds);
  SINCE(reader_units);
  SINCE(errors);
#undef SINCE
  return d;
}

int softgpu_xlate(int dev, struct softgpu_space space, uint64_t va, struct softgpu_xlate *out) {
  *out = (struct softgpu_xlate){.space = space, .va = va};
  return call(dev, SOFTGPU_XLATE, out);
}

int softgpu_scan(int dev, struct softgpu_space space, uint64_t start, uint64_t length, struct softgpu_scan *out) {
  *out = (struct softgpu_scan){.space = space, .start = start, .length = length};
  return call(dev, SOFTGPU_SCAN, out);
}

int softgpu_frame(int dev, unsigned gpu, uint64_t pa, struct softgpu_frame *out) {
  *out = (struct softgpu_frame){.gpu = gpu, .pa = pa};
  return call(dev, SOFTGPU_FRAME, out);
}

// ---- touching --------------------------------------------------------------------------------------

int softgpu_read(int dev, struct softgpu_space space, uint64_t va, void *buf, size_t length, uint64_t *done) {
  struct softgpu_access a = {.space = space, .op = SOFTGPU_READ, .va = va, .length = length, .buf = (uintptr_t)buf};
  int result = call(dev, SOFTGPU_ACCESS, &a);

  if (done)
    *done = a.out_done;
  return result;
}

int softgpu_write(int dev, struct softgpu_space space, uint64_t va, const void *buf, size_t length, uint64_t *done) {
  struct softgpu_access a = {.space = space, .op = SOFTGPU_WRITE, .va = va, .length = length, .buf = (uintptr_t)buf};
  int result = call(dev, SOFTGPU_ACCESS, &a);

  if (done)
    *done = a.out_done;
  return result;
}

int softgpu_fill(int dev, struct softgpu_space space, uint64_t va, uint64_t length, uint64_t value, uint64_t step) {
  struct softgpu_access a = {
      .space = space, .op = SOFTGPU_FILL, .va = va, .length = length, .value = value, .step = step};

  return call(dev, SOFTGPU_ACCESS, &a);
}

int softgpu_check(int dev, struct softgpu_space space, uint64_t va, uint64_t length, uint64_t value, uint64_t step,
                  struct softgpu_access *where) {
  struct softgpu_access a = {
      .space = space, .op = SOFTGPU_CHECK, .va = va, .length = length, .value = value, .step = step};
  int result = call(dev, SOFTGPU_ACCESS, &a);

  if (where)
    *where = a;
  return result;
}

int softgpu_peek(int dev, struct softgpu_space space, uint64_t va, uint64_t *value) {
  return softgpu_read(dev, space, va, value, sizeof(*value), NULL);
}

int softgpu_poke(int dev, struct softgpu_space space, uint64_t va, uint64_t value) {
  return softgpu_write(dev, space, va, &value, sizeof(value), NULL);
}

int softgpu_touch(int dev, struct softgpu_space space, uint64_t va, bool write) {
  uint64_t word = 0;
  struct softgpu_access a = {.space = space,
                             .op = write ? SOFTGPU_WRITE : SOFTGPU_READ,
                             .flags = SOFTGPU_ACCESS_DELIVER,
                             .va = va,
                             .length = sizeof(word),
                             .buf = (uintptr_t)&word};
  return call(dev, SOFTGPU_ACCESS, &a);
}

int softgpu_read_phys(int dev, unsigned gpu, uint64_t pa, void *buf, size_t length) {
  struct softgpu_access a = {.space = {.gpu = gpu},
                             .op = SOFTGPU_READ,
                             .flags = SOFTGPU_ACCESS_PHYSICAL,
                             .va = pa,
                             .length = length,
                             .buf = (uintptr_t)buf};

  return call(dev, SOFTGPU_ACCESS, &a);
}

int softgpu_check_phys(int dev, unsigned gpu, uint64_t pa, uint64_t length, uint64_t value, uint64_t step) {
  struct softgpu_access a = {.space = {.gpu = gpu},
                             .op = SOFTGPU_CHECK,
                             .flags = SOFTGPU_ACCESS_PHYSICAL,
                             .va = pa,
                             .length = length,
                             .value = value,
                             .step = step};

  return call(dev, SOFTGPU_ACCESS, &a);
}

// ---- resource manager --------------------------------------------------------------------------------

int softgpu_alloc(int dev, unsigned gpu, uint64_t size, uint64_t page_size, unsigned flags, struct softgpu_alloc *out) {
  *out = (struct softgpu_alloc){.gpu = gpu, .flags = flags, .size = size, .page_size = page_size};
  return call(dev, SOFTGPU_ALLOC, out);
}

int softgpu_free(int dev, uint32_t client, uint32_t handle) {
  struct softgpu_handle h = {.client = client, .handle = handle};

  return call(dev, SOFTGPU_FREE, &h);
}

int softgpu_space_new(int dev, unsigned gpu, struct softgpu_space *out) {
  *out = (struct softgpu_space){.gpu = gpu};
  return call(dev, SOFTGPU_SPACE_NEW, out);
}

int softgpu_space_free(int dev, struct softgpu_space space) {
  return call(dev, SOFTGPU_SPACE_FREE, &space);
}

int softgpu_inject(int dev, const char *name, unsigned flags, uint64_t nth, uint64_t repeat, uint32_t status, uint64_t delay_us) {
  struct softgpu_inject i = {.flags = flags, .status = status, .nth = nth, .repeat = repeat, .delay_us = delay_us};

  if (strlen(name) >= sizeof(i.name))
    return -EINVAL;
  strcpy(i.name, name);
  return call(dev, SOFTGPU_INJECT, &i);
}

int softgpu_fail_nth(int dev, const char *name, uint64_t nth, uint32_t status) {
  return softgpu_inject(dev, name, SOFTGPU_INJECT_MINE, nth, 1, status, 0);
}

int softgpu_inject_clear(int dev) {
  return softgpu_inject(dev, "", 0, 0, 0, 0, 0);
}

int softgpu_injected(int dev, struct softgpu_injected *out) {
  memset(out, 0, sizeof(*out));
  return call(dev, SOFTGPU_INJECTED, out);
}

// ---- the engine --------------------------------------------------------------------------------------

int softgpu_hold(int dev, unsigned gpu, unsigned op) {
  struct softgpu_hold h = {.gpu = gpu, .op = op};

  return call(dev, SOFTGPU_HOLD, &h);
}

int softgpu_hold_wait(int dev, unsigned gpu, unsigned timeout_ms) {
  struct softgpu_hold h = {.gpu = gpu, .op = SOFTGPU_HOLD_WAIT, .timeout_ms = timeout_ms};

  return call(dev, SOFTGPU_HOLD, &h);
}

int softgpu_settings(int dev, const struct softgpu_settings *set, struct softgpu_settings *old) {
  struct softgpu_settings s = {.flags = 0};
  int result;

  if (set)
    s = *set;
  s.flags = set ? SOFTGPU_SETTINGS_SET : 0;
  result = call(dev, SOFTGPU_SETTINGS, &s);
  if (!result && old)
    *old = s;
  return result;
}

int softgpu_lost(int dev, unsigned gpu, bool lost) {
  struct softgpu_lost l = {.gpu = gpu, .lost = lost};

  return call(dev, SOFTGPU_LOST, &l);
}

int softgpu_faults(int dev, unsigned gpu, struct softgpu_faults *out) {
  memset(out, 0, sizeof(*out));
  out->gpu = gpu;
  return call(dev, SOFTGPU_FAULTS, out);
}

const char *softgpu_fault_name(unsigned kind) {
  switch (kind) {
  case SOFTGPU_FAULT_MISSING:
    return "no translation";
  case SOFTGPU_FAULT_READ_ONLY:
    return "write to a read-only page";
  case SOFTGPU_FAULT_BAD_ADDRESS:
    return "translation to nonexistent memory";
  case SOFTGPU_FAULT_STALE:
    return "stale translation";
  case SOFTGPU_FAULT_POISON:
    return "read of memory never written";
  case SOFTGPU_ERROR_DOUBLE_FREE:
    return "video memory freed twice";
  case SOFTGPU_ERROR_FREED_MAPPED:
    return "video memory freed while mapped";
  case SOFTGPU_ERROR_OVERLAP:
    return "unordered copies overlap";
  case SOFTGPU_ERROR_UNORDERED:
    return "invalidate not ordered after page table writes";
  case SOFTGPU_ERROR_CHANNEL_BUSY:
    return "channel destroyed with work pending";
  case SOFTGPU_ERROR_SPACE_BUSY:
    return "address space destroyed with allocations";
  case SOFTGPU_ERROR_TABLE_FREED:
    return "page table freed while reachable";
  case SOFTGPU_ERROR_COPY:
    return "invalid copy engine address";
  case SOFTGPU_ERROR_METHOD:
    return "unknown method";
  case SOFTGPU_ERROR_TWICE:
    return "one entry written twice without ordering";
  case SOFTGPU_ERROR_MODEL:
    return "the model contradicts itself";
  case SOFTGPU_ERROR_GAP:
    return "changed by a BIND that does not name it";
  case SOFTGPU_ERROR_NEITHER:
    return "neither old nor new during a BIND";
  case SOFTGPU_ERROR_RESIZED:
    return "entry changes its page size while TLBs may hold the old one";
  case SOFTGPU_ERROR_NO_MEMBAR:
    return "reused before a membar";
  case SOFTGPU_ERROR_CACHED:
    return "wrong caching of an entry";
  case SOFTGPU_ERROR_BAD_FREE:
    return "free of an RM object that does not exist";
  case SOFTGPU_ERROR_LEAK:
    return "left over at unload";
  default:
    return "unknown kind";
  }
}

int softgpu_suspend(int dev, bool suspend) {
  struct softgpu_suspend s = {.suspend = suspend};
  int result = call(dev, SOFTGPU_SUSPEND, &s);

  return result ? result : (int)s.out_status;
}

int softgpu_verify(int dev) {
  return call(dev, SOFTGPU_VERIFY, NULL);
}

int softgpu_flush(int dev, unsigned gpu) {
  __u32 which = gpu;

  return call(dev, SOFTGPU_FLUSH, &which);
}

// ---- nvidia-uvm.ko -----------------------------------------------------------------------------------
// kernel-open/nvidia-uvm/uvm_ioctl.h and uvm_linux_ioctl.h; numbers and layouts are those of 535 to 595.

enum {
  UVM_REGISTER_GPU_VASPACE = 25,
  UVM_REGISTER_CHANNEL = 27,
  UVM_UNREGISTER_GPU_VASPACE = 26,
  UVM_ENABLE_PEER_ACCESS = 29,
  UVM_DISABLE_PEER_ACCESS = 30,
  UVM_MAP_EXTERNAL_ALLOCATION = 33,
  UVM_FREE = 34,
  UVM_REGISTER_GPU = 37,
  UVM_UNREGISTER_GPU = 38,
  UVM_UNMAP_EXTERNAL = 66,
  UVM_CREATE_EXTERNAL_RANGE = 73,
  UVM_MAP_EXTERNAL_SPARSE = 74,
  UVM_MM_INITIALIZE = 75,
  UVM_INITIALIZE = 0x30000001,
};

enum { MAPPING_READ_WRITE_ATOMIC = 1, MAPPING_READ_ONLY = 3 }; // uvm_types.h UvmGpuMappingType

#define CHECK_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), "layout of " #type)

struct uvm_initialize {
  uint64_t flags;
  uint32_t status, pad;
};
CHECK_SIZE(uvm_initialize, 16);

struct uvm_mm_initialize {
  int32_t uvm_fd;
  uint32_t status;
};
CHECK_SIZE(uvm_mm_initialize, 8);

struct uvm_register_gpu {
  uint8_t uuid[16];
  uint8_t numa_enabled, pad[3];
  int32_t numa_node, rm_fd;
  uint32_t client, partition, status;
};
CHECK_SIZE(uvm_register_gpu, 40);

struct uvm_one_gpu { // UNREGISTER_GPU, UNREGISTER_GPU_VASPACE
  uint8_t uuid[16];
  uint32_t status;
};
CHECK_SIZE(uvm_one_gpu, 20);

struct uvm_register_space {
  uint8_t uuid[16];
  int32_t rm_fd;
  uint32_t client, vaspace, status;
};
CHECK_SIZE(uvm_register_space, 32);

struct uvm_register_channel {
  uint8_t uuid[16];
  int32_t rm_fd;
  uint32_t client, channel, pad;
  uint64_t base, length;
  uint32_t status, pad2;
};
CHECK_SIZE(uvm_register_channel, 56);

struct uvm_two_gpus { // ENABLE_PEER_ACCESS, DISABLE_PEER_ACCESS
  uint8_t a[16], b[16];
  uint32_t status;
};
CHECK_SIZE(uvm_two_gpus, 36);

struct uvm_range { // CREATE_EXTERNAL_RANGE; FREE up to 580
  uint64_t base, length;
  uint32_t status, pad;
};
CHECK_SIZE(uvm_range, 24);

struct uvm_free_590 {
  uint64_t base;
  uint32_t status, pad;
};
CHECK_SIZE(uvm_free_590, 16);

struct uvm_gpu_range { // UNMAP_EXTERNAL, MAP_EXTERNAL_SPARSE
  uint64_t base, length;
  uint8_t uuid[16];
  uint32_t status, pad;
};
CHECK_SIZE(uvm_gpu_range, 40);

// MAP_EXTERNAL_ALLOCATION: head, 32 records (256 from 550 on), tail
struct uvm_map_head {
  uint64_t base, length, offset;
};
struct uvm_map_record {
  uint8_t uuid[16];
  uint32_t mapping_type, caching_type, format, element_bits, compression;
};
CHECK_SIZE(uvm_map_record, 36);
struct uvm_map_tail {
  uint64_t records;
  int32_t rm_fd;
  uint32_t client, memory, status;
};
CHECK_SIZE(uvm_map_tail, 24);

static int uvm_call(int uvm, unsigned long number, void *params, const uint32_t *status) {
  int result = call(uvm, number, params);

  return result ? result : (int)*status;
}

static int initialize(int uvm, bool shared) {
  enum { MULTI_PROCESS_SHARING_MODE = 2 }; // UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE
  struct uvm_initialize p = {.flags = shared ? MULTI_PROCESS_SHARING_MODE : 0};

  return uvm_call(uvm, UVM_INITIALIZE, &p, &p.status);
}

int softgpu_uvm_initialize(int uvm) {
  return initialize(uvm, false);
}

int softgpu_uvm_initialize_mm(int uvm) {
  enum { NOTHING_TO_DO = 0x10006 }; // NV_WARN_NOTHING_TO_DO: this kernel needs no second descriptor
  struct uvm_mm_initialize p = {.uvm_fd = uvm};
  int mm = softgpu_uvm_open();
  int result;

  if (mm < 0)
    return mm;
  result = uvm_call(mm, UVM_MM_INITIALIZE, &p, &p.status);
  if (!result || result == NOTHING_TO_DO)
    return mm;
  close(mm);
  return result < 0 ? result : -EIO;
}

int softgpu_uvm_register_gpu(struct softgpu_client *client, unsigned gpu) {
  struct uvm_register_gpu p = {.rm_fd = -1};

  memcpy(p.uuid, client->uuid[gpu], sizeof(p.uuid));
  return uvm_call(client->uvm, UVM_REGISTER_GPU, &p, &p.status);
}

static int one_gpu(struct softgpu_client *client, unsigned gpu, unsigned long number) {
  struct uvm_one_gpu p = {.status = 0};

  memcpy(p.uuid, client->uuid[gpu], sizeof(p.uuid));
  return uvm_call(client->uvm, number, &p, &p.status);
}

int softgpu_uvm_unregister_gpu(struct softgpu_client *client, unsigned gpu) {
  return one_gpu(client, gpu, UVM_UNREGISTER_GPU);
}

int softgpu_uvm_register_space(struct softgpu_client *client, unsigned gpu) {
  struct uvm_register_space p = {.rm_fd = -1};
  int result = softgpu_space_new(client->dev, gpu, &client->space[gpu]);

  if (result)
    return result;
  memcpy(p.uuid, client->uuid[gpu], sizeof(p.uuid));
  p.client = client->space[gpu].client;
  p.vaspace = client->space[gpu].vaspace;
  result = uvm_call(client->uvm, UVM_REGISTER_GPU_VASPACE, &p, &p.status);
  if (result)
    softgpu_space_free(client->dev, client->space[gpu]);
  return result;
}

int softgpu_uvm_register_channel(struct softgpu_client *client, unsigned gpu) {
  struct uvm_register_channel p = {.rm_fd = -1, .client = client->space[gpu].client, .channel = client->space[gpu].vaspace};

  memcpy(p.uuid, client->uuid[gpu], sizeof(p.uuid));
  return uvm_call(client->uvm, UVM_REGISTER_CHANNEL, &p, &p.status);
}

int softgpu_uvm_unregister_space(struct softgpu_client *client, unsigned gpu) {
  int result = one_gpu(client, gpu, UVM_UNREGISTER_GPU_VASPACE);

  if (!result)
    softgpu_space_free(client->dev, client->space[gpu]);
  return result;
}

static int two_gpus(struct softgpu_client *client, unsigned a, unsigned b, unsigned long number) {
  struct uvm_two_gpus p = {.status = 0};

  memcpy(p.a, client->uuid[a], sizeof(p.a));
  memcpy(p.b, client->uuid[b], sizeof(p.b));
  return uvm_call(client->uvm, number, &p, &p.status);
}

int softgpu_uvm_enable_peer(struct softgpu_client *client, unsigned a, unsigned b) {
  return two_gpus(client, a, b, UVM_ENABLE_PEER_ACCESS);
}

int softgpu_uvm_disable_peer(struct softgpu_client *client, unsigned a, unsigned b) {
  return two_gpus(client, a, b, UVM_DISABLE_PEER_ACCESS);
}

int softgpu_uvm_create_external(struct softgpu_client *client, uint64_t base, uint64_t length) {
  struct uvm_range p = {.base = base, .length = length};

  return uvm_call(client->uvm, UVM_CREATE_EXTERNAL_RANGE, &p, &p.status);
}

int softgpu_uvm_map_external(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length, uint64_t offset,
                             const struct softgpu_alloc *memory, bool read_only) {
  size_t records = client->branch < 550 ? 32 : 256;
  size_t tail_at = sizeof(struct uvm_map_head) + records * sizeof(struct uvm_map_record);
  unsigned char *p = calloc(1, tail_at + sizeof(struct uvm_map_tail));
  struct uvm_map_head head = {.base = base, .length = length, .offset = offset};
  struct uvm_map_record record = {.mapping_type = read_only ? MAPPING_READ_ONLY : MAPPING_READ_WRITE_ATOMIC};
  struct uvm_map_tail tail = {
      .records = 1, .rm_fd = -1, .client = memory->out_client, .memory = memory->out_handle};
  int result;

  if (!p)
    return -ENOMEM;
  memcpy(record.uuid, client->uuid[gpu], sizeof(record.uuid));
  memcpy(p, &head, sizeof(head));
  memcpy(p + sizeof(head), &record, sizeof(record));
  memcpy(p + tail_at, &tail, sizeof(tail));
  result = call(client->uvm, UVM_MAP_EXTERNAL_ALLOCATION, p);
  if (!result) {
    memcpy(&tail, p + tail_at, sizeof(tail));
    result = (int)tail.status;
  }
  free(p);
  return result;
}

static int gpu_range(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length, unsigned long number) {
  struct uvm_gpu_range p = {.base = base, .length = length};

  memcpy(p.uuid, client->uuid[gpu], sizeof(p.uuid));
  return uvm_call(client->uvm, number, &p, &p.status);
}

int softgpu_uvm_map_sparse(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length) {
  return gpu_range(client, gpu, base, length, UVM_MAP_EXTERNAL_SPARSE);
}

int softgpu_uvm_unmap_external(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length) {
  return gpu_range(client, gpu, base, length, UVM_UNMAP_EXTERNAL);
}

int softgpu_uvm_free(struct softgpu_client *client, uint64_t base, uint64_t length) {
  if (client->branch < 590) {
    struct uvm_range p = {.base = base, .length = length};

    return uvm_call(client->uvm, UVM_FREE, &p, &p.status);
  } else {
    struct uvm_free_590 p = {.base = base};

    return uvm_call(client->uvm, UVM_FREE, &p, &p.status);
  }
}

static int client_open(struct softgpu_client *client, unsigned gpus, bool shared) {
  int result;

  memset(client, 0, sizeof(*client));
  client->dev = client->uvm = client->mm = -1;
  if (gpus > SOFTGPU_MAX_GPUS)
    return -EINVAL;
  result = softgpu_open();
  if (result < 0)
    goto fail;
  client->dev = result;
  result = softgpu_uvm_open();
  if (result < 0)
    goto fail;
  client->uvm = result;
  result = initialize(client->uvm, shared);
  if (!result && !shared) {
    client->mm = softgpu_uvm_initialize_mm(client->uvm);
    result = client->mm < 0 ? client->mm : 0;
  }
  for (unsigned gpu = 0; !result && gpu < gpus; gpu++) {
    struct softgpu_info info;

    result = softgpu_info(client->dev, gpu, &info);
    if (result)
      break;
    client->branch = info.out_branch;
    memcpy(client->uuid[gpu], info.out_uuid, sizeof(info.out_uuid));
    result = softgpu_uvm_register_gpu(client, gpu);
    if (!result)
      result = softgpu_uvm_register_space(client, gpu);
    if (!result)
      client->gpus = gpu + 1;
  }
  if (!result)
    return 0;
fail:
  softgpu_client_close(client);
  return result;
}

int softgpu_client_open(struct softgpu_client *client, unsigned gpus) {
  return client_open(client, gpus, false);
}

int softgpu_client_open_shared(struct softgpu_client *client, unsigned gpus) {
  return client_open(client, gpus, true);
}

void softgpu_client_close(struct softgpu_client *client) {
  if (client->uvm >= 0)
    close(client->uvm);
  if (client->mm >= 0)
    close(client->mm);
  if (client->dev >= 0)
    close(client->dev);
  client->dev = client->uvm = client->mm = -1;
  client->gpus = 0;
}
