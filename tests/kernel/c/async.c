/* SPDX-License-Identifier: MIT */
/*
 * When a call may return, and when memory may be reused: the GPU's engine is stopped in between, and the state
 * so far is checked. "Did not return" is checked by a timed wait: on a slow machine that may miss a bug, but it never
 * fails a correct driver.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define A_WHILE 100 /* ms in which a call that does not wait would have returned */

static struct world W;

static bool can_async(void) {
  struct uvm_vmem_query q;
  return vm_query(W.uvm, W.uuid[0], &q) == 0 && (q.out_capabilities & UVM_VMEM_CAP_ASYNC);
}

static unsigned tickets_open(void) {
  struct uvm_vmem_stat s;
  return vm_stat(W.uvm, NULL, &s) ? ~0u : s.out_tickets;
}

static void a_ticket(void) {
  uint64_t ticket, second;
  uint32_t object;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 8, 0, &object));
  struct uvm_vmem_op op = op_map(RES, object, 0, 4, 0);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
  CHECK(ticket != 0);
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  CHECK(!gpu_xlate(&W, 0, RES).out_valid);
  EQ(tickets_open(), 1);
  EQ(vm_wait(W.uvm, ticket, 0), -ETIMEDOUT);
  EQ(vm_wait(W.uvm, ticket, 1000000), -ETIMEDOUT);
  op = op_map(RES + MIB(4), object, 4, 4, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &second));
  CHECK(second != 0 && second != ticket);
  EQ(tickets_open(), 2);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(vm_wait(W.uvm, second, FOREVER));
  OK(vm_wait(W.uvm, ticket, FOREVER));
  OK(gpu_check(&W, 0, RES, 4 * UNIT, 0, 0));
  OK(gpu_check(&W, 0, RES + MIB(4), 4 * UNIT, 0, 0));
  OK(vm_wait(W.uvm, ticket, 0)); /* again */
  EQ(tickets_open(), 0);
  EQ(vm_wait(W.uvm, second + 1000, 0), -ENOENT);
  OK(vm_wait(W.uvm, 0, 0));
  world_close(&W);
}

/* Nothing is pending: no ticket. */
static void no_ticket(void) {
  struct uvm_vmem_stat before, after;
  uint64_t ticket = 4711;
  uint32_t object;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &object));
  OK(vm_map(W.uvm, RES, RES, object, 0, 4, 0));
  OK(vm_stat(W.uvm, NULL, &before));
  /* Existing mappings and holes are unchanged. */
  struct uvm_vmem_op ops[2] = {op_map(RES, object, 0, 4, UVM_VMEM_OP_REPLACE), op_unmap(RES + MIB(8), 32, 0)};
  OK(vm_bind(W.uvm, RES, ops, 2, NULL, &ticket));
  EQ(ticket, 0);
  OK(vm_stat(W.uvm, NULL, &after));
  EQ(after.out_binds, before.out_binds + 1);
  EQ(after.out_pushes, before.out_pushes);
  EQ(after.out_tickets, 0);
  world_close(&W);
}

/* A call that runs in its own thread, and whether it has returned. */
struct call {
  pthread_t thread;
  int (*run)(void);
  int result;
  volatile bool returned;
};

static void *call_thread(void *argument) {
  struct call *c = argument;
  c->result = c->run();
  c->returned = true;
  return NULL;
}

static void call_start(struct call *c, int (*run)(void)) {
  c->run = run;
  c->returned = false;
  if (pthread_create(&c->thread, NULL, call_thread, c)) abort();
}

static int call_join(struct call *c) {
  pthread_join(c->thread, NULL);
  return c->result;
}

static uint32_t the_object;

static int bind_four(void) {
  return vm_map(W.uvm, RES, RES, the_object, 0, 4, 0);
}

static int unmap_four(void) {
  return vm_unmap(W.uvm, RES, RES, 4, 0);
}

static int free_all(void) {
  return vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP);
}

/* Stops the engine at `where`; run() must not return before the engine continues. */
static void must_wait(const char *what, unsigned where, int (*run)(void)) {
  struct call c;
  OK(softgpu_hold(W.dev, 0, where));
  call_start(&c, run);
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  sleep_ms(A_WHILE);
  bool early = c.returned;
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  if (early) fail("%s returned before the GPU had executed it", what);
}

static void calls_wait_for_the_gpu(void) {
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  must_wait("BIND (map)", SOFTGPU_HOLD_PUSH, bind_four);
  OK(gpu_check(&W, 0, RES, 4 * UNIT, 0, 0));
  must_wait("BIND (unmap)", SOFTGPU_HOLD_INVALIDATE, unmap_four);
  EQ(gpu_check(&W, 0, RES, 8, 0, 0), -EFAULT);
  must_wait("BIND (map)", SOFTGPU_HOLD_INVALIDATE, bind_four);
  OK(gpu_check(&W, 0, RES, 4 * UNIT, 0, 0));
  must_wait("FREE", SOFTGPU_HOLD_INVALIDATE, free_all);
  world_close(&W);
}

static uint64_t the_ticket;

static int wait_a_moment(void) {
  return vm_wait(W.uvm, the_ticket, 1000000);
}

/* WAIT returns when its timeout expires although the GPU is stopped. If it does not, the engine is released, and the
 * test fails. */
static void a_wait_ends_with_its_time(void) {
  struct call c;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  struct uvm_vmem_op op = op_map(RES, the_object, 0, 4, 0);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &the_ticket));
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  call_start(&c, wait_a_moment);
  for (unsigned i = 0; i < 1000 && !c.returned; i++) sleep_ms(10);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  EQ(call_join(&c), -ETIMEDOUT);
  OK(vm_wait(W.uvm, the_ticket, FOREVER));
  world_close(&W);
}

static struct uvm_vmem_create *unmapped_later;

static int create_into_nothing(void) {
  return vm_call(W.uvm, UVM_VMEM_CREATE, unmapped_later);
}

/* The struct becomes unwritable while CREATE runs, so no handle can be returned: CREATE must leave nothing behind. */
static void create_without_a_place_for_its_handle(void) {
  struct uvm_vmem_stat s;
  struct call c;
  world_open(&W, 1);
  unmapped_later = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(unmapped_later != MAP_FAILED);
  *unmapped_later = (struct uvm_vmem_create){.size = sizeof(*unmapped_later), .page_shift = 16, .count = 4};
  memcpy(unmapped_later->gpu_uuid, W.uuid[0], sizeof(unmapped_later->gpu_uuid));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&c, create_into_nothing);
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  munmap(unmapped_later, 4096);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  EQ(call_join(&c), -EFAULT);
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_objects + s.out_created_bytes + s.out_chunk_bytes, 0);
  world_close(&W);
}

static struct uvm_vmem_bind *bind_unmapped_later;

static int bind_into_nothing(void) {
  return vm_call(W.uvm, UVM_VMEM_BIND, bind_unmapped_later);
}

/* The same for BIND: the result cannot be returned, but the batch was carried out, and later calls work. */
static void bind_without_a_place_for_its_result(void) {
  struct uvm_vmem_stat s;
  struct call c;
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  const struct uvm_vmem_op op = op_map(RES, the_object, 0, 4, 0);
  bind_unmapped_later = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(bind_unmapped_later != MAP_FAILED);
  *bind_unmapped_later =
      (struct uvm_vmem_bind){.size = sizeof(*bind_unmapped_later), .start = RES, .ops = (uintptr_t)&op, .op_count = 1};
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&c, bind_into_nothing);
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  munmap(bind_unmapped_later, 4096);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  EQ(call_join(&c), -EFAULT);
  OK(gpu_check(&W, 0, RES, 4 * UNIT, 0, 0));
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, 4 * UNIT);
  EQ(s.out_tickets, 0);
  OK(vm_unmap(W.uvm, RES, RES, 4, 0));
  EQ(gpu_check(&W, 0, RES, 8, 0, 0), -EFAULT);
  world_close(&W);
}

static int release_it(void) {
  return vm_release(W.uvm, the_object);
}

/* Memory whose unmap is still in flight must not be handed out again. */
static void not_reused_before_the_invalidate(void) {
  struct softgpu_frame frame;
  struct call c;
  uint64_t ticket;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 21, 2, 0, &the_object));
  OK(vm_map(W.uvm, RES, RES, the_object, 0, 2, 0));
  OK(gpu_fill(&W, 0, RES, MIB(4), 0x77, 0));
  uint64_t pa[2] = {gpu_xlate(&W, 0, RES).out_pa, gpu_xlate(&W, 0, RES + MIB(2)).out_pa};
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_INVALIDATE));
  struct uvm_vmem_op op = op_unmap(RES, 64, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  call_start(&c, release_it); /* may wait */
  sleep_ms(A_WHILE);
  for (int i = 0; i < 2; i++) {
    OK(softgpu_frame(W.dev, 0, pa[i], &frame));
    CHECK(frame.out_allocated);
    OK(softgpu_check_phys(W.dev, 0, pa[i], UNIT, 0x77, 0)); /* and not zeroed for the next owner */
  }
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  OK(vm_wait(W.uvm, ticket, FOREVER));
  EQ(gpu_check(&W, 0, RES, 8, 0, 0), -EFAULT);
  world_close(&W);
}

/* The handle is released while a BIND that looked it up waits for its page tables: the BIND keeps the pages. */
static void released_during_a_bind(void) {
  struct uvm_vmem_stat s;
  struct call c;
  uint32_t next;
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&c, bind_four);
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  bool early = c.returned;
  int released = vm_release(W.uvm, the_object);
  int known = vm_release(W.uvm, the_object);
  int counted = vm_stat(W.uvm, NULL, &s);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  CHECK(!early);
  OK(released);
  EQ(known, -ESTALE);
  OK(counted);
  EQ(s.out_objects, 1);
  OK(gpu_fill(&W, 0, RES, 4 * UNIT, 0x55, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 32, 0, &next)); /* other memory */
  OK(gpu_check(&W, 0, RES, 4 * UNIT, 0x55, 0));
  OK(unmap_four());
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_objects, 1);
  world_close(&W);
}

/* Keeps writing through a mapping that is being removed, until that faults. */
static void *writes_until_gone(void *unused) {
  int result;
  (void)unused;
  while ((result = gpu_fill(&W, 0, RES, 4 * UNIT, ~0ull, 0)) == 0);
  return (void *)(intptr_t)result;
}

/* Pages are zeroed for the next owner after the previous owner's last write, whichever push the GPU would execute
 * first. */
static void zeroed_after_the_last_write(void) {
  enum { ROUNDS = 25 };
  struct softgpu_settings fast, slow;
  uint32_t keeps_the_chunk, next;
  unsigned reused = 0;
  uint64_t ticket;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 1, 0, &keeps_the_chunk));
  OK(softgpu_settings(W.dev, NULL, &fast));
  slow = fast;
  slow.delay_us = 2000;
  OK(softgpu_settings(W.dev, &slow, NULL));
  for (unsigned round = 0; round < ROUNDS; round++) {
    pthread_t writer;
    void *result;
    OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
    OK(bind_four());
    const uint64_t pa = gpu_xlate(&W, 0, RES).out_pa;
    OK(vm_release(W.uvm, the_object));
    OK(pthread_create(&writer, NULL, writes_until_gone, NULL));
    sleep_ms(2);
    struct uvm_vmem_op op = op_unmap(RES, 4, 0);
    OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
    OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &next));
    OK(pthread_join(writer, &result));
    EQ((intptr_t)result, -EFAULT);
    OK(vm_map(W.uvm, RES, RES + MIB(4), next, 0, 4, 0));
    reused += gpu_xlate(&W, 0, RES + MIB(4)).out_pa == pa;
    OK(gpu_check(&W, 0, RES + MIB(4), 4 * UNIT, 0, 0));
    OK(vm_unmap(W.uvm, RES, RES + MIB(4), 4, 0));
    OK(vm_release(W.uvm, next));
  }
  OK(softgpu_settings(W.dev, &fast, NULL));
  printf("%u of %u got the same memory\n", reused, ROUNDS);
  CHECK(reused > 0);
  W.base[0].stale = gpu_counters(&W, 0).stale; /* the writer used some between the unmap and the invalidate */
  world_close(&W);
}

static int read_proc(void) {
  char text[4096];
  int fd = open("/proc/driver/nvidia-uvm/vmem", O_RDONLY);
  if (fd < 0) return -errno;
  ssize_t n = read(fd, text, sizeof(text) - 1);
  close(fd);
  return n > 0 ? 0 : -EIO;
}

/* Reading the file in /proc does not wait for a call that waits for a GPU. (If it does, the reader thread is left
 * behind: it continues when the GPU does.) */
static bool proc_is_readable(void) {
  static struct call c;
  call_start(&c, read_proc);
  for (unsigned ms = 0; !c.returned && ms < 5000; ms += A_WHILE) sleep_ms(A_WHILE);
  return c.returned && call_join(&c) == 0;
}

/* Host memory is returned to the kernel, which knows nothing of GPUs: not while a GPU may still write to it. */
static void host_memory_waits(void) {
  enum { UNITS = 32 };
  struct call c;
  uint64_t ticket;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, UNITS, UVM_VMEM_CREATE_HOST, &the_object));
  OK(vm_map(W.uvm, RES, RES, the_object, 0, UNITS, 0));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_INVALIDATE));
  struct uvm_vmem_op op = op_unmap(RES, UNITS, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  call_start(&c, release_it);
  sleep_ms(A_WHILE);
  bool early = c.returned;
  bool readable = proc_is_readable();
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  CHECK(!early);
  CHECK(readable);
  OK(vm_wait(W.uvm, ticket, FOREVER));
  world_close(&W);
}

/* The GPU is unregistered with a bind in flight: the bind is carried out first, and its ticket is done. */
static int unregister_it(void) {
  int result = softgpu_uvm_unregister_space(&W.c, 0);
  return result ? result : softgpu_uvm_unregister_gpu(&W.c, 0);
}

static void gpu_goes_with_a_bind_in_flight(void) {
  struct uvm_vmem_stat s;
  struct call c;
  uint64_t ticket;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  struct uvm_vmem_op op = op_map(RES, the_object, 0, 4, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
  CHECK(ticket != 0);
  call_start(&c, unregister_it);
  sleep_ms(A_WHILE);
  bool early = c.returned;
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  CHECK(!early);
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_tickets, 0);
  EQ(s.out_mapped_bytes + s.out_chunk_bytes, 0);
  OK(vm_wait(W.uvm, ticket, 0));
  world_close(&W);
}

/* Processors: the threads under test run on THEIRS, where a busy thread can keep them from running. */
enum { OURS, THEIRS };

static int only_on(int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return sched_setaffinity(0, sizeof(set), &set) ? -errno : 0;
}

static int bind_there(void) {
  int result = only_on(THEIRS);
  return result ? result : vm_map(W.uvm, RES, RES, the_object, 0, 4, 0);
}

static volatile bool enough;

static int takes_it_all(void) {
  struct sched_param first = {.sched_priority = 1};
  int result = only_on(THEIRS);
  if (!result && sched_setscheduler(0, SCHED_FIFO, &first)) result = -errno;
  while (!result && !enough) continue;
  return result;
}

static bool let_it_have_all(bool on) {
  FILE *file = fopen("/proc/sys/kernel/sched_rt_runtime_us", "w");
  if (!file) return false;
  fputs(on ? "-1" : "950000", file);
  return fclose(file) == 0;
}

/* The GPU has executed a BIND's pushes, but the BIND has not noticed yet: the GPU stays registered until it has. */
static void gpu_goes_while_a_bind_waits(void) {
  struct call bind, gone, hog;
  cpu_set_t before;
  if (sysconf(_SC_NPROCESSORS_ONLN) <= THEIRS) SKIP("needs two processors");
  OK(sched_getaffinity(0, sizeof(before), &before));
  OK(only_on(OURS));
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&bind, bind_there);
  sleep_ms(2 * A_WHILE); /* by now it sleeps, 10 ms at a time */
  enough = false;
  CHECK(let_it_have_all(true));
  call_start(&hog, takes_it_all);
  /* It waits with mmap_lock held: from here on create no thread, and map no memory. */
  call_start(&gone, unregister_it);
  sleep_ms(A_WHILE);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  for (unsigned tries = 0; tries < 100 && !gone.returned && !bind.returned; tries++) sleep_ms(50);
  bool early = gone.returned && !bind.returned;
  enough = true;
  if (early) {
    printf("the GPU left before a BIND that waits for it\n"); /* and the BIND may wait forever */
    exit(1);
  }
  OK(call_join(&hog));
  CHECK(let_it_have_all(false));
  OK(call_join(&bind));
  OK(call_join(&gone));
  world_close(&W);
  OK(sched_setaffinity(0, sizeof(before), &before));
}

static int create_one(void) {
  return vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object);
}

/* A handle becomes valid only when its pages are zero. */
static void published_last(void) {
  struct uvm_vmem_stat s;
  struct call c;
  uint32_t first;
  world_open(&W, 1);
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &first));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&c, create_one);
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  sleep_ms(A_WHILE);
  OK(vm_stat(W.uvm, NULL, &s));
  bool early = c.returned;
  /* If it is valid already, releasing it takes the pages away from the CREATE that is still running. */
  int guessed = s.out_objects == 1 ? vm_release(W.uvm, first + 1) : 0;
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  CHECK(!early);
  EQ(guessed, -ENOENT);
  EQ(s.out_objects, 1);
  OK(vm_release(W.uvm, the_object));
  world_close(&W);
}

/* Asynchronous binds of the same addresses, one after another: the last one wins. */
static void order(void) {
  enum { ROUNDS = 60, PAGES = 8 };
  struct softgpu_settings fast, slow;
  uint64_t ticket[PAGES];
  uint32_t object;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(softgpu_settings(W.dev, NULL, &fast));
  slow = fast;
  slow.delay_us = 300;
  OK(softgpu_settings(W.dev, &slow, NULL));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, PAGES, 0, &object));
  OK(vm_map(W.uvm, RES, RES, object, 0, PAGES, 0));
  for (unsigned i = 0; i < PAGES; i++) OK(gpu_fill(&W, 0, RES + i * UNIT, UNIT, i, 0));
  for (unsigned round = 0; round < ROUNDS; round++) {
    unsigned last = 0;
    for (unsigned i = 0; i < PAGES; i++) {
      last = (round + i) % PAGES;
      struct uvm_vmem_op op = op_map(RES + MIB(4), object, last, 1, UVM_VMEM_OP_REPLACE);
      OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket[i]));
    }
    for (unsigned i = 0; i < PAGES; i++) OK(vm_wait(W.uvm, ticket[round % 2 ? i : PAGES - 1 - i], FOREVER));
    OK(gpu_check(&W, 0, RES + MIB(4), UNIT, last, 0));
  }
  /* A synchronous bind waits for all asynchronous ones before it. */
  for (unsigned round = 0; round < ROUNDS; round++) {
    for (unsigned i = 0; i < 4; i++) {
      struct uvm_vmem_op op = op_map(RES + MIB(4), object, (round + i) % PAGES, 1, UVM_VMEM_OP_REPLACE);
      OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket[i]));
    }
    OK(vm_map(W.uvm, RES, RES + MIB(4), object, round % PAGES, 1, UVM_VMEM_OP_REPLACE));
    OK(gpu_check(&W, 0, RES + MIB(4), UNIT, round % PAGES, 0));
  }
  OK(softgpu_settings(W.dev, &fast, NULL));
  world_close(&W);
}

static uint64_t *ticket_array;
static unsigned tickets_given;

/* Binds until the tickets run out. */
static int use_up_tickets(void) {
  struct uvm_vmem_query q;
  int result = vm_query(W.uvm, NULL, &q);
  tickets_given = 0;
  while (!result && tickets_given <= q.out_max_tickets) {
    struct uvm_vmem_op op = op_map(RES + (tickets_given % 128) * UNIT, the_object, 0, 1, UVM_VMEM_OP_REPLACE);
    result = vm_bind(W.uvm, RES, &op, 1, NULL, &ticket_array[tickets_given]);
    if (!result) tickets_given++;
  }
  return result;
}

static void too_many_tickets(void) {
  struct uvm_vmem_query q;
  struct call c;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_query(W.uvm, NULL, &q));
  ticket_array = calloc(q.out_max_tickets + 1, sizeof(*ticket_array));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 1, 0, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&c, use_up_tickets);
  for (unsigned ms = 0; !c.returned && ms < 10000; ms += A_WHILE) sleep_ms(A_WHILE);
  bool stuck = !c.returned; /* the ticket limit must be lower than the length of the GPU's queues */
  unsigned open_now = stuck ? 0 : tickets_open();
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  int result = call_join(&c);
  printf("%u tickets of %u\n", tickets_given, q.out_max_tickets);
  CHECK(!stuck);
  EQ(result, -EAGAIN);
  EQ(tickets_given, q.out_max_tickets);
  EQ(open_now, tickets_given);
  for (unsigned i = 0; i < tickets_given; i++) OK(vm_wait(W.uvm, ticket_array[i], FOREVER));
  EQ(tickets_open(), 0);
  struct uvm_vmem_op op = op_map(RES, the_object, 0, 1, UVM_VMEM_OP_REPLACE);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket_array[0]));
  OK(vm_wait(W.uvm, ticket_array[0], FOREVER));
  free(ticket_array);
  world_close(&W);
}

/* FREE, RELEASE and STAT with a bind in flight. */
static void free_with_a_bind_in_flight(void) {
  struct call c;
  uint64_t ticket;
  world_open(&W, 1);
  if (!can_async()) SKIP("no asynchronous binds");
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  struct uvm_vmem_op op = op_map(RES, the_object, 0, 4, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
  OK(vm_release(W.uvm, the_object));
  EQ(vm_free(W.uvm, RES, 0), -EBUSY);
  call_start(&c, free_all);
  sleep_ms(A_WHILE);
  CHECK(!c.returned);
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&c));
  OK(vm_wait(W.uvm, ticket, FOREVER));
  EQ(gpu_check(&W, 0, RES, 8, 0, 0), -EFAULT);
  world_close(&W);
}

/* Returns true if a killed process gives up its address space, which it does before it closes its files. */
static bool leaves_its_memory(pid_t pid) {
  char path[64];
  long pages = 1;
  snprintf(path, sizeof(path), "/proc/%d/statm", pid);
  for (unsigned ms = 0; pages && ms < 5000; ms += A_WHILE) {
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%ld", &pages) != 1) pages = 0;
    if (file) fclose(file);
    if (pages) sleep_ms(A_WHILE);
  }
  return !pages;
}

/* The process exits, or is killed while it waits for a bind, with binds in flight. */
static void end_with_binds_in_flight(void) {
  for (int killed = 0; killed < 2; killed++) {
    struct softgpu_counters base;
    int dev = softgpu_open(), ready[2], status = 0;
    char byte;
    OK(softgpu_counters(dev, 0, &base));
    OK(pipe(ready));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
      uint64_t ticket = 0;
      uint32_t object;
      world_open(&W, 1);
      if (!can_async()) _exit(77);
      if (vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_EAGER)) _exit(1);
      if (vm_create(W.uvm, W.uuid[0], 16, 32, 0, &object)) _exit(2);
      /* dev belongs to the parent: the hold outlives this process */
      if (softgpu_hold(dev, 0, SOFTGPU_HOLD_PUSH)) _exit(3);
      for (unsigned i = 0; i < 8; i++) {
        struct uvm_vmem_op op = op_map(RES + i * 4 * UNIT, object, i * 4, 4, 0);
        if (vm_bind(W.uvm, RES, &op, 1, NULL, &ticket)) _exit(4);
      }
      vm_release(W.uvm, object);
      if (write(ready[1], "", 1) != 1) _exit(5);
      if (killed) vm_wait(W.uvm, ticket, FOREVER);
      _exit(0);
    }
    close(ready[1]);
    if (read(ready[0], &byte, 1) != 1) {
      waitpid(child, &status, 0);
      if (WIFEXITED(status) && WEXITSTATUS(status) == 77) SKIP("no asynchronous binds");
      fail("the child failed: status 0x%x", status);
      return;
    }
    close(ready[0]);
    sleep_ms(A_WHILE);
    if (killed) kill(child, SIGKILL);
    bool left = leaves_its_memory(child);
    OK(softgpu_hold(dev, 0, SOFTGPU_HOLD_RELEASE));
    EQ(waitpid(child, &status, 0), child);
    CHECK(left); /* the GPU is stopped: so WAIT can be killed */
    CHECK(killed ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0);
    gpu_check_clean(dev, 0, &base, true);
    close(dev);
  }
}

MAIN(TEST(a_ticket), TEST(no_ticket), TEST(calls_wait_for_the_gpu), TEST(a_wait_ends_with_its_time),
     TEST(not_reused_before_the_invalidate), TEST(released_during_a_bind), TEST(zeroed_after_the_last_write),
     TEST(host_memory_waits), TEST(gpu_goes_with_a_bind_in_flight), TEST(gpu_goes_while_a_bind_waits),
     TEST(create_without_a_place_for_its_handle),
     TEST(bind_without_a_place_for_its_result), TEST(published_last), TEST(order), TEST(too_many_tickets),
     TEST(free_with_a_bind_in_flight), TEST(end_with_binds_in_flight))
