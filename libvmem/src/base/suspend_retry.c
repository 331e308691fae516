/* SPDX-License-Identifier: MIT */
#include "base/suspend_retry.h"

#include "base/clock.h"

#define FIRST_PAUSE_NS 1000000L
#define LONGEST_PAUSE_NS 100000000L

static _Thread_local unsigned undoing;

void vm_undo_begin(void) { undoing++; }

void vm_undo_end(void) { undoing--; }

bool vm_undoing(void) { return undoing != 0; }

bool vm_suspend_wait(struct vm_suspend_retry *p) {
  uint64_t now = vm_now_ns();
  struct timespec t;
  if (!p->pause_ns) *p = (struct vm_suspend_retry){now, FIRST_PAUSE_NS};
  if (!undoing && now - p->since_ns >= VM_SUSPEND_RETRY_S * 1000000000ull) return false;
  t = (struct timespec){.tv_nsec = p->pause_ns};
  nanosleep(&t, NULL);
  p->pause_ns = p->pause_ns < LONGEST_PAUSE_NS / 2 ? 2 * p->pause_ns : LONGEST_PAUSE_NS;
  return true;
}
