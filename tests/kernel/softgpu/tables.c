// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * tables.c - records of the page tables of user spaces.
 *
 * A table is recorded, with all its entries, when an entry of a reachable directory begins to point to it (or a root is
 * set), and forgotten when that entry changes. Each write of the engine into memory that holds a table passes through
 * here: entry by entry the recorded value and the new one are compared. This gives exact numbers of
 *   - page table entries written, and those whose value changed;
 *   - live entries that map each frame of video memory, so that freeing a mapped frame is detected immediately;
 *   - live tables in each frame, so that freeing or reusing such a frame is detected immediately.
 * sg_tables_verify() compares the records with the memory.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "impl.h"

#define TABLE_HASH_BITS 10
#define BLOCK 256ull /* the smallest table, and alignment of tables (allocation_size_* in uvm_*_mmu.c) */

struct table {
	struct hlist_node hash;
	struct list_head node; /* in space->tables */
	struct sg_space *space;
	struct softgpu *where; /* the GPU whose memory holds it; NULL: host memory */
	u64 pa;
	u64 va;                /* the address that its first entry translates */
	u8 level, half;
	u32 refs;              /* entries that point to it */
	bool shared;           /* refs was once above 1: va is one of several */
	u32 words;
	u64 word[];
};

static DEFINE_HASHTABLE(table_hash, TABLE_HASH_BITS);
static u64 tables_in_sysmem;

static u64 table_key(const struct softgpu *where, u64 pa)
{
	return (pa / BLOCK) ^ ((u64)(where ? where->index : SOFTGPU_MAX_GPUS) << 56);
}

static struct table *table_at(const struct softgpu *where, u64 pa)
{
	struct table *t;

	hash_for_each_possible(table_hash, t, hash, table_key(where, pa))
		if (t->where == where && t->pa == pa)
			return t;
	return NULL;
}

static u32 table_words(const struct sg_mmu_format *format, u8 level, u8 half)
{
	if (level == SG_LEVEL_PTE)
		return half == 0 ? SG_PAGE_2M / SG_PAGE_64K : SG_PAGE_2M / SG_PAGE_4K;
	return (1u << format->bits[level]) * (level == SG_LEVEL_PDE0 ? 2 : 1);
}

static u8 word_half(const struct table *t, u32 i)
{
	return t->level == SG_LEVEL_PDE0 ? i % 2 : t->half;
}

/* The bytes of addresses that one word translates. */
static u64 word_reach(const struct table *t)
{
	if (t->level == SG_LEVEL_PTE)
		return t->half == 0 ? SG_PAGE_64K : SG_PAGE_4K;
	return 1ull << t->space->gpu->format->shift[t->level];
}

static u64 word_va(const struct table *t, u32 i)
{
	return t->va + (t->level == SG_LEVEL_PDE0 ? i / 2 : i) * word_reach(t);
}

static void decode(const struct table *t, u32 i, u64 raw, struct sg_entry *out)
{
	t->space->gpu->format->decode(t->level, word_half(t, i), raw, out);
}

/* Finds the frames that a leaf maps, *first to *last; false: none. */
static bool leaf_frames(struct sg_space *space, const struct sg_entry *leaf, struct softgpu **gpu, u64 *first, u64 *last)
{
	u64 pa = leaf->pa & ~(leaf->page_size - 1);

	if (leaf->aperture == SOFTGPU_APERTURE_SYS)
		return false;
	*gpu = leaf->aperture == SOFTGPU_APERTURE_VID ? space->gpu : sg_gpu_by_index(leaf->peer);
	if (!*gpu || pa >= (*gpu)->vidmem)
		return false;
	*first = pa >> SOFTGPU_FRAME_SHIFT;
	*last = min((pa + leaf->page_size - 1) >> SOFTGPU_FRAME_SHIFT, (*gpu)->frames - 1);
	return true;
}

static void leaf_count(struct sg_space *space, const struct sg_entry *leaf, int sign)
{
	struct softgpu *gpu;
	u64 first, last, f;

	space->gpu->live_ptes += sign;
	if (!leaf_frames(space, leaf, &gpu, &first, &last))
		return;
	for (f = first; f <= last; f++) {
		gpu->frame[f].mappings += sign;
		if (sign < 0)
			sg_membars_cleared(space->gpu, gpu, f);
	}
}

static void table_enter(struct sg_space *space, bool sys, u64 pa, u8 level, u8 half, u64 va);
static void table_leave(struct table *t);

static void child_leave(struct table *t, const struct sg_entry *entry)
{
	struct table *child = table_at(entry->aperture == SOFTGPU_APERTURE_SYS ? NULL : t->space->gpu, entry->pa);

	if (child && child->space == t->space && child->level == t->level - 1)
		table_leave(child);
}

/* Word i of the table becomes `raw`. */
static void word_set(struct table *t, u32 i, u64 raw)
{
	struct sg_entry old, new;

	decode(t, i, t->word[i], &old);
	decode(t, i, raw, &new);
	if (t->refs > 1 && (new.kind == SG_ENTRY_LEAF || new.kind == SG_ENTRY_TABLE))
		sg_error(t->space->gpu, SOFTGPU_ERROR_MODEL, t->pa, raw, "table %llx, to which %u entries point, maps memory", t->pa,
			 t->refs);
	t->word[i] = raw;
	if (old.kind == SG_ENTRY_LEAF)
		leaf_count(t->space, &old, -1);
	else if (old.kind == SG_ENTRY_TABLE)
		child_leave(t, &old);
	if (new.kind == SG_ENTRY_LEAF)
		leaf_count(t->space, &new, 1);
	else if (new.kind == SG_ENTRY_TABLE)
		table_enter(t->space, new.aperture == SOFTGPU_APERTURE_SYS, new.pa, t->level - 1, word_half(t, i), word_va(t, i));
}

/* Several entries may point to one table if it maps nothing: its words then do not depend on the address. */
static bool table_maps(const struct table *t)
{
	u32 i;

	for (i = 0; i < t->words; i++) {
		struct sg_entry entry;

		decode(t, i, t->word[i], &entry);
		if (entry.kind == SG_ENTRY_LEAF || entry.kind == SG_ENTRY_TABLE)
			return true;
	}
	return false;
}

static void table_enter(struct sg_space *space, bool sys, u64 pa, u8 level, u8 half, u64 va)
{
	struct softgpu *gpu = space->gpu;
	struct sg_place place = { .where = sys ? SG_SYS : SG_VID, .gpu = gpu, .pa = pa };
	u32 words = table_words(gpu->format, level, half);
	struct table *t;
	u32 i;

	if (!sg_place_ok(&place, words * sizeof(u64))) {
		sg_error(gpu, SOFTGPU_ERROR_MODEL, pa, 0, "entry for %llx points to a table outside of memory: %llx", va, pa);
		return;
	}
	t = table_at(sys ? NULL : gpu, pa);
	if (t && t->space == space && t->level == level && t->half == half && !table_maps(t)) {
		t->refs++;
		t->shared = true;
		return;
	}
	if (t) {
		sg_error(gpu, SOFTGPU_ERROR_MODEL, pa, 0, "table %s %llx is reachable twice", sys ? "sys" : "vid", pa);
		return;
	}
	t = kvzalloc(struct_size(t, word, words), GFP_KERNEL);
	if (!t) {
		sg_error(gpu, SOFTGPU_ERROR_MODEL, pa, 0, "no memory for the records");
		return;
	}
	t->refs = 1;
	t->space = space;
	t->where = sys ? NULL : gpu;
	t->pa = pa;
	t->va = va;
	t->level = level;
	t->half = half;
	t->words = words;
	hash_add(table_hash, &t->hash, table_key(t->where, pa));
	list_add(&t->node, &space->tables);
	gpu->live_tables++;
	if (sys)
		tables_in_sysmem++;
	else
		gpu->frame[pa >> SOFTGPU_FRAME_SHIFT].tables++;
	for (i = 0; i < words; i++) {
		u64 raw;

		if (!sg_read_entry(gpu, sys, pa + i * sizeof(u64), &raw))
			return;
		if (raw)
			word_set(t, i, raw);
	}
}

static void table_leave(struct table *t)
{
	u32 i;

	if (--t->refs)
		return;
	for (i = 0; i < t->words; i++)
		if (t->word[i])
			word_set(t, i, 0);
	hash_del(&t->hash);
	list_del(&t->node);
	t->space->gpu->live_tables--;
	if (t->where)
		t->where->frame[t->pa >> SOFTGPU_FRAME_SHIFT].tables--;
	else
		tables_in_sysmem--;
	kvfree(t);
}

int sg_tables_set_root(struct sg_space *space)
{
	table_enter(space, space->root.sys, space->root.pa, space->gpu->format->root_level, 0, 0);
	return list_empty(&space->tables) ? -EIO : 0;
}

void sg_tables_drop_root(struct sg_space *space)
{
	struct table *root = table_at(space->root.sys ? NULL : space->gpu, space->root.pa);

	if (root && root->space == space)
		table_leave(root);
	if (!list_empty(&space->tables))
		sg_error(space->gpu, SOFTGPU_ERROR_MODEL, space->root.pa, 0, "tables left without a root");
	/* the resource manager does this, including the membars */
	sg_membars_invalidated(space->gpu);
	sg_membars_done(space->gpu, true);
}

static void count_word(struct table *t, u32 i, u64 raw)
{
	struct softgpu_counters *count = &t->space->gpu->count;
	struct sg_entry old, new;

	if (t->level == SG_LEVEL_PTE) {
		count->pte_writes++;
		count->pte_changes += raw != t->word[i];
		return;
	}
	decode(t, i, t->word[i], &old);
	decode(t, i, raw, &new);
	if (old.kind == SG_ENTRY_LEAF || new.kind == SG_ENTRY_LEAF) {
		count->pte_writes++;
		count->pte_changes += raw != t->word[i];
	} else if (old.kind == SG_ENTRY_TABLE || new.kind == SG_ENTRY_TABLE) {
		count->pde_writes++;
	}
}

/* ---- what readers see ----------------------------------------------------------------------------- */

static void sight_of(const struct sg_entry *entry, u64 va, struct sg_sight *out)
{
	*out = (struct sg_sight){ .kind = entry->kind };
	if (entry->kind == SG_ENTRY_LEAF) {
		out->aperture = entry->aperture;
		out->peer = entry->peer;
		out->read_only = entry->read_only;
		out->cached = entry->cached;
		out->page_size = entry->page_size;
		out->pa = (entry->pa & ~(entry->page_size - 1)) | (va & (entry->page_size - 1));
	} else if (entry->kind == SG_ENTRY_SPARSE) {
		out->page_size = SG_PAGE_64K;
	}
}

/* A unit below an entry of PDE0. in_memory: the table that it points to is not yet recorded. */
static void sight_below(const struct table *t, const struct sg_entry *entry, u64 va, bool in_memory, struct sg_sight *out)
{
	struct sg_entry below = { .kind = SG_ENTRY_INVALID };
	bool sys = entry->aperture == SOFTGPU_APERTURE_SYS;
	u32 i = va / SG_PAGE_64K % (SG_PAGE_2M / SG_PAGE_64K);
	struct sg_mmu_format const *format = t->space->gpu->format;
	u64 raw;

	if (entry->kind == SG_ENTRY_TABLE && in_memory) {
		if (sg_read_entry(t->space->gpu, sys, entry->pa + i * sizeof(u64), &raw))
			format->decode(SG_LEVEL_PTE, 0, raw, &below);
	} else if (entry->kind == SG_ENTRY_TABLE) {
		struct table *child = table_at(sys ? NULL : t->space->gpu, entry->pa);

		if (child)
			format->decode(SG_LEVEL_PTE, 0, child->word[i], &below);
	} else {
		below = *entry;
	}
	sight_of(&below, va, out);
}

static bool same_sight(const struct sg_sight *a, const struct sg_sight *b)
{
	return a->kind == b->kind && a->pa == b->pa && a->aperture == b->aperture && a->peer == b->peer &&
	       a->read_only == b->read_only;
}

/* The directory above is about to drop a table of PDE0 entries, and with it every unit seen through them. */
static void show_forgotten(const struct table *t, u8 level)
{
	const struct sg_sight nothing = { .kind = SG_ENTRY_INVALID };
	u32 i;

	for (i = 0; i < t->words; i++) {
		u64 va = word_va(t, i), end = va + word_reach(t);
		struct sg_entry entry;

		decode(t, i, t->word[i], &entry);
		if (word_half(t, i) != 0 || entry.kind == SG_ENTRY_INVALID)
			continue;
		for (; va < end; va += SG_PAGE_64K) {
			struct sg_sight before;

			sight_below(t, &entry, va, false, &before);
			if (before.kind != SG_ENTRY_INVALID)
				sg_readers_unit(t->space, level, va, &before, &nothing);
		}
	}
}

/* Word i is about to become `raw` in the records; in memory it already is. */
static void show_readers(struct table *t, u32 i, u64 raw)
{
	u64 va = word_va(t, i), end = va + word_reach(t);
	struct sg_entry old, new;

	decode(t, i, t->word[i], &old);
	decode(t, i, raw, &new);
	if (t->level > SG_LEVEL_PDE0) {
		const struct table *below;

		list_for_each_entry(below, &t->space->tables, node)
			if (old.kind == SG_ENTRY_TABLE && below->level == SG_LEVEL_PDE0 && below->va >= va && below->va < end)
				show_forgotten(below, t->level);
		return;
	}
	for (; va < end; va += SG_PAGE_64K) {
		struct sg_sight before, after;

		sight_below(t, &old, va, false, &before);
		sight_below(t, &new, va, true, &after);
		if (!same_sight(&before, &after))
			sg_readers_unit(t->space, t->level, va, &before, &after);
	}
}

/*
 * When an entry changes between a 2 MB page and a table, it has to be invalid until the TLBs have dropped the old value:
 * otherwise they could hold an address twice, with different page sizes, and accesses to it would be unordered
 * (block_gpu_pte_finish_split_2m in uvm_va_block.c).
 */
static void check_resize(struct table *t, u32 i, u64 raw)
{
	struct sg_space *space = t->space;
	unsigned long slot = word_va(t, i) / SG_PAGE_2M;
	enum sg_entry_kind was;
	struct sg_entry old, new;
	void *kept;

	decode(t, i, t->word[i], &old);
	decode(t, i, raw, &new);
	if (new.kind == SG_ENTRY_INVALID) {
		if (old.kind != SG_ENTRY_INVALID)
			xa_store(&space->resized, slot, xa_mk_value(old.kind), GFP_KERNEL);
		return;
	}
	kept = xa_load(&space->resized, slot);
	was = old.kind == SG_ENTRY_INVALID && kept ? xa_to_value(kept) : old.kind;
	if (was != SG_ENTRY_INVALID && was != new.kind)
		sg_error(space->gpu, SOFTGPU_ERROR_RESIZED, word_va(t, i), raw,
			 "%llx: %s becomes %s, and TLBs may hold both", word_va(t, i), sg_entry_name(was), sg_entry_name(new.kind));
	if (old.kind == SG_ENTRY_INVALID && was == new.kind)
		xa_erase(&space->resized, slot);
}

void sg_tables_invalidated(struct softgpu *gpu, struct sg_root root, u8 max_level, u64 start, u64 last)
{
	struct sg_space *space;

	if (max_level < SG_LEVEL_PDE0)
		return;
	list_for_each_entry(space, &model.spaces, node) {
		unsigned long slot;
		void *kept;

		if (space->gpu != gpu || !space->has_root || space->root.pa != root.pa || space->root.sys != root.sys)
			continue;
		xa_for_each_range(&space->resized, slot, kept, start / SG_PAGE_2M, last / SG_PAGE_2M)
			xa_erase(&space->resized, slot);
	}
}

/* ---- writes ---------------------------------------------------------------------------------------- */

/* Handles a write to [pa, pa + length), of which part may be in the table. */
static void table_written(struct table *t, u64 pa, u64 length)
{
	u64 bytes = t->words * sizeof(u64);
	u64 from = max(pa, t->pa) - t->pa;
	u64 to = min(pa + length, t->pa + bytes) - t->pa;
	u64 at;

	for (at = round_down(from, sizeof(u64)); at < to; at += sizeof(u64)) {
		u32 i = at / sizeof(u64);
		u64 raw;

		if (!sg_read_entry(t->space->gpu, !t->where, t->pa + at, &raw))
			return;
		count_word(t, i, raw);
		if (raw == t->word[i])
			continue;
		if (word_half(t, i) == 0) {
			if (sg_readers_watch(t->space))
				show_readers(t, i, raw);
			if (t->level == SG_LEVEL_PDE0)
				check_resize(t, i, raw);
		}
		word_set(t, i, raw);
	}
}

/* The table that covers the block at pa (BLOCK aligned): it starts there, or at the 4 KB boundary before. */
static struct table *table_of_block(struct softgpu *where, u64 pa)
{
	struct table *t = table_at(where, pa);

	if (t)
		return t;
	t = table_at(where, round_down(pa, SG_PAGE_4K));
	return t && t->pa + t->words * sizeof(u64) > pa ? t : NULL;
}

void sg_tables_written(struct softgpu *gpu, bool sys, u64 pa, u64 length)
{
	struct softgpu *where = sys ? NULL : gpu;
	u64 block;

	if (sys && !tables_in_sysmem)
		return;
	for (block = round_down(pa, BLOCK); block < pa + length; block += BLOCK) {
		struct table *t = table_of_block(where, block);
		u64 from = max(block, pa);

		if (t)
			table_written(t, from, min(block + BLOCK, pa + length) - from);
	}
}

bool sg_tables_holds(struct softgpu *gpu, bool sys, u64 pa, u64 length)
{
	u64 block;

	if (sys ? !tables_in_sysmem : pa >= gpu->vidmem || !gpu->frame[pa >> SOFTGPU_FRAME_SHIFT].tables)
		return false;
	for (block = round_down(pa, BLOCK); block < pa + length; block += BLOCK)
		if (table_of_block(sys ? NULL : gpu, block))
			return true;
	return false;
}

/* ---- looking -------------------------------------------------------------------------------------- */

/* Counts the sparse entries of shared tables that a directory points to. */
static void scan_shared(const struct table *t, struct softgpu_scan *scan, u64 last)
{
	u32 i, j;

	for (i = 0; i < t->words; i += 2) {
		struct sg_entry entry;
		struct table *child;

		decode(t, i, t->word[i], &entry);
		if (entry.kind != SG_ENTRY_TABLE)
			continue;
		child = table_at(entry.aperture == SOFTGPU_APERTURE_SYS ? NULL : t->space->gpu, entry.pa);
		for (j = 0; child && child->shared && j < child->words; j++) {
			u64 va = word_va(t, i) + j * SG_PAGE_64K;

			decode(child, j, child->word[j], &entry);
			scan->out_sparse += entry.kind == SG_ENTRY_SPARSE && va <= last && va + SG_PAGE_64K - 1 >= scan->start;
		}
	}
}

void sg_tables_scan(struct sg_space *space, struct softgpu_scan *scan)
{
	u64 last = scan->start + scan->length - 1;
	struct table *t;

	list_for_each_entry(t, &space->tables, node) {
		u64 end;
		u32 i;

		if (t->level == SG_LEVEL_PDE0)
			scan_shared(t, scan, last);
		if (t->shared)
			continue;
		end = word_va(t, t->words - 1) + word_reach(t) - 1;

		if (t->va > last || end < scan->start)
			continue;
		scan->out_tables++;
		for (i = 0; i < t->words; i++) {
			u64 va = word_va(t, i);
			struct sg_entry entry;

			if (!t->word[i] || va > last || va + word_reach(t) - 1 < scan->start)
				continue;
			decode(t, i, t->word[i], &entry);
			if (entry.kind == SG_ENTRY_SPARSE && t->half == 0)
				scan->out_sparse++;
			if (entry.kind != SG_ENTRY_LEAF)
				continue;
			scan->out_bytes += entry.page_size;
			scan->out_4k += entry.page_size == SG_PAGE_4K;
			scan->out_64k += entry.page_size == SG_PAGE_64K;
			scan->out_2m += entry.page_size == SG_PAGE_2M;
			scan->out_512m += entry.page_size == SG_PAGE_512M;
		}
	}
}

static int verify_table(struct table *t, u32 **mappings)
{
	struct sg_space *space = t->space;
	u32 i;

	for (i = 0; i < t->words; i++) {
		struct softgpu *gpu;
		struct sg_entry entry;
		u64 raw, first, last, f;

		if (!sg_read_entry(space->gpu, !t->where, t->pa + i * sizeof(u64), &raw))
			return -EIO;
		if (raw != t->word[i]) {
			sg_error(space->gpu, SOFTGPU_ERROR_MODEL, t->pa, raw, "records: table %llx word %u is %llx, was %llx",
				 t->pa, i, raw, t->word[i]);
			return -EIO;
		}
		decode(t, i, raw, &entry);
		if (entry.kind == SG_ENTRY_LEAF && leaf_frames(space, &entry, &gpu, &first, &last))
			for (f = first; f <= last; f++)
				mappings[gpu->index][f]++;
	}
	return 0;
}

int sg_tables_verify(void)
{
	u32 *mappings[SOFTGPU_MAX_GPUS] = { NULL };
	struct sg_space *space;
	struct table *t;
	int result = 0;
	u32 i;
	u64 f;

	for (i = 0; i < model.gpus; i++) {
		mappings[i] = kvcalloc(model.gpu[i]->frames, sizeof(u32), GFP_KERNEL);
		if (!mappings[i])
			result = -ENOMEM;
	}
	if (result)
		goto out;
	list_for_each_entry(space, &model.spaces, node)
		list_for_each_entry(t, &space->tables, node)
			result = result ? result : verify_table(t, mappings);
	for (i = 0; !result && i < model.gpus; i++) {
		for (f = 0; !result && f < model.gpu[i]->frames; f++) {
			if (mappings[i][f] == model.gpu[i]->frame[f].mappings)
				continue;
			sg_error(model.gpu[i], SOFTGPU_ERROR_MODEL, f << SOFTGPU_FRAME_SHIFT, 0, "records: frame %llx has %u mappings, not %u",
				 f << SOFTGPU_FRAME_SHIFT, mappings[i][f], model.gpu[i]->frame[f].mappings);
			result = -EIO;
		}
	}
out:
	for (i = 0; i < model.gpus; i++)
		kvfree(mappings[i]);
	return result;
}
