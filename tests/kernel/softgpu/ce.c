// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * ce.c - the copy engine: memset and memcpy, physical and virtual, and semaphores after them.
 *
 * Sources: kernel-open/nvidia-uvm/clc8b5.h (Hopper) and clc6b5.h (Ampere); the fields used here are the same in both
 * except for MEMORY_SCRUB_ENABLE, which Hopper added. Blackwell's (clc9b5.h, clcab5.h) are those of Hopper.
 *
 * Order: a launched transfer is only queued. It is carried out when something waits for it (a transfer that is not
 * pipelined, a semaphore of this engine, a WFI of the host) or when the channel has nothing else to do. Pipelined
 * transfers with nothing in between are carried out in random order; if two of them write the same bytes, that is an
 * error of the submitter (SOFTGPU_ERROR_OVERLAP).
 */
#include <linux/bitfield.h>
#include <linux/bitops.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/sort.h>

#include "impl.h"

enum {
	SET_OBJECT = 0x000,
	SET_SEMAPHORE_A = 0x240,
	SET_SEMAPHORE_B = 0x244,
	SET_SEMAPHORE_PAYLOAD = 0x248,
	SET_SRC_PHYS_MODE = 0x260,
	SET_DST_PHYS_MODE = 0x264,
	LAUNCH_DMA = 0x300,
	OFFSET_IN_UPPER = 0x400,
	OFFSET_IN_LOWER = 0x404,
	OFFSET_OUT_UPPER = 0x408,
	OFFSET_OUT_LOWER = 0x40c,
	LINE_LENGTH_IN = 0x418,
	SET_REMAP_CONST_A = 0x700,
	SET_REMAP_CONST_B = 0x704,
	SET_REMAP_COMPONENTS = 0x708,
};

#define OFFSET_UPPER GENMASK_ULL(24, 0)

#define LAUNCH_TRANSFER         GENMASK(1, 0)
#define TRANSFER_NONE           0
#define TRANSFER_PIPELINED      1
#define TRANSFER_NON_PIPELINED  2
#define LAUNCH_SEMAPHORE        GENMASK(4, 3)
#define SEMAPHORE_NONE          0
#define SEMAPHORE_FOUR_WORDS    2
#define LAUNCH_MULTI_LINE       BIT(9)
#define LAUNCH_REMAP            BIT(10)
#define LAUNCH_SRC_PHYSICAL     BIT(12)
#define LAUNCH_DST_PHYSICAL     BIT(13)
#define LAUNCH_REDUCTION        GENMASK(17, 14)
#define REDUCTION_INC           6
#define LAUNCH_REDUCTION_ENABLE BIT(19)
#define LAUNCH_SCRUB            BIT(23) /* since Hopper */

#define PHYS_TARGET      GENMASK(1, 0)
#define TARGET_LOCAL_FB  0
#define TARGET_PEERMEM   3
#define PHYS_PEER_ID     GENMASK(8, 6)

#define REMAP_DST(i)     (7u << (4 * (i)))
#define REMAP_CONST_A    4
#define REMAP_CONST_B    5
#define REMAP_SIZE       GENMASK(17, 16)
#define REMAP_NUM_DST    GENMASK(25, 24)

static u32 ce(struct sg_channel *channel, u32 method)
{
	return channel->ce[method >> 2];
}

static u64 ce_address(struct sg_channel *channel, u32 upper)
{
	return ((ce(channel, upper) & OFFSET_UPPER) << 32) | ce(channel, upper + 4);
}

/* ---- carrying transfers out ---------------------------------------------------------------------- */

/* Finds the place of the source or destination; *n is reduced to the bytes that are contiguous there. */
static bool side(struct sg_channel *channel, bool physical, bool sys, bool peer, u8 peer_id, u64 address, u64 *n, struct sg_place *out)
{
	u64 contiguous;

	if (!physical) {
		if (!sg_space_place(channel->space, address, out, &contiguous))
			return false;
		*n = min(*n, contiguous);
		return true;
	}
	*out = (struct sg_place){ .where = sys ? SG_SYS : SG_VID, .gpu = channel->gpu, .pa = address };
	if (peer) {
		out->gpu = sg_gpu_by_index(peer_id);
		if (!out->gpu || !(sg_peers_of(channel->gpu) & BIT(peer_id)))
			return false;
	}
	return sg_place_ok(out, *n);
}

static bool dst_side(struct sg_channel *channel, const struct sg_transfer *t, u64 done, u64 *n, struct sg_place *out)
{
	u64 frame;

	if (!side(channel, t->dst_physical, t->dst_sys, t->dst_peer, t->dst_peer_id, t->dst + done, n, out))
		return false;
	if (t->dst_physical && out->where == SG_VID)
		for (frame = out->pa >> SOFTGPU_FRAME_SHIFT; frame <= (out->pa + *n - 1) >> SOFTGPU_FRAME_SHIFT; frame++)
			if (frame < out->gpu->frames && !out->gpu->frame[frame].mappings)
				sg_membars_reused(out->gpu, frame);
	return true;
}

static bool src_side(struct sg_channel *channel, const struct sg_transfer *t, u64 done, u64 *n, struct sg_place *out)
{
	return side(channel, t->src_physical, t->src_sys, t->src_peer, t->src_peer_id, t->src + done, n, out);
}

static bool fill_run(struct sg_channel *channel, const struct sg_transfer *t)
{
	u8 *bounce = channel->gpu->bounce;
	bool word = sizeof(u64) % t->element == 0;
	u64 done = 0, pattern = 0;
	u32 i;

	for (i = 0; word && i < sizeof(u64); i++)
		((u8 *)&pattern)[i] = t->pattern[i % t->element];
	while (done < t->length) {
		u64 n = t->length - done;
		struct sg_place place;

		if (!dst_side(channel, t, done, &n, &place))
			return false;
		if (word) {
			n = n > SG_PAGE_4K ? round_down(n, SG_PAGE_4K) : n;
			if (sg_mem_fill(&place, ror64(pattern, 8 * (done % sizeof(u64))), n))
				return false;
		} else {
			n = min_t(u64, n, SG_PAGE_4K);
			for (i = 0; i < n; i++)
				bounce[i] = t->pattern[(done + i) % t->element];
			if (sg_mem_write(&place, bounce, n))
				return false;
		}
		done += n;
	}
	channel->gpu->count.memsets++;
	channel->gpu->count.memset_bytes += t->length;
	return true;
}

static bool copy_run(struct sg_channel *channel, const struct sg_transfer *t)
{
	u8 *bounce = channel->gpu->bounce;
	u64 done = 0;

	while (done < t->length) {
		u64 n = min_t(u64, t->length - done, SG_PAGE_4K);
		struct sg_place from, to;

		if (!src_side(channel, t, done, &n, &from) || !dst_side(channel, t, done, &n, &to))
			return false;
		if (sg_mem_read(&from, bounce, n) || sg_mem_write(&to, bounce, n))
			return false;
		done += n;
	}
	channel->gpu->count.copies++;
	channel->gpu->count.copy_bytes += t->length;
	return true;
}

/* The kind of memory that a transfer writes: addresses of different kinds cannot be compared. */
static u32 dst_kind(const struct sg_transfer *t)
{
	return t->dst_physical | t->dst_sys << 1 | t->dst_peer << 2 | t->dst_peer_id << 3;
}

static int by_destination(const void *left, const void *right)
{
	const struct sg_transfer *a = *(struct sg_transfer *const *)left, *b = *(struct sg_transfer *const *)right;

	if (dst_kind(a) != dst_kind(b))
		return dst_kind(a) < dst_kind(b) ? -1 : 1;
	return a->dst < b->dst ? -1 : a->dst > b->dst;
}

/* Unordered transfers must not write the same bytes. */
static void check_overlap(struct sg_channel *channel)
{
	struct sg_transfer **sorted = channel->sorted;
	u64 end = 0;
	u32 i;

	for (i = 0; i < channel->pending_count; i++)
		sorted[i] = &channel->pending[i];
	sort(sorted, channel->pending_count, sizeof(*sorted), by_destination, NULL);
	for (i = 0; i < channel->pending_count; i++) {
		const struct sg_transfer *t = sorted[i];
		bool table;

		if (i && dst_kind(t) == dst_kind(sorted[i - 1]) && t->dst < end) {
			table = t->dst_physical && !t->dst_peer && sg_tables_holds(channel->gpu, t->dst_sys, t->dst, t->length);
			sg_error(channel->gpu, table ? SOFTGPU_ERROR_TWICE : SOFTGPU_ERROR_OVERLAP, t->dst, 0,
				 "channel %u: %s at %llx + %llx is written twice without ordering", channel->id,
				 table ? "page table" : "memory", t->dst, t->length);
		}
		if (!i || dst_kind(t) != dst_kind(sorted[i - 1]))
			end = 0;
		end = max(end, t->dst + t->length);
	}
}

void sg_ce_flush(struct sg_channel *channel)
{
	u32 n = channel->pending_count, i;

	if (settings.check_ordering && n > 1)
		check_overlap(channel);
	for (i = 0; i < n && !channel->dead; i++) {
		struct sg_transfer t;

		if (settings.reorder && n - i > 1) {
			u32 pick = i + sg_random(n - i);

			if (pick != i) {
				swap(channel->pending[i], channel->pending[pick]);
				channel->gpu->count.reordered++;
			}
		}
		t = channel->pending[i];
		if (!(t.fill ? fill_run(channel, &t) : copy_run(channel, &t)))
			sg_channel_die(channel, SOFTGPU_ERROR_COPY, t.fill ? "memset to or near" : "copy to or near", t.dst);
	}
	channel->pending_count = 0;
}

/* ---- launching --------------------------------------------------------------------------------------- */

/* false: a combination that the model does not support */
static bool pattern_of(struct sg_channel *channel, u32 launch, struct sg_transfer *t)
{
	u32 components = ce(channel, SET_REMAP_COMPONENTS);
	u32 size = FIELD_GET(REMAP_SIZE, components) + 1;
	u32 count = FIELD_GET(REMAP_NUM_DST, components) + 1;
	u32 a = ce(channel, SET_REMAP_CONST_A), b = ce(channel, SET_REMAP_CONST_B), i;

	t->fill = true;
	if (launch & LAUNCH_SCRUB) {
		/* length in bytes, the two constants as one 64-bit word */
		memcpy(t->pattern, &a, sizeof(a));
		memcpy(t->pattern + sizeof(a), &b, sizeof(b));
		t->element = sizeof(u64);
		return true;
	}
	for (i = 0; i < count; i++) {
		u32 select = (components & REMAP_DST(i)) >> (4 * i);

		if (select != REMAP_CONST_A && select != REMAP_CONST_B)
			return false;
		memcpy(t->pattern + i * size, select == REMAP_CONST_A ? &a : &b, size);
	}
	t->element = size * count;
	t->length *= t->element;
	return true;
}

static void transfer_launch(struct sg_channel *channel, u32 launch)
{
	bool scrub = channel->gpu->arch->scrub && (launch & LAUNCH_SCRUB);
	u32 src_mode = ce(channel, SET_SRC_PHYS_MODE), dst_mode = ce(channel, SET_DST_PHYS_MODE);
	struct sg_transfer t = {
		.src_physical = launch & LAUNCH_SRC_PHYSICAL,
		.dst_physical = launch & LAUNCH_DST_PHYSICAL,
		.src = ce_address(channel, OFFSET_IN_UPPER),
		.dst = ce_address(channel, OFFSET_OUT_UPPER),
		.length = ce(channel, LINE_LENGTH_IN),
	};

	if (launch & LAUNCH_MULTI_LINE) {
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "copy of several lines", launch);
		return;
	}
	if (t.src_physical) {
		t.src_peer = FIELD_GET(PHYS_TARGET, src_mode) == TARGET_PEERMEM;
		t.src_sys = !t.src_peer && FIELD_GET(PHYS_TARGET, src_mode) != TARGET_LOCAL_FB;
		t.src_peer_id = FIELD_GET(PHYS_PEER_ID, src_mode);
	}
	if (t.dst_physical) {
		t.dst_peer = FIELD_GET(PHYS_TARGET, dst_mode) == TARGET_PEERMEM;
		t.dst_sys = !t.dst_peer && FIELD_GET(PHYS_TARGET, dst_mode) != TARGET_LOCAL_FB;
		t.dst_peer_id = FIELD_GET(PHYS_PEER_ID, dst_mode);
	}
	if ((scrub || (launch & LAUNCH_REMAP)) && !pattern_of(channel, scrub ? launch : launch & ~LAUNCH_SCRUB, &t)) {
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown remap", ce(channel, SET_REMAP_COMPONENTS));
		return;
	}
	if (FIELD_GET(LAUNCH_TRANSFER, launch) == TRANSFER_NON_PIPELINED || channel->pending_count == SG_CE_PENDING)
		sg_ce_flush(channel);
	if (channel->dead || !t.length)
		return;
	channel->pending[channel->pending_count++] = t;
}

static void semaphore_launch(struct sg_channel *channel, u32 launch)
{
	u64 va = ce_address(channel, SET_SEMAPHORE_A);
	u32 payload = ce(channel, SET_SEMAPHORE_PAYLOAD);
	u64 old;

	sg_ce_flush(channel);
	if (channel->dead)
		return;
	if (!(launch & LAUNCH_REDUCTION_ENABLE)) {
		sg_semaphore_write(channel, va, payload, false, FIELD_GET(LAUNCH_SEMAPHORE, launch) == SEMAPHORE_FOUR_WORDS);
		return;
	}
	if (FIELD_GET(LAUNCH_REDUCTION, launch) != REDUCTION_INC) {
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown reduction", launch);
		return;
	}
	if (sg_semaphore_read(channel, va, &old))
		sg_semaphore_write(channel, va, (u32)old >= payload ? 0 : (u32)old + 1, false, false);
}

void sg_ce_method(struct sg_channel *channel, u32 method, u32 value)
{
	if (method >= SG_CE_METHODS * 4) {
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown copy engine method", method);
		return;
	}
	channel->ce[method >> 2] = value;
	if (method != LAUNCH_DMA)
		return;
	if (FIELD_GET(LAUNCH_TRANSFER, value) != TRANSFER_NONE)
		transfer_launch(channel, value);
	if (!channel->dead && FIELD_GET(LAUNCH_SEMAPHORE, value) != SEMAPHORE_NONE)
		semaphore_launch(channel, value);
}
