// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * rmfault.c - the resource manager's interface: fault buffers (for replayable faults that a test requests), access
 * counters (there is a buffer, which stays empty), confidential computing and access bits (not supported).
 *
 * Sources: clc369.h, hwref/hopper/gh100/dev_fault.h and hwref/ampere/ga100/dev_fault.h in kernel-open/nvidia-uvm.
 */
#include <linux/bitfield.h>
#include <linux/bits.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "impl.h"

#define FAULT_PACKET_BYTES 32
#define REPLAYABLE_FAULTS  4096
#define SHADOW_FAULTS      1024
#define ACCESS_PACKETS     1024

/* Words of softgpu.registers, in addition to SG_REGISTER_TIME. */
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

/* Completes register writes that hardware would complete itself. */
void sg_registers_settle(struct softgpu *gpu)
{
	volatile u32 *get = &gpu->registers[FAULT_GET];
	u32 value = *get;

	if (value & FAULT_GET_CLEAR)
		cmpxchg((u32 *)get, value, value & ~FAULT_GET_CLEAR);
}

/* Words of a packet of the fault buffer, MMU_FAULT_BUFFER_ENTRY_*. The aperture of the instance is video memory: 0. */
#define FAULT0_INSTANCE_LO GENMASK(31, 12)
#define FAULT2_ADDRESS_LO  GENMASK(31, 12)
#define FAULT7_TYPE        GENMASK(4, 0)
#define FAULT_TYPE_PTE          2
#define FAULT_TYPE_RO_VIOLATION 6
#define FAULT7_REPLAYABLE  BIT(7)
#define FAULT7_ACCESS      GENMASK(19, 16)
#define FAULT_ACCESS_READ  0
#define FAULT_ACCESS_WRITE 1
#define FAULT7_ENABLED     BIT(30)
#define FAULT7_VALID       BIT(31)

#define ENGINE_GRAPHICS_HOPPER 384 /* and later */
#define ENGINE_GRAPHICS_AMPERE 64

/* Writes one packet, from client 0 of GPC 0. */
static void fault_put(struct softgpu *gpu, const struct sg_waiting_fault *fault, bool read_only)
{
	u32 put = *reg(gpu, FAULT_PUT);
	volatile u32 *word = (u32 *)((u8 *)gpu->fault_buffer + put * FAULT_PACKET_BYTES);
	u64 instance = fault->channel->instance >> 12, page = fault->va >> 12, now = ktime_get_ns();

	word[0] = FIELD_PREP(FAULT0_INSTANCE_LO, lower_32_bits(instance) & 0xfffff);
	word[1] = instance >> 20;
	word[2] = FIELD_PREP(FAULT2_ADDRESS_LO, lower_32_bits(page) & 0xfffff);
	word[3] = page >> 20;
	word[4] = lower_32_bits(now);
	word[5] = upper_32_bits(now);
	word[6] = gpu->arch->id == SOFTGPU_ARCH_AMPERE ? ENGINE_GRAPHICS_AMPERE : ENGINE_GRAPHICS_HOPPER;
	smp_wmb(); /* VALID is written last */
	word[7] = FIELD_PREP(FAULT7_TYPE, read_only ? FAULT_TYPE_RO_VIOLATION : FAULT_TYPE_PTE) | FAULT7_REPLAYABLE |
		  FIELD_PREP(FAULT7_ACCESS, fault->write ? FAULT_ACCESS_WRITE : FAULT_ACCESS_READ) | FAULT7_ENABLED | FAULT7_VALID;
	smp_wmb();
	*reg(gpu, FAULT_PUT) = (put + 1) % REPLAYABLE_FAULTS;
}

/* Returns true if the access still faults. */
static bool faults_now(const struct sg_waiting_fault *fault, bool *read_only)
{
	struct sg_translation t;

	sg_walk(fault->channel->space->gpu, fault->channel->space->root, fault->va, false, &t);
	*read_only = t.valid && t.read_only;
	return t.valid ? fault->write && t.read_only : !t.sparse;
}

int sg_fault_deliver(struct sg_space *space, u64 va, bool write)
{
	struct softgpu *gpu = space->gpu;
	struct sg_user_channel *channel;
	bool read_only;
	u32 i;

	list_for_each_entry(channel, &gpu->user_channels, node)
		if (channel->space == space)
			break;
	if (list_entry_is_head(channel, &gpu->user_channels, node))
		return -ENODEV;
	for (i = 0; i < SG_WAITING_FAULTS && gpu->waiting[i].channel; i++)
		;
	if (i == SG_WAITING_FAULTS)
		return -EBUSY;
	gpu->waiting[i] = (struct sg_waiting_fault){ .channel = channel, .va = va & ~(SG_PAGE_4K - 1), .write = write };
	gpu->count.faults_waiting_now++;
	faults_now(&gpu->waiting[i], &read_only);
	fault_put(gpu, &gpu->waiting[i], read_only);
	return 0;
}

static void waiting_end(struct softgpu *gpu, u32 i)
{
	gpu->waiting[i].channel = NULL;
	gpu->count.faults_waiting_now--;
}

void sg_faults_replay(struct softgpu *gpu)
{
	bool read_only;
	u32 i;

	for (i = 0; i < SG_WAITING_FAULTS; i++) {
		if (!gpu->waiting[i].channel)
			continue;
		if (!gpu->waiting[i].channel->space) {
			/* stopped: its context leaves the GPU, but the access may have faulted once more before that */
			fault_put(gpu, &gpu->waiting[i], false);
			waiting_end(gpu, i);
		} else if (faults_now(&gpu->waiting[i], &read_only)) {
			fault_put(gpu, &gpu->waiting[i], read_only);
		} else {
			waiting_end(gpu, i);
		}
	}
}

void sg_faults_cancel(struct softgpu *gpu, u64 va)
{
	u32 i;

	for (i = 0; i < SG_WAITING_FAULTS; i++) {
		if (!gpu->waiting[i].channel || gpu->waiting[i].va != va)
			continue;
		waiting_end(gpu, i);
		gpu->count.faults_cancelled++;
	}
}

void sg_faults_forget(struct softgpu *gpu, const struct sg_user_channel *channel)
{
	u32 i;

	for (i = 0; i < SG_WAITING_FAULTS; i++)
		if (gpu->waiting[i].channel == channel)
			waiting_end(gpu, i);
}

void sg_faults_interrupt(struct softgpu *gpu)
{
	NvProcessorUuid uuid;

	if (!gpu->fault_buffer || *reg(gpu, FAULT_PUT) == (*reg(gpu, FAULT_GET) & ~FAULT_GET_CLEAR))
		return;
	memcpy(uuid.uuid, gpu->uuid, sizeof(uuid.uuid));
	mutex_lock(&model.lock);
	if (model.events)
		model.events->isrTopHalf(&uuid);
	mutex_unlock(&model.lock);
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
