/* SPDX-License-Identifier: MIT */
/* Description: more scattered pages than the kernel allows mappings, more memory than there is. */
#include <sys/mman.h>

#include "check.h"

static uint64_t sysctl_max(void) {
  FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
  unsigned long long n = 0;
  if (!f || fscanf(f, "%llu", &n) != 1) n = 0;
  if (f) fclose(f);
  return n;
}

/* Every second page: each is a VMA, and so is each hole. Stops with -ENOSPC before the kernel would, so
 * that the process can still make mappings of its own, and everything can be unmapped again. */
static void scattered_pages(void) {
  vmem_t vm = open_host(KIB(4));
  uint64_t va, mapped = 0, max = sysctl_max();
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_stats before, after;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = KIB(4), .count = 500, .stride = KIB(8)};
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
  CHECK(2 * mapped + 4096 > max); /* the limit was nearly used up, not feared from afar */
  p = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CHECK(p != MAP_FAILED);
  munmap(p, 4096);
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_close(vm));
}

static void more_memory_than_there_is(void) {
  vmem_t vm = open_host(0);
  vmem_handle h;
  struct vmem_stats before = stats_of(vm), after;
  struct vmem_error e = {.size = sizeof(e)};
  uint64_t va;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = GIB(1024)};
  EQ(vMemCreate(vm, GIB(1024), NULL, &h), -ENOMEM);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "available"));
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vMemReserve(vm, GIB(1024), NULL, &va)); /* addresses are free */
  op.addr = va;
  before = stats_of(vm);
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOMEM);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(scattered_pages), TEST(more_memory_than_there_is))
