// SPDX-License-Identifier: MIT OR GPL-2.0
/* chardev.c - /dev/softgpu (softgpu.h). Closing a descriptor undoes everything that was requested through it. */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "impl.h"

static long do_info(struct file *file, void *argument)
{
	struct softgpu_info *info = argument;
	struct softgpu *gpu = sg_gpu_by_index(info->gpu);

	if (!gpu)
		return -ENOENT;
	info->out_gpus = model.gpus;
	info->out_branch = SOFTGPU_BRANCH;
	info->out_arch = gpu->arch->id;
	info->out_vidmem = gpu->vidmem;
	memcpy(info->out_uuid, gpu->uuid, sizeof(gpu->uuid));
	info->out_peers = sg_peers_of(gpu);
	info->out_lost = gpu->lost;
	info->out_va_bits = gpu->format->va_bits;
	return 0;
}

static long do_xlate(struct file *file, void *argument)
{
	struct softgpu_xlate *x = argument;
	struct sg_space *space = sg_space_find(&x->space);
	struct sg_translation t;

	if (!space)
		return -ENOENT;
	sg_walk(space->gpu, space->root, x->va, false, &t);
	x->out_pte = t.pte;
	x->out_pa = t.pa;
	x->out_page_size = t.valid ? t.page_size : 0;
	x->out_valid = t.valid;
	x->out_aperture = t.aperture;
	x->out_peer = t.aperture == SOFTGPU_APERTURE_PEER ? t.peer : 0;
	x->out_read_only = t.read_only;
	x->out_sparse = t.sparse;
	x->out_has_table = t.has_table;
	return 0;
}

static long do_access(struct file *file, void *argument)
{
	return sg_access(argument);
}

static long do_scan(struct file *file, void *argument)
{
	struct softgpu_scan *scan = argument;
	struct sg_space *space = sg_space_find(&scan->space);
	struct softgpu_scan result = { .space = scan->space, .start = scan->start, .length = scan->length };

	if (!scan->length || scan->start + scan->length - 1 < scan->start)
		return -EINVAL;
	if (!space)
		return -ENOENT;
	sg_tables_scan(space, &result);
	*scan = result;
	return 0;
}

static long do_frame(struct file *file, void *argument)
{
	struct softgpu_frame *out = argument;
	struct softgpu *gpu = sg_gpu_by_index(out->gpu);
	struct sg_frame *frame;
	u64 number = out->pa >> SOFTGPU_FRAME_SHIFT;
	u32 i;

	if (!gpu || out->pa >= gpu->vidmem)
		return -ENOENT;
	frame = &gpu->frame[number];
	out->out_state = frame->part ? SOFTGPU_FRAME_DATA : frame->poison ? SOFTGPU_FRAME_POISON : SOFTGPU_FRAME_UNIFORM;
	out->out_word = frame->word;
	out->out_allocated = test_bit(number, gpu->pma_used);
	out->out_pinned = test_bit(number, gpu->pma_pinned);
	out->out_mappings = frame->mappings;
	out->out_backed = 0;
	for (i = 0; frame->part && i < SG_SUBPAGES; i++)
		out->out_backed += frame->part[i] ? SG_PAGE_4K >> 10 : 0;
	return 0;
}

/* Called without the lock. */
static long do_alloc(struct file *file, void *argument)
{
	struct softgpu_alloc *a = argument;
	struct softgpu *gpu = sg_gpu_by_index(a->gpu);
	bool sys = a->flags & SOFTGPU_ALLOC_SYSMEM;
	struct sg_client *client;
	struct sg_object *object = NULL;
	struct sg_memory *memory;
	int error;

	if (!gpu)
		return -ENOENT;
	if (a->flags & ~(SOFTGPU_ALLOC_SYSMEM | SOFTGPU_ALLOC_CONTIGUOUS) || !a->size || a->size > 1ull << 40)
		return -EINVAL;
	if (a->page_size != SG_PAGE_64K && a->page_size != SG_PAGE_2M && !(sys && a->page_size == SG_PAGE_4K))
		return -EINVAL;
	if (!IS_ALIGNED(a->size, a->page_size))
		return -EINVAL;
	memory = sg_memory_new(gpu, sys, a->size, a->page_size, a->flags & SOFTGPU_ALLOC_CONTIGUOUS, a, &error);
	if (!memory)
		return error;
	mutex_lock(&model.lock);
	client = sg_client_new(file, 0);
	if (client)
		object = sg_object_new(client, 0, SG_OBJECT_MEMORY, gpu);
	if (object) {
		object->memory = memory;
		a->out_client = client->handle;
		a->out_handle = object->handle;
		a->out_pa = memory->pa[0];
	} else {
		sg_memory_put(memory);
		if (client)
			sg_object_free(file, client->handle, client->handle);
	}
	mutex_unlock(&model.lock);
	return object ? 0 : -ENOMEM;
}

/* Each allocation and each space has its own client, which is freed with it. */
static long do_free(struct file *file, void *argument)
{
	struct softgpu_handle *h = argument;
	struct sg_client *client = sg_client_find(h->client);

	if (!client || !sg_object_find(client, h->handle))
		return -ENOENT;
	return sg_object_free(file, h->client, h->client);
}

static long do_space_new(struct file *file, void *argument)
{
	struct softgpu_space *name = argument;
	struct softgpu *gpu = sg_gpu_by_index(name->gpu);
	struct sg_client *client;
	struct sg_object *object;

	if (!gpu)
		return -ENOENT;
	client = sg_client_new(file, 0);
	object = client ? sg_object_new(client, 0, SG_OBJECT_VASPACE, gpu) : NULL;
	if (!object) {
		if (client)
			sg_object_free(file, client->handle, client->handle);
		return -ENOMEM;
	}
	name->client = client->handle;
	name->vaspace = object->handle;
	return 0;
}

static long do_space_free(struct file *file, void *argument)
{
	struct softgpu_space *name = argument;
	struct softgpu_handle h = { .client = name->client, .handle = name->vaspace };

	return do_free(file, &h);
}

static long do_counters(struct file *file, void *argument)
{
	struct softgpu_counters *out = argument;
	struct softgpu *gpu = sg_gpu_by_index(out->gpu);
	struct sg_client *client;

	if (!gpu)
		return -ENOENT;
	*out = gpu->count;
	out->gpu = gpu->index;
	out->tables_now = gpu->live_tables;
	out->ptes_now = gpu->live_ptes;
	out->frames = gpu->frames;
	out->frames_free_now = gpu->pma_free;
	out->frames_pinned_now = bitmap_weight(gpu->pma_pinned, gpu->frames);
	out->backing_bytes_now = gpu->backing_bytes;
	out->tlb_entries_now = gpu->tlb.count;
	sg_readers_counters(out);
	list_for_each_entry(client, &model.clients, node)
		out->clients_now++;
	return 0;
}

static long do_faults(struct file *file, void *argument)
{
	struct softgpu_faults *out = argument;
	struct softgpu *gpu = sg_gpu_by_index(out->gpu);

	if (!gpu)
		return -ENOENT;
	memset(out->out, 0, sizeof(out->out));
	out->out_count = 0;
	while (gpu->fault_tail != gpu->fault_head && out->out_count < SOFTGPU_FAULT_RECORDS)
		out->out[out->out_count++] = gpu->fault[gpu->fault_tail++ % SG_FAULT_LOG];
	out->out_dropped = gpu->fault_dropped;
	gpu->fault_dropped = 0;
	return 0;
}

static long do_inject(struct file *file, void *argument)
{
	return sg_inject(argument, file);
}

static long do_injected(struct file *file, void *argument)
{
	sg_injected(argument);
	return 0;
}

static long do_calls(struct file *file, void *argument)
{
	return sg_call_info(argument);
}

static void hold_release(struct softgpu *gpu)
{
	gpu->hold = SOFTGPU_HOLD_RELEASE;
	gpu->hold_owner = NULL;
	gpu->hold_pass = false;
	WRITE_ONCE(gpu->held, false);
	wake_up_all(&gpu->wait);
}

/* Called without the lock: it may wait. */
static long do_hold(struct file *file, void *argument)
{
	struct softgpu_hold *h = argument;
	struct softgpu *gpu = sg_gpu_by_index(h->gpu);
	bool stands;
	long left;

	if (!gpu)
		return -ENOENT;
	if (h->op > SOFTGPU_HOLD_QUIET)
		return -EINVAL;
	if (h->op == SOFTGPU_HOLD_WAIT) {
		left = wait_event_killable_timeout(gpu->wait, READ_ONCE(gpu->held), msecs_to_jiffies(h->timeout_ms));
		h->out_held = READ_ONCE(gpu->held);
		return left < 0 ? left : h->out_held ? 0 : -ETIMEDOUT;
	}
	mutex_lock(&model.lock);
	stands = gpu->held;
	hold_release(gpu);
	gpu->hold = h->op;
	gpu->hold_pass = stands;
	gpu->hold_owner = file;
	mutex_unlock(&model.lock);
	h->out_held = 0;
	return 0;
}

static long do_settings(struct file *file, void *argument)
{
	struct softgpu_settings *s = argument;
	struct softgpu_settings old = {
		.flags = s->flags,
		.delay_us = settings.delay_us,
		.reorder = settings.reorder,
		.tlb_negative = settings.tlb_negative,
		.tlb_pde = settings.tlb_pde,
		.seed = settings.seed,
		.check_ordering = settings.check_ordering,
	};

	if (s->flags & ~SOFTGPU_SETTINGS_SET || s->__reserved)
		return -EINVAL;
	if (s->flags & SOFTGPU_SETTINGS_SET) {
		settings.delay_us = s->delay_us;
		settings.reorder = s->reorder;
		settings.tlb_negative = s->tlb_negative;
		settings.tlb_pde = s->tlb_pde;
		settings.check_ordering = s->check_ordering;
		if (s->seed) {
			settings.seed = s->seed;
			model.random = s->seed;
		}
	}
	*s = old;
	return 0;
}

static long do_lost(struct file *file, void *argument)
{
	struct softgpu_lost *lost = argument;
	struct softgpu *gpu = sg_gpu_by_index(lost->gpu);
	struct sg_channel *channel;

	if (!gpu)
		return -ENOENT;
	gpu->lost = lost->lost;
	if (gpu->lost)
		list_for_each_entry(channel, &gpu->channels, node)
			sg_channel_die(channel, 0, "lost", 0);
	return 0;
}

static long do_verify(struct file *file, void *argument)
{
	return sg_tables_verify();
}

static long do_flush(struct file *file, void *argument)
{
	struct softgpu *gpu = sg_gpu_by_index(*(u32 *)argument);

	if (!gpu)
		return -ENOENT;
	sg_tlb_flush(gpu);
	return 0;
}

/* Called without the lock: UVM waits for its channels in it. */
static long do_suspend(struct file *file, void *argument)
{
	struct softgpu_suspend *s = argument;

	u32 i;

	if (!model.events)
		return -ENODEV;
	for (i = 0; i < model.gpus; i++)
		sg_registers_settle(model.gpu[i]);
	s->out_status = s->suspend ? model.events->suspend() : model.events->resume();
	return 0;
}

static const struct {
	unsigned int command;
	bool unlocked;
	long (*handler)(struct file *file, void *argument);
} commands[] = {
	{ SOFTGPU_INFO, false, do_info },
	{ SOFTGPU_XLATE, false, do_xlate },
	{ SOFTGPU_ACCESS, true, do_access },
	{ SOFTGPU_SCAN, false, do_scan },
	{ SOFTGPU_FRAME, false, do_frame },
	{ SOFTGPU_ALLOC, true, do_alloc },
	{ SOFTGPU_FREE, false, do_free },
	{ SOFTGPU_SPACE_NEW, false, do_space_new },
	{ SOFTGPU_SPACE_FREE, false, do_space_free },
	{ SOFTGPU_COUNTERS, false, do_counters },
	{ SOFTGPU_FAULTS, false, do_faults },
	{ SOFTGPU_INJECT, true, do_inject },
	{ SOFTGPU_INJECTED, true, do_injected },
	{ SOFTGPU_CALLS, true, do_calls },
	{ SOFTGPU_HOLD, true, do_hold },
	{ SOFTGPU_SETTINGS, false, do_settings },
	{ SOFTGPU_LOST, false, do_lost },
	{ SOFTGPU_VERIFY, false, do_verify },
	{ SOFTGPU_FLUSH, false, do_flush },
	{ SOFTGPU_SUSPEND, true, do_suspend },
};

/* The struct is copied in and out, even on failure: ACCESS reports how far it got. */
static long run_command(struct file *file, u32 i, void __user *user)
{
	size_t size = _IOC_SIZE(commands[i].command);
	void *argument = kzalloc(max_t(size_t, size, 1), GFP_KERNEL);
	long result;

	if (!argument)
		return -ENOMEM;
	if (copy_from_user(argument, user, size)) {
		kfree(argument);
		return -EFAULT;
	}
	if (!commands[i].unlocked)
		mutex_lock(&model.lock);
	result = commands[i].handler(file, argument);
	if (!commands[i].unlocked)
		mutex_unlock(&model.lock);
	if ((_IOC_DIR(commands[i].command) & _IOC_READ) && copy_to_user(user, argument, size) && !result)
		result = -EFAULT;
	kfree(argument);
	return result;
}

static long softgpu_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	u32 i;

	for (i = 0; i < ARRAY_SIZE(commands); i++)
		if (commands[i].command == command)
			return run_command(file, i, (void __user *)argument);
	return -ENOTTY;
}

static int softgpu_release(struct inode *inode, struct file *file)
{
	u32 i;

	sg_inject_forget(file);
	mutex_lock(&model.lock);
	for (i = 0; i < model.gpus; i++)
		if (model.gpu[i]->hold_owner == file)
			hold_release(model.gpu[i]);
	sg_client_free_all(file);
	mutex_unlock(&model.lock);
	return 0;
}

static const struct file_operations softgpu_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = softgpu_ioctl,
	.release = softgpu_release,
};

static struct miscdevice softgpu_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "softgpu",
	.fops = &softgpu_fops,
	.mode = 0666,
};

int sg_chardev_init(void)
{
	return misc_register(&softgpu_device);
}

void sg_chardev_exit(void)
{
	misc_deregister(&softgpu_device);
}
