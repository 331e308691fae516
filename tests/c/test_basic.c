/* SPDX-License-Identifier: MIT */
/* Description: the five calls, aliases, references, ranges, contents, and memory returned to the system. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>

#include "check.h"

static uint64_t rss_shmem(void) {
  FILE *f = fopen("/proc/self/status", "re");
  char line[256];
  unsigned long long kib = 0;
  while (f && fgets(line, sizeof(line), f))
    if (sscanf(line, "RssShmem: %llu", &kib) == 1) break;
  if (f) fclose(f);
  return (uint64_t)kib << 10;
}

static void five_calls(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  struct vmem_stats s;
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  EQ(va % MIB(2), 0);
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  OK(vMemMap(vm, va + PAGE, 4 * PAGE, h, 0, 0));
  for (int i = 0; i < 4; i++) PUT(va + (1 + i) * PAGE, 10 + i);
  s = stats_of(vm);
  EQ(s.mapped_bytes, 4 * PAGE);
  EQ(s.used_bytes, 4 * PAGE);
  EQ(s.reserved_bytes, MIB(64));
  EQ(s.map_calls, 1);
  OK(vmem_check(vm));
  OK(vMemRelease(vm, h));
  s = stats_of(vm);
  EQ(s.mapped_bytes, 0);
  EQ(s.used_bytes, 0);
  EQ(s.handles, 0);
  EQ(vMemRelease(vm, h), -EBADF);
  OK(vMemFree(vm, va, 0));
  EQ(stats_of(vm).reservations, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  EQ(vmem_close(vm), -EBADF);
  EQ(vMemFree(vm, va, 0), -EBADF);
}

static void alias(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  struct vmem_handle_info info = {.size = sizeof(info)};
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 2 * PAGE, h, 0, 0));
  OK(vMemMap(vm, va + 8 * PAGE, PAGE, h, PAGE, 0));
  PUT(va + PAGE, 77);
  EQ(GET(va + 8 * PAGE), 77);
  EQ(stats_of(vm).mapped_bytes, 3 * PAGE);
  EQ(stats_of(vm).used_bytes, 2 * PAGE);
  OK(vmem_handle_query(vm, h, &info));
  EQ(info.mappings, 2);
  EQ(info.bytes, 2 * PAGE);
  EQ(vMemRelease(vm, h), -EBUSY);
  EQ(stats_of(vm).mapped_bytes, 3 * PAGE);
  OK(vMemUnmap(vm, va, 2 * PAGE));
  EQ(GET(va + 8 * PAGE), 77);
  OK(vmem_check(vm));
  OK(vMemRelease(vm, h)); /* unmaps the one remaining mapping */
  EQ(stats_of(vm).mapped_bytes, 0);
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_close(vm));
}

static void drop_keeps_mappings(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h, again;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, 2 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 2 * PAGE, h, 0, 0));
  PUT(va + PAGE, 5);
  OK(vmem_drop(vm, h));
  EQ(vmem_drop(vm, h), -EBADF);
  EQ(GET(va + PAGE), 5);
  EQ(stats_of(vm).used_bytes, 2 * PAGE);
  OK(vmem_retain(vm, va + PAGE, PAGE, &again));
  OK(vMemUnmap(vm, va, 2 * PAGE));
  EQ(stats_of(vm).used_bytes, PAGE);
  OK(vMemMap(vm, va + 4 * PAGE, PAGE, again, 0, 0));
  EQ(GET(va + 4 * PAGE), 5); /* not zeroed again */
  OK(vMemRelease(vm, again));
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* A released handle is never mistaken for a later one: the table reuses its entries in turn, each with a 20-bit
 * generation, and context tags are reused in turn too. */
static void stale_handles(void) {
  enum { TURN = 1024, CONTEXTS = 300 };
  vmem_t vm = open_vm(0), other;
  vmem_handle first, h;
  struct vmem_handle_info info = {.size = sizeof(info)};
  OK(vMemCreate(vm, PAGE, NULL, &first));
  OK(vmem_drop(vm, first));
  for (int i = 0; i < 3 * TURN; i++) {
    OK(vMemCreate(vm, PAGE, NULL, &h));
    CHECK(h != first);
    if (i < TURN - 1) CHECK((uint32_t)h != (uint32_t)first);
    EQ(vmem_handle_query(vm, first, &info), -EBADF);
    OK(vmem_drop(vm, h));
  }
  OK(vMemCreate(vm, PAGE, NULL, &first));
  for (int i = 0; i < 200; i++) { /* if heap memory is short, the table reuses an entry sooner, which is not an error */
    vmem_handle more;
    struct vmem_error e = {.size = sizeof(e)};
    OK(vmem_inject(vm, VMEM_INJECT_HEAP, i % 3, 1, ENOMEM));
    if (!vMemCreate(vm, PAGE, NULL, &more)) {
      OK(vmem_get_error(&e));
      EQ(e.code, 0);
    }
    OK(vmem_inject(vm, 0, 0, 0, 0));
  }
  for (int i = 0; on_host() && i < CONTEXTS; i++) {
    other = open_host(0);
    EQ(vmem_handle_query(other, first, &info), -EBADF);
    OK(vMemCreate(other, PAGE, NULL, &h));
    CHECK(h >> 52 != first >> 52);
    OK(vmem_close(other));
  }
  OK(vmem_close(vm));
}

/* A hole in the middle splits a mapping in two, so vMemRelease is ambiguous and fails. */
static void partial_unmap(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  struct vmem_handle_info info = {.size = sizeof(info)};
  struct vmem_range_info r = {.size = sizeof(r)};
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, 5 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 5 * PAGE, h, 0, 0));
  PUT(va, 1);
  PUT(va + 4 * PAGE, 5);
  OK(vMemUnmap(vm, va + PAGE, 2 * PAGE));
  OK(vmem_handle_query(vm, h, &info));
  EQ(info.mappings, 2);
  EQ(vMemRelease(vm, h), -EBUSY);
  OK(vmem_range_query(vm, va + PAGE, &r));
  EQ(r.flags & VMEM_RANGE_MAPPED, 0);
  EQ(r.run_bytes, 2 * PAGE);
  OK(vmem_range_query(vm, va + 3 * PAGE + 17, &r));
  EQ(r.flags & VMEM_RANGE_MAPPED, VMEM_RANGE_MAPPED);
  EQ(r.run_bytes, 2 * PAGE);
  EQ(r.mapped_bytes, 3 * PAGE);
  EQ(r.base, va);
  OK(vMemUnmap(vm, va, PAGE));
  EQ(GET(va + 4 * PAGE), 5);
  OK(vmem_check(vm));
  OK(vMemRelease(vm, h));
  EQ(stats_of(vm).mapped_bytes, 0);
  EQ(stats_of(vm).used_bytes, 0);
  OK(vmem_close(vm));
}

static void new_pages_are_zero(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  for (int round = 0; round < 3; round++) {
    OK(vMemCreate(vm, MIB(2), NULL, &h));
    OK(vMemMap(vm, va, MIB(2), h, 0, 0));
    for (uint64_t i = 0; i < MIB(2); i += 4096) EQ(GET(va + i), 0);
    OK(vmem_fill(vm, va, MIB(2), 0xff));
    OK(vMemRelease(vm, h));
  }
  OK(vmem_close(vm));
}

static void memory_goes_back(void) {
  ONLY_HOST(); /* measured by the kernel as this process's memory */
  vmem_t vm = open_vm(0);
  uint64_t va, before;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(32)};
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  op.addr = va;
  before = rss_shmem();
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_fill(vm, va, MIB(32), 1));
  CHECK(rss_shmem() - before >= MIB(32));
  OK(vMemUnmap(vm, va + MIB(8), MIB(24)));
  CHECK(rss_shmem() - before < MIB(9));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  CHECK(rss_shmem() - before < MIB(1));
  EQ(stats_of(vm).slab_bytes, 0);
  OK(vmem_close(vm));
}

static sigjmp_buf jump;
static void on_fault(int sig) {
  (void)sig;
  siglongjmp(jump, 1);
}

/* True if touching the address faults; `otherwise` if the back end does not allow to test that. */
static bool faults(vmem_t vm, uint64_t addr, bool write, bool otherwise) {
  struct sigaction sa = {.sa_handler = on_fault}, old_segv, old_bus;
  volatile bool hit = true;
  if (with_cuda(vm)) return otherwise;
  if (!on_host()) return touch(vm, addr, write) < 0;
  sigaction(SIGSEGV, &sa, &old_segv);
  sigaction(SIGBUS, &sa, &old_bus);
  if (!sigsetjmp(jump, 1)) {
    if (write)
      BYTE(addr) = 1;
    else
      (void)BYTE(addr);
    hit = false;
  }
  sigaction(SIGSEGV, &old_segv, NULL);
  sigaction(SIGBUS, &old_bus, NULL);
  return hit;
}

static void readonly_and_holes(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  char c = 9;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  CHECK(faults(vm, va, false, true));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, va, PAGE, h, 0, 0));
  OK(vMemMap(vm, va + PAGE, PAGE, h, 0, VMEM_MAP_READONLY));
  PUT(va, 42);
  EQ(GET(va + PAGE), 42);
  CHECK(faults(vm, va + PAGE, true, true));
  EQ(vmem_write(vm, va + PAGE, &c, 1), -EACCES);
  EQ(vmem_fill(vm, va, 2 * PAGE, 1), -EACCES);
  EQ(GET(va), 42);
  OK(vMemUnmap(vm, va, 2 * PAGE));
  CHECK(faults(vm, va, false, true));
  OK(vmem_close(vm));
}

/* Dirty pages (here after a failed discard) that are first mapped read-only must not show old contents. */
static void readonly_pages_are_zero(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vmem_warm(vm, MIB(1)));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, va, PAGE, h, 0, 0));
  OK(vmem_fill(vm, va, PAGE, 0xee));
  OK(vmem_inject(vm, VMEM_INJECT_SLAB, 0, 1, EIO));
  OK(vMemRelease(vm, h));
  OK(vmem_inject(vm, 0, 0, 0, 0));
  EQ(stats_of(vm).used_bytes, 0);
  for (int i = 0; i < 2; i++) {
    OK(vMemCreate(vm, MIB(1), NULL, &h));
    OK(vMemMap(vm, va, MIB(1), h, 0, VMEM_MAP_READONLY));
    for (uint64_t k = 0; k < MIB(1); k += 512) EQ(GET(va + k), 0);
    OK(vMemRelease(vm, h));
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

struct reader {
  char *at;
  size_t bytes;
  atomic_bool stop;
  uint64_t wrong;
};

/* ThreadSanitizer treats mmap as a write to its whole range. */
__attribute__((no_sanitize("thread"))) static void *read_on(void *arg) {
  struct reader *r = arg;
  while (!atomic_load(&r->stop))
    for (size_t i = 0; i < r->bytes; i += PAGE / 4) {
      char c = *(volatile char *)(r->at + i);
      r->wrong += c != 0 && c != 7;
    }
  return NULL;
}

/* A reader of a sparse range sees zeros or the page, never a fault, while pages are mapped and unmapped there. */
static void sparse_is_atomic(void) {
  vmem_t vm = open_vm(0);
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_reserve_opts o = {.size = sizeof(o), .flags = VMEM_RESERVE_SPARSE};
  struct reader r = {.bytes = 16 * PAGE};
  pthread_t thread;
  uint64_t va;
  vmem_handle h;
  OK(vmem_query(vm, &info));
  if (!on_host() || !(info.caps & VMEM_CAP_SPARSE_ATOMIC)) {
    OK(vmem_close(vm));
    return;
  }
  OK(vMemReserve(vm, r.bytes, &o, &va));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  r.at = (char *)(uintptr_t)va;
  CHECK(!pthread_create(&thread, NULL, read_on, &r));
  for (int i = 0; i < 2000; i++) {
    uint64_t at = va + (uint64_t)(i % 16) * PAGE;
    OK(vMemMap(vm, at, PAGE, h, 0, 0));
    __atomic_store_n((char *)(uintptr_t)at, 7, __ATOMIC_RELAXED);
    OK(vMemUnmap(vm, at, PAGE));
  }
  atomic_store(&r.stop, true);
  CHECK(!pthread_join(thread, NULL));
  EQ(r.wrong, 0);
  OK(vMemRelease(vm, h));
  OK(vMemFree(vm, va, 0));
  OK(vmem_close(vm));
}

static void sparse(void) {
  vmem_t vm = open_vm(0);
  struct vmem_reserve_opts o = {.size = sizeof(o), .flags = VMEM_RESERVE_SPARSE};
  uint64_t va;
  vmem_handle h;
  OK(vMemReserve(vm, MIB(4), &o, &va));
  EQ(touch(vm, va + MIB(3), false), 0);
  CHECK(faults(vm, va, true, on_host()) == on_host()); /* a GPU discards the write */
  EQ(touch(vm, va, false), 0);
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, va + PAGE, PAGE, h, 0, 0));
  PUT(va + 2 * PAGE - 1, 3);
  EQ(GET(va + 2 * PAGE - 1), 3);
  EQ(touch(vm, va + 2 * PAGE, false), 0);
  OK(vMemRelease(vm, h));
  EQ(touch(vm, va + 2 * PAGE - 1, false), 0);
  OK(vmem_close(vm));
}

static void contents(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_handle h;
  char in[3000], out[3000];
  for (size_t i = 0; i < sizeof(in); i++) in[i] = (char)(i * 7);
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
  OK(vmem_write(vm, va + PAGE - 100, in, sizeof(in)));
  OK(vmem_copy(vm, va + 2 * PAGE + 5, va + PAGE - 100, sizeof(in)));
  OK(vmem_read(vm, out, va + 2 * PAGE + 5, sizeof(out)));
  EQ(memcmp(in, out, sizeof(in)), 0);
  OK(vmem_fill(vm, va + 3, 10, 0x55));
  EQ(GET(va + 2), 0);
  EQ(GET(va + 3), 0x55);
  EQ(GET(va + 12), 0x55);
  EQ(GET(va + 13), 0);
  EQ(vmem_read(vm, out, va + 4 * PAGE - 1, 2), -EFAULT);
  EQ(vmem_copy(vm, va, va + 10, 100), -EINVAL);
  OK(vmem_close(vm));
}

static void page_sizes(void) {
  const uint64_t least = on_host() ? KIB(4) : PAGE;
  static const uint64_t sizes[] = {KIB(4), KIB(64), KIB(128), KIB(256), MIB(2)};
  vmem_t vm = open_vm(least);
  uint64_t va;
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
    struct vmem_create_opts o = {.size = sizeof(o), .page_size = sizes[i]};
    vmem_handle h;
    if (sizes[i] < least) continue;
    OK(vMemCreate(vm, 3 * sizes[i], &o, &h));
    OK(vMemMap(vm, va + i * MIB(8), 2 * sizes[i], h, sizes[i], 0));
    PUT(va + i * MIB(8), 1);
    if (sizes[i] > least) EQ(vMemMap(vm, va + MIB(60) + least, sizes[i], h, 0, 0), -EINVAL);
    OK(vMemRelease(vm, h));
  }
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void queries(void) {
  vmem_t vm = open_vm(0);
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_probe_info probe = {.size = sizeof(probe)};
  struct vmem_error e = {.size = sizeof(e)};
  OK(vmem_query(vm, &info));
  EQ(strcmp(info.backend, backend()), 0);
  EQ(info.granule, PAGE);
  CHECK(info.page_sizes & MIB(2));
  CHECK(info.max_segments > 0 || !on_host());
  OK(vmem_probe(backend(), 0, 0, &probe));
  EQ(probe.usable, 1);
  EQ(vmem_probe("nope", 0, 0, &probe), -EINVAL);
  OK(vmem_get_error(&e));
  EQ(e.code, -EINVAL);
  EQ(strcmp(e.op, "vmem_probe"), 0);
  CHECK(strstr(e.text, "nope"));
  EQ(strcmp(vmem_version(), VMEM_VERSION), 0);
  CHECK(vmem_backend_name(0) && !vmem_backend_name(99));
  OK(vmem_close(vm));
}

MAIN(TEST(five_calls), TEST(alias), TEST(drop_keeps_mappings), TEST(stale_handles), TEST(partial_unmap),
     TEST(new_pages_are_zero), TEST(memory_goes_back), TEST(readonly_and_holes), TEST(readonly_pages_are_zero),
     TEST(sparse), TEST(sparse_is_atomic), TEST(contents), TEST(page_sizes), TEST(queries))
