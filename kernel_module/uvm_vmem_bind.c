// SPDX-License-Identifier: MIT OR GPL-2.0
//
// BIND: a batch of map and unmap operations, all or nothing.
//
//   check      each operation alone; then sort them by address and check for overlaps
//   look up    the reservation and the objects, and pin the objects
//   stage      the final content of each slot that the batch touches: the value and the size of each PTE
//   prepare    slots, page tables, access to host memory: everything that can fail. Undone on failure.
//   send       to each GPU the fewest pushes that hold the PTEs, with one TLB invalidate at the end of the last
//   commit     the staged content to the slots, and move the references to objects accordingly
//   wait       unless the caller wants a ticket
//
// Before the first push no GPU and no other call sees a change, and every failure is rolled back (except that
// page tables allocated for a slot of a BIG reservation stay). Beginning a push fails only after a fatal error; it is
// then unknown what the GPU did with earlier pushes, and the reservation is marked broken.

#include <linux/sched/signal.h>
#include <linux/sort.h>

#include "uvm_vmem_internal.h"
#include "uvm_vmem_trace.h"

// A checked operation. Units are counted from the start of the reservation.
typedef struct
{
    NvU64 first_unit;
    NvU64 num_units;
    uvm_vmem_object_t *object; // MAP
    NvU64 object_unit;
    NvU32 number; // index in the caller's array
    NvU32 op;
    NvU32 flags;
} bind_op_t;

// The new content of a slot.
typedef struct
{
    NvU64 index;

    // Bitmaps, one bit per unit: an operation names the unit; its entry changes.
    NvU32 named;
    NvU32 touched;

    // A single MAP covers the whole slot.
    bool whole;

    // This batch created the slot.
    bool made;

    // uncut: an operation without CUT changes a unit; uncut_op is its index.
    bool uncut;
    NvU32 uncut_op;

    // large: an operation has LARGE; large_op is its index.
    bool large;
    NvU32 large_op;

    // An operation has CUT.
    bool cut;

    uvm_vmem_slot_state_t state;

    uvm_vmem_entry_t entries[UVM_VMEM_SLOT_UNITS];
} bind_stage_t;

typedef struct
{
    uvm_vmem_state_t *state;
    uvm_vmem_range_t *range;
    bind_op_t *ops;
    NvU32 num_ops;
    NvU32 num_pinned;
    NvU32 failed_op;
    bind_stage_t *stages;
    NvU64 num_stages;
    uvm_vmem_ticket_t *ticket;

    // The batch removes a mapping.
    bool unmaps;

    // Objects that lost their last reference: to be reaped after the batch.
    struct list_head dead;

    // The pushes to wait for.
    uvm_tracker_t tracker;
} bind_t;

static int check_op_alone(const struct uvm_vmem_op *op)
{
    NvU32 known_flags;

    switch (op->op) {
        case UVM_VMEM_OP_MAP:
            known_flags = UVM_VMEM_OP_READ_ONLY | UVM_VMEM_OP_REPLACE | UVM_VMEM_OP_CUT | UVM_VMEM_OP_LARGE;
            break;
        case UVM_VMEM_OP_UNMAP:
            known_flags = UVM_VMEM_OP_SPARSE | UVM_VMEM_OP_CUT;
            break;
        default:
            return -EOPNOTSUPP;
    }

    if (op->flags & ~known_flags)
        return -EOPNOTSUPP;

    if (op->count == 0 || op->__reserved)
        return -EINVAL;

    if (op->op == UVM_VMEM_OP_UNMAP && (op->handle || op->first))
        return -EINVAL;

    if (op->first + op->count < op->first)
        return -EOVERFLOW;

    return 0;
}

// LOCKING: Caller holds state->lock.
static int check_op_in_range(bind_t *bind, const struct uvm_vmem_op *op, bind_op_t *out)
{
    uvm_vmem_range_t *range = bind->range;
    NvU32 page_shift = range->page_shift;
    NvU64 length;
    NvU32 i;
    int ret;

    if ((op->flags & UVM_VMEM_OP_LARGE) && !range->big)
        return -EINVAL;

    if (op->op == UVM_VMEM_OP_MAP) {
        ret = uvm_vmem_object_find(bind->state, op->handle, &out->object);
        if (ret)
            return ret;

        if (out->object->dead)
            return -ENODEV;

        if (out->object->page_shift < page_shift)
            return -EINVAL;

        page_shift = out->object->page_shift;
        if (op->first + op->count > out->object->count)
            return -ERANGE;

        out->object_unit = (NvU64)op->first << (page_shift - UVM_VMEM_UNIT_SHIFT);
    }

    length = (NvU64)op->count << page_shift;
    if (!IS_ALIGNED(op->addr, 1ull << page_shift))
        return -EINVAL;

    if (op->addr + length < op->addr)
        return -EOVERFLOW;

    if (op->addr < range->start || op->addr - range->start > range->length ||
        length > range->length - (op->addr - range->start))
        return -ERANGE;

    for (i = 0; i < range->gpu_count; i++) {
        uvm_gpu_t *gpu = range->gpus[i].gpu;
        uvm_gpu_t *owner = out->object ? out->object->store->gpu : NULL;

        if (op->op == UVM_VMEM_OP_UNMAP) {
            if ((op->flags & UVM_VMEM_OP_SPARSE) && range->gpus[i].tree && !uvm_vmem_gpu_has_sparse(gpu))
                return -EOPNOTSUPP;
            continue;
        }

        if (!range->gpus[i].tree)
            return -ENODEV;

        if (owner && owner != gpu &&
            !uvm_processor_mask_test(&bind->state->va_space->can_access[uvm_id_value(gpu->id)], owner->id))
            return -EXDEV;

        if (owner != gpu)
            range->remote = true;
    }

    out->first_unit = (op->addr - range->start) / UVM_VMEM_UNIT;
    out->num_units = length / UVM_VMEM_UNIT;
    out->op = op->op;
    out->flags = op->flags;
    return 0;
}

static int check_ops(bind_t *bind, const struct uvm_vmem_op *ops)
{
    NvU32 worked = 0;
    NvU64 units = 0;
    int ret = 0;
    NvU32 i;

    uvm_mutex_lock(&bind->state->lock);

    for (i = 0; i < bind->num_ops && !ret; i++) {
        bind_op_t *op = &bind->ops[i];

        uvm_vmem_step(bind->state, &worked, 1);

        bind->failed_op = i;
        op->number = i;
        ret = check_op_in_range(bind, &ops[i], op);
        if (!ret) {
            units += op->num_units;
            if (units > UVM_VMEM_MAX_BIND_UNITS)
                ret = -EMSGSIZE;
        }

        if (!ret && op->object)
            op->object->pins++;
        else if (ret)
            op->object = NULL;
    }

    bind->num_pinned = i;
    uvm_mutex_unlock(&bind->state->lock);
    return ret;
}

static void unpin_objects(bind_t *bind)
{
    NvU32 worked = 0;
    NvU32 i;

    uvm_mutex_lock(&bind->state->lock);

    for (i = 0; i < bind->num_pinned; i++) {
        uvm_vmem_object_t *object = bind->ops[i].object;

        if (!object)
            continue;

        object->pins--;
        uvm_vmem_object_put(bind->state, object, &bind->dead);
        uvm_vmem_step(bind->state, &worked, 1);
    }

    bind->num_pinned = 0;
    uvm_mutex_unlock(&bind->state->lock);
}

static int compare_ops(const void *a, const void *b)
{
    const bind_op_t *op_a = a;
    const bind_op_t *op_b = b;

    // Called up to two million times for 65,536 operations.
    cond_resched();

    if (op_a->first_unit != op_b->first_unit)
        return op_a->first_unit < op_b->first_unit ? -1 : 1;

    return op_a->number < op_b->number ? -1 : op_a->number > op_b->number;
}

static int sort_ops(bind_t *bind)
{
    NvU32 i;

    sort(bind->ops, bind->num_ops, sizeof(bind->ops[0]), compare_ops, NULL);

    for (i = 1; i < bind->num_ops; i++) {
        bind_op_t *op = &bind->ops[i];

        if (op[-1].first_unit + op[-1].num_units > op->first_unit) {
            bind->failed_op = max(op[-1].number, op->number);
            return -EINVAL;
        }
    }

    return 0;
}

static NvU64 op_first_slot(const bind_op_t *op)
{
    return op->first_unit / UVM_VMEM_SLOT_UNITS;
}

static NvU64 op_last_slot(const bind_op_t *op)
{
    return (op->first_unit + op->num_units - 1) / UVM_VMEM_SLOT_UNITS;
}

// Return true if the operation changes a slot that was never bound.
static bool op_needs_slot(const bind_op_t *op)
{
    return op->op == UVM_VMEM_OP_MAP || (op->flags & UVM_VMEM_OP_SPARSE);
}

static bool slot_is_bound(bind_t *bind, NvU64 index)
{
    return uvm_vmem_slot(bind->range, index) || uvm_vmem_slot_is_all_sparse(bind->range, index);
}

// The number of slots that the batch touches. The operations are sorted.
static NvU64 count_stages(bind_t *bind)
{
    NvU64 count = 0;
    NvU64 next = 0;
    NvU64 slot;
    NvU32 i;

    for (i = 0; i < bind->num_ops; i++) {
        bind_op_t *op = &bind->ops[i];

        for (slot = max(next, op_first_slot(op)); slot <= op_last_slot(op); slot++) {
            if (!slot_is_bound(bind, slot) && !op_needs_slot(op))
                continue;

            count++;
            next = slot + 1;
            cond_resched();
        }
    }

    return count;
}

static uvm_vmem_entry_t op_entry(const bind_op_t *op, NvU64 unit)
{
    uvm_vmem_entry_t entry;

    if (op->op == UVM_VMEM_OP_UNMAP)
        return (op->flags & UVM_VMEM_OP_SPARSE) ? UVM_VMEM_ENTRY_SPARSE : 0;

    entry = UVM_VMEM_ENTRY_MAPPED;
    if (op->flags & UVM_VMEM_OP_READ_ONLY)
        entry |= UVM_VMEM_ENTRY_READ_ONLY;
    entry |= (uvm_vmem_entry_t)op->object->index << UVM_VMEM_ENTRY_INDEX_SHIFT;
    entry |= (op->object_unit + unit - op->first_unit) << UVM_VMEM_ENTRY_UNIT_SHIFT;
    return entry;
}

// Start a stage from the slot's current content.
static void stage_begin(bind_t *bind, bind_stage_t *stage)
{
    uvm_vmem_slot_t *slot = uvm_vmem_slot(bind->range, stage->index);
    NvU32 i;

    if (slot) {
        memcpy(stage->entries, slot->entries, sizeof(stage->entries));
    }
    else if (uvm_vmem_slot_is_all_sparse(bind->range, stage->index)) {
        for (i = 0; i < UVM_VMEM_SLOT_UNITS; i++)
            stage->entries[i] = UVM_VMEM_ENTRY_SPARSE;
    }
}

// Apply an operation to the staged content of one slot.
static int stage_op(bind_t *bind, const bind_op_t *op, bind_stage_t *stage)
{
    NvU64 slot_unit = stage->index * UVM_VMEM_SLOT_UNITS;
    NvU64 first = max(op->first_unit, slot_unit);
    NvU64 end = min(op->first_unit + op->num_units, slot_unit + UVM_VMEM_SLOT_UNITS);
    NvU64 unit;

    stage->named |= GENMASK(end - 1 - slot_unit, first - slot_unit);
    stage->whole = op->op == UVM_VMEM_OP_MAP && end - first == UVM_VMEM_SLOT_UNITS;
    stage->cut = stage->cut || (op->flags & UVM_VMEM_OP_CUT);
    if (op->flags & UVM_VMEM_OP_LARGE) {
        stage->large = true;
        stage->large_op = op->number;
    }

    for (unit = first; unit < end; unit++) {
        uvm_vmem_entry_t *entry = &stage->entries[unit - slot_unit];
        uvm_vmem_entry_t new_entry = op_entry(op, unit);

        if (*entry & UVM_VMEM_ENTRY_MAPPED) {
            if (op->op == UVM_VMEM_OP_MAP && !(op->flags & UVM_VMEM_OP_REPLACE)) {
                bind->failed_op = op->number;
                return -EEXIST;
            }
            bind->unmaps = true;
        }

        if (*entry != new_entry) {
            *entry = new_entry;
            stage->touched |= 1u << (unit - slot_unit);
            if (!(op->flags & UVM_VMEM_OP_CUT)) {
                stage->uncut = true;
                stage->uncut_op = op->number;
            }
        }
    }

    return 0;
}

// Choose the state of the slot's entry in the parent table, after all operations on the slot.
//
// When that entry changes between a 2 MB PTE and a table, the whole slot is invalid for a moment. Only addresses that
// the batch names may see that, unless the caller has said (CUT) that nothing uses the others.
static int stage_state(bind_t *bind, bind_stage_t *stage)
{
    uvm_vmem_slot_t *slot = uvm_vmem_slot(bind->range, stage->index);

    stage->state = uvm_vmem_slot_target(bind->range,
                                        stage->index,
                                        stage->entries,
                                        stage->whole,
                                        stage->large,
                                        stage->cut);
    if (stage->large && (~stage->named || stage->state != UVM_VMEM_SLOT_BIG)) {
        bind->failed_op = stage->large_op;
        return -EADDRNOTAVAIL;
    }

    if (!slot || slot->state == stage->state)
        return 0;

    if (slot->state == UVM_VMEM_SLOT_BIG && ~stage->named && stage->uncut) {
        bind->failed_op = stage->uncut_op;
        return -EADDRINUSE;
    }

    // The PTE size changes, so the entries of all units change, even if they map the same pages.
    if (stage->state == UVM_VMEM_SLOT_BIG || slot->state == UVM_VMEM_SLOT_BIG)
        stage->touched = ~0u;

    return 0;
}

static int stage_ops(bind_t *bind)
{
    NvU64 max_stages = count_stages(bind);
    bind_stage_t *stage = NULL;
    NvU64 slot;
    NvU32 i;
    int ret;

    bind->stages = uvm_vmem_alloc(bind->state, max(max_stages, 1ull) * sizeof(bind->stages[0]));
    if (!bind->stages)
        return -ENOMEM;

    for (i = 0; i < bind->num_ops; i++) {
        bind_op_t *op = &bind->ops[i];

        for (slot = op_first_slot(op); slot <= op_last_slot(op); slot++) {
            if (!stage || stage->index != slot) {
                if (!slot_is_bound(bind, slot) && !op_needs_slot(op))
                    continue;

                UVM_ASSERT(bind->num_stages < max_stages);
                stage = &bind->stages[bind->num_stages++];
                stage->index = slot;
                stage_begin(bind, stage);
            }

            ret = stage_op(bind, op, stage);
            if (ret)
                return ret;
            cond_resched();
        }
    }

    for (slot = 0; slot < bind->num_stages; slot++) {
        ret = stage_state(bind, &bind->stages[slot]);
        if (ret)
            return ret;
        cond_resched();
    }

    return 0;
}

// Let every GPU of the reservation reach the host memory that the batch maps.
static int prepare_host_memory(bind_t *bind)
{
    uvm_vmem_range_t *range = bind->range;
    NvU32 worked = 0;
    int ret = 0;
    NvU32 i, j, unit;
    NvU64 k;

    uvm_mutex_lock(&bind->state->lock);

    for (i = 0; i < bind->num_ops && !ret; i++) {
        bind_op_t *op = &bind->ops[i];
        uvm_vmem_chunk_t *last = NULL;

        if (!op->object || op->object->store->gpu)
            continue;

        for (k = 0; k < op->num_units && !ret; k++) {
            uvm_vmem_chunk_t *chunk = uvm_vmem_object_unit(op->object, op->object_unit + k, &unit);

            uvm_vmem_step(bind->state, &worked, 1);
            if (chunk == last)
                continue;

            last = chunk;
            for (j = 0; j < range->gpu_count && !ret; j++)
                ret = uvm_vmem_chunk_map_host(chunk, range->gpus[j].gpu);
        }
    }

    uvm_mutex_unlock(&bind->state->lock);
    return ret;
}

static int prepare_tables(bind_t *bind)
{
    uvm_vmem_range_t *range = bind->range;
    bool new_tables = false;
    int ret = 0;
    int waited;
    NvU64 i;

    for (i = 0; i < bind->num_stages && !ret; i++) {
        bind_stage_t *stage = &bind->stages[i];

        if (!stage->touched)
            continue;

        cond_resched();
        if (fatal_signal_pending(current))
            ret = -EINTR;
        else if (stage->state == UVM_VMEM_SLOT_SPARSE)
            ret = uvm_vmem_slot_get_sparse(range, stage->index, &new_tables);
        else
            ret = uvm_vmem_slot_get(range, stage->index, &stage->made);

        new_tables = new_tables || stage->made;
    }

    // Wait even after a failure: directories of sparse slots are kept, and the next batch writes to them.
    if (new_tables) {
        waited = uvm_vmem_range_wait_tables(range);
        ret = ret ? ret : waited;
    }

    if (ret)
        return ret;

    for (i = 0; i < bind->num_stages; i++) {
        bind_stage_t *stage = &bind->stages[i];

        if (!stage->touched || stage->state != UVM_VMEM_SLOT_SMALL || !uvm_vmem_slot(range, stage->index)->has_entry)
            continue;

        cond_resched();
        ret = uvm_vmem_slot_get_small(range, stage->index);
        if (ret)
            return ret;
    }

    return 0;
}

static void unmake_slots(bind_t *bind)
{
    NvU64 i;
    bool any = false;

    for (i = 0; i < bind->num_stages; i++) {
        if (bind->stages[i].made) {
            uvm_vmem_slot_put(bind->range, bind->stages[i].index);
            any = true;
            cond_resched();
        }
    }

    if (any)
        (void)uvm_vmem_range_wait_tables(bind->range);
}

// Send the changes to one GPU.
static int send_to_gpu(bind_t *bind, NvU32 gpu_index, bool *sent)
{
    uvm_vmem_range_t *range = bind->range;
    uvm_vmem_writer_t writer;
    NvU64 i;
    int ret = 0;

    uvm_vmem_writer_begin(&writer, range, gpu_index);

    for (i = 0; i < bind->num_stages && !ret; i++) {
        bind_stage_t *stage = &bind->stages[i];

        ret = uvm_vmem_writer_slot(&writer, stage->index, stage->entries, stage->touched, stage->state);
        cond_resched();
    }

    if (!ret && writer.second_phase) {
        ret = uvm_vmem_writer_begin_phase2(&writer);
        for (i = 0; i < bind->num_stages && !ret; i++) {
            bind_stage_t *stage = &bind->stages[i];

            if (stage->touched)
                ret = uvm_vmem_writer_slot_phase2(&writer, stage->index, stage->entries, stage->state);
        }
    }

    if (!ret)
        ret = uvm_vmem_writer_end(&writer);

    *sent = *sent || writer.sent;
    return ret;
}

static int send(bind_t *bind)
{
    uvm_vmem_range_t *range = bind->range;
    bool sent = false;
    int ret = 0;
    NvU32 i;

    for (i = 0; i < range->gpu_count && !ret; i++) {
        if (range->gpus[i].tree)
            ret = send_to_gpu(bind, i, &sent);
    }

    if (ret && sent) {
        range->broken = true;
        uvm_vmem_debug_failed(range, ret);
    }

    return ret;
}

static void commit_stage(bind_t *bind, bind_stage_t *stage)
{
    uvm_vmem_range_t *range = bind->range;
    uvm_vmem_slot_t *slot = uvm_vmem_slot(range, stage->index);
    NvU32 units;

    // The unit was unmapped before.
    if (stage->state == UVM_VMEM_SLOT_SPARSE) {
        uvm_vmem_slot_set_sparse(range, stage->index);
        return;
    }

    for (units = stage->touched; units; units &= units - 1) {
        NvU32 i = __ffs(units);
        uvm_vmem_entry_t old_entry = slot->entries[i];

        // Take the new reference first: a page that replaces itself must not be freed in between.
        uvm_vmem_range_ref(range, stage->entries[i]);
        slot->entries[i] = stage->entries[i];
        uvm_vmem_range_unref(range, old_entry, &bind->dead);

        if (stage->entries[i] & UVM_VMEM_ENTRY_MAPPED)
            slot->mapped |= 1u << i;
        else
            slot->mapped &= ~(1u << i);
    }

    slot->state = stage->state;
}

// Make what was sent the reservation's recorded content. Cannot fail.
static void commit(bind_t *bind, NvU64 *ticket_out)
{
    uvm_vmem_range_t *range = bind->range;
    NvU32 worked = 0;
    NvU64 i;

    uvm_mutex_lock(&bind->state->lock);

    for (i = 0; i < range->gpu_count; i++)
        uvm_tracker_add_tracker_safe(&bind->tracker, &range->gpus[i].tracker);

    // Must precede the return of any page.
    if (bind->unmaps) {
        uvm_tracker_remove_completed(&bind->state->pending);
        uvm_tracker_add_tracker_safe(&bind->state->pending, &bind->tracker);
    }

    for (i = 0; i < bind->num_stages; i++) {
        bind_stage_t *stage = &bind->stages[i];

        if (!stage->touched)
            continue;

        commit_stage(bind, stage);
        uvm_vmem_step(bind->state, &worked, UVM_VMEM_SLOT_UNITS);
    }

    if (bind->ticket) {
        uvm_tracker_add_tracker_safe(&bind->ticket->tracker, &bind->tracker);
        *ticket_out = uvm_vmem_ticket_publish(bind->state, bind->ticket);
        bind->ticket = NULL;
    }

    uvm_mutex_unlock(&bind->state->lock);
    atomic64_inc(&bind->state->binds);
}

static void trace_ops(bind_t *bind)
{
    uvm_vmem_range_t *range = bind->range;
    NvU32 i;

    for (i = 0; i < bind->num_ops && trace_uvm_vmem_bind_op_enabled(); i++) {
        bind_op_t *op = &bind->ops[i];

        trace_uvm_vmem_bind_op(range->start,
                               range->length,
                               range->start + op->first_unit * UVM_VMEM_UNIT,
                               op->num_units * UVM_VMEM_UNIT,
                               op->op,
                               op->flags);
    }
}

// LOCKING: Caller has claimed the reservation and holds no lock.
static int bind_claimed(bind_t *bind, const struct uvm_vmem_op *ops, NvU64 *ticket_out)
{
    int ret;

    uvm_assert_unlocked_order(UVM_LOCK_ORDER_VA_SPACE);

    if (bind->range->broken)
        return -EIO;

    ret = check_ops(bind, ops);
    if (!ret)
        ret = sort_ops(bind);
    if (!ret)
        ret = stage_ops(bind);

    if (ret)
        return ret;

    // From here on, a failure is not attributed to a single operation.
    bind->failed_op = ~0u;
    uvm_vmem_debug_batch(bind->range,
                         bind->num_ops,
                         bind->ops[0].first_unit,
                         bind->ops[bind->num_ops - 1].first_unit + bind->ops[bind->num_ops - 1].num_units - 1);

    trace_ops(bind);

    ret = prepare_host_memory(bind);
    if (!ret)
        ret = prepare_tables(bind);
    if (!ret)
        ret = send(bind);

    if (!ret)
        commit(bind, ticket_out);
    else if (!bind->range->broken)
        unmake_slots(bind);

    trace_uvm_vmem_bind_sent(bind->range->start, ret);
    return ret;
}

int uvm_vmem_bind(uvm_vmem_state_t *state, struct uvm_vmem_bind *params, struct uvm_vmem_op *ops)
{
    bind_t bind = { .state = state, .num_ops = params->op_count, .failed_op = ~0u };
    NvU64 ticket = 0;
    bool waits;
    int ret = 0;
    NvU32 i;

    params->out_failed_op = ~0u;

    if (params->flags & ~UVM_VMEM_BIND_ASYNC)
        return -EOPNOTSUPP;

    if (!IS_ALIGNED(params->start, UVM_VMEM_SLOT))
        return -EINVAL;

    for (i = 0; i < params->op_count; i++) {
        ret = check_op_alone(&ops[i]);
        if (ret) {
            params->out_failed_op = i;
            return ret;
        }
        cond_resched();
    }

    INIT_LIST_HEAD(&bind.dead);
    uvm_tracker_init(&bind.tracker);
    bind.ops = uvm_vmem_alloc(state, params->op_count * sizeof(bind.ops[0]));
    if (!bind.ops)
        return -ENOMEM;

    if (params->flags & UVM_VMEM_BIND_ASYNC)
        ret = uvm_vmem_ticket_alloc(state, &bind.ticket);
    if (ret)
        goto out;

    ret = uvm_vmem_range_claim(state, params->start, &bind.range);
    if (ret)
        goto out;

    ret = bind_claimed(&bind, ops, &ticket);

    // The GPU may still map the objects of a failed batch: keep their pins until the descriptor is closed.
    if (!bind.range->broken)
        unpin_objects(&bind);

    // While this call waits, other calls may bind, but no GPU is removed.
    uvm_vmem_call_hold(state);
    uvm_vmem_range_unclaim(bind.range);
    waits = !ret && !(params->flags & UVM_VMEM_BIND_ASYNC);
    if (waits)
        ret = uvm_vmem_wait_killable(&bind.tracker);
    uvm_vmem_object_reap(state, &bind.dead);
    uvm_vmem_call_end(state);

    if (waits && ret == -EIO)
        uvm_vmem_debug_failed_at(state, params->start);

    params->out_failed_op = bind.failed_op;
    params->out_ticket = ticket;

out:
    if (bind.ticket) {
        uvm_mutex_lock(&state->lock);
        uvm_vmem_ticket_free(state, bind.ticket);
        uvm_mutex_unlock(&state->lock);
    }
    uvm_tracker_deinit(&bind.tracker);
    uvm_vmem_free(state, bind.stages);
    uvm_vmem_free(state, bind.ops);
    return ret;
}
