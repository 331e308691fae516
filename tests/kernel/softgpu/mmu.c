// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * mmu.c - the formats of GPU page tables, and the walk.
 *
 * Sources: kernel-open/nvidia-uvm/hwref/hopper/gh100/dev_mmu.h (NV_MMU_VER3_*, NV_MMU_NEW_* = version 2), the level
 * maps at the head of uvm_pascal_mmu.c, uvm_hopper_mmu.c and uvm_blackwell_mmu.c, and what the comments there say about
 * invalid entries. GB10x has Hopper's format with one more page size; GB20x has Hopper's.
 */
#include <linux/bitfield.h>
#include <linux/bits.h>

#include "impl.h"

/* Both formats */
#define ENTRY_VALID     BIT_ULL(0)       /* PTE; in a directory: IS_PTE */
#define ENTRY_APERTURE  GENMASK_ULL(2, 1)
#define PTE_APERTURE_VID     0
#define PTE_APERTURE_PEER    1
#define PTE_APERTURE_SYS     2           /* coherent; 3 is non-coherent */
#define PDE_APERTURE_INVALID 0
#define PDE_APERTURE_VID     1

/* Version 2 */
#define V2_PTE_VOL        BIT_ULL(3)     /* not cached; in an invalid entry: sparse */
#define V2_PTE_PRIVILEGE  BIT_ULL(5)     /* in an invalid 64 KB entry: ignore the 4 KB table */
#define V2_PTE_READ_ONLY  BIT_ULL(6)
#define V2_ADDRESS_SYS    GENMASK_ULL(53, 8)
#define V2_ADDRESS_VID    GENMASK_ULL(32, 8)
#define V2_PEER           GENMASK_ULL(35, 33)
#define V2_PTE_KIND_SHIFT 56
#define V2_BIG_SYS        GENMASK_ULL(53, 4)
#define V2_BIG_VID        GENMASK_ULL(32, 4)
#define V2_ADDRESS_SHIFT  12
#define V2_BIG_SHIFT      8

/* Version 3 */
#define V3_PTE_PCF          GENMASK_ULL(7, 3)
#define V3_PCF_SPARSE       1
#define V3_PCF_NO_VALID_4KB 3
#define V3_PCF_READ_ONLY    BIT(2)       /* set in all read-only PCF values of valid entries */
#define V3_PCF_UNCACHED     BIT(0)       /* set in all uncached PCF values of valid entries */
#define V3_PCF_REGULAR_RW_ATOMIC_UNCACHED_ACE    0x01
#define V3_PCF_REGULAR_RO_NO_ATOMIC_CACHED_ACE   0x0c
#define V3_PTE_KIND_SHIFT   8
#define V3_ADDRESS          GENMASK_ULL(51, 12)
#define V3_ADDRESS_VID      GENMASK_ULL(39, 12)
#define V3_ADDRESS_BIG      GENMASK_ULL(51, 8)
#define V3_PEER             GENMASK_ULL(63, 61)

#define KIND_GENERIC 6ull

const char *sg_entry_name(enum sg_entry_kind kind)
{
	static const char *const names[] = { "nothing", "zeros", "a page", "a table" };

	return names[kind];
}

static u64 leaf_size(u8 level, u8 half)
{
	switch (level) {
	case SG_LEVEL_PTE:
		return half == 0 ? SG_PAGE_64K : SG_PAGE_4K;
	case SG_LEVEL_PDE0:
		return SG_PAGE_2M;
	default:
		return SG_PAGE_512M;
	}
}

static u8 leaf_aperture(u64 raw)
{
	switch (FIELD_GET(ENTRY_APERTURE, raw)) {
	case PTE_APERTURE_VID:
		return SOFTGPU_APERTURE_VID;
	case PTE_APERTURE_PEER:
		return SOFTGPU_APERTURE_PEER;
	default:
		return SOFTGPU_APERTURE_SYS;
	}
}

static void decode_ver2(u8 level, u8 half, u64 raw, struct sg_entry *out)
{
	bool leaf_level = level == SG_LEVEL_PTE || level == SG_LEVEL_PDE1 || (level == SG_LEVEL_PDE0 && half == 0);
	u64 aperture = FIELD_GET(ENTRY_APERTURE, raw);
	bool vid;

	*out = (struct sg_entry){ .kind = SG_ENTRY_INVALID };
	if (leaf_level && (raw & ENTRY_VALID)) {
		out->kind = SG_ENTRY_LEAF;
		out->aperture = leaf_aperture(raw);
		out->peer = FIELD_GET(V2_PEER, raw);
		out->read_only = raw & V2_PTE_READ_ONLY;
		out->cached = !(raw & V2_PTE_VOL);
		out->page_size = leaf_size(level, half);
		if (out->aperture == SOFTGPU_APERTURE_SYS)
			out->pa = FIELD_GET(V2_ADDRESS_SYS, raw) << V2_ADDRESS_SHIFT;
		else
			out->pa = FIELD_GET(V2_ADDRESS_VID, raw) << V2_ADDRESS_SHIFT;
		return;
	}
	if (level == SG_LEVEL_PTE) {
		if (raw & V2_PTE_VOL)
			out->kind = SG_ENTRY_SPARSE;
		out->no_small = half == 0 && (raw & (V2_PTE_PRIVILEGE | V2_PTE_VOL));
		return;
	}
	if (aperture == PDE_APERTURE_INVALID)
		return;
	vid = aperture == PDE_APERTURE_VID;
	out->kind = SG_ENTRY_TABLE;
	out->aperture = vid ? SOFTGPU_APERTURE_VID : SOFTGPU_APERTURE_SYS;
	if (level == SG_LEVEL_PDE0 && half == 0)
		out->pa = (vid ? FIELD_GET(V2_BIG_VID, raw) : FIELD_GET(V2_BIG_SYS, raw)) << V2_BIG_SHIFT;
	else
		out->pa = (vid ? FIELD_GET(V2_ADDRESS_VID, raw) : FIELD_GET(V2_ADDRESS_SYS, raw)) << V2_ADDRESS_SHIFT;
}

static void decode_ver3(u8 level, u8 half, u64 raw, struct sg_entry *out)
{
	bool leaf_level = level == SG_LEVEL_PTE || level == SG_LEVEL_PDE1 || (level == SG_LEVEL_PDE0 && half == 0);
	u64 aperture = FIELD_GET(ENTRY_APERTURE, raw);
	u64 pcf = FIELD_GET(V3_PTE_PCF, raw);

	*out = (struct sg_entry){ .kind = SG_ENTRY_INVALID };
	if (leaf_level && (raw & ENTRY_VALID)) {
		out->kind = SG_ENTRY_LEAF;
		out->aperture = leaf_aperture(raw);
		out->peer = FIELD_GET(V3_PEER, raw);
		out->read_only = pcf & V3_PCF_READ_ONLY;
		out->cached = !(pcf & V3_PCF_UNCACHED);
		out->page_size = leaf_size(level, half);
		out->pa = raw & (out->aperture == SOFTGPU_APERTURE_VID ? V3_ADDRESS_VID : V3_ADDRESS);
		return;
	}
	if (level == SG_LEVEL_PTE) {
		if (pcf == V3_PCF_SPARSE)
			out->kind = SG_ENTRY_SPARSE;
		out->no_small = half == 0 && (pcf == V3_PCF_SPARSE || pcf == V3_PCF_NO_VALID_4KB);
		return;
	}
	if (aperture == PDE_APERTURE_INVALID)
		return;
	out->kind = SG_ENTRY_TABLE;
	out->aperture = aperture == PDE_APERTURE_VID ? SOFTGPU_APERTURE_VID : SOFTGPU_APERTURE_SYS;
	out->pa = raw & (level == SG_LEVEL_PDE0 && half == 0 ? V3_ADDRESS_BIG : V3_ADDRESS);
}

static void decode_ver3_256g(u8 level, u8 half, u64 raw, struct sg_entry *out)
{
	if (level != SG_LEVEL_PDE2 || !(raw & ENTRY_VALID)) {
		decode_ver3(level, half, raw, out);
		return;
	}
	decode_ver3(SG_LEVEL_PDE1, half, raw, out); /* the fields of a page are the same in each level */
	out->page_size = SG_PAGE_256G;
}

static u64 pte_aperture(u8 aperture)
{
	u64 bits = aperture == SOFTGPU_APERTURE_VID ? PTE_APERTURE_VID :
		   aperture == SOFTGPU_APERTURE_PEER ? PTE_APERTURE_PEER : PTE_APERTURE_SYS;

	return FIELD_PREP(ENTRY_APERTURE, bits);
}

static u64 make_pte_ver2(u8 aperture, u8 peer, u64 pa, bool read_only)
{
	u64 pte = ENTRY_VALID | pte_aperture(aperture) | (KIND_GENERIC << V2_PTE_KIND_SHIFT);

	if (read_only)
		pte |= V2_PTE_READ_ONLY;
	if (aperture == SOFTGPU_APERTURE_SYS)
		return pte | FIELD_PREP(V2_ADDRESS_SYS, pa >> V2_ADDRESS_SHIFT);
	if (aperture == SOFTGPU_APERTURE_PEER)
		pte |= FIELD_PREP(V2_PEER, peer);
	return pte | FIELD_PREP(V2_ADDRESS_VID, pa >> V2_ADDRESS_SHIFT);
}

static u64 make_pte_ver3(u8 aperture, u8 peer, u64 pa, bool read_only)
{
	u64 pcf = read_only ? V3_PCF_REGULAR_RO_NO_ATOMIC_CACHED_ACE : V3_PCF_REGULAR_RW_ATOMIC_UNCACHED_ACE;
	u64 pte = ENTRY_VALID | pte_aperture(aperture) | (KIND_GENERIC << V3_PTE_KIND_SHIFT) | FIELD_PREP(V3_PTE_PCF, pcf) | pa;

	if (aperture == SOFTGPU_APERTURE_PEER)
		pte |= FIELD_PREP(V3_PEER, peer);
	return pte;
}

const struct sg_mmu_format sg_mmu_ver2 = {
	.va_bits = 49,
	.root_level = 4, /* PDE3 */
	.shift = { 0, 21, 29, 38, 47 },
	.bits = { 0, 8, 9, 9, 2 },
	.decode = decode_ver2,
	.make_pte = make_pte_ver2,
};

const struct sg_mmu_format sg_mmu_ver3 = {
	.va_bits = 57,
	.root_level = 5, /* PDE4 */
	.shift = { 0, 21, 29, 38, 47, 56 },
	.bits = { 0, 8, 9, 9, 9, 1 },
	.decode = decode_ver3,
	.make_pte = make_pte_ver3,
};

const struct sg_mmu_format sg_mmu_ver3_256g = {
	.va_bits = 57,
	.root_level = 5,
	.shift = { 0, 21, 29, 38, 47, 56 },
	.bits = { 0, 8, 9, 9, 9, 1 },
	.decode = decode_ver3_256g,
	.make_pte = make_pte_ver3,
};

bool sg_read_entry(struct softgpu *gpu, bool sys, u64 pa, u64 *raw)
{
	struct sg_place place = { .where = sys ? SG_SYS : SG_VID, .gpu = gpu, .pa = pa };

	if (sg_mem_read(&place, raw, sizeof(*raw)) == 0)
		return true;
	sg_error(gpu, SOFTGPU_ERROR_MODEL, pa, 0, "page table entry at %s %llx is outside of memory", sys ? "sys" : "vid", pa);
	return false;
}

static void absent(struct sg_translation *out, u8 level, u64 raw, u64 reach)
{
	out->level = level;
	out->pte = raw;
	out->page_size = reach;
}

static void leaf(struct sg_translation *out, u8 level, u64 raw, const struct sg_entry *entry, u64 va)
{
	out->valid = true;
	out->level = level;
	out->pte = raw;
	out->aperture = entry->aperture;
	out->peer = entry->peer;
	out->read_only = entry->read_only;
	out->page_size = entry->page_size;
	/* hardware ignores the address bits below the page size */
	out->pa = (entry->pa & ~(entry->page_size - 1)) | (va & (entry->page_size - 1));
}

/* The last level: dual entries point to a table of 64 KB entries, one of 4 KB entries, or both. */
static void walk_tables(struct softgpu *gpu, const u64 dual[2], u64 va, struct sg_translation *out)
{
	const struct sg_mmu_format *format = gpu->format;
	struct sg_entry big, small, entry;
	u64 raw = 0;

	format->decode(SG_LEVEL_PDE0, 0, dual[0], &big);
	format->decode(SG_LEVEL_PDE0, 1, dual[1], &small);
	if (big.kind == SG_ENTRY_LEAF) {
		leaf(out, SG_LEVEL_PDE0, dual[0], &big, va);
		return;
	}
	absent(out, SG_LEVEL_PDE0, dual[0], SG_PAGE_64K);
	if (big.kind == SG_ENTRY_TABLE) {
		out->has_table = true;
		if (!sg_read_entry(gpu, big.aperture == SOFTGPU_APERTURE_SYS, big.pa + 8 * ((va / SG_PAGE_64K) % 32), &raw))
			return;
		format->decode(SG_LEVEL_PTE, 0, raw, &entry);
		if (entry.kind == SG_ENTRY_LEAF) {
			leaf(out, SG_LEVEL_PTE, raw, &entry, va);
			return;
		}
		absent(out, SG_LEVEL_PTE, raw, SG_PAGE_64K);
		out->sparse = entry.kind == SG_ENTRY_SPARSE;
		if (entry.no_small)
			return;
	}
	if (small.kind == SG_ENTRY_TABLE) {
		if (!sg_read_entry(gpu, small.aperture == SOFTGPU_APERTURE_SYS, small.pa + 8 * ((va / SG_PAGE_4K) % 512), &raw))
			return;
		format->decode(SG_LEVEL_PTE, 1, raw, &entry);
		if (entry.kind == SG_ENTRY_LEAF) {
			leaf(out, SG_LEVEL_PTE, raw, &entry, va);
			return;
		}
		absent(out, SG_LEVEL_PTE, raw, SG_PAGE_4K);
		out->sparse = entry.kind == SG_ENTRY_SPARSE;
	}
}

/* Returns true if a dual entry is a directory entry; a 2 MB page is cached as a page. */
static bool points_to_tables(const struct sg_mmu_format *format, const u64 dual[2])
{
	struct sg_entry big, small;

	format->decode(SG_LEVEL_PDE0, 0, dual[0], &big);
	format->decode(SG_LEVEL_PDE0, 1, dual[1], &small);
	return big.kind != SG_ENTRY_LEAF && (big.kind == SG_ENTRY_TABLE || small.kind == SG_ENTRY_TABLE);
}

void sg_walk(struct softgpu *gpu, struct sg_root root, u64 va, bool cached, struct sg_translation *out)
{
	const struct sg_mmu_format *format = gpu->format;
	u8 level = format->root_level;
	u64 base = root.pa;
	bool sys = root.sys;
	u64 raw[2] = { 0, 0 };
	bool have = false;

	memset(out, 0, sizeof(*out));
	if (cached) {
		u8 l;

		/* the deepest directory entry that is cached */
		for (l = SG_LEVEL_PDE0; l <= format->root_level && !have; l++) {
			have = sg_tlb_directory(gpu, root, va, l, raw);
			if (have)
				level = l;
		}
	}
	for (;;) {
		struct sg_entry entry;

		if (!have) {
			u64 index = (va >> format->shift[level]) & ((1ull << format->bits[level]) - 1);
			u64 bytes = level == SG_LEVEL_PDE0 ? 16 : 8;

			absent(out, level, 0, SG_PAGE_64K);
			if (!sg_read_entry(gpu, sys, base + bytes * index, &raw[0]))
				return;
			if (level == SG_LEVEL_PDE0 && !sg_read_entry(gpu, sys, base + bytes * index + 8, &raw[1]))
				return;
		}
		if (level == SG_LEVEL_PDE0) {
			if (!have && cached && points_to_tables(format, raw))
				sg_tlb_add_directory(gpu, root, va, level, raw);
			walk_tables(gpu, raw, va, out);
			return;
		}
		format->decode(level, 0, raw[0], &entry);
		if (entry.kind == SG_ENTRY_LEAF) {
			leaf(out, level, raw[0], &entry, va);
			return;
		}
		if (entry.kind != SG_ENTRY_TABLE) {
			absent(out, level, raw[0], SG_PAGE_64K);
			return;
		}
		if (!have && cached)
			sg_tlb_add_directory(gpu, root, va, level, raw);
		have = false;
		sys = entry.aperture == SOFTGPU_APERTURE_SYS;
		base = entry.pa;
		level--;
	}
}

bool sg_translation_place(struct softgpu *gpu, const struct sg_translation *t, struct sg_place *out)
{
	*out = (struct sg_place){ .where = SG_VID, .gpu = gpu, .pa = t->pa };
	switch (t->aperture) {
	case SOFTGPU_APERTURE_SYS:
		out->where = SG_SYS;
		break;
	case SOFTGPU_APERTURE_PEER:
		/* peer numbers are GPU numbers here, see GetP2PCaps */
		out->gpu = sg_gpu_by_index(t->peer);
		if (!out->gpu || !(sg_peers_of(gpu) & BIT(t->peer)))
			return false;
		break;
	}
	return sg_place_ok(out, 1);
}
