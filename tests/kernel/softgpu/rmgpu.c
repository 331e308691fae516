// SPDX-License-Identifier: MIT OR GPL-2.0
/* rmgpu.c - the resource manager's interface: sessions, devices, GPU properties and capabilities, peers. */
#include <linux/dma-mapping.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "impl.h"

#define DMA_BITS           47
#define COPY_ENGINES       4
#define GPCS               8
#define PCIE_MBPS          32000
#define NVLINK_MBPS        50000

/*
 * Classes: clc56f.h, clc86f.h, clc96f.h, clca6f.h, clc6b5.h, clc8b5.h, clc9b5.h, clcab5.h in kernel-open/nvidia-uvm; clc6c0.h,
 * clcbc0.h, clcdc0.h, clcec0.h in src/common/sdk/nvidia/inc/class. TPCs: uvm_ARCH.c asserts a maximum.
 */
static const struct sg_arch archs[] = {
	{
		.name = "ampere",
		.product = "Software GPU (GA100)",
		.id = SOFTGPU_ARCH_AMPERE,
		.channel_class = 0xc56f,
		.copy_class = 0xc6b5,
		.compute_class = 0xc6c0,
		.tpcs_per_gpc = 8,
		.nvlink = UVM_LINK_TYPE_NVLINK_3,
		.format = &sg_mmu_ver2,
	},
	{
		.name = "hopper",
		.product = "Software GPU (GH100)",
		.id = SOFTGPU_ARCH_HOPPER,
		.channel_class = 0xc86f,
		.copy_class = 0xc8b5,
		.compute_class = 0xcbc0,
		.tpcs_per_gpc = 9,
		.nvlink = UVM_LINK_TYPE_NVLINK_4,
		.scrub = true,
		.format = &sg_mmu_ver3,
	},
#if SG_HAS_BLACKWELL
	{
		.name = "blackwell",
		.product = "Software GPU (GB100)",
		.id = SOFTGPU_ARCH_GB10X,
		.channel_class = 0xc96f,
		.copy_class = 0xc9b5,
		.compute_class = 0xcdc0,
		.tpcs_per_gpc = 10,
		.nvlink = UVM_LINK_TYPE_NVLINK_5,
		.scrub = true,
		.format = &sg_mmu_ver3_256g,
	},
	{
		.name = "gb20x",
		.product = "Software GPU (GB202)",
		.id = SOFTGPU_ARCH_GB20X,
		.channel_class = 0xca6f,
		.copy_class = 0xcab5,
		.compute_class = 0xcec0,
		.tpcs_per_gpc = 8,
		.nvlink = UVM_LINK_TYPE_NVLINK_5,
		.scrub = true,
		.format = &sg_mmu_ver3,
	},
#endif
};

const struct sg_arch *sg_arch_find(const char *name)
{
	u32 i;

	for (i = 0; i < ARRAY_SIZE(archs); i++)
		if (!strcmp(archs[i].name, name))
			return &archs[i];
	return NULL;
}

/* How GPUs reach each other. */
static char *p2p = "nvlink";
module_param(p2p, charp, 0444);
MODULE_PARM_DESC(p2p, "peers: nvlink (UVM enables them itself), pcie (on request), none");

static char *kind = "";
module_param(kind, charp, 0444);
MODULE_PARM_DESC(kind, "what the GPUs claim to be: virtual (SR-IOV), mig (one partition of all), integrated (no memory), "
		       "coherent (their memory is in the CPU's address space)");

/* The CPU address of a coherent GPU's memory: never accessed before the GPU has a NUMA node. */
#define COHERENT_WINDOW (1ull << 46)

static bool is_kind(const char *name)
{
	return !strcmp(kind, name);
}

static struct softgpu *to_gpu(uvmGpuDeviceHandle device)
{
	return (struct softgpu *)device;
}

/* A bitmap of the GPUs that can be peers of this one. Peer number = GPU number. */
u32 sg_peers_of(const struct softgpu *gpu)
{
	if (!strcmp(p2p, "none"))
		return 0;
	return ((1u << model.gpus) - 1) & ~(1u << gpu->index);
}

NV_STATUS nvUvmInterfaceRegisterGpu(const NvProcessorUuid *uuid, UvmGpuPlatformInfo *info)
{
	struct softgpu *gpu = sg_gpu_by_uuid(uuid->uuid);

	SG_CALL(RegisterGpu, gpu);
	if (!gpu)
		return NV_ERR_GPU_UUID_NOT_FOUND;
	info->pci_dev = gpu->pci;
	info->dma_addressable_start = 0;
	info->dma_addressable_limit = DMA_BIT_MASK(DMA_BITS);
	return NV_OK;
}

void nvUvmInterfaceUnregisterGpu(const NvProcessorUuid *uuid)
{
	sg_call(SG_CALL_UnregisterGpu, sg_gpu_by_uuid(uuid->uuid));
}

NV_STATUS nvUvmInterfaceSessionCreate(uvmGpuSessionHandle *session, UvmPlatformInfo *info)
{
	SG_CALL(SessionCreate, NULL);
	memset(info, 0, sizeof(*info));
	*session = (uvmGpuSessionHandle)&model;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceSessionDestroy(uvmGpuSessionHandle session)
{
	SG_CALL(SessionDestroy, NULL);
	return NV_OK;
}

/* The device handle is the GPU itself: a device has no state of its own. */
NV_STATUS nvUvmInterfaceDeviceCreate(uvmGpuSessionHandle session, const UvmGpuInfo *info, const NvProcessorUuid *uuid,
				     uvmGpuDeviceHandle *out, NvBool smc)
{
	struct softgpu *gpu = sg_gpu_by_uuid(uuid->uuid);

	SG_CALL(DeviceCreate, gpu);
	if (!gpu)
		return NV_ERR_GPU_UUID_NOT_FOUND;
	*out = (uvmGpuDeviceHandle)gpu;
	return NV_OK;
}

void nvUvmInterfaceDeviceDestroy(uvmGpuDeviceHandle device)
{
	sg_call(SG_CALL_DeviceDestroy, to_gpu(device));
}

#if !SG_HAS_EVENTS
#define nvUvmInterfaceRegisterUvmEvents nvUvmInterfaceRegisterUvmCallbacks
#define nvUvmInterfaceDeRegisterUvmEvents nvUvmInterfaceDeRegisterUvmOps
#define SG_CALL_RegisterUvmEvents SG_CALL_RegisterUvmCallbacks
#define SG_CALL_DeRegisterUvmEvents SG_CALL_DeRegisterUvmOps
#endif

NV_STATUS nvUvmInterfaceRegisterUvmEvents(struct UvmEventsLinux *events)
{
	SG_CALL(RegisterUvmEvents, NULL);
	mutex_lock(&model.lock);
	model.events = events;
	mutex_unlock(&model.lock);
	return NV_OK;
}

void nvUvmInterfaceDeRegisterUvmEvents(void)
{
	sg_call(SG_CALL_DeRegisterUvmEvents, NULL);
	mutex_lock(&model.lock);
	model.events = NULL;
	mutex_unlock(&model.lock);
}

NV_STATUS nvUvmInterfaceQueryCaps(uvmGpuDeviceHandle device, UvmGpuCaps *caps)
{
	SG_CALL(QueryCaps, to_gpu(device));
	memset(caps, 0, sizeof(*caps));
	return NV_OK;
}

NV_STATUS nvUvmInterfaceQueryCopyEnginesCaps(uvmGpuDeviceHandle device, UvmGpuCopyEnginesCaps *caps)
{
	u32 i;

	SG_CALL(QueryCopyEnginesCaps, to_gpu(device));
	memset(caps, 0, sizeof(*caps));
	for (i = 0; i < COPY_ENGINES; i++) {
		UvmGpuCopyEngineCaps *engine = &caps->copyEngineCaps[i];

		engine->supported = 1;
		engine->sysmem = 1;
		engine->sysmemRead = i == 0;
		engine->sysmemWrite = i == 1;
		engine->p2p = 1;
		engine->nvlinkP2p = !strcmp(p2p, "nvlink");
		engine->cePceMask = 1u << i;
	}
	return NV_OK;
}

NV_STATUS nvUvmInterfaceGetGpuInfo(const NvProcessorUuid *uuid, const UvmGpuClientInfo *client, UvmGpuInfo *info)
{
	struct softgpu *gpu = sg_gpu_by_uuid(uuid->uuid);

	SG_CALL(GetGpuInfo, gpu);
	if (!gpu)
		return NV_ERR_GPU_UUID_NOT_FOUND;
	memset(info, 0, sizeof(*info));
	strscpy(info->name, gpu->arch->product, sizeof(info->name));
	memcpy(info->uuid.uuid, gpu->uuid, sizeof(gpu->uuid));
	info->gpuArch = gpu->arch->id;
	info->hostClass = gpu->arch->channel_class;
	info->ceClass = gpu->arch->copy_class;
	info->computeClass = gpu->arch->compute_class;
	info->subdeviceCount = 1;
	info->smcEnabled = is_kind("mig");
	if (is_kind("coherent")) {
		info->systemMemoryWindowStart = COHERENT_WINDOW;
		info->systemMemoryWindowSize = gpu->vidmem;
	}
	info->virtMode = is_kind("virtual") ? UVM_VIRT_MODE_SRIOV_STANDARD : UVM_VIRT_MODE_NONE;
	info->maxTpcPerGpcCount = gpu->arch->tpcs_per_gpc;
	info->gpcCount = GPCS;
	info->maxGpcCount = GPCS;
	info->tpcCount = GPCS * info->maxTpcPerGpcCount;
#if SG_HAS_ACCESS_COUNT
	info->accessCntrBufferCount = 1;
#endif
	info->sysmemLink = UVM_LINK_TYPE_PCIE;
	info->sysmemLinkRateMBps = PCIE_MBPS;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceServiceDeviceInterruptsRM(uvmGpuDeviceHandle device)
{
	SG_CALL(ServiceDeviceInterruptsRM, to_gpu(device));
	return NV_OK;
}

NV_STATUS nvUvmInterfaceGetFbInfo(uvmGpuDeviceHandle device, UvmGpuFbInfo *info)
{
	SG_CALL(GetFbInfo, to_gpu(device));
	memset(info, 0, sizeof(*info));
	info->bZeroFb = is_kind("integrated");
	info->heapSize = to_gpu(device)->vidmem >> 10;
	info->maxAllocatableAddress = to_gpu(device)->vidmem - 1;
#if SG_HAS_ATS_ARGUMENT
	info->maxVidmemPageSize = SG_PAGE_2M;
#endif
	return NV_OK;
}

NV_STATUS nvUvmInterfaceGetEccInfo(uvmGpuDeviceHandle device, UvmGpuEccInfo *info)
{
	SG_CALL(GetEccInfo, to_gpu(device));
	memset(info, 0, sizeof(*info));
	return NV_OK;
}

#if SG_HAS_NVLINK_INFO
NV_STATUS nvUvmInterfaceGetNvlinkInfo(uvmGpuDeviceHandle device, UvmGpuNvlinkInfo *info)
{
	SG_CALL(GetNvlinkInfo, to_gpu(device));
	memset(info, 0, sizeof(*info));
	return NV_OK;
}

/* After this UVM does nothing more until it is reloaded. Not an error for the model: a test may have caused it. */
void nvUvmInterfaceReportFatalError(NV_STATUS error)
{
	sg_call(SG_CALL_ReportFatalError, NULL);
}
#endif

/* ---- peers ----------------------------------------------------------------------------------------- */

NV_STATUS nvUvmInterfaceGetP2PCaps(uvmGpuDeviceHandle device1, uvmGpuDeviceHandle device2, UvmGpuP2PCapsParams *caps)
{
	struct softgpu *one = to_gpu(device1), *two = to_gpu(device2);
	bool nvlink = !strcmp(p2p, "nvlink");

	SG_CALL(GetP2PCaps, one);
	memset(caps, 0, sizeof(*caps));
	if (!(sg_peers_of(one) & BIT(two->index)))
		return NV_OK; /* p2pLink is UVM_LINK_TYPE_NONE */
	caps->peerIds[0] = two->index;
	caps->peerIds[1] = one->index;
	if (nvlink)
		caps->p2pLink = one->arch->nvlink;
	else
		caps->p2pLink = UVM_LINK_TYPE_PCIE;
	caps->optimalNvlinkWriteCEs[0] = 2;
	caps->optimalNvlinkWriteCEs[1] = 2;
	caps->totalLinkLineRateMBps = nvlink ? NVLINK_MBPS : 0;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceP2pObjectCreate(uvmGpuDeviceHandle device1, uvmGpuDeviceHandle device2, NvHandle *out)
{
	SG_CALL(P2pObjectCreate, to_gpu(device1));
	if (!(sg_peers_of(to_gpu(device1)) & BIT(to_gpu(device2)->index)))
		return NV_ERR_NOT_SUPPORTED;
	mutex_lock(&model.lock);
	*out = ++model.next_handle;
	mutex_unlock(&model.lock);
	return NV_OK;
}

void nvUvmInterfaceP2pObjectDestroy(uvmGpuSessionHandle session, NvHandle handle)
{
	sg_call(SG_CALL_P2pObjectDestroy, NULL);
}
