/* SPDX-License-Identifier: MIT */
#include <string.h>

#include "api/api.h"

#define MAX_STRUCT 4096u /* larger than any version's structure: a larger size field is garbage */

int vm_copy_in(void *to, size_t to_size, const void *from, const char *what) {
  size_t size;
  memset(to, 0, to_size);
  if (!from) return 0;
  memcpy(&size, from, sizeof(size));
  if (size < 2 * sizeof(size_t) || size > MAX_STRUCT)
    return vm_fail_at(-EINVAL, 0, size, 0, "%s: its size field says %zu", what, size);
  if (size > to_size) {
    for (size_t i = to_size; i < size; i++)
      if (((const char *)from)[i])
        return vm_fail_at(-EINVAL, 0, size, to_size, "%s: uses fields that this version does not know", what);
    size = to_size;
  }
  memcpy(to, from, size);
  return 0;
}

int vm_copy_out(void *to, const void *from, size_t from_size, const char *what) {
  size_t size;
  if (!to) return vm_fail(-EINVAL, "%s: NULL", what);
  memcpy(&size, to, sizeof(size));
  if (size < 2 * sizeof(size_t) || size > MAX_STRUCT)
    return vm_fail_at(-EINVAL, 0, size, 0, "%s: its size field says %zu", what, size);
  memcpy((char *)to + sizeof(size), (const char *)from + sizeof(size),
         (size < from_size ? size : from_size) - sizeof(size));
  if (size > from_size) memset((char *)to + from_size, 0, size - from_size);
  return 0;
}
