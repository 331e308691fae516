/* SPDX-License-Identifier: MIT */
/* Limits on mappings: the driver's handles, and the VMAs that a process may have. */
#include "backend/driver.h"

int vm_room_take(struct vm_ctx *c, struct vm_room more, bool limited) {
  struct vm_driver *d = c->driver;
  struct vm_be_load load = {d->segments, d->planned.segments, more.segments};
  uint64_t limit = c->info->pub.max_mappings, now = d->mappings + d->aliases + d->planned.mappings;
  int err = 0;
  if (limit && limited && now + more.mappings > limit)
    return vm_fail_at(-ENOSPC, 0, 0, limit,
                      "%llu mappings plus %llu more exceed the %llu that this context may have (max_mappings of "
                      "vmem_open): map longer runs, join them (vmem_join), or unmap",
                      (unsigned long long)now, (unsigned long long)more.mappings, (unsigned long long)limit);
  if (c->be->room && more.segments) err = c->be->room(c->bes, &load);
  if (err) return err;
  d->planned.segments += more.segments;
  d->planned.mappings += more.mappings;
  return 0;
}

void vm_room_end(struct vm_ctx *c, struct vm_room planned) {
  c->driver->planned.segments -= planned.segments;
  c->driver->planned.mappings -= planned.mappings;
}

bool vm_recount(struct vm_ctx *c, int err) {
  uint64_t segments;
  if (err != -ENOSPC || !c->be->recount) return false;
  pthread_mutex_lock(&c->lock);
  segments = c->driver->segments;
  pthread_mutex_unlock(&c->lock);
  c->be->recount(c->bes, segments);
  return true;
}
