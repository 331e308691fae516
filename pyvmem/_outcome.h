/* SPDX-License-Identifier: MIT */
/* Wrappers of vmem.h functions that write their outcome to the caller's memory before they return to Python, where an
 * exception from a signal handler (Ctrl-C) discards the return value, but not the outcome. cffi
 * reads the part after the includes (see _build.py). Each function returns the result of its
 * counterpart in vmem.h. */
#include <vmem.h>

struct pyvmem_outcome {
  int32_t called;  /* 1: the call was made and has returned */
  int32_t code;    /* the call's return value */
  uint64_t value;  /* the ticket, handle or address that the call returned; 0 = none */
  uintptr_t edits; /* list of [owner, key, value]: applied if the call succeeds, before it returns; 0: none */
};

/* Records a call's return value and the handle that it created. If the call succeeded, applies the edits and clears
 * outcome->edits.
 *
 * If the key of an edit is a str, the edit sets an attribute of the owner, bypassing its __setattr__; otherwise it sets
 * an item, or adds the key to a set. The value Ellipsis removes the attribute, item or key. If the owner is a list and
 * the key a str, the value is a list, too: each owner's attribute is set to the value at the same index. The edit then
 * holds the previous value instead (Ellipsis: there was none), so that no finalizer runs before the caller drops the
 * edits. */
int pyvmem_note(struct pyvmem_outcome *outcome, int code, uint64_t value);
/* Applies edits without a call, or undoes them. `change` is a list [applied, edits]; the flag `applied` makes repeated
 * calls harmless. */
void pyvmem_change(uintptr_t change, int back);
int pyvmem_batch(struct pyvmem_outcome *outcome, vmem_t vm, const struct vmem_op *ops, size_t n,
                 const struct vmem_after *after, size_t num_after, uint32_t flags);
int pyvmem_submit(struct pyvmem_outcome *outcome, vmem_t vm, const struct vmem_op *ops, size_t n,
                  const struct vmem_after *after, size_t num_after, uint32_t flags);
int pyvmem_create(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t size, const struct vmem_create_opts *opts);
int pyvmem_gather(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t count,
                  uint64_t stride);
int pyvmem_drop_range(struct pyvmem_outcome *outcome, vmem_t vm, vmem_handle handle, uint64_t offset, uint64_t bytes,
                      uint64_t count, uint64_t stride);
int pyvmem_reserve(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t size, const struct vmem_reserve_opts *opts);
int pyvmem_free(struct pyvmem_outcome *outcome, vmem_t vm, uint64_t addr, uint32_t flags);
int pyvmem_open(struct pyvmem_outcome *outcome, const struct vmem_open_opts *opts);
int pyvmem_close(struct pyvmem_outcome *outcome, vmem_t vm);
