// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * rmfault.c - the resource manager's interface: fault buffers, access counters (there are buffers, and nothing is ever
 * put into them), confidential computing and access bits (there are none).
 */
#include <linux/bits.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "impl.h"

#define FAULT_PACKET_BYTES 32
#define REPLAYABLE_FAULTS  4096
#define SHADOW_FAULTS      1024
#define ACCESS_PACKETS     1024

/* Words of softgpu.registers; SG_REGISTER_TIME is another. */
enum {
	FAULT_GET,
	FAULT_PUT,
	FAULT_INFO,
	FAULT_INTERRUPT,
	FAULT_ENABLE_SET,
	FAULT_ENABLE_CLEAR,
	FAULT_PREFETCH,
	ACCESS_GET = 16,
	ACCESS_PUT,
	ACCESS_FULL,
	ACCESS_INTERRUPT,
	ACCESS_ENABLE_SET,
	ACCESS_ENABLE_CLEAR,
};

#define FAULT_INTERRUPT_MASK  1
#define ACCESS_INTERRUPT_MASK 2
#define FAULT_BUFFER_HANDLE   0xfb
#define ACCESS_BUFFER_HANDLE  0xac

static struct softgpu *to_gpu(uvmGpuDeviceHandle device)
{
	return (struct softgpu *)device;
}

static volatile NvU32 *reg(struct softgpu *gpu, u32 number)
{
	return (volatile NvU32 *)&gpu->registers[number];
}

/* NV_PFB_PRI_MMU_FAULT_BUFFER_GET_GETPTR_CORRUPTED and _OVERFLOW (dev_fb.h of gv100): written as 1 to clear, read as 0 then. */
#define FAULT_GET_CLEAR GENMASK(31, 30)

/* What hardware does at once, and memory that plays a register does not. */
void sg_registers_settle(struct softgpu *gpu)
{
	volatile u32 *get = &gpu->registers[FAULT_GET];
	u32 value = *get;

	if (value & FAULT_GET_CLEAR)
		cmpxchg((u32 *)get, value, value & ~FAULT_GET_CLEAR);
}

NV_STATUS nvUvmInterfaceOwnPageFaultIntr(uvmGpuDeviceHandle device, NvBool own)
{
	SG_CALL(OwnPageFaultIntr, to_gpu(device));
	return NV_OK;
}

NV_STATUS nvUvmInterfaceInitFaultInfo(uvmGpuDeviceHandle device, UvmGpuFaultInfo *info)
{
	struct softgpu *gpu = to_gpu(device);

	SG_CALL(InitFaultInfo, gpu);
	memset(info, 0, sizeof(*info));
	if (!gpu->fault_buffer)
		gpu->fault_buffer = vzalloc(REPLAYABLE_FAULTS * FAULT_PACKET_BYTES);
	if (!gpu->shadow_buffer)
		gpu->shadow_buffer = vzalloc(SHADOW_FAULTS * FAULT_PACKET_BYTES);
	if (!gpu->fault_buffer || !gpu->shadow_buffer)
		return NV_ERR_NO_MEMORY;
	info->replayable.pFaultBufferGet = reg(gpu, FAULT_GET);
	info->replayable.pFaultBufferPut = reg(gpu, FAULT_PUT);
	info->replayable.pFaultBufferInfo = reg(gpu, FAULT_INFO);
	info->replayable.pPmcIntr = reg(gpu, FAULT_INTERRUPT);
	info->replayable.pPmcIntrEnSet = reg(gpu, FAULT_ENABLE_SET);
	info->replayable.pPmcIntrEnClear = reg(gpu, FAULT_ENABLE_CLEAR);
	info->replayable.pPrefetchCtrl = reg(gpu, FAULT_PREFETCH);
	info->replayable.replayableFaultMask = FAULT_INTERRUPT_MASK;
	info->replayable.bufferAddress = gpu->fault_buffer;
	info->replayable.bufferSize = REPLAYABLE_FAULTS * FAULT_PACKET_BYTES;
	info->nonReplayable.shadowBufferAddress = gpu->shadow_buffer;
	info->nonReplayable.bufferSize = SHADOW_FAULTS * FAULT_PACKET_BYTES;
	info->faultBufferHandle = FAULT_BUFFER_HANDLE;
	*reg(gpu, FAULT_GET) = 0;
	*reg(gpu, FAULT_PUT) = 0;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceDestroyFaultInfo(uvmGpuDeviceHandle device, UvmGpuFaultInfo *info)
{
	SG_CALL(DestroyFaultInfo, to_gpu(device));
	return NV_OK;
}

NV_STATUS nvUvmInterfaceHasPendingNonReplayableFaults(UvmGpuFaultInfo *info, NvBool *pending)
{
	*pending = NV_FALSE;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceGetNonReplayableFaults(UvmGpuFaultInfo *info, void *buffer, NvU32 *count)
{
	*count = 0;
	return NV_OK;
}

#if SG_HAS_ATS_ARGUMENT
NV_STATUS nvUvmInterfaceFlushReplayableFaultBuffer(UvmGpuFaultInfo *info, NvBool copy)
{
	return NV_OK;
}

NV_STATUS nvUvmInterfaceTogglePrefetchFaults(UvmGpuFaultInfo *info, NvBool enable)
{
	return NV_OK;
}
#else
NV_STATUS nvUvmInterfaceFlushReplayableFaultBuffer(uvmGpuDeviceHandle device)
{
	return NV_OK;
}
#endif

NV_STATUS nvUvmInterfaceReportNonReplayableFault(uvmGpuDeviceHandle device, const void *packet)
{
	return NV_OK;
}

NV_STATUS nvUvmInterfaceInitAccessCntrInfo(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info, NvU32 index)
{
	struct softgpu *gpu = to_gpu(device);

	SG_CALL(InitAccessCntrInfo, gpu);
	memset(info, 0, sizeof(*info));
	if (!gpu->access_buffer)
		gpu->access_buffer = vzalloc(ACCESS_PACKETS * FAULT_PACKET_BYTES);
	if (!gpu->access_buffer)
		return NV_ERR_NO_MEMORY;
	info->pAccessCntrBufferGet = reg(gpu, ACCESS_GET);
	info->pAccessCntrBufferPut = reg(gpu, ACCESS_PUT);
	info->pAccessCntrBufferFull = reg(gpu, ACCESS_FULL);
	info->pHubIntr = reg(gpu, ACCESS_INTERRUPT);
	info->pHubIntrEnSet = reg(gpu, ACCESS_ENABLE_SET);
	info->pHubIntrEnClear = reg(gpu, ACCESS_ENABLE_CLEAR);
	info->accessCounterMask = ACCESS_INTERRUPT_MASK;
	info->bufferAddress = gpu->access_buffer;
	info->bufferSize = ACCESS_PACKETS * FAULT_PACKET_BYTES;
	info->accessCntrBufferHandle = ACCESS_BUFFER_HANDLE;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceDestroyAccessCntrInfo(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info)
{
	SG_CALL(DestroyAccessCntrInfo, to_gpu(device));
	return NV_OK;
}

#if SG_HAS_CONST_CONFIG
NV_STATUS nvUvmInterfaceEnableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info, const UvmGpuAccessCntrConfig *config)
#else
NV_STATUS nvUvmInterfaceEnableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info, UvmGpuAccessCntrConfig *config)
#endif
{
	SG_CALL(EnableAccessCntr, to_gpu(device));
	return NV_OK;
}

NV_STATUS nvUvmInterfaceDisableAccessCntr(uvmGpuDeviceHandle device, UvmGpuAccessCntrInfo *info)
{
	SG_CALL(DisableAccessCntr, to_gpu(device));
	return NV_OK;
}

/* ---- confidential computing: none ------------------------------------------------------------------- */

NV_STATUS nvUvmInterfaceCslInitContext(UvmCslContext *context, uvmGpuChannelHandle channel)
{
	return NV_ERR_NOT_SUPPORTED;
}

void nvUvmInterfaceDeinitCslContext(UvmCslContext *context)
{
}

#if SG_HAS_KEY_ROTATION
NV_STATUS nvUvmInterfaceCslLogEncryption(UvmCslContext *context, UvmCslOperation operation, NvU32 size)
{
	return NV_ERR_NOT_SUPPORTED;
}

NV_STATUS nvUvmInterfaceCslRotateKey(UvmCslContext *contexts[], NvU32 count)
{
	return NV_ERR_NOT_SUPPORTED;
}
#endif

#if SG_HAS_ATS_ARGUMENT
NV_STATUS nvUvmInterfaceCslRotateIv(UvmCslContext *context, UvmCslOperation operation)
{
	return NV_ERR_NOT_SUPPORTED;
}

NV_STATUS nvUvmInterfaceCslQueryMessagePool(UvmCslContext *context, UvmCslOperation operation, NvU64 *messages)
{
	return NV_ERR_NOT_SUPPORTED;
}
#endif

NV_STATUS nvUvmInterfaceCslIncrementIv(UvmCslContext *context, UvmCslOperation operation, NvU64 increment, UvmCslIv *iv)
{
	return NV_ERR_NOT_SUPPORTED;
}

NV_STATUS nvUvmInterfaceCslEncrypt(UvmCslContext *context, NvU32 size, NvU8 const *in, UvmCslIv *iv, NvU8 *out, NvU8 *tag)
{
	return NV_ERR_NOT_SUPPORTED;
}

NV_STATUS nvUvmInterfaceCslDecrypt(UvmCslContext *context, NvU32 size, NvU8 const *in, UvmCslIv const *iv,
#if SG_HAS_KEY_ROTATION
				   NvU32 key,
#endif
				   NvU8 *out, NvU8 const *data, NvU32 data_size, NvU8 const *tag)
{
	return NV_ERR_NOT_SUPPORTED;
}

NV_STATUS nvUvmInterfaceCslSign(UvmCslContext *context, NvU32 size, NvU8 const *in, NvU8 *tag)
{
	return NV_ERR_NOT_SUPPORTED;
}

/* ---- access bits: none ------------------------------------------------------------------------------- */

#if SG_HAS_ACCESS_BITS
NV_STATUS nvUvmInterfaceAccessBitsBufAlloc(uvmGpuDeviceHandle device, UvmGpuAccessBitsBufferAlloc *info)
{
	return NV_ERR_NOT_SUPPORTED;
}

NV_STATUS nvUvmInterfaceAccessBitsBufFree(uvmGpuDeviceHandle device, UvmGpuAccessBitsBufferAlloc *info)
{
	return NV_OK;
}

NV_STATUS nvUvmInterfaceAccessBitsDump(uvmGpuDeviceHandle device, UvmGpuAccessBitsBufferAlloc *info, UVM_ACCESS_BITS_DUMP_MODE mode)
{
	return NV_ERR_NOT_SUPPORTED;
}
#endif
