// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * pma.c - the allocator of video memory: hands out frames, and asks UVM to evict if none are free.
 *
 * Modelled on RM's physical memory allocator (src/nvidia/src/kernel/gpu/mem_mgr/phys_mem_allocator/): frames are free,
 * unpinned or pinned. A call that finds too little memory tries to evict once: for single pages UVM chooses; for a
 * contiguous block the allocator chooses the first window without a pinned frame, and UVM has to empty exactly that
 * window. Frames that UVM keeps without declaring them pinned look evictable.
 *
 * Freed and newly allocated memory is poison; no memory is ever reported as zero.
 */
#include <linux/bitmap.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "impl.h"

#define FRAMES_IN_2M (SG_PAGE_2M >> SOFTGPU_FRAME_SHIFT)

static struct softgpu *to_gpu(void *pma)
{
	return pma;
}

static void update_stats(struct softgpu *gpu)
{
	gpu->pma_stats.numPages2m = gpu->frames / FRAMES_IN_2M;
	gpu->pma_stats.numFreePages64k = gpu->pma_free;
	gpu->pma_stats.numFreePages2m = gpu->pma_free_2m;
}

int sg_pma_init(struct softgpu *gpu)
{
	gpu->pma_used = bitmap_zalloc(gpu->frames, GFP_KERNEL);
	gpu->pma_pinned = bitmap_zalloc(gpu->frames, GFP_KERNEL);
	gpu->pma_chunk_used = kvzalloc(gpu->frames / FRAMES_IN_2M, GFP_KERNEL);
	if (!gpu->pma_used || !gpu->pma_pinned || !gpu->pma_chunk_used)
		return -ENOMEM;
	gpu->pma_free = gpu->frames;
	gpu->pma_free_2m = gpu->frames / FRAMES_IN_2M;
	update_stats(gpu);
	return 0;
}

void sg_pma_exit(struct softgpu *gpu)
{
	bitmap_free(gpu->pma_used);
	bitmap_free(gpu->pma_pinned);
	kvfree(gpu->pma_chunk_used);
}

static void mark(struct softgpu *gpu, u64 frame, bool used)
{
	u8 *chunk = &gpu->pma_chunk_used[frame / FRAMES_IN_2M];

	if (used) {
		__set_bit(frame, gpu->pma_used);
		gpu->pma_free--;
		if ((*chunk)++ == 0)
			gpu->pma_free_2m--;
	} else {
		__clear_bit(frame, gpu->pma_used);
		gpu->pma_free++;
		if (--(*chunk) == 0)
			gpu->pma_free_2m++;
	}
}

static bool find_run(struct softgpu *gpu, u64 frames, u64 align_mask, bool top, u64 first, u64 end, u64 *out)
{
	u64 at;

	if (frames > end - first)
		return false;
	if (!top) {
		at = bitmap_find_next_zero_area(gpu->pma_used, end, first, frames, align_mask);
		*out = at;
		return at + frames <= end;
	}
	for (at = (end - frames) & ~align_mask;; at -= align_mask + 1) {
		if (find_next_bit(gpu->pma_used, at + frames, at) >= at + frames) {
			*out = at;
			return true;
		}
		if (at < first + align_mask + 1)
			return false;
	}
}

/* Takes one contiguous run in [lo, hi). */
bool sg_pma_take(struct softgpu *gpu, u64 size, u64 align, bool top, bool pin, u64 lo, u64 hi, u64 *pa)
{
	u64 frames = DIV_ROUND_UP(size, SOFTGPU_FRAME_SIZE);
	u64 align_mask = max(align, SOFTGPU_FRAME_SIZE) / SOFTGPU_FRAME_SIZE - 1;
	u64 end = min(hi >> SOFTGPU_FRAME_SHIFT, gpu->frames);
	u64 at, i;

	if (!frames || !find_run(gpu, frames, align_mask, top, lo >> SOFTGPU_FRAME_SHIFT, end, &at))
		return false;
	for (i = at; i < at + frames; i++)
		mark(gpu, i, true);
	if (pin)
		bitmap_set(gpu->pma_pinned, at, frames);
	update_stats(gpu);
	*pa = at << SOFTGPU_FRAME_SHIFT;
	return true;
}

/* Checks that a frame may be discarded, and poisons it. */
static void wipe(struct softgpu *gpu, u64 frame)
{
	struct sg_frame *f = &gpu->frame[frame];
	u64 pa = frame << SOFTGPU_FRAME_SHIFT;

	if (f->mappings && !gpu->lost && !gpu->died)
		sg_error(gpu, SOFTGPU_ERROR_FREED_MAPPED, pa, f->mappings, "frame %llx freed while %u live entries map it", pa, f->mappings);
	if (f->tables && !gpu->lost && !gpu->died)
		sg_error(gpu, SOFTGPU_ERROR_TABLE_FREED, pa, f->tables, "frame %llx freed while it holds %u live tables", pa, f->tables);
	sg_membars_reused(gpu, frame);
	sg_frame_poison(gpu, pa);
}

void sg_pma_put(struct softgpu *gpu, u64 pa, u64 size)
{
	u64 first = pa >> SOFTGPU_FRAME_SHIFT;
	u64 end = first + DIV_ROUND_UP(size, SOFTGPU_FRAME_SIZE);
	u64 i;

	for (i = first; i < end; i++) {
		if (i >= gpu->frames || !test_bit(i, gpu->pma_used)) {
			sg_error(gpu, SOFTGPU_ERROR_DOUBLE_FREE, i << SOFTGPU_FRAME_SHIFT, 0, "frame %llx freed twice", i << SOFTGPU_FRAME_SHIFT);
			continue;
		}
		wipe(gpu, i);
		__clear_bit(i, gpu->pma_pinned);
		mark(gpu, i, false);
	}
	update_stats(gpu);
}

struct request {
	u64 count, page_size, align, lo, hi;
	bool contiguous, partial, evict, pin;
	u64 evict_calls, evict_failed;
};

/* Takes the available pages, up to the count; contiguous: all or none. */
static u64 take_pages(struct softgpu *gpu, const struct request *r, u64 *pages)
{
	u64 i;

	if (r->contiguous)
		return sg_pma_take(gpu, r->count * r->page_size, r->align, false, r->pin, r->lo, r->hi, pages) ? r->count : 0;
	for (i = 0; i < r->count; i++)
		if (!sg_pma_take(gpu, r->page_size, r->align, false, r->pin, r->lo, r->hi, &pages[i]))
			break;
	return i;
}

/* UVM chooses pages, evicts their contents, and hands them to us. */
static bool evict_pages(struct softgpu *gpu, struct request *r, u64 *pages)
{
	u64 i, f;

	if (!gpu->evict_pages)
		return false;
	r->evict_calls++;
	mutex_unlock(&model.lock);
	f = gpu->evict_pages(gpu->evict_data, r->page_size, pages, r->count, r->lo, r->hi - 1, UVM_PMA_GPU_MEMORY_TYPE_UNPROTECTED);
	mutex_lock(&model.lock);
	if (f != NV_OK) {
		r->evict_failed++;
		return false;
	}
	for (i = 0; i < r->count; i++) {
		u64 first = pages[i] >> SOFTGPU_FRAME_SHIFT;

		for (f = first; f < first + (r->page_size >> SOFTGPU_FRAME_SHIFT); f++) {
			wipe(gpu, f);
			if (r->pin)
				__set_bit(f, gpu->pma_pinned);
			else
				__clear_bit(f, gpu->pma_pinned);
		}
	}
	return true;
}

/* UVM empties the window that we choose. */
static bool evict_window(struct softgpu *gpu, struct request *r, u64 *pages)
{
	u64 frames = DIV_ROUND_UP(r->count * r->page_size, SOFTGPU_FRAME_SIZE);
	u64 end = min(r->hi >> SOFTGPU_FRAME_SHIFT, gpu->frames);
	u64 at = bitmap_find_next_zero_area(gpu->pma_pinned, end, r->lo >> SOFTGPU_FRAME_SHIFT, frames,
					    r->align / SOFTGPU_FRAME_SIZE - 1);
	NV_STATUS status;

	if (!gpu->evict_range || at + frames > end)
		return false;
	r->evict_calls++;
	mutex_unlock(&model.lock);
	status = gpu->evict_range(gpu->evict_data, at << SOFTGPU_FRAME_SHIFT, ((at + frames) << SOFTGPU_FRAME_SHIFT) - 1,
				  UVM_PMA_GPU_MEMORY_TYPE_UNPROTECTED);
	mutex_lock(&model.lock);
	if (status == NV_OK && sg_pma_take(gpu, frames << SOFTGPU_FRAME_SHIFT, SOFTGPU_FRAME_SIZE, false, r->pin,
					   at << SOFTGPU_FRAME_SHIFT, (at + frames) << SOFTGPU_FRAME_SHIFT, pages))
		return true;
	r->evict_failed++;
	return false;
}

/* Returns the number of pages taken. Called with the lock, which is dropped around eviction. */
static u64 allocate(struct softgpu *gpu, struct request *r, u64 *pages)
{
	u64 taken = take_pages(gpu, r, pages);

	if (taken == r->count || (r->partial && taken))
		return taken;
	while (taken)
		sg_pma_put(gpu, pages[--taken], r->page_size);
	if (!r->evict)
		return 0;
	if (r->contiguous ? evict_window(gpu, r, pages) : evict_pages(gpu, r, pages))
		return r->count;
	return 0;
}

int sg_pma_alloc(struct softgpu *gpu, u64 page_size, u64 count, bool contiguous, bool pin, u64 *pages, struct softgpu_alloc *counts)
{
	struct request r = {
		.count = count,
		.page_size = page_size,
		.align = page_size,
		.hi = gpu->vidmem,
		.contiguous = contiguous,
		.evict = true,
		.pin = pin,
	};
	u64 taken;

	mutex_lock(&model.lock);
	taken = allocate(gpu, &r, pages);
	mutex_unlock(&model.lock);
	if (counts) {
		counts->out_evict_calls = r.evict_calls;
		counts->out_evict_failed = r.evict_failed;
	}
	return taken ? 0 : -ENOSPC;
}

/* ---- interface ------------------------------------------------------------------------------------ */

NV_STATUS nvUvmInterfacePmaAllocPages(void *pma, NvLength count, NvU64 page_size, UvmPmaAllocationOptions *options, NvU64 *pages)
{
	struct softgpu *gpu = to_gpu(pma);
	struct request r = {
		.count = count,
		.page_size = page_size,
		.align = page_size,
		.hi = gpu->vidmem,
		.contiguous = options->flags & UVM_PMA_ALLOCATE_CONTIGUOUS,
		.partial = options->flags & UVM_PMA_ALLOCATE_ALLOW_PARTIAL,
		.evict = !(options->flags & UVM_PMA_ALLOCATE_DONT_EVICT),
		.pin = options->flags & UVM_PMA_ALLOCATE_PINNED,
	};
	u64 taken;

	SG_CALL(PmaAllocPages, gpu);
	if (page_size < SOFTGPU_FRAME_SIZE)
		return NV_ERR_NOT_SUPPORTED;
	if (options->flags & UVM_PMA_ALLOCATE_FORCE_ALIGNMENT)
		r.align = max_t(u64, r.align, options->alignment);
	if (options->flags & UVM_PMA_ALLOCATE_SPECIFY_ADDRESS_RANGE) {
		r.lo = options->physBegin;
		r.hi = min_t(u64, options->physEnd + 1, gpu->vidmem);
	}
	mutex_lock(&model.lock);
	gpu->count.pma_alloc_calls++;
	taken = allocate(gpu, &r, pages);
	mutex_unlock(&model.lock);
	options->resultFlags = 0; /* not zero */
	options->numPagesAllocated = taken;
	return taken ? NV_OK : NV_ERR_NO_MEMORY;
}

NV_STATUS nvUvmInterfacePmaPinPages(void *pma, NvU64 *pages, NvLength count, NvU64 page_size, NvU32 flags)
{
	struct softgpu *gpu = to_gpu(pma);
	u64 i;

	SG_CALL(PmaPinPages, gpu);
	mutex_lock(&model.lock);
	for (i = 0; i < count; i++)
		bitmap_set(gpu->pma_pinned, pages[i] >> SOFTGPU_FRAME_SHIFT, page_size >> SOFTGPU_FRAME_SHIFT);
	mutex_unlock(&model.lock);
	return NV_OK;
}

void nvUvmInterfacePmaFreePages(void *pma, NvU64 *pages, NvLength count, NvU64 page_size, NvU32 flags)
{
	struct softgpu *gpu = to_gpu(pma);
	u64 i;

	sg_call(SG_CALL_PmaFreePages, gpu);
	mutex_lock(&model.lock);
	gpu->count.pma_free_calls++;
	if (flags & UVM_PMA_ALLOCATE_CONTIGUOUS)
		sg_pma_put(gpu, pages[0], count * page_size);
	else
		for (i = 0; i < count; i++)
			sg_pma_put(gpu, pages[i], page_size);
	mutex_unlock(&model.lock);
}

NV_STATUS nvUvmInterfaceGetPmaObject(uvmGpuDeviceHandle device, void **pma, const UvmPmaStatistics **stats)
{
	struct softgpu *gpu = (struct softgpu *)device;

	SG_CALL(GetPmaObject, gpu);
	*pma = gpu;
	*stats = &gpu->pma_stats;
	return NV_OK;
}

NV_STATUS nvUvmInterfacePmaRegisterEvictionCallbacks(void *pma, uvmPmaEvictPagesCallback pages, uvmPmaEvictRangeCallback range, void *data)
{
	struct softgpu *gpu = to_gpu(pma);

	SG_CALL(PmaRegisterEvictionCallbacks, gpu);
	mutex_lock(&model.lock);
	gpu->evict_pages = pages;
	gpu->evict_range = range;
	gpu->evict_data = data;
	mutex_unlock(&model.lock);
	return NV_OK;
}

void nvUvmInterfacePmaUnregisterEvictionCallbacks(void *pma)
{
	struct softgpu *gpu = to_gpu(pma);

	sg_call(SG_CALL_PmaUnregisterEvictionCallbacks, gpu);
	mutex_lock(&model.lock);
	gpu->evict_pages = NULL;
	gpu->evict_range = NULL;
	mutex_unlock(&model.lock);
}
