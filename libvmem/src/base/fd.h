/* SPDX-License-Identifier: MIT */
/*
 * fd.h - file descriptors that the library keeps. None is 0, 1 or 2: in a process that was started without
 * standard output, printf would write into the file that has number 1.
 */
#ifndef VMEM_BASE_FD_H
#define VMEM_BASE_FD_H

/* Duplicates a descriptor, with close-on-exec; -1 with errno. */
int vm_duplicate(int fd);

/* Returns `fd` if it is above 2, else closes it and returns a duplicate above 2; `fd` has close-on-exec set already. -1
 * with errno: `fd` was -1, or it could not be duplicated and is closed. */
int vm_above_stdio(int fd);

#endif
