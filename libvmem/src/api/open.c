/* SPDX-License-Identifier: MIT */
/* Opening and closing; capabilities of back ends and contexts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/api.h"
#include "base/log.h"

VMEM_API const char *vmem_version(void) { return VMEM_VERSION; }

VMEM_API const char *vmem_backend_name(unsigned index) {
  for (unsigned i = 0; vm_backends[i]; i++)
    if (i == index) return vm_backends[i]->name;
  return NULL;
}

/* `beside`: for the error message, another name that the caller accepts, followed by ", ". */
static const struct vm_backend *find_backend(const char *name, const char *beside) {
  char names[128] = "";
  size_t used = 0;
  for (size_t i = 0; vm_backends[i]; i++) {
    if (!strcmp(vm_backends[i]->name, name)) return vm_backends[i];
    if (used < sizeof(names))
      used += (size_t)snprintf(names + used, sizeof(names) - used, "%s%s", used ? ", " : "", vm_backends[i]->name);
  }
  vm_fail(-EINVAL, "unknown back end \"%.32s\"; known are %s%s", name, beside, names);
  return NULL;
}

VMEM_API int vmem_probe(const char *backend, int32_t device, uint32_t flags, struct vmem_probe_info *info) {
  struct vmem_probe_info found = {.size = sizeof(found)};
  const struct vm_backend *be;
  vm_error_begin("vmem_probe");
  if (!backend || !info) return vm_fail(-EINVAL, "NULL argument");
  if (flags) return vm_fail(-EINVAL, "unknown flags 0x%x", flags);
  if (!(be = find_backend(backend, ""))) return -EINVAL;
  vm_cancel_later();
  vm_backend_probe(be, device, &found);
  vm_cancel_now();
  vm_error_begin("vmem_probe");
  return vm_copy_out(info, &found, sizeof(found), "vmem_probe_info");
}

static unsigned log2_of(uint64_t x) { return 63 - (unsigned)__builtin_clzll(x); }

static int check_opts(const struct vmem_open_opts *o) {
  if (o->flags & ~VMEM_OPEN_LARGE_ENTRIES)
    return vm_fail(-EINVAL, "unknown flags 0x%x", o->flags & ~VMEM_OPEN_LARGE_ENTRIES);
  if (o->num_devices > VMEM_MAX_DEVICES)
    return vm_fail_at(-EINVAL, 0, o->num_devices, VMEM_MAX_DEVICES, "%u devices, at most %u", o->num_devices,
                      VMEM_MAX_DEVICES);
  for (uint32_t i = 0; i < o->num_devices; i++)
    for (uint32_t k = 0; k < i; k++)
      if (o->devices[i] == o->devices[k]) return vm_fail(-EINVAL, "device %d is listed twice", o->devices[i]);
  if (o->granule && !vm_is_pow2(o->granule))
    return vm_fail_at(-EINVAL, 0, o->granule, 0, "granule %llu is not a power of two", (unsigned long long)o->granule);
  if (o->slab_size && (!vm_is_pow2(o->slab_size) || o->slab_size < o->granule || o->slab_size > 1ull << 40))
    return vm_fail_at(-EINVAL, 0, o->slab_size, 0, "slab size %llu is not a power of two between the granule and 1 TiB",
                      (unsigned long long)o->slab_size);
  if (o->log_level > VMEM_LOG_DEBUG || o->log_reserved)
    return vm_fail_at(-EINVAL, 0, o->log_level, VMEM_LOG_DEBUG, "bad log level %u or reserved field", o->log_level);
  return 0;
}

/* A context and the state of all its layers, allocated together. */
struct context {
  struct vm_ctx c;
  struct vm_be_info info;
  struct vm_driver driver;
  struct vm_phys phys;
  struct vm_virt virt;
  struct vm_work work;
};

static struct vm_ctx *context_new(void) {
  struct context *all = calloc(1, sizeof(*all));
  if (!all) return NULL;
  all->c.info = &all->info;
  all->c.driver = &all->driver;
  all->c.phys = &all->phys;
  all->c.virt = &all->virt;
  all->c.work = &all->work;
  return &all->c; /* the first member, so freeing it frees all */
}

static int open_one(const struct vm_backend *be, const struct vmem_open_opts *o, struct vm_ctx **out) {
  struct vm_ctx *c = context_new();
  pthread_condattr_t attr;
  int err;
  if (!c) return vm_fail(-ENOMEM, "no heap memory for a context");
  c->opts = *o;
  if (!c->opts.num_devices) c->opts.num_devices = 1;
  if (!c->opts.log_level) c->opts.log_level = VMEM_LOG_INFO;
  if ((err = vm_backend_open(be, &c->opts, c->info, &c->bes))) {
    free(c);
    return err;
  }
  c->be = c->info->table;
  if (c->info->most_mappings && o->max_mappings > c->info->most_mappings) {
    err = vm_fail_at(-EINVAL, 0, o->max_mappings, c->info->most_mappings,
                     "max_mappings %llu: the driver has handles for only %llu", (unsigned long long)o->max_mappings,
                     (unsigned long long)c->info->most_mappings);
    VM_UNDO(c->be->close(c->bes));
    free(c);
    return err;
  }
  c->granule = c->info->pub.granule;
  c->shift = log2_of(c->granule);
  c->chunk_units = c->granule < LARGE_PAGE ? (uint32_t)(LARGE_PAGE >> c->shift) : 1;
  c->large_pages = c->granule < LARGE_PAGE && !c->info->one_page_slabs;
  c->chunk_shift = log2_of(c->chunk_units);
  c->large_entries = o->flags & VMEM_OPEN_LARGE_ENTRIES && c->large_pages;
  if (c->large_entries) c->info->pub.caps |= VMEM_CAP_LARGE_ENTRIES;
  c->info->pub.size = sizeof(c->info->pub);
  c->info->pub.num_devices = c->opts.num_devices;
  if (o->max_mappings) c->info->pub.max_mappings = o->max_mappings;
  if (o->slab_size) c->info->pub.slab_size = o->slab_size;
  if (c->info->pub.slab_size < c->granule) c->info->pub.slab_size = c->granule;
  snprintf(c->info->pub.backend, sizeof(c->info->pub.backend), "%s", be->name);
  if (c->info->unknown_branch) snprintf(c->info->pub.warning, sizeof(c->info->pub.warning), "%s", c->info->about);
  if (!c->opts.pool_high) {
    c->opts.pool_high = c->info->pool_high;
    c->phys->surplus.delay = c->info->pool_delay;
  }
  if (c->opts.pool_high < c->opts.pool_low) c->opts.pool_high = c->opts.pool_low;
  vm_pools_init(c);
  c->phys->clean.background = !c->be->discard && !c->info->no_contents;
  pthread_mutex_init(&c->lock, NULL);
  pthread_condattr_init(&attr);
  pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
  pthread_cond_init(&c->done_cond, &attr);
  pthread_cond_init(&c->work_cond, &attr);
  pthread_condattr_destroy(&attr);
  vm_work_init(c);
  *out = c;
  return 0;
}

/* Opens the first usable back end; records why earlier ones were passed over. */
static int open_auto(const struct vmem_open_opts *o, struct vm_ctx **out) {
  char why[sizeof((*out)->info->pub.why)] = "";
  size_t used = 0;
  int err = -ENODEV;
  for (size_t i = 0; vm_backends[i]; i++) {
    struct vmem_error e;
    if (!(err = open_one(vm_backends[i], o, out))) {
      memcpy((*out)->info->pub.why, why, sizeof(why));
      return 0;
    }
    vm_error_save(&e);
    if (used < sizeof(why))
      used += (size_t)snprintf(why + used, sizeof(why) - used, "%s%s: %.150s", used ? "; " : "", vm_backends[i]->name,
                               e.text);
  }
  return vm_fail(err, "no back end can be opened: %.400s", why);
}

/* Frees a context that no other thread can reach. Waits for a suspended driver. */
static void tear_down(struct vm_ctx *c) {
  vm_worker_stop(c);
  vm_tickets_free(c);
  vm_undo_begin();
  vm_virt_close(c);
  vm_phys_close(c);
  c->be->close(c->bes);
  vm_undo_end();
  pthread_mutex_destroy(&c->lock);
  pthread_cond_destroy(&c->done_cond);
  pthread_cond_destroy(&c->work_cond);
  free(c);
}

static void log_opened(const struct vm_ctx *c, const char *asked) {
  const struct vmem_info *i = &c->info->pub;
  vm_log(c, VMEM_LOG_INFO, "back end %s (%s asked for)%s%s%s%s: granule %llu, slabs of %llu bytes%s%s", i->backend,
         asked, i->device_name[0] ? " on " : "", i->device_name, i->driver[0] ? ", driver " : "", i->driver,
         (unsigned long long)i->granule, (unsigned long long)i->slab_size, i->why[0] ? "; passed over: " : "", i->why);
  if (i->warning[0]) vm_log(c, VMEM_LOG_WARNING, "%s", i->warning);
}

static int open_context(const struct vm_backend *be, const struct vmem_open_opts *o, vmem_t *vm) {
  struct vm_ctx *c = NULL;
  int err = be ? open_one(be, o, &c) : open_auto(o, &c);
  if (err) return err;
  c->opts.backend = c->be->name; /* the caller's string may be freed */
  if (c->opts.pool_low && (err = vm_worker_start(c))) {
    VM_UNDO(tear_down(c));
    return err;
  }
  log_opened(c, o->backend); /* now, because another thread may close it later */
  if ((err = vm_registry_add(c, vm))) VM_UNDO(tear_down(c));
  return err;
}

VMEM_API int vmem_open(const struct vmem_open_opts *opts, vmem_t *vm) {
  struct vmem_open_opts o;
  const struct vm_backend *be = NULL;
  int err;
  vm_error_begin("vmem_open");
  if (!vm) return vm_fail(-EINVAL, "NULL argument");
  if ((err = vm_copy_in(&o, sizeof(o), opts, "vmem_open_opts")) || (err = check_opts(&o))) return err;
  if (!o.backend) o.backend = "auto";
  if (strcmp(o.backend, "auto") && !(be = find_backend(o.backend, "auto, "))) return -EINVAL;
  vm_cancel_later();
  err = open_context(be, &o, vm);
  vm_cancel_now();
  return err;
}

static void close_context(struct vm_ctx *c) {
  pthread_mutex_lock(&c->lock);
  c->closing = true;
  pthread_cond_broadcast(&c->done_cond);
  pthread_mutex_unlock(&c->lock);
  vm_registry_drain(c);
  vm_inject_arm(c, 0, 0, 0, 0);
  tear_down(c);
}

VMEM_API int vmem_close(vmem_t vm) {
  int err = 0;
  struct vm_ctx *c = vm_get(vm, "vmem_close", &err);
  if (!c) return err;
  if (vm_registry_remove(c, vm))
    close_context(c);
  else
    err = vm_fail(-EBADF, "0x%llx is not an open context", (unsigned long long)vm);
  vm_cancel_now();
  return err;
}

VMEM_API int vmem_query(vmem_t vm, struct vmem_info *info) {
  int err;
  struct vm_ctx *c = vm_get(vm, "vmem_query", &err);
  if (!c) return err;
  err = vm_copy_out(info, &c->info->pub, sizeof(c->info->pub), "vmem_info");
  vm_put(c);
  return err;
}
