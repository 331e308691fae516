/* SPDX-License-Identifier: MIT */
/*
 * The back end for a machine without a GPU: real reservations (PROT_NONE mappings), real pages
 * (parts of one memfd), mapped with MAP_FIXED; a freed page is punched out of the file.
 *
 * Every scattered page is a VMA of the process, and the kernel allows vm.max_map_count of them (65,530
 * by default). The core counts the pieces; room() keeps the sum over all contexts below the limit by a margin, so that
 * an undo, which may briefly need one VMA more, does not fail. If other code in the process has used up the margin, the
 * kernel may let a map call reach one VMA above the limit, and then refuses every further mmap, including the undo's:
 * the undo then frees spare mappings first.
 *
 * A GPU's driver maps a slab of pages of 2 MiB with entries of that size where it can, and then changes none in part.
 * So does this back end (entries.h): code that works here works on a GPU.
 *
 * All mappings are MADV_DONTFORK: a forked child must not write to the parent's pages, nor keep them when the parent
 * has ended. A fork waits for calls that have created a mapping but not yet marked it.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/backend.h"
#include "backend/host/entries.h"
#include "base/available.h"
#include "base/clock.h"
#include "base/context.h"
#include "base/fd.h"

#define VMA_MARGIN 256u   /* VMAs kept free for an undo, thread stacks and libraries loaded later */
#define VMA_RECOUNT 4096u /* new pieces after which the process's other VMAs are counted again */
#define VMA_PAUSE 10      /* after a refusal, wait this many times the duration of a count before counting again */
#define SPARES 4
#define SLAB_SIZE (64ull << 20)

struct gap {
  uint64_t offset, bytes;
};

/* A slab's handle is its offset in the file; the lowest bit is set if its pages are 2 MiB. */
#define LARGE_SLAB 1u

struct host {
  int fd;
  uint64_t granule;
  struct host *next; /* in `process` */

  /* protected by process.memory */
  uint64_t slab_bytes, file_bytes;
  struct gap *gaps; /* file ranges of destroyed slabs, sorted by offset; never adjacent */
  size_t ngaps, cap_gaps;

  pthread_mutex_t lock;                                /* protects the fields below */
  uint64_t other_vmas, counted_at, max_vmas, segments; /* compared by room(); segments: the core's last count */
  uint64_t others_at;                                  /* the other contexts' pieces when the VMAs were last counted */
  uint64_t next_count;                                 /* ns: earliest recount after a refusal */
  bool recount_due;
  struct host_entries entries;
  void *spares[SPARES]; /* a page each, never accessed; NULL: released */
  bool spares_lack;     /* atomic; true if some spares are released */
};

/* ---- the process ------------------------------------------------------------------------------ */

enum source { MAPS, MAX_MAPS, SOURCES };

static const char *const source_paths[SOURCES] = {
    [MAPS] = "/proc/self/maps",
    [MAX_MAPS] = "/proc/sys/vm/max_map_count",
};

/* State shared by all contexts. */
static struct {
  pthread_mutex_t forks; /* held by a fork; protects the fields below */
  struct host *first;
  int sources[SOURCES];           /* kept open while a context is open, since descriptors may run out later; -1: none */
  struct vm_available *available; /* the sources of free memory; read under `memory` */
  pthread_mutex_t memory;         /* protects the promises of all contexts; `forks` may be taken under it */
  pthread_mutex_t counting;       /* held while reading MAPS */
} process = {
    .forks = PTHREAD_MUTEX_INITIALIZER, .memory = PTHREAD_MUTEX_INITIALIZER, .counting = PTHREAD_MUTEX_INITIALIZER};

/* All contexts' pieces, as last reported by their cores. The numbers may be old: between two counts of the process only
 * their growth is used. */
static uint64_t all_segments; /* atomic */

/* Nesting depth of this thread's holds of `forks`, waits included: a fork in a signal handler must not wait for its
 * own thread. In the child it is 0, even in the middle of the interrupted call. */
static _Thread_local unsigned forks_held;

static int no_handlers; /* errno of pthread_atfork; 0: the fork handlers are registered */

static void hold_forks(void) {
  if (!forks_held++) pthread_mutex_lock(&process.forks);
}

static void release_forks(void) {
  if (forks_held <= 1) pthread_mutex_unlock(&process.forks);
  if (forks_held) forks_held--;
}

static void close_sources(void) {
  struct vm_available *available = process.available;
  process.available = NULL;
  vm_available_close(available);
  for (size_t i = 0; i < SOURCES; i++)
    if (process.sources[i] >= 0) close(process.sources[i]);
}

/* A child has no contexts. Keeping the parent's file open would keep the memory of a killed parent. */
static void in_child(void) {
  if (process.first) close_sources();
  for (struct host *h = process.first; h; h = h->next) close(h->fd);
  process.first = NULL;
  forks_held = 0;
  pthread_mutex_unlock(&process.forks);
  pthread_mutex_init(&process.memory, NULL);
  pthread_mutex_init(&process.counting, NULL);
  __atomic_store_n(&all_segments, 0, __ATOMIC_RELAXED);
}

/* Runs early, as in api/registry.c. A fork takes `forks` after the locks of handlers that are registered later. */
__attribute__((constructor(101))) static void set_up(void) {
  no_handlers = pthread_atfork(hold_forks, release_forks, in_child);
}

static int open_sources(void) {
  for (size_t i = 0; i < SOURCES; i++) process.sources[i] = -1;
  for (size_t i = 0; i < SOURCES; i++) {
    process.sources[i] = vm_above_stdio(open(source_paths[i], O_RDONLY | O_CLOEXEC));
    if (process.sources[i] < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM)) {
      int err = -errno;
      close_sources();
      return vm_fail(-ENOMEM, "%s: %s", source_paths[i], strerror(-err));
    }
  }
  int err = vm_available_open("", &process.available);
  if (err) close_sources();
  return err;
}

/* Creates the context's file, which a forked child closes. */
static int join(struct host *h) {
  int err = 0;
  if (no_handlers) return vm_fail(-ENOMEM, "pthread_atfork: %s", strerror(no_handlers));
  hold_forks();
  if (!process.first) err = open_sources();
  if (!err && (h->fd = vm_above_stdio(memfd_create("vmem", MFD_CLOEXEC))) < 0) {
    err = vm_fail(errno == ENOSYS ? -ENODEV : -ENOMEM, "memfd_create: %s", strerror(errno));
    if (!process.first) close_sources();
  }
  if (!err) {
    h->next = process.first;
    process.first = h;
  }
  release_forks();
  return err;
}

static void leave(struct host *h) {
  struct host **at = &process.first;
  hold_forks();
  while (*at != h) at = &(*at)->next;
  *at = h->next;
  close(h->fd);
  if (!process.first) close_sources();
  release_forks();
}

/* ---- limits of the machine -------------------------------------------------------------------- */

/* Reads a number from the first line that matches the format, within the first 4 KiB. */
static bool read_number(enum source from, const char *format, unsigned long long *out) {
  char text[4096], *line = text;
  ssize_t n;
  do n = pread(process.sources[from], text, sizeof(text) - 1, 0);
  while (n < 0 && errno == EINTR);
  if (n <= 0) return false;
  text[n] = 0;
  while (sscanf(line, format, out) != 1) {
    if (!(line = strchr(line, '\n'))) return false;
    line++;
  }
  return true;
}

static uint64_t count_vmas(void) {
  char buf[16384];
  uint64_t lines = 0;
  off_t at = 0;
  ssize_t n;
  /* If threads read it in turns, the kernel searches for the position from the beginning each time. */
  pthread_mutex_lock(&process.counting);
  while ((n = pread(process.sources[MAPS], buf, sizeof(buf), at)) > 0 || (n < 0 && errno == EINTR))
    for (ssize_t i = 0; i < n; i++) lines += buf[i] == '\n', at++;
  pthread_mutex_unlock(&process.counting);
  return lines;
}

/* Records a context's number of pieces; returns the sum over the other contexts. */
static uint64_t note(struct host *h, uint64_t segments) {
  uint64_t all = __atomic_add_fetch(&all_segments, segments - h->segments, __ATOMIC_RELAXED);
  h->segments = segments;
  return all - segments;
}

static void host_recount(void *be, uint64_t segments) {
  struct host *h = be;
  unsigned long long max = 65530;
  uint64_t begun = vm_now_ns(), all = count_vmas(), now = vm_now_ns(), others = all > segments ? all - segments : 0;
  read_number(MAX_MAPS, "%llu", &max);
  pthread_mutex_lock(&h->lock);
  h->max_vmas = max;
  h->other_vmas = others;
  h->counted_at = segments;
  h->others_at = note(h, segments);
  h->recount_due = false;
  h->next_count = now + VMA_PAUSE * (now - begun);
  pthread_mutex_unlock(&h->lock);
}

/* Rate-limited: callers may retry in a loop, and near the limit each count takes about 50 ms. */
static void host_refused(void *be, uint64_t segments) {
  struct host *h = be;
  bool due;
  pthread_mutex_lock(&h->lock);
  due = vm_now_ns() >= h->next_count;
  pthread_mutex_unlock(&h->lock);
  if (due) host_recount(h, segments);
}

/* Recounts only if it may matter, since that takes milliseconds, and from map calls: room() runs under the core's
 * lock. */
static void recount_if_due(struct host *h) {
  uint64_t segments;
  bool due;
  pthread_mutex_lock(&h->lock);
  due = h->recount_due;
  h->recount_due = false;
  segments = h->segments;
  pthread_mutex_unlock(&h->lock);
  if (due) host_recount(h, segments);
}

static int no_room(uint64_t have, uint64_t more, uint64_t max) {
  return vm_fail_at(-ENOSPC, 0, have + more, max,
                    "%llu more scattered pieces would exceed the limit on mappings of a process: %llu in use of "
                    "vm.max_map_count = %llu (margin %u); raise it with sysctl, or use larger pages",
                    (unsigned long long)more, (unsigned long long)have, (unsigned long long)max, VMA_MARGIN);
}

static int host_room(void *be, const struct vm_be_load *load) {
  struct host *h = be;
  uint64_t segments = load->segments, more = load->more_segments, have, max, others;
  pthread_mutex_lock(&h->lock);
  others = note(h, segments);
  others = others > h->others_at ? others - h->others_at : 0;
  have = segments + load->planned_segments + h->other_vmas + others;
  max = h->max_vmas;
  if (have + more + VMA_MARGIN > max / 4 * 3 && segments + others > h->counted_at + VMA_RECOUNT) h->recount_due = true;
  pthread_mutex_unlock(&h->lock);
  return have + more + VMA_MARGIN <= max ? 0 : no_room(have, more, max);
}

static const struct vm_backend host_counted;

#define EMPTY (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

/* Maps part of the file without letting children inherit it; NULL: anywhere. On MAP_FAILED, the range is either
 * unchanged or empty, with the protection `empty`. */
static void *share(struct host *h, void *addr, uint64_t bytes, int prot, uint64_t offset, int empty) {
  void *p;
  int err;
  hold_forks();
  p = mmap(addr, bytes, prot, MAP_SHARED | (addr ? MAP_FIXED : 0), h->fd, (off_t)offset);
  err = errno;
  if (p != MAP_FAILED && madvise(p, bytes, MADV_DONTFORK)) {
    err = errno;
    if (!addr)
      munmap(p, bytes);
    else if (mmap(p, bytes, empty, EMPTY | MAP_FIXED, -1, 0) != MAP_FAILED)
      madvise(p, bytes, MADV_DONTFORK);
    p = MAP_FAILED;
  }
  release_forks();
  errno = err;
  return p;
}

/* Maps the spares at distant file offsets, so that the kernel does not merge their VMAs. */
static void take_spares(struct host *h) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  bool lack = false;
  pthread_mutex_lock(&h->lock);
  for (size_t i = 0; i < SPARES; i++) {
    if (!h->spares[i]) h->spares[i] = share(h, NULL, page, PROT_NONE, 2 * i * page, PROT_NONE);
    if (h->spares[i] == MAP_FAILED) h->spares[i] = NULL;
    lack = lack || !h->spares[i];
  }
  __atomic_store_n(&h->spares_lack, lack, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&h->lock);
}

static bool give_spare(struct host *h) {
  bool given = false;
  pthread_mutex_lock(&h->lock);
  for (size_t i = 0; i < SPARES && !given; i++)
    if (h->spares[i]) {
      munmap(h->spares[i], (size_t)sysconf(_SC_PAGESIZE));
      h->spares[i] = NULL;
      given = true;
    }
  if (given) __atomic_store_n(&h->spares_lack, true, __ATOMIC_RELAXED);
  pthread_mutex_unlock(&h->lock);
  return given;
}

/* Returns the bytes of all contexts' slabs that are untouched, so not allocated yet; *held: bytes allocated. */
static uint64_t promised(uint64_t *held) {
  uint64_t all = 0;
  *held = 0;
  for (struct host *h = process.first; h; h = h->next) {
    struct stat st;
    uint64_t resident = fstat(h->fd, &st) ? 0 : (uint64_t)st.st_blocks * 512;
    if (h->slab_bytes > resident) all += h->slab_bytes - resident;
    *held += resident;
  }
  return all;
}

/* Returns the memory that this process may still allocate, of which *open_promises are already promised to slabs. Exact
 * only up to *open_promises + enough. Called with `memory` locked. */
static uint64_t available(uint64_t enough, uint64_t *open_promises, uint64_t *total) {
  uint64_t bytes, held;
  hold_forks();
  *open_promises = promised(&held);
  if (enough > UINT64_MAX - *open_promises) enough = UINT64_MAX - *open_promises;
  vm_available_read(process.available, held, enough + *open_promises, &bytes, total);
  release_forks();
  return bytes;
}

/* ---- open, close ------------------------------------------------------------------------------ */

static uint64_t page_sizes(void) {
  uint64_t least = (uint64_t)sysconf(_SC_PAGESIZE);
  return (4ull << 20) - least; /* a bit for each page size from `least` to 2 MiB */
}

static int host_open(const struct vmem_open_opts *o, struct vm_be_info *info, void **be) {
  struct host *h;
  int err;
  uint64_t sizes = page_sizes(), granule = o->granule ? o->granule : 64u << 10;
  if (o->num_devices > 1)
    return vm_fail_at(-EINVAL, 0, o->num_devices, 1, "back end host has one device, not %u", o->num_devices);
  if (!(granule & sizes) || granule & (granule - 1))
    return vm_fail_at(-EOPNOTSUPP, 0, granule, sizes, "back end host does not support a granule of %llu bytes",
                      (unsigned long long)granule);
  if (!(h = calloc(1, sizeof(*h)))) return vm_fail(-ENOMEM, "no heap memory for a context");
  if ((err = join(h))) {
    free(h);
    return err;
  }
  h->granule = granule;
  pthread_mutex_init(&h->lock, NULL);
  take_spares(h);
  host_recount(h, 0);
  info->pub.caps = VMEM_CAP_ALIAS | VMEM_CAP_READONLY | VMEM_CAP_SPARSE | VMEM_CAP_SPARSE_ATOMIC | VMEM_CAP_HOST_PAGES |
                   VMEM_CAP_CPU_ACCESS | VMEM_CAP_VISIBLE | VMEM_CAP_PLAIN;
  info->pub.granule = granule;
  info->pub.page_sizes = sizes & ~(granule - 1);
  info->all_page_sizes = sizes;
  info->pub.slab_size = SLAB_SIZE;
  info->pub.max_segments = h->max_vmas;
  if (o->max_mappings || o->flags & VMEM_OPEN_LARGE_ENTRIES) {
    info->pub.caps |= VMEM_CAP_JOIN;
    info->table = &host_counted;
  }
  snprintf(info->pub.device_name, sizeof(info->pub.device_name), "host memory");
  info->fresh_is_zero = true;
  info->unreserve_unmaps = true;
  *be = h;
  return 0;
}

static void host_close(void *be) {
  struct host *h = be;
  while (give_spare(h)) {
  }
  note(h, 0);
  leave(h);
  pthread_mutex_destroy(&h->lock);
  free(h->entries.v);
  free(h->gaps);
  free(h);
}

static int host_mem_info(void *be, uint32_t location, int32_t device, uint64_t *free_bytes, uint64_t *total_bytes) {
  uint64_t open_promises, left;
  (void)be;
  (void)location;
  (void)device;
  pthread_mutex_lock(&process.memory);
  left = available(UINT64_MAX, &open_promises, total_bytes);
  pthread_mutex_unlock(&process.memory);
  *free_bytes = left > open_promises ? left - open_promises : 0;
  return 0;
}

/* ---- addresses -------------------------------------------------------------------------------- */

static void *at(uint64_t addr) { return (void *)(uintptr_t)addr; }

/* Replaces a range by an inaccessible mapping or, if sparse, the zero page. */
static int blank(struct host *h, uint64_t addr, uint64_t bytes, bool sparse) {
  void *p;
  do p = mmap(at(addr), bytes, sparse ? PROT_READ : PROT_NONE, EMPTY | MAP_FIXED, -1, 0);
  while (p == MAP_FAILED && errno == ENOMEM && give_spare(h));
  if (p == MAP_FAILED) return -errno;
  madvise(p, bytes, MADV_DONTFORK); /* may fail if kernel memory is short: a child then inherits the empty range */
  return 0;
}

static int host_reserve(void *be, uint64_t bytes, uint64_t align, uint32_t flags, uint64_t *addr, uint32_t *kind,
                        uint64_t *priv) {
  bool sparse = flags & VMEM_RESERVE_SPARSE;
  uint64_t room = bytes + align, a;
  void *p;
  int err;
  if (room < bytes)
    return vm_fail_at(-EOVERFLOW, 0, bytes, align, "%llu bytes and their alignment overflow 64 bits",
                      (unsigned long long)bytes);
  p = mmap(NULL, room, PROT_NONE, EMPTY, -1, 0);
  if (p == MAP_FAILED)
    return vm_fail_at(-ENOMEM, 0, bytes, 0, "cannot reserve %llu bytes of addresses: %s", (unsigned long long)bytes,
                      strerror(errno));
  a = vm_round_up((uint64_t)(uintptr_t)p, align);
  if (a > (uint64_t)(uintptr_t)p) munmap(p, a - (uint64_t)(uintptr_t)p);
  if (a + bytes < (uint64_t)(uintptr_t)p + room) munmap(at(a + bytes), (uint64_t)(uintptr_t)p + room - a - bytes);
  if ((err = blank(be, a, bytes, sparse))) {
    munmap(at(a), bytes);
    return vm_fail_at(-ENOMEM, a, bytes, 0, "cannot reserve %llu bytes of addresses: %s", (unsigned long long)bytes,
                      strerror(-err));
  }
  *addr = a;
  *kind = VMEM_RANGE_VISIBLE | (sparse ? VMEM_RANGE_SPARSE : 0);
  *priv = 0;
  return 0;
}

static void drop_entries(struct host *h, uint64_t addr, uint64_t bytes) {
  pthread_mutex_lock(&h->lock);
  host_entries_drop(&h->entries, addr, bytes);
  pthread_mutex_unlock(&h->lock);
}

static int host_unreserve(void *be, uint64_t addr, uint64_t bytes, uint64_t priv, bool *gone) {
  (void)priv;
  (void)gone;
  if (munmap(at(addr), bytes)) return vm_fail_at(-EIO, addr, bytes, 0, "munmap: %s", strerror(errno));
  drop_entries(be, addr, bytes);
  return 0;
}

static int map_failed(struct host *h, uint64_t addr, uint64_t bytes, int err) {
  uint64_t vmas = err == -ENOMEM ? count_vmas() : 0, max;
  pthread_mutex_lock(&h->lock);
  max = h->max_vmas;
  pthread_mutex_unlock(&h->lock);
  if (err == -ENOMEM && vmas + VMA_MARGIN >= max) return no_room(vmas, 1, max);
  return vm_fail_at(err == -ENOMEM ? -ENOMEM : -EIO, addr, bytes, 0, "mmap: %s", strerror(-err));
}

/* Updates the entries for a call that maps large entries, small entries or nothing. */
static int change_entries(struct host *h, uint64_t addr, uint64_t bytes, bool large) {
  int err;
  pthread_mutex_lock(&h->lock);
  err = host_entries_check(&h->entries, addr, bytes);
  if (!err && large)
    err = host_entries_add(&h->entries, addr, bytes);
  else if (!err)
    host_entries_drop(&h->entries, addr, bytes);
  pthread_mutex_unlock(&h->lock);
  return err;
}

static int check_entries(struct host *h, uint64_t addr, uint64_t bytes) {
  int err;
  pthread_mutex_lock(&h->lock);
  err = host_entries_check(&h->entries, addr, bytes);
  pthread_mutex_unlock(&h->lock);
  return err;
}

static int host_unmap(void *be, uint64_t addr, uint64_t bytes, bool sparse) {
  int err = check_entries(be, addr, bytes);
  if (err) return err;
  if ((err = blank(be, addr, bytes, sparse))) return map_failed(be, addr, bytes, err);
  drop_entries(be, addr, bytes);
  return 0;
}

static int host_map(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags,
                    bool sparse) {
  struct host *h = be;
  int prot = PROT_READ | (flags & VMEM_MAP_READONLY ? 0 : PROT_WRITE), err;
  bool large = slab & LARGE_SLAB && !((addr | bytes | offset) & (HOST_ENTRY - 1));
  recount_if_due(h);
  if ((err = change_entries(h, addr, bytes, large))) return err;
  if (__atomic_load_n(&h->spares_lack, __ATOMIC_RELAXED)) take_spares(h);
  slab &= ~(uint64_t)LARGE_SLAB;
  if (share(h, at(addr), bytes, prot, slab + offset, sparse ? PROT_READ : PROT_NONE) == MAP_FAILED) {
    err = errno;
    drop_entries(h, addr, bytes);
    return map_failed(h, addr, bytes, -err);
  }
  return 0;
}

static int host_reveal(void *be, uint64_t addr, uint64_t bytes, bool zeros) {
  int err = blank(be, addr, bytes, zeros);
  return err ? vm_fail_at(-ENOMEM, addr, bytes, 0, "mmap: %s", strerror(-err)) : 0;
}

/* Unmaps first as a GPU's driver does; mmap alone would replace atomically. */
static int host_remap(void *be, uint64_t addr, uint64_t bytes, uint64_t slab, uint64_t offset, uint32_t flags) {
  int err = host_unmap(be, addr, bytes, false);
  return err ? err : host_map(be, addr, bytes, slab, offset, flags, false);
}

/* ---- memory ----------------------------------------------------------------------------------- */

/* Finds a gap in the file, or extends it. */
static int find_gap(struct host *h, uint64_t bytes, uint64_t *offset) {
  uint64_t end = h->file_bytes + bytes;
  struct rlimit most;
  for (size_t i = 0; i < h->ngaps; i++) {
    struct gap *gap = &h->gaps[i];
    if (gap->bytes < bytes) continue;
    *offset = gap->offset;
    gap->offset += bytes;
    gap->bytes -= bytes;
    if (!gap->bytes) memmove(gap, gap + 1, (--h->ngaps - i) * sizeof(*gap));
    return 0;
  }
  if (!getrlimit(RLIMIT_FSIZE, &most) && end > most.rlim_cur) /* ftruncate would raise SIGXFSZ: fail before it */
    return vm_fail_at(
        -ENOMEM, 0, bytes, most.rlim_cur,
        "growing the memory file by %llu bytes to %llu: the limit on a file's size (RLIMIT_FSIZE) is %llu",
        (unsigned long long)bytes, (unsigned long long)end, (unsigned long long)most.rlim_cur);
  if (end < bytes) errno = EFBIG;
  if (end < bytes || ftruncate(h->fd, (off_t)end))
    return vm_fail_at(-ENOMEM, 0, bytes, 0, "growing the memory file to %llu bytes: %s", (unsigned long long)end,
                      strerror(errno));
  *offset = h->file_bytes;
  h->file_bytes = end;
  return 0;
}

/* Merges a gap with the next if they are adjacent. */
static void join_gaps(struct host *h, size_t i) {
  struct gap *gap = &h->gaps[i];
  if (i + 1 >= h->ngaps || gap->offset + gap->bytes != gap[1].offset) return;
  gap->bytes += gap[1].bytes;
  memmove(gap + 1, gap + 2, (--h->ngaps - i - 1) * sizeof(*gap));
}

/* If heap memory is short, these offsets are never used again. A file may have 2^63 bytes of holes. */
static void leave_gap(struct host *h, uint64_t offset, uint64_t bytes) {
  struct gap *last;
  size_t i = 0;
  if (h->ngaps == h->cap_gaps) {
    size_t cap = h->cap_gaps ? 2 * h->cap_gaps : 16;
    struct gap *more = realloc(h->gaps, cap * sizeof(*more));
    if (!more) return;
    h->gaps = more;
    h->cap_gaps = cap;
  }
  while (i < h->ngaps && h->gaps[i].offset < offset) i++;
  memmove(&h->gaps[i + 1], &h->gaps[i], (h->ngaps++ - i) * sizeof(*h->gaps));
  h->gaps[i] = (struct gap){offset, bytes};
  join_gaps(h, i);
  if (i) join_gaps(h, i - 1);
  last = &h->gaps[h->ngaps - 1];
  if (last->offset + last->bytes < h->file_bytes) return;
  h->file_bytes = last->offset; /* the file itself is not truncated: only a later extension changes its size */
  h->ngaps--;
}

static int host_slab_create(void *be, uint64_t bytes, uint64_t page_size, uint32_t location, int32_t device,
                            uint64_t *slab) {
  struct host *h = be;
  uint64_t avail, open_promises, total;
  int err;
  (void)location;
  (void)device;
  pthread_mutex_lock(&process.memory);
  avail = available(bytes, &open_promises, &total);
  if (avail < open_promises || avail - open_promises < bytes)
    err = vm_fail_at(-ENOMEM, 0, bytes, avail, "%llu bytes of host memory: %llu available, %llu of them promised",
                     (unsigned long long)bytes, (unsigned long long)avail, (unsigned long long)open_promises);
  else
    err = find_gap(h, bytes, slab);
  if (!err) h->slab_bytes += bytes;
  if (!err && page_size >= HOST_ENTRY && h->granule < HOST_ENTRY && !(bytes & (HOST_ENTRY - 1))) *slab |= LARGE_SLAB;
  pthread_mutex_unlock(&process.memory);
  return err;
}

static int host_discard(void *be, uint64_t slab, uint64_t offset, uint64_t bytes) {
  struct host *h = be;
  slab &= ~(uint64_t)LARGE_SLAB;
  while (fallocate(h->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(slab + offset), (off_t)bytes))
    if (errno != EINTR) return vm_fail_at(-EIO, 0, bytes, 0, "punching a hole: %s", strerror(errno));
  return 0;
}

static int host_slab_destroy(void *be, uint64_t slab, uint64_t bytes) {
  struct host *h = be;
  int err = host_discard(be, slab, 0, bytes);
  if (err) return err;
  pthread_mutex_lock(&process.memory);
  h->slab_bytes -= bytes;
  leave_gap(h, slab & ~(uint64_t)LARGE_SLAB, bytes);
  pthread_mutex_unlock(&process.memory);
  return 0;
}

static int host_fill(void *be, const struct vm_be_range *r, size_t n, uint8_t value, const vm_event *after,
                     size_t num_after, vm_event *done) {
  (void)be;
  (void)after;
  (void)num_after;
  for (size_t i = 0; i < n; i++) memset(at(r[i].addr), value, r[i].bytes);
  *done = 0;
  return 0;
}

static int host_read(void *be, void *dst, uint64_t addr, uint64_t bytes) {
  (void)be;
  memcpy(dst, at(addr), bytes);
  return 0;
}

static int host_write(void *be, uint64_t addr, const void *src, uint64_t bytes) {
  (void)be;
  memcpy(at(addr), src, bytes);
  return 0;
}

static int host_copy(void *be, const struct vm_be_copy *copies, size_t n, const vm_event *after, size_t num_after,
                     vm_event *done) {
  (void)be;
  (void)after;
  (void)num_after;
  for (size_t i = 0; i < n; i++) memcpy(at(copies[i].dst), at(copies[i].src), copies[i].bytes);
  *done = 0;
  return 0;
}

#define HOST_ENTRIES                                                                                                   \
  .name = "host", .open = host_open, .close = host_close, .mem_info = host_mem_info, .reserve = host_reserve,          \
  .unreserve = host_unreserve, .slab_create = host_slab_create, .slab_destroy = host_slab_destroy,                     \
  .discard = host_discard, .map = host_map, .unmap = host_unmap, .fill = host_fill, .read = host_read,                 \
  .write = host_write, .copy = host_copy, .reveal = host_reveal, .room = host_room, .recount = host_refused

const struct vm_backend vm_backend_host = {HOST_ENTRIES};

/* Used if max_mappings or large entries emulate another back end: calls or entries are counted then, so joining saves
 * some. Otherwise the kernel merges adjacent mappings by itself. */
static const struct vm_backend host_counted = {HOST_ENTRIES, .remap = host_remap};
