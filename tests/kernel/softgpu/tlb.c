// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * tlb.c - translations that the hardware caches until a TLB invalidate covers them.
 *
 * For each root it caches pages (present, sparse and absent) and directory entries. Nothing is evicted, so that a missing
 * invalidate always shows; only at ENTRIES_MAX are all entries dropped, and a line is logged.
 *
 * Levels: an entry carries the level of the page table entry that decided it: a page of 64 KB or 4 KB PTE, a page of
 * 2 MB PDE0, an absence the level where the walk ended, a directory entry its own. An invalidate names the highest level
 * that it reaches (clc86f.h, MEM_OP_C_TLB_INVALIDATE_PAGE_TABLE_LEVEL): what is above stays, stale or not.
 */
#include <linux/log2.h>
#include <linux/slab.h>

#include "impl.h"

#define ENTRIES_MAX (1u << 18)

struct tlb_root {
	struct list_head node;
	struct sg_root root;
	struct list_head entries;
	u64 count;
};

enum entry_kind { ENTRY_PAGE, ENTRY_DIRECTORY };

struct tlb_entry {
	struct hlist_node hash;
	struct list_head node; /* link in its root's list */
	struct tlb_root *root;
	u64 number;            /* address >> shift */
	u8 shift;
	u8 kind;
	u8 level;
	u64 raw[2];            /* DIRECTORY */
	u64 pa;                /* PAGE: address of the page's start */
	bool valid, sparse, read_only;
	u8 aperture, peer;
};

static u64 key_of(const struct tlb_root *root, u64 number, u8 shift, u8 kind)
{
	return (root->root.pa >> 12) ^ (number << 6) ^ ((u64)shift << 1) ^ kind ^ ((u64)root->root.sys << 63);
}

static struct tlb_root *root_find(struct softgpu *gpu, struct sg_root root)
{
	struct tlb_root *r;

	list_for_each_entry(r, &gpu->tlb.roots, node)
		if (r->root.pa == root.pa && r->root.sys == root.sys)
			return r;
	return NULL;
}

static struct tlb_root *root_get(struct softgpu *gpu, struct sg_root root)
{
	struct tlb_root *r = root_find(gpu, root);

	if (r)
		return r;
	r = kzalloc(sizeof(*r), GFP_KERNEL);
	if (!r)
		return NULL;
	r->root = root;
	INIT_LIST_HEAD(&r->entries);
	list_add(&r->node, &gpu->tlb.roots);
	return r;
}

static struct tlb_entry *entry_find(struct softgpu *gpu, struct tlb_root *root, u64 va, u8 shift, u8 kind)
{
	u64 number = va >> shift;
	struct tlb_entry *e;

	hash_for_each_possible(gpu->tlb.entries, e, hash, key_of(root, number, shift, kind))
		if (e->root == root && e->number == number && e->shift == shift && e->kind == kind)
			return e;
	return NULL;
}

static void entry_drop(struct softgpu *gpu, struct tlb_entry *e)
{
	hash_del(&e->hash);
	list_del(&e->node);
	e->root->count--;
	kfree(e);
	gpu->tlb.count--;
}

static struct tlb_entry *entry_add(struct softgpu *gpu, struct sg_root root, u64 va, u8 shift, u8 kind, u8 level)
{
	struct tlb_root *r;
	struct tlb_entry *e;

	if (gpu->tlb.count >= ENTRIES_MAX) {
		pr_info("softgpu: TLB model full, all entries dropped\n");
		sg_tlb_flush(gpu);
	}
	r = root_get(gpu, root);
	e = r ? kzalloc(sizeof(*e), GFP_KERNEL) : NULL;
	if (!e)
		return NULL;
	e->root = r;
	e->number = va >> shift;
	e->shift = shift;
	e->kind = kind;
	e->level = level;
	hash_add(gpu->tlb.entries, &e->hash, key_of(r, e->number, shift, kind));
	list_add(&e->node, &r->entries);
	r->count++;
	gpu->tlb.count++;
	return e;
}

void sg_tlb_init(struct softgpu *gpu)
{
	hash_init(gpu->tlb.entries);
	INIT_LIST_HEAD(&gpu->tlb.roots);
}

void sg_tlb_invalidate_root(struct softgpu *gpu, struct sg_root root)
{
	struct tlb_root *r = root_find(gpu, root);
	struct tlb_entry *e, *next;

	if (!r)
		return;
	list_for_each_entry_safe(e, next, &r->entries, node)
		entry_drop(gpu, e);
	list_del(&r->node);
	kfree(r);
}

void sg_tlb_flush(struct softgpu *gpu)
{
	struct tlb_root *r, *next;

	list_for_each_entry_safe(r, next, &gpu->tlb.roots, node)
		sg_tlb_invalidate_root(gpu, r->root);
}

void sg_tlb_exit(struct softgpu *gpu)
{
	sg_tlb_flush(gpu);
}

static const u8 page_shifts[] = { 16, 21, 12, 29 };

/* The maximum number of entries in [start, last]. */
static u64 probes_for(struct softgpu *gpu, u64 start, u64 last)
{
	u64 probes = 0;
	u32 i;

	for (i = 0; i < ARRAY_SIZE(page_shifts); i++)
		probes += (last >> page_shifts[i]) - (start >> page_shifts[i]) + 1;
	for (i = SG_LEVEL_PDE0; i <= gpu->format->root_level; i++)
		probes += (last >> gpu->format->shift[i]) - (start >> gpu->format->shift[i]) + 1;
	return probes;
}

static void probe(struct softgpu *gpu, struct tlb_root *r, u8 shift, u8 kind, u8 max_level, u64 start, u64 last)
{
	u64 number;

	for (number = start >> shift; number <= last >> shift; number++) {
		struct tlb_entry *e = entry_find(gpu, r, number << shift, shift, kind);

		if (e && e->level <= max_level)
			entry_drop(gpu, e);
	}
}

void sg_tlb_invalidate(struct softgpu *gpu, struct sg_root root, u8 max_level, u64 start, u64 last)
{
	struct tlb_root *r = root_find(gpu, root);
	struct tlb_entry *e, *next;
	u32 i;

	if (!r)
		return;
	if (last - start < SG_PAGE_512M && probes_for(gpu, start, last) < r->count) {
		for (i = 0; i < ARRAY_SIZE(page_shifts); i++)
			probe(gpu, r, page_shifts[i], ENTRY_PAGE, max_level, start, last);
		for (i = SG_LEVEL_PDE0; i <= gpu->format->root_level; i++)
			probe(gpu, r, gpu->format->shift[i], ENTRY_DIRECTORY, max_level, start, last);
		return;
	}
	list_for_each_entry_safe(e, next, &r->entries, node) {
		u64 first = e->number << e->shift;
		u64 end = first + (1ull << e->shift) - 1;

		if (e->level <= max_level && first <= last && end >= start)
			entry_drop(gpu, e);
	}
}

bool sg_tlb_directory(struct softgpu *gpu, struct sg_root root, u64 va, u8 level, u64 raw[2])
{
	struct tlb_root *r = settings.tlb_pde ? root_find(gpu, root) : NULL;
	struct tlb_entry *e = r ? entry_find(gpu, r, va, gpu->format->shift[level], ENTRY_DIRECTORY) : NULL;

	if (!e)
		return false;
	raw[0] = e->raw[0];
	raw[1] = e->raw[1];
	return true;
}

void sg_tlb_add_directory(struct softgpu *gpu, struct sg_root root, u64 va, u8 level, const u64 raw[2])
{
	struct tlb_entry *e;

	if (!settings.tlb_pde)
		return;
	e = entry_add(gpu, root, va, gpu->format->shift[level], ENTRY_DIRECTORY, level);
	if (!e)
		return;
	e->raw[0] = raw[0];
	e->raw[1] = raw[1];
}

void sg_tlb_translate(struct softgpu *gpu, struct sg_root root, u64 va, struct sg_translation *out)
{
	struct tlb_root *r = root_find(gpu, root);
	struct tlb_entry *e = NULL;
	u32 i;

	for (i = 0; r && !e && i < ARRAY_SIZE(page_shifts); i++)
		e = entry_find(gpu, r, va, page_shifts[i], ENTRY_PAGE);
	if (e) {
		gpu->count.tlb_hits++;
		*out = (struct sg_translation){
			.valid = e->valid,
			.sparse = e->sparse,
			.read_only = e->read_only,
			.aperture = e->aperture,
			.peer = e->peer,
			.level = e->level,
			.pte = e->raw[0],
			.page_size = 1ull << e->shift,
			.pa = e->pa + (va & ((1ull << e->shift) - 1)),
		};
		return;
	}
	gpu->count.tlb_misses++;
	sg_walk(gpu, root, va, true, out);
	if (!out->valid && !settings.tlb_negative)
		return;
	e = entry_add(gpu, root, va, ilog2(out->page_size), ENTRY_PAGE, out->level);
	if (!e)
		return;
	e->valid = out->valid;
	e->sparse = out->sparse;
	e->read_only = out->read_only;
	e->aperture = out->aperture;
	e->peer = out->peer;
	e->raw[0] = out->pte;
	e->pa = out->pa & ~(out->page_size - 1);
}
