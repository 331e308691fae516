/* SPDX-License-Identifier: MIT */
/* Description: what a context logs, and at which level; a bad level is refused. */
#include <pthread.h>

#include "check.h"

#define LINES 256

struct heard {
  pthread_mutex_t lock;
  unsigned n;
  uint32_t level[LINES];
  char text[LINES][256];
};

static struct heard heard = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void listen(void *arg, uint32_t level, const char *text) {
  struct heard *h = arg;
  pthread_mutex_lock(&h->lock);
  if (h->n < LINES) {
    h->level[h->n] = level;
    snprintf(h->text[h->n], sizeof(h->text[0]), "%s", text);
    h->n++;
  }
  pthread_mutex_unlock(&h->lock);
}

/* Counts the logged lines with this level and this prefix. */
static unsigned told(uint32_t level, const char *start) {
  unsigned n = 0;
  pthread_mutex_lock(&heard.lock);
  for (unsigned i = 0; i < heard.n; i++) n += heard.level[i] == level && !strncmp(heard.text[i], start, strlen(start));
  pthread_mutex_unlock(&heard.lock);
  return n;
}

static vmem_t open_at(uint32_t level) {
  struct vmem_open_opts o = {.size = sizeof(o), .log = listen, .log_arg = &heard, .log_level = level};
  vmem_t vm = 0;
  heard.n = 0;
  if (open_opts(&o, &vm)) printf("cannot open %s: %s\n", backend(), vmem_last_error());
  return vm;
}

static void opening_is_told(void) {
  char start[64];
  vmem_t vm = open_at(0);
  CHECK(vm);
  snprintf(start, sizeof(start), "back end %s (%s requested)", backend(), backend());
  EQ(heard.n, 1);
  EQ(told(VMEM_LOG_INFO, start), 1);
  OK(vmem_close(vm));
  CHECK(vm = open_at(VMEM_LOG_WARNING));
  OK(vmem_close(vm));
  EQ(heard.n, 0);
}

static void auto_tells_why(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .log = listen, .log_arg = &heard};
  struct vmem_info info = {.size = sizeof(info)};
  vmem_t vm;
  heard.n = 0;
  OK(vmem_open(&o, &vm));
  OK(vmem_query(vm, &info));
  EQ(told(VMEM_LOG_INFO, "back end "), 1);
  CHECK(strstr(heard.text[0], "(auto requested)"));
  EQ(!!strstr(heard.text[0], "passed over"), info.why[0] != 0);
  OK(vmem_close(vm));
}

static void slabs_are_told_and_nothing_else(void) {
  vmem_handle a, b;
  uint64_t va;
  unsigned before;
  vmem_t vm = open_at(VMEM_LOG_DEBUG);
  CHECK(vm);
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vMemCreate(vm, PAGE, NULL, &a));
  CHECK(told(VMEM_LOG_DEBUG, "slab of ") >= 1);
  before = heard.n;
  OK(vMemCreate(vm, PAGE, NULL, &b));
  OK(vMemMap(vm, va, PAGE, a, 0, 0));
  OK(vMemMap(vm, va + PAGE, PAGE, b, 0, 0));
  OK(vmem_fill(vm, va, 2 * PAGE, 1));
  EQ(heard.n, before);
  OK(vMemRelease(vm, a));
  OK(vMemRelease(vm, b));
  OK(vmem_trim(vm, 0, NULL));
  EQ(told(VMEM_LOG_DEBUG, "slab of ") % 2, 0);
  CHECK(heard.n > before);
  OK(vmem_close(vm));
  EQ(told(VMEM_LOG_WARNING, ""), 0);
}

static void failures_are_told(void) {
  struct vmem_op op = {.op = VMEM_OP_MAP};
  vmem_handle h;
  vmem_ticket t;
  uint64_t va;
  vmem_t vm = open_at(0);
  CHECK(vm);
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  op.addr = va, op.bytes = PAGE, op.handle = h;
  OK(vmem_inject(vm, VMEM_INJECT_MAP, 0, 1, EIO));
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  EQ(vmem_wait(vm, t, -1), -EIO);
  EQ(told(VMEM_LOG_INFO, "a submitted batch failed: "), 1);
  EQ(told(VMEM_LOG_WARNING, ""), 0);
  OK(vmem_close(vm));
}

/* Two maps: the second fails, and so does the undo of the first. */
static void quarantine_is_a_warning(void) {
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_op ops[2] = {{.op = VMEM_OP_MAP}, {.op = VMEM_OP_MAP}};
  vmem_handle h;
  uint64_t va;
  vmem_t vm = open_at(0);
  CHECK(vm);
  OK(vmem_query(vm, &info));
  if (info.caps & VMEM_CAP_ONE_CALL) { /* a batch is one driver call: there is nothing to undo */
    OK(vmem_close(vm));
    return;
  }
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  for (int i = 0; i < 2; i++)
    ops[i].addr = va + (uint64_t)i * 4 * PAGE, ops[i].bytes = PAGE, ops[i].handle = h,
    ops[i].offset = (uint64_t)i * PAGE;
  OK(vmem_inject(vm, VMEM_INJECT_MAP | VMEM_INJECT_UNMAP, 1, 2, EIO));
  EQ(vmem_batch(vm, ops, 2, NULL, 0, 0), -ENOTRECOVERABLE);
  EQ(told(VMEM_LOG_WARNING, "0x"), 1);
  OK(vmem_close(vm));
}

static void bad_levels_are_refused(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .log_level = VMEM_LOG_DEBUG + 1}, r = {.size = sizeof(r)};
  vmem_t vm;
  EQ(open_opts(&o, &vm), -EINVAL);
  r.log_reserved = 1;
  EQ(open_opts(&r, &vm), -EINVAL);
  r.size = offsetof(struct vmem_open_opts, log); /* a caller compiled before the log existed */
  OK(open_opts(&r, &vm));
  OK(vmem_close(vm));
}

MAIN(TEST(opening_is_told), TEST(auto_tells_why), TEST(slabs_are_told_and_nothing_else), TEST(failures_are_told),
     TEST(quarantine_is_a_warning), TEST(bad_levels_are_refused))
