// SPDX-License-Identifier: MIT OR GPL-2.0
/* access.c - /dev/softgpu's ACCESS: what a kernel running on the GPU would do (softgpu.h says what counts as a fault). */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "impl.h"

struct work {
	struct softgpu_access *a;
	struct sg_place place;
	bool sparse;
	u64 words[SG_PAGE_4K / sizeof(u64)];
};

/* Compares the cached translation with the page tables: a difference is recorded, and the cached one is used. */
static void check_stale(struct sg_space *space, u64 va, const struct sg_translation *cached)
{
	struct sg_translation now;

	sg_walk(space->gpu, space->root, va, false, &now);
	if (now.valid == cached->valid && now.sparse == cached->sparse &&
	    (!now.valid || (now.pa == cached->pa && now.aperture == cached->aperture && now.read_only == cached->read_only)))
		return;
	sg_fault(space->gpu, SOFTGPU_FAULT_STALE, va, cached->pte, space->pid, 0);
}

/* Returns the errno of a fault, and delivers the fault to UVM if that was requested. */
static int told(struct work *w, struct sg_space *space, u64 va, bool write, int fault)
{
	int result = w->a->flags & SOFTGPU_ACCESS_DELIVER ? sg_fault_deliver(space, va, write) : 0;

	return result ? result : fault;
}

static int translate(struct sg_space *space, u64 va, bool write, struct work *w)
{
	struct softgpu *gpu = space->gpu;
	struct sg_translation t;

	sg_tlb_translate(gpu, space->root, va, &t);
	check_stale(space, va, &t);
	w->sparse = !t.valid && t.sparse;
	if (w->sparse)
		return 0;
	if (!t.valid) {
		sg_fault(gpu, SOFTGPU_FAULT_MISSING, va, t.pte, space->pid, 0);
		return told(w, space, va, write, -EFAULT);
	}
	if (write && t.read_only) {
		sg_fault(gpu, SOFTGPU_FAULT_READ_ONLY, va, t.pte, space->pid, 0);
		return told(w, space, va, write, -EROFS);
	}
	if (!sg_translation_place(gpu, &t, &w->place)) {
		sg_fault(gpu, SOFTGPU_FAULT_BAD_ADDRESS, va, t.pte, space->pid, 0);
		return -ENXIO;
	}
	return 0;
}

static u64 word_at(const struct softgpu_access *a, u64 offset)
{
	return a->value + offset / sizeof(u64) * a->step;
}

static int compare(struct work *w, u64 n)
{
	struct softgpu_access *a = w->a;
	u64 i;

	for (i = 0; i < n / sizeof(u64); i++) {
		if (w->words[i] == word_at(a, a->out_done))
			a->out_done += sizeof(u64);
		else {
			a->out_found = w->words[i];
			return -EBADMSG;
		}
	}
	return 0;
}

/* Accesses n bytes of one page, through the buffer w->words. Lock held. */
static int piece(struct work *w, u64 n)
{
	struct softgpu_access *a = w->a;
	u64 i;
	int result = 0;

	switch (a->op) {
	case SOFTGPU_READ:
	case SOFTGPU_CHECK:
		if (w->sparse)
			memset(w->words, 0, n);
		else
			result = sg_mem_read(&w->place, w->words, n);
		break;
	case SOFTGPU_FILL:
		if (w->sparse)
			break;
		if (!a->step) {
			result = sg_mem_fill(&w->place, a->value, n);
			break;
		}
		for (i = 0; i < n / sizeof(u64); i++)
			w->words[i] = word_at(a, a->out_done + i * sizeof(u64));
		fallthrough;
	case SOFTGPU_WRITE:
		if (!w->sparse)
			result = sg_mem_write(&w->place, w->words, n);
		break;
	}
	return result == -EIO ? -ENXIO : result;
}

static int place_of(struct work *w, u64 va, bool write)
{
	struct softgpu_access *a = w->a;
	struct softgpu *gpu = sg_gpu_by_index(a->space.gpu);
	struct sg_space *space;

	if (gpu->lost)
		return -ENODEV;
	if (a->flags & SOFTGPU_ACCESS_PHYSICAL) {
		w->place = (struct sg_place){ .where = SG_VID, .gpu = gpu, .pa = va };
		w->sparse = false;
		return sg_place_ok(&w->place, 1) ? 0 : -ENXIO;
	}
	space = sg_space_find(&a->space);
	if (!space)
		return -ENOENT;
	if (va >> gpu->format->va_bits) {
		sg_fault(gpu, SOFTGPU_FAULT_MISSING, va, 0, space->pid, 0);
		return -EFAULT;
	}
	return translate(space, va, write, w);
}

static int step(struct work *w)
{
	struct softgpu_access *a = w->a;
	u64 va = a->va + a->out_done;
	u64 reach = a->op == SOFTGPU_FILL && !a->step ? SOFTGPU_FRAME_SIZE : SG_PAGE_4K;
	u64 n = min(a->length - a->out_done, reach - (va & (reach - 1)));
	void __user *user = u64_to_user_ptr(a->buf + a->out_done);
	bool write = a->op == SOFTGPU_WRITE || a->op == SOFTGPU_FILL;
	int result;

	if (a->op == SOFTGPU_WRITE && copy_from_user(w->words, user, n))
		return -EINVAL;
	mutex_lock(&model.lock);
	result = place_of(w, va, write);
	if (!result && reach > SG_PAGE_4K && !(a->flags & SOFTGPU_ACCESS_PHYSICAL)) {
		/* not across a page, which may be smaller than the translation's range */
		n = min(n, SG_PAGE_4K - (va & (SG_PAGE_4K - 1)));
		if (IS_ALIGNED(va, SOFTGPU_FRAME_SIZE) && a->length - a->out_done >= SOFTGPU_FRAME_SIZE && !w->sparse) {
			struct sg_space *space = sg_space_find(&a->space);
			struct sg_translation t;

			sg_tlb_translate(space->gpu, space->root, va, &t);
			if (t.valid && t.page_size >= SOFTGPU_FRAME_SIZE)
				n = SOFTGPU_FRAME_SIZE;
		}
	}
	if (!result)
		result = piece(w, n);
	if (!result && a->op == SOFTGPU_CHECK)
		result = compare(w, n);
	else if (!result)
		a->out_done += n;
	mutex_unlock(&model.lock);
	if (!result && a->op == SOFTGPU_READ && copy_to_user(user, w->words, n)) {
		a->out_done -= n;
		return -EINVAL;
	}
	return result;
}

long sg_access(struct softgpu_access *a)
{
	struct work *w;
	long result = 0;

	if (a->op > SOFTGPU_CHECK || (a->flags & ~(SOFTGPU_ACCESS_PHYSICAL | SOFTGPU_ACCESS_DELIVER)) || a->va + a->length < a->va)
		return -EINVAL;
	if (a->op >= SOFTGPU_FILL && !IS_ALIGNED(a->va | a->length, sizeof(u64)))
		return -EINVAL;
	if (!sg_gpu_by_index(a->space.gpu))
		return -ENOENT;
	w = kvmalloc(sizeof(*w), GFP_KERNEL);
	if (!w)
		return -ENOMEM;
	w->a = a;
	a->out_done = 0;
	a->out_found = 0;
	while (!result && a->out_done < a->length) {
		result = step(w);
		cond_resched();
	}
	kvfree(w);
	return result;
}
