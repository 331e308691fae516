/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * softgpu.h - the tests' interface to the software GPU: the ioctls of /dev/softgpu.
 *
 * The software GPU is a kernel module that replaces nvidia.ko. The real nvidia-uvm.ko registers its GPUs,
 * submits pushbuffers to them and writes their page tables. Through these ioctls a test examines the result
 * and injects faults. None of them goes through nvidia-uvm.ko.
 *
 * Vocabulary
 *   gpu       index 0 .. SOFTGPU_INFO.out_gpus - 1.
 *   space     a GPU address space that was registered with UVM (UVM_REGISTER_GPU_VASPACE), named by the
 *             gpu and the RM handles (client, vaspace) that were given to UVM. Handles 0, 0 stand for the
 *             space that the calling process registered last on this gpu and that still exists.
 *   frame     64 KB of video memory, the unit in which it is allocated.
 *   access    what a kernel running on the GPU would do: through the TLB model, then the page tables.
 *
 * Errors: EINVAL malformed; ENOENT no such gpu, space, handle or call name; EFAULT user memory;
 * EIO the model found itself inconsistent (see the kernel log). ACCESS has more errors, described there.
 *
 * The size of each struct is part of its ioctl's number: an old test gets ENOTTY, never a wrong layout.
 */
#ifndef SOFTGPU_H
#define SOFTGPU_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define SOFTGPU_DEVICE     "/dev/softgpu"
#define SOFTGPU_MAX_GPUS   4
#define SOFTGPU_UUID_BYTES 16
#define SOFTGPU_NAME_BYTES 48

#define SOFTGPU_FRAME_SHIFT 16
#define SOFTGPU_FRAME_SIZE  (1ull << SOFTGPU_FRAME_SHIFT)

/* The byte value of video memory that was never written or was freed. */
#define SOFTGPU_POISON_BYTE 0xDBu
#define SOFTGPU_POISON_WORD 0xDBDBDBDBDBDBDBDBull

/* Names an address space: its GPU and handles. */
struct softgpu_space {
	__u32 gpu;
	__u32 client;  /* if this and vaspace are 0: the calling process's last space */
	__u32 vaspace;
	__u32 __reserved;
};

/*
 * INFO: describes the machine (out_gpus, out_branch, out_arch: the same for each gpu), and one gpu.
 */
#define SOFTGPU_ARCH_AMPERE 0x170
#define SOFTGPU_ARCH_HOPPER 0x180
#define SOFTGPU_ARCH_GB10X  0x1a0
#define SOFTGPU_ARCH_GB20X  0x1b0

struct softgpu_info {
	__u32 gpu;                             /* in */
	__u32 out_gpus;
	__u32 out_branch;                      /* 535, 550, ... */
	__u32 out_arch;                        /* SOFTGPU_ARCH_* */
	__u64 out_vidmem;                      /* bytes */
	__u8  out_uuid[SOFTGPU_UUID_BYTES];
	__u32 out_peers;                       /* bit n: gpu n can be a peer of this one */
	__u32 out_lost;                        /* 1 after LOST */
	__u64 out_va_bits;                     /* bits of its virtual addresses: 49 or 57 */
};

/*
 * XLATE: walk the page tables for one address. Neither uses nor changes the TLB model.
 */
#define SOFTGPU_APERTURE_VID  0 /* this gpu's own memory */
#define SOFTGPU_APERTURE_PEER 1 /* memory of out_peer */
#define SOFTGPU_APERTURE_SYS  2 /* host memory */

struct softgpu_xlate {
	struct softgpu_space space;
	__u64 va;
	__u64 out_pte;       /* the raw entry, even if it is invalid; 0 if there is no table */
	__u64 out_pa;        /* physical address of va itself, in its aperture */
	__u64 out_page_size; /* 4 KB, 64 KB, 2 MB or 512 MB; 0 if not valid */
	__u32 out_valid;
	__u32 out_aperture;  /* SOFTGPU_APERTURE_* */
	__u32 out_peer;      /* gpu */
	__u32 out_read_only;
	__u32 out_sparse;    /* not valid: reads zeros and drops writes instead of faulting */
	__u32 out_has_table; /* not valid, but there is a table of 64 KB entries */
};

/*
 * ACCESS: access length bytes at va as a kernel on the GPU would, page by page.
 *   READ   into buf            WRITE  from buf
 *   FILL   64-bit words: word i (counted from va, i = 0, 1, ...) becomes value + i * step. va and length are
 *          multiples of 8. A whole frame filled with step 0 costs no guest memory.
 *   CHECK  compares the same words: at the first that differs the call returns EBADMSG, with the bytes before
 *          it in out_done, and its value in out_found.
 * PHYSICAL: va is an address in the gpu's video memory (no space, no TLB, no faults).
 * DELIVER: a missing translation or a write to a read-only page is delivered to UVM, by its fault buffer and an
 *   interrupt, as if a kernel on a channel of the space had faulted. The access fails as without DELIVER; the kernel keeps
 *   faulting at each replay until UVM has cancelled the fault (counter faults_cancelled) or there is a translation.
 *   ENODEV: no channel was registered for the space (UVM_REGISTER_CHANNEL).
 *
 * out_done is written on failure too. A fault stops the access:
 *   EFAULT  no translation (recorded, kind MISSING)
 *   EROFS   write to a read-only page (recorded, kind READ_ONLY)
 *   ENXIO   the translation points outside of memory (recorded, kind BAD_ADDRESS)
 *   ENODEV  the gpu is lost
 * A stale translation is used, as by hardware: the access succeeds on the OLD page, and is recorded (kind
 * STALE). A stale absent translation faults, and is recorded as STALE too. Sparse: READ gives zeros, WRITE is dropped.
 */
#define SOFTGPU_READ  0
#define SOFTGPU_WRITE 1
#define SOFTGPU_FILL  2
#define SOFTGPU_CHECK 3

#define SOFTGPU_ACCESS_PHYSICAL (1u << 0)
#define SOFTGPU_ACCESS_DELIVER  (1u << 1)

struct softgpu_access {
	struct softgpu_space space;
	__u32 op;
	__u32 flags;
	__u64 va;
	__u64 length;
	__u64 buf;       /* user address: READ, WRITE */
	__u64 value;     /* FILL, CHECK */
	__u64 step;
	__u64 out_done;  /* bytes before the fault or difference */
	__u64 out_found; /* CHECK: the word that differs */
};

/*
 * SCAN: count the entries of the page tables for [start, start + length), by walking them (no TLB).
 */
struct softgpu_scan {
	struct softgpu_space space;
	__u64 start;
	__u64 length;
	__u64 out_4k;     /* valid entries of each size */
	__u64 out_64k;
	__u64 out_2m;
	__u64 out_512m;
	__u64 out_sparse; /* sparse 64 KB entries */
	__u64 out_bytes;  /* bytes mapped by valid entries */
	__u64 out_tables; /* page tables and directories that cover part of the range, the root included */
};

/*
 * FRAME: describes one frame of video memory.
 */
#define SOFTGPU_FRAME_POISON  0 /* never written since it was allocated; reads count as poison reads */
#define SOFTGPU_FRAME_UNIFORM 1 /* every 64-bit word is out_word */
#define SOFTGPU_FRAME_DATA    2

struct softgpu_frame {
	__u32 gpu;
	__u32 out_state;
	__u64 pa;            /* any address in it */
	__u64 out_word;
	__u32 out_allocated;
	__u32 out_pinned;    /* pinned in the PMA: a contiguous allocation will not try to evict it */
	__u32 out_mappings;  /* live PTEs of registered spaces, on any gpu, that map part of it */
	__u32 out_backed;    /* KB of guest memory behind it */
};

/*
 * ALLOC: allocate memory from the resource manager, as cudaMalloc or another driver client would; it can be passed
 * to UVM_MAP_EXTERNAL_ALLOCATION as (out_client, out_handle). CONTIGUOUS asks for one physical run: if none is
 * free, the PMA chooses a window without pinned frames and asks UVM to evict it (out_evict_calls and
 * out_evict_failed count these requests and those that UVM refused). ENOSPC if there is no such window.
 * FREE: free it. Closing /dev/softgpu does so too.
 */
#define SOFTGPU_ALLOC_SYSMEM     (1u << 0)
#define SOFTGPU_ALLOC_CONTIGUOUS (1u << 1)

struct softgpu_alloc {
	__u32 gpu;
	__u32 flags;
	__u64 size;
	__u64 page_size;        /* 4 KB (SYSMEM only), 64 KB, 2 MB; size is a multiple of it */
	__u32 out_client;
	__u32 out_handle;
	__u64 out_pa;           /* the first page's */
	__u32 out_evict_calls;
	__u32 out_evict_failed;
};

struct softgpu_handle {
	__u32 client;
	__u32 handle;
};

/*
 * SPACE_NEW: make a new pair of RM handles for UVM_REGISTER_GPU_VASPACE. Valid until SPACE_FREE, or until the
 * descriptor of /dev/softgpu that made it is closed; an address space that UVM holds by then lives on, as in RM.
 */
/* takes struct softgpu_space: gpu in; client, vaspace out */

/*
 * COUNTERS: counters of one gpu since the module was loaded; they never decrease, except those named "now".
 */
struct softgpu_counters {
	__u32 gpu; /* in */
	__u32 __reserved;
	/* the engine */
	__u64 pushes;           /* gpfifo entries with a pushbuffer segment: UVM writes one for each push */
	__u64 methods;
	__u64 semaphore_releases;
	__u64 semaphore_acquires;
	__u64 wfi;              /* waits for idle */
	__u64 membar_sys;
	__u64 membar_gpu;
	__u64 invalidates;      /* TLB invalidates of all kinds */
	__u64 invalidates_all;  /* of these: for a whole address space, or for all */
	__u64 memsets, memset_bytes;
	__u64 copies, copy_bytes;
	__u64 reordered;        /* pipelined copies that were executed out of submission order */
	/* page tables of registered spaces, once a table is reachable from the root */
	__u64 pte_writes;       /* 8-byte entries written that map memory (4 KB, 64 KB, 2 MB), changed or not */
	__u64 pte_changes;      /* of these: entries whose value changed */
	__u64 pde_writes;       /* 8-byte halves or words of directory entries written that point to tables */
	__u64 tables_now;       /* tables and directories reachable */
	__u64 ptes_now;         /* valid entries in them */
	/* video memory */
	__u64 frames;           /* in all */
	__u64 frames_free_now;
	__u64 frames_pinned_now;
	__u64 pma_alloc_calls, pma_free_calls;
	__u64 backing_bytes_now; /* guest memory that backs video memory */
	__u64 poison_reads;     /* reads (by copies, kernels and walks) of memory that was allocated and never written */
	/* translation */
	__u64 tlb_hits, tlb_misses;
	__u64 tlb_entries_now;
	/* accesses with DELIVER */
	__u64 faults_waiting_now; /* for UVM to cancel them */
	__u64 faults_cancelled;
	/* live objects */
	__u64 channels_now, spaces_now, rm_memory_now, clients_now;
	/* faults and errors: each is in the log of FAULTS too */
	__u64 faults;           /* all kinds, STALE included */
	__u64 stale;            /* accesses that used a stale translation */
	__u64 reader_binds;     /* all gpus: BINDs of the patched driver watched by readers */
	__u64 reader_units;     /* all gpus: changes of 64 KB units that they saw */
	__u64 errors;           /* violations of the rules below; each is also in the kernel log ("softgpu: error:") */
};

/*
 * FAULTS: read the oldest unread records: out_count of them (at most SOFTGPU_FAULT_RECORDS); out_dropped records
 * were lost since the last call because the log was full.
 */
#define SOFTGPU_FAULT_MISSING        1 /* access without a translation */
#define SOFTGPU_FAULT_READ_ONLY      2
#define SOFTGPU_FAULT_BAD_ADDRESS    3 /* a translation to nonexistent memory */
#define SOFTGPU_FAULT_STALE          4 /* the TLB model's entry differed from the page tables */
#define SOFTGPU_FAULT_POISON         5 /* read of memory that was allocated but not written; address: physical */
/* errors: counted in softgpu_counters.errors */
#define SOFTGPU_ERROR_FIRST         16
#define SOFTGPU_ERROR_DOUBLE_FREE   16 /* frame freed that was not allocated; address: physical */
#define SOFTGPU_ERROR_FREED_MAPPED  17 /* frame freed while live PTEs map it; address: physical, pte: their number */
#define SOFTGPU_ERROR_OVERLAP       18 /* pipelined copies without an ordering point write the same bytes */
#define SOFTGPU_ERROR_UNORDERED     19 /* TLB invalidate while page table writes may still be in flight (no WFI) */
#define SOFTGPU_ERROR_CHANNEL_BUSY  20 /* channel destroyed with work pending */
#define SOFTGPU_ERROR_SPACE_BUSY    21 /* address space destroyed with allocations */
#define SOFTGPU_ERROR_TABLE_FREED   22 /* frame freed while it holds a table reachable from a live root */
#define SOFTGPU_ERROR_COPY          23 /* a copy engine accessed an invalid address */
#define SOFTGPU_ERROR_METHOD        24 /* a method or value that the model does not support */
#define SOFTGPU_ERROR_TWICE         25 /* one PTE written twice with no ordering point in between */
#define SOFTGPU_ERROR_MODEL         26 /* the model contradicts itself */
#define SOFTGPU_ERROR_BAD_FREE      27 /* RM object freed that does not exist */
#define SOFTGPU_ERROR_LEAK          28 /* left over at unload */
#define SOFTGPU_ERROR_GAP           29 /* a unit changed that no BIND in flight names; address: virtual */
#define SOFTGPU_ERROR_NEITHER       30 /* a named unit had neither the old nor the new translation; address: virtual */
#define SOFTGPU_ERROR_NO_MEMBAR     32 /* frame reused while accesses through an old translation may be in flight; address: physical */
#define SOFTGPU_ERROR_CACHED        33 /* entry of a reservation: memory that is not the GPU's own is cached, or its own is not */
#define SOFTGPU_ERROR_RESIZED       31 /* an entry changes between table and 2 MB page while TLBs may hold the old one */

#define SOFTGPU_FAULT_RECORDS 32

struct softgpu_fault {
	__u32 kind;
	__u32 gpu;
	__u64 address;
	__u64 pte;
	__u32 pid;     /* process that made the access or owns the space; 0 = unknown */
	__u32 channel; /* 0 = none */
};

struct softgpu_faults {
	__u32 gpu;
	__u32 out_count;
	__u64 out_dropped;
	struct softgpu_fault out[SOFTGPU_FAULT_RECORDS];
};

/*
 * INJECT: make calls into the resource manager fail or take long. There is one rule at a time; a new rule replaces it
 * and restarts counting. name: "" = any call that can fail; "nvUvmInterfacePmaAllocPages" = this call (the prefix
 * nvUvmInterface may be omitted); "push" = not a call, but the execution of a push on any channel, which then
 * dies with an error, as after a hardware fault (status is not used).
 *   nth 0         no failure (counts only; delay_us may be set)
 *   nth n         the nth matching call from now on fails with status, and so do the next repeat - 1 calls
 *                 (repeat 0 means 1; ~0: all)
 *   MINE          count only calls made by the calling process
 * Closing the descriptor that set the rule clears it; so do flags 0, nth 0, name "" and delay 0.
 * INJECTED: the number of calls that matched the rule so far, and of those that failed.
 */
#define SOFTGPU_INJECT_MINE (1u << 0)

#define SOFTGPU_STATUS_NO_MEMORY       0x51u /* NV_ERR_NO_MEMORY */
#define SOFTGPU_STATUS_GPU_IS_LOST     0x0Fu /* NV_ERR_GPU_IS_LOST */
#define SOFTGPU_STATUS_GENERIC         0xFFFFu

struct softgpu_inject {
	char  name[SOFTGPU_NAME_BYTES];
	__u32 flags;
	__u32 status;     /* NV_STATUS; 0 means NV_ERR_NO_MEMORY */
	__u64 nth;
	__u64 repeat;
	__u64 delay_us;   /* each matching call first takes this long */
};

struct softgpu_injected {
	__u64 out_calls;
	__u64 out_failed;
	char  out_last[SOFTGPU_NAME_BYTES]; /* the last call that matched */
};

/*
 * CALLS: describes call number index of the resource manager's interface (0, 1, ...): its name, the number of calls
 * since loading, and whether INJECT can make it fail. ENOENT beyond the last call.
 */
struct softgpu_call {
	__u32 index;
	__u32 out_can_fail;
	__u64 out_calls;
	char  out_name[SOFTGPU_NAME_BYTES];
};

/*
 * HOLD: stop the engine of a gpu before it executes something, so that the intermediate state can be examined.
 *   RELEASE     continue
 *   NOW         before the next word
 *   INVALIDATE  before the next TLB invalidate
 *   PUSH        before the next push
 *   QUIET       do not stop, but faults in the buffer raise no interrupt until RELEASE
 * If the engine is already stopped, the same op again makes it continue to the next such place.
 * WAIT waits until the engine has stopped there: ETIMEDOUT after timeout_ms. out_held: 1 if it has stopped. The hold
 * ends when the descriptor that requested it is closed.
 */
#define SOFTGPU_HOLD_RELEASE    0
#define SOFTGPU_HOLD_NOW        1
#define SOFTGPU_HOLD_INVALIDATE 2
#define SOFTGPU_HOLD_PUSH       3
#define SOFTGPU_HOLD_WAIT       4
#define SOFTGPU_HOLD_QUIET      5

struct softgpu_hold {
	__u32 gpu;
	__u32 op;
	__u32 timeout_ms;
	__u32 out_held;
};

/*
 * SETTINGS: the hardware's behaviour (all gpus); also module parameters of the same names. SET writes all of
 * them and returns the old values; without SET they are only read.
 */
#define SOFTGPU_SETTINGS_SET (1u << 0)

struct softgpu_settings {
	__u32 flags;
	__u32 delay_us;      /* maximum random delay of each push */
	__u32 reorder;       /* 1: pipelined copies are executed in random order (default) */
	__u32 tlb_negative;  /* 1: the TLB keeps absent translations too (default) */
	__u32 tlb_pde;       /* 1: directory entries are cached (default) */
	__u32 seed;          /* seed of all random choices; reads as 0 if not set */
	__u32 check_ordering; /* 1: SOFTGPU_ERROR_OVERLAP, _UNORDERED, _TWICE are checked (default) */
	__u32 __reserved;
};

/*
 * LOST: the gpu falls off the bus: its channels die, calls about it return NV_ERR_GPU_IS_LOST, accesses ENODEV.
 * lost 0 brings it back for new channels. (Hardware cannot do that; it lets one guest run more tests.)
 */
struct softgpu_lost {
	__u32 gpu;
	__u32 lost;
};

/*
 * VERIFY: compare the records of page tables (reachable tables, PTEs that map each frame) with a full walk of all
 * registered spaces. EIO if they differ, with the first difference in the kernel log.
 * FLUSH: drop the TLB model's entries of a gpu, as a test's own "invalidate". Takes __u32 gpu.
 */

/*
 * SUSPEND: suspend (suspend 1) or resume (0) nvidia-uvm.ko, as when the system does; out_status is its NV_STATUS.
 * ENODEV if it is not loaded.
 */
struct softgpu_suspend {
	__u32 suspend;
	__u32 out_status;
};

#define SOFTGPU_IOCTL_TYPE 'S'
#define SOFTGPU_INFO       _IOWR(SOFTGPU_IOCTL_TYPE, 1, struct softgpu_info)
#define SOFTGPU_XLATE      _IOWR(SOFTGPU_IOCTL_TYPE, 2, struct softgpu_xlate)
#define SOFTGPU_ACCESS     _IOWR(SOFTGPU_IOCTL_TYPE, 3, struct softgpu_access)
#define SOFTGPU_SCAN       _IOWR(SOFTGPU_IOCTL_TYPE, 4, struct softgpu_scan)
#define SOFTGPU_FRAME      _IOWR(SOFTGPU_IOCTL_TYPE, 5, struct softgpu_frame)
#define SOFTGPU_ALLOC      _IOWR(SOFTGPU_IOCTL_TYPE, 6, struct softgpu_alloc)
#define SOFTGPU_FREE       _IOW(SOFTGPU_IOCTL_TYPE, 7, struct softgpu_handle)
#define SOFTGPU_SPACE_NEW  _IOWR(SOFTGPU_IOCTL_TYPE, 8, struct softgpu_space)
#define SOFTGPU_SPACE_FREE _IOW(SOFTGPU_IOCTL_TYPE, 9, struct softgpu_space)
#define SOFTGPU_COUNTERS   _IOWR(SOFTGPU_IOCTL_TYPE, 10, struct softgpu_counters)
#define SOFTGPU_FAULTS     _IOWR(SOFTGPU_IOCTL_TYPE, 11, struct softgpu_faults)
#define SOFTGPU_INJECT     _IOW(SOFTGPU_IOCTL_TYPE, 12, struct softgpu_inject)
#define SOFTGPU_INJECTED   _IOR(SOFTGPU_IOCTL_TYPE, 13, struct softgpu_injected)
#define SOFTGPU_CALLS      _IOWR(SOFTGPU_IOCTL_TYPE, 14, struct softgpu_call)
#define SOFTGPU_HOLD       _IOWR(SOFTGPU_IOCTL_TYPE, 15, struct softgpu_hold)
#define SOFTGPU_SETTINGS   _IOWR(SOFTGPU_IOCTL_TYPE, 16, struct softgpu_settings)
#define SOFTGPU_LOST       _IOW(SOFTGPU_IOCTL_TYPE, 17, struct softgpu_lost)
#define SOFTGPU_VERIFY     _IO(SOFTGPU_IOCTL_TYPE, 18)
#define SOFTGPU_FLUSH      _IOW(SOFTGPU_IOCTL_TYPE, 19, __u32)
#define SOFTGPU_SUSPEND    _IOWR(SOFTGPU_IOCTL_TYPE, 20, struct softgpu_suspend)

#define SOFTGPU_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), "layout of " #type)
SOFTGPU_SIZE(softgpu_space, 16);
SOFTGPU_SIZE(softgpu_info, 56);
SOFTGPU_SIZE(softgpu_xlate, 72);
SOFTGPU_SIZE(softgpu_access, 80);
SOFTGPU_SIZE(softgpu_scan, 88);
SOFTGPU_SIZE(softgpu_frame, 40);
SOFTGPU_SIZE(softgpu_alloc, 48);
SOFTGPU_SIZE(softgpu_handle, 8);
SOFTGPU_SIZE(softgpu_fault, 32);
SOFTGPU_SIZE(softgpu_faults, 16 + 32 * SOFTGPU_FAULT_RECORDS);
SOFTGPU_SIZE(softgpu_inject, 80);
SOFTGPU_SIZE(softgpu_injected, 64);
SOFTGPU_SIZE(softgpu_call, 64);
SOFTGPU_SIZE(softgpu_hold, 16);
SOFTGPU_SIZE(softgpu_settings, 32);
SOFTGPU_SIZE(softgpu_lost, 8);
SOFTGPU_SIZE(softgpu_suspend, 8);

#endif
