/* SPDX-License-Identifier: MIT */
/*
 * Tries a driver of an unknown branch in a child process, so that a misread structure cannot harm the caller's
 * context.
 *
 * A forked child cannot use CUDA. It cannot use the heap or stdio either, because other threads may have held their
 * locks at the fork. So it uses only RM and UVM, as in without_cuda.c. It is created without running fork handlers,
 * which belong to CUDA and other libraries, and without an exit signal, so that the program's own wait() does not see
 * it.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/stock/stock.h"
#include "base/error.h"
#include "base/fd.h"

enum { PAGES = 4, TIME_LIMIT_S = VM_SUSPEND_RETRY_S + 30 };
#define SPAN (2ull << 20) /* size of the trial's range */

/* Expects an error: a driver that accepts this call does not follow the interface that we know. */
static int refused(int err, const char *what) {
  return err ? 0 : vm_fail(-EIO, "%s was not refused: the driver does not do what it reports", what);
}

static int use_range(const struct nvidia *n, uint64_t addr, uint32_t memory, uint64_t page) {
  int err = refused(ext_create(n, addr, SPAN), "UVM_CREATE_EXTERNAL_RANGE where there is a range");
  /* Map twice, once read-only, at an offset and addresses that are aligned to no more than the page. */
  if (!err) err = ext_map(n, addr + page, page, memory, (PAGES - 1) * page, UVM_MAPPING_DEFAULT);
  if (!err) err = ext_map(n, addr + 2 * page, page, memory, (PAGES - 1) * page, UVM_MAPPING_DEFAULT);
  if (!err) err = ext_map(n, addr + 3 * page, page, memory, page, UVM_MAPPING_READ_ONLY);
  if (!err)
    err = refused(ext_map(n, addr + 4 * page, page, memory, PAGES * page, UVM_MAPPING_DEFAULT),
                  "UVM_MAP_EXTERNAL_ALLOCATION beyond the end of the memory");
  if (!err)
    err = refused(ext_map(n, addr + SPAN, page, memory, 0, UVM_MAPPING_DEFAULT),
                  "UVM_MAP_EXTERNAL_ALLOCATION where there is no range");
  if (!err) err = ext_unmap(n, addr + page, page);
  if (!err) err = refused(ext_unmap(n, addr + SPAN, page), "UVM_UNMAP_EXTERNAL where there is no range");
  if (!err) err = ext_map(n, addr + page, page, memory, 0, UVM_MAPPING_DEFAULT);
  if (!err && page >= 64 << 10) err = ext_sparse(n, addr + 5 * page, page);
  if (!err && page >= 64 << 10)
    err = refused(ext_sparse(n, addr + SPAN, page), "UVM_MAP_EXTERNAL_SPARSE where there is no range");
  if (!err) err = ext_free(n, addr, SPAN);
  return err ? err : refused(ext_free(n, addr, SPAN), "UVM_FREE where there is no range");
}

static int use_driver(struct nvidia *n) {
  uint64_t page = n->granule < SPAN / 8 ? n->granule : SPAN / 8, slab, addr;
  int err = rm_client(&n->rm);
  if (!err) err = nvidia_register_own(n);
  if (!err) err = stock_slab_create(n, PAGES * page, page, VMEM_DEVICE, 0, &slab);
  if (!err) err = nvidia_host_range(2 * SPAN, SPAN, &addr);
  if (!err) err = ext_create(n, addr, SPAN);
  if (!err) err = use_range(n, addr, stock_slab_object(slab), page);
  return err ? err : stock_slab_destroy(n, slab, PAGES * page);
}

/* Runs in the child and never returns. What it opens is closed when it exits. */
static void be_child(const struct nvidia *parent, int out) {
  struct vmem_error why = {0};
  struct nvidia n;
  nvidia_init(&n);
  n.granule = parent->granule;
  n.num_devices = parent->num_devices;
  for (uint32_t i = 0; i < n.num_devices; i++) {
    memcpy(n.devices[i].uuid, parent->devices[i].uuid, sizeof(n.devices[i].uuid));
    memcpy(n.devices[i].name, parent->devices[i].name, sizeof(n.devices[i].name));
  }
  if (rm_open_again(&n.rm, &parent->rm) || use_driver(&n)) vm_error_save(&why);
  _exit(write(out, &why, sizeof(why)) != sizeof(why));
}

/* Reads the child's result. Returns the bytes read: 0 if the child died; -1 if no result came in time. */
static ssize_t hear(int in, struct vmem_error *why) {
  struct pollfd p = {.fd = in, .events = POLLIN};
  ssize_t n;
  do n = poll(&p, 1, TIME_LIMIT_S * 1000);
  while (n < 0 && errno == EINTR);
  if (n <= 0) return -1;
  do n = read(in, why, sizeof(*why));
  while (n < 0 && errno == EINTR);
  return n;
}

static int judge(const struct nvidia *n, ssize_t heard, const struct vmem_error *answer, int status) {
  struct vmem_error why = {.code = -EIO};
  if (heard == sizeof(*answer)) why = *answer;
  if (!why.code) return 0;
  if (heard < 0)
    snprintf(why.text, sizeof(why.text), "no result in %d s", TIME_LIMIT_S);
  else if (heard != sizeof(*answer) && WIFSIGNALED(status))
    snprintf(why.text, sizeof(why.text), "it was killed by signal %d", WTERMSIG(status));
  else if (heard != sizeof(*answer))
    snprintf(why.text, sizeof(why.text), "it exited without a result");
  if (why.code == -ENOTRECOVERABLE) why.code = -EIO; /* the lost range died with the child */
  vm_error_restore(&why);
  return vm_fail_at(why.code, why.addr, why.bytes, 0, "driver %s failed its trial in a child process: %.400s",
                    n->rm.version_text, why.text);
}

int stock_trial(const struct nvidia *n) {
  struct vmem_error why;
  sigset_t all, before;
  int pipe_of[2], status = 0;
  ssize_t heard;
  long pid;
  if (pipe2(pipe_of, O_CLOEXEC)) return vm_fail(-ENOMEM, "a pipe: %s", strerror(errno));
  for (int i = 0; i < 2; i++) pipe_of[i] = vm_above_stdio(pipe_of[i]);
  /* The child inherits this process's signal handlers, which must not run there. */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pid = pipe_of[0] < 0 || pipe_of[1] < 0 ? -1 : syscall(SYS_clone, 0, NULL, NULL, NULL, NULL);
  if (pid == 0) be_child(n, pipe_of[1]);
  status = errno;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (pipe_of[1] >= 0) close(pipe_of[1]);
  if (pid < 0) {
    if (pipe_of[0] >= 0) close(pipe_of[0]);
    return vm_fail(-ENOMEM, "cannot create a child process for the driver's trial: %s", strerror(status));
  }
  heard = hear(pipe_of[0], &why);
  close(pipe_of[0]);
  if (heard < 0) kill((pid_t)pid, SIGKILL);
  while (waitpid((pid_t)pid, &status, __WALL) < 0 && errno == EINTR) {
  }
  return judge(n, heard, &why, status);
}
