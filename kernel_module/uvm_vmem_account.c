// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Kernel memory of vmem: how it is charged and limited.
//
// Our own allocations carry __GFP_ACCOUNT, so the memory cgroup of the process is charged for them. It is not charged
// for what UVM allocates on our behalf (page tables, and the structs that describe a page table or an external range),
// and nothing else bounds either kind: a process that touches one unit in each 2 MB of 16 TB makes 8 million tables. So
// all kernel memory behind a reservation is also counted in accounts, with limits that are on by default:
//
//   the user's     all descriptors of the real user id that made them
//   the cgroup's   all descriptors of the cgroup (version 2) that the process was in, unless that is the root cgroup.
//                  In containers every process may be root: there root's user account is ignored and only this one
//                  applies.
//   the machine's  all descriptors on the machine, so that part of its memory stays free however many users and
//                  cgroups there are.
//
// Pinned host memory has separate accounts. A descriptor keeps its accounts even if the process moves to another
// cgroup or user. Only the cgroup itself is charged, not its ancestors: if users may create cgroups, the user's limit
// still bounds them.

#include <linux/cgroup.h>
#include <linux/cred.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/vmalloc.h>

#include "uvm_pmm_gpu.h"
#include "uvm_va_range.h"
#include "uvm_vmem_internal.h"

// The caller chooses the size: fail with ENOMEM rather than wake the OOM killer.
#define ALLOC_FLAGS (GFP_KERNEL | __GFP_ACCOUNT | __GFP_RETRY_MAYFAIL | __GFP_ZERO)

static long uvm_vmem_user_tables_limit_mb = -1;
module_param(uvm_vmem_user_tables_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_user_tables_limit_mb,
                 "Kernel memory, in MB, for vmem's page tables and reservations that the processes of one user may use "
                 "(0: no limit; default: 1/32 of the machine's memory). Above it RESERVE and BIND fail with EDQUOT.");

static long uvm_vmem_cgroup_tables_limit_mb = -1;
module_param(uvm_vmem_cgroup_tables_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_cgroup_tables_limit_mb, "The same for the processes of one cgroup (version 2).");

static long uvm_vmem_total_tables_limit_mb = -1;
module_param(uvm_vmem_total_tables_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_total_tables_limit_mb, "The same for all processes together (default: 1/8).");

static long uvm_vmem_user_host_limit_mb = -1;
module_param(uvm_vmem_user_host_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_user_host_limit_mb,
                 "Host memory, in MB, that the processes of one user may pin with vmem (0: no limit; default: half of "
                 "the machine's memory). Above it CREATE fails with EDQUOT.");

static long uvm_vmem_cgroup_host_limit_mb = -1;
module_param(uvm_vmem_cgroup_host_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_cgroup_host_limit_mb, "The same for the processes of one cgroup (version 2).");

static long uvm_vmem_total_host_limit_mb = -1;
module_param(uvm_vmem_total_host_limit_mb, long, S_IRUGO | S_IWUSR);
MODULE_PARM_DESC(uvm_vmem_total_host_limit_mb, "The same for all processes together (default: 3/4).");

typedef enum
{
    SCOPE_USER,
    SCOPE_CGROUP,
    SCOPE_ALL,
    SCOPES
} scope_t;

// A negative parameter stands for part/whole of the machine's memory. 1/32 for a user's tables is ample: a slot with
// its page table takes about 700 bytes, so even with half as much host memory as GPU memory all GPU memory can be
// mapped many times over.
static const struct
{
    long *parameter;
    NvU32 part;
    NvU32 whole;
} g_limits[SCOPES][UVM_VMEM_ACCOUNT_KINDS] =
{
    [SCOPE_USER][UVM_VMEM_ACCOUNT_TABLES] = { &uvm_vmem_user_tables_limit_mb, 1, 32 },
    [SCOPE_USER][UVM_VMEM_ACCOUNT_HOST] = { &uvm_vmem_user_host_limit_mb, 1, 2 },
    [SCOPE_CGROUP][UVM_VMEM_ACCOUNT_TABLES] = { &uvm_vmem_cgroup_tables_limit_mb, 1, 32 },
    [SCOPE_CGROUP][UVM_VMEM_ACCOUNT_HOST] = { &uvm_vmem_cgroup_host_limit_mb, 1, 2 },
    [SCOPE_ALL][UVM_VMEM_ACCOUNT_TABLES] = { &uvm_vmem_total_tables_limit_mb, 1, 8 },
    [SCOPE_ALL][UVM_VMEM_ACCOUNT_HOST] = { &uvm_vmem_total_host_limit_mb, 3, 4 },
};

struct uvm_vmem_account_struct
{
    // In g_accounts.
    struct list_head node;

    scope_t scope;
    NvU64 id;

    // Number of descriptors. Protected by g_accounts_lock.
    NvU32 refs;

    atomic64_t bytes[UVM_VMEM_ACCOUNT_KINDS];
};

// No other lock is taken while the mutex is held.
static LIST_HEAD(g_accounts);
static DEFINE_MUTEX(g_accounts_lock);

static NvU64 limit_of(scope_t scope, uvm_vmem_account_kind_t kind)
{
    long limit = READ_ONCE(*g_limits[scope][kind].parameter);

    if (limit == 0)
        return ~0ull;

    if (limit > 0)
        return (NvU64)limit << 20;

    // Not si_meminfo(): it gathers much more, and takes a block-layer lock to do so.
    return ((NvU64)totalram_pages() << PAGE_SHIFT) / g_limits[scope][kind].whole * g_limits[scope][kind].part;
}

// The cgroup of the calling process; 0 for the root cgroup, or without cgroup v2.
static NvU64 current_cgroup(void)
{
    NvU64 id = 0;

// Cgroup ids are reused before Linux 5.5.
#if defined(CONFIG_CGROUPS) && LINUX_VERSION_CODE >= KERNEL_VERSION(5, 5, 0)
    struct cgroup *cgroup;

    rcu_read_lock();
    cgroup = task_dfl_cgroup(current);
    if (cgroup_parent(cgroup))
        id = cgroup_id(cgroup);
    rcu_read_unlock();
#endif

    return id;
}

static uvm_vmem_account_t *account_get(scope_t scope, NvU64 id)
{
    uvm_vmem_account_t *account;

    mutex_lock(&g_accounts_lock);

    list_for_each_entry(account, &g_accounts, node) {
        if (account->scope == scope && account->id == id) {
            account->refs++;
            goto out;
        }
    }

    account = kzalloc(sizeof(*account), ALLOC_FLAGS);
    if (account) {
        account->scope = scope;
        account->id = id;
        account->refs = 1;
        list_add(&account->node, &g_accounts);
    }

out:
    mutex_unlock(&g_accounts_lock);
    return account;
}

static void account_put(uvm_vmem_account_t *account)
{
    NvU32 i;

    if (!account)
        return;

    mutex_lock(&g_accounts_lock);

    if (--account->refs == 0) {
        for (i = 0; i < UVM_VMEM_ACCOUNT_KINDS; i++)
            UVM_ASSERT(atomic64_read(&account->bytes[i]) == 0);

        list_del(&account->node);
        kfree(account);
    }

    mutex_unlock(&g_accounts_lock);
}

int uvm_vmem_accounts_get(uvm_vmem_state_t *state)
{
    NvU64 cgroup = current_cgroup();
    bool wanted[SCOPES] = {
        [SCOPE_USER] = !cgroup || !uid_eq(current_uid(), GLOBAL_ROOT_UID),
        [SCOPE_CGROUP] = cgroup,
        [SCOPE_ALL] = true,
    };
    NvU64 id[SCOPES] = { [SCOPE_USER] = __kuid_val(current_uid()), [SCOPE_CGROUP] = cgroup };
    NvU32 i;

    BUILD_BUG_ON(ARRAY_SIZE(state->accounts) != SCOPES);

    for (i = 0; i < SCOPES; i++) {
        if (!wanted[i])
            continue;

        state->accounts[i] = account_get(i, id[i]);
        if (!state->accounts[i]) {
            uvm_vmem_accounts_put(state);
            return -ENOMEM;
        }
    }

    return 0;
}

void uvm_vmem_accounts_put(uvm_vmem_state_t *state)
{
    NvU32 i;

    for (i = 0; i < ARRAY_SIZE(state->accounts); i++) {
        account_put(state->accounts[i]);
        state->accounts[i] = NULL;
    }
}

int uvm_vmem_charge(uvm_vmem_state_t *state, uvm_vmem_account_kind_t kind, NvU64 bytes)
{
    NvU32 i;

    for (i = 0; i < ARRAY_SIZE(state->accounts); i++) {
        uvm_vmem_account_t *account = state->accounts[i];

        if (!account || (NvU64)atomic64_add_return(bytes, &account->bytes[kind]) <= limit_of(account->scope, kind))
            continue;

        do {
            if (state->accounts[i])
                atomic64_sub(bytes, &state->accounts[i]->bytes[kind]);
        } while (i-- > 0);

        return -EDQUOT;
    }

    atomic64_add(bytes, &state->charged[kind]);
    return 0;
}

void uvm_vmem_uncharge(uvm_vmem_state_t *state, uvm_vmem_account_kind_t kind, NvU64 bytes)
{
    NvU32 i;

    for (i = 0; i < ARRAY_SIZE(state->accounts); i++) {
        if (state->accounts[i])
            atomic64_sub(bytes, &state->accounts[i]->bytes[kind]);
    }

    atomic64_sub(bytes, &state->charged[kind]);
}

NvU64 uvm_vmem_table_cost(NvU32 entries, NvU32 table_bytes)
{
    return sizeof(uvm_page_directory_t) + entries * sizeof(uvm_page_directory_t *) + sizeof(uvm_gpu_chunk_t) + table_bytes;
}

NvU64 uvm_vmem_external_cost(void)
{
    return sizeof(uvm_vmem_external_t);
}

// Header of an allocation too large for kmalloc; sized so that the memory after it stays aligned.
typedef struct
{
    size_t size;
    size_t unused;
} large_header_t;

static bool is_large(size_t size)
{
    return size > PAGE_SIZE;
}

static void *alloc_large(size_t size)
{
    large_header_t *header;

#if LINUX_VERSION_CODE >= KERNEL_VERSION(5, 8, 0)
    header = __vmalloc(sizeof(*header) + size, ALLOC_FLAGS);
#else
    header = __vmalloc(sizeof(*header) + size, ALLOC_FLAGS, PAGE_KERNEL);
#endif
    if (!header)
        return NULL;

    header->size = size;
    return header + 1;
}

size_t uvm_vmem_size(void *p)
{
    return is_vmalloc_addr(p) ? ((large_header_t *)p)[-1].size : ksize(p);
}

void *uvm_vmem_alloc(uvm_vmem_state_t *state, size_t size)
{
    void *p = is_large(size) ? alloc_large(size) : kzalloc(size, ALLOC_FLAGS);

    if (p && state)
        atomic64_add(uvm_vmem_size(p), &state->kernel_bytes);

    return p;
}

void uvm_vmem_free(uvm_vmem_state_t *state, void *p)
{
    if (!p)
        return;

    if (state)
        atomic64_sub(uvm_vmem_size(p), &state->kernel_bytes);

    if (is_vmalloc_addr(p))
        vfree((large_header_t *)p - 1);
    else
        kfree(p);
}
