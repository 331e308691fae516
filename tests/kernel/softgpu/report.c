// SPDX-License-Identifier: MIT OR GPL-2.0
/* report.c - records and counts faults and rule violations. */
#include <linux/printk.h>

#include "impl.h"

void sg_fault(struct softgpu *gpu, u32 kind, u64 address, u64 pte, u32 pid, u32 channel)
{
	if (kind >= SOFTGPU_ERROR_FIRST)
		gpu->count.errors++;
	else if (kind != SOFTGPU_FAULT_POISON)
		gpu->count.faults++;
	if (kind == SOFTGPU_FAULT_STALE)
		gpu->count.stale++;
	/* reads of poison are frequent; leave room in the log for other faults */
	if (kind == SOFTGPU_FAULT_POISON && gpu->fault_head - gpu->fault_tail >= SG_FAULT_LOG / 2)
		return;
	if (gpu->fault_head - gpu->fault_tail == SG_FAULT_LOG) {
		gpu->fault_dropped++;
		return;
	}
	gpu->fault[gpu->fault_head++ % SG_FAULT_LOG] = (struct softgpu_fault){
		.kind = kind,
		.gpu = gpu->index,
		.address = address,
		.pte = pte,
		.pid = pid,
		.channel = channel,
	};
}

void sg_error(struct softgpu *gpu, u32 kind, u64 address, u64 pte, const char *format, ...)
{
	struct va_format what = { .fmt = format };
	va_list arguments;

	va_start(arguments, format);
	what.va = &arguments;
	pr_err("softgpu: error: gpu %u: %pV\n", gpu ? gpu->index : 0, &what);
	va_end(arguments);
	if (gpu)
		sg_fault(gpu, kind, address, pte, 0, 0);
}
