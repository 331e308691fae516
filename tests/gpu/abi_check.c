/* SPDX-License-Identifier: MIT */
/* Description: the layout chosen for each driver version; the versions on both sides of every
 * change. Needs no GPU. */
#include <stdio.h>

#include "stock_abi.h"

static const struct {
  struct nv_version version;
  struct stock_abi abi;
} cases[] = {
    {{530, 30, 2}, {40, 120, 32, true, 4}},   {{530, 41, 3}, {40, 120, 32, true, 4}},
    {{535, 43, 2}, {48, 120, 32, true, 4}},   {{535, 288, 1}, {48, 120, 32, true, 4}},
    {{545, 23, 6}, {48, 128, 32, true, 4}},   {{550, 40, 7}, {48, 128, 32, true, 4}},
    {{550, 40, 53}, {48, 128, 256, true, 4}}, {{550, 54, 14}, {48, 128, 256, true, 4}},
    {{550, 163, 1}, {48, 128, 256, true, 4}}, {{555, 42, 2}, {48, 128, 256, true, 8}},
    {{580, 159, 4}, {48, 128, 256, true, 8}}, {{590, 44, 1}, {48, 128, 256, false, 8}},
    {{595, 45, 4}, {48, 128, 256, false, 8}},
};

int main(void) {
  int failed = 0;

  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    struct nv_version v = cases[i].version;
    struct stock_abi got = stock_abi_for(v), want = cases[i].abi;

    if (got.alloc_bytes != want.alloc_bytes || got.memparams_bytes != want.memparams_bytes ||
        got.map_records != want.map_records || got.free_has_length != want.free_has_length ||
        got.virtualization_bytes != want.virtualization_bytes) {
      printf("%u.%u.%02u: alloc %u, memory parameters %u, records %u, length in free %d, "
             "virtualization %u\n",
             v.major, v.minor, v.patch, got.alloc_bytes, got.memparams_bytes, got.map_records,
             got.free_has_length, got.virtualization_bytes);
      failed = 1;
    }
  }
  return failed;
}
