/* SPDX-License-Identifier: MIT */
#include "base/error.h"

#include <errno.h>

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local struct vmem_error last;

void vm_error_begin(const char *op) {
  last.code = 0;
  last.status = 0;
  last.status_name[0] = 0;
  last.addr = last.bytes = last.limit = 0;
  last.text[0] = 0;
  snprintf(last.op, sizeof(last.op), "%s", op);
}

static void record(int code, uint64_t addr, uint64_t bytes, uint64_t limit, const char *fmt, va_list ap) {
  last.code = code;
  last.addr = addr;
  last.bytes = bytes;
  last.limit = limit;
  last.status = 0;
  last.status_name[0] = 0;
  vsnprintf(last.text, sizeof(last.text), fmt, ap);
}

int vm_fail(int code, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  record(code, 0, 0, 0, fmt, ap);
  va_end(ap);
  return code;
}

int vm_fail_at(int code, uint64_t addr, uint64_t bytes, uint64_t limit, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  record(code, addr, bytes, limit, fmt, ap);
  va_end(ap);
  return code;
}

int vm_fail_status(uint32_t status, const char *name) {
  size_t used = strlen(last.text);
  last.status = status;
  snprintf(last.status_name, sizeof(last.status_name), "%s", name ? name : "");
  snprintf(last.text + used, sizeof(last.text) - used, " (driver status 0x%x%s%s)", status,
           name ? " " : "", name ? name : "");
  return last.code;
}

void vm_error_save(struct vmem_error *out) { *out = last; }

void vm_error_restore(const struct vmem_error *in) {
  char op[sizeof(last.op)];
  memcpy(op, last.op, sizeof(op));
  last = *in;
  memcpy(last.op, op, sizeof(op));
}

VMEM_API const char *vmem_last_error(void) {
  static _Thread_local char text[sizeof(last.text) + sizeof(last.op) + 4];
  if (!last.code) return "";
  snprintf(text, sizeof(text), "%s: %s", last.op, last.text);
  return text;
}

VMEM_API int vmem_get_error(struct vmem_error *error) {
  size_t size = error ? error->size : 0;
  struct vmem_error copy = last;
  if (size < offsetof(struct vmem_error, code) + sizeof(error->code)) return -EINVAL;
  copy.size = size;
  memcpy(error, &copy, size < sizeof(copy) ? size : sizeof(copy));
  return 0;
}
