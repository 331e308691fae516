/* SPDX-License-Identifier: MIT */
/* What a context tells its listener (vmem_open_opts.log). Never under the context's lock. */
#ifndef VMEM_BASE_LOG_H
#define VMEM_BASE_LOG_H

#include "base/context.h"

/* The thread's error stays what it was. */
void vm_log(const struct vm_ctx *c, uint32_t level, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
