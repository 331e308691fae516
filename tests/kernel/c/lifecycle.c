/* SPDX-License-Identifier: MIT */
/*
 * Events around reservations and pages: other clients, removal of GPUs and address spaces, UVM's own calls
 * on our ranges, managed memory that competes for the same memory, allocations of the resource manager.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define PATTERN 0x2222000000000000ull

/* Opens a world with 8 units of one object mapped at RES, and 2 MB at RES + 4 MB, holding patterns. */
static int furnish(struct world *w, uint64_t pattern, uint32_t *small, uint32_t *large) {
  world_open(w, 1);
  int result = vm_reserve(w->uvm, w->uuid[0], RES, MIB(64), 16, 0);
  if (!result) result = vm_create(w->uvm, w->uuid[0], 16, 8, 0, small);
  if (!result) result = vm_create(w->uvm, w->uuid[0], 21, 1, 0, large);
  if (!result) result = vm_map(w->uvm, RES, RES, *small, 0, 8, 0);
  if (!result) result = vm_map(w->uvm, RES, RES + MIB(4), *large, 0, 1, 0);
  if (!result) result = gpu_fill(w, 0, RES, 8 * UNIT, pattern, 1);
  if (!result) result = gpu_fill(w, 0, RES + MIB(4), MIB(2), ~pattern, 1);
  return result;
}

static int still_there(struct world *w, uint64_t pattern) {
  int result = gpu_check(w, 0, RES, 8 * UNIT, pattern, 1);
  return result ? result : gpu_check(w, 0, RES + MIB(4), MIB(2), ~pattern, 1);
}

static void two_clients(void) {
  struct world a, b;
  struct uvm_vmem_stat s;
  uint32_t a_small, a_large, b_small, b_large;
  OK(furnish(&a, PATTERN, &a_small, &a_large));
  OK(furnish(&b, PATTERN + (1ull << 32), &b_small, &b_large));
  OK(still_there(&a, PATTERN));
  OK(vm_unmap(b.uvm, RES, RES, 4, 0));
  OK(still_there(&a, PATTERN));
  EQ(gpu_check(&b, 0, RES, 8, 0, 0), -EFAULT);
  OK(vm_stat(a.uvm, NULL, &s));
  EQ(s.out_objects, 2);
  EQ(s.out_mapped_bytes, 8 * UNIT + MIB(2));
  world_close(&b);
  OK(still_there(&a, PATTERN));
  OK(vm_unmap(a.uvm, RES, RES, 8, 0));
  world_close(&a);
}

static void the_address_space_goes(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t small, large;
  OK(furnish(&w, PATTERN, &small, &large));
  OK(softgpu_uvm_unregister_space(&w.c, 0));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, 0);
  EQ(s.out_objects, 2);
  EQ(s.out_created_bytes, 8 * UNIT + MIB(2));
  EQ(vm_map(w.uvm, RES, RES, small, 0, 1, 0), -ENODEV);
  EQ(vm_reserve(w.uvm, w.uuid[0], RES + GIB(1), MIB(2), 16, 0), -ENODEV);
  OK(vm_free(w.uvm, RES, 0));
  OK(softgpu_uvm_register_space(&w.c, 0));
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_map(w.uvm, RES, RES, small, 0, 8, 0));
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1)); /* the objects kept their contents */
  OK(vm_release(w.uvm, small));
  OK(vm_release(w.uvm, large));
  world_close(&w);
}

static void the_gpu_goes(void) {
  for (int space_first = 0; space_first < 2; space_first++) {
    struct world w, stays;
    struct softgpu_counters base;
    struct uvm_vmem_stat s;
    uint32_t small, large, more;
    world_open(&stays, 1);
    base = gpu_counters(&stays, 0);
    OK(furnish(&w, PATTERN, &small, &large));
    if (space_first) OK(softgpu_uvm_unregister_space(&w.c, 0));
    OK(softgpu_uvm_unregister_gpu(&w.c, 0));
    OK(vm_stat(w.uvm, NULL, &s));
    EQ(s.out_created_bytes + s.out_mapped_bytes + s.out_chunk_bytes, 0);
    /* The memory is free although the descriptor is still open. */
    EQ(gpu_counters(&stays, 0).frames_free_now, base.frames_free_now);
    EQ(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &more), -ENODEV);
    int result = vm_map(w.uvm, RES, RES, small, 0, 1, 0);
    EQ(result, -ENODEV);
    OK(vm_release(w.uvm, small)); /* handles stay valid until they are released */
    OK(vm_release(w.uvm, large));
    OK(vm_stat(w.uvm, NULL, &s));
    EQ(s.out_objects, 0);
    OK(vm_free(w.uvm, RES, 0));
    OK(softgpu_uvm_register_gpu(&w.c, 0));
    OK(softgpu_uvm_register_space(&w.c, 0));
    OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
    OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &more));
    OK(vm_map(w.uvm, RES, RES, more, 0, 1, 0));
    OK(gpu_check(&w, 0, RES, UNIT, 0, 0));
    world_close(&w);
    world_close(&stays);
  }
}

static void uvm_free_of_our_range(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t small, large;
  OK(furnish(&w, PATTERN, &small, &large));
  OK(softgpu_uvm_free(&w.c, RES, MIB(64)));
  EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT);
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_reservations, 0);
  EQ(s.out_mapped_bytes + s.out_reserved_bytes, 0);
  EQ(s.out_objects, 2);
  EQ(vm_free(w.uvm, RES, 0), -ENOENT);
  EQ(vm_map(w.uvm, RES, RES, small, 0, 1, 0), -ENOENT);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_map(w.uvm, RES, RES, small, 0, 8, 0));
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  world_close(&w);
}

/* UVM's own external mappings are refused on our range, and do not change it. */
static void uvm_map_on_our_range(void) {
  struct world w;
  struct softgpu_alloc memory;
  uint32_t small, large;
  OK(furnish(&w, PATTERN, &small, &large));
  OK(softgpu_alloc(w.dev, 0, MIB(2), UNIT, 0, &memory));
  static const uint64_t places[] = {RES, RES + MIB(4), RES + MIB(32)};
  for (size_t i = 0; i < ARRAY_SIZE(places); i++) {
    CHECK(softgpu_uvm_map_external(&w.c, 0, places[i], UNIT, 0, &memory, false) > 0);
    CHECK(softgpu_uvm_map_sparse(&w.c, 0, places[i], MIB(2)) > 0);
    CHECK(softgpu_uvm_unmap_external(&w.c, 0, places[i], UNIT) > 0);
  }
  OK(still_there(&w, PATTERN));
  EQ(gpu_check(&w, 0, RES + MIB(32), 8, 0, 0), -EFAULT);
  /* On UVM's own range they work as before. */
  OK(softgpu_uvm_create_external(&w.c, RES + GIB(1), MIB(4)));
  OK(softgpu_uvm_map_external(&w.c, 0, RES + GIB(1), MIB(2), 0, &memory, false));
  OK(gpu_fill(&w, 0, RES + GIB(1), MIB(2), 1, 1));
  OK(softgpu_uvm_unmap_external(&w.c, 0, RES + GIB(1), MIB(2)));
  OK(softgpu_uvm_free(&w.c, RES + GIB(1), MIB(4)));
  OK(softgpu_free(w.dev, memory.out_client, memory.out_handle));
  world_close(&w);
}

/* CREATE until memory runs out; then calls that need memory fail, calls that free memory work, and in the end all is
 * free. */
static void memory_runs_out(void) {
  enum { MOST = 8192 };
  static uint32_t object[MOST];
  struct world w;
  struct uvm_vmem_stat before, after;
  uint32_t more;
  unsigned n = 0;
  int result = 0;
  OK(set_parameter("uvm_vmem_gpu_limit_mb", 0));
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, GIB(64), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 8, 0, &more));
  while (n < MOST && (result = vm_create(w.uvm, w.uuid[0], 21, 4, 0, &object[n])) == 0) n++;
  EQ(result, -ENOSPC);
  OK(vm_stat(w.uvm, NULL, &after));
  EQ(after.out_created_bytes, 8 * UNIT + n * MIB(8)); /* the failed CREATE kept nothing */
  printf("%u objects of 8 MB in %llu MB\n", n, (unsigned long long)(w.vidmem_bytes >> 20));
  CHECK(n * MIB(8) > w.vidmem_bytes / 2);
  while (n < MOST && (result = vm_create(w.uvm, w.uuid[0], 16, 1, 0, &object[n])) == 0) n++;
  EQ(result, -ENOSPC);
  /* Tables for many slots: UVM uses host memory if the GPU has none. If a batch fails, it must have changed nothing. */
  static struct uvm_vmem_op ops[512];
  struct uvm_vmem_query q;
  OK(vm_query(w.uvm, NULL, &q));
  unsigned count = q.out_max_bind_ops < ARRAY_SIZE(ops) ? q.out_max_bind_ops : ARRAY_SIZE(ops);
  unsigned done = 0;
  result = 0;
  OK(vm_stat(w.uvm, NULL, &before));
  for (unsigned batch = 0; batch < 4 && !result; batch++, done++) {
    for (unsigned i = 0; i < count; i++) ops[i] = op_map(RES + (batch * count + i) * SLOT, more, i % 8, 1, 0);
    result = vm_bind(w.uvm, RES, ops, count, NULL, NULL);
    if (result) break;
    OK(vm_stat(w.uvm, NULL, &before));
  }
  OK(vm_stat(w.uvm, NULL, &after));
  printf("%u batches of new tables, then %s\n", done, result ? strerror(-result) : "no failure");
  if (result) {
    CHECK(result == -ENOSPC || result == -ENOMEM);
    CHECK(stat_same(&before, &after));
  }
  while (n) OK(vm_release(w.uvm, object[--n]));
  OK(vm_create(w.uvm, w.uuid[0], 21, 4, 0, &object[0]));
  OK(vm_map(w.uvm, RES, RES + GIB(63), object[0], 0, 4, 0));
  OK(gpu_check(&w, 0, RES + GIB(63), MIB(8), 0, 0));
  world_close(&w);
}

/* Another driver client allocates a contiguous 80 MB among many live pages: the resource manager must not try to evict
 * pages that cannot be evicted. */
static void contiguous_allocation(void) {
  enum { CHUNKS = 4096 };
  static uint32_t object[CHUNKS];
  struct softgpu_alloc memory;
  struct world w;
  unsigned n = 0, live = 0;
  world_open(&w, 1);
  /* Fill the memory, then free every other chunk: holes everywhere. */
  while (n < CHUNKS && vm_create(w.uvm, w.uuid[0], 21, 1, 0, &object[n]) == 0) n++;
  CHECK(n >= 96);
  for (unsigned i = 0; i < n; i += 2) OK(vm_release(w.uvm, object[i]));
  int result = softgpu_alloc(w.dev, 0, MIB(80), MIB(2), SOFTGPU_ALLOC_CONTIGUOUS, &memory);
  printf("with %u of %u chunks: %d, %u evictions asked, %u refused\n", n / 2, n, result, memory.out_evict_calls,
         memory.out_evict_failed);
  EQ(memory.out_evict_failed, 0);
  if (!result) OK(softgpu_free(w.dev, memory.out_client, memory.out_handle));
  if (result) EQ(result, -ENOSPC);
  for (unsigned i = 1; i < n; i += 2, live++) OK(vm_release(w.uvm, object[i]));
  OK(softgpu_alloc(w.dev, 0, MIB(80), MIB(2), SOFTGPU_ALLOC_CONTIGUOUS, &memory));
  EQ(memory.out_evict_failed, 0);
  OK(softgpu_free(w.dev, memory.out_client, memory.out_handle));
  world_close(&w);
}

/* Managed memory fills the GPU; our pages evict it, and it keeps its contents. */
static void managed_memory_gives_way(void) {
  struct world w;
  uint32_t object[2048];
  unsigned n = 0;
  world_open(&w, 1);
  if (w.vidmem_bytes > GIB(1)) SKIP("the GPU is too large for this guest (run with --vidmem 256)");
  const uint64_t bytes = (w.vidmem_bytes * 3 / 4) & ~(MIB(2) - 1);
  uint64_t *managed = mmap((void *)0x7d0000000000ull, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, w.uvm,
                           0x7d0000000000ll);
  CHECK(managed != MAP_FAILED);
  for (uint64_t i = 0; i < bytes / 8; i += 512) managed[i] = PATTERN + i;
  struct uvm_migrate {
    uint64_t base, length;
    uint8_t uuid[16];
    uint32_t flags;
    uint64_t semaphore;
    uint32_t payload, node;
    uint64_t start, bytes;
    uint32_t status;
  } m = {.base = (uintptr_t)managed, .length = bytes}; /* UVM_MIGRATE_PARAMS of uvm_ioctl.h */
  memcpy(m.uuid, w.uuid[0], sizeof(m.uuid));
  OK(vm_call(w.uvm, 51, &m));
  OK(m.status);
  while (n < ARRAY_SIZE(object) && vm_create(w.uvm, w.uuid[0], 21, 1, 0, &object[n]) == 0) n++;
  CHECK(n * MIB(2) > w.vidmem_bytes / 2); /* more than was free */
  OK(vm_reserve(w.uvm, w.uuid[0], RES, GIB(4), 16, 0));
  for (unsigned i = 0; i < n; i++) {
    OK(vm_map(w.uvm, RES, RES + i * SLOT, object[i], 0, 1, 0));
    OK(gpu_check(&w, 0, RES + i * SLOT, SLOT, 0, 0));
    OK(gpu_fill(&w, 0, RES + i * SLOT, SLOT, i, 0));
  }
  /* Migrating managed memory back does not evict our pages. */
  vm_call(w.uvm, 51, &m);
  for (uint64_t i = 0; i < bytes / 8; i += 512) EQ(managed[i], PATTERN + i);
  for (unsigned i = 0; i < n; i++) OK(gpu_check(&w, 0, RES + i * SLOT, SLOT, i, 0));
  munmap(managed, bytes);
  world_close(&w);
}

static struct world raced;
static volatile bool stop;

static void *race_binds(void *argument) {
  uintptr_t number = (uintptr_t)argument;
  const uint64_t base = RES + number * GIB(1);
  uint64_t odd = 0;
  while (!stop) {
    uint32_t object;
    int result = vm_reserve(raced.uvm, raced.uuid[0], base, MIB(8), 16, 0);
    if (result && result != -ENODEV && result != -EEXIST) odd++;
    result = vm_create(raced.uvm, raced.uuid[0], 16, 8, 0, &object);
    if (result && result != -ENODEV) odd++;
    result = vm_map(raced.uvm, base, base + MIB(2), object, 0, 8, UVM_VMEM_OP_REPLACE);
    if (result && result != -ENODEV && result != -ENOENT && result != -ESTALE) odd++;
    result = vm_unmap(raced.uvm, base, base, 128, 0);
    if (result && result != -ENODEV && result != -ENOENT) odd++;
    vm_release(raced.uvm, object);
    result = vm_free(raced.uvm, base, UVM_VMEM_FREE_UNMAP);
    if (result && result != -ENOENT && result != -ENODEV) odd++;
  }
  return (void *)odd;
}

/* Address spaces and GPUs are registered and unregistered while threads bind. */
static void unregister_under_fire(void) {
  pthread_t thread[2];
  struct world stays;
  world_open(&stays, 1);
  world_open(&raced, 1);
  stop = false;
  for (uintptr_t t = 0; t < 2; t++) OK(pthread_create(&thread[t], NULL, race_binds, (void *)t));
  int result = 0;
  for (unsigned i = 0; i < 20 && !result; i++) {
    sleep_ms(20);
    result = softgpu_uvm_unregister_space(&raced.c, 0);
    if (!result && i % 4 == 3) {
      result = softgpu_uvm_unregister_gpu(&raced.c, 0);
      if (!result) result = softgpu_uvm_register_gpu(&raced.c, 0);
    }
    sleep_ms(5);
    if (!result) result = softgpu_uvm_register_space(&raced.c, 0);
  }
  sleep_ms(20);
  stop = true;
  for (uintptr_t t = 0; t < 2; t++) {
    void *odd;
    OK(pthread_join(thread[t], &odd));
    EQ((uintptr_t)odd, 0);
  }
  EQ(result, 0);
  world_close(&raced);
  world_close(&stays);
}

static bool readable(const char *path) {
  char text[4096];
  int fd = open(path, O_RDONLY);
  bool good = fd >= 0 && read(fd, text, sizeof(text)) > 0;
  close(fd);
  return good;
}

/* While the system is suspended every call fails with EAGAIN; afterwards everything works as before. The descriptor is
 * not closed during that time: UVM does not expect it, since a real suspend freezes user space. */
static void suspended(void) {
  struct world w;
  struct uvm_vmem_query q;
  struct uvm_vmem_stat s;
  uint32_t small, large, more;
  uint64_t ticket = 0;
  OK(furnish(&w, PATTERN, &small, &large));
  struct uvm_vmem_op op = op_map(RES + MIB(8), small, 0, 8, 0);
  OK(vm_bind(w.uvm, RES, &op, 1, NULL, &ticket)); /* may still be in flight */
  OK(softgpu_suspend(w.dev, true));
  const int got[] = {vm_query(w.uvm, NULL, &q),
                     vm_reserve(w.uvm, w.uuid[0], RES + GIB(1), MIB(2), 16, 0),
                     vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP),
                     vm_create(w.uvm, w.uuid[0], 16, 1, 0, &more),
                     vm_release(w.uvm, small),
                     vm_unmap(w.uvm, RES, RES, 1, 0),
                     vm_wait(w.uvm, ticket, 0),
                     vm_stat(w.uvm, NULL, &s)};
  const bool shown = readable("/proc/driver/nvidia-uvm/vmem"), listed = readable("/proc/driver/nvidia-uvm/vmem_dump");
  OK(softgpu_suspend(w.dev, false));
  for (size_t i = 0; i < ARRAY_SIZE(got); i++) EQ(got[i], -EAGAIN);
  CHECK(shown && listed);
  OK(vm_wait(w.uvm, ticket, FOREVER));
  OK(still_there(&w, PATTERN));
  OK(gpu_check(&w, 0, RES + MIB(8), 8 * UNIT, PATTERN, 1));
  OK(vm_map(w.uvm, RES, RES + MIB(10), small, 0, 8, 0));
  OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
  world_close(&w);
}

/* Repeats the call while the system is suspended, and counts the repeats. */
#define AWAKE(call)                                          \
  ({                                                         \
    int awake_;                                              \
    while ((awake_ = (call)) == -EAGAIN) {                   \
      slept++;                                               \
      sleep_ms(1);                                           \
    }                                                        \
    awake_;                                                  \
  })

static _Atomic unsigned slept, rounds;

/* Works on its own reservation: GPU pages and host pages, a slot that is one 2 MB entry, a ticket in each round. */
static void *goes_on(void *argument) {
  const uintptr_t number = (uintptr_t)argument;
  const uint64_t base = RES + number * GIB(1);
  uint64_t wrong = 0, ticket;
  uint32_t large, host;
  wrong += AWAKE(vm_reserve(raced.uvm, raced.uuid[0], base, MIB(16), 16, number ? UVM_VMEM_RESERVE_BIG : 0)) != 0;
  wrong += AWAKE(vm_create(raced.uvm, raced.uuid[0], 21, 1, 0, &large)) != 0;
  wrong += AWAKE(vm_create(raced.uvm, raced.uuid[0], 16, 4, UVM_VMEM_CREATE_HOST, &host)) != 0;
  wrong += AWAKE(vm_map(raced.uvm, base, base, large, 0, 1, 0)) != 0;
  wrong += AWAKE(vm_map(raced.uvm, base, base + MIB(2), host, 0, 4, 0)) != 0;
  wrong += gpu_fill(&raced, 0, base, MIB(2), number + 1, 1) != 0;
  wrong += gpu_fill(&raced, 0, base + MIB(2), 4 * UNIT, ~number, 1) != 0;
  while (!stop && !wrong) {
    uint32_t object;
    wrong += AWAKE(vm_create(raced.uvm, raced.uuid[0], 16, 4, 0, &object)) != 0;
    struct uvm_vmem_op op = op_map(base + MIB(4), object, 0, 4, 0);
    wrong += AWAKE(vm_bind(raced.uvm, base, &op, 1, NULL, &ticket)) != 0;
    wrong += AWAKE(vm_wait(raced.uvm, ticket, FOREVER)) != 0;
    wrong += gpu_check(&raced, 0, base + MIB(4), 4 * UNIT, 0, 0) != 0;
    wrong += gpu_fill(&raced, 0, base + MIB(4), 4 * UNIT, number, 0) != 0;
    wrong += AWAKE(vm_release(raced.uvm, object)) != 0;
    wrong += AWAKE(vm_unmap(raced.uvm, base, base + MIB(4), 4, 0)) != 0;
    wrong += gpu_check(&raced, 0, base, MIB(2), number + 1, 1) != 0;
    wrong += gpu_check(&raced, 0, base + MIB(2), 4 * UNIT, ~number, 1) != 0;
    rounds++;
  }
  return (void *)(uintptr_t)wrong;
}

/* The system is suspended again and again while threads map and unmap: no operation is lost or done twice. */
static void suspended_under_fire(void) {
  struct uvm_vmem_stat s;
  pthread_t thread[2];
  world_open(&raced, 1);
  stop = false;
  slept = rounds = 0;
  for (uintptr_t t = 0; t < 2; t++) OK(pthread_create(&thread[t], NULL, goes_on, (void *)t));
  int result = 0;
  for (unsigned i = 0; i < 10 && !result; i++) {
    const unsigned before = rounds;
    for (unsigned ms = 0; rounds < before + 2 && ms < 5000; ms += 10) sleep_ms(10);
    result = softgpu_suspend(raced.dev, true);
    if (result) break;
    sleep_ms(20);
    result = softgpu_suspend(raced.dev, false);
  }
  stop = true;
  for (unsigned t = 0; t < 2; t++) {
    void *wrong;
    OK(pthread_join(thread[t], &wrong));
    EQ((uintptr_t)wrong, 0);
  }
  EQ(result, 0);
  printf("%u rounds, %u calls while the system was suspended\n", rounds, slept);
  CHECK(slept > 0 && rounds >= 20);
  OK(vm_stat(raced.uvm, NULL, &s));
  EQ(s.out_objects, 4);
  EQ(s.out_tickets, 0);
  EQ(s.out_mapped_bytes, 2 * (MIB(2) + 4 * UNIT));
  world_close(&raced);
}

/* A handle with the index of a live object and a generation that was never issued is not valid. */
static void forged_generations(void) {
  struct world w;
  struct uvm_vmem_stat before, after;
  uint32_t live, larger;
  world_open(&w, 1);
  const unsigned bits = parameter("INDEX_BITS", 20);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(2), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &live));
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &larger));
  OK(vm_map(w.uvm, RES, RES, live, 0, 1, 0));
  OK(gpu_fill(&w, 0, RES, UNIT, PATTERN, 1));
  OK(vm_stat(w.uvm, NULL, &before));
  for (unsigned bit = bits; bit < 32; bit++) {
    const uint32_t forged = live ^ 1u << bit;
    EQ(vm_map(w.uvm, RES, RES + UNIT, forged, 0, 1, 0), -ENOENT);
    EQ(vm_release(w.uvm, forged), -ENOENT);
  }
  OK(vm_stat(w.uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  EQ(gpu_check(&w, 0, RES + UNIT, 8, 0, 0), -EFAULT);
  OK(gpu_check(&w, 0, RES, UNIT, PATTERN, 1));
  OK(vm_release(w.uvm, larger));
  OK(vm_release(w.uvm, live));
  world_close(&w);
}

/* A descriptor's indices wrap after 32 objects: handles still only grow, and old handles give ESTALE. */
static void indices_come_round(void) {
  enum { OBJECTS = 100 };
  uint32_t handle[OBJECTS], kept;
  struct world w;
  world_open(&w, 1);
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &kept));
  for (unsigned i = 0; i < OBJECTS; i++) {
    OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &handle[i]));
    if (handle[i] <= (i ? handle[i - 1] : kept)) fail("handle 0x%x after 0x%x", handle[i], i ? handle[i - 1] : kept);
    OK(vm_release(w.uvm, handle[i]));
  }
  for (unsigned i = 0; i < OBJECTS; i++) EQ(vm_release(w.uvm, handle[i]), -ESTALE);
  EQ(vm_release(w.uvm, handle[OBJECTS - 1] + 1), -ENOENT);
  EQ(vm_release(w.uvm, kept - 1), -ENOENT); /* no handle was issued before the first */
  OK(vm_release(w.uvm, kept));
  world_close(&w);
}

/* After 2^INDEX_BITS objects, indices are reused: an old handle must not refer to the new object. */
static void handles_come_round(void) {
  struct world w;
  uint32_t keeps_the_chunk, first, handle = 0;
  const unsigned bits = parameter("INDEX_BITS", 0);
  const uint32_t index = (1u << bits) - 1;
  if (!bits) SKIP("2 ms each, 2^20 times (INDEX_BITS=20; fewer for a driver with shorter indices)");
  world_open(&w, 1);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(2), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &keeps_the_chunk));
  for (unsigned round = 0; round < (bits < 10 ? 3 : 1); round++) {
    OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &first));
    OK(vm_release(w.uvm, first));
    for (unsigned i = 0; i < (1u << bits) + 8; i++) {
      OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &handle));
      CHECK(handle != 0 && handle != first && handle != keeps_the_chunk);
      if ((handle & index) == (first & index)) break;
      if (i % (1u << 16) == 0) printf("%u objects\n", i);
      OK(vm_release(w.uvm, handle));
    }
    EQ(handle & index, first & index);
    EQ(vm_map(w.uvm, RES, RES, first, 0, 1, 0), -ESTALE);
    EQ(vm_release(w.uvm, first), -ESTALE);
    OK(vm_map(w.uvm, RES, RES, handle, 0, 1, 0));
    OK(vm_unmap(w.uvm, RES, RES, 1, 0));
    OK(vm_release(w.uvm, handle));
  }
  OK(vm_map(w.uvm, RES, RES, keeps_the_chunk, 0, 1, 0)); /* its index was skipped */
  world_close(&w);
}

/* Every index is in use: CREATE fails with ENOMEM, frees what it took, and works again once an index is free. */
static void no_index_is_left(void) {
  enum { MOST = 1024 };
  static uint32_t handle[MOST];
  struct world w;
  struct uvm_vmem_stat before, after;
  uint32_t more;
  unsigned n = 0;
  const unsigned bits = parameter("INDEX_BITS", 0);
  if (!bits || bits > 10) SKIP("needs a driver with short indices (INDEX_BITS=6)");
  world_open(&w, 1);
  while (n < (1u << bits) - 1) OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &handle[n++]));
  OK(vm_stat(w.uvm, NULL, &before));
  EQ(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &more), -ENOMEM);
  OK(vm_stat(w.uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  EQ(after.out_kernel_bytes, before.out_kernel_bytes);
  OK(vm_release(w.uvm, handle[5]));
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &handle[5]));
  while (n) OK(vm_release(w.uvm, handle[--n]));
  OK(vm_stat(w.uvm, NULL, &after));
  EQ(after.out_objects + after.out_created_bytes, 0);
  world_close(&w);
}

MAIN(TEST(two_clients), TEST(the_address_space_goes), TEST(the_gpu_goes), TEST(uvm_free_of_our_range),
     TEST(uvm_map_on_our_range), TEST(memory_runs_out), TEST(contiguous_allocation), TEST(managed_memory_gives_way),
     TEST(unregister_under_fire), TEST(suspended), TEST(suspended_under_fire), TEST(forged_generations),
     TEST(indices_come_round), TEST(handles_come_round),
     TEST(no_index_is_left))
