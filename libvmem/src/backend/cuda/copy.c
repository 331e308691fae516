/* SPDX-License-Identifier: MIT */
/*
 * Fill and copy with our own kernels: CUDA's copies refuse addresses that CUDA did not allocate.
 *
 * Both kernels split a range into a head up to the first 16-byte boundary, a body of 16-byte words
 * and a tail. A copy whose source and destination differ modulo 16 goes byte by byte.
 *
 * Reads and writes of host memory page-locked by CUDA are such copies, done directly. All others go
 * through our own page-locked buffer in windows: the GPU copies one while the CPU copies another.
 */
#include <string.h>

#include "backend/cuda/gpu.h"
#include "base/error.h"

enum {
  BLOCK = 256,
  BLOCK_BYTES = 16 * 1024, /* bytes that one thread block handles: four 16-byte words per thread */
  FILL_RANGES = 250,       /* so that the parameters stay below the 4 KiB every driver accepts */
  COPY_RANGES = 166,
  WINDOWS = 2,
  WINDOW_BYTES = 2 << 20,
  STAGE_BYTES = WINDOWS * WINDOW_BYTES,
  DIRECT_BYTES = 16 << 20, /* limit per launch, so that other threads' fills can run in between */
};

struct fill_params {
  uint32_t pattern, reserved;
  struct vm_be_range ranges[FILL_RANGES];
};
_Static_assert(sizeof(struct fill_params) == 4008, "the PTX below names this size");

struct copy_params {
  struct vm_be_copy copies[COPY_RANGES];
};
_Static_assert(sizeof(struct copy_params) == 3984, "the PTX below names this size");

/* %a5 = this thread, %a7 = threads in the grid's x direction. */
#define PTX_THREAD                                                                                                     \
  "mov.u32 %r3, %ctaid.x;\n mov.u32 %r4, %ntid.x;\n mov.u32 %r5, %tid.x;\n mov.u32 %r6, "                              \
  "%nctaid.x;\n"                                                                                                       \
  "mul.wide.u32 %a5, %r3, %r4;\n cvt.u64.u32 %a6, %r5;\n add.s64 %a5, %a5, %a6;\n"                                     \
  "mul.wide.u32 %a7, %r6, %r4;\n"
/* From %a3 = start, %a4 = end: %a8 = end of the head, %a9 = end of the body. */
#define PTX_SPLIT                                                                                                      \
  "add.s64 %a8, %a3, 15;\n and.b64 %a8, %a8, -16;\n min.u64 %a8, %a8, %a4;\n"                                          \
  "and.b64 %a9, %a4, -16;\n max.u64 %a9, %a9, %a8;\n"
#define PTX_REGS ".reg .pred %q<8>;\n .reg .b32 %r<16>;\n .reg .b64 %a<24>;\n"

static const char kernels[] =
    ".version 6.0\n.target sm_60\n.address_size 64\n"
    ".visible .entry vmem_fill(.param .align 8 .b8 p[4008])\n{\n" PTX_REGS
    "mov.u32 %r1, %ctaid.y;\n mul.wide.u32 %a1, %r1, 16;\n mov.b64 %a2, p;\n add.s64 %a2, %a2, "
    "%a1;\n"
    "ld.param.u64 %a3, [%a2+8];\n ld.param.u64 %a4, [%a2+16];\n add.s64 %a4, %a4, %a3;\n"
    "ld.param.u32 %r2, [p];\n" PTX_THREAD PTX_SPLIT
    "add.s64 %a10, %a3, %a5;\n setp.lt.u64 %q1, %a10, %a8;\n @%q1 st.global.u8 [%a10], %r2;\n"
    "add.s64 %a11, %a9, %a5;\n setp.lt.u64 %q2, %a11, %a4;\n @%q2 st.global.u8 [%a11], %r2;\n"
    "shl.b64 %a12, %a5, 4;\n add.s64 %a12, %a12, %a8;\n shl.b64 %a13, %a7, 4;\n"
    "loop:\n setp.ge.u64 %q3, %a12, %a9;\n @%q3 bra done;\n"
    "st.global.v4.u32 [%a12], {%r2, %r2, %r2, %r2};\n add.s64 %a12, %a12, %a13;\n bra loop;\n"
    "done:\n ret;\n}\n"
    /* %a14 = src - dst */
    ".visible .entry vmem_copy(.param .align 8 .b8 p[3984])\n{\n" PTX_REGS
    "mov.u32 %r1, %ctaid.y;\n mul.wide.u32 %a1, %r1, 24;\n mov.b64 %a2, p;\n add.s64 %a2, %a2, "
    "%a1;\n"
    "ld.param.u64 %a3, [%a2];\n ld.param.u64 %a14, [%a2+8];\n ld.param.u64 %a4, [%a2+16];\n"
    "sub.s64 %a14, %a14, %a3;\n add.s64 %a4, %a4, %a3;\n" PTX_THREAD PTX_SPLIT
    "and.b64 %a15, %a14, 15;\n setp.ne.u64 %q4, %a15, 0;\n @%q4 bra bytes;\n"
    "add.s64 %a10, %a3, %a5;\n setp.ge.u64 %q1, %a10, %a8;\n @%q1 bra tail;\n"
    "add.s64 %a16, %a10, %a14;\n ld.global.u8 %r8, [%a16];\n st.global.u8 [%a10], %r8;\n"
    "tail:\n add.s64 %a11, %a9, %a5;\n setp.ge.u64 %q2, %a11, %a4;\n @%q2 bra body;\n"
    "add.s64 %a16, %a11, %a14;\n ld.global.u8 %r8, [%a16];\n st.global.u8 [%a11], %r8;\n"
    "body:\n shl.b64 %a12, %a5, 4;\n add.s64 %a12, %a12, %a8;\n shl.b64 %a13, %a7, 4;\n"
    "loop:\n setp.ge.u64 %q3, %a12, %a9;\n @%q3 bra done;\n add.s64 %a16, %a12, %a14;\n"
    "ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%a16];\n"
    "st.global.v4.u32 [%a12], {%r8, %r9, %r10, %r11};\n add.s64 %a12, %a12, %a13;\n bra loop;\n"
    "bytes:\n add.s64 %a12, %a3, %a5;\n"
    "next:\n setp.ge.u64 %q3, %a12, %a4;\n @%q3 bra done;\n add.s64 %a16, %a12, %a14;\n"
    "ld.global.u8 %r8, [%a16];\n st.global.u8 [%a12], %r8;\n add.s64 %a12, %a12, %a7;\n bra next;\n"
    "done:\n ret;\n}\n";

static unsigned blocks_for(const struct gpu *g, uint64_t bytes, unsigned sharers) {
  uint64_t want = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
  uint64_t most = 16u * (g->multiprocessors ? g->multiprocessors : 1) / sharers;
  if (want > most) want = most;
  return want ? (unsigned)want : 1;
}

static int launch_fills(struct gpu *g, gpu_stream stream, const struct vm_be_range *ranges, size_t n, uint8_t value) {
  struct fill_params p = {.pattern = 0x01010101u * value};
  while (n) {
    unsigned count = n < FILL_RANGES ? (unsigned)n : FILL_RANGES;
    void *args[] = {&p};
    uint64_t longest = 0;
    gpu_result r;
    memcpy(p.ranges, ranges, count * sizeof(*ranges));
    for (unsigned i = 0; i < count; i++)
      if (ranges[i].bytes > longest) longest = ranges[i].bytes;
    r = g->api->launch(g->fill, blocks_for(g, longest, count), count, 1, BLOCK, 1, 1, 0, stream, args, NULL);
    if (r != GPU_SUCCESS) return gpu_fail_at(g->api, r, ranges[0].addr, ranges[0].bytes, "cuLaunchKernel (fill)");
    ranges += count;
    n -= count;
  }
  return 0;
}

static int launch_copies(struct gpu *g, gpu_stream stream, const struct vm_be_copy *copies, size_t n) {
  struct copy_params p = {0};
  while (n) {
    unsigned count = n < COPY_RANGES ? (unsigned)n : COPY_RANGES;
    void *args[] = {&p};
    uint64_t longest = 0;
    gpu_result r;
    memcpy(p.copies, copies, count * sizeof(*copies));
    for (unsigned i = 0; i < count; i++)
      if (copies[i].bytes > longest) longest = copies[i].bytes;
    r = g->api->launch(g->copy, blocks_for(g, longest, count), count, 1, BLOCK, 1, 1, 0, stream, args, NULL);
    if (r != GPU_SUCCESS) return gpu_fail_at(g->api, r, copies[0].dst, copies[0].bytes, "cuLaunchKernel (copy)");
    copies += count;
    n -= count;
  }
  return 0;
}

/* Returns an idle stream, or any stream if none is idle. Called by one thread at a time. */
static gpu_stream free_after(struct gpu *g) {
  for (unsigned i = 0; i < GPU_AFTER_STREAMS; i++)
    if (g->api->stream_query(g->after[i]) == GPU_SUCCESS) return g->after[i];
  return g->after[g->next_after++ % GPU_AFTER_STREAMS];
}

/* Picks a stream for work after these events and makes it wait for them. */
static int stream_after(struct gpu *g, const vm_event *after, size_t n, gpu_stream *stream) {
  *stream = g->work;
  for (size_t i = 0; i < n; i++) {
    gpu_result r;
    if (!after[i]) continue;
    if (*stream == g->work) *stream = free_after(g);
    r = g->api->stream_wait(*stream, gpu_event_handle(after[i]), 0);
    if (r != GPU_SUCCESS) return gpu_fail(g->api, r, "cuStreamWaitEvent");
  }
  return 0;
}

/* Starts fills or, if `copies` is given, copies. */
static int start(struct gpu *g, const struct vm_be_range *ranges, const struct vm_be_copy *copies, size_t n,
                 uint8_t value, const vm_event *after, size_t num_after, vm_event *done) {
  struct gpu_scope scope;
  gpu_stream stream;
  int err;
  *done = 0;
  if (!n) return 0;
  err = gpu_enter(g, 0, &scope);
  if (err) return err;
  err = stream_after(g, after, num_after, &stream);
  if (!err) err = copies ? launch_copies(g, stream, copies, n) : launch_fills(g, stream, ranges, n, value);
  if (!err) err = gpu_event_record(g, stream, done);
  /* Kernels launched before the failure must finish before the caller unmaps their pages. */
  if (err) g->api->stream_sync(stream);
  gpu_leave(g, &scope);
  return err;
}

int gpu_fill(struct gpu *g, const struct vm_be_range *ranges, size_t n, uint8_t value, const vm_event *after,
             size_t num_after, vm_event *done) {
  return start(g, ranges, NULL, n, value, after, num_after, done);
}

int gpu_copy(struct gpu *g, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
             vm_event *done) {
  return start(g, NULL, copies, n, 0, after, num_after, done);
}

/* Starts a copy; a context of devices[0] is current. */
static int copy_start(struct gpu *g, uint64_t dst, uint64_t src, uint64_t bytes, vm_event *done) {
  struct vm_be_copy one = {dst, src, bytes};
  int err = launch_copies(g, g->work, &one, 1);
  return err ? err : gpu_event_record(g, g->work, done);
}

/* Waits for the copy; 0 if none was started. */
static int copy_finish(struct gpu *g, vm_event *done) {
  int err = gpu_event_wait(g, *done);
  gpu_event_put(g, *done);
  *done = 0;
  return err;
}

int gpu_copy_init(struct gpu *g) {
  gpu_result r = g->api->module_load(&g->module, kernels);
  struct vm_be_range nothing = {0, 0};
  vm_event done = 0;
  int err;
  if (r != GPU_SUCCESS) return gpu_fail(g->api, r, "cuModuleLoadData: the driver cannot compile libvmem's kernels");
  r = g->api->module_function(&g->fill, g->module, "vmem_fill");
  if (r == GPU_SUCCESS) r = g->api->module_function(&g->copy, g->module, "vmem_copy");
  if (r != GPU_SUCCESS) return gpu_fail(g->api, r, "cuModuleGetFunction");
  r = g->api->host_alloc(&g->stage, STAGE_BYTES, GPU_HOST_PORTABLE);
  if (r != GPU_SUCCESS) {
    g->stage = NULL;
    return gpu_fail_at(g->api, r, 0, STAGE_BYTES, "cuMemHostAlloc (staging buffer)");
  }
  /* Launch both kernels once: by default CUDA loads a kernel lazily at its first launch. */
  err = launch_fills(g, g->work, &nothing, 1, 0);
  if (!err) err = copy_start(g, 0, 0, 0, &done);
  return err ? err : copy_finish(g, &done);
}

void gpu_copy_exit(struct gpu *g) {
  if (g->stage) g->api->host_free(g->stage);
  if (g->module) g->api->module_unload(g->module);
  g->stage = NULL;
  g->module = NULL;
}

/* CUDA's attributes of a host address; zeros if it has none. */
struct answers {
  unsigned type;
  gpu_ptr device; /* its address for kernels of the current context */
  unsigned long long id;
  gpu_ptr start;
  size_t size;
};

static struct answers ask(struct gpu *g, uint64_t host) {
  int attributes[] = {GPU_POINTER_MEMORY_TYPE, GPU_POINTER_DEVICE_POINTER, GPU_POINTER_BUFFER_ID,
                      GPU_POINTER_RANGE_START, GPU_POINTER_RANGE_SIZE};
  struct answers a = {0};
  void *to[] = {&a.type, &a.device, &a.id, &a.start, &a.size};
  if (g->api->pointer_attributes(5, attributes, to, host) != GPU_SUCCESS || a.type != GPU_MEMORY_HOST)
    a = (struct answers){0};
  return a;
}

/* Returns the device address of host memory inside one page-locked allocation or registration; else 0. */
static gpu_ptr locked(struct gpu *g, uint64_t host, uint64_t bytes) {
  struct answers first = ask(g, host), last;
  if (!first.device) return 0;
  if (host >= first.start && host - first.start < first.size && bytes <= first.size - (host - first.start))
    return first.device;
  last = ask(g, host + bytes - 1);
  return first.id && first.id == last.id && last.device == first.device + bytes - 1 ? first.device : 0;
}

static int transfer_directly(struct gpu *g, uint64_t dst, uint64_t src, uint64_t bytes) {
  vm_event done[WINDOWS] = {0};
  int err = 0;
  for (unsigned i = 0; bytes && !err; i = (i + 1) % WINDOWS) {
    uint64_t part = bytes < DIRECT_BYTES ? bytes : DIRECT_BYTES;
    err = copy_finish(g, &done[i]);
    if (!err) err = copy_start(g, dst, src, part, &done[i]);
    dst += part;
    src += part;
    bytes -= part;
  }
  for (unsigned i = 0; i < WINDOWS; i++) {
    int e = copy_finish(g, &done[i]);
    if (!err) err = e;
  }
  return err;
}

/* Part of the staging buffer and the copy in progress on it. */
struct window {
  uint8_t *at, *to; /* to: where the CPU copies the window once the GPU has filled it, or NULL */
  uint64_t bytes;
  vm_event done;
};

static int window_finish(struct gpu *g, struct window *w) {
  int err = copy_finish(g, &w->done);
  if (!err && w->to) memcpy(w->to, w->at, w->bytes);
  w->to = NULL;
  return err;
}

/* Each window starts at the same offset in a 16-byte word as the address, so that the copy is aligned. */
static int transfer_staged(struct gpu *g, uint8_t *in, const uint8_t *out, uint64_t addr, uint64_t bytes) {
  struct window windows[WINDOWS] = {0};
  int err = 0;
  for (unsigned i = 0; bytes && !err; i = (i + 1) % WINDOWS) {
    struct window *w = &windows[i];
    uint64_t shift = addr & 15;
    err = window_finish(g, w);
    if (err) break;
    w->at = (uint8_t *)g->stage + i * WINDOW_BYTES + shift;
    w->bytes = bytes < WINDOW_BYTES - shift ? bytes : WINDOW_BYTES - shift;
    if (out) {
      memcpy(w->at, out, w->bytes);
      err = copy_start(g, addr, (uint64_t)(uintptr_t)w->at, w->bytes, &w->done);
      out += w->bytes;
    } else {
      err = copy_start(g, (uint64_t)(uintptr_t)w->at, addr, w->bytes, &w->done);
      if (!err) w->to = in;
      in += w->bytes;
    }
    addr += w->bytes;
    bytes -= w->bytes;
  }
  for (unsigned i = 0; i < WINDOWS; i++) {
    int e = window_finish(g, &windows[i]);
    if (!err) err = e;
  }
  return err;
}

/* Reads into `in`, or writes from `out`. */
static int transfer(struct gpu *g, uint8_t *in, const uint8_t *out, uint64_t addr, uint64_t bytes) {
  struct gpu_scope scope;
  gpu_ptr host;
  int err;
  if (!bytes) return 0;
  err = gpu_enter(g, 0, &scope);
  if (err) return err;
  host = locked(g, (uint64_t)(uintptr_t)(out ? out : in), bytes);
  if (host && !((host ^ addr) & 15)) {
    err = out ? transfer_directly(g, addr, host, bytes) : transfer_directly(g, host, addr, bytes);
    if (err) g->api->stream_sync(g->work);
  } else {
    pthread_mutex_lock(&g->stage_lock);
    err = transfer_staged(g, in, out, addr, bytes);
    /* Kernels launched before the failure must not outlive the call: they use the buffer or the caller's pages. */
    if (err) g->api->stream_sync(g->work);
    pthread_mutex_unlock(&g->stage_lock);
  }
  gpu_leave(g, &scope);
  return err;
}

int gpu_read(struct gpu *g, void *dst, uint64_t addr, uint64_t bytes) { return transfer(g, dst, NULL, addr, bytes); }

int gpu_write(struct gpu *g, uint64_t addr, const void *src, uint64_t bytes) {
  return transfer(g, NULL, src, addr, bytes);
}
