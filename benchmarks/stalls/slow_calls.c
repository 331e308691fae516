/* SPDX-License-Identifier: MIT */
/*
 * slow_calls.c - LD_PRELOAD: which ioctl of a process is slow, and what its thread did meanwhile.
 *
 *     cc -O2 -shared -fPIC -pthread -o slow_calls.so slow_calls.c
 *     SLOW_CALLS=log.jsonl SLOW_MS=5 LD_PRELOAD=./slow_calls.so PROGRAM
 *
 * Every ioctl is timed: wall clock and the thread's CPU time. One that takes SLOW_MS or longer becomes a line of
 * JSON: its number among the calls of its kind, both times (CPU near wall: it worked in the kernel; CPU near 0: it
 * slept or was not scheduled), context switches (voluntary ones: it slept), faults, and the CPU before and after.
 *
 * A thread of the library looks each millisecond at calls under way for more than 2 ms: the scheduler's state (R
 * runs or waits for a CPU, S and D sleep), the kernel function that it sleeps in, the kernel's stack where the
 * process may read it, and what the machine counts of memory compaction and reclaim.
 *
 * At exit there is one line for each kind of call with a histogram in powers of two of a microsecond.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { KINDS = 1024, BUCKETS = 20, THREADS = 64 };

struct kind {
  _Atomic uint64_t calls, ns, cpu_ns, most_ns, buckets[BUCKETS];
};

/* A thread's call under way; `began` is 0 between calls. */
struct under_way {
  _Atomic uint64_t began;
  _Atomic unsigned long request;
  _Atomic int tid;
};

static struct kind kinds[KINDS];
static struct under_way threads[THREADS];
static atomic_int taken;
static _Thread_local struct under_way *mine;
static FILE *out;
static pthread_mutex_t out_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t slow_ns = 5000000, started;

static uint64_t now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* UVM's requests are bare numbers below 4096, those of the resource manager encode size and type. */
static unsigned kind_of(unsigned long request) {
  return request < 512 ? (unsigned)request : 512 + (unsigned)(request & 0xff);
}

/* ---- looking at a call that lasts ------------------------------------------------------------- */

static void read_file(const char *path, char *text, size_t size) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  ssize_t n = fd < 0 ? -1 : read(fd, text, size - 1);
  if (fd >= 0) close(fd);
  text[n > 0 ? n : 0] = 0;
  for (char *c = text; *c; c++)
    if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ') *c = *c == '\n' ? '|' : ' ';
}

/* The counters of /proc/vmstat that tell of stalls in the kernel's own memory management. */
static void memory_events(char *text, size_t size) {
  static const char *const names[] = {"compact_stall", "compact_fail",    "allocstall_normal", "allocstall_movable",
                                      "pgmigrate_success", "nr_tlb_remote_flush", "thp_split_page", "pgscan_direct"};
  FILE *f = fopen("/proc/vmstat", "re");
  char name[64];
  unsigned long long value;
  size_t used = 0;
  text[0] = 0;
  while (f && fscanf(f, "%63s %llu", name, &value) == 2)
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
      if (!strcmp(name, names[i]) && used + 64 < size)
        used += (size_t)snprintf(text + used, size - used, "%s%s=%llu", used ? " " : "", name, value);
  if (f) fclose(f);
}

static void look(const struct under_way *u, uint64_t began) {
  char path[64], stat[512], wchan[128], stack[2048], memory[512], *state;
  int tid = u->tid;
  snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
  read_file(path, stat, sizeof(stat));
  state = strrchr(stat, ')');
  snprintf(path, sizeof(path), "/proc/self/task/%d/wchan", tid);
  read_file(path, wchan, sizeof(wchan));
  snprintf(path, sizeof(path), "/proc/self/task/%d/stack", tid);
  read_file(path, stack, sizeof(stack));
  memory_events(memory, sizeof(memory));
  pthread_mutex_lock(&out_lock);
  fprintf(out,
          "{\"look\":%d,\"at_ms\":%.2f,\"lasts_ms\":%.2f,\"request\":%lu,\"state\":\"%c\",\"wchan\":\"%s\",\"stack\":\"%s\","
          "\"memory\":\"%s\"}\n",
          tid, (double)(now(CLOCK_MONOTONIC) - started) / 1e6, (double)(now(CLOCK_MONOTONIC) - began) / 1e6,
          (unsigned long)u->request, state && state[1] ? state[2] : '?', wchan, stack, memory);
  pthread_mutex_unlock(&out_lock);
}

static void *watch(void *unused) {
  const struct timespec rest = {0, 1000000};
  (void)unused;
  for (;;) {
    nanosleep(&rest, NULL);
    for (int i = 0; i < THREADS && i < taken; i++) {
      uint64_t began = threads[i].began;
      if (began && now(CLOCK_MONOTONIC) - began > 2000000) look(&threads[i], began);
    }
  }
  return NULL;
}

/* ---- begin and end ----------------------------------------------------------------------------- */

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("SLOW_CALLS"), *ms = getenv("SLOW_MS");
  pthread_t thread;
  if (!path || !(out = fopen(path, "ae"))) return;
  setvbuf(out, NULL, _IOLBF, 0);
  if (ms) slow_ns = (uint64_t)(atof(ms) * 1e6);
  started = now(CLOCK_MONOTONIC);
  pthread_create(&thread, NULL, watch, NULL);
}

__attribute__((destructor)) static void end(void) {
  if (!out) return;
  pthread_mutex_lock(&out_lock);
  for (int k = 0; k < KINDS; k++) {
    if (!kinds[k].calls) continue;
    fprintf(out, "{\"kind\":%d,\"calls\":%lu,\"ms\":%.1f,\"cpu_ms\":%.1f,\"most_ms\":%.2f,\"histogram\":[", k,
            (unsigned long)kinds[k].calls, (double)kinds[k].ns / 1e6, (double)kinds[k].cpu_ns / 1e6,
            (double)kinds[k].most_ns / 1e6);
    for (int b = 0; b < BUCKETS; b++) fprintf(out, "%s%lu", b ? "," : "", (unsigned long)kinds[k].buckets[b]);
    fprintf(out, "]}\n");
  }
  fflush(out);
  pthread_mutex_unlock(&out_lock);
}

static struct under_way *place(void) {
  static struct under_way none;
  if (!mine) {
    int i = atomic_fetch_add(&taken, 1);
    mine = i < THREADS ? &threads[i] : &none;
    mine->tid = (int)syscall(SYS_gettid);
  }
  return mine;
}

int ioctl(int fd, unsigned long request, ...) {
  struct rusage before, after;
  struct under_way *u;
  struct kind *k;
  uint64_t began, wall, cpu, number, most, bucket;
  int cpu_before, ret, error;
  void *arg;
  va_list ap;
  va_start(ap, request);
  arg = va_arg(ap, void *);
  va_end(ap);
  if (!out) return (int)syscall(SYS_ioctl, fd, request, arg);
  u = place();
  k = &kinds[kind_of(request)];
  cpu_before = sched_getcpu();
  getrusage(RUSAGE_THREAD, &before);
  cpu = now(CLOCK_THREAD_CPUTIME_ID);
  u->request = request;
  u->began = began = now(CLOCK_MONOTONIC);
  ret = (int)syscall(SYS_ioctl, fd, request, arg);
  error = errno;
  wall = now(CLOCK_MONOTONIC) - began;
  u->began = 0;
  cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
  number = atomic_fetch_add(&k->calls, 1) + 1;
  k->ns += wall;
  k->cpu_ns += cpu;
  for (most = k->most_ns; wall > most && !atomic_compare_exchange_weak(&k->most_ns, &most, wall);) {
  }
  bucket = wall / 1000 ? 64 - (uint64_t)__builtin_clzll(wall / 1000) : 0;
  k->buckets[bucket < BUCKETS ? bucket : BUCKETS - 1]++;
  if (wall < slow_ns) {
    errno = error;
    return ret;
  }
  getrusage(RUSAGE_THREAD, &after);
  pthread_mutex_lock(&out_lock);
  fprintf(out,
          "{\"slow\":%u,\"request\":%lu,\"number\":%lu,\"at_ms\":%.2f,\"wall_ms\":%.3f,\"cpu_ms\":%.3f,\"slept\":%ld,"
          "\"preempted\":%ld,\"faults\":%ld,\"cpu\":[%d,%d],\"tid\":%d}\n",
          kind_of(request), request, (unsigned long)number, (double)(began - started) / 1e6, (double)wall / 1e6,
          (double)cpu / 1e6, after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw,
          after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt, cpu_before, sched_getcpu(), u->tid);
  pthread_mutex_unlock(&out_lock);
  errno = error;
  return ret;
}
