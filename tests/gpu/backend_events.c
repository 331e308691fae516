/* SPDX-License-Identifier: MIT */
/* Description: order against GPU work, and graph capture elsewhere in the process. */
#include <errno.h>
#include <pthread.h>

#include "check.h"

static const char kernels[] =
    ".version 6.0\n.target sm_60\n.address_size 64\n"
    ".visible .entry spin(.param .u64 ns)\n{\n.reg .b64 %a<4>; .reg .pred %p;\n"
    "ld.param.u64 %a1, [ns];\n mov.u64 %a2, %globaltimer;\n add.u64 %a2, %a2, %a1;\n"
    "again:\n mov.u64 %a3, %globaltimer;\n setp.lt.u64 %p, %a3, %a2;\n @%p bra again;\n ret;\n}\n"
    ".visible .entry store(.param .u64 at, .param .u32 value)\n{\n.reg .b64 %a<2>; .reg .b32 "
    "%r<2>;\n"
    "ld.param.u64 %a1, [at];\n ld.param.u32 %r1, [value];\n st.global.u8 [%a1], %r1;\n ret;\n}\n";

/* Loads the function into the current context, since a module belongs to one context. */
static gpu_function function_of(const struct env *e, const char *name) {
  static struct {
    gpu_ctx ctx;
    gpu_module module;
  } loaded[VMEM_MAX_DEVICES];
  gpu_result (*current)(gpu_ctx *);
  gpu_function f = NULL;
  gpu_ctx ctx = NULL;
  unsigned i = 0;
  *(void **)&current = cuda_symbol("cuCtxGetCurrent");
  if (current(&ctx) != GPU_SUCCESS) abort();
  while (loaded[i].ctx && loaded[i].ctx != ctx) i++;
  if (!loaded[i].ctx && e->cu->module_load(&loaded[i].module, kernels) != GPU_SUCCESS) abort();
  loaded[i].ctx = ctx;
  if (e->cu->module_function(&f, loaded[i].module, name) != GPU_SUCCESS) abort();
  return f;
}

void kernel_spin(const struct env *e, gpu_stream stream, uint64_t ns) {
  void *args[] = {&ns};
  if (e->cu->launch(function_of(e, "spin"), 1, 1, 1, 1, 1, 1, 0, stream, args, NULL) != GPU_SUCCESS) abort();
}

gpu_result kernel_store(const struct env *e, uint64_t addr, uint32_t value) {
  void *args[] = {&addr, &value};
  gpu_result r = e->cu->launch(function_of(e, "store"), 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL);
  return r ? r : e->cu->stream_sync(NULL);
}

static bool all_bytes(const uint8_t *p, size_t n, uint8_t value) {
  for (size_t i = 0; i < n; i++)
    if (p[i] != value) return false;
  return true;
}

/* A page mapped for the length of one check. */
struct page {
  uint64_t addr, slab, priv;
};

static bool page_get(struct env *e, struct page *p) {
  uint32_t kind;
  return !e->b->reserve(e->be, e->page, 0, 0, &p->addr, &kind, &p->priv) &&
         !e->b->slab_create(e->be, e->page, e->page, VMEM_DEVICE, 0, &p->slab) &&
         !e->b->map(e->be, p->addr, e->page, p->slab, 0, 0, false);
}

static bool page_put(struct env *e, struct page *p) {
  return !e->b->unmap(e->be, p->addr, e->page, false) && !e->b->slab_destroy(e->be, p->slab, e->page) &&
         !put_range(e, p->addr, e->page, p->priv);
}

void check_events(struct env *e) {
  const struct vm_backend *b = e->b;
  struct page p;
  struct vm_be_range range;
  uint8_t got[256];
  vm_event after = 0, done = 0, other = 0, soon = 0;
  gpu_stream stream = NULL;
  gpu_cuevent theirs = NULL;
  bool ok;
  if (!check(e, "page for the event checks", page_get(e, &p))) return;
  range = (struct vm_be_range){p.addr, e->page};
  e->cu->stream_create(&stream, GPU_STREAM_NON_BLOCKING, 0);
  e->cu->event_create(&theirs, GPU_EVENT_DISABLE_TIMING);

  kernel_spin(e, stream, 100000000);
  check(e, "event_from a busy stream", !b->event_from(e->be, VMEM_AFTER_STREAM, (uint64_t)(uintptr_t)stream, &after));
  check(e, "event_query says not yet", b->event_query(e->be, after) == -EAGAIN);
  check(e, "a fill that waits for it starts", !b->fill(e->be, &range, 1, 0x11, &after, 1, &done) && done);
  check(e, "and has not finished", b->event_query(e->be, done) == -EAGAIN);
  ok = !b->fill(e->be, &range, 1, 0x22, NULL, 0, &other) && !b->event_wait(e->be, other);
  check(e, "a fill that waits for nothing passes it", ok && b->event_query(e->be, done) == -EAGAIN);
  b->event_put(e->be, other);
  ok = !b->event_from(e->be, VMEM_AFTER_STREAM, 0, &soon) && !b->fill(e->be, &range, 1, 0x22, &soon, 1, &other) &&
       !b->event_wait(e->be, other);
  check(e, "so does one that waits for less", ok && b->event_query(e->be, done) == -EAGAIN);
  b->event_put(e->be, other);
  b->event_put(e->be, soon);
  b->read(e->be, got, p.addr, sizeof(got));
  check(e, "the later fill finishes first", all_bytes(got, sizeof(got), 0x22));
  check(e, "event_wait", !b->event_wait(e->be, done) && b->event_query(e->be, after) == 0);
  b->read(e->be, got, p.addr, sizeof(got));
  check(e, "the waiting fill came after the kernel", all_bytes(got, sizeof(got), 0x11));
  b->event_put(e->be, done);
  b->event_put(e->be, after);

  kernel_spin(e, stream, 50000000);
  e->cu->event_record(theirs, stream);
  ok = !b->event_from(e->be, VMEM_AFTER_EVENT, (uint64_t)(uintptr_t)theirs, &after);
  check(e, "the caller's event: not yet", ok && b->event_query(e->be, after) == -EAGAIN);
  check(e, "the caller's event: waited for", !b->event_wait(e->be, after));
  b->event_put(e->be, after);
  check(e, "event_put leaves the caller's event alone", e->cu->event_query(theirs) == GPU_SUCCESS);

  /* Order: a stream of the caller waits for our fill, which waits for a kernel. */
  kernel_spin(e, stream, 50000000);
  b->event_from(e->be, VMEM_AFTER_STREAM, (uint64_t)(uintptr_t)stream, &after);
  b->fill(e->be, &range, 1, 0x33, &after, 1, &done);
  ok = !b->stream_wait(e->be, 0, done) && kernel_store(e, p.addr, 0x44) == GPU_SUCCESS;
  b->read(e->be, got, p.addr, sizeof(got));
  check(e, "stream_wait orders the caller after a fill", ok && got[0] == 0x44 && got[1] == 0x33);
  b->event_put(e->be, done);
  b->event_put(e->be, after);
  check(e, "event_from the default stream",
        !b->event_from(e->be, VMEM_AFTER_STREAM, 0, &after) && !b->event_wait(e->be, after));
  b->event_put(e->be, after);
  check(e, "event of an unknown kind", b->event_from(e->be, 77, 1, &after) == -EINVAL);
  e->cu->event_destroy(theirs);
  e->cu->stream_destroy(stream);
  check(e, "page given back", page_put(e, &p));
}

struct thread_job {
  struct env *e;
  uint64_t addr, slab;
  int id;
  bool ok;
};

/* Each thread works in its own part of one reservation, on one common slab if slabs can be shared.
 */
static void *work_in_thread(void *arg) {
  struct thread_job *job = arg;
  struct env *e = job->e;
  uint64_t offset = e->info.one_page_slabs ? 0 : (uint64_t)job->id * e->page;
  job->ok = true;
  for (int i = 0; i < 200 && job->ok; i++) {
    struct vm_be_range range = {job->addr + (uint64_t)(i % 16) * e->page, e->page};
    uint8_t value = (uint8_t)(job->id * 50 + i % 50), got[64];
    vm_event done;
    job->ok = !e->b->map(e->be, range.addr, range.bytes, job->slab, offset, 0, false) &&
              !e->b->fill(e->be, &range, 1, value, NULL, 0, &done) && !e->b->event_wait(e->be, done);
    if (!job->ok) break;
    e->b->event_put(e->be, done);
    job->ok = !e->b->read(e->be, got, range.addr + e->page - sizeof(got), sizeof(got)) &&
              all_bytes(got, sizeof(got), value) && !e->b->unmap(e->be, range.addr, range.bytes, false);
  }
  return NULL;
}

void check_threads(struct env *e) {
  enum { THREADS = 4 };
  struct thread_job jobs[THREADS];
  pthread_t threads[THREADS];
  uint64_t addr, priv, slab[THREADS], bytes = 16 * e->page;
  uint32_t kind;
  bool ok = !e->b->reserve(e->be, THREADS * bytes, 0, 0, &addr, &kind, &priv);

  for (int i = 0; i < THREADS && ok; i++)
    if (e->info.one_page_slabs || i == 0)
      ok = !e->b->slab_create(e->be, e->info.one_page_slabs ? e->page : bytes, e->page, VMEM_DEVICE, 0, &slab[i]);
    else
      slab[i] = slab[0];
  if (!check(e, "reserve for four threads", ok)) return;
  for (int i = 0; i < THREADS; i++) {
    jobs[i] = (struct thread_job){e, addr + (uint64_t)i * bytes, slab[i], i, false};
    pthread_create(&threads[i], NULL, work_in_thread, &jobs[i]);
  }
  for (int i = 0; i < THREADS; i++) {
    pthread_join(threads[i], NULL);
    ok = ok && jobs[i].ok;
  }
  check(e, "four threads map, fill, read and unmap at once", ok);
  ok = !put_range(e, addr, THREADS * bytes, priv);
  for (int i = 0; i < THREADS; i++)
    if (e->info.one_page_slabs || i == 0)
      ok = !e->b->slab_destroy(e->be, slab[i], e->info.one_page_slabs ? e->page : bytes) && ok;
  check(e, "and free everything", ok);
}

struct capture_job {
  struct env *e;
  bool ok;
};

/* Makes all calls that reach the driver, while a stream is being captured in global mode. */
static void *work_during_capture(void *arg) {
  struct capture_job *job = arg;
  struct env *e = job->e, second;
  struct page p;
  uint8_t bytes[64] = {1, 2, 3};
  vm_event done = 0;
  struct vm_be_range range;
  job->ok = page_get(e, &p);
  range = (struct vm_be_range){p.addr, e->page};
  job->ok = job->ok && !e->b->fill(e->be, &range, 1, 0, NULL, 0, &done) && !e->b->event_wait(e->be, done);
  e->b->event_put(e->be, done);
  job->ok = job->ok && !e->b->write(e->be, p.addr, bytes, sizeof(bytes)) &&
            !e->b->read(e->be, bytes, p.addr, sizeof(bytes)) && bytes[2] == 3 && page_put(e, &p);
  if (job->ok) {
    second = *e;
    env_open(&second, e->b, 0);
    second.b->close(second.be);
  }
  return NULL;
}

static void idle_event(struct env *e, vm_event *event) {
  gpu_stream stream = NULL;
  e->cu->stream_create(&stream, GPU_STREAM_NON_BLOCKING, 0);
  e->b->event_from(e->be, VMEM_AFTER_STREAM, (uint64_t)(uintptr_t)stream, event);
  e->cu->stream_destroy(stream);
}

void check_capture(struct env *e) {
  gpu_result (*begin)(gpu_stream, int), (*end)(gpu_stream, void **), (*drop)(void *);
  void *symbols[3] = {cuda_symbol("cuStreamBeginCapture_v2"), cuda_symbol("cuStreamEndCapture"),
                      cuda_symbol("cuGraphDestroy")};
  gpu_stream stream = NULL;
  struct capture_job here = {e, false}, there = {e, false};
  vm_event event = 0;
  pthread_t thread;
  void *graph = NULL;
  gpu_result r;
  memcpy(&begin, &symbols[0], sizeof(begin));
  memcpy(&end, &symbols[1], sizeof(end));
  memcpy(&drop, &symbols[2], sizeof(drop));
  e->cu->stream_create(&stream, GPU_STREAM_NON_BLOCKING, 0);
  if (!check(e, "begin a capture in global mode", begin(stream, 0) == GPU_SUCCESS)) return;
  kernel_spin(e, stream, 1000);
  work_during_capture(&here);
  check(e, "all calls during a capture, same thread", here.ok);
  pthread_create(&thread, NULL, work_during_capture, &there);
  pthread_join(thread, NULL);
  check(e, "all calls during a capture, other thread", there.ok);
  check(e, "event_from a captured stream is refused",
        e->b->event_from(e->be, VMEM_AFTER_STREAM, (uint64_t)(uintptr_t)stream, &event) == -EINVAL);
  idle_event(e, &event);
  check(e, "stream_wait of a captured stream is refused",
        e->b->stream_wait(e->be, (uint64_t)(uintptr_t)stream, event) == -EINVAL);
  e->b->event_put(e->be, event);
  r = end(stream, &graph);
  check(e, "the capture is intact", r == GPU_SUCCESS && graph);
  if (graph) drop(graph);
  e->cu->stream_destroy(stream);
}
