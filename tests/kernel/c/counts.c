/* SPDX-License-Identifier: MIT */
/*
 * The cost of growing a request, in calls, command buffers, page table entries, TLB invalidates and bytes of
 * kernel memory; and for comparison the same with the stock driver's calls. live_pages needs a GPU of 8 GB.
 *
 * Each measured case is printed as a line "COUNTS {json}".
 */
#include <sys/mman.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

/* Llama-3-8B: a K and a V tensor for each of 32 layers; a token takes 8 heads x 128 x 2 bytes in each. */
#define TENSORS 64
#define TOKEN_BYTES 2048
#define TOKENS 8192
#define TENSOR_BYTES ((uint64_t)TOKENS * TOKEN_BYTES) /* 16 MB */
#define TENSOR_PAGES (TENSOR_BYTES / UNIT)            /* 256 */
#define RES 0x7c0000000000ull
#define LIVE_PAGES 100000

static struct world W;
static uint64_t calls; /* ioctls of the current case so far */

struct cost {
  uint64_t ioctls, pushes, pte_writes, invalidates, pde_writes, table_waits, methods, membars;
};

struct snapshot {
  struct softgpu_counters gpu;
  struct uvm_vmem_stat stat;
  uint64_t calls;
};

static struct snapshot take(void) {
  struct snapshot s = {.gpu = gpu_counters(&W, 0), .calls = calls};
  vm_stat(W.uvm, NULL, &s.stat);
  return s;
}

static struct cost since(const struct snapshot *before) {
  struct snapshot now = take();
  struct softgpu_counters d = softgpu_counters_since(&before->gpu, &now.gpu);
  return (struct cost){.ioctls = now.calls - before->calls,
                       .pushes = d.pushes,
                       .pte_writes = d.pte_writes,
                       .invalidates = d.invalidates,
                       .pde_writes = d.pde_writes,
                       .methods = d.methods,
                       .membars = d.membar_gpu + d.membar_sys,
                       .table_waits = now.stat.out_table_waits - before->stat.out_table_waits};
}

static void publish(const char *name, const struct cost *c) {
  printf("COUNTS {\"case\": \"%s\", \"ioctls\": %llu, \"pushes\": %llu, \"pte_writes\": %llu, \"invalidates\": %llu, "
         "\"pde_writes\": %llu, \"table_waits\": %llu, \"methods\": %llu}\n",
         name, (unsigned long long)c->ioctls, (unsigned long long)c->pushes, (unsigned long long)c->pte_writes,
         (unsigned long long)c->invalidates, (unsigned long long)c->pde_writes, (unsigned long long)c->table_waits,
         (unsigned long long)c->methods);
}

static uint64_t tensor(unsigned t) {
  return RES + t * TENSOR_BYTES;
}

static int bind(const struct uvm_vmem_op *ops, unsigned n) {
  calls++;
  return vm_bind(W.uvm, RES, ops, n, NULL, NULL);
}

/* Maps page number `page` of every tensor; its pages start in the object at page * TENSORS. */
static int grow(uint32_t object, unsigned page) {
  struct uvm_vmem_op ops[TENSORS];
  for (unsigned t = 0; t < TENSORS; t++) ops[t] = op_map(tensor(t) + page * UNIT, object, page * TENSORS + t, 1, 0);
  return bind(ops, TENSORS);
}

static int shrink(unsigned page) {
  struct uvm_vmem_op ops[TENSORS];
  for (unsigned t = 0; t < TENSORS; t++) ops[t] = op_unmap(tensor(t) + page * UNIT, 1, 0);
  return bind(ops, TENSORS);
}

static void one_request(void) {
  struct snapshot before;
  struct cost c, grown = {0};
  uint32_t object, whole[TENSORS];
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, TENSORS * TENSOR_BYTES, 16, 0));
  before = take();
  OK(vm_create(W.uvm, W.uuid[0], 16, TENSORS * 64, 0, &object));
  calls++;
  c = since(&before);
  publish("create 4096 pages", &c);
  EQ(c.invalidates, 0);

  before = take();
  OK(grow(object, 0));
  c = since(&before);
  publish("grow 64 tensors, first touch of 64 slots", &c);
  EQ(c.ioctls, 1);
  EQ(c.table_waits, 1);
  CHECK(c.pte_writes <= TENSORS);

  for (unsigned page = 1; page < 4; page++) {
    before = take();
    OK(grow(object, page));
    c = since(&before);
    if (page == 1) publish("grow 64 tensors, tables there", &c);
    grown = c;
    EQ(c.ioctls, 1);
    EQ(c.pushes, 1);
    EQ(c.pte_writes, TENSORS);
    CHECK(c.invalidates <= 1);
    EQ(c.pde_writes, 0);
    EQ(c.table_waits, 0);
  }
  before = take();
  OK(shrink(3));
  c = since(&before);
  publish("unmap one page of 64 tensors", &c);
  EQ(c.pushes, 1);
  EQ(c.pte_writes, TENSORS);
  CHECK(c.invalidates <= 1);
  /* One membar more than without an unmap: accesses through the old translations must have finished. */
  EQ(c.membars, grown.membars + 1);
  /* The model agrees that these pages are mapped and no others. */
  EQ(gpu_scan(&W, 0, RES, TENSORS * TENSOR_BYTES).out_64k, 3 * TENSORS);
  OK(vm_unmap(W.uvm, RES, RES, TENSORS * TENSOR_PAGES, 0));
  OK(vm_free(W.uvm, RES, 0));
  OK(vm_release(W.uvm, object));

  /* From 0 to 8K tokens, one page of every tensor at a time, in a new reservation. */
  OK(vm_reserve(W.uvm, W.uuid[0], RES, TENSORS * TENSOR_BYTES, 16, 0));
  before = take();
  uint64_t first_touches = 0;
  for (unsigned page = 0; page < TENSOR_PAGES; page++) {
    if (page % 64 == 0) {
      OK(vm_create(W.uvm, W.uuid[0], 16, 64 * TENSORS, 0, &whole[page / 64]));
      calls++;
    }
    struct snapshot step = take();
    struct uvm_vmem_op ops[TENSORS];
    for (unsigned t = 0; t < TENSORS; t++) {
      ops[t] = op_map(tensor(t) + page * UNIT, whole[page / 64], page % 64 * TENSORS + t, 1, 0);
    }
    OK(bind(ops, TENSORS));
    c = since(&step);
    first_touches += c.table_waits;
    EQ(c.pte_writes, TENSORS);
    CHECK(c.table_waits || (c.pushes == 1 && c.invalidates <= 1));
  }
  c = since(&before);
  publish("grow from 0 to 8K tokens, 256 steps", &c);
  EQ(first_touches, TENSOR_PAGES / SLOT_UNITS);
  EQ(c.pte_writes, TENSORS * TENSOR_PAGES);

  /* Unmap the whole request in one call: 64 runs of 256 pages. */
  struct uvm_vmem_op ops[TENSORS];
  for (unsigned t = 0; t < TENSORS; t++) ops[t] = op_unmap(tensor(t), TENSOR_PAGES, 0);
  before = take();
  OK(bind(ops, TENSORS));
  c = since(&before);
  publish("unmap a request of 8K tokens", &c);
  EQ(c.ioctls, 1);
  EQ(c.pte_writes, TENSORS * TENSOR_PAGES);
  EQ(c.invalidates, 1);
  /* And map it again in one call. */
  for (unsigned t = 0; t < TENSORS; t++) ops[t] = op_map(tensor(t), whole[t / 16], t % 16 * TENSOR_PAGES, TENSOR_PAGES, 0);
  before = take();
  OK(bind(ops, TENSORS));
  c = since(&before);
  publish("map a request of 8K tokens, tables there", &c);
  EQ(c.pte_writes, TENSORS * TENSOR_PAGES);
  EQ(c.invalidates, 1);
  OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  world_close(&W);
}

/* How the stock driver maps pages: one UVM call per page, from one RM allocation. */
static void the_stock_path(void) {
  struct softgpu_alloc memory;
  struct snapshot before;
  struct cost c;
  world_open(&W, 1);
  OK(softgpu_alloc(W.dev, 0, TENSORS * UNIT * 2, UNIT, 0, &memory));
  OK(softgpu_uvm_create_external(&W.c, RES, TENSORS * TENSOR_BYTES));
  for (unsigned page = 0; page < 2; page++) {
    before = take();
    for (unsigned t = 0; t < TENSORS; t++) {
      OK(softgpu_uvm_map_external(&W.c, 0, tensor(t) + page * UNIT, UNIT, (page * TENSORS + t) * UNIT, &memory, false));
      calls++;
    }
    c = since(&before);
    publish(page ? "stock path: grow 64 tensors, tables there" : "stock path: grow 64 tensors, first touch", &c);
    EQ(c.ioctls, TENSORS);
    CHECK(c.pushes >= TENSORS);
  }
  before = take();
  for (unsigned t = 0; t < TENSORS; t++) {
    OK(softgpu_uvm_unmap_external(&W.c, 0, tensor(t) + UNIT, UNIT));
    calls++;
  }
  c = since(&before);
  publish("stock path: unmap one page of 64 tensors", &c);
  OK(softgpu_uvm_free(&W.c, RES, TENSORS * TENSOR_BYTES));
  OK(softgpu_free(W.dev, memory.out_client, memory.out_handle));
  world_close(&W);
}

/* Returns the kB value of a line of /proc/meminfo. */
static uint64_t meminfo(const char *name) {
  char line[128];
  uint64_t kb = 0;
  FILE *f = fopen("/proc/meminfo", "r");
  while (f && fgets(line, sizeof(line), f)) {
    if (strncmp(line, name, strlen(name)) == 0) kb = strtoull(line + strlen(name) + 1, NULL, 10);
  }
  if (f) fclose(f);
  return kb;
}

/* 100,000 pages of 64 KB in full slots: kernel memory per page; growing costs the same as without them. */
static void live_pages(void) {
  enum { SLOTS = LIVE_PAGES / SLOT_UNITS, STEP = 1024 }; /* 3125 slots */
  const uint64_t live = RES + GIB(16);
  struct uvm_vmem_query q;
  struct uvm_vmem_stat empty, full;
  struct snapshot before;
  struct cost few, many;
  uint32_t object, more;
  world_open(&W, 1);
  if (W.vidmem_bytes < GIB(7)) SKIP("the GPU has less than 7 GB (run with --vidmem 8192)");
  OK(vm_query(W.uvm, NULL, &q));
  unsigned step = q.out_max_create_pages < STEP ? q.out_max_create_pages : STEP;
  if (step > q.out_max_bind_units) step = q.out_max_bind_units;
  step -= step % SLOT_UNITS;
  OK(vm_reserve(W.uvm, W.uuid[0], RES, TENSORS * TENSOR_BYTES, 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4 * TENSORS, 0, &object));
  OK(grow(object, 0));
  before = take();
  OK(grow(object, 1));
  few = since(&before);

  OK(vm_reserve(W.uvm, W.uuid[0], live, SLOTS * SLOT, 16, 0));
  OK(vm_stat(W.uvm, NULL, &empty));
  uint64_t slab = meminfo("SUnreclaim:");
  for (uint64_t page = 0; page < SLOTS * SLOT_UNITS; page += step) {
    unsigned n = SLOTS * SLOT_UNITS - page < step ? SLOTS * SLOT_UNITS - page : step;
    OK(vm_create(W.uvm, W.uuid[0], 16, n, 0, &more));
    OK(vm_map(W.uvm, live, live + page * UNIT, more, 0, n, 0));
    OK(vm_release(W.uvm, more));
  }
  OK(vm_stat(W.uvm, NULL, &full));
  EQ(full.out_mapped_bytes - empty.out_mapped_bytes, SLOTS * SLOT);
  EQ(full.out_slots - empty.out_slots, SLOTS);
  uint64_t bytes = full.out_kernel_bytes - empty.out_kernel_bytes;
  printf("COUNTS {\"case\": \"%u live pages in full slots\", \"kernel_bytes\": %llu, \"per_page\": %.2f, "
         "\"slab_kb\": %llu}\n",
         LIVE_PAGES, (unsigned long long)bytes, (double)bytes / (SLOTS * SLOT_UNITS),
         (unsigned long long)(meminfo("SUnreclaim:") - slab));
  CHECK(bytes > 0);
  CHECK(bytes <= 32ull * SLOTS * SLOT_UNITS);

  before = take();
  OK(grow(object, 2));
  many = since(&before);
  publish("grow 64 tensors beside 100,000 live pages", &many);
  EQ(many.pushes, few.pushes);
  EQ(many.pte_writes, few.pte_writes);
  EQ(many.invalidates, few.invalidates);
  EQ(many.methods, few.methods);
  EQ(gpu_scan(&W, 0, live, SLOTS * SLOT).out_64k, SLOTS * SLOT_UNITS);
  OK(vm_free(W.uvm, live, UVM_VMEM_FREE_UNMAP));
  OK(vm_stat(W.uvm, NULL, &full));
  EQ(full.out_mapped_bytes, empty.out_mapped_bytes + TENSORS * UNIT);
  CHECK(full.out_kernel_bytes <= empty.out_kernel_bytes + 4096);
  world_close(&W);
}

/* Maps and unmaps 1 GB with 2 MB entries and with 64 KB entries: the same memory, including the first touch. Then a
 * page of each 2 MB entry is unmapped and mapped again, and the entry is joined again. */
static void a_gigabyte(void) {
  enum { SLOTS = 512, UNITS = SLOTS * SLOT_UNITS };
  static const char *const sizes[] = {"64 KB", "2 MB"};
  static struct uvm_vmem_op ops[SLOTS];
  char name[64];
  struct snapshot before;
  struct uvm_vmem_query q;
  struct cost c;
  uint32_t object;
  world_open(&W, 1);
  if (W.vidmem_bytes < GIB(7)) SKIP("the GPU has less than 7 GB (run with --vidmem 8192)");
  OK(vm_query(W.uvm, NULL, &q));
  if (!(q.out_capabilities & UVM_VMEM_CAP_LARGE)) SKIP("no entries on request");
  OK(vm_create(W.uvm, W.uuid[0], 16, UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &object));
  for (unsigned large = 0; large < 2; large++) {
    struct uvm_vmem_op map = op_map(RES, object, 0, UNITS, large ? UVM_VMEM_OP_LARGE : 0), unmap = op_unmap(RES, UNITS, 0);
    OK(vm_reserve(W.uvm, W.uuid[0], RES, GIB(1), 16, large ? UVM_VMEM_RESERVE_BIG : 0));
    for (unsigned again = 0; again < 2; again++) {
      before = take();
      OK(bind(&map, 1));
      c = since(&before);
      snprintf(name, sizeof(name), "map 1 GB by entries of %s%s", sizes[large], again ? ", again" : "");
      publish(name, &c);
      EQ(c.ioctls, 1);
      EQ(c.pte_writes, large ? SLOTS : UNITS);
      if (again) EQ(c.invalidates, 1); /* the first touch allocates tables */
      before = take();
      OK(bind(&unmap, 1));
      c = since(&before);
      if (again) continue;
      snprintf(name, sizeof(name), "unmap 1 GB by entries of %s", sizes[large]);
      publish(name, &c);
      EQ(c.invalidates, 1);
    }
    if (large) {
      OK(bind(&map, 1));
      for (unsigned i = 0; i < SLOTS; i++) ops[i] = op_unmap(RES + i * SLOT + i % SLOT_UNITS * UNIT, 1, UVM_VMEM_OP_CUT);
      for (unsigned again = 0; again < 2; again++) {
        before = take();
        OK(bind(ops, SLOTS));
        c = since(&before);
        publish(again ? "split 512 entries, tables there" : "split 512 entries", &c);
        EQ(gpu_scan(&W, 0, RES, GIB(1)).out_64k, UNITS - SLOTS);
        map.flags |= UVM_VMEM_OP_REPLACE;
        before = take();
        OK(bind(&map, 1));
        c = since(&before);
        if (again) publish("join 512 entries", &c);
        EQ(gpu_scan(&W, 0, RES, GIB(1)).out_2m, SLOTS);
      }
    }
    OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  }
  world_close(&W);
}

/* One page in each of 2,000 slots. */
static void sparse_slots(void) {
  enum { SLOTS = 2000 };
  struct uvm_vmem_query q;
  struct uvm_vmem_stat empty, full;
  uint32_t object;
  world_open(&W, 1);
  OK(vm_query(W.uvm, NULL, &q));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, SLOTS * SLOT, 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 1, 0, &object));
  OK(vm_stat(W.uvm, NULL, &empty));
  for (unsigned i = 0; i < SLOTS;) {
    struct uvm_vmem_op ops[TENSORS];
    unsigned n = 0;
    for (; n < TENSORS && i < SLOTS; n++, i++) ops[n] = op_map(RES + i * SLOT + i % SLOT_UNITS * UNIT, object, 0, 1, 0);
    OK(bind(ops, n));
  }
  OK(vm_stat(W.uvm, NULL, &full));
  EQ(full.out_slots - empty.out_slots, SLOTS);
  uint64_t bytes = full.out_kernel_bytes - empty.out_kernel_bytes;
  printf("COUNTS {\"case\": \"%u slots with one page each\", \"kernel_bytes\": %llu, \"per_slot\": %.2f}\n", SLOTS,
         (unsigned long long)bytes, (double)bytes / SLOTS);
  CHECK(bytes > 0);
  CHECK(bytes <= 512ull * SLOTS);
  OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  world_close(&W);
}

MAIN(TEST(one_request), TEST(the_stock_path), TEST(live_pages), TEST(a_gigabyte), TEST(sparse_slots))
