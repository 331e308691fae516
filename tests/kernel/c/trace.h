/* SPDX-License-Identifier: MIT */
/*
 * trace.h - the driver's tracepoints: what was called, with what result.
 */
#ifndef TRACE_H
#define TRACE_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#define TRACING "/sys/kernel/tracing"

static inline bool trace_set(const char *file, const char *value) {
  char path[128];
  snprintf(path, sizeof(path), TRACING "/%s", file);
  int fd = open(path, O_WRONLY | O_TRUNC);
  if (fd < 0) return false;
  bool good = write(fd, value, strlen(value)) == (ssize_t)strlen(value);
  close(fd);
  return good;
}

/* From now on, with nothing that was before. false: the kernel has no tracepoints. */
static inline bool trace_start(void) {
  mount("tracefs", TRACING, "tracefs", 0, NULL);
  return trace_set("events/uvm_vmem/enable", "1") && trace_set("trace", " ");
}

/* What was called since, a line each. */
static inline void trace_stop(char *text, size_t size) {
  size_t have = 0;
  ssize_t n;
  trace_set("events/uvm_vmem/enable", "0");
  int fd = open(TRACING "/trace", O_RDONLY);
  while (fd >= 0 && (n = read(fd, text + have, size - 1 - have)) > 0) have += n;
  text[have] = 0;
  if (fd >= 0) close(fd);
}

#endif
