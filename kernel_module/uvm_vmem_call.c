// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Shared by all calls: errors, begin and end (between which no GPU is unregistered), dropping a lock between steps,
// waiting for a GPU by polling, and checks for unsupported GPUs.

#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/sched/signal.h>

#include "uvm_global.h"
#include "uvm_vmem_internal.h"

// UVM detects completion by polling a semaphore in memory: its channels raise no interrupt, and it offers no hook. So a
// waiter polls too: it spins for about as long as most batches take (estimated from UVM's own pushes), then sleeps for
// a fraction of the time waited so far, which bounds the relative overshoot.
#define PAUSE_SPIN_NS 20000ull
#define PAUSE_PART    4
#define PAUSE_MIN_NS  5000ull
#define PAUSE_MAX_NS  10000000ull

int uvm_vmem_errno(NV_STATUS status, int out_of_memory)
{
    switch (status) {
        case NV_OK:
            return 0;
        case NV_ERR_NO_MEMORY:
        case NV_ERR_INSUFFICIENT_RESOURCES:
            return out_of_memory;
        case NV_ERR_UVM_ADDRESS_IN_USE:
            return -EEXIST;
        case NV_ERR_INVALID_ADDRESS:
        case NV_ERR_OUT_OF_RANGE:
            return -ERANGE;
        case NV_ERR_INVALID_DEVICE:
            return -ENODEV;
        case NV_ERR_BUSY_RETRY:
            return -EAGAIN;
        default:
            return -EIO;
    }
}

void uvm_vmem_call_hold(uvm_vmem_state_t *state)
{
    uvm_mutex_lock(&state->lock);
    state->calls++;
    uvm_mutex_unlock(&state->lock);
}

void uvm_vmem_call_begin(uvm_vmem_state_t *state)
{
    uvm_assert_rwsem_locked(&state->va_space->lock);

    uvm_vmem_call_hold(state);
}

void uvm_vmem_call_end(uvm_vmem_state_t *state)
{
    uvm_mutex_lock(&state->lock);
    state->calls--;

    // Wake under the lock: once a waiter sees that no call is left, the state may be freed.
    wake_up_all(&state->wait);
    uvm_mutex_unlock(&state->lock);
}

void uvm_vmem_call_drain(uvm_vmem_state_t *state)
{
    uvm_assert_rwsem_locked_write(&state->va_space->lock);

    uvm_vmem_wait_event(state, READ_ONCE(state->calls) == 0);
}

void uvm_vmem_step(uvm_vmem_state_t *state, NvU32 *units, NvU32 more)
{
    uvm_assert_mutex_locked(&state->lock);
    UVM_ASSERT(more <= UVM_VMEM_SLOT_UNITS);

    *units += more;
    state->most_units = max(state->most_units, *units);

    if (*units + UVM_VMEM_SLOT_UNITS <= UVM_VMEM_STEP_UNITS)
        return;

    uvm_mutex_unlock(&state->lock);
    cond_resched();
    uvm_mutex_lock(&state->lock);
    *units = 0;
}

void uvm_vmem_pause(NvU64 waited_ns, NvU64 left_ns)
{
    NvU64 pause_us = min(clamp(waited_ns / PAUSE_PART, PAUSE_MIN_NS, PAUSE_MAX_NS), left_ns) / NSEC_PER_USEC;

    if (waited_ns < PAUSE_SPIN_NS)
        cpu_relax();
    else
        usleep_range(max(pause_us, 1ull), max(pause_us, 1ull) * 5 / 4 + 1);
}

int uvm_vmem_wait_killable(uvm_tracker_t *tracker)
{
    NvU64 start = ktime_get_ns();

    while (true) {
        NV_STATUS status = uvm_tracker_query(tracker);

        if (status != NV_WARN_MORE_PROCESSING_REQUIRED)
            return uvm_vmem_errno(status, -EIO);

        if (fatal_signal_pending(current))
            return -EINTR;

        uvm_vmem_pause(ktime_get_ns() - start, ~0ull);
    }
}

bool uvm_vmem_page_shift_is_valid(NvU32 page_shift)
{
    return page_shift < 32 && ((1u << page_shift) & UVM_VMEM_PAGE_SIZES);
}

NvU32 uvm_vmem_gpu_refusal(uvm_va_space_t *va_space, uvm_gpu_t *gpu)
{
    uvm_page_tree_t *tree = &uvm_gpu_va_space_get(va_space, gpu)->page_tables;
    NvU64 needed_sizes = UVM_PAGE_SIZE_64K | UVM_PAGE_SIZE_2M;

    if (g_uvm_global.conf_computing_enabled)
        return UVM_VMEM_GPU_CONFIDENTIAL;
    if (gpu->parent->virt_mode != UVM_VIRT_MODE_NONE)
        return UVM_VMEM_GPU_VIRTUAL;
    if (gpu->parent->smc.enabled)
        return UVM_VMEM_GPU_MIG;
    if (uvm_vmem_gpu_is_coherent(gpu))
        return UVM_VMEM_GPU_COHERENT;
    if (gpu->mem_info.size == 0)
        return UVM_VMEM_GPU_INTEGRATED;

    // GPUs before Pascal have no 2 MB pages, and their tables of 64 KB PTEs cover more than one slot.
    if ((tree->hal->page_sizes() & needed_sizes) != needed_sizes || uvm_vmem_big_page_size(tree) != UVM_PAGE_SIZE_64K ||
        uvm_mmu_pde_coverage(tree, UVM_PAGE_SIZE_64K) != UVM_VMEM_SLOT)
        return UVM_VMEM_GPU_NO_64K;

    return UVM_VMEM_GPU_OK;
}

uvm_gpu_t *uvm_vmem_gpu_of_uuid(uvm_va_space_t *va_space, const __u8 *uuid)
{
    NvProcessorUuid processor_uuid;

    BUILD_BUG_ON(sizeof(processor_uuid.uuid) != UVM_VMEM_UUID_BYTES);
    memcpy(processor_uuid.uuid, uuid, sizeof(processor_uuid.uuid));

    return uvm_va_space_get_gpu_by_uuid_with_gpu_va_space(va_space, &processor_uuid);
}

int uvm_vmem_find_gpu(uvm_vmem_state_t *state, const __u8 *uuid, uvm_gpu_t **gpu_out)
{
    uvm_gpu_t *gpu = uvm_vmem_gpu_of_uuid(state->va_space, uuid);

    if (!gpu)
        return -ENODEV;

    if (uvm_vmem_gpu_refusal(state->va_space, gpu) != UVM_VMEM_GPU_OK)
        return -EOPNOTSUPP;

    *gpu_out = gpu;
    return 0;
}
