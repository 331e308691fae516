// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Diagnosis of failures: kernel log messages, and /proc/driver/nvidia-uvm/vmem_dump.
//
// A line is logged when UVM cancels an access to a reservation (a fatal fault), when a batch fails after it was sent,
// and when that leaves the reservation broken. Each names the process, the reservation, the address and the last batch.
//
// vmem_dump lists all reservations, one per line. After "PID ADDRESS" is written to it, a read returns the dump of that
// one reservation: its slots, their page tables and their entries, with equal neighbours merged.
//
// Nothing here waits for a client's lock, which may be held while a GPU works: a reader retries for a while and then
// gets EBUSY; a log line leaves out what it cannot read. A dump claims the reservation for each read() separately, so
// each slot is consistent in itself, but slots may be from different moments. Fully sparse slots are left out.

#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/proc_fs.h>
#include <linux/ratelimit.h>
#include <linux/seq_file.h>
#include <linux/uaccess.h>

#include "uvm_api.h"
#include "uvm_hal_types.h"
#include "uvm_procfs.h"
#include "uvm_vmem_internal.h"

// A reader tries to take a client's locks this many times, 10 ms apart.
#define LOCK_TRIES 100

// The longest "PID ADDRESS" that is accepted, with some slack.
#define MAX_SELECTION 64

// Size of the text about the last batch.
#define BATCH_TEXT 160

// The process chooses its name: characters that could end a field or a line, or control a terminal, are escaped in
// octal.
void uvm_vmem_debug_process(uvm_vmem_state_t *state)
{
    char name[TASK_COMM_LEN];
    char *out = state->command;
    NvU32 i;

    state->process = task_tgid_nr(current);
    get_task_comm(name, current->group_leader);

    for (i = 0; name[i]; i++) {
        bool plain = name[i] > ' ' && name[i] <= '~' && name[i] != '\\';

        out += sprintf(out, plain ? "%c" : "\\%03o", (unsigned char)name[i]);
    }
}

void uvm_vmem_debug_batch(uvm_vmem_range_t *range, NvU32 num_ops, NvU64 first_unit, NvU64 last_unit)
{
    uvm_vmem_last_batch_t *last = &range->last_batch;

    UVM_ASSERT(range->claimed);

    last->number++;
    last->num_ops = num_ops;
    last->first_unit = first_unit;
    last->last_unit = last_unit;
    last->thread = task_pid_nr(current);
    last->time = ktime_get_ns();
}

// LOCKING: Takes no lock. If a batch is recorded at the same time, the text may mix two batches.
static const char *batch_text(uvm_vmem_range_t *range, char *text)
{
    uvm_vmem_last_batch_t last = range->last_batch;

    if (!last.number)
        return "none";

    snprintf(text,
             BATCH_TEXT,
             "%llu of thread %d, %u operations on 0x%llx-0x%llx, %llu us ago",
             last.number,
             last.thread,
             last.num_ops,
             range->start + last.first_unit * UVM_VMEM_UNIT,
             range->start + (last.last_unit + 1) * UVM_VMEM_UNIT - 1,
             (ktime_get_ns() - last.time) / 1000);
    return text;
}

void uvm_vmem_debug_failed(uvm_vmem_range_t *range, int error)
{
    char text[BATCH_TEXT];

    pr_err_ratelimited("vmem: process %d (%s): a batch failed on a GPU (%d), reservation 0x%llx-0x%llx%s; last batch: %s\n",
                       range->state->process,
                       range->state->command,
                       error,
                       range->start,
                       range->start + range->length - 1,
                       range->broken ? " is in an unknown state and takes no more batches" : "",
                       batch_text(range, text));
}

void uvm_vmem_debug_failed_at(uvm_vmem_state_t *state, NvU64 start)
{
    uvm_vmem_range_t *range;

    uvm_va_space_down_read(state->va_space);
    if (uvm_vmem_range_find(state, start, &range) == 0)
        uvm_vmem_debug_failed(range, -EIO);
    uvm_va_space_up_read(state->va_space);
}

// The reservation that holds an address, or NULL. LOCKING: Caller holds the VA space lock, for
// read or write.
static uvm_vmem_range_t *range_at(uvm_vmem_state_t *state, NvU64 address)
{
    uvm_vmem_range_t *range;

    list_for_each_entry(range, &state->ranges, node) {
        if (address >= range->start && address - range->start < range->length)
            return range;
    }

    return NULL;
}

// The recorded state of an address.
static const char *entry_text(uvm_vmem_range_t *range, NvU64 address)
{
    NvU64 unit = (address - range->start) / UVM_VMEM_UNIT;
    const char *text = "nothing mapped";
    uvm_vmem_slot_t *slot;

    // No call can claim the reservation while this lock is held.
    if (!uvm_mutex_trylock(&range->state->lock))
        return "a batch is under way";

    slot = range->claimed ? NULL : uvm_vmem_slot(range, unit / UVM_VMEM_SLOT_UNITS);
    if (range->claimed) {
        text = "a batch is under way";
    }
    else if (uvm_vmem_slot_is_all_sparse(range, unit / UVM_VMEM_SLOT_UNITS)) {
        text = "sparse";
    }
    else if (!slot) {
        text = "never bound";
    }
    else {
        uvm_vmem_entry_t entry = slot->entries[unit % UVM_VMEM_SLOT_UNITS];

        if (entry & UVM_VMEM_ENTRY_READ_ONLY)
            text = "a read-only page";
        else if (entry & UVM_VMEM_ENTRY_MAPPED)
            text = "a page";
        else if (entry & UVM_VMEM_ENTRY_SPARSE)
            text = "sparse";
    }

    uvm_mutex_unlock(&range->state->lock);
    return text;
}

void uvm_vmem_fatal_fault(uvm_va_space_t *va_space, uvm_gpu_id_t gpu_id, const uvm_fault_buffer_entry_t *fault)
{
    uvm_vmem_state_t *state = READ_ONCE(va_space->vmem.state);
    uvm_vmem_range_t *range;
    char text[BATCH_TEXT];

    uvm_assert_rwsem_locked(&va_space->lock);

    range = state ? range_at(state, fault->fault_address) : NULL;
    if (!range)
        return;

    pr_err_ratelimited("vmem: process %d (%s): %s at 0x%llx on GPU %u cancelled, reservation 0x%llx-0x%llx, there: %s; "
                       "last batch: %s\n",
                       state->process,
                       state->command,
                       fault->fault_access_type >= UVM_FAULT_ACCESS_TYPE_WRITE ? "write" : "read",
                       fault->fault_address,
                       uvm_id_value(gpu_id),
                       range->start,
                       range->start + range->length - 1,
                       entry_text(range, fault->fault_address),
                       batch_text(range, text));
}

// The state of one open file.
typedef struct
{
    // The reservation to dump. process is 0 if none was requested.
    pid_t process;
    NvU64 address;

    // Claimed from start to stop.
    uvm_vmem_range_t *range;
} dump_t;

static void show_range_flags(struct seq_file *file, uvm_vmem_range_t *range)
{
    seq_printf(file,
               "%s%s%s%s",
               range->big ? "big" : "small",
               range->remote ? ",remote" : "",
               range->broken ? ",broken" : "",
               range->mapped_units ? "" : ",empty");
}

static int list_ranges(uvm_vmem_state_t *state, void *seq)
{
    struct seq_file *file = seq;
    uvm_vmem_range_t *range;
    char text[BATCH_TEXT];

    // Fails even if a writer is only queued; this client's reservations are then left out.
    if (!uvm_down_read_trylock(&state->va_space->lock)) {
        seq_printf(file, "%d busy\n", state->process);
        return 0;
    }

    list_for_each_entry(range, &state->ranges, node) {
        seq_printf(file,
                   "%d 0x%llx 0x%llx %llu %u %llu ",
                   state->process,
                   range->start,
                   range->length,
                   1ull << (range->page_shift - 10),
                   range->gpu_count,
                   range->mapped_units * (UVM_VMEM_UNIT >> 10));
        show_range_flags(file, range);
        seq_printf(file, " %s\n", batch_text(range, text));
    }

    uvm_up_read(&state->va_space->lock);
    return 0;
}

// Claim the requested reservation if it belongs to this state. Returns 1 if claimed, 0 if it belongs to another state,
// or -EBUSY. The state stays valid after the list's lock is dropped: a VA space is not dismantled while a range is
// claimed.
static int claim_range(uvm_vmem_state_t *state, void *reader)
{
    dump_t *dump = reader;
    uvm_vmem_range_t *range;
    int ret = 0;

    if (state->process != dump->process)
        return 0;

    if (!uvm_down_read_trylock(&state->va_space->lock))
        return -EBUSY;

    range = range_at(state, dump->address);
    if (range) {
        ret = -EBUSY;
        if (uvm_mutex_trylock(&state->lock)) {
            if (!range->dying && uvm_vmem_range_try_claim(range)) {
                dump->range = range;
                ret = 1;
            }
            uvm_mutex_unlock(&state->lock);
        }
    }

    uvm_up_read(&state->va_space->lock);
    return ret;
}

// File position: 0 at the header, n + 1 at the first slot numbered n or above.
static void *dump_at(dump_t *dump, loff_t *pos)
{
    uvm_vmem_slot_t *slot;
    NvU64 index;

    if (*pos == 0)
        return SEQ_START_TOKEN;

    if (!dump->range)
        return NULL;

    index = *pos - 1;
    slot = uvm_vmem_slot_next(dump->range, &index);
    *pos = index + 1;
    return slot;
}

static void *dump_start(struct seq_file *file, loff_t *pos)
{
    dump_t *dump = file->private;
    int tries, ret = 0;

    dump->range = NULL;
    if (dump->process) {
        for (tries = 0; tries < LOCK_TRIES; tries++) {
            ret = uvm_vmem_stat_visit(claim_range, dump);
            if (ret != -EBUSY || fatal_signal_pending(current))
                break;
            msleep(10);
        }

        if (ret < 0)
            return ERR_PTR(ret);

        // The reservation may be freed between two reads: then the dump ends.
        if (!dump->range)
            return *pos == 0 ? ERR_PTR(-ENOENT) : NULL;
    }

    return dump_at(dump, pos);
}

static void *dump_next(struct seq_file *file, void *element, loff_t *pos)
{
    ++*pos;
    return dump_at(file->private, pos);
}

static void dump_stop(struct seq_file *file, void *element)
{
    dump_t *dump = file->private;

    if (!dump->range)
        return;

    uvm_vmem_range_unclaim(dump->range);
    dump->range = NULL;
}

static void show_head(struct seq_file *file, uvm_vmem_range_t *range)
{
    char text[BATCH_TEXT];
    NvU32 i;

    seq_printf(file,
               "process %d %s\nreservation 0x%llx-0x%llx, pages of %llu KB, %llu slots\nmapped %llu KB, state ",
               range->state->process,
               range->state->command,
               range->start,
               range->start + range->length - 1,
               1ull << (range->page_shift - 10),
               range->num_slots,
               range->mapped_units * (UVM_VMEM_UNIT >> 10));
    show_range_flags(file, range);
    seq_printf(file, "\nlast batch %s\n", batch_text(range, text));
    for (i = 0; i < range->gpu_count; i++) {
        if (range->gpus[i].tree)
            seq_printf(file, "gpu %u: %s\n", i, uvm_gpu_name(range->gpus[i].gpu));
        else
            seq_printf(file, "gpu %u: gone\n", i);
    }
}

static const char *aperture_text(uvm_aperture_t aperture)
{
    if (aperture == UVM_APERTURE_VID)
        return "gpu";

    return aperture == UVM_APERTURE_SYS ? "host" : "peer";
}

static void show_table(struct seq_file *file, uvm_page_tree_t *tree, uvm_page_table_range_t *table, const char *what)
{
    uvm_gpu_phys_address_t address;

    if (table->entry_count == 0)
        return;

    address = uvm_page_table_range_entry_address(tree, table, 0);
    seq_printf(file, ", %s %s:0x%llx", what, aperture_text(address.aperture), address.address);
}

// The address of an entry's unit as seen by the first remaining GPU.
static uvm_gpu_phys_address_t entry_address(uvm_vmem_range_t *range, uvm_vmem_object_t *object, NvU64 object_unit)
{
    uvm_vmem_chunk_t *chunk;
    NvU32 i = 0;
    NvU32 unit;

    while (i + 1 < range->gpu_count && !range->gpus[i].tree)
        i++;

    chunk = uvm_vmem_object_unit(object, object_unit, &unit);
    return uvm_vmem_chunk_address(chunk, unit, range->gpus[i].gpu);
}

// Show the run of entries from first on that map consecutive pages of contiguous memory, or are all sparse, or all
// empty.
static NvU32 show_run(struct seq_file *file, uvm_vmem_range_t *range, const uvm_vmem_entry_t *entries, NvU32 first)
{
    uvm_vmem_entry_t entry = entries[first];
    NvU64 step = entry & UVM_VMEM_ENTRY_MAPPED ? 1ull << UVM_VMEM_ENTRY_UNIT_SHIFT : 0;
    NvU64 object_unit = entry >> UVM_VMEM_ENTRY_UNIT_SHIFT;
    uvm_gpu_phys_address_t address = { 0 };
    uvm_vmem_object_t *object = NULL;
    NvU32 count;

    if (step) {
        object = uvm_vmem_object_of_entry(range->state, entry);
        address = entry_address(range, object, object_unit);
    }

    for (count = 1; first + count < UVM_VMEM_SLOT_UNITS && entries[first + count] == entry + count * step; count++) {
        if (step && entry_address(range, object, object_unit + count).address != address.address + count * UVM_VMEM_UNIT)
            break;
    }

    if (!entry)
        return count;

    seq_printf(file, "  units %u-%u: ", first, first + count - 1);
    if (step) {
        seq_printf(file,
                   "handle 0x%x%s, its units %llu-%llu, %s:0x%llx%s\n",
                   object->handle,
                   object->released ? " (released)" : "",
                   object_unit,
                   object_unit + count - 1,
                   aperture_text(address.aperture),
                   address.address,
                   entry & UVM_VMEM_ENTRY_READ_ONLY ? ", read-only" : "");
    }
    else {
        seq_puts(file, "sparse\n");
    }

    return count;
}

static void show_slot(struct seq_file *file, uvm_vmem_range_t *range, uvm_vmem_slot_t *slot, NvU64 index)
{
    static const char *const states[] = {
        [UVM_VMEM_SLOT_EMPTY] = "empty",
        [UVM_VMEM_SLOT_SMALL] = "small",
        [UVM_VMEM_SLOT_BIG] = "big",
        [UVM_VMEM_SLOT_SPARSE] = "sparse",
    };
    NvU32 i;

    seq_printf(file, "slot %llu 0x%llx: %s", index, range->start + index * UVM_VMEM_SLOT, states[slot->state]);
    for (i = 0; i < range->gpu_count; i++) {
        uvm_page_tree_t *tree = range->gpus[i].tree;

        if (!tree)
            continue;

        seq_printf(file, "; gpu %u", i);
        show_table(file, tree, &slot->tables[i], "table");
        if (slot->has_entry)
            show_table(file, tree, &slot->tables[range->gpu_count + i], "2 MB entry");
    }
    seq_putc(file, '\n');

    for (i = 0; i < UVM_VMEM_SLOT_UNITS;)
        i += show_run(file, range, slot->entries, i);
}

static int dump_show(struct seq_file *file, void *element)
{
    dump_t *dump = file->private;

    if (!dump->range) {
        seq_puts(file, "# pid start length page_kb gpus mapped_kb state last_batch\n");
        return uvm_vmem_stat_visit(list_ranges, file);
    }

    if (element == SEQ_START_TOKEN)
        show_head(file, dump->range);
    else
        show_slot(file, dump->range, element, file->index - 1);

    return 0;
}

static const struct seq_operations g_dump_operations = {
    .start = dump_start,
    .next = dump_next,
    .stop = dump_stop,
    .show = dump_show,
};

static int dump_open(struct inode *inode, struct file *file)
{
    return seq_open_private(file, &g_dump_operations, sizeof(dump_t));
}

static ssize_t dump_read(struct file *file, char __user *user, size_t size, loff_t *pos)
{
    UVM_ENTRY_RET(seq_read(file, user, size, pos));
}

static ssize_t dump_write(struct file *file, const char __user *user, size_t size, loff_t *pos)
{
    struct seq_file *seq = file->private_data;
    char text[MAX_SELECTION] = { 0 };
    dump_t *dump = seq->private;
    unsigned long long address;
    int process;

    if (size >= sizeof(text))
        return -EINVAL;

    if (copy_from_user(text, user, size))
        return -EFAULT;

    if (sscanf(text, "%d %llx", &process, &address) != 2 || process <= 0)
        return -EINVAL;

    mutex_lock(&seq->lock);
    dump->process = process;
    dump->address = address;
    mutex_unlock(&seq->lock);
    return size;
}

static const nv_proc_ops_t g_dump_file = {
    NV_PROC_OPS_SET_OWNER()
    .NV_PROC_OPS_OPEN = dump_open,
    .NV_PROC_OPS_READ = dump_read,
    .NV_PROC_OPS_WRITE = dump_write,
    .NV_PROC_OPS_LSEEK = seq_lseek,
    .NV_PROC_OPS_RELEASE = seq_release_private,
};

void uvm_vmem_debug_procfs_init(struct proc_dir_entry *dir)
{
    // Ignore a failure: only this file would be missing.
    (void)proc_create("vmem_dump", S_IRUSR | S_IWUSR, dir, &g_dump_file);
}
