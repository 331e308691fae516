/* SPDX-License-Identifier: MIT */
/*
 * suspend_retry.h - retries of driver calls that return EAGAIN because the machine is being suspended.
 *
 * During a suspend NVIDIA's modules return EAGAIN from every call while they save the video memory, and this process
 * still runs. A call that may fail is retried for VM_SUSPEND_RETRY_S. A call that undoes something must not fail: it is
 * retried until it returns something else.
 */
#ifndef VMEM_SUSPEND_RETRY_H
#define VMEM_SUSPEND_RETRY_H

#include <stdbool.h>
#include <stdint.h>

/* Longer than it takes to save the memory of a card of 80 GB to a disk that writes 2 GB/s (40 s). */
#define VM_SUSPEND_RETRY_S 60

/* The retries of one call; all zero before the first. */
struct vm_suspend_retry {
  uint64_t since_ns;
  long pause_ns;
};

/* Sleeps before the next attempt, longer each time. False, without sleeping, if the time is up: give up. */
bool vm_suspend_wait(struct vm_suspend_retry *p);

/* Between these two, the calling thread's calls never give up. Pairs nest; VM_UNDO (error.h) uses them. */
void vm_undo_begin(void);
void vm_undo_end(void);
bool vm_undoing(void);

#endif
