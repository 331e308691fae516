/* SPDX-License-Identifier: MIT */
/*
 * What concurrent GPU work sees during a BIND (uvm_vmem_ioctl.h). The engine is stopped before each word of the
 * BIND's pushes; at each stop the watched addresses are walked, as a GPU with an empty TLB would do, and read through
 * the TLB. In the tests named free_* nothing is stopped: threads read continuously while batches of two and more pushes
 * are executed, each push some milliseconds late. In all other tests of all programs, readers.c of the software GPU
 * watches the page tables.
 *
 * Parameters: FLIPS of a slot (2), SLOTS and ROUNDS of the free_* tests (2048, 6). TRACE=1 shows the words at which
 * something changes.
 */
#include <pthread.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define MOST_SPOTS 160
#define READERS 2

/* An address, and the values that a read there may return. */
struct spot {
  uint64_t va, value[2];
};

struct seen {
  uint64_t words;              /* places where the engine was stopped */
  uint64_t walks, walks_none;  /* walks of the page tables; those that found no translation */
  uint64_t reads, faults, wrong, first_seen, second_seen;
  uint64_t words_none, words_fault; /* stops at which at least one spot had no translation, or faulted */
};

static struct world W;
static struct spot spots[MOST_SPOTS];
static unsigned num_spots;
static struct seen seen;
static bool trace;
static struct softgpu_counters readers; /* the software GPU's counters at the start */

static bool has(uint64_t capability) {
  struct uvm_vmem_query q;
  return vm_query(W.uvm, W.uuid[0], &q) == 0 && (q.out_capabilities & capability) == capability;
}

static void watch(uint64_t va, uint64_t before, uint64_t after) {
  if (num_spots == MOST_SPOTS) abort();
  spots[num_spots++] = (struct spot){.va = va, .value = {before, after}};
}

static uint64_t value_of(unsigned object, unsigned unit) {
  return 0xa000 + 0x1000 * object + unit;
}

static void start(void) {
  world_open(&W, 1);
  readers = gpu_counters(&W, 0);
  memset(&seen, 0, sizeof(seen));
  num_spots = 0;
}

/* Creates an object whose units contain value_of(number, unit), filled through a separate reservation. */
static int furnish(unsigned number, unsigned shift, unsigned count, unsigned flags, uint32_t *object) {
  const uint64_t aside = RES + GIB(64) + number * MIB(64);
  const unsigned units = count << (shift - UVM_VMEM_UNIT_SHIFT);
  int result = vm_reserve(W.uvm, W.uuid[0], aside, MIB(64), 16, 0);
  if (!result) result = vm_create(W.uvm, W.uuid[0], shift, count, flags, object);
  if (!result) result = vm_map(W.uvm, aside, aside, *object, 0, count, 0);
  for (unsigned unit = 0; unit < units && !result; unit++) {
    result = gpu_fill(&W, 0, aside + unit * UNIT, UNIT, value_of(number, unit), 0);
  }
  return result;
}

/* ---- word by word ------------------------------------------------------------------------------------------ */

struct bind {
  pthread_t thread;
  const struct uvm_vmem_op *ops;
  unsigned count;
  int result;
  volatile bool returned;
};

static void *bind_thread(void *argument) {
  struct bind *b = argument;
  b->result = vm_bind(W.uvm, RES, b->ops, b->count, NULL, NULL);
  b->returned = true;
  return NULL;
}

struct look {
  unsigned none, faults, wrong;
};

static struct look look(void) {
  struct look l = {0};
  for (unsigned i = 0; i < num_spots; i++) {
    const struct spot *s = &spots[i];
    struct softgpu_xlate x = gpu_xlate(&W, 0, s->va);
    uint64_t value = 0;
    if (!x.out_valid && !x.out_sparse) l.none++;
    int result = softgpu_peek(W.dev, W.c.space[0], s->va, &value);
    if (result && result != -EFAULT) hopeless("a read", result);
    if (result) {
      l.faults++;
    } else if (value != s->value[0] && value != s->value[1]) {
      l.wrong++;
    } else {
      seen.first_seen += value == s->value[0];
      seen.second_seen += value == s->value[1];
    }
  }
  seen.words++;
  seen.walks += num_spots;
  seen.reads += num_spots;
  seen.walks_none += l.none;
  seen.faults += l.faults;
  seen.wrong += l.wrong;
  seen.words_none += l.none != 0;
  seen.words_fault += l.faults != 0;
  return l;
}

static void show(unsigned word, const struct look *l, const struct softgpu_counters *base) {
  struct softgpu_counters c = gpu_counters_since(&W, 0, base);
  printf("  before word %u: %u of %u without a translation, %u reads fault, %u wrong; so far %llu PTE and %llu PDE "
         "writes, %llu invalidates\n",
         word, l->none, num_spots, l->faults, l->wrong, (unsigned long long)c.pte_changes,
         (unsigned long long)c.pde_writes, (unsigned long long)c.invalidates);
}

/* Runs one BIND, and checks all spots before each word that the engine executes. */
static int stepped(const struct uvm_vmem_op *ops, unsigned count) {
  struct bind b = {.ops = ops, .count = count};
  struct softgpu_counters base = gpu_counters(&W, 0);
  struct look last = look(), now = last;
  unsigned word = 0;
  if (trace) show(0, &now, &base);
  int result = softgpu_hold(W.dev, 0, SOFTGPU_HOLD_NOW);
  if (result) return result;
  if (pthread_create(&b.thread, NULL, bind_thread, &b)) abort();
  for (;;) {
    if (softgpu_hold_wait(W.dev, 0, 10) == 0) {
      now = look();
      word++;
      if (trace && memcmp(&now, &last, sizeof(now))) show(word, &now, &base);
      last = now;
      softgpu_hold(W.dev, 0, SOFTGPU_HOLD_NOW);
    } else if (b.returned) {
      break;
    }
  }
  softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE);
  pthread_join(b.thread, NULL);
  now = look();
  if (trace) show(word + 1, &now, &base);
  trace = false;
  return b.result;
}

static int stepped_one(struct uvm_vmem_op op) {
  return stepped(&op, 1);
}

/* Prints the observations and checks them: no fault, no wrong data, always a translation. */
static void judge(const char *what) {
  printf("%s: %llu words; walks %llu, %llu without a translation (at %llu words); reads %llu, %llu faults (at %llu "
         "words), %llu wrong, %llu as before, %llu as after\n",
         what, (unsigned long long)seen.words, (unsigned long long)seen.walks, (unsigned long long)seen.walks_none,
         (unsigned long long)seen.words_none, (unsigned long long)seen.reads, (unsigned long long)seen.faults,
         (unsigned long long)seen.words_fault, (unsigned long long)seen.wrong, (unsigned long long)seen.first_seen,
         (unsigned long long)seen.second_seen);
  struct softgpu_counters since = gpu_counters_since(&W, 0, &readers);
  if (seen.words < 4) fail("%s: the engine was never stopped", what);
  if (!since.reader_binds || !since.reader_units) fail("%s: the readers of the software GPU saw nothing", what);
  if (seen.walks_none) fail("%s: a unit had no translation", what);
  if (seen.faults) fail("%s: a read faulted", what);
  if (seen.wrong) fail("%s: a read found another unit's word", what);
}

/* A changed translation may be used until its invalidate: such stale uses are not counted against the test. */
static void forgive_stale(void) {
  W.base[0].stale = gpu_counters(&W, 0).stale;
}

/* The missing unit of a slot is mapped and unmapped again; the 31 others are watched. */
static void flip(unsigned flags, unsigned create_flags, const char *what) {
  const uint64_t slot = RES + MIB(2);
  uint32_t object;
  start();
  if ((flags & UVM_VMEM_RESERVE_BIG) && !has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, 16, SLOT_UNITS, create_flags, &object));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, flags));
  OK(vm_map(W.uvm, RES, slot, object, 0, SLOT_UNITS - 1, 0));
  OK(vm_map(W.uvm, RES, slot + (SLOT_UNITS - 1) * UNIT, object, SLOT_UNITS - 1, 1, 0));
  trace = parameter("TRACE", 0);
  for (unsigned i = 0; i < parameter("FLIPS", 2); i++) {
    const unsigned named = i * 7 % SLOT_UNITS;
    num_spots = 0;
    for (unsigned unit = 0; unit < SLOT_UNITS; unit++) {
      if (unit != named) watch(slot + unit * UNIT + 8 * unit, value_of(0, unit), value_of(0, unit));
    }
    OK(stepped_one(op_unmap(slot + named * UNIT, 1, 0)));
    OK(stepped_one(op_map(slot + named * UNIT, object, named, 1, 0)));
    EQ(gpu_xlate(&W, 0, slot).out_page_size, UNIT);
  }
  judge(what);
  world_close(&W);
}

static void parts(void) {
  flip(0, UVM_VMEM_CREATE_CONTIGUOUS, "without BIG, a unit mapped and unmapped");
}

static void parts_in_big(void) {
  flip(UVM_VMEM_RESERVE_BIG, UVM_VMEM_CREATE_CONTIGUOUS, "BIG, the last unit of an object mapped and unmapped");
  flip(UVM_VMEM_RESERVE_BIG, 0, "BIG, the last of small pages mapped and unmapped");
}

/* A 2 MB entry results from an operation that names the whole slot, with no sparse unit in it. */
static void made_by_one_operation(void) {
  const uint64_t slot = RES + MIB(2);
  uint32_t object, plain, large;
  start();
  if (!has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, 16, SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &object));
  OK(furnish(1, 16, SLOT_UNITS, 0, &plain));
  OK(furnish(2, 21, 1, 0, &large));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG));
  struct uvm_vmem_op halves[2] = {op_map(slot, object, 0, 16, 0), op_map(slot + MIB(1), object, 16, 16, 0)};
  OK(vm_bind(W.uvm, RES, halves, 2, NULL, NULL));
  EQ(gpu_xlate(&W, 0, slot).out_page_size, UNIT);
  OK(vm_unmap(W.uvm, RES, slot, SLOT_UNITS, 0));
  OK(vm_map(W.uvm, RES, slot, plain, 0, SLOT_UNITS, 0)); /* contiguous by chance at most */
  EQ(gpu_xlate(&W, 0, slot).out_page_size, UNIT);
  OK(vm_map(W.uvm, RES, slot, large, 0, 1, UVM_VMEM_OP_REPLACE)); /* over small entries */
  EQ(gpu_xlate(&W, 0, slot).out_page_size, MIB(2));
  OK(vm_unmap(W.uvm, RES, slot, SLOT_UNITS, 0));
  OK(vm_map(W.uvm, RES, slot, object, 0, SLOT_UNITS, 0)); /* in an empty slot */
  EQ(gpu_xlate(&W, 0, slot).out_page_size, MIB(2));
  OK(vm_map(W.uvm, RES, slot, plain, 0, SLOT_UNITS, UVM_VMEM_OP_REPLACE)); /* small entries over all of it */
  EQ(gpu_xlate(&W, 0, slot).out_page_size, UNIT);
  OK(vm_map(W.uvm, RES, slot, object, 0, SLOT_UNITS, UVM_VMEM_OP_REPLACE));
  for (unsigned i = 0; i < 2; i++) halves[i].flags = UVM_VMEM_OP_REPLACE; /* the same again changes nothing */
  OK(vm_bind(W.uvm, RES, halves, 2, NULL, NULL));
  EQ(gpu_xlate(&W, 0, slot).out_page_size, MIB(2));
  halves[0] = op_unmap(slot, 16, 0); /* two operations that together name the whole slot */
  halves[1] = op_unmap(slot + MIB(1), 16, 0);
  OK(vm_bind(W.uvm, RES, halves, 2, NULL, NULL));
  EQ(gpu_check(&W, 0, slot, 8, 0, 0), -EFAULT);
  if (has(UVM_VMEM_CAP_SPARSE)) {
    OK(vm_unmap(W.uvm, RES, slot + 9 * UNIT, 1, UVM_VMEM_OP_SPARSE));
    OK(vm_map(W.uvm, RES, slot, large, 0, 1, 0));
    EQ(gpu_xlate(&W, 0, slot).out_page_size, UNIT);
  }
  world_close(&W);
}

/* Pages that one operation replaces with themselves get one 2 MB entry; slots next to them never become invalid. */
static void joined_by_name(void) {
  const uint64_t slot = RES + MIB(2);
  uint32_t object;
  start();
  if (!has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, 16, SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &object));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG));
  OK(vm_map(W.uvm, RES, slot - 8 * UNIT, object, 0, 8, 0));
  OK(vm_map(W.uvm, RES, slot + SLOT, object, 0, SLOT_UNITS, 0));
  for (unsigned unit = 0; unit < 8; unit++) watch(slot - (8 - unit) * UNIT, value_of(0, unit), value_of(0, unit));
  for (unsigned unit = 0; unit < SLOT_UNITS; unit++) watch(slot + SLOT + unit * UNIT, value_of(0, unit), value_of(0, unit));
  for (unsigned i = 0; i < parameter("FLIPS", 2); i++) {
    OK(vm_map(W.uvm, RES, slot, object, 0, 20, 0));
    OK(vm_map(W.uvm, RES, slot + 20 * UNIT, object, 20, 12, 0));
    EQ(gpu_xlate(&W, 0, slot).out_page_size, UNIT);
    OK(stepped_one(op_map(slot, object, 0, SLOT_UNITS, UVM_VMEM_OP_REPLACE)));
    EQ(gpu_xlate(&W, 0, slot + 30 * UNIT).out_page_size, MIB(2));
    for (unsigned unit = 0; unit < SLOT_UNITS; unit++) OK(gpu_check(&W, 0, slot + unit * UNIT, 64, value_of(0, unit), 0));
    OK(stepped_one(op_unmap(slot, SLOT_UNITS, 0)));
  }
  judge("BIG, slots next to one that gets one entry");
  world_close(&W);
}

/* Without CUT an operation on part of a 2 MB entry is refused, and the batch changes nothing. */
static void refused_without_cut(void) {
  const uint64_t slot = RES + MIB(2);
  struct uvm_vmem_stat before, after;
  uint32_t object, other, failed;
  start();
  if (!has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, 16, SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &object));
  OK(furnish(1, 16, 1, 0, &other));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG));
  OK(vm_map(W.uvm, RES, slot, object, 0, SLOT_UNITS, 0));
  const struct uvm_vmem_op wrong[] = {
      op_unmap(slot, 1, 0),
      op_unmap(slot + 31 * UNIT, 1, 0),
      op_unmap(slot - 4 * UNIT, 20, 0),
      op_unmap(slot + 5 * UNIT, 1, UVM_VMEM_OP_SPARSE),
      op_map(slot + 7 * UNIT, other, 0, 1, UVM_VMEM_OP_REPLACE),
      op_map(slot + 7 * UNIT, object, 7, 1, UVM_VMEM_OP_REPLACE | UVM_VMEM_OP_READ_ONLY),
  };
  for (unsigned i = 0; i < ARRAY_SIZE(wrong); i++) {
    /* Together with valid operations, one of which has CUT. */
    struct uvm_vmem_op ops[3] = {op_map(RES + MIB(8), other, 0, 1, 0), wrong[i],
                                 op_unmap(slot + 20 * UNIT, 2, UVM_VMEM_OP_CUT)};
    struct softgpu_counters base = gpu_counters(&W, 0);
    OK(vm_stat(W.uvm, NULL, &before));
    EQ(vm_bind(W.uvm, RES, ops, 3, &failed, NULL), -EADDRINUSE);
    EQ(failed, 1);
    OK(vm_stat(W.uvm, NULL, &after));
    CHECK(stat_same(&before, &after));
    EQ(gpu_counters_since(&W, 0, &base).pte_changes, 0);
    EQ(gpu_xlate(&W, 0, slot).out_page_size, MIB(2));
    EQ(gpu_check(&W, 0, RES + MIB(8), 8, 0, 0), -EFAULT);
  }
  for (unsigned unit = 0; unit < SLOT_UNITS; unit++) OK(gpu_check(&W, 0, slot + unit * UNIT, 64, value_of(0, unit), 0));
  /* CUT without a 2 MB entry to cut. */
  OK(vm_map(W.uvm, RES, RES + MIB(8), other, 0, 1, UVM_VMEM_OP_CUT));
  OK(vm_unmap(W.uvm, RES, RES + MIB(8), 1, UVM_VMEM_OP_CUT));
  OK(vm_unmap(W.uvm, RES, slot, SLOT_UNITS, UVM_VMEM_OP_CUT));
  world_close(&W);
}

/* With CUT only the slot becomes invalid for a moment, and its other units read as before in the end. */
static void cut(void) {
  const uint64_t slot = RES + SLOT;
  uint32_t object;
  start();
  if (!has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, 16, SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &object));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, UVM_VMEM_RESERVE_BIG));
  OK(vm_map(W.uvm, RES, RES, object, 0, SLOT_UNITS, 0));        /* one entry */
  OK(vm_map(W.uvm, RES, RES + 2 * SLOT, object, 1, 20, 0));     /* small ones */
  for (unsigned unit = 0; unit < SLOT_UNITS; unit++) watch(RES + unit * UNIT, value_of(0, unit), value_of(0, unit));
  for (unsigned unit = 0; unit < 20; unit++) {
    watch(RES + 2 * SLOT + unit * UNIT, value_of(0, unit + 1), value_of(0, unit + 1));
  }
  trace = parameter("TRACE", 0);
  for (unsigned i = 0; i < parameter("FLIPS", 2); i++) {
    const unsigned named = i * 7 % SLOT_UNITS;
    OK(vm_map(W.uvm, RES, slot, object, 0, SLOT_UNITS, i ? UVM_VMEM_OP_REPLACE : 0));
    EQ(gpu_xlate(&W, 0, slot).out_page_size, MIB(2));
    struct uvm_vmem_op ops[2] = {op_unmap(slot + named * UNIT, 1, UVM_VMEM_OP_CUT),
                                 op_map(RES + 2 * SLOT + (20 + i % 12) * UNIT, object, 3, 1, 0)};
    OK(stepped(ops, 2));
    EQ(gpu_xlate(&W, 0, slot + (named ? 0 : UNIT)).out_page_size, UNIT);
    for (unsigned unit = 0; unit < SLOT_UNITS; unit++) {
      EQ(gpu_check(&W, 0, slot + unit * UNIT, 64, value_of(0, unit), 0), unit == named ? -EFAULT : 0);
    }
    ops[1] = op_unmap(RES + 2 * SLOT + (20 + i % 12) * UNIT, 1, 0);
    OK(stepped(&ops[1], 1));
  }
  judge("BIG, slots next to the one that is cut, and a small one");
  world_close(&W);
}

/* ---- REPLACE: old or new, never neither --------------------------------------------------------------------- */

static void replace_pages(unsigned shift, unsigned flags, unsigned count, const char *what) {
  const unsigned units = count << (shift - UVM_VMEM_UNIT_SHIFT);
  uint32_t object[2];
  start();
  if ((flags & UVM_VMEM_RESERVE_BIG) && !has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  for (unsigned i = 0; i < 2; i++) OK(furnish(i, shift, count, 0, &object[i]));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, flags));
  OK(vm_map(W.uvm, RES, RES + MIB(2), object[0], 0, count, 0));
  for (unsigned unit = 0; unit < units; unit++) {
    watch(RES + MIB(2) + unit * UNIT, value_of(0, unit), value_of(1, unit));
  }
  trace = parameter("TRACE", 0);
  for (unsigned i = 0; i < parameter("FLIPS", 2); i++) {
    OK(stepped_one(op_map(RES + MIB(2), object[(i + 1) % 2], 0, count, UVM_VMEM_OP_REPLACE)));
  }
  judge(what);
  forgive_stale();
  world_close(&W);
}

static void replace_same(void) {
  replace_pages(16, 0, 1, "a page of 64 KB by another");
  replace_pages(17, 0, 3, "3 pages of 128 KB by others");
  replace_pages(18, 0, 2, "2 pages of 256 KB by others");
  replace_pages(21, 0, 2, "2 pages of 2 MB by others");
}

static void replace_same_in_big(void) {
  replace_pages(16, UVM_VMEM_RESERVE_BIG, 3, "BIG, 3 pages of 64 KB by others");
  replace_pages(21, UVM_VMEM_RESERVE_BIG, 2, "BIG, 2 pages of 2 MB by others");
}

/* ---- sparse: zeros or the page, never a fault --------------------------------------------------------------- */

static void sparse_pages(unsigned shift, unsigned flags, unsigned count, const char *what) {
  const unsigned units = count << (shift - UVM_VMEM_UNIT_SHIFT);
  uint32_t object;
  start();
  if (!has(UVM_VMEM_CAP_SPARSE)) SKIP("no sparse ranges");
  if ((flags & UVM_VMEM_RESERVE_BIG) && !has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, shift, count, 0, &object));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(16), 16, flags));
  OK(vm_unmap(W.uvm, RES, RES + MIB(2), 2 * SLOT_UNITS, UVM_VMEM_OP_SPARSE));
  for (unsigned unit = 0; unit < units; unit++) watch(RES + MIB(2) + unit * UNIT, 0, value_of(0, unit));
  watch(RES + MIB(2) + units * UNIT, 0, 0); /* next to it: always sparse */
  trace = parameter("TRACE", 0);
  for (unsigned i = 0; i < parameter("FLIPS", 2); i++) {
    OK(stepped_one(op_map(RES + MIB(2), object, 0, count, 0)));
    OK(stepped_one(op_unmap(RES + MIB(2), units, UVM_VMEM_OP_SPARSE)));
  }
  judge(what);
  forgive_stale();
  world_close(&W);
}

static void sparse_to_mapped(void) {
  sparse_pages(16, 0, 3, "sparse, 3 pages of 64 KB, sparse");
  sparse_pages(18, 0, 2, "sparse, 2 pages of 256 KB, sparse");
  sparse_pages(21, 0, 1, "sparse, a page of 2 MB, sparse");
}

static void sparse_to_mapped_in_big(void) {
  sparse_pages(16, UVM_VMEM_RESERVE_BIG, 3, "BIG, sparse, 3 pages of 64 KB, sparse");
  sparse_pages(21, UVM_VMEM_RESERVE_BIG, 1, "BIG, sparse, a page of 2 MB, sparse");
}

/* ---- next to a reservation that is freed ---------------------------------------------------------------------- */

#define NEIGHBOUR (RES + MIB(64))

static void *free_thread(void *result) {
  *(int *)result = vm_free(W.uvm, NEIGHBOUR, UVM_VMEM_FREE_UNMAP);
  return NULL;
}

/* FREE of the last reservation with tables in a 512 MB directory removes the directory, while a BIND gives the
 * reservation at the directory's beginning its first page: the readers must not blame one for the other's writes. The
 * order in which FREE clears the entries above its tables is not specified, so the test runs a few times. */
static void beside_a_free(void) {
  enum { A_WHILE = 100, ROUNDS = 10 };
  uint32_t object;
  start();
  OK(furnish(0, 16, 8, 0, &object));
  for (unsigned round = 0; round < ROUNDS; round++) {
    struct uvm_vmem_op op = op_map(RES, object, 0, 8, 0);
    struct bind b = {.ops = &op, .count = 1};
    pthread_t freeing;
    int freed = -EBUSY;
    OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
    OK(vm_reserve(W.uvm, W.uuid[0], NEIGHBOUR, MIB(2), 16, 0));
    OK(vm_map(W.uvm, NEIGHBOUR, NEIGHBOUR, object, 0, 8, 0));
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
    if (pthread_create(&freeing, NULL, free_thread, &freed)) abort();
    sleep_ms(A_WHILE);
    if (pthread_create(&b.thread, NULL, bind_thread, &b)) abort();
    sleep_ms(A_WHILE);
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
    pthread_join(freeing, NULL);
    pthread_join(b.thread, NULL);
    OK(freed);
    OK(b.result);
    EQ(gpu_check(&W, 0, NEIGHBOUR, 8, 0, 0), -EFAULT);
    for (unsigned unit = 0; unit < 8; unit++) OK(gpu_check(&W, 0, RES + unit * UNIT, UNIT, value_of(0, unit), 0));
    OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  }
  world_close(&W);
}

/* ---- without stopping the engine ------------------------------------------------------------------------------ */

struct reader {
  pthread_t thread;
  struct rng rng;
  unsigned slots;
  uint64_t reads, faults, wrong;
};

static volatile bool stop;

static void *reader_thread(void *argument) {
  struct reader *r = argument;
  while (!stop) {
    const unsigned slot = rng_below(&r->rng, r->slots), unit = 1 + rng_below(&r->rng, SLOT_UNITS - 1);
    uint64_t value = 0;
    int result = softgpu_peek(W.dev, W.c.space[0], RES + slot * SLOT + unit * UNIT, &value);
    r->reads++;
    if (result && result != -EFAULT) hopeless("a read", result);
    if (result) r->faults++;
    else if (value != value_of(0, unit)) r->wrong++;
  }
  return NULL;
}

/* One batch unmaps unit 0 of all slots, the next maps it again, while the other units are read. All map one object. */
static void free_running(unsigned flags, const char *what) {
  const unsigned slots = parameter("SLOTS", 2048), rounds = parameter("ROUNDS", 6);
  struct uvm_vmem_op *ops = calloc(slots, sizeof(*ops));
  struct reader reader[READERS] = {0};
  struct softgpu_settings settings, old;
  struct uvm_vmem_stat before, after;
  uint64_t reads = 0, faults = 0, wrong = 0;
  uint32_t object;
  int result = 0;
  start();
  if ((flags & UVM_VMEM_RESERVE_BIG) && !has(UVM_VMEM_CAP_BIG)) SKIP("no 2 MB entries");
  OK(furnish(0, 16, SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &object));
  OK(vm_reserve(W.uvm, W.uuid[0], RES, slots * SLOT, 16, flags));
  for (unsigned i = 0; i < slots; i++) ops[i] = op_map(RES + i * SLOT, object, 0, SLOT_UNITS - 1, 0);
  OK(vm_bind(W.uvm, RES, ops, slots, NULL, NULL));
  for (unsigned i = 0; i < slots; i++) ops[i] = op_map(RES + i * SLOT + (SLOT_UNITS - 1) * UNIT, object, SLOT_UNITS - 1, 1, 0);
  OK(vm_bind(W.uvm, RES, ops, slots, NULL, NULL));
  EQ(gpu_xlate(&W, 0, RES).out_page_size, UNIT);
  OK(softgpu_settings(W.dev, NULL, &settings));
  settings.delay_us = 20000;
  OK(softgpu_settings(W.dev, &settings, &old));
  OK(vm_stat(W.uvm, NULL, &before));
  stop = false;
  for (unsigned i = 0; i < READERS; i++) {
    reader[i].slots = slots;
    reader[i].rng.state = i + 1;
    if (pthread_create(&reader[i].thread, NULL, reader_thread, &reader[i])) abort();
  }
  for (unsigned round = 0; round < rounds && !result; round++) {
    for (unsigned i = 0; i < slots; i++) ops[i] = op_unmap(RES + i * SLOT, 1, 0);
    result = vm_bind(W.uvm, RES, ops, slots, NULL, NULL);
    for (unsigned i = 0; i < slots; i++) ops[i] = op_map(RES + i * SLOT, object, 0, 1, 0);
    if (!result) result = vm_bind(W.uvm, RES, ops, slots, NULL, NULL);
  }
  stop = true;
  for (unsigned i = 0; i < READERS; i++) {
    pthread_join(reader[i].thread, NULL);
    reads += reader[i].reads;
    faults += reader[i].faults;
    wrong += reader[i].wrong;
  }
  settings.delay_us = old.delay_us;
  OK(softgpu_settings(W.dev, &settings, NULL));
  OK(result);
  OK(vm_stat(W.uvm, NULL, &after));
  printf("%s: %u binds of %u slots, %llu pushes; %llu reads, %llu faults, %llu wrong\n", what, 2 * rounds, slots,
         (unsigned long long)(after.out_pushes - before.out_pushes), (unsigned long long)reads,
         (unsigned long long)faults, (unsigned long long)wrong);
  if (reads < 100) fail("%s: too few reads", what);
  if (faults || wrong) fail("%s: reads of units that no batch names faulted or were wrong", what);
  free(ops);
  world_close(&W);
}

static void free_small(void) {
  free_running(0, "without BIG");
}

static void free_big(void) {
  free_running(UVM_VMEM_RESERVE_BIG, "BIG");
}

static struct world other;

static void *free_elsewhere(void *argument) {
  *(int *)argument = vm_free(other.uvm, RES, UVM_VMEM_FREE_UNMAP);
  return NULL;
}

/* Two descriptors of one process have reservations at the same addresses, each in its own address space: a FREE on one
 * is not a gap in the other's BIND. */
static void beside_a_free_in_another_space(void) {
  enum { A_WHILE = 100, ROUNDS = 5 };
  uint32_t object;
  start();
  world_open(&other, 1);
  OK(furnish(0, 16, 8, 0, &object));
  for (unsigned round = 0; round < ROUNDS; round++) {
    struct uvm_vmem_op op = op_map(RES, object, 0, 8, 0), sparse = op_unmap(RES + MIB(6), 8, UVM_VMEM_OP_SPARSE);
    struct bind b = {.ops = &op, .count = 1};
    pthread_t freeing;
    int freed = -EBUSY;
    OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
    OK(vm_reserve(other.uvm, other.uuid[0], RES, MIB(64), 16, 0));
    OK(vm_bind(other.uvm, RES, &sparse, 1, NULL, NULL));
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
    if (pthread_create(&b.thread, NULL, bind_thread, &b)) abort();
    OK(softgpu_hold_wait(W.dev, 0, 10000)); /* stopped at the table that the BIND needs */
    if (pthread_create(&freeing, NULL, free_elsewhere, &freed)) abort();
    sleep_ms(A_WHILE);
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
    pthread_join(b.thread, NULL);
    pthread_join(freeing, NULL);
    OK(b.result);
    OK(freed);
    OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  }
  world_close(&other);
  world_close(&W);
}

MAIN(TEST(parts), TEST(parts_in_big), TEST(made_by_one_operation), TEST(joined_by_name), TEST(refused_without_cut), TEST(cut),
     TEST(replace_same), TEST(replace_same_in_big), TEST(sparse_to_mapped), TEST(sparse_to_mapped_in_big),
     TEST(beside_a_free), TEST(beside_a_free_in_another_space), TEST(free_small), TEST(free_big))
