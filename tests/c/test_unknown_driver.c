/* SPDX-License-Identifier: MIT */
/* Description: a driver of an unknown branch is tried in a child process, and the error says how it differs. */
#include "../softcuda/softrm.c"

#include <sys/wait.h>

#include "backend/stock/stock.h"
#include "base/error.h"
#include "check.h"

static void drive(const char *which, const char *how) {
  setenv("SOFTRM_VERSION", which, 1);
  setenv("SOFTRM_LIE", how, 1);
}

/* Does what opening does up to the trial, without CUDA, which would provide the uuid. */
static int try_driver(void) {
  struct nvidia n;
  int err;
  nvidia_init(&n);
  n.granule = 64 << 10;
  n.num_devices = 1;
  uuid_of(0, n.devices[0].uuid);
  err = rm_open(&n.rm);
  if (!err) err = n.rm.careful ? stock_trial(&n) : 0;
  VM_UNDO(nvidia_close(&n));
  return err;
}

static void known_branches_are_not_tried(void) {
  for (unsigned i = 0; i < NV_BRANCHES; i++) {
    char text[32];
    snprintf(text, sizeof(text), "%u.1", nv_branches[i].major);
    drive(text, "die:NV_ESC_RM_ALLOC");
    OK(try_driver());
  }
  drive("529.99", "");
  EQ(try_driver(), -ENODEV);
  CHECK(strstr(vmem_last_error(), "driver 529.99 is too old: 530 or later"));
}

static void an_unknown_one_that_is_like_the_newest_passes(void) {
  static const char *const versions[] = {"600.1", "621.5.3", "999.99.99"};
  for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
    drive(versions[i], "");
    OK(try_driver());
  }
}

static void the_environment_says_whether_to_try(void) {
  struct vmem_error e = {.size = sizeof(e)};
  drive("625.10", "");
  setenv("VMEM_UNKNOWN_DRIVER", "refuse", 1);
  EQ(try_driver(), -ENODEV);
  CHECK(strstr(vmem_last_error(), "driver 625.10 is of a branch that this library does not know (530 to 620), and "
                                  "VMEM_UNKNOWN_DRIVER=refuse"));
  drive("620.6", "");
  OK(try_driver());
  setenv("VMEM_UNKNOWN_DRIVER", "perhaps", 1);
  EQ(try_driver(), -EINVAL);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "VMEM_UNKNOWN_DRIVER is \"perhaps\": expected \"try\" or \"refuse\""));
  drive("625.10", "");
  setenv("VMEM_UNKNOWN_DRIVER", "try", 1);
  OK(try_driver());
  setenv("VMEM_UNKNOWN_DRIVER", "", 1);
  OK(try_driver());
  unsetenv("VMEM_UNKNOWN_DRIVER");
}

#define UNKNOWN_CALL "does not know this call"
#define UNTOUCHED "did not write the status field"
#define IDLE "the driver does not do what it reports"

/* The message for each kind of difference. */
static const struct {
  const char *how, *text;
} ways[] = {
    {"longer", UNTOUCHED},  {"moved", UNTOUCHED},     {"number", UNKNOWN_CALL},
    {"gone", UNKNOWN_CALL}, {"untouched", UNTOUCHED}, {"die", "it was killed by signal 9"},
};

static void fails_with(const char *how, const char *call, const char *text) {
  char what[64];
  snprintf(what, sizeof(what), "%s:%s", how, call);
  drive("625.10", what);
  EQ(try_driver(), -EIO);
  if (strstr(vmem_last_error(), "driver 625.10 failed its trial") && strstr(vmem_last_error(), text)) return;
  printf("%s: expected \"%s\", got: %s\n", what, text, vmem_last_error());
  CHECK(!"the error says what differs");
}

static void each_way_to_differ_is_named(void) {
  for (unsigned i = 0; i < CALLS; i++)
    for (size_t k = 0; k < sizeof(ways) / sizeof(*ways); k++) {
      bool sized = call_table[i].kind == CONTROL && !strcmp(ways[k].how, "longer");
      /* The trial does not call these: the version was read earlier, and a single device has no peers. */
      if (call_table[i].run == esc_version || call_table[i].run == uvm_peers) continue;
      if (!call_table[i].status && (!strcmp(ways[k].how, "untouched") || !strcmp(ways[k].how, "moved"))) continue;
      /* "moved" needs room before the status. */
      if (call_table[i].status < 8 && !strcmp(ways[k].how, "moved")) continue;
      /* The numbers of RM's ioctls include the size. */
      fails_with(ways[k].how, call_table[i].name, sized ? UNKNOWN_CALL : ways[k].text);
    }
}

static void what_a_call_does_is_seen(void) {
  static const char *const calls_seen[] = {"UVM_CREATE_EXTERNAL_RANGE", "UVM_MAP_EXTERNAL_ALLOCATION",
                                           "UVM_UNMAP_EXTERNAL", "UVM_MAP_EXTERNAL_SPARSE", "UVM_FREE"};
  for (size_t i = 0; i < sizeof(calls_seen) / sizeof(*calls_seen); i++) {
    fails_with("idle", calls_seen[i], IDLE);
    fails_with("idle", calls_seen[i], calls_seen[i]);
  }
  /* The other call's structure is longer, and its status is beyond the end of ours. */
  fails_with("other", "UVM_FREE", "wrote past the end of the structure");
  fails_with("other", "UVM_UNMAP_EXTERNAL", UNTOUCHED);
  fails_with("longer", "NV_MEMORY_ALLOCATION_PARAMS", "NV_ERR_INVALID_PARAM_STRUCT");
}

/* A known driver gets the structures themselves, not copies, but its status is checked just as strictly. */
static void a_known_one_that_differs_is_noticed_too(void) {
  struct nvidia n;
  drive("620.6", "untouched:NV_ESC_RM_ALLOC");
  nvidia_init(&n);
  OK(rm_open(&n.rm));
  CHECK(!n.rm.careful);
  EQ(rm_client(&n.rm), -EIO);
  CHECK(strstr(vmem_last_error(), UNTOUCHED));
  nvidia_close(&n);
}

static unsigned children;

static void child_ended(int number) {
  (void)number;
  children++;
}

/* The child leaves no trace in the program: no signal, no process to wait for, no descriptor, the same signal mask. */
static void nothing_of_it_is_left(void) {
  static const char *const ends[] = {"", "die:UVM_FREE", "gone:UVM_FREE"};
  sigset_t before_it = {0}, after = {0};
  int first, last;
  signal(SIGCHLD, child_ended);
  pthread_sigmask(SIG_SETMASK, NULL, &before_it);
  for (size_t i = 0; i < sizeof(ends) / sizeof(*ends); i++) {
    drive("625.10", ends[i]);
    first = dup(1);
    close(first);
    EQ(!try_driver(), !*ends[i]);
    last = dup(1);
    close(last);
    EQ(last, first);
  }
  pthread_sigmask(SIG_SETMASK, NULL, &after);
  EQ(memcmp(&before_it, &after, sizeof(after)), 0);
  EQ(children, 0);
  EQ(waitpid(-1, NULL, __WALL | WNOHANG), -1);
  EQ(errno, ECHILD);
  signal(SIGCHLD, SIG_DFL);
}

/* Allocates in a loop, so that the heap's lock may be held at the fork. */
static void *work(void *stop) {
  while (!atomic_load((atomic_bool *)stop)) {
    void *volatile p = malloc(2 << 20);
    free(p);
  }
  return NULL;
}

static void other_threads_do_not_matter(void) {
  pthread_t threads[4];
  atomic_bool stop = false;
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, work, &stop);
  drive("625.10", "");
  for (int i = 0; i < 10; i++) OK(try_driver());
  atomic_store(&stop, true);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
}

MAIN(TEST(known_branches_are_not_tried), TEST(an_unknown_one_that_is_like_the_newest_passes),
     TEST(the_environment_says_whether_to_try), TEST(each_way_to_differ_is_named), TEST(what_a_call_does_is_seen),
     TEST(a_known_one_that_differs_is_noticed_too), TEST(nothing_of_it_is_left), TEST(other_threads_do_not_matter))
