/* SPDX-License-Identifier: MIT */
/* Description: the test of a back end when it is opened; `auto` skips a back end that fails it; failures in vMemFree
 * and in `room`. */
#include "api/api.h"
#include "check.h"

/* A copy of the back end host with one fault. */
enum fault { NONE, LOST_WRITES, WRONG_PAGE, NO_MAP, LOST_MAP, NO_UNMAP, NO_SLAB, NO_DESTROY, NO_RESERVE, NO_READ };

static enum fault fault;
static unsigned opened, closed, reserved, slabs, mapped, map_calls;

#define HOST vm_backend_host

static void odd_close(void *be) {
  closed++;
  HOST.close(be);
}

static int odd_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                       uint64_t *priv) {
  int err =
      fault == NO_RESERVE ? vm_fail(-ENOMEM, "no addresses") : HOST.reserve(be, bytes, align, flags, addr, kind, priv);
  if (!err) reserved++;
  return err;
}

/* If true, vMemFree frees the reservation but fails to free its addresses. */
static bool keeps_addresses;

static int odd_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone) {
  if (keeps_addresses) {
    HOST.unmap(be, addr, bytes, false);
    *gone = true;
    return vm_fail_at(-EIO, addr, bytes, 0, "the addresses stay");
  }
  reserved--;
  return HOST.unreserve(be, addr, bytes, priv, gone);
}

static int odd_slab_create(void *be, uint64_t bytes, uint64_t page, uint32_t location, int32_t device, uint64_t *slab) {
  int err =
      fault == NO_SLAB ? vm_fail(-ENOMEM, "no memory") : HOST.slab_create(be, bytes, page, location, device, slab);
  if (!err) slabs++;
  return err;
}

static int odd_slab_destroy(void *be, uint64_t slab, uint64_t bytes) {
  slabs--;
  return fault == NO_DESTROY ? vm_fail(-EIO, "it is not given back") : HOST.slab_destroy(be, slab, bytes);
}

static int odd_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                   bool sparse) {
  map_calls++;
  if (fault == NO_MAP || (fault == LOST_MAP && mapped))
    return vm_fail(fault == NO_MAP ? -EIO : -ENOTRECOVERABLE, "it does not map");
  /* A second mapping maps another page. */
  if (fault == WRONG_PAGE && mapped) offset -= bytes;
  mapped++;
  return HOST.map(be, addr, bytes, slab, offset, flags, sparse);
}

static int odd_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  mapped--;
  return fault == NO_UNMAP ? vm_fail(-EIO, "it does not unmap") : HOST.unmap(be, addr, bytes, sparse);
}

static int odd_fill(void *be, const struct vm_be_range *r, size_t n, uint8_t value, const vm_event *after,
                    size_t num_after, vm_event *done) {
  if (fault == LOST_WRITES) value = 0x11;
  return HOST.fill(be, r, n, value, after, num_after, done);
}

static int odd_read(void *be, void *dst, uint64_t addr, uint64_t bytes) {
  return fault == NO_READ ? vm_fail_at(-EIO, addr, bytes, 0, "the device is gone") : HOST.read(be, dst, addr, bytes);
}

/* refusals: how many more times `room` refuses */
static unsigned refusals, recounts;
static vmem_t recounted;

static int odd_room(void *be, const struct vm_be_load *load) {
  if (!refusals) return HOST.room(be, load);
  refusals--;
  return vm_fail(-ENOSPC, "no room");
}

/* Counting is slow, so it must run without the context's lock: with the lock held, stats_of would deadlock. */
static void odd_recount(void *be, uint64_t segments) {
  recounts++;
  stats_of(recounted);
  HOST.recount(be, segments);
}

/* Copies host's table, which is complete only at run time, and replaces some of its functions by the odd ones. */
static int odd_open(const struct vmem_open_opts *o, struct vm_be_info *info, void **be) {
  static struct vm_backend table;
  int err;
  table = HOST;
  table.name = "odd";
  table.close = odd_close;
  table.reserve = odd_reserve;
  table.unreserve = odd_unreserve;
  table.slab_create = odd_slab_create;
  table.slab_destroy = odd_slab_destroy;
  table.map = odd_map;
  table.unmap = odd_unmap;
  table.fill = odd_fill;
  table.read = odd_read;
  table.room = odd_room;
  table.recount = odd_recount;
  err = HOST.open(o, info, be);
  if (!err) opened++;
  info->table = &table;
  return err;
}

static const struct vm_backend odd = {.name = "odd", .open = odd_open};
const struct vm_backend *const vm_backends[] = {&odd, &vm_backend_host, NULL};

static const struct {
  enum fault fault;
  int error;
  const char *text;
} faults[] = {
    {LOST_WRITES, -EIO, "filled with 0xa5, reads as 0x11"},
    {WRONG_PAGE, -EIO, "filled with 0xa5, reads as 0x00"},
    {NO_MAP, -EIO, "it does not map"},
    {LOST_MAP, -EIO, "it does not map"},
    {NO_UNMAP, -EIO, "it does not unmap"},
    {NO_SLAB, -ENOMEM, "no memory"},
    {NO_DESTROY, -EIO, "it is not given back"},
    {NO_RESERVE, -ENOMEM, "no addresses"},
    {NO_READ, -EIO, "the device is gone"},
};

static void start(enum fault f) {
  fault = f;
  opened = closed = reserved = slabs = mapped = map_calls = 0;
}

static int open_named(const char *name, vmem_t *vm) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = name};
  return vmem_open(&o, vm);
}

static void each_failure_is_named_and_leaves_nothing(void) {
  for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
    struct vmem_error e = {.size = sizeof(e)};
    vmem_t vm = 77;
    start(faults[i].fault);
    EQ(open_named("odd", &vm), faults[i].error);
    EQ(vm, 77);
    OK(vmem_get_error(&e));
    EQ(e.code, faults[i].error);
    CHECK(strstr(e.text, "back end odd opened, but failed its opening test"));
    CHECK(strstr(e.text, faults[i].text));
    EQ(opened, 1);
    EQ(closed, 1);
    EQ(reserved, 0);
    EQ(slabs, 0);
    EQ(mapped, 0);
  }
}

static void the_byte_that_differs_is_named(void) {
  struct vmem_error e = {.size = sizeof(e)};
  char at[32];
  vmem_t vm;
  start(LOST_WRITES);
  EQ(open_named("odd", &vm), -EIO);
  OK(vmem_get_error(&e));
  CHECK(e.addr);
  EQ(e.bytes, 1);
  snprintf(at, sizeof(at), "0x%llx", (unsigned long long)e.addr);
  CHECK(strstr(e.text, at));
}

static void auto_passes_it_over(void) {
  for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
    struct vmem_info info = {.size = sizeof(info)};
    vmem_t vm;
    start(faults[i].fault);
    OK(open_named("auto", &vm));
    OK(vmem_query(vm, &info));
    EQ(strcmp(info.backend, "host"), 0);
    CHECK(strstr(info.why, "odd: "));
    CHECK(strstr(info.why, faults[i].text));
    EQ(opened, closed);
    OK(vmem_close(vm));
  }
}

static void probe_says_the_same(void) {
  for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
    struct vmem_probe_info p = {.size = sizeof(p)};
    start(faults[i].fault);
    OK(vmem_probe("odd", 0, 0, &p));
    EQ(p.usable, 0);
    EQ(p.error, faults[i].error);
    CHECK(strstr(p.reason, faults[i].text));
    EQ(opened, closed);
  }
  start(NONE);
  struct vmem_probe_info p = {.size = sizeof(p)};
  OK(vmem_probe("odd", 0, 0, &p));
  EQ(p.usable, 1);
  CHECK(strstr(p.reason, "was mapped, written, read and unmapped"));
  EQ(opened, 1);
  EQ(closed, 1);
}

/* The opening test changes nothing that the context's user can see, and does not count towards limits. */
static void opening_test_leaves_no_trace(void) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "odd", .mem_limit = PAGE, .slab_size = PAGE};
  struct vmem_stats s;
  uint64_t va;
  vmem_handle h;
  vmem_t vm;
  start(NONE);
  OK(vmem_open(&o, &vm));
  EQ(map_calls, 2);
  EQ(reserved + slabs + mapped, 0);
  s = stats_of(vm);
  EQ(s.map_calls + s.unmap_calls + s.slab_calls + s.fill_calls + s.driver_ns, 0);
  EQ(s.slab_bytes + s.slabs + s.free_bytes + s.used_bytes + s.peak_used_bytes + s.peak_mapped_bytes, 0);
  EQ(s.reservations + s.reserved_bytes + s.segments + s.mappings, 0);
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, va, PAGE, h, 0, 0));
  EQ(vMemCreate(vm, PAGE, NULL, &h), -ENOMEM);
  OK(vmem_close(vm));
  EQ(reserved + slabs, 0);
}

static void each_granule_is_tested(void) {
  for (uint64_t granule = KIB(4); granule <= MIB(2); granule <<= 1) {
    struct vmem_open_opts o = {.size = sizeof(o), .backend = "odd", .granule = granule};
    vmem_t vm;
    start(LOST_WRITES);
    EQ(vmem_open(&o, &vm), -EIO);
    start(NONE);
    OK(vmem_open(&o, &vm));
    OK(vmem_close(vm));
  }
}

/* ---- vMemFree when only the addresses cannot be freed ------------------------------------------ */

static void a_range_that_is_gone_shows_no_mappings(void) {
  struct vmem_range_info r = {.size = sizeof(r)};
  struct vmem_stats s;
  uint64_t va, other;
  vmem_handle h;
  vmem_t vm;
  start(NONE);
  OK(open_named("odd", &vm));
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemReserve(vm, MIB(2), NULL, &other));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
  OK(vMemMap(vm, other, PAGE, h, 0, 0));
  keeps_addresses = true;
  EQ(vMemFree(vm, va, VMEM_FREE_UNMAP), -EIO);
  CHECK(strstr(vmem_last_error(), "the addresses stay"));
  OK(vmem_check(vm));
  s = stats_of(vm);
  EQ(s.mapped_bytes, PAGE);
  EQ(s.reservations, 2);
  OK(vmem_range_query(vm, va + PAGE, &r));
  EQ(r.base, va);
  EQ(r.mapped_bytes, 0);
  EQ(r.flags & (VMEM_RANGE_MAPPED | VMEM_RANGE_BUSY), 0);
  /* Nothing can be mapped there any more, and trying changes nothing. */
  EQ(vMemMap(vm, va, PAGE, h, 0, 0), -ENXIO);
  CHECK(strstr(vmem_last_error(), "vMemFree"));
  EQ(vMemUnmap(vm, va, PAGE), -ENXIO);
  EQ(vmem_fill(vm, va, PAGE, 1), -ENXIO);
  EQ(vMemFree(vm, va, 0), -EIO);
  /* The mapping in the lost range no longer counts: one is left, so releasing the handle is unambiguous. */
  OK(vMemRelease(vm, h));
  keeps_addresses = false;
  OK(vMemFree(vm, va, 0));
  EQ(vmem_range_query(vm, va, &r), -ENXIO);
  OK(vMemFree(vm, other, 0));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
  EQ(reserved + slabs, 0);
}

static void a_range_that_is_not_gone_keeps_its_mappings(void) {
  struct vmem_range_info r = {.size = sizeof(r)};
  uint64_t va;
  vmem_handle h;
  vmem_t vm;
  start(NONE);
  OK(open_named("odd", &vm));
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, PAGE, NULL, &h));
  OK(vMemMap(vm, va, PAGE, h, 0, 0));
  OK(vmem_fill(vm, va, PAGE, 0x77));
  OK(vmem_inject(vm, VMEM_INJECT_RESERVE, 0, 1, EIO));
  EQ(vMemFree(vm, va, VMEM_FREE_UNMAP), -EIO);
  OK(vmem_range_query(vm, va, &r));
  EQ(r.mapped_bytes, PAGE);
  EQ(r.flags & (VMEM_RANGE_MAPPED | VMEM_RANGE_BUSY), VMEM_RANGE_MAPPED);
  EQ(BYTE(va), 0x77);
  OK(vmem_check(vm));
  OK(vMemFree(vm, va, VMEM_FREE_UNMAP));
  OK(vmem_close(vm));
}

/* ---- free mappings ----------------------------------------------------------------------------- */

static void a_refusal_is_counted_again_without_the_lock(void) {
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
  struct vmem_stats before, after;
  uint64_t va;
  vmem_handle h;
  vmem_t vm;
  start(NONE);
  OK(open_named("odd", &vm));
  recounted = vm;
  recounts = 0;
  OK(vMemReserve(vm, MIB(2), NULL, &va));
  OK(vMemCreate(vm, 4 * PAGE, NULL, &h));
  refusals = 1;
  OK(vMemMap(vm, va, 4 * PAGE, h, 0, 0));
  EQ(recounts, 1);
  refusals = 1;
  OK(vMemUnmap(vm, va + PAGE, PAGE)); /* a piece more */
  EQ(recounts, 2);
  before = stats_of(vm);
  op.addr = va + MIB(1);
  refusals = 2;
  EQ(vmem_batch(vm, &op, 1, NULL, 0, 0), -ENOSPC);
  EQ(recounts, 3);
  after = stats_of(vm);
  CHECK(same_state(&before, &after));
  OK(vmem_batch(vm, &op, 1, NULL, 0, 0));
  OK(vmem_check(vm));
  OK(vmem_close(vm));
}

MAIN(TEST(each_failure_is_named_and_leaves_nothing), TEST(the_byte_that_differs_is_named), TEST(auto_passes_it_over),
     TEST(probe_says_the_same), TEST(opening_test_leaves_no_trace), TEST(each_granule_is_tested),
     TEST(a_range_that_is_gone_shows_no_mappings), TEST(a_range_that_is_not_gone_keeps_its_mappings),
     TEST(a_refusal_is_counted_again_without_the_lock))
