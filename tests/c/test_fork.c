/* SPDX-License-Identifier: MIT */
/* Description: after fork the child gets an error, the parent notices nothing. */
#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static int in_child(void (*f)(vmem_t, uint64_t), vmem_t vm, uint64_t va) {
  int status;
  pid_t pid;
  fflush(stdout);
  pid = fork();
  if (!pid) {
    f(vm, va);
    fflush(stdout);
    _exit(failures_here ? 1 : 0);
  }
  waitpid(pid, &status, 0);
  return status;
}

static void child_calls(vmem_t vm, uint64_t va) {
  vmem_handle h;
  vmem_t own;
  uint64_t mine;
  struct vmem_stats s = {.size = sizeof(s)};
  EQ(vMemCreate(vm, PAGE, NULL, &h), -ECHILD);
  EQ(vMemUnmap(vm, va, PAGE), -ECHILD);
  EQ(vMemFree(vm, va, VMEM_FREE_UNMAP), -ECHILD);
  EQ(vmem_get_stats(vm, &s), -ECHILD);
  EQ(vmem_close(vm), -ECHILD);
  EQ(vmem_close(vm), -ECHILD);
  /* A context of its own works. */
  own = open_host(0);
  CHECK(own && own != vm);
  OK(vMemReserve(own, MIB(2), NULL, &mine));
  OK(vMemCreate(own, PAGE, NULL, &h));
  OK(vMemMap(own, mine, PAGE, h, 0, 0));
  BYTE(mine) = 1;
  OK(vmem_close(own));
  EQ(vmem_close(vm), -ECHILD);
}

static void child_touches(vmem_t vm, uint64_t va) {
  (void)vm;
  if (!freopen("/dev/null", "w", stderr)) return; /* a sanitizer would report the fault */
  BYTE(va) = 66;                                  /* must fault, not reach the parent's page */
}

/* The first file of this process's whose name begins so; -1: none. */
static int descriptor_of(const char *name) {
  DIR *dir = opendir("/proc/self/fd");
  struct dirent *entry;
  int found = -1;
  while (dir && found < 0 && (entry = readdir(dir))) {
    char link[64] = "";
    if (readlinkat(dirfd(dir), entry->d_name, link, sizeof(link) - 1) > 0 && !strncmp(link, name, strlen(name)))
      found = atoi(entry->d_name);
  }
  if (dir) closedir(dir);
  return found;
}

/* What a child keeps open stays when the parent is killed. */
static void child_holds_no_memory(vmem_t vm, uint64_t va) {
  (void)vm;
  (void)va;
  EQ(descriptor_of("/memfd:vmem"), -1);
}

/* In a child of its own, which has no standard streams. */
static void child_without_streams(vmem_t vm, uint64_t va) {
  int fd;
  for (fd = 0; fd < 3; fd++) close(fd);
  vm = open_host(0);
  fd = descriptor_of("/memfd:vmem");
  if (!vm || fd < 3 || vMemReserve(vm, MIB(2), NULL, &va) || vmem_close(vm)) failures_here++;
}

/* A file that may not grow would end the process by SIGXFSZ. */
static void child_with_small_files(vmem_t vm, uint64_t va) {
  struct rlimit small = {.rlim_cur = MIB(100), .rlim_max = MIB(100)};
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_stats before, after;
  vmem_handle h[2];
  (void)va;
  vm = open_host(0);
  OK(setrlimit(RLIMIT_FSIZE, &small));
  OK(vMemCreate(vm, MIB(64), NULL, &h[0]));
  before = stats_of(vm);
  EQ(vMemCreate(vm, MIB(64), NULL, &h[1]), -ENOMEM);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "RLIMIT_FSIZE"));
  EQ(e.limit, MIB(100));
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vmem_drop(vm, h[0]));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void forked(void) {
  vmem_t vm = open_host(0);
  uint64_t va;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 4 * PAGE};
  struct vmem_stats before, after;
  vmem_ticket t;
  int status;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  op.addr = va;
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t)); /* the worker thread exists */
  OK(vmem_wait(vm, t, -1));
  OK(vmem_fill(vm, va, PAGE, 5));
  before = stats_of(vm);
  CHECK(descriptor_of("/memfd:vmem") > 2);
  EQ(in_child(child_calls, vm, va), 0);
  EQ(in_child(child_holds_no_memory, vm, va), 0);
  status = in_child(child_touches, vm, va);
  CHECK(!WIFEXITED(status) || WEXITSTATUS(status)); /* killed (a sanitizer may turn that into an exit) */
  EQ(BYTE(va), 5);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  op.addr = va + MIB(1);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void strange_processes(void) {
  EQ(in_child(child_without_streams, 0, 0), 0);
  EQ(in_child(child_with_small_files, 0, 0), 0);
}

MAIN(TEST(forked), TEST(strange_processes))
