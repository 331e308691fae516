// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * host.c - methods of the host class: semaphores, membars, TLB invalidates, waits for idle.
 *
 * Sources: kernel-open/nvidia-uvm/clc96f.h (Blackwell), clc86f.h (Hopper), clc56f.h (Ampere); the fields used here are the same
 * in all. On Blackwell UVM's invalidates include their membar; on earlier GPUs a separate membar operation follows.
 *
 * Order: the copy engine runs asynchronously to the host. Only a WFI, or a semaphore release with WFI, waits for its
 * transfers; a membar or TLB invalidate does not. An invalidate while page table entries are still being written
 * is an error of the submitter (SOFTGPU_ERROR_UNORDERED).
 */
#include <linux/bitfield.h>
#include <linux/ktime.h>

#include "impl.h"

enum {
	SET_OBJECT = 0x00,
	NOP = 0x08,
	NON_STALL_INTERRUPT = 0x20,
	FB_FLUSH = 0x24,
	MEM_OP_A = 0x28,
	MEM_OP_B = 0x2c,
	MEM_OP_C = 0x30,
	MEM_OP_D = 0x34,
	SEMAPHORE_A = 0x10, /* the older semaphore methods: set by UVM's tests, never executed */
	SEMAPHORE_B = 0x14,
	SEMAPHORE_C = 0x18,
	SET_REFERENCE = 0x50,
	SEM_ADDR_LO = 0x5c,
	SEM_ADDR_HI = 0x60,
	SEM_PAYLOAD_LO = 0x64,
	SEM_PAYLOAD_HI = 0x68,
	SEM_EXECUTE = 0x6c,
	WFI = 0x78,
};

#define OP_A_SIZE        GENMASK(5, 0)  /* TLB_INVALIDATE_INVALIDATION_SIZE: log2, in 4 KB */
#define OP_A_SYSMEMBAR   BIT(11)
#define OP_A_ADDRESS_LO  GENMASK(31, 12)
#define OP_C_MEMBAR_TYPE GENMASK(2, 0)
#define MEMBAR_SYS       0
#define OP_C_PDB_ALL     BIT(0)
#define OP_C_REPLAY      GENMASK(4, 2)
#define REPLAY_NONE      0
#define REPLAY_CANCEL_FIRST 3           /* from this value on, the level field has another meaning */
#define REPLAY_CANCEL_VA_GLOBAL 5
#define OP_C_LEVEL       GENMASK(9, 7)  /* TLB_INVALIDATE_PAGE_TABLE_LEVEL */
#define LEVEL_ALL        0
#define LEVEL_PTE_ONLY   1              /* 2: up to PDE0, ... */
#define OP_C_APERTURE    GENMASK(11, 10)
#define OP_C_PDB_LO      GENMASK(31, 12)
#define OP_D_PDB_HI      GENMASK(26, 0)
#define OP_D_OPERATION   GENMASK(31, 27)

enum {
	OP_MEMBAR = 0x05,
	OP_TLB_INVALIDATE = 0x09,
	OP_TLB_INVALIDATE_TARGETED = 0x0a,
	OP_L2_PEERMEM_INVALIDATE = 0x0d,
	OP_L2_SYSMEM_INVALIDATE = 0x0e,
	OP_L2_CLEAN_COMPTAGS = 0x0f,
	OP_L2_FLUSH_DIRTY = 0x10,
	OP_L2_WAIT_FOR_SYS_PENDING_READS = 0x15,
	OP_ACCESS_COUNTER_CLR = 0x16,
};

#define EXECUTE_OPERATION    GENMASK(2, 0)
#define SEM_ACQUIRE          0
#define SEM_RELEASE          1
#define SEM_ACQ_CIRC_GEQ     3
#define EXECUTE_RELEASE_WFI  BIT(20)
#define EXECUTE_PAYLOAD_64   BIT(24)
#define EXECUTE_TIMESTAMP    BIT(25)
#define SEM_ADDR_HI_MASK     GENMASK_ULL(24, 0)

bool sg_semaphore_write(struct sg_channel *channel, u64 va, u64 value, bool two_words, bool timestamp)
{
	struct sg_place place;
	u64 contiguous, now = ktime_get_ns();
	struct sg_place stamp;

	if (!sg_space_place(channel->space, va, &place, &contiguous)) {
		sg_channel_die(channel, SOFTGPU_ERROR_COPY, "semaphore release at", va);
		return false;
	}
	stamp = place;
	sg_place_advance(&stamp, 8);
	if (timestamp)
		sg_mem_write(&stamp, &now, sizeof(now));
	smp_wmb(); /* earlier writes become visible before the semaphore */
	if (sg_mem_write(&place, &value, two_words ? sizeof(u64) : sizeof(u32))) {
		sg_channel_die(channel, SOFTGPU_ERROR_COPY, "semaphore release at", va);
		return false;
	}
	channel->gpu->count.semaphore_releases++;
	return true;
}

bool sg_semaphore_read(struct sg_channel *channel, u64 va, u64 *value)
{
	struct sg_place place;
	u64 contiguous;
	u32 word;

	if (!sg_space_place(channel->space, va, &place, &contiguous) || sg_mem_read(&place, &word, sizeof(word))) {
		sg_channel_die(channel, SOFTGPU_ERROR_COPY, "semaphore at", va);
		return false;
	}
	*value = word;
	smp_rmb(); /* later accesses follow the acquire */
	return true;
}

static bool semaphore_execute(struct sg_channel *channel, u32 word)
{
	u64 va = ((channel->semaphore[1] & SEM_ADDR_HI_MASK) << 32) | (channel->semaphore[0] & ~3u);
	u64 payload = channel->semaphore[2] | ((u64)channel->semaphore[3] << 32);
	u64 value;

	switch (FIELD_GET(EXECUTE_OPERATION, word)) {
	case SEM_RELEASE:
		if (word & EXECUTE_RELEASE_WFI)
			sg_ce_flush(channel);
		if (!channel->dead)
			sg_semaphore_write(channel, va, payload, word & EXECUTE_PAYLOAD_64, word & EXECUTE_TIMESTAMP);
		return true;
	case SEM_ACQUIRE:
		if (!sg_semaphore_read(channel, va, &value))
			return true;
		if ((u32)value != (u32)payload)
			return false;
		break;
	case SEM_ACQ_CIRC_GEQ:
		if (!sg_semaphore_read(channel, va, &value))
			return true;
		if ((s32)((u32)value - (u32)payload) < 0)
			return false;
		break;
	default:
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown semaphore operation", word);
		return true;
	}
	channel->gpu->count.semaphore_acquires++;
	return true;
}

static bool tables_in_flight(struct sg_channel *channel)
{
	u32 i;

	for (i = 0; i < channel->pending_count; i++) {
		struct sg_transfer *t = &channel->pending[i];

		if (t->dst_physical && !t->dst_peer && sg_tables_holds(channel->gpu, t->dst_sys, t->dst, t->length))
			return true;
	}
	return false;
}

static void tlb_invalidate(struct sg_channel *channel, bool targeted)
{
	struct softgpu *gpu = channel->gpu;
	u32 a = channel->mem_op[0], b = channel->mem_op[1], c = channel->mem_op[2], d = channel->mem_op[3];
	struct sg_root root = {
		.pa = (FIELD_GET(OP_D_PDB_HI, (u64)d) << 32) | (c & OP_C_PDB_LO),
		.sys = FIELD_GET(OP_C_APERTURE, c) != 0,
	};
	u32 level = FIELD_GET(OP_C_LEVEL, c);
	u8 max_level = level == LEVEL_ALL ? SG_LEVELS_MAX : level - LEVEL_PTE_ONLY + SG_LEVEL_PTE;
	u64 start = 0, last = U64_MAX;

	if (FIELD_GET(OP_C_REPLAY, c) != REPLAY_NONE) {
		/* a fault replay, for which UVM names no page directory */
		if (FIELD_GET(OP_C_REPLAY, c) == REPLAY_CANCEL_VA_GLOBAL)
			sg_faults_cancel(gpu, ((u64)b << 32) | (a & OP_A_ADDRESS_LO));
		if (FIELD_GET(OP_C_REPLAY, c) >= REPLAY_CANCEL_FIRST)
			return;
		sg_faults_replay(gpu);
	} else {
		gpu->count.invalidates++;
		if (!targeted)
			gpu->count.invalidates_all++;
		if (settings.check_ordering && tables_in_flight(channel))
			sg_error(gpu, SOFTGPU_ERROR_UNORDERED, root.pa, 0,
				 "channel %u: TLB invalidate while page table entries are still being written", channel->id);
	}
	sg_membars_invalidated(gpu);
	if (a & OP_A_SYSMEMBAR) {
		gpu->count.membar_sys++;
		sg_membars_done(gpu, true);
	}
	if (targeted) {
		u64 bytes = SG_PAGE_4K << FIELD_GET(OP_A_SIZE, a);

		start = (((u64)b << 32) | (a & OP_A_ADDRESS_LO)) & ~(bytes - 1);
		last = start + bytes - 1;
	}
	if (c & OP_C_PDB_ALL) {
		sg_tlb_flush(gpu);
	} else {
		sg_tlb_invalidate(gpu, root, max_level, start, last);
		sg_tables_invalidated(gpu, root, max_level, start, last);
	}
}

static void mem_op(struct sg_channel *channel)
{
	u32 c = channel->mem_op[2], d = channel->mem_op[3];

	switch (FIELD_GET(OP_D_OPERATION, d)) {
	case OP_MEMBAR:
		if (FIELD_GET(OP_C_MEMBAR_TYPE, c) == MEMBAR_SYS)
			channel->gpu->count.membar_sys++;
		else
			channel->gpu->count.membar_gpu++;
		sg_membars_done(channel->gpu, FIELD_GET(OP_C_MEMBAR_TYPE, c) == MEMBAR_SYS);
		break;
	case OP_TLB_INVALIDATE:
		tlb_invalidate(channel, false);
		break;
	case OP_TLB_INVALIDATE_TARGETED:
		tlb_invalidate(channel, true);
		break;
	case OP_L2_PEERMEM_INVALIDATE:
	case OP_L2_SYSMEM_INVALIDATE:
	case OP_L2_CLEAN_COMPTAGS:
	case OP_L2_FLUSH_DIRTY:
	case OP_L2_WAIT_FOR_SYS_PENDING_READS:
	case OP_ACCESS_COUNTER_CLR:
		break; /* the model has neither data caches nor access counters */
	default:
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown memory operation", d);
	}
}

static bool holds_before_invalidate(struct sg_channel *channel, u32 d)
{
	u32 operation = FIELD_GET(OP_D_OPERATION, d);
	bool invalidate = operation == OP_TLB_INVALIDATE || operation == OP_TLB_INVALIDATE_TARGETED;

	if (!invalidate || FIELD_GET(OP_C_REPLAY, channel->mem_op[2]) != REPLAY_NONE)
		return false;
	return sg_holds(channel->gpu, SOFTGPU_HOLD_INVALIDATE);
}

bool sg_host_method(struct sg_channel *channel, u32 method, u32 value)
{
	switch (method) {
	case SET_OBJECT:
	case NOP:
	case NON_STALL_INTERRUPT:
	case FB_FLUSH:
	case SET_REFERENCE:
	case SEMAPHORE_A:
	case SEMAPHORE_B:
	case SEMAPHORE_C:
		return true;
	case WFI:
		channel->gpu->count.wfi++;
		sg_ce_flush(channel);
		return true;
	case MEM_OP_A:
	case MEM_OP_B:
	case MEM_OP_C:
		channel->mem_op[(method - MEM_OP_A) / 4] = value;
		return true;
	case MEM_OP_D:
		if (holds_before_invalidate(channel, value))
			return false;
		channel->mem_op[3] = value;
		mem_op(channel);
		return true;
	case SEM_ADDR_LO:
	case SEM_ADDR_HI:
	case SEM_PAYLOAD_LO:
	case SEM_PAYLOAD_HI:
		channel->semaphore[(method - SEM_ADDR_LO) / 4] = value;
		return true;
	case SEM_EXECUTE:
		return semaphore_execute(channel, value);
	default:
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown host method", method);
		return true;
	}
}
