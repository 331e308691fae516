// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * rmmem.c - memory that processes allocate from the resource manager, and its duplication into UVM
 * (UVM_MAP_EXTERNAL_ALLOCATION).
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "impl.h"

#define MAPPING_READ_ONLY 3 /* UvmRmGpuMappingTypeReadOnly, UvmGpuMappingTypeReadOnly */
#define DUAL_PTE_BYTES    16 /* a 2 MB entry takes a dual entry */
#define PTE_BYTES         8
#define KIND_GENERIC      6  /* NV_MMU_PTE_KIND_GENERIC_MEMORY, dev_mmu.h */

/* Allocates host memory in separate pages, zeroed. */
static int sys_fill(struct sg_memory *memory)
{
	u64 i;

	for (i = 0; i < memory->pages; i++) {
		void *page = (void *)__get_free_pages(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN, get_order(memory->page_size));

		if (!page)
			break;
		memory->pa[i] = virt_to_phys(page);
	}
	if (i == memory->pages)
		return 0;
	while (i--)
		free_pages((unsigned long)phys_to_virt(memory->pa[i]), get_order(memory->page_size));
	return -ENOSPC;
}

static int vid_fill(struct sg_memory *memory, bool contiguous, struct softgpu_alloc *counts)
{
	int result = sg_pma_alloc(memory->gpu, memory->page_size, memory->pages, contiguous, true, memory->pa, counts);
	u64 i;

	for (i = 1; contiguous && !result && i < memory->pages; i++)
		memory->pa[i] = memory->pa[0] + i * memory->page_size;
	return result;
}

struct sg_memory *sg_memory_new(struct softgpu *gpu, bool sys, u64 size, u64 page_size, bool contiguous,
				struct softgpu_alloc *counts, int *error)
{
	u64 pages = size / page_size;
	struct sg_memory *memory;

	memory = kvzalloc(struct_size(memory, pa, pages), GFP_KERNEL);
	if (!memory) {
		*error = -ENOMEM;
		return NULL;
	}
	memory->users = 1;
	memory->gpu = gpu;
	memory->sys = sys;
	memory->size = size;
	memory->page_size = page_size;
	memory->pages = pages;
	*error = sys ? sys_fill(memory) : vid_fill(memory, contiguous, counts);
	if (*error) {
		kvfree(memory);
		return NULL;
	}
	mutex_lock(&model.lock);
	memory->handle = ++model.next_handle;
	list_add(&memory->node, &model.memories);
	gpu->count.rm_memory_now++;
	mutex_unlock(&model.lock);
	return memory;
}

void sg_memory_put(struct sg_memory *memory)
{
	u64 i;

	if (--memory->users)
		return;
	list_del(&memory->node);
	memory->gpu->count.rm_memory_now--;
	for (i = 0; i < memory->pages; i++) {
		if (memory->sys)
			free_pages((unsigned long)phys_to_virt(memory->pa[i]), get_order(memory->page_size));
		else
			sg_pma_put(memory->gpu, memory->pa[i], memory->page_size);
	}
	kvfree(memory);
}

static struct sg_memory *memory_by_handle(u32 handle)
{
	struct sg_memory *memory;

	list_for_each_entry(memory, &model.memories, node)
		if (memory->handle == handle)
			return memory;
	return NULL;
}

/* ---- interface --------------------------------------------------------------------------------------- */

NV_STATUS nvUvmInterfaceDupMemory(uvmGpuDeviceHandle device, NvHandle client_handle, NvHandle handle, NvHandle *out, UvmGpuMemoryInfo *info)
{
	struct sg_client *client;
	struct sg_object *object;
	struct sg_memory *memory;

	SG_CALL(DupMemory, (struct softgpu *)device);
	mutex_lock(&model.lock);
	client = sg_client_find(client_handle);
	object = client ? sg_object_find(client, handle) : NULL;
	memory = object ? object->memory : NULL;
	if (memory) {
		memory->users++;
		*out = memory->handle;
		memset(info, 0, sizeof(*info));
		info->kind = KIND_GENERIC;
		info->sysmem = memory->sys;
		info->deviceDescendant = NV_TRUE;
		info->pageSize = memory->page_size;
		info->size = memory->size;
		info->contig = memory->pages == 1;
		info->physAddr = memory->pa[0];
		memcpy(info->uuid.uuid, memory->gpu->uuid, sizeof(memory->gpu->uuid));
	}
	mutex_unlock(&model.lock);
	return memory ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
}

NV_STATUS nvUvmInterfaceFreeDupedHandle(uvmGpuDeviceHandle device, NvHandle handle)
{
	struct sg_memory *memory;

	SG_CALL(FreeDupedHandle, (struct softgpu *)device);
	mutex_lock(&model.lock);
	memory = memory_by_handle(handle);
	if (memory)
		sg_memory_put(memory);
	else
		sg_error((struct softgpu *)device, SOFTGPU_ERROR_BAD_FREE, handle, 0, "free of memory handle %x, which does not exist", handle);
	mutex_unlock(&model.lock);
	return memory ? NV_OK : NV_ERR_OBJECT_NOT_FOUND;
}

static NV_STATUS fill_ptes(struct sg_space *space, struct sg_memory *memory, u64 offset, u64 size, UvmGpuExternalMappingInfo *info)
{
	u64 page_size = info->mappingPageSize ? info->mappingPageSize : memory->page_size;
	u8 aperture = SOFTGPU_APERTURE_VID;
	u64 count, i;

	if (page_size > memory->page_size || !IS_ALIGNED(offset | size, page_size) || offset + size > memory->size)
		return NV_ERR_INVALID_ARGUMENT;
	if (memory->sys)
		aperture = SOFTGPU_APERTURE_SYS;
	else if (memory->gpu != space->gpu)
		aperture = SOFTGPU_APERTURE_PEER;
	if (aperture == SOFTGPU_APERTURE_PEER && !(sg_peers_of(space->gpu) & BIT(memory->gpu->index)))
		return NV_ERR_INVALID_DEVICE;
	info->pteSize = page_size == SG_PAGE_2M ? DUAL_PTE_BYTES : PTE_BYTES;
	count = size / page_size;
	info->numWrittenPtes = min(count, info->pteBufferSize / info->pteSize);
	info->numRemainingPtes = count - info->numWrittenPtes;
	for (i = 0; i < info->numWrittenPtes; i++) {
		u64 at = offset + i * page_size;
		u64 *pte = info->pteBuffer + i * (info->pteSize / sizeof(u64));
		u64 pa = memory->pa[at / memory->page_size] + at % memory->page_size;

		pte[0] = space->gpu->format->make_pte(aperture, memory->gpu->index, pa, (int)info->mappingType == MAPPING_READ_ONLY);
		if (info->pteSize == DUAL_PTE_BYTES)
			pte[1] = 0;
	}
	return NV_OK;
}

NV_STATUS nvUvmInterfaceGetExternalAllocPtes(uvmGpuAddressSpaceHandle handle, NvHandle memory_handle, NvU64 offset, NvU64 size,
					     UvmGpuExternalMappingInfo *info)
{
	struct sg_space *space = (struct sg_space *)handle;
	struct sg_memory *memory;
	NV_STATUS status = NV_ERR_OBJECT_NOT_FOUND;

	SG_CALL(GetExternalAllocPtes, space->gpu);
	mutex_lock(&model.lock);
	memory = memory_by_handle(memory_handle);
	if (memory)
		status = fill_ptes(space, memory, offset, size, info);
	mutex_unlock(&model.lock);
	return status;
}

#if SG_HAS_NVLINK_INFO
NV_STATUS nvUvmInterfaceGetExternalAllocPhysAddrs(uvmGpuAddressSpaceHandle space, NvHandle memory, NvU64 offset, NvU64 size,
						  UvmGpuExternalPhysAddrInfo *info)
{
	SG_CALL(GetExternalAllocPhysAddrs, NULL);
	return NV_ERR_NOT_SUPPORTED;
}
#endif
