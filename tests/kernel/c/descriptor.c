/* SPDX-License-Identifier: MIT */
/*
 * Whose descriptor it is: not initialised, inherited by a child, passed to another process, kept through
 * execve, used by a thread, duplicated, closed by its owner while another still has it. And what one may pin at most.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull

/* All commands but QUERY, with arguments that would be right; each must give -want. Returns how many did not. */
static int all_give(int fd, const uint8_t *gpu, uint32_t object, int want) {
  struct uvm_vmem_op op = op_unmap(RES, 1, 0);
  struct uvm_vmem_stat stat;
  uint32_t handle, failed;
  const struct {
    const char *name;
    int got;
  } calls[] = {
      {"RESERVE", vm_reserve(fd, gpu, RES + GIB(1), MIB(2), 16, 0)},
      {"CREATE", vm_create(fd, gpu, 16, 1, 0, &handle)},
      {"BIND", vm_bind(fd, RES, &op, 1, &failed, NULL)},
      {"WAIT", vm_wait(fd, 0, 0)},
      {"STAT", vm_stat(fd, NULL, &stat)},
      {"RELEASE", vm_release(fd, object)},
      {"FREE", vm_free(fd, RES, UVM_VMEM_FREE_UNMAP)},
  };
  int wrong = 0;
  for (size_t i = 0; i < ARRAY_SIZE(calls); i++) {
    if (calls[i].got == -want) continue;
    printf("%s: %d, should be %d\n", calls[i].name, calls[i].got, -want);
    wrong++;
  }
  return wrong;
}

static void not_initialised(void) {
  struct softgpu_info info;
  struct uvm_vmem_query q;
  struct world w;
  world_open(&w, 1);
  OK(softgpu_info(w.dev, 0, &info));
  int fd = softgpu_uvm_open();
  CHECK(fd >= 0);
  OK(vm_query(fd, NULL, &q));
  EQ(q.out_abi_version, UVM_VMEM_ABI_VERSION);
  EQ(vm_query(fd, info.out_uuid, &q), -EBADFD);
  EQ(all_give(fd, info.out_uuid, 1, EBADFD), 0);
  OK(softgpu_uvm_initialize(fd));
  EQ(vm_reserve(fd, info.out_uuid, RES, MIB(2), 16, 0), -ENODEV); /* initialised, but without a GPU */
  close(fd);
  EQ(vm_query(fd, NULL, &q), -EBADF);
  world_close(&w);
}

/* A world with one page mapped at RES that holds a pattern. */
static int furnish(struct world *w, uint32_t *object) {
  world_open(w, 1);
  int result = vm_reserve(w->uvm, w->uuid[0], RES, MIB(16), 16, 0);
  if (!result) result = vm_create(w->uvm, w->uuid[0], 16, 4, 0, object);
  if (!result) result = vm_map(w->uvm, RES, RES, *object, 0, 4, 0);
  if (!result) result = gpu_fill(w, 0, RES, 4 * UNIT, 0x1234, 1);
  return result;
}

static int wait_for(pid_t pid) {
  int status = -1;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void forked_child(void) {
  struct uvm_vmem_stat before, after;
  struct uvm_vmem_query q;
  struct world w;
  uint32_t object;
  OK(furnish(&w, &object));
  OK(vm_stat(w.uvm, NULL, &before));
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    int wrong = all_give(w.uvm, w.uuid[0], object, EPERM);
    if (vm_query(w.uvm, NULL, &q)) wrong++;
    fflush(stdout);
    _exit(wrong);
  }
  EQ(wait_for(child), 0);
  OK(vm_stat(w.uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  OK(gpu_check(&w, 0, RES, 4 * UNIT, 0x1234, 1));
  OK(vm_unmap(w.uvm, RES, RES, 4, 0));
  world_close(&w);
}

static int send_fd(int over, int fd) {
  char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec io = {.iov_base = &byte, .iov_len = 1};
  struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  memcpy(CMSG_DATA(c), &fd, sizeof(fd));
  return sendmsg(over, &m, 0) == 1 ? 0 : -errno;
}

static int receive_fd(int over) {
  char byte, control[CMSG_SPACE(sizeof(int))] = {0};
  struct iovec io = {.iov_base = &byte, .iov_len = 1};
  struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
  int fd = -1;
  if (recvmsg(over, &m, 0) != 1) return -1;
  struct cmsghdr *c = CMSG_FIRSTHDR(&m);
  if (c && c->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(c), sizeof(fd));
  return fd;
}

/* A process that has its own descriptor, with equal numbers in use, is passed another's. */
static int receiver(int over) {
  struct world own;
  uint32_t object;
  if (furnish(&own, &object)) return 100;
  int fd = receive_fd(over);
  if (fd < 0) return 101;
  int wrong = all_give(fd, own.uuid[0], object, EPERM);
  if (gpu_check(&own, 0, RES, 4 * UNIT, 0x1234, 1)) wrong++;
  close(fd);
  return wrong;
}

static void passed_over_a_socket(void) {
  struct uvm_vmem_stat before, after;
  struct world w;
  uint32_t object;
  int pair[2];
  OK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
  fflush(stdout);
  pid_t other = fork();
  if (other == 0) {
    close(pair[0]);
    int wrong = receiver(pair[1]);
    fflush(stdout);
    _exit(wrong);
  }
  close(pair[1]);
  OK(furnish(&w, &object));
  OK(vm_stat(w.uvm, NULL, &before));
  OK(send_fd(pair[0], w.uvm));
  EQ(wait_for(other), 0);
  OK(vm_stat(w.uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  OK(gpu_check(&w, 0, RES, 4 * UNIT, 0x1234, 1));
  close(pair[0]);
  world_close(&w);
}

static void kept_through_execve(void) {
  char number[16], object_text[16];
  struct world w;
  uint32_t object;
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    if (furnish(&w, &object)) _exit(100);
    fcntl(w.uvm, F_SETFD, 0);
    snprintf(number, sizeof(number), "%d", w.uvm);
    snprintf(object_text, sizeof(object_text), "%u", object);
    execl("/proc/self/exe", "descriptor", "--after-exec", number, object_text, NULL);
    _exit(101);
  }
  EQ(wait_for(child), 0);
  world_open(&w, 1);
  world_close(&w);
}

static int after_exec(int fd, uint32_t object) {
  struct uvm_vmem_query q;
  struct softgpu_info info;
  int dev = softgpu_open();
  if (dev < 0 || softgpu_info(dev, 0, &info)) return 102;
  int wrong = all_give(fd, info.out_uuid, object, EPERM);
  if (vm_query(fd, NULL, &q)) wrong++;
  return wrong;
}

static struct world shared;
static uint32_t shared_object;

static void *in_a_thread(void *unused) {
  int result = vm_map(shared.uvm, RES, RES + MIB(4), shared_object, 0, 4, 0);
  (void)unused;
  return (void *)(intptr_t)result;
}

static void another_thread(void) {
  pthread_t thread;
  void *result = (void *)1;
  OK(furnish(&shared, &shared_object));
  OK(pthread_create(&thread, NULL, in_a_thread, NULL));
  OK(pthread_join(thread, &result));
  EQ((intptr_t)result, 0);
  OK(gpu_check(&shared, 0, RES + MIB(4), 4 * UNIT, 0x1234, 1));
  world_close(&shared);
}

static void duplicated(void) {
  struct world w;
  uint32_t object;
  OK(furnish(&w, &object));
  int twin = dup(w.uvm);
  close(w.uvm);
  OK(vm_map(twin, RES, RES + MIB(4), object, 0, 4, 0));
  OK(gpu_check(&w, 0, RES + MIB(4), 4 * UNIT, 0x1234, 1));
  w.uvm = w.c.uvm = twin;
  world_close(&w);
}

/* The owner is gone, a child still has the descriptor: nothing is lost before the child's end, all is after. */
static void owner_closes_first(void) {
  struct softgpu_counters base, now;
  struct world w;
  uint32_t object;
  int gate[2];
  world_open(&w, 1);
  base = w.base[0];
  world_close(&w);
  OK(pipe(gate));
  fflush(stdout);
  pid_t owner = fork();
  if (owner == 0) {
    if (furnish(&w, &object)) _exit(100);
    if (fork() == 0) { /* the grandchild keeps the descriptor until the pipe is closed */
      char byte;
      close(gate[1]);
      if (read(gate[0], &byte, 1) < 0) _exit(1);
      _exit(all_give(w.uvm, w.uuid[0], object, EPERM));
    }
    _exit(0);
  }
  close(gate[0]);
  EQ(wait_for(owner), 0);
  int dev = softgpu_open();
  OK(softgpu_counters(dev, 0, &now));
  CHECK(now.frames_free_now < base.frames_free_now);
  close(gate[1]);
  gpu_check_clean(dev, 0, &base, true);
  close(dev);
}

/* A CREATE that is above the limit, and leaves everything as it was. */
static void refused(struct world *w, unsigned shift, unsigned count, unsigned flags) {
  struct uvm_vmem_stat before, after;
  struct softgpu_counters base = gpu_counters(w, 0), now;
  uint32_t handle;
  OK(vm_stat(w->uvm, NULL, &before));
  EQ(vm_create(w->uvm, w->uuid[0], shift, count, flags, &handle), -EDQUOT);
  OK(vm_stat(w->uvm, NULL, &after));
  CHECK(stat_same(&before, &after));
  EQ(after.out_chunk_bytes, before.out_chunk_bytes);
  EQ(after.out_kernel_bytes, before.out_kernel_bytes);
  EQ(after.out_zeroed_bytes, before.out_zeroed_bytes);
  now = gpu_counters(w, 0);
  EQ(now.frames_free_now, base.frames_free_now);
}

/* The limit is of 8 MB, in GPU memory or (flags) the host's; it counts what is pinned, which is 2 MB at a time. */
static void fill_to_limit(struct world *w, const char *limit, unsigned flags) {
  uint32_t large, small, mapped, more;
  OK(set_parameter(limit, 8));
  OK(vm_create(w->uvm, w->uuid[0], 21, 2, flags, &large));
  OK(vm_create(w->uvm, w->uuid[0], 16, 31, flags, &small));
  refused(w, 21, 2, flags); /* the first page would fit */
  OK(vm_create(w->uvm, w->uuid[0], 17, 16, flags, &mapped)); /* 8 MB */
  OK(vm_create(w->uvm, w->uuid[0], 16, 1, flags, &more));    /* inside them */
  refused(w, 16, 1, flags);
  refused(w, 21, 1, flags);
  refused(w, 18, 100, flags);
  /* The other kind of memory has its own limit. */
  OK(vm_release(w->uvm, more));
  OK(vm_create(w->uvm, w->uuid[0], 21, 1, flags ^ UVM_VMEM_CREATE_HOST, &more));
  OK(vm_release(w->uvm, more));
  OK(vm_create(w->uvm, w->uuid[0], 16, 1, flags, &more));
  /* Room comes when memory is given back: not when it is released while it is mapped. */
  OK(vm_reserve(w->uvm, w->uuid[0], RES, MIB(16), 16, 0));
  OK(vm_map(w->uvm, RES, RES, mapped, 0, 16, 0));
  OK(vm_release(w->uvm, mapped));
  refused(w, 16, 1, flags);
  OK(vm_unmap(w->uvm, RES, RES, MIB(16) / UNIT, 0));
  OK(vm_create(w->uvm, w->uuid[0], 21, 1, flags, &mapped));
  refused(w, 16, 1, flags);
  OK(vm_release(w->uvm, large));
  OK(vm_create(w->uvm, w->uuid[0], 16, 64, flags, &large));
  refused(w, 16, 1, flags);
  /* A lower one leaves what is held, and what is not a multiple of 2 MB counts down. */
  OK(set_parameter(limit, 3));
  OK(vm_map(w->uvm, RES, RES, large, 0, 64, 0));
  OK(vm_unmap(w->uvm, RES, RES, 64, 0));
  refused(w, 16, 1, flags);
  OK(vm_release(w->uvm, large));
  OK(vm_release(w->uvm, mapped));
  refused(w, 21, 1, flags);
  OK(vm_release(w->uvm, small));
  OK(vm_release(w->uvm, more));
  OK(vm_create(w->uvm, w->uuid[0], 21, 1, flags, &large));
  refused(w, 16, 1, flags);
  OK(set_parameter(limit, 0));
  OK(vm_create(w->uvm, w->uuid[0], 21, 8, flags, &more));
  OK(vm_release(w->uvm, more));
  OK(vm_release(w->uvm, large));
  OK(vm_free(w->uvm, RES, 0));
}

static void limits(void) {
  static const struct {
    const char *name;
    unsigned flags;
  } kinds[] = {{"uvm_vmem_limit_mb", 0}, {"uvm_vmem_host_limit_mb", UVM_VMEM_CREATE_HOST}};
  for (size_t i = 0; i < ARRAY_SIZE(kinds); i++) {
    struct world a, b;
    uint32_t large, more;
    world_open(&a, 1);
    fill_to_limit(&a, kinds[i].name, kinds[i].flags);
    /* Each descriptor has a limit of its own. */
    world_open(&b, 1);
    int error = set_parameter(kinds[i].name, 8);
    if (!error) error = vm_create(a.uvm, a.uuid[0], 21, 4, kinds[i].flags, &large);
    if (!error) error = vm_create(b.uvm, b.uuid[0], 21, 4, kinds[i].flags, &large);
    int above = vm_create(a.uvm, a.uuid[0], 16, 1, kinds[i].flags, &more);
    set_parameter(kinds[i].name, 0);
    if (failures_here) printf("with %s\n", kinds[i].name);
    EQ(error, 0);
    EQ(above, -EDQUOT);
    world_close(&b);
    world_close(&a);
  }
}

int main(int argc, char **argv) {
  static const struct test tests[] = {TEST(not_initialised),      TEST(forked_child),   TEST(passed_over_a_socket),
                                      TEST(kept_through_execve),  TEST(another_thread), TEST(duplicated),
                                      TEST(owner_closes_first),   TEST(limits)};
  if (argc == 4 && strcmp(argv[1], "--after-exec") == 0) return after_exec(atoi(argv[2]), (uint32_t)atoi(argv[3]));
  return run_tests(tests, ARRAY_SIZE(tests), argc, argv);
}
