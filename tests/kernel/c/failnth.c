/* SPDX-License-Identifier: MIT */
/*
 * Each ioctl is made to fail at its 1st, 2nd, nth call into the resource manager, and, if the kernel supports it
 * (CONFIG_FAULT_INJECTION, /proc/self/fail-nth), at its nth allocation of kernel memory, until it succeeds.
 *
 * A failure must be ENOMEM or ENOSPC and change nothing (STAT and the page tables), and the same call must
 * succeed when repeated. At the end all memory must have been returned.
 *
 * Parameters: ACTION (runs only this action; the first is 1).
 */
#include <fcntl.h>
#include <unistd.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define SPARE (RES + GIB(64))
#define WIDE (RES + GIB(16))
#define MANY 8400 /* slots; 2 MB hold the tables of 8192 */
#define LIMIT 2000 /* failures of one call before the test gives up */

static struct world W;
static uint32_t small, large, made, grown; /* 64 x 64 KB; 4 x 2 MB; made by the action; 10 x 2 MB, in pages of 64 KB */
static uint64_t capabilities;
static unsigned many = MANY;   /* slots that one BIND touches for the first time */
static unsigned eager = 8192;  /* slots of an EAGER reservation */

/* The initial state: slot 0 of RES has tables and 8 units mapped; slot 2 is mapped entirely; of slots 100 to 107 the
 * even ones have 2 MB entries, and the odd ones the pages for one; all other slots are untouched. */
static int furnish(void) {
  struct uvm_vmem_query q;
  uint32_t host;
  world_open(&W, 1);
  int result = vm_query(W.uvm, NULL, &q);
  capabilities = q.out_capabilities;
  if (!result) result = vm_reserve(W.uvm, W.uuid[0], RES, MIB(256), 16, capabilities & UVM_VMEM_CAP_BIG ? UVM_VMEM_RESERVE_BIG : 0);
  if (!result) result = vm_reserve(W.uvm, W.uuid[0], WIDE, MANY * SLOT, 16, 0);
  if (!result) result = vm_create(W.uvm, W.uuid[0], 16, 64, 0, &small);
  if (!result) result = vm_create(W.uvm, W.uuid[0], 21, 4, 0, &large);
  if (!result) result = vm_map(W.uvm, RES, RES, small, 0, 8, 0);
  if (!result) result = vm_map(W.uvm, RES, RES + MIB(4), large, 0, 1, 0);
  for (unsigned i = 0; i < 8 && !result && capabilities & UVM_VMEM_CAP_LARGE; i++) {
    if (!i) result = vm_create(W.uvm, W.uuid[0], 16, 10 * SLOT_UNITS, UVM_VMEM_CREATE_CONTIGUOUS, &grown);
    if (!result) result = vm_map(W.uvm, RES, RES + (100 + i) * SLOT, grown, i * SLOT_UNITS, i % 2 ? 20 : SLOT_UNITS, 0);
    if (!result && i % 2) result = vm_map(W.uvm, RES, RES + (100 + i) * SLOT + 20 * UNIT, grown, i * SLOT_UNITS + 20, 12, 0);
  }
  if (!result) result = gpu_fill(&W, 0, RES, 8 * UNIT, 0xf00d, 1);
  /* Memory allocated for the first host page is kept: allocate it now, so that it does not look like a leak. */
  if (!result && capabilities & UVM_VMEM_CAP_HOST) {
    result = vm_create(W.uvm, W.uuid[0], 16, 1, UVM_VMEM_CREATE_HOST, &host);
    if (!result) result = vm_release(W.uvm, host);
  }
  return result;
}

struct action {
  const char *name;
  int (*run)(void);
  void (*undo)(void);
  bool from_scratch; /* needs a new world for each try, since its effect cannot be undone */
};

static int do_reserve(void) { return vm_reserve(W.uvm, W.uuid[0], SPARE, MIB(64), 16, 0); }
static int do_reserve_eager(void) { return vm_reserve(W.uvm, W.uuid[0], SPARE, eager * SLOT, 16, UVM_VMEM_RESERVE_EAGER); }
static void undo_reserve(void) { vm_free(W.uvm, SPARE, 0); }

static int do_create(void) { return vm_create(W.uvm, W.uuid[0], 16, 40, 0, &made); }
static int do_create_large(void) { return vm_create(W.uvm, W.uuid[0], 21, 4, 0, &made); }
static int do_create_middle(void) { return vm_create(W.uvm, W.uuid[0], 18, 20, 0, &made); }
static int do_create_contiguous(void) { return vm_create(W.uvm, W.uuid[0], 16, 32, UVM_VMEM_CREATE_CONTIGUOUS, &made); }
static int do_create_host(void) {
  if (!(capabilities & UVM_VMEM_CAP_HOST)) return 0;
  return vm_create(W.uvm, W.uuid[0], 16, 4, UVM_VMEM_CREATE_HOST, &made);
}
static void undo_create(void) { vm_release(W.uvm, made); }

static int do_bind_steady(void) { return vm_map(W.uvm, RES, RES + 16 * UNIT, small, 16, 8, 0); }
static void undo_bind_steady(void) { vm_unmap(W.uvm, RES, RES + 16 * UNIT, 8, 0); }

/* First touch of slots 8 .. 15, a run across two slots, one REPLACE and one UNMAP. */
static int do_bind_new(void) {
  struct uvm_vmem_op ops[11];
  for (unsigned i = 0; i < 8; i++) ops[i] = op_map(RES + (8 + i) * SLOT + i * UNIT, small, 20 + i, 1, 0);
  ops[8] = op_map(RES + 20 * SLOT - 4 * UNIT, small, 30, 8, 0);
  ops[9] = op_map(RES, small, 40, 2, UVM_VMEM_OP_REPLACE);
  ops[10] = op_unmap(RES + 6 * UNIT, 2, 0);
  return vm_bind(W.uvm, RES, ops, 11, NULL, NULL);
}

/* More new tables than UVM has cached memory for: it has to ask the resource manager. */
static int do_bind_many(void) {
  static struct uvm_vmem_op ops[MANY];
  for (unsigned i = 0; i < many; i++) ops[i] = op_map(WIDE + i * SLOT, small, i % 64, 1, 0);
  return vm_bind(W.uvm, WIDE, ops, many, NULL, NULL);
}

static int do_bind_async(void) {
  struct uvm_vmem_op op = op_map(RES + 30 * SLOT, small, 0, 8, 0);
  uint64_t ticket = 0;
  int result = vm_bind(W.uvm, RES, &op, 1, NULL, &ticket);
  return result ? result : vm_wait(W.uvm, ticket, FOREVER);
}

/* One 2 MB entry is cut, and an empty slot gets one. */
static int do_bind_big(void) {
  struct uvm_vmem_op ops[2] = {op_unmap(RES + MIB(4) + 5 * UNIT, 1, UVM_VMEM_OP_CUT), op_map(RES + MIB(6), large, 2, 1, 0)};
  return vm_bind(W.uvm, RES, ops, 2, NULL, NULL);
}

/* Four 2 MB entries are split, four are joined from small ones, two are mapped in empty slots; and pages next to them
 * get tables. */
static int do_bind_entries(void) {
  struct uvm_vmem_op ops[18];
  if (!(capabilities & UVM_VMEM_CAP_LARGE)) return 0;
  for (unsigned i = 0; i < 4; i++) {
    ops[i] = op_unmap(RES + (100 + 2 * i) * SLOT + i * UNIT, 3, UVM_VMEM_OP_CUT);
    ops[4 + i] = op_map(RES + (101 + 2 * i) * SLOT, grown, (1 + 2 * i) * SLOT_UNITS, SLOT_UNITS,
                        UVM_VMEM_OP_LARGE | UVM_VMEM_OP_REPLACE);
  }
  for (unsigned i = 0; i < 2; i++) ops[8 + i] = op_map(RES + (110 + i) * SLOT, grown, (8 + i) * SLOT_UNITS, SLOT_UNITS, UVM_VMEM_OP_LARGE);
  for (unsigned i = 0; i < 8; i++) ops[10 + i] = op_map(RES + (20 + i) * SLOT, small, i, 1, 0);
  return vm_bind(W.uvm, RES, ops, 18, NULL, NULL);
}

static int do_unmap(void) { return vm_unmap(W.uvm, RES, RES, MIB(256) / UNIT, 0); }
static int do_free(void) { return vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP); }
static int do_release(void) { return vm_release(W.uvm, large); }
static int do_stat(void) {
  struct uvm_vmem_stat s;
  return vm_stat(W.uvm, NULL, &s);
}

static const struct action actions[] = {
    {"RESERVE", do_reserve, undo_reserve, false},
    {"RESERVE, eager", do_reserve_eager, undo_reserve, false},
    {"CREATE 40 x 64 KB", do_create, undo_create, false},
    {"CREATE 20 x 256 KB", do_create_middle, undo_create, false},
    {"CREATE 4 x 2 MB", do_create_large, undo_create, false},
    {"CREATE, contiguous", do_create_contiguous, undo_create, false},
    {"CREATE, host memory", do_create_host, undo_create, false},
    {"BIND, tables there", do_bind_steady, undo_bind_steady, false},
    {"BIND, new tables", do_bind_new, NULL, true},
    {"BIND, many new tables", do_bind_many, NULL, true},
    {"BIND, asynchronous", do_bind_async, NULL, true},
    {"BIND, 2 MB entries", do_bind_big, NULL, true},
    {"BIND, entries split and joined", do_bind_entries, NULL, true},
    {"BIND, unmap all", do_unmap, NULL, true},
    {"FREE", do_free, NULL, true},
    {"RELEASE", do_release, NULL, true},
    {"STAT", do_stat, NULL, false},
};

/* Makes the nth call fail: armed right before the action, disarmed right after it. */
struct injector {
  const char *what;
  bool (*arm)(uint64_t nth);
  bool (*disarm)(void); /* true: a call failed because of it */
};

static bool rm_arm(uint64_t nth) {
  return softgpu_fail_nth(W.dev, "", nth, SOFTGPU_STATUS_NO_MEMORY) == 0;
}

static bool rm_disarm(void) {
  struct softgpu_injected injected = {0};
  softgpu_injected(W.dev, &injected);
  softgpu_inject_clear(W.dev);
  return injected.out_failed > 0;
}

static int fail_nth_fd = -1;

static bool kmalloc_arm(uint64_t nth) {
  char text[24];
  int n = snprintf(text, sizeof(text), "%llu", (unsigned long long)nth);
  return pwrite(fail_nth_fd, text, (size_t)n, 0) == n;
}

/* The kernel counts down: the remaining count says if the nth allocation was reached. */
static bool kmalloc_disarm(void) {
  char text[24] = {0};
  bool fired = pread(fail_nth_fd, text, sizeof(text) - 1, 0) > 0 && atoi(text) == 0;
  kmalloc_arm(0);
  return fired;
}

struct view {
  struct uvm_vmem_stat stat;
  uint64_t mapped, entries; /* bytes and 2 MB entries in the page tables */
};

static struct view look(void) {
  struct view v;
  if (vm_stat(W.uvm, NULL, &v.stat)) memset(&v.stat, 0xff, sizeof(v.stat));
  struct softgpu_scan scan = gpu_scan(&W, 0, RES, MIB(256));
  v.mapped = scan.out_bytes + gpu_scan(&W, 0, WIDE, MANY * SLOT).out_bytes;
  v.entries = scan.out_2m;
  return v;
}

/* Tries that failed, and tries that succeeded despite the failure (UVM can use other memory for its page tables). */
struct score {
  int failed, passed;
};

static bool sweep(const struct action *a, const struct injector *by, struct score *score) {
  *score = (struct score){0};
  for (uint64_t nth = 1; nth < LIMIT; nth++) {
    if (a->from_scratch) {
      if (furnish()) hopeless("the furniture", 0);
    }
    struct view before = look();
    if (!by->arm(nth)) hopeless("arming", -errno);
    int result = a->run();
    bool fired = by->disarm();
    struct view after = look();
    if (result) {
      score->failed++;
      if (result != -ENOMEM && result != -ENOSPC) fail("%s, %s %d: %s", a->name, by->what, (int)nth, strerror(-result));
      if (!fired) fail("%s, %s %d: fails by itself", a->name, by->what, (int)nth);
      if (!stat_same(&before.stat, &after.stat)) fail("%s, %s %d: STAT changed", a->name, by->what, (int)nth);
      if (before.entries != after.entries) fail("%s, %s %d: entries of 2 MB changed", a->name, by->what, (int)nth);
      if (before.mapped != after.mapped) fail("%s, %s %d: the page tables changed", a->name, by->what, (int)nth);
      /* A batch may keep the structs of slots that it was the first to touch. */
      if (!a->from_scratch && before.stat.out_kernel_bytes != after.stat.out_kernel_bytes) {
        fail("%s, %s %d: kernel memory was %llu bytes and is %llu", a->name, by->what, (int)nth,
             (unsigned long long)before.stat.out_kernel_bytes, (unsigned long long)after.stat.out_kernel_bytes);
      }
      int probe = gpu_check(&W, 0, RES, 8 * UNIT, 0xf00d, 1);
      if (probe) fail("%s, %s %d: memory that was mapped: %s", a->name, by->what, (int)nth, strerror(-probe));
      int again = a->run();
      if (again) fail("%s, %s %d: once more: %s", a->name, by->what, (int)nth, strerror(-again));
    }
    if (a->undo) a->undo();
    if (a->from_scratch) world_close(&W);
    if (failures_here) return false;
    if (!fired) return true;
    score->passed += !result;
  }
  fail("%s, %s: still failing after %d", a->name, by->what, LIMIT);
  return false;
}

static void sweep_all(const struct injector *by) {
  const uint64_t only = parameter("ACTION", 0);
  int total = 0;
  for (size_t i = 0; i < ARRAY_SIZE(actions); i++) {
    const struct action *a = &actions[i];
    if (only && i + 1 != only) continue;
    if (!a->from_scratch) OK(furnish());
    struct score score;
    bool good = sweep(a, by, &score);
    if (!a->from_scratch) world_close(&W);
    printf("%s: by %s %d failed, %d passed all the same\n", a->name, by->what, score.failed, score.passed);
    if (!good) return;
    total += score.failed;
  }
  CHECK(total > 0 || only); /* otherwise nothing was tested */
}

static void resource_manager(void) {
  static const struct injector by = {"RM call", rm_arm, rm_disarm};
  sweep_all(&by);
}

/* Makes allocations that may sleep fail too: by default they never do. */
static void set(const char *path, const char *value) {
  int fd = open(path, O_WRONLY);
  if (fd < 0) return;
  if (write(fd, value, strlen(value)) < 0) perror(path);
  close(fd);
}

static void kernel_memory(void) {
  static const struct injector by = {"allocation", kmalloc_arm, kmalloc_disarm};
  fail_nth_fd = open("/proc/thread-self/fail-nth", O_RDWR);
  if (fail_nth_fd < 0) SKIP("the kernel has no CONFIG_FAULT_INJECTION");
  set("/sys/kernel/debug/failslab/ignore-gfp-wait", "N");
  set("/sys/kernel/debug/fail_page_alloc/ignore-gfp-wait", "N");
  set("/sys/kernel/debug/fail_page_alloc/ignore-gfp-highmem", "N");
  set("/sys/kernel/debug/fail_page_alloc/min-order", "0");
  set("/sys/kernel/debug/failslab/verbose", "0");
  set("/sys/kernel/debug/fail_page_alloc/verbose", "0");
  /* Few slots: each needs a few allocations, and every allocation fails in turn. */
  many = 20;
  eager = 20;
  sweep_all(&by);
  close(fail_nth_fd);
}

/* Memory runs out for good in the middle of a batch: every call from the nth on fails. */
static void from_the_nth_on(void) {
  for (uint64_t nth = 1; nth < 10; nth++) {
    OK(furnish());
    struct view before = look();
    OK(softgpu_inject(W.dev, "", SOFTGPU_INJECT_MINE, nth, ~0ull, SOFTGPU_STATUS_NO_MEMORY, 0));
    int result = do_bind_many();
    int create = do_create_large();
    bool fired = rm_disarm();
    struct view after = look();
    if (result) {
      CHECK(result == -ENOMEM || result == -ENOSPC);
      EQ(after.mapped, before.mapped);
      OK(do_bind_many());
    }
    if (!create) undo_create();
    OK(do_create_large());
    world_close(&W);
    if (!fired) break;
  }
}

MAIN(TEST(resource_manager), TEST(from_the_nth_on), TEST(kernel_memory))
