/* SPDX-License-Identifier: MIT */
/* The calling thread's last error. Every failing path calls one of these and returns its value. */
#ifndef VMEM_ERROR_H
#define VMEM_ERROR_H

#include <vmem.h>

#include "base/suspend_retry.h"

/* Records the error and returns `code` (a negative errno). The text needs no newline and no function
 * name: the public entry point sets that with vm_error_begin. */
int vm_fail(int code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Like vm_fail; also records the range or size in question and the limit that was reached (0 = none). */
int vm_fail_at(int code, uint64_t addr, uint64_t bytes, uint64_t limit, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* Adds the driver's status to the error just recorded; returns its code. `name` may be NULL. */
int vm_fail_status(uint32_t status, const char *name);

/* Begins a public function: names it and clears the previous error. */
void vm_error_begin(const char *op);

/* Copies the calling thread's error, to hand a worker's error to the thread that waits for it. */
void vm_error_save(struct vmem_error *out);
void vm_error_restore(const struct vmem_error *in);

const struct vmem_error *vm_error_last(void);

/* Makes a call that undoes something: the error recorded before remains, and the call is retried while the driver is
 * suspended (suspend_retry.h). */
#define VM_UNDO(call)                                                                                                  \
  do {                                                                                                                 \
    struct vmem_error why_;                                                                                            \
    vm_error_save(&why_);                                                                                              \
    vm_undo_begin();                                                                                                   \
    (void)(call);                                                                                                      \
    vm_undo_end();                                                                                                     \
    vm_error_restore(&why_);                                                                                           \
  } while (0)

#endif
