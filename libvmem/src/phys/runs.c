/* SPDX-License-Identifier: MIT */
/* Lists of runs, the contents of a handle. */
#include <stdlib.h>

#include "phys/phys.h"

struct vm_run *vm_runs_add(struct vm_ctx *c, struct vm_run *runs, uint32_t *n, struct vm_run r) {
  if (*n && runs[*n - 1].slab == r.slab && runs[*n - 1].unit + runs[*n - 1].n == r.unit) {
    runs[*n - 1].n += r.n;
    return runs;
  }
  if (!(*n & (*n - 1))) { /* capacity: the next power of two */
    struct vm_run *v = vm_realloc(c, runs, *n ? 2 * (size_t)*n : 1, sizeof(*runs));
    if (!v) return NULL;
    runs = v;
  }
  runs[(*n)++] = r;
  return runs;
}

void vm_runs_put(struct vm_ctx *c, struct vm_run *runs, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (runs[i].slab) vm_units_put(c, runs[i].slab, runs[i].unit, runs[i].n);
  free(runs);
}

int vm_runs_take(struct vm_ctx *c, struct vm_pool *p, uint64_t units, uint32_t align, struct vm_run **out,
                 uint32_t *nout, uint64_t *missing) {
  struct vm_run *runs = NULL, *v;
  struct vm_place place = {0};
  uint64_t taken = 0;
  uint32_t n = 0;
  *missing = 0;
  while (units) {
    struct vm_run r = vm_pool_take(c, p, units, align, &place);
    if (!r.n) *missing = units;
    if (!r.n || !(v = vm_runs_add(c, runs, &n, r))) {
      if (r.n) vm_units_put(c, r.slab, r.unit, r.n);
      vm_runs_put(c, runs, n);
      return -ENOMEM;
    }
    runs = v;
    units -= r.n;
    taken += r.n;
    place = (struct vm_place){.slab = r.slab, .unit = r.unit + r.n};
    if (c->large_entries) place.offset = taken & (c->chunk_units - 1); /* most mappings begin at a block */
  }
  *out = runs;
  *nout = n;
  return 0;
}
