// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Page tables of a reservation: allocated slot by slot, kept until the reservation is freed, written in batches.
//
// A push cannot fail once begun, and while it is open neither the PMM nor the page tree may be called (the PUSH
// lock order comes after theirs). So all tables that a batch needs are allocated first (uvm_vmem_slot_get,
// uvm_vmem_slot_get_small), then uvm_vmem_writer_t sends the changes. It writes each PTE at most once in a push,
// because the writes of a uvm_pte_batch_t are unordered.

#include "uvm_hal.h"
#include "uvm_tlb_batch.h"
#include "uvm_vmem_internal.h"

// The most bytes that one slot adds to a push, and room to end the push: 32 PTEs as one inline copy or four runs of up
// to four memsets of 13 words each, a PDE or 2 MB PTE, and the membars and the TLB invalidate at the end.
#define UVM_VMEM_PUSH_ROOM 4096

// If more runs than this change in one slot, everything from the first to the last is written as one copy.
#define UVM_VMEM_MAX_RUNS 4

// A table of 32 PTEs of 8 bytes; a directory of 512 MB, for whose 256 dual entries UVM keeps two pointers each.
#define TABLE_BYTES       256
#define DIRECTORY_BYTES   4096
#define DIRECTORY_ENTRIES 512

static uvm_page_table_range_t *slot_ptes(uvm_vmem_slot_t *slot, NvU32 gpu_index)
{
    return &slot->tables[gpu_index];
}

static uvm_page_table_range_t *slot_entry_2m(uvm_vmem_range_t *range, uvm_vmem_slot_t *slot, NvU32 gpu_index)
{
    UVM_ASSERT(slot->has_entry);

    return &slot->tables[range->gpu_count + gpu_index];
}

static NvU64 slot_address(uvm_vmem_range_t *range, NvU64 index)
{
    return range->start + index * UVM_VMEM_SLOT;
}

// The slot, NULL, or UVM_VMEM_SLOT_ALL_SPARSE.
static uvm_vmem_slot_t *slot_or_sparse(uvm_vmem_range_t *range, NvU64 index)
{
    uvm_vmem_slot_t **leaf = range->leaves[index / UVM_VMEM_LEAF_SLOTS];

    return leaf ? leaf[index % UVM_VMEM_LEAF_SLOTS] : NULL;
}

uvm_vmem_slot_t *uvm_vmem_slot(uvm_vmem_range_t *range, NvU64 index)
{
    uvm_vmem_slot_t *slot = slot_or_sparse(range, index);

    return slot == UVM_VMEM_SLOT_ALL_SPARSE ? NULL : slot;
}

bool uvm_vmem_slot_is_all_sparse(uvm_vmem_range_t *range, NvU64 index)
{
    return slot_or_sparse(range, index) == UVM_VMEM_SLOT_ALL_SPARSE;
}

uvm_vmem_slot_t *uvm_vmem_slot_next(uvm_vmem_range_t *range, NvU64 *index)
{
    // 16 TB may be all sparse: millions of slots to scan.
    uvm_assert_unlocked_order(UVM_LOCK_ORDER_VMEM);

    while (*index < range->num_slots) {
        uvm_vmem_slot_t **leaf = range->leaves[*index / UVM_VMEM_LEAF_SLOTS];

        if (IS_ALIGNED(*index, UVM_VMEM_LEAF_SLOTS))
            cond_resched();

        if (!leaf)
            *index = UVM_ALIGN_DOWN(*index, UVM_VMEM_LEAF_SLOTS) + UVM_VMEM_LEAF_SLOTS;
        else if (!uvm_vmem_slot(range, *index))
            (*index)++;
        else
            return leaf[*index % UVM_VMEM_LEAF_SLOTS];
    }

    return NULL;
}

// A slot's charge against the limit: our struct, and a table of 32 PTEs on each GPU, whether allocated or not.
static NvU64 slot_cost(uvm_vmem_range_t *range, bool has_entry)
{
    NvU32 num_tables = range->gpu_count * (has_entry ? 2 : 1);

    return sizeof(uvm_vmem_slot_t) + num_tables * sizeof(uvm_page_table_range_t) +
           UVM_VMEM_SLOT_UNITS * sizeof(uvm_vmem_entry_t) + range->gpu_count * uvm_vmem_table_cost(0, TABLE_BYTES);
}

// A leaf's charge against the limit: its array, and two directories of 512 MB on each GPU.
static NvU64 leaf_cost(uvm_vmem_range_t *range)
{
    return UVM_VMEM_LEAF_SLOTS * sizeof(uvm_vmem_slot_t *) +
           range->gpu_count * 2 * uvm_vmem_table_cost(DIRECTORY_ENTRIES, DIRECTORY_BYTES);
}

static int leaf_get(uvm_vmem_range_t *range, NvU64 number)
{
    int ret;

    // A leaf stays until the reservation is freed.
    if (range->leaves[number])
        return 0;

    ret = uvm_vmem_charge(range->state, UVM_VMEM_ACCOUNT_TABLES, leaf_cost(range));
    if (ret)
        return ret;

    range->leaves[number] = uvm_vmem_alloc(range->state, UVM_VMEM_LEAF_SLOTS * sizeof(range->leaves[number][0]));
    if (range->leaves[number])
        return 0;

    uvm_vmem_uncharge(range->state, UVM_VMEM_ACCOUNT_TABLES, leaf_cost(range));
    return -ENOMEM;
}

void uvm_vmem_leaf_put(uvm_vmem_range_t *range, NvU64 number)
{
    NvU32 i;

    if (!range->leaves[number])
        return;

    for (i = 0; i < UVM_VMEM_LEAF_SLOTS; i++) {
        if (range->leaves[number][i] == UVM_VMEM_SLOT_ALL_SPARSE)
            atomic64_dec(&range->state->slots);
    }

    uvm_vmem_free(range->state, range->leaves[number]);
    uvm_vmem_uncharge(range->state, UVM_VMEM_ACCOUNT_TABLES, leaf_cost(range));
    range->leaves[number] = NULL;
}

static void put_table(uvm_page_tree_t *tree, uvm_page_table_range_t *table)
{
    if (table->entry_count == 0)
        return;

    uvm_page_tree_put_ptes_async(tree, table);
    table->entry_count = 0;
}

// Free a slot and its tables.
static void slot_destroy(uvm_vmem_range_t *range, uvm_vmem_slot_t *slot)
{
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        uvm_page_tree_t *tree = range->gpus[i].tree;

        // Tables of a removed GPU were freed with its page tree (uvm_vmem_range_remove_gpu).
        if (!tree)
            continue;

        put_table(tree, slot_ptes(slot, i));
        if (slot->has_entry)
            put_table(tree, slot_entry_2m(range, slot, i));
    }

    uvm_vmem_uncharge(range->state, UVM_VMEM_ACCOUNT_TABLES, slot_cost(range, slot->has_entry));
    uvm_vmem_free(range->state, slot->entries);
    uvm_vmem_free(range->state, slot);
}

void uvm_vmem_slot_put(uvm_vmem_range_t *range, NvU64 index)
{
    slot_destroy(range, uvm_vmem_slot(range, index));
    range->leaves[index / UVM_VMEM_LEAF_SLOTS][index % UVM_VMEM_LEAF_SLOTS] = NULL;
    atomic64_dec(&range->state->slots);
}

// Create a slot, and on each GPU its table or, with has_entry, its entry in the parent table.
static int slot_create(uvm_vmem_range_t *range, NvU64 index, bool has_entry, uvm_vmem_slot_t **slot_out)
{
    NvU32 num_tables = range->gpu_count * (has_entry ? 2 : 1);
    uvm_vmem_slot_t *slot;
    NV_STATUS status;
    NvU32 i;
    int ret;

    ret = uvm_vmem_charge(range->state, UVM_VMEM_ACCOUNT_TABLES, slot_cost(range, has_entry));
    if (ret)
        return ret;

    slot = uvm_vmem_alloc(range->state, sizeof(*slot) + num_tables * sizeof(slot->tables[0]));
    if (slot)
        slot->entries = uvm_vmem_alloc(range->state, UVM_VMEM_SLOT_UNITS * sizeof(slot->entries[0]));

    if (!slot || !slot->entries) {
        uvm_vmem_free(range->state, slot);
        uvm_vmem_uncharge(range->state, UVM_VMEM_ACCOUNT_TABLES, slot_cost(range, has_entry));
        return -ENOMEM;
    }

    slot->has_entry = has_entry;

    for (i = 0; i < range->gpu_count; i++) {
        uvm_page_tree_t *tree = range->gpus[i].tree;

        if (!tree)
            continue;

        status = uvm_page_tree_get_ptes_async(tree,
                                              has_entry ? UVM_PAGE_SIZE_2M : UVM_PAGE_SIZE_64K,
                                              slot_address(range, index),
                                              UVM_VMEM_SLOT,
                                              UVM_PMM_ALLOC_FLAGS_EVICT,
                                              has_entry ? slot_entry_2m(range, slot, i) : slot_ptes(slot, i));
        if (status != NV_OK) {
            slot_destroy(range, slot);
            return uvm_vmem_errno(status, -ENOSPC);
        }
    }

    *slot_out = slot;
    return 0;
}

int uvm_vmem_slot_get(uvm_vmem_range_t *range, NvU64 index, bool *made)
{
    bool all_sparse = uvm_vmem_slot_is_all_sparse(range, index);
    uvm_vmem_slot_t *slot;
    NvU32 i;
    int ret;

    *made = false;
    if (uvm_vmem_slot(range, index))
        return 0;

    ret = leaf_get(range, index / UVM_VMEM_LEAF_SLOTS);
    if (!ret)
        ret = slot_create(range, index, range->big || all_sparse, &slot);
    if (ret)
        return ret;

    if (all_sparse) {
        slot->state = UVM_VMEM_SLOT_SPARSE;
        for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++)
            slot->entries[i] = UVM_VMEM_ENTRY_SPARSE;
    }
    else {
        slot->state = range->big ? UVM_VMEM_SLOT_EMPTY : UVM_VMEM_SLOT_SMALL;
        atomic64_inc(&range->state->slots);
        *made = true;
    }

    range->leaves[index / UVM_VMEM_LEAF_SLOTS][index % UVM_VMEM_LEAF_SLOTS] = slot;
    return 0;
}

static NvU64 directory_number(uvm_vmem_range_t *range, NvU64 index)
{
    return (slot_address(range, index) >> UVM_VMEM_DIRECTORY_SHIFT) - (range->start >> UVM_VMEM_DIRECTORY_SHIFT);
}

// The start of the part of the range that one directory covers.
static NvU64 directory_start(uvm_vmem_range_t *range, NvU64 number)
{
    return max(range->start, ((range->start >> UVM_VMEM_DIRECTORY_SHIFT) + number) << UVM_VMEM_DIRECTORY_SHIFT);
}

static NvU64 directory_end(uvm_vmem_range_t *range, NvU64 number)
{
    return min(range->start + range->length,
               ((range->start >> UVM_VMEM_DIRECTORY_SHIFT) + number + 1) << UVM_VMEM_DIRECTORY_SHIFT);
}

static void directory_put(uvm_vmem_range_t *range, NvU64 number)
{
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        if (range->gpus[i].tree)
            put_table(range->gpus[i].tree, &range->directories[number][i]);
    }

    uvm_vmem_free(range->state, range->directories[number]);
    range->directories[number] = NULL;
}

void uvm_vmem_directories_put(uvm_vmem_range_t *range)
{
    NvU64 i;

    for (i = 0; i < range->num_directories; i++) {
        if (range->directories[i])
            directory_put(range, i);
        cond_resched();
    }
}

static int directory_get(uvm_vmem_range_t *range, NvU64 number)
{
    NvU64 start = directory_start(range, number);
    NvU32 i;

    range->directories[number] = uvm_vmem_alloc(range->state, range->gpu_count * sizeof(range->directories[number][0]));
    if (!range->directories[number])
        return -ENOMEM;

    for (i = 0; i < range->gpu_count; i++) {
        NV_STATUS status;

        if (!range->gpus[i].tree)
            continue;

        status = uvm_page_tree_get_ptes_async(range->gpus[i].tree,
                                              UVM_PAGE_SIZE_2M,
                                              start,
                                              directory_end(range, number) - start,
                                              UVM_PMM_ALLOC_FLAGS_EVICT,
                                              &range->directories[number][i]);
        if (status != NV_OK) {
            directory_put(range, number);
            return uvm_vmem_errno(status, -ENOSPC);
        }
    }

    return 0;
}

int uvm_vmem_slot_get_sparse(uvm_vmem_range_t *range, NvU64 index, bool *new_tables)
{
    NvU64 number = directory_number(range, index);
    int ret;
    NvU32 i;

    ret = leaf_get(range, index / UVM_VMEM_LEAF_SLOTS);
    if (ret || range->directories[number])
        return ret;

    for (i = 0; i < range->gpu_count && !ret; i++) {
        if (range->gpus[i].tree)
            ret = uvm_vmem_store_get_sparse_table(range->state, range->gpus[i].gpu, range->gpus[i].tree);
    }

    if (!ret)
        ret = directory_get(range, number);
    if (!ret)
        *new_tables = true;

    return ret;
}

void uvm_vmem_slot_set_sparse(uvm_vmem_range_t *range, NvU64 index)
{
    UVM_ASSERT(!slot_or_sparse(range, index));

    range->leaves[index / UVM_VMEM_LEAF_SLOTS][index % UVM_VMEM_LEAF_SLOTS] = UVM_VMEM_SLOT_ALL_SPARSE;
    atomic64_inc(&range->state->slots);
}

int uvm_vmem_slot_get_small(uvm_vmem_range_t *range, NvU64 index)
{
    uvm_vmem_slot_t *slot = uvm_vmem_slot(range, index);
    NV_STATUS status;
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        uvm_page_tree_t *tree = range->gpus[i].tree;

        if (!tree || slot_ptes(slot, i)->entry_count != 0)
            continue;

        status = uvm_page_tree_alloc_table(tree,
                                           UVM_PAGE_SIZE_64K,
                                           UVM_PMM_ALLOC_FLAGS_EVICT,
                                           slot_entry_2m(range, slot, i),
                                           slot_ptes(slot, i));
        if (status != NV_OK) {
            slot_ptes(slot, i)->entry_count = 0;
            return uvm_vmem_errno(status, -ENOSPC);
        }
    }

    return 0;
}

// Wait for the page tree's pushes, but not under the tree's lock as uvm_page_tree_wait does: every caller that makes or
// frees a table in this address space needs that lock.
static NV_STATUS tree_wait(uvm_page_tree_t *tree)
{
    uvm_tracker_t tracker = UVM_TRACKER_INIT();
    NV_STATUS status;

    uvm_mutex_lock(&tree->lock);
    status = uvm_tracker_add_tracker_safe(&tracker, &tree->tracker);
    uvm_mutex_unlock(&tree->lock);

    if (status == NV_OK)
        status = uvm_tracker_wait(&tracker);

    uvm_tracker_deinit(&tracker);
    return status;
}

int uvm_vmem_range_wait_tables(uvm_vmem_range_t *range)
{
    int ret = 0;
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        NV_STATUS status;

        if (!range->gpus[i].tree)
            continue;

        atomic64_inc(&range->state->table_waits);
        status = tree_wait(range->gpus[i].tree);
        if (status != NV_OK)
            ret = uvm_vmem_errno(status, -ENOSPC);
    }

    return ret;
}

// Return true if an operation that covers a whole slot with this object may map it by one 2 MB PTE.
static bool object_is_big(uvm_vmem_object_t *object)
{
    return object->page_shift == UVM_VMEM_SLOT_SHIFT ||
           (object->contiguous && object->count << (object->page_shift - UVM_VMEM_UNIT_SHIFT) == UVM_VMEM_SLOT_UNITS);
}

// Return true if these entries map one whole chunk of GPU memory, in order and with one access right. Pages that are
// adjacent by chance qualify only with LARGE: a caller must know where there are 2 MB PTEs, since it may not cut them.
static bool entries_are_big(uvm_vmem_range_t *range, const uvm_vmem_entry_t *entries, bool asked)
{
    uvm_vmem_object_t *object = NULL;
    uvm_vmem_chunk_t *first = NULL;
    uvm_vmem_chunk_t *chunk;
    NvU32 i, unit;

    for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++) {
        if (!(entries[i] & UVM_VMEM_ENTRY_MAPPED) || ((entries[i] ^ entries[0]) & UVM_VMEM_ENTRY_READ_ONLY))
            return false;

        // The entry does not continue the previous one: look up the object.
        if (i == 0 || entries[i] != entries[i - 1] + (1ull << UVM_VMEM_ENTRY_UNIT_SHIFT)) {
            object = uvm_vmem_object_of_entry(range->state, entries[i]);
            if (!asked && (i > 0 || !object_is_big(object)))
                return false;
        }

        chunk = uvm_vmem_object_unit(object, entries[i] >> UVM_VMEM_ENTRY_UNIT_SHIFT, &unit);
        if (i == 0)
            first = chunk;

        // Host memory is contiguous in 64 KB pieces only.
        if (chunk != first || unit != i || chunk->host_mem)
            return false;
    }

    return true;
}

static bool slot_has_sparse(uvm_vmem_slot_t *slot)
{
    NvU32 i;

    for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++) {
        if (slot->entries[i] & UVM_VMEM_ENTRY_SPARSE)
            return true;
    }

    return false;
}

static bool entries_are_all_sparse(const uvm_vmem_entry_t *entries)
{
    NvU32 i;

    for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++) {
        if (entries[i] != UVM_VMEM_ENTRY_SPARSE)
            return false;
    }

    return true;
}

uvm_vmem_slot_state_t uvm_vmem_slot_target(uvm_vmem_range_t *range,
                                           NvU64 index,
                                           const uvm_vmem_entry_t *entries,
                                           bool whole,
                                           bool large,
                                           bool cut)
{
    bool all_sparse = uvm_vmem_slot_is_all_sparse(range, index);
    uvm_vmem_slot_t *slot = uvm_vmem_slot(range, index);
    NvU32 i;

    // Only a slot that is new or already SPARSE may use the GPU's table of sparse PTEs; any other uses its own.
    if ((!slot || slot->state == UVM_VMEM_SLOT_SPARSE) && entries_are_all_sparse(entries))
        return UVM_VMEM_SLOT_SPARSE;

    if (!range->big)
        return UVM_VMEM_SLOT_SMALL;

    if (slot && slot->state == UVM_VMEM_SLOT_BIG && !cut &&
        !memcmp(slot->entries, entries, UVM_VMEM_SLOT_UNITS * sizeof(entries[0])))
        return UVM_VMEM_SLOT_BIG;

    // A concurrent reader of a sparse unit must not fault, so a sparse PTE is replaced only by a PTE of the same size.
    if ((whole || large) && !all_sparse && (!slot || !slot_has_sparse(slot)) && entries_are_big(range, entries, large))
        return UVM_VMEM_SLOT_BIG;

    if (all_sparse || (slot && (slot->state == UVM_VMEM_SLOT_SMALL || slot->state == UVM_VMEM_SLOT_SPARSE)))
        return UVM_VMEM_SLOT_SMALL;

    for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++) {
        if (entries[i])
            return UVM_VMEM_SLOT_SMALL;
    }

    return UVM_VMEM_SLOT_EMPTY;
}

static NvU64 entry_pte(uvm_vmem_writer_t *writer, uvm_vmem_entry_t entry)
{
    uvm_vmem_range_t *range = writer->range;
    uvm_gpu_t *gpu = range->gpus[writer->gpu_index].gpu;
    uvm_page_tree_t *tree = range->gpus[writer->gpu_index].tree;
    uvm_prot_t prot = (entry & UVM_VMEM_ENTRY_READ_ONLY) ? UVM_PROT_READ_ONLY : UVM_PROT_READ_WRITE_ATOMIC;
    NvU64 flags = UVM_MMU_PTE_FLAGS_ACCESS_COUNTERS_DISABLED;
    uvm_gpu_phys_address_t address;
    uvm_vmem_chunk_t *chunk;
    NvU32 unit;

    // A zero big PTE makes the GPU consult the 4 KB table, but there is none below. UVM too writes zero to unmap
    // external ranges.
    if (!(entry & UVM_VMEM_ENTRY_MAPPED))
        return (entry & UVM_VMEM_ENTRY_SPARSE) ? tree->hal->make_sparse_pte() : 0;

    chunk = uvm_vmem_object_unit(uvm_vmem_object_of_entry(range->state, entry), entry >> UVM_VMEM_ENTRY_UNIT_SHIFT, &unit);
    address = uvm_vmem_chunk_address(chunk, unit, gpu);

    // UVM caches local memory, and by default neither peer nor host memory.
    if (address.aperture == UVM_APERTURE_VID)
        flags |= UVM_MMU_PTE_FLAGS_CACHED;

    return tree->hal->make_pte(address.aperture, address.address, prot, flags);
}

void uvm_vmem_writer_begin(uvm_vmem_writer_t *writer, uvm_vmem_range_t *range, NvU32 gpu_index)
{
    memset(writer, 0, sizeof(*writer));
    writer->range = range;
    writer->gpu_index = gpu_index;
    writer->first_unit = ~0ull;
    writer->membar = UVM_MEMBAR_NONE;
    writer->page_sizes = UVM_PAGE_SIZE_64K;
}

// Extend the range to invalidate by the units from first to last.
static void writer_extend(uvm_vmem_writer_t *writer, NvU64 first, NvU64 last)
{
    writer->first_unit = min(writer->first_unit, first);
    writer->last_unit = max(writer->last_unit, last);
}

static int writer_open(uvm_vmem_writer_t *writer)
{
    uvm_vmem_range_gpu_t *range_gpu = &writer->range->gpus[writer->gpu_index];
    NV_STATUS status;

    if (writer->open)
        return 0;

    status = uvm_push_begin_acquire(range_gpu->gpu->channel_manager,
                                    UVM_CHANNEL_TYPE_MEMOPS,
                                    &range_gpu->tracker,
                                    &writer->push,
                                    "vmem page tables at 0x%llx",
                                    writer->range->start);
    if (status != NV_OK)
        return uvm_vmem_errno(status, -EIO);

    uvm_pte_batch_begin(&writer->push, &writer->pte_batch);
    writer->open = true;
    return 0;
}

static void writer_close(uvm_vmem_writer_t *writer)
{
    uvm_vmem_range_gpu_t *range_gpu = &writer->range->gpus[writer->gpu_index];

    uvm_push_end(&writer->push);
    uvm_tracker_overwrite_with_push(&range_gpu->tracker, &writer->push);
    atomic64_inc(&writer->range->state->pushes);
    writer->open = false;
    writer->sent = true;
}

// The size of the inline data that the PTE batch has written past the push's end; uvm_push_has_space ignores it.
static NvU32 writer_inline_size(uvm_vmem_writer_t *writer)
{
    return writer->pte_batch.inlining ? uvm_push_inline_data_size(&writer->pte_batch.inline_data) : 0;
}

// Start a new push if this one has no room for another slot.
static int writer_make_room(uvm_vmem_writer_t *writer)
{
    if (writer->open && !uvm_push_has_space(&writer->push, UVM_VMEM_PUSH_ROOM + writer_inline_size(writer))) {
        uvm_pte_batch_end(&writer->pte_batch);

        // pte_batch_end has already ordered the writes; the last push has the invalidate.
        uvm_push_set_flag(&writer->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
        writer_close(writer);
    }

    return writer_open(writer);
}

static void writer_invalidate(uvm_vmem_writer_t *writer)
{
    uvm_vmem_range_t *range = writer->range;

    uvm_tlb_batch_single_invalidate(range->gpus[writer->gpu_index].tree,
                                    &writer->push,
                                    range->start + writer->first_unit * UVM_VMEM_UNIT,
                                    (writer->last_unit - writer->first_unit + 1) * UVM_VMEM_UNIT,
                                    writer->page_sizes,
                                    writer->membar);
    atomic64_inc(&range->state->invalidates);
}

static void write_run(uvm_vmem_writer_t *writer, uvm_vmem_slot_t *slot, const uvm_vmem_entry_t *entries, NvU32 first, NvU32 count)
{
    uvm_page_tree_t *tree = writer->range->gpus[writer->gpu_index].tree;
    uvm_page_table_range_t *table = slot_ptes(slot, writer->gpu_index);
    NvU32 pte_size = uvm_mmu_pte_size(tree, UVM_PAGE_SIZE_64K);
    NvU64 ptes[UVM_VMEM_SLOT_UNITS];
    NvU32 i;

    UVM_ASSERT(pte_size == sizeof(ptes[0]));

    for (i = 0; i < count; i++)
        ptes[i] = entry_pte(writer, entries[first + i]);

    if (count > UVM_PTE_BATCH_MAX_PTES) {
        uvm_pte_batch_write_ptes(&writer->pte_batch,
                                 uvm_page_table_range_entry_address(tree, table, first),
                                 ptes,
                                 pte_size,
                                 count);
    }
    else {
        for (i = 0; i < count; i++) {
            uvm_pte_batch_write_pte(&writer->pte_batch,
                                    uvm_page_table_range_entry_address(tree, table, first + i),
                                    ptes[i],
                                    pte_size);
        }
    }

    atomic64_add(count, &writer->range->state->pte_writes);
}

static void write_runs(uvm_vmem_writer_t *writer, uvm_vmem_slot_t *slot, const uvm_vmem_entry_t *entries, NvU32 touched)
{
    NvU32 runs = hweight32(touched & ~(touched << 1));

    if (runs > UVM_VMEM_MAX_RUNS)
        touched = GENMASK(fls(touched) - 1, __ffs(touched));

    while (touched) {
        NvU32 first = __ffs(touched);
        NvU32 count = touched >> first == ~0u ? UVM_VMEM_SLOT_UNITS : ffz(touched >> first);

        write_run(writer, slot, entries, first, count);
        touched = count == UVM_VMEM_SLOT_UNITS ? 0 : touched & ~(((1u << count) - 1) << first);
    }
}

static void write_entry_2m(uvm_vmem_writer_t *writer, uvm_vmem_slot_t *slot, NvU64 pte)
{
    uvm_page_tree_t *tree = writer->range->gpus[writer->gpu_index].tree;
    uvm_page_table_range_t *entry_2m = slot_entry_2m(writer->range, slot, writer->gpu_index);

    uvm_pte_batch_write_pte(&writer->pte_batch,
                            uvm_page_table_range_entry_address(tree, entry_2m, 0),
                            pte,
                            uvm_mmu_pte_size(tree, UVM_PAGE_SIZE_2M));
    atomic64_inc(&writer->range->state->pte_writes);
}

// The membar that waits for accesses through the old entry.
static uvm_membar_t entry_membar(uvm_vmem_writer_t *writer, uvm_vmem_entry_t entry)
{
    uvm_gpu_t *gpu = writer->range->gpus[writer->gpu_index].gpu;

    if (!(entry & UVM_VMEM_ENTRY_MAPPED))
        return UVM_MEMBAR_NONE;

    return uvm_hal_downgrade_membar_type(gpu, uvm_vmem_object_of_entry(writer->range->state, entry)->store->gpu == gpu);
}

// Write the entries of slots that become, or were, all sparse.
static int writer_sparse(uvm_vmem_writer_t *writer, NvU64 index, bool present)
{
    uvm_vmem_range_t *range = writer->range;
    uvm_vmem_range_gpu_t *range_gpu = &range->gpus[writer->gpu_index];
    uvm_vmem_store_t *store = range->state->stores[1 + uvm_id_gpu_index(range_gpu->gpu->id)];
    uvm_mmu_page_table_alloc_t *allocs[2] = { present ? &store->sparse_table : NULL, NULL };
    NvU64 number = directory_number(range, index);
    uvm_page_table_range_t *directory = &range->directories[number][writer->gpu_index];
    NvU32 entry = (slot_address(range, index) - directory_start(range, number)) / UVM_VMEM_SLOT;
    NvU32 size = uvm_mmu_pte_size(range_gpu->tree, UVM_PAGE_SIZE_2M);
    NvU64 bits[2] = { 0 };
    int ret;

    ret = writer_make_room(writer);
    if (ret)
        return ret;

    UVM_ASSERT(size == sizeof(bits));
    range_gpu->tree->hal->make_pde(bits, allocs, directory->table, directory->start_index + entry);
    uvm_pte_batch_write_ptes(&writer->pte_batch,
                             uvm_page_table_range_entry_address(range_gpu->tree, directory, entry),
                             bits,
                             size,
                             1);
    atomic64_inc(&range->state->pte_writes);

    writer->page_sizes |= UVM_PAGE_SIZE_2M;
    writer_extend(writer, index * UVM_VMEM_SLOT_UNITS, (index + 1) * UVM_VMEM_SLOT_UNITS - 1);
    return 0;
}

int uvm_vmem_writer_slot(uvm_vmem_writer_t *writer,
                         NvU64 index,
                         const uvm_vmem_entry_t *entries,
                         NvU32 touched,
                         uvm_vmem_slot_state_t target)
{
    uvm_vmem_range_t *range = writer->range;
    uvm_vmem_slot_t *slot = uvm_vmem_slot(range, index);
    NvU32 units;
    int ret;

    if (!touched)
        return 0;

    if (target == UVM_VMEM_SLOT_SPARSE)
        return writer_sparse(writer, index, true);

    ret = writer_make_room(writer);
    if (ret)
        return ret;

    for (units = touched; units; units &= units - 1)
        writer->membar = max(writer->membar, entry_membar(writer, slot->entries[__ffs(units)]));

    // A change of the 2 MB entry affects all units of the slot.
    if (target != UVM_VMEM_SLOT_SMALL || slot->state != UVM_VMEM_SLOT_SMALL) {
        writer->page_sizes |= UVM_PAGE_SIZE_2M;
        units = ~0u;
    }
    else {
        units = touched;
    }

    writer_extend(writer, index * UVM_VMEM_SLOT_UNITS + __ffs(units), index * UVM_VMEM_SLOT_UNITS + fls(units) - 1);

    if (slot->state != target && (slot->state == UVM_VMEM_SLOT_SMALL || target == UVM_VMEM_SLOT_SMALL)) {
        writer->second_phase = true;

        // The PTEs of a new table are uninitialized.
        if (target == UVM_VMEM_SLOT_SMALL)
            write_run(writer, slot, entries, 0, UVM_VMEM_SLOT_UNITS);

        // When it changes from a table to a 2 MB PTE or back, the entry has to be invalid in between, or the GPU could
        // hold both in its TLBs; block_gpu_pte_finish_split_2m in uvm_va_block.c explains why.
        // A switch to another table, which has the same PTEs for units that the batch does not name, is one write.
        if (slot->state == UVM_VMEM_SLOT_SMALL || slot->state == UVM_VMEM_SLOT_BIG) {
            writer->clears = true;
            write_entry_2m(writer, slot, 0);
        }
    }
    else if (target == UVM_VMEM_SLOT_SMALL) {
        write_runs(writer, slot, entries, touched);
    }
    else if (target == UVM_VMEM_SLOT_BIG) {
        write_entry_2m(writer, slot, entry_pte(writer, entries[0]));
    }
    else if (slot->state == UVM_VMEM_SLOT_BIG) {
        write_entry_2m(writer, slot, 0);
    }

    return 0;
}

int uvm_vmem_writer_begin_phase2(uvm_vmem_writer_t *writer)
{
    int ret = writer_open(writer);

    if (ret)
        return ret;

    // Order the writes so far before those that follow.
    uvm_pte_batch_end(&writer->pte_batch);
    if (writer->clears)
        writer_invalidate(writer);
    uvm_pte_batch_begin(&writer->push, &writer->pte_batch);

    return 0;
}

int uvm_vmem_writer_slot_phase2(uvm_vmem_writer_t *writer,
                                NvU64 index,
                                const uvm_vmem_entry_t *entries,
                                uvm_vmem_slot_state_t target)
{
    uvm_vmem_range_t *range = writer->range;
    uvm_vmem_slot_t *slot = uvm_vmem_slot(range, index);
    int ret;

    if (target == UVM_VMEM_SLOT_SPARSE || slot->state == target ||
        (slot->state != UVM_VMEM_SLOT_SMALL && target != UVM_VMEM_SLOT_SMALL))
        return 0;

    ret = writer_make_room(writer);
    if (ret)
        return ret;

    if (target == UVM_VMEM_SLOT_BIG) {
        write_entry_2m(writer, slot, entry_pte(writer, entries[0]));
    }
    else {
        uvm_page_table_range_t *entry_2m = slot_entry_2m(range, slot, writer->gpu_index);

        // The batch and this write would both use the push's inline data.
        if (writer->pte_batch.pte_count != 0) {
            uvm_pte_batch_end(&writer->pte_batch);
            uvm_pte_batch_begin(&writer->push, &writer->pte_batch);
        }

        // The end of the batch, which follows, orders this write as well.
        uvm_push_set_flag(&writer->push, UVM_PUSH_FLAG_CE_NEXT_PIPELINED);
        uvm_push_set_flag(&writer->push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
        uvm_page_tree_write_pde(range->gpus[writer->gpu_index].tree, entry_2m, &writer->push);
        if (uvm_page_table_range_aperture(entry_2m) == UVM_APERTURE_SYS)
            writer->pte_batch.membar = UVM_MEMBAR_SYS;
        atomic64_inc(&range->state->pte_writes);
    }

    return 0;
}

int uvm_vmem_writer_end(uvm_vmem_writer_t *writer)
{
    int ret;

    // Nothing changed.
    if (writer->first_unit == ~0ull)
        return 0;

    ret = writer_open(writer);
    if (ret)
        return ret;

    uvm_pte_batch_end(&writer->pte_batch);
    writer_invalidate(writer);
    writer_close(writer);
    return 0;
}

// Clear the slot's entry in the parent table, unless it points to the slot's own table.
static int clear_entry(uvm_vmem_writer_t *writer, NvU64 index)
{
    uvm_vmem_range_t *range = writer->range;
    uvm_vmem_slot_t *slot = uvm_vmem_slot(range, index);
    int ret;

    if (!slot)
        return uvm_vmem_slot_is_all_sparse(range, index) ? writer_sparse(writer, index, false) : 0;

    if (slot->state == UVM_VMEM_SLOT_SPARSE)
        return writer_sparse(writer, index, false);

    if (slot->state != UVM_VMEM_SLOT_BIG)
        return 0;

    ret = writer_make_room(writer);
    if (ret)
        return ret;

    write_entry_2m(writer, slot, 0);
    writer_extend(writer, index * UVM_VMEM_SLOT_UNITS, (index + 1) * UVM_VMEM_SLOT_UNITS - 1);
    return 0;
}

// Clear the range's 2 MB PTEs on one GPU, and its entries that point to the table of sparse PTEs.
static void clear_entries(uvm_vmem_range_t *range, NvU32 gpu_index)
{
    uvm_vmem_writer_t writer;
    int ret = 0;
    NvU64 i;

    uvm_vmem_writer_begin(&writer, range, gpu_index);
    writer.page_sizes |= UVM_PAGE_SIZE_2M;
    writer.membar = UVM_MEMBAR_SYS;

    for (i = 0; i < range->num_slots && !ret; i++) {
        if (!range->leaves[i / UVM_VMEM_LEAF_SLOTS])
            i = UVM_ALIGN_DOWN(i, UVM_VMEM_LEAF_SLOTS) + UVM_VMEM_LEAF_SLOTS - 1;
        else
            ret = clear_entry(&writer, i);
        cond_resched();
    }

    // Fails only after a fatal error; no page is then freed until the user channels are stopped.
    if (!ret)
        (void)uvm_vmem_writer_end(&writer);

    (void)uvm_tracker_wait(&range->gpus[gpu_index].tracker);
}

// Wait for accesses to memory other than the GPU's own that were in flight when their translations were invalidated.
// Putting page tables includes a membar only for the memory that holds the tables.
static void membar_sys(uvm_vmem_range_t *range, NvU32 gpu_index)
{
    uvm_vmem_writer_t writer;

    uvm_vmem_writer_begin(&writer, range, gpu_index);
    if (writer_open(&writer) == 0) {
        uvm_pte_batch_end(&writer.pte_batch);
        uvm_hal_wfi_membar(&writer.push, UVM_MEMBAR_SYS);
        writer_close(&writer);
    }

    (void)uvm_tracker_wait(&range->gpus[gpu_index].tracker);
}

void uvm_vmem_table_remove_gpu(uvm_vmem_range_t *range, NvU32 gpu_index)
{
    uvm_page_tree_t *tree = range->gpus[gpu_index].tree;
    uvm_vmem_slot_t *slot;
    bool any = false;
    NvU64 i;

    clear_entries(range, gpu_index);

    for_each_vmem_slot(slot, i, range) {
        put_table(tree, slot_ptes(slot, gpu_index));
        if (slot->has_entry)
            put_table(tree, slot_entry_2m(range, slot, gpu_index));
        any = true;
        cond_resched();
    }

    for (i = 0; i < range->num_directories; i++) {
        if (range->directories[i]) {
            put_table(tree, &range->directories[i][gpu_index]);
            any = true;
        }
        cond_resched();
    }

    if (any)
        (void)tree_wait(tree);
    if (range->remote)
        membar_sys(range, gpu_index);
}
