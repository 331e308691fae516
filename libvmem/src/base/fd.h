/* SPDX-License-Identifier: MIT */
/*
 * fd.h - file descriptors that the library keeps. None is 0, 1 or 2: in a process that was started without
 * standard output, say, printf would write into what has its number.
 */
#ifndef VMEM_BASE_FD_H
#define VMEM_BASE_FD_H

/* Another descriptor of the same file, which exec closes; -1 with errno. */
int vm_duplicate(int fd);

/* `fd`, which exec closes, or one that replaces it; -1 with errno, also where `fd` is -1. Then `fd` is closed. */
int vm_above_stdio(int fd);

#endif
