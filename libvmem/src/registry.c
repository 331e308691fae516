/* SPDX-License-Identifier: MIT */
/*
 * Contexts by number. A vmem_t is 32 bits of generation and 32 bits of place, so that a closed context
 * is recognised; every public function pins its context here and close waits for the pins.
 *
 * The table is the library's only shared state. A forked child finds it marked and starts an empty one
 * of its own: the parent's threads, locks and driver descriptors are not the child's to use.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "work/work.h"

#define MAX_CONTEXTS 256u

__attribute__((weak)) const struct vm_backend *const vm_backends[] = {&vm_backend_uvm, &vm_backend_stock, &vm_backend_cuda,
                                                                     &vm_backend_host, NULL};

static struct {
  pthread_mutex_t lock;
  pthread_cond_t unpinned;
  struct vm_ctx *ctx[MAX_CONTEXTS];
  uint32_t gen[MAX_CONTEXTS];
  uint32_t inherited[MAX_CONTEXTS]; /* generation of a context of the parent process; 0 = none */
  uint32_t next_gen;
} table = {.lock = PTHREAD_MUTEX_INITIALIZER, .unpinned = PTHREAD_COND_INITIALIZER};

static pthread_once_t once = PTHREAD_ONCE_INIT;

/* In the child only one thread is left, and it is here: no lock is needed, and the inherited one may be
 * held by a thread that does not exist any more. */
static void in_child(void) {
  pthread_mutex_init(&table.lock, NULL);
  pthread_cond_init(&table.unpinned, NULL);
  for (uint32_t i = 0; i < MAX_CONTEXTS; i++) {
    if (table.ctx[i]) table.inherited[i] = table.gen[i];
    table.ctx[i] = NULL;
  }
}

static void set_up(void) { pthread_atfork(NULL, NULL, in_child); }

const char *vmem_version(void) { return VMEM_VERSION; }

const char *vmem_backend_name(unsigned index) {
  for (unsigned i = 0; vm_backends[i]; i++)
    if (i == index) return vm_backends[i]->name;
  return NULL;
}

#define MAX_STRUCT 4096u /* no version's structure is larger: a larger size field is rubbish */

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

struct vm_ctx *vm_get(vmem_t vm, const char *op, int *err) {
  uint32_t i = (uint32_t)vm - 1, gen = (uint32_t)(vm >> 32);
  struct vm_ctx *c = NULL;
  vm_error_begin(op);
  pthread_mutex_lock(&table.lock);
  if (i < MAX_CONTEXTS && table.ctx[i] && table.gen[i] == gen) {
    c = table.ctx[i];
    c->pins++;
  } else if (i < MAX_CONTEXTS && gen && table.inherited[i] == gen) {
    *err = vm_fail(-ECHILD, "the context belongs to the process that this one was forked from");
  } else {
    *err = vm_fail(-EBADF, "0x%llx is no open context", (unsigned long long)vm);
  }
  pthread_mutex_unlock(&table.lock);
  return c;
}

void vm_put(struct vm_ctx *c) {
  pthread_mutex_lock(&table.lock);
  if (!--c->pins) pthread_cond_broadcast(&table.unpinned);
  pthread_mutex_unlock(&table.lock);
}

/* ---- opening --------------------------------------------------------------------------------- */

static const struct vm_backend *find_backend(const char *name) {
  for (size_t i = 0; vm_backends[i]; i++)
    if (!strcmp(vm_backends[i]->name, name)) return vm_backends[i];
  vm_fail(-EINVAL, "no back end is called \"%.32s\"", name);
  return NULL;
}

int vmem_probe(const char *backend, int32_t device, uint32_t flags, struct vmem_probe_info *info) {
  struct vmem_probe_info found = {.size = sizeof(found)};
  const struct vm_backend *be;
  vm_error_begin("vmem_probe");
  if (!backend || !info) return vm_fail(-EINVAL, "NULL argument");
  if (flags & ~VMEM_OPEN_FORCE) return vm_fail(-EINVAL, "unknown flags 0x%x", flags & ~VMEM_OPEN_FORCE);
  if (!(be = find_backend(backend))) return -EINVAL;
  vm_backend_probe(be, device, flags, &found);
  vm_error_begin("vmem_probe");
  return vm_copy_out(info, &found, sizeof(found), "vmem_probe_info");
}

static unsigned log2_of(uint64_t x) { return 63 - (unsigned)__builtin_clzll(x); }

static int check_opts(const struct vmem_open_opts *o) {
  if (o->flags & ~VMEM_OPEN_FORCE) return vm_fail(-EINVAL, "unknown flags 0x%x", o->flags & ~VMEM_OPEN_FORCE);
  if (o->num_devices > VMEM_MAX_DEVICES)
    return vm_fail_at(-EINVAL, 0, o->num_devices, VMEM_MAX_DEVICES, "%u devices, at most %u", o->num_devices,
                      VMEM_MAX_DEVICES);
  for (uint32_t i = 0; i < o->num_devices; i++)
    for (uint32_t k = 0; k < i; k++)
      if (o->devices[i] == o->devices[k]) return vm_fail(-EINVAL, "device %d is named twice", o->devices[i]);
  if (o->granule && !vm_is_pow2(o->granule))
    return vm_fail_at(-EINVAL, 0, o->granule, 0, "granule %llu is no power of two", (unsigned long long)o->granule);
  if (o->slab_size && (!vm_is_pow2(o->slab_size) || o->slab_size < o->granule || o->slab_size > 1ull << 40))
    return vm_fail_at(-EINVAL, 0, o->slab_size, 0, "slab size %llu is no power of two from the granule to 1 TiB",
                      (unsigned long long)o->slab_size);
  return 0;
}

static void pools_init(struct vm_ctx *c) {
  c->pools[0] = (struct vm_pool){.location = VMEM_DEVICE, .device = c->opts.devices[0]};
  c->pools[1] = (struct vm_pool){.location = VMEM_HOST, .device = c->opts.devices[0]};
  for (uint32_t i = 1; i < c->opts.num_devices; i++)
    c->pools[1 + i] = (struct vm_pool){.location = VMEM_PEER, .device = c->opts.devices[i]};
  for (uint32_t i = 0; i < VM_PLACES; i++) {
    c->pools[VM_PLACES + i] = c->pools[i];
    c->pools[VM_PLACES + i].large = true;
  }
}

static int open_one(const struct vm_backend *be, const struct vmem_open_opts *o, struct vm_ctx **out) {
  struct vm_ctx *c = calloc(1, sizeof(*c));
  pthread_condattr_t attr;
  int err;
  if (!c) return vm_fail(-ENOMEM, "no heap memory for a context");
  c->opts = *o;
  if (!c->opts.num_devices) c->opts.num_devices = 1;
  if ((err = vm_backend_open(be, &c->opts, &c->info, &c->bes))) {
    free(c);
    return err;
  }
  c->be = c->info.table;
  if (c->info.most_mappings && o->max_mappings > c->info.most_mappings) {
    err = vm_fail_at(-EINVAL, 0, o->max_mappings, c->info.most_mappings,
                     "max_mappings %llu: the driver has handles for %llu", (unsigned long long)o->max_mappings,
                     (unsigned long long)c->info.most_mappings);
    VM_UNDO(c->be->close(c->bes));
    free(c);
    return err;
  }
  c->granule = c->info.pub.granule;
  c->shift = log2_of(c->granule);
  c->chunk_units = c->granule < LARGE_PAGE ? (uint32_t)(LARGE_PAGE >> c->shift) : 1;
  c->large_pages = c->granule < LARGE_PAGE && !c->info.one_page_slabs;
  c->chunk_shift = log2_of(c->chunk_units);
  c->info.pub.size = sizeof(c->info.pub);
  c->info.pub.num_devices = c->opts.num_devices;
  if (o->max_mappings) c->info.pub.max_mappings = o->max_mappings;
  if (o->slab_size) c->info.pub.slab_size = o->slab_size;
  if (c->info.pub.slab_size < c->granule) c->info.pub.slab_size = c->granule;
  snprintf(c->info.pub.backend, sizeof(c->info.pub.backend), "%s", be->name);
  if (!c->opts.pool_high) c->opts.pool_high = c->info.pool_high;
  if (c->opts.pool_high < c->opts.pool_low) c->opts.pool_high = c->opts.pool_low;
  pools_init(c);
  c->clean.background = !c->be->discard && !c->info.no_contents;
  pthread_mutex_init(&c->lock, NULL);
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&c->done_cond, &attr);
  pthread_cond_init(&c->work_cond, &attr);
  pthread_condattr_destroy(&attr);
  c->queue_tail = &c->queue;
  c->waiting_tail = &c->waiting;
  *out = c;
  return 0;
}

/* The first back end that opens; notes why those before it were passed over. */
static int open_auto(const struct vmem_open_opts *o, struct vm_ctx **out) {
  char why[sizeof((*out)->info.pub.why)] = "";
  size_t used = 0;
  int err = -ENODEV;
  for (size_t i = 0; vm_backends[i]; i++) {
    struct vmem_error e;
    if (!(err = open_one(vm_backends[i], o, out))) {
      memcpy((*out)->info.pub.why, why, sizeof(why));
      return 0;
    }
    vm_error_save(&e);
    if (used < sizeof(why))
      used += (size_t)snprintf(why + used, sizeof(why) - used, "%s%s: %.150s", used ? "; " : "", vm_backends[i]->name, e.text);
  }
  return vm_fail(err, "no back end can be opened: %.400s", why);
}

/* Best effort: what the driver refuses to give back it takes back when the back end is closed. */
static void close_spaces(struct vm_ctx *c) {
  for (size_t i = 0; i < c->nspaces; i++) {
    struct vm_space *s = c->spaces[i];
    uint64_t a = s->base, end = s->base + s->bytes, n;
    bool gone;
    for (; a < end && s->mapped && !c->info.unreserve_unmaps; a += n) {
      struct vm_pte *p = vm_pte(c, s, a);
      n = vm_space_run(c, s, a, end - a);
      if (p && p->flags & PTE_MAPPED) vm_drv_unmap(c, a, n, s->kind & VMEM_RANGE_SPARSE);
    }
    vm_drv_unreserve(c, s, &gone);
    vm_space_destroy(s);
  }
  free(c->spaces);
}

/* Nobody else knows the context any more. A suspended driver is waited for. */
static void tear_down(struct vm_ctx *c) {
  vm_worker_stop(c);
  vm_tickets_free(c);
  vm_undo_begin();
  close_spaces(c);
  for (uint32_t k = 1; k < c->nslabs; k++)
    if (c->slabs[k]) vm_slab_destroy(c, c->slabs[k]);
  free(c->slabs);
  for (uint32_t k = 1; k < c->nhdls; k++) free(c->hdls[k].runs);
  free(c->hdls);
  c->be->close(c->bes);
  vm_undo_end();
  pthread_mutex_destroy(&c->lock);
  pthread_cond_destroy(&c->done_cond);
  pthread_cond_destroy(&c->work_cond);
  free(c);
}

int vmem_open(const struct vmem_open_opts *opts, vmem_t *vm) {
  struct vmem_open_opts o;
  const struct vm_backend *be = NULL;
  struct vm_ctx *c = NULL;
  uint32_t i;
  int err;
  vm_error_begin("vmem_open");
  if (!vm) return vm_fail(-EINVAL, "NULL argument");
  if ((err = vm_copy_in(&o, sizeof(o), opts, "vmem_open_opts")) || (err = check_opts(&o))) return err;
  pthread_once(&once, set_up);
  if (!o.backend) o.backend = "auto";
  if (strcmp(o.backend, "auto") && !(be = find_backend(o.backend))) return -EINVAL;
  err = be ? open_one(be, &o, &c) : open_auto(&o, &c);
  if (err) return err;
  c->opts.backend = c->be->name; /* the caller's string need not live on */
  if (c->opts.pool_low && (err = vm_worker_start(c))) {
    VM_UNDO(tear_down(c));
    return err;
  }
  pthread_mutex_lock(&table.lock);
  for (i = 0; i < MAX_CONTEXTS && (table.ctx[i] || table.inherited[i]); i++) {
  }
  if (i < MAX_CONTEXTS) {
    if (!++table.next_gen) table.next_gen = 1;
    table.ctx[i] = c;
    table.gen[i] = table.next_gen;
    c->tag = (table.next_gen & 0xfff) ? (table.next_gen & 0xfff) : 0x7ff;
    *vm = (uint64_t)table.next_gen << 32 | (i + 1);
  }
  pthread_mutex_unlock(&table.lock);
  if (i < MAX_CONTEXTS) return 0;
  tear_down(c);
  return vm_fail_at(-ENOMEM, 0, 0, MAX_CONTEXTS, "%u contexts are open already", MAX_CONTEXTS);
}

/* ---- closing --------------------------------------------------------------------------------- */

int vmem_close(vmem_t vm) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_close", &err);
  uint32_t i = (uint32_t)vm - 1;
  if (!c) return err;
  pthread_mutex_lock(&table.lock);
  if (table.ctx[i] != c) { /* another thread is closing it */
    if (!--c->pins) pthread_cond_broadcast(&table.unpinned);
    pthread_mutex_unlock(&table.lock);
    return vm_fail(-EBADF, "0x%llx is no open context", (unsigned long long)vm);
  }
  table.ctx[i] = NULL;
  c->pins--;
  pthread_mutex_unlock(&table.lock);

  pthread_mutex_lock(&c->lock);
  c->closing = true;
  pthread_cond_broadcast(&c->done_cond);
  pthread_mutex_unlock(&c->lock);
  pthread_mutex_lock(&table.lock);
  while (c->pins) pthread_cond_wait(&table.unpinned, &table.lock);
  pthread_mutex_unlock(&table.lock);

  vm_inject_arm(c, 0, 0, 0, 0);
  tear_down(c);
  return 0;
}

int vmem_query(vmem_t vm, struct vmem_info *info) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_query", &err);
  if (!c) return err;
  err = vm_copy_out(info, &c->info.pub, sizeof(c->info.pub), "vmem_info");
  vm_put(c);
  return err;
}
