/* SPDX-License-Identifier: MIT */
/* Calls of vmem.h that leave their outcome in the caller's memory before they return to Python: an exception
 * that a signal raises there (Ctrl-C) takes the return value with it, but not what is known of the call. cffi
 * reads the part after the includes (see _build.py). Each function returns what the one of vmem.h did. */
#include <vmem.h>

struct pyvmem_outcome {
  int32_t called;  /* 1: the call was made and has returned */
  int32_t code;    /* what it returned */
  uint64_t value;  /* what it made: a ticket, a handle, an address; 0 = nothing */
  uintptr_t edits; /* list of [owner, key, value]: applied if the call succeeds, before it returns; 0: none */
};

/* Notes what a call returned, and what it made; applies the edits if it succeeded, and forgets them.
 *
 * An edit sets an attribute of an object, past its __setattr__, where the key is a str, and else an item; to a set it
 * adds the key. Ellipsis as the value removes instead. With a list of owners and a str it sets the attribute of each to
 * the value at the same place of a list. Each value is replaced by the one that was there (Ellipsis: none), so that no
 * finalizer runs before the caller drops the edits. */
int pyvmem_note(struct pyvmem_outcome *outcome, int code, uint64_t value);
/* Makes edits without any call, or takes them back. `change` is a list of whether they are made, and of them; nothing
 * is done twice. */
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
