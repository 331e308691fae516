// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * membars.c - detects reuse of memory while accesses through a removed translation may still be in flight.
 *
 * A TLB invalidate keeps later accesses from using the old translation. A membar after it waits for accesses in flight: a
 * GPU membar for the GPU's own memory, a system membar for another GPU's (uvm_hal_downgrade_membar_type). Each GPU has a
 * clock of these operations; each frame records when each GPU lost a translation to it. Memory counts as reused when it is
 * freed, and when a copy engine writes it by physical address while nothing maps it.
 */
#include "impl.h"

void sg_membars_cleared(struct softgpu *by, struct softgpu *owner, u64 frame)
{
	owner->frame[frame].cleared[by->index] = ++by->membars.clock;
}

void sg_membars_invalidated(struct softgpu *by)
{
	by->membars.invalidated = ++by->membars.clock;
}

void sg_membars_done(struct softgpu *by, bool sys)
{
	by->membars.own_until = by->membars.invalidated;
	if (sys)
		by->membars.peers_until = by->membars.invalidated;
}

void sg_membars_reused(struct softgpu *owner, u64 frame)
{
	struct sg_frame *f = &owner->frame[frame];
	u64 pa = frame << SOFTGPU_FRAME_SHIFT;
	u32 i;

	for (i = 0; i < model.gpus; i++) {
		struct softgpu *by = model.gpu[i];
		u64 cleared = f->cleared[i];

		f->cleared[i] = 0;
		if (cleared <= (by == owner ? by->membars.own_until : by->membars.peers_until) || by->lost || by->died)
			continue;
		sg_error(owner, SOFTGPU_ERROR_NO_MEMBAR, pa, i, "frame %llx reused, but no membar followed gpu %u's invalidate", pa, i);
	}
}
