/* SPDX-License-Identifier: MIT */
/*
 * softrm.c - a replacement for NVIDIA's kernel modules without a GPU: implements the calls that the back end "stock"
 * makes. An LD_PRELOAD library that intercepts /dev/nvidiactl, /dev/nvidia0 and so on, and /dev/nvidia-uvm.
 *
 * Device memory is made of memfds, and mappings are mappings of this process, so softcuda's kernels access the pages
 * that were mapped. The structure layouts are those of the configured version, defined independently of libvmem, and
 * any other layout is refused. Used with softcuda.c, which gets its own UVM descriptor from here (softrm_attach). The
 * state belongs to the process: a child starts with a copy. The environment is read when /dev/nvidiactl is first
 * opened.
 *
 *   SOFTRM_VERSION (580.159.04): the driver version to imitate
 *   SOFTRM_LIE: how this driver differs from that version: KIND:CALL, where CALL is a name in `call_table` below:
 *     longer     the call's structure has 8 more bytes before the status; so has NV_MEMORY_ALLOCATION_PARAMS
 *     moved      the status is 8 bytes before its proper place
 *     number     the call has another number
 *     gone       the call does not exist
 *     other      the call's number means UVM_CREATE_EXTERNAL_RANGE
 *     untouched  the call does not write the status
 *     idle       the call does nothing, but reports success
 *     die        the call kills the process
 *   or one of these: shifted (a map maps the pages that start one page later), stuck (unmapping does nothing), writable
 *   (read-only mappings are writable)
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
  OK = 0,
  INSUFFICIENT_RESOURCES = 0x1a,
  INVALID_ADDRESS = 0x1e,
  INVALID_ARGUMENT = 0x1f,
  INVALID_CLASS = 0x22,
  INVALID_CLIENT = 0x23,
  INVALID_COMMAND = 0x24,
  INVALID_DEVICE = 0x26,
  INVALID_OFFSET = 0x37,
  INVALID_PARAM_STRUCT = 0x3a,
  INVALID_STATE = 0x40,
  NO_MEMORY = 0x51,
  OBJECT_NOT_FOUND = 0x57,
  ADDRESS_IN_USE = 0x68,
  MAX_DEVICES = 8,
  GARBAGE = 0xcb
};
#define SMALL (64ull << 10)
#define LARGE (2ull << 20)

enum kind { CONTROL = 1, CARD, UVM };

/* One type of record for all objects, from a private list: malloc's heap may be locked in the child of a fork. */
struct thing {
  enum { FILE_OF, CLIENT, OBJECT, RANGE, MAPPING, KINDS } is;
  struct thing *next, **at; /* links in `lists`; a mapping's, in its range's list */
  /* a file */
  enum kind kind;
  ino_t inode;
  unsigned users;
  bool initialised;
  uint32_t gpus; /* registered GPUs, a bit mask */
  /* a client (its owner is a file) or an object (its owner is a client) */
  struct thing *owner;
  uint32_t handle, class_id, device;
  uint64_t bytes, page;
  int fd;
  unsigned maps;
  bool freed, host;
  /* a range (its owner is a file) or a mapping of `object` (its owner is a range; object is NULL if sparse) */
  uint64_t addr, offset;
  struct thing *object, *mappings;
  bool large;
};

static struct thing *lists[KINDS], *unused;
static atomic_int holder; /* pid of the lock's holder: a child forked while its parent held the lock takes it over */
static unsigned major, minor, patch, num_devices = 1;
static char version[64];
static uint64_t memory = 4ull << 30, used[MAX_DEVICES];
static uint64_t (*cuda_used)(unsigned device);
static const char *lie = "", *lied_of = "";

static void enter(void) {
  int me = (int)syscall(SYS_getpid), free_now = 0;
  while (!atomic_compare_exchange_weak(&holder, &free_now, me)) {
    if (free_now && free_now != me) {
      atomic_store(&holder, me);
      return;
    }
    free_now = 0;
    sched_yield();
  }
}

static void leave(void) { atomic_store(&holder, 0); }

static struct thing *new_thing(int is, struct thing *owner) {
  struct thing *t, **list = is == MAPPING ? &owner->mappings : &lists[is];
  if (!unused) {
    t = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (t == MAP_FAILED) abort();
    for (size_t i = 0; i < (1 << 20) / sizeof(*t); i++) {
      t[i].next = unused;
      unused = &t[i];
    }
  }
  t = unused;
  unused = t->next;
  *t = (struct thing){.is = is, .owner = owner, .fd = -1, .next = *list, .at = list};
  if (t->next) t->next->at = &t->next;
  *list = t;
  return t;
}

static void drop_thing(struct thing *gone) {
  *gone->at = gone->next;
  if (gone->next) gone->next->at = gone->at;
  gone->next = unused;
  unused = gone;
}

static bool lies(const char *kind, const char *call) {
  return !strcmp(lie, kind) && !strcmp(lied_of, call ? call : "");
}

static bool before(unsigned a, unsigned b, unsigned c) {
  return major != a ? major < a : minor != b ? minor < b : patch < c;
}

/* ---- the calls, and their structures by version -------------------------------------------------- */

struct call {
  const char *name;
  enum kind kind;
  uint32_t number, size, status; /* status: its offset; 0: none */
  uint32_t (*run)(struct thing *file, uint8_t *p);
};

static uint64_t u64(const uint8_t *p, unsigned at) {
  uint64_t v;
  memcpy(&v, p + at, sizeof(v));
  return v;
}

static uint32_t u32(const uint8_t *p, unsigned at) {
  uint32_t v;
  memcpy(&v, p + at, sizeof(v));
  return v;
}

static void put32(uint8_t *p, unsigned at, uint32_t v) { memcpy(p + at, &v, sizeof(v)); }

/* ---- RM ----------------------------------------------------------------------------------------- */

static void uuid_of(unsigned device, uint8_t uuid[16]) {
  memset(uuid, 0xc5, 15); /* the same as softcuda's */
  uuid[15] = (uint8_t)device;
}

static int device_of(const uint8_t *uuid) {
  uint8_t other[16];
  for (unsigned i = 0; i < num_devices; i++) {
    uuid_of(i, other);
    if (!memcmp(uuid, other, sizeof(other))) return (int)i;
  }
  return -1;
}

static struct thing *client_of(const struct thing *file, uint32_t handle) {
  for (struct thing *t = lists[CLIENT]; t; t = t->next)
    if (t->handle == handle && (!file || t->owner == file)) return t;
  return NULL;
}

static struct thing *object_of(const struct thing *client, uint32_t handle) {
  for (struct thing *t = lists[OBJECT]; t; t = t->next)
    if (t->owner == client && t->handle == handle && !t->freed) return t;
  return NULL;
}

static void let_go(struct thing *o) {
  if (!o->freed || o->maps) return;
  if (o->fd >= 0) syscall(SYS_close, o->fd);
  if (o->fd >= 0 && !o->host) used[o->device] -= o->bytes;
  drop_thing(o);
}

static uint32_t make_memory(struct thing *o, const uint8_t *p) {
  uint32_t attr = u32(p, 24), pages = attr >> 23 & 3, place = attr >> 25 & 3, noncontiguous = attr >> 27 & 3;
  uint8_t *seen;
  o->host = o->class_id == 0x3e;
  o->bytes = u64(p, 64);
  o->page = pages == 1 ? 4096 : pages == 2 ? SMALL : LARGE;
  if (u32(p, 0) != o->owner->handle || u32(p, 8) != 0x8100 || place != o->host || noncontiguous != 3 || !pages ||
      (pages == 3) != (u32(p, 28) == 1u << 20) || u64(p, 72) != o->page || !o->bytes || o->bytes % o->page)
    return INVALID_ARGUMENT;
  if (!o->host && used[o->device] + (cuda_used ? cuda_used(o->device) : 0) + o->bytes > memory) return NO_MEMORY;
  o->fd = (int)syscall(SYS_memfd_create, "softrm memory", MFD_CLOEXEC);
  if (o->fd < 0 || ftruncate(o->fd, (off_t)o->bytes)) return NO_MEMORY;
  seen = mmap(NULL, o->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, o->fd, 0);
  if (seen == MAP_FAILED) return NO_MEMORY;
  for (uint64_t at = 0; at < o->bytes; at += SMALL) memset(seen + at, GARBAGE, 64);
  munmap(seen, o->bytes);
  if (!o->host) used[o->device] += o->bytes;
  return OK;
}

static uint32_t size_of_class(uint32_t class_id) {
  switch (class_id) {
  case 0x41:
    return 0;
  case 0x80:
    return 56;
  case 0x2080:
    return 4;
  case 0x90f1:
    return before(580, 0, 0) ? 48 : 56;
  case 0x40:
  case 0x3e:
    return (before(545, 0, 0) ? 120 : 128) + (lies("longer", "NV_MEMORY_ALLOCATION_PARAMS") ? 8 : 0);
  default:
    return UINT32_MAX;
  }
}

static uint32_t make_object(struct thing *o, struct thing *parent, uint8_t *params) {
  if (o->class_id == 0x80) {
    o->device = u32(params, 0);
    return o->device < num_devices && u32(params, 4) == o->owner->handle ? OK : INVALID_ARGUMENT;
  }
  if (!parent || parent->class_id != 0x80) return INVALID_ARGUMENT;
  o->device = parent->device;
  if (o->class_id == 0x90f1) return u32(params, 4) == (1u << 3 | 1u << 6) ? OK : INVALID_ARGUMENT;
  return o->class_id == 0x2080 ? OK : make_memory(o, params);
}

static uint32_t esc_alloc(struct thing *file, uint8_t *p) {
  bool old = before(535, 0, 0);
  uint32_t root = u32(p, 0), handle = u32(p, 8), class_id = u32(p, 12), status, size = size_of_class(class_id);
  uint8_t *params = (uint8_t *)(uintptr_t)u64(p, 16);
  struct thing *client = client_of(file, root), *o;
  if (size == UINT32_MAX) return INVALID_CLASS;
  if (old ? u32(p, 32) : u32(p, 32) != size || u32(p, 36) || u32(p, 44)) return INVALID_PARAM_STRUCT;
  if (u64(p, 24) || (size && !params)) return INVALID_ARGUMENT;
  if (class_id == 0x41) {
    static uint32_t last = 0xc1d00000;
    o = new_thing(CLIENT, file);
    o->handle = ++last;
    put32(p, 8, o->handle);
    return OK;
  }
  if (!client) return INVALID_CLIENT;
  if (!handle || object_of(client, handle)) return INVALID_ARGUMENT;
  o = new_thing(OBJECT, client);
  o->handle = handle;
  o->class_id = class_id;
  status = make_object(o, object_of(client, u32(p, 4)), params);
  if (!status) return OK;
  if (o->fd >= 0) syscall(SYS_close, o->fd);
  drop_thing(o);
  return status;
}

static uint32_t esc_free(struct thing *file, uint8_t *p) {
  struct thing *client = client_of(file, u32(p, 0)), *o = client ? object_of(client, u32(p, 8)) : NULL;
  if (!client) return INVALID_CLIENT;
  if (!o) return OK; /* RM reports success for objects that no longer exist */
  o->freed = true;
  let_go(o);
  return OK;
}

static uint32_t uuid_info(uint8_t *p) {
  int device = device_of(p);
  if (device < 0 || u32(p, 256) != 2) return INVALID_ARGUMENT;
  put32(p, 260, 0x100u * (unsigned)(device + 1));
  put32(p, 264, (uint32_t)device);
  return OK;
}

static uint32_t uuid_from_id(uint8_t *p) {
  uint32_t device = u32(p, 0) / 0x100 - 1;
  if (device >= num_devices || u32(p, 4) != 2) return INVALID_ARGUMENT;
  uuid_of(device, p + 8);
  put32(p, 264, 16);
  return OK;
}

static uint32_t fb_info(const struct thing *o, uint8_t *p) {
  for (uint32_t i = 0; i < u32(p, 0); i++) {
    uint64_t taken = used[o->device] + (cuda_used ? cuda_used(o->device) : 0);
    put32(p, 8 + 8 * i, (uint32_t)((u32(p, 4 + 8 * i) == 0x16 ? memory - taken : memory) >> 10));
  }
  return OK;
}

static uint32_t esc_control(struct thing *file, uint8_t *p) {
  uint32_t command = u32(p, 8), size = u32(p, 24);
  uint32_t entries = before(545, 0, 0) ? 54 : before(560, 0, 0) ? 55 : before(580, 0, 0) ? 57 : 128;
  uint8_t *params = (uint8_t *)(uintptr_t)u64(p, 16);
  struct thing *client = client_of(file, u32(p, 0)), *o = client ? object_of(client, u32(p, 4)) : NULL;
  if (!client) return INVALID_CLIENT;
  if (u32(p, 12)) return INVALID_ARGUMENT;
  switch (command) {
  case 0x274:
    return size == 272 ? uuid_info(params) : INVALID_PARAM_STRUCT;
  case 0x275:
    return size == 268 ? uuid_from_id(params) : INVALID_PARAM_STRUCT;
  }
  if (!o) return OBJECT_NOT_FOUND;
  switch (command) {
  case 0x20800110:
    if (size != (major <= 580 ? 132 : 68)) return INVALID_PARAM_STRUCT;
    snprintf((char *)params + 4, 64, "software CUDA device");
    return OK;
  case 0x20801303:
    return size == 4 + 8 * entries ? fb_info(o, params) : INVALID_PARAM_STRUCT;
  case 0x800289:
    if (size != (before(555, 0, 0) ? 4 : 8)) return INVALID_PARAM_STRUCT;
    put32(params, 0, 0);
    return OK;
  default:
    return INVALID_COMMAND;
  }
}

static uint32_t esc_cards(struct thing *file, uint8_t *p) {
  (void)file;
  for (unsigned i = 0; i < num_devices; i++) {
    uint8_t *card = p + 72 * i;
    card[0] = 1;
    put32(card, 16, 0x100 * (i + 1));
    put32(card, 56, i);
  }
  return OK;
}

static uint32_t esc_version(struct thing *file, uint8_t *p) {
  (void)file;
  if (u32(p, 0) == '2') snprintf((char *)p + 8, 64, "%s", version);
  put32(p, 4, 1);
  return OK;
}

/* ---- UVM ---------------------------------------------------------------------------------------- */

static struct thing *file_of(int fd);

static uint32_t uvm_initialize(struct thing *file, uint8_t *p) {
  if (u64(p, 0) != 1) return INVALID_ARGUMENT;
  file->initialised = true;
  return OK;
}

static uint32_t uvm_mm(struct thing *file, uint8_t *p) {
  struct thing *other = file_of((int)u32(p, 0));
  (void)file;
  return other && other->kind == UVM && other->initialised ? OK : INVALID_ARGUMENT;
}

static uint32_t uvm_register(struct thing *file, uint8_t *p) {
  if (!file->initialised) return INVALID_STATE;
  return device_of(p) < 0 || (int32_t)u32(p, 24) != -1 ? INVALID_DEVICE : OK;
}

static struct thing *memory_of(int fd, uint32_t client, uint32_t handle) {
  struct thing *file = file_of(fd), *c = file && file->kind == CONTROL ? client_of(file, client) : NULL;
  return c ? object_of(c, handle) : NULL;
}

static uint32_t uvm_register_space(struct thing *file, uint8_t *p) {
  struct thing *space = memory_of((int)u32(p, 16), u32(p, 20), u32(p, 24));
  if (!file->initialised || device_of(p) < 0) return INVALID_DEVICE;
  if (!space || space->class_id != 0x90f1) return INVALID_ARGUMENT;
  file->gpus |= 1u << device_of(p);
  return OK;
}

static uint32_t uvm_peers(struct thing *file, uint8_t *p) {
  (void)file;
  return device_of(p) < 0 || device_of(p + 16) < 0 ? INVALID_DEVICE : OK;
}

static struct thing *range_at(const struct thing *file, uint64_t addr, uint64_t bytes) {
  for (struct thing *t = lists[RANGE]; t; t = t->next)
    if (t->owner == file && addr < t->addr + t->bytes && t->addr < addr + bytes) return t;
  return NULL;
}

/* Makes addresses inaccessible or, with `zeros`, readable as zeros. */
static void show_nothing(uint64_t addr, uint64_t bytes, bool zeros) {
  if (mmap((void *)(uintptr_t)addr, bytes, zeros ? PROT_READ | PROT_WRITE : PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
    abort();
}

static bool overlaps(const struct thing *t, uint64_t addr, uint64_t bytes) {
  return addr < t->addr + t->bytes && t->addr < addr + bytes;
}

static bool cuts(const struct thing *t, uint64_t at) {
  return t->large && at > t->addr && at < t->addr + t->bytes && at % LARGE;
}

static void cut_out(struct thing *t, uint64_t addr, uint64_t bytes) {
  uint64_t end = t->addr + t->bytes;
  if (end > addr + bytes) {
    struct thing *rest = new_thing(MAPPING, t->owner);
    rest->addr = addr + bytes;
    rest->bytes = end - rest->addr;
    rest->offset = t->offset + (rest->addr - t->addr);
    rest->large = t->large;
    rest->object = t->object;
    rest->object->maps++;
  }
  if (t->addr < addr) {
    t->bytes = addr - t->addr;
    return;
  }
  t->object->maps--;
  let_go(t->object);
  drop_thing(t);
}

/* Removes the mappings in part of a range; false, without effect, if that would split a 2 MiB entry. */
static bool clear(struct thing *range, uint64_t addr, uint64_t bytes) {
  for (struct thing *t = range->mappings; t; t = t->next)
    if (overlaps(t, addr, bytes) && (cuts(t, addr) || cuts(t, addr + bytes))) return false;
  for (struct thing *t = range->mappings, *next; t; t = next) {
    next = t->next;
    if (overlaps(t, addr, bytes)) cut_out(t, addr, bytes);
  }
  return true;
}

static uint32_t uvm_create(struct thing *file, uint8_t *p) {
  uint64_t addr = u64(p, 0), bytes = u64(p, 8);
  struct thing *range;
  if (!file->gpus) return INVALID_STATE;
  if (!bytes || (addr | bytes) % 4096 || addr + bytes < addr) return INVALID_ADDRESS;
  if (range_at(file, addr, bytes)) return ADDRESS_IN_USE;
  range = new_thing(RANGE, file);
  range->addr = addr;
  range->bytes = bytes;
  return OK;
}

static uint32_t uvm_free(struct thing *file, uint8_t *p) {
  uint64_t addr = u64(p, 0);
  struct thing *range = range_at(file, addr, 1);
  if (!range || range->addr != addr) return INVALID_ADDRESS;
  if (before(590, 0, 0) && u64(p, 8) != range->bytes) return INVALID_ADDRESS;
  clear(range, addr, range->bytes);
  show_nothing(addr, range->bytes, false);
  drop_thing(range);
  return OK;
}

static struct thing *inside(struct thing *file, uint64_t addr, uint64_t bytes) {
  struct thing *range = bytes ? range_at(file, addr, bytes) : NULL;
  return range && addr >= range->addr && bytes <= range->bytes && addr - range->addr <= range->bytes - bytes ? range
                                                                                                             : NULL;
}

static uint64_t smallest(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint32_t uvm_map(struct thing *file, uint8_t *p) {
  unsigned records = before(550, 40, 53) ? 32 : 256, tail = 24 + 36 * records;
  uint64_t addr = u64(p, 0), bytes = u64(p, 8), offset = u64(p, 16), count = u64(p, tail), align, shown;
  struct thing *range = inside(file, addr, bytes), *o, *m;
  bool readonly = u32(p, 24 + 16) == 3;
  if (!count || count > num_devices) return INVALID_ARGUMENT;
  for (unsigned i = 0; i < records; i++) {
    const uint8_t *record = p + 24 + 36 * i;
    for (unsigned k = i < count ? 20 : 0; k < 36; k++)
      if (record[k]) return INVALID_ARGUMENT;
    if (i < count && (device_of(record) < 0 || !(file->gpus & 1u << device_of(record)))) return INVALID_DEVICE;
    if (i < count && u32(record, 16) != (readonly ? 3 : 0)) return INVALID_ARGUMENT;
  }
  o = memory_of((int)u32(p, tail + 8), u32(p, tail + 12), u32(p, tail + 16));
  if (!o || o->fd < 0) return INVALID_ARGUMENT;
  if (!range) return INVALID_ADDRESS;
  if (offset > o->bytes || bytes > o->bytes - offset) return INVALID_OFFSET;
  align = (addr | bytes | offset | o->page) & -(addr | bytes | offset | o->page);
  if (align < 4096 || (o->page >= SMALL && align < SMALL)) return INVALID_ADDRESS;
  if (!clear(range, addr, bytes)) return INVALID_ADDRESS;
  shown = lies("shifted", NULL) && offset + bytes + align <= o->bytes ? offset + smallest(align, SMALL) : offset;
  if (mmap((void *)(uintptr_t)addr, bytes, readonly && !lies("writable", NULL) ? PROT_READ : PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED, o->fd, (off_t)shown) == MAP_FAILED)
    return NO_MEMORY;
  m = new_thing(MAPPING, range);
  m->object = o;
  m->addr = addr;
  m->bytes = bytes;
  m->offset = offset;
  m->large = align >= LARGE && o->page >= LARGE;
  o->maps++;
  return OK;
}

/* Called once per device; the first call already unmaps everything. */
static uint32_t uvm_unmap(struct thing *file, uint8_t *p) {
  uint64_t addr = u64(p, 0), bytes = u64(p, 8);
  struct thing *range = inside(file, addr, bytes);
  if (device_of(p + 16) < 0) return INVALID_DEVICE;
  if (!range || (addr | bytes) % 4096) return INVALID_ADDRESS;
  if (lies("stuck", NULL)) return OK;
  if (!clear(range, addr, bytes)) return INVALID_ADDRESS;
  show_nothing(addr, bytes, false);
  return OK;
}

static uint32_t uvm_sparse(struct thing *file, uint8_t *p) {
  uint32_t status = (u64(p, 0) | u64(p, 8)) % SMALL ? INVALID_ADDRESS : uvm_unmap(file, p);
  if (!status) show_nothing(u64(p, 0), u64(p, 8), true);
  return status;
}

/* ---- the ioctl ------------------------------------------------------------------------------------ */

static const struct call call_table[] = {
    {"NV_ESC_RM_ALLOC", CONTROL, 0x2b, 48, 40, esc_alloc},
    {"NV_ESC_RM_FREE", CONTROL, 0x29, 16, 12, esc_free},
    {"NV_ESC_RM_CONTROL", CONTROL, 0x2a, 32, 28, esc_control},
    {"NV_ESC_CARD_INFO", CONTROL, 200, 72 * 32, 0, esc_cards},
    {"NV_ESC_CHECK_VERSION_STR", CONTROL, 210, 72, 0, esc_version},
    {"UVM_INITIALIZE", UVM, 0x30000001, 16, 8, uvm_initialize},
    {"UVM_MM_INITIALIZE", UVM, 75, 8, 4, uvm_mm},
    {"UVM_REGISTER_GPU", UVM, 37, 40, 36, uvm_register},
    {"UVM_REGISTER_GPU_VASPACE", UVM, 25, 32, 28, uvm_register_space},
    {"UVM_ENABLE_PEER_ACCESS", UVM, 29, 36, 32, uvm_peers},
    {"UVM_CREATE_EXTERNAL_RANGE", UVM, 73, 24, 16, uvm_create},
    {"UVM_MAP_EXTERNAL_ALLOCATION", UVM, 33, 9264, 9260, uvm_map},
    {"UVM_UNMAP_EXTERNAL", UVM, 66, 40, 32, uvm_unmap},
    {"UVM_MAP_EXTERNAL_SPARSE", UVM, 74, 40, 32, uvm_sparse},
    {"UVM_FREE", UVM, 34, 16, 8, uvm_free},
};
enum { CALLS = sizeof(call_table) / sizeof(*call_table) };
static struct call calls[CALLS]; /* call_table adapted to the version and SOFTRM_LIE */

static void be_version(void) {
  memcpy(calls, call_table, sizeof(calls));
  for (struct call *c = calls; c < calls + CALLS; c++) {
    if (c->run == esc_alloc && before(535, 0, 0)) c->size = 40, c->status = 36;
    if (c->run == uvm_map && before(550, 40, 53)) c->size = 1200, c->status = 1196;
    if (c->run == uvm_free && before(590, 0, 0)) c->size = 24, c->status = 16;
    if (lies("longer", c->name)) c->size += 8, c->status += c->status ? 8 : 0;
    if (lies("moved", c->name)) c->status -= 8;
    if (lies("number", c->name)) c->number += 100;
    if (lies("other", c->name)) c->run = uvm_create, c->size = 24, c->status = 16;
  }
}

/* Called when a program starts to use the driver: reads the version to imitate from the environment. */
static void set_up(void) {
  static char text[64];
  const char *told = getenv("SOFTRM_VERSION"), *how = getenv("SOFTRM_LIE");
  char *colon;
  snprintf(version, sizeof(version), "%s", told && *told ? told : "580.159.04");
  major = minor = patch = 0;
  sscanf(version, "%u.%u.%u", &major, &minor, &patch);
  snprintf(text, sizeof(text), "%s", how ? how : "");
  lie = text;
  colon = strchr(text, ':');
  lied_of = colon ? colon + 1 : "";
  if (colon) *colon = 0;
  be_version();
}

static const struct call *call_of(enum kind kind, uint32_t number) {
  for (unsigned i = 0; i < CALLS; i++)
    if (calls[i].kind == kind && calls[i].number == number) return &calls[i];
  return NULL;
}

static int answer(struct thing *file, unsigned long request, uint8_t *arg) {
  uint32_t number = file->kind == UVM ? (uint32_t)request : (uint32_t)_IOC_NR(request);
  const struct call *c = call_of(file->kind, number);
  uint8_t p[9264 + 64];
  uint32_t status;
  if (!c || lies("gone", c->name)) return -EINVAL;
  if (file->kind == CONTROL && (_IOC_TYPE(request) != 'F' || _IOC_SIZE(request) != c->size)) return -EINVAL;
  if (lies("die", c->name)) syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  memcpy(p, arg, c->size);
  status = lies("idle", c->name) ? OK : c->run(file, p);
  if (c->status && !lies("untouched", c->name)) put32(p, c->status, status);
  memcpy(arg, p, c->size);
  return 0;
}

/* ---- files ---------------------------------------------------------------------------------------- */

static enum kind kind_of(const char *path) {
  char *end;
  if (!path || strncmp(path, "/dev/nvidia", 11)) return 0;
  if (!strcmp(path + 11, "ctl")) return CONTROL;
  if (!strcmp(path + 11, "-uvm")) return UVM;
  return path[11] && strtoul(path + 11, &end, 10) < num_devices && !*end ? CARD : 0;
}

static void describe(enum kind kind, struct stat *st) {
  st->st_mode = S_IFCHR | 0666;
  st->st_rdev = makedev(kind == UVM ? 511 : 195, kind == CONTROL ? 255 : 0);
}

static struct thing *file_of(int fd) {
  struct stat st;
  if (syscall(SYS_fstat, fd, &st)) return NULL;
  for (struct thing *t = lists[FILE_OF]; t; t = t->next)
    if (t->inode == st.st_ino) return t;
  return NULL;
}

static int open_file(enum kind kind) {
  int fd = (int)syscall(SYS_memfd_create, "softrm file", MFD_CLOEXEC);
  struct stat st;
  struct thing *file;
  bool used_now = false;
  for (file = lists[FILE_OF]; file; file = file->next) used_now |= file->kind == CONTROL;
  if (!used_now) set_up();
  if (fd < 0 || syscall(SYS_fstat, fd, &st)) return fd;
  file = new_thing(FILE_OF, NULL);
  file->kind = kind;
  file->inode = st.st_ino;
  file->users = 1;
  return fd;
}

/* Frees everything that belongs to a file whose last descriptor was closed, except memory that is mapped elsewhere. */
static void end_file(struct thing *file) {
  for (struct thing *t = lists[RANGE], *next; t; t = next) {
    next = t->next;
    if (t->owner != file) continue;
    clear(t, t->addr, t->bytes);
    show_nothing(t->addr, t->bytes, false);
    drop_thing(t);
  }
  for (struct thing *t = lists[OBJECT], *next; t; t = next) {
    next = t->next;
    if (!t->owner || t->owner->owner != file) continue;
    t->owner = NULL;
    t->freed = true;
    let_go(t);
  }
  for (struct thing *t = lists[CLIENT], *next; t; t = next) {
    next = t->next;
    if (t->owner == file) drop_thing(t);
  }
  drop_thing(file);
}

static int opened(const char *path, int flags, mode_t mode, bool *ours) {
  enum kind kind = kind_of(path);
  int fd;
  *ours = kind != 0;
  if (!kind) return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
  enter();
  fd = open_file(kind);
  leave();
  return fd;
}

static int do_open(const char *path, int flags, va_list ap) {
  mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(ap, mode_t) : 0;
  bool ours;
  return opened(path, flags, mode, &ours);
}

EXPORT int open(const char *path, int flags, ...) {
  va_list ap;
  int fd;
  va_start(ap, flags);
  fd = do_open(path, flags, ap);
  va_end(ap);
  return fd;
}

EXPORT int open64(const char *path, int flags, ...) {
  va_list ap;
  int fd;
  va_start(ap, flags);
  fd = do_open(path, flags | O_LARGEFILE, ap);
  va_end(ap);
  return fd;
}

EXPORT int close(int fd) {
  struct thing *file;
  int err;
  enter();
  file = file_of(fd);
  err = (int)syscall(SYS_close, fd);
  if (file && !--file->users) end_file(file);
  leave();
  return err;
}

static int do_fcntl(int fd, int command, void *arg) {
  int result = (int)syscall(SYS_fcntl, fd, command, arg);
  struct thing *file;
  if (result < 0 || (command != F_DUPFD && command != F_DUPFD_CLOEXEC)) return result;
  enter();
  file = file_of(fd);
  if (file) file->users++;
  leave();
  return result;
}

EXPORT int fcntl(int fd, int command, ...) {
  va_list ap;
  int result;
  va_start(ap, command);
  result = do_fcntl(fd, command, va_arg(ap, void *));
  va_end(ap);
  return result;
}

EXPORT int fcntl64(int fd, int command, ...) __attribute__((alias("fcntl")));

EXPORT int access(const char *path, int mode) {
  return kind_of(path) ? 0 : (int)syscall(SYS_faccessat, AT_FDCWD, path, mode);
}

EXPORT int stat(const char *path, struct stat *st) {
  enum kind kind = kind_of(path);
  memset(st, 0, sizeof(*st));
  if (!kind) return (int)syscall(SYS_newfstatat, AT_FDCWD, path, st, 0);
  describe(kind, st);
  return 0;
}

EXPORT int fstat(int fd, struct stat *st) {
  int err = (int)syscall(SYS_fstat, fd, st);
  struct thing *file;
  enter();
  file = err ? NULL : file_of(fd);
  if (file) describe(file->kind, st);
  leave();
  return err;
}

EXPORT int ioctl(int fd, unsigned long request, ...) {
  struct thing *file;
  va_list ap;
  void *arg;
  int err = 0;
  va_start(ap, request);
  arg = va_arg(ap, void *);
  va_end(ap);
  enter();
  file = file_of(fd);
  if (file) err = answer(file, request, arg);
  leave();
  if (!file) return (int)syscall(SYS_ioctl, fd, request, arg);
  errno = -err;
  return err ? -1 : 0;
}

/* ---- for softcuda.c ---------------------------------------------------------------------------- */

/* Called when CUDA is initialised, with the number of devices and their memory. Opens two UVM descriptors, like CUDA:
 * one that is not used, then one on which every GPU is registered. */
EXPORT void softrm_attach(unsigned devices, uint64_t bytes, uint64_t (*used_by_cuda)(unsigned device)) {
  struct thing *file;
  enter();
  num_devices = devices;
  memory = bytes;
  cuda_used = used_by_cuda;
  open_file(UVM);
  file = file_of(open_file(UVM));
  file->initialised = true;
  file->gpus = (1u << devices) - 1;
  leave();
}

EXPORT uint64_t softrm_used(unsigned device) { return used[device]; }
