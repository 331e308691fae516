/* SPDX-License-Identifier: MIT */
/*
 * available.h - memory that this process may still take: the machine's, and that of its control group and of every
 * group above it, version 1 or 2. No other module queries it.
 *
 * For a group this is its limit minus its usage plus the page cache that can be reclaimed at once. When a charge
 * exceeds a group's limit, the kernel reclaims from that group and those below it, and kills only if that is not
 * enough. It takes clean pages of files, active or not, and in version 2 slab caches. It does not count on dirty
 * pages and pages under writeback, which wait for a disk. Locked pages, and those of tmpfs (ours, too), are not on
 * the lists of files. The usage is exact, the sizes of these lists are not: on Linux 6.18 they did not change while
 * 100 MB were reclaimed. So tmpfs that this process has allocated, and that the group's list does not show yet, is
 * taken off the cache.
 *
 * memory.high counts as a limit: beyond it every allocation is throttled. Swap counts for nothing, as in the
 * machine's MemAvailable: a swapped page would stop a step. memory.min and memory.low of groups beside this one, which
 * keep their cache from being reclaimed, are not looked at.
 */
#ifndef VMEM_BASE_AVAILABLE_H
#define VMEM_BASE_AVAILABLE_H

#include <stdint.h>

/* The open files. They stay open, for a process may run out of descriptors. */
struct vm_available;

/* `root` is put before every path: "" but in tests. -ENOMEM recorded where descriptors or heap memory are short; what
 * is not there is left out. */
int vm_available_open(const char *root, struct vm_available **out);
void vm_available_close(struct vm_available *a);

/* As of now: limits may have changed and the process moved since. `held`: bytes of tmpfs that this process knows to be
 * allocated. *free_bytes is exact only below `enough`: files that take the kernel long are left unread where they would
 * not change the answer. *total_bytes is what there could be if nothing else were using memory. Not thread-safe. */
void vm_available_read(struct vm_available *a, uint64_t held, uint64_t enough, uint64_t *free_bytes,
                       uint64_t *total_bytes);

/* Opens, reads and closes; for rare callers. */
int vm_available_now(uint64_t *free_bytes, uint64_t *total_bytes);

#endif
