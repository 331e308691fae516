/* SPDX-License-Identifier: MIT */
/* Description: more scattered pages than the kernel's limit on mappings, and more memory than the machine has. */
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

/* The number after `label` at the start of a file in /proc; 0 if there is none. */
static uint64_t number_in(const char *path, const char *label) {
  FILE *f = fopen(path, "re");
  char line[64] = "";
  size_t skip = strlen(label);
  if (f && !fgets(line, sizeof(line), f)) line[0] = 0;
  if (f) fclose(f);
  return strncmp(line, label, skip) ? 0 : strtoull(line + skip, NULL, 10);
}

static uint64_t sysctl_max(void) { return number_in("/proc/sys/vm/max_map_count", ""); }

/* Bytes that this process has read so far. */
static uint64_t read_so_far(void) { return number_in("/proc/self/io", "rchar: "); }

/* Maps every second page: each page is a VMA, and so is each hole. The library returns -ENOSPC before the kernel would,
 * so that the process can still create mappings and everything can be unmapped again. */
static void scattered_pages(void) {
  vmem_t vm = open_host(KIB(4));
  uint64_t va, mapped = 0, max = sysctl_max();
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_stats before, after;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = KIB(4), .count = 500, .stride = KIB(8)};
  uint64_t begun;
  int ret = 0;
  void *p;
  if (max > 300000) {
    printf("vm.max_map_count is %llu here: the limit is not reached in this test\n", (unsigned long long)max);
    OK(vmem_close(vm));
    return;
  }
  OK(vMemReserve(vm, GIB(4), NULL, &va));
  for (op.addr = va; !ret && op.addr < va + GIB(3); op.addr += op.count * op.stride) {
    before = stats_of(vm);
    if (!(ret = vmem_batch(vm, &op, 1, NULL, 0, 0))) mapped += op.count;
  }
  EQ(ret, -ENOSPC);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "vm.max_map_count"));
  EQ(e.limit, max);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  CHECK(2 * mapped + 4096 > max); /* it stopped close to the limit, not far below it */
  /* If a caller retries in a loop, the library does not count the process's mappings each time. */
  begun = read_so_far();
  CHECK(begun);
  for (int i = 0; i < 1000; i++) EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
  CHECK(read_so_far() - begun < 1000 * max);
  p = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  munmap(p, 4096);
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_close(vm));
}

/* Two contexts map alternately: each accounts for the other's mappings, and the process keeps a margin. */
static void two_contexts(void) {
  vmem_t vm[2] = {open_host(KIB(4)), open_host(KIB(4))};
  struct vmem_op op[2];
  uint64_t va;
  int ret[2] = {0}, left = 0;
  void *p[200];
  for (int k = 0; k < 2; k++) {
    OK(vMemReserve(vm[k], GIB(2), NULL, &va));
    op[k] = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = va, .bytes = KIB(4), .count = 20, .stride = KIB(8)};
  }
  if (sysctl_max() <= 300000) {
    while (!ret[0] || !ret[1])
      for (int k = 0; k < 2; k++) {
        if (!ret[k]) ret[k] = vmem_batch(vm[k], &op[k], 1, NULL, 0, 0);
        op[k].addr += op[k].count * op[k].stride;
      }
    EQ(ret[0], -ENOSPC);
    EQ(ret[1], -ENOSPC);
    while (left < 200) { /* neighbours with different protection are not merged */
      p[left] = mmap(NULL, KIB(4), left & 1 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (p[left] == MAP_FAILED) break;
      left++;
    }
    for (int i = 0; i < left; i++) munmap(p[i], KIB(4));
    EQ(left, 200);
    OK(vmem_close(vm[0])); /* the other context can use its mappings */
    OK(vmem_batch(vm[1], &op[1], 1, NULL, 0, 0));
  } else {
    OK(vmem_close(vm[0]));
  }
  OK(vmem_check(vm[1]));
  OK(vmem_close(vm[1]));
}

/* Queued batches count towards the limit: each would fit alone, but not both. */
static void queued_pages(void) {
  vmem_t vm = open_host(KIB(4));
  int fd = eventfd(0, EFD_CLOEXEC);
  uint64_t va, max = sysctl_max(), one = 1;
  struct vmem_after after = {.kind = VMEM_AFTER_FD, .handle = (uint64_t)fd};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = KIB(4), .count = max * 3 / 10, .stride = KIB(8)};
  struct vmem_stats before, now;
  vmem_ticket first, second;
  if (max > 300000) {
    OK(vmem_close(vm));
    return;
  }
  OK(vMemReserve(vm, GIB(4), NULL, &va));
  before = stats_of(vm);
  op.addr = va;
  OK(vmem_submit(vm, &op, 1, &after, 1, 0, &first));
  op.addr = va + GIB(2);
  EQ(vmem_submit(vm, &op, 1, NULL, 0, 0, &second), -ENOSPC);
  EQ(write(fd, &one, sizeof(one)), sizeof(one));
  OK(vmem_wait(vm, first, -1));
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
  op = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = KIB(4), .count = op.count, .stride = KIB(8)};
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  op.op = VMEM_OP_POPULATE;
  op.addr = va + GIB(2);
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_check(vm));
  op.op = VMEM_OP_UNMAP;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  now = stats_of(vm);
  EQ(now.segments, before.segments);
  EQ(now.quarantined_bytes, 0);
  close(fd);
  OK(vmem_close(vm));
}

/* Mappings that other code in the process has freed can be used after a while. A batch that the kernel refuses is
 * undone, whether the kernel refuses it at the limit or one mapping above it, which depends on `odd`. */
static void with_mappings_of_others(bool odd) {
  vmem_t vm = open_host(KIB(4));
  uint64_t va, max = sysctl_max(), size = max / 2 * KIB(8);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = KIB(4), .count = max / 4, .stride = KIB(8)};
  struct vmem_stats before, after;
  void *one = odd ? mmap(NULL, KIB(4), PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0) : NULL;
  int ret;
  char *p;
  OK(vMemReserve(vm, GIB(4), NULL, &va));
  op.addr = va;
  p = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  for (uint64_t at = 0; at + KIB(8) <= size * 3 / 4; at += KIB(8)) EQ(mprotect(p + at, KIB(4), PROT_READ), 0);
  before = stats_of(vm);
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  EQ(munmap(p, size), 0);
  for (int i = 0; (ret = vmem_batch(vm, &op, 1, NULL, 0, 0)) == -ENOSPC && i < 3000; i++) usleep(10000);
  OK(ret);
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_close(vm));
  if (one) EQ(munmap(one, KIB(4)), 0);
}

static void mappings_of_others(void) {
  for (int odd = 0; odd < 2 && sysctl_max() <= 300000; odd++) with_mappings_of_others(odd);
}

static void more_memory_than_there_is(void) {
  vmem_t vm = open_host(0);
  vmem_handle h;
  struct vmem_stats before = stats_of(vm), after;
  struct vmem_error e = {.size = sizeof(e)};
  uint64_t va;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = GIB(1024)};
  uint64_t all = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE) / PAGE * PAGE;
  EQ(vMemCreate(vm, GIB(1024), NULL, &h), -ENOMEM);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "exceed the total memory"));
  EQ(vmem_warm(vm, GIB(1024)), -ENOMEM);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  EQ(after.slab_calls, before.slab_calls);    /* nothing was allocated, not even for a moment */
  EQ(vMemCreate(vm, all, NULL, &h), -ENOMEM); /* because this process already uses some */
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "available"));
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vMemReserve(vm, GIB(1024), NULL, &va)); /* addresses cost nothing */
  op.addr = va;
  before = stats_of(vm);
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOMEM);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Memory promised to one context is not promised to another. */
static void memory_of_two_contexts(void) {
  vmem_t vm[2] = {open_host(0), open_host(0)};
  uint64_t most = (number_in("/proc/meminfo", "MemTotal:") << 10) / 8 * 5 / MIB(2) * MIB(2);
  vmem_handle h;
  int first = vMemCreate(vm[0], most, NULL, &h);
  if (!first) EQ(vMemCreate(vm[1], most, NULL, &h), -ENOMEM); /* otherwise other processes use that much */
  OK(vmem_close(vm[0]));
  if (!first) OK(vMemCreate(vm[1], most / 2, NULL, &h));
  OK(vmem_close(vm[1]));
}

static struct vmem_op page_at(uint64_t addr) {
  return (struct vmem_op){.op = VMEM_OP_POPULATE, .flags = VMEM_OP_SPREAD, .addr = addr, .bytes = PAGE};
}

/* max_mappings can be reached but not exceeded, queued mappings included; unmapping and joining make room. */
static void mappings(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "host", .max_mappings = 16};
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_stats before, after;
  vmem_ticket tickets[8];
  struct vmem_op op;
  uint64_t va, calls;
  vmem_t vm;
  OK(vmem_open(&o, &vm));
  OK(vmem_query(vm, &info));
  EQ(info.max_mappings, 16);
  CHECK(info.caps & VMEM_CAP_JOIN);
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  for (int i = 0; i < 8; i++) {
    op = page_at(va + i * PAGE);
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  }
  for (int i = 0; i < 8; i++) {
    op = page_at(va + (8 + i) * PAGE);
    OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &tickets[i]));
  }
  op = page_at(va + MIB(32));
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
  OK(vmem_get_error(&e));
  EQ(e.limit, 16);
  CHECK(strstr(e.text, "max_mappings"));
  for (int i = 0; i < 8; i++) OK(vmem_wait(vm, tickets[i], -1));
  before = stats_of(vm);
  EQ(before.mappings, 16);
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vMemUnmap(vm, va + 3 * PAGE, PAGE));
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_join(vm, va, MIB(2), &calls));
  EQ(calls, 2);
  EQ(stats_of(vm).mappings, 3);
  OK(vMemUnmap(vm, va + 9 * PAGE, PAGE)); /* splits a mapping */
  EQ(stats_of(vm).mappings, 4);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(mappings), TEST(scattered_pages), TEST(two_contexts), TEST(mappings_of_others), TEST(queued_pages),
     TEST(memory_of_two_contexts), TEST(more_memory_than_there_is))
