// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Statistics: STAT for one file descriptor, /proc/driver/nvidia-uvm/vmem for all of them. (uvm_vmem_debug.c dumps one
// reservation, entry by entry.)

#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#include "uvm_api.h"
#include "uvm_vmem_internal.h"

// All states. The mutex is taken with no other lock held; while it is held, other locks are only trylocked.
static LIST_HEAD(g_states);
static DEFINE_MUTEX(g_states_lock);

void uvm_vmem_stat_add(uvm_vmem_state_t *state)
{
    mutex_lock(&g_states_lock);
    list_add_tail(&state->node, &g_states);
    mutex_unlock(&g_states_lock);
}

void uvm_vmem_stat_remove(uvm_vmem_state_t *state)
{
    mutex_lock(&g_states_lock);
    list_del(&state->node);
    mutex_unlock(&g_states_lock);
}

int uvm_vmem_stat_visit(int (*visit)(uvm_vmem_state_t *state, void *data), void *data)
{
    uvm_vmem_state_t *state;
    int ret = 0;

    mutex_lock(&g_states_lock);
    list_for_each_entry(state, &g_states, node) {
        ret = visit(state, data);
        if (ret)
            break;
    }
    mutex_unlock(&g_states_lock);

    return ret;
}

// LOCKING: Caller holds state->lock.
static void add_store(struct uvm_vmem_stat *stat, uvm_vmem_store_t *store)
{
    NvU64 created = store->created_units * UVM_VMEM_UNIT;

    stat->out_created_bytes += created;
    stat->out_mapped_bytes += store->mapped_units * UVM_VMEM_UNIT;
    if (store->gpu)
        stat->out_chunk_bytes += store->num_chunks * UVM_VMEM_SLOT;
    else
        stat->out_host_bytes += created;
}

// Fill in the numbers of the descriptor and the sums over the stores from first to last.
//
// LOCKING: Caller holds state->lock; released on return.
static void fill_stat(uvm_vmem_state_t *state, struct uvm_vmem_stat *stat, NvU32 first, NvU32 last)
{
    NvU32 i;

    uvm_assert_mutex_locked(&state->lock);

    for (i = first; i <= last; i++) {
        if (state->stores[i])
            add_store(stat, state->stores[i]);
    }

    stat->out_objects = state->num_objects;
    stat->out_tickets = state->num_tickets;
    stat->out_most_units = state->most_units;

    uvm_mutex_unlock(&state->lock);

    stat->out_reserved_bytes = atomic64_read(&state->reserved_bytes);
    stat->out_kernel_bytes = atomic64_read(&state->kernel_bytes);
    stat->out_table_bytes = atomic64_read(&state->charged[UVM_VMEM_ACCOUNT_TABLES]);
    stat->out_reservations = atomic64_read(&state->reservations);
    stat->out_slots = atomic64_read(&state->slots);
    stat->out_binds = atomic64_read(&state->binds);
    stat->out_pushes = atomic64_read(&state->pushes);
    stat->out_invalidates = atomic64_read(&state->invalidates);
    stat->out_pte_writes = atomic64_read(&state->pte_writes);
    stat->out_table_waits = atomic64_read(&state->table_waits);
    stat->out_zeroed_bytes = atomic64_read(&state->zeroed_bytes);
}

int uvm_vmem_stat(uvm_vmem_state_t *state, struct uvm_vmem_stat *params)
{
    uvm_gpu_t *gpu;
    int ret = 0;

    if (params->flags & ~UVM_VMEM_STAT_GPU)
        return -EOPNOTSUPP;

    if (!(params->flags & UVM_VMEM_STAT_GPU)) {
        if (memchr_inv(params->gpu_uuid, 0, sizeof(params->gpu_uuid)))
            return -EINVAL;

        uvm_mutex_lock(&state->lock);
        fill_stat(state, params, 0, UVM_VMEM_STORES - 1);
        return 0;
    }

    uvm_va_space_down_read(state->va_space);

    ret = uvm_vmem_find_gpu(state, params->gpu_uuid, &gpu);
    if (!ret) {
        NvU32 index = 1 + uvm_id_gpu_index(gpu->id);

        uvm_mutex_lock(&state->lock);
        fill_stat(state, params, index, index);
    }

    uvm_va_space_up_read(state->va_space);
    return ret;
}

static int show_states(struct seq_file *file)
{
    uvm_vmem_state_t *state;

    seq_puts(file, "# pid reservations reserved_kb objects created_kb mapped_kb gpu_kb host_kb slots kernel_kb binds command\n");

    mutex_lock(&g_states_lock);
    list_for_each_entry(state, &g_states, node) {
        struct uvm_vmem_stat stat = { 0 };

        // A call that waits for a GPU must not block readers of this file, which would block every open and close.
        if (!uvm_mutex_trylock(&state->lock)) {
            seq_printf(file, "%d busy\n", state->process);
            continue;
        }

        fill_stat(state, &stat, 0, UVM_VMEM_STORES - 1);
        seq_printf(file,
                   "%d %u %llu %u %llu %llu %llu %llu %u %llu %llu %s\n",
                   state->process,
                   stat.out_reservations,
                   stat.out_reserved_bytes >> 10,
                   stat.out_objects,
                   stat.out_created_bytes >> 10,
                   stat.out_mapped_bytes >> 10,
                   stat.out_chunk_bytes >> 10,
                   stat.out_host_bytes >> 10,
                   stat.out_slots,
                   stat.out_kernel_bytes >> 10,
                   stat.out_binds,
                   state->command);
    }
    mutex_unlock(&g_states_lock);

    return 0;
}

static int procfs_show(struct seq_file *file, void *unused)
{
    UVM_ENTRY_RET(show_states(file));
}

void uvm_vmem_stat_procfs_init(struct proc_dir_entry *dir)
{
    // A failure is ignored: only the file is missing then.
    (void)proc_create_single("vmem", S_IRUSR, dir, procfs_show);
}
