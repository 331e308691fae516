/* SPDX-License-Identifier: MIT */
/*
 * Aliasing: two requests share the pages of a common prefix, read-only if the back end supports it.
 *
 * usage: prefix [BACKEND]
 */
#include <errno.h>
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
  const uint64_t slot = 256ull << 20;
  uint64_t first, second, prefix, tail;
  unsigned char byte = 0;
  vmem_handle shared;
  vmem_t vm;

  if (vmem_open(&opts, &vm) || vmem_query(vm, &info) || vMemReserve(vm, 2 * slot, NULL, &first)) return failed("open");
  if (!(info.caps & VMEM_CAP_ALIAS)) {
    printf("the back end %s maps a page at one address only\n", info.backend);
    return vmem_close(vm) ? 1 : 77;
  }
  second = first + slot;
  prefix = 32 * info.granule;
  tail = info.granule;

  /* The first request fills 32 pages. */
  struct vmem_op fill = {.op = VMEM_OP_POPULATE, .addr = first, .bytes = prefix};
  if (vmem_batch(vm, &fill, 1, NULL, 0, 0) || vmem_fill(vm, first, prefix, 0x11)) return failed("first request");

  /* The second request maps the same pages, and continues in pages of its own. */
  uint32_t flags = info.caps & VMEM_CAP_READONLY ? VMEM_OP_READONLY : 0;
  if (vmem_retain(vm, first, prefix, &shared)) return failed("retain");
  struct vmem_op share[2] = {
      {.op = VMEM_OP_MAP, .flags = flags | VMEM_OP_CONSUME, .addr = second, .bytes = prefix, .handle = shared},
      {.op = VMEM_OP_POPULATE, .addr = second + prefix, .bytes = tail},
  };
  if (vmem_batch(vm, share, 2, NULL, 0, 0)) return failed("share");
  if (vmem_get_stats(vm, &stats)) return failed("stats");
  printf("%llu KiB mapped, %llu KiB of memory\n", (unsigned long long)stats.mapped_bytes >> 10,
         (unsigned long long)stats.used_bytes >> 10);

  /* Writing to the shared part through the second request is refused. */
  if (flags) {
    if (vmem_write(vm, second, &byte, 1) != -EACCES) return failed("write");
    printf("a write to the shared part: %s\n", vmem_last_error());
  }

  /* The first request ends. The pages stay, because the second still maps them. */
  if (vMemUnmap(vm, first, prefix) || vmem_read(vm, &byte, second + prefix - 1, 1) || byte != 0x11)
    return failed("first request's end");
  printf("after the first request has ended, the second reads %02x\n", byte);
  if (vMemFree(vm, first, VMEM_FREE_UNMAP) || vmem_close(vm)) return failed("end");
  return 0;
}
