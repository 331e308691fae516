/* SPDX-License-Identifier: MIT */
/*
 * The five calls: reserve addresses, create a page, map it, use it, release and free.
 *
 * usage: five_calls [BACKEND]
 */
#include <stdio.h>
#include <vmem.h>

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, vmem_last_error());
  return 1;
}

int main(int argc, char **argv) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .backend = argc > 1 ? argv[1] : "auto"};
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_stats stats = {.size = sizeof(stats)};
  vmem_t vm;
  vmem_handle page;
  uint64_t addr;
  unsigned char seen[4];

  if (vmem_open(&opts, &vm) || vmem_query(vm, &info)) return failed("open");
  printf("back end %s, pages of %llu KiB\n", info.backend, (unsigned long long)info.granule >> 10);

  /* 1 GiB of addresses costs nothing; one page of memory is mapped at its start. */
  if (vMemReserve(vm, 1ull << 30, NULL, &addr)) return failed("reserve");
  if (vMemCreate(vm, info.granule, NULL, &page)) return failed("create");
  if (vMemMap(vm, addr, info.granule, page, 0, 0)) return failed("map");

  if (vmem_fill(vm, addr, info.granule, 0x2a) || vmem_read(vm, seen, addr, sizeof(seen))) return failed("use");
  if (vmem_get_stats(vm, &stats)) return failed("stats");
  printf("%llu KiB reserved, %llu KiB in use, first bytes %02x %02x %02x %02x\n",
         (unsigned long long)stats.reserved_bytes >> 10, (unsigned long long)stats.used_bytes >> 10, seen[0], seen[1],
         seen[2], seen[3]);

  if (vMemRelease(vm, page) || vMemFree(vm, addr, 0) || vmem_close(vm)) return failed("end");
  return seen[0] == 0x2a && seen[3] == 0x2a ? 0 : 1;
}
