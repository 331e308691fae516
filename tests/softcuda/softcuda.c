/* SPDX-License-Identifier: MIT */
/*
 * softcuda.c - libcuda.so.1 for machines without a GPU: implements the calls that libvmem's back end "cuda" and pyvmem
 * make, with memfds and threads.
 *
 * It guarantees only what a driver guarantees: new memory contains garbage; calls that need a current context fail
 * without one; an allocation can only be mapped and unmapped as a whole; addresses with mappings cannot be freed;
 * streams are asynchronous; nothing works in the child of a fork. A kernel that accesses a wrong address causes a
 * segmentation fault. Kernels are recognised by name: the two of the back end, and the self-test's "touch", for which a
 * wrong address breaks the context, as on a GPU. With softrm.c, which replaces the kernel modules, it also opens a
 * descriptor of UVM and provides managed memory, as the back end stock requires.
 *
 *   SOFTCUDA_DEVICES (1): number of devices
 *   SOFTCUDA_MEMORY (4294967296): bytes of each device
 *   SOFTCUDA_DELAY_US (0): maximum random delay before work of a stream starts
 *   SOFTCUDA_CALL_US (0): maximum random delay of calls that create, map, unmap or release memory, as if other
 *     processes used the device
 */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NOT_INITIALIZED = 3,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  PEER_ALREADY_ENABLED = 704,
  NOT_SUPPORTED = 801,
  MAX_DEVICES = 8,
  MAX_DEPTH = 16,
  GRANULE = 2 << 20,
  GARBAGE = 0xcb
};

/* ---- state, protected by `lock` ----------------------------------------------------------------- */

struct alloc { /* from cuMemCreate; freed once it is released and no longer mapped */
  uint64_t id, bytes, maps;
  int fd, device; /* -1: host memory */
  bool released;
  struct alloc *next;
};

struct mapping {
  uint64_t addr, bytes;
  struct alloc *of;
  struct mapping *next;
};

struct range { /* reserved addresses, or pinned host memory */
  uint64_t addr, bytes, id;
  struct range *next;
};

struct event {
  uint64_t recorded, done; /* counts */
};

struct op {
  enum { FILL, COPY, TOUCH, RECORD, WAIT } kind;
  struct event *event;
  uint64_t count;
  unsigned ranges;
  void *params;
  struct op *next;
};

struct stream {
  struct context *ctx;
  pthread_t thread;
  struct op *first, **last;
  bool busy, ending;
  struct stream *next;
};

struct context {
  int device, retained;
  uint64_t used;
  struct stream standard; /* the default streams */
  struct stream *streams;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct context contexts[MAX_DEVICES];
static struct alloc *allocs;
static struct mapping *mappings;
static struct range *reserved, *locked_host;
static uint64_t next_id = 1, memory = 4ull << 30;
static unsigned num_devices = 1, delay_us, call_us;
static bool started, forked, broken; /* broken: a kernel has faulted */

/* Functions of softrm.c, if that is loaded too. */
extern void softrm_attach(unsigned devices, uint64_t memory, uint64_t (*used_by_cuda)(unsigned device))
    __attribute__((weak));
extern uint64_t softrm_used(unsigned device) __attribute__((weak));

static uint64_t used_here(unsigned device) { return contexts[device].used; }
static uint64_t used_in_all(int device) {
  return contexts[device].used + (softrm_used ? softrm_used((unsigned)device) : 0);
}

static _Thread_local struct context *stack[MAX_DEPTH];
static _Thread_local unsigned depth;

static struct context *current(void) { return depth ? stack[depth - 1] : NULL; }

#define NEED_STARTED()                                                                                                 \
  if (!started || forked) return NOT_INITIALIZED
#define NEED_CONTEXT()                                                                                                 \
  NEED_STARTED();                                                                                                      \
  if (!current()) return INVALID_CONTEXT;                                                                              \
  if (broken) return ILLEGAL_ADDRESS
#define EXPORT __attribute__((visibility("default")))

static uint64_t number(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void in_child(void) { forked = true; }

/* ---- streams ----------------------------------------------------------------------------------- */

struct fill_range {
  uint64_t addr, bytes;
};

struct fill_params {
  uint32_t pattern, reserved;
  struct fill_range ranges[250];
};

struct copy_params {
  struct {
    uint64_t dst, src, bytes;
  } copies[166];
};

static void late(unsigned most, unsigned *seed) {
  unsigned us = most ? (unsigned)rand_r(seed) % (most + 1) : 0;
  struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000L};
  if (us) nanosleep(&t, NULL);
}

static void late_call(void) {
  static _Thread_local unsigned seed;
  if (!seed) seed = (unsigned)(uintptr_t)&seed;
  late(call_us, &seed);
}

struct touch_params {
  uint64_t addr, write;
};

/* True if the address is accessible. System calls access it, because they return an error where a load would crash. */
static bool may_touch(const struct touch_params *p) {
  uint32_t word;
  void *at = (void *)(uintptr_t)p->addr;
  int ends[2];
  bool may;
  if (pipe(ends)) return false;
  may = write(ends[1], at, sizeof(word)) == sizeof(word) && read(ends[0], &word, sizeof(word)) == sizeof(word);
  word++;
  if (may && p->write)
    may = write(ends[1], &word, sizeof(word)) == sizeof(word) && read(ends[0], at, sizeof(word)) == sizeof(word);
  close(ends[0]);
  close(ends[1]);
  return may;
}

static void compute(const struct op *op) {
  const struct fill_params *fill = op->params;
  const struct copy_params *copy = op->params;
  if (op->kind == TOUCH && !may_touch(op->params)) broken = true;
  for (unsigned i = 0; i < op->ranges && op->kind != TOUCH; i++)
    if (op->kind == FILL)
      memset((void *)(uintptr_t)fill->ranges[i].addr, (int)(fill->pattern & 0xff), fill->ranges[i].bytes);
    else
      memmove((void *)(uintptr_t)copy->copies[i].dst, (void *)(uintptr_t)copy->copies[i].src, copy->copies[i].bytes);
}

static void *run(void *arg) {
  struct stream *s = arg;
  unsigned seed = (unsigned)(uintptr_t)s;
  pthread_mutex_lock(&lock);
  for (;;) {
    struct op *op;
    while (!s->first && !s->ending) pthread_cond_wait(&changed, &lock);
    op = s->first;
    if (!op) break;
    while (op->kind == WAIT && op->event->done < op->count) pthread_cond_wait(&changed, &lock);
    if (op->params) {
      pthread_mutex_unlock(&lock);
      late(delay_us, &seed);
      compute(op);
      pthread_mutex_lock(&lock);
    } else if (op->kind == RECORD && op->event->done < op->count) {
      op->event->done = op->count;
    }
    s->first = op->next;
    if (!s->first) s->last = &s->first;
    free(op->params);
    free(op);
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&lock);
  return NULL;
}

static int begin(struct stream *s, struct context *ctx) {
  s->ctx = ctx;
  s->last = &s->first;
  s->ending = false;
  return pthread_create(&s->thread, NULL, run, s) ? OUT_OF_MEMORY : OK;
}

static void put(struct stream *s, struct op op) {
  struct op *new = malloc(sizeof(*new));
  if (!new) abort();
  *new = op;
  new->next = NULL;
  *s->last = new;
  s->last = &new->next;
  pthread_cond_broadcast(&changed);
}

static struct stream *stream_of(void *handle) {
  return (uintptr_t)handle <= 2 ? &current()->standard : (struct stream *)handle;
}

static void finish(struct stream *s) {
  while (s->first) pthread_cond_wait(&changed, &lock);
}

EXPORT int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  struct stream *s;
  int err;
  (void)flags, (void)priority;
  NEED_CONTEXT();
  s = calloc(1, sizeof(*s));
  if (!s) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  err = begin(s, current());
  if (!err) {
    s->next = s->ctx->streams;
    s->ctx->streams = s;
  }
  pthread_mutex_unlock(&lock);
  if (err) free(s);
  *stream = s;
  return err;
}

EXPORT int cuStreamDestroy_v2(void *stream) {
  struct stream *s = stream, **at;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  for (at = &s->ctx->streams; *at != s; at = &(*at)->next) {
  }
  *at = s->next;
  s->ending = true;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  pthread_join(s->thread, NULL);
  free(s);
  return OK;
}

EXPORT int cuStreamSynchronize(void *stream) {
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  finish(stream_of(stream));
  pthread_mutex_unlock(&lock);
  return OK;
}

EXPORT int cuStreamQuery(void *stream) {
  int ready;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  ready = !stream_of(stream)->first;
  pthread_mutex_unlock(&lock);
  return ready ? OK : NOT_READY;
}

EXPORT int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  struct event *e = event;
  (void)flags;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  put(stream_of(stream), (struct op){.kind = WAIT, .event = e, .count = e->recorded});
  pthread_mutex_unlock(&lock);
  return OK;
}

EXPORT int cuStreamGetCtx(void *stream, void **ctx) {
  NEED_CONTEXT();
  *ctx = stream_of(stream)->ctx;
  return OK;
}

EXPORT int cuStreamIsCapturing(void *stream, int *capturing) {
  (void)stream;
  NEED_CONTEXT();
  *capturing = 0;
  return OK;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode) {
  (void)mode;
  return OK;
}

EXPORT int cuCtxSynchronize(void) {
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  finish(&current()->standard);
  for (struct stream *s = current()->streams; s;) { /* after a wait the list may have changed: start over */
    bool waited = s->first != NULL;
    if (waited) pthread_cond_wait(&changed, &lock);
    s = waited ? current()->streams : s->next;
  }
  pthread_mutex_unlock(&lock);
  return broken ? ILLEGAL_ADDRESS : OK;
}

/* ---- events ------------------------------------------------------------------------------------ */

EXPORT int cuEventCreate(void **event, unsigned flags) {
  (void)flags;
  NEED_CONTEXT();
  *event = calloc(1, sizeof(struct event));
  return *event ? OK : OUT_OF_MEMORY;
}

EXPORT int cuEventDestroy_v2(void *event) {
  struct event *e = event;
  NEED_STARTED();
  pthread_mutex_lock(&lock);
  while (e->done < e->recorded) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  free(e);
  return OK;
}

EXPORT int cuEventRecord(void *event, void *stream) {
  struct event *e = event;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  put(stream_of(stream), (struct op){.kind = RECORD, .event = e, .count = ++e->recorded});
  pthread_mutex_unlock(&lock);
  return OK;
}

EXPORT int cuEventQuery(void *event) {
  struct event *e = event;
  bool done;
  NEED_STARTED();
  pthread_mutex_lock(&lock);
  done = e->done >= e->recorded;
  pthread_mutex_unlock(&lock);
  return done ? OK : NOT_READY;
}

EXPORT int cuEventSynchronize(void *event) {
  struct event *e = event;
  NEED_STARTED();
  pthread_mutex_lock(&lock);
  while (e->done < e->recorded) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ---- kernels ----------------------------------------------------------------------------------- */

enum { KERNELS = 3 };
static char names[KERNELS][16] = {"vmem_fill", "vmem_copy", "touch"}; /* a function's handle is its name */
static const size_t sizes[KERNELS] = {sizeof(struct fill_params), sizeof(struct copy_params),
                                      sizeof(struct touch_params)};

EXPORT int cuModuleLoadData(void **module, const void *image) {
  NEED_CONTEXT();
  *module = (void *)(uintptr_t)image;
  return OK;
}

EXPORT int cuModuleUnload(void *module) {
  (void)module;
  NEED_CONTEXT();
  return OK;
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
  (void)module;
  NEED_CONTEXT();
  for (unsigned i = 0; i < KERNELS; i++)
    if (!strcmp(names[i], name)) {
      *function = names[i];
      return OK;
    }
  return NOT_FOUND;
}

EXPORT int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **args, void **extra) {
  unsigned kernel = 0;
  void *params;
  (void)gx, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
  NEED_CONTEXT();
  while (kernel < KERNELS && function != names[kernel]) kernel++;
  if (kernel == KERNELS) return INVALID_VALUE;
  params = malloc(sizes[kernel]);
  if (!params) return OUT_OF_MEMORY;
  if (kernel == TOUCH)
    *(struct touch_params *)params = (struct touch_params){*(uint64_t *)args[0], *(uint64_t *)args[1]};
  else
    memcpy(params, args[0], sizes[kernel]);
  pthread_mutex_lock(&lock);
  put(stream_of(stream), (struct op){.kind = kernel, .ranges = gy, .params = params});
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ---- the driver, devices, contexts ------------------------------------------------------------- */

EXPORT int cuInit(unsigned flags) {
  (void)flags;
  if (forked) return NOT_INITIALIZED;
  pthread_mutex_lock(&lock);
  if (!started) {
    num_devices = (unsigned)number("SOFTCUDA_DEVICES", 1);
    if (num_devices > MAX_DEVICES) num_devices = MAX_DEVICES;
    memory = number("SOFTCUDA_MEMORY", 4ull << 30);
    delay_us = (unsigned)number("SOFTCUDA_DELAY_US", 0);
    call_us = (unsigned)number("SOFTCUDA_CALL_US", 0);
    pthread_atfork(NULL, NULL, in_child);
    if (softrm_attach) softrm_attach(num_devices, memory, used_here);
    started = true;
  }
  pthread_mutex_unlock(&lock);
  return OK;
}

EXPORT int cuDriverGetVersion(int *version) {
  *version = 13000;
  return OK;
}

EXPORT int cuGetErrorName(int error, const char **name) {
  static const struct {
    int error;
    const char *name;
  } known[] = {{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},     {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
               {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
               {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
               {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"}};
  *name = NULL;
  for (unsigned i = 0; i < sizeof(known) / sizeof(*known); i++)
    if (known[i].error == error) *name = known[i].name;
  return *name ? OK : INVALID_VALUE;
}

/* cuda.bindings looks up the calls with this. */
EXPORT int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
  static const char *const suffixes[] = {"_v2", ""};
  char name[96];
  Dl_info self;
  void *library;
  (void)version, (void)flags;
  *function = NULL;
  dladdr(names, &self);
  library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  for (unsigned i = 0; i < 2 && library && !*function; i++) {
    snprintf(name, sizeof(name), "%s%s", symbol, suffixes[i]);
    *function = dlsym(library, name);
  }
  if (library) dlclose(library);
  if (status) *status = *function ? 0 : 1; /* found, or no such symbol */
  return *function ? OK : NOT_FOUND;
}

EXPORT int cuDeviceGetCount(int *count) {
  NEED_STARTED();
  *count = (int)num_devices;
  return OK;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
  NEED_STARTED();
  if (ordinal < 0 || ordinal >= (int)num_devices) return INVALID_DEVICE;
  *device = ordinal;
  return OK;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
  (void)device;
  snprintf(name, (size_t)size, "software CUDA device");
  return OK;
}

EXPORT int cuDeviceGetUuid(uint8_t *uuid, int device) {
  memset(uuid, 0xc5, 15);
  uuid[15] = (uint8_t)device;
  return OK;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  *value = attribute == 16 ? 8 : attribute == 75 ? 9 : attribute == 41 || attribute == 102; /* SMs; CC; UVA, VMM */
  return OK;
}

EXPORT int cuDeviceCanAccessPeer(int *can, int one, int other) {
  *can = one != other;
  return OK;
}

EXPORT int cuDevicePrimaryCtxRetain(void **ctx, int device) {
  struct context *c = &contexts[device];
  int err = OK;
  NEED_STARTED();
  pthread_mutex_lock(&lock);
  c->device = device;
  if (!c->standard.ctx) err = begin(&c->standard, c);
  if (!err) c->retained++;
  pthread_mutex_unlock(&lock);
  *ctx = c;
  return err;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  int err;
  NEED_STARTED();
  pthread_mutex_lock(&lock);
  err = contexts[device].retained ? OK : INVALID_CONTEXT;
  if (!err) contexts[device].retained--;
  pthread_mutex_unlock(&lock);
  return err;
}

EXPORT int cuCtxPushCurrent_v2(void *ctx) {
  struct context *c = ctx;
  NEED_STARTED();
  if (!c || !c->retained) return INVALID_CONTEXT;
  if (depth == MAX_DEPTH) return INVALID_VALUE;
  stack[depth++] = c;
  return OK;
}

EXPORT int cuCtxPopCurrent_v2(void **ctx) {
  NEED_CONTEXT();
  *ctx = stack[--depth];
  return OK;
}

EXPORT int cuCtxGetCurrent(void **ctx) {
  NEED_STARTED();
  *ctx = depth ? stack[depth - 1] : NULL;
  return OK;
}

EXPORT int cuCtxSetCurrent(void *ctx) {
  struct context *c = ctx;
  NEED_STARTED();
  if (c && !c->retained) return INVALID_CONTEXT;
  if (depth) depth--;
  if (c) stack[depth++] = c;
  return OK;
}

EXPORT int cuCtxEnablePeerAccess(void *peer, unsigned flags) {
  (void)peer, (void)flags;
  NEED_CONTEXT();
  return PEER_ALREADY_ENABLED;
}

EXPORT int cuCtxGetStreamPriorityRange(int *low, int *high) {
  NEED_CONTEXT();
  *low = 0;
  *high = -5;
  return OK;
}

/* ---- memory ------------------------------------------------------------------------------------ */

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  *free_bytes = memory - used_in_all(current()->device);
  *total = memory;
  pthread_mutex_unlock(&lock);
  return OK;
}

EXPORT int cuMemGetAllocationGranularity(size_t *granule, const void *prop, int option) {
  (void)prop, (void)option;
  NEED_STARTED();
  *granule = GRANULE;
  return OK;
}

static int add_range(struct range **list, uint64_t addr, uint64_t bytes) {
  struct range *r = malloc(sizeof(*r));
  if (!r) return OUT_OF_MEMORY;
  *r = (struct range){addr, bytes, next_id++, *list};
  *list = r;
  return OK;
}

static int drop_range(struct range **list, uint64_t addr, uint64_t bytes) {
  for (; *list; list = &(*list)->next)
    if ((*list)->addr == addr && (!bytes || (*list)->bytes == bytes)) {
      struct range *gone = *list;
      *list = gone->next;
      free(gone);
      return OK;
    }
  return INVALID_VALUE;
}

static bool within(const struct range *r, uint64_t addr, uint64_t bytes) {
  return addr >= r->addr && bytes <= r->bytes && addr - r->addr <= r->bytes - bytes;
}

static bool is_mapped(uint64_t addr, uint64_t bytes) {
  for (struct mapping *m = mappings; m; m = m->next)
    if (addr < m->addr + m->bytes && m->addr < addr + bytes) return true;
  return false;
}

/* Makes addresses inaccessible. */
static void *closed(uint64_t addr, uint64_t bytes) {
  return mmap((void *)(uintptr_t)addr, bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (addr ? MAP_FIXED : 0), -1, 0);
}

EXPORT int cuMemAddressReserve(uint64_t *addr, size_t bytes, size_t align, uint64_t hint, unsigned long long flags) {
  uint64_t start;
  char *all;
  int err;
  (void)hint, (void)flags;
  NEED_CONTEXT();
  if (!bytes || bytes % GRANULE || (align & (align - 1))) return INVALID_VALUE;
  if (align < GRANULE) align = GRANULE;
  all = closed(0, bytes + align);
  if (all == MAP_FAILED) return OUT_OF_MEMORY;
  start = ((uint64_t)(uintptr_t)all + align - 1) / align * align;
  if (start > (uint64_t)(uintptr_t)all) munmap(all, start - (uint64_t)(uintptr_t)all);
  munmap((void *)(uintptr_t)(start + bytes), (uint64_t)(uintptr_t)all + align - start);
  pthread_mutex_lock(&lock);
  err = add_range(&reserved, start, bytes);
  pthread_mutex_unlock(&lock);
  *addr = start;
  return err;
}

EXPORT int cuMemAddressFree(uint64_t addr, size_t bytes) {
  int err;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  err = is_mapped(addr, bytes) ? INVALID_VALUE : drop_range(&reserved, addr, bytes);
  if (!err) munmap((void *)(uintptr_t)addr, bytes);
  pthread_mutex_unlock(&lock);
  return err;
}

struct prop { /* the first fields of CUmemAllocationProp */
  int32_t type, handle_types, location, id;
};

EXPORT int cuMemCreate(unsigned long long *handle, size_t bytes, const void *prop, unsigned long long flags) {
  const struct prop *p = prop;
  struct alloc *a;
  int device = p->location == 1 ? p->id : -1;
  void *seen;
  (void)flags;
  NEED_CONTEXT();
  late_call();
  if (!bytes || bytes % GRANULE || device >= (int)num_devices) return INVALID_VALUE;
  a = calloc(1, sizeof(*a));
  if (!a) return OUT_OF_MEMORY;
  *a = (struct alloc){.bytes = bytes, .device = device, .fd = memfd_create("softcuda", MFD_CLOEXEC)};
  seen = MAP_FAILED;
  pthread_mutex_lock(&lock);
  if (a->fd >= 0 && (device < 0 || used_in_all(device) + bytes <= memory) && !ftruncate(a->fd, (off_t)bytes))
    seen = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, a->fd, 0);
  if (seen == MAP_FAILED) {
    pthread_mutex_unlock(&lock);
    if (a->fd >= 0) close(a->fd);
    free(a);
    return OUT_OF_MEMORY;
  }
  if (device >= 0) contexts[device].used += bytes;
  a->id = next_id++;
  a->next = allocs;
  allocs = a;
  pthread_mutex_unlock(&lock);
  memset(seen, GARBAGE, bytes);
  munmap(seen, bytes);
  *handle = a->id;
  return OK;
}

static struct alloc **find(uint64_t id) {
  struct alloc **at = &allocs;
  while (*at && (*at)->id != id) at = &(*at)->next;
  return at;
}

static void let_go(struct alloc *a) {
  struct alloc **at = find(a->id);
  if (!a->released || a->maps) return;
  *at = a->next;
  if (a->device >= 0) contexts[a->device].used -= a->bytes;
  close(a->fd);
  free(a);
}

EXPORT int cuMemRelease(unsigned long long handle) {
  struct alloc *a;
  int err = INVALID_VALUE;
  NEED_CONTEXT();
  late_call();
  pthread_mutex_lock(&lock);
  a = *find(handle);
  if (a && !a->released) {
    a->released = true;
    let_go(a);
    err = OK;
  }
  pthread_mutex_unlock(&lock);
  return err;
}

EXPORT int cuMemMap(uint64_t addr, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
  struct mapping *m = malloc(sizeof(*m));
  struct range *r;
  struct alloc *a;
  int err = INVALID_VALUE;
  (void)flags;
  NEED_CONTEXT();
  late_call();
  if (!m) return OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  a = *find(handle);
  for (r = reserved; r && !within(r, addr, bytes); r = r->next) {
  }
  if (a && !a->released && r && !offset && bytes == a->bytes && addr % GRANULE == 0 && !is_mapped(addr, bytes)) {
    *m = (struct mapping){addr, bytes, a, mappings};
    mappings = m;
    a->maps++;
    err = OK;
  }
  pthread_mutex_unlock(&lock);
  if (err) free(m);
  return err;
}

EXPORT int cuMemSetAccess(uint64_t addr, size_t bytes, const void *access, size_t count) {
  const struct {
    int32_t location, id, prot;
  } *first = access;
  int prot = first->prot == 3 ? PROT_READ | PROT_WRITE : first->prot == 1 ? PROT_READ : PROT_NONE, err = INVALID_VALUE;
  NEED_CONTEXT();
  late_call();
  if (!count) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (struct mapping *m = mappings; m; m = m->next)
    if (m->addr == addr && m->bytes == bytes)
      err = mmap((void *)(uintptr_t)addr, bytes, prot, MAP_SHARED | MAP_FIXED, m->of->fd, 0) == MAP_FAILED
                ? OUT_OF_MEMORY
                : OK;
  pthread_mutex_unlock(&lock);
  return err;
}

/* Unmaps complete mappings without gaps between them. */
EXPORT int cuMemUnmap(uint64_t addr, size_t bytes) {
  struct mapping **at;
  uint64_t found = 0;
  bool cut = false;
  NEED_CONTEXT();
  late_call();
  pthread_mutex_lock(&lock);
  for (struct mapping *m = mappings; m; m = m->next)
    if (m->addr < addr + bytes && addr < m->addr + m->bytes) {
      cut |= m->addr < addr || m->addr + m->bytes > addr + bytes;
      found += m->bytes;
    }
  if (cut || found != bytes || closed(addr, bytes) == MAP_FAILED) {
    pthread_mutex_unlock(&lock);
    return INVALID_VALUE;
  }
  for (at = &mappings; *at;) {
    struct mapping *m = *at;
    if (m->addr >= addr && m->addr < addr + bytes) {
      *at = m->next;
      m->of->maps--;
      let_go(m->of);
      free(m);
    } else {
      at = &m->next;
    }
  }
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ---- host memory ------------------------------------------------------------------------------- */

EXPORT int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
  int err;
  (void)flags;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  err = add_range(&locked_host, (uint64_t)(uintptr_t)at, bytes);
  pthread_mutex_unlock(&lock);
  return err;
}

EXPORT int cuMemHostUnregister(void *at) {
  int err;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  err = drop_range(&locked_host, (uint64_t)(uintptr_t)at, 0);
  pthread_mutex_unlock(&lock);
  return err;
}

EXPORT int cuMemHostAlloc(void **at, size_t bytes, unsigned flags) {
  NEED_CONTEXT();
  *at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return *at ? cuMemHostRegister_v2(*at, bytes, flags) : OUT_OF_MEMORY;
}

EXPORT int cuMemFreeHost(void *at) {
  int err = cuMemHostUnregister(at);
  if (!err) free(at);
  return err;
}

/* Attributes of pinned memory that libvmem queries: type (host), address in kernels, id, start, size. */
EXPORT int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t addr) {
  struct range *r;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  for (r = locked_host; r && !within(r, addr, 1); r = r->next) {
  }
  for (unsigned i = 0; i < count; i++) {
    if (attributes[i] == 2)
      *(unsigned *)values[i] = r ? 1 : 0;
    else
      *(uint64_t *)values[i] = !r                    ? 0
                               : attributes[i] == 3  ? addr
                               : attributes[i] == 7  ? r->id
                               : attributes[i] == 11 ? r->addr
                                                     : r->bytes;
  }
  pthread_mutex_unlock(&lock);
  return OK;
}

/* ---- managed memory: addresses at which "stock" maps its own pages ------------------------------ */

EXPORT int cuMemAllocManaged(uint64_t *addr, size_t bytes, unsigned flags) {
  int err;
  (void)flags;
  NEED_CONTEXT();
  if (!softrm_attach) return NOT_SUPPORTED;
  err = cuMemAddressReserve(addr, (bytes + GRANULE - 1) / GRANULE * GRANULE, GRANULE, 0, 0);
  if (!err) mprotect((void *)(uintptr_t)*addr, bytes, PROT_READ | PROT_WRITE);
  return err;
}

EXPORT int cuMemFree_v2(uint64_t addr) {
  struct range *r;
  uint64_t bytes = 0;
  NEED_CONTEXT();
  pthread_mutex_lock(&lock);
  for (r = reserved; r; r = r->next)
    if (r->addr == addr) bytes = r->bytes;
  pthread_mutex_unlock(&lock);
  return bytes ? cuMemAddressFree(addr, bytes) : INVALID_VALUE;
}
