/* SPDX-License-Identifier: MIT */
/*
 * A slab's own mapping at addresses of the context, through which its pages are zeroed and moved
 * without any caller seeing it. Created on first use, and kept as long as the slab.
 */
#include "phys/phys.h"

/* Lock held; dropped around driver calls. */
static int make_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind) {
  uint64_t addr, priv;
  const struct vm_room room = {2, 1};
  int err = vm_room_take(c, room, true);
  if (err) return err;
  s->alias_making = true;
  pthread_mutex_unlock(&c->lock);
  err = vm_drv_alias(c, s->priv, s->bytes, kind, &addr, &priv);
  pthread_mutex_lock(&c->lock);
  vm_room_end(c, room);
  s->alias_making = false;
  pthread_cond_broadcast(&c->done_cond);
  if (err) return err;
  s->alias = addr;
  s->alias_priv = priv;
  c->driver->aliases++;
  return 0;
}

static int try_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind) {
  int err = 0;
  pthread_mutex_lock(&c->lock);
  while (s->alias_making) pthread_cond_wait(&c->done_cond, &c->lock);
  if (!s->alias) err = make_alias(c, s, kind);
  pthread_mutex_unlock(&c->lock);
  return err;
}

int vm_slab_alias(struct vm_ctx *c, struct vm_slab *s, uint32_t kind) {
  int err = try_alias(c, s, kind);
  return vm_recount(c, err) ? try_alias(c, s, kind) : err;
}
