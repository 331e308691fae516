/* SPDX-License-Identifier: MIT */
/*
 * A process with several busy threads is killed at a random point, again and again; afterwards everything that it
 * held has been freed, and no other process sees its data. Also tests /proc/driver/nvidia-uvm/vmem, which lists live
 * clients.
 *
 * Parameters: KILLS, SEED.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define RES 0x7c0000000000ull
#define THREADS 3
#define SECRET 0x5ec7e75ec7e75ec7ull

static struct world W;

/* Creates, binds, writes, unbinds and frees forever. */
static void *work(void *argument) {
  struct rng rng = {.state = (uintptr_t)argument};
  const uint64_t base = RES + ((uintptr_t)argument & 0xff) * GIB(2);
  for (;;) {
    uint64_t ticket = 0;
    uint32_t object[3];
    unsigned flags = rng_one_in(&rng, 3) ? UVM_VMEM_RESERVE_EAGER : rng_one_in(&rng, 2) ? UVM_VMEM_RESERVE_BIG : 0;
    if (vm_reserve(W.uvm, W.uuid[0], base, MIB(32), 16, flags)) flags = 0;
    for (unsigned i = 0; i < 3; i++) {
      static const unsigned shifts[] = {16, 17, 18, 21};
      unsigned host = rng_one_in(&rng, 5) ? UVM_VMEM_CREATE_HOST : 0;
      if (vm_create(W.uvm, W.uuid[0], shifts[rng_below(&rng, 4)], 1 + rng_below(&rng, 8), host, &object[i])) continue;
      struct uvm_vmem_op op = op_map(base + i * MIB(8), object[i], 0, 1, UVM_VMEM_OP_REPLACE);
      vm_bind(W.uvm, base, &op, 1, NULL, rng_one_in(&rng, 2) ? &ticket : NULL);
      if (ticket && rng_one_in(&rng, 2)) vm_wait(W.uvm, ticket, FOREVER);
      if (rng_one_in(&rng, 4)) gpu_fill(&W, 0, base + i * MIB(8), UNIT, SECRET, 0);
    }
    for (unsigned i = 0; i < 3; i++) {
      struct uvm_vmem_op op = op_unmap(base + i * MIB(8), 32, rng_one_in(&rng, 3) ? UVM_VMEM_OP_SPARSE : 0);
      if (rng_one_in(&rng, 2)) vm_release(W.uvm, object[i]);
      if (rng_one_in(&rng, 2)) vm_bind(W.uvm, base, &op, 1, NULL, rng_one_in(&rng, 2) ? &ticket : NULL);
    }
    vm_free(W.uvm, base, rng_one_in(&rng, 5) ? 0 : UVM_VMEM_FREE_UNMAP);
  }
  return NULL;
}

__attribute__((noreturn)) static void victim(uint64_t seed) {
  pthread_t thread;
  world_open(&W, 1);
  for (uintptr_t t = 0; t < THREADS; t++) pthread_create(&thread, NULL, work, (void *)(seed << 8 | t));
  for (;;) sleep_ms(1000);
}

/* Memory of killed processes is zeroed for the next owner. */
static void nothing_shows(struct world *w) {
  unsigned pages = 256;
  uint32_t object;
  OK(vm_reserve(w->uvm, w->uuid[0], RES, pages * UNIT, 16, 0));
  OK(vm_create(w->uvm, w->uuid[0], 16, pages, 0, &object));
  OK(vm_map(w->uvm, RES, RES, object, 0, pages, 0));
  OK(gpu_check(w, 0, RES, pages * UNIT, 0, 0));
  OK(vm_free(w->uvm, RES, UVM_VMEM_FREE_UNMAP));
  OK(vm_release(w->uvm, object));
}

static void kill_at_random(void) {
  uint64_t kills = parameter("KILLS", 50), seed = parameter("SEED", 1);
  struct rng rng = {.state = seed};
  struct softgpu_counters base;
  struct world stays;
  printf("SEED=%llu KILLS=%llu\n", (unsigned long long)seed, (unsigned long long)kills);
  /* A client that stays open makes opening cheap for the others: UVM's channels already exist. */
  world_open(&stays, 1);
  nothing_shows(&stays);
  base = gpu_counters(&stays, 0);
  for (uint64_t i = 0; i < kills && !failures_here; i++) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) victim(seed * 100003 + i);
    /* Some are killed while they open, most in the middle of their work. */
    sleep_ms(rng_below(&rng, rng_one_in(&rng, 4) ? 20 : 150));
    kill(child, SIGKILL);
    EQ(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status)) fail("the victim ended by itself: 0x%x", status);
    gpu_check_clean(stays.dev, 0, &base, true);
    if (i % 10 == 9) nothing_shows(&stays);
    if (failures_here) printf("after %llu kills\n", (unsigned long long)i + 1);
  }
  OK(softgpu_verify(stays.dev));
  world_close(&stays);
}

/* The same without another client: when the last one exits, UVM destroys the GPU's channels. */
static void kill_the_only_client(void) {
  uint64_t kills = 1 + parameter("KILLS", 50) / 10, seed = parameter("SEED", 1);
  struct rng rng = {.state = seed + 1};
  struct softgpu_counters base;
  int dev = softgpu_open();
  OK(softgpu_counters(dev, 0, &base));
  for (uint64_t i = 0; i < kills && !failures_here; i++) {
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) victim(seed * 700001 + i);
    sleep_ms(rng_below(&rng, 600));
    kill(child, SIGKILL);
    EQ(waitpid(child, &status, 0), child);
    gpu_check_clean(dev, 0, &base, true);
  }
  close(dev);
}

/* The same while UVM adds a GPU. That needs a kernel thread, which a process that is being killed cannot start. Up to
 * 555 UVM then leaks the GPU's struct, which its leak checker reports at the end. */
static void killed_while_the_gpu_is_added(void) {
  enum { SLOW_US = 400000, TRIES = 4 };
  struct softgpu_counters base;
  struct world w;
  int dev = softgpu_open();
  OK(softgpu_counters(dev, 0, &base));
  OK(softgpu_inject(dev, "GetGpuInfo", 0, 0, 0, 0, SLOW_US));
  for (unsigned i = 0; i < TRIES; i++) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) victim(i);
    sleep_ms(SLOW_US / 2000 * (i + 1));
    kill(child, SIGKILL);
    EQ(waitpid(child, NULL, 0), child);
  }
  OK(softgpu_inject_clear(dev));
  gpu_check_clean(dev, 0, &base, true);
  close(dev);
  world_open(&w, 1);
  nothing_shows(&w);
  world_close(&w);
}

/* A line of the file; busy: the client held its lock. */
struct row {
  int pid;
  bool busy;
  unsigned long long reservations, reserved_kb, objects, created_kb, mapped_kb, gpu_kb, host_kb, slots, kernel_kb, binds;
  char command[64];
};

#define PROC_FILE "/proc/driver/nvidia-uvm/vmem"
#define COLUMNS \
  "# pid reservations reserved_kb objects created_kb mapped_kb gpu_kb host_kb slots kernel_kb binds command\n"

/* Reads at most `most` lines. Returns their number, or -1 if the file is malformed. */
static int read_rows(struct row *rows, int most) {
  FILE *file = fopen(PROC_FILE, "r");
  char line[512], rest[8];
  int n = 0;
  if (!file) return -1;
  if (!fgets(line, sizeof(line), file) || strcmp(line, COLUMNS) != 0) n = -1;
  while (n >= 0 && fgets(line, sizeof(line), file)) {
    struct row r = {0};
    int fields = sscanf(line, "%d %llu %llu %llu %llu %llu %llu %llu %llu %llu %llu %63s %7s", &r.pid, &r.reservations,
                        &r.reserved_kb, &r.objects, &r.created_kb, &r.mapped_kb, &r.gpu_kb, &r.host_kb, &r.slots,
                        &r.kernel_kb, &r.binds, r.command, rest);
    r.busy = fields == 1 && strstr(line, " busy\n");
    if ((fields != 12 && !r.busy) || n == most) {
      printf("line %d of %d: %s", n, most, line);
      n = -1;
    } else {
      rows[n++] = r;
    }
  }
  fclose(file);
  return n;
}

enum { MOST_ROWS = 64 };

/* Finds the only line of a process. Returns false if it has none. */
static bool row_of(pid_t pid, struct row *row) {
  static struct row rows[MOST_ROWS];
  int found = 0, n = read_rows(rows, MOST_ROWS);
  if (n < 0) fail("the file cannot be read");
  for (int i = 0; i < n; i++) {
    if (rows[i].pid != pid) continue;
    *row = rows[i];
    found++;
  }
  if (found > 1) fail("%d lines of process %d", found, pid);
  return found == 1;
}

static void row_agrees(const struct row *r, const struct uvm_vmem_stat *s, const char *command) {
  CHECK(!r->busy);
  EQ(r->reservations, s->out_reservations);
  EQ(r->reserved_kb, s->out_reserved_bytes >> 10);
  EQ(r->objects, s->out_objects);
  EQ(r->created_kb, s->out_created_bytes >> 10);
  EQ(r->mapped_kb, s->out_mapped_bytes >> 10);
  EQ(r->gpu_kb, s->out_chunk_bytes >> 10);
  EQ(r->host_kb, s->out_host_bytes >> 10);
  EQ(r->slots, s->out_slots);
  EQ(r->kernel_kb, s->out_kernel_bytes >> 10);
  EQ(r->binds, s->out_binds);
  if (strcmp(r->command, command) != 0) fail("command %s, not %s", r->command, command);
}

/* A client whose size and name depend on number: sends its STAT over the pipe and stays alive. */
__attribute__((noreturn)) static void sits(unsigned number, int pipe) {
  struct uvm_vmem_stat s;
  uint32_t object[3];
  char name[16];
  snprintf(name, sizeof(name), "sits %u", number);
  prctl(PR_SET_NAME, name);
  world_open(&W, 1);
  int bad = vm_reserve(W.uvm, W.uuid[0], RES, MIB(32) << number, 16, 0) != 0;
  if (number) bad |= vm_reserve(W.uvm, W.uuid[0], RES + GIB(8), MIB(2), 16, 0) != 0;
  bad |= vm_create(W.uvm, W.uuid[0], 16, 5 + number, 0, &object[0]) != 0;
  bad |= vm_create(W.uvm, W.uuid[0], 21, 1 + number, 0, &object[1]) != 0;
  bad |= vm_create(W.uvm, W.uuid[0], 17, 3 + number, UVM_VMEM_CREATE_HOST, &object[2]) != 0;
  for (unsigned i = 0; i <= number; i++) bad |= vm_map(W.uvm, RES, RES + i * MIB(4), object[0], 0, 2 + i, 0) != 0;
  bad |= vm_map(W.uvm, RES, RES + MIB(2), object[2], 0, 2, 0) != 0;
  bad |= vm_stat(W.uvm, NULL, &s) != 0;
  if (bad || write(pipe, &s, sizeof(s)) != sizeof(s)) _exit(1);
  for (;;) sleep_ms(1000);
}

/* The line of a killed process disappears after a while. */
static void row_goes(pid_t pid) {
  struct row row;
  for (unsigned tries = 0; row_of(pid, &row); tries++) {
    if (tries == 100) {
      fail("process %d is dead and still listed", pid);
      return;
    }
    sleep_ms(50);
  }
}

/* Each client has a line that agrees with its STAT; the line disappears with its client, and no other line does. */
static void proc_shows_the_living(void) {
  enum { CLIENTS = 3 };
  struct uvm_vmem_stat s, own, none;
  struct row row, rows[MOST_ROWS];
  pid_t child[CLIENTS];
  struct world w;
  uint32_t object = 0;
  char name[32];
  int ends[2];
  struct uvm_vmem_stat stat[CLIENTS];
  OK(pipe(ends));
  EQ(read_rows(rows, MOST_ROWS), 0);
  world_open(&w, 1);
  fflush(stdout);
  for (unsigned i = 0; i < CLIENTS; i++) {
    child[i] = fork();
    if (child[i] == 0) sits(i, ends[1]);
    EQ(read(ends[0], &stat[i], sizeof(stat[i])), sizeof(stat[i]));
  }
  CHECK(!row_of(getpid(), &row)); /* it has given no command yet */
  OK(vm_stat(w.uvm, NULL, &none));
  for (unsigned step = 0; step < 6; step++) {
    if (step == 1) OK(vm_reserve(w.uvm, w.uuid[0], RES, MIB(64), 16, UVM_VMEM_RESERVE_EAGER));
    if (step == 2) OK(vm_create(w.uvm, w.uuid[0], 16, 40, 0, &object));
    if (step == 3) OK(vm_map(w.uvm, RES, RES, object, 0, 40, 0));
    if (step == 4) OK(vm_release(w.uvm, object));
    if (step == 5) OK(vm_unmap(w.uvm, RES, RES, 39, 0));
    OK(vm_stat(w.uvm, NULL, &own));
    CHECK(row_of(getpid(), &row));
    row_agrees(&row, &own, "kill");
  }
  EQ(own.out_mapped_bytes, UNIT); /* so that not only zeros were compared */
  EQ(own.out_created_bytes, 40 * UNIT);
  for (unsigned dead = 0; dead <= CLIENTS; dead++) {
    for (unsigned i = dead; i < CLIENTS; i++) {
      snprintf(name, sizeof(name), "sits\\040%u", i);
      CHECK(row_of(child[i], &row));
      row_agrees(&row, &stat[i], name);
    }
    if (dead < CLIENTS) {
      kill(child[dead], SIGKILL);
      EQ(waitpid(child[dead], NULL, 0), child[dead]);
      row_goes(child[dead]);
    }
    EQ(read_rows(rows, MOST_ROWS), dead < CLIENTS ? CLIENTS - dead : 1);
  }
  OK(vm_stat(w.uvm, NULL, &s));
  CHECK(row_of(getpid(), &row));
  row_agrees(&row, &s, "kill");
  world_close(&w);
  EQ(read_rows(rows, MOST_ROWS), 0);
  close(ends[0]);
  close(ends[1]);
}

/* Only root may read the file. */
static void proc_is_for_root(void) {
  int status = -1;
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    if (setuid(1000)) _exit(1);
    _exit(open(PROC_FILE, O_RDONLY) >= 0 || errno != EACCES);
  }
  EQ(waitpid(child, &status, 0), child);
  EQ(status, 0);
}

static volatile bool stop;
static _Atomic unsigned reads, seen, was_busy;

/* Checks that a line is possible for a client of come_and_go. */
static bool plausible(const struct row *r) {
  if (r->busy) return true;
  return strcmp(r->command, "kill") == 0 && r->objects <= 1 && r->host_kb == 0 && (!r->created_kb || r->created_kb == 1024) &&
         (!r->mapped_kb || r->mapped_kb == 512) && (!r->reserved_kb || r->reserved_kb == 32768);
}

static void *reads_on(void *unused) {
  struct row rows[MOST_ROWS];
  uintptr_t wrong = 0;
  (void)unused;
  while (!stop) {
    int n = read_rows(rows, MOST_ROWS);
    if (n < 0) wrong++;
    for (int i = 0; i < n; i++) {
      was_busy += rows[i].busy;
      seen++;
      if (rows[i].pid != getpid() || plausible(&rows[i])) continue;
      printf("%llu objects, %llu KB of %s\n", rows[i].objects, rows[i].created_kb, rows[i].command);
      wrong++;
    }
    reads++;
  }
  return (void *)wrong;
}

/* Reads without checking, so that it is nearly always walking the list when a client leaves it. */
static void *reads_only(void *unused) {
  char text[4096];
  uintptr_t wrong = 0;
  int fd = open(PROC_FILE, O_RDONLY);
  (void)unused;
  for (; !stop; reads++) wrong += pread(fd, text, sizeof(text), 0) < (ssize_t)strlen(COLUMNS);
  close(fd);
  return (void *)wrong;
}

static void *come_and_go(void *number) {
  const uint64_t base = RES + (uintptr_t)number * GIB(4);
  struct softgpu_client c;
  uintptr_t wrong = 0;
  while (!stop) {
    uint32_t object;
    if (softgpu_client_open(&c, 1)) return (void *)1;
    wrong += vm_reserve(c.uvm, c.uuid[0], base, MIB(32), 16, 0) != 0;
    wrong += vm_create(c.uvm, c.uuid[0], 16, 16, 0, &object) != 0;
    for (unsigned i = 0; i < 4; i++) {
      wrong += vm_map(c.uvm, base, base + MIB(2), object, 0, 8, 0) != 0;
      wrong += vm_unmap(c.uvm, base, base, 64, 0) != 0;
    }
    if (wrong % 2 == 0) wrong += vm_release(c.uvm, object) != 0;
    softgpu_client_close(&c);
  }
  return (void *)wrong;
}

/* Two threads read while clients come and go, and other clients are killed. */
static void proc_under_fire(void) {
  uint64_t kills = 2 + parameter("KILLS", 50) / 25;
  struct softgpu_counters base;
  struct row rows[MOST_ROWS];
  struct world stays;
  pthread_t thread[4];
  void *wrong;
  stop = false;
  reads = seen = was_busy = 0;
  world_open(&stays, 1);
  base = gpu_counters(&stays, 0);
  static void *(*const work_of[])(void *) = {reads_on, reads_only, come_and_go, come_and_go};
  for (uintptr_t t = 0; t < 4; t++) OK(pthread_create(&thread[t], NULL, work_of[t], (void *)t));
  for (uint64_t i = 0; i < kills; i++) {
    pid_t child = fork();
    if (child == 0) victim(900001 + i);
    sleep_ms(100);
    kill(child, SIGKILL);
    EQ(waitpid(child, NULL, 0), child);
    row_goes(child);
  }
  stop = true;
  for (unsigned t = 0; t < 4; t++) {
    OK(pthread_join(thread[t], &wrong));
    EQ((uintptr_t)wrong, 0);
  }
  printf("%u reads, %u lines, %u of them busy\n", reads, seen, was_busy);
  CHECK(reads > 20 && seen > was_busy);
  gpu_check_clean(stays.dev, 0, &base, true);
  world_close(&stays);
  EQ(read_rows(rows, MOST_ROWS), 0);
}

/* Clients without a GPU come and go as fast as they can while their list is read continuously. */
static void proc_of_the_hasty(void) {
  enum { CLIENTS = 2 };
  const uint64_t rounds = parameter("ROUNDS", 200);
  struct row rows[MOST_ROWS];
  unsigned left = CLIENTS, looks = 0;
  int status;
  fflush(stdout);
  for (unsigned i = 0; i < CLIENTS; i++) {
    if (fork() != 0) continue;
    bool bad = false;
    for (uint64_t round = 0; round < rounds; round++) {
      struct uvm_vmem_stat s;
      int uvm = softgpu_uvm_open(), mm;
      bad |= uvm < 0 || softgpu_uvm_initialize(uvm) != 0;
      mm = softgpu_uvm_initialize_mm(uvm);
      bad |= mm < 0 || vm_stat(uvm, NULL, &s) != 0;
      close(mm);
      close(uvm);
    }
    _exit(bad);
  }
  while (left) {
    int n = read_rows(rows, MOST_ROWS);
    CHECK(n >= 0 && n <= CLIENTS);
    looks++;
    if (waitpid(-1, &status, WNOHANG) <= 0) continue;
    EQ(status, 0);
    left--;
  }
  printf("%u reads beside %llu clients\n", looks, (unsigned long long)(CLIENTS * rounds));
  EQ(read_rows(rows, MOST_ROWS), 0);
}

MAIN(TEST(proc_shows_the_living), TEST(proc_is_for_root), TEST(kill_at_random), TEST(kill_the_only_client),
     TEST(killed_while_the_gpu_is_added), TEST(proc_under_fire), TEST(proc_of_the_hasty))
