/* SPDX-License-Identifier: MIT */
#include "_outcome.h"

#include "_holes.h"

int pyvmem_note(struct pyvmem_outcome *outcome, int code, uint64_t value) {
  outcome->code = code;
  outcome->value = code ? 0 : value;
  outcome->called = 1;
  return code;
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
  if (outcome->called && !outcome->code) return 0; /* the addresses may be another's by now */
  uint64_t watched = pyvmem_holes_forget(addr);    /* first: later the addresses may be another's */
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
