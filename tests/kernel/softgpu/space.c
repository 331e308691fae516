// SPDX-License-Identifier: MIT OR GPL-2.0
/* space.c - GPU address spaces, and the memory with an address that UVM gets from the resource manager in them. */
#include <linux/mm.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "impl.h"

#define RM_FIRST_OFFSET (4ull << 30) /* the first address allocated in UVM's own spaces; arbitrary */
#define RM_ALIGNMENT    SG_PAGE_2M

static struct sg_space *to_space(uvmGpuAddressSpaceHandle handle)
{
	return (struct sg_space *)handle;
}

static struct sg_space *space_new(struct softgpu *gpu, u64 base, u64 size)
{
	struct sg_space *space = kzalloc(sizeof(*space), GFP_KERNEL);

	if (!space)
		return NULL;
	space->gpu = gpu;
	space->rm_base = base;
	space->rm_size = size;
	space->rm_next = base + RM_FIRST_OFFSET;
	INIT_LIST_HEAD(&space->allocations);
	INIT_LIST_HEAD(&space->tables);
	xa_init(&space->resized);
	mutex_lock(&model.lock);
	list_add(&space->node, &model.spaces);
	gpu->count.spaces_now++;
	mutex_unlock(&model.lock);
	return space;
}

static void space_info(struct softgpu *gpu, UvmGpuAddressSpaceInfo *info)
{
	memset(info, 0, sizeof(*info));
	info->bigPageSize = SG_PAGE_64K;
	info->time0Offset = (volatile NvU32 *)&gpu->registers[SG_REGISTER_TIME];
	info->time1Offset = (volatile NvU32 *)&gpu->registers[SG_REGISTER_TIME + 1];
	info->maxSubctxCount = 64;
	info->smcGpcCount = 8;
}

/* The newest match, so that handles 0, 0 mean the caller's last one. */
struct sg_space *sg_space_find(const struct softgpu_space *name)
{
	bool mine = !name->client && !name->vaspace;
	struct sg_space *space;

	list_for_each_entry(space, &model.spaces, node) {
		if (!space->user || !space->has_root || space->gpu->index != name->gpu)
			continue;
		if (mine ? space->pid == current->tgid : space->client == name->client && space->vaspace == name->vaspace)
			return space;
	}
	return NULL;
}

static struct sg_allocation *allocation_at(struct sg_space *space, u64 va)
{
	struct sg_allocation *a;

	list_for_each_entry(a, &space->allocations, node)
		if (va >= a->va && va - a->va < a->backing->length)
			return a;
	return NULL;
}

/* Translates an address of a space for the engine: resource manager memory, or through the page tables. */
bool sg_space_place(struct sg_space *space, u64 va, struct sg_place *out, u64 *contiguous)
{
	struct sg_translation t;
	struct sg_allocation *a = allocation_at(space, va);

	if (a) {
		u64 offset = va - a->va;

		*contiguous = a->backing->length - offset;
		*out = (struct sg_place){ .where = a->backing->sys ? SG_CPU : SG_VID, .gpu = space->gpu };
		out->pa = a->backing->pa + offset;
		out->cpu = a->backing->cpu + offset;
		return true;
	}
	if (!space->has_root)
		return false;
	sg_tlb_translate(space->gpu, space->root, va, &t);
	if (!t.valid || !sg_translation_place(space->gpu, &t, out))
		return false;
	*contiguous = t.page_size - (va & (t.page_size - 1));
	return true;
}

/* ---- interface: spaces ------------------------------------------------------------------------------ */

NV_STATUS nvUvmInterfaceAddressSpaceCreate(uvmGpuDeviceHandle device, unsigned long long base, unsigned long long size,
#if SG_HAS_ATS_ARGUMENT
					   NvBool ats,
#endif
					   uvmGpuAddressSpaceHandle *out, UvmGpuAddressSpaceInfo *info)
{
	struct softgpu *gpu = (struct softgpu *)device;
	struct sg_space *space;

	SG_CALL(AddressSpaceCreate, gpu);
	space = space_new(gpu, base, size);
	if (!space)
		return NV_ERR_NO_MEMORY;
	space_info(gpu, info);
	*out = (uvmGpuAddressSpaceHandle)space;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceDupAddressSpace(uvmGpuDeviceHandle device, NvHandle client, NvHandle vaspace, uvmGpuAddressSpaceHandle *out,
					UvmGpuAddressSpaceInfo *info)
{
	struct softgpu *gpu = (struct softgpu *)device;
	struct sg_space *space;
	struct sg_client *owner;
	struct sg_object *object;
	bool ok;

	SG_CALL(DupAddressSpace, gpu);
	mutex_lock(&model.lock);
	owner = sg_client_find(client);
	object = owner ? sg_object_find(owner, vaspace) : NULL;
	ok = object && object->kind == SG_OBJECT_VASPACE && object->gpu == gpu;
	mutex_unlock(&model.lock);
	if (!ok)
		return NV_ERR_INVALID_OBJECT_HANDLE;
	space = space_new(gpu, 0, 0);
	if (!space)
		return NV_ERR_NO_MEMORY;
	space->user = true;
	space->client = client;
	space->vaspace = vaspace;
	space->pid = current->tgid;
	space->descriptor = sg_descriptor_of_caller();
	space_info(gpu, info);
	*out = (uvmGpuAddressSpaceHandle)space;
	return NV_OK;
}

static void root_drop(struct sg_space *space)
{
	if (!space->has_root)
		return;
	if (space->user)
		sg_tables_drop_root(space);
	sg_tlb_invalidate_root(space->gpu, space->root);
	space->has_root = false;
}

void nvUvmInterfaceAddressSpaceDestroy(uvmGpuAddressSpaceHandle handle)
{
	struct sg_space *space = to_space(handle);

	sg_call(SG_CALL_AddressSpaceDestroy, space->gpu);
	mutex_lock(&model.lock);
	if (!list_empty(&space->allocations))
		sg_error(space->gpu, SOFTGPU_ERROR_SPACE_BUSY, 0, 0, "address space destroyed with allocations");
	root_drop(space);
	list_del(&space->node);
	space->gpu->count.spaces_now--;
	mutex_unlock(&model.lock);
	xa_destroy(&space->resized);
	kfree(space);
}

NV_STATUS nvUvmInterfaceSetPageDirectory(uvmGpuAddressSpaceHandle handle, NvU64 pa, unsigned entries, NvBool vidmem, NvU32 pasid
#if SG_HAS_PDB_DMA
					 , NvU64 *dma
#endif
)
{
	struct sg_space *space = to_space(handle);
	NV_STATUS status = NV_OK;

	SG_CALL(SetPageDirectory, space->gpu);
	mutex_lock(&model.lock);
	root_drop(space);
	space->root = (struct sg_root){ .pa = pa, .sys = !vidmem };
	space->has_root = true;
	sg_tlb_invalidate_root(space->gpu, space->root);
	if (space->user && sg_tables_set_root(space)) {
		space->has_root = false;
		status = NV_ERR_NO_MEMORY;
	}
	mutex_unlock(&model.lock);
#if SG_HAS_PDB_DMA
	if (dma)
		*dma = pa;
#endif
	return status;
}

NV_STATUS nvUvmInterfaceUnsetPageDirectory(uvmGpuAddressSpaceHandle handle)
{
	struct sg_space *space = to_space(handle);

	SG_CALL(UnsetPageDirectory, space->gpu);
	mutex_lock(&model.lock);
	root_drop(space);
	mutex_unlock(&model.lock);
	return NV_OK;
}

/* ---- interface: memory with an address ----------------------------------------------------------------- */

static void backing_put(struct sg_backing *backing)
{
	if (--backing->users)
		return;
	if (backing->sys)
		vfree(backing->cpu);
	else if (backing->length)
		sg_pma_put(backing->gpu, backing->pa, backing->length);
	kfree(backing);
}

static struct sg_backing *backing_new(struct softgpu *gpu, u64 length, bool sys)
{
	struct sg_backing *backing = kzalloc(sizeof(*backing), GFP_KERNEL);
	struct sg_place place = { .where = SG_VID, .gpu = gpu };
	bool ok;

	if (!backing)
		return NULL;
	backing->users = 1;
	backing->gpu = gpu;
	backing->sys = sys;
	if (sys) {
		backing->cpu = vzalloc(length);
		ok = backing->cpu;
	} else {
		ok = sg_pma_take(gpu, length, SOFTGPU_FRAME_SIZE, true, true, 0, gpu->vidmem, &backing->pa);
		place.pa = backing->pa;
		if (ok)
			sg_mem_fill(&place, 0, length);
	}
	if (!ok) {
		kfree(backing);
		return NULL;
	}
	backing->length = length;
	return backing;
}

static u64 attach(struct sg_space *space, struct sg_allocation *a, struct sg_backing *backing, u64 alignment)
{
	a->backing = backing;
	a->va = ALIGN(space->rm_next, max(alignment, RM_ALIGNMENT));
	space->rm_next = a->va + backing->length;
	list_add(&a->node, &space->allocations);
	space->gpu->count.rm_memory_now++;
	return a->va;
}

static NV_STATUS memory_alloc(struct sg_space *space, u64 length, u64 alignment, bool sys, UvmGpuPointer *out)
{
	struct sg_allocation *a = kzalloc(sizeof(*a), GFP_KERNEL);
	struct sg_backing *backing;

	if (!a)
		return NV_ERR_NO_MEMORY;
	mutex_lock(&model.lock);
	backing = backing_new(space->gpu, ALIGN(length, SOFTGPU_FRAME_SIZE), sys);
	if (backing)
		*out = attach(space, a, backing, alignment);
	mutex_unlock(&model.lock);
	if (!backing) {
		kfree(a);
		return NV_ERR_NO_MEMORY;
	}
	return NV_OK;
}

NV_STATUS nvUvmInterfaceMemoryAllocFB(uvmGpuAddressSpaceHandle handle, NvLength length, UvmGpuPointer *out, UvmGpuAllocInfo *info)
{
	SG_CALL(MemoryAllocFB, to_space(handle)->gpu);
	return memory_alloc(to_space(handle), length, info->alignment, false, out);
}

NV_STATUS nvUvmInterfaceMemoryAllocSys(uvmGpuAddressSpaceHandle handle, NvLength length, UvmGpuPointer *out, UvmGpuAllocInfo *info)
{
	SG_CALL(MemoryAllocSys, to_space(handle)->gpu);
	return memory_alloc(to_space(handle), length, info->alignment, true, out);
}

void nvUvmInterfaceMemoryFree(uvmGpuAddressSpaceHandle handle, UvmGpuPointer va)
{
	struct sg_space *space = to_space(handle);
	struct sg_allocation *a;

	sg_call(SG_CALL_MemoryFree, space->gpu);
	mutex_lock(&model.lock);
	a = allocation_at(space, va);
	if (!a || a->va != va) {
		sg_error(space->gpu, SOFTGPU_ERROR_BAD_FREE, va, 0, "free of address %llx, which was not allocated", va);
	} else {
		list_del(&a->node);
		space->gpu->count.rm_memory_now--;
		if (a->mapped)
			vunmap(a->mapped);
		backing_put(a->backing);
		kfree(a);
	}
	mutex_unlock(&model.lock);
}

NV_STATUS nvUvmInterfaceMemoryCpuMap(uvmGpuAddressSpaceHandle handle, UvmGpuPointer va, NvLength length, void **out, NvU64 page_size)
{
	struct sg_space *space = to_space(handle);
	struct sg_allocation *a;
	NV_STATUS status = NV_OK;

	SG_CALL(MemoryCpuMap, space->gpu);
	mutex_lock(&model.lock);
	a = allocation_at(space, va);
	if (!a || a->va != va) {
		status = NV_ERR_INVALID_ADDRESS;
	} else if (a->backing->sys) {
		*out = a->backing->cpu;
	} else {
		if (!a->mapped)
			a->mapped = sg_vidmem_map(space->gpu, a->backing->pa, a->backing->length);
		*out = a->mapped;
		status = a->mapped ? NV_OK : NV_ERR_NO_MEMORY;
	}
	mutex_unlock(&model.lock);
	return status;
}

/* Mappings of video memory live until the memory is freed. */
void nvUvmInterfaceMemoryCpuUnMap(uvmGpuAddressSpaceHandle handle, void *cpu)
{
	sg_call(SG_CALL_MemoryCpuUnMap, to_space(handle)->gpu);
}

NV_STATUS nvUvmInterfaceDupAllocation(uvmGpuAddressSpaceHandle from, NvU64 from_va, uvmGpuAddressSpaceHandle to, NvU64 alignment,
				      NvU64 *out)
{
	struct sg_space *source = to_space(from), *target = to_space(to);
	struct sg_allocation *old, *new;

	SG_CALL(DupAllocation, target->gpu);
	new = kzalloc(sizeof(*new), GFP_KERNEL);
	if (!new)
		return NV_ERR_NO_MEMORY;
	mutex_lock(&model.lock);
	old = allocation_at(source, from_va);
	if (old) {
		old->backing->users++;
		*out = attach(target, new, old->backing, alignment);
	}
	mutex_unlock(&model.lock);
	if (!old) {
		kfree(new);
		return NV_ERR_INVALID_ADDRESS;
	}
	return NV_OK;
}
