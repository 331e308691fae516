/* SPDX-License-Identifier: MIT */
/*
 * api.h - the public functions. Each pins its context, checks its arguments, calls the layer that does the work, and
 * unpins the context.
 */
#ifndef VMEM_API_H
#define VMEM_API_H

#include "work/work.h"

/* ---- registry.c: contexts by number ------------------------------------------------------------- */

/* Defers cancellation of the thread, which may hold locks. Calls nest. */
void vm_cancel_later(void);
void vm_cancel_now(void);
/* Pins the context and defers cancellation of the thread; or records the error, also in *err, and returns NULL. */
struct vm_ctx *vm_get(vmem_t vm, const char *op, int *err);
void vm_put(struct vm_ctx *c);
int vm_registry_add(struct vm_ctx *c, vmem_t *vm);
/* Removes the context, so that later calls do not find it, and drops the caller's pin. False if another thread did
 * so first. */
bool vm_registry_remove(struct vm_ctx *c, vmem_t vm);
/* Waits until no call has the context pinned. */
void vm_registry_drain(struct vm_ctx *c);

/* ---- sized.c: structures whose first field is their size ----------------------------------------- */

/* Copies the part that both sides know; the rest becomes 0. -EINVAL if the size does not even cover the size field. */
int vm_copy_in(void *to, size_t to_size, const void *from, const char *what);
int vm_copy_out(void *to, const void *from, size_t from_size, const char *what);

#endif
