/* SPDX-License-Identifier: MIT */
/*
 * fd.h - file descriptors that the library keeps. None is 0, 1 or 2: in a process that was started without
 * standard output, say, printf would write into what has its number.
 */
#ifndef VMEM_BASE_FD_H
#define VMEM_BASE_FD_H

/* Another descriptor of the same file, which exec closes; -1 with errno. */
int vm_duplicate(int fd);

/* `fd`, which exec closes, or one that replaces it, and `fd` is closed. -1 with errno: `fd` was -1, or there is none to
 * replace it, and it is closed. */
int vm_above_stdio(int fd);

#endif
