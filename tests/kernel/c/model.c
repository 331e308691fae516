/* SPDX-License-Identifier: MIT */
/*
 * Random operations by several threads of several processes, against a model of what every address must read.
 *
 * Each thread has its own objects, its own reservation, and a part of a reservation that its process's threads share.
 * Every page's contents carry the writer's tag; fresh memory must be zero. So a page that another thread or process
 * wrote, a stale translation, or a half-done operation shows as a wrong value, read through the
 * GPU's TLB and page tables. Pushes are delayed at random, and copies are reordered.
 *
 * Parameters: OPS (for each thread), PROCS, THREADS, SEED, DELAY_US.
 */
#include <pthread.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define OWN_BASE 0x7c0000000000ull /* + thread * 1 GB */
#define SHARED_BASE 0x7b0000000000ull
#define OWN_SLOTS 6
#define SHARED_SLOTS 2 /* per thread */
#define MOST_SLOTS (OWN_SLOTS > SHARED_SLOTS ? OWN_SLOTS : SHARED_SLOTS)
#define OBJECTS 12
#define MAX_UNITS 96 /* per object */
#define MAX_OPS 16
#define TICKETS 4

/* The contents of an object's pages, unit by unit. Lives until the object is released and no longer mapped. */
struct object {
  uint32_t handle; /* 0: unused */
  unsigned shift, pages;
  bool one_run; /* each 2 MB of it may get one 2 MB entry */
  bool released;
  unsigned mapped; /* mapped units, in all areas */
  uint64_t value[MAX_UNITS];
  uint64_t step[MAX_UNITS]; /* 0 or 1 */
};

enum state { NOTHING, SPARSE, MAPPED };

struct unit {
  enum state state;
  bool read_only;
  struct object *object;
  unsigned index; /* unit of the object */
};

/* A range of a reservation that only this thread uses. */
struct area {
  uint64_t reservation, start;
  unsigned shift, units;
  bool big;
  struct unit unit[MOST_SLOTS * SLOT_UNITS];
  bool one[MOST_SLOTS]; /* the slot has a 2 MB entry */
};

struct actor {
  struct world *w;
  struct rng rng;
  unsigned process, number;
  uint64_t tags;
  struct object object[OBJECTS];
  struct area area[2]; /* its own reservation; its part of the shared one */
  uint64_t ticket[TICKETS];
  unsigned tickets;
  uint64_t counts[8];
  bool failed;
};

static uint64_t capabilities;
static struct world process_world;

#define WRONG(a, ...)                                              \
  do {                                                             \
    printf("process %u, thread %u: ", (a)->process, (a)->number);  \
    printf(__VA_ARGS__);                                           \
    putchar('\n');                                                 \
    (a)->failed = true;                                            \
  } while (0)

static uint64_t below(struct actor *a, uint64_t n) {
  return rng_below(&a->rng, n);
}

/* Waits for all binds in flight. */
static void settle(struct actor *a) {
  while (a->tickets && !a->failed) {
    int result = vm_wait(a->w->uvm, a->ticket[--a->tickets], FOREVER);
    if (result) WRONG(a, "WAIT: %s", strerror(-result));
  }
  a->tickets = 0;
}

static uint64_t address(const struct area *area, unsigned unit) {
  return area->start + unit * UNIT;
}

/* Checks the current content of a unit, as the GPU reads it. */
static void check_unit(struct actor *a, struct area *area, unsigned i) {
  struct unit *u = &area->unit[i];
  uint64_t value = 0, step = 0;
  int want = u->state == NOTHING ? -EFAULT : 0;
  if (u->state == MAPPED) {
    value = u->object->value[u->index];
    step = u->object->step[u->index];
  }
  int got = gpu_check(a->w, 0, address(area, i), u->state == NOTHING ? 8 : UNIT, value, step);
  uint64_t size = gpu_xlate(a->w, 0, address(area, i)).out_page_size;
  if (u->state == MAPPED && (size == SLOT) != area->one[i / SLOT_UNITS]) {
    WRONG(a, "0x%llx has an entry of 0x%llx bytes", (unsigned long long)address(area, i), (unsigned long long)size);
  }
  if (got != want) {
    WRONG(a, "0x%llx should be %s value 0x%llx step %llu: %s", (unsigned long long)address(area, i),
          u->state == NOTHING ? "absent" : u->state == SPARSE ? "sparse" : "mapped", (unsigned long long)value,
          (unsigned long long)step, got ? strerror(-got) : "readable");
  }
}

static void write_unit(struct actor *a, struct area *area, unsigned i) {
  struct unit *u = &area->unit[i];
  uint64_t value = (uint64_t)(a->process + 1) << 56 | (uint64_t)(a->number + 1) << 48 | ++a->tags << 16;
  uint64_t step = below(a, 4) == 0;
  int want = u->state == NOTHING ? -EFAULT : u->state == MAPPED && u->read_only ? -EROFS : 0;
  int got = gpu_fill(a->w, 0, address(area, i), UNIT, value, step);
  if (got != want) WRONG(a, "write to 0x%llx: %d, not %d", (unsigned long long)address(area, i), got, want);
  if (!got && u->state == MAPPED) {
    u->object->value[u->index] = value;
    u->object->step[u->index] = step;
  }
}

static void drop_if_dead(struct object *o) {
  if (o->released && !o->mapped) o->handle = 0;
}

static void set_unit(struct unit *u, struct unit to) {
  struct object *old = u->state == MAPPED ? u->object : NULL;
  if (to.state == MAPPED) to.object->mapped++;
  *u = to;
  if (old) {
    old->mapped--;
    drop_if_dead(old);
  }
}

static void do_create(struct actor *a) {
  static const unsigned shifts[] = {16, 16, 16, 17, 18, 21};
  struct object *o = NULL;
  for (unsigned i = 0; i < OBJECTS; i++) {
    if (!a->object[i].handle) o = &a->object[i];
  }
  if (!o) return;
  unsigned shift = shifts[below(a, ARRAY_SIZE(shifts))], pages = 1 + below(a, shift == 21 ? 3 : 8);
  unsigned flags = (capabilities & UVM_VMEM_CAP_HOST) && below(a, 8) == 0 ? UVM_VMEM_CREATE_HOST : 0;
  uint32_t handle;
  if (shift == 16 && below(a, 3) == 0) {
    pages = SLOT_UNITS;
    if (!flags && below(a, 2)) flags = UVM_VMEM_CREATE_CONTIGUOUS;
  }
  int result = vm_create(a->w->uvm, a->w->uuid[0], shift, pages, flags, &handle);
  if (result == -ENOSPC || result == -EDQUOT) return;
  if (result) {
    WRONG(a, "CREATE: %s", strerror(-result));
    return;
  }
  *o = (struct object){.handle = handle,
                       .shift = shift,
                       .pages = pages,
                       .one_run = !(flags & UVM_VMEM_CREATE_HOST) && (shift == 21 || flags & UVM_VMEM_CREATE_CONTIGUOUS)};
}

static void do_release(struct actor *a) {
  struct object *o = &a->object[below(a, OBJECTS)];
  if (!o->handle || o->released) return;
  int result = vm_release(a->w->uvm, o->handle);
  if (result) WRONG(a, "RELEASE: %s", strerror(-result));
  o->released = true;
  drop_if_dead(o);
}

/* Makes up one operation and marks its units in used. Returns false if no operation fits. */
static bool random_op(struct actor *a, struct area *area, struct uvm_vmem_op *op, struct object **object, bool *used) {
  *object = NULL;
  if (below(a, 3) == 0) { /* UNMAP */
    unsigned page = 1u << (area->shift - 16), pages = area->units / page;
    unsigned count = 1 + below(a, below(a, 6) ? 8 : pages), first = below(a, pages);
    if (first + count > pages) count = pages - first;
    unsigned sparse = (capabilities & UVM_VMEM_CAP_SPARSE) && below(a, 4) == 0 ? UVM_VMEM_OP_SPARSE : 0;
    for (unsigned i = first * page; i < (first + count) * page; i++) {
      if (used[i]) return false;
    }
    if (below(a, 4) == 0) sparse |= UVM_VMEM_OP_CUT;
    memset(used + first * page, true, count * page);
    *op = op_unmap(address(area, first * page), count, sparse);
    return true;
  }
  struct object *o = &a->object[below(a, OBJECTS)];
  if (!o->handle || o->released || o->shift < area->shift) return false;
  unsigned page = 1u << (o->shift - 16), first = below(a, o->pages), count = 1 + below(a, o->pages - first);
  if (o->one_run && o->shift < 21 && below(a, 2)) { /* all of it, if it can be one entry */
    first = 0;
    count = o->pages;
    page = SLOT_UNITS;
  }
  unsigned at = below(a, area->units / page) * page;
  page = 1u << (o->shift - 16);
  if (at + count * page > area->units) return false;
  unsigned flags = 0;
  for (unsigned i = at; i < at + count * page; i++) {
    if (used[i]) return false;
    if (area->unit[i].state == MAPPED) flags |= UVM_VMEM_OP_REPLACE;
  }
  if (flags && !(capabilities & UVM_VMEM_CAP_REPLACE)) return false;
  if ((capabilities & UVM_VMEM_CAP_REPLACE) && below(a, 8) == 0) flags |= UVM_VMEM_OP_REPLACE;
  if ((capabilities & UVM_VMEM_CAP_READ_ONLY) && below(a, 6) == 0) flags |= UVM_VMEM_OP_READ_ONLY;
  if (below(a, 4) == 0) flags |= UVM_VMEM_OP_CUT;
  memset(used + at, true, count * page);
  *op = op_map(address(area, at), o->handle, first, count, flags);
  *object = o;
  return true;
}

/* Changes one field so that the batch must fail. Returns the expected errno. */
static int spoil(struct actor *a, struct area *area, struct uvm_vmem_op *op) {
  switch (below(a, 6)) {
    case 0: op->count = 0; return -EINVAL;
    case 1: op->addr += 4096; return -EINVAL;
    case 2: op->__reserved = 1; return -EINVAL;
    case 3: op->op = 9; return -EOPNOTSUPP;
    case 4:
      op->addr = area->reservation - UNIT * SLOT_UNITS;
      return -ERANGE;
    default:
      if (op->op != UVM_VMEM_OP_MAP) return 0;
      op->handle = 0;
      return -ENOENT;
  }
}

static void model_op(struct area *area, const struct uvm_vmem_op *op, struct object *o) {
  unsigned at = (op->addr - area->start) / UNIT;
  if (op->op == UVM_VMEM_OP_UNMAP) {
    struct unit to = {.state = op->flags & UVM_VMEM_OP_SPARSE ? SPARSE : NOTHING};
    for (unsigned i = 0; i < op->count << (area->shift - 16); i++) set_unit(&area->unit[at + i], to);
    return;
  }
  for (unsigned i = 0; i < op->count << (o->shift - 16); i++) {
    struct unit to = {.state = MAPPED,
                      .read_only = op->flags & UVM_VMEM_OP_READ_ONLY,
                      .object = o,
                      .index = (op->first << (o->shift - 16)) + i};
    set_unit(&area->unit[at + i], to);
  }
}

/* Finds the units of a slot that an operation names: from *first to *last. Returns false if it names none. */
static bool units_in_slot(const struct area *area, unsigned slot, const struct uvm_vmem_op *op, const struct object *o,
                          unsigned *first, unsigned *last) {
  unsigned at = (op->addr - area->start) / UNIT, units = op->count << ((o ? o->shift : area->shift) - 16);
  *first = at > slot * SLOT_UNITS ? at : slot * SLOT_UNITS;
  *last = (at + units < (slot + 1) * SLOT_UNITS ? at + units : (slot + 1) * SLOT_UNITS) - 1;
  return at < (slot + 1) * SLOT_UNITS && at + units > slot * SLOT_UNITS;
}

static bool op_changes(const struct area *area, const struct uvm_vmem_op *op, const struct object *o, unsigned unit) {
  const struct unit *u = &area->unit[unit];
  if (op->op == UVM_VMEM_OP_UNMAP) return u->state != (op->flags & UVM_VMEM_OP_SPARSE ? SPARSE : NOTHING);
  unsigned index = (op->first << (o->shift - 16)) + unit - (op->addr - area->start) / UNIT;
  return u->state != MAPPED || u->object != o || u->index != index || u->read_only != !!(op->flags & UVM_VMEM_OP_READ_ONLY);
}

/* Returns true if the operations map the whole slot to a 2 MB run of one object, in order and with one access right. */
static bool maps_run(const struct area *area, unsigned slot, const struct uvm_vmem_op *ops, struct object *const *object,
                     unsigned n) {
  const struct object *run = NULL;
  unsigned named = 0, first, last, flags = 0, begins = 0;
  for (unsigned i = 0; i < n; i++) {
    if (!units_in_slot(area, slot, &ops[i], object[i], &first, &last)) continue;
    if (!object[i] || !object[i]->one_run) return false;
    /* The unit of the object that the operation maps, or would map, at the slot's first unit. */
    unsigned begin = (ops[i].first << (object[i]->shift - 16)) + slot * SLOT_UNITS - (unsigned)((ops[i].addr - area->start) / UNIT);
    if (run && (run != object[i] || begin != begins || (ops[i].flags ^ flags) & UVM_VMEM_OP_READ_ONLY)) return false;
    run = object[i];
    begins = begin;
    flags = ops[i].flags;
    named += last - first + 1;
  }
  return named == SLOT_UNITS && begins % SLOT_UNITS == 0;
}

/* Predicts if a slot has a 2 MB entry after the batch. Or the batch is refused, because an operation without CUT
 * changes part of a 2 MB entry, or because an operation with LARGE cannot get one: that operation is named. */
static int slot_after(const struct area *area, unsigned slot, const struct uvm_vmem_op *ops, struct object *const *object,
                      unsigned n, bool *one, bool *culprit) {
  unsigned named = 0, first, last;
  bool whole = false, changed = false, any_uncut = false, any_cut = false, sparse = false;
  for (unsigned i = 0; i < SLOT_UNITS; i++) sparse |= area->unit[slot * SLOT_UNITS + i].state == SPARSE;
  for (unsigned i = 0; i < n; i++) {
    if (!(ops[i].flags & UVM_VMEM_OP_LARGE) || !units_in_slot(area, slot, &ops[i], object[i], &first, &last)) continue;
    culprit[i] = true;
    *one = !sparse && maps_run(area, slot, ops, object, n);
    return *one ? 0 : -EADDRNOTAVAIL;
  }
  for (unsigned i = 0; i < n; i++) {
    if (!units_in_slot(area, slot, &ops[i], object[i], &first, &last)) continue;
    bool changes = false;
    for (unsigned unit = first; unit <= last; unit++) changes |= op_changes(area, &ops[i], object[i], unit);
    named += last - first + 1;
    changed |= changes;
    any_cut |= ops[i].flags & UVM_VMEM_OP_CUT;
    if (object[i] && object[i]->one_run && last - first + 1 == SLOT_UNITS) whole = true;
    if (changes && !(ops[i].flags & UVM_VMEM_OP_CUT)) any_uncut = culprit[i] = true;
  }
  *one = area->one[slot] && !changed && !any_cut;
  if (area->big && whole && !sparse) *one = true;
  return area->one[slot] && !*one && named < SLOT_UNITS && any_uncut ? -EADDRINUSE : 0;
}

static void do_bind(struct actor *a) {
  struct area *area = &a->area[below(a, 2)];
  bool used[ARRAY_SIZE(a->area[0].unit)] = {false}, one[MOST_SLOTS] = {false}, culprit[MAX_OPS] = {false};
  struct uvm_vmem_op ops[MAX_OPS];
  struct object *object[MAX_OPS];
  unsigned want_ops = 1 + below(a, MAX_OPS), n = 0;
  for (unsigned tries = 0; tries < 3 * MAX_OPS && n < want_ops; tries++) {
    if (random_op(a, area, &ops[n], &object[n], used)) n++;
  }
  if (!n) return;
  if (below(a, 5)) { /* otherwise nearly all batches would be refused */
    for (unsigned i = 0; i < n; i++) ops[i].flags |= UVM_VMEM_OP_CUT;
  }
  /* LARGE for an operation that maps a contiguous object: the slot gets a 2 MB entry, or the batch is refused. */
  unsigned large = below(a, n);
  if (area->big && capabilities & UVM_VMEM_CAP_LARGE && object[large] && object[large]->one_run && below(a, 2)) {
    ops[large].flags |= UVM_VMEM_OP_LARGE;
  }
  unsigned bad = below(a, n);
  struct uvm_vmem_op good = ops[bad];
  int want = below(a, 10) == 0 ? spoil(a, area, &ops[bad]) : 0;
  for (unsigned slot = 0; slot < area->units / SLOT_UNITS && (!want || want == -EADDRINUSE || want == -EADDRNOTAVAIL); slot++) {
    bool here[MAX_OPS] = {false};
    int result = slot_after(area, slot, ops, object, n, &one[slot], here);
    if (result == 0 || want) continue;
    want = result;
    memcpy(culprit, here, sizeof(culprit));
  }
  bool async = (capabilities & UVM_VMEM_CAP_ASYNC) && below(a, 3) == 0;
  uint64_t ticket = 0;
  uint32_t failed;
  if (a->tickets == TICKETS) settle(a);
  int got = vm_bind(a->w->uvm, area->reservation, ops, n, &failed, async ? &ticket : NULL);
  while (got == -EAGAIN) { /* the other threads hold all the tickets */
    settle(a);
    sched_yield();
    got = vm_bind(a->w->uvm, area->reservation, ops, n, &failed, async ? &ticket : NULL);
  }
  if (got == -ENOSPC && !want) { /* no memory for tables */
    ops[bad] = good;
    return;
  }
  if ((got == -EADDRINUSE || got == -EADDRNOTAVAIL) && want == got && failed < n && culprit[failed]) bad = failed;
  if (got != want || failed != (want ? bad : ~0u)) {
    WRONG(a, "BIND of %u: %d (operation %d), not %d (%d)", n, got, (int)failed, want, want ? (int)bad : -1);
    return;
  }
  a->counts[want ? 7 : 6]++;
  if (ticket) a->ticket[a->tickets++] = ticket;
  if (want) return;
  memcpy(area->one, one, sizeof(one));
  /* Unmapping may free an object. So count all unmapped units first, then the mapped ones. */
  for (unsigned i = 0; i < n; i++) {
    if (object[i]) object[i]->mapped++;
  }
  for (unsigned i = 0; i < n; i++) model_op(area, &ops[i], object[i]);
  for (unsigned i = 0; i < n; i++) {
    if (!object[i]) continue;
    object[i]->mapped--;
    drop_if_dead(object[i]);
  }
}

static int reserve_own(struct actor *a) {
  static const unsigned shifts[] = {16, 16, 17, 18};
  struct area *own = &a->area[0];
  unsigned flags = below(a, 3) == 0 ? UVM_VMEM_RESERVE_EAGER : 0;
  if ((capabilities & UVM_VMEM_CAP_BIG) && below(a, 2)) flags |= UVM_VMEM_RESERVE_BIG;
  own->reservation = own->start = OWN_BASE + a->number * GIB(1);
  own->big = flags & UVM_VMEM_RESERVE_BIG;
  own->shift = shifts[below(a, ARRAY_SIZE(shifts))];
  own->units = OWN_SLOTS * SLOT_UNITS;
  return vm_reserve(a->w->uvm, a->w->uuid[0], own->start, OWN_SLOTS * SLOT, own->shift, flags);
}

static void clear_area(struct area *area) {
  for (unsigned i = 0; i < area->units; i++) set_unit(&area->unit[i], (struct unit){.state = NOTHING});
  memset(area->one, 0, sizeof(area->one));
}

static void do_free(struct actor *a) {
  bool mapped = false;
  for (unsigned i = 0; i < a->area[0].units; i++) mapped |= a->area[0].unit[i].state == MAPPED;
  int result = vm_free(a->w->uvm, a->area[0].reservation, 0);
  if (result != (mapped ? -EBUSY : 0)) WRONG(a, "FREE without UNMAP: %d", result);
  if (result) {
    result = vm_free(a->w->uvm, a->area[0].reservation, UVM_VMEM_FREE_UNMAP);
    if (result) WRONG(a, "FREE: %s", strerror(-result));
  }
  clear_area(&a->area[0]);
  settle(a);
  result = reserve_own(a);
  if (result) WRONG(a, "RESERVE: %s", strerror(-result));
}

static void look(struct actor *a) {
  struct area *area = &a->area[below(a, 2)];
  settle(a);
  for (unsigned i = 0; i < 6 && !a->failed; i++) {
    unsigned unit = below(a, area->units);
    if (below(a, 2)) {
      check_unit(a, area, unit);
    } else {
      write_unit(a, area, unit);
    }
  }
}

static void look_at_all(struct actor *a) {
  settle(a);
  for (unsigned which = 0; which < 2; which++) {
    for (unsigned i = 0; i < a->area[which].units && !a->failed; i++) check_unit(a, &a->area[which], i);
  }
}

static void step(struct actor *a) {
  unsigned dice = below(a, 100);
  if (dice < 12) {
    do_create(a);
    a->counts[0]++;
  } else if (dice < 20) {
    do_release(a);
    a->counts[1]++;
  } else if (dice < 60) {
    do_bind(a);
    a->counts[2]++;
  } else if (dice < 99) {
    look(a);
    a->counts[3]++;
  } else if (below(a, 3)) {
    look_at_all(a);
    a->counts[4]++;
  } else {
    do_free(a);
    a->counts[5]++;
  }
}

static void *act(void *argument) {
  struct actor *a = argument;
  uint64_t ops = parameter("OPS", 2000);
  for (uint64_t i = 0; i < ops && !a->failed; i++) {
    step(a);
    if (a->failed) printf("process %u, thread %u: at operation %llu\n", a->process, a->number, (unsigned long long)i);
  }
  if (!a->failed) look_at_all(a);
  printf("process %u, thread %u: create %llu release %llu bind %llu (done %llu, refused %llu) look %llu all %llu free %llu\n",
         a->process, a->number, (unsigned long long)a->counts[0], (unsigned long long)a->counts[1],
         (unsigned long long)a->counts[2], (unsigned long long)a->counts[6], (unsigned long long)a->counts[7],
         (unsigned long long)a->counts[3], (unsigned long long)a->counts[4], (unsigned long long)a->counts[5]);
  return NULL;
}

/* Frees everything, and checks STAT. */
static bool put_away(struct actor *actor, unsigned threads) {
  struct uvm_vmem_stat s;
  bool good = true;
  for (unsigned t = 0; t < threads; t++) {
    struct actor *a = &actor[t];
    good &= vm_free(a->w->uvm, a->area[0].reservation, UVM_VMEM_FREE_UNMAP) == 0;
    for (unsigned i = 0; i < OBJECTS; i++) {
      if (a->object[i].handle && !a->object[i].released) good &= vm_release(a->w->uvm, a->object[i].handle) == 0;
    }
  }
  good &= vm_free(process_world.uvm, SHARED_BASE, UVM_VMEM_FREE_UNMAP) == 0;
  good &= vm_stat(process_world.uvm, NULL, &s) == 0;
  if (s.out_reserved_bytes || s.out_created_bytes || s.out_mapped_bytes || s.out_objects || s.out_slots || s.out_tickets) {
    printf("left: reserved %llu created %llu mapped %llu objects %u slots %u tickets %u\n",
           (unsigned long long)s.out_reserved_bytes, (unsigned long long)s.out_created_bytes,
           (unsigned long long)s.out_mapped_bytes, s.out_objects, s.out_slots, s.out_tickets);
    good = false;
  }
  return good;
}

/* Runs one process. Exit status 0: everything was as the model predicts. */
static int process(unsigned number, unsigned threads, uint64_t seed) {
  struct actor *actor = calloc(threads, sizeof(*actor));
  pthread_t thread[16];
  struct uvm_vmem_query q;
  bool good = true;
  world_open(&process_world, 1);
  if (vm_query(process_world.uvm, process_world.uuid[0], &q)) return 1;
  capabilities = q.out_capabilities;
  int result = vm_reserve(process_world.uvm, process_world.uuid[0], SHARED_BASE, threads * SHARED_SLOTS * SLOT, 16,
                          capabilities & UVM_VMEM_CAP_BIG ? UVM_VMEM_RESERVE_BIG : 0);
  if (result) hopeless("RESERVE", result);
  for (unsigned t = 0; t < threads; t++) {
    struct actor *a = &actor[t];
    a->w = &process_world;
    a->process = number;
    a->number = t;
    a->rng.state = seed * 1000003 + number * 1009 + t;
    a->area[1] = (struct area){.reservation = SHARED_BASE,
                               .start = SHARED_BASE + t * SHARED_SLOTS * SLOT,
                               .shift = 16,
                               .big = capabilities & UVM_VMEM_CAP_BIG,
                               .units = SHARED_SLOTS * SLOT_UNITS};
    result = reserve_own(a);
    if (result) hopeless("RESERVE", result);
  }
  for (unsigned t = 0; t < threads; t++) pthread_create(&thread[t], NULL, act, &actor[t]);
  for (unsigned t = 0; t < threads; t++) pthread_join(thread[t], NULL);
  for (unsigned t = 0; t < threads; t++) good &= !actor[t].failed;
  /* Every second process exits without freeing anything. */
  if (good && number % 2 == 0) good = put_away(actor, threads);
  fflush(stdout);
  return good ? 0 : 1;
}

static void random_operations(void) {
  unsigned procs = parameter("PROCS", 2), threads = parameter("THREADS", 2);
  uint64_t seed = parameter("SEED", 1);
  struct softgpu_settings settings;
  struct softgpu_counters base;
  int dev = softgpu_open(), status;
  CHECK(threads <= 16 && procs <= 16);
  printf("SEED=%llu PROCS=%u THREADS=%u OPS=%llu DELAY_US=%llu\n", (unsigned long long)seed, procs, threads,
         (unsigned long long)parameter("OPS", 2000), (unsigned long long)parameter("DELAY_US", 200));
  OK(softgpu_counters(dev, 0, &base));
  OK(softgpu_settings(dev, NULL, &settings));
  settings.delay_us = parameter("DELAY_US", 200);
  settings.reorder = 1;
  settings.seed = seed;
  OK(softgpu_settings(dev, &settings, NULL));
  fflush(stdout);
  for (unsigned i = 0; i < procs; i++) {
    if (fork() == 0) _exit(process(i, threads, seed));
  }
  unsigned bad = 0;
  while (wait(&status) > 0) bad += !WIFEXITED(status) || WEXITSTATUS(status);
  EQ(bad, 0);
  settings.delay_us = 0;
  OK(softgpu_settings(dev, &settings, NULL));
  OK(softgpu_verify(dev));
  gpu_check_clean(dev, 0, &base, true);
  close(dev);
}

MAIN(TEST(random_operations))
