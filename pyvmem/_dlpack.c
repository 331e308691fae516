/* SPDX-License-Identifier: MIT */
/*
 * Tensors over addresses, through DLPack. The structures are those of DLPack 1.x and of the earlier, unversioned form
 * (dmlc/dlpack, include/dlpack/dlpack.h). No code in this file accesses the memory that they describe.
 * A managed tensor owns a reference to a Python object that keeps the reservation alive.
 */
#if !defined(Py_LIMITED_API) && !defined(_CFFI_NO_LIMITED_API)
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_holes.h"

struct dl_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct dl_managed {
  struct dl_tensor tensor;
  void *owner;
  void (*deleter)(struct dl_managed *);
};

struct dl_managed_versioned {
  uint32_t major, minor;
  void *owner;
  void (*deleter)(struct dl_managed_versioned *);
  uint64_t flags;
  struct dl_tensor tensor;
};

_Static_assert(sizeof(struct dl_tensor) == 48, "DLTensor");
_Static_assert(sizeof(struct dl_managed) == 64, "DLManagedTensor");
_Static_assert(sizeof(struct dl_managed_versioned) == 80, "DLManagedTensorVersioned");

void *pyvmem_dlpack_capsule(void *owner, uint64_t addr, int32_t device_type, int32_t device_id, uint8_t code,
                            uint8_t bits, int32_t ndim, const int64_t *shape, const int64_t *strides, int versioned);

/* The consumer may release the tensor in any thread, with or without the GIL, even after the
 * interpreter has finished. */
static void drop_owner(void *owner) {
  if (!Py_IsInitialized()) return;
  PyGILState_STATE state = PyGILState_Ensure();
  Py_DecRef((PyObject *)owner);
  PyGILState_Release(state);
}

static void delete_plain(struct dl_managed *managed) {
  if (!managed) return;
  drop_owner(managed->owner);
  free(managed);
}

static void delete_versioned(struct dl_managed_versioned *managed) {
  if (!managed) return;
  drop_owner(managed->owner);
  free(managed);
}

/* A capsule that still has its original name was never consumed; its tensor must be deleted here. */
static void destroy_plain(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor")) delete_plain(PyCapsule_GetPointer(capsule, "dltensor"));
}

static void destroy_versioned(PyObject *capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
    delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

/*
 * Returns a new reference to a capsule with a new tensor; NULL, with MemoryError set, if the heap is exhausted.
 * Called with the GIL held, unlike the other functions that cffi declares. Creates tensor and capsule in one call:
 * between two calls, an exception from a signal handler would leave a tensor with no owner, or with two.
 */
void *pyvmem_dlpack_capsule(void *owner, uint64_t addr, int32_t device_type, int32_t device_id, uint8_t code,
                            uint8_t bits, int32_t ndim, const int64_t *shape, const int64_t *strides, int versioned) {
  pyvmem_holes_renew();
  size_t head = versioned ? sizeof(struct dl_managed_versioned) : sizeof(struct dl_managed);
  char *block = calloc(1, head + 2 * (size_t)ndim * sizeof(int64_t));
  if (!block) return PyErr_NoMemory();
  int64_t *dims = (int64_t *)(block + head);
  memcpy(dims, shape, (size_t)ndim * sizeof(int64_t));
  memcpy(dims + ndim, strides, (size_t)ndim * sizeof(int64_t));
  struct dl_tensor tensor = {
      .data = (void *)(uintptr_t)addr,
      .device_type = device_type,
      .device_id = device_id,
      .ndim = ndim,
      .code = code,
      .bits = bits,
      .lanes = 1,
      .shape = dims,
      .strides = dims + ndim,
  };
  if (versioned) {
    struct dl_managed_versioned *managed = (void *)block;
    managed->major = 1;
    managed->owner = owner;
    managed->deleter = delete_versioned;
    managed->tensor = tensor;
  } else {
    struct dl_managed *managed = (void *)block;
    managed->tensor = tensor;
    managed->owner = owner;
    managed->deleter = delete_plain;
  }
  PyObject *capsule = versioned ? PyCapsule_New(block, "dltensor_versioned", destroy_versioned)
                                : PyCapsule_New(block, "dltensor", destroy_plain);
  if (capsule)
    Py_IncRef((PyObject *)owner);
  else
    free(block);
  return capsule;
}
