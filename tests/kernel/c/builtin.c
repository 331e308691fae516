/* SPDX-License-Identifier: MIT */
/*
 * UVM's own built-in tests (module parameter uvm_enable_builtin_tests), and managed memory as CUDA uses it.
 * Run on the driver with and without our patches, with the same expectations. Each result is printed as
 * "RESULT name status", so that two runs can be compared line by line.
 *
 * FULL=1 runs PMM_SANITY in its full mode too: 324,000 pushes, with a wait for each. That takes 20 seconds if the
 * guest's two processors have a host processor each, and ten times as long if they share them with another guest.
 *
 * Not run here: CHANNEL_STRESS key rotation, SEC2_*, CE and CHANNEL parts of confidential computing (no such
 * GPU); PMM_INDIRECT_PEERS and NUMA_* (need a coherent platform); access counters (RECONFIGURE_, RESET_,
 * QUERY_: the software GPU has none); tests that need a second process or a tools reader as their partner
 * (VA_SPACE_MM_RETAIN, TOOLS_*, INJECT_TOOLS_EVENT); GET_RM_PTES (checks the resource manager, not UVM).
 */
#define _GNU_SOURCE
#include <nvtypes.h>
#include <nvstatus.h>
#include <uvm_linux_ioctl.h>
#include <uvm_test_ioctl.h>

#include <sys/mman.h>
#include "kcheck.h"
#include "world.h"

#define MANAGED ((void *)0x7d0000000000ull)
#define BYTES_2M MIB(2)

static struct world W;

/* The CPU as a processor (nvCpuUuid.c of the driver). */
static const NvProcessorUuid CPU = {
    {0xa6, 0x5e, 0x0f, 0x4e, 0xd7, 0xd4, 0x7b, 0xa2, 0x50, 0x47, 0x41, 0x2c, 0x14, 0x2a, 0x77, 0x73}};

static NvProcessorUuid uuid_of(unsigned gpu) {
  NvProcessorUuid uuid;
  memcpy(uuid.uuid, W.uuid[gpu], sizeof(uuid.uuid));
  return uuid;
}

static void setup(void) {
  static bool made;
  if (!made) world_open(&W, 1);
  made = true;
}

/* Returns the status of a UVM ioctl, or 0x10000 + errno if the ioctl itself failed. */
static unsigned uvm_call(unsigned long number, void *params, const NV_STATUS *status) {
  int error = vm_call(W.uvm, number, params);
  return error ? 0x10000u + (unsigned)-error : *status;
}

#define RUN(name, ...)                                                             \
  do {                                                                             \
    name##_PARAMS p_ = {__VA_ARGS__};                                              \
    unsigned got_ = uvm_call(name, &p_, &p_.rmStatus);                             \
    printf("RESULT %s 0x%x\n", #name, got_);                                       \
    if (got_ != NV_OK) fail("%s: 0x%x", #name, got_);                              \
  } while (0)

/* CHANNEL_SANITY makes a channel fail on purpose, which kills it in the model, and then recreates all channels of the
 * GPU. UVM does not update references to the old ones: the trackers of freed memory are left with dangling pointers. So
 * this test comes first, before any memory is freed. */
static void channels_made_anew(void) {
  setup();
  struct softgpu_counters before = gpu_counters(&W, 0);
  RUN(UVM_TEST_CHANNEL_SANITY, 0);
  EQ(gpu_counters(&W, 0).errors - before.errors, 1);
  W.base[0].errors++;
}

static void data_structures(void) {
  setup();
  RUN(UVM_TEST_RNG_SANITY, 0);
  RUN(UVM_TEST_RANGE_TREE_DIRECTED, 0);
  RUN(UVM_TEST_RANGE_TREE_RANDOM, .main_iterations = 2000, .seed = 1, .max_end = 1 << 20, .max_ranges = 200,
      .high_probability = 90, .add_remove_shrink_group_probability = 80, .shrink_probability = 30,
      .collision_checks = 10, .iterator_checks = 10, .max_batch_count = 10);
  RUN(UVM_TEST_RB_TREE_DIRECTED, 0);
  RUN(UVM_TEST_RB_TREE_RANDOM, .iterations = 2000, .range_max = 1 << 20, .node_limit = 200, .seed = 1);
  RUN(UVM_TEST_RANGE_ALLOCATOR_SANITY, .seed = 1, .iters = 1000);
  RUN(UVM_TEST_LOCK_SANITY, 0);
  RUN(UVM_TEST_KVMALLOC, 0);
  RUN(UVM_TEST_PERF_UTILS_SANITY, 0);
  RUN(UVM_TEST_NV_KTHREAD_Q, 0);
  RUN(UVM_TEST_THREAD_CONTEXT_SANITY, .iterations = 10);
  RUN(UVM_TEST_CPU_CHUNK_API, 0);
}

static void page_tree(void) {
  setup();
  RUN(UVM_TEST_PAGE_TREE, 0);
}

static void engine(void) {
  setup();
  RUN(UVM_TEST_RM_MEM_SANITY, 0);
  RUN(UVM_TEST_GPU_SEMAPHORE_SANITY, 0);
  RUN(UVM_TEST_TRACKER_SANITY, 0);
  RUN(UVM_TEST_PUSH_SANITY, 0);
  RUN(UVM_TEST_CHANNEL_STRESS, .mode = UVM_TEST_CHANNEL_STRESS_MODE_NOOP_PUSH, .iterations = 200, .num_streams = 8);
  RUN(UVM_TEST_CHANNEL_STRESS, .mode = UVM_TEST_CHANNEL_STRESS_MODE_STREAM, .iterations = 50, .num_streams = 8,
      .seed = 3);
  RUN(UVM_TEST_CE_SANITY, 0);
  RUN(UVM_TEST_HOST_SANITY, 0);
  RUN(UVM_TEST_MEM_SANITY, 0);
  RUN(UVM_TEST_FAULT_BUFFER_FLUSH, .iterations = 10);
  RUN(UVM_TEST_INVALIDATE_TLB, .gpu_uuid = uuid_of(0), .target_va_mode = UvmTargetVaModeAll,
      .page_table_level = UvmInvalidatePageTableLevelAll, .membar = UvmInvalidateTlbMemBarSys);
}

static void physical_memory(void) {
  setup();
  RUN(UVM_TEST_PMM_SANITY, .mode = UvmTestPmmSanityModeBasic);
  if (parameter("FULL", 0)) RUN(UVM_TEST_PMM_SANITY, .mode = UvmTestPmmSanityModeFull);
  RUN(UVM_TEST_PMM_CHECK_LEAK, .gpu_uuid = uuid_of(0), .chunk_size = 64 << 10, .alloc_limit = 512);
  RUN(UVM_TEST_PMM_CHECK_LEAK, .gpu_uuid = uuid_of(0), .chunk_size = 2 << 20, .alloc_limit = -1);
  RUN(UVM_TEST_PMM_ASYNC_ALLOC, .gpu_uuid = uuid_of(0), .num_chunks = 64, .num_work_iterations = 50);
  RUN(UVM_TEST_PMA_ALLOC_FREE, .gpu_uuid = uuid_of(0), .page_size = 64 << 10, .num_pages = 100);
  RUN(UVM_TEST_PMA_ALLOC_FREE, .gpu_uuid = uuid_of(0), .page_size = 2 << 20, .num_pages = 8, .contiguous = 1);
  RUN(UVM_TEST_PMM_ALLOC_FREE_ROOT, .gpu_uuid = uuid_of(0));
  RUN(UVM_TEST_PMM_RELEASE_FREE_ROOT_CHUNKS, .gpu_uuid = uuid_of(0));
}

static void *managed(uint64_t offset, size_t bytes) {
  void *at = mmap((char *)MANAGED + offset, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, W.uvm,
                  (off_t)((uintptr_t)MANAGED + offset));
  if (at == MAP_FAILED) hopeless("managed memory", -errno);
  return at;
}

static unsigned migrate(void *at, size_t bytes, NvProcessorUuid to) {
  UVM_MIGRATE_PARAMS m = {.base = (uintptr_t)at, .length = bytes, .destinationUuid = to};
  return uvm_call(UVM_MIGRATE, &m, &m.rmStatus);
}

#if defined(UVM_TEST_PMM_SYSMEM) || defined(UVM_TEST_PMM_REVERSE_MAP)
/* Creates a range of 2 MB split into four, which UVM's reverse map tests need. */
static void *in_four_parts(uint64_t offset) {
  char *at = managed(offset, BYTES_2M);
  for (unsigned part = 1; part < 4; part++) {
    UVM_TEST_VA_RANGE_SPLIT_PARAMS s = {.split_address = (uintptr_t)at + part * BYTES_2M / 4 - 1};
    unsigned status = uvm_call(UVM_TEST_VA_RANGE_SPLIT, &s, &s.rmStatus);
    if (status) fail("splitting a range: 0x%x", status);
  }
  memset(at, 1, BYTES_2M);
  return at;
}
#endif

static void managed_blocks(void) {
  setup();
  RUN(UVM_TEST_VA_BLOCK, 0);
  RUN(UVM_TEST_PERF_EVENTS_SANITY, 0);
  char *two = memset(managed(0, 2 * BYTES_2M), 1, 2 * BYTES_2M);
  RUN(UVM_TEST_PERF_MODULE_SANITY, .range_address = (uintptr_t)two, .range_size = 2 * BYTES_2M);
  munmap(two, 2 * BYTES_2M);
  UVM_TEST_RANGE_GROUP_TREE_PARAMS groups = {0};
  for (unsigned i = 0; i < 4; i++) {
    UVM_CREATE_RANGE_GROUP_PARAMS g = {0};
    EQ(uvm_call(UVM_CREATE_RANGE_GROUP, &g, &g.rmStatus), NV_OK);
    groups.rangeGroupIds[i] = g.rangeGroupId;
  }
  EQ(uvm_call(UVM_TEST_RANGE_GROUP_TREE, &groups, &groups.rmStatus), NV_OK);
  printf("RESULT UVM_TEST_RANGE_GROUP_TREE 0x0\n");
#ifdef UVM_TEST_PMM_SYSMEM
  void *whole = memset(managed(0, BYTES_2M), 1, BYTES_2M), *parts = in_four_parts(2 * BYTES_2M);
  /* Since 550 this test accepts only GPUs whose access counters report physical addresses: Volta. */
  UVM_TEST_PMM_SYSMEM_PARAMS s = {.range_address1 = (uintptr_t)whole, .range_address2 = (uintptr_t)parts};
  unsigned status = uvm_call(UVM_TEST_PMM_SYSMEM, &s, &s.rmStatus);
  printf("RESULT UVM_TEST_PMM_SYSMEM 0x%x\n", status);
  EQ(status, atoi(W.driver_version) < 550 ? NV_OK : NV_ERR_INVALID_DEVICE);
  munmap(whole, BYTES_2M);
  munmap(parts, BYTES_2M);
#endif
#ifdef UVM_TEST_PMM_REVERSE_MAP
  void *on_gpu = memset(managed(0, BYTES_2M), 1, BYTES_2M), *parts_on_gpu = in_four_parts(2 * BYTES_2M);
  EQ(migrate(on_gpu, BYTES_2M, uuid_of(0)), NV_OK);
  EQ(migrate(parts_on_gpu, BYTES_2M, uuid_of(0)), NV_OK);
  RUN(UVM_TEST_PMM_REVERSE_MAP, .gpu_uuid = uuid_of(0), .range_address1 = (uintptr_t)on_gpu,
      .range_address2 = (uintptr_t)parts_on_gpu, .range_size2 = BYTES_2M);
  munmap(on_gpu, BYTES_2M);
  munmap(parts_on_gpu, BYTES_2M);
#endif
}

/* The CPU writes, the GPU reads and writes, the CPU reads. */
static void managed_memory(void) {
  enum { BYTES = 8 << 20, WORDS = BYTES / 8 };
  setup();
  uint64_t *words = managed(0, BYTES);
  for (uint64_t i = 0; i < WORDS; i++) words[i] = 0xabc0000 + i;
  EQ(migrate(words, BYTES, uuid_of(0)), NV_OK);
  EQ(gpu_xlate(&W, 0, (uintptr_t)words).out_aperture, SOFTGPU_APERTURE_VID);
  OK(gpu_check(&W, 0, (uintptr_t)words, BYTES, 0xabc0000, 1));
  OK(gpu_fill(&W, 0, (uintptr_t)words, BYTES / 2, 5, 2));
  EQ(migrate(words, BYTES / 4, CPU), NV_OK);
  for (uint64_t i = 0; i < WORDS; i++) { /* the CPU's page faults migrate the others */
    uint64_t want = i < WORDS / 2 ? 5 + 2 * i : 0xabc0000 + i;
    EQ(words[i], want);
  }
  munmap(words, BYTES);
}

/* HMM: memory that the driver has not allocated. Needs a kernel with DEVICE_PRIVATE, which HMM=1 declares. */
static void system_memory(void) {
  enum { BYTES = 4 << 20, WORDS = BYTES / 8 };
  setup();
  UVM_PAGEABLE_MEM_ACCESS_PARAMS p = {0};
  EQ(uvm_call(UVM_PAGEABLE_MEM_ACCESS, &p, &p.rmStatus), NV_OK);
  EQ(p.pageableMemAccess, parameter("HMM", 0));
  if (!p.pageableMemAccess) SKIP("a kernel without DEVICE_PRIVATE");
  uint64_t *words = aligned_alloc(BYTES_2M, BYTES);
  CHECK(words != NULL);
  for (uint64_t i = 0; i < WORDS; i++) words[i] = 0xabc0000 + i;
  EQ(migrate(words, BYTES, uuid_of(0)), NV_OK);
  EQ(gpu_xlate(&W, 0, (uintptr_t)words).out_aperture, SOFTGPU_APERTURE_VID);
  OK(gpu_check(&W, 0, (uintptr_t)words, BYTES, 0xabc0000, 1));
  OK(gpu_fill(&W, 0, (uintptr_t)words, BYTES / 2, 5, 2));
  for (uint64_t i = 0; i < WORDS; i++) { /* migrated by the CPU's page faults */
    uint64_t want = i < WORDS / 2 ? 5 + 2 * i : 0xabc0000 + i;
    EQ(words[i], want);
  }
  free(words);
}

/* Another driver client's memory, mapped with each page size. */
static void external_memory(void) {
  static const struct {
    uint64_t page_size;
    unsigned flags;
  } kinds[] = {{2 << 20, 0}, {64 << 10, 0}, {4 << 10, SOFTGPU_ALLOC_SYSMEM}};
  setup();
  const uint64_t base = 0x7e0000000000ull;
  OK(softgpu_uvm_create_external(&W.c, base, MIB(64)));
  for (size_t k = 0; k < ARRAY_SIZE(kinds); k++) {
    const uint64_t at = base + k * MIB(16);
    struct softgpu_alloc memory;
    OK(softgpu_alloc(W.dev, 0, MIB(4), kinds[k].page_size, kinds[k].flags, &memory));
    OK(softgpu_uvm_map_external(&W.c, 0, at, MIB(4), 0, &memory, false));
    OK(gpu_fill(&W, 0, at, MIB(4), 0x77 + k, 1));
    OK(gpu_check(&W, 0, at, MIB(4), 0x77 + k, 1));
    OK(softgpu_uvm_unmap_external(&W.c, 0, at, MIB(4)));
    EQ(gpu_check(&W, 0, at, 8, 0, 0), -EFAULT);
    OK(softgpu_free(W.dev, memory.out_client, memory.out_handle));
  }
  OK(softgpu_uvm_free(&W.c, base, MIB(64)));
}

static void two_gpus(void) {
  struct world two;
  if (world_gpus() < 2) SKIP("one GPU (run with --gpus 2)");
  setup();
  world_close(&W);
  world_open(&two, 2);
  struct world first = W;
  W = two;
  int peers = softgpu_uvm_enable_peer(&W.c, 0, 1); /* refused if they are always peers (NVLink) */
  RUN(UVM_TEST_PEER_IDENTITY_MAPPINGS, .gpuA = uuid_of(0), .gpuB = uuid_of(1));
  RUN(UVM_TEST_CE_SANITY, 0);
  RUN(UVM_TEST_TRACKER_SANITY, 0);
  RUN(UVM_TEST_MEM_SANITY, 0);
  if (!peers) OK(softgpu_uvm_disable_peer(&W.c, 0, 1));
  W = first;
  world_close(&two);
  world_open(&W, 1);
}

static void nothing_is_left(void) {
  setup();
  world_close(&W);
  world_open(&W, 1);
}

MAIN(TEST(channels_made_anew), TEST(data_structures), TEST(page_tree), TEST(engine), TEST(physical_memory),
     TEST(managed_blocks), TEST(managed_memory), TEST(system_memory), TEST(external_memory), TEST(two_gpus),
     TEST(nothing_is_left))
