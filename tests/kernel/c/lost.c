/* SPDX-License-Identifier: MIT */
/*
 * The GPU fails: it falls off the bus, or a push dies. After either UVM refuses to work until it is reloaded,
 * so each guest runs only one of these tests: `lost gpu_lost`, `lost push_dies`. The driver itself
 * reports the failure in the kernel log.
 *
 * Nothing may hang, calls must fail in a defined way, and close must free everything.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull

static struct world W, stays;
static uint32_t object;

static int furnish(void) {
  world_open(&stays, 1);
  world_open(&W, 1);
  int result = vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0);
  if (!result) result = vm_create(W.uvm, W.uuid[0], 16, 32, 0, &object);
  if (!result) result = vm_map(W.uvm, RES, RES, object, 0, 8, 0);
  return result;
}

static bool defined(int result) {
  return result == -EIO || result == -ENODEV || result == -ENOSPC || result == -ENOMEM;
}

/* The first call that needs the GPU notices the failure. From then on only calls that query or free work. */
static void calls_after_the_failure(void) {
  struct uvm_vmem_query q;
  struct uvm_vmem_stat s;
  uint32_t more;
  int result = vm_map(W.uvm, RES, RES + MIB(2), object, 8, 8, 0);
  CHECK(defined(result));
  EQ(vm_map(W.uvm, RES, RES + MIB(2), object, 8, 8, 0), -EIO);
  EQ(vm_unmap(W.uvm, RES, RES, 8, 0), -EIO);
  EQ(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &more), -EIO);
  EQ(vm_reserve(W.uvm, W.uuid[0], RES + GIB(1), MIB(64), 16, UVM_VMEM_RESERVE_EAGER), -EIO);
  EQ(vm_reserve(W.uvm, W.uuid[0], RES + GIB(1), MIB(64), 16, 0), -EIO);
  EQ(vm_wait(W.uvm, 0, 0), -EIO);
  OK(vm_query(W.uvm, NULL, &q));
  OK(vm_query(W.uvm, W.uuid[0], &q));
  OK(vm_stat(W.uvm, NULL, &s));
  OK(vm_stat(W.uvm, W.uuid[0], &s));
  OK(vm_release(W.uvm, object));
  OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP)); /* also frees mappings in an unknown state */
}

/* Page tables may still map the memory, and user channels run: it is not freed until they are stopped. */
static void memory_stays_until_close(void) {
  struct uvm_vmem_stat s;
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_objects, 0);
  EQ(s.out_chunk_bytes, MIB(2));
}

/* The descriptors close without hanging, and nothing stays allocated in the resource manager. (UVM can no longer clear
 * page tables, so memory is freed that entries still map. The model reports it, but no GPU runs.) */
static void all_closes(void) {
  struct softgpu_counters base = stays.base[0], now;
  softgpu_client_close(&W.c);
  softgpu_client_close(&stays.c);
  int dev = softgpu_open();
  OK(softgpu_counters(dev, 0, &now));
  EQ(now.stale, base.stale);
  EQ(now.channels_now, base.channels_now);
  EQ(now.spaces_now, base.spaces_now);
  close(dev);
}

static void gpu_lost(void) {
  OK(furnish());
  OK(softgpu_lost(W.dev, 0, true));
  calls_after_the_failure();
  if (!failures_here) all_closes();
}

static void push_dies(void) {
  OK(furnish());
  OK(softgpu_fail_nth(W.dev, "push", 1, 0));
  int result = vm_map(W.uvm, RES, RES + 16 * UNIT, object, 16, 8, 0);
  EQ(result, -EIO);
  softgpu_inject_clear(W.dev);
  uint32_t more;
  EQ(vm_create(W.uvm, W.uuid[0], 16, 1, 0, &more), -EIO); /* UVM has noticed the failure and begins no new work */
  calls_after_the_failure();
  if (!failures_here) memory_stays_until_close();
  if (!failures_here) all_closes();
}

/* A process with binds in flight when the GPU is lost does not hang. */
static void lost_in_flight(void) {
  uint64_t ticket = 0;
  OK(furnish());
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  struct uvm_vmem_op op = op_map(RES + 16 * UNIT, object, 16, 8, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
  OK(softgpu_lost(W.dev, 0, true));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  int result = vm_wait(W.uvm, ticket, FOREVER);
  CHECK(result == -EIO || result == -ENODEV);
  calls_after_the_failure();
  if (!failures_here) all_closes();
}

enum { CLIENTS = 12, BINDS = 256 };

static struct world filler[CLIENTS];
static volatile unsigned filled;
static volatile bool bound;

/* Sends batches to GPU 1, which is stopped, until its channel is full; the last waits until the GPU is lost. */
static void *fills(void *unused) {
  (void)unused;
  for (unsigned i = 0; i < CLIENTS * BINDS; i++, filled++) {
    uint32_t failed;
    uint64_t ticket;
    struct uvm_vmem_op op = op_unmap(RES, 1, i % 2 ? 0 : UVM_VMEM_OP_SPARSE);
    int result = vm_bind(filler[i / BINDS].uvm, RES, &op, 1, &failed, &ticket);
    if (result) return (void *)(intptr_t)result;
  }
  return NULL;
}

static void *binds_on_both(void *unused) {
  (void)unused;
  intptr_t result = vm_map(W.uvm, RES, RES, object, 0, 8, 0);
  bound = true;
  return (void *)result;
}

/* True if the kernel's log, from fd on, has a line with this text. */
static bool logged(int fd, const char *what) {
  char line[2048];
  for (unsigned tries = 0; tries < 100;) {
    ssize_t n = read(fd, line, sizeof(line) - 1);
    if (n > 0) {
      line[n] = 0;
      if (strstr(line, what)) return true;
    } else if (n == 0 || errno != EPIPE) {
      sleep_ms(20);
      tries++;
    }
  }
  return false;
}

/* The second GPU is lost when half of a batch was sent, to the first: the state of the page tables is unknown. */
static void broken(void) {
  struct uvm_vmem_stat s;
  pthread_t first, second;
  void *result;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  int log = open("/dev/kmsg", O_RDONLY | O_NONBLOCK);
  CHECK(log >= 0 && lseek(log, 0, SEEK_END) >= 0);
  world_open(&stays, 1);
  world_open(&W, 2);
  OK(vm_reserve_on(W.uvm, RES, MIB(64), 16, UVM_VMEM_RESERVE_EAGER, W.uuid, 2));
  OK(vm_create(W.uvm, W.uuid[0], 16, 32, UVM_VMEM_CREATE_HOST, &object));
  for (unsigned i = 0; i < CLIENTS; i++) {
    world_open(&filler[i], 2);
    OK(vm_reserve(filler[i].uvm, filler[i].uuid[1], RES, MIB(2), 16, UVM_VMEM_RESERVE_EAGER));
  }
  OK(softgpu_hold(W.dev, 1, SOFTGPU_HOLD_PUSH));
  OK(pthread_create(&first, NULL, fills, NULL));
  for (unsigned before = ~0u; before != filled;) {
    before = filled;
    sleep_ms(2000);
  }
  printf("%u batches wait for GPU 1\n", filled);
  CHECK(filled < CLIENTS * BINDS);
  OK(pthread_create(&second, NULL, binds_on_both, NULL));
  sleep_ms(1000);
  CHECK(!bound);
  OK(softgpu_lost(W.dev, 1, true));
  OK(softgpu_hold(W.dev, 1, SOFTGPU_HOLD_RELEASE));
  OK(pthread_join(second, &result));
  EQ((intptr_t)result, -EIO);
  OK(pthread_join(first, &result));
  char expected[160];
  snprintf(expected, sizeof(expected), "process %d (lost): a batch failed on a GPU (-5), reservation 0x%llx-0x%llx is in an unknown",
           getpid(), RES, RES + MIB(64) - 1);
  CHECK(logged(log, expected));
  EQ(vm_map(W.uvm, RES, RES + MIB(2), object, 8, 8, 0), -EIO);
  /* Memory visible to the other GPU stays pinned, and is freed with the descriptor. */
  OK(vm_release(W.uvm, object));
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_host_bytes, 32 * UNIT);
  OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  for (unsigned i = 0; i < CLIENTS; i++) softgpu_client_close(&filler[i].c);
  close(log);
  if (!failures_here) all_closes();
}

MAIN(TEST(gpu_lost), TEST(push_dies), TEST(lost_in_flight), TEST(broken))
