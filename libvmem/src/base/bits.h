/* SPDX-License-Identifier: MIT */
/* bits.h - bitmaps of any length, in words of 64 bits. */
#ifndef VMEM_BASE_BITS_H
#define VMEM_BASE_BITS_H

#include <stdbool.h>
#include <stdint.h>

static inline bool vm_bit(const uint64_t *map, uint32_t i) { return map[i / 64] >> (i % 64) & 1; }

void vm_bits_set_many(uint64_t *map, uint32_t i, uint32_t n, bool value);
uint32_t vm_bits_run_many(const uint64_t *map, uint32_t i, uint32_t max, bool value);

/* Most ranges are a single page. */
static inline void vm_bits_set(uint64_t *map, uint32_t i, uint32_t n, bool value) {
  uint64_t bit = 1ull << (i % 64);
  if (n != 1)
    vm_bits_set_many(map, i, n, value);
  else
    map[i / 64] = value ? map[i / 64] | bit : map[i / 64] & ~bit;
}

/* Counts the bits equal to `value` from i on, at most max. */
static inline uint32_t vm_bits_run(const uint64_t *map, uint32_t i, uint32_t max, bool value) {
  if (!max || vm_bit(map, i) != value) return 0;
  return max == 1 ? 1 : vm_bits_run_many(map, i, max, value);
}

#endif
