/* SPDX-License-Identifier: MIT */
#include "base/error.h"

#include <errno.h>

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/probe.h"

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
  VM_PROBE3(error, last.op, code, last.text);
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
  snprintf(last.text + used, sizeof(last.text) - used, " (driver status 0x%x%s%s)", status, name ? " " : "",
           name ? name : "");
  return last.code;
}

void vm_error_save(struct vmem_error *out) { *out = last; }

void vm_error_restore(const struct vmem_error *in) {
  char op[sizeof(last.op)];
  memcpy(op, last.op, sizeof(op));
  last = *in;
  memcpy(last.op, op, sizeof(op));
}

const struct vmem_error *vm_error_last(void) { return &last; }
