/* SPDX-License-Identifier: MIT */
/* What holes.py calls of _holes.c; cffi reads the part after the includes (see _build.py). */
#include <vmem.h>

struct pyvmem_hole {
  uint64_t addr;         /* that was read */
  uint64_t start, bytes; /* the hole */
  uint64_t base;         /* of the reservation */
  uint64_t thread;       /* pthread_self */
  int32_t python;        /* whether the thread runs Python */
};

/* Watches a reservation that the CPU reads. Best effort: without it a fault there ends the process, as it would. */
void pyvmem_holes_watch(vmem_t vm, uint64_t addr, uint64_t bytes);
/* The reservation is about to be freed. Its length; 0: it was not watched. */
uint64_t pyvmem_holes_forget(uint64_t addr);
/* Becomes the handler of SIGSEGV again, where another one was installed meanwhile. */
void pyvmem_holes_renew(void);
/* Has the interpreter call holes.py again. */
void pyvmem_holes_again(void);
/* The oldest read of a hole that nobody has taken; 0: there is none. */
int pyvmem_holes_take(struct pyvmem_hole *hole);
/* Holes that were read fault again. */
void pyvmem_holes_conceal(void);
