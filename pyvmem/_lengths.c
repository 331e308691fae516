/* SPDX-License-Identifier: MIT */
/* What a step asks of every slot, in one pass over Python's own list. */
#if !defined(Py_LIMITED_API) && !defined(_CFFI_NO_LIMITED_API)
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stdint.h>

int64_t pyvmem_lengths(void *list, uint32_t count, const uint64_t *held, const uint64_t *capacity,
                       uint64_t *next, uint32_t *beyond, uint64_t *total);

/*
 * Reads `count` lengths from a list of exactly as many. `next` gets the rows that each slot holds
 * afterwards, max(length, held), `total` their sum, and `beyond` the places whose length exceeds their
 * capacity, in order; it has room for one more than `count`.
 *
 * Returns how many places are in `beyond`; or -1 - i where entry i is no int from 0 to 2^64 - 1.
 */
int64_t pyvmem_lengths(void *list, uint32_t count, const uint64_t *held, const uint64_t *capacity,
                       uint64_t *next, uint32_t *beyond, uint64_t *total)
{
  PyGILState_STATE state = PyGILState_Ensure();
  int64_t n = 0;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint64_t length = PyLong_AsUnsignedLongLong(PyList_GetItem(list, i));
    if (length == UINT64_MAX && PyErr_Occurred()) {
      PyErr_Clear();
      n = -1 - (int64_t)i;
      break;
    }
    beyond[n] = i;
    n += length > capacity[i];
    next[i] = length > held[i] ? length : held[i];
    sum += next[i];
  }
  PyGILState_Release(state);
  *total = sum;
  return n;
}
