/* SPDX-License-Identifier: MIT */
/*
 * Reservations. UVM lets us map into an external range, which may cover any addresses that UVM does
 * not know yet.
 */
#include <errno.h>

#include "backend/stock/stock.h"
#include "base/error.h"

enum { SPARSE_PIECE = 64 << 20 };

/*
 * Makes the range sparse piece by piece: mapping a page into a sparse piece splits it, at a cost that
 * grows with the piece. On an H200, 4 GiB took 29 ms in pieces of 2 MiB and 14 ms in pieces of 32 to
 * 512 MiB, and mapping a page over any of them took 18.6 us; over a single piece of 32 GiB, on an
 * H100, it took 59 us.
 */
static int make_sparse(struct nvidia *s, uint64_t addr, uint64_t bytes) {
  for (uint64_t at = 0; at < bytes; at += SPARSE_PIECE) {
    uint64_t piece = bytes - at < SPARSE_PIECE ? bytes - at : SPARSE_PIECE;
    int err = ext_sparse(s, addr + at, piece);
    /* Not -ENOTRECOVERABLE: the caller frees the whole range on all devices after any error. */
    if (err) return err == -ENOTRECOVERABLE ? -EIO : err;
  }
  return 0;
}

static int make_range(struct nvidia *s, uint64_t addr, uint64_t bytes, uint32_t flags) {
  int err = ext_create(s, addr, bytes);
  if (err || !(flags & VMEM_RESERVE_SPARSE)) return err;
  err = make_sparse(s, addr, bytes);
  if (err) VM_UNDO(ext_free(s, addr, bytes));
  return err;
}

int stock_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                  uint64_t *priv) {
  struct nvidia *s = be;
  struct nvidia_range *r;
  int err;
  if ((flags & VMEM_RESERVE_SPARSE) && s->granule < 64 << 10)
    return vm_fail_at(-EOPNOTSUPP, 0, s->granule, 64 << 10, "sparse reservations need a granule of 64 KiB or more");
  err = nvidia_addresses_get(s, bytes, align, flags, &r);
  if (err) return err;
  err = make_range(s, r->addr, bytes, flags);
  if (err) {
    VM_UNDO(nvidia_addresses_put(s, r));
    return err;
  }
  *addr = r->addr;
  *kind = (r->visible ? VMEM_RANGE_VISIBLE : 0) | (flags & VMEM_RESERVE_SPARSE ? VMEM_RANGE_SPARSE : 0);
  *priv = (uint64_t)(uintptr_t)r;
  return 0;
}

int stock_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone) {
  struct nvidia *s = be;
  struct nvidia_range *r = (struct nvidia_range *)(uintptr_t)priv;
  int err = r->freed ? 0 : ext_free(s, addr, bytes);
  if (err) return err;
  r->freed = *gone = true;
  return nvidia_addresses_put(s, r);
}
