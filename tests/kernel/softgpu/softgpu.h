/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * softgpu.h - what a test sees of the software GPU: the ioctls of /dev/softgpu.
 *
 * The software GPU is a kernel module in nvidia.ko's place. The real nvidia-uvm.ko registers its GPUs,
 * submits pushbuffers to them and writes their page tables; here a test looks at the result and
 * disturbs it. Nothing below goes through nvidia-uvm.ko.
 *
 * Vocabulary
 *   gpu       index 0 .. SOFTGPU_INFO.out_gpus - 1.
 *   space     a GPU address space that was registered with UVM (UVM_REGISTER_GPU_VASPACE), named by the
 *             gpu and the RM handles (client, vaspace) that were given to UVM. Handles 0, 0 stand for the
 *             one that the calling process registered last on this gpu and that is still there.
 *   frame     64 KB of video memory, the granule in which it is given out.
 *   access    what a kernel running on the GPU would do: through the TLB model, then the page tables.
 *
 * Errors: EINVAL malformed; ENOENT no such gpu, space, handle or call name; EFAULT user memory;
 * EIO the model found itself wrong (see the kernel log). Those of ACCESS are said there.
 *
 * The size of each struct is part of its ioctl's number: an old test meets ENOTTY, never a wrong layout.
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

/* The byte that never-written and freed video memory reads as. */
#define SOFTGPU_POISON_BYTE 0xDBu
#define SOFTGPU_POISON_WORD 0xDBDBDBDBDBDBDBDBull

/* The address space: which GPU, which handles. */
struct softgpu_space {
	__u32 gpu;
	__u32 client;  /* 0 and vaspace 0: the calling process's last one */
	__u32 vaspace;
	__u32 __reserved;
};

/*
 * INFO: the machine (out_gpus, out_branch, out_arch: the same for each gpu), and one gpu.
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
	__u64 out_va_bits;                     /* of its virtual addresses: 49 or 57 */
};

/*
 * XLATE: walk the page tables for one address. Ignores the TLB model and changes nothing in it.
 */
#define SOFTGPU_APERTURE_VID  0 /* this gpu's own memory */
#define SOFTGPU_APERTURE_PEER 1 /* memory of out_peer */
#define SOFTGPU_APERTURE_SYS  2 /* host memory */

struct softgpu_xlate {
	struct softgpu_space space;
	__u64 va;
	__u64 out_pte;       /* the raw entry, also when it is invalid; 0 if there is no table */
	__u64 out_pa;        /* of va itself, in its aperture */
	__u64 out_page_size; /* 4 KB, 64 KB, 2 MB or 512 MB; 0 if not valid */
	__u32 out_valid;
	__u32 out_aperture;  /* SOFTGPU_APERTURE_* */
	__u32 out_peer;      /* gpu */
	__u32 out_read_only;
	__u32 out_sparse;    /* not valid: reads zeros and drops writes instead of faulting */
	__u32 out_has_table; /* not valid: there is a table of 64 KB entries, though */
};

/*
 * ACCESS: as a kernel on the GPU would. length bytes at va, in steps of the page size.
 *   READ   into buf            WRITE  from buf
 *   FILL   64-bit words: word i (counted from va, i = 0, 1, ...) becomes value + i * step. va and length are
 *          multiples of 8. A whole frame filled with step 0 costs no guest memory.
 *   CHECK  the same words are compared: on the first that differs out_done says where (bytes before it),
 *          out_found what is there, and the call returns EBADMSG.
 * PHYSICAL: va is an address in the gpu's video memory (no space, no TLB, no faults).
 * DELIVER: UVM learns of a missing translation or a write to a read-only page, by its fault buffer and an interrupt,
 *   as if a kernel on a channel of the space had met it. The access fails as it does without; the kernel goes on
 *   faulting at each replay until UVM has cancelled the fault (counter faults_cancelled) or it finds a translation.
 *   ENODEV: no channel was registered for the space (UVM_REGISTER_CHANNEL).
 *
 * out_done is written on failure too. A fault stops it:
 *   EFAULT  no translation (recorded, kind MISSING)
 *   EROFS   write to a read-only page (recorded, kind READ_ONLY)
 *   ENXIO   the translation points outside of memory (recorded, kind BAD_ADDRESS)
 *   ENODEV  the gpu is lost
 * A stale translation is used as hardware would: the access succeeds on the OLD page, and is recorded (kind
 * STALE). A stale absence faults, and is recorded as STALE too. Sparse: READ gives zeros, WRITE is dropped.
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
 * SCAN: count what the page tables hold in [start, start + length), by walking them (no TLB).
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
	__u64 out_bytes;  /* mapped by valid entries */
	__u64 out_tables; /* page tables and directories that cover a part of the range, the root included */
};

/*
 * FRAME: one frame of video memory.
 */
#define SOFTGPU_FRAME_POISON  0 /* never written since it was given out; reads are counted as poison reads */
#define SOFTGPU_FRAME_UNIFORM 1 /* every 64-bit word is out_word */
#define SOFTGPU_FRAME_DATA    2

struct softgpu_frame {
	__u32 gpu;
	__u32 out_state;
	__u64 pa;            /* any address in it */
	__u64 out_word;
	__u32 out_allocated;
	__u32 out_pinned;    /* in the PMA's books: a contiguous allocation will not try to evict it */
	__u32 out_mappings;  /* live PTEs of registered spaces, on any gpu, that map a part of it */
	__u32 out_backed;    /* KB of guest memory behind it */
};

/*
 * ALLOC: memory from the resource manager, as cudaMalloc or another driver client would get it; can be given to
 * UVM_MAP_EXTERNAL_ALLOCATION with (out_client, out_handle). CONTIGUOUS asks for one physical run: where there is
 * no free one the PMA chooses a window without pinned frames and asks UVM to evict it (out_evict_calls,
 * out_evict_failed: how often, and how often UVM said no). ENOSPC when there is none.
 * FREE: gives it back. So does closing /dev/softgpu.
 */
#define SOFTGPU_ALLOC_SYSMEM     (1u << 0)
#define SOFTGPU_ALLOC_CONTIGUOUS (1u << 1)

struct softgpu_alloc {
	__u32 gpu;
	__u32 flags;
	__u64 size;
	__u64 page_size;        /* 4 KB (SYSMEM only), 64 KB, 2 MB; size is a multiple */
	__u32 out_client;
	__u32 out_handle;
	__u64 out_pa;           /* of the first page */
	__u32 out_evict_calls;
	__u32 out_evict_failed;
};

struct softgpu_handle {
	__u32 client;
	__u32 handle;
};

/*
 * SPACE_NEW: a fresh pair of RM handles for UVM_REGISTER_GPU_VASPACE. Valid until the descriptor of /dev/softgpu
 * that made it is closed or SPACE_FREE; an address space that UVM holds by then lives on, as in RM.
 */
/* takes struct softgpu_space: gpu in; client, vaspace out */

/*
 * COUNTERS: of one gpu, since the module was loaded; they never go back, except those marked "now".
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
	__u64 invalidates_all;  /* of them: a whole address space, or all */
	__u64 memsets, memset_bytes;
	__u64 copies, copy_bytes;
	__u64 reordered;        /* pipelined copies that were executed out of the order they were submitted in */
	/* page tables of registered spaces, from the moment that a table is reachable from the root */
	__u64 pte_writes;       /* 8-byte entries written that map memory (4 KB, 64 KB, 2 MB), changed or not */
	__u64 pte_changes;      /* of them: those whose value changed */
	__u64 pde_writes;       /* 8-byte halves or words of directory entries written that point to tables */
	__u64 tables_now;       /* tables and directories reachable */
	__u64 ptes_now;         /* valid entries in them */
	/* video memory */
	__u64 frames;           /* in all */
	__u64 frames_free_now;
	__u64 frames_pinned_now;
	__u64 pma_alloc_calls, pma_free_calls;
	__u64 backing_bytes_now; /* guest memory behind video memory */
	__u64 poison_reads;     /* reads (by copies, kernels and walks) of memory that was given out and never written */
	/* translation */
	__u64 tlb_hits, tlb_misses;
	__u64 tlb_entries_now;
	/* accesses with DELIVER */
	__u64 faults_waiting_now; /* of UVM to cancel them */
	__u64 faults_cancelled;
	/* live objects */
	__u64 channels_now, spaces_now, rm_memory_now, clients_now;
	/* what must not happen: each is in the log of FAULTS too */
	__u64 faults;           /* all kinds, STALE included */
	__u64 stale;            /* accesses that used a stale translation */
	__u64 reader_binds;     /* of all gpus: BINDs of the patched driver that readers have watched */
	__u64 reader_units;     /* of all gpus: how often they saw a unit of 64 KB change meanwhile */
	__u64 errors;           /* the rules below that were broken; any error is also in the kernel log ("softgpu: error:") */
};

/*
 * FAULTS: the oldest records that were not read yet; out_count of them (at most SOFTGPU_FAULT_RECORDS), out_dropped
 * were lost since the last call because nobody read.
 */
#define SOFTGPU_FAULT_MISSING        1 /* access without a translation */
#define SOFTGPU_FAULT_READ_ONLY      2
#define SOFTGPU_FAULT_BAD_ADDRESS    3 /* a translation to where no memory is */
#define SOFTGPU_FAULT_STALE          4 /* the TLB model's entry differed from the page tables */
#define SOFTGPU_FAULT_POISON         5 /* read of memory that was given out and not written; address: physical */
/* errors: counted in softgpu_counters.errors */
#define SOFTGPU_ERROR_FIRST         16
#define SOFTGPU_ERROR_DOUBLE_FREE   16 /* frame freed that was not allocated; address: physical */
#define SOFTGPU_ERROR_FREED_MAPPED  17 /* frame freed while a live PTE maps it; address: physical, pte: how many */
#define SOFTGPU_ERROR_OVERLAP       18 /* pipelined copies without an ordering point write the same bytes */
#define SOFTGPU_ERROR_UNORDERED     19 /* TLB invalidate while page table writes may still be in flight (no WFI) */
#define SOFTGPU_ERROR_CHANNEL_BUSY  20 /* channel destroyed with work pending */
#define SOFTGPU_ERROR_SPACE_BUSY    21 /* address space destroyed with allocations */
#define SOFTGPU_ERROR_TABLE_FREED   22 /* frame freed that holds a table which is reachable from a live root */
#define SOFTGPU_ERROR_COPY          23 /* a copy engine touched an address that is not there */
#define SOFTGPU_ERROR_METHOD        24 /* a method or value that the model does not know */
#define SOFTGPU_ERROR_TWICE         25 /* one PTE written twice with no ordering point in between */
#define SOFTGPU_ERROR_MODEL         26 /* the model contradicts itself */
#define SOFTGPU_ERROR_BAD_FREE      27 /* RM object freed that does not exist */
#define SOFTGPU_ERROR_LEAK          28 /* left over at unload */
#define SOFTGPU_ERROR_GAP           29 /* a BIND in flight changes what it does not name; address: virtual */
#define SOFTGPU_ERROR_NEITHER       30 /* what a BIND names was neither as before nor as after it; address: virtual */
#define SOFTGPU_ERROR_NO_MEMBAR     32 /* frame reused while accesses through an old translation may be under way; address: physical */
#define SOFTGPU_ERROR_CACHED        33 /* entry of a reservation: other memory than the GPU's is cached, or its own is not */
#define SOFTGPU_ERROR_RESIZED       31 /* an entry becomes a table or a 2 MB page while TLBs may hold the other */

#define SOFTGPU_FAULT_RECORDS 32

struct softgpu_fault {
	__u32 kind;
	__u32 gpu;
	__u64 address;
	__u64 pte;
	__u32 pid;     /* of the process whose access it was, or whose space it is; 0 = not known */
	__u32 channel; /* 0 = none */
};

struct softgpu_faults {
	__u32 gpu;
	__u32 out_count;
	__u64 out_dropped;
	struct softgpu_fault out[SOFTGPU_FAULT_RECORDS];
};

/*
 * INJECT: make calls into the resource manager fail or take long. One rule at a time; a new one replaces it, and
 * the counting starts anew. name: "" = any call that can fail; "nvUvmInterfacePmaAllocPages" = this one (the prefix
 * nvUvmInterface may be left out); "push" = not a call, but the execution of a push on any channel, which then
 * dies with an error, as after a fault of the hardware (status is not used).
 *   nth 0         no failure (counts only; delay_us may be set)
 *   nth n         the nth matching call from now on fails with status, and so do the repeat - 1 after it
 *                 (repeat 0 is taken as 1; ~0: all)
 *   MINE          count only calls made by the calling process
 * Gone when the descriptor that made it is closed. flags 0, nth 0, name "" and delay 0: clear.
 * INJECTED: how many calls matched the rule since, and how many of them failed.
 */
#define SOFTGPU_INJECT_MINE (1u << 0)

#define SOFTGPU_STATUS_NO_MEMORY       0x51u /* NV_ERR_NO_MEMORY */
#define SOFTGPU_STATUS_GPU_IS_LOST     0x0Fu /* NV_ERR_GPU_IS_LOST */
#define SOFTGPU_STATUS_GENERIC         0xFFFFu

struct softgpu_inject {
	char  name[SOFTGPU_NAME_BYTES];
	__u32 flags;
	__u32 status;     /* NV_STATUS; 0 is taken as NV_ERR_NO_MEMORY */
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
 * CALLS: call number index of the resource manager's interface (0, 1, ...): its name, how often it was called
 * since loading, and if INJECT can make it fail. ENOENT after the last one.
 */
struct softgpu_call {
	__u32 index;
	__u32 out_can_fail;
	__u64 out_calls;
	char  out_name[SOFTGPU_NAME_BYTES];
};

/*
 * HOLD: stop the engine of a gpu before it executes something, so that the state in between can be looked at.
 *   RELEASE     go on
 *   NOW         before the next word
 *   INVALIDATE  before the next TLB invalidate
 *   PUSH        before the next push
 *   QUIET       nowhere, but faults in the buffer raise no interrupt meanwhile
 * Where it stands already does not count: with the same op again it goes on to the next such place.
 * WAIT waits until it stands there: ETIMEDOUT after timeout_ms. out_held: 1 if it stands. The hold ends when the
 * descriptor that asked for it is closed.
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
 * SETTINGS: how the hardware behaves (all gpus); also module parameters of the same names. SET writes all of
 * them and returns the old ones; without it they are only read.
 */
#define SOFTGPU_SETTINGS_SET (1u << 0)

struct softgpu_settings {
	__u32 flags;
	__u32 delay_us;      /* each push is executed up to so much later, at random */
	__u32 reorder;       /* 1: pipelined copies are executed in random order (default) */
	__u32 tlb_negative;  /* 1: the TLB keeps absent translations too (default) */
	__u32 tlb_pde;       /* 1: directory entries are cached (default) */
	__u32 seed;          /* of all this randomness; 0 on reading = not set */
	__u32 check_ordering; /* 1: SOFTGPU_ERROR_OVERLAP, _UNORDERED, _TWICE are checked (default) */
	__u32 __reserved;
};

/*
 * LOST: the gpu falls off the bus: its channels die, calls about it return NV_ERR_GPU_IS_LOST, accesses ENODEV.
 * lost 0 brings it back for new channels (what no hardware does; so that one guest can run more tests).
 */
struct softgpu_lost {
	__u32 gpu;
	__u32 lost;
};

/*
 * VERIFY: compare the books (which tables are reachable, how many PTEs map each frame) with a full walk of all
 * registered spaces. EIO when they differ, with the first difference in the kernel log.
 * FLUSH: drop the TLB model's entries of a gpu, as a test's own "invalidate". Takes __u32 gpu.
 */

/*
 * SUSPEND: what happens to nvidia-uvm.ko when the system goes to sleep (suspend 1) and wakes up (0); out_status is
 * its NV_STATUS. ENODEV if it is not loaded.
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
