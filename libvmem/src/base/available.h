/* SPDX-License-Identifier: MIT */
/*
 * available.h - memory that this process may still allocate: the machine's, within the limits of its control group and
 * of every group above it (version 1 or 2). No other module reads these files.
 *
 * A group's available memory is its limit minus its usage plus the page cache that can be reclaimed immediately. When a
 * charge exceeds a group's limit, the kernel reclaims from that group and those below it, and kills only if that is not
 * enough. It reclaims clean file pages, active or not, and in version 2 slab caches. It cannot count on dirty pages and
 * pages under writeback, which wait for a disk. Locked and tmpfs pages (including ours) are not on the file lists. The
 * usage is exact, the sizes of these lists are not: on Linux 6.18 they did not change while 100 MB were reclaimed. So
 * tmpfs memory that this process has allocated, but that the group's list does not show yet, is subtracted from the
 * cache.
 *
 * memory.high counts as a limit: beyond it every allocation is throttled. Swap does not count, as in the machine's
 * MemAvailable: a swapped page would stall a step. memory.min and memory.low of sibling groups, which protect their
 * cache from being reclaimed, are ignored.
 */
#ifndef VMEM_BASE_AVAILABLE_H
#define VMEM_BASE_AVAILABLE_H

#include <stdint.h>

/* The open files. They stay open, because the process may run out of descriptors later. */
struct vm_available;

/* `root` is put before every path: "" except in tests. Records -ENOMEM if descriptors or heap memory are short; missing
 * files are left out. */
int vm_available_open(const char *root, struct vm_available **out);
void vm_available_close(struct vm_available *a);

/* Reads the files again, because limits may have changed and the process may have moved. `held`: bytes of tmpfs that
 * this process knows to be allocated. *free_bytes is exact only below `enough`: files that are slow to read are skipped
 * if the result is at least that anyway. *total_bytes is what would be free if nothing else used memory. Not
 * thread-safe. */
void vm_available_read(struct vm_available *a, uint64_t held, uint64_t enough, uint64_t *free_bytes,
                       uint64_t *total_bytes);

/* Opens, reads and closes; for rare callers. */
int vm_available_now(uint64_t *free_bytes, uint64_t *total_bytes);

#endif
