/* SPDX-License-Identifier: MIT */
/* Description: after a fork the child's calls fail, and the parent is not affected. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/time.h>
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
  /* The child can open its own context. */
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
  if (!freopen("/dev/null", "w", stderr)) return; /* hides a sanitizer's report of the fault */
  BYTE(va) = 66;                                  /* must fault instead of writing to the parent's page */
}

/* Finds this process's first open file whose name begins with `name`; -1: none. */
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

/* Counts the mappings of this process whose line contains `name`. */
static int mappings_of(const char *name) {
  FILE *f = fopen("/proc/self/maps", "re");
  char line[512];
  int n = 0;
  while (f && fgets(line, sizeof(line), f)) n += strstr(line, name) != NULL;
  if (f) fclose(f);
  return n;
}

/* A child must not inherit files or mappings of the library: the memory would outlive a killed parent. */
static void child_holds_no_memory(vmem_t vm, uint64_t va) {
  (void)vm;
  (void)va;
  EQ(descriptor_of("/memfd:vmem"), -1);
  EQ(mappings_of("/memfd:vmem"), 0);
}

static uint64_t max_mappings(void) {
  FILE *f = fopen("/proc/sys/vm/max_map_count", "re");
  unsigned long long max = 0;
  if (f && fscanf(f, "%llu", &max) != 1) max = 0;
  if (f) fclose(f);
  return max;
}

/* Without a free descriptor, the library still allocates no more memory than available and names the mapping limit. */
static void child_without_descriptors(vmem_t vm, uint64_t va) {
  struct rlimit few = {.rlim_cur = 64, .rlim_max = 64};
  struct vmem_open_opts host = {.size = sizeof(host), .backend = "host"};
  uint64_t max = max_mappings(), others = max * 3 / 4 * KIB(4);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = KIB(4), .count = max / 4, .stride = KIB(8)};
  vmem_handle h;
  vmem_t other;
  char *p;
  vm = open_host(KIB(4));
  OK(setrlimit(RLIMIT_NOFILE, &few));
  while (open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0) {
  }
  EQ(errno, EMFILE);
  EQ(vMemCreate(vm, GIB(16384), NULL, &h), -ENOMEM);
  EQ(vmem_open(&host, &other), -ENOMEM);
  CHECK(strstr(vmem_last_error(), "Too many open files"));
  if (max <= 300000) {
    OK(vMemReserve(vm, GIB(4), NULL, &va));
    p = mmap(NULL, others, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    for (uint64_t at = 0; at < others; at += KIB(8)) EQ(mprotect(p + at, KIB(4), PROT_READ), 0);
    op.addr = va;
    EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
    CHECK(strstr(vmem_last_error(), "vm.max_map_count"));
    EQ(munmap(p, others), 0);
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* Runs in a child without standard streams. */
static void child_without_streams(vmem_t vm, uint64_t va) {
  int fd;
  for (fd = 0; fd < 3; fd++) close(fd);
  vm = open_host(0);
  fd = descriptor_of("/memfd:vmem");
  if (!vm || fd < 3 || vMemReserve(vm, MIB(2), NULL, &va) || vmem_close(vm)) failures_here++;
}

/* Growing a file beyond RLIMIT_FSIZE would kill the process with SIGXFSZ. */
static void child_with_small_files(vmem_t vm, uint64_t va) {
  struct rlimit small = {.rlim_cur = MIB(100), .rlim_max = MIB(100)};
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "host", .slab_size = MIB(1)};
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
  OK(vmem_close(vm));
  OK(vmem_open(&o, &vm));
  for (int i = 0; i < 200; i++) { /* freed memory can be allocated again in other sizes */
    OK(vMemCreate(vm, MIB(1 + i % 20), NULL, &h[0]));
    OK(vMemCreate(vm, MIB(2 + 2 * (i % 7)), NULL, &h[1]));
    OK(vmem_drop(vm, h[i % 2]));
    OK(vmem_drop(vm, h[!(i % 2)]));
  }
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
  CHECK(!WIFEXITED(status) || WEXITSTATUS(status)); /* killed, or exited with an error under a sanitizer */
  EQ(BYTE(va), 5);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  op.addr = va + MIB(1);
  OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
  OK(vmem_wait(vm, t, -1));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

struct mapper {
  vmem_t vm;
  uint64_t va;
  int err;
  bool over; /* atomic */
};

/* Maps and unmaps `count` scattered pages. */
static int map_and_unmap(vmem_t vm, uint64_t va, uint64_t count) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .addr = va, .bytes = PAGE, .count = count, .stride = 2 * PAGE};
  int err = vmem_batch(vm, &op, 1, NULL, 0, 0);
  op.op = VMEM_OP_UNMAP;
  return err ? err : vmem_batch(vm, &op, 1, NULL, 0, 0);
}

static void *maps_and_unmaps(void *arg) {
  struct mapper *m = arg;
  while (!m->err && !__atomic_load_n(&m->over, __ATOMIC_RELAXED)) m->err = map_and_unmap(m->vm, m->va, 64);
  return NULL;
}

/* A child never inherits a mapping that is not yet marked MADV_DONTFORK. */
static void while_another_thread_maps(void) {
  struct mapper m = {.vm = open_host(0)};
  pthread_t thread;
  int with = 0;
  OK(vMemReserve(m.vm, MIB(16), NULL, &m.va));
  EQ(pthread_create(&thread, NULL, maps_and_unmaps, &m), 0);
  for (int i = 0; i < 100; i++) with += in_child(child_holds_no_memory, m.vm, m.va) != 0;
  __atomic_store_n(&m.over, true, __ATOMIC_RELAXED);
  pthread_join(thread, NULL);
  EQ(with, 0);
  EQ(m.err, 0);
  OK(vmem_check(m.vm));
  OK(vmem_close(m.vm));
}

/* Exits only after the fork: ThreadSanitizer would report it in the child as a leaked thread otherwise. */
static void *closes(void *arg) {
  struct mapper *m = arg;
  m->err = vmem_close(m->vm);
  while (!__atomic_load_n(&m->over, __ATOMIC_RELAXED)) sched_yield();
  return NULL;
}

/* Forks while a context has left the table but is not closed yet, because it waits for a batch that waits for a
 * descriptor. */
static void while_a_context_is_closed(void) {
  struct mapper m = {.vm = open_host(0)};
  struct vmem_after after = after_fd(eventfd(0, EFD_CLOEXEC));
  struct vmem_op op = populate(0, PAGE);
  struct vmem_stats s = {.size = sizeof(s)};
  pthread_t thread;
  OK(vMemReserve(m.vm, MIB(2), NULL, &m.va));
  op.addr = m.va;
  OK(vmem_submit(m.vm, &op, 1, &after, 1, VMEM_SUBMIT_DETACHED, NULL));
  EQ(pthread_create(&thread, NULL, closes, &m), 0);
  while (!vmem_get_stats(m.vm, &s)) sched_yield();
  int status = in_child(child_holds_no_memory, m.vm, m.va);
  __atomic_store_n(&m.over, true, __ATOMIC_RELAXED);
  pthread_join(thread, NULL);
  EQ(status, 0);
  EQ(m.err, 0);
  close((int)after.handle);
}

/* ---- the caller's own handlers, which were registered before any context was open ----------------- */

static struct {
  pthread_mutex_t lock;
  bool used;
  vmem_t vm;
  uint64_t va;
  int err, child_err;
} caller = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void maps_a_page(void) {
  if (!caller.err) caller.err = map_and_unmap(caller.vm, caller.va, 1);
}

static void callers_prepare(void) {
  if (!caller.used) return;
  pthread_mutex_lock(&caller.lock);
  maps_a_page();
}

static void callers_parent(void) {
  if (!caller.used) return;
  maps_a_page();
  pthread_mutex_unlock(&caller.lock);
}

static void callers_child(void) {
  struct vmem_open_opts host = {.size = sizeof(host), .backend = "host"};
  vmem_t own;
  if (!caller.used) return;
  caller.child_err = vmem_open(&host, &own) || vmem_close(own);
  pthread_mutex_unlock(&caller.lock);
}

static void *maps_under_the_lock(void *arg) {
  struct mapper *m = arg;
  while (!__atomic_load_n(&m->over, __ATOMIC_RELAXED)) {
    pthread_mutex_lock(&caller.lock);
    maps_a_page();
    pthread_mutex_unlock(&caller.lock);
  }
  return NULL;
}

static void child_of_a_handler(vmem_t vm, uint64_t va) {
  (void)vm;
  (void)va;
  EQ(caller.child_err, 0);
}

/* The caller's fork handlers may call the library, and take a lock that other threads hold when they call it. */
static void with_handlers_of_the_caller(void) {
  struct mapper m = {0};
  pthread_t thread;
  int bad = 0;
  caller.vm = open_host(0);
  OK(vMemReserve(caller.vm, MIB(2), NULL, &caller.va));
  caller.used = true;
  EQ(pthread_create(&thread, NULL, maps_under_the_lock, &m), 0);
  for (int i = 0; i < 100; i++) bad += in_child(child_of_a_handler, caller.vm, caller.va) != 0;
  __atomic_store_n(&m.over, true, __ATOMIC_RELAXED);
  pthread_join(thread, NULL);
  caller.used = false;
  EQ(bad, 0);
  OK(caller.err);
  OK(vmem_check(caller.vm));
  OK(vmem_close(caller.vm));
}

#ifdef __SANITIZE_THREAD__
#define BY_THREAD_SANITIZER true
#else
#define BY_THREAD_SANITIZER false
#endif

static void forks_again(int sig) {
  (void)sig;
  if (!fork()) _exit(0);
}

/* A signal handler that forks may interrupt a fork or a call. This test comes first because the process must never have
 * had a second thread: glibc's fork would deadlock. One signal per round: the kernel restarts an interrupted fork, so a
 * fork that is always interrupted never finishes. */
static void in_signal_handlers(void) {
  struct mapper m = {.vm = open_host(0)};
  struct sigaction act = {.sa_handler = forks_again, .sa_flags = SA_RESTART}, old;
  struct itimerval once = {0};
  int err = 0;
  if (BY_THREAD_SANITIZER) {
    printf("not run: ThreadSanitizer allocates memory where a signal handler forks\n");
    OK(vmem_close(m.vm));
    return;
  }
  OK(vMemReserve(m.vm, MIB(2), NULL, &m.va));
  EQ(sigaction(SIGALRM, &act, &old), 0);
  for (int i = 0; i < 400 && !err; i++) {
    once.it_value.tv_usec = 1 + i * 37 % 1500;
    EQ(setitimer(ITIMER_REAL, &once, NULL), 0);
    if (!fork()) _exit(0);
    err = map_and_unmap(m.vm, m.va, 1);
    while (waitpid(-1, NULL, WNOHANG) > 0) {
    }
  }
  once.it_value.tv_usec = 0;
  EQ(setitimer(ITIMER_REAL, &once, NULL), 0);
  EQ(sigaction(SIGALRM, &old, NULL), 0);
  while (waitpid(-1, NULL, 0) > 0) {
  }
  OK(err);
  OK(vmem_check(m.vm));
  OK(vmem_close(m.vm));
}

/* A child of a process that has opened all contexts can open the same number. */
static void child_with_all_contexts(vmem_t vm, uint64_t va) {
  vmem_t own[256];
  int n = 0;
  (void)va;
  while (n < 256 && (own[n] = open_host(0))) n++;
  EQ(n, 256);
  EQ(vmem_close(vm), -EBADF); /* its entry was reused, so the parent's context looks closed */
  while (n--) OK(vmem_close(own[n]));
}

static void with_all_contexts(void) {
  vmem_t all[256];
  for (int i = 0; i < 256; i++) CHECK(all[i] = open_host(0));
  EQ(in_child(child_with_all_contexts, all[0], 0), 0);
  for (int i = 0; i < 256; i++) OK(vmem_close(all[i]));
}

static void strange_processes(void) {
  EQ(in_child(child_without_streams, 0, 0), 0);
  EQ(in_child(child_without_descriptors, 0, 0), 0);
  EQ(in_child(child_with_small_files, 0, 0), 0);
}

static const struct test tests[] = {TEST(in_signal_handlers),
                                    TEST(forked),
                                    TEST(while_another_thread_maps),
                                    TEST(while_a_context_is_closed),
                                    TEST(with_handlers_of_the_caller),
                                    TEST(with_all_contexts),
                                    TEST(strange_processes)};

/* Runs before `main`, as the constructor of a C++ object may. */
__attribute__((constructor)) static void register_handlers(void) {
  pthread_atfork(callers_prepare, callers_parent, callers_child);
}

int main(void) { return run_tests(tests, sizeof(tests) / sizeof(tests[0])); }
