/* SPDX-License-Identifier: MIT */
/* GPU work that a batch waits for: events of the back end, and descriptors that poll readable. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fd.h"
#include "work/work.h"

#define CLOSING_MS 100 /* poll timeout: vmem_close waits for blocked calls, which may never become ready */

static int make_one(struct vm_ctx *c, const struct vmem_after *a, size_t i, struct vm_deps *d) {
  vm_event e = 0;
  int fd, err;
  if (a->flags || a->reserved[0] || a->reserved[1])
    return vm_fail(-EINVAL, "dependency %zu: flags or a reserved field is not 0", i);
  if (a->kind == VMEM_AFTER_FD) {
    fd = a->handle <= INT32_MAX ? vm_duplicate((int)a->handle) : -1;
    if (fd < 0 && a->handle <= INT32_MAX && errno != EBADF)
      return vm_fail(-ENOMEM, "descriptor %llu cannot be duplicated: %s", (unsigned long long)a->handle,
                     strerror(errno));
    if (fd < 0) return vm_fail(-EINVAL, "%llu is not an open descriptor", (unsigned long long)a->handle);
    d->fds[d->nfds++] = fd;
    return 0;
  }
  if (a->kind != VMEM_AFTER_STREAM && a->kind != VMEM_AFTER_EVENT)
    return vm_fail(-EINVAL, "unknown kind %u of dependency %zu", a->kind, i);
  if (!c->be->event_from) return vm_fail(-EOPNOTSUPP, "back end %s has no streams and events", c->be->name);
  if (!(err = vm_drv_event_from(c, a->kind, a->handle, &e)) && e) d->events[d->nevents++] = e;
  return err;
}

int vm_deps_make(struct vm_ctx *c, const struct vmem_after *after, size_t n, struct vm_deps *d) {
  size_t nfds = 0;
  int err = 0;
  *d = (struct vm_deps){.events = d->few_events, .fds = d->few_fds};
  for (size_t i = 0; i < n; i++) nfds += after[i].kind == VMEM_AFTER_FD;
  if (nfds > VM_INLINE_DEPS && !(d->fds = vm_calloc(c, nfds, sizeof(*d->fds)))) err = -ENOMEM;
  if (!err && n - nfds > VM_INLINE_DEPS && !(d->events = vm_calloc(c, n - nfds, sizeof(*d->events)))) err = -ENOMEM;
  for (size_t i = 0; i < n && !err; i++) err = make_one(c, &after[i], i, d);
  if (err) VM_UNDO(vm_deps_put(c, d));
  return err;
}

void vm_deps_put(struct vm_ctx *c, struct vm_deps *d) {
  while (d->nevents) c->be->event_put(c->bes, d->events[--d->nevents]);
  while (d->nfds) close(d->fds[--d->nfds]);
  if (d->events != d->few_events) free(d->events);
  if (d->fds != d->few_fds) free(d->fds);
  d->events = d->few_events;
  d->fds = d->few_fds;
}

static int fd_ready(int fd, int timeout_ms) {
  struct pollfd p = {.fd = fd, .events = POLLIN};
  int n = poll(&p, 1, timeout_ms);
  if (n < 0 && errno != EINTR) return vm_fail(-EIO, "poll of a dependency: %s", strerror(errno));
  if (n > 0 && p.revents & POLLNVAL) return vm_fail(-EIO, "a dependency's descriptor is not open");
  return n > 0 ? 0 : -EAGAIN;
}

int vm_deps_poll(struct vm_ctx *c, struct vm_deps *d, bool events_too) {
  while (d->nfds) {
    int err = fd_ready(d->fds[d->nfds - 1], 0);
    if (err) return err;
    close(d->fds[--d->nfds]);
  }
  while (events_too && d->nevents) {
    int err = vm_drv_event_query(c, d->events[d->nevents - 1]);
    if (err) return err;
    c->be->event_put(c->bes, d->events[--d->nevents]);
  }
  return 0;
}

int vm_deps_wait(struct vm_ctx *c, struct vm_deps *d) {
  while (d->nfds) {
    int err = fd_ready(d->fds[d->nfds - 1], CLOSING_MS);
    if (err == -EAGAIN) {
      bool closing;
      pthread_mutex_lock(&c->lock);
      closing = c->closing;
      pthread_mutex_unlock(&c->lock);
      if (closing) return vm_fail(-EBADF, "the context was closed while waiting for a dependency");
      continue;
    }
    if (err) return err;
    close(d->fds[--d->nfds]);
  }
  while (d->nevents) {
    int err = vm_drv_event_wait(c, d->events[d->nevents - 1]);
    if (err) return err;
    c->be->event_put(c->bes, d->events[--d->nevents]);
  }
  return 0;
}
