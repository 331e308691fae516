/* SPDX-License-Identifier: MIT */
/*
 * world.h - a client of the driver with software GPUs, and checks from the GPU's side.
 *
 * world_close() fails the test if the model recorded an error or a stale translation since world_open(),
 * or if memory taken from the GPU was not returned.
 */
#ifndef WORLD_H
#define WORLD_H

#include <softgpu_user.h>
#include <time.h>
#include <unistd.h>
#include "abi.h"
#include "kcheck.h"

struct world {
  struct softgpu_client c;
  int uvm, dev;
  uint8_t (*uuid)[SOFTGPU_UUID_BYTES];
  uint64_t vidmem_bytes;
  char driver_version[32];
  struct softgpu_counters base[SOFTGPU_MAX_GPUS];
};

static int worlds_open;

/* Exits the program: without this the tests are meaningless. */
__attribute__((noreturn)) static inline void hopeless(const char *what, int result) {
  printf("%s: %s\n", what, result < 0 ? strerror(-result) : "status of the driver");
  if (result > 0) printf("status 0x%x\n", (unsigned)result);
  exit(1);
}

static inline unsigned world_gpus(void) {
  struct softgpu_info info;
  int dev = softgpu_open();
  int result = dev < 0 ? dev : softgpu_info(dev, 0, &info);
  if (result) hopeless("the software GPU", result);
  close(dev);
  return info.out_gpus;
}

static inline struct softgpu_counters gpu_counters(struct world *w, unsigned gpu) {
  struct softgpu_counters c;
  int result = softgpu_counters(w->dev, gpu, &c);
  if (result) hopeless("counters", result);
  return c;
}

/* Sets a parameter of nvidia-uvm.ko that may change while it is loaded. */
static inline int set_parameter(const char *name, uint64_t value) {
  char path[96];
  snprintf(path, sizeof(path), "/sys/module/nvidia_uvm/parameters/%s", name);
  FILE *file = fopen(path, "w");
  if (!file) return -errno;
  fprintf(file, "%llu\n", (unsigned long long)value);
  return fclose(file) ? -errno : 0;
}

static inline void sleep_ms(unsigned ms) {
  struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};
  nanosleep(&t, NULL);
}

static inline struct world *world_open_as(struct world *w, unsigned gpus, int (*client_open)(struct softgpu_client *, unsigned)) {
  struct softgpu_info info;
  int dev = softgpu_open();
  if (dev < 0) hopeless("open /dev/softgpu", dev);
  memset(w, 0, sizeof(*w));
  for (unsigned gpu = 0; gpu < gpus; gpu++) {
    int result = softgpu_counters(dev, gpu, &w->base[gpu]);
    if (result) hopeless("counters", result);
  }
  close(dev);
  int result = client_open(&w->c, gpus);
  if (result) hopeless("a client of the driver", result);
  w->uvm = w->c.uvm;
  w->dev = w->c.dev;
  w->uuid = w->c.uuid;
  softgpu_info(w->dev, 0, &info);
  w->vidmem_bytes = info.out_vidmem;
  FILE *version = fopen("/sys/module/nvidia_uvm/version", "r");
  if (!version || !fgets(w->driver_version, sizeof(w->driver_version), version)) {
    snprintf(w->driver_version, sizeof(w->driver_version), "%u", info.out_branch);
  }
  w->driver_version[strcspn(w->driver_version, "\n")] = 0;
  if (version) fclose(version);
  worlds_open++;
  return w;
}

static inline struct world *world_open(struct world *w, unsigned gpus) {
  return world_open_as(w, gpus, softgpu_client_open);
}

/* Prints the model's records of faults and errors on a GPU. */
static inline void world_show_faults(int dev, unsigned gpu) {
  struct softgpu_faults f;
  if (softgpu_faults(dev, gpu, &f)) return;
  for (unsigned i = 0; i < f.out_count; i++) {
    if (f.out[i].kind < SOFTGPU_ERROR_FIRST && f.out[i].kind != SOFTGPU_FAULT_STALE) continue;
    printf("gpu %u: %s, address 0x%llx, pte 0x%llx\n", gpu, softgpu_fault_name(f.out[i].kind),
           (unsigned long long)f.out[i].address, (unsigned long long)f.out[i].pte);
  }
}

/* Checks that the GPU had no faults or errors since base and, with returned, that all memory was returned. */
static inline void gpu_check_clean(int dev, unsigned gpu, const struct softgpu_counters *base, bool returned) {
  struct softgpu_counters now;
  for (unsigned tries = 0;; tries++) {
    int result = softgpu_counters(dev, gpu, &now);
    if (result) hopeless("counters", result);
    bool back = now.frames_free_now == base->frames_free_now && now.spaces_now <= base->spaces_now &&
                now.channels_now == base->channels_now && now.rm_memory_now == base->rm_memory_now;
    if (!returned || back || tries == 100) break;
    sleep_ms(50); /* a process may still be exiting when its parent's wait() returns */
  }
  if (now.errors != base->errors) fail("gpu %u: %llu errors", gpu, (unsigned long long)(now.errors - base->errors));
  if (now.stale != base->stale) {
    fail("gpu %u: %llu stale translations used", gpu, (unsigned long long)(now.stale - base->stale));
  }
  if (now.errors != base->errors || now.stale != base->stale) world_show_faults(dev, gpu);
  if (!returned) return;
#define BACK(member)                                                                                       \
  if (now.member != base->member) {                                                                        \
    fail("gpu %u: " #member " is %llu, was %llu", gpu, (unsigned long long)now.member,                     \
         (unsigned long long)base->member);                                                                \
  }
  BACK(frames_free_now)
  BACK(frames_pinned_now)
  BACK(channels_now)
  BACK(spaces_now)
  BACK(rm_memory_now)
#undef BACK
}

static inline void world_close(struct world *w) {
  unsigned gpus = w->c.gpus;
  int result = softgpu_verify(w->dev);
  if (result) fail("the model's bookkeeping differs from the page tables: %s", strerror(-result));
  softgpu_client_close(&w->c);
  worlds_open--;
  int dev = softgpu_open();
  for (unsigned gpu = 0; gpu < gpus; gpu++) gpu_check_clean(dev, gpu, &w->base[gpu], worlds_open == 0);
  close(dev);
}

/* Accesses memory as a kernel on the GPU: 0 or a negative errno (see ACCESS in softgpu.h; EBADMSG: wrong value). */
static inline int gpu_fill(struct world *w, unsigned gpu, uint64_t va, uint64_t length, uint64_t value, uint64_t step) {
  return softgpu_fill(w->dev, w->c.space[gpu], va, length, value, step);
}

static inline int gpu_check(struct world *w, unsigned gpu, uint64_t va, uint64_t length, uint64_t value,
                            uint64_t step) {
  struct softgpu_access where;
  int result = softgpu_check(w->dev, w->c.space[gpu], va, length, value, step, &where);
  if (result == -EBADMSG) {
    printf("at 0x%llx: 0x%llx, not 0x%llx\n", (unsigned long long)(va + where.out_done),
           (unsigned long long)where.out_found, (unsigned long long)(value + where.out_done / 8 * step));
  }
  return result;
}

static inline struct softgpu_xlate gpu_xlate(struct world *w, unsigned gpu, uint64_t va) {
  struct softgpu_xlate x;
  int result = softgpu_xlate(w->dev, w->c.space[gpu], va, &x);
  if (result) hopeless("walking the page tables", result);
  return x;
}

static inline struct softgpu_scan gpu_scan(struct world *w, unsigned gpu, uint64_t start, uint64_t length) {
  struct softgpu_scan s;
  int result = softgpu_scan(w->dev, w->c.space[gpu], start, length, &s);
  if (result) hopeless("walking the page tables", result);
  return s;
}

static inline struct softgpu_counters gpu_counters_since(struct world *w, unsigned gpu,
                                                         const struct softgpu_counters *before) {
  struct softgpu_counters now = gpu_counters(w, gpu);
  return softgpu_counters_since(before, &now);
}

#endif
