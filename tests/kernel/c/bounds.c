/* SPDX-License-Identifier: MIT */
/*
 * Bounds on the resources that a user can take, and on the time that a user can make others wait: limits of each user
 * and cgroup, charges to the memory cgroup, calls that wait for the GPU with no lock held, locks that are released in
 * steps, a wait that sleeps, and a process that is killed while it waits.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/user.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define OTHER (RES + GIB(1024))
#define A_WHILE 100 /* ms in which a call that does not wait would have returned */

#define USER_TABLES "uvm_vmem_user_tables_limit_mb"
#define CGROUP_TABLES "uvm_vmem_cgroup_tables_limit_mb"
#define USER_HOST "uvm_vmem_user_host_limit_mb"
#define CGROUP_HOST "uvm_vmem_cgroup_host_limit_mb"
#define TOTAL_TABLES "uvm_vmem_total_tables_limit_mb"
#define TOTAL_HOST "uvm_vmem_total_host_limit_mb"
#define GPU_TOTAL "uvm_vmem_gpu_limit_mb"

static struct world W;
static uint32_t the_object, the_other;

/* ---- limits --------------------------------------------------------------------------------------- */

static int write_file(const char *path, const char *text) {
  FILE *file = fopen(path, "w");
  if (!file) return -errno;
  int result = fputs(text, file) < 0 ? -EIO : 0;
  return fclose(file) ? -errno : result;
}

/* Resets the limits to their defaults. */
static void defaults(void) {
  static const char *const names[] = {USER_TABLES, CGROUP_TABLES, USER_HOST, CGROUP_HOST, TOTAL_TABLES, TOTAL_HOST, GPU_TOTAL};
  char path[96];
  for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
    snprintf(path, sizeof(path), "/sys/module/nvidia_uvm/parameters/%s", names[i]);
    OK(write_file(path, "-1"));
  }
}

static int wait_for(pid_t pid) {
  int status = -1;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* Touches one slot in each stride of a reservation, 16 at a time and the last ones singly, until that fails. Returns
 * how many slots were touched. */
static unsigned touch_each(struct world *w, uint64_t start, uint64_t stride, uint32_t object, unsigned most, int *error) {
  struct uvm_vmem_op ops[16];
  unsigned n = 0;
  for (unsigned count = ARRAY_SIZE(ops); count; count = count > 1 ? 1 : 0) {
    for (*error = 0; n < most; n += count) {
      for (unsigned i = 0; i < count; i++) ops[i] = op_map(start + (n + i) * stride, object, i, 1, UVM_VMEM_OP_REPLACE);
      *error = vm_bind(w->uvm, start, ops, count, NULL, NULL);
      if (*error) break;
    }
  }
  return n;
}

static unsigned touch(struct world *w, uint32_t object, unsigned most, int *error) {
  return touch_each(w, RES, SLOT, object, most, error);
}

/* 64 slots and the directories above them take more than 1 MB. What remains of 1 MB is less than LARGE needs. */
#define LARGE GIB(4096)

static int fill_a_megabyte(struct world *w, uint32_t object) {
  int error;
  touch_each(w, RES, GIB(1), object, 64, &error);
  return error;
}

/* Opens a world with a reservation of 64 GB and an object. */
static int furnish(struct world *w, uint32_t *object) {
  world_open(w, 1);
  int result = vm_reserve(w->uvm, w->uuid[0], RES, GIB(64), 16, 0);
  return result ? result : vm_create(w->uvm, w->uuid[0], 16, 64, 0, object);
}

/* A call beyond the limit changes nothing: a reservation, and a batch of which only part would fit. */
static void refused(struct world *w, uint32_t object, unsigned bound) {
  static struct uvm_vmem_op ops[4096];
  struct uvm_vmem_stat before, after;
  uint32_t failed = 0;
  for (unsigned i = 0; i < ARRAY_SIZE(ops); i++) ops[i] = op_map(RES + (bound + i) * SLOT, object, i % 64, 1, 0);
  OK(vm_stat(w->uvm, NULL, &before));
  uint64_t mapped = gpu_scan(w, 0, RES, GIB(64)).out_bytes;
  EQ(vm_bind(w->uvm, RES, ops, ARRAY_SIZE(ops), &failed, NULL), -EDQUOT);
  EQ(failed, ~0u);
  EQ(vm_reserve(w->uvm, w->uuid[0], OTHER, GIB(4096), 16, 0), -EDQUOT);
  EQ(vm_reserve(w->uvm, w->uuid[0], OTHER, GIB(16), 16, UVM_VMEM_RESERVE_EAGER), -EDQUOT);
  OK(vm_stat(w->uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  EQ(gpu_scan(w, 0, RES, GIB(64)).out_bytes, mapped);
  /* Slots bound before still work. */
  OK(vm_map(w->uvm, RES, RES, object, 1, 1, UVM_VMEM_OP_REPLACE));
}

/* The limit is 1 MB; first with one descriptor, then with a second one of the same user or cgroup. */
static void fill_tables(const char *limit) {
  struct world a, b;
  struct uvm_vmem_stat s;
  uint32_t in_a, in_b;
  int error;
  OK(furnish(&a, &in_a));
  OK(set_parameter(limit, 1));
  unsigned alone = touch(&a, in_a, 4096, &error);
  EQ(error, -EDQUOT);
  OK(vm_stat(a.uvm, NULL, &s));
  printf("%s: %u slots in 1 MB, %llu bytes counted, %llu of our own\n", limit, alone,
         (unsigned long long)s.out_table_bytes, (unsigned long long)s.out_kernel_bytes);
  CHECK(alone > 500 && alone < 4096);
  CHECK(s.out_table_bytes <= MIB(1) && s.out_table_bytes > KIB(950));
  refused(&a, in_a, alone);
  if (failures_here) return;
  /* Another descriptor has nothing left, not even for a reservation. */
  world_open(&b, 1);
  EQ(vm_reserve(b.uvm, b.uuid[0], RES, GIB(64), 16, 0), -EDQUOT);
  /* A higher limit takes effect immediately; then no limit, and the lower one again. */
  OK(set_parameter(limit, 2));
  OK(vm_reserve(b.uvm, b.uuid[0], RES, GIB(64), 16, 0));
  OK(vm_create(b.uvm, b.uuid[0], 16, 64, 0, &in_b));
  unsigned second = touch(&b, in_b, 4096, &error);
  EQ(error, -EDQUOT);
  CHECK(second + 64 > alone && second < alone + 64);
  OK(set_parameter(limit, 0));
  OK(vm_map(b.uvm, RES, RES + GIB(63), in_b, 0, 1, 0));
  OK(set_parameter(limit, 1));
  EQ(vm_map(b.uvm, RES, RES + GIB(62), in_b, 0, 1, 0), -EDQUOT);
  /* Freed memory is available to others. */
  OK(vm_free(a.uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(vm_stat(a.uvm, NULL, &s));
  EQ(s.out_table_bytes, 0);
  world_close(&b);
  OK(vm_reserve(a.uvm, a.uuid[0], RES, GIB(64), 16, 0));
  EQ(touch(&a, in_a, 4096, &error), alone);
  EQ(error, -EDQUOT);
  world_close(&a);
  defaults();
}

/* Fills a limit of 8 MB of host memory from two descriptors. */
static void fill_host(const char *limit) {
  struct uvm_vmem_stat before, after;
  struct world a, b;
  uint32_t first, second, more;
  world_open(&b, 1); /* is closed last */
  world_open(&a, 1);
  OK(set_parameter(limit, 8));
  OK(vm_create(a.uvm, a.uuid[0], 21, 2, UVM_VMEM_CREATE_HOST, &first));
  OK(vm_create(b.uvm, b.uuid[0], 16, 64, UVM_VMEM_CREATE_HOST, &second));
  OK(vm_stat(a.uvm, NULL, &before));
  EQ(vm_create(a.uvm, a.uuid[0], 16, 1, UVM_VMEM_CREATE_HOST, &more), -EDQUOT);
  EQ(vm_create(b.uvm, b.uuid[0], 21, 1, UVM_VMEM_CREATE_HOST, &more), -EDQUOT);
  OK(vm_stat(a.uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  EQ(after.out_kernel_bytes, before.out_kernel_bytes);
  OK(vm_create(a.uvm, a.uuid[0], 21, 1, 0, &more)); /* GPU memory does not count */
  OK(vm_release(b.uvm, second));
  EQ(vm_create(a.uvm, a.uuid[0], 21, 3, UVM_VMEM_CREATE_HOST, &second), -EDQUOT); /* two would fit */
  OK(vm_create(a.uvm, a.uuid[0], 21, 2, UVM_VMEM_CREATE_HOST, &second));
  OK(vm_release(a.uvm, first));
  world_close(&a);
  OK(vm_create(b.uvm, b.uuid[0], 21, 4, UVM_VMEM_CREATE_HOST, &first));
  world_close(&b);
  defaults();
}

static uint64_t table_bytes(struct world *w) {
  struct uvm_vmem_stat s;
  return vm_stat(w->uvm, NULL, &s) ? ~0ull : s.out_table_bytes;
}

/* Counted against the limits of page tables: a reservation, and each 1 GB and each 2 MB of it from its first BIND
 * on; fully sparse slots add nothing. */
static void what_counts(void) {
  struct world w;
  uint32_t object;
  uint64_t before;
  world_open(&w, 1);
  EQ(table_bytes(&w), 0);
  OK(vm_create(w.uvm, w.uuid[0], 16, 64, 0, &object));
  EQ(table_bytes(&w), 0);
  OK(vm_reserve(w.uvm, w.uuid[0], OTHER, GIB(64), 16, 0));
  const uint64_t reserved = table_bytes(&w);
  CHECK(reserved > 0);
  OK(vm_reserve(w.uvm, w.uuid[0], RES, GIB(64), 16, 0));
  EQ(table_bytes(&w), 2 * reserved);
  OK(vm_unmap(w.uvm, RES, RES, SLOT_UNITS, 0)); /* nothing was mapped */
  EQ(table_bytes(&w), 2 * reserved);
  OK(vm_map(w.uvm, RES, RES, object, 0, 1, 0));
  before = table_bytes(&w);
  OK(vm_map(w.uvm, RES, RES + SLOT, object, 0, 1, 0));
  const uint64_t slot = table_bytes(&w) - before, gib = before - 2 * reserved - slot;
  CHECK(slot > 512 && gib > 2 * KIB(4)); /* a table and the record of its PTEs; two directories */
  before = table_bytes(&w);
  EQ(vm_map(w.uvm, RES, RES + SLOT, object, 1, 1, 0), -EEXIST);
  OK(vm_map(w.uvm, RES, RES + UNIT, object, 1, 31, 0));
  OK(vm_unmap(w.uvm, RES, RES, 2 * SLOT_UNITS, 0));
  EQ(table_bytes(&w), before);
  OK(vm_unmap(w.uvm, RES, RES + 4 * SLOT, 100 * SLOT_UNITS, UVM_VMEM_OP_SPARSE)); /* within the same 1 GB */
  EQ(table_bytes(&w), before);
  OK(vm_unmap(w.uvm, RES, RES + GIB(1), GIB(2) / UNIT, UVM_VMEM_OP_SPARSE));
  EQ(table_bytes(&w), before + 2 * gib);
  OK(vm_map(w.uvm, RES, RES + GIB(5), object, 0, 1, 0));
  EQ(table_bytes(&w), before + 3 * gib + slot);
  before = table_bytes(&w);
  OK(vm_map(w.uvm, RES, RES + 9 * SLOT, object, 0, 1, 0)); /* no longer fully sparse */
  CHECK(table_bytes(&w) >= before + slot);
  before = table_bytes(&w);
  OK(vm_unmap(w.uvm, RES, RES + 9 * SLOT, 1, UVM_VMEM_OP_SPARSE));
  EQ(table_bytes(&w), before);
  OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
  EQ(table_bytes(&w), reserved);
  OK(vm_free(w.uvm, OTHER, 0));
  EQ(table_bytes(&w), 0);
  world_close(&w);
}

/* Runs command in a child with its own descriptor, then changes the user id and tries to reserve. Root's account is
 * full: the result shows whether the reservation is still charged to root. */
static int becomes_another(int (*command)(int, const uint8_t *), int (*change)(uid_t)) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    struct world own;
    world_open(&own, 1);
    if ((command && command(own.uvm, own.uuid[0])) || change(1000)) _exit(100);
    _exit(-vm_reserve(own.uvm, own.uuid[0], RES, LARGE, 16, 0));
  }
  return wait_for(child);
}

static int a_query(int fd, const uint8_t *gpu) {
  struct uvm_vmem_query q;
  return vm_query(fd, gpu, &q);
}

static int a_stat(int fd, const uint8_t *gpu) {
  struct uvm_vmem_stat s;
  return vm_stat(fd, gpu, &s);
}

/* Usage is charged to the real uid of the process at its first command other than QUERY. */
static void whose_limit(void) {
  defaults();
  struct world w;
  uint32_t object;
  int error, after_query, after_stat, effective, small, alone;
  OK(furnish(&w, &object));
  OK(set_parameter(USER_TABLES, 1));
  error = fill_a_megabyte(&w, object);
  after_query = becomes_another(a_query, setuid);
  after_stat = becomes_another(a_stat, setuid);
  effective = becomes_another(NULL, seteuid);
  OK(set_parameter(USER_TABLES, 0));
  OK(set_parameter(CGROUP_TABLES, 1)); /* this process is in the root cgroup, which has no limit */
  small = fill_a_megabyte(&w, object);
  alone = vm_reserve(w.uvm, w.uuid[0], OTHER, GIB(64), 16, 0);
  defaults();
  EQ(error, -EDQUOT);
  EQ(after_query, 0);
  EQ(after_stat, EDQUOT);
  EQ(effective, EDQUOT);
  OK(small);
  OK(alone);
  world_close(&w);
}

/* Each user has a separate limit. */
static void limit_of_a_user(void) {
  defaults();
  struct world w;
  uint32_t object;
  fill_tables(USER_TABLES);
  if (failures_here) return;
  fill_host(USER_HOST);
  if (failures_here) return;
  OK(furnish(&w, &object));
  OK(set_parameter(USER_TABLES, 1));
  EQ(fill_a_megabyte(&w, object), -EDQUOT);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    struct world own;
    world_open(&own, 1);
    if (setuid(1000)) _exit(100);
    _exit(vm_reserve(own.uvm, own.uuid[0], RES, LARGE, 16, 0) != 0);
  }
  int result = wait_for(child);
  defaults();
  EQ(result, 0);
  world_close(&w);
}

static long parameter_now(const char *name) {
  char path[96], text[32] = "";
  snprintf(path, sizeof(path), "/sys/module/nvidia_uvm/parameters/%s", name);
  FILE *file = fopen(path, "r");
  if (!file || !fgets(text, sizeof(text), file)) strcpy(text, "-99");
  if (file) fclose(file);
  return atol(text);
}

/* By default all limits except per-descriptor ones apply, and depend on the machine's memory and the GPU's: 1/32 for
 * a user's page tables, half for a user's pinned host memory, 15/16 for the GPU's memory. */
static void limits_are_on(void) {
  static const struct {
    const char *name;
    long value;
  } limits[] = {{"uvm_vmem_limit_mb", 0}, {"uvm_vmem_host_limit_mb", 0}, {USER_TABLES, -1},
                {CGROUP_TABLES, -1},      {USER_HOST, -1},               {CGROUP_HOST, -1},
                {TOTAL_TABLES, -1},       {TOTAL_HOST, -1},              {GPU_TOTAL, -1}};
  for (size_t i = 0; i < ARRAY_SIZE(limits); i++) EQ(parameter_now(limits[i].name), limits[i].value);
  struct uvm_vmem_stat s;
  struct sysinfo machine;
  struct world w;
  uint32_t object, host;
  uint64_t pinned = 0;
  int error;
  OK(sysinfo(&machine));
  const uint64_t memory = machine.totalram * machine.mem_unit;
  OK(furnish(&w, &object));
  /* The number of slots that the limit allows a user, extrapolated from a few. */
  uint64_t before = table_bytes(&w);
  unsigned made = touch(&w, object, 512, &error);
  OK(error);
  double slot = (double)(table_bytes(&w) - before) / made;
  printf("BOUNDS {\"case\": \"a slot's tables\", \"bytes\": %.0f, \"slots_within_default\": %.0f, \"machine_mb\": %llu}\n", slot,
         (double)memory / 32 / slot, (unsigned long long)(memory >> 20));
  OK(vm_free(w.uvm, RES, UVM_VMEM_FREE_UNMAP));
  /* One slot in each 1 GB: the most memory for one page. */
  const uint64_t start = 1ull << 44;
  OK(vm_reserve(w.uvm, w.uuid[0], start, start, 16, 0));
  touch_each(&w, start, GIB(1), object, start / GIB(1), &error);
  EQ(error, -EDQUOT);
  CHECK(table_bytes(&w) <= memory / 32 && table_bytes(&w) > memory / 32 - KIB(32));
  OK(vm_free(w.uvm, start, UVM_VMEM_FREE_UNMAP));
  while ((error = vm_create(w.uvm, w.uuid[0], 21, 8, UVM_VMEM_CREATE_HOST, &host)) == 0) pinned += MIB(16);
  EQ(error, -EDQUOT);
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_host_bytes, pinned);
  CHECK(pinned <= memory / 2 && pinned > memory / 2 - MIB(16));
  world_close(&w);
  world_open(&w, 1);
  pinned = 0;
  for (unsigned pages = 256; pages; pages /= 4) {
    while ((error = vm_create(w.uvm, w.uuid[0], 21, pages, 0, &object)) == 0) pinned += pages * MIB(2);
  }
  EQ(error, -EDQUOT);
  EQ(pinned, w.vidmem_bytes / 16 * 15);
  world_close(&w);
}

/* A user gets only what is left of the machine's limit, whatever the user's own limit. */
static int takes_host_memory(unsigned chunks) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    struct world own;
    uint32_t host;
    world_open(&own, 1);
    if (setuid(1000)) _exit(100);
    _exit(-vm_create(own.uvm, own.uuid[0], 21, chunks, UVM_VMEM_CREATE_HOST, &host));
  }
  return wait_for(child);
}

static int takes_tables(uint64_t length) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    struct world own;
    world_open(&own, 1);
    if (setuid(1000)) _exit(100);
    _exit(-vm_reserve(own.uvm, own.uuid[0], RES, length, 16, 0));
  }
  return wait_for(child);
}

/* All users together, and all descriptors on a GPU, have their own limits. */
static void limit_of_all(void) {
  struct world a, b;
  uint32_t object, host, more;
  defaults();
  world_open(&b, 1); /* is closed last */
  OK(furnish(&a, &object));
  OK(set_parameter(TOTAL_HOST, 8));
  OK(vm_create(a.uvm, a.uuid[0], 21, 3, UVM_VMEM_CREATE_HOST, &host));
  int fits = takes_host_memory(1), above = takes_host_memory(2);
  EQ(fits, 0);
  EQ(above, EDQUOT);
  OK(vm_release(a.uvm, host));
  OK(takes_host_memory(4));
  OK(set_parameter(TOTAL_TABLES, 1));
  EQ(fill_a_megabyte(&a, object), -EDQUOT);
  EQ(takes_tables(LARGE), EDQUOT);
  OK(vm_free(a.uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(takes_tables(LARGE));
  OK(set_parameter(GPU_TOTAL, 8));
  OK(vm_create(a.uvm, a.uuid[0], 21, 2, 0, &more)); /* furnish() holds 4 MB */
  EQ(vm_create(b.uvm, b.uuid[0], 16, 1, 0, &host), -EDQUOT);
  OK(vm_release(a.uvm, more));
  OK(vm_create(b.uvm, b.uuid[0], 21, 2, 0, &host));
  EQ(vm_create(a.uvm, a.uuid[0], 21, 1, 0, &more), -EDQUOT);
  OK(vm_create(a.uvm, a.uuid[0], 21, 1, UVM_VMEM_CREATE_HOST, &more));
  world_close(&a);
  OK(vm_create(b.uvm, b.uuid[0], 21, 2, 0, &more));
  world_close(&b);
  defaults();
}

/* ---- cgroups -------------------------------------------------------------------------------------- */

#define CGROUPS "/tmp/cgroups"

static uint64_t read_number(const char *path, const char *key) {
  char line[256];
  uint64_t number = 0;
  FILE *file = fopen(path, "r");
  while (file && fgets(line, sizeof(line), file)) {
    size_t n = strlen(key);
    if (strncmp(line, key, n) == 0 && (n == 0 || line[n] == ' ')) {
      number = strtoull(line + n, NULL, 10);
      break;
    }
  }
  if (file) fclose(file);
  return number;
}

/* Creates two cgroups of version 2 with the memory controller. */
static bool make_cgroups(void) {
  static bool made;
  if (made) return true;
  mkdir(CGROUPS, 0755);
  if (mount("cgroup2", CGROUPS, "cgroup2", 0, NULL)) return false;
  if (write_file(CGROUPS "/cgroup.subtree_control", "+memory")) return false;
  made = mkdir(CGROUPS "/a", 0755) == 0 && mkdir(CGROUPS "/b", 0755) == 0;
  return made;
}

static int move_to(const char *cgroup) {
  char path[96];
  snprintf(path, sizeof(path), CGROUPS "/%s/cgroup.procs", cgroup);
  return write_file(path, "0");
}

/* Runs run() in a process of the cgroup. */
static int in_cgroup(const char *name, void (*run)(void)) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    if (move_to(name)) _exit(100);
    failures_here = 0;
    worlds_open = 0;
    run();
    fflush(stdout);
    _exit(failures_here != 0);
  }
  return wait_for(child);
}

static void fill_the_cgroup(void) {
  fill_tables(CGROUP_TABLES);
  if (!failures_here) fill_host(CGROUP_HOST);
}

/* The user's limit is reached, but it does not apply to root in a cgroup. */
static void above_the_users(void) {
  struct world w;
  uint32_t object;
  OK(furnish(&w, &object));
  OK(fill_a_megabyte(&w, object));
  world_close(&w);
}

/* Returns the errno of a RESERVE by a new process in a cgroup. */
static int reserve_in(const char *cgroup) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    struct world own;
    if (move_to(cgroup)) _exit(200);
    world_open(&own, 1);
    _exit(-vm_reserve(own.uvm, own.uuid[0], RES, LARGE, 16, 0));
  }
  return wait_for(child);
}

/* A RESERVE that the cgroup's limit refuses is not charged to the user, whose limit is not reached. */
static void refused_by_the_cgroup(void) {
  const uint64_t most = GIB(16384); /* two reservations of this size take nearly 1 MB */
  struct world roots, w;
  world_open(&roots, 1);
  for (unsigned i = 1; i < 3; i++) OK(vm_reserve(roots.uvm, roots.uuid[0], i * most, most, 16, 0));
  world_open(&w, 1);
  OK(setuid(1000));
  for (unsigned i = 0; i < 8; i++) EQ(vm_reserve(w.uvm, w.uuid[0], most, most, 16, 0), -EDQUOT);
  for (unsigned i = 1; i < 3; i++) OK(vm_free(roots.uvm, i * most, 0));
  OK(vm_reserve(w.uvm, w.uuid[0], most, most, 16, 0));
}

/* A user other than root is under both limits; the exit of the process frees the rest. */
static void below_the_users(void) {
  struct world w;
  uint32_t object;
  world_open(&w, 1);
  OK(setuid(1000));
  OK(vm_reserve(w.uvm, w.uuid[0], RES, GIB(64), 16, 0));
  OK(vm_create(w.uvm, w.uuid[0], 16, 64, 0, &object));
  EQ(fill_a_megabyte(&w, object), -EDQUOT);
}

/* A descriptor stays in the cgroup of its first command. */
static void moves_away(void) {
  struct world w;
  uint32_t object;
  OK(furnish(&w, &object));
  OK(move_to("b"));
  EQ(fill_a_megabyte(&w, object), -EDQUOT);
  EQ(reserve_in("a"), EDQUOT);
  EQ(reserve_in("b"), 0);
  world_close(&w);
}

static int say_to, hear_from;

/* Uses up the cgroup's limit, and holds it until told to stop. */
static void hold_and_say(void) {
  struct world w;
  uint32_t object;
  char byte;
  OK(furnish(&w, &object));
  EQ(fill_a_megabyte(&w, object), -EDQUOT);
  if (write(say_to, "", 1) != 1 || read(hear_from, &byte, 1) < 0) fail("the pipe");
  world_close(&w);
}

static void limit_of_a_cgroup(void) {
  defaults();
  int ready[2], go[2];
  char byte;
  if (!make_cgroups()) SKIP("the kernel has no memory cgroups");
  EQ(in_cgroup("a", fill_the_cgroup), 0);
  OK(set_parameter(USER_TABLES, 1));
  int result = in_cgroup("a", above_the_users), user = in_cgroup("a", below_the_users);
  defaults();
  EQ(result, 0);
  EQ(user, 0);
  OK(set_parameter(CGROUP_TABLES, 1));
  OK(set_parameter(USER_TABLES, 1));
  result = in_cgroup("a", refused_by_the_cgroup);
  defaults();
  EQ(result, 0);
  OK(set_parameter(CGROUP_TABLES, 1));
  result = in_cgroup("a", moves_away);
  defaults();
  EQ(result, 0);
  /* One cgroup is full, the other has its own limit. */
  OK(pipe(ready));
  OK(pipe(go));
  say_to = ready[1];
  hear_from = go[0];
  OK(set_parameter(CGROUP_TABLES, 1));
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    close(go[1]);
    _exit(in_cgroup("a", hold_and_say));
  }
  close(ready[1]);
  int heard = read(ready[0], &byte, 1) == 1;
  int other = reserve_in("b");
  close(go[1]);
  close(go[0]);
  close(ready[0]);
  result = wait_for(child);
  defaults();
  EQ(heard, 1);
  EQ(other, 0);
  EQ(result, 0);
}

/* STAT's kernel memory agrees with what the memory cgroup was charged. */
static void compare_with_the_cgroup(void) {
  enum { SLOTS = 8192 };
  static struct uvm_vmem_op ops[512];
  struct uvm_vmem_stat before, after;
  struct world w;
  uint32_t object;
  OK(furnish(&w, &object));
  OK(vm_stat(w.uvm, NULL, &before));
  uint64_t charged = read_number(CGROUPS "/a/memory.current", "");
  for (unsigned i = 0; i < SLOTS; i += ARRAY_SIZE(ops)) {
    for (unsigned j = 0; j < ARRAY_SIZE(ops); j++) ops[j] = op_map(RES + (i + j) * SLOT, object, j % 64, 1, 0);
    OK(vm_bind(w.uvm, RES, ops, ARRAY_SIZE(ops), NULL, NULL));
  }
  OK(vm_stat(w.uvm, NULL, &after));
  uint64_t own = after.out_kernel_bytes - before.out_kernel_bytes;
  uint64_t more = read_number(CGROUPS "/a/memory.current", "") - charged;
  printf("%u slots: %llu bytes of our own, %llu more in the cgroup, %llu counted\n", SLOTS, (unsigned long long)own,
         (unsigned long long)more, (unsigned long long)(after.out_table_bytes - before.out_table_bytes));
  CHECK(own > SLOTS * 256ull);
  CHECK(more >= own * 9 / 10);
  world_close(&w);
}

/* The memory cgroup is full: ENOMEM, nothing is changed, and no process is killed. */
static void until_the_cgroup_is_full(void) {
  enum { SLOTS = 16384 };
  static struct uvm_vmem_op ops[SLOTS];
  struct uvm_vmem_stat before, after;
  struct world w;
  uint32_t object;
  char text[32];
  OK(furnish(&w, &object));
  for (unsigned i = 0; i < SLOTS; i++) ops[i] = op_map(RES + i * SLOT, object, i % 64, 1, 0);
  snprintf(text, sizeof(text), "%llu", (unsigned long long)(read_number(CGROUPS "/b/memory.current", "") + MIB(4)));
  OK(write_file(CGROUPS "/b/memory.max", text));
  OK(vm_stat(w.uvm, NULL, &before));
  int result = vm_bind(w.uvm, RES, ops, SLOTS, NULL, NULL);
  OK(vm_stat(w.uvm, NULL, &after));
  OK(write_file(CGROUPS "/b/memory.max", "max"));
  EQ(result, -ENOMEM);
  CHECK(stat_same(&before, &after));
  EQ(read_number(CGROUPS "/b/memory.events", "oom_kill"), 0);
  OK(vm_bind(w.uvm, RES, ops, 64, NULL, NULL));
  world_close(&w);
}

static void charged_to_the_cgroup(void) {
  defaults();
  if (!make_cgroups()) SKIP("the kernel has no memory cgroups");
  EQ(in_cgroup("a", compare_with_the_cgroup), 0);
  EQ(in_cgroup("b", until_the_cgroup_is_full), 0);
}

/* ---- locks ---------------------------------------------------------------------------------------- */

struct call {
  pthread_t thread;
  int (*run)(void);
  int result;
  volatile bool returned;
  long switches; /* how often the thread went to sleep */
};

static void *call_thread(void *argument) {
  struct call *c = argument;
  struct rusage usage;
  c->result = c->run();
  c->switches = getrusage(RUSAGE_THREAD, &usage) ? -1 : usage.ru_nvcsw;
  c->returned = true;
  return NULL;
}

static void call_start(struct call *c, int (*run)(void)) {
  *c = (struct call){.run = run};
  if (pthread_create(&c->thread, NULL, call_thread, c)) abort();
}

static int call_join(struct call *c) {
  pthread_join(c->thread, NULL);
  return c->result;
}

static int bind_first_touch(void) { return vm_map(W.uvm, RES, RES + MIB(8), the_object, 0, 4, 0); }
static int bind_steady(void) { return vm_map(W.uvm, RES, RES, the_object, 8, 4, UVM_VMEM_OP_REPLACE); }
static int create_pages(void) { return vm_create(W.uvm, W.uuid[0], 16, 64, 0, &the_other); }
static int free_mapped(void) { return vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP); }
static int reserve_eager(void) { return vm_reserve(W.uvm, W.uuid[0], RES + GIB(512), MIB(64), 16, UVM_VMEM_RESERVE_EAGER); }

/* Releases memory whose unmap is in flight. */
static int release_host(void) { return vm_release(W.uvm, the_other); }
static int release_gpu(void) { return vm_release(W.uvm, the_other); }

/* An ASYNC batch that removes the last mapping of a released object. */
static int bind_the_last(void) {
  struct uvm_vmem_op op = op_unmap(RES + MIB(4), 32, 0);
  uint64_t ticket;
  int result = vm_bind(W.uvm, RES, &op, 1, NULL, &ticket);
  return result ? result : vm_wait(W.uvm, ticket, FOREVER);
}

/* Other calls: together they need each of the locks, but never the GPU. */
static int others(void) {
  struct uvm_vmem_stat s;
  int result = vm_reserve(W.uvm, W.uuid[0], OTHER, GIB(2), 16, 0);
  if (!result) result = vm_stat(W.uvm, W.uuid[0], &s);
  if (!result) result = vm_free(W.uvm, OTHER, 0);
  return result;
}

static const struct {
  const char *name;
  int (*run)(void);
} waiters[] = {{"BIND, new tables", bind_first_touch}, {"BIND", bind_steady},        {"CREATE", create_pages},
               {"RESERVE, eager", reserve_eager},      {"RELEASE", release_host},    {"FREE", free_mapped},
               {"RELEASE of GPU memory", release_gpu}, {"BIND that empties a chunk", bind_the_last}};

/* The engine is stopped: a call waits for it, but other calls do not wait for that call. */
static void no_lock_while_the_gpu_works(void) {
  defaults();
  for (size_t i = 0; i < ARRAY_SIZE(waiters); i++) {
    struct call waiter, other;
    uint64_t ticket = 0;
    uint32_t host, chunk;
    OK(furnish(&W, &the_object));
    OK(vm_create(W.uvm, W.uuid[0], 16, 4, UVM_VMEM_CREATE_HOST, &host));
    OK(vm_map(W.uvm, RES, RES, the_object, 0, 8, 0));
    OK(vm_map(W.uvm, RES, RES + MIB(1), host, 0, 4, 0));
    OK(vm_create(W.uvm, W.uuid[0], 21, 1, 0, &chunk));
    OK(vm_map(W.uvm, RES, RES + MIB(4), chunk, 0, 1, 0));
    if (waiters[i].run == bind_the_last) OK(vm_release(W.uvm, chunk));
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
    if (waiters[i].run == release_host || waiters[i].run == release_gpu) {
      const bool in_host = waiters[i].run == release_host;
      struct uvm_vmem_op op = op_unmap(RES + (in_host ? MIB(1) : MIB(4)), in_host ? 4 : 32, 0);
      OK(vm_bind(W.uvm, RES, &op, 1, NULL, &ticket));
      the_other = in_host ? host : chunk;
    }
    call_start(&waiter, waiters[i].run);
    sleep_ms(A_WHILE);
    bool waits = !waiter.returned;
    call_start(&other, others);
    for (unsigned tries = 0; tries < 200 && !other.returned; tries++) sleep_ms(50);
    bool went_on = other.returned;
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
    OK(call_join(&waiter));
    OK(call_join(&other));
    if (!waits) fail("%s did not wait for the GPU", waiters[i].name);
    if (!went_on) fail("%s kept others waiting", waiters[i].name);
    if (ticket) OK(vm_wait(W.uvm, ticket, FOREVER));
    world_close(&W);
    if (failures_here) return;
  }
}

static int uvm_free_it(void) { return softgpu_uvm_free(&W.c, RES, GIB(64)); }

/* Freeing a reservation waits only for the call that has claimed it. */
static void uvm_free_waits_for_a_bind(void) {
  struct call bind, gone, create;
  OK(furnish(&W, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&bind, bind_first_touch);
  sleep_ms(A_WHILE);
  call_start(&gone, uvm_free_it);
  sleep_ms(A_WHILE);
  bool early = gone.returned;
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&bind));
  OK(call_join(&gone));
  CHECK(!early);
  EQ(gpu_check(&W, 0, RES + MIB(8), 8, 0, 0), -EFAULT);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, GIB(64), 16, 0));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  call_start(&create, create_pages);
  sleep_ms(A_WHILE);
  call_start(&gone, uvm_free_it);
  for (unsigned tries = 0; tries < 200 && !gone.returned; tries++) sleep_ms(50);
  bool went_on = gone.returned;
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(call_join(&create));
  OK(call_join(&gone));
  CHECK(went_on);
  world_close(&W);
}

/* One hold of the lock covers a bounded number of units, even in calls on many times as many. */
static void locks_are_let_go(void) {
  enum { PAGES = 2048, TIMES = 16 }; /* 32,768 units */
  struct uvm_vmem_op ops[TIMES];
  struct uvm_vmem_stat s;
  uint32_t many;
  OK(furnish(&W, &the_object));
  OK(vm_create(W.uvm, W.uuid[0], 16, PAGES, 0, &many));
  for (unsigned i = 0; i < TIMES; i++) ops[i] = op_map(RES + i * PAGES * UNIT, many, 0, PAGES, 0);
  OK(vm_bind(W.uvm, RES, ops, TIMES, NULL, NULL));
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_mapped_bytes, TIMES * PAGES * UNIT);
  printf("BOUNDS {\"case\": \"map 32,768 units\", \"most_units\": %llu}\n", (unsigned long long)s.out_most_units);
  CHECK(s.out_most_units > 0 && s.out_most_units <= 4096);
  OK(vm_unmap(W.uvm, RES, RES, TIMES * PAGES, 0));
  OK(vm_bind(W.uvm, RES, ops, TIMES, NULL, NULL));
  OK(vm_release(W.uvm, many));
  OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(vm_stat(W.uvm, NULL, &s));
  EQ(s.out_created_bytes, 64 * UNIT);
  /* One object of more units than one hold may cover. */
  OK(vm_create(W.uvm, W.uuid[0], 16, 6144, 0, &many));
  OK(vm_release(W.uvm, many));
  OK(vm_stat(W.uvm, NULL, &s));
  printf("BOUNDS {\"case\": \"and unmap, free, release\", \"most_units\": %llu}\n", (unsigned long long)s.out_most_units);
  CHECK(s.out_most_units <= 4096);
  world_close(&W);
}

/* Many slots, freed by FREE and by close. SLOTS=1048576 for a million. */
static void many_slots(void) {
  defaults();
  const unsigned slots = parameter("SLOTS", 4096);
  for (int by_close = 0; by_close < 2; by_close++) {
    static struct uvm_vmem_op ops[1024];
    struct uvm_vmem_stat s;
    uint32_t object;
    world_open(&W, 1);
    OK(set_parameter(USER_TABLES, 0));
    OK(set_parameter(TOTAL_TABLES, 0));
    OK(vm_reserve(W.uvm, W.uuid[0], RES, slots * SLOT, 16, 0));
    OK(vm_create(W.uvm, W.uuid[0], 16, 64, 0, &object));
    for (unsigned i = 0; i < slots; i += ARRAY_SIZE(ops)) {
      for (unsigned j = 0; j < ARRAY_SIZE(ops); j++) ops[j] = op_map(RES + (i + j) * SLOT, object, j % 64, 1, 0);
      OK(vm_bind(W.uvm, RES, ops, ARRAY_SIZE(ops), NULL, NULL));
    }
    OK(vm_stat(W.uvm, NULL, &s));
    struct softgpu_counters before = gpu_counters(&W, 0);
    if (!by_close) {
      OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
      struct softgpu_counters d = gpu_counters_since(&W, 0, &before);
      OK(vm_stat(W.uvm, NULL, &s));
      printf("BOUNDS {\"case\": \"FREE of %u slots\", \"pushes\": %llu, \"invalidates\": %llu, \"most_units\": %llu}\n",
             slots, (unsigned long long)d.pushes, (unsigned long long)d.invalidates, (unsigned long long)s.out_most_units);
      CHECK(s.out_most_units <= 4096);
      EQ(s.out_table_bytes, 0);
    }
    world_close(&W);
  }
  defaults();
}

/* ---- sparse slots --------------------------------------------------------------------------------- */

static int make_sparse(uint64_t start, uint64_t length) { return vm_unmap(W.uvm, RES + MIB(2), start, length / UNIT, UVM_VMEM_OP_SPARSE); }

static uint64_t sparse_units(void) { return gpu_scan(&W, 0, RES, GIB(65)).out_sparse; }

/* Fully sparse slots share one table; each gets its own when a page is mapped in it. The reservation begins 2 MB after
 * a 512 MB boundary. */
static void sparse_slots_share(void) {
  const uint64_t base = RES + MIB(2);
  struct uvm_vmem_stat before, after;
  uint32_t page, large;
  defaults();
  for (int big = 0; big < 2; big++) {
    world_open(&W, 1);
    OK(vm_reserve(W.uvm, W.uuid[0], base, GIB(64), 16, big ? UVM_VMEM_RESERVE_BIG : 0));
    OK(vm_create(W.uvm, W.uuid[0], 16, 8, 0, &page));
    OK(vm_create(W.uvm, W.uuid[0], 21, 1, 0, &large));
    OK(vm_map(W.uvm, base, base + MIB(4), page, 0, 1, 0)); /* gets its own table, which is kept */
    OK(vm_stat(W.uvm, NULL, &before));
    struct softgpu_counters gpu = gpu_counters(&W, 0);
    OK(make_sparse(base, GIB(64)));
    struct softgpu_counters d = gpu_counters_since(&W, 0, &gpu);
    OK(vm_stat(W.uvm, NULL, &after));
    EQ(after.out_slots, GIB(64) / SLOT);
    EQ(sparse_units(), GIB(64) / UNIT);
    printf("BOUNDS {\"case\": \"64 GB become sparse%s\", \"table_bytes\": %llu, \"kernel_bytes\": %llu, \"pushes\": %llu, "
           "\"invalidates\": %llu}\n",
           big ? ", BIG" : "", (unsigned long long)(after.out_table_bytes - before.out_table_bytes),
           (unsigned long long)(after.out_kernel_bytes - before.out_kernel_bytes), (unsigned long long)d.pushes,
           (unsigned long long)d.invalidates);
    CHECK(after.out_table_bytes - before.out_table_bytes < 100 * (GIB(64) / SLOT));
    OK(gpu_check(&W, 0, base, MIB(1), 0, 0));
    OK(gpu_fill(&W, 0, base + GIB(63), MIB(1), 1, 1));
    OK(gpu_check(&W, 0, base + GIB(63), MIB(1), 0, 0));
    /* One page in each of three slots, next to a slot that already had a table. */
    struct uvm_vmem_op ops[4] = {op_map(base, page, 1, 1, 0), op_map(base + MIB(4) + 3 * UNIT, page, 2, 1, 0),
                                 op_map(base + GIB(32) + 31 * UNIT, page, 3, 1, 0),
                                 op_map(base + GIB(64) - UNIT, page, 4, 1, 0)};
    OK(vm_bind(W.uvm, base, ops, 4, NULL, NULL));
    for (unsigned i = 0; i < 4; i++) OK(gpu_fill(&W, 0, ops[i].addr, UNIT, 7 + i, 0));
    for (unsigned i = 0; i < 4; i++) OK(gpu_check(&W, 0, ops[i].addr, UNIT, 7 + i, 0));
    OK(gpu_check(&W, 0, base + UNIT, MIB(2) - UNIT, 0, 0));
    EQ(sparse_units(), GIB(64) / UNIT - 4);
    OK(vm_stat(W.uvm, NULL, &after));
    EQ(after.out_slots, GIB(64) / SLOT);
    /* Map one slot entirely, unmap another, and half of a third; then make all sparse again. */
    OK(vm_map(W.uvm, base, base + MIB(32), large, 0, 1, 0));
    EQ(gpu_xlate(&W, 0, base + MIB(32)).out_page_size, UNIT); /* 64 KB PTEs: readers of the sparse slot must never fault */
    OK(vm_unmap(W.uvm, base, base + MIB(34), 32, 0));
    OK(vm_unmap(W.uvm, base, base + MIB(36), 16, 0));
    EQ(gpu_check(&W, 0, base + MIB(34), 8, 0, 0), -EFAULT);
    EQ(gpu_check(&W, 0, base + MIB(36), 8, 0, 0), -EFAULT);
    OK(gpu_check(&W, 0, base + MIB(37), MIB(1), 0, 0));
    EQ(sparse_units(), GIB(64) / UNIT - 4 - 32 - 32 - 16);
    OK(make_sparse(base + MIB(32), MIB(6)));
    EQ(sparse_units(), GIB(64) / UNIT - 4);
    OK(gpu_check(&W, 0, base + MIB(32), MIB(6), 0, 0));
    /* A failure leaves the sparse PTEs in place. */
    static struct uvm_vmem_op many[4096];
    for (unsigned i = 0; i < ARRAY_SIZE(many); i++) many[i] = op_map(base + GIB(1) + i * SLOT, page, i % 8, 1, 0);
    OK(vm_stat(W.uvm, NULL, &before));
    OK(set_parameter(USER_TABLES, 3));
    int result = vm_bind(W.uvm, base, many, ARRAY_SIZE(many), NULL, NULL);
    defaults();
    EQ(result, -EDQUOT);
    OK(vm_stat(W.uvm, NULL, &after));
    CHECK(stat_same(&before, &after));
    EQ(sparse_units(), GIB(64) / UNIT - 4);
    OK(gpu_check(&W, 0, base + GIB(1), MIB(16), 0, 0));
    OK(vm_bind(W.uvm, base, many, 64, NULL, NULL));
    OK(gpu_check(&W, 0, base + GIB(1) + UNIT, MIB(2) - UNIT, 0, 0));
    /* A second reservation uses the same shared table; the first is freed. */
    OK(vm_reserve(W.uvm, W.uuid[0], OTHER, GIB(1), 16, 0));
    OK(vm_unmap(W.uvm, OTHER, OTHER, GIB(1) / UNIT, UVM_VMEM_OP_SPARSE));
    gpu = gpu_counters(&W, 0);
    OK(vm_free(W.uvm, base, UVM_VMEM_FREE_UNMAP));
    d = gpu_counters_since(&W, 0, &gpu);
    printf("BOUNDS {\"case\": \"FREE of 64 GB, nearly all sparse%s\", \"pushes\": %llu}\n", big ? ", BIG" : "",
           (unsigned long long)d.pushes);
    EQ(gpu_check(&W, 0, base + GIB(2), 8, 0, 0), -EFAULT);
    OK(gpu_check(&W, 0, OTHER, MIB(4), 0, 0));
    world_close(&W);
  }
}

/* ---- waiting -------------------------------------------------------------------------------------- */

static uint64_t the_ticket;
static int wait_for_ticket(void) { return vm_wait(W.uvm, the_ticket, FOREVER); }

static uint64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

/* A waiter sleeps for increasing times, up to 10 ms, which bounds the number of sleeps. */
static void waiting_sleeps(void) {
  for (int synchronous = 0; synchronous < 2; synchronous++) {
    struct call waiter;
    OK(furnish(&W, &the_object));
    OK(vm_map(W.uvm, RES, RES, the_object, 0, 8, 0));
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
    if (!synchronous) {
      struct uvm_vmem_op op = op_map(RES, the_object, 8, 4, UVM_VMEM_OP_REPLACE);
      OK(vm_bind(W.uvm, RES, &op, 1, NULL, &the_ticket));
      CHECK(the_ticket);
    }
    uint64_t start = now_ms();
    call_start(&waiter, synchronous ? bind_steady : wait_for_ticket);
    sleep_ms(2000);
    OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
    OK(call_join(&waiter));
    uint64_t took = now_ms() - start;
    printf("%s: %ld sleeps in %llu ms\n", synchronous ? "BIND" : "WAIT", waiter.switches, (unsigned long long)took);
    CHECK(waiter.switches > 0);
    CHECK(waiter.switches <= 200 + (long)took / 8);
    world_close(&W);
  }
}

/* ---- a process that is killed --------------------------------------------------------------------- */

/* The calls below would map these pages of the object: 8 to 11 at RES (BIND), 0 to 3 at RES + 8 MB (a first touch), 20
 * at RES + 16 MB (behind another call). */
#define FIRST_TOUCH (RES + MIB(8))
#define BEHIND (RES + MIB(16))

static int bind_behind(void) { return vm_map(W.uvm, RES, BEHIND, the_object, 20, 1, 0); }
static int create_many(void) { return vm_create(W.uvm, W.uuid[0], 21, 256, 0, &the_other); }
static int reserve_many(void) { return vm_reserve(W.uvm, W.uuid[0], OTHER, GIB(16), 16, UVM_VMEM_RESERVE_EAGER); }

/* Stops the GPU while another call has claimed the reservation. */
static int stands_and_is_taken(void) {
  static struct call first;
  int result = softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH);
  call_start(&first, bind_first_touch);
  sleep_ms(A_WHILE);
  return result ? result : first.returned;
}

static int stands(void) { return softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH); }

static int stands_with_a_ticket(void) {
  struct uvm_vmem_op op = op_map(RES, the_object, 8, 4, UVM_VMEM_OP_REPLACE);
  int result = stands();
  return result ? result : vm_bind(W.uvm, RES, &op, 1, NULL, &the_ticket);
}

/* Delays each allocation by 50 ms. */
static int slow(void) { return softgpu_inject(W.dev, "PmaAllocPages", 0, 0, 0, 0, 50000); }

static const struct killed {
  const char *name;
  int (*before)(void);
  int (*run)(void);
  bool at_once;     /* the killed call ends although the GPU is stopped */
  bool committed;   /* whether RES finally maps the new pages */
  bool first_touch; /* and FIRST_TOUCH maps the pages of the earlier call */
} killed[] = {
    {"BIND", stands, bind_steady, true, true, false},
    {"WAIT", stands_with_a_ticket, wait_for_ticket, true, true, false},
    {"CREATE", slow, create_many, true, false, false},
    {"RESERVE, eager", stands, reserve_many, false, false, false},
    {"BIND behind another", stands_and_is_taken, bind_behind, true, false, true},
    {"FREE behind a BIND", stands_and_is_taken, free_mapped, true, false, true},
};

/* The child's report about itself. */
struct told {
  struct softgpu_space space;
  uint64_t old_pa, new_pa; /* addresses of the page at RES and of the page that BIND (or the ticket) maps there */
};

static void killed_child(const struct killed *k, int ready, int gate) {
  struct told told;
  char byte;
  if (furnish(&W, &the_object) || vm_map(W.uvm, RES, RES, the_object, 0, 16, 0)) _exit(1);
  told.space = W.c.space[0];
  told.old_pa = gpu_xlate(&W, 0, RES).out_pa;
  told.new_pa = gpu_xlate(&W, 0, RES + 8 * UNIT).out_pa;
  if (k->before()) _exit(2);
  if (fork() == 0) { /* keeps the descriptor open until the gate closes, so that nothing is dismantled */
    if (read(gate, &byte, 1) < 0) _exit(1);
    _exit(0);
  }
  if (write(ready, &told, sizeof(told)) != sizeof(told)) _exit(3);
  k->run();
  _exit(4);
}

/* Returns true if the page tables have this entry, now or soon. */
static bool comes_to(int dev, struct softgpu_space space, uint64_t va, bool valid, uint64_t pa) {
  for (unsigned tries = 0; tries < 100; tries++) {
    struct softgpu_xlate x;
    if (softgpu_xlate(dev, space, va, &x)) return false;
    if (x.out_valid == valid && (!valid || !pa || x.out_pa == pa)) return true;
    sleep_ms(50);
  }
  return false;
}

/* Kills a process that is in a call. *result: the call's result, which the process no longer sees. false: the call did
 * not end. */
static bool kill_in_a_call(pid_t pid, bool (*meanwhile)(void *), void *argument, long long *result) {
  struct user_regs_struct registers;
  int status;
  *result = 0;
  if (ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT)) return false;
  kill(pid, SIGKILL);
  for (unsigned tries = 0; tries < 200; tries++) {
    pid_t stopped = waitpid(pid, &status, WNOHANG | __WALL);
    if (stopped == pid && status >> 8 == (SIGTRAP | PTRACE_EVENT_EXIT << 8)) {
      if (ptrace(PTRACE_GETREGS, pid, 0, &registers)) return false;
      *result = (long long)registers.rax;
      return ptrace(PTRACE_CONT, pid, 0, 0) == 0;
    }
    if (meanwhile && !meanwhile(argument)) return false;
    sleep_ms(50);
  }
  return false;
}

static bool goes_on_again(void *dev) { return softgpu_hold(*(int *)dev, 0, SOFTGPU_HOLD_RELEASE) == 0; }

/* A call that waits when its process is killed ends with EINTR, if possible even while the GPU is stopped. A batch that
 * was sent is still carried out; a call that waited for another call has changed nothing. */
static void killed_calls(void) {
  for (size_t i = 0; i < ARRAY_SIZE(killed); i++) {
    const struct killed *k = &killed[i];
    struct softgpu_counters base;
    struct told told;
    long long result;
    int dev = softgpu_open(), ready[2], gate[2], status = 0;
    OK(softgpu_counters(dev, 0, &base));
    OK(pipe(ready));
    OK(pipe(gate));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
      close(gate[1]);
      close(dev);
      killed_child(k, ready[1], gate[0]);
    }
    close(ready[1]);
    close(gate[0]);
    EQ(read(ready[0], &told, sizeof(told)), sizeof(told));
    sleep_ms(2 * A_WHILE);
    bool ended = kill_in_a_call(child, k->at_once ? NULL : goes_on_again, &dev, &result);
    OK(softgpu_hold(dev, 0, SOFTGPU_HOLD_RELEASE));
    softgpu_inject_clear(dev);
    if (!ended) fail("%s did not end", k->name);
    if (ended && result != -EINTR) fail("%s: %lld, should be %d", k->name, result, -EINTR);
    waitpid(child, &status, __WALL);
    if (WIFSTOPPED(status)) {
      ptrace(PTRACE_CONT, child, 0, 0);
      waitpid(child, &status, __WALL);
    }
    if (!WIFSIGNALED(status)) fail("%s: status 0x%x", k->name, status);
    if (!comes_to(dev, told.space, RES, true, k->committed ? told.new_pa : told.old_pa)) fail("%s: the wrong page", k->name);
    if (!comes_to(dev, told.space, FIRST_TOUCH, k->first_touch, 0)) fail("%s: not the call before", k->name);
    if (!comes_to(dev, told.space, BEHIND, false, 0)) fail("%s was carried out", k->name);
    close(gate[1]);
    close(ready[0]);
    gpu_check_clean(dev, 0, &base, true);
    close(dev);
    if (failures_here) return;
  }
}

MAIN(TEST(limits_are_on), TEST(what_counts), TEST(limit_of_a_user), TEST(limit_of_all), TEST(whose_limit),
     TEST(limit_of_a_cgroup), TEST(charged_to_the_cgroup), TEST(no_lock_while_the_gpu_works), TEST(uvm_free_waits_for_a_bind),
     TEST(locks_are_let_go), TEST(many_slots), TEST(sparse_slots_share), TEST(waiting_sleeps), TEST(killed_calls))
