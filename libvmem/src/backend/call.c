/* SPDX-License-Identifier: MIT */
/* Calls to the back end's functions: counts and times them, and injects failures. */
#include "backend/driver.h"
#include "base/clock.h"
#include "base/probe.h"

static _Thread_local bool is_worker;

void vm_drv_mark_worker(void) { is_worker = true; }

/* Accounts for a call; returns how long it took. */
static uint64_t account(struct vm_ctx *c, uint64_t *calls, uint64_t start) {
  uint64_t ns = vm_now_ns() - start;
  if (calls) __atomic_fetch_add(calls, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&c->driver->ns, ns, __ATOMIC_RELAXED);
  if (is_worker) __atomic_fetch_add(&c->driver->worker_ns, ns, __ATOMIC_RELAXED);
  return ns;
}

/* `ns` is set to how long the call took; unchanged if a failure was injected instead. */
#define TIMED_CALL(kind, calls, ns, expr)                                                                              \
  ({                                                                                                                   \
    int ret_ = vm_injected(c, kind);                                                                                   \
    if (!ret_) {                                                                                                       \
      uint64_t start_ = vm_now_ns();                                                                                   \
      ret_ = (expr);                                                                                                   \
      ns = account(c, calls, start_);                                                                                  \
    }                                                                                                                  \
    ret_;                                                                                                              \
  })

#define CALL(kind, calls, expr)                                                                                        \
  ({                                                                                                                   \
    uint64_t ns_ __attribute__((unused));                                                                              \
    TIMED_CALL(kind, calls, ns_, expr);                                                                                \
  })

int vm_drv_reserve(struct vm_ctx *c, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                   uint64_t *priv) {
  return CALL(VMEM_INJECT_RESERVE, NULL, c->be->reserve(c->bes, bytes, align, flags, addr, kind, priv));
}

int vm_drv_unreserve(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone) {
  *gone = false;
  return CALL(VMEM_INJECT_RESERVE, NULL, c->be->unreserve(c->bes, addr, bytes, priv, gone));
}

int vm_drv_slab_create(struct vm_ctx *c, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device,
                       uint64_t *slab) {
  return CALL(VMEM_INJECT_SLAB, &c->driver->slab_calls,
              c->be->slab_create(c->bes, bytes, page_size, location, device, slab));
}

/* The caller forgets the slab whatever the outcome, so wait while the driver is suspended. */
int vm_drv_slab_destroy(struct vm_ctx *c, uint64_t slab, uint64_t bytes) {
  int err;
  vm_undo_begin();
  err = CALL(0, &c->driver->slab_calls, c->be->slab_destroy(c->bes, slab, bytes));
  vm_undo_end();
  return err;
}

int vm_drv_discard(struct vm_ctx *c, uint64_t slab, uint64_t offset, uint64_t bytes) {
  return CALL(VMEM_INJECT_SLAB, &c->driver->slab_calls, c->be->discard(c->bes, slab, offset, bytes));
}

int vm_drv_memory(struct vm_ctx *c, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes) {
  return CALL(0, NULL, c->be->mem_info(c->bes, location, device, free_bytes, total_bytes));
}

static int alias_map(struct vm_ctx *c, uint64_t slab, uint64_t bytes, uint64_t addr, uint64_t priv) {
  uint64_t most = c->info->bind_bytes ? c->info->bind_bytes : bytes, n;
  int err = 0;
  if (!c->be->bind) return c->be->map(c->bes, addr, bytes, slab, 0, 0, false);
  for (uint64_t at = 0; at < bytes && !err; at += n) {
    struct vm_bind_op op = {.kind = VM_BIND_MAP, .addr = addr + at, .slab = slab, .offset = at, .priv = priv};
    struct vm_bind_result r = {0};
    op.bytes = n = bytes - at < most ? bytes - at : most;
    err = c->be->bind(c->bes, &op, 1, &r);
  }
  return err;
}

int vm_drv_alias(struct vm_ctx *c, uint64_t slab, uint64_t bytes, uint32_t kind, uint64_t *addr, uint64_t *priv) {
  uint64_t align = c->granule > LARGE_PAGE ? c->granule : LARGE_PAGE, *calls = &c->driver->slab_calls;
  uint32_t flags = c->info->pub.caps & VMEM_CAP_PLAIN ? VMEM_RESERVE_PLAIN : 0, ignored;
  bool gone;
  int err = CALL(kind, calls, c->be->reserve(c->bes, bytes, align, flags, addr, &ignored, priv));
  if (err) return err;
  err = CALL(kind, calls, alias_map(c, slab, bytes, *addr, *priv));
  /* Either nothing is mapped yet, or unreserve removes the mappings too. */
  if (err) VM_UNDO(c->be->unreserve(c->bes, *addr, bytes, *priv, &gone));
  return err;
}

int vm_drv_unalias(struct vm_ctx *c, uint64_t addr, uint64_t bytes, uint64_t priv) {
  uint64_t *calls = &c->driver->slab_calls;
  bool gone = false;
  int err = 0;
  vm_undo_begin();
  if (!c->info->unreserve_unmaps) err = CALL(0, calls, c->be->unmap(c->bes, addr, bytes, false));
  if (!err) err = CALL(0, calls, c->be->unreserve(c->bes, addr, bytes, priv, &gone));
  vm_undo_end();
  return gone ? 0 : err;
}

int vm_drv_map(struct vm_ctx *c, const struct vm_bind_op *op) {
  uint64_t ns = 0;
  int err = TIMED_CALL(VMEM_INJECT_MAP, &c->driver->map_calls, ns,
                       c->be->map(c->bes, op->addr, op->bytes, op->slab, op->offset, op->flags, op->sparse));
  VM_PROBE5(map, c, op->addr, op->bytes, ns, err);
  return err;
}

int vm_drv_unmap(struct vm_ctx *c, uint64_t addr, uint64_t bytes, bool sparse) {
  uint64_t ns = 0;
  int err = TIMED_CALL(VMEM_INJECT_UNMAP, &c->driver->unmap_calls, ns, c->be->unmap(c->bes, addr, bytes, sparse));
  VM_PROBE5(unmap, c, addr, bytes, ns, err);
  return err;
}

int vm_drv_remap(struct vm_ctx *c, const struct vm_bind_op *op) {
  uint64_t ns = 0;
  int err = TIMED_CALL(VMEM_INJECT_MAP, &c->driver->map_calls, ns,
                       c->be->remap(c->bes, op->addr, op->bytes, op->slab, op->offset, op->flags));
  VM_PROBE5(map, c, op->addr, op->bytes, ns, err);
  return err;
}

/* With failure injection, each operation counts as a call: otherwise a test that fails the nth map would only reach
 * the first. An injected failure fails all operations. */
int vm_drv_bind(struct vm_ctx *c, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result) {
  uint64_t start, ns;
  bool maps = false;
  int err = 0;
  for (size_t i = 0; i < n && !err; i++) {
    maps |= ops[i].kind != VM_BIND_UNMAP;
    err = vm_injected(c, ops[i].kind == VM_BIND_UNMAP ? VMEM_INJECT_UNMAP : VMEM_INJECT_MAP);
  }
  if (err) return err;
  start = vm_now_ns();
  err = c->be->bind(c->bes, ops, n, result);
  ns = account(c, maps ? &c->driver->map_calls : &c->driver->unmap_calls, start);
  VM_PROBE4(bind, c, n, ns, err);
  return err;
}

int vm_drv_fill(struct vm_ctx *c, uint32_t kind, const struct vm_be_range *r, size_t n, uint8_t value,
                const vm_event *after, size_t num_after, vm_event *done) {
  return CALL(kind, &c->driver->fill_calls, c->be->fill(c->bes, r, n, value, after, num_after, done));
}

int vm_drv_copy(struct vm_ctx *c, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                vm_event *done) {
  return CALL(VMEM_INJECT_FILL, &c->driver->fill_calls, c->be->copy(c->bes, copies, n, after, num_after, done));
}

int vm_drv_event_from(struct vm_ctx *c, uint32_t kind, uint64_t handle, vm_event *e) {
  int err = vm_injected(c, VMEM_INJECT_EVENT);
  return err ? err : c->be->event_from(c->bes, kind, handle, e);
}

int vm_drv_event_query(struct vm_ctx *c, vm_event e) {
  int err = vm_injected(c, VMEM_INJECT_EVENT);
  return err ? err : c->be->event_query(c->bes, e);
}

int vm_drv_event_wait(struct vm_ctx *c, vm_event e) {
  int err = vm_injected(c, VMEM_INJECT_EVENT);
  return err ? err : c->be->event_wait(c->bes, e);
}

int vm_drv_event_finish(struct vm_ctx *c, vm_event *e) {
  int err = 0;
  if (!*e) return 0;
  err = c->be->event_wait(c->bes, *e);
  c->be->event_put(c->bes, *e);
  *e = 0;
  return err;
}

void vm_drv_event_follow(struct vm_ctx *c, vm_event *last, vm_event e) {
  if (*last) c->be->event_put(c->bes, *last);
  *last = e;
}
