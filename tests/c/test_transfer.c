/* SPDX-License-Identifier: MIT */
/*
 * Description: reads and writes of the GPU back ends, over a fake driver that, at random, runs a copy
 * when it is launched or when a thread waits for it.
 */
#include "backend/cuda/gpu.h"
#include "check.h"

enum { MEMORY = 40 << 20, EDGE = 64, MOST_PENDING = 64 };
#define ALIAS 0x700000000000u /* kernels see pinned memory at its host address plus this offset */

enum telling { TELLS_RANGE, TELLS_IDS, TELLS_NOTHING };

static struct {
  struct vm_be_copy pending[MOST_PENDING];
  unsigned num_pending;
  uint8_t *device, *host; /* EDGE bytes before and after MEMORY bytes */
  uint8_t *stage;
  size_t stage_bytes;
  uint64_t locked_at, locked_bytes;
  enum telling telling;
  unsigned direct, staged;                 /* launches */
  unsigned misplaced, misaligned;          /* launches: impossible on a GPU, slow on a GPU */
  int fail_launch, fail_record, fail_sync; /* fail the n-th from now; 0: none */
  uint64_t chance;
} fake;

static uint64_t chance(uint64_t below) {
  fake.chance = fake.chance * 6364136223846793005u + 1442695040888963407u;
  return (fake.chance >> 16) % below;
}

static bool inside(uint64_t at, uint64_t bytes, uint64_t start, uint64_t size) {
  return at >= start && at - start <= size && bytes <= size - (at - start);
}

static bool on_device(uint64_t at, uint64_t bytes) {
  return inside(at, bytes, (uint64_t)(uintptr_t)fake.device, MEMORY + 2 * EDGE);
}

static void run_pending(void) {
  for (unsigned i = 0; i < fake.num_pending; i++) {
    struct vm_be_copy *c = &fake.pending[i];
    uint64_t dst = c->dst, src = c->src;
    if (inside(dst - ALIAS, c->bytes, fake.locked_at, fake.locked_bytes)) dst -= ALIAS;
    if (inside(src - ALIAS, c->bytes, fake.locked_at, fake.locked_bytes)) src -= ALIAS;
    memcpy((void *)(uintptr_t)dst, (void *)(uintptr_t)src, c->bytes);
  }
  fake.num_pending = 0;
}

static bool fails(int *countdown) { return *countdown && !--*countdown; }

static gpu_result fake_launch(gpu_function f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                              unsigned shared, gpu_stream stream, void **args, void **extra) {
  const struct vm_be_copy *c = args[0];
  (void)x, (void)z, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
  if (fails(&fake.fail_launch)) return GPU_ERROR_INVALID_VALUE;
  for (unsigned i = 0; f == (gpu_function)2 && i < y; i++) {
    bool writes = on_device(c[i].dst, c[i].bytes);
    uint64_t other = writes ? c[i].src : c[i].dst, ours = writes ? c[i].dst : c[i].src;
    if (!c[i].bytes) continue;
    fake.misaligned += ((c[i].dst ^ c[i].src) & 15) != 0;
    if (!on_device(ours, c[i].bytes) || fake.num_pending == MOST_PENDING)
      fake.misplaced++;
    else if (inside(other - ALIAS, c[i].bytes, fake.locked_at, fake.locked_bytes))
      fake.direct++, fake.pending[fake.num_pending++] = c[i];
    else if (inside(other, c[i].bytes, (uint64_t)(uintptr_t)fake.stage, fake.stage_bytes))
      fake.staged++, fake.pending[fake.num_pending++] = c[i];
    else
      fake.misplaced++;
  }
  if (chance(2)) run_pending();
  return GPU_SUCCESS;
}

static gpu_result fake_query(gpu_cuevent e) {
  (void)e;
  return fake.num_pending || chance(2) ? GPU_ERROR_NOT_READY : GPU_SUCCESS;
}

static gpu_result fake_event_sync(gpu_cuevent e) {
  (void)e;
  if (fails(&fake.fail_sync)) return GPU_ERROR_INVALID_VALUE;
  run_pending();
  return GPU_SUCCESS;
}

static gpu_result fake_stream_sync(gpu_stream s) {
  (void)s;
  run_pending();
  return GPU_SUCCESS;
}

static gpu_result fake_record(gpu_cuevent e, gpu_stream s) {
  (void)e, (void)s;
  return fails(&fake.fail_record) ? GPU_ERROR_INVALID_VALUE : GPU_SUCCESS;
}

static gpu_result fake_attributes(unsigned n, int *attributes, void **to, gpu_ptr at) {
  bool known = fake.telling != TELLS_NOTHING && inside(at, 1, fake.locked_at, fake.locked_bytes);
  for (unsigned i = 0; i < n; i++) switch (attributes[i]) {
    case GPU_POINTER_MEMORY_TYPE:
      *(unsigned *)to[i] = known ? GPU_MEMORY_HOST : 0;
      break;
    case GPU_POINTER_DEVICE_POINTER:
      *(gpu_ptr *)to[i] = known ? at + ALIAS : 0;
      break;
    case GPU_POINTER_BUFFER_ID:
      *(unsigned long long *)to[i] = known ? 77 : 0;
      break;
    case GPU_POINTER_RANGE_START:
      *(gpu_ptr *)to[i] = known && fake.telling == TELLS_RANGE ? fake.locked_at : 0;
      break;
    case GPU_POINTER_RANGE_SIZE:
      *(size_t *)to[i] = known && fake.telling == TELLS_RANGE ? fake.locked_bytes : 0;
      break;
    default:
      return GPU_ERROR_INVALID_VALUE;
    }
  return GPU_SUCCESS;
}

static gpu_result fake_host_alloc(void **p, size_t bytes, unsigned flags) {
  (void)flags;
  if (posix_memalign(p, 4096, bytes)) return GPU_ERROR_OUT_OF_MEMORY;
  fake.stage = *p;
  fake.stage_bytes = bytes;
  return GPU_SUCCESS;
}

static gpu_result fake_host_free(void *p) {
  free(p);
  return GPU_SUCCESS;
}

static gpu_result fake_push(gpu_ctx c) { return (void)c, GPU_SUCCESS; }
static gpu_result fake_pop(gpu_ctx *c) { return (void)c, GPU_SUCCESS; }
static gpu_result fake_mode(int *mode) { return (void)mode, GPU_SUCCESS; }
static gpu_result fake_event_create(gpu_cuevent *e, unsigned flags) { return (void)flags, *e = NULL, GPU_SUCCESS; }
static gpu_result fake_event_destroy(gpu_cuevent e) { return (void)e, GPU_SUCCESS; }
static gpu_result fake_module(gpu_module *m, const void *image) { return (void)image, *m = (gpu_module)1, GPU_SUCCESS; }
static gpu_result fake_unload(gpu_module m) { return (void)m, GPU_SUCCESS; }
static gpu_result fake_error_name(gpu_result r, const char **name) { return (void)r, *name = "FAKE", GPU_SUCCESS; }
static gpu_result fake_function(gpu_function *f, gpu_module m, const char *name) {
  (void)m;
  *f = strcmp(name, "vmem_copy") ? (gpu_function)1 : (gpu_function)2;
  return GPU_SUCCESS;
}

static const struct gpu_api api = {.launch = fake_launch,
                                   .event_create = fake_event_create,
                                   .event_destroy = fake_event_destroy,
                                   .event_record = fake_record,
                                   .event_query = fake_query,
                                   .event_sync = fake_event_sync,
                                   .stream_sync = fake_stream_sync,
                                   .pointer_attributes = fake_attributes,
                                   .host_alloc = fake_host_alloc,
                                   .host_free = fake_host_free,
                                   .ctx_push = fake_push,
                                   .ctx_pop = fake_pop,
                                   .capture_mode = fake_mode,
                                   .module_load = fake_module,
                                   .module_unload = fake_unload,
                                   .module_function = fake_function,
                                   .error_name = fake_error_name};

static struct gpu *open_fake(void) {
  struct gpu *g = calloc(1, sizeof(*g));
  memset(&fake, 0, sizeof(fake));
  g->api = &api;
  g->num_devices = 1;
  pthread_mutex_init(&g->event_lock, NULL);
  pthread_mutex_init(&g->stage_lock, NULL);
  if (posix_memalign((void **)&fake.device, 4096, MEMORY + 2 * EDGE) ||
      posix_memalign((void **)&fake.host, 4096, MEMORY + 2 * EDGE) || gpu_copy_init(g))
    abort();
  for (uint64_t i = 0; i < MEMORY + 2 * EDGE; i++) fake.device[i] = (uint8_t)(i * 7 + (i >> 12));
  return g;
}

static void close_fake(struct gpu *g) {
  gpu_events_free(g);
  gpu_copy_exit(g);
  pthread_mutex_destroy(&g->event_lock);
  pthread_mutex_destroy(&g->stage_lock);
  free(fake.device);
  free(fake.host);
  free(g);
}

static void lock_host(enum telling telling, uint64_t from, uint64_t bytes) {
  fake.telling = telling;
  fake.locked_at = (uint64_t)(uintptr_t)fake.host + from;
  fake.locked_bytes = bytes;
  fake.direct = fake.staged = 0;
}

/* Reads into host memory filled with 0xee, or writes from it, and checks both sides and the bytes around them. */
static bool agree(struct gpu *g, bool write, uint64_t at, uint64_t host_at, uint64_t bytes) {
  uint8_t *d = fake.device + at, *h = fake.host + host_at, before[2], *end = write ? d + bytes : h + bytes;
  uint8_t *start = (write ? d : h) - 1;
  if (write)
    for (uint64_t i = 0; i < bytes; i++) h[i] = (uint8_t)chance(256);
  else
    memset(h, 0xee, bytes);
  before[0] = *start;
  before[1] = *end;
  if (write ? gpu_write(g, (uint64_t)(uintptr_t)d, h, bytes) : gpu_read(g, h, (uint64_t)(uintptr_t)d, bytes))
    return false;
  return !memcmp(d, h, bytes) && *start == before[0] && *end == before[1] && !fake.num_pending && !fake.misplaced &&
         !fake.misaligned;
}

/* Odd alignments and lengths, in pinned and pageable memory; both queries for pinned memory. */
static void contents_agree(void) {
  static const uint64_t sizes[] = {0,      1,          15,          16,         17,     4095,   MIB(2) - 1,
                                   MIB(2), MIB(2) + 1, MIB(4) - 15, MIB(4) + 1, MIB(9), MIB(35)};
  struct gpu *g = open_fake();
  for (int telling = TELLS_RANGE; telling <= TELLS_NOTHING; telling++)
    for (unsigned s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
      for (int i = 0; i < 6; i++) {
        uint64_t at = EDGE + chance(40), host_at = EDGE + (i & 1 ? at % 16 : chance(40)), bytes = sizes[s];
        bool direct = telling != TELLS_NOTHING && at % 16 == host_at % 16;
        lock_host(telling, 0, MEMORY);
        CHECK(agree(g, i & 2, at, host_at, bytes));
        CHECK(!bytes || (direct ? fake.direct && !fake.staged : fake.staged && !fake.direct));
      }
  close_fake(g);
}

static void memory_that_is_locked_in_part_is_not_trusted(void) {
  struct gpu *g = open_fake();
  for (int telling = TELLS_RANGE; telling <= TELLS_IDS; telling++) {
    lock_host(telling, EDGE, MIB(3));
    CHECK(agree(g, false, EDGE, EDGE, MIB(3)));
    CHECK(fake.direct && !fake.staged);
    lock_host(telling, EDGE, MIB(3));
    CHECK(agree(g, false, EDGE, EDGE, MIB(3) + 1));
    CHECK(fake.staged && !fake.direct);
    lock_host(telling, EDGE + 16, MIB(3));
    CHECK(agree(g, true, EDGE, EDGE, MIB(1)));
    CHECK(fake.staged && !fake.direct);
  }
  close_fake(g);
}

/* A driver error is returned, and no copy is still running then. */
static void failures_leave_nothing_running(void) {
  static const int nth[] = {1, 1, 1, 1, 2, 3, 4, 5}; /* 1 more often: no wait for a later copy covers it */
  struct gpu *g = open_fake();
  uint64_t at = (uint64_t)(uintptr_t)fake.device + EDGE;
  unsigned failed = 0;
  for (int locked = 0; locked < 2; locked++)
    for (int write = 0; write < 2; write++)
      for (int what = 0; what < 3; what++)
        for (unsigned n = 0; n < sizeof(nth) / sizeof(*nth); n++) {
          int *which = what == 0 ? &fake.fail_launch : what == 1 ? &fake.fail_record : &fake.fail_sync, err;
          lock_host(locked ? TELLS_RANGE : TELLS_NOTHING, 0, MEMORY);
          *which = nth[n];
          err = write ? gpu_write(g, at, fake.host + EDGE, MIB(36)) : gpu_read(g, fake.host + EDGE, at, MIB(36));
          EQ(fake.num_pending, 0);
          EQ(err, *which ? 0 : -EIO); /* no error if the copies ended before the failing call */
          failed += err != 0;
          *which = 0;
          CHECK(agree(g, write, EDGE, EDGE, MIB(1)));
        }
  CHECK(failed >= 20);
  close_fake(g);
}

MAIN(TEST(contents_agree), TEST(memory_that_is_locked_in_part_is_not_trusted), TEST(failures_leave_nothing_running))
