/* SPDX-License-Identifier: MIT */
/* The back end's functions as the core calls them: failed on request, counted and timed. */
#include <stdlib.h>
#include <time.h>

#include "internal.h"

static _Thread_local bool is_worker;

void vm_drv_mark_worker(void) { is_worker = true; }

uint64_t vm_now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void account(struct vm_ctx *c, uint64_t *calls, uint64_t start) {
  uint64_t ns = vm_now_ns() - start;
  if (calls) __atomic_fetch_add(calls, 1, __ATOMIC_RELAXED);
  __atomic_fetch_add(&c->driver_ns, ns, __ATOMIC_RELAXED);
  if (is_worker) __atomic_fetch_add(&c->worker_driver_ns, ns, __ATOMIC_RELAXED);
}

/* One relaxed load when nothing is armed. Without the lock, because the heap is also used under it. */
static bool injection_hit(struct vm_ctx *c, uint32_t kind) {
  uint64_t left;
  if (!(__atomic_load_n(&c->inject.kinds, __ATOMIC_RELAXED) & kind)) return false;
  left = __atomic_load_n(&c->inject.skip, __ATOMIC_RELAXED);
  while (left)
    if (__atomic_compare_exchange_n(&c->inject.skip, &left, left - 1, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
      return false;
  left = __atomic_load_n(&c->inject.count, __ATOMIC_RELAXED);
  while (left)
    if (__atomic_compare_exchange_n(&c->inject.count, &left, left - 1, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED))
      return true;
  return false;
}

void vm_inject_arm(struct vm_ctx *c, uint32_t kinds, uint64_t skip, uint64_t count, int error) {
  __atomic_store_n(&c->inject.kinds, 0, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.skip, skip, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.count, count, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.error, error, __ATOMIC_RELAXED);
  __atomic_store_n(&c->inject.kinds, count ? kinds : 0, __ATOMIC_RELEASE);
}

/* As the back ends do: what takes back is repeated while the driver is suspended. Others have been by now. */
static int injected(struct vm_ctx *c, uint32_t kind) {
  struct vm_patience p = {0};
  int error;
  do {
    if (!injection_hit(c, kind)) return 0;
    error = -__atomic_load_n(&c->inject.error, __ATOMIC_RELAXED);
  } while (error == -EAGAIN && vm_undoing() && vm_again(&p));
  return vm_fail(error, "failure injected");
}

#define CALL(kind, calls, expr)                \
  ({                                           \
    int ret_ = injected(c, kind);           \
    if (!ret_) {                               \
      uint64_t start_ = vm_now_ns();           \
      ret_ = (expr);                           \
      account(c, calls, start_);               \
    }                                          \
    ret_;                                      \
  })

int vm_drv_reserve(struct vm_ctx *c, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr,
                   uint32_t *kind, uint64_t *priv) {
  return CALL(VMEM_INJECT_RESERVE, NULL, c->be->reserve(c->bes, bytes, align, flags, addr, kind, priv));
}

int vm_drv_unreserve(struct vm_ctx *c, struct vm_space *s, bool *gone) {
  *gone = false;
  return CALL(VMEM_INJECT_RESERVE, NULL, c->be->unreserve(c->bes, s->base, s->bytes, s->priv, gone));
}

int vm_drv_slab_create(struct vm_ctx *c, uint64_t bytes, uint64_t page_size, uint32_t location,
                       int32_t device, uint64_t *priv) {
  return CALL(VMEM_INJECT_SLAB, &c->slab_calls,
              c->be->slab_create(c->bes, bytes, page_size, location, device, priv));
}

/* The core has forgotten the slab whatever comes of it, so a suspended driver is waited for. */
int vm_drv_slab_destroy(struct vm_ctx *c, struct vm_slab *s) {
  int err;
  vm_undo_begin();
  err = CALL(0, &c->slab_calls, c->be->slab_destroy(c->bes, s->priv, s->bytes));
  vm_undo_end();
  return err;
}

/* As part of a slab's life these count as slab calls. */
static int alias_map(struct vm_ctx *c, const struct vm_slab *s, uint64_t addr, uint64_t priv) {
  uint64_t most = c->info.bind_bytes ? c->info.bind_bytes : s->bytes, n;
  int err = 0;
  if (!c->be->bind) return c->be->map(c->bes, addr, s->bytes, s->priv, 0, 0, false);
  for (uint64_t at = 0; at < s->bytes && !err; at += n) {
    struct vm_bind_op op = {.kind = VM_BIND_MAP, .addr = addr + at, .slab = s->priv, .offset = at, .priv = priv};
    struct vm_bind_result r = {0};
    op.bytes = n = s->bytes - at < most ? s->bytes - at : most;
    err = c->be->bind(c->bes, &op, 1, &r);
  }
  return err;
}

int vm_drv_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind, uint64_t *addr, uint64_t *priv) {
  uint64_t align = c->granule > LARGE_PAGE ? c->granule : LARGE_PAGE;
  uint32_t flags = c->info.pub.caps & VMEM_CAP_PLAIN ? VMEM_RESERVE_PLAIN : 0, ignored;
  bool gone;
  int err = CALL(kind, &c->slab_calls, c->be->reserve(c->bes, s->bytes, align, flags, addr, &ignored, priv));
  if (err) return err;
  err = CALL(kind, &c->slab_calls, alias_map(c, s, *addr, *priv));
  /* Whatever is mapped goes with the reservation, or nothing is. */
  if (err) VM_UNDO(c->be->unreserve(c->bes, *addr, s->bytes, *priv, &gone));
  return err;
}

int vm_drv_unalias(struct vm_ctx *c, struct vm_slab *s) {
  bool gone = false;
  int err = 0;
  if (!s->alias) return 0;
  vm_undo_begin();
  if (!c->info.unreserve_unmaps) err = CALL(0, &c->slab_calls, c->be->unmap(c->bes, s->alias, s->bytes, false));
  if (!err) err = CALL(0, &c->slab_calls, c->be->unreserve(c->bes, s->alias, s->bytes, s->alias_priv, &gone));
  vm_undo_end();
  if (err && !gone) return err;
  s->alias = 0;
  return 0;
}

int vm_drv_discard(struct vm_ctx *c, struct vm_slab *s, uint32_t unit, uint32_t n) {
  return CALL(VMEM_INJECT_SLAB, &c->slab_calls,
              c->be->discard(c->bes, s->priv, (uint64_t)unit << c->shift, (uint64_t)n << c->shift));
}

int vm_drv_map(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_slab *s, uint32_t unit,
               uint32_t flags, bool sparse) {
  return CALL(VMEM_INJECT_MAP, &c->map_calls,
              c->be->map(c->bes, addr, bytes, s->priv, (uint64_t)unit << c->shift, flags, sparse));
}

int vm_drv_unmap(struct vm_ctx *c, uint64_t addr, uint64_t bytes, bool sparse) {
  return CALL(VMEM_INJECT_UNMAP, &c->unmap_calls, c->be->unmap(c->bes, addr, bytes, sparse));
}

int vm_drv_remap(struct vm_ctx *c, uint64_t addr, uint64_t bytes, struct vm_slab *s, uint32_t unit,
                 uint32_t flags) {
  return CALL(VMEM_INJECT_MAP, &c->map_calls,
              c->be->remap(c->bes, addr, bytes, s->priv, (uint64_t)unit << c->shift, flags));
}

/* Each operation counts as a call of its own where failures are asked for, or a test that fails the nth map
 * would reach none but the first; one that is hit fails them all. */
int vm_drv_bind(struct vm_ctx *c, const struct vm_bind_op *ops, size_t n, struct vm_bind_result *result) {
  uint64_t start;
  bool maps = false;
  int err = 0;
  *result = (struct vm_bind_result){0};
  for (size_t i = 0; i < n && !err; i++) {
    maps |= ops[i].kind != VM_BIND_UNMAP;
    err = injected(c, ops[i].kind == VM_BIND_UNMAP ? VMEM_INJECT_UNMAP : VMEM_INJECT_MAP);
  }
  if (err) return err;
  start = vm_now_ns();
  err = c->be->bind(c->bes, ops, n, result);
  account(c, maps ? &c->map_calls : &c->unmap_calls, start);
  return err;
}

int vm_drv_fill(struct vm_ctx *c, const struct vm_be_range *r, size_t n, uint8_t value,
                const vm_event *after, size_t num_after, vm_event *done) {
  return CALL(VMEM_INJECT_FILL, &c->fill_calls, c->be->fill(c->bes, r, n, value, after, num_after, done));
}

int vm_drv_clean(struct vm_ctx *c, const struct vm_be_range *r, size_t n, vm_event *done) {
  return CALL(VMEM_INJECT_CLEAN, &c->fill_calls, c->be->fill(c->bes, r, n, 0, NULL, 0, done));
}

int vm_drv_copy(struct vm_ctx *c, const struct vm_be_copy *copies, size_t n, const vm_event *after,
                size_t num_after, vm_event *done) {
  return CALL(VMEM_INJECT_FILL, &c->fill_calls, c->be->copy(c->bes, copies, n, after, num_after, done));
}

int vm_drv_event_finish(struct vm_ctx *c, vm_event e) {
  int ret;
  if (!e) return 0;
  ret = c->be->event_wait(c->bes, e);
  c->be->event_put(c->bes, e);
  return ret;
}

void *vm_calloc(struct vm_ctx *c, size_t n, size_t size) {
  void *p = injection_hit(c, VMEM_INJECT_HEAP) ? NULL : calloc(n, size);
  if (!p) vm_fail_at(-ENOMEM, 0, n * size, 0, "no heap memory for %zu bytes of bookkeeping", n * size);
  return p;
}

void *vm_realloc(struct vm_ctx *c, void *p, size_t n, size_t size) {
  void *q = injection_hit(c, VMEM_INJECT_HEAP) ? NULL : reallocarray(p, n, size);
  if (!q) vm_fail_at(-ENOMEM, 0, n * size, 0, "no heap memory for %zu bytes of bookkeeping", n * size);
  return q;
}
