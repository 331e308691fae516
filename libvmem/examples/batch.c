/* SPDX-License-Identifier: MIT */
/*
 * A batch is all or nothing: an invalid entry in the middle leaves every mapping unchanged.
 *
 * usage: batch [BACKEND]
 */
#include <errno.h>
#include <stdio.h>
#include <vmem.h>

#define TENSORS 8u

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, vmem_last_error());
  return 1;
}

static uint64_t mapped_bytes(vmem_t vm) {
  struct vmem_stats stats = {.size = sizeof(stats)};
  return vmem_get_stats(vm, &stats) ? UINT64_MAX : stats.mapped_bytes;
}

int main(int argc, char **argv) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .backend = argc > 1 ? argv[1] : "auto"};
  struct vmem_info info = {.size = sizeof(info)};
  const uint64_t tensor = 64ull << 20;
  uint64_t addr, page;
  vmem_t vm;

  if (vmem_open(&opts, &vm) || vmem_query(vm, &info) || vMemReserve(vm, TENSORS * tensor, NULL, &addr))
    return failed("open");
  page = info.granule;

  /* One operation gives each of the eight tensors one new, zeroed page. */
  struct vmem_op grow = {.op = VMEM_OP_POPULATE, .addr = addr, .bytes = page, .count = TENSORS, .stride = tensor};
  if (vmem_batch(vm, &grow, 1, NULL, 0, 0)) return failed("grow");
  printf("mapped %llu pages in one batch\n", (unsigned long long)(mapped_bytes(vm) / page));

  /* The second entry maps over the first batch's mapping and is refused, so the first entry is not
   * applied. */
  struct vmem_op bad[2] = {
      {.op = VMEM_OP_POPULATE, .addr = addr + page, .bytes = page, .count = TENSORS, .stride = tensor},
      {.op = VMEM_OP_POPULATE, .addr = addr, .bytes = page},
  };
  int err = vmem_batch(vm, bad, 2, NULL, 0, 0);
  printf("a batch with a bad entry: %s\n", vmem_last_error());
  if (err != -EEXIST || mapped_bytes(vm) != TENSORS * page) return 1;

  /* Maps come before unmaps: grow and shrink in one batch. */
  struct vmem_op swap[2] = {
      {.op = VMEM_OP_UNMAP, .addr = addr, .bytes = page, .count = TENSORS, .stride = tensor},
      {.op = VMEM_OP_POPULATE, .addr = addr + page, .bytes = page, .count = TENSORS, .stride = tensor},
  };
  if (vmem_batch(vm, swap, 2, NULL, 0, 0)) return failed("swap");
  printf("mapped after growing and shrinking: %llu pages\n", (unsigned long long)(mapped_bytes(vm) / page));

  /* Pages created by POPULATE belong to their mapping: unmapping gives them back. */
  if (vMemFree(vm, addr, VMEM_FREE_UNMAP) || vmem_close(vm)) return failed("end");
  return 0;
}
