/* SPDX-License-Identifier: MIT */
/*
 * A growing KV cache: contiguous addresses for each request, memory as needed.
 *
 * Four requests of different lengths decode at the same time. Their rows of 384 bytes do not divide
 * the page; a row simply crosses from one page to the next.
 *
 * usage: growing_cache [BACKEND]
 */
#include <stdio.h>
#include <string.h>
#include <vmem.h>

#define TENSORS 4u /* keys and values of two layers */
#define REQUESTS 4u
#define ROW 384u
#define MAX_TOKENS 32768u

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, vmem_last_error());
  return 1;
}

static uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

int main(int argc, char **argv) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .backend = argc > 1 ? argv[1] : "auto"};
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_stats stats = {.size = sizeof(stats)};
  uint64_t base, page, slot, tensor, have[REQUESTS] = {0}, used = 0;
  const uint64_t prompt[REQUESTS] = {17, 900, 5000, 12000};
  unsigned char row[ROW], seen[ROW];
  vmem_t vm;

  if (vmem_open(&opts, &vm) || vmem_query(vm, &info)) return failed("open");
  page = info.granule;
  slot = round_up((uint64_t)MAX_TOKENS * ROW, page);
  tensor = slot * REQUESTS;
  if (vMemReserve(vm, tensor * TENSORS, NULL, &base)) return failed("reserve");

  for (uint64_t step = 0; step < 200; step++) {
    struct vmem_op ops[REQUESTS];
    size_t n = 0;
    for (unsigned r = 0; r < REQUESTS; r++) {
      uint64_t need = round_up((prompt[r] + step) * ROW, page);
      if (need <= have[r]) continue;
      /* One operation grows the request in every tensor. SPREAD leaves room for the next page. */
      ops[n++] = (struct vmem_op){.op = VMEM_OP_POPULATE,
                                  .flags = VMEM_OP_SPREAD,
                                  .addr = base + r * slot + have[r],
                                  .bytes = need - have[r],
                                  .count = TENSORS,
                                  .stride = tensor};
      have[r] = need;
    }
    if (n && vmem_batch(vm, ops, n, NULL, 0, 0)) return failed("step");
    /* Write each request's row of this step in each tensor. */
    for (unsigned t = 0; t < TENSORS; t++) {
      for (unsigned r = 0; r < REQUESTS; r++) {
        memset(row, (int)(t * 64 + r * 16 + step % 16), ROW);
        if (vmem_write(vm, base + t * tensor + r * slot + (prompt[r] + step - 1) * ROW, row, ROW))
          return failed("write");
      }
    }
  }

  for (unsigned t = 0; t < TENSORS; t++) {
    for (unsigned r = 0; r < REQUESTS; r++) {
      memset(row, (int)(t * 64 + r * 16 + 199 % 16), ROW);
      if (vmem_read(vm, seen, base + t * tensor + r * slot + (prompt[r] + 198) * ROW, ROW)) return failed("read");
      if (memcmp(row, seen, ROW)) return fprintf(stderr, "tensor %u, request %u: wrong contents\n", t, r), 1;
      used += (prompt[r] + 199) * ROW;
    }
  }
  if (vmem_get_stats(vm, &stats)) return failed("stats");
  printf("%llu KiB of rows in %llu KiB of memory; %llu KiB reserved\n", (unsigned long long)used >> 10,
         (unsigned long long)stats.used_bytes >> 10, (unsigned long long)stats.reserved_bytes >> 10);
  if (vMemFree(vm, base, VMEM_FREE_UNMAP) || vmem_close(vm)) return failed("end");
  return stats.used_bytes < used + (uint64_t)TENSORS * REQUESTS * page ? 0 : 1;
}
