/* SPDX-License-Identifier: MIT */
/* Description: the structure layout chosen for each driver version, including the versions just before and after each
 * change, and the known branches. Needs no GPU. */
#include <stdio.h>

#include "backend/nvidia/abi.h"

static const struct {
  struct nv_version version;
  struct nv_abi abi;
} cases[] = {
    {{530, 30, 2}, {40, 120, 32, true, 4, 54, 48}},    {{530, 41, 3}, {40, 120, 32, true, 4, 54, 48}},
    {{535, 43, 2}, {48, 120, 32, true, 4, 54, 48}},    {{535, 288, 1}, {48, 120, 32, true, 4, 54, 48}},
    {{545, 23, 6}, {48, 128, 32, true, 4, 55, 48}},    {{550, 40, 7}, {48, 128, 32, true, 4, 55, 48}},
    {{550, 40, 53}, {48, 128, 256, true, 4, 55, 48}},  {{550, 54, 14}, {48, 128, 256, true, 4, 55, 48}},
    {{550, 163, 1}, {48, 128, 256, true, 4, 55, 48}},  {{555, 42, 2}, {48, 128, 256, true, 8, 55, 48}},
    {{560, 28, 3}, {48, 128, 256, true, 8, 57, 48}},   {{575, 64, 5}, {48, 128, 256, true, 8, 57, 48}},
    {{580, 65, 6}, {48, 128, 256, true, 8, 128, 56}},  {{580, 159, 4}, {48, 128, 256, true, 8, 128, 56}},
    {{590, 44, 1}, {48, 128, 256, false, 8, 128, 56}}, {{595, 45, 4}, {48, 128, 256, false, 8, 128, 56}},
    {{600, 1, 0}, {48, 128, 256, false, 8, 128, 56}},  {{610, 43, 2}, {48, 128, 256, false, 8, 128, 56}},
    {{615, 62, 0}, {48, 128, 256, false, 8, 128, 56}}, {{620, 6, 0}, {48, 128, 256, false, 8, 128, 56}},
    {{999, 9, 9}, {48, 128, 256, false, 8, 128, 56}},
};

int main(void) {
  int failed = 0;
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    struct nv_version v = cases[i].version;
    struct nv_abi got = nv_abi_for(v), want = cases[i].abi;
    if (got.alloc_bytes != want.alloc_bytes || got.memparams_bytes != want.memparams_bytes ||
        got.map_records != want.map_records || got.free_has_length != want.free_has_length ||
        got.virtualization_bytes != want.virtualization_bytes || got.fb_entries != want.fb_entries ||
        got.va_space_bytes != want.va_space_bytes) {
      printf("%u.%u.%02u: alloc %u, memory parameters %u, records %u, length in free %d, "
             "virtualization %u, memory entries %u, VA space %u\n",
             v.major, v.minor, v.patch, got.alloc_bytes, got.memparams_bytes, got.map_records, got.free_has_length,
             got.virtualization_bytes, got.fb_entries, got.va_space_bytes);
      failed = 1;
    }
  }
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
    unsigned major = cases[i].version.major;
    bool known = nv_branch_of(cases[i].version), want = major >= 530 && major != 600 && major <= 620;
    if (known != want) {
      printf("%u: %s\n", major, known ? "known" : "unknown");
      failed = 1;
    }
  }
  for (unsigned i = 1; i < NV_BRANCHES; i++)
    if (nv_branches[i].major <= nv_branches[i - 1].major) {
      printf("%u stands behind %u\n", nv_branches[i].major, nv_branches[i - 1].major);
      failed = 1;
    }
  return failed;
}
