/* SPDX-License-Identifier: MIT */
#ifndef VMEM_BASE_CLOCK_H
#define VMEM_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t vm_now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline struct timespec vm_timespec(uint64_t ns) {
  return (struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
}

#endif
