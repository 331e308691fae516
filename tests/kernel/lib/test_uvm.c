/* SPDX-License-Identifier: MIT */
/*
 * Description: libvmem's back end uvm on the patched driver: the number of calls that a batch takes, the state after
 * failures of the driver and of the GPU, the limits of one call, and that all memory is returned.
 *
 *   test_uvm             all of it
 *   test_uvm gpu-fails   a push that dies, after which UVM gives up on the GPU
 *   test_uvm two-gpus    with two software GPUs
 *   test_uvm unpatched   the probe on a driver without the patch
 */
#include <dirent.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "api/api.h"
#include "softgpu_user.h"
#include "backend/uvm/uvm.h"

static int dev; /* /dev/softgpu */

static struct uvm *state_of(vmem_t vm) {
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  struct uvm *u = c->bes;
  vm_put(c);
  return u;
}

static struct uvm_vmem_stat driver_stat(vmem_t vm) {
  struct uvm_vmem_stat s = {.size = sizeof(s)};
  if (ioctl(state_of(vm)->nv.uvm_fd, UVM_VMEM_STAT, &s)) printf("STAT: %s\n", strerror(errno));
  return s;
}

static uint64_t gpu_free(vmem_t vm) {
  int err;
  uint64_t free_bytes = 0, total;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  if (c->be->mem_info(c->bes, VMEM_DEVICE, 0, &free_bytes, &total)) printf("%s\n", vmem_last_error());
  vm_put(c);
  return free_bytes;
}

static int open_fds(void) {
  DIR *d = opendir("/proc/self/fd");
  int n = 0;
  while (d && readdir(d)) n++;
  closedir(d);
  return n;
}

static void probing(void) {
  struct vmem_probe_info p = {.size = sizeof(p)};
  int fds;
  OK(vmem_probe("uvm", 0, 0, &p));
  fds = open_fds();
  OK(vmem_probe("uvm", 0, 0, &p));
  printf("%s %s: %s\n", p.device_name, p.driver, p.reason);
  EQ(p.usable, 1);
  CHECK(strstr(p.reason, "patched driver, ABI 1"));
  CHECK(strstr(p.reason, "written, read and unmapped"));
  CHECK(p.driver[0] && p.device_name[0]);
  EQ(p.page_sizes, KIB(64) | KIB(128) | KIB(256) | MIB(2));
  EQ(open_fds(), fds);
  EQ(vmem_probe("uvm", 7, 0, &p), 0);
  EQ(p.usable, 0);
  EQ(p.error, -ENODEV);
}

static void automatic(void) {
  struct vmem_open_opts o = {.size = sizeof(o)};
  struct vmem_info info = {.size = sizeof(info)};
  vmem_t vm;
  OK(vmem_open(&o, &vm));
  OK(vmem_query(vm, &info));
  EQ(strcmp(info.backend, "uvm"), 0);
  EQ(info.why[0], 0);
  CHECK(info.caps & VMEM_CAP_ONE_CALL);
  CHECK(!(info.caps & VMEM_CAP_SPARSE) == !(info.caps & VMEM_CAP_SPARSE_ATOMIC));
  CHECK(!(info.caps & (VMEM_CAP_CPU_ACCESS | VMEM_CAP_VISIBLE)));
  CHECK(memcmp(info.uuid[0], (uint8_t[16]){0}, 16));
  OK(vmem_close(vm));
}

#define TENSORS 64
#define STRIDE MIB(2)

/* Stops the background zeroing of returned pages, whose calls would be counted with those of a batch. */
static void no_background(vmem_t vm) { OK(vmem_inject(vm, VMEM_INJECT_CLEAN, 0, UINT64_MAX, EIO)); }

/* Growing each of 64 tensors by a page takes one BIND, one push, 64 entries and one invalidate. So does unmapping the
 * pages, or both in one batch, in the caller's thread or in the worker's. */
static void growth_is_one_call(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  vmem_ticket t;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE, .count = TENSORS, .stride = STRIDE}, both[2];
  struct uvm_vmem_stat before, now;
  struct vmem_stats calls;
  no_background(vm);
  OK(vMemReserve(vm, TENSORS * STRIDE, NULL, &va));
  OK(vmem_warm(vm, MIB(32)));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0)); /* allocates the tables */
  for (int round = 0; round < 4; round++) {
    before = driver_stat(vm);
    calls = stats_of(vm);
    op.addr = va + (1 + (uint64_t)round) * PAGE;
    if (round == 0) {
      OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    } else if (round == 1) {
      OK(vmem_submit(vm, &op, 1, NULL, 0, 0, &t));
      OK(vmem_wait(vm, t, -1));
    } else if (round == 2) {
      both[0] = both[1] = op;
      both[1].op = VMEM_OP_UNMAP;
      both[1].addr = va;
      OK(vmem_batch(vm, both, 2, NULL, 0, 0));
    } else {
      op.op = VMEM_OP_UNMAP;
      op.addr = va + PAGE;
      OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    }
    now = driver_stat(vm);
    EQ(now.out_binds - before.out_binds, 1);
    EQ(now.out_pushes - before.out_pushes, 1);
    EQ(now.out_pte_writes - before.out_pte_writes, round == 2 ? 2 * TENSORS : TENSORS);
    EQ(now.out_invalidates - before.out_invalidates, 1);
    EQ(now.out_table_waits, before.out_table_waits);
    EQ(stats_of(vm).map_calls + stats_of(vm).unmap_calls - calls.map_calls - calls.unmap_calls, 1);
  }
  EQ(now.out_mapped_bytes, 2 * TENSORS * PAGE);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static void everything_goes_back(void) {
  vmem_t watch = open_vm(0), vm;
  uint64_t va, other, before = gpu_free(watch);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(1), .count = 4, .stride = MIB(4)};
  struct uvm_vmem_stat s;
  CHECK(before > MIB(64));
  vm = open_vm(0);
  OK(vMemReserve(vm, MIB(32), NULL, &va));
  OK(vMemReserve(vm, MIB(32), NULL, &other));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  CHECK(gpu_free(watch) < before);
  OK(vMemFree(vm, other, 0));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_trim(vm, 0, NULL));
  s = driver_stat(vm);
  EQ(s.out_reservations, 0);
  EQ(s.out_objects, 0);
  EQ(s.out_mapped_bytes, 0);
  EQ(s.out_created_bytes, 0);
  EQ(s.out_slots, 0);
  OK(vMemReserve(vm, MIB(32), NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_close(vm)); /* while everything is still allocated */
  EQ(gpu_free(watch), before);
  OK(vmem_close(watch));
}

/* Reads a word as a kernel on the GPU would; the library reads mapped memory only. */
static int64_t sparse_word(uint64_t va) {
  uint64_t word = 0;
  int err = softgpu_peek(dev, (struct softgpu_space){0}, va, &word);
  return err ? err : (int64_t)word;
}

/* With small limits, runs cross from one kernel object into the next, and one batch takes several calls. */
static void small_limits(void) {
  vmem_t vm = open_vm(0);
  struct uvm *u = state_of(vm);
  uint64_t va, binds;
  int err;
  struct vm_ctx *c = vm_get(vm, "test", &err);
  struct vmem_op ops[2] = {{.op = VMEM_OP_POPULATE, .bytes = 11 * PAGE, .count = 5, .stride = MIB(4)}};
  struct vmem_reserve_opts sparse = {.size = sizeof(sparse), .flags = VMEM_RESERVE_SPARSE};
  vm_put(c);
  u->object_bytes = 4 * PAGE;
  u->query.out_max_bind_ops = 5;
  u->query.out_max_bind_units = 9;
  c->info->bind_bytes = 8 * PAGE;
  binds = driver_stat(vm).out_binds;
  OK(vMemReserve(vm, MIB(8), &sparse, &va)); /* 128 units */
  EQ(driver_stat(vm).out_binds - binds, 15);
  for (uint64_t at = 0; at < MIB(8); at += PAGE) EQ(sparse_word(va + at), 0);
  OK(vMemFree(vm, va, 0));
  OK(vMemReserve(vm, MIB(64), NULL, &va));
  ops[0].addr = va;
  OK(vmem_batch(vm, ops, 1, NULL, 0, 0));
  CHECK(driver_stat(vm).out_binds > 5);
  for (uint64_t i = 0; i < 55; i++) PUT(va + i / 11 * MIB(4) + i % 11 * PAGE + 17, 1 + i);
  for (uint64_t i = 0; i < 55; i++) EQ(GET(va + i / 11 * MIB(4) + i % 11 * PAGE + 17), 1 + i);
  /* A later call of the batch finds the GPU's memory full: the earlier calls are rolled back. */
  ops[1] = ops[0];
  ops[1].addr = va + MIB(32);
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .addr = va, .bytes = PAGE, .count = 5, .stride = MIB(4)};
  binds = driver_stat(vm).out_binds;
  OK(softgpu_inject(dev, "PmaAllocPages", SOFTGPU_INJECT_MINE, 1, ~0ull, SOFTGPU_STATUS_NO_MEMORY, 0));
  err = vmem_batch(vm, ops, 2, NULL, 0, 0);
  OK(softgpu_inject_clear(dev));
  CHECK(err == 0 || err == -ENOMEM);
  printf("with no page for the GPU's memory: %d, after %llu calls\n", err,
         (unsigned long long)(driver_stat(vm).out_binds - binds));
  OK(vmem_check(vm));
  if (err)
    for (uint64_t i = 0; i < 55; i++) EQ(GET(va + i / 11 * MIB(4) + i % 11 * PAGE + 17), 1 + i);
  /* Unmapped units count like mapped units. */
  binds = driver_stat(vm).out_binds;
  ops[0] = (struct vmem_op){.op = VMEM_OP_UNMAP, .flags = VMEM_OP_HOLES, .addr = va, .bytes = 11 * PAGE, .count = 5,
                            .stride = MIB(4)};
  OK(vmem_batch(vm, ops, 1, NULL, 0, 0));
  CHECK(driver_stat(vm).out_binds - binds > 5);
  OK(vmem_close(vm));
}

/* A large page takes one page table entry if the reservation has VMEM_RESERVE_LARGE and is not sparse; otherwise 32. */
static void large_pages(void) {
  static const uint32_t flags[] = {0, VMEM_RESERVE_LARGE, VMEM_RESERVE_LARGE | VMEM_RESERVE_SPARSE};
  for (int i = 0; i < 3; i++) {
    vmem_t vm = open_vm(0);
    const bool large = flags[i] == VMEM_RESERVE_LARGE;
    /* A sparse slot gets its own table, which takes one more write to fill. */
    const uint64_t wanted = large ? 2 : flags[i] & VMEM_RESERVE_SPARSE ? 66 : 64;
    struct vmem_reserve_opts o = {.size = sizeof(o), .flags = flags[i]};
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = MIB(4), .page_size = MIB(2)};
    uint64_t va, writes;
    no_background(vm);
    OK(vMemReserve(vm, MIB(16), &o, &va));
    writes = driver_stat(vm).out_pte_writes;
    op.addr = va;
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    EQ(driver_stat(vm).out_pte_writes - writes, wanted);
    writes = driver_stat(vm).out_pte_writes;
    PUT(va + MIB(3), 7);
    op.op = VMEM_OP_UNMAP;
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    EQ(driver_stat(vm).out_pte_writes - writes, large ? 2 : 64);
    OK(vmem_close(vm));
  }
}

static struct softgpu_counters gpu_counters(void) {
  struct softgpu_counters c = {0};
  if (softgpu_counters(dev, 0, &c)) printf("no counters\n");
  return c;
}

/* A large page replaces small ones, and is unmapped as a whole. All other pages read as before at every moment, which
 * the software GPU checks. */
static void promoted(void) {
  vmem_t vm = open_vm(0);
  struct vmem_reserve_opts o = {.size = sizeof(o), .flags = VMEM_RESERVE_LARGE};
  struct vmem_op small = {.op = VMEM_OP_POPULATE, .bytes = MIB(6)}, copy = {.op = VMEM_OP_POPULATE, .flags = VMEM_OP_COPY,
                          .bytes = MIB(2), .page_size = MIB(2)};
  struct vmem_op ops[] = {{.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .bytes = MIB(2)},
                          {.op = VMEM_OP_UNMAP, .bytes = MIB(2)}};
  struct vmem_range_info range = {.size = sizeof(range)};
  struct softgpu_counters before = gpu_counters(), now;
  uint64_t va, writes, calls;
  no_background(vm);
  OK(vMemReserve(vm, MIB(32), &o, &va));
  small.addr = va;
  OK(vmem_batch(vm, &small, 1, NULL, 0, 0));
  for (uint64_t i = 0; i < 96; i++) PUT(va + i * PAGE + 9, i);
  copy.addr = ops[1].addr = va + MIB(16);
  copy.src = ops[0].addr = va + MIB(2);
  OK(vmem_batch(vm, &copy, 1, NULL, 0, 0));
  OK(vmem_gather(vm, copy.addr, MIB(2), 1, 0, &ops[0].handle));
  writes = driver_stat(vm).out_pte_writes;
  OK(vmem_batch(vm, ops, 2, NULL, 0, 0));
  CHECK(driver_stat(vm).out_pte_writes - writes < 32); /* not small ones again */
  OK(vmem_range_query(vm, va + MIB(2) + PAGE, &range));
  CHECK(range.flags & VMEM_RANGE_LARGE);
  for (uint64_t i = 0; i < 96; i++) EQ(GET(va + i * PAGE + 9), i);
  EQ(vMemUnmap(vm, va + MIB(2) + PAGE, PAGE), -EINVAL);
  OK(vmem_join(vm, va, MIB(6), &calls));
  OK(vMemUnmap(vm, va + MIB(1), MIB(4))); /* with some small pages on both sides */
  for (uint64_t i = 0; i < 16; i++) EQ(GET(va + i * PAGE + 9), i);
  for (uint64_t i = 80; i < 96; i++) EQ(GET(va + i * PAGE + 9), i);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  now = gpu_counters();
  CHECK(now.reader_binds > before.reader_binds && now.reader_units > before.reader_units);
  EQ(now.errors, before.errors);
}

/* More addresses than one call of the driver accepts. */
static void wide_sparse(void) {
  vmem_t vm = open_vm(0);
  struct vmem_reserve_opts o = {.size = sizeof(o), .flags = VMEM_RESERVE_SPARSE};
  const uint64_t bytes = 130ull << 30;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
  uint64_t va;
  CHECK(bytes > (uint64_t)state_of(vm)->query.out_max_bind_units << UVM_VMEM_UNIT_SHIFT);
  OK(vMemReserve(vm, bytes, &o, &va));
  for (uint64_t at = 0; at < bytes; at += bytes / 13 & ~(PAGE - 1)) EQ(sparse_word(va + at), 0);
  EQ(sparse_word(va + bytes - 8), 0);
  op.addr = va + bytes - PAGE;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  PUT(va + bytes - 1, 5);
  EQ(GET(va + bytes - 1), 5);
  EQ(sparse_word(va + bytes - PAGE - 8), 0);
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_close(vm));
}

/* Moving pages of two tensors takes one call. */
static void a_move_is_one_call(void) {
  vmem_t vm = open_vm(0);
  struct vmem_op copy = {.op = VMEM_OP_POPULATE, .bytes = 3 * PAGE, .count = 2, .stride = MIB(4), .src_stride = MIB(4)};
  struct vmem_op ops[] = {
      {.op = VMEM_OP_MAP, .flags = VMEM_OP_REPLACE | VMEM_OP_CONSUME, .bytes = 3 * PAGE, .count = 2, .stride = MIB(4)},
      {.op = VMEM_OP_UNMAP, .bytes = 3 * PAGE, .count = 2, .stride = MIB(4)},
  };
  struct uvm_vmem_stat before, now;
  uint64_t va;
  no_background(vm);
  OK(vMemReserve(vm, MIB(32), NULL, &va));
  ops[0].addr = copy.src = va;
  ops[1].addr = va + MIB(16);
  copy.addr = va;
  OK(vmem_batch(vm, &copy, 1, NULL, 0, 0));
  PUT(va + MIB(4) + PAGE, 9);
  copy.flags = VMEM_OP_COPY;
  copy.addr = va + MIB(16);
  OK(vmem_batch(vm, &copy, 1, NULL, 0, 0));
  OK(vmem_gather(vm, va + MIB(16), 3 * PAGE, 2, MIB(4), &ops[0].handle));
  before = driver_stat(vm);
  OK(vmem_batch(vm, ops, 2, NULL, 0, 0));
  now = driver_stat(vm);
  EQ(now.out_binds - before.out_binds, 1);
  EQ(now.out_pushes - before.out_pushes, 1);
  EQ(now.out_invalidates - before.out_invalidates, 1);
  EQ(now.out_pte_writes - before.out_pte_writes, 2 * 2 * 3);
  EQ(GET(va + MIB(4) + PAGE), 9);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* One call per reservation: the kernel accepts no batch over several. */
static void several_reservations(void) {
  vmem_t vm = open_vm(0);
  uint64_t va[3];
  struct vmem_op ops[6];
  struct uvm_vmem_stat before;
  for (int i = 0; i < 3; i++) OK(vMemReserve(vm, MIB(4), NULL, &va[i]));
  for (int i = 0; i < 6; i++)
    ops[i] = (struct vmem_op){.op = VMEM_OP_POPULATE, .addr = va[i % 3] + (uint64_t)i * 2 * PAGE, .bytes = PAGE};
  before = driver_stat(vm);
  OK(vmem_batch(vm, ops, 6, NULL, 0, 0));
  EQ(driver_stat(vm).out_binds - before.out_binds, 3);
  for (int i = 0; i < 6; i++) PUT(va[i % 3] + (uint64_t)i * 2 * PAGE, 50 + i);
  for (int i = 0; i < 6; i++) EQ(GET(va[i % 3] + (uint64_t)i * 2 * PAGE), 50 + i);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

/* The GPU fails during a batch: the addresses and pages of that call are quarantined until close. */
static void gpu_fails(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_error e = {.size = sizeof(e)};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE, .count = 4, .stride = MIB(2)};
  OK(vMemReserve(vm, MIB(16), NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  op.addr = va + PAGE;
  OK(softgpu_inject(dev, "push", 0, 1, 1, 0, 0));
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOTRECOVERABLE);
  OK(vmem_get_error(&e));
  printf("%s\n", e.text);
  OK(softgpu_inject_clear(dev));
  CHECK(e.addr >= va && e.bytes);
  EQ(stats_of(vm).quarantined_bytes, 4 * PAGE);
  EQ(vMemFree(vm, va, VMEM_FREE_UNMAP), -ENOTRECOVERABLE);
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

static int limit_of_gpu_memory(const char *mb) {
  FILE *file = fopen("/sys/module/nvidia_uvm/parameters/uvm_vmem_gpu_limit_mb", "w");
  if (!file) return -errno;
  fputs(mb, file);
  return fclose(file) ? -errno : 0;
}

static void no_memory(void) {
  vmem_t vm = open_vm(0);
  struct vmem_error e = {.size = sizeof(e)};
  vmem_handle h;
  uint64_t before = gpu_free(vm);
  EQ(vMemCreate(vm, GIB(4), NULL, &h), -ENOMEM);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "4294967296 bytes exceed the total memory of 268435456 bytes"));
  EQ(vMemCreate(vm, MIB(256), NULL, &h), -ENOMEM);
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "a limit on pinned pages or page tables is reached, by default 15/16 of the GPU's memory"));
  OK(limit_of_gpu_memory("0"));
  EQ(vMemCreate(vm, MIB(256), NULL, &h), -ENOMEM);
  OK(limit_of_gpu_memory("-1"));
  OK(vmem_get_error(&e));
  CHECK(strstr(e.text, "no physical memory left"));
  CHECK(strstr(e.text, "CREATE of "));
  CHECK(e.bytes > 0);
  EQ(stats_of(vm).slab_bytes, 0);
  EQ(gpu_free(vm), before);
  OK(vMemCreate(vm, MIB(4), NULL, &h));
  OK(vmem_close(vm));
}

/* Pages of 2 MiB, and a reservation that is not a multiple of them. */
static void granules(void) {
  static const uint64_t sizes[] = {KIB(64), KIB(128), KIB(256), MIB(2)};
  for (int i = 0; i < 4; i++) {
    vmem_t vm = open_vm(sizes[i]);
    uint64_t va, n = sizes[i];
    struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = n, .count = 3, .stride = 2 * n};
    OK(vMemReserve(vm, 7 * n, NULL, &va));
    op.addr = va;
    OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
    for (int k = 0; k < 3; k++) PUT(va + 2 * (uint64_t)k * n + n - 1, 1 + k);
    for (int k = 0; k < 3; k++) EQ(GET(va + 2 * (uint64_t)k * n + n - 1), 1 + k);
    CHECK(touch(vm, va + n, false) < 0);
    EQ(vMemUnmap(vm, va + n, n), -EFAULT);
    OK(vMemUnmap(vm, va + 2 * n, n));
    CHECK(touch(vm, va + 2 * n, false) < 0);
    OK(vmem_check(vm));
    OK(vmem_close(vm));
  }
}

static void pages_in_host_memory(void) {
  vmem_t vm = open_vm(0);
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_create_opts o = {.size = sizeof(o), .location = VMEM_HOST};
  uint64_t va, before;
  vmem_handle h;
  OK(vmem_query(vm, &info));
  if (!(info.caps & VMEM_CAP_HOST_PAGES)) {
    printf("the driver has no pages in host memory\n");
    OK(vmem_close(vm));
    return;
  }
  before = gpu_free(vm);
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, &o, &h));
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
  EQ(driver_stat(vm).out_host_bytes, info.slab_size);
  PUT(va + PAGE, 9);
  EQ(GET(va + PAGE), 9);
  EQ(GET(va + 3 * PAGE), 0);
  CHECK(before - gpu_free(vm) < MIB(4)); /* at most page tables */
  OK(vmem_close(vm));
}

static void forked_child(void) {
  vmem_t vm = open_vm(0);
  uint64_t va;
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
  int status = 0;
  pid_t child;
  OK(vMemReserve(vm, MIB(4), NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  PUT(va, 5);
  child = fork();
  if (!child) {
    vmem_t mine = 0;
    uint64_t own;
    struct uvm_vmem_stat s = {.size = sizeof(s)};
    bool good = vMemUnmap(vm, va, PAGE) == -ECHILD && ioctl(3, UVM_VMEM_STAT, &s) < 0;
    mine = open_vm(0); /* its own context works */
    good = good && mine && !vMemReserve(mine, MIB(4), NULL, &own);
    op.addr = own;
    good = good && !vmem_batch(mine, &op, 1, NULL, 0, 0) && get_byte(mine, own) == 0 && put_byte(mine, own, 7);
    good = good && !vmem_close(mine);
    _exit(good ? 0 : 1);
  }
  EQ(waitpid(child, &status, 0), child);
  EQ(status, 0);
  EQ(GET(va), 5);
  OK(vmem_close(vm));
}

/* One reservation on two GPUs: pages of the first seen by the second, pages in the second seen by the first. */
static void two_gpus(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .num_devices = 2, .devices = {0, 1}};
  struct vmem_info info = {.size = sizeof(info)};
  struct vmem_create_opts peer = {.size = sizeof(peer), .location = VMEM_PEER, .device = 1};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE, .count = 4, .stride = MIB(2)};
  struct softgpu_space second = {.gpu = 1};
  vmem_t vm;
  vmem_handle h;
  uint64_t va, value = 0;
  OK(open_opts(&o, &vm));
  OK(vmem_query(vm, &info));
  EQ(info.num_devices, 2);
  CHECK(memcmp(info.uuid[0], info.uuid[1], 16));
  CHECK(info.caps & VMEM_CAP_PEER);
  second.client = state_of(vm)->nv.rm.client;
  second.vaspace = state_of(vm)->nv.devices[1].va_space;
  OK(vMemReserve(vm, MIB(16), NULL, &va));
  op.addr = va;
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_fill(vm, va, PAGE, 0x42));
  OK(softgpu_peek(dev, second, va, &value));
  EQ(value, 0x4242424242424242);
  OK(vMemCreate(vm, 2 * PAGE, &peer, &h));
  OK(vMemMap(vm, va + PAGE, 2 * PAGE, h, 0, 0));
  EQ(GET(va + PAGE), 0);
  PUT(va + 2 * PAGE, 0x77);
  OK(softgpu_peek(dev, second, va + 2 * PAGE, &value));
  EQ(value, 0x77);
  OK(vMemRelease(vm, h));
  EQ(softgpu_peek(dev, second, va + 2 * PAGE, &value), -EFAULT);
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_close(vm));
}

static int unpatched(void) {
  struct vmem_probe_info p = {.size = sizeof(p)};
  struct vmem_open_opts o = {.size = sizeof(o)};
  struct vmem_info info = {.size = sizeof(info)};
  vmem_t vm;
  if (vmem_probe("uvm", 0, 0, &p)) return 1;
  printf("%s\n", p.reason);
  if (p.usable || p.error != -ENODEV || !strstr(p.reason, "is not the patched one")) return 1;
  if (vmem_open(&o, &vm) || vmem_query(vm, &info)) return 1;
  printf("auto takes %s: %s\n", info.backend, info.why);
  return strcmp(info.backend, "host") || !strstr(info.why, "uvm: the loaded nvidia-uvm is not the patched one");
}

int main(int argc, char **argv) {
  static const struct test tests[] = {TEST(probing),      TEST(automatic),   TEST(growth_is_one_call), TEST(everything_goes_back),
                                      TEST(small_limits), TEST(large_pages), TEST(promoted), TEST(a_move_is_one_call),
                                      TEST(several_reservations), TEST(no_memory), TEST(granules),
                                      TEST(pages_in_host_memory), TEST(forked_child)};
  static const struct test failing[] = {TEST(gpu_fails)}, two[] = {TEST(two_gpus)}, wide[] = {TEST(wide_sparse)};
  if (argc > 1 && !strcmp(argv[1], "unpatched")) return unpatched();
  setenv("VMEM_TEST_BACKEND", "uvm", 1);
  if ((dev = softgpu_open()) < 0) {
    printf("no /dev/softgpu\n");
    return 77;
  }
  if (argc > 1 && !strcmp(argv[1], "gpu-fails")) return run_tests(failing, 1);
  if (argc > 1 && !strcmp(argv[1], "two-gpus")) return run_tests(two, 1);
  if (argc > 1 && !strcmp(argv[1], "wide")) return run_tests(wide, 1);
  return run_tests(tests, sizeof(tests) / sizeof(tests[0]));
}
