/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * impl.h - internals of the software GPU: all types, and the functions that the files share.
 *
 * Objects
 *   softgpu   one GPU: video memory, TLB, channels, one thread that executes pushbuffers.
 *   space     a GPU address space. UVM creates some for itself (channels, copies) and duplicates those that
 *             processes register ("user" spaces). Has a root page table, which UVM writes.
 *   channel   a ring of pushbuffer segments; executed by the GPU's thread.
 *   table     our record of one page table or directory that is reachable from the root of a user space.
 *   memory    memory of the resource manager that a process allocated (a handle in a client).
 *
 * Locks
 *   model.lock protects everything here, unless noted otherwise. It is a mutex, and dropped around calls back into
 *   UVM (eviction), around delays and while the engine is held. Nothing is called under it that could wait for UVM.
 *   calls.c has its own spinlock for failure injection, readers.c one for the BINDs in flight.
 *
 * Names: sg_ for functions; the nvUvmInterface* functions are the resource manager's interface, declared by NVIDIA's
 * nv_uvm_interface.h.
 */
#ifndef SOFTGPU_IMPL_H
#define SOFTGPU_IMPL_H

#include <linux/hashtable.h>
#include <linux/kernel.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/types.h>
#include <linux/wait.h>
#include <linux/xarray.h>

#include "nvtypes.h"
#include "nvstatus.h"
#include "nv_uvm_interface.h"

#include "softgpu.h"

#ifndef SOFTGPU_BRANCH
#error SOFTGPU_BRANCH is the number of the driver branch, for example 535
#endif

/* SG_HAS_*: differences between versions of nv_uvm_interface.h, see FEATURES in scripts/kernel_tree.py. */
#include "softgpu_features.h"

/* UVM knows the classes of both kinds of Blackwell. */
#define SG_HAS_BLACKWELL (SOFTGPU_BRANCH >= 570)

#if !SG_HAS_EVENTS
#define UvmEventsLinux UvmOpsUvmEvents
#endif

#define SG_PAGE_4K   0x1000ull
#define SG_PAGE_64K  0x10000ull
#define SG_PAGE_2M   0x200000ull
#define SG_PAGE_512M 0x20000000ull
#define SG_PAGE_256G 0x4000000000ull

#define SG_SUBPAGES (SOFTGPU_FRAME_SIZE / SG_PAGE_4K)

/* ---- video memory (vidmem.c) and places in memory ---------------------------------------------- */

/* 64 KB of video memory. Its 4 KB parts are backed by guest memory only when their contents are not `word`. */
struct sg_frame {
	u64 word;           /* value of each 64-bit word in the parts that are not backed */
	void **part;        /* NULL or SG_SUBPAGES pointers, each NULL or 4 KB */
	u32 mappings;       /* PTEs of user spaces that map part of it */
	u64 cleared[SOFTGPU_MAX_GPUS]; /* when each GPU last lost a translation to the frame (membars.c) */
	u16 tables;         /* live tables in the frame (tables.c) */
	u8 poison;          /* `word` is the poison: never written */
	u8 cpu_mapped;      /* its backing must not move */
};

/* A place in memory that a GPU can touch. */
enum sg_where { SG_VID, SG_SYS, SG_CPU };

struct sg_place {
	enum sg_where where;
	struct softgpu *gpu; /* SG_VID: whose memory */
	u64 pa;              /* SG_VID, SG_SYS */
	u8 *cpu;             /* SG_CPU */
};

int sg_vidmem_init(struct softgpu *gpu);
void sg_vidmem_exit(struct softgpu *gpu);
bool sg_place_ok(const struct sg_place *place, u64 length);
void sg_place_advance(struct sg_place *place, u64 length);
/* Any length within the place. The write functions update the records of page tables. -EIO: no memory there. */
int sg_mem_read(const struct sg_place *place, void *buf, u64 length);
int sg_mem_write(const struct sg_place *place, const void *buf, u64 length);
int sg_mem_fill(const struct sg_place *place, u64 word, u64 length); /* repeats the word, starting at place */
void sg_frame_poison(struct softgpu *gpu, u64 pa);
void *sg_vidmem_map(struct softgpu *gpu, u64 pa, u64 length); /* maps it for the CPU; undo with vunmap() */

/* ---- page table formats and walks (mmu.c) ------------------------------------------------------ */

enum sg_entry_kind { SG_ENTRY_INVALID, SG_ENTRY_SPARSE, SG_ENTRY_LEAF, SG_ENTRY_TABLE };

struct sg_entry {
	enum sg_entry_kind kind;
	u8 aperture;     /* LEAF: SOFTGPU_APERTURE_*; TABLE: _VID or _SYS */
	u8 peer;         /* LEAF, aperture peer */
	bool read_only;
	bool cached;     /* LEAF: cached in the GPU's L2 */
	bool no_small;   /* INVALID in a table of 64 KB entries: the 4 KB table is not consulted */
	u64 pa;          /* address of the page or of the table */
	u64 page_size;   /* LEAF */
};

const char *sg_entry_name(enum sg_entry_kind kind);

/* Levels count down as NVIDIA's names do: SG_LEVEL_PTE = 0, PDE0 = 1, PDE1 = 2, ... */
enum { SG_LEVEL_PTE = 0, SG_LEVEL_PDE0 = 1, SG_LEVEL_PDE1 = 2, SG_LEVEL_PDE2 = 3, SG_LEVELS_MAX = 6 };

struct sg_mmu_format {
	u8 va_bits;
	u8 root_level;
	u8 shift[SG_LEVELS_MAX]; /* number of the lowest address bit that indexes this level; [PTE]: not used */
	u8 bits[SG_LEVELS_MAX];
	/* half: PDE0 has two words per entry (0: 2 MB page or 64 KB table, 1: 4 KB table); tables of PTEs: half 0 = 64 KB */
	void (*decode)(u8 level, u8 half, u64 raw, struct sg_entry *out);
	u64 (*make_pte)(u8 aperture, u8 peer, u64 pa, bool read_only);
};
extern const struct sg_mmu_format sg_mmu_ver2; /* Pascal to Ada */
extern const struct sg_mmu_format sg_mmu_ver3; /* Hopper, GB20x */
extern const struct sg_mmu_format sg_mmu_ver3_256g; /* GB10x: version 3 with 256 GB pages */

struct sg_root {
	u64 pa;
	bool sys;
};

struct sg_translation {
	bool valid, sparse, read_only, has_table;
	u8 aperture, peer;
	u8 level;      /* where the walk ended: SG_LEVEL_* of the entry that decided */
	u64 pte, pa;   /* the raw entry; pa of the address itself */
	u64 page_size; /* if the translation is absent, the size of the missing range */
};

/* cached: uses and fills the cache of directory entries. */
void sg_walk(struct softgpu *gpu, struct sg_root root, u64 va, bool cached, struct sg_translation *out);
bool sg_read_entry(struct softgpu *gpu, bool sys, u64 pa, u64 *raw);
bool sg_translation_place(struct softgpu *gpu, const struct sg_translation *t, struct sg_place *out);

/* ---- TLB model (tlb.c) --------------------------------------------------------------------------- */

#define SG_TLB_HASH_BITS 12

struct sg_tlb {
	DECLARE_HASHTABLE(entries, SG_TLB_HASH_BITS);
	struct list_head roots; /* struct tlb_root */
	u64 count;
};

void sg_tlb_init(struct softgpu *gpu);
void sg_tlb_exit(struct softgpu *gpu);
void sg_tlb_translate(struct softgpu *gpu, struct sg_root root, u64 va, struct sg_translation *out);
/* Drops entries of SG_LEVEL_* max_level and below in [start, last]. */
void sg_tlb_invalidate(struct softgpu *gpu, struct sg_root root, u8 max_level, u64 start, u64 last);
void sg_tlb_invalidate_root(struct softgpu *gpu, struct sg_root root);
void sg_tlb_flush(struct softgpu *gpu);
bool sg_tlb_directory(struct softgpu *gpu, struct sg_root root, u64 va, u8 level, u64 raw[2]);
void sg_tlb_add_directory(struct softgpu *gpu, struct sg_root root, u64 va, u8 level, const u64 raw[2]);

/* ---- records of page tables (tables.c) ------------------------------------------------------------- */

struct sg_space;
int sg_tables_set_root(struct sg_space *space);
void sg_tables_drop_root(struct sg_space *space);
void sg_tables_written(struct softgpu *gpu, bool sys, u64 pa, u64 length);
bool sg_tables_holds(struct softgpu *gpu, bool sys, u64 pa, u64 length);
int sg_tables_verify(void);
void sg_tables_scan(struct sg_space *space, struct softgpu_scan *scan);
/* To be called after a TLB invalidate of entries of this level and below. */
void sg_tables_invalidated(struct softgpu *gpu, struct sg_root root, u8 max_level, u64 start, u64 last);

/* ---- membars (membars.c) --------------------------------------------------------------------------- */

struct sg_membars {
	u64 clock;
	u64 invalidated;            /* the last TLB invalidate */
	u64 own_until, peers_until; /* invalidates up to here were followed by a membar for such memory */
};

void sg_membars_cleared(struct softgpu *by, struct softgpu *owner, u64 frame);
void sg_membars_invalidated(struct softgpu *by);
void sg_membars_done(struct softgpu *by, bool sys);
void sg_membars_reused(struct softgpu *owner, u64 frame);

/* ---- readers (readers.c) --------------------------------------------------------------------------- */

/* A unit as a reader sees it. */
struct sg_sight {
	enum sg_entry_kind kind; /* never TABLE */
	u8 aperture, peer;       /* LEAF */
	bool read_only, cached;
	u64 pa;                  /* the unit's */
	u64 page_size;           /* the entry's; 0: absent */
};

int sg_readers_init(void);
void sg_readers_exit(void);
/* Returns true if a BIND is in flight: only then changed units have to be reported. */
bool sg_readers_watch(const struct sg_space *space);
/* Reports that the translation of va changes, because an entry of this level is written. */
void sg_readers_unit(struct sg_space *space, u8 level, u64 va, const struct sg_sight *before, const struct sg_sight *after);
void sg_readers_counters(struct softgpu_counters *out);
struct sg_channel;
const void *sg_descriptor_of_caller(void);
void sg_readers_channel_add(struct sg_channel *channel);
void sg_readers_channel_remove(struct sg_channel *channel);
void sg_readers_channel_runs(const struct sg_channel *channel);
void sg_readers_channel_advance(struct sg_channel *channel);

/* ---- address spaces and memory of the resource manager (space.c, rmmem.c) --------------------------- */

struct sg_space {
	struct list_head node;
	struct softgpu *gpu;
	bool user;             /* duplicated from a process's space */
	u32 client, vaspace;
	pid_t pid;
	const void *descriptor; /* the UVM descriptor that registered it */
	struct sg_root root;
	bool has_root;
	u64 root_entries;
	struct list_head tables;      /* struct table */
	struct xarray resized;        /* slots whose entry is invalid, and what TLBs may still hold of it; by address >> 21 */
	u64 rm_base, rm_size, rm_next; /* addresses that the resource manager maps itself */
	struct list_head allocations;  /* struct sg_allocation */
};

/* Backing of memory with a GPU address that UVM got from the resource manager (pushbuffers, semaphores). */
struct sg_backing {
	int users;
	struct softgpu *gpu;
	bool sys;
	u64 length;
	u8 *cpu;   /* sys */
	u64 pa;    /* vidmem */
};

struct sg_allocation {
	struct list_head node;
	u64 va;
	struct sg_backing *backing;
	void *mapped;  /* vidmem: for the CPU */
};

bool sg_space_place(struct sg_space *space, u64 va, struct sg_place *out, u64 *contiguous);
struct sg_space *sg_space_find(const struct softgpu_space *name);

/* Memory that a process allocated; also what UVM duplicates. */
struct sg_memory {
	struct list_head node;
	u32 handle;
	int users;
	struct softgpu *gpu;
	bool sys;
	u64 size, page_size, pages;
	u64 pa[];
};

/* Called without the lock: UVM may have to evict. counts may be NULL. Returns NULL on failure, with the reason in *error. */
struct sg_memory *sg_memory_new(struct softgpu *gpu, bool sys, u64 size, u64 page_size, bool contiguous,
				struct softgpu_alloc *counts, int *error);
void sg_memory_put(struct sg_memory *memory);

/* ---- handles of processes (client.c) ---------------------------------------------------------------- */

enum sg_object_kind { SG_OBJECT_DEVICE, SG_OBJECT_SUBDEVICE, SG_OBJECT_VASPACE, SG_OBJECT_MEMORY, SG_OBJECT_OTHER };

struct sg_object {
	struct list_head node;
	u32 handle, parent;
	u32 class_id;
	enum sg_object_kind kind;
	struct softgpu *gpu;
	struct sg_memory *memory;
};

struct sg_client {
	struct list_head node;
	u32 handle;
	const void *owner; /* the struct file that it belongs to */
	struct list_head objects;
	u32 next;
};

struct sg_client *sg_client_new(const void *owner, u32 handle);
struct sg_client *sg_client_find(u32 handle);
struct sg_object *sg_object_find(struct sg_client *client, u32 handle);
struct sg_object *sg_object_new(struct sg_client *client, u32 handle, enum sg_object_kind kind, struct softgpu *gpu);
int sg_object_free(const void *owner, u32 client, u32 handle); /* frees the object and its children; if handle equals client, the client */
void sg_client_free_all(const void *owner);

/* ---- video memory's owner: the PMA (pma.c) --------------------------------------------------------- */

int sg_pma_init(struct softgpu *gpu);
void sg_pma_exit(struct softgpu *gpu);
bool sg_pma_take(struct softgpu *gpu, u64 size, u64 align, bool top, bool pin, u64 lo, u64 hi, u64 *pa);
void sg_pma_put(struct softgpu *gpu, u64 pa, u64 size);
/* Allocates as RM does for other clients: may ask UVM to evict. Takes the lock. 0 or -ENOSPC. */
int sg_pma_alloc(struct softgpu *gpu, u64 page_size, u64 pages, bool contiguous, bool pin, u64 *pa, struct softgpu_alloc *counts);

/* ---- channels and the engine (channel.c, engine.c, host.c, ce.c) ------------------------------------- */

#define SG_CE_METHODS (0x800 / 4)
#define SG_CE_PENDING 2048

/* A transfer of the copy engine that may still be in flight. */
struct sg_transfer {
	bool fill;
	bool src_physical, dst_physical;
	bool src_sys, dst_sys, src_peer, dst_peer;
	u8 src_peer_id, dst_peer_id;
	u8 element;      /* fill: bytes of the pattern, 1 .. 16 */
	u8 pattern[16];
	u64 src, dst, length;
};

struct sg_channel {
	struct list_head node;
	struct sg_space *space;
	struct softgpu *gpu;
	u32 id;
	volatile u32 *userd;       /* SG_USERD_* */
	u64 *gpfifo;
	u32 entries, get;
	u64 fetched;               /* entries, since its creation */
	NvNotification *error;
	bool dead;
	u64 segment_base;          /* Hopper: the address bits above 40 */
	u32 *segment;              /* copy of the current pushbuffer segment */
	u32 segment_words, segment_at;
	/* decoder */
	u32 method, subchannel, left;
	bool increment, increment_once;
	/* state of the host */
	u32 mem_op[4];
	u32 semaphore[4];
	/* state of the copy engine */
	u32 ce[SG_CE_METHODS];
	struct sg_transfer *pending;
	struct sg_transfer **sorted; /* room for one pointer to each */
	u32 pending_count;
};

/* A process's channel, as UVM knows it: only what identifies it in faults of its kernels. */
struct sg_user_channel {
	struct list_head node;
	struct softgpu *gpu;
	struct sg_space *space; /* NULL: stopped */
	u64 instance;
};

/* An access that waits for UVM to service its fault. */
struct sg_waiting_fault {
	struct sg_user_channel *channel;
	u64 va;
	bool write;
};

enum { SG_USERD_GET, SG_USERD_PUT, SG_USERD_DOORBELL, SG_USERD_TOKEN, SG_USERD_DUMMY };

int sg_engine_start(struct softgpu *gpu);
void sg_engine_stop(struct softgpu *gpu);
void sg_channel_die(struct sg_channel *channel, u32 kind, const char *what, u64 value);
/* false: the channel waits (semaphore, hold); the same word is executed again later */
bool sg_holds(struct softgpu *gpu, u32 where);
bool sg_host_method(struct sg_channel *channel, u32 method, u32 value);
void sg_ce_method(struct sg_channel *channel, u32 method, u32 value);
void sg_ce_flush(struct sg_channel *channel);
bool sg_semaphore_write(struct sg_channel *channel, u64 va, u64 value, bool two_words, bool timestamp);
bool sg_semaphore_read(struct sg_channel *channel, u64 va, u64 *value);

/* ---- GPUs -------------------------------------------------------------------------------------------- */

#define SG_FAULT_LOG 256
#define SG_WAITING_FAULTS 16

/* Differences between architectures that are visible to UVM. */
struct sg_arch {
	const char *name;    /* as in the parameter arch= */
	const char *product;
	u32 id;              /* SOFTGPU_ARCH_* */
	u32 channel_class, copy_class, compute_class;
	u32 tpcs_per_gpc;
	u32 nvlink;          /* UVM_LINK_TYPE_* */
	bool scrub;          /* the copy engine has MEMORY_SCRUB_ENABLE */
	const struct sg_mmu_format *format;
};

const struct sg_arch *sg_arch_find(const char *name);

struct softgpu {
	u32 index;
	struct pci_dev *pci;
	u8 uuid[SOFTGPU_UUID_BYTES];
	const struct sg_arch *arch;
	const struct sg_mmu_format *format; /* of arch */
	bool lost;
	bool died;        /* a channel was killed on purpose: UVM can no longer submit work, so it cannot unmap either */

	u64 vidmem;
	u64 frames;
	struct sg_frame *frame;
	u64 backing_bytes;

	unsigned long *pma_used;   /* a bit for each frame: allocated, or being evicted for an allocation */
	unsigned long *pma_pinned; /* allocated frames that UVM cannot be asked to evict */
	u8 *pma_chunk_used;        /* used frames in each 2 MB */
	u64 pma_free, pma_free_2m;
	UvmPmaStatistics pma_stats;
	uvmPmaEvictPagesCallback evict_pages;
	uvmPmaEvictRangeCallback evict_range;
	void *evict_data;

	struct sg_tlb tlb;
	struct sg_membars membars;
	struct list_head channels;
	u32 next_channel;
	u64 live_tables;           /* in user spaces */
	u64 live_ptes;

	struct task_struct *thread;
	wait_queue_head_t wait;    /* wakes on: held, released */
	u32 hold;                  /* SOFTGPU_HOLD_* */
	bool held;
	bool hold_pass;            /* the engine does not stop again at the current place */
	const void *hold_owner;
	u8 *bounce;                /* one page, for copies */

	struct list_head user_channels; /* struct sg_user_channel */
	struct sg_waiting_fault waiting[SG_WAITING_FAULTS];
	volatile u32 *registers;   /* memory that UVM takes for registers */
	void *fault_buffer, *shadow_buffer, *access_buffer;

	struct softgpu_counters count;
	struct softgpu_fault fault[SG_FAULT_LOG];
	u64 fault_head, fault_tail;
	u64 fault_dropped;
};

#define SG_REGISTER_TIME 64 /* two words: nanoseconds */
void sg_registers_settle(struct softgpu *gpu);

/* Faults that are delivered to UVM (rmfault.c). deliver: -ENODEV without a channel, -EBUSY if too many wait. */
int sg_fault_deliver(struct sg_space *space, u64 va, bool write);
void sg_faults_replay(struct softgpu *gpu);
void sg_faults_cancel(struct softgpu *gpu, u64 va);
void sg_faults_forget(struct softgpu *gpu, const struct sg_user_channel *channel);
/* Calls UVM's interrupt handler while the fault buffer is not empty. Called without the lock. */
void sg_faults_interrupt(struct softgpu *gpu);

struct sg_settings {
	uint delay_us;
	uint reorder;
	uint tlb_negative;
	uint tlb_pde;
	uint seed;
	uint check_ordering;
};

/* All state that does not belong to one GPU. */
struct sg_model {
	struct mutex lock;
	struct softgpu *gpu[SOFTGPU_MAX_GPUS];
	u32 gpus;
	struct list_head spaces;    /* struct sg_space */
	struct list_head memories;  /* struct sg_memory */
	struct list_head clients;   /* struct sg_client */
	u32 next_handle;
	u64 random;
	struct UvmEventsLinux *events;
};

extern struct sg_model model;
extern struct sg_settings settings;

u32 sg_random(u32 below);
struct softgpu *sg_gpu_by_uuid(const void *uuid);
struct softgpu *sg_gpu_by_index(u32 index);
u32 sg_peers_of(const struct softgpu *gpu);

/* ---- faults and rule violations (report.c) ------------------------------------------------------------- */

void sg_fault(struct softgpu *gpu, u32 kind, u64 address, u64 pte, u32 pid, u32 channel);
/* SOFTGPU_ERROR_*: recorded, counted, and logged */
__printf(5, 6) void sg_error(struct softgpu *gpu, u32 kind, u64 address, u64 pte, const char *format, ...);

/* ---- calls and injected failures (calls.c, calls.h) -------------------------------------------------- */

#include "calls.h"

/* Returns the status that the call must fail with, or NV_OK. May sleep. gpu may be NULL. */
NV_STATUS sg_call(enum sg_call_id id, const struct softgpu *gpu);
bool sg_push_fails(void);

#define SG_CALL(name, gpu)                                             \
	do {                                                           \
		NV_STATUS sg_status_ = sg_call(SG_CALL_##name, gpu);   \
		if (sg_status_ != NV_OK)                               \
			return sg_status_;                             \
	} while (0)

int sg_inject(const struct softgpu_inject *rule, const void *owner);
void sg_inject_forget(const void *owner);
void sg_injected(struct softgpu_injected *out);
int sg_call_info(struct softgpu_call *call);

/* ---- devices (chardev.c, access.c, rmdev.c) ----------------------------------------------------------- */

int sg_chardev_init(void);
void sg_chardev_exit(void);
long sg_access(struct softgpu_access *access);
int sg_rmdev_init(void);
void sg_rmdev_exit(void);

#endif
