/* SPDX-License-Identifier: MIT */
/*
 * What an administrator sees when something goes wrong: the kernel log after a fatal fault, the dump of a reservation in
 * /proc/driver/nvidia-uvm/vmem_dump, the tracepoints.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define DUMP_FILE "/proc/driver/nvidia-uvm/vmem_dump"

static struct world W;

/* Opens the kernel log at its end. */
static int log_open(void) {
  int fd = open("/dev/kmsg", O_RDONLY | O_NONBLOCK);
  if (fd >= 0) lseek(fd, 0, SEEK_END);
  return fd;
}

/* Waits a while for the next line that contains `what`. Returns false if none came. */
static bool log_line(int fd, const char *what, char *line, size_t size) {
  for (unsigned tries = 0; tries < 100;) {
    ssize_t n = read(fd, line, size - 1);
    if (n <= 0) {
      if (n < 0 && errno == EPIPE) continue; /* lines were overwritten */
      sleep_ms(20);
      tries++;
      continue;
    }
    line[n] = 0;
    if (strstr(line, what)) return true;
  }
  return false;
}

/* Makes an access that UVM cancels; the log line about it must contain all of `wanted`. */
static void faults(int log, uint64_t va, bool write, int errno_of_it, const char *const *wanted) {
  struct softgpu_counters before = gpu_counters(&W, 0);
  char line[2048];
  EQ(softgpu_touch(W.dev, W.c.space[0], va, write), errno_of_it);
  for (unsigned tries = 0; tries < 250 && gpu_counters(&W, 0).faults_cancelled == before.faults_cancelled; tries++) sleep_ms(20);
  struct softgpu_counters after = gpu_counters(&W, 0);
  EQ(after.faults_cancelled, before.faults_cancelled + 1);
  EQ(after.faults_waiting_now, 0);
  if (!wanted) {
    CHECK(!log_line(log, "nvidia-uvm: vmem: ", line, sizeof(line)));
    return;
  }
  CHECK(log_line(log, "nvidia-uvm: vmem: ", line, sizeof(line)));
  for (; *wanted; wanted++) {
    if (!strstr(line, *wanted)) fail("no \"%s\" in: %s", *wanted, line);
  }
}

static void fatal_faults(void) {
  char process[64];
  uint32_t object;
  int log = log_open();
  CHECK(log >= 0);
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 8, 0, &object));
  EQ(softgpu_touch(W.dev, W.c.space[0], RES, false), -ENODEV); /* without a channel no fault can be reported */
  OK(softgpu_uvm_register_channel(&W.c, 0));
  snprintf(process, sizeof(process), "process %d (diagnose): ", getpid());
  faults(log, RES + MIB(3) + 0x123, false, -EFAULT,
         (const char *const[]){process, "read at 0x7c0000300000 ", "reservation 0x7c0000000000-0x7c0003ffffff", "never bound",
                               "last batch: none", NULL});
  OK(vm_map(W.uvm, RES, RES, object, 0, 4, 0));
  struct uvm_vmem_op ops[2] = {op_map(RES + 4 * UNIT, object, 4, 2, UVM_VMEM_OP_READ_ONLY), op_unmap(RES + 16 * UNIT, 2, 0)};
  OK(vm_bind(W.uvm, RES, ops, 2, NULL, NULL));
  faults(log, RES + 20 * UNIT, true, -EFAULT,
         (const char *const[]){process, "write at 0x7c0000140000 ", "there: nothing mapped",
                               "2 operations on 0x7c0000040000-0x7c000011ffff", " us ago", NULL});
  faults(log, RES + 5 * UNIT, true, -EROFS,
         (const char *const[]){process, "write at 0x7c0000050000 ", "there: a read-only page", "last batch: 2 of thread", NULL});
  faults(log, RES + GIB(1), false, -EFAULT, NULL); /* not in our reservation: left to UVM and the resource manager */
  /* The reservation still works. */
  OK(gpu_check(&W, 0, RES, 6 * UNIT, 0, 0));
  OK(vm_map(W.uvm, RES, RES + 20 * UNIT, object, 7, 1, 0));
  OK(softgpu_touch(W.dev, W.c.space[0], RES + 20 * UNIT, true));
  world_close(&W);
  close(log);
}

/* A process's name can neither end a line nor look like two words. (/dev/kmsg shows a backslash as \x5c.) */
static void name_in_the_log(void) {
  uint32_t object;
  int log = log_open(), status = -1;
  CHECK(log >= 0);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    failures_here = 0;
    prctl(PR_SET_NAME, "a\nb \033c");
    world_open(&W, 1);
    bool good = vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0) == 0 && vm_create(W.uvm, W.uuid[0], 16, 8, 0, &object) == 0 &&
                softgpu_uvm_register_channel(&W.c, 0) == 0;
    if (good) faults(log, RES + MIB(3), false, -EFAULT, (const char *const[]){" (a\\x5c012b\\x5c040\\x5c033c): read at ", NULL});
    fflush(stdout);
    _exit(!good || failures_here);
  }
  EQ(waitpid(child, &status, 0), child);
  EQ(status, 0);
  close(log);
}

static void *closes(void *unused) {
  (void)unused;
  close(W.c.uvm);
  return NULL;
}

/* The descriptor is closed while UVM services an earlier fault: the log line must not read the reservation's contents,
 * which are being freed. */
static void fault_at_the_end(void) {
  struct softgpu_injected injected = {0};
  char line[2048];
  pthread_t thread;
  uint32_t object;
  int log = log_open();
  CHECK(log >= 0);
  world_open_as(&W, 1, softgpu_client_open_shared); /* otherwise the address space is destroyed first */
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 8, 0, &object));
  OK(vm_map(W.uvm, RES, RES, object, 0, 1, 0));
  OK(vm_release(W.uvm, object));
  OK(softgpu_uvm_register_channel(&W.c, 0));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_QUIET));
  EQ(softgpu_touch(W.dev, W.c.space[0], RES + UNIT, false), -EFAULT);
  OK(softgpu_inject(W.dev, "PmaFreePages", 0, 0, 0, 0, 3000000));
  OK(pthread_create(&thread, NULL, closes, NULL));
  for (unsigned tries = 0; tries < 500 && !injected.out_calls; tries++) {
    sleep_ms(20);
    OK(softgpu_injected(W.dev, &injected));
  }
  CHECK(injected.out_calls); /* memory of the reservation is being freed */
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  bool said = log_line(log, "nvidia-uvm: vmem: ", line, sizeof(line));
  OK(softgpu_inject_clear(W.dev));
  OK(pthread_join(thread, NULL));
  CHECK(said);
  if (!strstr(line, "there: a batch is under way")) fail("it looked at what is being freed: %s", line);
  W.c.uvm = -1;
  world_close(&W);
  close(log);
}

/* Reads the file after writing `selection` to it. Returns the length, or a negative errno. */
static int dump(const char *selection, char *text, size_t size) {
  size_t have = 0;
  ssize_t n = 0;
  int fd = open(DUMP_FILE, O_RDWR);
  if (fd < 0) return -errno;
  if (selection && write(fd, selection, strlen(selection)) < 0) {
    int error = errno;
    close(fd);
    return -error;
  }
  while (have + 1 < size && (n = read(fd, text + have, size - 1 - have)) > 0) have += n;
  int error = errno;
  close(fd);
  text[have] = 0;
  return n < 0 ? -error : (int)have;
}

static char text[1 << 20];

static int dump_of(uint64_t address) {
  char selection[64];
  snprintf(selection, sizeof(selection), "%d 0x%llx\n", getpid(), (unsigned long long)address);
  return dump(selection, text, sizeof(text));
}

enum { SLOTS = 40 };

/* The dump's entry of each unit. */
struct said {
  bool mapped, sparse, read_only;
  unsigned handle, object_unit;
  uint64_t pa;
};

static struct said said[SLOTS * 32];

/* Parses the dump into `said`. Returns the number of slots in it, or -1. */
static int parse(uint64_t start) {
  int slots = 0;
  unsigned base = 0;
  memset(said, 0, sizeof(said));
  char *copy = strdup(text), *rest = copy;
  for (char *line; (line = strsep(&rest, "\n"));) {
    unsigned long long number, at;
    unsigned first, last;
    if (sscanf(line, "slot %llu 0x%llx:", &number, &at) == 2) {
      if (at != start + number * SLOT || number >= SLOTS) slots = -1000;
      base = number * 32;
      slots++;
    } else if (sscanf(line, "  units %u-%u: ", &first, &last) == 2) {
      struct said s = {.sparse = strstr(line, ": sparse") != NULL, .read_only = strstr(line, ", read-only") != NULL};
      unsigned long long pa = 0;
      const char *place = strrchr(line, ':');
      const char *handle = strstr(line, "handle 0x"), *units = strstr(line, ", its units ");
      s.mapped = handle != NULL;
      if (s.mapped && (!units || sscanf(handle, "handle 0x%x", &s.handle) != 1 ||
                       sscanf(units, ", its units %u-", &s.object_unit) != 1 || sscanf(place, ":0x%llx", &pa) != 1)) {
        slots = -1000;
      }
      for (unsigned unit = first; unit <= last && last < 32; unit++) {
        said[base + unit] = s;
        said[base + unit].object_unit += unit - first;
        said[base + unit].pa = pa + (unit - first) * UNIT;
      }
    }
  }
  free(copy);
  return slots;
}

/* Checks that the dump and the GPU's page tables agree about every unit. */
static void agrees(uint64_t start, unsigned slots) {
  for (unsigned unit = 0; unit < slots * 32; unit++) {
    struct softgpu_xlate x = gpu_xlate(&W, 0, start + unit * UNIT);
    const struct said *s = &said[unit];
    bool same = x.out_valid == s->mapped && (x.out_valid || x.out_sparse == s->sparse) &&
                (!x.out_valid || (x.out_pa == s->pa && x.out_read_only == s->read_only));
    if (!same) {
      fail("unit %u: the GPU says valid %u pa 0x%llx, the dump %d pa 0x%llx", unit, x.out_valid,
           (unsigned long long)x.out_pa, s->mapped, (unsigned long long)s->pa);
    }
    if (failures_here > 10) return;
  }
}

static void dump_of_a_reservation(void) {
  for (int big = 0; big < 2; big++) {
    uint32_t small, large;
    char expected[128];
    world_open(&W, 1);
    OK(vm_reserve(W.uvm, W.uuid[0], RES, SLOTS * SLOT, 16, big ? UVM_VMEM_RESERVE_BIG : 0));
    CHECK(dump_of(RES) > 0);
    EQ(parse(RES), 0);
    CHECK(strstr(text, "last batch none\n"));
    OK(vm_create(W.uvm, W.uuid[0], 16, 64, 0, &small));
    OK(vm_create(W.uvm, W.uuid[0], 21, 2, 0, &large));
    OK(vm_map(W.uvm, RES, RES + 28 * UNIT, small, 3, 8, 0)); /* across two slots */
    OK(vm_map(W.uvm, RES, RES + 10 * SLOT, large, 0, 2, 0));
    OK(vm_map(W.uvm, RES, RES + 20 * SLOT, small, 0, 5, UVM_VMEM_OP_READ_ONLY));
    OK(vm_unmap(W.uvm, RES, RES + 20 * SLOT + 3 * UNIT, 10, UVM_VMEM_OP_SPARSE));
    for (unsigned i = 21; i < SLOTS; i++) OK(vm_map(W.uvm, RES, RES + i * SLOT + i % 32 * UNIT, small, i, 1, 0));
    OK(vm_release(W.uvm, large));
    CHECK(dump_of(RES + 30 * SLOT + 5) > 0); /* any address inside selects it */
    EQ(parse(RES), 2 + 2 + 1 + SLOTS - 21);
    agrees(RES, SLOTS);
    for (unsigned i = 0; i < 8; i++) CHECK(said[28 + i].handle == small && said[28 + i].object_unit == 3 + i);
    CHECK(strstr(text, "(released)"));
    snprintf(expected, sizeof(expected), "process %d diagnose\nreservation 0x%llx-0x%llx, pages of 64 KB, %u slots\n",
             getpid(), RES, RES + SLOTS * SLOT - 1, SLOTS);
    if (strncmp(text, expected, strlen(expected)) != 0) fail("%.200s\ninstead of\n%s", text, expected);
    CHECK(!big == !strstr(text, "2 MB entry "));
    CHECK(!big == !strstr(text, ": big;"));
    CHECK(strstr(text, "table "));
    /* The table's address is the GPU's: the entry of slot 20, unit 0, is the table's first. */
    struct softgpu_xlate x = gpu_xlate(&W, 0, RES + 20 * SLOT);
    const char *slot = strstr(text, "slot 20 "), *table = slot ? strstr(slot, ", table ") : NULL;
    unsigned long long at = 0, pte = 0;
    CHECK(table && sscanf(strchr(table, ':'), ":0x%llx", &at) == 1);
    OK(softgpu_read_phys(W.dev, 0, at, &pte, sizeof(pte)));
    EQ(pte, x.out_pte);
    OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
    EQ(dump_of(RES), -ENOENT);
    world_close(&W);
  }
}

/* Without a selection the file has a line for each reservation. */
static void list_of_reservations(void) {
  char expected[2][96];
  uint32_t object;
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_reserve(W.uvm, W.uuid[0], RES + GIB(1), MIB(2), 21, UVM_VMEM_RESERVE_BIG));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &object));
  OK(vm_map(W.uvm, RES, RES + MIB(2), object, 0, 4, 0));
  CHECK(dump(NULL, text, sizeof(text)) > 0);
  snprintf(expected[0], sizeof(expected[0]), "\n%d 0x%llx 0x4000000 64 1 256 small 1 of thread ", getpid(), RES);
  snprintf(expected[1], sizeof(expected[1]), "\n%d 0x%llx 0x200000 2048 1 0 big,empty none\n", getpid(), RES + GIB(1));
  for (int i = 0; i < 2; i++) {
    if (!strstr(text, expected[i])) fail("no%s in\n%s", expected[i], text);
  }
  world_close(&W);
  CHECK(dump(NULL, text, sizeof(text)) > 0);
  CHECK(!strchr(strchr(text, '\n') + 1, '\n')); /* only the heading */
}

static void selections(void) {
  static const struct {
    const char *text;
    int want;
  } wrong[] = {{"nonsense\n", -EINVAL},
               {"12\n", -EINVAL},
               {"-1 0x7c0000000000\n", -EINVAL},
               {"0 0x7c0000000000\n", -EINVAL},
               {"999999 0x7c0000000000\n", -ENOENT},
               {"1 00000000000000000000000000000000000000000000000000000000000007c0000000000\n", -EINVAL}};
  int status = -1;
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
  for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
    if (dump(wrong[i].text, text, sizeof(text)) != wrong[i].want) fail("%s", wrong[i].text);
  }
  EQ(dump_of(RES - 1), -ENOENT);
  EQ(dump_of(RES + MIB(64)), -ENOENT);
  CHECK(dump_of(RES + MIB(64) - 1) > 0);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    if (setuid(1000)) _exit(1);
    _exit(open(DUMP_FILE, O_RDONLY) >= 0 || errno != EACCES);
  }
  EQ(waitpid(child, &status, 0), child);
  EQ(status, 0);
  world_close(&W);
}

static uint32_t the_object;

static void *binds(void *unused) {
  (void)unused;
  return (void *)(intptr_t)vm_map(W.uvm, RES, RES, the_object, 0, 4, 0);
}

/* A BIND has claimed the reservation and waits for the GPU: the reader gives up, and does not disturb the BIND. */
static void busy(void) {
  pthread_t thread;
  void *result;
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 16, 4, 0, &the_object));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_PUSH));
  OK(pthread_create(&thread, NULL, binds, NULL));
  OK(softgpu_hold_wait(W.dev, 0, 10000));
  int while_busy = dump_of(RES), listed = dump(NULL, text, sizeof(text));
  OK(softgpu_hold(W.dev, 0, SOFTGPU_HOLD_RELEASE));
  OK(pthread_join(thread, &result));
  EQ((intptr_t)result, 0);
  EQ(while_busy, -EBUSY);
  CHECK(listed > 0);
  CHECK(dump_of(RES) > 0);
  EQ(parse(RES), 1);
  world_close(&W);
}

static volatile bool stop;

static void *dumps(void *count) {
  static char mine[1 << 20];
  char selection[64];
  snprintf(selection, sizeof(selection), "%d 0x%llx", getpid(), RES);
  while (!stop) {
    int n = dump(selection, mine, sizeof(mine));
    if (n < 0 && n != -EBUSY && n != -ENOENT) return (void *)(intptr_t)n;
    if (n > 0) ++*(unsigned *)count;
  }
  return NULL;
}

/* Dumps reservations while they are changed and freed. */
static void under_fire(void) {
  unsigned seen = 0;
  pthread_t thread;
  uint32_t object;
  void *result;
  world_open(&W, 1);
  OK(vm_create(W.uvm, W.uuid[0], 16, 64, 0, &object));
  stop = false;
  OK(pthread_create(&thread, NULL, dumps, &seen));
  for (unsigned round = 0; round < 8 || (seen < 3 && round < 400); round++) {
    OK(vm_reserve(W.uvm, W.uuid[0], RES, SLOTS * SLOT, 16, round % 2 ? UVM_VMEM_RESERVE_BIG : 0));
    for (unsigned i = 0; i < SLOTS; i++) OK(vm_map(W.uvm, RES, RES + i * SLOT, object, 0, 1 + i % 32, 0));
    OK(vm_unmap(W.uvm, RES, RES, SLOTS * 16, 0));
    OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  }
  stop = true;
  OK(pthread_join(thread, &result));
  EQ((intptr_t)result, 0);
  printf("%u dumps\n", seen);
  CHECK(seen > 0);
  world_close(&W);
}

#define TRACING "/sys/kernel/tracing"

static bool put(const char *path, const char *value) {
  int fd = open(path, O_WRONLY | O_TRUNC);
  if (fd < 0) return false;
  bool good = write(fd, value, strlen(value)) == (ssize_t)strlen(value);
  close(fd);
  return good;
}

/* The kernel patches its code to turn tracepoints on and off. Under QEMU's emulation another processor may loop forever
 * on the int3 that is there for a moment, so the other processors are taken offline. */
static bool trace_events(const char *value) {
  static const char second[] = "/sys/devices/system/cpu/cpu1/online";
  bool took = put(second, "0"), good = put(TRACING "/events/uvm_vmem/enable", value);
  return (!took || put(second, "1")) && good;
}

/* Each operation is traced with its arguments and its result. */
static void tracepoints(void) {
  uint64_t ticket;
  uint32_t object, failed;
  mount("tracefs", TRACING, "tracefs", 0, NULL);
  if (!trace_events("1")) SKIP("no tracefs");
  put(TRACING "/trace", "");
  world_open(&W, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], RES, MIB(64), 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 17, 4, 0, &object));
  struct uvm_vmem_op ops[2] = {op_map(RES, object, 0, 4, 0), op_map(RES + MIB(2), object, 3, 2, 0)};
  EQ(vm_bind(W.uvm, RES, ops, 2, &failed, NULL), -ERANGE);
  OK(vm_bind(W.uvm, RES, ops, 1, NULL, &ticket));
  OK(vm_wait(W.uvm, ticket, FOREVER));
  OK(vm_release(W.uvm, object));
  EQ(vm_release(W.uvm, object), -ESTALE);
  OK(vm_free(W.uvm, RES, UVM_VMEM_FREE_UNMAP));
  CHECK(trace_events("0"));
  int fd = open(TRACING "/trace", O_RDONLY);
  ssize_t n, have = 0;
  while ((n = read(fd, text + have, sizeof(text) - 1 - have)) > 0) have += n;
  text[have] = 0;
  close(fd);
  char lines[8][128];
  snprintf(lines[0], 128, "uvm_vmem_reserve: start=0x%llx length=0x4000000 gpus=1 result=0\n", RES);
  snprintf(lines[1], 128, "uvm_vmem_create: page_shift=17 count=4 handle=0x%x result=0\n", object);
  snprintf(lines[2], 128, "uvm_vmem_bind: start=0x%llx ops=2 failed_op=1 ticket=0 result=%d\n", RES, -ERANGE);
  snprintf(lines[3], 128, "uvm_vmem_bind: start=0x%llx ops=1 failed_op=-1 ticket=%llu result=0\n", RES, (unsigned long long)ticket);
  snprintf(lines[4], 128, "uvm_vmem_wait: ticket=%llu result=0\n", (unsigned long long)ticket);
  snprintf(lines[5], 128, "uvm_vmem_release: handle=0x%x result=0\n", object);
  snprintf(lines[6], 128, "uvm_vmem_release: handle=0x%x result=%d\n", object, -ESTALE);
  snprintf(lines[7], 128, "uvm_vmem_free: start=0x%llx result=0\n", RES);
  for (int i = 0; i < 8; i++) {
    if (!strstr(text, lines[i])) fail("not traced: %s", lines[i]);
  }
  if (failures_here) printf("%s", text);
  world_close(&W);
}

MAIN(TEST(fatal_faults), TEST(name_in_the_log), TEST(fault_at_the_end), TEST(dump_of_a_reservation),
     TEST(list_of_reservations), TEST(selections), TEST(busy), TEST(under_fire), TEST(tracepoints))
