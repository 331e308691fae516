/* SPDX-License-Identifier: MIT */
#if !defined(Py_LIMITED_API) && !defined(_CFFI_NO_LIMITED_API)
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

/* clang-format off */
#include "_outcome.h"
#include "_columns.h"
/* clang-format on */

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Rounds down to a power of two; 0 for 0. */
static uint64_t floor_power(uint64_t number) { return number ? 1ull << (63 - __builtin_clzll(number)) : 0; }

static uint64_t ceil_power(uint64_t number) { return number < 2 ? 1 : floor_power(number - 1) * 2; }

static uint64_t ceil_div(uint64_t number, uint64_t by) { return (number + by - 1) / by; }

/* ---- the slots ---- */

struct row { /* the fields of a Slot (slots.py) that C reads */
  PyObject ob_base;
  /* Scans over all slots read these 64 bytes. */
  char active, broken, writer, rows_lost, kept;
  uint64_t mapped, granted, head, dirty;
  PyObject *job, *span, *tier_map; /* NULL only while the slot is being created or collected */
  uint64_t index, addr, large_end, block, owner, freed_at, freed_order;
};

static int row_traverse(PyObject *self, visitproc visit, void *arg) {
  struct row *row = (struct row *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(row->job);
  Py_VISIT(row->span);
  Py_VISIT(row->tier_map);
  return 0;
}

static int row_clear(PyObject *self) {
  struct row *row = (struct row *)self;
  Py_CLEAR(row->job);
  Py_CLEAR(row->span);
  Py_CLEAR(row->tier_map);
  return 0;
}

static void row_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  row_clear(self);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

/* Reads an attribute that is an int or a bool. Returns 0 if that fails. */
static uint64_t number(PyObject *owner, const char *name) {
  PyObject *found = PyObject_GetAttrString(owner, name);
  uint64_t value = found ? PyLong_AsUnsignedLongLong(found) : 0;
  Py_XDECREF(found);
  if (PyErr_Occurred()) PyErr_Clear();
  return value;
}

/* Reads slots one after the other, with the GIL held. Caches the previous slot's objects, since many slots share
 * them. */
struct look {
  PyObject *span, *tier_map;              /* objects of the previous slot */
  uint64_t shared, off_device_end, noted; /* read from these objects: two page counts and the number of intervals */
  PyObject *stretches;                    /* borrowed */
};

/* Reads the bounds of an interval in `TierMap.noted`. */
static void interval(PyObject *stretches, Py_ssize_t at, uint64_t *low, uint64_t *high) {
  PyObject *one = PySequence_GetItem(stretches, at);
  *low = PyLong_AsUnsignedLongLong(PyTuple_GetItem(one, 0));
  *high = PyLong_AsUnsignedLongLong(PyTuple_GetItem(one, 1));
  Py_DECREF(one);
}

static void look_again(struct look *look, const struct row *row) {
  if (look->span != row->span) look->shared = number(row->span, "pages");
  if (look->tier_map != row->tier_map) {
    look->stretches = PyObject_GetAttrString(row->tier_map, "noted");
    Py_DECREF(look->stretches); /* the slot keeps the object alive */
    uint64_t low;
    look->noted = (uint64_t)PySequence_Size(look->stretches);
    look->off_device_end = 0;
    if (look->noted) interval(look->stretches, (Py_ssize_t)look->noted - 1, &low, &look->off_device_end);
  }
  look->span = row->span;
  look->tier_map = row->tier_map;
}

static inline void look_at(struct look *look, const struct row *row) {
  if (look->span != row->span || look->tier_map != row->tier_map) look_again(look, row);
}

/* True if there are shared, off-device or missing pages beyond the owner's. */
static inline int stale(struct look *look, const struct row *row) {
  look_at(look, row);
  return look->shared > row->granted || row->head > row->granted || look->off_device_end > row->granted;
}

static uint32_t kinds(struct look *look, const struct row *row) {
  int busy = row->job != Py_None, taking = busy && number(row->job, "takes_pages");
  uint32_t found = busy ? PYVMEM_BUSY : 0;
  if (row->rows_lost) found |= PYVMEM_ROWS_LOST;
  if (stale(look, row)) found |= PYVMEM_STALE | PYVMEM_LOSING;
  if (taking) found |= PYVMEM_LOSING;
  if (!row->active)
    return found | (row->broken ? 0 : PYVMEM_FREE) | (row->mapped && !row->rows_lost ? PYVMEM_CACHED : 0);
  if (busy || row->rows_lost) return found;
  if (row->mapped > row->granted) found |= PYVMEM_LEFT;
  if (row->dirty > row->granted || look->noted || found & PYVMEM_STALE) return found;
  return found | PYVMEM_PLAIN;
}

/* True if a slot has all flags of `all` and none of `none`. */
static int matches(struct look *look, const struct row *row, uint32_t all, uint32_t none) {
  if (all & PYVMEM_FREE && (row->active || row->broken)) return 0; /* a quick test that rejects most slots */
  if (all & PYVMEM_STALE && !stale(look, row)) return 0;
  return (kinds(look, row) & (all | none)) == all;
}

static PyObject *row_stale(PyObject *self, void *closure) {
  struct look look = {0};
  (void)closure;
  return PyBool_FromLong(stale(&look, (struct row *)self));
}

/* Returns a new reference to the base class of Slot. Called with the GIL held, as
 * `pyvmem_dlpack_capsule` is. */
void *pyvmem_row_type(void) {
#define MEMBER(type, name)                                                                                             \
  {                                                                                                                    \
    #name, type, offsetof(struct row, name), 0, NULL                                                                   \
  }
  static PyMemberDef members[] = {
      MEMBER(T_ULONGLONG, index),
      MEMBER(T_ULONGLONG, addr),
      MEMBER(T_ULONGLONG, mapped),
      MEMBER(T_ULONGLONG, granted),
      MEMBER(T_ULONGLONG, large_end),
      MEMBER(T_ULONGLONG, block),
      MEMBER(T_ULONGLONG, head),
      MEMBER(T_ULONGLONG, dirty),
      MEMBER(T_ULONGLONG, owner),
      MEMBER(T_ULONGLONG, freed_at),
      MEMBER(T_ULONGLONG, freed_order),
      MEMBER(T_OBJECT_EX, job),
      MEMBER(T_OBJECT_EX, span),
      MEMBER(T_OBJECT_EX, tier_map),
      MEMBER(T_BOOL, active),
      MEMBER(T_BOOL, broken),
      MEMBER(T_BOOL, writer),
      MEMBER(T_BOOL, rows_lost),
      MEMBER(T_BOOL, kept),
      {NULL, 0, 0, 0, NULL},
  };
#undef MEMBER
  static PyGetSetDef computed[] = {{"stale", row_stale, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL}};
  static PyType_Slot slots[] = {
      {Py_tp_getset, computed}, {Py_tp_members, members},     {Py_tp_traverse, row_traverse},
      {Py_tp_clear, row_clear}, {Py_tp_dealloc, row_dealloc}, {0, NULL},
  };
  static PyType_Spec spec = {"pyvmem._native.Row", sizeof(struct row), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots};
  return PyType_FromSpec(&spec);
}

static struct row *row_at(const struct pyvmem_columns *columns, uint64_t slot) { return columns->row[slot]; }

static int older(const struct row *a, const struct row *b) {
  return a->freed_order < b->freed_order || (a->freed_order == b->freed_order && a->index < b->index);
}

static int by_age(const void *a, const void *b) {
  const struct row *one = *(void *const *)a, *other = *(void *const *)b;
  return older(one, other) ? -1 : one != other;
}

/*
 * Finds the slots with all flags of `all` and none of `none`, least recently used first. With
 * `found` NULL it only counts them.
 *
 * Returns their number.
 */
uint32_t pyvmem_pick(const struct pyvmem_columns *columns, uint32_t all, uint32_t none, uint32_t *found) {
  struct look look = {0};
  uint32_t n = 0;
  PyGILState_STATE state = PyGILState_Ensure();
  for (uint32_t i = 0; i < columns->count; i++) {
    if (!matches(&look, columns->row[i], all, none)) continue;
    if (found) columns->found[n] = columns->row[i];
    n++;
  }
  PyGILState_Release(state);
  if (!found) return n;
  qsort(columns->found, n, sizeof(*columns->found), by_age);
  for (uint32_t i = 0; i < n; i++) found[i] = (uint32_t)((struct row *)columns->found[i])->index;
  return n;
}

/*
 * Chooses, among the slots that `pyvmem_pick` finds, the one with the fewest mapped pages, but at least `pages`;
 * failing that, the one with the most. Ties go to the least recently used. Returns the number of
 * slots if none is found.
 */
uint32_t pyvmem_fit(const struct pyvmem_columns *columns, uint32_t all, uint32_t none, uint64_t pages) {
  struct look look = {0};
  const struct row *best = NULL;
  PyGILState_STATE state = PyGILState_Ensure();
  for (uint32_t i = 0; i < columns->count; i++) {
    const struct row *row = columns->row[i];
    if (!matches(&look, row, all, none)) continue;
    int enough = row->mapped >= pages, more = best && row->mapped > best->mapped;
    if (!best || (row->mapped == best->mapped ? older(row, best) : best->mapped < pages ? more : enough && !more))
      best = row;
  }
  PyGILState_Release(state);
  return best ? (uint32_t)best->index : columns->count;
}

/*
 * Counts the device pages of slots beyond those of their owners. Excludes the unused pages of a partly used large
 * entry, slots with a growth in flight, and slots that lost rows.
 */
uint64_t pyvmem_spare(const struct pyvmem_columns *columns) {
  struct look look = {0};
  uint64_t sum = 0;
  PyGILState_STATE state = PyGILState_Ensure();
  for (uint32_t i = 0; i < columns->count; i++) {
    const struct row *row = columns->row[i];
    if (row->rows_lost || (row->job != Py_None && !number(row->job, "takes_pages"))) continue;
    look_at(&look, row);
    uint64_t from = row->granted, low, high;
    if (row->active && from < row->large_end) from = ceil_div(from, row->block) * row->block;
    if (from < row->head + look.shared) from = row->head + look.shared;
    if (from >= row->mapped) continue;
    sum += row->mapped - from;
    for (uint64_t at = 0; at < look.noted; at++) {
      interval(look.stretches, (Py_ssize_t)at, &low, &high);
      low = low < from ? from : low;
      high = smaller(high, row->mapped);
      sum -= low < high ? high - low : 0;
    }
  }
  PyGILState_Release(state);
  return sum;
}

/* ---- a step ---- */

/*
 * Reads a list with a length for each slot, and writes:
 * - `rows`: the rows that each slot holds afterwards, max(length, held); `total`: their sum;
 * - `needs`: the rows for which each slot must have pages, more for a prefill;
 * - `beyond`: the indices of the slots whose needs exceed their capacity, in order. It has room for one index more
 *    than there are slots.
 *
 * Returns the number of indices in `beyond`; -1 - i if entry i is not an int from 0 to 2^64 - 1; or
 * -1 - slots - i if entry i is above a slot's limit, or above 0 for a free slot.
 */
int64_t pyvmem_scan(void *list, const struct pyvmem_place *place, const struct pyvmem_columns *columns,
                    const uint64_t *held, uint64_t *rows, uint64_t *needs, uint32_t *beyond, uint64_t *total) {
  PyGILState_STATE state = PyGILState_Ensure();
  const uint64_t *capacity = columns->capacity;
  uint32_t slots = columns->count;
  uint64_t guard = place->guard, prefill = place->prefill, max_rows = place->max_rows;
  int64_t n = 0, bad = 0;
  uint64_t sum = 0, length = 0;
  PyObject *last = NULL;
  for (uint32_t i = 0; i < slots; i++) {
    PyObject *item = PyList_GetItem(list, i);
    if (item != last) /* free slots share one object, the int 0: do not convert it again */
      length = PyLong_AsUnsignedLongLong(item);
    last = item;
    if (length == UINT64_MAX && PyErr_Occurred()) {
      PyErr_Clear();
      bad = -1 - (int64_t)i;
      break;
    }
    columns->named[i] = length > 0;
    uint64_t need = length > held[i] ? length : held[i];
    rows[i] = need;
    sum += need;
    if (guard && need - held[i] > prefill && need < max_rows) need = smaller(need + guard, max_rows);
    needs[i] = need;
    if (need <= capacity[i]) continue;
    beyond[n++] = i;
    if (!bad && (!row_at(columns, i)->active || need > max_rows)) bad = -1 - (int64_t)slots - (int64_t)i;
  }
  PyGILState_Release(state);
  *total = sum;
  return bad ? bad : n;
}

/*
 * Chooses the number of pages to map for each slot, at least `pages`. Slots that have enough are
 * unchanged. Returns the surplus pages of all slots.
 */
uint64_t pyvmem_goals(const struct pyvmem_runs *runs, const struct pyvmem_columns *columns, uint64_t count,
                      const uint64_t *pages, const uint64_t *mapped, const uint64_t *head, uint64_t *goals) {
  memcpy(goals, pages, count * sizeof(*goals));
  uint64_t need = 0;
  for (uint64_t i = 0; i < count; i++) need += pages[i] > mapped[i] ? pages[i] - mapped[i] : 0;
  if (!need || need >= runs->free || runs->longest == 1) return 0;
  uint64_t room = runs->free - need, active = 0;
  for (uint32_t i = 0; i < columns->count; i++) active += row_at(columns, i)->active;
  uint64_t least = runs->left ? ceil_power(ceil_div(2 * room * runs->tensors, runs->left)) : 1;
  uint64_t share = room / (active ? active : 1);
  uint64_t most = smaller(runs->longest, floor_power(least > 1 ? share : share / 2));
  if (most < 2) return 0;
  uint64_t left = room;
  for (uint64_t i = 0; i < count; i++) {
    if (pages[i] <= mapped[i]) continue;
    uint64_t run = floor_power((uint64_t)((double)(pages[i] - head[i]) * runs->fraction));
    run = smaller(run < least ? least : run, most);
    if (run < 2) continue;
    uint64_t goal = smaller(ceil_div(pages[i], run) * run, runs->last);
    if (goal - pages[i] > left) continue;
    left -= goal - pages[i];
    goals[i] = goal;
  }
  return room - left;
}

/*
 * Finds the slots in use in the last scan that will run out of pages within `ahead` more rows. Writes them to `found`,
 * and to `needs` the rows for which each is to have pages; skips a slot if the pages would exceed `room` in total, or
 * if it is not plain.
 *
 * Returns their number.
 */
uint32_t pyvmem_near(const struct pyvmem_place *place, const struct pyvmem_columns *columns, const uint64_t *held,
                     uint64_t ahead, uint64_t room, uint64_t *needs, uint32_t *found) {
  struct look look = {0};
  uint32_t n = 0;
  PyGILState_STATE state = PyGILState_Ensure();
  for (uint32_t i = 0; i < columns->count; i++) {
    const struct row *row = columns->row[i];
    uint64_t rows = smaller(held[i] + ahead, place->max_rows), mapped = row->mapped;
    uint64_t bytes = smaller(rows + place->overread, place->max_rows) * place->row_bytes;
    if (!columns->named[i] || bytes <= mapped * place->page_size || mapped != row->granted) continue;
    if (!(kinds(&look, row) & PYVMEM_PLAIN)) continue;
    uint64_t lacking = ceil_div(bytes, place->page_size) - mapped;
    if (lacking > room) continue;
    room -= lacking;
    needs[i] = rows;
    found[n++] = i;
  }
  PyGILState_Release(state);
  return n;
}

/*
 * Plans the growth of the slots in `growth->slot` to their needs, one POPULATE each. Changes only
 * `growth` and `ops`.
 *
 * Returns 0; or -1 if a slot is not plain, or more pages are missing than `runs` says are free.
 */
int pyvmem_plan(const struct pyvmem_runs *runs, const struct pyvmem_place *place, const struct pyvmem_columns *columns,
                const uint64_t *needs, struct pyvmem_growth *growth, struct vmem_op *ops) {
  struct look look = {0};
  uint32_t all = PYVMEM_PLAIN;
  PyGILState_STATE state = PyGILState_Ensure();
  for (uint64_t i = 0; i < growth->count; i++) all &= kinds(&look, columns->row[growth->slot[i]]);
  PyGILState_Release(state);
  if (!all) return -1;
  growth->lacking = growth->reused = growth->ops = 0;
  for (uint64_t i = 0; i < growth->count; i++) {
    uint32_t slot = growth->slot[i];
    const struct row *row = columns->row[slot];
    uint64_t rows = smaller(needs[slot] + place->overread, place->max_rows);
    uint64_t pages = place->fixed ? place->fixed : ceil_div(rows * place->row_bytes, place->page_size);
    uint64_t mapped = row->mapped;
    growth->pages[i] = pages;
    growth->mapped[i] = mapped;
    growth->lacking += pages > mapped ? pages - mapped : 0;
    growth->reused += smaller(pages, mapped) - row->granted;
    growth->head[i] = row->head;
  }
  if (growth->lacking > runs->free) return -1;
  uint64_t ahead =
      pyvmem_goals(runs, columns, growth->count, growth->pages, growth->mapped, growth->head, growth->goal);
  growth->added = growth->lacking + ahead;
  for (uint64_t i = 0; i < growth->count; i++) {
    uint32_t slot = growth->slot[i];
    uint64_t mapped = growth->mapped[i];
    growth->large_end[i] = row_at(columns, slot)->large_end;
    if (place->block && (ceil_div(mapped, place->block) + 1) * place->block <= growth->goal[i])
      growth->large_end[i] = growth->goal[i] / place->block * place->block;
    if (growth->goal[i] <= mapped) {
      growth->goal[i] = mapped;
      continue;
    }
    ops[growth->ops++] = (struct vmem_op){
        .op = VMEM_OP_POPULATE,
        .flags = place->op_flags,
        .addr = place->base + slot * place->slot_bytes + mapped * place->page_size,
        .bytes = (growth->goal[i] - mapped) * place->page_size,
        .count = place->tensors,
        .stride = place->tensor_bytes,
        .page_size = place->page_size,
        .location = VMEM_DEVICE,
    };
  }
  return 0;
}

/* Records the pages of a planned growth as mapped and granted. */
static void commit(const struct pyvmem_place *place, struct pyvmem_columns *columns,
                   const struct pyvmem_growth *growth) {
  for (uint64_t i = 0; i < growth->count; i++) {
    uint32_t slot = growth->slot[i];
    struct row *row = columns->row[slot];
    uint64_t before = row->mapped, rows = growth->pages[i] * place->page_size / place->row_bytes;
    if (growth->goal[i] > before) {
      columns->calls[slot] = before ? columns->calls[slot] + 1 : 1;
      columns->joined[slot] = smaller(columns->joined[slot], before);
    }
    row->mapped = growth->goal[i];
    row->granted = growth->pages[i];
    row->large_end = growth->large_end[i];
    columns->capacity[slot] = place->fixed || rows >= place->max_rows ? place->max_rows : rows - place->overread;
  }
}

/* Caps the driver time at the length of the wait: other threads use the context, too. */
void pyvmem_wait_add(struct pyvmem_waits *waits, uint64_t ns, uint64_t driver_ns) {
  unsigned power = ns > 1 ? 64 - (unsigned)__builtin_clzll(ns - 1) : 0;
  waits->count++;
  waits->ns += ns;
  waits->last_ns += ns;
  waits->driver_ns += smaller(ns, driver_ns);
  waits->lengths[power < PYVMEM_WAIT_COUNTS ? power : PYVMEM_WAIT_COUNTS - 1]++;
}

static uint64_t driver_ns(vmem_t vm) {
  struct vmem_stats stats = {.size = sizeof(stats)};
  return vmem_get_stats(vm, &stats) ? 0 : stats.driver_ns;
}

static uint64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

void pyvmem_wait_begin(struct pyvmem_wait *wait, vmem_t vm) {
  wait->driver_ns = driver_ns(vm);
  wait->start_ns = now_ns();
}

/* Overwrites the thread's last error. */
void pyvmem_wait_end(struct pyvmem_waits *waits, const struct pyvmem_wait *wait, vmem_t vm) {
  uint64_t ns = now_ns() - wait->start_ns, driver = driver_ns(vm);
  pyvmem_wait_add(waits, ns, driver > wait->driver_ns ? driver - wait->driver_ns : 0);
}

/* Writes one UNMAP per item: pages [low, high) of a slot, in every tensor. */
void pyvmem_unmaps(const struct pyvmem_place *place, uint64_t count, const uint64_t *slot, const uint64_t *low,
                   const uint64_t *high, struct vmem_op *ops) {
  for (uint64_t i = 0; i < count; i++)
    ops[i] = (struct vmem_op){
        .op = VMEM_OP_UNMAP,
        .addr = place->base + slot[i] * place->slot_bytes + low[i] * place->page_size,
        .bytes = (high[i] - low[i]) * place->page_size,
        .count = place->tensors,
        .stride = place->tensor_bytes,
    };
}

/*
 * Runs the `n` map operations of growths that were planned together, as one batch, and records them
 * as mapped and granted; `outcome` holds the edits to the other records.
 *
 * Returns the result of vmem_batch. If it is not 0, nothing changed, and the caller must first read the error and
 * then call pyvmem_wait_end on `wait`.
 */
int pyvmem_extend(struct pyvmem_outcome *outcome, vmem_t vm, const struct pyvmem_grown *groups, uint64_t count,
                  const struct vmem_op *ops, uint64_t n, struct pyvmem_waits *waits, struct pyvmem_wait *wait) {
  if (n) {
    pyvmem_wait_begin(wait, vm);
    int code = pyvmem_batch(outcome, vm, ops, n, NULL, 0, 0);
    if (code) return code;
    pyvmem_wait_end(waits, wait, vm);
  } else {
    pyvmem_note(outcome, 0, 0);
  }
  for (uint64_t i = 0; i < count; i++) commit(groups[i].place, groups[i].columns, groups[i].growth);
  return 0;
}
