/* SPDX-License-Identifier: MIT */
/* bits.h - bitmaps of any length, in words of 64 bits. */
#ifndef VMEM_BASE_BITS_H
#define VMEM_BASE_BITS_H

#include <stdbool.h>
#include <stdint.h>

static inline bool vm_bit(const uint64_t *map, uint32_t i) { return map[i / 64] >> (i % 64) & 1; }

void vm_bits_set(uint64_t *map, uint32_t i, uint32_t n, bool value);
/* Number of bits equal to `value` from i on, at most max. */
uint32_t vm_bits_run(const uint64_t *map, uint32_t i, uint32_t max, bool value);

#endif
