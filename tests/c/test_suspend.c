/* SPDX-License-Identifier: MIT */
/* Description: a driver that returns EAGAIN, as during a suspend: an undo keeps retrying, other calls time out. */
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "api/api.h"
#include "backend/nvidia/rm.h"
#include "check.h"

/* ---- a fake driver and a fake clock ------------------------------------------------------------ */

#define FAKE_FD 1000000

static bool fake_time;
static uint64_t time_ns, longest_pause_ns;
static struct {
  uint64_t awake_at_ns; /* suspended until this time */
  bool in_status;       /* reports the suspend in the structure's status instead of errno */
  uint32_t status;
  unsigned calls, interrupts;
  unsigned long request;
} driver;

int clock_gettime(clockid_t clock, struct timespec *t) {
  if (!fake_time) return (int)syscall(SYS_clock_gettime, clock, t);
  *t = (struct timespec){(time_t)(time_ns / 1000000000), (long)(time_ns % 1000000000)};
  return 0;
}

int nanosleep(const struct timespec *t, struct timespec *left) {
  uint64_t ns = (uint64_t)t->tv_sec * 1000000000 + (uint64_t)t->tv_nsec;
  if (!fake_time) return (int)syscall(SYS_nanosleep, t, left);
  if (ns > longest_pause_ns) longest_pause_ns = ns;
  time_ns += ns;
  return 0;
}

int ioctl(int fd, unsigned long request, ...) {
  struct nvos00 *f;
  va_list ap;
  void *arg;
  va_start(ap, request);
  arg = va_arg(ap, void *);
  va_end(ap);
  if (fd != FAKE_FD) return (int)syscall(SYS_ioctl, fd, request, arg);
  driver.calls++;
  driver.request = request;
  if (driver.interrupts) {
    driver.interrupts--;
    errno = EINTR;
    return -1;
  }
  f = arg;
  if (time_ns >= driver.awake_at_ns) {
    f->status = 0;
    return 0;
  }
  if (driver.in_status) {
    f->status = driver.status;
    return 0;
  }
  errno = EAGAIN;
  return -1;
}

#define SECOND 1000000000ull

static void suspend(uint64_t seconds) {
  fake_time = true;
  time_ns = 1000 * SECOND;
  longest_pause_ns = 0;
  memset(&driver, 0, sizeof(driver));
  driver.awake_at_ns = time_ns + seconds * SECOND;
}

static uint64_t waited_s(void) { return (time_ns - 1000 * SECOND) / SECOND; }

static struct rm rm = {.fd = FAKE_FD, .client = 1};

/* ---- one call ---------------------------------------------------------------------------------- */

static void a_call_waits_for_a_suspend(void) {
  suspend(VM_SUSPEND_RETRY_S - 1);
  driver.interrupts = 3;
  OK(rm_free(&rm, 1, 2));
  fake_time = false;
  CHECK(waited_s() >= VM_SUSPEND_RETRY_S - 2);
  /* the library slept between attempts */
  CHECK(driver.calls < VM_SUSPEND_RETRY_S * 12);
  EQ(longest_pause_ns, SECOND / 10);
}

static void a_call_gives_up_after_a_while(void) {
  static const uint32_t statuses[] = {0, NV_ERR_BUSY_RETRY, NV_ERR_GPU_NOT_FULL_POWER};
  for (size_t i = 0; i < 3; i++) {
    struct vmem_error e = {.size = sizeof(e)};
    suspend(1000);
    driver.in_status = i;
    driver.status = statuses[i];
    EQ(rm_free(&rm, 1, 2), -EAGAIN);
    fake_time = false;
    CHECK(waited_s() >= VM_SUSPEND_RETRY_S - 1 && waited_s() <= VM_SUSPEND_RETRY_S + 1);
    OK(vmem_get_error(&e));
    EQ(e.code, -EAGAIN);
    EQ(e.status, statuses[i]);
    CHECK(strstr(e.text, "EAGAIN") || strstr(e.text, e.status_name));
  }
}

static void an_undo_does_not_give_up(void) {
  static const uint32_t statuses[] = {0, NV_ERR_BUSY_RETRY, NV_ERR_GPU_NOT_FULL_POWER};
  for (size_t i = 0; i < 3; i++) {
    int err = -1;
    suspend(3600);
    driver.in_status = i;
    driver.status = statuses[i];
    vm_fail(-ENOMEM, "what is undone");
    VM_UNDO(err = rm_free(&rm, 1, 2));
    fake_time = false;
    EQ(err, 0);
    CHECK(waited_s() >= 3600);
    CHECK(!vm_undoing());
  }
}

static void another_refusal_is_no_suspend(void) {
  int err = 0;
  suspend(1000);
  driver.in_status = true;
  driver.status = 0x40; /* NV_ERR_INVALID_STATE */
  EQ(rm_free(&rm, 1, 2), -EIO);
  fake_time = false;
  EQ(driver.calls, 1);
  suspend(1000);
  driver.in_status = true;
  driver.status = 0x40;
  VM_UNDO(err = rm_free(&rm, 1, 2));
  fake_time = false;
  EQ(err, -EIO);
  EQ(driver.calls, 1);
}

static void every_rm_call_does_so(void) {
  struct nv0080_alloc params = {0};
  uint32_t object, word = 0;
  for (int kind = 0; kind < 2; kind++) {
    suspend(1000);
    rm.abi = nv_abi_for((struct nv_version){580, 0, 0});
    EQ(kind ? rm_alloc(&rm, 1, NV01_DEVICE_0, &params, sizeof(params), &object, "an allocation")
            : rm_control(&rm, 1, 5, &word, sizeof(word), "a question"),
       -EAGAIN);
    fake_time = false;
    CHECK(strstr(vmem_last_error(), kind ? "an allocation" : "a question"));
    CHECK(waited_s() >= VM_SUSPEND_RETRY_S - 1);
  }
}

/* ---- batches ----------------------------------------------------------------------------------- */

static vmem_t vm;
static uint64_t va;
static vmem_handle a, b;

static void set_up(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "host"};
  OK(vmem_open(&o, &vm));
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &a));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &b));
  OK(vMemMap(vm, va, 4 * PAGE, a, 0, 0));
  OK(vmem_fill(vm, va, 4 * PAGE, 0x5c));
}

static void tear_down(void) {
  EQ(stats_of(vm).quarantined_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_inject(vm, 0, 0, 0, 0));
  OK(vmem_close(vm));
}

/* The second map fails, and unmapping the first finds the driver suspended for many attempts. */
static void an_undone_map_quarantines_nothing(void) {
  uint64_t before;
  struct vmem_op ops[2] = {{.op = VMEM_OP_MAP, .handle = b}, {.op = VMEM_OP_MAP, .handle = b}};
  set_up();
  ops[0].handle = ops[1].handle = b;
  ops[0].addr = va + MIB(1);
  ops[1].addr = va + MIB(2);
  ops[0].bytes = ops[1].bytes = PAGE;
  suspend(0);
  before = time_ns;
  OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, 1, 200, EAGAIN));
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -EAGAIN);
  fake_time = false;
  CHECK(time_ns > before);
  EQ(stats_of(vm).mapped_bytes, 4 * PAGE);
  OK(vmem_inject(vm, 0, 0, 0, 0));
  OK(vmem_batch(vm, ops, 2, NULL, 0, 0));
  EQ(stats_of(vm).mapped_bytes, 6 * PAGE);
  EQ(BYTE(va), 0x5c);
  tear_down();
}

/* The second unmap fails, and mapping the first range again finds the driver suspended. */
static void an_undone_unmap_quarantines_nothing(void) {
  struct vmem_op ops[2] = {{.op = VMEM_OP_UNMAP}, {.op = VMEM_OP_UNMAP}};
  set_up();
  OK(vMemMap(vm, va + MIB(1), PAGE, b, 0, 0));
  ops[0].addr = va;
  ops[0].bytes = 4 * PAGE;
  ops[1].addr = va + MIB(1);
  ops[1].bytes = PAGE;
  suspend(0);
  OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, 1, 500, EAGAIN));
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -EAGAIN);
  fake_time = false;
  OK(vmem_inject(vm, 0, 0, 0, 0));
  EQ(stats_of(vm).mapped_bytes, 5 * PAGE);
  EQ(BYTE(va), 0x5c);
  EQ(BYTE(va + 4 * PAGE - 1), 0x5c);
  tear_down();
}

/* The map of a replace fails: the old pages are mapped again, even if that takes long. */
static void an_undone_replace_quarantines_nothing(void) {
  struct vmem_op op = {.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE, .bytes = 4 * PAGE};
  set_up();
  op.addr = va;
  op.handle = b;
  suspend(0);
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 300, EAGAIN));
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -EAGAIN);
  fake_time = false;
  OK(vmem_inject(vm, 0, 0, 0, 0));
  EQ(BYTE(va), 0x5c);
  tear_down();
}

/* A failure that is not caused by a suspend quarantines pages as usual. */
static void a_real_refusal_quarantines(void) {
  struct vmem_op ops[2] = {{.op = VMEM_OP_MAP}, {.op = VMEM_OP_MAP}};
  set_up();
  ops[0].handle = ops[1].handle = b;
  ops[0].addr = va + MIB(1);
  ops[1].addr = va + MIB(2);
  ops[0].bytes = ops[1].bytes = PAGE;
  OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, 1, 2, EIO));
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -ENOTRECOVERABLE);
  EQ(stats_of(vm).quarantined_bytes, PAGE);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(a_call_waits_for_a_suspend), TEST(a_call_gives_up_after_a_while), TEST(an_undo_does_not_give_up),
     TEST(another_refusal_is_no_suspend), TEST(every_rm_call_does_so), TEST(an_undone_map_quarantines_nothing),
     TEST(an_undone_unmap_quarantines_nothing), TEST(an_undone_replace_quarantines_nothing),
     TEST(a_real_refusal_quarantines))
