/* SPDX-License-Identifier: MIT */
#include "base/bits.h"

#define WORD 64u

void vm_bits_set(uint64_t *map, uint32_t i, uint32_t n, bool value) {
  while (n) {
    uint32_t off = i % WORD, take = WORD - off < n ? WORD - off : n;
    uint64_t mask = (take == WORD ? ~0ull : (1ull << take) - 1) << off;
    if (value)
      map[i / WORD] |= mask;
    else
      map[i / WORD] &= ~mask;
    i += take;
    n -= take;
  }
}

uint32_t vm_bits_run(const uint64_t *map, uint32_t i, uint32_t max, bool value) {
  uint32_t n = 0;
  while (n < max) {
    uint64_t w = map[(i + n) / WORD];
    uint32_t off = (i + n) % WORD, k;
    if (value) w = ~w;
    w >>= off;
    k = w ? (uint32_t)__builtin_ctzll(w) : WORD - off;
    if (k > WORD - off) k = WORD - off;
    n += k;
    if (k < WORD - off) break;
  }
  return n < max ? n : max;
}
