/* SPDX-License-Identifier: MIT */
/*
 * A process with several threads at work is killed at a random point, again and again; afterwards everything
 * that it had is back, and nobody sees what it wrote.
 *
 * Parameters: KILLS, SEED.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define THREADS 3
#define SECRET 0x5ec7e75ec7e75ec7ull

static struct world W;

/* Makes, binds, writes, unbinds and frees for ever. */
static void *work(void *argument) {
  struct rng rng = {.state = (uintptr_t)argument};
  const uint64_t base = RES + ((uintptr_t)argument & 0xff) * GIB(2);
  for (;;) {
    uint64_t ticket = 0;
    uint32_t object[3];
    unsigned flags = rng_one_in(&rng, 3) ? UVM_VMEM_RESERVE_EAGER : rng_one_in(&rng, 2) ? UVM_VMEM_RESERVE_BIG : 0;
    if (vm_reserve(W.uvm, W.uuid[0], base, MIB(32), 16, flags)) flags = 0;
    for (unsigned i = 0; i < 3; i++) {
      static const unsigned shifts[] = {16, 17, 18, 21};
      unsigned host = rng_one_in(&rng, 5) ? UVM_VMEM_CREATE_HOST : 0;
      if (vm_create(W.uvm, W.uuid[0], shifts[rng_below(&rng, 4)], 1 + rng_below(&rng, 8), host, &object[i])) continue;
      struct uvm_vmem_op op = op_map(base + i * MIB(8), object[i], 0, 1, UVM_VMEM_OP_REPLACE);
      vm_bind(W.uvm, base, &op, 1, NULL, rng_one_in(&rng, 2) ? &ticket : NULL);
      if (ticket && rng_one_in(&rng, 2)) vm_wait(W.uvm, ticket, FOREVER);
      if (rng_one_in(&rng, 4)) gpu_fill(&W, 0, base + i * MIB(8), UNIT, SECRET, 0);
    }
    for (unsigned i = 0; i < 3; i++) {
      struct uvm_vmem_op op = op_unmap(base + i * MIB(8), 32, rng_one_in(&rng, 3) ? UVM_VMEM_OP_SPARSE : 0);
      if (rng_one_in(&rng, 2)) vm_release(W.uvm, object[i]);
      if (rng_one_in(&rng, 2)) vm_bind(W.uvm, base, &op, 1, NULL, rng_one_in(&rng, 2) ? &ticket : NULL);
    }
    vm_free(W.uvm, base, rng_one_in(&rng, 5) ? 0 : UVM_VMEM_FREE_UNMAP);
  }
  return NULL;
}

__attribute__((noreturn)) static void victim(uint64_t seed) {
  pthread_t thread;
  world_open(&W, 1);
  for (uintptr_t t = 0; t < THREADS; t++) pthread_create(&thread, NULL, work, (void *)(seed << 8 | t));
  for (;;) sleep_ms(1000);
}

/* Memory that the dead left is zero for the next. */
static void nothing_shows(struct world *w) {
  unsigned pages = 256;
  uint32_t object;
  OK(vm_reserve(w->uvm, w->uuid[0], RES, pages * UNIT, 16, 0));
  OK(vm_create(w->uvm, w->uuid[0], 16, pages, 0, &object));
  OK(vm_map(w->uvm, RES, RES, object, 0, pages, 0));
  OK(gpu_check(w, 0, RES, pages * UNIT, 0, 0));
  OK(vm_free(w->uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(vm_release(w->uvm, object));
}

static void kill_at_random(void) {
  uint64_t kills = parameter("KILLS", 50), seed = parameter("SEED", 1);
  struct rng rng = {.state = seed};
  struct softgpu_counters base;
  struct world stays;
  printf("SEED=%llu KILLS=%llu\n", (unsigned long long)seed, (unsigned long long)kills);
  /* A client that stays makes opening cheap for the others: UVM's channels are there already. */
  world_open(&stays, 1);
  nothing_shows(&stays);
  base = gpu_counters(&stays, 0);
  for (uint64_t i = 0; i < kills && !failures_here; i++) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) victim(seed * 100003 + i);
    /* Some die while they open, most in the middle of their work. */
    sleep_ms(rng_below(&rng, rng_one_in(&rng, 4) ? 20 : 150));
    kill(child, SIGKILL);
    EQ(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status)) fail("the victim ended by itself: 0x%x", status);
    gpu_check_clean(stays.dev, 0, &base, true);
    if (i % 10 == 9) nothing_shows(&stays);
    if (failures_here) printf("after %llu kills\n", (unsigned long long)i + 1);
  }
  OK(softgpu_verify(stays.dev));
  world_close(&stays);
}

/* The same with no other client: the last one out takes the GPU's channels with it. */
static void kill_the_only_client(void) {
  uint64_t kills = 1 + parameter("KILLS", 50) / 10, seed = parameter("SEED", 1);
  struct rng rng = {.state = seed + 1};
  struct softgpu_counters base;
  int dev = softgpu_open();
  OK(softgpu_counters(dev, 0, &base));
  for (uint64_t i = 0; i < kills && !failures_here; i++) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) victim(seed * 700001 + i);
    sleep_ms(rng_below(&rng, 600));
    kill(child, SIGKILL);
    EQ(waitpid(child, &status, 0), child);
    gpu_check_clean(dev, 0, &base, true);
  }
  close(dev);
}

MAIN(TEST(kill_at_random), TEST(kill_the_only_client))
