/* SPDX-License-Identifier: MIT */
/*
 * Structure-aware ioctl fuzzer: mostly valid structs with some fields wrong, from two threads, on descriptors
 * of every kind, with handles of other descriptors, addresses that wrap, and memory that cannot be read.
 *
 * Checks: only errnos that the ABI documents, no output on failure except out_failed_op, a consistent STAT,
 * and a bystander (another descriptor of the process, with mapped pages) whose memory never changes.
 * The runner also checks the kernel log; the program checks the GPU's error counters.
 *
 * Parameters: CALLS (in total), SEED. After every 2,000 calls of a thread its descriptor is closed and reopened.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define STEP GIB(4) /* between the addresses used for reservations */
#define PLACES 6
#define HANDLES 16
#define THREADS 2
#define ROUND 2000
#define MAX_OPS 40

struct fuzzer {
  struct rng rng;
  unsigned number;
  struct world w;
  int closed, plain, null; /* a closed number; not initialised; /dev/null */
  struct world *other;     /* the bystander: its handles and addresses are tried on ours */
  uint32_t handle[HANDLES], other_handle;
  uint64_t ticket;
  char *page; /* 8 KB, followed by an unmapped page */
  uint64_t calls, good;
  uint64_t by_errno[200];
  bool failed;
};

static const uint64_t odd_addresses[] = {0,
                                         1,
                                         4096,
                                         0x10000,
                                         0x200000,
                                         RES - 0x10000,
                                         RES + 0x1000,
                                         0x7fffffffffffull,
                                         0x800000000000ull,
                                         0xffffffffull,
                                         1ull << 49,
                                         1ull << 56,
                                         1ull << 57,
                                         1ull << 63,
                                         0xffff888000000000ull,
                                         ~0ull - 0x1fffff,
                                         ~0ull - 0xffff,
                                         ~0ull};
static const uint32_t odd_numbers[] = {0,  1,   2,    3,    15,         16,         17,         18,         19,
                                       21, 31,  32,   33,   63,         64,         65,         127,        128,
                                       255, 256, 1000, 4096, 0x7fffffff, 0x80000000, 0xfffffff0, 0xffffffff};

static bool chance(struct fuzzer *f, unsigned n) {
  return rng_one_in(&f->rng, n);
}

static uint64_t below(struct fuzzer *f, uint64_t n) {
  return rng_below(&f->rng, n);
}

static uint32_t any32(struct fuzzer *f) {
  return chance(f, 2) ? odd_numbers[below(f, ARRAY_SIZE(odd_numbers))] : (uint32_t)rng_next(&f->rng);
}

static uint64_t any64(struct fuzzer *f) {
  switch (below(f, 4)) {
    case 0: return rng_next(&f->rng);
    case 1: return rng_next(&f->rng) & ~0x1fffffull;
    case 2: return any32(f);
    default: return odd_addresses[below(f, ARRAY_SIZE(odd_addresses))];
  }
}

static uint64_t a_place(struct fuzzer *f) {
  if (chance(f, 12)) return any64(f);
  return RES + below(f, PLACES) * STEP + (chance(f, 10) ? below(f, 8) * SLOT : 0);
}

static uint32_t a_handle(struct fuzzer *f) {
  if (chance(f, 10)) return chance(f, 2) ? f->other_handle : any32(f);
  return f->handle[below(f, HANDLES)];
}

static uint32_t a_shift(struct fuzzer *f) {
  static const uint32_t shifts[] = {16, 16, 16, 17, 18, 21};
  return chance(f, 15) ? any32(f) : shifts[below(f, ARRAY_SIZE(shifts))];
}

static void a_gpu(struct fuzzer *f, uint8_t *uuid) {
  memcpy(uuid, f->w.uuid[0], UVM_VMEM_UUID_BYTES);
  if (chance(f, 20)) uuid[below(f, UVM_VMEM_UUID_BYTES)] ^= 1u << below(f, 8);
  if (chance(f, 40)) memset(uuid, 0, UVM_VMEM_UUID_BYTES);
}

static uint32_t flags(struct fuzzer *f, uint32_t defined) {
  if (chance(f, 20)) return any32(f);
  if (chance(f, 20)) return 1u << below(f, 32);
  return chance(f, 2) ? 0 : (uint32_t)rng_next(&f->rng) & defined;
}

static uint32_t zero(struct fuzzer *f) {
  return chance(f, 40) ? any32(f) : 0;
}

/* Places an array for the kernel to read: in readable memory, across its end, or in unmapped memory. */
static uint64_t array(struct fuzzer *f, const void *content, size_t bytes) {
  if (chance(f, 15)) return any64(f);
  if (chance(f, 15)) { /* its end is beyond the last page */
    size_t there = below(f, bytes + 1);
    memcpy(f->page + 8192 - there, content, there);
    return (uintptr_t)f->page + 8192 - there;
  }
  memcpy(f->page, content, bytes);
  return (uintptr_t)f->page;
}

static void fill_query(struct fuzzer *f, struct uvm_vmem_query *q) {
  q->flags = flags(f, UVM_VMEM_QUERY_GPU);
  if (q->flags & UVM_VMEM_QUERY_GPU || chance(f, 10)) a_gpu(f, q->gpu_uuid);
  q->__reserved = zero(f);
}

static void fill_reserve(struct fuzzer *f, struct uvm_vmem_reserve *r) {
  uint8_t gpus[4 * UVM_VMEM_UUID_BYTES];
  r->flags = flags(f, UVM_VMEM_RESERVE_EAGER | UVM_VMEM_RESERVE_BIG);
  r->start = a_place(f);
  r->length = chance(f, 12) ? any64(f) : (1 + below(f, 16)) * SLOT;
  if (r->length > GIB(1) && !(r->length & (SLOT - 1))) r->flags &= ~UVM_VMEM_RESERVE_EAGER; /* allocating the tables takes too long */
  r->page_shift = a_shift(f);
  r->gpu_count = chance(f, 15) ? any32(f) : 1;
  for (unsigned i = 0; i < 4; i++) a_gpu(f, gpus + i * UVM_VMEM_UUID_BYTES);
  r->gpus = array(f, gpus, sizeof(gpus));
}

static void fill_free(struct fuzzer *f, struct uvm_vmem_free *r) {
  r->flags = flags(f, UVM_VMEM_FREE_UNMAP);
  r->start = a_place(f);
}

static void fill_create(struct fuzzer *f, struct uvm_vmem_create *c) {
  c->flags = flags(f, UVM_VMEM_CREATE_HOST | UVM_VMEM_CREATE_CONTIGUOUS);
  a_gpu(f, c->gpu_uuid);
  c->page_shift = a_shift(f);
  c->count = chance(f, 15) ? any32(f) : chance(f, 10) ? 32 : 1 + below(f, 16);
  c->out_handle = 0;
  c->__reserved = zero(f);
}

static void fill_release(struct fuzzer *f, struct uvm_vmem_release *r) {
  r->flags = flags(f, 0);
  r->handle = a_handle(f);
  r->__reserved = zero(f);
}

static void fill_bind(struct fuzzer *f, struct uvm_vmem_bind *b) {
  struct uvm_vmem_op ops[MAX_OPS] = {0};
  unsigned n = 1 + below(f, chance(f, 4) ? MAX_OPS : 4);
  b->flags = flags(f, UVM_VMEM_BIND_ASYNC);
  b->start = a_place(f);
  for (unsigned i = 0; i < n; i++) {
    struct uvm_vmem_op *op = &ops[i];
    bool map = below(f, 3) != 0;
    op->op = chance(f, 40) ? any32(f) : map ? UVM_VMEM_OP_MAP : UVM_VMEM_OP_UNMAP;
    op->flags = flags(f, (map ? UVM_VMEM_OP_READ_ONLY | UVM_VMEM_OP_REPLACE | UVM_VMEM_OP_LARGE : UVM_VMEM_OP_SPARSE) | UVM_VMEM_OP_CUT);
    if (map && !chance(f, 3)) op->flags |= UVM_VMEM_OP_REPLACE;
    op->addr = chance(f, 30) ? any64(f) : b->start + (chance(f, 3) ? below(f, 16) * SLOT : below(f, 512) * UNIT);
    op->handle = map ? a_handle(f) : zero(f);
    op->first = map ? (chance(f, 15) ? any32(f) : below(f, 8)) : zero(f);
    op->count = chance(f, 20) ? any32(f) : 1 + below(f, map ? 6 : 40);
    op->__reserved = zero(f);
  }
  b->ops = array(f, ops, sizeof(ops[0]) * n);
  b->op_count = chance(f, 20) ? any32(f) : n;
  b->out_failed_op = 0x55;
}

static void fill_wait(struct fuzzer *f, struct uvm_vmem_wait *w) {
  w->flags = flags(f, 0);
  w->ticket = chance(f, 4) ? any64(f) : f->ticket - below(f, 4);
  w->timeout_ns = chance(f, 2) ? 0 : chance(f, 2) ? 100000 : FOREVER;
}

static void fill_stat(struct fuzzer *f, struct uvm_vmem_stat *s) {
  s->flags = flags(f, UVM_VMEM_STAT_GPU);
  if (s->flags & UVM_VMEM_STAT_GPU || chance(f, 10)) a_gpu(f, s->gpu_uuid);
}

union any {
  uint32_t size;
  struct uvm_vmem_query query;
  struct uvm_vmem_reserve reserve;
  struct uvm_vmem_free free;
  struct uvm_vmem_create create;
  struct uvm_vmem_release release;
  struct uvm_vmem_bind bind;
  struct uvm_vmem_wait wait;
  struct uvm_vmem_stat stat;
  char bytes[512];
};

#define KIND(name, NAME) {UVM_VMEM_##NAME, sizeof(struct uvm_vmem_##name)}
static const struct {
  unsigned long number;
  size_t size;
} kinds[] = {KIND(query, QUERY),     KIND(reserve, RESERVE), KIND(free, FREE), KIND(create, CREATE),
             KIND(release, RELEASE), KIND(bind, BIND),       KIND(wait, WAIT), KIND(stat, STAT)};

static unsigned pick_kind(struct fuzzer *f) {
  static const unsigned weights[] = {2, 12, 4, 20, 12, 44, 3, 3};
  unsigned dice = below(f, 100), kind = 0;
  while (dice >= weights[kind]) dice -= weights[kind++];
  return kind;
}

static void fill(struct fuzzer *f, unsigned kind, union any *a) {
  memset(a, 0, sizeof(*a));
  switch (kind) {
    case 0: fill_query(f, &a->query); break;
    case 1: fill_reserve(f, &a->reserve); break;
    case 2: fill_free(f, &a->free); break;
    case 3: fill_create(f, &a->create); break;
    case 4: fill_release(f, &a->release); break;
    case 5: fill_bind(f, &a->bind); break;
    case 6: fill_wait(f, &a->wait); break;
    default: fill_stat(f, &a->stat);
  }
  a->size = (uint32_t)kinds[kind].size;
  if (chance(f, 25)) a->size = any32(f);
  if (chance(f, 25)) a->size = (uint32_t)(kinds[kind].size + 8 * below(f, 8));
  if (chance(f, 50)) a->bytes[below(f, kinds[kind].size)] ^= (char)(1 << below(f, 8));
  if (chance(f, 50)) a->bytes[kinds[kind].size + below(f, 64)] = 1;
}

static int pick_fd(struct fuzzer *f) {
  if (!chance(f, 25)) return f->w.uvm;
  switch (below(f, 4)) {
    case 0: return f->closed;
    case 1: return f->plain;
    case 2: return f->null;
    default: return -1;
  }
}

static bool errno_is_of_the_abi(int error) {
  static const int known[] = {ENOTTY, E2BIG,  EINVAL, EOPNOTSUPP, EOVERFLOW, EMSGSIZE, EFAULT, ERANGE, ENOENT, ESTALE, EEXIST,
                              EBUSY,  EADDRINUSE, EXDEV,  ENODEV, ENOMEM,     ENOSPC,    EDQUOT,   EBADFD, EAGAIN, ETIMEDOUT,
                              EADDRNOTAVAIL};
  for (size_t i = 0; i < ARRAY_SIZE(known); i++) {
    if (known[i] == error) return true;
  }
  return false;
}

static void after(struct fuzzer *f, unsigned kind, const union any *a) {
  if (kind == 1 && a->reserve.length > GIB(1)) vm_free(f->w.uvm, a->reserve.start, 0);
  if (kind == 3) {
    uint32_t *place = &f->handle[below(f, HANDLES)];
    if (a->create.out_handle == 0) {
      printf("CREATE gave handle 0\n");
      f->failed = true;
    }
    vm_release(f->w.uvm, *place); /* may already be released */
    *place = a->create.out_handle;
    uint64_t bytes = (uint64_t)a->create.count << a->create.page_shift;
    if (bytes > MIB(64)) vm_release(f->w.uvm, a->create.out_handle);
  }
  if (kind == 5 && a->bind.out_ticket) f->ticket = a->bind.out_ticket;
}

static void one_call(struct fuzzer *f) {
  unsigned kind = pick_kind(f);
  unsigned long number = kinds[kind].number;
  int fd = pick_fd(f);
  union any *a = (union any *)(f->page + 4096);
  void *argument = a;
  fill(f, kind, a);
  if (chance(f, 60)) number = _IO(UVM_VMEM_IOCTL_TYPE, below(f, 256));
  if (chance(f, 60)) {
    argument = (void *)(uintptr_t)any64(f);
  } else if (chance(f, 40)) { /* the struct extends into unmapped memory */
    size_t there = below(f, kinds[kind].size + 1);
    argument = memmove(f->page + 8192 - there, a, there);
  }
  union any before = *a;
  int result = vm_call(fd, number, argument);
  f->calls++;
  f->by_errno[-result % 200]++;
  if (!result) f->good++;
  if (!result && fd == f->w.uvm && argument == a && number == kinds[kind].number) after(f, kind, a);
  if (!result || fd != f->w.uvm) return;
  if (!errno_is_of_the_abi(-result)) {
    printf("command 0x%lx gives %s\n", number, strerror(-result));
    f->failed = true;
  }
  if (argument != a || number != kinds[kind].number) return;
  if (kind == 5) before.bind.out_failed_op = a->bind.out_failed_op; /* also written on failure */
  if (kind == 5 && a->bind.out_ticket == 0) before.bind.out_ticket = 0;
  if (memcmp(&before, a, sizeof(before))) {
    printf("command 0x%lx fails with %s and writes its struct\n", number, strerror(-result));
    f->failed = true;
  }
}

static void begin_round(struct fuzzer *f) {
  world_open(&f->w, 1);
  memset(f->handle, 0, sizeof(f->handle));
  f->ticket = 0;
  f->plain = softgpu_uvm_open();
  for (unsigned i = 0; i < 3; i++) vm_reserve(f->w.uvm, f->w.uuid[0], RES + i * STEP, 16 * SLOT, 16, i & 1 ? UVM_VMEM_RESERVE_BIG : 0);
  for (unsigned i = 0; i < 4; i++) vm_create(f->w.uvm, f->w.uuid[0], 16, 8, 0, &f->handle[i]);
}

/* STAT must be consistent in itself and with the page tables. */
static void end_round(struct fuzzer *f) {
  struct uvm_vmem_stat s;
  int result = vm_stat(f->w.uvm, NULL, &s);
  uint64_t mapped = 0;
  if (f->ticket) vm_wait(f->w.uvm, f->ticket, FOREVER);
  if (result || s.out_mapped_bytes % UNIT || s.out_created_bytes > s.out_chunk_bytes + s.out_host_bytes) {
    printf("STAT: %d, mapped %llu created %llu chunks %llu host %llu\n", result, (unsigned long long)s.out_mapped_bytes,
           (unsigned long long)s.out_created_bytes, (unsigned long long)s.out_chunk_bytes,
           (unsigned long long)s.out_host_bytes);
    f->failed = true;
  }
  for (unsigned i = 0; i < PLACES; i++) mapped += gpu_scan(&f->w, 0, RES + i * STEP, 32 * SLOT).out_bytes;
  if (mapped > s.out_mapped_bytes) {
    printf("STAT says %llu bytes are mapped, the page tables say %llu\n", (unsigned long long)s.out_mapped_bytes,
           (unsigned long long)mapped);
    f->failed = true;
  }
  close(f->plain);
  if (softgpu_verify(f->w.dev)) {
    printf("the model's bookkeeping differs from the page tables\n");
    f->failed = true;
  }
  softgpu_client_close(&f->w.c);
}

static void *fuzz_thread(void *argument) {
  struct fuzzer *f = argument;
  uint64_t calls = parameter("CALLS", 50000) / THREADS;
  while (f->calls < calls && !f->failed) {
    begin_round(f);
    for (unsigned i = 0; i < ROUND && !f->failed; i++) one_call(f);
    end_round(f);
  }
  return NULL;
}

static struct world bystander;
static uint32_t bystander_object;

static int bystander_begin(void) {
  world_open(&bystander, 1);
  int result = vm_reserve(bystander.uvm, bystander.uuid[0], RES, 4 * SLOT, 16, 0);
  if (!result) result = vm_create(bystander.uvm, bystander.uuid[0], 16, 64, 0, &bystander_object);
  if (!result) result = vm_map(bystander.uvm, RES, RES, bystander_object, 0, 64, 0);
  if (!result) result = gpu_fill(&bystander, 0, RES, 64 * UNIT, 0xb15, 1);
  return result;
}

static void fuzz(void) {
  static struct fuzzer f[THREADS];
  pthread_t thread[THREADS];
  uint64_t seed = parameter("SEED", 1);
  struct uvm_vmem_stat before, now;
  printf("SEED=%llu CALLS=%llu\n", (unsigned long long)seed, (unsigned long long)parameter("CALLS", 50000));
  OK(bystander_begin());
  OK(vm_stat(bystander.uvm, NULL, &before));
  for (unsigned t = 0; t < THREADS; t++) {
    f[t].number = t;
    f[t].rng.state = seed * 7919 + t;
    f[t].other = &bystander;
    f[t].other_handle = bystander_object;
    f[t].null = open("/dev/null", O_RDWR);
    f[t].closed = 900 + t;
    f[t].page = mmap(NULL, 12288, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(f[t].page != MAP_FAILED);
    munmap(f[t].page + 8192, 4096);
    OK(pthread_create(&thread[t], NULL, fuzz_thread, &f[t]));
  }
  for (unsigned t = 0; t < THREADS; t++) OK(pthread_join(thread[t], NULL));
  for (unsigned t = 0; t < THREADS; t++) {
    printf("thread %u: %llu calls, %llu succeeded;", t, (unsigned long long)f[t].calls, (unsigned long long)f[t].good);
    for (unsigned e = 1; e < ARRAY_SIZE(f[t].by_errno); e++) {
      if (f[t].by_errno[e]) printf(" %s %llu", strerrorname_np((int)e), (unsigned long long)f[t].by_errno[e]);
    }
    putchar('\n');
    CHECK(!f[t].failed);
    CHECK(f[t].good > f[t].calls / 20); /* a fuzzer that is always refused proves nothing */
  }
  OK(gpu_check(&bystander, 0, RES, 64 * UNIT, 0xb15, 1));
  OK(vm_stat(bystander.uvm, NULL, &now));
  CHECK(stat_same(&before, &now));
  worlds_open = 1;
  world_close(&bystander);
}

MAIN(TEST(fuzz))
