// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * vidmem.c - video memory, and access to all places in memory that a GPU can touch.
 *
 * A frame (64 KB) is either one repeated 64-bit word, which costs nothing, or that word with some of its 4 KB parts
 * backed by guest memory. The word is poison when a frame is new, and again when it is freed: so an 8 GB GPU fits
 * into a small guest, and missing zeroing shows.
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/vmalloc.h>

#include "impl.h"

int sg_vidmem_init(struct softgpu *gpu)
{
	u64 i;

	gpu->frames = gpu->vidmem >> SOFTGPU_FRAME_SHIFT;
	gpu->frame = kvcalloc(gpu->frames, sizeof(*gpu->frame), GFP_KERNEL);
	if (!gpu->frame)
		return -ENOMEM;
	for (i = 0; i < gpu->frames; i++) {
		gpu->frame[i].word = SOFTGPU_POISON_WORD;
		gpu->frame[i].poison = 1;
	}
	return 0;
}

/* Frees the backing of a frame and sets all its words to `word`. */
static void frame_uniform(struct softgpu *gpu, struct sg_frame *frame, u64 word, bool poison)
{
	u32 i;

	if (frame->part) {
		for (i = 0; i < SG_SUBPAGES; i++) {
			if (!frame->part[i])
				continue;
			free_page((unsigned long)frame->part[i]);
			gpu->backing_bytes -= SG_PAGE_4K;
		}
		kfree(frame->part);
		frame->part = NULL;
	}
	frame->word = word;
	frame->poison = poison;
	frame->cpu_mapped = 0;
}

void sg_frame_poison(struct softgpu *gpu, u64 pa)
{
	frame_uniform(gpu, &gpu->frame[pa >> SOFTGPU_FRAME_SHIFT], SOFTGPU_POISON_WORD, true);
}

void sg_vidmem_exit(struct softgpu *gpu)
{
	u64 i;

	if (!gpu->frame)
		return;
	for (i = 0; i < gpu->frames; i++)
		frame_uniform(gpu, &gpu->frame[i], 0, false);
	kvfree(gpu->frame);
	gpu->frame = NULL;
}

/* Returns the backing of the 4 KB at pa, and allocates it if needed; fill: with the frame's word. NULL: no guest memory. */
static u8 *frame_part(struct softgpu *gpu, u64 pa, bool fill)
{
	struct sg_frame *frame = &gpu->frame[pa >> SOFTGPU_FRAME_SHIFT];
	u32 i = (pa / SG_PAGE_4K) % SG_SUBPAGES;

	if (!frame->part)
		frame->part = kcalloc(SG_SUBPAGES, sizeof(*frame->part), GFP_KERNEL);
	if (!frame->part)
		return NULL;
	if (!frame->part[i]) {
		frame->part[i] = (void *)__get_free_page(GFP_KERNEL);
		if (!frame->part[i])
			return NULL;
		if (fill)
			memset64(frame->part[i], frame->word, SG_PAGE_4K / sizeof(u64));
		gpu->backing_bytes += SG_PAGE_4K;
	}
	return frame->part[i];
}

bool sg_place_ok(const struct sg_place *place, u64 length)
{
	switch (place->where) {
	case SG_VID:
		return place->pa < place->gpu->vidmem && length <= place->gpu->vidmem - place->pa;
	case SG_SYS:
		return pfn_valid(place->pa >> PAGE_SHIFT) && pfn_valid((place->pa + length - 1) >> PAGE_SHIFT);
	case SG_CPU:
		return true;
	}
	return false;
}

void sg_place_advance(struct sg_place *place, u64 length)
{
	place->pa += length;
	if (place->where == SG_CPU)
		place->cpu += length;
}

/* Fills buf with a repeated word, starting at its byte `phase`. */
static void repeat_word(u8 *buf, u64 word, u32 phase, u64 length)
{
	u64 i;

	if (phase == 0 && IS_ALIGNED((unsigned long)buf | length, sizeof(u64))) {
		memset64((u64 *)buf, word, length / sizeof(u64));
		return;
	}
	for (i = 0; i < length; i++)
		buf[i] = ((u8 *)&word)[(phase + i) % sizeof(u64)];
}

static u64 to_page_end(u64 address, u64 length)
{
	return min_t(u64, length, SG_PAGE_4K - (address & (SG_PAGE_4K - 1)));
}

static int vid_read(struct softgpu *gpu, u64 pa, u8 *buf, u64 length)
{
	while (length) {
		struct sg_frame *frame = &gpu->frame[pa >> SOFTGPU_FRAME_SHIFT];
		u8 *part = frame->part ? frame->part[(pa / SG_PAGE_4K) % SG_SUBPAGES] : NULL;
		u64 n = to_page_end(pa, length);

		if (part) {
			memcpy(buf, part + (pa & (SG_PAGE_4K - 1)), n);
		} else {
			repeat_word(buf, frame->word, pa % sizeof(u64), n);
			if (frame->poison) {
				gpu->count.poison_reads++;
				sg_fault(gpu, SOFTGPU_FAULT_POISON, pa, 0, 0, 0);
			}
		}
		pa += n;
		buf += n;
		length -= n;
	}
	return 0;
}

static int vid_write(struct softgpu *gpu, u64 pa, const u8 *buf, u64 length)
{
	while (length) {
		u64 n = to_page_end(pa, length);
		u8 *part = frame_part(gpu, pa, n != SG_PAGE_4K);

		if (!part)
			return -ENOMEM;
		memcpy(part + (pa & (SG_PAGE_4K - 1)), buf, n);
		if (gpu->frame[pa >> SOFTGPU_FRAME_SHIFT].tables)
			sg_tables_written(gpu, false, pa, n);
		pa += n;
		buf += n;
		length -= n;
	}
	return 0;
}

/* A copy that may be read while it is written word by word (semaphores, notifiers). */
static void sys_copy(void *to, const void *from, u64 length)
{
	if (length == sizeof(u32) && IS_ALIGNED((unsigned long)to | (unsigned long)from, sizeof(u32)))
		WRITE_ONCE(*(u32 *)to, READ_ONCE(*(u32 *)from));
	else if (length == sizeof(u64) && IS_ALIGNED((unsigned long)to | (unsigned long)from, sizeof(u64)))
		WRITE_ONCE(*(u64 *)to, READ_ONCE(*(u64 *)from));
	else
		memcpy(to, from, length);
}

static int sys_access(u64 pa, u8 *buf, u64 length, bool write)
{
	while (length) {
		u64 n = to_page_end(pa, length);
		u8 *cpu;

		if (!pfn_valid(pa >> PAGE_SHIFT))
			return -EIO;
		cpu = phys_to_virt(pa);
		if (write) {
			sys_copy(cpu, buf, n);
			sg_tables_written(NULL, true, pa, n);
		} else {
			sys_copy(buf, cpu, n);
		}
		pa += n;
		buf += n;
		length -= n;
	}
	return 0;
}

int sg_mem_read(const struct sg_place *place, void *buf, u64 length)
{
	if (!sg_place_ok(place, length))
		return -EIO;
	switch (place->where) {
	case SG_VID:
		return vid_read(place->gpu, place->pa, buf, length);
	case SG_SYS:
		return sys_access(place->pa, buf, length, false);
	case SG_CPU:
		sys_copy(buf, place->cpu, length);
		return 0;
	}
	return -EIO;
}

int sg_mem_write(const struct sg_place *place, const void *buf, u64 length)
{
	if (!sg_place_ok(place, length))
		return -EIO;
	switch (place->where) {
	case SG_VID:
		return vid_write(place->gpu, place->pa, buf, length);
	case SG_SYS:
		return sys_access(place->pa, (u8 *)buf, length, true);
	case SG_CPU:
		sys_copy(place->cpu, buf, length);
		return 0;
	}
	return -EIO;
}

static int vid_fill(struct softgpu *gpu, u64 pa, u64 word, u64 length)
{
	u64 at = 0;

	while (at < length) {
		u64 to = pa + at;
		struct sg_frame *frame = &gpu->frame[to >> SOFTGPU_FRAME_SHIFT];
		u32 phase = at % sizeof(u64);
		u64 n;
		u8 *part;

		if (!frame->tables && !frame->cpu_mapped && phase == 0 && IS_ALIGNED(to, SOFTGPU_FRAME_SIZE) && length - at >= SOFTGPU_FRAME_SIZE) {
			frame_uniform(gpu, frame, word, false);
			at += SOFTGPU_FRAME_SIZE;
			continue;
		}
		n = to_page_end(to, length - at);
		if (frame->poison || frame->part || frame->word != word || phase || !IS_ALIGNED(to, sizeof(u64))) {
			part = frame_part(gpu, to, n != SG_PAGE_4K);
			if (!part)
				return -ENOMEM;
			repeat_word(part + (to & (SG_PAGE_4K - 1)), word, phase, n);
		}
		if (frame->tables)
			sg_tables_written(gpu, false, to, n);
		at += n;
	}
	return 0;
}

int sg_mem_fill(const struct sg_place *place, u64 word, u64 length)
{
	u64 at = 0;

	if (!sg_place_ok(place, length))
		return -EIO;
	switch (place->where) {
	case SG_VID:
		return vid_fill(place->gpu, place->pa, word, length);
	case SG_SYS:
		while (at < length) {
			u64 to = place->pa + at;
			u64 n = to_page_end(to, length - at);

			if (!pfn_valid(to >> PAGE_SHIFT))
				return -EIO;
			repeat_word(phys_to_virt(to), word, at % sizeof(u64), n);
			sg_tables_written(NULL, true, to, n);
			at += n;
		}
		return 0;
	case SG_CPU:
		repeat_word(place->cpu, word, 0, length);
		return 0;
	}
	return -EIO;
}

void *sg_vidmem_map(struct softgpu *gpu, u64 pa, u64 length)
{
	u64 count = DIV_ROUND_UP(length, SG_PAGE_4K);
	struct page **pages = kvcalloc(count, sizeof(*pages), GFP_KERNEL);
	void *mapped = NULL;
	u64 i;

	if (!pages)
		return NULL;
	for (i = 0; i < count; i++) {
		u8 *part = frame_part(gpu, pa + i * SG_PAGE_4K, true);

		if (!part)
			goto out;
		pages[i] = virt_to_page(part);
		gpu->frame[(pa + i * SG_PAGE_4K) >> SOFTGPU_FRAME_SHIFT].cpu_mapped = 1;
	}
	mapped = vmap(pages, count, VM_MAP, PAGE_KERNEL);
out:
	kvfree(pages);
	return mapped;
}
