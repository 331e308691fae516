// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Physical memory: chunks of 2 MB, in GPU memory or pinned in host memory, cut into units of 64 KB.
//
// GPU memory comes from the PMM as kernel-type chunks. User-type chunks would be smaller, but the resource manager does
// not know that such chunks are pinned: it picks their range for a contiguous allocation, and then spins for 30 seconds
// waiting for them to move. Kernel-type chunks are pinned for PMA too.
//
// A chunk is in the list of the order of its largest aligned block of free units, so that the cost of taking and
// returning units does not depend on the number of chunks. Units are taken from the fullest chunk that has a block
// large enough for everything still wanted; failing that, from the largest blocks; failing that, from a new chunk. An
// unused chunk is freed immediately. But after a fatal UVM error page tables may not have been cleared and user
// channels still run: then it is freed when the file descriptor is closed, which stops the channels.
//
// A unit is zeroed on allocation unless its chunk was known to be zero and the unit was never used. It is reused only
// after the pushes in state->pending, which remove the translations to it.

#include <linux/module.h>
#include <linux/sched/signal.h>

#include "uvm_global.h"
#include "uvm_hal.h"
#include "uvm_vmem_internal.h"

static ulong uvm_vmem_limit_mb;
module_param(uvm_vmem_limit_mb, ulong, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_limit_mb,
                 "GPU memory, in MB, that one file descriptor may pin on each GPU with vmem (0: no limit). Above it "
                 "CREATE fails with EDQUOT; pages already held stay.");

static ulong uvm_vmem_host_limit_mb;
module_param(uvm_vmem_host_limit_mb, ulong, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_host_limit_mb,
                 "Host memory, in MB, that one file descriptor may pin with vmem (0: no limit but the memory "
                 "cgroup's; RLIMIT_MEMLOCK does not count). Above it CREATE fails with EDQUOT.");

static long uvm_vmem_gpu_limit_mb = -1;
module_param(uvm_vmem_gpu_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_gpu_limit_mb,
                 "GPU memory, in MB, that all file descriptors together may pin on each GPU with vmem (0: no limit; "
                 "default: 15/16 of the GPU's memory). Above it CREATE fails with EDQUOT.");

// Chunks of all descriptors on each GPU, including those being allocated.
static atomic64_t g_gpu_chunks[UVM_ID_MAX_GPUS];

// A memset by the copy engine takes 13 to 15 words; a chunk of host memory takes 32 memsets. Includes room to end the
// push.
#define ZERO_PUSH_ROOM 4096

// Pinned memory cannot be evicted: leave memory for page tables, UVM's own channels, and other users of the GPU.
static NvU64 gpu_limit(uvm_gpu_t *gpu)
{
    long limit = READ_ONCE(uvm_vmem_gpu_limit_mb);

    if (limit < 0)
        return gpu->mem_info.size - gpu->mem_info.size / 16;

    return limit ? (NvU64)limit << 20 : ~0ull;
}

static int gpu_charge(uvm_gpu_t *gpu)
{
    atomic64_t *chunks = &g_gpu_chunks[uvm_id_gpu_index(gpu->id)];

    if ((NvU64)atomic64_inc_return(chunks) * UVM_VMEM_SLOT <= gpu_limit(gpu))
        return 0;

    atomic64_dec(chunks);
    return -EDQUOT;
}

static void gpu_uncharge(uvm_gpu_t *gpu)
{
    atomic64_dec(&g_gpu_chunks[uvm_id_gpu_index(gpu->id)]);
}

// One bit for each position of an aligned block of an order.
static NvU32 order_positions(NvU32 order)
{
    static const NvU32 positions[UVM_VMEM_ORDERS] = { 0xffffffff, 0x55555555, 0x11111111, 0x01010101, 0x00010001, 0x1 };

    return positions[order];
}

// The positions at which an aligned block of this order is free.
static NvU32 free_blocks(NvU32 free, NvU32 order)
{
    NvU32 i;

    for (i = 0; i < order; i++)
        free &= free >> (1u << i);

    return free & order_positions(order);
}

static NvU32 block_mask(NvU32 first, NvU32 order)
{
    return order == UVM_VMEM_ORDERS - 1 ? ~0u : ((1u << (1u << order)) - 1) << first;
}

// Put a chunk into the list of the order of its largest free block; a full chunk is in no list.
static void chunk_file(uvm_vmem_chunk_t *chunk)
{
    NvU32 order = UVM_VMEM_ORDERS;

    list_del_init(&chunk->node);
    while (order-- > 0) {
        if (free_blocks(chunk->free, order)) {
            list_add(&chunk->node, &chunk->store->chunks[order]);
            return;
        }
    }
}

uvm_vmem_store_t *uvm_vmem_store_get(uvm_vmem_state_t *state, uvm_gpu_t *gpu)
{
    NvU32 index = gpu ? 1 + uvm_id_gpu_index(gpu->id) : UVM_VMEM_STORE_HOST;
    uvm_vmem_store_t *store = state->stores[index];
    NvU32 i;

    uvm_assert_mutex_locked(&state->lock);

    if (store)
        return store;

    store = uvm_vmem_alloc(state, sizeof(*store));
    if (!store)
        return NULL;

    store->state = state;
    store->gpu = gpu;
    INIT_LIST_HEAD(&store->all);
    for (i = 0; i < UVM_VMEM_ORDERS; i++)
        INIT_LIST_HEAD(&store->chunks[i]);

    state->stores[index] = store;
    return store;
}

int uvm_vmem_chunk_map_host(uvm_vmem_chunk_t *chunk, uvm_gpu_t *gpu)
{
    uvm_assert_mutex_locked(&chunk->store->state->lock);

    return uvm_vmem_errno(uvm_mem_map_gpu_phys(chunk->host_mem, gpu), -ENOMEM);
}

uvm_gpu_phys_address_t uvm_vmem_chunk_address(uvm_vmem_chunk_t *chunk, NvU32 unit, uvm_gpu_t *gpu)
{
    uvm_gpu_t *owner = chunk->store->gpu;
    uvm_gpu_phys_address_t address;

    if (chunk->host_mem)
        return uvm_mem_gpu_physical(chunk->host_mem, gpu, unit * UVM_VMEM_UNIT, UVM_VMEM_UNIT);

    if (owner == gpu)
        address = uvm_gpu_phys_address(UVM_APERTURE_VID, chunk->gpu_chunk->address);
    else
        address = uvm_vmem_peer_address(owner, chunk->gpu_chunk, gpu);

    address.address += unit * UVM_VMEM_UNIT;
    return address;
}

// Take a chunk out of its store.
//
// LOCKING: Caller holds state->lock.
static void chunk_remove(uvm_vmem_chunk_t *chunk, struct list_head *unused)
{
    list_del(&chunk->node);
    list_del(&chunk->all_node);
    list_add(&chunk->node, unused);
}

static void chunk_free(uvm_vmem_state_t *state, uvm_vmem_chunk_t *chunk)
{
    uvm_vmem_store_t *store = chunk->store;

    if (chunk->host_mem) {
        uvm_mem_free(chunk->host_mem);
        uvm_vmem_uncharge(state, UVM_VMEM_ACCOUNT_HOST, UVM_VMEM_SLOT);
    }
    else {
        uvm_pmm_gpu_free(&store->gpu->pmm, chunk->gpu_chunk, NULL);
        gpu_uncharge(store->gpu);
    }

    uvm_vmem_free(state, chunk);

    uvm_mutex_lock(&state->lock);
    store->num_chunks--;
    uvm_mutex_unlock(&state->lock);
}

void uvm_vmem_store_free_unused(uvm_vmem_state_t *state, struct list_head *unused)
{
    uvm_tracker_t tracker = UVM_TRACKER_INIT();
    uvm_vmem_chunk_t *chunk, *next;

    if (list_empty(unused))
        return;

    // The kernel does not wait for a GPU before it reuses a page; the PMM does, but under its caller's locks. Units are
    // returned only after the pushes that unmap them were added to state->pending, so it covers them all.
    uvm_mutex_lock(&state->lock);
    uvm_tracker_remove_completed(&state->pending);
    (void)uvm_tracker_add_tracker_safe(&tracker, &state->pending);
    uvm_mutex_unlock(&state->lock);

    (void)uvm_tracker_wait_deinit(&tracker);

    list_for_each_entry_safe(chunk, next, unused, node) {
        list_del(&chunk->node);
        chunk_free(state, chunk);
        cond_resched();
    }
}

// Move a chunk without used units to unused if it is safe to free it now.
static void chunk_put(uvm_vmem_chunk_t *chunk, struct list_head *unused)
{
    UVM_ASSERT(chunk->free == ~0u);

    if (uvm_global_get_status() == NV_OK)
        chunk_remove(chunk, unused);
    else
        chunk_file(chunk);
}

static int chunk_alloc_gpu(uvm_vmem_chunk_t *chunk, uvm_gpu_t *gpu)
{
    uvm_tracker_t tracker = UVM_TRACKER_INIT();
    NV_STATUS status;
    int ret;

    ret = gpu_charge(gpu);
    if (ret)
        return ret;

    status = uvm_pmm_gpu_alloc_kernel(&gpu->pmm,
                                      1,
                                      UVM_CHUNK_SIZE_2M,
                                      UVM_PMM_ALLOC_FLAGS_EVICT,
                                      &chunk->gpu_chunk,
                                      &tracker);
    if (status != NV_OK) {
        gpu_uncharge(gpu);
        return uvm_vmem_errno(status, -ENOSPC);
    }

    chunk->dirty = chunk->gpu_chunk->is_zero ? 0 : ~0u;

    // Later owners of units of this chunk rely on its former owner being done with it.
    status = uvm_tracker_wait_deinit(&tracker);
    if (status != NV_OK) {
        uvm_pmm_gpu_free(&gpu->pmm, chunk->gpu_chunk, NULL);
        gpu_uncharge(gpu);
        return uvm_vmem_errno(status, -EIO);
    }

    return 0;
}

static int chunk_alloc_host(uvm_vmem_state_t *state, uvm_vmem_chunk_t *chunk)
{
    uvm_mem_alloc_params_t params = { 0 };
    int ret;

    ret = uvm_vmem_charge(state, UVM_VMEM_ACCOUNT_HOST, UVM_VMEM_SLOT);
    if (ret)
        return ret;

    params.size = UVM_VMEM_SLOT;
    params.page_size = UVM_VMEM_UNIT;
    params.zero = true;
    params.mm = current->mm;

    ret = uvm_vmem_errno(uvm_mem_alloc(&params, &chunk->host_mem), -ENOSPC);
    if (ret)
        uvm_vmem_uncharge(state, UVM_VMEM_ACCOUNT_HOST, UVM_VMEM_SLOT);

    return ret;
}

// Add a new chunk to the store, for the caller to take pages from.
//
// LOCKING: Caller holds state->lock. It is dropped during the allocation, because evicting other users of the GPU takes
// long.
static int store_grow(uvm_vmem_state_t *state, uvm_vmem_store_t *store, uvm_vmem_chunk_t **chunk_out)
{
    ulong limit = READ_ONCE(*(store->gpu ? &uvm_vmem_limit_mb : &uvm_vmem_host_limit_mb));
    uvm_vmem_chunk_t *chunk;
    int ret;

    if (limit && (store->num_chunks + store->num_growing + 1) * (UVM_VMEM_SLOT >> 20) > limit)
        return -EDQUOT;

    // kmalloc aligns a power of two to its size: the low bits of a chunk's address are free to hold a unit's number.
    BUILD_BUG_ON(sizeof(*chunk) < UVM_VMEM_SLOT_UNITS || !is_power_of_2(sizeof(*chunk)));
    chunk = uvm_vmem_alloc(state, sizeof(*chunk));
    if (!chunk)
        return -ENOMEM;

    UVM_ASSERT(IS_ALIGNED((unsigned long)chunk, UVM_VMEM_SLOT_UNITS));

    INIT_LIST_HEAD(&chunk->node);
    chunk->store = store;
    chunk->free = ~0u;

    store->num_growing++;
    uvm_mutex_unlock(&state->lock);
    ret = store->gpu ? chunk_alloc_gpu(chunk, store->gpu) : chunk_alloc_host(state, chunk);
    uvm_mutex_lock(&state->lock);
    store->num_growing--;

    if (ret) {
        uvm_vmem_free(state, chunk);
        return ret;
    }

    store->num_chunks++;
    list_add(&chunk->all_node, &store->all);
    *chunk_out = chunk;
    return 0;
}

// The chunk to take the next pages from, or NULL. wanted: the order of a block that holds all pages still to be taken.
// least: the order of one page.
static uvm_vmem_chunk_t *store_choose(uvm_vmem_store_t *store, NvU32 wanted, NvU32 least, bool contiguous)
{
    NvU32 order;

    for (order = wanted; order < UVM_VMEM_ORDERS; order++) {
        if (!list_empty(&store->chunks[order]))
            return list_first_entry(&store->chunks[order], uvm_vmem_chunk_t, node);
    }

    if (contiguous)
        return NULL;

    for (order = wanted; order-- > least;) {
        if (!list_empty(&store->chunks[order]))
            return list_first_entry(&store->chunks[order], uvm_vmem_chunk_t, node);
    }

    return NULL;
}

// Take up to count pages from a chunk, starting at its first free block of wanted_order if it has one.
static NvU32 chunk_take(uvm_vmem_chunk_t *chunk, NvU32 page_order, NvU32 wanted_order, NvU32 count, unsigned long *pages)
{
    NvU32 blocks = free_blocks(chunk->free, wanted_order);
    NvU32 first = blocks ? __ffs(blocks) : 0;
    NvU32 taken = 0;
    NvU32 unit;

    for (unit = first; unit < UVM_VMEM_SLOT_UNITS && taken < count; unit += 1u << page_order) {
        NvU32 mask = block_mask(unit, page_order);

        if ((chunk->free & mask) != mask)
            continue;

        chunk->free &= ~mask;
        pages[taken++] = (unsigned long)chunk | unit;
    }

    chunk_file(chunk);
    return taken;
}

void uvm_vmem_store_give(uvm_vmem_state_t *state, NvU32 page_shift, NvU32 count, const unsigned long *pages,
                         struct list_head *unused)
{
    NvU32 page_order = page_shift - UVM_VMEM_UNIT_SHIFT;
    uvm_vmem_chunk_t *chunk;
    NvU32 units = 0;
    NvU32 i;

    uvm_assert_mutex_locked(&state->lock);

    for (i = 0; i < count; i++) {
        NvU32 mask = block_mask(uvm_vmem_page_unit(pages[i]), page_order);

        chunk = uvm_vmem_page_chunk(pages[i]);
        UVM_ASSERT(!(chunk->free & mask));
        chunk->free |= mask;
        chunk->store->created_units -= 1u << page_order;

        if (chunk->free == ~0u)
            chunk_put(chunk, unused);
        else
            chunk_file(chunk);

        uvm_vmem_step(state, &units, 1u << page_order);
    }
}

int uvm_vmem_store_take(uvm_vmem_state_t *state,
                        uvm_vmem_store_t *store,
                        uvm_gpu_t *gpu,
                        NvU32 page_shift,
                        NvU32 count,
                        bool contiguous,
                        unsigned long *pages)
{
    NvU32 page_order = page_shift - UVM_VMEM_UNIT_SHIFT;
    LIST_HEAD(unused);
    NvU32 worked = 0;
    NvU32 taken = 0;
    int ret = 0;

    uvm_mutex_lock(&state->lock);
    UVM_ASSERT(state->calls > 0);

    while (taken < count) {
        NvU64 units = (NvU64)(count - taken) << page_order;
        NvU32 wanted = min((NvU32)order_base_2(units), (NvU32)UVM_VMEM_ORDERS - 1);
        uvm_vmem_chunk_t *chunk = store_choose(store, wanted, page_order, contiguous);
        NvU32 n;

        if (!chunk) {
            ret = fatal_signal_pending(current) ? -EINTR : store_grow(state, store, &chunk);
            if (ret)
                break;
        }

        if (chunk->host_mem) {
            ret = uvm_vmem_chunk_map_host(chunk, gpu);
            if (ret) {
                if (chunk->free == ~0u)
                    chunk_put(chunk, &unused);
                break;
            }
        }

        n = chunk_take(chunk, page_order, wanted, count - taken, pages + taken);
        store->created_units += (NvU64)n << page_order;
        taken += n;
        uvm_vmem_step(state, &worked, n << page_order);
    }

    if (ret)
        uvm_vmem_store_give(state, page_shift, taken, pages, &unused);

    uvm_mutex_unlock(&state->lock);
    uvm_vmem_store_free_unused(state, &unused);
    return ret;
}

// The page's units that must be zeroed.
static NvU32 page_dirty(unsigned long page, NvU32 page_order)
{
    return READ_ONCE(uvm_vmem_page_chunk(page)->dirty) & block_mask(uvm_vmem_page_unit(page), page_order);
}

static void push_zero(uvm_push_t *push, uvm_vmem_chunk_t *chunk, NvU32 first, NvU32 count)
{
    uvm_gpu_t *gpu = uvm_push_get_gpu(push);

    // Host memory is contiguous only within a unit.
    NvU32 step = chunk->host_mem ? 1 : count;
    NvU32 unit;

    for (unit = first; unit < first + count; unit += step) {
        uvm_gpu_phys_address_t address = uvm_vmem_chunk_address(chunk, unit, gpu);

        // The membar at the end of the push covers all memsets.
        uvm_push_set_flag(push, UVM_PUSH_FLAG_NEXT_MEMBAR_NONE);
        uvm_push_set_flag(push, UVM_PUSH_FLAG_CE_NEXT_PIPELINED);
        gpu->parent->ce_hal->memset_8(push, uvm_gpu_address_copy(gpu, address), 0, step * UVM_VMEM_UNIT);
    }
}

int uvm_vmem_store_zero(uvm_vmem_state_t *state, uvm_gpu_t *gpu, NvU32 page_shift, NvU32 count, const unsigned long *pages)
{
    NvU32 page_order = page_shift - UVM_VMEM_UNIT_SHIFT;
    NvU64 page_size = 1ull << page_shift;
    uvm_tracker_t tracker = UVM_TRACKER_INIT();
    NV_STATUS status = NV_OK;
    uvm_push_t push;
    bool open = false;
    NvU32 worked = 0;
    NvU64 zeroed = 0;
    NvU32 i, n;

    // The caller owns these units: other calls may change other bits of dirty, but not those of these units.
    for (i = 0; i < count && !page_dirty(pages[i], page_order); i++)
        cond_resched();

    if (i < count) {
        uvm_mutex_lock(&state->lock);
        uvm_tracker_remove_completed(&state->pending);
        status = uvm_tracker_add_tracker_safe(&tracker, &state->pending);
        uvm_mutex_unlock(&state->lock);
    }

    for (; i < count && status == NV_OK; i += n) {
        uvm_vmem_chunk_t *chunk = uvm_vmem_page_chunk(pages[i]);

        n = 1;
        cond_resched();
        if (!page_dirty(pages[i], page_order))
            continue;

        // Zero adjacent units with one memset.
        while (i + n < count && pages[i + n] == pages[i] + ((unsigned long)n << page_order) &&
               uvm_vmem_page_chunk(pages[i + n]) == chunk && page_dirty(pages[i + n], page_order))
            n++;

        if (!open) {
            status = uvm_push_begin_acquire(gpu->channel_manager,
                                            UVM_CHANNEL_TYPE_GPU_INTERNAL,
                                            &tracker,
                                            &push,
                                            "vmem zero %u pages",
                                            count);
            if (status != NV_OK)
                break;
            open = true;
        }

        push_zero(&push, chunk, uvm_vmem_page_unit(pages[i]), n << page_order);
        zeroed += n * page_size;

        if (!uvm_push_has_space(&push, ZERO_PUSH_ROOM)) {
            uvm_push_end(&push);
            uvm_tracker_overwrite_with_push(&tracker, &push);
            open = false;
        }
    }

    if (open) {
        uvm_push_end(&push);
        uvm_tracker_overwrite_with_push(&tracker, &push);
    }

    if (status == NV_OK)
        status = uvm_tracker_wait_deinit(&tracker);
    else
        (void)uvm_tracker_wait_deinit(&tracker);

    if (status != NV_OK)
        return uvm_vmem_errno(status, -EIO);

    // Their contents are unknown from here on.
    uvm_mutex_lock(&state->lock);
    for (i = 0; i < count; i++) {
        uvm_vmem_page_chunk(pages[i])->dirty |= block_mask(uvm_vmem_page_unit(pages[i]), page_order);
        uvm_vmem_step(state, &worked, 1u << page_order);
    }
    uvm_mutex_unlock(&state->lock);

    atomic64_add(zeroed, &state->zeroed_bytes);
    return 0;
}

// Fill a table with 32 sparse PTEs, and wait.
static NV_STATUS fill_sparse_table(uvm_gpu_t *gpu, uvm_page_tree_t *tree, uvm_mmu_page_table_alloc_t *table, uvm_tracker_t *tracker)
{
    NV_STATUS status;
    uvm_push_t push;

    status = uvm_push_begin_acquire(gpu->channel_manager, UVM_CHANNEL_TYPE_MEMOPS, tracker, &push, "vmem sparse table");
    if (status != NV_OK)
        return status;

    gpu->parent->ce_hal->memset_8(&push, uvm_mmu_gpu_address(gpu, table->addr), tree->hal->make_sparse_pte(), table->size);
    uvm_push_end(&push);
    uvm_tracker_overwrite_with_push(tracker, &push);
    return uvm_tracker_wait(tracker);
}

int uvm_vmem_store_get_sparse_table(uvm_vmem_state_t *state, uvm_gpu_t *gpu, uvm_page_tree_t *tree)
{
    uvm_mmu_page_table_alloc_t table = { 0 };
    uvm_tracker_t tracker = UVM_TRACKER_INIT();
    uvm_gpu_chunk_t *chunk = NULL;
    uvm_vmem_store_t *store;
    NV_STATUS status;
    bool there;

    uvm_mutex_lock(&state->lock);
    store = uvm_vmem_store_get(state, gpu);
    there = store && store->sparse_chunk;
    uvm_mutex_unlock(&state->lock);

    if (!store)
        return -ENOMEM;
    if (there)
        return 0;

    status = uvm_pmm_gpu_alloc_kernel(&gpu->pmm, 1, UVM_CHUNK_SIZE_64K, UVM_PMM_ALLOC_FLAGS_EVICT, &chunk, &tracker);
    if (status != NV_OK)
        return uvm_vmem_errno(status, -ENOSPC);

    table.addr = uvm_gpu_phys_address(UVM_APERTURE_VID, chunk->address);
    table.size = UVM_VMEM_SLOT_UNITS * sizeof(NvU64);
    status = fill_sparse_table(gpu, tree, &table, &tracker);
    (void)uvm_tracker_wait_deinit(&tracker);

    // Another call may have won the race.
    uvm_mutex_lock(&state->lock);
    if (status == NV_OK && !store->sparse_chunk) {
        store->sparse_table = table;
        store->sparse_chunk = chunk;
        chunk = NULL;
    }
    uvm_mutex_unlock(&state->lock);

    if (chunk)
        uvm_pmm_gpu_free(&gpu->pmm, chunk, NULL);

    return uvm_vmem_errno(status, -EIO);
}

// Free a store and its chunks.
//
// LOCKING: Takes state->lock. Caller ensures that no call is in flight, so that nothing changes while the lock is
// dropped.
static void store_destroy(uvm_vmem_state_t *state, NvU32 index)
{
    uvm_vmem_chunk_t *chunk, *next;
    uvm_vmem_store_t *store;
    NvU32 worked = 0;
    LIST_HEAD(unused);

    uvm_mutex_lock(&state->lock);

    store = state->stores[index];
    state->stores[index] = NULL;

    if (store) {
        UVM_ASSERT(store->created_units == 0);
        UVM_ASSERT(store->num_growing == 0);

        // Chunks that a fatal error kept from being freed.
        list_for_each_entry_safe(chunk, next, &store->all, all_node) {
            chunk_remove(chunk, &unused);
            uvm_vmem_step(state, &worked, UVM_VMEM_SLOT_UNITS);
        }
    }

    uvm_mutex_unlock(&state->lock);

    if (!store)
        return;

    uvm_vmem_store_free_unused(state, &unused);
    UVM_ASSERT(store->num_chunks == 0);

    // The page trees whose entries pointed to it are gone.
    if (store->sparse_chunk)
        uvm_pmm_gpu_free(&store->gpu->pmm, store->sparse_chunk, NULL);

    uvm_vmem_free(state, store);
}

// Remove a GPU's access to host memory.
//
// LOCKING: as store_destroy.
static void store_unmap_gpu(uvm_vmem_state_t *state, uvm_gpu_t *gpu)
{
    uvm_vmem_store_t *store = state->stores[UVM_VMEM_STORE_HOST];
    uvm_vmem_chunk_t *chunk;
    NvU32 worked = 0;

    if (!store)
        return;

    uvm_mutex_lock(&state->lock);

    list_for_each_entry(chunk, &store->all, all_node) {
        uvm_mem_unmap_gpu_phys(chunk->host_mem, gpu);
        uvm_vmem_step(state, &worked, UVM_VMEM_SLOT_UNITS);
    }

    uvm_mutex_unlock(&state->lock);
}

void uvm_vmem_store_remove_gpu(uvm_vmem_state_t *state, uvm_gpu_t *gpu)
{
    uvm_assert_rwsem_locked_write(&state->va_space->lock);

    store_unmap_gpu(state, gpu);
    store_destroy(state, 1 + uvm_id_gpu_index(gpu->id));
}

void uvm_vmem_store_destroy_all(uvm_vmem_state_t *state)
{
    NvU32 i;

    for (i = 0; i < UVM_VMEM_STORES; i++)
        store_destroy(state, i);
}
