/* SPDX-License-Identifier: MIT */
/*
 * Description: tests the back ends "cuda" and "stock" on hardware, using only backend.h.
 *
 *   backend_check [cuda|stock]           all checks; exit 0 passed, 1 failed, 77 no GPU
 *   backend_check readonly NAME          child: writes through a read-only mapping
 *   backend_check probe NAME             child: probes
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"
#include "check.h"

unsigned checks_passed, checks_failed;
static const char *self;

bool check(const struct env *e, const char *name, bool ok) {
  printf("%-5s  %-4s  %s%s%s\n", e->b->name, ok ? "ok" : "FAIL", name, ok ? "" : "  <- ", ok ? "" : vmem_last_error());
  fflush(stdout);
  *(ok ? &checks_passed : &checks_failed) += 1;
  return ok;
}

void note(const struct env *e, const char *name, const char *fmt, ...) {
  va_list ap;
  printf("%-5s        %-44s ", e->b->name, name);
  va_start(ap, fmt);
  vprintf(fmt, ap);
  va_end(ap);
  printf("\n");
}

double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double median(double *values, size_t n) {
  qsort(values, n, sizeof(*values), by_value);
  return values[n / 2];
}

void *cuda_symbol(const char *name) {
  void *p = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  if (!p) abort();
  return p;
}

int put_range(const struct env *e, uint64_t addr, uint64_t bytes, uint64_t priv) {
  bool gone;
  return e->b->unreserve(e->be, addr, bytes, priv, &gone);
}

void env_open(struct env *e, const struct vm_backend *b, uint64_t granule) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .granule = granule};
  int err;
  e->b = b;
  memset(&e->info, 0, sizeof(e->info));
  err = vm_backend_open(b, &opts, &e->info, &e->be);
  if (err) {
    printf("%s: open: %d %s\n", b->name, err, vmem_last_error());
    exit(err == -ENODEV ? 77 : 1);
  }
  e->page = e->info.pub.granule;
  gpu_api_get(&e->cu);
}

static uint64_t random_u64(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 16;
}

static bool copy_sync(struct env *e, const struct vm_be_copy *copies, size_t n) {
  vm_event done = 0;
  bool ok = !e->b->copy(e->be, copies, n, NULL, 0, &done);
  if (!done) return ok;
  ok = !e->b->event_wait(e->be, done) && ok;
  e->b->event_put(e->be, done);
  return ok;
}

/* Makes more copies than fit in one launch of the copy kernel, with every alignment of source and destination. */
static bool copy_many(struct env *e, uint64_t addr, uint8_t *model, uint64_t half) {
  enum { COPIES = 400, PITCH = 4096 };
  static struct vm_be_copy copies[COPIES];

  for (unsigned i = 0; i < COPIES; i++) {
    uint64_t from = i * PITCH + i % 37, to = half + i * PITCH + i % 19, n = i * 7;
    copies[i] = (struct vm_be_copy){addr + to, addr + from, n};
    memcpy(model + to, model + from, n);
  }
  return copy_sync(e, copies, COPIES);
}

static void check_contents(struct env *e) {
  enum { BYTES = 4 << 20 };
  uint64_t seed = 42, slab[2], per = e->info.one_page_slabs ? e->page : BYTES;
  unsigned slabs = (unsigned)(BYTES / per);
  uint8_t *model = malloc(BYTES), *got = malloc(BYTES);
  uint64_t addr, priv;
  uint32_t kind;
  bool ok;

  ok = !e->b->reserve(e->be, BYTES, 2 << 20, 0, &addr, &kind, &priv);
  for (unsigned i = 0; i < slabs && i < 2 && ok; i++)
    ok = !e->b->slab_create(e->be, per, e->page, VMEM_DEVICE, 0, &slab[i]) &&
         !e->b->map(e->be, addr + i * per, per, slab[i], 0, 0, false);
  for (int i = 0; i < BYTES; i++) model[i] = (uint8_t)random_u64(&seed);
  check(e, "write 4 MiB", ok && !e->b->write(e->be, addr, model, BYTES));
  for (int i = 0; i < 300 && ok; i++) {
    uint64_t at = random_u64(&seed) % (BYTES - 70000), n = random_u64(&seed) % 70000;
    uint64_t from = random_u64(&seed) % (BYTES - 70000);
    struct vm_be_copy one = {addr + at, addr + from, n};
    if (i % 3 == 0 && from < at + n && at < from + n) continue;
    switch (i % 3) {
    case 0:
      ok = copy_sync(e, &one, 1);
      memmove(model + at, model + from, n);
      break;
    case 1:
      fill_sync(e, addr + at, n, (uint8_t)i);
      memset(model + at, (uint8_t)i, n);
      break;
    default:
      ok = !e->b->write(e->be, addr + at, model + from, n);
      memmove(model + at, model + from, n);
    }
  }
  ok = ok && !e->b->read(e->be, got, addr, BYTES);
  check(e, "300 random fills, copies, writes agree", ok && !memcmp(got, model, BYTES));
  ok = copy_many(e, addr, model, BYTES / 2) && !e->b->read(e->be, got, addr, BYTES);
  check(e, "many copies in one call agree", ok && !memcmp(got, model, BYTES));
  check(e, "unmap both at once", !e->b->unmap(e->be, addr, BYTES, false));
  ok = !put_range(e, addr, BYTES, priv);
  for (unsigned i = 0; i < slabs && i < 2; i++) ok = !e->b->slab_destroy(e->be, slab[i], per) && ok;
  check(e, "contents given back", ok);
  free(model);
  free(got);
}

/* Checks that CUDA reports, for both ends of registered host memory, the attributes that reads and writes depend on. */
static bool tells_of(struct env *e, uint8_t *host, uint64_t bytes) {
  int which[] = {GPU_POINTER_MEMORY_TYPE, GPU_POINTER_RANGE_START, GPU_POINTER_RANGE_SIZE, GPU_POINTER_BUFFER_ID};
  unsigned type[2] = {0};
  unsigned long long id[2] = {0};
  gpu_ptr start = 0;
  size_t size = 0;
  for (int i = 0; i < 2; i++) {
    void *to[] = {&type[i], &start, &size, &id[i]};
    if (e->cu->pointer_attributes(4, which, to, (gpu_ptr)(uintptr_t)(host + i * (bytes - 1)))) return false;
  }
  note(e, "  registered memory: range, buffer", "%llu of %llu bytes, %llu and %llu", (unsigned long long)size,
       (unsigned long long)bytes, id[0], id[1]);
  return type[0] == GPU_MEMORY_HOST && type[1] == GPU_MEMORY_HOST &&
         ((start <= (uintptr_t)host && (uintptr_t)host + bytes <= start + size) || (id[0] && id[0] == id[1]));
}

/* Checks reads and writes of host memory that is pinned, partly pinned and not pinned. */
static void check_locked(struct env *e) {
  enum { BYTES = 48 << 20, LOCKED = 40 << 20 };
  gpu_result (*register_host)(void *, size_t, unsigned), (*unregister)(void *);
  void *symbols[] = {cuda_symbol("cuMemHostRegister_v2"), cuda_symbol("cuMemHostUnregister")};
  uint64_t seed = 43, slab[24], per = e->info.one_page_slabs ? e->page : BYTES, addr, priv;
  unsigned slabs = (unsigned)(BYTES / per);
  uint8_t *host = aligned_alloc(1 << 21, BYTES), *model = malloc(BYTES);
  uint32_t kind;
  bool ok;
  memcpy(&register_host, &symbols[0], sizeof(register_host));
  memcpy(&unregister, &symbols[1], sizeof(unregister));
  if (!check(e, "slabs for pinned memory", slabs <= sizeof(slab) / sizeof(*slab))) return;
  ok = !e->b->reserve(e->be, BYTES, 2 << 20, 0, &addr, &kind, &priv);
  for (unsigned i = 0; i < slabs && ok; i++)
    ok = !e->b->slab_create(e->be, per, e->page, VMEM_DEVICE, 0, &slab[i]) &&
         !e->b->map(e->be, addr + i * per, per, slab[i], 0, 0, false);
  for (int i = 0; i < BYTES; i++) host[i] = model[i] = (uint8_t)random_u64(&seed);
  check(e, "register host memory", ok && register_host(host, LOCKED, 3) == GPU_SUCCESS);
  check(e, "CUDA reports what is registered", tells_of(e, host, LOCKED));
  ok = ok && !e->b->write(e->be, addr, host, LOCKED) &&
       !e->b->write(e->be, addr + LOCKED, host + LOCKED, BYTES - LOCKED);
  memset(host, 0, BYTES);
  check(e, "pinned, in one read", ok && !e->b->read(e->be, host, addr, LOCKED) && !memcmp(host, model, LOCKED));
  check(e, "pinned and beyond", ok && !e->b->read(e->be, host, addr, BYTES) && !memcmp(host, model, BYTES));
  for (int i = 0; i < 300 && ok; i++) {
    uint64_t n = random_u64(&seed) % (i % 10 ? 70000 : 20 << 20), at = random_u64(&seed) % (BYTES - n);
    uint64_t from = i % 3 ? random_u64(&seed) % (BYTES - n) : at;
    if (i & 1) {
      for (uint64_t k = 0; k < n; k += 97) host[from + k] ^= 0x5a;
      ok = !e->b->write(e->be, addr + at, host + from, n);
      memcpy(model + at, host + from, n);
    } else {
      ok = !e->b->read(e->be, host + from, addr + at, n) && !memcmp(host + from, model + at, n);
    }
  }
  check(e, "300 reads and writes at odd offsets and lengths agree", ok);
  check(e, "unregister", unregister(host) == GPU_SUCCESS);
  check(e, "the same memory after unregistering",
        ok && !e->b->read(e->be, host, addr, BYTES) && !memcmp(host, model, BYTES));
  ok = !e->b->unmap(e->be, addr, BYTES, false) && !put_range(e, addr, BYTES, priv);
  for (unsigned i = 0; i < slabs; i++) ok = !e->b->slab_destroy(e->be, slab[i], per) && ok;
  check(e, "pinned memory: freed", ok);
  free(host);
  free(model);
}

static void check_runs(struct env *e) {
  enum { PAGES = 128 };
  struct vm_be_range ranges[PAGES * 5];
  struct area a;
  vm_event done;
  bool ok;
  uint64_t run = PAGES * e->page;

  if (!check(e, "reserve for runs", area_get(e, &a, 2 * run, run, 0))) return;
  ok = !e->b->map(e->be, a.addr, run, a.slab, 0, 0, false);
  check(e, "map a run", ok);
  fill_sync(e, a.addr, run, 7);
  check(e, "unmap three pages in its middle", !e->b->unmap(e->be, a.addr + 5 * e->page, 3 * e->page, false));
  check(e, "the rest is intact",
        reads_as(e, a.addr, 5 * e->page, 7) && reads_as(e, a.addr + 8 * e->page, (PAGES - 8) * e->page, 7));
  check(e, "alias: the same pages elsewhere",
        !e->b->map(e->be, a.addr + run, run, a.slab, 0, 0, false) && reads_as(e, a.addr + run, run, 7));
  check(e, "unmap the alias", !e->b->unmap(e->be, a.addr + run, run, false));
  ok = true;
  for (int i = 5; i < 8; i++)
    ok = ok && !e->b->map(e->be, a.addr + i * e->page, e->page, a.slab, i * e->page, 0, false);
  check(e, "map the three again, one by one", ok && reads_as(e, a.addr, run, 7));
  if (e->b->remap)
    check(e, "remap all as one run", !e->b->remap(e->be, a.addr, run, a.slab, 0, 0) && reads_as(e, a.addr, run, 7));
  for (int i = 0; i < PAGES * 5; i++)
    ranges[i] = (struct vm_be_range){a.addr + (uint64_t)i * e->page / 5 / 16 * 16, 16};
  ok = !e->b->fill(e->be, ranges, PAGES * 5, 9, NULL, 0, &done) && !e->b->event_wait(e->be, done);
  e->b->event_put(e->be, done);
  for (int i = 0; i < PAGES * 5 && ok; i += 37)
    ok = reads_as(e, ranges[i].addr, 16, 9) && reads_as(e, ranges[i].addr + 16, 16, 7);
  check(e, "fill of 640 ranges", ok);
  check(e, "unreserve with live mappings", area_put(e, &a));
}

static void check_sparse(struct env *e) {
  struct area a;
  double start = now_us();
  uint64_t at;
  if (!check(e, "reserve 4 GiB sparse", area_get(e, &a, 4ull << 30, 64 << 20, VMEM_RESERVE_SPARSE))) return;
  note(e, "  us", "%.0f", now_us() - start);
  at = a.addr + (1ull << 30) + 3 * e->page;
  check(e, "sparse reads as zeros", reads_as(e, at, 4 * e->page, 0));
  fill_sync(e, at, e->page, 5);
  check(e, "a write to it is discarded", reads_as(e, at, e->page, 0));
  check(e, "map over it", !e->b->map(e->be, at, e->page, a.slab, e->page, 0, true));
  fill_sync(e, at, 2 * e->page, 6);
  check(e, "a mapped page keeps writes, its neighbour does not",
        reads_as(e, at, e->page, 6) && reads_as(e, at + e->page, e->page, 0));
  check(e, "reads as zeros again after unmap",
        !e->b->unmap(e->be, at, e->page, true) && reads_as(e, at - e->page, 3 * e->page, 0));
  start = now_us();
  check(e, "unreserve sparse", area_put(e, &a));
  note(e, "  us", "%.0f", now_us() - start);
}

static void check_kinds(struct env *e) {
  gpu_result (*to_host)(void *, gpu_ptr, size_t);
  void *symbol = cuda_symbol("cuMemcpyDtoH_v2");
  struct area a;
  uint8_t got[4096];
  uint64_t free0, free1, total;
  bool ok;
  memcpy(&to_host, &symbol, sizeof(to_host));
  for (int visible = 0; visible < 2; visible++) {
    uint32_t flags = visible ? VMEM_RESERVE_VISIBLE : VMEM_RESERVE_PLAIN;
    if (!visible && !(e->info.pub.caps & VMEM_CAP_PLAIN)) continue;
    if (!check(e, visible ? "reserve visible" : "reserve plain",
               area_get(e, &a, 64 << 20, e->info.one_page_slabs ? e->page : 16 * e->page, flags)))
      return;
    e->b->map(e->be, a.addr + e->page, e->page, a.slab, 0, 0, false);
    fill_sync(e, a.addr + e->page, e->page, 0x6b);
    ok = to_host(got, a.addr + e->page, sizeof(got)) == GPU_SUCCESS && got[4095] == 0x6b;
    check(e, visible ? "cuMemcpy accepts visible" : "cuMemcpy refuses plain", ok == (visible == 1));
    check(e, "kind is told", !(a.kind & VMEM_RANGE_VISIBLE) == !visible);
    check(e, "unmap and unreserve", !e->b->unmap(e->be, a.addr + e->page, e->page, false) && area_put(e, &a));
  }
  if (!(e->info.pub.caps & VMEM_CAP_PLAIN)) return;
  e->b->mem_info(e->be, VMEM_DEVICE, 0, &free0, &total);
  check(e, "visible beyond the card is -ENOSPC",
        e->b->reserve(e->be, total, 0, VMEM_RESERVE_VISIBLE, &a.addr, &a.kind, &a.priv) == -ENOSPC);
  vm_error_begin("check");
  ok = !e->b->reserve(e->be, 12ull << 40, 0, 0, &a.addr, &a.kind, &a.priv);
  check(e, "12 TiB by default is plain, and leaves no error",
        ok && !*vmem_last_error() && !(a.kind & VMEM_RANGE_VISIBLE));
  check(e, "and goes back", ok && !put_range(e, a.addr, 12ull << 40, a.priv));
  ok = true;
  for (int i = 0; i < 50 && ok; i++)
    ok = !e->b->reserve(e->be, 8ull << 30, 0, VMEM_RESERVE_VISIBLE, &a.addr, &a.kind, &a.priv) &&
         !put_range(e, a.addr, 8ull << 30, a.priv);
  check(e, "visible 8 GiB, reserved and freed 50 times", ok);
  e->b->mem_info(e->be, VMEM_DEVICE, 0, &free1, &total);
  check(e, "which loses no memory", free1 + (64 << 20) >= free0);
}

static void check_placement(struct env *e) {
  struct area a;
  uint64_t slab, bytes = e->info.one_page_slabs ? e->page : 4 << 20;
  if (!(e->info.pub.caps & VMEM_CAP_HOST_PAGES)) return note(e, "host pages", "not offered");
  if (!check(e, "reserve for host pages", area_get(e, &a, 64 << 20, bytes, 0))) return;
  if (check(e, "slab in host memory", !e->b->slab_create(e->be, bytes, e->page, VMEM_HOST, 0, &slab))) {
    check(e, "map it", !e->b->map(e->be, a.addr, bytes, slab, 0, 0, false));
    fill_sync(e, a.addr, bytes, 3);
    check(e, "fill and read it", reads_as(e, a.addr, bytes, 3));
    check(e, "unmap, destroy", !e->b->unmap(e->be, a.addr, bytes, false) && !e->b->slab_destroy(e->be, slab, bytes));
  }
  check(e, "placement given back", area_put(e, &a));
}

static void check_memory(struct env *e) {
  uint64_t free_bytes, total, slab, slabs[64], before, after;
  double us[64];
  bool ok = true;
  unsigned n = 0;
  e->b->mem_info(e->be, VMEM_DEVICE, 0, &free_bytes, &total);
  check(e, "slab larger than the card is -ENOMEM",
        e->b->slab_create(e->be, (total + (1ull << 30)) & ~((2ull << 20) - 1), e->page, VMEM_DEVICE, 0, &slab) ==
            -ENOMEM);
  printf("                 said: %s\n", vmem_last_error());
  before = free_bytes;
  for (n = 0; n < 64 && ok; n++) {
    double start = now_us();
    ok = !e->b->slab_create(e->be, 64 << 20, e->page, VMEM_DEVICE, 0, &slabs[n]);
    us[n] = now_us() - start;
  }
  e->b->mem_info(e->be, VMEM_DEVICE, 0, &after, &total);
  check(e, "64 slabs of 64 MiB take 4 GiB", ok && before - after >= 4ull << 30 && before - after < 5ull << 30);
  note(e, "  us a slab", "%.1f", median(us, n));
  while (n--) ok = !e->b->slab_destroy(e->be, slabs[n], 64 << 20) && ok;
  e->b->mem_info(e->be, VMEM_DEVICE, 0, &after, &total);
  check(e, "and free it", ok && after + (64 << 20) >= before);
}

/* Each device runs a kernel that stores a different byte in every part; reads back and checks each byte. */
static bool every_device_writes(struct env *e, unsigned devices, uint64_t addr, uint64_t part_bytes) {
  bool ok = true;
  for (unsigned device = 0; device < devices && ok; device++) {
    gpu_ctx ctx, popped;
    ok = !e->cu->primary_retain(&ctx, (gpu_dev)device) && !e->cu->ctx_push(ctx);
    for (unsigned part = 0; part < devices && ok; part++)
      ok = kernel_store(e, addr + part * part_bytes + device, 0x80 + device) == GPU_SUCCESS;
    e->cu->ctx_pop(&popped);
  }
  for (unsigned part = 0; part < devices && ok; part++)
    for (unsigned device = 0; device < devices && ok; device++)
      ok = reads_as(e, addr + part * part_bytes + device, 1, (uint8_t)(0x80 + device));
  return ok;
}

/* Checks a context on several devices, the last device first: kernels on all of them see the same memory. */
static void check_devices(const struct vm_backend *b, unsigned devices) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .num_devices = devices};
  struct env e = {.b = b};
  struct area a;
  uint64_t peers[VMEM_MAX_DEVICES], bytes;
  char name[64];
  int count = 0;
  bool ok;
  gpu_api_get(&e.cu);
  e.cu->device_count(&count);
  snprintf(name, sizeof(name), "open on %u devices, the last one first", devices);
  if ((unsigned)count < devices) return note(&e, name, "not run: %d here", count);
  for (unsigned i = 0; i < devices; i++) opts.devices[i] = (int)(devices - 1 - i);
  if (!check(&e, name, !vm_backend_open(b, &opts, &e.info, &e.be))) return;
  e.page = e.info.pub.granule;
  bytes = e.info.one_page_slabs ? e.page : 16 * e.page;
  ok = area_get(&e, &a, 64 << 20, bytes, 0) && !b->map(e.be, a.addr, bytes, a.slab, 0, 0, false);
  for (unsigned i = 1; i < devices && ok; i++)
    ok = !b->slab_create(e.be, bytes, e.page, VMEM_PEER, opts.devices[i], &peers[i]) &&
         !b->map(e.be, a.addr + i * bytes, bytes, peers[i], 0, 0, false);
  check(&e, "one range: own pages, then each peer's", ok);
  fill_sync(&e, a.addr, devices * bytes, 0x21);
  check(&e, "fill and read across", reads_as(&e, a.addr, devices * bytes, 0x21));
  check(&e, "a kernel of each device writes all", every_device_writes(&e, devices, a.addr, bytes));
  ok = !b->unmap(e.be, a.addr, bytes, false);
  for (unsigned i = 1; i < devices; i++)
    ok = !b->unmap(e.be, a.addr + i * bytes, bytes, false) && !b->slab_destroy(e.be, peers[i], bytes) && ok;
  check(&e, "given back", area_put(&e, &a) && ok);
  if ((e.info.pub.caps & VMEM_CAP_SPARSE) &&
      check(&e, "sparse on all", area_get(&e, &a, 64 << 20, bytes, VMEM_RESERVE_SPARSE))) {
    /* Device 0's context is current, so the store runs there. */
    ok = kernel_store(&e, a.addr + 7, 1) == GPU_SUCCESS && reads_as(&e, a.addr, e.page, 0) &&
         !b->map(e.be, a.addr, e.page, a.slab, 0, 0, true) && kernel_store(&e, a.addr + 7, 1) == GPU_SUCCESS &&
         reads_as(&e, a.addr + 7, 1, 1) && !b->unmap(e.be, a.addr, e.page, true) && reads_as(&e, a.addr, e.page, 0);
    check(&e, "map and unmap in it", ok);
    check(&e, "sparse given back", area_put(&e, &a));
  }
  check_pages(&e);
  check_contents(&e);
  b->close(e.be);
}

/* Runs this program again in a process that has not touched CUDA. Returns its exit status. */
static int run_child(const char *what, const char *name, bool as_nobody) {
  int status = 0;
  pid_t pid;
  fflush(stdout);
  pid = fork();
  if (pid == 0) {
    if (as_nobody && (setgid(65534) || setuid(65534))) _exit(99);
    execl("/proc/self/exe", self, what, name, (char *)NULL);
    _exit(98);
  }
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* Exit status 0: the read through a read-only mapping worked and the write faulted. */
static int child_readonly(struct env *e) {
  struct area a;
  gpu_ctx ignored;
  if (!area_get(e, &a, 64 << 20, e->page, 0) || e->b->map(e->be, a.addr, e->page, a.slab, 0, 0, false)) return 2;
  fill_sync(e, a.addr, e->page, 0x77);
  if (e->info.one_page_slabs && e->b->unmap(e->be, a.addr, e->page, false)) return 3;
  if (e->b->map(e->be, a.addr + e->page, e->page, a.slab, 0, VMEM_MAP_READONLY, false)) return 4;
  if (!reads_as(e, a.addr + e->page, e->page, 0x77)) return 5;
  if (e->cu->primary_retain(&ignored, 0) || e->cu->ctx_push(ignored)) return 6;
  if (kernel_store(e, a.addr + e->page, 1) == GPU_SUCCESS) return 7;
  e->b->close(e->be); /* the fault has broken the context; close must not hang or crash */
  return 0;
}

static int child_probe(const struct vm_backend *b) {
  struct vmem_probe_info info = {.size = sizeof(info)};
  int err = vm_backend_probe(b, 0, &info);
  printf("                 uid %d: %d %s\n", (int)getuid(), err, err ? vmem_last_error() : info.reason);
  return err != 0;
}

static void check_backend(const struct vm_backend *b) {
  struct env e = {.b = b}, second;
  struct vmem_probe_info info = {.size = sizeof(info)};
  uint64_t before, after, total;
  gpu_ctx ctx;
  double start = now_us();
  int err = vm_backend_probe(b, 0, &info);
  if (err == -ENODEV) return note(&e, "not run:", "%s", vmem_last_error());
  if (!check(&e, "probe", err == 0)) return;
  gpu_api_get(&e.cu);
  note(&e, info.reason, "(%.0f ms, %s, driver %s, caps 0x%x)", (now_us() - start) / 1e3, info.device_name, info.driver,
       info.caps);
  start = now_us();
  env_open(&e, b, 0);
  note(&e, "open", "%.1f ms", (now_us() - start) / 1e3);
  e.cu->primary_retain(&ctx, 0);
  e.cu->ctx_push(ctx);
  kernel_spin(&e, NULL, 1);
  b->mem_info(e.be, VMEM_DEVICE, 0, &before, &total);
  check_pages(&e);
  check_contents(&e);
  check_locked(&e);
  if (!e.info.one_page_slabs) check_runs(&e);
  if (e.info.pub.caps & VMEM_CAP_SPARSE) check_sparse(&e);
  check_kinds(&e);
  check_placement(&e);
  check_memory(&e);
  check_events(&e);
  check_threads(&e);
  check_capture(&e);
  for (unsigned devices = 2; devices <= 8; devices *= 2) check_devices(b, devices);
  env_open(&second, b, 0);
  check(&e, "opened twice", second.be != e.be);
  check_contents(&second);
  second.b->close(second.be);
  check_contents(&e);
  b->close(e.be);
  if (!e.info.one_page_slabs) {
    env_open(&e, b, 4096);
    check_pages(&e);
    check_contents(&e);
    b->close(e.be);
    env_open(&e, b, 2 << 20);
    check_pages(&e);
    check_runs(&e);
    b->close(e.be);
  }
  env_open(&e, b, 0);
  b->mem_info(e.be, VMEM_DEVICE, 0, &after, &total);
  check(&e, "all memory is free after close", after + (64 << 20) >= before);
  note(&e, "  free MiB before, after", "%llu, %llu", (unsigned long long)before >> 20, (unsigned long long)after >> 20);
  if (e.info.pub.caps & VMEM_CAP_READONLY)
    check(&e, "a write through a read-only mapping faults", run_child("readonly", b->name, false) == 0);
  else
    note(&e, "read-only", "not offered");
  if (getuid() == 0) check(&e, "an ordinary user may use it", run_child("probe", b->name, true) == 0);
  b->close(e.be);
}

int main(int argc, char **argv) {
  const struct vm_backend *all[] = {&vm_backend_cuda, &vm_backend_stock};
  const char *name = argc > 1 ? argv[argc - 1] : NULL;
  struct env e;
  self = argv[0];
  /* Opens a UVM descriptor that is not CUDA's and is found before CUDA's. */
  if (open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC) < 0) printf("no /dev/nvidia-uvm here\n");
  for (int i = 0; i < 2; i++) {
    if (name && strcmp(name, all[i]->name) != 0) continue;
    if (argc > 2 && !strcmp(argv[1], "probe")) return child_probe(all[i]);
    if (argc > 2) {
      env_open(&e, all[i], 0);
      return child_readonly(&e);
    }
    check_backend(all[i]);
  }
  printf("%u passed, %u failed\n", checks_passed, checks_failed);
  if (!checks_passed && !checks_failed) return 77;
  return checks_failed ? 1 : 0;
}
