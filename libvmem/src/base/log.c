/* SPDX-License-Identifier: MIT */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

void vm_log(const struct vm_ctx *c, uint32_t level, const char *fmt, ...) {
  char text[1024];
  va_list ap;
  if (!c->opts.log || level > c->opts.log_level) return;
  va_start(ap, fmt);
  vsnprintf(text, sizeof(text), fmt, ap);
  va_end(ap);
  c->opts.log(c->opts.log_arg, level, text);
}
