/* SPDX-License-Identifier: MIT */
#include "base/retry.h"

#include <time.h>

#define FIRST_PAUSE_NS 1000000L
#define LONGEST_PAUSE_NS 100000000L

static _Thread_local unsigned undoing;

void vm_undo_begin(void) { undoing++; }

void vm_undo_end(void) { undoing--; }

bool vm_undoing(void) { return undoing != 0; }

bool vm_again(struct vm_patience *p) {
  struct timespec t;
  uint64_t now;
  clock_gettime(CLOCK_MONOTONIC, &t);
  now = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
  if (!p->pause_ns) *p = (struct vm_patience){now, FIRST_PAUSE_NS};
  if (!undoing && now - p->since_ns >= VM_PATIENCE_S * 1000000000ull) return false;
  t = (struct timespec){.tv_nsec = p->pause_ns};
  nanosleep(&t, NULL);
  if (p->pause_ns < LONGEST_PAUSE_NS / 2)
    p->pause_ns *= 2;
  else
    p->pause_ns = LONGEST_PAUSE_NS;
  return true;
}
