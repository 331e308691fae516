/* SPDX-License-Identifier: MIT */
#include "base/fd.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define FIRST 3

int vm_duplicate(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, FIRST); }

int vm_above_stdio(int fd) {
  int high, err;
  if (fd < 0 || fd >= FIRST) return fd;
  high = vm_duplicate(fd);
  err = errno;
  close(fd);
  errno = err;
  return high;
}
