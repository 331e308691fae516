/* SPDX-License-Identifier: MIT */
/* Functions of _holes.c for holes.py; cffi reads the part after the includes (see _build.py). */
#include <vmem.h>

struct pyvmem_hole {
  uint64_t addr;         /* the address read */
  uint64_t start, bytes; /* the hole */
  uint64_t base;         /* of the reservation */
  uint64_t thread;       /* pthread_self */
  int32_t python;        /* true if the thread runs Python */
};

/* Watches a reservation that the CPU reads. Best effort: unwatched, a fault there kills the
 * process. */
void pyvmem_holes_watch(vmem_t vm, uint64_t addr, uint64_t bytes);
/* Stops watching a reservation that is about to be freed. Returns its length; 0: it was not
 * watched. */
uint64_t pyvmem_holes_forget(uint64_t addr);
/* Becomes the handler of SIGSEGV again, if another was installed meanwhile. */
void pyvmem_holes_renew(void);
/* Has the interpreter call holes.py again. */
void pyvmem_holes_again(void);
/* Takes the oldest recorded read of a hole; 0: none. */
int pyvmem_holes_take(struct pyvmem_hole *hole);
/* Makes holes that were read fault again. */
void pyvmem_holes_conceal(void);
