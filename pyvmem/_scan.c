/* SPDX-License-Identifier: MIT */
/* What a step asks of every slot, in one pass. */
#include <stddef.h>
#include <stdint.h>

uint32_t pyvmem_exceeding(const uint64_t *values, const uint64_t *limits, uint32_t count, uint32_t *found);

/* Writes the places where a value exceeds its limit to `found`, in order; returns how many there are. */
uint32_t pyvmem_exceeding(const uint64_t *values, const uint64_t *limits, uint32_t count, uint32_t *found)
{
  uint32_t n = 0;
  for (uint32_t i = 0; i < count; i++) {
    found[n] = i;
    n += values[i] > limits[i];
  }
  return n;
}
