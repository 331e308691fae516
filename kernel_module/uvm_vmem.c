// SPDX-License-Identifier: MIT OR GPL-2.0
//
// vmem: fine-grained GPU memory for address ranges that stay contiguous.
//
// The interface is in uvm_vmem_ioctl.h. This file parses and dispatches the ioctls; each of the other files has one
// task, and no two files call each other:
//
//   uvm_vmem_call.c    shared by all calls: begin and end, waiting for a GPU, checks for unsupported GPUs
//   uvm_vmem_account.c kernel memory: charged to the process's memory cgroup, and limited for each user and cgroup
//   uvm_vmem_memory.c  stores and chunks: 2 MB pieces of physical memory, cut into units of 64 KB
//   uvm_vmem_object.c  objects: the pages of one CREATE, and the table of handles
//   uvm_vmem_range.c   reservations: creation and every path that destroys them
//   uvm_vmem_table.c   page tables, and the pushes that write them
//   uvm_vmem_bind.c    BIND
//   uvm_vmem_ticket.c  BINDs in flight, and WAIT
//   uvm_vmem_stat.c    STAT and the procfs file
//   uvm_vmem_debug.c   kernel log messages, and the dump of a reservation
//   uvm_vmem_compat.h  the differences between driver branches
//
// Objects and their lifetimes
//
//   uvm_vmem_va_space_t  in each VA space, from UVM_INITIALIZE to close. Records the owning process.
//   uvm_vmem_state_t     the vmem state of a VA space; created by the first command, freed with the VA space.
//   uvm_vmem_range_t     a reservation; held by an external VA range, which destroys it.
//   uvm_vmem_slot_t      2 MB of a reservation, once bound: its page tables and the content of each PTE. Kept
//                        until the reservation is freed, so that a steady state writes PTEs only. While all of it is
//                        sparse it is only a mark in its leaf (UVM_VMEM_SLOT_ALL_SPARSE).
//   uvm_vmem_object_t    pages; alive until its handle is released and none of its units is mapped.
//   uvm_vmem_chunk_t     2 MB of physical memory; alive while one of its units belongs to an object (after a fatal error:
//                        until close).
//   uvm_vmem_ticket_t    an unfinished BIND, until its completion is observed.
//
// Locks, in this order
//
//   VA space lock   read: to find a reservation or a GPU, and to begin a call; nothing else. GPU fault handling needs
//                   it, for other processes too. write: RESERVE and FREE, to insert and remove a range, and the hooks
//                   that remove GPUs, page trees and ranges.
//   state->lock     (UVM_LOCK_ORDER_VMEM) protects objects, stores, chunks, tickets, claims. Dropped after at most
//                   4,096 units (uvm_vmem_step).
//   then UVM's own: page tree, push, PMM.
//
// Long work holds neither lock: it runs as a call (uvm_vmem_call_begin), during which no GPU is removed. A reservation
// belongs to one call at a time (uvm_vmem_range_claim): BIND, FREE and an eager RESERVE claim it.
//
// These hold a lock for longer than one push or 4,096 units, or wait for the GPU or a call while holding it:
//
//   UVM_FREE of a reservation                  VA space lock, write: waits for a call on it to end, then frees the page
//                                              tables one by one
//   a GPU or its VA space is unregistered,     VA space lock, write: waits for all calls and tickets, then removes page
//   peer access ends                           tables and mappings in all reservations, and the GPU's pages
//   a tracker cannot allocate memory           state->lock: waits for the pushes instead of recording them
//   uvm_page_tree_alloc_table                  UVM's page tree lock, of one address space: until the tree's own pushes
//                                              complete
//
// User memory is accessed with no lock held: a fault on managed memory takes mmap_lock and the VA space lock.
//
// Physical memory and the GPU's TLBs
//
// A push that removes translations is added to state->pending before the pages lose their references. Memory is reused
// only after that push: the push that zeroes a page acquires it, and a chunk is returned to the PMM or the kernel only
// after waiting for it, without a lock. So even an ASYNC batch never lets a page reach another owner while a GPU could
// still see it.
//
// Trade-offs
//
// - Zeroing at CREATE, not in the background: a page is never handed out dirty, at the cost of a memset in each CREATE.
// - All sparse slots of a descriptor share one table of 32 sparse PTEs on a GPU. Mapping a page in such a slot first
//   fills a private table, then switches the slot to it with one write, so that concurrent reads of the slot's other,
//   still sparse pages never fault. A 2 MB sparse entry would be smaller but could not be replaced like that. A slot
//   never returns to the shared table: UVM's page tree cannot free a table without clearing the entry that points to
//   it.
// - A slot records 32 entries of 8 bytes even if only one of its pages is used: these 256 bytes per 2 MB of addresses
//   make a batch's final values, its undo and its accounting trivial.
// - Chunks belong to one file descriptor: two processes never share 2 MB, and what a process leaves behind is zeroed by
//   us or by the PMM's next user.

#include <linux/module.h>
#include <linux/sched/mm.h>
#include <linux/uaccess.h>

#include "uvm_global.h"
#include "uvm_vmem_internal.h"
#include "uvm_vmem_trace.h"

MODULE_INFO(vmem_abi, __stringify(UVM_VMEM_ABI_VERSION));

// The sizes of version 1, the smallest accepted, and the layouts that user space relies on.
#define QUERY_SIZE_1   120
#define RESERVE_SIZE_1 40
#define FREE_SIZE_1    16
#define CREATE_SIZE_1  40
#define RELEASE_SIZE_1 16
#define BIND_SIZE_1    40
#define WAIT_SIZE_1    24
#define STAT_SIZE_1    136

// A larger struct is a caller's error, whatever it contains.
#define MAX_STRUCT_SIZE 4096

#define CAPABILITIES                                                                                                    \
    (UVM_VMEM_CAP_HOST | UVM_VMEM_CAP_PEER | UVM_VMEM_CAP_MULTI_GPU | UVM_VMEM_CAP_READ_ONLY | UVM_VMEM_CAP_SPARSE |    \
     UVM_VMEM_CAP_REPLACE | UVM_VMEM_CAP_BIG | UVM_VMEM_CAP_ASYNC | UVM_VMEM_CAP_LARGE)

typedef union
{
    __u32 size;
    struct uvm_vmem_query query;
    struct uvm_vmem_reserve reserve;
    struct uvm_vmem_free free;
    struct uvm_vmem_create create;
    struct uvm_vmem_release release;
    struct uvm_vmem_bind bind;
    struct uvm_vmem_wait wait;
    struct uvm_vmem_stat stat;
} params_t;

typedef struct
{
    NvU32 size;
    NvU32 min_size;

    // The struct has output fields, written on success. With out_on_failure they are also written on failure.
    bool has_out;
    bool out_on_failure;

    // Also works after a fatal UVM error.
    bool after_error;

    // state is NULL for QUERY only.
    int (*run)(struct file *filp, uvm_vmem_state_t *state, params_t *params);

    // Undoes run() when its result could not be copied out.
    void (*undo)(uvm_vmem_state_t *state, params_t *params);
} command_t;

static int run_query(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    struct uvm_vmem_query *query = &params->query;
    uvm_va_space_t *va_space = uvm_fd_va_space(filp);
    int ret = 0;

    if (query->flags & ~UVM_VMEM_QUERY_GPU)
        return -EOPNOTSUPP;

    if (query->__reserved)
        return -EINVAL;

    if (!(query->flags & UVM_VMEM_QUERY_GPU)) {
        if (memchr_inv(query->gpu_uuid, 0, sizeof(query->gpu_uuid)))
            return -EINVAL;
    }
    else {
        uvm_gpu_t *gpu;

        if (!va_space)
            return -EBADFD;
        if (va_space->vmem.owner != current->mm)
            return -EPERM;

        uvm_va_space_down_read(va_space);
        gpu = uvm_vmem_gpu_of_uuid(va_space, query->gpu_uuid);
        if (gpu)
            query->out_gpu_refusal = uvm_vmem_gpu_refusal(va_space, gpu);
        else
            ret = -ENODEV;
        uvm_va_space_up_read(va_space);
    }

    query->out_abi_version = UVM_VMEM_ABI_VERSION;
    query->out_capabilities = CAPABILITIES;
    query->out_page_sizes = UVM_VMEM_PAGE_SIZES;
    query->out_max_bind_ops = UVM_VMEM_MAX_BIND_OPS;
    query->out_max_bind_units = UVM_VMEM_MAX_BIND_UNITS;
    query->out_max_create_pages = UVM_VMEM_MAX_CREATE_PAGES;
    query->out_max_gpus = UVM_VMEM_MAX_GPUS;
    query->out_max_tickets = UVM_VMEM_MAX_TICKETS;
    query->out_max_reserve_bytes = UVM_VMEM_MAX_RESERVE_BYTES;
    query->out_max_eager_bytes = UVM_VMEM_MAX_EAGER_BYTES;
    strscpy(query->out_driver_version, NV_VERSION_STRING, sizeof(query->out_driver_version));
    return ret;
}

// Copy an array from user space. -EINVAL if it is empty, -EMSGSIZE, -ENOMEM, -EFAULT.
static int copy_array(uvm_vmem_state_t *state, NvU64 address, NvU32 count, NvU32 max_count, size_t element_size, void **array_out)
{
    void *array;

    if (count == 0)
        return -EINVAL;

    if (count > max_count)
        return -EMSGSIZE;

    array = uvm_vmem_alloc(state, count * element_size);
    if (!array)
        return -ENOMEM;

    if (copy_from_user(array, u64_to_user_ptr(address), count * element_size)) {
        uvm_vmem_free(state, array);
        return -EFAULT;
    }

    *array_out = array;
    return 0;
}

static int run_reserve(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    struct uvm_vmem_reserve *reserve = &params->reserve;
    void *uuids;
    int ret;

    ret = copy_array(state, reserve->gpus, reserve->gpu_count, UVM_VMEM_MAX_GPUS, UVM_VMEM_UUID_BYTES, &uuids);
    if (!ret) {
        ret = uvm_vmem_reserve(state, reserve, uuids);
        uvm_vmem_free(state, uuids);
    }

    trace_uvm_vmem_reserve(reserve->start, reserve->length, reserve->gpu_count, ret);
    return ret;
}

static int run_free(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    int ret = uvm_vmem_free_range(state, &params->free);

    trace_uvm_vmem_free(params->free.start, ret);
    return ret;
}

static int run_create(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    int ret = uvm_vmem_create(state, &params->create);

    trace_uvm_vmem_create(params->create.page_shift, params->create.count, params->create.out_handle, ret);
    return ret;
}

static int run_release(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    int ret = uvm_vmem_release(state, &params->release);

    trace_uvm_vmem_release(params->release.handle, ret);
    return ret;
}

static void undo_create(uvm_vmem_state_t *state, params_t *params)
{
    struct uvm_vmem_release release = { .size = sizeof(release), .handle = params->create.out_handle };

    (void)uvm_vmem_release(state, &release);
}

static int run_bind(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    struct uvm_vmem_bind *bind = &params->bind;
    void *ops;
    int ret;

    bind->out_failed_op = ~0u;
    bind->out_ticket = 0;

    ret = copy_array(state, bind->ops, bind->op_count, UVM_VMEM_MAX_BIND_OPS, sizeof(struct uvm_vmem_op), &ops);
    if (!ret) {
        ret = uvm_vmem_bind(state, bind, ops);
        uvm_vmem_free(state, ops);
    }

    trace_uvm_vmem_bind(bind->start, bind->op_count, bind->out_failed_op, bind->out_ticket, ret);
    return ret;
}

static int run_wait(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    int ret = uvm_vmem_wait(state, &params->wait);

    trace_uvm_vmem_wait(params->wait.ticket, ret);
    return ret;
}

static int run_stat(struct file *filp, uvm_vmem_state_t *state, params_t *params)
{
    // Outputs are accumulated: start from zero, not from the caller's values.
    struct uvm_vmem_stat stat = { .size = params->size, .flags = params->stat.flags };
    int ret;

    memcpy(stat.gpu_uuid, params->stat.gpu_uuid, sizeof(stat.gpu_uuid));
    ret = uvm_vmem_stat(state, &stat);
    params->stat = stat;
    return ret;
}

#define COMMAND(name, NAME, ...)                                                                                        \
    [_IOC_NR(UVM_VMEM_##NAME) - _IOC_NR(UVM_VMEM_QUERY)] = {                                                            \
        .size = sizeof(struct uvm_vmem_##name),                                                                         \
        .min_size = NAME##_SIZE_1,                                                                                      \
        .run = run_##name,                                                                                              \
        __VA_ARGS__                                                                                                     \
    }

static const command_t g_commands[] =
{
    COMMAND(query, QUERY, .has_out = true),
    COMMAND(reserve, RESERVE),
    COMMAND(free, FREE, .after_error = true),
    COMMAND(create, CREATE, .has_out = true, .undo = undo_create),
    COMMAND(release, RELEASE, .after_error = true),
    COMMAND(bind, BIND, .has_out = true, .out_on_failure = true),
    COMMAND(wait, WAIT),
    COMMAND(stat, STAT, .has_out = true, .after_error = true),
};

bool uvm_vmem_is_ioctl(unsigned int cmd)
{
    return _IOC_TYPE(cmd) == UVM_VMEM_IOCTL_TYPE && _IOC_DIR(cmd) == _IOC_NONE && _IOC_SIZE(cmd) == 0 &&
           _IOC_NR(cmd) >= _IOC_NR(UVM_VMEM_QUERY);
}

// Copy the caller's struct of any size; the part we do not know must be zero.
static int copy_params(const command_t *command, void __user *user, params_t *params)
{
    NvU32 size;
    int ret;

    if (copy_from_user(&size, user, sizeof(size)))
        return -EFAULT;

    if (size < command->min_size)
        return -EINVAL;

    if (size > MAX_STRUCT_SIZE)
        return -E2BIG;

    memset(params, 0, sizeof(*params));
    if (copy_from_user(params, user, min(size, command->size)))
        return -EFAULT;

    // Ignore a size that another thread has changed since.
    params->size = size;

    if (size > command->size) {
        ret = check_zeroed_user(user + command->size, size - command->size);
        if (ret < 0)
            return ret;
        if (!ret)
            return -E2BIG;
    }

    return 0;
}

static int copy_params_back(const command_t *command, void __user *user, const params_t *params)
{
    return copy_to_user(user, params, min(params->size, command->size)) ? -EFAULT : 0;
}

// Charge the table of objects to the memory cgroup where the kernel supports that.
#ifdef XA_FLAGS_ACCOUNT
#define OBJECTS_ACCOUNT XA_FLAGS_ACCOUNT
#else
#define OBJECTS_ACCOUNT 0
#endif

static uvm_vmem_state_t *state_create(uvm_va_space_t *va_space)
{
    uvm_vmem_state_t *state = uvm_vmem_alloc(NULL, sizeof(*state));
    uvm_vmem_state_t *other;

    if (!state)
        return NULL;

    if (uvm_vmem_accounts_get(state)) {
        uvm_vmem_free(NULL, state);
        return NULL;
    }

    state->va_space = va_space;
    state->next_index = UVM_VMEM_INDEX_FIRST;
    uvm_vmem_debug_process(state);
    INIT_LIST_HEAD(&state->ranges);
    INIT_LIST_HEAD(&state->tickets);
    uvm_mutex_init(&state->lock, UVM_LOCK_ORDER_VMEM);
    uvm_tracker_init(&state->pending);
    init_waitqueue_head(&state->wait);
    xa_init_flags(&state->objects, XA_FLAGS_ALLOC1 | OBJECTS_ACCOUNT);
    atomic64_set(&state->kernel_bytes, uvm_vmem_size(state));

    // Another thread may have won the race.
    other = cmpxchg(&va_space->vmem.state, NULL, state);
    if (other) {
        uvm_vmem_accounts_put(state);
        uvm_vmem_free(NULL, state);
        return other;
    }

    uvm_vmem_stat_add(state);
    return state;
}

static int state_get(struct file *filp, uvm_vmem_state_t **state_out)
{
    uvm_va_space_t *va_space = uvm_fd_va_space(filp);

    if (!va_space)
        return -EBADFD;

    if (va_space->vmem.owner != current->mm)
        return -EPERM;

    *state_out = READ_ONCE(va_space->vmem.state);
    if (!*state_out)
        *state_out = state_create(va_space);

    return *state_out ? 0 : -ENOMEM;
}

long uvm_vmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
    NvU32 number = _IOC_NR(cmd) - _IOC_NR(UVM_VMEM_QUERY);
    void __user *user = (void __user *)arg;
    uvm_vmem_state_t *state = NULL;
    const command_t *command;
    params_t params;
    int ret;

    BUILD_BUG_ON(sizeof(struct uvm_vmem_query) != QUERY_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_reserve) != RESERVE_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_free) != FREE_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_create) != CREATE_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_release) != RELEASE_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_bind) != BIND_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_wait) != WAIT_SIZE_1);
    BUILD_BUG_ON(offsetof(struct uvm_vmem_stat, out_table_bytes) != STAT_SIZE_1);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_stat) != STAT_SIZE_1 + 16);
    BUILD_BUG_ON(sizeof(struct uvm_vmem_op) != 32);

    if (number >= ARRAY_SIZE(g_commands))
        return -ENOTTY;

    command = &g_commands[number];
    ret = copy_params(command, user, &params);
    if (ret)
        return ret;

    // Fail before any work is done if the struct cannot be written.
    if (command->has_out && copy_params_back(command, user, &params))
        return -EFAULT;

    if (cmd != UVM_VMEM_QUERY) {
        ret = state_get(filp, &state);
        if (!ret && !command->after_error)
            ret = uvm_vmem_errno(uvm_global_get_status(), -EIO);
        if (ret)
            return ret;
    }

    ret = command->run(filp, state, &params);

    if ((!ret && command->has_out) || command->out_on_failure) {
        if (copy_params_back(command, user, &params)) {
            if (!ret && command->undo)
                command->undo(state, &params);
            ret = -EFAULT;
        }
    }

    return ret;
}

void uvm_vmem_procfs_init(struct proc_dir_entry *dir)
{
    uvm_vmem_stat_procfs_init(dir);
    uvm_vmem_debug_procfs_init(dir);
}

void uvm_vmem_va_space_init(uvm_vmem_va_space_t *vmem)
{
    vmem->state = NULL;
    vmem->owner = current->mm;
    mmgrab(vmem->owner);
}

void uvm_vmem_va_space_stop(uvm_vmem_va_space_t *vmem)
{
    uvm_vmem_state_t *state = vmem->state;

    if (!state)
        return;

    // A reader of vmem_dump may hold a claim, which it releases soon. No new claim is possible from here on.
    uvm_vmem_stat_remove(state);
    uvm_vmem_wait_event(state, READ_ONCE(state->calls) == 0);

    uvm_vmem_range_stop_all(state);
}

void uvm_vmem_va_space_destroy(uvm_vmem_va_space_t *vmem)
{
    uvm_vmem_state_t *state = vmem->state;

    if (state) {
        UVM_ASSERT(list_empty(&state->ranges));
        UVM_ASSERT(list_empty(&state->tickets));

        // The GPUs are unregistered and all pushes have completed. What remains is host memory, and descriptors of
        // objects whose GPU is gone.
        uvm_vmem_object_destroy_all(state);
        uvm_vmem_store_destroy_all(state);
        uvm_tracker_deinit(&state->pending);

        // UVM's leak checker does not see our allocations.
        if (atomic64_read(&state->kernel_bytes) != uvm_vmem_size(state) ||
            atomic64_read(&state->charged[UVM_VMEM_ACCOUNT_TABLES]) != 0 ||
            atomic64_read(&state->charged[UVM_VMEM_ACCOUNT_HOST]) != 0)
            pr_err("nvidia-uvm: vmem: Memory leak of %lld bytes, %lld of page tables, %lld of host memory\n",
                   (long long)atomic64_read(&state->kernel_bytes) - (long long)uvm_vmem_size(state),
                   (long long)atomic64_read(&state->charged[UVM_VMEM_ACCOUNT_TABLES]),
                   (long long)atomic64_read(&state->charged[UVM_VMEM_ACCOUNT_HOST]));

        uvm_vmem_accounts_put(state);
        uvm_vmem_free(NULL, state);
        vmem->state = NULL;
    }

    mmdrop(vmem->owner);
}
