// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * calls.c - counts the calls that UVM makes, and injects failures and delays.
 *
 * One rule at a time (softgpu.h, INJECT). For calls made while nvidia-uvm.ko is loaded the rule is a module parameter,
 * inject=NAME:NTH[:STATUS].
 */
#include <linux/atomic.h>
#include <linux/delay.h>
#include <linux/moduleparam.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/string.h>

#include "impl.h"

static const struct {
	const char *name;
	bool can_fail;
} calls[] = {
#define CALL(name, can_fail) { "nvUvmInterface" #name, can_fail },
	SG_CALLS(CALL)
#undef CALL
};

static atomic64_t call_count[SG_CALL_COUNT];

#define PREFIX "nvUvmInterface"
#define PUSH   "push"

enum match { MATCH_NONE, MATCH_ANY, MATCH_CALL, MATCH_PUSH };

static DEFINE_SPINLOCK(rule_lock); /* protects rule */
static struct {
	enum match match;
	u32 call;             /* MATCH_CALL */
	u32 flags;
	NV_STATUS status;
	u64 nth, repeat, delay_us;
	pid_t pid;            /* with MINE */
	const void *owner;
	u64 calls, failed;
	const char *last;
} rule;

static int find_call(const char *name)
{
	u32 i;

	for (i = 0; i < SG_CALL_COUNT; i++)
		if (!strcmp(calls[i].name, name) || !strcmp(calls[i].name + strlen(PREFIX), name))
			return i;
	return -1;
}

int sg_inject(const struct softgpu_inject *in, const void *owner)
{
	enum match match = MATCH_ANY;
	int call = 0;

	if (in->flags & ~SOFTGPU_INJECT_MINE)
		return -EINVAL;
	if (strnlen(in->name, sizeof(in->name)) == sizeof(in->name))
		return -EINVAL;
	if (!strcmp(in->name, PUSH)) {
		match = MATCH_PUSH;
	} else if (in->name[0]) {
		match = MATCH_CALL;
		call = find_call(in->name);
		if (call < 0)
			return -ENOENT;
	} else if (!in->flags && !in->nth && !in->delay_us) {
		match = MATCH_NONE;
	}
	spin_lock(&rule_lock);
	memset(&rule, 0, sizeof(rule));
	rule.match = match;
	rule.call = call;
	rule.flags = in->flags;
	rule.status = in->status ? in->status : NV_ERR_NO_MEMORY;
	rule.nth = in->nth;
	rule.repeat = in->repeat ? in->repeat : 1;
	rule.delay_us = in->delay_us;
	rule.pid = current->tgid;
	rule.owner = owner;
	rule.last = "";
	spin_unlock(&rule_lock);
	return 0;
}

void sg_inject_forget(const void *owner)
{
	spin_lock(&rule_lock);
	if (rule.owner == owner)
		memset(&rule, 0, sizeof(rule));
	spin_unlock(&rule_lock);
}

void sg_injected(struct softgpu_injected *out)
{
	memset(out, 0, sizeof(*out));
	spin_lock(&rule_lock);
	out->out_calls = rule.calls;
	out->out_failed = rule.failed;
	if (rule.last)
		strscpy(out->out_last, rule.last, sizeof(out->out_last));
	spin_unlock(&rule_lock);
}

/* The rule matched: returns true if this call must fail. */
static bool strike(const char *name)
{
	u64 n = ++rule.calls;

	rule.last = name;
	if (!rule.nth || n < rule.nth || n - rule.nth >= rule.repeat)
		return false;
	rule.failed++;
	return true;
}

bool sg_push_fails(void)
{
	bool fails;

	spin_lock(&rule_lock);
	fails = rule.match == MATCH_PUSH && strike(PUSH);
	spin_unlock(&rule_lock);
	return fails;
}

NV_STATUS sg_call(enum sg_call_id id, const struct softgpu *gpu)
{
	NV_STATUS status = NV_OK;
	u64 delay_us = 0;
	bool matches;

	atomic64_inc(&call_count[id]);
	spin_lock(&rule_lock);
	matches = rule.match == MATCH_ANY || (rule.match == MATCH_CALL && rule.call == id);
	if ((rule.flags & SOFTGPU_INJECT_MINE) && rule.pid != current->tgid)
		matches = false;
	if (matches && (calls[id].can_fail || rule.match == MATCH_CALL)) {
		delay_us = rule.delay_us;
		if (strike(calls[id].name) && calls[id].can_fail)
			status = rule.status;
	}
	spin_unlock(&rule_lock);
	if (delay_us)
		usleep_range(delay_us, delay_us + 10);
	if (status == NV_OK && calls[id].can_fail && gpu && gpu->lost)
		status = NV_ERR_GPU_IS_LOST;
	return status;
}

int sg_call_info(struct softgpu_call *call)
{
	if (call->index >= SG_CALL_COUNT)
		return -ENOENT;
	call->out_can_fail = calls[call->index].can_fail;
	call->out_calls = atomic64_read(&call_count[call->index]);
	strscpy(call->out_name, calls[call->index].name, sizeof(call->out_name));
	return 0;
}

static int inject_set(const char *text, const struct kernel_param *parameter)
{
	struct softgpu_inject in = { .repeat = 1 };

	if (sscanf(text, "%47[^:]:%llu:%i", in.name, &in.nth, (int *)&in.status) < 2)
		return -EINVAL;
	return sg_inject(&in, NULL);
}

static const struct kernel_param_ops inject_ops = { .set = inject_set };
module_param_cb(inject, &inject_ops, NULL, 0200);
MODULE_PARM_DESC(inject, "NAME:NTH[:STATUS]: the nth call of this name fails");
