// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Objects: the pages of one CREATE, and the table in which handles are looked up.
//
// An object lives until its handle is released, none of its units is mapped and no BIND uses it. Its index stays in use
// that long, because entries refer to objects by index. Indices are allocated cyclically, and a handle also holds the
// number of wraps, so an old handle never refers to a new object. (After 2^32 handles, -ESTALE, released, and -ENOENT,
// never existed, can no longer be told apart.)

#include "uvm_global.h"
#include "uvm_vmem_internal.h"

static NvU32 handle_index(NvU32 handle)
{
    return handle & UVM_VMEM_INDEX_MAX;
}

int uvm_vmem_object_find(uvm_vmem_state_t *state, NvU32 handle, uvm_vmem_object_t **object_out)
{
    uvm_vmem_object_t *object;

    uvm_assert_mutex_locked(&state->lock);

    object = handle_index(handle) ? xa_load(&state->objects, handle_index(handle)) : NULL;
    if (!object || object->handle != handle) {
        bool given = handle_index(handle) && handle >= UVM_VMEM_INDEX_FIRST && handle <= state->last_handle;

        return given ? -ESTALE : -ENOENT;
    }

    if (object->released)
        return -ESTALE;

    *object_out = object;
    return 0;
}

// An entry's object lives while the entry exists, so concurrent changes of the table are harmless.
uvm_vmem_object_t *uvm_vmem_object_of_entry(uvm_vmem_state_t *state, uvm_vmem_entry_t entry)
{
    UVM_ASSERT(entry & UVM_VMEM_ENTRY_MAPPED);

    return xa_load(&state->objects, (entry >> UVM_VMEM_ENTRY_INDEX_SHIFT) & UVM_VMEM_INDEX_MAX);
}

uvm_vmem_chunk_t *uvm_vmem_object_unit(uvm_vmem_object_t *object, NvU64 unit, NvU32 *unit_out)
{
    NvU32 page_order = object->page_shift - UVM_VMEM_UNIT_SHIFT;
    unsigned long page = object->pages[unit >> page_order];

    *unit_out = uvm_vmem_page_unit(page) + (unit & ((1u << page_order) - 1));
    return uvm_vmem_page_chunk(page);
}

static void object_remove(uvm_vmem_state_t *state, uvm_vmem_object_t *object, struct list_head *dead)
{
    xa_erase(&state->objects, object->index);
    state->num_objects--;
    list_add_tail(&object->node, dead);
}

void uvm_vmem_object_put(uvm_vmem_state_t *state, uvm_vmem_object_t *object, struct list_head *dead)
{
    uvm_assert_mutex_locked(&state->lock);

    if (object->released && object->mapped_units == 0 && object->pins == 0)
        object_remove(state, object, dead);
}

// Return all pages of an object to its store.
//
// LOCKING: Takes state->lock.
static void object_give_pages(uvm_vmem_state_t *state, uvm_vmem_object_t *object)
{
    LIST_HEAD(unused);

    uvm_mutex_lock(&state->lock);
    uvm_vmem_store_give(state, object->page_shift, object->count, object->pages, &unused);
    uvm_mutex_unlock(&state->lock);

    uvm_vmem_store_free_unused(state, &unused);
}

void uvm_vmem_object_reap(uvm_vmem_state_t *state, struct list_head *dead)
{
    uvm_vmem_object_t *object, *next;

    list_for_each_entry_safe(object, next, dead, node) {
        if (!object->dead)
            object_give_pages(state, object);

        list_del(&object->node);
        uvm_vmem_free(state, object);
        cond_resched();
    }
}

// Publish a finished object in the table: from here on its handle is valid, and another thread may release it.
static int object_publish(uvm_vmem_state_t *state, uvm_vmem_object_t *object, NvU32 *handle_out)
{
    int ret;

    uvm_mutex_lock(&state->lock);

    ret = xa_alloc_cyclic(&state->objects,
                          &object->index,
                          object,
                          XA_LIMIT(1, UVM_VMEM_INDEX_MAX),
                          &state->next_index,
                          GFP_KERNEL | __GFP_RETRY_MAYFAIL);
    if (ret >= 0) {
        // Since 6.16 xa_alloc_cyclic no longer reports that the index wrapped.
        if (object->index <= handle_index(state->last_handle))
            state->generation++;
        object->handle = (state->generation << UVM_VMEM_INDEX_BITS) | object->index;
        state->last_handle = object->handle;
        *handle_out = object->handle;
        state->num_objects++;
    }

    uvm_mutex_unlock(&state->lock);

    // -EBUSY: all indices are in use.
    return ret == -EBUSY ? -ENOMEM : min(ret, 0);
}

int uvm_vmem_create(uvm_vmem_state_t *state, struct uvm_vmem_create *params)
{
    bool contiguous = params->flags & UVM_VMEM_CREATE_CONTIGUOUS;
    bool host = params->flags & UVM_VMEM_CREATE_HOST;
    uvm_vmem_object_t *object;
    NvU32 handle = 0;
    uvm_gpu_t *gpu;
    int ret;

    if (params->flags & ~(UVM_VMEM_CREATE_HOST | UVM_VMEM_CREATE_CONTIGUOUS))
        return -EOPNOTSUPP;

    if (params->__reserved || params->count == 0 || !uvm_vmem_page_shift_is_valid(params->page_shift))
        return -EINVAL;

    if (params->count > UVM_VMEM_MAX_CREATE_PAGES)
        return -EMSGSIZE;

    object = uvm_vmem_alloc(state, sizeof(*object) + params->count * sizeof(object->pages[0]));
    if (!object)
        return -ENOMEM;

    object->page_shift = params->page_shift;
    object->contiguous = contiguous;
    object->count = params->count;

    uvm_va_space_down_read(state->va_space);

    ret = uvm_vmem_find_gpu(state, params->gpu_uuid, &gpu);
    if (!ret)
        uvm_vmem_call_begin(state);

    uvm_va_space_up_read(state->va_space);
    if (ret) {
        uvm_vmem_free(state, object);
        return ret;
    }

    uvm_assert_unlocked_order(UVM_LOCK_ORDER_VA_SPACE);
    uvm_mutex_lock(&state->lock);
    object->store = uvm_vmem_store_get(state, host ? NULL : gpu);
    uvm_mutex_unlock(&state->lock);
    if (!object->store) {
        ret = -ENOMEM;
        goto out;
    }

    ret = uvm_vmem_store_take(state, object->store, gpu, object->page_shift, object->count, contiguous, object->pages);
    if (ret)
        goto out;

    ret = uvm_vmem_store_zero(state, gpu, object->page_shift, object->count, object->pages);
    if (!ret)
        ret = object_publish(state, object, &handle);

    if (ret) {
        object_give_pages(state, object);
        goto out;
    }

    params->out_handle = handle;

out:
    if (ret)
        uvm_vmem_free(state, object);
    uvm_vmem_call_end(state);
    return ret;
}

int uvm_vmem_release(uvm_vmem_state_t *state, const struct uvm_vmem_release *params)
{
    uvm_vmem_object_t *object;
    LIST_HEAD(dead);
    int ret;

    if (params->flags)
        return -EOPNOTSUPP;

    if (params->__reserved)
        return -EINVAL;

    // Keep the pages' GPU registered until the call ends: the pages may be returned to it.
    uvm_va_space_down_read(state->va_space);
    uvm_vmem_call_begin(state);
    uvm_va_space_up_read(state->va_space);

    uvm_mutex_lock(&state->lock);
    ret = uvm_vmem_object_find(state, params->handle, &object);
    if (!ret) {
        object->released = true;
        uvm_vmem_object_put(state, object, &dead);
    }
    uvm_mutex_unlock(&state->lock);

    uvm_vmem_object_reap(state, &dead);
    uvm_vmem_call_end(state);
    return ret;
}

void uvm_vmem_object_remove_gpu(uvm_vmem_state_t *state, uvm_gpu_t *gpu)
{
    uvm_vmem_object_t *object;
    unsigned long index;

    // No call is in flight, not even RELEASE, so the table of objects does not change.
    uvm_assert_rwsem_locked_write(&state->va_space->lock);

    xa_for_each(&state->objects, index, object) {
        if (object->dead || object->store->gpu != gpu)
            continue;

        UVM_ASSERT(object->mapped_units == 0);

        // A batch that left its reservation broken keeps its pins.
        UVM_ASSERT(object->pins == 0 || uvm_global_get_status() != NV_OK);
        object_give_pages(state, object);
        object->dead = true;
        object->store = NULL;
    }
}

void uvm_vmem_object_destroy_all(uvm_vmem_state_t *state)
{
    uvm_vmem_object_t *object;
    unsigned long index;
    NvU32 worked = 0;
    LIST_HEAD(dead);

    uvm_mutex_lock(&state->lock);
    xa_for_each(&state->objects, index, object) {
        object_remove(state, object, &dead);
        uvm_vmem_step(state, &worked, 1);
    }
    uvm_mutex_unlock(&state->lock);

    uvm_vmem_object_reap(state, &dead);
    xa_destroy(&state->objects);
}
