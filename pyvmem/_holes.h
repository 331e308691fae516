/* SPDX-License-Identifier: MIT */
/* Functions of _holes.c for holes.py; cffi reads the part after the includes (see _build.py). */
#include <vmem.h>

struct pyvmem_hole {
  uint64_t addr;         /* the address that was read */
  uint64_t start, bytes; /* the hole */
  uint64_t base;         /* start of the reservation */
  uint64_t thread;       /* pthread_self */
  int32_t python;        /* true if the thread is a Python thread */
};

/* Watches a reservation if the CPU can read it. Best effort: reading a hole in an unwatched reservation kills the
 * process. */
void pyvmem_holes_watch(vmem_t vm, uint64_t addr, uint64_t bytes);
/* Stops watching a reservation that is about to be freed. Returns its length, or 0 if it was not watched. */
uint64_t pyvmem_holes_forget(uint64_t addr);
/* Installs the SIGSEGV handler again if another has replaced it. */
void pyvmem_holes_renew(void);
/* Schedules another call of holes.py by the interpreter. */
void pyvmem_holes_again(void);
/* Removes the oldest recorded read of a hole and returns 1; returns 0 if there is none. */
int pyvmem_holes_take(struct pyvmem_hole *hole);
/* Makes holes that were read fault again. */
void pyvmem_holes_conceal(void);
