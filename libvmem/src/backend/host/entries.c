/* SPDX-License-Identifier: MIT */
#include "backend/host/entries.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"

/* Finds the index of the first entry at or after addr. */
static size_t find(const struct host_entries *e, uint64_t addr) {
  size_t lo = 0, hi = e->n;
  while (lo < hi) {
    size_t mid = (lo + hi) / 2;
    if (e->v[mid] < addr)
      lo = mid + 1;
    else
      hi = mid;
  }
  return lo;
}

static bool inside(const struct host_entries *e, uint64_t addr) {
  uint64_t block = addr & ~(HOST_ENTRY - 1);
  size_t i = find(e, block);
  return addr != block && i < e->n && e->v[i] == block;
}

int host_entries_check(const struct host_entries *e, uint64_t addr, uint64_t bytes) {
  uint64_t at = inside(e, addr) ? addr : addr + bytes;
  if (!inside(e, at)) return 0;
  return vm_fail_at(-EIO, addr, bytes, HOST_ENTRY,
                    "0x%llx is inside an entry of 2 MiB, which cannot be changed in part", (unsigned long long)at);
}

void host_entries_drop(struct host_entries *e, uint64_t addr, uint64_t bytes) {
  size_t first = find(e, addr), end = find(e, addr + bytes);
  if (first == end) return;
  memmove(e->v + first, e->v + end, (e->n - end) * sizeof(*e->v));
  e->n -= end - first;
}

int host_entries_add(struct host_entries *e, uint64_t addr, uint64_t bytes) {
  size_t more = bytes / HOST_ENTRY, at;
  if (e->n + more > e->cap) {
    size_t cap = 2 * (e->n + more);
    uint64_t *v = realloc(e->v, cap * sizeof(*v));
    if (!v) return vm_fail(-ENOMEM, "heap: %zu entries", cap);
    e->v = v;
    e->cap = cap;
  }
  host_entries_drop(e, addr, bytes);
  at = find(e, addr);
  memmove(e->v + at + more, e->v + at, (e->n - at) * sizeof(*e->v));
  for (size_t i = 0; i < more; i++) e->v[at + i] = addr + i * HOST_ENTRY;
  e->n += more;
  return 0;
}
