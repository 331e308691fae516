// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Reservations. To UVM a reservation is an external VA range without mappings of its own, so that nothing else takes
// its addresses and UVM_FREE works; the range points to a uvm_vmem_range_t, and UVM's own map calls refuse it.
//
// A reservation is dismantled (range_dismantle) by FREE, which has claimed it, and on close, before the VA space is
// destroyed; neither holds a lock. The following dismantle it, or part of it, with the VA space lock held for write,
// because UVM holds it, and wait for calls in flight:
//   UVM_FREE                              -> uvm_vmem_range_destroy
//   the GPU VA space is unregistered      -> uvm_vmem_range_remove_gpu (the range stays, without this GPU)
//   peer access ends                      -> uvm_vmem_range_disable_peer
//   a GPU is unregistered                 -> uvm_vmem_unregister_gpu
// Each frees page tables first, and memory once no GPU can reach it. After a fatal UVM error no push can begin and page
// tables stay as they are: memory is then freed when the file descriptor is closed, after the user channels were
// stopped (uvm_vmem_memory.c).

#include <linux/sched/signal.h>

#include "uvm_global.h"
#include "uvm_vmem_internal.h"

void uvm_vmem_range_ref(uvm_vmem_range_t *range, uvm_vmem_entry_t entry)
{
    uvm_vmem_object_t *object;

    uvm_assert_mutex_locked(&range->state->lock);

    if (!(entry & UVM_VMEM_ENTRY_MAPPED))
        return;

    object = uvm_vmem_object_of_entry(range->state, entry);
    object->mapped_units++;
    object->store->mapped_units++;
    range->mapped_units++;
}

void uvm_vmem_range_unref(uvm_vmem_range_t *range, uvm_vmem_entry_t entry, struct list_head *dead)
{
    uvm_vmem_object_t *object;

    uvm_assert_mutex_locked(&range->state->lock);

    if (!(entry & UVM_VMEM_ENTRY_MAPPED))
        return;

    object = uvm_vmem_object_of_entry(range->state, entry);
    UVM_ASSERT(object->mapped_units > 0);
    object->mapped_units--;
    object->store->mapped_units--;
    range->mapped_units--;
    uvm_vmem_object_put(range->state, object, dead);
}

int uvm_vmem_range_find(uvm_vmem_state_t *state, NvU64 start, uvm_vmem_range_t **range_out)
{
    uvm_va_range_t *va_range;

    uvm_assert_rwsem_locked(&state->va_space->lock);

    va_range = uvm_va_range_find(state->va_space, start);
    if (!va_range || va_range->type != UVM_VA_RANGE_TYPE_EXTERNAL || va_range->node.start != start)
        return -ENOENT;

    *range_out = *uvm_vmem_range_slot(va_range);
    return *range_out ? 0 : -ENOENT;
}

bool uvm_vmem_range_try_claim(uvm_vmem_range_t *range)
{
    uvm_assert_mutex_locked(&range->state->lock);

    if (range->claimed)
        return false;

    range->claimed = true;
    range->state->calls++;
    return true;
}

int uvm_vmem_range_claim(uvm_vmem_state_t *state, NvU64 start, uvm_vmem_range_t **range_out)
{
    uvm_va_space_t *va_space = state->va_space;

    while (true) {
        uvm_vmem_range_t *range;
        NvU64 unclaims;
        bool claimed;
        int ret;

        uvm_va_space_down_read(va_space);

        ret = uvm_vmem_range_find(state, start, &range);
        if (ret) {
            uvm_va_space_up_read(va_space);
            return ret;
        }

        uvm_mutex_lock(&state->lock);
        unclaims = state->unclaims;
        claimed = uvm_vmem_range_try_claim(range);
        uvm_mutex_unlock(&state->lock);

        uvm_va_space_up_read(va_space);

        if (claimed && !range->dying) {
            *range_out = range;
            return 0;
        }

        // FREE has dismantled it, but its VA range still exists.
        if (claimed) {
            uvm_vmem_range_unclaim(range);
            return -ENOENT;
        }

        // Wait until any claim is released, not this range's: this range may be freed during the wait.
        if (wait_event_killable(state->wait, READ_ONCE(state->unclaims) != unclaims))
            return -EINTR;
    }
}

void uvm_vmem_range_unclaim(uvm_vmem_range_t *range)
{
    uvm_vmem_state_t *state = range->state;

    uvm_mutex_lock(&state->lock);
    UVM_ASSERT(range->claimed);
    range->claimed = false;
    state->unclaims++;
    uvm_mutex_unlock(&state->lock);

    // Wakes the callers that wait for a claim.
    uvm_vmem_call_end(state);
}

static int check_reserve(const struct uvm_vmem_reserve *params, const __u8 *uuids)
{
    NvU32 i, j;

    if (params->flags & ~(UVM_VMEM_RESERVE_EAGER | UVM_VMEM_RESERVE_BIG))
        return -EOPNOTSUPP;

    // UVM accepts no range at 0, which would make null pointers valid.
    if (!IS_ALIGNED(params->start | params->length, UVM_VMEM_SLOT) || params->start == 0 || params->length == 0 ||
        !uvm_vmem_page_shift_is_valid(params->page_shift))
        return -EINVAL;

    if (params->start + params->length < params->start)
        return -EOVERFLOW;

    if (params->length > UVM_VMEM_MAX_RESERVE_BYTES)
        return -EMSGSIZE;

    if ((params->flags & UVM_VMEM_RESERVE_EAGER) && params->length > UVM_VMEM_MAX_EAGER_BYTES)
        return -EMSGSIZE;

    for (i = 0; i < params->gpu_count; i++) {
        for (j = 0; j < i; j++) {
            if (!memcmp(uuids + i * UVM_VMEM_UUID_BYTES, uuids + j * UVM_VMEM_UUID_BYTES, UVM_VMEM_UUID_BYTES))
                return -EINVAL;
        }
    }

    return 0;
}

static int make_all_tables(uvm_vmem_range_t *range)
{
    bool made;
    NvU64 i;
    int ret;

    uvm_assert_unlocked_order(UVM_LOCK_ORDER_VA_SPACE);

    for (i = 0; i < range->num_slots; i++) {
        ret = fatal_signal_pending(current) ? -EINTR : uvm_vmem_slot_get(range, i, &made);
        if (ret)
            return ret;
        cond_resched();
    }

    return uvm_vmem_range_wait_tables(range);
}

static NvU64 range_num_leaves(uvm_vmem_range_t *range)
{
    return DIV_ROUND_UP(range->num_slots, UVM_VMEM_LEAF_SLOTS);
}

// The kernel memory of the range itself, as counted against the limit.
static NvU64 range_cost(uvm_vmem_range_t *range)
{
    return sizeof(*range) + range_num_leaves(range) * sizeof(range->leaves[0]) +
           range->num_directories * sizeof(range->directories[0]) + uvm_vmem_external_cost();
}

// Free all slots. Their page tables were freed on every GPU.
static void range_free_slots(uvm_vmem_range_t *range)
{
    uvm_vmem_slot_t *slot;
    NvU64 i;

    for_each_vmem_slot(slot, i, range) {
        uvm_vmem_slot_put(range, i);
        cond_resched();
    }

    for (i = 0; i < range_num_leaves(range); i++) {
        uvm_vmem_leaf_put(range, i);
        cond_resched();
    }

    uvm_vmem_directories_put(range);
}

static void range_free(uvm_vmem_range_t *range)
{
    range_free_slots(range);
    uvm_vmem_free(range->state, range->directories);
    uvm_vmem_free(range->state, range->leaves);
    uvm_vmem_uncharge(range->state, UVM_VMEM_ACCOUNT_TABLES, range_cost(range));
    uvm_vmem_free(range->state, range);
}

static int range_create(uvm_vmem_state_t *state, const struct uvm_vmem_reserve *params, uvm_vmem_range_t **range_out)
{
    uvm_vmem_range_t *range = uvm_vmem_alloc(state, sizeof(*range));
    NvU32 i;
    int ret;

    if (!range)
        return -ENOMEM;

    range->state = state;
    range->start = params->start;
    range->length = params->length;
    range->num_slots = params->length / UVM_VMEM_SLOT;
    range->num_directories = ((range->start + range->length - 1) >> UVM_VMEM_DIRECTORY_SHIFT) -
                             (range->start >> UVM_VMEM_DIRECTORY_SHIFT) + 1;
    range->page_shift = params->page_shift;
    range->big = params->flags & UVM_VMEM_RESERVE_BIG;
    range->gpu_count = params->gpu_count;
    INIT_LIST_HEAD(&range->node);
    for (i = 0; i < range->gpu_count; i++)
        uvm_tracker_init(&range->gpus[i].tracker);

    ret = uvm_vmem_charge(state, UVM_VMEM_ACCOUNT_TABLES, range_cost(range));
    if (ret) {
        uvm_vmem_free(state, range);
        return ret;
    }

    range->leaves = uvm_vmem_alloc(state, range_num_leaves(range) * sizeof(range->leaves[0]));
    range->directories = uvm_vmem_alloc(state, range->num_directories * sizeof(range->directories[0]));
    if (!range->leaves || !range->directories) {
        uvm_vmem_free(state, range->leaves);
        uvm_vmem_free(state, range->directories);
        uvm_vmem_uncharge(state, UVM_VMEM_ACCOUNT_TABLES, range_cost(range));
        uvm_vmem_free(state, range);
        return -ENOMEM;
    }

    *range_out = range;
    return 0;
}

// Drop all mappings. The range's page tables were freed on every GPU.
static void forget_mappings(uvm_vmem_range_t *range)
{
    uvm_vmem_slot_t *slot;
    LIST_HEAD(dead);
    NvU64 i;
    NvU32 j;

    // Hold the lock only for the objects: millions of all-sparse slots may lie between two slots.
    for_each_vmem_slot(slot, i, range) {
        uvm_mutex_lock(&range->state->lock);
        for (j = 0; j < UVM_VMEM_SLOT_UNITS; j++) {
            uvm_vmem_range_unref(range, slot->entries[j], &dead);
            slot->entries[j] = 0;
        }
        slot->mapped = 0;
        uvm_mutex_unlock(&range->state->lock);
        cond_resched();
    }

    UVM_ASSERT(range->mapped_units == 0);
    uvm_vmem_object_reap(range->state, &dead);
}

// Free the range's page tables on one GPU, and wait for the TLB invalidates.
//
// The PTEs need not be cleared: each table serves this range alone, so putting it clears the entry that points to it
// and invalidates the TLBs. But a 2 MB PTE is in a table that other ranges may use, so it is cleared.
static void remove_tables(uvm_vmem_range_t *range, NvU32 gpu_index)
{
    uvm_vmem_range_gpu_t *range_gpu = &range->gpus[gpu_index];

    (void)uvm_tracker_wait(&range_gpu->tracker);
    uvm_vmem_table_remove_gpu(range, gpu_index);
    range_gpu->tree = NULL;
}

// Remove mappings, page tables and slots. The rest of the range is small and can be freed without the GPU.
//
// LOCKING: Caller has claimed the range, or holds the VA space lock for write while no call is using the range. Takes
// state->lock.
static void range_dismantle(uvm_vmem_range_t *range)
{
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        if (range->gpus[i].tree)
            remove_tables(range, i);
    }

    forget_mappings(range);
    range_free_slots(range);
}

// Remove the dismantled reservation from the VA space, unless UVM_FREE has already done so. Called after unclaim.
//
// LOCKING: Takes the VA space lock for write.
static void range_remove(uvm_vmem_state_t *state, NvU64 start, NvU64 number)
{
    uvm_va_space_t *va_space = state->va_space;
    LIST_HEAD(deferred_free_list);
    uvm_vmem_range_t *range;

    uvm_va_space_down_write(va_space);

    if (uvm_vmem_range_find(state, start, &range) == 0 && range->number == number)
        uvm_va_range_destroy(uvm_va_range_find(va_space, start), &deferred_free_list);

    uvm_va_space_up_write(va_space);

    // Other external ranges defer freeing their mappings with this list; ours has none.
    UVM_ASSERT(list_empty(&deferred_free_list));
}

// Free a reservation that this call has claimed.
static void range_free_claimed(uvm_vmem_range_t *range)
{
    uvm_vmem_state_t *state = range->state;
    NvU64 number = range->number;
    NvU64 start = range->start;

    uvm_assert_unlocked_order(UVM_LOCK_ORDER_VA_SPACE);

    range->dying = true;
    range_dismantle(range);
    uvm_vmem_range_unclaim(range);
    range_remove(state, start, number);
}

int uvm_vmem_reserve(uvm_vmem_state_t *state, const struct uvm_vmem_reserve *params, const __u8 *uuids)
{
    uvm_va_space_t *va_space = state->va_space;
    bool eager = params->flags & UVM_VMEM_RESERVE_EAGER;
    uvm_vmem_external_t *external = NULL;
    uvm_vmem_range_t *range;
    struct mm_struct *mm;
    int ret;
    NvU32 i;

    ret = check_reserve(params, uuids);
    if (!ret)
        ret = range_create(state, params, &range);
    if (ret)
        return ret;

    mm = uvm_va_space_mm_or_current_retain_lock(va_space);
    uvm_va_space_down_write(va_space);

    for (i = 0; i < range->gpu_count && !ret; i++) {
        uvm_gpu_t *gpu;

        ret = uvm_vmem_find_gpu(state, uuids + i * UVM_VMEM_UUID_BYTES, &gpu);
        if (!ret && !uvm_gpu_can_address(gpu, range->start, range->length))
            ret = -ERANGE;

        if (!ret) {
            range->gpus[i].gpu = gpu;
            range->gpus[i].tree = &uvm_gpu_va_space_get(va_space, gpu)->page_tables;
        }
    }

    if (!ret) {
        ret = uvm_vmem_errno(uvm_va_range_create_external(va_space, mm, range->start, range->length, &external),
                             -ENOMEM);
    }

    if (!ret) {
        *uvm_vmem_range_slot(uvm_vmem_external_to_va_range(external)) = range;
        list_add_tail(&range->node, &state->ranges);
        range->number = ++state->last_range;
        atomic64_inc(&state->reservations);
        atomic64_add(range->length, &state->reserved_bytes);

        // Other calls cannot see the range before the lock is released.
        if (eager) {
            range->claimed = true;
            uvm_vmem_call_begin(state);
        }
    }

    uvm_va_space_up_write(va_space);
    uvm_va_space_mm_or_current_release_unlock(va_space, mm);

    if (ret) {
        range_free(range);
        return ret;
    }

    if (eager) {
        ret = make_all_tables(range);
        if (ret)
            range_free_claimed(range);
        else
            uvm_vmem_range_unclaim(range);
    }

    return ret;
}

int uvm_vmem_free_range(uvm_vmem_state_t *state, const struct uvm_vmem_free *params)
{
    uvm_vmem_range_t *range;
    int ret;

    if (params->flags & ~UVM_VMEM_FREE_UNMAP)
        return -EOPNOTSUPP;

    if (!IS_ALIGNED(params->start, UVM_VMEM_SLOT))
        return -EINVAL;

    ret = uvm_vmem_range_claim(state, params->start, &range);
    if (ret)
        return ret;

    if (range->mapped_units && !(params->flags & UVM_VMEM_FREE_UNMAP)) {
        uvm_vmem_range_unclaim(range);
        return -EBUSY;
    }

    range_free_claimed(range);
    return 0;
}

void uvm_vmem_range_stop_all(uvm_vmem_state_t *state)
{
    uvm_vmem_range_t *range;
    bool claimed;

    UVM_ASSERT(state->calls == 0);
    uvm_assert_unlocked_order(UVM_LOCK_ORDER_VA_SPACE);

    list_for_each_entry(range, &state->ranges, node) {
        // No call is in flight, but a fault being serviced may still read the range (uvm_vmem_fatal_fault).
        uvm_mutex_lock(&state->lock);
        claimed = uvm_vmem_range_try_claim(range);
        uvm_mutex_unlock(&state->lock);

        UVM_ASSERT(claimed);
        range_dismantle(range);
        uvm_vmem_range_unclaim(range);
    }
}

static bool range_has_gpu(uvm_vmem_range_t *range)
{
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        if (range->gpus[i].tree)
            return true;
    }

    return false;
}

void uvm_vmem_range_remove_gpu(uvm_vmem_range_t *range, uvm_gpu_t *gpu)
{
    NvU32 i;

    if (!range)
        return;

    uvm_vmem_call_drain(range->state);

    for (i = 0; i < range->gpu_count; i++) {
        if (range->gpus[i].gpu == gpu && range->gpus[i].tree)
            remove_tables(range, i);
    }

    if (!range_has_gpu(range))
        forget_mappings(range);
}

void uvm_vmem_range_destroy(uvm_vmem_range_t *range)
{
    uvm_vmem_state_t *state;
    NvU32 i;

    if (!range)
        return;

    state = range->state;
    uvm_assert_rwsem_locked_write(&state->va_space->lock);

    // Only UVM_FREE gets here with the range intact. Wait for the call on this range only: other calls continue.
    uvm_vmem_wait_event(state, !READ_ONCE(range->claimed));
    range_dismantle(range);

    list_del(&range->node);
    atomic64_dec(&state->reservations);
    atomic64_sub(range->length, &state->reserved_bytes);
    for (i = 0; i < range->gpu_count; i++)
        uvm_tracker_deinit(&range->gpus[i].tracker);
    range_free(range);
}

// Copy the slot's content to entries without the pages in gpu's memory. Returns a bitmap of the units that change.
static NvU32 without_gpu(uvm_vmem_range_t *range, uvm_vmem_slot_t *slot, uvm_gpu_t *gpu, uvm_vmem_entry_t *entries)
{
    NvU32 touched = 0;
    NvU32 i;

    memcpy(entries, slot->entries, UVM_VMEM_SLOT_UNITS * sizeof(entries[0]));
    for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++) {
        if (!(entries[i] & UVM_VMEM_ENTRY_MAPPED))
            continue;

        if (uvm_vmem_object_of_entry(range->state, entries[i])->store->gpu == gpu) {
            entries[i] = 0;
            touched |= 1u << i;
        }
    }

    return touched;
}

// On one GPU of the range, clear the PTEs of the pages in gpu's memory, and wait until that is done.
static void evict_ptes(uvm_vmem_range_t *range, NvU32 gpu_index, uvm_gpu_t *gpu)
{
    uvm_vmem_entry_t entries[UVM_VMEM_SLOT_UNITS];
    uvm_vmem_writer_t writer;
    uvm_vmem_slot_t *slot;
    NvU64 i;
    int ret = 0;

    uvm_vmem_writer_begin(&writer, range, gpu_index);
    for_each_vmem_slot(slot, i, range) {
        NvU32 touched = without_gpu(range, slot, gpu, entries);

        ret = uvm_vmem_writer_slot(&writer, i, entries, touched, uvm_vmem_slot_target(range, i, entries, false, false, false));
        if (ret)
            break;
        cond_resched();
    }

    // Removing pages never makes a 2 MB PTE, and all pages of an existing one are in the same GPU's memory.
    UVM_ASSERT(!writer.second_phase);
    if (!ret)
        (void)uvm_vmem_writer_end(&writer);

    (void)uvm_tracker_wait(&range->gpus[gpu_index].tracker);
}

// Remove all mappings of pages in gpu's memory.
//
// LOCKING: Caller holds the VA space lock for write. Takes state->lock.
static void range_evict(uvm_vmem_range_t *range, uvm_gpu_t *gpu)
{
    uvm_vmem_entry_t entries[UVM_VMEM_SLOT_UNITS];
    uvm_vmem_store_t *store;
    uvm_vmem_slot_t *slot;
    LIST_HEAD(dead);
    NvU64 i;
    NvU32 j;

    uvm_assert_rwsem_locked_write(&range->state->va_space->lock);

    store = range->state->stores[1 + uvm_id_gpu_index(gpu->id)];
    if (!range->mapped_units || !store || !store->mapped_units)
        return;

    for (j = 0; j < range->gpu_count; j++) {
        if (range->gpus[j].tree)
            evict_ptes(range, j, gpu);
    }

    for_each_vmem_slot(slot, i, range) {
        NvU32 touched = without_gpu(range, slot, gpu, entries);

        uvm_mutex_lock(&range->state->lock);
        if (touched && slot->state == UVM_VMEM_SLOT_BIG)
            slot->state = UVM_VMEM_SLOT_EMPTY;

        for (j = 0; j < UVM_VMEM_SLOT_UNITS; j++) {
            if (touched & (1u << j))
                uvm_vmem_range_unref(range, slot->entries[j], &dead);
        }

        slot->mapped &= ~touched;
        memcpy(slot->entries, entries, sizeof(entries));
        uvm_mutex_unlock(&range->state->lock);
        cond_resched();
    }

    uvm_vmem_object_reap(range->state, &dead);
}

static bool range_maps_on(uvm_vmem_range_t *range, uvm_gpu_t *gpu)
{
    NvU32 i;

    for (i = 0; i < range->gpu_count; i++) {
        if (range->gpus[i].gpu == gpu && range->gpus[i].tree)
            return true;
    }

    return false;
}

void uvm_vmem_range_disable_peer(uvm_vmem_range_t *range, uvm_gpu_t *gpu0, uvm_gpu_t *gpu1)
{
    if (!range)
        return;

    uvm_vmem_call_drain(range->state);

    if (range_maps_on(range, gpu0))
        range_evict(range, gpu1);
    if (range_maps_on(range, gpu1))
        range_evict(range, gpu0);
}

void uvm_vmem_unregister_gpu(uvm_va_space_t *va_space, uvm_gpu_t *gpu)
{
    uvm_vmem_state_t *state = va_space->vmem.state;
    uvm_vmem_range_t *range;

    uvm_assert_rwsem_locked_write(&va_space->lock);

    if (!state)
        return;

    uvm_vmem_call_drain(state);
    uvm_vmem_ticket_drain(state);

    // The GPU's own page tables are gone, but peers may still map its memory.
    list_for_each_entry(range, &state->ranges, node)
        range_evict(range, gpu);

    uvm_vmem_object_remove_gpu(state, gpu);
    uvm_vmem_store_remove_gpu(state, gpu);
}
