/* SPDX-License-Identifier: MIT */
/*
 * torch's allocator interface on top of vmem: vmem_malloc and vmem_free, for CUDAPluggableAllocator.
 *
 * torch finds the two functions by name in this extension and passes no user pointer, so each device's context is kept
 * here: one pool per device for the whole process. torch's caching allocator places tensors; it asks for segments (2
 * MiB, 20 MiB, or more) and keeps them.
 *
 * A block is a segment. It has its own reservation and is either mapped or paused. A paused block keeps its addresses
 * but has no memory; `save` points to its contents, or is NULL if they were discarded.
 *
 * A pool's lock is held across driver calls, so that another thread that frees through torch always finds a block
 * either mapped or paused. Only pyvmem/torch_pool/pool.py calls the other functions.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "_outcome.h"
#include "_torch_alloc.h"
#include "base/error.h"

#define EXPORT __attribute__((visibility("default")))

struct block {
  struct block *next;
  uint64_t addr, bytes; /* the reservation; `bytes` is a multiple of the page size */
  uint32_t tag;
  int paused;
  int freed; /* torch has freed the block (it will not do so again), but unmapping it failed */
  const unsigned char *save;
};

static struct pool {
  pthread_mutex_t lock;
  vmem_t vm; /* 0 = no context is registered */
  uint64_t page;
  uint32_t reserve_flags;
  struct pyvmem_torch_gpu gpu; /* all zero = no GPU */
  struct block *blocks;
  uint64_t mallocs, frees, failures;
  char error[640];
} pools[VMEM_MAX_DEVICES] = {[0 ... VMEM_MAX_DEVICES - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};

static _Thread_local uint32_t thread_tag;

EXPORT void *vmem_malloc(ssize_t size, int device, void *stream);
EXPORT void vmem_free(void *ptr, size_t size, int device, void *stream);

/* ---- blocks; the pool's lock is held ----------------------------------------------------------- */

static int is_of(const struct block *b, uint32_t tag) { return tag == PYVMEM_TORCH_ALL || b->tag == tag; }

/* Copies an error to last_error, as torch's interface cannot return it. */
static void note(struct pool *p, const char *what, uint64_t addr, uint64_t bytes) {
  p->failures++;
  snprintf(p->error, sizeof(p->error), "%s(%#" PRIx64 ", %" PRIu64 " bytes): %s", what, addr, bytes, vmem_last_error());
}

static int make_block(struct pool *p, uint64_t size, struct block **out) {
  struct vmem_reserve_opts opts = {.size = sizeof(opts), .flags = p->reserve_flags};
  struct vmem_op op = {.op = VMEM_OP_POPULATE};
  struct block *b;
  int err;

  vm_error_begin("vmem_malloc");
  if (!p->vm) return vm_fail(-ENODEV, "no VMemPool is open on this device");
  if (size == 0 || size > INT64_MAX - p->page) return vm_fail_at(-EINVAL, 0, size, 0, "invalid size");
  b = calloc(1, sizeof(*b));
  if (!b) return vm_fail(-ENOMEM, "the heap is exhausted");
  b->bytes = (size + p->page - 1) / p->page * p->page;
  b->tag = thread_tag;
  err = vMemReserve(p->vm, b->bytes, &opts, &b->addr);
  if (err) {
    free(b);
    return err;
  }
  op.addr = b->addr;
  op.bytes = b->bytes;
  op.page_size = p->page;
  err = vmem_batch(p->vm, &op, 1, NULL, 0, 0);
  if (err) {
    VM_UNDO(vMemFree(p->vm, b->addr, 0));
    free(b);
    return err;
  }
  *out = b;
  return 0;
}

/* Waits for the device's work. A calling thread that only drops a tensor may have no current context. */
static int synchronize(const struct pyvmem_torch_gpu *gpu) {
  const char *function = "cuCtxPushCurrent";
  int status = ((int (*)(void *))(uintptr_t)gpu->push)((void *)(uintptr_t)gpu->context);
  if (!status) {
    void *ignored;
    function = "cuCtxSynchronize";
    status = ((int (*)(void))(uintptr_t)gpu->synchronize)();
    ((int (*)(void **))(uintptr_t)gpu->pop)(&ignored);
  }
  if (!status) return 0;
  vm_error_begin("vmem_free");
  return vm_fail(-EIO, "%s returned %d; the memory stays mapped", function, status);
}

/* Frees a block's memory. Like cudaFree, first waits for the GPU, as work on the block may be unfinished. */
static int end_block(struct pool *p, struct block *b) {
  if (!b->paused && p->gpu.synchronize) {
    int err = synchronize(&p->gpu);
    if (err) return err;
  }
  return vMemFree(p->vm, b->addr, VMEM_FREE_UNMAP);
}

/* Retries to free the blocks that torch has freed but whose unmapping failed. Returns the last error, else 0. */
static int end_freed(struct pool *p) {
  struct block **at = &p->blocks, *b;
  int err, failed = 0;
  while ((b = *at)) {
    if (b->freed) {
      err = end_block(p, b);
      if (!err) {
        *at = b->next;
        p->frees++;
        free(b);
        continue;
      }
      failed = err;
    }
    at = &b->next;
  }
  return failed;
}

/* ---- called by torch -------------------------------------------------------------------------- */

/* Returns a new block of zeroed pages under the thread's tag; NULL on failure. */
void *vmem_malloc(ssize_t size, int device, void *stream) {
  struct pool *p;
  struct block *b = NULL;
  (void)stream; /* the addresses are new: no earlier work can use them */
  if (device < 0 || device >= VMEM_MAX_DEVICES) return NULL;
  p = &pools[device];
  pthread_mutex_lock(&p->lock);
  end_freed(p);
  if (make_block(p, size < 0 ? 0 : (uint64_t)size, &b)) {
    note(p, "vmem_malloc", 0, size < 0 ? 0 : (uint64_t)size);
  } else {
    b->next = p->blocks;
    p->blocks = b;
    p->mallocs++;
  }
  pthread_mutex_unlock(&p->lock);
  return b ? (void *)(uintptr_t)b->addr : NULL;
}

/* A block that cannot be freed stays mapped and is counted as a failure; later calls retry it. */
void vmem_free(void *ptr, size_t size, int device, void *stream) {
  uint64_t addr = (uint64_t)(uintptr_t)ptr;
  struct block **at, *b;
  struct pool *p;
  (void)stream; /* torch waits for work on other streams with its own events; end_block waits for this stream */
  if (!ptr || device < 0 || device >= VMEM_MAX_DEVICES) return;
  p = &pools[device];
  pthread_mutex_lock(&p->lock);
  for (at = &p->blocks; *at && (*at)->addr != addr; at = &(*at)->next);
  b = *at;
  if (b) b->freed = 1;
  if (!b) {
    vm_error_begin("vmem_free");
    vm_fail_at(-EINVAL, addr, size, 0, "no block begins there: it was freed before, or belongs to another pool");
    note(p, "vmem_free", addr, size);
  } else if (end_block(p, b)) {
    note(p, "vmem_free", addr, b->bytes);
  } else {
    *at = b->next;
    p->frees++;
    free(b);
  }
  pthread_mutex_unlock(&p->lock);
}

/* ---- called by torch_pool/pool.py -------------------------------------------------------------- */

uint32_t pyvmem_torch_tag(uint32_t tag) {
  uint32_t before = thread_tag;
  thread_tag = tag;
  return before;
}

uint32_t pyvmem_torch_tag_now(void) { return thread_tag; }

/* Returns the pool of a device, locked; NULL with `*err` set if `device` is out of range. */
static struct pool *get(const char *op, int device, int *err) {
  struct pool *p;
  vm_error_begin(op);
  if (device < 0 || device >= VMEM_MAX_DEVICES) {
    *err = vm_fail_at(-EINVAL, 0, 0, VMEM_MAX_DEVICES - 1, "device %d is not between 0 and %d", device,
                      VMEM_MAX_DEVICES - 1);
    return NULL;
  }
  p = &pools[device];
  pthread_mutex_lock(&p->lock);
  *err = 0;
  return p;
}

int pyvmem_torch_open(struct pyvmem_outcome *outcome, int device, vmem_t vm, uint64_t page, uint32_t reserve_flags,
                      const struct pyvmem_torch_gpu *gpu) {
  int err;
  struct pool *p = get("VMemPool", device, &err);
  if (!p) return pyvmem_note(outcome, err, 0);
  if (p->vm) {
    err = vm_fail(-EBUSY, "device %d has an open VMemPool already", device);
  } else {
    p->vm = vm;
    p->page = page;
    p->reserve_flags = reserve_flags;
    p->gpu = gpu ? *gpu : (struct pyvmem_torch_gpu){0};
    p->mallocs = p->frees = p->failures = 0;
    p->error[0] = 0;
  }
  pthread_mutex_unlock(&p->lock);
  return pyvmem_note(outcome, err, 0);
}

int pyvmem_torch_close(struct pyvmem_outcome *outcome, int device) {
  struct block *b;
  uint64_t blocks = 0, bytes = 0;
  int err;
  struct pool *p = get("VMemPool.close", device, &err);
  if (!p) return pyvmem_note(outcome, err, 0);
  err = end_freed(p);
  for (b = p->blocks; b; b = b->next) {
    if (b->freed) continue;
    blocks++;
    bytes += b->bytes;
  }
  if (blocks)
    err = vm_fail_at(-EBUSY, 0, bytes, 0, "torch holds %" PRIu64 " blocks of the pool (%" PRIu64 " bytes)", blocks,
                     bytes);
  else if (!err)
    p->vm = 0;
  pthread_mutex_unlock(&p->lock);
  return pyvmem_note(outcome, err, 0);
}

/* Builds a batch with one operation for each paused block of the tag or, if `paused` is 0, for each mapped block. The
 * caller frees the array. */
static int ops_of(struct pool *p, uint32_t tag, int paused, uint32_t kind, struct vmem_op **ops, size_t *count) {
  struct block *b;
  size_t n = 0;
  for (b = p->blocks; b; b = b->next) n += is_of(b, tag) && b->paused == paused;
  *ops = calloc(n ? n : 1, sizeof(**ops));
  if (!*ops) return vm_fail(-ENOMEM, "the heap is exhausted");
  n = 0;
  for (b = p->blocks; b; b = b->next)
    if (is_of(b, tag) && b->paused == paused)
      (*ops)[n++] = (struct vmem_op){.op = kind, .addr = b->addr, .bytes = b->bytes, .page_size = p->page};
  *count = n;
  return 0;
}

int pyvmem_torch_pause(struct pyvmem_outcome *outcome, int device, uint32_t tag, void *save, uint64_t room) {
  struct vmem_op *ops = NULL;
  struct block *b;
  size_t i, n = 0;
  uint64_t used = 0;
  int err;
  struct pool *p = get("VMemPool.pause", device, &err);
  if (!p) return pyvmem_note(outcome, err, 0);
  end_freed(p);
  err = ops_of(p, tag, 0, VMEM_OP_UNMAP, &ops, &n);
  for (i = 0; !err && save && i < n; i++) {
    if (ops[i].bytes > room - used) {
      vm_error_begin("VMemPool.pause"); /* vmem_read has set its own name as the operation of the error */
      err = vm_fail(-EAGAIN, "blocks were added meanwhile");
    } else {
      err = vmem_read(p->vm, (char *)save + used, ops[i].addr, ops[i].bytes);
    }
    used += ops[i].bytes;
  }
  for (i = 0; i < n; i++) ops[i].page_size = 0;
  if (!err && n) err = vmem_batch(p->vm, ops, n, NULL, 0, 0);
  if (!err) {
    used = 0;
    for (b = p->blocks; b; b = b->next) {
      if (!is_of(b, tag) || b->paused) continue;
      b->paused = 1;
      b->save = save ? (unsigned char *)save + used : NULL;
      used += b->bytes;
    }
  }
  pthread_mutex_unlock(&p->lock);
  free(ops);
  return pyvmem_note(outcome, err, 0);
}

int pyvmem_torch_resume(int device, uint32_t tag) {
  struct vmem_op *ops = NULL;
  struct block *b;
  size_t i, n = 0;
  int err;
  struct pool *p = get("VMemPool.resume", device, &err);
  if (!p) return err;
  end_freed(p);
  err = ops_of(p, tag, 1, VMEM_OP_POPULATE, &ops, &n);
  if (!err && n) err = vmem_batch(p->vm, ops, n, NULL, 0, 0);
  if (!err) {
    for (b = p->blocks; b && !err; b = b->next)
      if (is_of(b, tag) && b->paused && b->save) err = vmem_write(p->vm, b->addr, b->save, b->bytes);
    for (i = 0; err && i < n; i++) {
      ops[i].op = VMEM_OP_UNMAP;
      ops[i].page_size = 0;
    }
    if (err) VM_UNDO(vmem_batch(p->vm, ops, n, NULL, 0, 0));
  }
  for (b = p->blocks; b && !err; b = b->next) {
    if (is_of(b, tag)) {
      b->paused = 0;
      b->save = NULL;
    }
  }
  pthread_mutex_unlock(&p->lock);
  free(ops);
  return err;
}

/* Returns the block that contains a range, or NULL. The pool's lock is held. */
static const struct block *find(const struct pool *p, uint64_t addr, uint64_t bytes) {
  const struct block *b;

  for (b = p->blocks; b; b = b->next)
    if (addr >= b->addr && addr - b->addr < b->bytes && bytes <= b->bytes - (addr - b->addr)) return b;
  return NULL;
}

int pyvmem_torch_owns(int device, uint64_t addr, uint64_t bytes) {
  int err, owns;
  struct pool *p = get("VMemPool.owns", device, &err);
  if (!p) return 0;
  owns = find(p, addr, bytes) != NULL;
  pthread_mutex_unlock(&p->lock);
  return owns;
}

uint64_t pyvmem_torch_saved(int device, uint64_t addr, uint64_t bytes) {
  const struct block *b;
  uint64_t at = 0;
  int err;
  struct pool *p = get("VMemPool.saved", device, &err);
  if (!p) return 0;
  b = find(p, addr, bytes);
  if (b && b->paused && b->save) at = (uint64_t)(uintptr_t)b->save + (addr - b->addr);
  pthread_mutex_unlock(&p->lock);
  return at;
}

int pyvmem_torch_stats(int device, uint32_t tag, struct pyvmem_torch_stats *out) {
  struct block *b;
  int err;
  struct pool *p = get("VMemPool.stats", device, &err);
  if (!p) return err;
  *out = (struct pyvmem_torch_stats){.mallocs = p->mallocs, .frees = p->frees, .failures = p->failures};
  memcpy(out->error, p->error, sizeof(p->error));
  for (b = p->blocks; b; b = b->next) {
    if (!is_of(b, tag)) continue;
    out->blocks++;
    *(b->paused ? &out->paused_bytes : &out->mapped_bytes) += b->bytes;
    out->saved_bytes += b->save ? b->bytes : 0;
  }
  pthread_mutex_unlock(&p->lock);
  return 0;
}
