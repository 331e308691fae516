/* SPDX-License-Identifier: MIT */
/*
 * kcheck.h - a test program is a list of functions; a CHECK that fails ends its function.
 *
 * The program prints "N passed, N failed, N skipped" and exits with 0, with 1 if a test failed, or with 77 if all
 * were skipped. If arguments name tests, only these run.
 */
#ifndef KCHECK_H
#define KCHECK_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define KIB(n) ((uint64_t)(n) << 10)
#define MIB(n) ((uint64_t)(n) << 20)
#define GIB(n) ((uint64_t)(n) << 30)
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

static int failures_here;
static bool skipped_here;

/* Counts a failure without leaving the function: for loops over tables. */
__attribute__((format(printf, 1, 2))) static inline void fail(const char *format, ...) {
  va_list args;
  va_start(args, format);
  vprintf(format, args);
  va_end(args);
  putchar('\n');
  failures_here++;
}

#define CHECK(cond)                                               \
  do {                                                            \
    if (!(cond)) {                                                \
      fail("%s:%d: %s is false", __FILE__, __LINE__, #cond);      \
      return;                                                     \
    }                                                             \
  } while (0)

#define EQ(a, b)                                                                                        \
  do {                                                                                                  \
    long long a_ = (long long)(a), b_ = (long long)(b);                                                 \
    if (a_ != b_) {                                                                                     \
      fail("%s:%d: %s is %lld (0x%llx), not %lld (%s)", __FILE__, __LINE__, #a, a_, a_, b_, #b);        \
      return;                                                                                           \
    }                                                                                                   \
  } while (0)

#define OK(call) EQ(call, 0)

#define SKIP(reason)                     \
  do {                                   \
    printf("not run: %s\n", reason);     \
    skipped_here = true;                 \
    return;                              \
  } while (0)

/* Reproducible random numbers from a seed (splitmix64). */
struct rng {
  uint64_t state;
};

static inline uint64_t rng_next(struct rng *rng) {
  uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* A number in [0, n). */
static inline uint64_t rng_below(struct rng *rng, uint64_t n) {
  return rng_next(rng) % n;
}

/* True with probability 1/n. */
static inline bool rng_one_in(struct rng *rng, uint64_t n) {
  return rng_below(rng, n) == 0;
}

/* A number from the environment of the run, e.g. OPS=5000. */
static inline uint64_t parameter(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

struct test {
  const char *name;
  void (*run)(void);
};

/* Arguments: NAME to run, -NAME to leave out, NAME=VALUE for parameter(). */
static inline bool wanted(const char *name, int argc, char **argv) {
  bool any = false;
  for (int i = 1; i < argc; i++) {
    if (argv[i][0] == '-' && strcmp(argv[i] + 1, name) == 0) return false;
    if (argv[i][0] == '-' || strchr(argv[i], '=')) continue;
    any = true;
    if (strcmp(argv[i], name) == 0) return true;
  }
  return !any;
}

static inline double seconds_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static inline int run_tests(const struct test *tests, size_t n, int argc, char **argv) {
  int passed = 0, failed = 0, skipped = 0;
  setvbuf(stdout, NULL, _IOLBF, 0);
  for (int i = 1; i < argc; i++) {
    if (strchr(argv[i], '=')) putenv(argv[i]);
  }
  for (size_t i = 0; i < n; i++) {
    if (!wanted(tests[i].name, argc, argv)) continue;
    failures_here = 0;
    skipped_here = false;
    printf("-- %s\n", tests[i].name);
    double start = seconds_now();
    tests[i].run();
    printf("   %.1f s\n", seconds_now() - start);
    if (failures_here) {
      printf("FAILED %s\n", tests[i].name);
      failed++;
    } else if (skipped_here) {
      skipped++;
    } else {
      passed++;
    }
  }
  printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  if (failed || passed + skipped == 0) return 1;
  return passed ? 0 : 77;
}

#define TEST(name) {#name, name}
#define MAIN(...)                                                        \
  int main(int argc, char **argv) {                                      \
    static const struct test tests[] = {__VA_ARGS__};                    \
    return run_tests(tests, ARRAY_SIZE(tests), argc, argv);              \
  }

#endif
