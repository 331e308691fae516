/* SPDX-License-Identifier: MIT */
/* Description: maps, fills, reads and unmaps pages of every size; prints microseconds per call. */
#include "check.h"

void fill_sync(struct env *e, uint64_t addr, uint64_t bytes, uint8_t value) {
  struct vm_be_range r = {addr, bytes};
  vm_event done;
  if (e->b->fill(e->be, &r, 1, value, NULL, 0, &done)) return;
  e->b->event_wait(e->be, done);
  e->b->event_put(e->be, done);
}

bool reads_as(struct env *e, uint64_t addr, uint64_t bytes, uint8_t value) {
  uint8_t *p = malloc(bytes);
  bool ok = !e->b->read(e->be, p, addr, bytes);
  for (uint64_t i = 0; i < bytes && ok; i++) ok = p[i] == value;
  free(p);
  return ok;
}

bool area_get(struct env *e, struct area *a, uint64_t bytes, uint64_t slab_bytes, uint32_t flags) {
  a->bytes = bytes;
  a->slab_bytes = slab_bytes;
  return !e->b->reserve(e->be, bytes, 2 << 20, flags, &a->addr, &a->kind, &a->priv) &&
         !e->b->slab_create(e->be, slab_bytes, e->page, VMEM_DEVICE, 0, &a->slab);
}

bool area_put(struct env *e, struct area *a) {
  return !put_range(e, a->addr, a->bytes, a->priv) && !e->b->slab_destroy(e->be, a->slab, a->slab_bytes);
}

static void check_page_size(struct env *e, struct area *a, uint64_t size) {
  enum { ROUNDS = 200 };
  double map_us[ROUNDS], unmap_us[ROUNDS], fill_us[ROUNDS];
  bool whole = e->info.one_page_slabs, ok = true;
  char name[64];

  for (int i = 0; i < ROUNDS && ok; i++) {
    uint64_t places = a->bytes / size, parts = a->slab_bytes / size;
    uint64_t addr = a->addr + (uint64_t)(i * 7 + 1) % places * size;
    uint64_t offset = whole ? 0 : (uint64_t)(i * 5 + 3) % parts * size;
    double t0 = now_us(), t1, t2;
    ok = !e->b->map(e->be, addr, size, a->slab, offset, 0, false);
    t1 = now_us();
    if (!ok) break;
    fill_sync(e, addr, size, (uint8_t)(i + 1));
    t2 = now_us();
    ok = reads_as(e, addr, size < 4096 ? size : 4096, (uint8_t)(i + 1)) &&
         reads_as(e, addr + size - 512, 512, (uint8_t)(i + 1));
    map_us[i] = t1 - t0;
    fill_us[i] = t2 - t1;
    t0 = now_us();
    ok = ok && !e->b->unmap(e->be, addr, size, false);
    unmap_us[i] = now_us() - t0;
  }
  snprintf(name, sizeof(name), "map, fill, read, unmap pages of %llu KiB", (unsigned long long)size >> 10);
  if (check(e, name, ok))
    note(e, "  median us", "map %.1f, unmap %.1f, fill and wait %.1f", median(map_us, ROUNDS), median(unmap_us, ROUNDS),
         median(fill_us, ROUNDS));
}

/* Times driver calls back to back. */
static void time_calls(struct env *e, struct area *a, uint64_t size) {
  enum { ROUNDS = 1000 };
  static double map_us[ROUNDS], unmap_us[ROUNDS];
  double map_mid, unmap_mid;
  bool whole = e->info.one_page_slabs, ok = true;

  for (int pass = 0; pass < 2; pass++)
    for (int i = 0; i < ROUNDS && ok; i++) {
      uint64_t addr = a->addr + (uint64_t)(i * 7919) % (a->bytes / size) * size;
      uint64_t offset = whole ? 0 : (uint64_t)(i * 5 + 3) % (a->slab_bytes / size) * size;
      double start = now_us();
      ok = !e->b->map(e->be, addr, size, a->slab, offset, 0, false);
      map_us[i] = now_us() - start;
      start = now_us();
      ok = ok && !e->b->unmap(e->be, addr, size, false);
      unmap_us[i] = now_us() - start;
    }
  check(e, "scattered maps and unmaps", ok);
  map_mid = median(map_us, ROUNDS); /* sorts */
  unmap_mid = median(unmap_us, ROUNDS);
  note(e, "  alone in 2 MiB, us", "map %.1f (p99 %.1f), unmap %.1f (p99 %.1f)", map_mid, map_us[ROUNDS * 99 / 100],
       unmap_mid, unmap_us[ROUNDS * 99 / 100]);
  if (whole || size >= 2 << 20) return;
  /* While a neighbour is mapped, the page table already exists. */
  for (int i = 0; i < ROUNDS && ok; i++) {
    double start = now_us();
    ok = !e->b->map(e->be, a->addr + (uint64_t)i * size, size, a->slab,
                    (uint64_t)(i * 5 + 3) % (a->slab_bytes / size) * size, 0, false);
    map_us[i] = now_us() - start;
  }
  for (int i = 0; i < ROUNDS && ok; i++) {
    double start = now_us();
    ok = !e->b->unmap(e->be, a->addr + (uint64_t)i * size, size, false);
    unmap_us[i] = now_us() - start;
  }
  check(e, "maps and unmaps in a row", ok);
  map_mid = median(map_us, ROUNDS);
  unmap_mid = median(unmap_us, ROUNDS);
  note(e, "  one after the other, us", "map %.1f (p99 %.1f), unmap %.1f (p99 %.1f)", map_mid, map_us[ROUNDS * 99 / 100],
       unmap_mid, unmap_us[ROUNDS * 99 / 100]);
}

void check_pages(struct env *e) {
  struct area a;
  for (uint64_t size = e->page; size <= 2 << 20; size <<= 1) {
    uint64_t slab = e->info.one_page_slabs ? size : 64 << 20;
    if (!check(e, "reserve 1 GiB, slab", area_get(e, &a, 1 << 30, slab, 0))) return;
    check_page_size(e, &a, size);
    time_calls(e, &a, size);
    check(e, "unreserve", area_put(e, &a));
  }
}
