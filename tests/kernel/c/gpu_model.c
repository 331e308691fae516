// SPDX-License-Identifier: MIT
// Description: the software GPU itself: what the other tests rely on to find errors. Only stock calls of UVM.
#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "kcheck.h"
#include "softgpu_user.h"

#define BASE 0x7d0000000000ull
#define FRAME SOFTGPU_FRAME_SIZE

static struct softgpu_client C;
static struct softgpu_counters before;

static int open_client(unsigned gpus) {
  int result = softgpu_client_open(&C, gpus);

  if (!result)
    result = softgpu_counters(C.dev, 0, &before);
  if (!result)
    result = softgpu_uvm_create_external(&C, BASE, MIB(64));
  return result;
}

static struct softgpu_counters since(void) {
  struct softgpu_counters now;

  softgpu_counters(C.dev, 0, &now);
  return softgpu_counters_since(&before, &now);
}

// The kinds of pages that the resource manager hands out: map, write, read back and unmap each.
static void pages(void) {
  static const struct {
    uint64_t page, size;
    unsigned flags;
  } kinds[] = {{MIB(2), MIB(4), 0}, {KIB(64), MIB(2), 0}, {KIB(4), KIB(512), SOFTGPU_ALLOC_SYSMEM}};

  OK(open_client(1));
  for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
    uint64_t va = BASE + k * MIB(16), entries = kinds[k].size / kinds[k].page;
    struct softgpu_alloc memory;
    struct softgpu_xlate x;
    struct softgpu_scan scan;
    struct softgpu_frame frame;

    OK(softgpu_alloc(C.dev, 0, kinds[k].size, kinds[k].page, kinds[k].flags, &memory));
    OK(softgpu_uvm_map_external(&C, 0, va, kinds[k].size, 0, &memory, false));
    EQ(since().pte_writes, entries);
    EQ(since().pte_changes, entries);
    OK(softgpu_counters(C.dev, 0, &before));
    OK(softgpu_xlate(C.dev, C.space[0], va + 0x1008, &x));
    EQ(x.out_page_size, kinds[k].page);
    OK(softgpu_scan(C.dev, C.space[0], va, kinds[k].size, &scan));
    EQ(scan.out_bytes, kinds[k].size);
    EQ(scan.out_2m + scan.out_64k + scan.out_4k, entries);
    OK(softgpu_scan(C.dev, C.space[0], va + kinds[k].size, kinds[k].size, &scan));
    EQ(scan.out_bytes, 0);
    OK(softgpu_fill(C.dev, C.space[0], va, kinds[k].size, 7 * k, 3));
    OK(softgpu_check(C.dev, C.space[0], va, kinds[k].size, 7 * k, 3, NULL));
    if (!kinds[k].flags) {
      EQ(x.out_aperture, SOFTGPU_APERTURE_VID);
      EQ(x.out_pa, memory.out_pa + 0x1008);
      OK(softgpu_frame(C.dev, 0, memory.out_pa, &frame));
      EQ(frame.out_mappings, 1);
      EQ(frame.out_allocated, 1);
      OK(softgpu_check_phys(C.dev, 0, memory.out_pa, KIB(4), 7 * k, 3));
    } else {
      EQ(x.out_aperture, SOFTGPU_APERTURE_SYS);
    }
    OK(softgpu_uvm_unmap_external(&C, 0, va, kinds[k].size));
    EQ(since().pte_writes, entries);
    EQ(softgpu_check(C.dev, C.space[0], va, 8, 0, 0, NULL), -EFAULT);
    OK(softgpu_free(C.dev, memory.out_client, memory.out_handle));
    if (!kinds[k].flags) {
      OK(softgpu_frame(C.dev, 0, memory.out_pa, &frame));
      EQ(frame.out_allocated, 0);
      EQ(frame.out_state, SOFTGPU_FRAME_POISON);
      EQ(frame.out_mappings, 0);
    }
    OK(softgpu_verify(C.dev));
    OK(softgpu_counters(C.dev, 0, &before));
  }
  EQ(before.stale, 0);
  EQ(before.errors, 0);
  softgpu_client_close(&C);
}

// Memory starts as poison. Filled memory takes no guest memory, only data does.
static void contents(void) {
  struct softgpu_alloc memory;
  struct softgpu_frame frame;
  uint64_t value;

  OK(open_client(1));
  OK(softgpu_alloc(C.dev, 0, MIB(4), MIB(2), 0, &memory));
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(4), 0, &memory, false));
  OK(softgpu_frame(C.dev, 0, memory.out_pa, &frame));
  EQ(frame.out_state, SOFTGPU_FRAME_POISON);
  OK(softgpu_peek(C.dev, C.space[0], BASE + 24, &value));
  EQ(value, SOFTGPU_POISON_WORD);
  EQ(since().poison_reads, 1);
  OK(softgpu_fill(C.dev, C.space[0], BASE, MIB(4), 0x1122334455667788, 0));
  OK(softgpu_frame(C.dev, 0, memory.out_pa + 5 * FRAME, &frame));
  EQ(frame.out_state, SOFTGPU_FRAME_UNIFORM);
  EQ(frame.out_backed, 0);
  OK(softgpu_check(C.dev, C.space[0], BASE, MIB(4), 0x1122334455667788, 0, NULL));
  OK(softgpu_poke(C.dev, C.space[0], BASE + 5 * FRAME + 16, 99));
  OK(softgpu_frame(C.dev, 0, memory.out_pa + 5 * FRAME, &frame));
  EQ(frame.out_state, SOFTGPU_FRAME_DATA);
  EQ(frame.out_backed, 4);
  OK(softgpu_peek(C.dev, C.space[0], BASE + 5 * FRAME + 24, &value));
  EQ(value, 0x1122334455667788);
  unsigned char bytes[3] = {1, 2, 3}, back[5];
  OK(softgpu_write(C.dev, C.space[0], BASE + KIB(4) - 1, bytes, 3, NULL));
  OK(softgpu_read(C.dev, C.space[0], BASE + KIB(4) - 2, back, 5, NULL));
  EQ(memcmp(back + 1, bytes, 3), 0);
  EQ(back[0], 0x22);
  EQ(back[4], 0x66);
  EQ(since().poison_reads, 1);
  OK(softgpu_uvm_free(&C, BASE, MIB(64)));
  softgpu_client_close(&C);
}

struct call {
  uint64_t va, size;
  const struct softgpu_alloc *memory; // map; NULL: unmap
  int result;
};

static void *in_background(void *argument) {
  struct call *c = argument;

  c->result = c->memory ? softgpu_uvm_map_external(&C, 0, c->va, c->size, 0, c->memory, false)
                        : softgpu_uvm_unmap_external(&C, 0, c->va, c->size);
  return NULL;
}

static void fault_is(unsigned kind, uint64_t address) {
  struct softgpu_faults faults;

  OK(softgpu_faults(C.dev, 0, &faults));
  CHECK(faults.out_count >= 1);
  EQ(faults.out[0].kind, kind);
  EQ(faults.out[0].address, address);
}

// The page tables' and the TLB's translation while a call is stopped before its invalidate.
struct between {
  int xlate, peek;
  struct softgpu_xlate x;
  uint64_t value, stale;
};

static struct between look_between(struct call *call) {
  struct between b = {.xlate = -1};
  pthread_t thread;

  if (softgpu_hold(C.dev, 0, SOFTGPU_HOLD_INVALIDATE) || pthread_create(&thread, NULL, in_background, call)) return b;
  if (!softgpu_hold_wait(C.dev, 0, 20000)) {
    b.xlate = softgpu_xlate(C.dev, C.space[0], call->va, &b.x);
    b.peek = softgpu_peek(C.dev, C.space[0], call->va, &b.value);
    b.stale = since().stale;
  }
  softgpu_hold(C.dev, 0, SOFTGPU_HOLD_RELEASE);
  pthread_join(thread, NULL);
  return b;
}

// Between the write of an entry and its invalidate the TLB holds the old state: no translation yet, or the old page.
static void stale(void) {
  const uint64_t va = BASE + MIB(1);
  struct softgpu_alloc keep, memory;
  struct call call = {.va = va, .size = MIB(1)};
  struct softgpu_faults none;
  struct between b;
  uint64_t value;

  OK(open_client(1));
  OK(softgpu_faults(C.dev, 0, &none));
  OK(softgpu_alloc(C.dev, 0, MIB(1), KIB(64), 0, &keep));
  OK(softgpu_alloc(C.dev, 0, MIB(1), KIB(64), 0, &memory));
  // the table stays, so that only its entries change below
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(1), 0, &keep, false));
  EQ(softgpu_peek(C.dev, C.space[0], va, &value), -EFAULT);
  fault_is(SOFTGPU_FAULT_MISSING, va);

  call.memory = &memory;
  b = look_between(&call);
  OK(call.result);
  OK(b.xlate);
  EQ(b.x.out_valid, 1);
  EQ(b.peek, -EFAULT);
  EQ(b.stale, 1);
  fault_is(SOFTGPU_FAULT_STALE, va);
  OK(softgpu_poke(C.dev, C.space[0], va, 4711));
  EQ(since().stale, 1);

  call.memory = NULL;
  b = look_between(&call);
  OK(call.result);
  OK(b.xlate);
  EQ(b.x.out_valid, 0);
  OK(b.peek);
  EQ(b.value, 4711); // the old page
  EQ(b.stale, 2);
  EQ(softgpu_peek(C.dev, C.space[0], va, &value), -EFAULT);
  EQ(since().stale, 2);
  EQ(since().errors, 0);
  softgpu_client_close(&C);
}

static void *close_after_wait(void *argument) {
  int dev = *(int *)argument;

  softgpu_hold_wait(dev, 0, 20000);
  close(dev);
  return NULL;
}

// A hold ends when the descriptor that requested it is closed.
static void hold_ends(void) {
  struct softgpu_alloc memory;
  pthread_t thread;

  OK(open_client(1));
  OK(softgpu_alloc(C.dev, 0, MIB(2), KIB(64), 0, &memory));
  for (unsigned op = SOFTGPU_HOLD_NOW; op <= SOFTGPU_HOLD_PUSH; op++) {
    int dev = softgpu_open();
    CHECK(dev >= 0);
    EQ(softgpu_hold_wait(dev, 0, 1), -ETIMEDOUT);
    OK(softgpu_hold(dev, 0, op));
    CHECK(!pthread_create(&thread, NULL, close_after_wait, &dev));
    OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false));
    pthread_join(thread, NULL);
    OK(softgpu_uvm_unmap_external(&C, 0, BASE, MIB(2)));
  }
  softgpu_client_close(&C);
}

static void read_only(void) {
  struct softgpu_alloc memory;
  struct softgpu_xlate x;
  uint64_t value;

  OK(open_client(1));
  OK(softgpu_alloc(C.dev, 0, MIB(2), KIB(64), 0, &memory));
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, true));
  OK(softgpu_xlate(C.dev, C.space[0], BASE, &x));
  EQ(x.out_read_only, 1);
  struct softgpu_faults none;
  OK(softgpu_peek(C.dev, C.space[0], BASE, &value));
  OK(softgpu_faults(C.dev, 0, &none));
  EQ(softgpu_poke(C.dev, C.space[0], BASE, 1), -EROFS);
  fault_is(SOFTGPU_FAULT_READ_ONLY, BASE);
  OK(softgpu_uvm_unmap_external(&C, 0, BASE, MIB(2)));
  OK(softgpu_uvm_map_sparse(&C, 0, BASE, MIB(2)));
  OK(softgpu_xlate(C.dev, C.space[0], BASE, &x));
  EQ(x.out_valid, 0);
  EQ(x.out_sparse, 1);
  OK(softgpu_poke(C.dev, C.space[0], BASE, 1));
  OK(softgpu_peek(C.dev, C.space[0], BASE, &value));
  EQ(value, 0);
  EQ(since().stale, 0);
  softgpu_client_close(&C);
}

// Injection makes the nth call fail, selected by number or by name, counts the failures, and then stops.
static void injection(void) {
  struct softgpu_alloc memory;
  struct softgpu_injected injected;
  int fd, result;
  unsigned n;

  OK(open_client(1));
  OK(softgpu_alloc(C.dev, 0, MIB(2), KIB(64), 0, &memory));
  for (n = 1, result = 1; result; n++) {
    CHECK(n < 100);
    OK(softgpu_fail_nth(C.dev, "", n, SOFTGPU_STATUS_GENERIC));
    result = softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false);
    OK(softgpu_injected(C.dev, &injected));
    EQ(injected.out_failed, result != 0);
    if (result) EQ(result, SOFTGPU_STATUS_GENERIC);
    OK(softgpu_verify(C.dev));
  }
  CHECK(n > 2);
  OK(softgpu_uvm_unmap_external(&C, 0, BASE, MIB(2)));
  OK(softgpu_fail_nth(C.dev, "GetExternalAllocPtes", 1, SOFTGPU_STATUS_NO_MEMORY));
  EQ(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false), SOFTGPU_STATUS_NO_MEMORY);
  OK(softgpu_injected(C.dev, &injected));
  EQ(strcmp(injected.out_last, "nvUvmInterfaceGetExternalAllocPtes"), 0);
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false));
  OK(softgpu_uvm_unmap_external(&C, 0, BASE, MIB(2)));
  EQ(softgpu_fail_nth(C.dev, "NoSuchCall", 1, 0), -ENOENT);
  fd = softgpu_open();
  OK(softgpu_fail_nth(fd, "DupMemory", 1, 0));
  close(fd);
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false));
  softgpu_client_close(&C);
}

// Closing a descriptor frees what it still holds, except memory that UVM holds, which lives until it is unmapped.
static void given_back(void) {
  struct softgpu_alloc memory;
  struct softgpu_counters now;
  struct softgpu_frame frame;
  int dev, other;

  OK(open_client(1));
  other = softgpu_open();
  CHECK(other >= 0);
  OK(softgpu_alloc(other, 0, MIB(2), KIB(64), 0, &memory));
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false));
  close(other);
  OK(softgpu_poke(C.dev, C.space[0], BASE, 5));
  OK(softgpu_frame(C.dev, 0, memory.out_pa, &frame));
  EQ(frame.out_allocated, 1);
  dev = softgpu_open();
  OK(softgpu_uvm_unmap_external(&C, 0, BASE, MIB(2)));
  OK(softgpu_frame(dev, 0, memory.out_pa, &frame));
  EQ(frame.out_allocated, 0);
  softgpu_client_close(&C);
  OK(softgpu_counters(dev, 0, &now));
  EQ(now.spaces_now, 0);
  EQ(now.channels_now, 0);
  EQ(now.rm_memory_now, 0);
  EQ(now.frames_free_now, now.frames);
  EQ(now.tables_now, 0);
  EQ(now.ptes_now, 0);
  EQ(now.clients_now, 0);
  EQ(now.tlb_entries_now, 0);
  close(dev);
}

// Memory of the other GPU, through its page tables and through a peer's.
static void peers(void) {
  struct softgpu_alloc memory;
  struct softgpu_info info;
  struct softgpu_xlate x;

  int dev = softgpu_open();
  OK(softgpu_info(dev, 0, &info));
  close(dev);
  if (info.out_gpus < 2) SKIP("one GPU");
  OK(open_client(2));
  softgpu_uvm_enable_peer(&C, 0, 1); // refused if they are always peers (NVLink)
  OK(softgpu_alloc(C.dev, 1, MIB(2), KIB(64), 0, &memory));
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false));
  OK(softgpu_uvm_map_external(&C, 1, BASE, MIB(2), 0, &memory, false));
  OK(softgpu_xlate(C.dev, C.space[0], BASE, &x));
  EQ(x.out_aperture, SOFTGPU_APERTURE_PEER);
  EQ(x.out_peer, 1);
  OK(softgpu_xlate(C.dev, C.space[1], BASE, &x));
  EQ(x.out_aperture, SOFTGPU_APERTURE_VID);
  OK(softgpu_fill(C.dev, C.space[0], BASE, MIB(2), 3, 5));
  OK(softgpu_check(C.dev, C.space[1], BASE, MIB(2), 3, 5, NULL));
  struct softgpu_frame frame;
  OK(softgpu_frame(C.dev, 1, memory.out_pa, &frame));
  EQ(frame.out_mappings, 2);
  OK(softgpu_verify(C.dev));
  OK(softgpu_uvm_free(&C, BASE, MIB(64)));
  OK(softgpu_frame(C.dev, 1, memory.out_pa, &frame));
  EQ(frame.out_mappings, 0);
  softgpu_client_close(&C);
}

// nvidia-uvm.ko is suspended and resumed.
static void suspend(void) {
  struct softgpu_alloc memory;

  OK(open_client(1));
  OK(softgpu_alloc(C.dev, 0, MIB(2), KIB(64), 0, &memory));
  OK(softgpu_suspend(C.dev, true));
  EQ(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false), -EAGAIN);
  OK(softgpu_suspend(C.dev, false));
  OK(softgpu_uvm_map_external(&C, 0, BASE, MIB(2), 0, &memory, false));
  OK(softgpu_poke(C.dev, C.space[0], BASE, 5));
  softgpu_client_close(&C);
}

MAIN(TEST(pages), TEST(contents), TEST(stale), TEST(hold_ends), TEST(read_only), TEST(injection), TEST(given_back), TEST(peers),
     TEST(suspend))
