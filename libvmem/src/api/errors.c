/* SPDX-License-Identifier: MIT */
/* The calling thread's last error. */
#include <stdio.h>
#include <string.h>

#include "api/api.h"

VMEM_API const char *vmem_last_error(void) {
  static _Thread_local char text[sizeof(((struct vmem_error *)0)->text) + sizeof(((struct vmem_error *)0)->op) + 4];
  const struct vmem_error *last = vm_error_last();
  if (!last->code) return "";
  snprintf(text, sizeof(text), "%s: %s", last->op, last->text);
  return text;
}

VMEM_API int vmem_get_error(struct vmem_error *error) {
  size_t size = error ? error->size : 0;
  struct vmem_error copy = *vm_error_last();
  if (size < offsetof(struct vmem_error, code) + sizeof(error->code)) return -EINVAL;
  copy.size = size;
  memcpy(error, &copy, size < sizeof(copy) ? size : sizeof(copy));
  return 0;
}
