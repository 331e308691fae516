/* SPDX-License-Identifier: MIT */
/*
 * entries.h - the entries of 2 MiB that a GPU's driver would have made, and its refusal to change a part of one.
 *
 * Memory of a CPU has none, so they are kept in a table. Locked by the caller.
 */
#ifndef VMEM_BACKEND_HOST_ENTRIES_H
#define VMEM_BACKEND_HOST_ENTRIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOST_ENTRY (2ull << 20)

struct host_entries {
  uint64_t *v; /* addresses, in order */
  size_t n, cap;
};

/* -EIO where the range takes a part of an entry. */
int host_entries_check(const struct host_entries *e, uint64_t addr, uint64_t bytes);
/* The range has no entries any more. */
void host_entries_drop(struct host_entries *e, uint64_t addr, uint64_t bytes);
/* It has nothing but entries: they take the place of those that were there. */
int host_entries_add(struct host_entries *e, uint64_t addr, uint64_t bytes);

#endif
