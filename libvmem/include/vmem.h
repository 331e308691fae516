/* SPDX-License-Identifier: MIT */
/*
 * vmem.h - fine-grained virtual memory for GPUs (and for the host).
 *
 * Vocabulary
 *   granule      the smallest page of a context, a power of two (64 KiB unless requested otherwise).
 *   page         a unit of physical memory: granule x 2^k. vmem_info.page_sizes lists a back end's page sizes.
 *   slab         one large allocation of physical memory from the driver; pages are cut from slabs.
 *   run          pages that are adjacent both physically and virtually; one driver call maps a run.
 *   reservation  a range of virtual addresses with no memory behind it.
 *   large page   a page of 2 MiB in a context with a smaller granule. Large pages are cut from their own
 *                slabs. If a large page is mapped whole at a 2 MiB boundary, a single entry of the GPU's page tables
 *                maps it (on "uvm" see VMEM_RESERVE_LARGE), and it can only be unmapped or replaced as a
 *                whole.
 *   entry        an entry of the GPU's page tables: 4 KiB, 64 KiB or 2 MiB. With VMEM_OPEN_LARGE_ENTRIES a block (2 MiB
 *                of addresses, 2 MiB aligned) of small pages gets a large entry if its pages are physically adjacent
 *                and begin at a multiple of 2 MiB in their slab; a call that populates 2 MiB or more gets such pages.
 *                Part of a large entry cannot be unmapped or replaced; a batch with VMEM_OP_SPLIT splits the entry
 *                first, and vmem_join merges small entries where it can.
 *   handle       a reference to physical pages, created by vMemCreate or vmem_retain.
 *   mapping      the range that one vMemMap mapped (a partial unmap may cut it in two).
 *   batch        map and unmap operations that succeed or fail as one.
 *   ticket       identifies a batch given to the worker thread, and holds its result until vmem_ticket_drop.
 *
 * Ten lines
 *      vmem_t vm; uint64_t va; vmem_handle h;
 *      struct vmem_open_opts o = { .size = sizeof(o), .backend = "auto" };
 *      if (vmem_open(&o, &vm)) return puts(vmem_last_error()), 1;
 *      vMemReserve(vm, 1 << 30, NULL, &va);           // 1 GiB of addresses, no memory
 *      vMemCreate(vm, 64 << 10, NULL, &h);            // one 64 KiB page
 *      vMemMap(vm, va, 64 << 10, h, 0, 0);            // mapped and accessible
 *      vmem_fill(vm, va, 64 << 10, 0x2a);
 *      vMemRelease(vm, h);                            // unmapped, page back in the pool
 *      vMemFree(vm, va, 0);
 *      vmem_close(vm);
 *
 * Rules that hold for every function
 *   - Sizes and offsets are in bytes, addresses are device virtual addresses (on "host": pointers).
 *   - The return value is 0 or a negative errno, each with one meaning (list below); a failed call
 *     changes nothing, except where -ENOTRECOVERABLE says what was lost. For the calling thread,
 *     vmem_last_error() says what failed, where and for how many bytes.
 *   - Thread-safe. No lock is held across a driver call. A range that another call is changing gives
 *     -EBUSY immediately.
 *   - A structure's first field is its size as the caller knows it; fields beyond it count as 0.
 *     NULL options mean all defaults.
 *   - The library prints nothing, handles no signals and never terminates the process. A thread that is
 *     cancelled (pthread_cancel) during a call completes the call first.
 *   - Ordering against GPU work is the caller's job: unmap only what no unfinished GPU work may touch, or name that
 *     work in `after` (vmem_batch, vmem_submit). A page that vanishes under a kernel is a fatal fault.
 *
 * Errors
 *   -EINVAL           a malformed argument: size 0, unaligned, unknown flag, non-zero reserved field; a range
 *                     that cuts a large page, or a large entry without VMEM_OP_SPLIT
 *   -EOVERFLOW        address + size (or count x stride) overflows 64 bits
 *   -EOPNOTSUPP       this back end cannot do it (page size, sparse, read-only, location)
 *   -EBADF            a context or handle that is closed, freed, or of another context; a ticket that was dropped
 *                     or never issued
 *   -ECHILD           the context belongs to the parent of this forked process (may be -EBADF instead if the
 *                     contexts of the parent and of this process together exceed the limit per process)
 *   -ENXIO            the address is not inside a reservation of this context
 *   -EEXIST           map over a live mapping
 *   -EFAULT           unmap of, or access to, an address with nothing mapped
 *   -EACCES           write to a read-only mapping; or a device node that this user may not open
 *   -ERANGE           beyond the end of the handle, or in part of it that was dropped
 *   -EBUSY            live mappings (vMemFree, vMemRelease); a range being changed; a page that a batch has yet
 *                     to zero
 *   -ENOMEM           not enough physical memory: the device's, the context's limit, or the heap
 *   -ENOSPC           a limit on the number of mappings: the system's (message names the sysctl) or the context's
 *                     (max_mappings); or visible reservations beyond the card's free memory
 *   -EAGAIN           too many unfinished batches (VMEM_MAX_PENDING); or NVIDIA's driver has been suspended for
 *                     a minute because the machine is going to sleep: call again. Calls that unmap or close
 *                     wait until it resumes
 *   -ENOBUFS          too many tickets not dropped (VMEM_MAX_TICKETS); the message names the oldest whose batch
 *                     is finished
 *   -ETIMEDOUT        vmem_wait: not finished in time
 *   -ENODEV           the back end cannot be used on this machine (message says why)
 *   -EIO              the driver refused a valid request; its status is in vmem_error
 *   -ENOTRECOVERABLE  a failed batch could not be undone: the named range and its pages are quarantined
 *                     (never handed out again) until vmem_close
 */
#ifndef VMEM_H
#define VMEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VMEM_VERSION "0.1.0"

#if defined(__GNUC__)
#define VMEM_API __attribute__((visibility("default")))
#else
#define VMEM_API
#endif

typedef uint64_t vmem_t;      /* a context; never 0 */
typedef uint64_t vmem_handle; /* physical pages; never 0. A released handle gives -EBADF until its context has created
                                 2^30 more, or the process has opened 3,839 more contexts */
typedef uint64_t vmem_ticket; /* a submitted batch; never 0 */

#define VMEM_MAX_DEVICES 16
#define VMEM_MAX_PENDING 4096  /* limit on unfinished batches per context */
#define VMEM_MAX_TICKETS 65536 /* limit on undropped tickets per context: about 100 bytes each, 740 if the batch is
                                  unfinished or failed; so at most 7 MB, or 48 MB if all failed */
#define VMEM_KEEP_ALL UINT64_MAX

/* Capabilities of a back end (vmem_info.caps, vmem_probe_info.caps). */
#define VMEM_CAP_ALIAS (1u << 0)       /* one page at several addresses */
#define VMEM_CAP_READONLY (1u << 1)    /* read-only mappings */
#define VMEM_CAP_SPARSE (1u << 2)      /* unmapped parts of a sparse reservation read as zeros */
#define VMEM_CAP_HOST_PAGES (1u << 3)  /* pages in host memory that the device can access */
#define VMEM_CAP_PEER (1u << 4)        /* pages in, and mappings on, another device */
#define VMEM_CAP_CPU_ACCESS (1u << 5)  /* the CPU may dereference mapped addresses */
#define VMEM_CAP_VISIBLE (1u << 6)     /* addresses that CUDA's memcpy and memset accept */
#define VMEM_CAP_PLAIN (1u << 7)       /* addresses that only kernels accept, unlimited in number */
#define VMEM_CAP_JOIN (1u << 8)        /* vmem_join can merge mappings or entries */
#define VMEM_CAP_ONE_CALL (1u << 9)    /* one driver call does all maps and unmaps of a batch in one reservation, up to
                                          the driver's limit on operations; a call is all or nothing */
#define VMEM_CAP_SPARSE_ATOMIC (1u << 10) /* in a sparse reservation a page replaces zeros, and zeros replace a page, in
                                             one step: a concurrent reader does not fault */
#define VMEM_CAP_LARGE_ENTRIES (1u << 11) /* contexts only: opened with VMEM_OPEN_LARGE_ENTRIES, which the back end
                                             supports */

/* ---- context ------------------------------------------------------------------------------- */

#define VMEM_OPEN_LARGE_ENTRIES (1u << 0) /* entries of 2 MiB for small pages, wherever they fill a block: see `entry`
                                             above. Pages in host memory and sparse reservations of "uvm" keep small
                                             entries. The module of "uvm" must support it (-EOPNOTSUPP). No effect
                                             if the granule is 2 MiB (cuda) */

/* Log levels (vmem_open_opts.log); each includes those above it. */
#define VMEM_LOG_WARNING 1 /* for operators: a driver of an unknown branch is in use, a range is quarantined, a slab
                              could not be given back */
#define VMEM_LOG_INFO 2    /* what was opened and why; submitted batches that failed */
#define VMEM_LOG_DEBUG 3   /* slabs taken from the driver and given back */

/* Receives a line without a newline, valid during the call. Called concurrently from any thread in the library, the
 * worker included. It must not call the library, and should return quickly: callers wait for it. */
typedef void (*vmem_log_fn)(void *arg, uint32_t level, const char *text);

struct vmem_open_opts {
  size_t size;
  const char *backend;  /* "auto" (default), "host", "cuda", "stock", "uvm"; "auto" takes the first usable of
                           uvm, stock, cuda, host */
  uint32_t flags;       /* VMEM_OPEN_* */
  uint32_t num_devices; /* number of entries in devices; 0 = device 0 alone */
  int32_t devices[VMEM_MAX_DEVICES]; /* CUDA ordinals as this process sees them; pages are in devices[0]
                                        unless requested otherwise, mappings exist on all */
  uint64_t granule;   /* 0 = 64 KiB, or the back end's smallest if that is larger */
  uint64_t slab_size; /* 0 = the back end's choice; else a power of two, at least granule */
  uint64_t mem_limit; /* limit on bytes taken from the driver, all locations together; 0 = none */
  uint64_t pool_low;  /* the worker keeps at least this many free bytes in the pool; 0 = none */
  uint64_t pool_high; /* free bytes above this are returned to the driver immediately, in whole slabs; 0 = the back
                         end's default (host: 0; GPU: 1 GiB, and only memory not needed for half a second),
                         VMEM_KEEP_ALL = only vmem_trim returns memory */
  uint64_t max_mappings; /* limit on vmem_stats.mappings; 0 = the back end's default (stock: 237,568, half of the
                            handles that a context could take from the driver, divided by the number of devices;
                            others: no limit) */
  vmem_log_fn log;       /* called from vmem_open to the end of vmem_close; NULL = no log. Calls that
                            need no driver memory log nothing */
  void *log_arg;         /* the first argument of `log` */
  uint32_t log_level;    /* the most verbose level to log: VMEM_LOG_*; 0 = VMEM_LOG_INFO */
  uint32_t log_reserved; /* 0 */
};

struct vmem_info {
  size_t size;
  uint32_t caps;        /* VMEM_CAP_* */
  uint32_t num_devices;
  uint64_t granule;
  uint64_t page_sizes;  /* bit k set: pages of 2^k bytes */
  uint64_t slab_size;
  uint64_t max_segments; /* limit on vmem_stats.segments (host: vm.max_map_count); 0 = none */
  uint64_t max_mappings; /* limit on vmem_stats.mappings (vmem_open_opts); 0 = none */
  char backend[16];
  char driver[64];      /* driver version, "" on host */
  char device_name[64]; /* name of devices[0] */
  uint8_t uuid[VMEM_MAX_DEVICES][16];
  char why[512];        /* "auto": why the back ends before this one were passed over */
  char warning[192];    /* warning for operators, "" = none: the driver is of an unknown branch and was tested more
                           strictly (stock, uvm) */
};

struct vmem_probe_info {
  size_t size;
  int32_t usable;       /* 1: a context can be opened */
  int32_t error;        /* 0 or a negative errno */
  uint32_t caps;
  uint32_t reserved;
  uint64_t page_sizes;
  char backend[16];
  char driver[64];
  char device_name[64];
  char reason[512];     /* why not usable, or what was tested */
};

/* Counters since vmem_open ("calls", "ns") and present state (all other fields). */
struct vmem_stats {
  size_t size;
  uint64_t reserved_bytes;    /* bytes of addresses in reservations */
  uint64_t mapped_bytes;      /* virtual bytes with a mapping (an aliased page counts each time) */
  uint64_t used_bytes;        /* physical bytes referenced by handles or mappings */
  uint64_t free_bytes;        /* physical bytes in the pool, ready for use */
  uint64_t slab_bytes;        /* physical bytes taken from the driver: used + free + quarantined,
                                 plus, while vmem_compact empties a slab, that slab's free bytes */
  uint64_t quarantined_bytes;
  uint64_t peak_mapped_bytes;
  uint64_t peak_used_bytes;
  uint64_t reservations, handles, slabs, segments; /* segments: contiguous pieces as the back end sees them */
  uint64_t pending;           /* batches submitted and not finished */
  uint64_t batches;           /* batches committed */
  uint64_t map_calls, unmap_calls, slab_calls, fill_calls; /* driver calls; a call that both maps and unmaps
                                                              counts as a map call */
  uint64_t driver_ns;         /* time in driver calls, all threads */
  uint64_t worker_driver_ns;  /* the worker's share of driver_ns */
  uint64_t mappings;          /* map calls whose mapping still exists: each page of a run mapped page by page
                                 counts, and so does the mapping through which a slab is zeroed */
  uint64_t tickets;           /* undropped tickets, whether their batches are finished or not */
  uint64_t dirty_bytes;       /* the part of free_bytes not zeroed yet; handed out last */
  uint64_t large_entries;     /* live entries of 2 MiB in reservations, those of large pages included; 0 if the
                                 granule is 2 MiB, since every entry is that large then */
  uint64_t splits, joins;     /* large entries split so far, and created by joining */
};

/* The last error of the calling thread. */
struct vmem_error {
  size_t size;
  int32_t code;         /* negative errno, 0 = none yet */
  uint32_t status;      /* driver status: CUresult or RM status; 0 = none */
  char status_name[48]; /* name of the status, "" = none */
  char op[24];          /* the function that failed */
  uint64_t addr, bytes; /* the range or size in question, 0 = none */
  uint64_t limit;       /* the limit that was reached, 0 = none */
  char text[512];
};

/* Opens a back end and tests it as vmem_probe does. "auto" skips a back end that fails the test. If a back end that was
 * requested by name fails it, vmem_open returns the test's error (-EIO if a byte differs: vmem_error.addr and text name
 * it). The caller owns *vm and closes it with vmem_close. A driver of a branch that the library does not know is first
 * tried in a child process (stock), tested more strictly, and reported by a warning; with VMEM_UNKNOWN_DRIVER=refuse in
 * the environment it is refused. */
VMEM_API int vmem_open(const struct vmem_open_opts *opts, vmem_t *vm);

/* Closes a context and releases every mapping, page and reservation. Unfinished batches that wait for a descriptor
 * that is not readable are cancelled; for all others vmem_close waits until their GPU work and fills are finished. It
 * also waits while the driver is suspended. Later use of `vm` gives -EBADF, and a vmem_wait in progress returns it. */
VMEM_API int vmem_close(vmem_t vm);

/* Describes the context. The size field of *info must be set. */
VMEM_API int vmem_query(vmem_t vm, struct vmem_info *info);

/* Tests whether `backend` works here by mapping, writing, reading and unmapping a page, as vmem_open does; opens and
 * closes what it needs. Returns 0 with the result in info->usable, -EINVAL for an unknown name. */
VMEM_API int vmem_probe(const char *backend, int32_t device, uint32_t flags, struct vmem_probe_info *info);

/* Names of the back ends in the order of "auto", NULL past the end. */
VMEM_API const char *vmem_backend_name(unsigned index);

VMEM_API int vmem_get_stats(vmem_t vm, struct vmem_stats *stats);

/* "" when the calling thread has had no error. Valid until its next vmem call. */
VMEM_API const char *vmem_last_error(void);
VMEM_API int vmem_get_error(struct vmem_error *error);

VMEM_API const char *vmem_version(void);

/* ---- reservations ---------------------------------------------------------------------------- */

#define VMEM_RESERVE_VISIBLE (1u << 0) /* fail unless CUDA's copies will accept the addresses */
#define VMEM_RESERVE_PLAIN (1u << 1)   /* only kernels need to accept them */
#define VMEM_RESERVE_SPARSE (1u << 2)  /* unmapped parts read as zeros (a write to them faults on host
                                          and is discarded on a GPU) */
#define VMEM_RESERVE_FORCE (1u << 3)   /* visible even beyond the card's free memory; see stock below */
#define VMEM_RESERVE_LARGE (1u << 4)   /* large pages will be mapped here: "uvm" then maps each by one entry, except
                                          in SPARSE reservations; other back ends always do */

struct vmem_reserve_opts {
  size_t size;
  uint32_t flags;    /* neither VISIBLE nor PLAIN: visible while it fits, else plain */
  uint32_t reserved;
  uint64_t align;    /* power of two; 0 = 2 MiB, or the granule where larger */
};

/* Reserves `size` bytes (a multiple of the granule) of addresses. On "stock" and "uvm" the sum of all visible
 * reservations is kept below the card's free memory: they are CUDA managed memory, and programs that asked for too
 * much of it have hung GPUs. */
VMEM_API int vMemReserve(vmem_t vm, uint64_t size, const struct vmem_reserve_opts *opts, uint64_t *addr);

#define VMEM_FREE_UNMAP (1u << 0) /* unmap what is still mapped instead of returning -EBUSY */

/* Frees a reservation; `addr` is its first address. If the driver has dropped it but its addresses cannot be freed
 * (-EIO), nothing is mapped there any more and nothing can be; vMemFree may be called again. */
VMEM_API int vMemFree(vmem_t vm, uint64_t addr, uint32_t flags);

#define VMEM_RANGE_MAPPED (1u << 0)
#define VMEM_RANGE_READONLY (1u << 1)
#define VMEM_RANGE_VISIBLE (1u << 2)
#define VMEM_RANGE_SPARSE (1u << 3)
#define VMEM_RANGE_BUSY (1u << 4)
#define VMEM_RANGE_QUARANTINED (1u << 5)
#define VMEM_RANGE_LARGE (1u << 6) /* a large page, which cannot be split; a large entry of small pages
                                      (entry_bytes) can */

struct vmem_range_info {
  size_t size;
  uint64_t base, bytes;    /* start and size of the reservation */
  uint64_t mapped_bytes;   /* mapped bytes in the reservation */
  uint64_t segments;       /* segments in the reservation */
  uint64_t run_bytes;      /* bytes from the address's granule on that have the same state and form one run */
  uint32_t flags;          /* state of the address: VMEM_RANGE_* */
  uint32_t reserved;
  uint64_t entry_bytes;    /* size of the page-table entry that maps the address: 4 KiB, 64 KiB or 2 MiB; 0 = not
                              mapped. On "host", the size that a GPU would use after the same calls */
};

VMEM_API int vmem_range_query(vmem_t vm, uint64_t addr, struct vmem_range_info *info);

/* Makes the hole around `addr`, where nothing is mapped, read as zeros until something is mapped there or vmem_conceal
 * is called, and returns its start and length. "host" only. A SIGSEGV handler may call it for the address of the fault.
 * -EEXIST: mapped. -EACCES: it can be read, but not written. -EBUSY: another call is changing it. */
VMEM_API int vmem_reveal(vmem_t vm, uint64_t addr, uint64_t *start, uint64_t *bytes);

/* Makes the holes of [addr, addr + bytes) fault again. Every other call treats revealed holes as holes. */
VMEM_API int vmem_conceal(vmem_t vm, uint64_t addr, uint64_t bytes);

/* ---- physical pages -------------------------------------------------------------------------- */

enum vmem_location { VMEM_DEVICE = 0, VMEM_HOST = 1, VMEM_PEER = 2 };

#define VMEM_CREATE_DIRTY (1u << 0) /* contents may be those of an earlier user in this context */

struct vmem_create_opts {
  size_t size;
  uint32_t flags;
  uint32_t location;   /* enum vmem_location */
  int32_t device;      /* VMEM_PEER: CUDA ordinal, one of vmem_open_opts.devices */
  uint32_t reserved;
  uint64_t page_size;  /* 0 = granule */
};

struct vmem_memory_info {
  size_t size;
  uint64_t free_bytes;   /* bytes that this context could still take from the driver, or on host from the system */
  uint64_t total_bytes;  /* total memory of the location, whether in use or not */
};

/* Reports the memory of a location as of now; `device` as in vmem_create_opts. For host memory, the control groups of
 * this process also limit both values. Another process may take the memory first. Free pages of the pool do not
 * count. */
VMEM_API int vmem_memory_query(vmem_t vm, uint32_t location, int32_t device, struct vmem_memory_info *info);

/* Allocates `size` bytes (a multiple of the page size) of physical pages, in as few runs as the pool allows. They are
 * zeroed before they are first mapped, unless VMEM_CREATE_DIRTY. Usually needs no driver call. */
VMEM_API int vMemCreate(vmem_t vm, uint64_t size, const struct vmem_create_opts *opts, vmem_handle *handle);

/* Unmaps the one mapping of the handle, if there is one, and drops the caller's reference. The pages
 * return to the pool with their last reference. If there are several mappings, fails with -EBUSY. Like vMemUnmap, it
 * does not split large entries. */
VMEM_API int vMemRelease(vmem_t vm, vmem_handle handle);

/* Drops only the caller's reference: mappings stay and keep their pages. */
VMEM_API int vmem_drop(vmem_t vm, vmem_handle handle);

/* Creates a handle to the pages behind [addr, addr + bytes), all of which must be mapped. */
VMEM_API int vmem_retain(vmem_t vm, uint64_t addr, uint64_t bytes, vmem_handle *handle);

/* Like vmem_retain, for `count` pieces (0 = 1) whose starts are `stride` apart, as in a 2-D copy. They are contiguous
 * in the handle, so that one VMEM_OP_MAP of the same number of pieces maps them elsewhere. */
VMEM_API int vmem_gather(vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t count, uint64_t stride,
                         vmem_handle *handle);

/* Drops the caller's reference to part of a handle's pages: `count` pieces (0 = 1) of `bytes` bytes, the
 * first at `offset`, `stride` apart; multiples of the page size. Pages that no mapping or other handle refers to
 * return to the pool. The remaining pages keep their offsets; mapping or dropping the dropped ones gives -ERANGE. */
VMEM_API int vmem_drop_range(vmem_t vm, vmem_handle handle, uint64_t offset, uint64_t bytes, uint64_t count,
                             uint64_t stride);

struct vmem_handle_info {
  size_t size;
  uint64_t bytes, page_size;
  uint64_t runs;      /* physical runs */
  uint64_t mappings;  /* live mappings made with this handle */
  uint32_t location;
  int32_t device;
};

VMEM_API int vmem_handle_query(vmem_t vm, vmem_handle handle, struct vmem_handle_info *info);

/* ---- mapping --------------------------------------------------------------------------------- */

#define VMEM_MAP_READONLY (1u << 0)

/* Maps [offset, offset + bytes) of the handle at addr and makes it accessible on every device of the
 * context. All three are multiples of the handle's page size. */
VMEM_API int vMemMap(vmem_t vm, uint64_t addr, uint64_t bytes, vmem_handle handle, uint64_t offset,
                     uint32_t flags);

/* Unmaps [addr, addr + bytes), all of which must be mapped; may cut mappings. Does not split large entries
 * (-EINVAL): use vmem_batch with VMEM_OP_SPLIT. */
VMEM_API int vMemUnmap(vmem_t vm, uint64_t addr, uint64_t bytes);

enum vmem_op_kind {
  VMEM_OP_MAP = 1,      /* piece i: addr + i x stride <- handle at offset + i x offset_stride */
  VMEM_OP_POPULATE = 2, /* new pages of page_size for every piece, owned by the mapping alone */
  VMEM_OP_UNMAP = 3,
  VMEM_OP_FILL = 4,     /* write the byte `value` */
  VMEM_OP_JOIN = 5      /* vmem_join as part of the batch: remap ranges mapped by several calls or small entries */
};

#define VMEM_OP_READONLY (1u << 0) /* MAP */
#define VMEM_OP_CONSUME (1u << 1)  /* MAP: on success the caller's reference to the handle is dropped */
#define VMEM_OP_DIRTY (1u << 2)    /* POPULATE: do not zero */
#define VMEM_OP_HOLES (1u << 3)    /* UNMAP, FILL, JOIN: skip what is not mapped instead of -EFAULT */
#define VMEM_OP_SPREAD (1u << 4)   /* POPULATE: let each stretch grow in a 2 MiB chunk of its own while
                                      the pool has empty chunks, so that later pages join its run */
#define VMEM_OP_COPY (1u << 5)     /* POPULATE: the new pages start as a copy of `src` */
#define VMEM_OP_REPLACE (1u << 6)  /* MAP: over a fully mapped range, whose old pages lose that reference.
                                      The handle's pages must have been mapped before (-EINVAL otherwise:
                                      their contents are not known). On "uvm" a concurrent reader sees the
                                      old pages or the new, except where a 2 MiB entry is created or removed:
                                      a large page replaces small ones, or small pages or host memory replace
                                      a large page, in a reservation with VMEM_RESERVE_LARGE (or a granule of
                                      2 MiB) that is not SPARSE. There, and always on the other back ends,
                                      the replaced range (and nothing else) is briefly unmapped: no GPU work
                                      may touch it */
#define VMEM_OP_SPLIT (1u << 7)    /* UNMAP, MAP with REPLACE: split large entries that the operation covers in part.
                                      The whole block is briefly unmapped, and what stays is mapped again with
                                      small entries: from the end of the work in `after` until the batch is
                                      finished, no GPU work may touch any part of the block. Without this flag such
                                      a batch is refused (-EINVAL), unless its operations together cover the whole
                                      block */

/* An operation on `count` pieces of `bytes` bytes, `stride` apart (as in a 2-D copy). */
struct vmem_op {
  uint32_t op;        /* enum vmem_op_kind */
  uint32_t flags;     /* VMEM_OP_* */
  uint64_t addr;
  uint64_t bytes;     /* size of one piece */
  uint64_t count;     /* pieces; 0 = 1 */
  uint64_t stride;    /* distance between the starts of pieces; ignored if there is one piece */
  vmem_handle handle; /* MAP */
  uint64_t offset;    /* MAP */
  uint32_t location;  /* POPULATE: enum vmem_location */
  int32_t device;     /* POPULATE: VMEM_PEER's CUDA ordinal */
  uint64_t page_size; /* POPULATE: 0 = granule */
  uint64_t value;     /* FILL: 0 to 255 */
  /* POPULATE with COPY: the source must be mapped and need not be aligned. No call may change it before the batch is
   * finished; unmapping it gives -EBUSY until then. */
  uint64_t src;        /* address of the contents of the first piece */
  uint64_t src_stride; /* distance between the pieces' sources; 0: all pieces copy the same source */
  uint64_t src_bytes;  /* bytes to copy per piece; 0 = bytes. The rest of the piece is zeroed */
  uint64_t offset_stride; /* MAP: distance between the pieces' offsets, a multiple of the page size; 0 = bytes */
  uint64_t reserved[2];   /* 0, else -EINVAL. For later fields, as the elements of an array have no size field */
};

/* GPU work that must be complete before a batch changes anything. */
enum vmem_after_kind {
  VMEM_AFTER_STREAM = 1, /* handle: a CUstream (0 = the legacy default stream); all its work so far */
  VMEM_AFTER_EVENT = 2,  /* handle: a CUevent, kept by the caller until the batch is finished */
  VMEM_AFTER_FD = 3      /* handle: a descriptor that polls readable once the work is complete (eventfd,
                            sync_file); duplicated, works on every back end */
};

struct vmem_after {
  uint32_t kind;        /* enum vmem_after_kind */
  uint32_t flags;       /* 0 */
  uint64_t handle;
  uint64_t reserved[2]; /* 0 */
};

/* Runs `n` operations as one, after the work in `after` (the calling thread waits). New pages appear before old ones
 * vanish, or at the same time (VMEM_CAP_ONE_CALL). Maps come first (new pages are zeroed before they are mapped, and
 * copied to afterwards), then fills, replaces and splits, joins, unmaps. So a batch cannot map where it unmaps
 * (-EEXIST), nor fill what it maps or the remainder of a block that it splits, nor join what it maps or unmaps (-EBUSY;
 * new pages are zero). VMEM_OP_HOLES skips what is a hole when its operation is checked. Operations are checked in the
 * order of `ops`, so pages that a later operation maps still count as holes and are not changed.
 * To move pages while keeping their addresses: POPULATE with COPY elsewhere; then, when no GPU work is in progress,
 * vmem_gather there and one batch of MAP with REPLACE and UNMAP. The arguments of all operations are checked before
 * the pages of any, so a malformed operation is reported first, whatever its position.
 * On failure maps and unmaps are undone; bytes written by FILL stay written.
 * `after` may hold any number of entries; each FD uses up a descriptor of the process until it is readable.
 * The batch waits for an unfinished fill of another batch only if it unmaps, replaces, copies, fills, or maps at a
 * second address what that fill writes.
 * No flags are defined: `flags` must be 0 (-EINVAL). */
VMEM_API int vmem_batch(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after,
                        size_t num_after, uint32_t flags);

#define VMEM_SUBMIT_DETACHED (1u << 0) /* no result is wanted: it is dropped when the batch is finished */
#define VMEM_SUBMIT_LATE (1u << 1)     /* the worker takes the pages, if the pool has enough: see vmem_submit */

/* Like vmem_batch, on the worker thread. Everything is checked, and the pages are taken from the pool, before the call
 * returns: only the call itself can fail with -ENOMEM, -EAGAIN (VMEM_MAX_PENDING unfinished batches) or -ENOBUFS
 * (VMEM_MAX_TICKETS undropped tickets), not the batch later. Until the batch is finished, other calls on its ranges get
 * -EBUSY. Batches start in order, but a batch that waits (for GPU work, for a fill of an earlier batch, or, before its
 * unmaps, for its own fills) lets later batches pass: if it never finishes, it holds up only batches that need its
 * ranges. The result is kept until vmem_ticket_drop, however many batches follow. flags: VMEM_SUBMIT_*. With
 * VMEM_SUBMIT_DETACHED there is no result; `ticket` may be NULL, and is set to 0 otherwise. With VMEM_SUBMIT_LATE, if
 * the pool has enough pages, the call checks only the arguments, and its cost does not depend on the number of pages.
 * The worker takes the pages, and the ranges become -EBUSY for other calls, when it starts the batch, as if vmem_submit
 * had been called then: a conflict, or a shortage because other calls took the pages first, is the batch's result. */
VMEM_API int vmem_submit(vmem_t vm, const struct vmem_op *ops, size_t n, const struct vmem_after *after,
                         size_t num_after, uint32_t flags, vmem_ticket *ticket);

/* Waits until the batch is finished, its fills included, and returns its result. timeout_ns < 0: no
 * limit; 0: poll. Any thread may ask for the result again until vmem_ticket_drop. */
VMEM_API int vmem_wait(vmem_t vm, vmem_ticket ticket, int64_t timeout_ns);

/* Waits until the batch's mappings exist, then makes `stream` (a CUstream), not the calling thread, wait for its
 * fills. Returns the batch's result. On host, equivalent to vmem_wait without a limit. */
VMEM_API int vmem_order(vmem_t vm, vmem_ticket ticket, uint64_t stream);

/* Drops the result, now or when the batch is finished; the batch runs on as if submitted with VMEM_SUBMIT_DETACHED.
 * A thread that is in vmem_wait or vmem_order gets the result if there is one, else -EBADF; later calls with the
 * ticket, including this one, get -EBADF. */
VMEM_API int vmem_ticket_drop(vmem_t vm, vmem_ticket ticket);

/* ---- contents -------------------------------------------------------------------------------- */

/* Copies and fills through the device, at any mapped address of this context, visible or plain; done when the
 * call returns. -EFAULT if a byte is not mapped, -EACCES if a byte to be written is read-only. */
VMEM_API int vmem_read(vmem_t vm, void *dst, uint64_t addr, uint64_t bytes);
VMEM_API int vmem_write(vmem_t vm, uint64_t addr, const void *src, uint64_t bytes);
VMEM_API int vmem_copy(vmem_t vm, uint64_t dst, uint64_t src, uint64_t bytes);
VMEM_API int vmem_fill(vmem_t vm, uint64_t addr, uint64_t bytes, uint8_t value);

/* ---- pool ------------------------------------------------------------------------------------ */

/* Takes memory from the driver until `bytes` are free in the device pool. */
VMEM_API int vmem_warm(vmem_t vm, uint64_t bytes);

/* Returns empty slabs to the driver while at least `keep` free bytes remain; *freed (may be NULL)
 * receives the bytes returned. */
VMEM_API int vmem_trim(vmem_t vm, uint64_t keep, uint64_t *freed);

/* Returns at least `want` bytes to the driver (UINT64_MAX: all it can), after the work in `after`: empty slabs
 * first, then slabs of which no more than half is in use, the least used first. Their pages are copied to free pages
 * of fuller slabs, which replace the old ones at every address and in every handle; that takes no memory from the
 * driver. Large pages move as a whole. Call it at a safe point only: from the end of that work until the call returns,
 * no GPU work may touch pages that may move, and any page may move. A slab in use by a call or an unfinished
 * batch is skipped; while a slab moves, other calls on its pages get -EBUSY. Each slab moves entirely or not at
 * all: after an error the slabs before it have been returned, and nothing else has changed. *freed (may be NULL)
 * receives the bytes returned, even after an error. Visits every mapped page once. flags: 0. */
VMEM_API int vmem_compact(vmem_t vm, uint64_t want, const struct vmem_after *after, size_t num_after,
                          uint32_t flags, uint64_t *freed);

/* Remaps, with one driver call per run, pages in [addr, addr + bytes) that were mapped one by one: frees driver memory
 * and makes later unmaps cheaper. With VMEM_OPEN_LARGE_ENTRIES it gives complete blocks large entries. Parts already
 * mapped by the fewest possible calls and entries are left alone, and so are parts that are unmapped or that a batch is
 * changing. Call it at a safe point only: no GPU work may touch the range. *calls (may be NULL) receives the number of
 * driver calls. */
VMEM_API int vmem_join(vmem_t vm, uint64_t addr, uint64_t bytes, uint64_t *calls);

/* ---- testing an engine's error paths ---------------------------------------------------------- */

#define VMEM_INJECT_MAP (1u << 0)
#define VMEM_INJECT_UNMAP (1u << 1)
#define VMEM_INJECT_SLAB (1u << 2) /* physical memory, and the mapping through which a slab is zeroed or copied */
#define VMEM_INJECT_FILL (1u << 3)
#define VMEM_INJECT_RESERVE (1u << 4)
#define VMEM_INJECT_HEAP (1u << 5) /* libvmem's own heap allocations in this context */
#define VMEM_INJECT_CLEAN (1u << 6) /* zeroing of free pages in the background */
#define VMEM_INJECT_EVENT (1u << 7) /* recording, querying or waiting for an event of GPU work that a call depends on */

/* From now on, lets `skip` driver calls of these kinds pass and fails the next `count` with -error; count 0 turns
 * this off. An undo retries calls that fail with EAGAIN, as it does with a real driver. */
VMEM_API int vmem_inject(vmem_t vm, uint32_t kinds, uint64_t skip, uint64_t count, int error);

/* Checks every internal invariant (free + used + quarantined = slabs, reference counts against
 * mappings, ...). Returns 0, or -EIO with the first contradiction in the error text. Slow. */
VMEM_API int vmem_check(vmem_t vm);

#ifdef __cplusplus
}
#endif
#endif
