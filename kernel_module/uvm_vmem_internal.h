// SPDX-License-Identifier: MIT OR GPL-2.0
//
// The types of vmem and the functions that its files share. uvm_vmem.c explains the design.

#ifndef __UVM_VMEM_INTERNAL_H__
#define __UVM_VMEM_INTERNAL_H__

#include <linux/list.h>
#include <linux/wait.h>
#include <linux/xarray.h>

#include "uvm_gpu.h"
#include "uvm_lock.h"
#include "uvm_mem.h"
#include "uvm_mmu.h"
#include "uvm_pmm_gpu.h"
#include "uvm_pte_batch.h"
#include "uvm_push.h"
#include "uvm_tracker.h"
#include "uvm_va_space.h"
#include "uvm_vmem.h"
#include "uvm_vmem_compat.h"
#include "uvm_vmem_ioctl.h"

#define UVM_VMEM_UNIT       (1ull << UVM_VMEM_UNIT_SHIFT)
#define UVM_VMEM_SLOT       (1ull << UVM_VMEM_SLOT_SHIFT)
#define UVM_VMEM_SLOT_UNITS ((NvU32)(UVM_VMEM_SLOT / UVM_VMEM_UNIT))

// A running batch takes 80 bytes per operation and 290 bytes per slot: at these limits 5 MB and, if the operations are
// on adjacent addresses, 19 MB.
#define UVM_VMEM_MAX_BIND_OPS   (1u << 16)
#define UVM_VMEM_MAX_BIND_UNITS (1u << 21)

// An object takes 8 bytes per page.
#define UVM_VMEM_MAX_CREATE_PAGES (1u << 16)

#define UVM_VMEM_MAX_GPUS 8

// Well below the 1024 entries of a UVM channel: once those are in use, the next push waits for the GPU.
#define UVM_VMEM_MAX_TICKETS 256

// A reservation's slots are in leaves of one page, each covering 1 GB. At this limit the pointers to the
// leaves take 128 KB.
#define UVM_VMEM_LEAF_SLOTS        512
#define UVM_VMEM_MAX_RESERVE_BYTES (1ull << 44)

// Each slot costs a push and a TLB invalidate: at this limit 8,192 of them in one call.
#define UVM_VMEM_MAX_EAGER_BYTES (1ull << 34)

// Maximum number of units processed before state->lock is briefly released.
#define UVM_VMEM_STEP_UNITS 4096

// Log2 of the address range that one directory of 2 MB entries covers (512 MB).
#define UVM_VMEM_DIRECTORY_SHIFT 29

// The low bits of a handle are an index into the table of objects; the high bits count how often the index had
// wrapped. Handles repeat after 2^32 objects.
#define UVM_VMEM_INDEX_BITS 20
#define UVM_VMEM_INDEX_MAX  ((1u << UVM_VMEM_INDEX_BITS) - 1)

// The index of a descriptor's first object: indices wrap after 32 objects, so that every program exercises wrapping.
#define UVM_VMEM_INDEX_FIRST (UVM_VMEM_INDEX_MAX - 31)

typedef struct uvm_vmem_account_struct uvm_vmem_account_t;
typedef struct uvm_vmem_chunk_struct uvm_vmem_chunk_t;
typedef struct uvm_vmem_object_struct uvm_vmem_object_t;
typedef struct uvm_vmem_slot_struct uvm_vmem_slot_t;
typedef struct uvm_vmem_store_struct uvm_vmem_store_t;

// Orders of an aligned block of units inside a chunk: 0 is one unit, 5 the whole chunk.
#define UVM_VMEM_ORDERS 6

// 2 MB of physical memory from which pages are cut.
struct uvm_vmem_chunk_struct
{
    uvm_vmem_store_t *store;

    // Exactly one is set: a kernel-type chunk of the PMM, or pinned host memory.
    uvm_gpu_chunk_t *gpu_chunk;
    uvm_mem_t *host_mem;

    // In store->chunks[order of the largest free aligned block], if there is a free unit.
    struct list_head node;

    // In store->all.
    struct list_head all_node;

    // Bitmaps, one bit per unit: the unit is free; the unit must be zeroed before use.
    NvU32 free;
    NvU32 dirty;
};

// The source of chunks: one GPU, or host memory. One per file descriptor and source, created on first use.
struct uvm_vmem_store_struct
{
    uvm_vmem_state_t *state;

    // NULL: host memory.
    uvm_gpu_t *gpu;

    struct list_head chunks[UVM_VMEM_ORDERS];
    struct list_head all;

    // Chunks, including those being allocated.
    NvU64 num_chunks;
    NvU64 num_growing;

    // The table of 32 sparse PTEs that the entries of all wholly sparse slots on this GPU point to; created on first
    // use, in its own memory.
    uvm_gpu_chunk_t *sparse_chunk;
    uvm_mmu_page_table_alloc_t sparse_table;

    // Units in objects, and units mapped, counted once for each address.
    NvU64 created_units;
    NvU64 mapped_units;
};

// The pages allocated by one CREATE.
struct uvm_vmem_object_struct
{
    uvm_vmem_store_t *store;

    // References: the handle, each mapped unit, and each BIND that uses the object.
    NvU64 mapped_units;
    NvU32 pins;
    bool released;

    // The store's GPU was unregistered, which freed the pages.
    bool dead;

    // Created with CONTIGUOUS: each 2 MB of the object is contiguous in one chunk.
    bool contiguous;

    NvU32 index;
    NvU32 handle;
    NvU32 page_shift;
    NvU32 count;

    // Once unreferenced: link in a list of objects whose pages are being returned, last first (uvm_vmem_object_reap).
    struct list_head node;

    // For each page, the address of its chunk, with the index of the page's first unit in the low 5 bits.
    unsigned long pages[];
};

// A unit of virtual addresses. Zero: nothing is mapped.
//   bit 0 mapped, bit 1 read-only, bit 2 sparse (not mapped), bits 8-27 index of the object, bits 32-63 unit in it
typedef NvU64 uvm_vmem_entry_t;

#define UVM_VMEM_ENTRY_MAPPED      (1ull << 0)
#define UVM_VMEM_ENTRY_READ_ONLY   (1ull << 1)
#define UVM_VMEM_ENTRY_SPARSE      (1ull << 2)
#define UVM_VMEM_ENTRY_INDEX_SHIFT 8
#define UVM_VMEM_ENTRY_UNIT_SHIFT  32

// The kind of a slot's entry in the parent table, on each GPU. In a reservation without BIG it is SMALL or SPARSE.
typedef enum
{
    UVM_VMEM_SLOT_EMPTY, // invalid
    UVM_VMEM_SLOT_SMALL, // points to a table of 32 PTEs
    UVM_VMEM_SLOT_BIG,   // is a 2 MB PTE
    UVM_VMEM_SLOT_SPARSE // points to the GPU's table of sparse PTEs
} uvm_vmem_slot_state_t;

// In a leaf: a slot in state SPARSE with nothing else to record. Once something is mapped there, it becomes a
// uvm_vmem_slot_t permanently.
#define UVM_VMEM_SLOT_ALL_SPARSE ((uvm_vmem_slot_t *)1)

// 2 MB of virtual addresses that have been bound at least once.
struct uvm_vmem_slot_struct
{
    uvm_vmem_entry_t *entries; // UVM_VMEM_SLOT_UNITS
    NvU32 mapped;              // one bit per unit
    uvm_vmem_slot_state_t state;

    // The reservation is BIG, or the slot was all sparse: vmem itself writes the entry in the parent table, and tables
    // has a range for it.
    bool has_entry;

    // Holds the table of PTEs of each GPU of the reservation (entry_count is 0 if it is not allocated), followed, if
    // has_entry, by the slot's own entry in the parent table of each GPU.
    uvm_page_table_range_t tables[];
};

// A reservation's state on one GPU.
typedef struct
{
    uvm_gpu_t *gpu;

    // NULL once the GPU is unregistered.
    uvm_page_tree_t *tree;

    // The last push for this reservation: the next one is ordered after it.
    uvm_tracker_t tracker;
} uvm_vmem_range_gpu_t;

// The last valid batch of a reservation; number 0: none yet. For diagnosis only.
typedef struct
{
    NvU64 number;
    NvU64 first_unit;
    NvU64 last_unit;
    NvU64 time;
    NvU32 num_ops;
    pid_t thread;
} uvm_vmem_last_batch_t;

struct uvm_vmem_range_struct
{
    // Immutable.
    uvm_vmem_state_t *state;
    NvU64 start;
    NvU64 length;
    NvU64 num_slots;
    NvU32 page_shift;
    bool big;
    NvU32 gpu_count;

    // Unique among the reservations of a descriptor.
    NvU64 number;

    // In state->ranges. Protected by the VA space lock.
    struct list_head node;

    // A call has claimed the reservation (uvm_vmem_range_claim): that call owns all fields below, without a lock. While
    // it is unclaimed, UVM's hooks own them under the VA space lock for write. Protected by state->lock.
    bool claimed;

    // Being freed: lookups no longer find it. Written by the call that has claimed it.
    bool dying;

    // Arrays of UVM_VMEM_LEAF_SLOTS slots; NULL at either level means never bound.
    uvm_vmem_slot_t ***leaves;

    // For each aligned 512 MB of addresses that the range overlaps, in order: the entries of its slots there, on each
    // GPU. Allocated when one of them first becomes all sparse, so that the directory is kept; NULL before.
    uvm_page_table_range_t **directories;
    NvU64 num_directories;

    NvU64 mapped_units;

    // A push failed after part of a batch was sent: the contents of the GPUs' page tables are unknown.
    bool broken;

    // A GPU has mapped memory other than its own.
    bool remote;

    uvm_vmem_last_batch_t last_batch;

    uvm_vmem_range_gpu_t gpus[UVM_VMEM_MAX_GPUS];
};

// A BIND that may still be unfinished.
typedef struct
{
    NvU64 number;
    uvm_tracker_t tracker;
    struct list_head node;
} uvm_vmem_ticket_t;

// Indices of stores: host memory first, then each GPU.
#define UVM_VMEM_STORE_HOST 0
#define UVM_VMEM_STORES     (1 + UVM_ID_MAX_GPUS)

struct uvm_vmem_state_struct
{
    // Immutable. process and command, which is escaped, are for diagnosis only.
    uvm_va_space_t *va_space;
    pid_t process;
    char command[4 * TASK_COMM_LEN];

    // Links in the list of all states (uvm_vmem_stat.c).
    struct list_head node;

    // Protected by the VA space lock: for read to walk the list, for write to change it.
    struct list_head ranges;

    // The accounts of the user, the cgroup and the machine; NULL: not counted. Immutable.
    uvm_vmem_account_t *accounts[3];

    // Order UVM_LOCK_ORDER_VMEM. Protects the fields below, and the contents of objects, stores and chunks.
    uvm_mutex_t lock;

    // Calls in flight without the VA space lock. Hooks that remove GPUs wait for zero.
    NvU32 calls;

    // The number of claims released so far. Wakes waiters for a reservation or for calls.
    NvU64 unclaims;
    wait_queue_head_t wait;

    NvU64 last_range;

    struct xarray objects;
    NvU32 next_index;
    NvU32 generation;
    NvU32 last_handle;
    NvU32 num_objects;

    uvm_vmem_store_t *stores[UVM_VMEM_STORES];

    // Pushes that remove translations. Unmapped memory is reused only after them.
    uvm_tracker_t pending;

    struct list_head tickets; // in order of their numbers
    NvU64 last_ticket;
    NvU32 num_tickets;

    // Statistics. The atomic counters change without the lock.
    atomic64_t kernel_bytes;
    atomic64_t charged[2];
    atomic64_t reserved_bytes;
    atomic64_t reservations;
    atomic64_t slots;
    atomic64_t binds;
    atomic64_t pushes;
    atomic64_t invalidates;
    atomic64_t pte_writes;
    atomic64_t table_waits;
    atomic64_t zeroed_bytes;

    // Largest number of units covered by one hold of the lock. Protected by the lock.
    NvU32 most_units;
};

// uvm_vmem_call.c

// Convert a status of UVM or the resource manager to -errno. out_of_memory is the errno for NV_ERR_NO_MEMORY, which can
// mean kernel memory (ENOMEM) as well as GPU memory (ENOSPC).
int uvm_vmem_errno(NV_STATUS status, int out_of_memory);

// Begin work without the VA space lock: until uvm_vmem_call_end no GPU or GPU VA space is unregistered and no peer
// access ends. The VA space lock must not be taken in between.
//
// LOCKING: Caller holds the VA space lock, for read or write. Takes state->lock.
void uvm_vmem_call_begin(uvm_vmem_state_t *state);

// Begin a nested call; it needs its own uvm_vmem_call_end. Both take state->lock.
void uvm_vmem_call_hold(uvm_vmem_state_t *state);
void uvm_vmem_call_end(uvm_vmem_state_t *state);

// Wait until no call is in flight.
//
// LOCKING: Caller holds the VA space lock for write, so that no new call begins. Takes state->lock.
void uvm_vmem_call_drain(uvm_vmem_state_t *state);

// Wait until condition holds, which a call makes true under state->lock. The lock is taken once afterwards: all that
// the call wrote is then visible, on every architecture, and the call no longer uses the state.
//
// LOCKING: Takes state->lock.
#define uvm_vmem_wait_event(state, condition)                                                                            \
    do {                                                                                                                 \
        wait_event((state)->wait, condition);                                                                            \
        uvm_mutex_lock(&(state)->lock);                                                                                  \
        uvm_mutex_unlock(&(state)->lock);                                                                                \
    } while (0)

// Count processed units, and drop state->lock briefly when the limit is reached. units starts at 0.
//
// LOCKING: Caller holds state->lock; dropped and retaken when the limit is reached.
void uvm_vmem_step(uvm_vmem_state_t *state, NvU32 *units, NvU32 more);

// Wait for a GPU by polling, with growing pauses. Returns -EINTR if the process is being killed, -EIO if the GPU
// failed.
int uvm_vmem_wait_killable(uvm_tracker_t *tracker);

// Sleep before the next poll, for a fraction of waited_ns, at most left_ns.
void uvm_vmem_pause(NvU64 waited_ns, NvU64 left_ns);

// The registered GPU with this UUID if it has a GPU VA space, else NULL.
//
// LOCKING: Caller holds the VA space lock, for read or write.
uvm_gpu_t *uvm_vmem_gpu_of_uuid(uvm_va_space_t *va_space, const __u8 *uuid);

// Find the GPU with this UUID. Returns -ENODEV if it is not registered or has no GPU VA space, -EOPNOTSUPP if it is
// not supported.
//
// LOCKING: Caller holds the VA space lock, for read or write.
int uvm_vmem_find_gpu(uvm_vmem_state_t *state, const __u8 *uuid, uvm_gpu_t **gpu_out);

// Return the reason why the GPU is refused (UVM_VMEM_GPU_*), or 0.
//
// LOCKING: Caller holds the VA space lock, for read or write.
NvU32 uvm_vmem_gpu_refusal(uvm_va_space_t *va_space, uvm_gpu_t *gpu);

bool uvm_vmem_page_shift_is_valid(NvU32 page_shift);

// uvm_vmem_account.c

typedef enum
{
    UVM_VMEM_ACCOUNT_TABLES,
    UVM_VMEM_ACCOUNT_HOST,
    UVM_VMEM_ACCOUNT_KINDS
} uvm_vmem_account_kind_t;

// Find or create the accounts of the calling process. Returns 0 or -ENOMEM.
int uvm_vmem_accounts_get(uvm_vmem_state_t *state);
void uvm_vmem_accounts_put(uvm_vmem_state_t *state);

// Charge bytes against the limits. On -EDQUOT nothing is charged.
int uvm_vmem_charge(uvm_vmem_state_t *state, uvm_vmem_account_kind_t kind, NvU64 bytes);
void uvm_vmem_uncharge(uvm_vmem_state_t *state, uvm_vmem_account_kind_t kind, NvU64 bytes);

// The kernel memory that UVM needs for a page table or directory with this many entries, and for an external range.
NvU64 uvm_vmem_table_cost(NvU32 entries, NvU32 table_bytes);
NvU64 uvm_vmem_external_cost(void);

// Kernel memory that is charged to the process's memory cgroup and counted in state->kernel_bytes (state may be NULL).
// alloc returns zeros, or NULL.
void *uvm_vmem_alloc(uvm_vmem_state_t *state, size_t size);
void uvm_vmem_free(uvm_vmem_state_t *state, void *p);
size_t uvm_vmem_size(void *p);

// uvm_vmem_memory.c: stores and chunks

// The store of a GPU, or of host memory (gpu NULL), created if needed; NULL if out of memory.
//
// LOCKING: Caller holds state->lock.
uvm_vmem_store_t *uvm_vmem_store_get(uvm_vmem_state_t *state, uvm_gpu_t *gpu);

// Take count pages of 1 << page_shift bytes and store their locations in pages. On failure (-ENOSPC, -EDQUOT, -ENOMEM,
// -EIO) nothing was taken. gpu is the one that must reach host memory.
//
// LOCKING: Caller is between call_begin and call_end. Takes state->lock.
int uvm_vmem_store_take(uvm_vmem_state_t *state,
                        uvm_vmem_store_t *store,
                        uvm_gpu_t *gpu,
                        NvU32 page_shift,
                        NvU32 count,
                        bool contiguous,
                        unsigned long *pages);

// Return pages. state->pending covers those that were unmapped. Chunks that become unused are put into unused, for
// uvm_vmem_store_free_unused.
//
// LOCKING: Caller holds state->lock; dropped and retaken every UVM_VMEM_STEP_UNITS units.
void uvm_vmem_store_give(uvm_vmem_state_t *state, NvU32 page_shift, NvU32 count, const unsigned long *pages,
                         struct list_head *unused);

// Wait for the pushes that unmap unused chunks, and free them.
//
// LOCKING: Takes state->lock.
void uvm_vmem_store_free_unused(uvm_vmem_state_t *state, struct list_head *unused);

// Zero the newly taken pages that are not zero yet, and wait.
//
// LOCKING: Caller is between call_begin and call_end. Takes state->lock.
int uvm_vmem_store_zero(uvm_vmem_state_t *state, uvm_gpu_t *gpu, NvU32 page_shift, NvU32 count, const unsigned long *pages);

// Make sure that the store of a GPU has its table of sparse PTEs (-ENOSPC, -ENOMEM, -EIO).
//
// LOCKING: Caller is between call_begin and call_end. Takes state->lock.
int uvm_vmem_store_get_sparse_table(uvm_vmem_state_t *state, uvm_gpu_t *gpu, uvm_page_tree_t *tree);

// A GPU is unregistered: remove its access to host memory, and free its store with all chunks. No object may be left in
// it.
//
// LOCKING: Caller holds the VA space lock for write, and no call is in flight. Takes state->lock.
void uvm_vmem_store_remove_gpu(uvm_vmem_state_t *state, uvm_gpu_t *gpu);

// On close: free the remaining store, which is host memory.
void uvm_vmem_store_destroy_all(uvm_vmem_state_t *state);

static uvm_vmem_chunk_t *uvm_vmem_page_chunk(unsigned long page)
{
    return (uvm_vmem_chunk_t *)(page & ~(unsigned long)(UVM_VMEM_SLOT_UNITS - 1));
}

static NvU32 uvm_vmem_page_unit(unsigned long page)
{
    return page & (UVM_VMEM_SLOT_UNITS - 1);
}

// Let gpu access a host chunk (-ENOMEM, -EIO). LOCKING: Caller holds state->lock.
int uvm_vmem_chunk_map_host(uvm_vmem_chunk_t *chunk, uvm_gpu_t *gpu);

// The address of a unit of a chunk as gpu sees it.
uvm_gpu_phys_address_t uvm_vmem_chunk_address(uvm_vmem_chunk_t *chunk, NvU32 unit, uvm_gpu_t *gpu);

// uvm_vmem_object.c

int uvm_vmem_create(uvm_vmem_state_t *state, struct uvm_vmem_create *params);
int uvm_vmem_release(uvm_vmem_state_t *state, const struct uvm_vmem_release *params);

// The object of a handle: -ENOENT, -ESTALE, -ENODEV. LOCKING: Caller holds state->lock.
int uvm_vmem_object_find(uvm_vmem_state_t *state, NvU32 handle, uvm_vmem_object_t **object_out);

// The object of a mapped entry. LOCKING: Caller holds state->lock.
uvm_vmem_object_t *uvm_vmem_object_of_entry(uvm_vmem_state_t *state, uvm_vmem_entry_t entry);

// If nothing refers to the object, move it from the table to dead, for uvm_vmem_object_reap.
//
// LOCKING: Caller holds state->lock.
void uvm_vmem_object_put(uvm_vmem_state_t *state, uvm_vmem_object_t *object, struct list_head *dead);

// Return the pages of dead objects and free the objects.
//
// LOCKING: Takes state->lock. Caller is between call_begin and call_end, or holds the VA space lock for write.
void uvm_vmem_object_reap(uvm_vmem_state_t *state, struct list_head *dead);

// The chunk that holds an object's unit; *unit_out is the unit's number in the chunk.
uvm_vmem_chunk_t *uvm_vmem_object_unit(uvm_vmem_object_t *object, NvU64 unit, NvU32 *unit_out);

// Drop all objects in the store of a GPU that is being unregistered; none is mapped.
//
// LOCKING: Caller holds the VA space lock for write, and no call is in flight. Takes state->lock.
void uvm_vmem_object_remove_gpu(uvm_vmem_state_t *state, uvm_gpu_t *gpu);
void uvm_vmem_object_destroy_all(uvm_vmem_state_t *state);

// uvm_vmem_range.c

// Errors of RESERVE and FREE are in the ABI header. uuids: gpu_count UUIDs in kernel memory.
int uvm_vmem_reserve(uvm_vmem_state_t *state, const struct uvm_vmem_reserve *params, const __u8 *uuids);
int uvm_vmem_free_range(uvm_vmem_state_t *state, const struct uvm_vmem_free *params);

// Dismantle all reservations. No call is in flight or can begin.
void uvm_vmem_range_stop_all(uvm_vmem_state_t *state);

// The reservation that starts at start (-ENOENT). LOCKING: Caller holds the VA space lock, for
// read or write.
int uvm_vmem_range_find(uvm_vmem_state_t *state, NvU64 start, uvm_vmem_range_t **range_out);

// Claim the reservation that starts at start for this call; waits while another call has claimed it. Also begins a call
// (uvm_vmem_call_begin), which unclaim ends. -ENOENT; -EINTR: the process is being killed.
//
// LOCKING: Caller holds no lock. Takes the VA space lock for read and state->lock; releases both.
int uvm_vmem_range_claim(uvm_vmem_state_t *state, NvU64 start, uvm_vmem_range_t **range_out);

// Claim a range that was already looked up, without waiting; false: another call has claimed it.
//
// LOCKING: Caller holds state->lock.
bool uvm_vmem_range_try_claim(uvm_vmem_range_t *range);
void uvm_vmem_range_unclaim(uvm_vmem_range_t *range);

// Count an entry as mapped, or as unmapped, in its object and store. Entries that map nothing are ignored.
// dead: see uvm_vmem_object_put.
//
// LOCKING: Caller holds state->lock, and has claimed the range or holds the VA space lock for write.
void uvm_vmem_range_ref(uvm_vmem_range_t *range, uvm_vmem_entry_t entry);
void uvm_vmem_range_unref(uvm_vmem_range_t *range, uvm_vmem_entry_t entry, struct list_head *dead);

// uvm_vmem_table.c: page tables and writes to them

// The slot with this number; NULL if it was never bound or is all sparse.
uvm_vmem_slot_t *uvm_vmem_slot(uvm_vmem_range_t *range, NvU64 index);
bool uvm_vmem_slot_is_all_sparse(uvm_vmem_range_t *range, NvU64 index);

// The first bound slot numbered *index or above; *index becomes its number. NULL: none.
//
// LOCKING: Caller has claimed the range or holds the VA space lock for write, and does not hold state->lock.
uvm_vmem_slot_t *uvm_vmem_slot_next(uvm_vmem_range_t *range, NvU64 *index);

#define for_each_vmem_slot(slot, index, range)                                                                           \
    for ((index) = 0; ((slot) = uvm_vmem_slot_next((range), &(index))) != NULL; (index)++)

// Make sure that a slot exists. *made is set if this call created it (to be undone on failure). A fully sparse slot
// gets its own table; the GPU sees no difference.
//
// LOCKING: Caller has claimed the range or holds the VA space lock for write.
int uvm_vmem_slot_get(uvm_vmem_range_t *range, NvU64 index, bool *made);

// Make sure that a slot with has_entry has a table of PTEs on each GPU. The table is unused until the slot's state is
// SMALL; it is freed with the slot.
int uvm_vmem_slot_get_small(uvm_vmem_range_t *range, NvU64 index);

// Free the directories kept by fully sparse slots.
void uvm_vmem_directories_put(uvm_vmem_range_t *range);

// Free a leaf without slots; number counts leaves from 0.
void uvm_vmem_leaf_put(uvm_vmem_range_t *range, NvU64 number);

// Make sure that a slot that was never bound can become all sparse. *new_tables is set if page tables were allocated.
int uvm_vmem_slot_get_sparse(uvm_vmem_range_t *range, NvU64 index, bool *new_tables);

// Record the slot as fully sparse. The GPU's entry was already sent.
void uvm_vmem_slot_set_sparse(uvm_vmem_range_t *range, NvU64 index);

// Free a slot and its tables. The GPU no longer sees what the tables hold once uvm_vmem_range_wait_tables has returned.
void uvm_vmem_slot_put(uvm_vmem_range_t *range, NvU64 index);

// Free all page tables on one GPU, and wait for the TLB invalidates. Its tracker is completed.
//
// LOCKING: Caller has claimed the range or holds the VA space lock for write.
void uvm_vmem_table_remove_gpu(uvm_vmem_range_t *range, NvU32 gpu_index);

// Wait for the page tables that slot_get and slot_get_small allocated, on all GPUs.
int uvm_vmem_range_wait_tables(uvm_vmem_range_t *range);

// Writes one batch to the page tables of one GPU. Call order: begin; slot for each slot that changes; if second_phase
// is set then begin_phase2, and slot_phase2 for the same slots; end. After any of them fails (-EIO), call no other;
// sent is set if anything was sent to the GPU.
typedef struct
{
    uvm_vmem_range_t *range;
    NvU32 gpu_index;
    uvm_push_t push;
    uvm_pte_batch_t pte_batch;
    bool open;
    bool sent;

    // Bounding range of the units that change, and the page sizes (ORed) and membar to invalidate them with.
    NvU64 first_unit;
    NvU64 last_unit;
    NvU32 page_sizes;
    uvm_membar_t membar;

    // second_phase: some slot changes from a 2 MB PTE to a table or back. clears: a valid entry has to be invalid in
    // between.
    bool second_phase;
    bool clears;
} uvm_vmem_writer_t;

void uvm_vmem_writer_begin(uvm_vmem_writer_t *writer, uvm_vmem_range_t *range, NvU32 gpu_index);

// Bring the slot from slot->entries to entries, which differ in the units of touched only, and from slot->state to
// target. Between BIG and SMALL the whole slot is invalid for a moment; any other change shows a reader of a unit the
// old entry or the new one.
int uvm_vmem_writer_slot(uvm_vmem_writer_t *writer,
                         NvU64 index,
                         const uvm_vmem_entry_t *entries,
                         NvU32 touched,
                         uvm_vmem_slot_state_t target);
int uvm_vmem_writer_begin_phase2(uvm_vmem_writer_t *writer);
int uvm_vmem_writer_slot_phase2(uvm_vmem_writer_t *writer,
                                NvU64 index,
                                const uvm_vmem_entry_t *entries,
                                uvm_vmem_slot_state_t target);
int uvm_vmem_writer_end(uvm_vmem_writer_t *writer);

// The slot's state for this content. whole: one operation maps all of it. large, cut: an operation says LARGE, CUT.
uvm_vmem_slot_state_t uvm_vmem_slot_target(uvm_vmem_range_t *range,
                                           NvU64 index,
                                           const uvm_vmem_entry_t *entries,
                                           bool whole,
                                           bool large,
                                           bool cut);

// uvm_vmem_bind.c

int uvm_vmem_bind(uvm_vmem_state_t *state, struct uvm_vmem_bind *params, struct uvm_vmem_op *ops);

// uvm_vmem_ticket.c

// Allocate a ticket (-EAGAIN: too many are unfinished; -ENOMEM).
int uvm_vmem_ticket_alloc(uvm_vmem_state_t *state, uvm_vmem_ticket_t **ticket_out);

// publish numbers the ticket and makes it visible, or frees it if nothing is pending in its tracker; it returns the
// number or 0. free is for a ticket that was not published.
//
// LOCKING: Caller holds state->lock, for both functions.
NvU64 uvm_vmem_ticket_publish(uvm_vmem_state_t *state, uvm_vmem_ticket_t *ticket);
void uvm_vmem_ticket_free(uvm_vmem_state_t *state, uvm_vmem_ticket_t *ticket);

// Wait for all that is pending on any GPU, and free all published tickets.
//
// LOCKING: Caller holds the VA space lock for write, and no call is in flight. Takes state->lock.
void uvm_vmem_ticket_drain(uvm_vmem_state_t *state);

int uvm_vmem_wait(uvm_vmem_state_t *state, const struct uvm_vmem_wait *params);

// uvm_vmem_stat.c

// Add a state to the list that the procfs file shows, or remove it.
void uvm_vmem_stat_add(uvm_vmem_state_t *state);
void uvm_vmem_stat_remove(uvm_vmem_state_t *state);

int uvm_vmem_stat(uvm_vmem_state_t *state, struct uvm_vmem_stat *params);
void uvm_vmem_stat_procfs_init(struct proc_dir_entry *dir);

// Call visit for each state until it returns non-zero; returns that value. visit may only trylock.
int uvm_vmem_stat_visit(int (*visit)(uvm_vmem_state_t *state, void *data), void *data);

// uvm_vmem_debug.c

// Record the calling process in a state that is not published yet.
void uvm_vmem_debug_process(uvm_vmem_state_t *state);

// Record a batch that is about to be sent. LOCKING: Caller has claimed the range.
void uvm_vmem_debug_batch(uvm_vmem_range_t *range, NvU32 num_ops, NvU64 first_unit, NvU64 last_unit);

// Log that the last batch failed after part of it was sent.
//
// LOCKING: Caller has claimed the range, or holds the VA space lock for read or write.
void uvm_vmem_debug_failed(uvm_vmem_range_t *range, int error);

// The same for the reservation that starts at start, if it still exists.
//
// LOCKING: Takes the VA space lock for read.
void uvm_vmem_debug_failed_at(uvm_vmem_state_t *state, NvU64 start);

void uvm_vmem_debug_procfs_init(struct proc_dir_entry *dir);

#endif // __UVM_VMEM_INTERNAL_H__
