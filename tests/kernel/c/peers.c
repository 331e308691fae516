/* SPDX-License-Identifier: MIT */
/*
 * Two GPUs: one reservation on both, pages of one mapped for the other, and the end of peer access.
 */
#include <pthread.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define PATTERN 0x3333000000000000ull

static bool has(struct world *w, uint64_t capability) {
  struct uvm_vmem_query q;
  return vm_query(w->uvm, w->uuid[0], &q) == 0 && (q.out_capabilities & capability) == capability;
}

/* GPUs on NVLink are always peers: UVM refuses to enable it. */
static bool always_peers(struct world *w) {
  enum { INVALID_DEVICE = 0x26 };
  int status = softgpu_uvm_enable_peer(&w->c, 0, 1);
  if (status == INVALID_DEVICE) return true;
  if (status) hopeless("peer access", status);
  softgpu_uvm_disable_peer(&w->c, 0, 1);
  return false;
}

/* STAT of one GPU counts only that GPU's pages; all other fields are the descriptor's. */
static void of_one_gpu(struct world *w) {
  struct uvm_vmem_stat all, one[2];
  uint32_t host;
  OK(vm_create(w->uvm, w->uuid[0], 16, 2, UVM_VMEM_CREATE_HOST, &host));
  OK(vm_map(w->uvm, RES, RES + MIB(8), host, 0, 2, 0));
  OK(vm_stat(w->uvm, NULL, &all));
  for (unsigned gpu = 0; gpu < 2; gpu++) {
    OK(vm_stat(w->uvm, w->uuid[gpu], &one[gpu]));
    EQ(one[gpu].out_host_bytes, 0); /* host memory belongs to no GPU */
    CHECK(one[gpu].out_chunk_bytes == MIB(2) && one[gpu].out_created_bytes == one[gpu].out_mapped_bytes);
    EQ(one[gpu].out_reserved_bytes, all.out_reserved_bytes);
    EQ(one[gpu].out_reservations, 2);
    EQ(one[gpu].out_objects, all.out_objects);
    EQ(one[gpu].out_slots, all.out_slots);
    EQ(one[gpu].out_kernel_bytes, all.out_kernel_bytes);
    EQ(one[gpu].out_table_bytes, all.out_table_bytes);
    EQ(one[gpu].out_binds, all.out_binds);
    EQ(one[gpu].out_pushes, all.out_pushes);
    EQ(one[gpu].out_invalidates, all.out_invalidates);
    EQ(one[gpu].out_pte_writes, all.out_pte_writes);
    EQ(one[gpu].out_zeroed_bytes, all.out_zeroed_bytes);
  }
  EQ(all.out_host_bytes, 2 * UNIT);
  EQ(all.out_chunk_bytes, one[0].out_chunk_bytes + one[1].out_chunk_bytes);
  EQ(all.out_created_bytes, one[0].out_created_bytes + one[1].out_created_bytes + 2 * UNIT);
  EQ(all.out_mapped_bytes, one[0].out_mapped_bytes + one[1].out_mapped_bytes + 2 * UNIT);
  OK(vm_release(w->uvm, host));
  OK(vm_unmap(w->uvm, RES, RES + MIB(8), 2, 0));
}

static void apart(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t on0, on1;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_reserve(w.uvm, w.uuid[1], RES + GIB(1), MIB(16), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 8, 0, &on0));
  OK(vm_create(w.uvm, w.uuid[1], 16, 4, 0, &on1));
  OK(vm_map(w.uvm, RES, RES, on0, 0, 8, 0));
  OK(vm_map(w.uvm, RES + GIB(1), RES + GIB(1), on1, 0, 4, 0));
  OK(gpu_fill(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  OK(gpu_fill(&w, 1, RES + GIB(1), 4 * UNIT, ~PATTERN, 1));
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  EQ(gpu_check(&w, 1, RES, 8, 0, 0), -EFAULT);
  EQ(gpu_check(&w, 0, RES + GIB(1), 8, 0, 0), -EFAULT);
  OK(vm_stat(w.uvm, w.uuid[0], &s));
  EQ(s.out_created_bytes, 8 * UNIT);
  EQ(s.out_mapped_bytes, 8 * UNIT);
  OK(vm_stat(w.uvm, w.uuid[1], &s));
  EQ(s.out_created_bytes, 4 * UNIT);
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_created_bytes, 12 * UNIT);
  of_one_gpu(&w);
  /* Map the other GPU's memory without peer access. */
  if (!always_peers(&w)) EQ(vm_map(w.uvm, RES, RES + MIB(4), on1, 0, 1, 0), -EXDEV);
  /* One GPU is unregistered, without effect on the other. */
  OK(softgpu_uvm_unregister_space(&w.c, 1));
  OK(softgpu_uvm_unregister_gpu(&w.c, 1));
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  OK(vm_unmap(w.uvm, RES, RES, 4, 0));
  OK(vm_map(w.uvm, RES, RES + MIB(4), on0, 0, 4, 0));
  OK(gpu_check(&w, 0, RES + MIB(4), 4 * UNIT, PATTERN, 1));
  world_close(&w);
}

static void one_reservation_on_both(void) {
  struct world w;
  struct softgpu_counters before[2];
  uint32_t host, on0;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  if (!has(&w, UVM_VMEM_CAP_MULTI_GPU)) SKIP("no reservations on several GPUs");
  OK(vm_reserve_on(w.uvm, RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER, w.uuid, 2));
  OK(vm_create(w.uvm, w.uuid[0], 16, 8, 0, &on0));
  if (!always_peers(&w)) EQ(vm_map(w.uvm, RES, RES, on0, 0, 1, 0), -EXDEV); /* GPU 1 cannot reach it */
  if (has(&w, UVM_VMEM_CAP_HOST)) {
    OK(vm_create(w.uvm, w.uuid[0], 16, 8, UVM_VMEM_CREATE_HOST, &host));
    before[0] = gpu_counters(&w, 0);
    before[1] = gpu_counters(&w, 1);
    OK(vm_map(w.uvm, RES, RES, host, 0, 8, 0));
    for (unsigned gpu = 0; gpu < 2; gpu++) {
      struct softgpu_counters d = gpu_counters_since(&w, gpu, &before[gpu]);
      EQ(d.pushes, 1);
      EQ(d.pte_writes, 8);
      OK(gpu_check(&w, gpu, RES, 8 * UNIT, 0, 0));
    }
    OK(gpu_fill(&w, 0, RES, 8 * UNIT, PATTERN, 1));
    OK(gpu_check(&w, 1, RES, 8 * UNIT, PATTERN, 1));
    OK(vm_unmap(w.uvm, RES, RES, 8, 0));
    for (unsigned gpu = 0; gpu < 2; gpu++) EQ(gpu_check(&w, gpu, RES, 8, 0, 0), -EFAULT);
  }
  world_close(&w);
}

static void peer_memory(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t on0, on1;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  if (!has(&w, UVM_VMEM_CAP_PEER)) SKIP("no peer mappings");
  const bool always = always_peers(&w);
  if (!always) OK(softgpu_uvm_enable_peer(&w.c, 0, 1));
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_reserve_on(w.uvm, RES + GIB(1), MIB(16), 16, 0, w.uuid, has(&w, UVM_VMEM_CAP_MULTI_GPU) ? 2 : 1));
  OK(vm_create(w.uvm, w.uuid[0], 16, 8, 0, &on0));
  OK(vm_create(w.uvm, w.uuid[1], 17, 4, 0, &on1));
  OK(vm_map(w.uvm, RES, RES, on1, 0, 4, 0));
  OK(vm_map(w.uvm, RES + GIB(1), RES + GIB(1), on0, 0, 8, 0));
  /* Mappings of other memory are kept in all cases. */
  const uint64_t stays = RES + MIB(12), stays_on_both = RES + GIB(1) + MIB(12);
  uint32_t host;
  OK(vm_create(w.uvm, w.uuid[0], 16, 1, UVM_VMEM_CREATE_HOST, &host));
  OK(vm_map(w.uvm, RES, stays, on0, 7, 1, 0));
  OK(vm_map(w.uvm, RES + GIB(1), stays_on_both, host, 0, 1, 0));
  if (has(&w, UVM_VMEM_CAP_MULTI_GPU)) OK(vm_map(w.uvm, RES + GIB(1), RES + GIB(1) + MIB(4), on1, 0, 4, 0));
  struct softgpu_xlate x = gpu_xlate(&w, 0, RES);
  EQ(x.out_aperture, SOFTGPU_APERTURE_PEER);
  EQ(x.out_peer, 1);
  OK(gpu_check(&w, 0, RES, 8 * UNIT, 0, 0));
  OK(gpu_fill(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  if (has(&w, UVM_VMEM_CAP_MULTI_GPU)) {
    OK(gpu_fill(&w, 1, RES + GIB(1), 8 * UNIT, ~PATTERN, 1));
    OK(gpu_check(&w, 0, RES + GIB(1), 8 * UNIT, ~PATTERN, 1));
  }
  if (!always) {
    /* Peer access ends: pages in the other GPU's memory can no longer be reached, and are unmapped. */
    OK(softgpu_uvm_disable_peer(&w.c, 0, 1));
    EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT);
    for (unsigned gpu = 0; gpu < 2 && has(&w, UVM_VMEM_CAP_MULTI_GPU); gpu++) {
      EQ(gpu_check(&w, gpu, RES + GIB(1), 8, 0, 0), -EFAULT);
      EQ(gpu_check(&w, gpu, RES + GIB(1) + MIB(4), 8, 0, 0), -EFAULT);
      CHECK(gpu_xlate(&w, gpu, stays_on_both).out_valid);
    }
    CHECK(gpu_xlate(&w, 0, stays).out_valid);
    OK(vm_stat(w.uvm, NULL, &s));
    EQ(s.out_objects, 3);
    EQ(s.out_mapped_bytes, 2 * UNIT);
    EQ(vm_map(w.uvm, RES, RES + MIB(4), on1, 0, 1, 0), -EXDEV);
    OK(softgpu_uvm_enable_peer(&w.c, 0, 1));
  }
  OK(vm_map(w.uvm, RES, RES + MIB(4), on1, 0, 4, 0));
  OK(gpu_check(&w, 0, RES + MIB(4), 8 * UNIT, PATTERN, 1));
  /* The peer is unregistered while its pages are mapped here. */
  if (!always) OK(softgpu_uvm_disable_peer(&w.c, 0, 1));
  OK(softgpu_uvm_unregister_space(&w.c, 1));
  OK(softgpu_uvm_unregister_gpu(&w.c, 1));
  EQ(gpu_check(&w, 0, RES + MIB(4), 8, 0, 0), -EFAULT);
  OK(vm_unmap(w.uvm, RES, RES, MIB(16) / UNIT, 0));
  world_close(&w);
}

/* 2 MB entries over memory of each GPU, on both GPUs: cut, joined, and removed when peer access ends. */
static void large_entries(void) {
  struct world w;
  struct uvm_vmem_stat s;
  uint32_t on[2], host;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  const bool always = always_peers(&w);
  if (!always) OK(softgpu_uvm_enable_peer(&w.c, 0, 1));
  OK(vm_reserve_on(w.uvm, RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG, w.uuid, 2));
  for (unsigned i = 0; i < 2; i++) {
    OK(vm_create(w.uvm, w.uuid[i], 16, SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &on[i]));
    OK(vm_map(w.uvm, RES, RES + i * SLOT, on[i], 0, SLOT_UNITS, UVM_VMEM_OP_LARGE));
  }
  OK(gpu_fill(&w, 0, RES, 2 * SLOT, PATTERN, 1));
  for (unsigned round = 0; round < 2; round++) {
    for (unsigned gpu = 0; gpu < 2; gpu++) {
      for (unsigned i = 0; i < 2; i++) {
        struct softgpu_xlate x = gpu_xlate(&w, gpu, RES + i * SLOT);
        EQ(x.out_page_size, SLOT);
        EQ(x.out_aperture, i == gpu ? SOFTGPU_APERTURE_VID : SOFTGPU_APERTURE_PEER);
      }
      OK(gpu_check(&w, gpu, RES, 2 * SLOT, PATTERN, 1));
    }
    if (round) break;
    for (unsigned i = 0; i < 2; i++) OK(vm_unmap(w.uvm, RES, RES + i * SLOT + 5 * UNIT, 1, UVM_VMEM_OP_CUT));
    for (unsigned gpu = 0; gpu < 2; gpu++) {
      EQ(gpu_scan(&w, gpu, RES, 2 * SLOT).out_64k, 2 * (SLOT_UNITS - 1));
      OK(gpu_check(&w, gpu, RES, 5 * UNIT, PATTERN, 1));
      OK(gpu_check(&w, gpu, RES + SLOT + 6 * UNIT, SLOT - 6 * UNIT, PATTERN + (SLOT + 6 * UNIT) / 8, 1));
      for (unsigned i = 0; i < 2; i++) EQ(gpu_check(&w, gpu, RES + i * SLOT + 5 * UNIT, 8, 0, 0), -EFAULT);
    }
    for (unsigned i = 0; i < 2; i++)
      OK(vm_map(w.uvm, RES, RES + i * SLOT, on[i], 0, SLOT_UNITS, UVM_VMEM_OP_LARGE | UVM_VMEM_OP_REPLACE));
  }
  if (!always) {
    OK(softgpu_uvm_disable_peer(&w.c, 0, 1));
    for (unsigned gpu = 0; gpu < 2; gpu++) EQ(gpu_scan(&w, gpu, RES, 2 * SLOT).out_2m, 0);
    OK(vm_stat(w.uvm, NULL, &s));
    EQ(s.out_mapped_bytes, 0);
    /* No 2 MB entry is left there that mapping a page would have to cut. */
    OK(vm_create(w.uvm, w.uuid[0], 16, 1, UVM_VMEM_CREATE_HOST, &host));
    for (unsigned i = 0; i < 2; i++) OK(vm_map(w.uvm, RES, RES + i * SLOT + 3 * UNIT, host, 0, 1, 0));
    for (unsigned gpu = 0; gpu < 2; gpu++) OK(gpu_check(&w, gpu, RES + 3 * UNIT, UNIT, 0, 0));
  }
  world_close(&w);
}

/* The administrator's limit is per GPU. */
static void limit_of_each_gpu(void) {
  struct world w;
  uint32_t object[2], more;
  int result = 0, above[2];
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  OK(set_parameter("uvm_vmem_limit_mb", 4));
  for (unsigned gpu = 0; gpu < 2 && !result; gpu++) result = vm_create(w.uvm, w.uuid[gpu], 21, 2, 0, &object[gpu]);
  for (unsigned gpu = 0; gpu < 2; gpu++) above[gpu] = vm_create(w.uvm, w.uuid[gpu], 16, 1, 0, &more);
  OK(set_parameter("uvm_vmem_limit_mb", 0));
  EQ(result, 0);
  EQ(above[0], -EDQUOT);
  EQ(above[1], -EDQUOT);
  world_close(&w);
}

#define A_WHILE 100 /* ms in which a call that does not wait would have returned */

static struct world both;
static uint32_t on_the_host;
static volatile bool returned;

static int map_on_both(void) {
  return vm_map(both.uvm, RES, RES, on_the_host, 0, 8, 0);
}

static int unmap_on_both(void) {
  return vm_unmap(both.uvm, RES, RES, 8, 0);
}

static int free_on_both(void) {
  return vm_free(both.uvm, RES, UVM_VMEM_FREE_UNMAP);
}

static void *call_on_both(void *call) {
  intptr_t result = ((int (*)(void))call)();
  returned = true;
  return (void *)result;
}

/* Stops one GPU, the first or the second: the call must not return. */
static void waits_for(unsigned gpu, const char *what, int (*call)(void)) {
  pthread_t thread;
  void *result;
  returned = false;
  OK(softgpu_hold(both.dev, gpu, SOFTGPU_HOLD_PUSH));
  OK(pthread_create(&thread, NULL, call_on_both, call));
  OK(softgpu_hold_wait(both.dev, gpu, 10000));
  sleep_ms(A_WHILE);
  bool early = returned;
  OK(softgpu_hold(both.dev, gpu, SOFTGPU_HOLD_RELEASE));
  OK(pthread_join(thread, &result));
  EQ((intptr_t)result, 0);
  if (early) fail("%s returned before GPU %u had executed it", what, gpu);
}

/* A ticket stays unfinished until the last GPU is done. */
static void ticket_waits_for(unsigned gpu, struct uvm_vmem_op op) {
  uint64_t ticket;
  OK(softgpu_hold(both.dev, gpu, SOFTGPU_HOLD_PUSH));
  OK(vm_bind(both.uvm, RES, &op, 1, NULL, &ticket));
  OK(softgpu_hold_wait(both.dev, gpu, 10000));
  int early = vm_wait(both.uvm, ticket, A_WHILE * 1000000ull);
  OK(softgpu_hold(both.dev, gpu, SOFTGPU_HOLD_RELEASE));
  OK(vm_wait(both.uvm, ticket, FOREVER));
  if (early != -ETIMEDOUT) fail("WAIT gave %d before GPU %u was done", early, gpu);
}

static void every_gpu_is_waited_for(void) {
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&both, 2);
  if (!has(&both, UVM_VMEM_CAP_MULTI_GPU | UVM_VMEM_CAP_HOST)) SKIP("no reservations on several GPUs");
  OK(vm_create(both.uvm, both.uuid[0], 16, 8, UVM_VMEM_CREATE_HOST, &on_the_host));
  for (unsigned gpu = 0; gpu < 2; gpu++) {
    OK(vm_reserve_on(both.uvm, RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER, both.uuid, 2));
    waits_for(gpu, "BIND (map)", map_on_both);
    waits_for(gpu, "BIND (unmap)", unmap_on_both);
    ticket_waits_for(gpu, op_map(RES, on_the_host, 0, 8, 0));
    ticket_waits_for(gpu, op_unmap(RES, 8, 0));
    OK(map_on_both());
    waits_for(gpu, "FREE", free_on_both);
  }
  world_close(&both);
}

static uint32_t on_gpu_0;

static int release_it(void) {
  return vm_release(both.uvm, on_gpu_0);
}

/* Memory that both GPUs mapped is not reused before both have unmapped it. */
static void not_reused_before_both_are_done(void) {
  struct softgpu_frame frame;
  pthread_t thread;
  void *result;
  uint32_t object;
  uint64_t ticket;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&both, 2);
  if (!has(&both, UVM_VMEM_CAP_MULTI_GPU | UVM_VMEM_CAP_PEER)) SKIP("no reservations on several GPUs");
  if (!always_peers(&both)) OK(softgpu_uvm_enable_peer(&both.c, 0, 1));
  OK(vm_reserve_on(both.uvm, RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER, both.uuid, 2));
  OK(vm_create(both.uvm, both.uuid[0], 21, 1, 0, &object));
  OK(vm_map(both.uvm, RES, RES, object, 0, 1, 0));
  OK(gpu_fill(&both, 0, RES, MIB(2), 0x77, 0));
  uint64_t pa = gpu_xlate(&both, 0, RES).out_pa;
  OK(softgpu_hold(both.dev, 1, SOFTGPU_HOLD_INVALIDATE));
  struct uvm_vmem_op op = op_unmap(RES, 32, 0);
  OK(vm_bind(both.uvm, RES, &op, 1, NULL, &ticket));
  OK(softgpu_hold_wait(both.dev, 1, 10000));
  on_gpu_0 = object;
  OK(pthread_create(&thread, NULL, call_on_both, release_it)); /* may wait */
  sleep_ms(A_WHILE);
  OK(softgpu_frame(both.dev, 0, pa, &frame));
  int untouched = softgpu_check_phys(both.dev, 0, pa, UNIT, 0x77, 0);
  OK(softgpu_hold(both.dev, 1, SOFTGPU_HOLD_RELEASE));
  OK(pthread_join(thread, &result));
  EQ((intptr_t)result, 0);
  OK(vm_wait(both.uvm, ticket, FOREVER));
  CHECK(frame.out_allocated);
  EQ(untouched, 0);
  world_close(&both);
}

/* One of two GPUs is unregistered: the other keeps its mappings, and the reservation continues on it alone. */
static void one_of_two_leaves(void) {
  struct uvm_vmem_stat s;
  uint32_t object;
  struct world w;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  if (!has(&w, UVM_VMEM_CAP_MULTI_GPU | UVM_VMEM_CAP_HOST)) SKIP("no reservations on several GPUs");
  OK(vm_reserve_on(w.uvm, RES, MIB(16), 16, 0, w.uuid, 2));
  OK(vm_create(w.uvm, w.uuid[0], 16, 8, UVM_VMEM_CREATE_HOST, &object));
  OK(vm_map(w.uvm, RES, RES, object, 0, 8, 0));
  OK(gpu_fill(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  OK(softgpu_uvm_unregister_space(&w.c, 1));
  OK(softgpu_uvm_unregister_gpu(&w.c, 1));
  OK(gpu_check(&w, 0, RES, 8 * UNIT, PATTERN, 1));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, 8 * UNIT);
  EQ(vm_map(w.uvm, RES, RES + MIB(4), object, 0, 1, 0), -ENODEV);
  OK(vm_unmap(w.uvm, RES, RES, 4, 0));
  EQ(gpu_check(&w, 0, RES, 8, 0, 0), -EFAULT);
  OK(gpu_check(&w, 0, RES + 4 * UNIT, 4 * UNIT, PATTERN + 4 * UNIT / 8, 1));
  OK(softgpu_uvm_unregister_space(&w.c, 0));
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, 0);
  world_close(&w);
}

static uint32_t object_on_0;

static void *bind_on_0(void *argument) {
  struct world *w = argument;
  return (void *)(intptr_t)vm_map(w->uvm, RES, RES, object_on_0, 0, 4, 0);
}

static void *create_on_1(void *argument) {
  struct world *w = argument;
  uint32_t object;
  return (void *)(intptr_t)vm_create(w->uvm, w->uuid[1], 16, 4, 0, &object);
}

/* A BIND is over when its own pushes are executed: pushes that another call sent to another GPU during the BIND, and
 * that are still pending, must not make the following FREE look like a gap. */
static void free_while_another_gpu_is_slow(void) {
  struct world w;
  pthread_t bind, create;
  void *result;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(2), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 4, 0, &object_on_0));
  OK(softgpu_hold(w.dev, 0, SOFTGPU_HOLD_PUSH));
  OK(pthread_create(&bind, NULL, bind_on_0, &w));
  OK(softgpu_hold_wait(w.dev, 0, 10000)); /* it waits for its page tables */
  OK(softgpu_hold(w.dev, 1, SOFTGPU_HOLD_PUSH));
  OK(pthread_create(&create, NULL, create_on_1, &w));
  OK(softgpu_hold_wait(w.dev, 1, 10000));
  OK(softgpu_hold(w.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(pthread_join(bind, &result));
  EQ((intptr_t)result, 0);
  OK(gpu_check(&w, 0, RES, 4 * UNIT, 0, 0));
  OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(softgpu_hold(w.dev, 1, SOFTGPU_HOLD_RELEASE));
  OK(pthread_join(create, &result));
  EQ((intptr_t)result, 0);
  world_close(&w);
}

/* A system membar waits for accesses to memory other than the GPU's own, a GPU membar for those to its own: the owner
 * of the unmapped page decides which one is used. FREE of a reservation that mapped other memory takes one more. */
static void membars_by_memory(void) {
  enum { OWN, HOST, PEER, MEMORIES };
  static const char *const name[] = {"its own", "the host's", "the peer's"};
  struct softgpu_counters before, unmapped[MEMORIES], freed[MEMORIES];
  struct world w;
  uint32_t object[MEMORIES];
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  world_open(&w, 2);
  if (!has(&w, UVM_VMEM_CAP_HOST | UVM_VMEM_CAP_PEER)) SKIP("no host memory, or no peer mappings");
  if (!always_peers(&w)) OK(softgpu_uvm_enable_peer(&w.c, 0, 1));
  OK(set_parameter("uvm_downgrade_force_membar_sys", 0)); /* by default UVM always uses system membars */
  OK(vm_create(w.uvm, w.uuid[0], 16, 2, 0, &object[OWN]));
  OK(vm_create(w.uvm, w.uuid[0], 16, 2, UVM_VMEM_CREATE_HOST, &object[HOST]));
  OK(vm_create(w.uvm, w.uuid[1], 16, 2, 0, &object[PEER]));
  for (unsigned m = OWN; m < MEMORIES; m++) {
    OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(2), 16, 0));
    OK(vm_map(w.uvm, RES, RES, object[m], 0, 2, 0));
    before = gpu_counters(&w, 0);
    OK(vm_unmap(w.uvm, RES, RES, 1, 0));
    unmapped[m] = gpu_counters_since(&w, 0, &before);
    before = gpu_counters(&w, 0);
    OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
    freed[m] = gpu_counters_since(&w, 0, &before);
    printf("%s: UNMAP %llu of the system, %llu of the GPU; FREE %llu and %llu\n", name[m],
           (unsigned long long)unmapped[m].membar_sys, (unsigned long long)unmapped[m].membar_gpu,
           (unsigned long long)freed[m].membar_sys, (unsigned long long)freed[m].membar_gpu);
  }
  for (unsigned m = HOST; m < MEMORIES; m++) {
    EQ(unmapped[m].membar_sys, unmapped[OWN].membar_sys + 1);
    EQ(unmapped[m].membar_gpu + 1, unmapped[OWN].membar_gpu);
    CHECK(freed[m].membar_sys > freed[OWN].membar_sys);
  }
  OK(set_parameter("uvm_downgrade_force_membar_sys", 1));
  world_close(&w);
}

MAIN(TEST(limit_of_each_gpu), TEST(apart), TEST(one_reservation_on_both), TEST(peer_memory), TEST(large_entries),
     TEST(every_gpu_is_waited_for), TEST(not_reused_before_both_are_done), TEST(one_of_two_leaves),
     TEST(free_while_another_gpu_is_slow), TEST(membars_by_memory))
