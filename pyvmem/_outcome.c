/* SPDX-License-Identifier: MIT */
#if !defined(Py_LIMITED_API) && !defined(_CFFI_NO_LIMITED_API)
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>

/* clang-format off */
#include "_outcome.h"
/* clang-format on */

/* Sets the attribute or item `key` of `owner`, or removes it if the value is Ellipsis. */
static int assign(PyObject *owner, PyObject *key, PyObject *value) {
  int gone = value == Py_Ellipsis;
  if (PyUnicode_Check(key)) return PyObject_GenericSetAttr(owner, key, gone ? NULL : value);
  if (PySet_Check(owner)) return gone ? PySet_Discard(owner, key) : PySet_Add(owner, key);
  return gone ? PyObject_DelItem(owner, key) : PyObject_SetItem(owner, key, value);
}

/* Returns the attribute or item `key` of `owner`, or Ellipsis if it is missing. */
static PyObject *find(PyObject *owner, PyObject *key) {
  PyObject *found = NULL;
  if (PySet_Check(owner)) {
    found = PySet_Contains(owner, key) == 1 ? Py_None : NULL;
    Py_XINCREF(found);
  } else {
    found = PyUnicode_Check(key) ? PyObject_GetAttr(owner, key) : PyObject_GetItem(owner, key);
  }
  if (!found) {
    PyErr_Clear();
    Py_INCREF(Py_Ellipsis);
    found = Py_Ellipsis;
  }
  return found;
}

/* Swaps `values[at]` with the value that it replaces. */
static void exchange(PyObject *owner, PyObject *key, PyObject *values, Py_ssize_t at) {
  PyObject *old = find(owner, key), *value = PyList_GetItem(values, at);
  Py_XINCREF(value);
  /* Removing a missing key changes nothing. */
  int failed = !value || (!(value == Py_Ellipsis && old == Py_Ellipsis) && assign(owner, key, value) < 0);
  if (failed) PyErr_WriteUnraisable(owner); /* the records are inconsistent after this */
  PyList_SetItem(values, at, old);
  Py_XDECREF(value);
}

/* Applies the edits or, with `back`, undoes them in reverse order. */
static void apply(PyObject *edits, int back) {
  Py_ssize_t count = PyList_Size(edits);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *edit = PyList_GetItem(edits, back ? count - 1 - i : i);
    PyObject *owner = PyList_GetItem(edit, 0), *key = PyList_GetItem(edit, 1), *value = PyList_GetItem(edit, 2);
    if (!PyList_Check(owner) || !PyUnicode_Check(key)) {
      exchange(owner, key, edit, 2);
      continue;
    }
    for (Py_ssize_t at = 0; at < PyList_Size(owner); at++) exchange(PyList_GetItem(owner, at), key, value, at);
  }
}

#include "_holes.h"

int pyvmem_note(struct pyvmem_outcome *outcome, int code, uint64_t value) {
  PyObject *edits = (PyObject *)outcome->edits;
  outcome->code = code;
  outcome->value = code ? 0 : value;
  outcome->edits = 0;
  if (edits && !code) {
    PyGILState_STATE state = PyGILState_Ensure();
    apply(edits, 0);
    PyGILState_Release(state);
  }
  outcome->called = 1;
  return code;
}

void pyvmem_change(uintptr_t change, int back) {
  PyGILState_STATE state = PyGILState_Ensure();
  PyObject *list = (PyObject *)change, *next = back ? Py_False : Py_True;
  if (PyList_GetItem(list, 0) != next) {
    apply(PyList_GetItem(list, 1), back);
    Py_INCREF(next);
    PyList_SetItem(list, 0, next);
  }
  PyGILState_Release(state);
}

int pyvmem_batch(struct pyvmem_outcome *outcome, vmem_t vm, const struct vmem_op *ops, size_t n,
                 const struct vmem_after *after, size_t num_after, uint32_t flags) {
  pyvmem_holes_renew();
  return pyvmem_note(outcome, vmem_batch(vm, ops, n, after, num_after, flags), 0);
}

int pyvmem_submit(struct pyvmem_outcome *outcome, vmem_t vm, const struct vmem_op *ops, size_t n,
                  const struct vmem_after *after, size_t num_after, uint32_t flags) {
  vmem_ticket ticket = 0;
  int code = vmem_submit(vm, ops, n, after, num_after, flags, &ticket);
  return pyvmem_note(outcome, code, ticket);
}

int pyvmem_create(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t size, const struct vmem_create_opts *opts) {
  vmem_handle handle = 0;
  int code = vMemCreate(vm, size, opts, &handle);
  return pyvmem_note(outcome, code, handle);
}

int pyvmem_gather(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t count,
                  uint64_t stride) {
  vmem_handle handle = 0;
  int code = vmem_gather(vm, addr, bytes, count, stride, &handle);
  return pyvmem_note(outcome, code, handle);
}

int pyvmem_drop_range(struct pyvmem_outcome *outcome, vmem_t vm, vmem_handle handle, uint64_t offset, uint64_t bytes,
                      uint64_t count, uint64_t stride) {
  return pyvmem_note(outcome, vmem_drop_range(vm, handle, offset, bytes, count, stride), 0);
}

int pyvmem_reserve(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t size, const struct vmem_reserve_opts *opts) {
  uint64_t addr = 0;
  int code = vMemReserve(vm, size, opts, &addr);
  if (!code) pyvmem_holes_watch(vm, addr, size);
  return pyvmem_note(outcome, code, addr);
}

int pyvmem_free(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t addr, uint32_t flags) {
  if (outcome->called && !outcome->code) return 0; /* an earlier call freed the addresses, which may be in use again */
  /* must precede the call: once freed, the addresses may be reserved again */
  uint64_t watched = pyvmem_holes_forget(addr);
  int code = vMemFree(vm, addr, flags);
  if (code && watched) pyvmem_holes_watch(vm, addr, watched);
  return pyvmem_note(outcome, code, 0);
}

int pyvmem_open(struct pyvmem_outcome *outcome, const struct vmem_open_opts *opts) {
  vmem_t vm = 0;
  int code = vmem_open(opts, &vm);
  return pyvmem_note(outcome, code, vm);
}

int pyvmem_close(struct pyvmem_outcome *outcome, vmem_t vm) { return pyvmem_note(outcome, vmem_close(vm), 0); }
