// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * engine.c - the thread of a GPU: fetches pushbuffer segments from the rings of its channels and decodes them.
 *
 * Sources: kernel-open/nvidia-uvm/clc86f.h and clc56f.h (GP_ENTRY*, DMA_*).
 *
 * The thread polls GPPut; it works under model.lock, on one channel at a time. With delay_us set each push starts up to
 * that much later, with the lock dropped: this exposes a caller that does not wait for its push.
 */
#include <linux/bitfield.h>
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/slab.h>

#include "impl.h"

/* GP_ENTRY0, GP_ENTRY1 */
#define GP0_ADDRESS       GENMASK(31, 2)
#define GP0_EXTENDED_BASE GENMASK(24, 8)
#define GP1_ADDRESS_HI    GENMASK(7, 0)
#define GP1_OPCODE        GENMASK(7, 0)
#define GP1_LENGTH        GENMASK(30, 10)
#define GP_OPCODE_NOP     0
#define GP_OPCODE_SET_PB_SEGMENT_EXTENDED_BASE 4
#define EXTENDED_BASE_SHIFT 40

/* pushbuffer words (DMA_*) */
#define DMA_OPERATION    GENMASK(31, 29)
#define DMA_METHOD       GENMASK(11, 0)
#define DMA_SUBCHANNEL   GENMASK(15, 13)
#define DMA_COUNT        GENMASK(28, 16)
#define DMA_OP_GRP0      0
#define DMA_OP_INCREASE  1
#define DMA_OP_CONSTANT  3
#define DMA_OP_IMMEDIATE 4
#define DMA_OP_INCREASE_ONCE 5

#define HOST_METHODS_END 0x100
#define SUBCHANNEL_CE    4 /* UVM_SUBCHANNEL_CE */
#define SUBCHANNEL_SW    5 /* UVM_SW_OBJ_SUBCHANNEL */

#define POLL_BUSY_ROUNDS 400 /* polls without sleeping after the last work */
#define POLL_MIN_US      50
#define POLL_MAX_US      1000

#define NOTIFIER_ERROR   0xffff
#define ROBUST_CHANNEL_FAULT 31 /* ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT */

/* kind 0: not an error found by the model, but requested by a test */
void sg_channel_die(struct sg_channel *channel, u32 kind, const char *what, u64 value)
{
	if (kind)
		sg_error(channel->gpu, kind, value, 0, "channel %u: %s %llx", channel->id, what, value);
	else
		channel->gpu->died = true;
	channel->error->info32 = ROBUST_CHANNEL_FAULT;
	WRITE_ONCE(channel->error->status, NOTIFIER_ERROR);
	channel->dead = true;
	channel->pending_count = 0;
}

/* Returns true if the engine must stop at this kind of place. */
bool sg_holds(struct softgpu *gpu, u32 where)
{
	if (gpu->hold != where)
		return false;
	if (gpu->hold_pass) {
		gpu->hold_pass = false;
		return false;
	}
	gpu->held = true;
	return true;
}

static bool method(struct sg_channel *channel, u32 subchannel, u32 number, u32 value)
{
	bool done = true;

	if (number < HOST_METHODS_END)
		done = sg_host_method(channel, number, value);
	else if (subchannel == SUBCHANNEL_CE)
		sg_ce_method(channel, number, value);
	else if (subchannel != SUBCHANNEL_SW)
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown subchannel", subchannel);
	if (done)
		channel->gpu->count.methods++;
	return done;
}

/* Copies the segment's words: they are few, and may be in any memory. */
static bool segment_load(struct sg_channel *channel, u64 va, u32 words)
{
	u64 left = (u64)words * sizeof(u32);
	u8 *to;

	channel->segment = kvmalloc(left, GFP_KERNEL);
	if (!channel->segment)
		return false;
	to = (u8 *)channel->segment;
	while (left) {
		struct sg_place place;
		u64 n;

		if (!sg_space_place(channel->space, va, &place, &n))
			goto bad;
		n = min(n, left);
		if (sg_mem_read(&place, to, n))
			goto bad;
		to += n;
		va += n;
		left -= n;
	}
	channel->segment_words = words;
	channel->segment_at = 0;
	channel->left = 0;
	return true;
bad:
	kvfree(channel->segment);
	channel->segment = NULL;
	return false;
}

/* Fetches one entry of the ring: a segment to run, or a control entry. */
static void entry_fetch(struct sg_channel *channel)
{
	u64 raw = READ_ONCE(channel->gpfifo[channel->get]);
	u32 entry0 = lower_32_bits(raw), entry1 = upper_32_bits(raw);
	u32 words = FIELD_GET(GP1_LENGTH, entry1);
	u64 va;

	if (!words) {
		switch (FIELD_GET(GP1_OPCODE, entry1)) {
		case GP_OPCODE_SET_PB_SEGMENT_EXTENDED_BASE:
			channel->segment_base = FIELD_GET(GP0_EXTENDED_BASE, (u64)entry0) << EXTENDED_BASE_SHIFT;
			break;
		case GP_OPCODE_NOP:
			break;
		default:
			sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown ring entry", entry1);
		}
		return;
	}
	if (sg_push_fails()) {
		sg_channel_die(channel, 0, "failure asked for", 0);
		return;
	}
	channel->gpu->count.pushes++;
	va = channel->segment_base | (FIELD_GET(GP1_ADDRESS_HI, (u64)entry1) << 32) | (entry0 & GP0_ADDRESS);
	if (!segment_load(channel, va, words))
		sg_channel_die(channel, SOFTGPU_ERROR_COPY, "pushbuffer at", va);
}

static void header(struct sg_channel *channel, u32 word)
{
	u32 count = FIELD_GET(DMA_COUNT, word);

	channel->method = FIELD_GET(DMA_METHOD, word) << 2;
	channel->subchannel = FIELD_GET(DMA_SUBCHANNEL, word);
	channel->increment = false;
	channel->increment_once = false;
	switch (FIELD_GET(DMA_OPERATION, word)) {
	case DMA_OP_INCREASE:
		channel->increment = true;
		channel->left = count;
		break;
	case DMA_OP_CONSTANT:
		channel->left = count;
		break;
	case DMA_OP_INCREASE_ONCE:
		channel->increment = true;
		channel->increment_once = true;
		channel->left = count;
		break;
	case DMA_OP_IMMEDIATE:
		method(channel, channel->subchannel, channel->method, count);
		break;
	case DMA_OP_GRP0:
		if (word == 0)
			break;
		fallthrough;
	default:
		sg_channel_die(channel, SOFTGPU_ERROR_METHOD, "unknown pushbuffer word", word);
	}
}

/* false: the channel waits */
static bool segment_run(struct sg_channel *channel)
{
	while (channel->segment_at < channel->segment_words && !channel->dead) {
		u32 word = channel->segment[channel->segment_at];

		if (sg_holds(channel->gpu, SOFTGPU_HOLD_NOW))
			return false;
		if (channel->left == 0) {
			channel->segment_at++;
			header(channel, word);
			continue;
		}
		if (!method(channel, channel->subchannel, channel->method, word))
			return false;
		channel->segment_at++;
		channel->left--;
		if (channel->increment)
			channel->method += 4;
		if (channel->increment_once)
			channel->increment = false;
	}
	return true;
}

static bool channel_has_work(const struct sg_channel *channel)
{
	return !channel->dead && (channel->segment || READ_ONCE(channel->userd[SG_USERD_PUT]) != channel->get);
}

/* Runs a channel until it is empty or waits, or for one segment. Returns true if any work was done. */
static bool channel_run(struct sg_channel *channel, bool one_segment)
{
	struct softgpu *gpu = channel->gpu;
	bool progress = false;

	while (channel_has_work(channel)) {
		u32 at = channel->segment_at;

		sg_readers_channel_runs(channel);
		if (!channel->segment) {
			smp_rmb(); /* pairs with the writer: the entry was written before GPPut */
			if (sg_holds(gpu, SOFTGPU_HOLD_PUSH) || sg_holds(gpu, SOFTGPU_HOLD_NOW))
				return progress;
			at = 0;
			entry_fetch(channel);
		}
		if (channel->segment && !segment_run(channel))
			return progress || channel->segment_at != at;
		progress = true;
		if (channel->dead)
			break;
		kvfree(channel->segment);
		channel->segment = NULL;
		sg_readers_channel_advance(channel);
		smp_wmb();
		WRITE_ONCE(channel->userd[SG_USERD_GET], channel->get);
		if (one_segment)
			break;
	}
	if (!channel->dead && !channel_has_work(channel))
		sg_ce_flush(channel);
	return progress;
}

static bool any_work(struct softgpu *gpu)
{
	struct sg_channel *channel;

	list_for_each_entry(channel, &gpu->channels, node)
		if (channel_has_work(channel))
			return true;
	return false;
}

static void tick(struct softgpu *gpu)
{
	u64 now = ktime_get_ns();

	gpu->registers[SG_REGISTER_TIME] = lower_32_bits(now);
	gpu->registers[SG_REGISTER_TIME + 1] = upper_32_bits(now);
	sg_registers_settle(gpu);
}

static int engine(void *data)
{
	struct softgpu *gpu = data;
	u32 idle = 0;

	while (!kthread_should_stop()) {
		struct sg_channel *channel;
		bool progress = false;
		u32 delay = READ_ONCE(settings.delay_us);

		tick(gpu);
		mutex_lock(&model.lock);
		if (delay && any_work(gpu)) {
			delay = sg_random(delay) + 1;
			mutex_unlock(&model.lock);
			usleep_range(delay, delay + 1);
			mutex_lock(&model.lock);
		}
		list_for_each_entry(channel, &gpu->channels, node)
			if (!gpu->held)
				progress |= channel_run(channel, delay != 0);
		if (gpu->held)
			wake_up_all(&gpu->wait);
		mutex_unlock(&model.lock);
		if (READ_ONCE(gpu->hold) != SOFTGPU_HOLD_QUIET)
			sg_faults_interrupt(gpu);
		if (gpu->held)
			wait_event_timeout(gpu->wait, !READ_ONCE(gpu->held) || kthread_should_stop(), HZ / 10);
		if (progress)
			idle = 0;
		else
			idle++;
		if (idle < POLL_BUSY_ROUNDS)
			cond_resched();
		else
			usleep_range(min(POLL_MIN_US + idle - POLL_BUSY_ROUNDS, POLL_MAX_US), POLL_MAX_US);
	}
	return 0;
}

int sg_engine_start(struct softgpu *gpu)
{
	gpu->thread = kthread_run(engine, gpu, "softgpu%u", gpu->index);
	if (IS_ERR(gpu->thread)) {
		int result = PTR_ERR(gpu->thread);

		gpu->thread = NULL;
		return result;
	}
	return 0;
}

void sg_engine_stop(struct softgpu *gpu)
{
	if (gpu->thread)
		kthread_stop(gpu->thread);
	gpu->thread = NULL;
}
