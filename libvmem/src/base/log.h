/* SPDX-License-Identifier: MIT */
/* Logs to the context's callback (vmem_open_opts.log). Never called under the context's lock. */
#ifndef VMEM_BASE_LOG_H
#define VMEM_BASE_LOG_H

#include "base/context.h"

/* Leaves the thread's error unchanged. */
void vm_log(const struct vm_ctx *c, uint32_t level, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
