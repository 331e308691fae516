// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * readers.c - checks what continuously reading GPU work would see during a BIND of the patched driver.
 *
 * A reader looks up an address in the page tables, so its view changes only when they are written. While BINDs are in
 * flight, each entry that the engine writes passes through here, and every unit (64 KB) whose translation depends on the
 * entry is compared before and after. That covers all addresses at every moment, as a GPU with empty TLBs sees them.
 * Stale TLB entries are the subject of tlb.c.
 *
 * Rules (uvm_vmem_ioctl.h), for the reservations that a BIND in flight works on:
 *   - a unit that no BIND in flight names does not change (SOFTGPU_ERROR_GAP);
 *   - a unit that a BIND names changes once, from the old translation to the new one (SOFTGPU_ERROR_NEITHER). It may be
 *     absent in between only if its slot changes between a 2 MB page and a table, and never if it was sparse;
 *   - a mapped unit is cached by the GPU if it is the GPU's own memory, and otherwise not (SOFTGPU_ERROR_CACHED), as UVM
 *     does it.
 *
 * BINDs are observed through the driver's tracepoints: uvm_vmem_bind_op comes before anything is written,
 * uvm_vmem_bind_sent when all pushes are in the rings, uvm_vmem_bind when the call returns. A BIND is in flight until the
 * engine has executed the entries put into the rings between the first two, whatever the call returned: a call that a
 * signal ends leaves its pushes behind. Entries that other calls put there in that time count too, as they cannot be told
 * apart. So once the call has returned, the BIND is held responsible for writes of pushes from that time only, and not for
 * later ones, such as those of a FREE that has waited for it.
 */
#include <linux/file.h>
#include <linux/module.h>
#include <linux/notifier.h>
#include <linux/ptrace.h>
#include <linux/sched.h>
#include <linux/sched/task_stack.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>
#include <linux/tracepoint.h>
#include <linux/xarray.h>
#include <asm/syscall.h>

#include "impl.h"

/* From the patched driver's uvm_vmem_ioctl.h, which an unpatched driver does not have. */
#define OP_CUT (1u << 3)

#define RANGES_PER_CHUNK 254
#define MARKS_MAX        64 /* maximum number of channels on all GPUs together */
#define REPORTS_MAX      8 /* maximum number of reports for one BIND */
#define GPU_SHIFT        48 /* above the 57 - 16 bits of a unit's number */

struct named {
	u64 first, last;
};

struct chunk {
	struct list_head node;
	u64 low, high; /* bounds of all its ranges */
	u32 count;
	struct named range[RANGES_PER_CHUNK];
};

/* A position in a channel's ring. */
struct mark {
	struct sg_channel *channel;
	u64 first, fetched; /* the ring entries of the BIND's time: [first, fetched) */
};

/* The history of a named unit. */
enum { UNTOUCHED, CHANGED, GONE_WITH_PAGE, GONE_WITH_TABLE, GONE_SPARSE };

struct bind {
	struct list_head node;
	struct task_struct *task; /* the calling thread, until the call returns: only compared, never dereferenced */
	const void *descriptor;   /* the driver's descriptor, which has one address space on each GPU */
	u64 start, last;          /* the reservation's bounds */
	struct list_head chunks;
	const struct named *hint; /* the range found by the last lookup */
	bool sent;
	u32 marks;
	struct mark mark[MARKS_MAX];
	struct xarray units;      /* state of named units, by GPU and address >> 16 */
	u32 reports;
};

/* Protects everything below, and the channels' positions (channel->get, ->fetched). Taken with or without model.lock. */
static DEFINE_SPINLOCK(lock);
static LIST_HEAD(binds); /* BINDs in flight, oldest first */
static u64 binds_seen, units_seen;
/* The ring entry that the engine executes, and its number. Protected by model.lock. */
static struct {
	const struct sg_channel *channel;
	u64 entry;
} runs;

/* ---- channels ------------------------------------------------------------------------------------------ */

void sg_readers_channel_add(struct sg_channel *channel)
{
	spin_lock(&lock);
	list_add_tail(&channel->node, &channel->gpu->channels);
	spin_unlock(&lock);
}

void sg_readers_channel_remove(struct sg_channel *channel)
{
	struct bind *bind;
	u32 i;

	spin_lock(&lock);
	if (runs.channel == channel)
		runs.channel = NULL;
	list_del(&channel->node);
	list_for_each_entry(bind, &binds, node)
		for (i = 0; i < bind->marks; i++)
			if (bind->mark[i].channel == channel)
				bind->mark[i].channel = NULL;
	spin_unlock(&lock);
}

void sg_readers_channel_runs(const struct sg_channel *channel)
{
	runs.channel = channel;
	runs.entry = channel->fetched;
}

void sg_readers_channel_advance(struct sg_channel *channel)
{
	spin_lock(&lock);
	channel->get = (channel->get + 1) % channel->entries;
	channel->fetched++;
	spin_unlock(&lock);
}

/* Returns the number of entries written to the ring since its creation. */
static u64 filled(const struct sg_channel *channel)
{
	u32 put = READ_ONCE(channel->userd[SG_USERD_PUT]);

	return channel->fetched + (put + channel->entries - channel->get) % channel->entries;
}

static void mark_rings(struct bind *bind)
{
	struct sg_channel *channel;
	u32 i;

	for (i = 0; i < model.gpus; i++)
		list_for_each_entry(channel, &model.gpu[i]->channels, node)
			if (bind->marks < MARKS_MAX)
				bind->mark[bind->marks++] = (struct mark){ channel, filled(channel), 0 };
}

/* Rings that got no entries during the BIND are not waited for. */
static void mark_what_was_sent(struct bind *bind)
{
	u32 i;

	for (i = 0; i < bind->marks; i++) {
		struct mark *mark = &bind->mark[i];
		u64 now = mark->channel ? filled(mark->channel) : 0;

		if (now == mark->first)
			mark->channel = NULL;
		mark->fetched = now;
	}
}

static bool passed(const struct bind *bind)
{
	u32 i;

	for (i = 0; i < bind->marks; i++) {
		const struct sg_channel *channel = bind->mark[i].channel;

		if (channel && !channel->dead && channel->fetched < bind->mark[i].fetched)
			return false;
	}
	return bind->sent;
}

/* Returns true if the BIND is held responsible for the engine's current write. */
static bool answers(const struct bind *bind)
{
	u32 i;

	if (bind->task || bind->marks == MARKS_MAX)
		return true;
	for (i = 0; i < bind->marks; i++)
		if (bind->mark[i].channel && bind->mark[i].channel == runs.channel)
			return runs.entry >= bind->mark[i].first && runs.entry < bind->mark[i].fetched;
	return false;
}

/* ---- descriptors --------------------------------------------------------------------------------------- */

/* Returns the file whose ioctl the calling thread is in: two descriptors of one process may have reservations at the same
 * addresses, and nothing else distinguishes them here. It is only compared, never dereferenced. */
const void *sg_descriptor_of_caller(void)
{
	unsigned long args[6];
	struct file *file;

	syscall_get_arguments(current, current_pt_regs(), args);
	file = fget(args[0]);
	if (file)
		fput(file);
	return file;
}

/* ---- BINDs --------------------------------------------------------------------------------------------- */

static void bind_free(struct bind *bind)
{
	struct chunk *chunk, *next;

	list_for_each_entry_safe(chunk, next, &bind->chunks, node)
		kfree(chunk);
	list_del(&bind->node);
	xa_destroy(&bind->units);
	kfree(bind);
}

static void forget_passed(void)
{
	struct bind *bind, *next;

	list_for_each_entry_safe(bind, next, &binds, node)
		if (passed(bind))
			bind_free(bind);
}

static struct bind *bind_of_caller(void)
{
	struct bind *bind;

	list_for_each_entry(bind, &binds, node)
		if (bind->task == current)
			return bind;
	return NULL;
}

static struct bind *bind_new(const void *descriptor, u64 start, u64 length)
{
	struct bind *bind = kzalloc(sizeof(*bind), GFP_ATOMIC);

	if (!bind)
		return NULL;
	bind->task = current;
	bind->descriptor = descriptor;
	bind->start = start;
	bind->last = start + length - 1;
	INIT_LIST_HEAD(&bind->chunks);
	xa_init(&bind->units);
	mark_rings(bind);
	list_add_tail(&bind->node, &binds);
	binds_seen++;
	return bind;
}

static void bind_name(struct bind *bind, u64 first, u64 last)
{
	struct chunk *chunk = list_empty(&bind->chunks) ? NULL : list_last_entry(&bind->chunks, struct chunk, node);

	if (!chunk || chunk->count == RANGES_PER_CHUNK) {
		chunk = kmalloc(sizeof(*chunk), GFP_ATOMIC);
		if (!chunk) {
			pr_err("softgpu: error: no memory for a BIND's ranges\n");
			return;
		}
		chunk->low = first;
		chunk->high = last;
		chunk->count = 0;
		list_add_tail(&chunk->node, &bind->chunks);
	}
	chunk->low = min(chunk->low, first);
	chunk->high = max(chunk->high, last);
	chunk->range[chunk->count++] = (struct named){ first, last };
}

static bool bind_names(struct bind *bind, u64 va)
{
	const struct chunk *chunk;
	u32 i;

	if (bind->hint && va >= bind->hint->first && va <= bind->hint->last)
		return true;
	list_for_each_entry(chunk, &bind->chunks, node) {
		if (va < chunk->low || va > chunk->high)
			continue;
		for (i = 0; i < chunk->count; i++)
			if (va >= chunk->range[i].first && va <= chunk->range[i].last) {
				bind->hint = &chunk->range[i];
				return true;
			}
	}
	return false;
}

/* ---- what changes -------------------------------------------------------------------------------------- */

bool sg_readers_watch(const struct sg_space *space)
{
	return space->user && !list_empty(&binds);
}

/* Returns the next state of a unit that a BIND names, or -1 for a forbidden change. No BIND removes a directory's tables. */
static int next_state(unsigned long state, u8 level, const struct sg_sight *before, const struct sg_sight *after)
{
	bool whole = level == SG_LEVEL_PDE0;

	if (level > SG_LEVEL_PDE0)
		return -1;
	switch (state) {
	case UNTOUCHED:
		if (!whole || after->kind != SG_ENTRY_INVALID)
			return CHANGED;
		if (before->kind == SG_ENTRY_SPARSE)
			return GONE_SPARSE;
		return before->page_size == SG_PAGE_2M ? GONE_WITH_PAGE : GONE_WITH_TABLE;
	case GONE_WITH_PAGE:
		return whole && after->page_size != SG_PAGE_2M ? CHANGED : -1;
	case GONE_WITH_TABLE:
		return whole && after->page_size == SG_PAGE_2M ? CHANGED : -1;
	default:
		return -1;
	}
}

void sg_readers_unit(struct sg_space *space, u8 level, u64 va, const struct sg_sight *before, const struct sg_sight *after)
{
	bool named = false, good = false, cached_wrong = false;
	struct bind *bind, *last = NULL;
	u32 kind;

	spin_lock(&lock);
	forget_passed();
	list_for_each_entry(bind, &binds, node) {
		/* each GPU of the reservation has its own translation */
		unsigned long index = va / SG_PAGE_64K | (unsigned long)space->gpu->index << GPU_SHIFT, state;
		int next;

		if (bind->descriptor != space->descriptor || va < bind->start || va > bind->last || !answers(bind))
			continue;
		last = bind;
		if (!bind_names(bind, va))
			continue;
		named = true;
		state = xa_to_value(xa_load(&bind->units, index) ?: xa_mk_value(UNTOUCHED));
		next = next_state(state, level, before, after);
		if (next < 0)
			continue;
		good = true;
		if (xa_is_err(xa_store(&bind->units, index, xa_mk_value(next), GFP_ATOMIC)))
			pr_err("softgpu: error: no memory for a BIND's units\n");
		break;
	}
	if (last)
		units_seen++;
	if (good)
		cached_wrong = after->kind == SG_ENTRY_LEAF && after->cached != (after->aperture == SOFTGPU_APERTURE_VID);
	if (!last || (good && !cached_wrong) || last->reports == REPORTS_MAX) {
		spin_unlock(&lock);
		return;
	}
	last->reports++;
	spin_unlock(&lock);
	if (cached_wrong) {
		sg_error(space->gpu, SOFTGPU_ERROR_CACHED, va, 0, "entry at %llx: memory of aperture %u is %scached", va, after->aperture,
			 after->cached ? "" : "not ");
		return;
	}
	kind = named ? SOFTGPU_ERROR_NEITHER : SOFTGPU_ERROR_GAP;
	sg_error(space->gpu, kind, va, 0, "%s at %llx: %s (%llx) becomes %s (%llx)", named ? "neither old nor new" : "gap", va,
		 sg_entry_name(before->kind), before->pa, sg_entry_name(after->kind), after->pa);
}

void sg_readers_counters(struct softgpu_counters *out)
{
	spin_lock(&lock);
	out->reader_binds = binds_seen;
	out->reader_units = units_seen;
	spin_unlock(&lock);
}

/* ---- the driver's tracepoints -------------------------------------------------------------------------- */

/*
 * A tracepoint runs in the process whose allocations a test makes fail one by one (fail-nth). Our allocations are exempt:
 * a BIND that is not recorded would look like a gap.
 */
static unsigned int spare(void)
{
	unsigned int nth = 0;

#ifdef CONFIG_FAULT_INJECTION
	nth = current->fail_nth;
	current->fail_nth = 0;
#endif
	return nth;
}

static void spare_end(unsigned int nth)
{
#ifdef CONFIG_FAULT_INJECTION
	current->fail_nth = nth;
#endif
}

static void probe_op(void *data, u64 start, u64 length, u64 addr, u64 bytes, u32 op, u32 flags)
{
	const void *descriptor = sg_descriptor_of_caller();
	u64 first = addr, last = addr + bytes - 1;
	unsigned int nth = spare();
	struct bind *bind;

	/* a cut changes the whole slot */
	if (flags & OP_CUT) {
		first = max(start, round_down(first, SG_PAGE_2M));
		last = last | (SG_PAGE_2M - 1);
	}
	spin_lock(&lock);
	forget_passed();
	bind = bind_of_caller() ?: bind_new(descriptor, start, length);
	if (bind)
		bind_name(bind, first, last);
	else
		pr_err("softgpu: error: no memory for a BIND\n");
	spin_unlock(&lock);
	spare_end(nth);
}

static void probe_sent(void *data, u64 start, int result)
{
	struct bind *bind;

	spin_lock(&lock);
	bind = bind_of_caller();
	if (bind) {
		mark_what_was_sent(bind);
		bind->sent = true;
	}
	spin_unlock(&lock);
}

static void probe_returned(void *data, u64 start, u32 ops, u32 failed_op, u64 ticket, int result)
{
	struct bind *bind;

	spin_lock(&lock);
	bind = bind_of_caller();
	if (bind)
		bind->task = NULL;
	forget_passed();
	spin_unlock(&lock);
}

static const struct {
	const char *name;
	void *probe;
} probes[] = {
	{ "uvm_vmem_bind_op", probe_op },
	{ "uvm_vmem_bind_sent", probe_sent },
	{ "uvm_vmem_bind", probe_returned },
};

static int module_changes(struct notifier_block *block, unsigned long what, void *data)
{
	struct module *module = ((struct tp_module *)data)->mod;
	int (*change)(struct tracepoint *, void *, void *) =
		what == MODULE_STATE_COMING ? tracepoint_probe_register : tracepoint_probe_unregister;
	u32 i, j;

	if (what != MODULE_STATE_COMING && what != MODULE_STATE_GOING)
		return NOTIFY_OK;
	for (i = 0; i < module->num_tracepoints; i++) {
		struct tracepoint *tracepoint = tracepoint_ptr_deref(&module->tracepoints_ptrs[i]);

		for (j = 0; j < ARRAY_SIZE(probes); j++)
			if (!strcmp(tracepoint->name, probes[j].name) && change(tracepoint, probes[j].probe, NULL))
				pr_err("softgpu: error: %s of %s\n", tracepoint->name, module->name);
	}
	return NOTIFY_OK;
}

static struct notifier_block notifier = { .notifier_call = module_changes };

int sg_readers_init(void)
{
	return register_tracepoint_module_notifier(&notifier);
}

/* Called when nvidia-uvm.ko is unloaded. */
void sg_readers_exit(void)
{
	struct bind *bind, *next;

	unregister_tracepoint_module_notifier(&notifier);
	tracepoint_synchronize_unregister();
	list_for_each_entry_safe(bind, next, &binds, node)
		bind_free(bind);
}
