/* SPDX-License-Identifier: MIT */
/*
 * entries.h - emulates the 2 MiB entries that a GPU's driver would create, and its refusal to change part of one.
 *
 * CPU mappings have no such entries, so a table records them. The caller locks it.
 */
#ifndef VMEM_BACKEND_HOST_ENTRIES_H
#define VMEM_BACKEND_HOST_ENTRIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HOST_ENTRY (2ull << 20)

struct host_entries {
  uint64_t *v; /* addresses of the entries, sorted */
  size_t n, cap;
};

/* -EIO if the range covers only part of an entry. */
int host_entries_check(const struct host_entries *e, uint64_t addr, uint64_t bytes);
/* Removes the entries of the range. */
void host_entries_drop(struct host_entries *e, uint64_t addr, uint64_t bytes);
/* Covers the range with entries, replacing those there. */
int host_entries_add(struct host_entries *e, uint64_t addr, uint64_t bytes);

#endif
