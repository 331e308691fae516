/* SPDX-License-Identifier: MIT */
#if !defined(Py_LIMITED_API) && !defined(_CFFI_NO_LIMITED_API)
#define Py_LIMITED_API 0x030a0000
#endif
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* clang-format off */
#include "_outcome.h"
#include "_columns.h"
/* clang-format on */

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* The largest power of two that is not above a number; 0 for 0. */
static uint64_t floor_power(uint64_t number) { return number ? 1ull << (63 - __builtin_clzll(number)) : 0; }

static uint64_t ceil_power(uint64_t number) { return number < 2 ? 1 : floor_power(number - 1) * 2; }

static uint64_t ceil_div(uint64_t number, uint64_t by) { return (number + by - 1) / by; }

/*
 * Reads `slots` lengths from a list of exactly as many. `rows` gets the rows that each slot holds
 * afterwards, max(length, held), `total` their sum; `needs` the rows that it must have pages for, which
 * are more for a prefill; and `beyond` the places where these exceed the capacity, in order. `beyond` has
 * room for one more than `slots`.
 *
 * Returns how many places are in `beyond`; -1 - i where entry i is not an int from 0 to 2^64 - 1; or
 * -1 - slots - i where no slot can hold so many rows, or this one is free.
 */
int64_t pyvmem_scan(void *list, uint32_t slots, const struct pyvmem_place *place, const struct pyvmem_columns *columns,
                    const uint64_t *held, uint64_t *rows, uint64_t *needs, uint32_t *beyond, uint64_t *total) {
  PyGILState_STATE state = PyGILState_Ensure();
  const uint64_t *capacity = columns->capacity;
  uint64_t guard = place->guard, prefill = place->prefill, max_rows = place->max_rows;
  int64_t n = 0, bad = 0;
  uint64_t sum = 0, length = 0;
  PyObject *last = NULL;
  for (uint32_t i = 0; i < slots; i++) {
    PyObject *item = PyList_GetItem(list, i);
    if (item != last) /* the zeros of free slots are one object */
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
    if (!bad && (!columns->active[i] || need > max_rows)) bad = -1 - (int64_t)slots - (int64_t)i;
  }
  PyGILState_Release(state);
  *total = sum;
  return bad ? bad : n;
}

/*
 * Chooses for each slot how many pages are mapped, at least `pages`. Slots that lack none
 * stay as they are. Returns the pages beyond what is asked for, of all slots together.
 */
uint64_t pyvmem_goals(const struct pyvmem_runs *runs, uint64_t count, const uint64_t *pages, const uint64_t *mapped,
                      const uint64_t *head, uint64_t *goals) {
  memcpy(goals, pages, count * sizeof(*goals));
  uint64_t need = 0;
  for (uint64_t i = 0; i < count; i++) need += pages[i] > mapped[i] ? pages[i] - mapped[i] : 0;
  if (!need || need >= runs->free || runs->longest == 1) return 0;
  uint64_t room = runs->free - need;
  uint64_t least = runs->left ? ceil_power(ceil_div(2 * room * runs->tensors, runs->left)) : 1;
  uint64_t share = room / (runs->active ? runs->active : 1);
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
 * Finds the slots that the last scan named, and whose pages end within `ahead` rows after those that are held.
 * `found` gets them and `needs` the rows that each is to have pages for, as long as they lack no more than `room`
 * pages together. Slots that are not plain are left out.
 *
 * Returns how many there are.
 */
uint32_t pyvmem_near(const struct pyvmem_place *place, const struct pyvmem_columns *columns, uint32_t slots,
                     const uint64_t *held, uint64_t ahead, uint64_t room, uint64_t *needs, uint32_t *found) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < slots; i++) {
    if (!columns->named[i] || !columns->plain[i]) continue;
    uint64_t rows = smaller(held[i] + ahead, place->max_rows), mapped = columns->mapped[i];
    uint64_t bytes = smaller(rows + place->overread, place->max_rows) * place->row_bytes;
    if (bytes <= mapped * place->page_size || mapped != columns->granted[i]) continue;
    uint64_t lacking = ceil_div(bytes, place->page_size) - mapped;
    if (lacking > room) continue;
    room -= lacking;
    needs[i] = rows;
    found[n++] = i;
  }
  return n;
}

/*
 * Plans the growth of the slots in `growth->slot` to what they need, one POPULATE each. Changes nothing but
 * `growth` and `ops`.
 *
 * Returns 0; or -1 where a slot is not plain, or more pages are lacking than `runs` says are free.
 */
int pyvmem_plan(const struct pyvmem_runs *runs, const struct pyvmem_place *place, const struct pyvmem_columns *columns,
                const uint64_t *needs, struct pyvmem_growth *growth, struct vmem_op *ops) {
  growth->lacking = growth->reused = growth->ops = 0;
  for (uint64_t i = 0; i < growth->count; i++) {
    uint32_t slot = growth->slot[i];
    if (!columns->plain[slot]) return -1;
    uint64_t rows = smaller(needs[slot] + place->overread, place->max_rows);
    uint64_t pages = place->fixed ? place->fixed : ceil_div(rows * place->row_bytes, place->page_size);
    uint64_t mapped = columns->mapped[slot];
    growth->pages[i] = pages;
    growth->mapped[i] = mapped;
    growth->lacking += pages > mapped ? pages - mapped : 0;
    growth->reused += smaller(pages, mapped) - columns->granted[slot];
    growth->head[i] = columns->head[slot];
  }
  if (growth->lacking > runs->free) return -1;
  uint64_t ahead = pyvmem_goals(runs, growth->count, growth->pages, growth->mapped, growth->head, growth->goal);
  growth->added = growth->lacking + ahead;
  for (uint64_t i = 0; i < growth->count; i++) {
    uint32_t slot = growth->slot[i];
    uint64_t mapped = growth->mapped[i];
    growth->whole[i] = columns->whole[slot];
    if (place->block && (ceil_div(mapped, place->block) + 1) * place->block <= growth->goal[i])
      growth->whole[i] = growth->goal[i] / place->block * place->block;
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

/* Pages of a slot that can be unmapped: those not granted, without the rest of a large entry that is begun. */
static uint64_t surplus_of(const struct pyvmem_place *place, const struct pyvmem_columns *columns, uint32_t slot) {
  uint64_t granted = columns->granted[slot];
  if (granted < columns->whole[slot]) granted = ceil_div(granted, place->block) * place->block;
  return columns->mapped[slot] - granted;
}

/* Notes that a planned growth is mapped and granted. */
static void commit(const struct pyvmem_place *place, struct pyvmem_columns *columns,
                   const struct pyvmem_growth *growth) {
  for (uint64_t i = 0; i < growth->count; i++) {
    uint32_t slot = growth->slot[i];
    uint64_t before = columns->mapped[slot], rows = growth->pages[i] * place->page_size / place->row_bytes;
    if (growth->goal[i] > before) {
      columns->calls[slot] = before ? columns->calls[slot] + 1 : 1;
      columns->joined[slot] = smaller(columns->joined[slot], before);
    }
    columns->surplus -= surplus_of(place, columns, slot);
    columns->mapped[slot] = growth->goal[i];
    columns->granted[slot] = growth->pages[i];
    columns->whole[slot] = growth->whole[i];
    columns->surplus += surplus_of(place, columns, slot);
    columns->capacity[slot] = place->fixed || rows >= place->max_rows ? place->max_rows : rows - place->overread;
  }
}

/* The worker, and perhaps others, use the context too: never counts more driver time than the wait took. */
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

/* Writes one UNMAP for each item: pages [low, high) of a slot, in every tensor. */
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
 * Runs the `n` map calls of growths that were planned together, as one batch, and notes that they are mapped and
 * granted; `outcome` has the edits of the other records.
 *
 * Returns what vmem_batch did. Where that is not 0 nothing changed, and `wait` is to be ended by the caller, who asks
 * for the error first.
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
