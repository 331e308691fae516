/* SPDX-License-Identifier: MIT */
/*
 * Ownership of a descriptor: not initialised, inherited by a child, passed to another process, kept through
 * execve, used by a thread, duplicated, closed by its owner while another process still has it. And the limits on what
 * one descriptor may pin.
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

/* Tries all commands but QUERY with otherwise valid arguments; each must give -want. Returns how many did not. */
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
  if (failed != 12345) { /* the value that vm_bind() sets: a BIND on a wrong descriptor writes nothing */
    printf("BIND: out_failed_op is %u\n", failed);
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

/* Opens a world with one page mapped at RES that holds a pattern. */
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
    if (vm_query(w.uvm, w.uuid[0], &q) != -EPERM) {
      printf("QUERY about a GPU should be %d\n", -EPERM);
      wrong++;
    }
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

/* A process that has its own descriptor, with the same handles and addresses in use, receives another process's. */
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

/* The owner exits while a child still has the descriptor: everything is freed when the child exits, not before. */
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

/* A CREATE beyond the limit fails and changes nothing. */
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

/* The limit is 8 MB of GPU memory or (flags) host memory; it counts pinned memory, which grows in steps of 2 MB. */
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
  /* Memory counts until it is freed: releasing an object that is still mapped does not help. */
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
  /* A lower limit keeps memory already held; a limit that is not a multiple of 2 MB is rounded down. */
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
    /* Each descriptor has a separate limit. */
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

enum { THREADS = 4 };

static pthread_barrier_t together;

/* Creates a 2 MB page at the same time as the other threads. */
static void *creates_one(void *handle) {
  pthread_barrier_wait(&together);
  return (void *)(intptr_t)vm_create(shared.uvm, shared.uuid[0], 21, 1, 0, handle);
}

/* THREADS threads CREATE at the same time. Returns how many succeed; the others must get -EDQUOT. */
static int create_together(uint32_t *handles) {
  pthread_t thread[THREADS];
  int made = 0;
  pthread_barrier_init(&together, NULL, THREADS);
  for (int t = 0; t < THREADS; t++) {
    if (pthread_create(&thread[t], NULL, creates_one, &handles[t])) abort();
  }
  for (int t = 0; t < THREADS; t++) {
    void *result;
    pthread_join(thread[t], &result);
    if (result && (intptr_t)result != -EDQUOT) fail("CREATE: %d", (int)(intptr_t)result);
    made += !result;
  }
  pthread_barrier_destroy(&together);
  return made;
}

/* Several threads give a descriptor's first command at the same time: it still gets a single state. */
static void first_use_by_many(void) {
  for (unsigned round = 0; round < 10; round++) {
    uint32_t handle[THREADS];
    struct uvm_vmem_stat s;
    world_open(&shared, 1);
    EQ(create_together(handle), THREADS);
    OK(vm_stat(shared.uvm, NULL, &s));
    EQ(s.out_objects, THREADS);
    EQ(s.out_created_bytes, THREADS * MIB(2));
    for (int t = 0; t < THREADS; t++) OK(vm_release(shared.uvm, handle[t]));
    world_close(&shared);
  }
}

/* Threads that allocate from the resource manager at the same time stay below the limit together. */
static void limit_under_threads(void) {
  enum { SLOW_US = 30000 };
  for (unsigned round = 0; round < 2; round++) {
    uint32_t handle[THREADS] = {0}, more;
    struct uvm_vmem_stat s;
    world_open(&shared, 1);
    /* Use up UVM's cached memory, so that each thread has to ask the resource manager. */
    OK(vm_create(shared.uvm, shared.uuid[0], 21, 1, 0, &more));
    OK(set_parameter("uvm_vmem_limit_mb", 6));
    OK(softgpu_inject(shared.dev, "PmaAllocPages", 0, 0, 0, 0, SLOW_US));
    int made = create_together(handle);
    softgpu_inject_clear(shared.dev);
    OK(vm_stat(shared.uvm, NULL, &s));
    OK(set_parameter("uvm_vmem_limit_mb", 0));
    EQ(made, 2);
    EQ(s.out_chunk_bytes, MIB(6));
    world_close(&shared);
  }
}

/* Returns the number of live structs of a type, from the kernel's slab statistics; -1 if they are not available. */
static long slab_objects(const char *name) {
  char line[256], found[64];
  long active = -1, n;
  FILE *file = fopen("/proc/slabinfo", "r");
  while (file && fgets(line, sizeof(line), file)) {
    if (sscanf(line, "%63s %ld", found, &n) == 2 && strcmp(found, name) == 0) active = n;
  }
  if (file) fclose(file);
  return active;
}

/* A descriptor keeps a reference to its address space until it is closed, and no longer. */
static void address_spaces_come_back(void) {
  enum { CHILDREN = 400, LEFT = 100 };
  long before = slab_objects("mm_struct");
  if (before < 0) SKIP("no /proc/slabinfo");
  fflush(stdout);
  for (unsigned i = 0; i < CHILDREN; i++) {
    pid_t child = fork();
    if (child == 0) {
      int fd = softgpu_uvm_open();
      _exit(fd < 0 || softgpu_uvm_initialize(fd));
    }
    EQ(wait_for(child), 0);
  }
  long after = slab_objects("mm_struct");
  printf("%ld address spaces, then %ld\n", before, after);
  CHECK(after < before + LEFT);
}

/* A kind of GPU that QUERY refuses: no command works on it, and everything else still works. */
static void refused_kind(void) {
  struct uvm_vmem_query q;
  struct uvm_vmem_stat s = {0};
  struct world w;
  uint32_t handle;
  const char *kind = getenv("KIND");
  if (!kind) SKIP("needs another kind of GPU (kind=virtual, KIND=virtual; mig, integrated, coherent)");
  const uint32_t refusal = !strcmp(kind, "virtual") ? UVM_VMEM_GPU_VIRTUAL
                           : !strcmp(kind, "mig")   ? UVM_VMEM_GPU_MIG
                           : !strcmp(kind, "coherent") ? UVM_VMEM_GPU_COHERENT
                                                       : UVM_VMEM_GPU_INTEGRATED;
  world_open(&w, 1);
  OK(vm_query(w.uvm, w.uuid[0], &q));
  EQ(q.out_gpu_refusal, refusal);
  EQ(vm_reserve(w.uvm, w.uuid[0], RES, MIB(16), 16, 0), -EOPNOTSUPP);
  EQ(vm_create(w.uvm, w.uuid[0], 16, 1, 0, &handle), -EOPNOTSUPP);
  EQ(vm_stat(w.uvm, w.uuid[0], &s), -EOPNOTSUPP);
  OK(vm_stat(w.uvm, NULL, &s));
  EQ(s.out_objects + s.out_reservations, 0);
  world_close(&w);
}

int main(int argc, char **argv) {
  static const struct test tests[] = {TEST(not_initialised),      TEST(forked_child),   TEST(passed_over_a_socket),
                                      TEST(kept_through_execve),  TEST(another_thread), TEST(duplicated),
                                      TEST(owner_closes_first),   TEST(limits),         TEST(first_use_by_many),
                                      TEST(limit_under_threads),  TEST(refused_kind),   TEST(address_spaces_come_back)};
  if (argc == 4 && strcmp(argv[1], "--after-exec") == 0) return after_exec(atoi(argv[2]), (uint32_t)atoi(argv[3]));
  return run_tests(tests, ARRAY_SIZE(tests), argc, argv);
}
