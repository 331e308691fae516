/* SPDX-License-Identifier: MIT */
/*
 * retry.h - how long to repeat a call that the driver refuses only for the moment.
 *
 * While the machine goes to sleep NVIDIA's modules answer EAGAIN to everything, and this process still runs: on
 * the way there they save the video memory. A call that may fail is repeated for VM_PATIENCE_S. A
 * call that undoes something must not fail: it is repeated for as long as the answer is EAGAIN.
 */
#ifndef VMEM_RETRY_H
#define VMEM_RETRY_H

#include <stdbool.h>
#include <stdint.h>

/* Longer than it takes to save the memory of a card of 80 GB to a disk that takes 2 GB/s (40 s). */
#define VM_PATIENCE_S 60

/* One call's attempts; all zero before the first. */
struct vm_patience {
  uint64_t since_ns;
  long pause_ns;
};

/* Sleeps a little, longer each time. False, without sleeping: enough. */
bool vm_again(struct vm_patience *p);

/* Brackets of the calling thread around what must not give up; they nest. VM_UNDO (error.h) is one. */
void vm_undo_begin(void);
void vm_undo_end(void);
bool vm_undoing(void);

#endif
