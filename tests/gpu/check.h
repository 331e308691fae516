/* SPDX-License-Identifier: MIT */
/* check.h - helpers shared by the back-end checks. */
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "backend/backend.h"
#include "backend/cuda/api.h"

struct env {
  const struct vm_backend *b;
  void *be;
  struct vm_be_info info;
  const struct gpu_api *cu;
  uint64_t page; /* granule */
};

extern unsigned checks_passed, checks_failed;

/* Prints and counts one result; `why` of a failure is the library's own error text. */
bool check(const struct env *e, const char *name, bool ok);
void note(const struct env *e, const char *name, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

double now_us(void);
double median(double *values, size_t n);

/* Opens with the given granule (0: default); exits the process on failure. */
void env_open(struct env *e, const struct vm_backend *b, uint64_t granule);
/* Frees a reservation; returns 0 or the error. */
int put_range(const struct env *e, uint64_t addr, uint64_t bytes, uint64_t priv);

/* Kernels for checks: spin for `ns`, and store a byte. The primary context must be current. */
void kernel_spin(const struct env *e, gpu_stream stream, uint64_t ns);
gpu_result kernel_store(const struct env *e, uint64_t addr, uint32_t value);

/* The symbols of libcuda that only the checks need. */
void *cuda_symbol(const char *name);

/* A reservation and a slab for one group of checks. */
struct area {
  uint64_t addr, bytes, priv, slab, slab_bytes;
  uint32_t kind;
};

bool area_get(struct env *e, struct area *a, uint64_t bytes, uint64_t slab_bytes, uint32_t flags);
bool area_put(struct env *e, struct area *a);
void fill_sync(struct env *e, uint64_t addr, uint64_t bytes, uint8_t value);
bool reads_as(struct env *e, uint64_t addr, uint64_t bytes, uint8_t value);

void check_pages(struct env *e);
void check_events(struct env *e);
void check_threads(struct env *e);
void check_capture(struct env *e);

#endif
