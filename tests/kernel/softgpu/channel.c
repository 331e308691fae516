// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * channel.c - groups and channels that UVM allocates. The ring, GPGet, GPPut and the doorbell are ordinary memory: the
 * engine's thread polls, so nothing has to trap.
 */
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "impl.h"

struct group {
	struct sg_space *space;
	u32 engine_index;
};

#define NOTIFIERS 2 /* for errors, and for key rotation, which never happens */

NV_STATUS nvUvmInterfaceTsgAllocate(uvmGpuAddressSpaceHandle handle, const UvmGpuTsgAllocParams *parameters, uvmGpuTsgHandle *out)
{
	struct sg_space *space = (struct sg_space *)handle;
	struct group *group;

	SG_CALL(TsgAllocate, space->gpu);
	group = kzalloc(sizeof(*group), GFP_KERNEL);
	if (!group)
		return NV_ERR_NO_MEMORY;
	group->space = space;
	group->engine_index = parameters->engineIndex;
	*out = (uvmGpuTsgHandle)group;
	return NV_OK;
}

void nvUvmInterfaceTsgDestroy(uvmGpuTsgHandle handle)
{
	struct group *group = (struct group *)handle;

	sg_call(SG_CALL_TsgDestroy, group->space->gpu);
	kfree(group);
}

static void channel_free(struct sg_channel *channel)
{
	vfree(channel->gpfifo);
	free_page((unsigned long)channel->userd);
	kfree((void *)channel->error);
	kvfree(channel->pending);
	kvfree(channel->sorted);
	kvfree(channel->segment);
	kvfree(channel);
}

static struct sg_channel *channel_new(struct group *group, u32 entries)
{
	struct sg_channel *channel = kvzalloc(sizeof(*channel), GFP_KERNEL);

	if (!channel)
		return NULL;
	channel->space = group->space;
	channel->gpu = group->space->gpu;
	channel->entries = entries;
	channel->gpfifo = vzalloc(array_size(entries, sizeof(*channel->gpfifo)));
	channel->userd = (void *)get_zeroed_page(GFP_KERNEL);
	channel->error = kcalloc(NOTIFIERS, sizeof(*channel->error), GFP_KERNEL);
	channel->pending = kvcalloc(SG_CE_PENDING, sizeof(*channel->pending), GFP_KERNEL);
	channel->sorted = kvcalloc(SG_CE_PENDING, sizeof(*channel->sorted), GFP_KERNEL);
	if (!channel->gpfifo || !channel->userd || !channel->error || !channel->pending || !channel->sorted) {
		channel_free(channel);
		return NULL;
	}
	return channel;
}

NV_STATUS nvUvmInterfaceChannelAllocate(const uvmGpuTsgHandle handle, const UvmGpuChannelAllocParams *parameters, uvmGpuChannelHandle *out,
					UvmGpuChannelInfo *info)
{
	struct group *group = (struct group *)handle;
	struct softgpu *gpu = group->space->gpu;
	struct sg_channel *channel;

	SG_CALL(ChannelAllocate, gpu);
	channel = channel_new(group, parameters->numGpFifoEntries);
	if (!channel)
		return NV_ERR_NO_MEMORY;
	mutex_lock(&model.lock);
	channel->id = ++gpu->next_channel;
	sg_readers_channel_add(channel);
	gpu->count.channels_now++;
	mutex_unlock(&model.lock);

	memset(info, 0, sizeof(*info));
	info->gpGet = (volatile unsigned *)&channel->userd[SG_USERD_GET];
	info->gpPut = (volatile unsigned *)&channel->userd[SG_USERD_PUT];
	info->gpFifoEntries = (UvmGpuPointer *)channel->gpfifo;
	info->numGpFifoEntries = channel->entries;
	info->channelClassNum = gpu->arch->channel_class;
	info->errorNotifier = channel->error;
#if SG_HAS_KEY_NOTIFIER
	info->keyRotationNotifier = channel->error + 1;
#endif
	info->hwRunlistId = group->engine_index;
	info->hwChannelId = channel->id;
	info->dummyBar1Mapping = (volatile unsigned *)&channel->userd[SG_USERD_DUMMY];
	info->workSubmissionOffset = (volatile NvU32 *)&channel->userd[SG_USERD_DOORBELL];
	info->workSubmissionToken = channel->id;
	channel->userd[SG_USERD_TOKEN] = channel->id;
	info->pWorkSubmissionToken = (volatile NvU32 *)&channel->userd[SG_USERD_TOKEN];
	*out = (uvmGpuChannelHandle)channel;
	return NV_OK;
}

void nvUvmInterfaceChannelDestroy(uvmGpuChannelHandle handle)
{
	struct sg_channel *channel = (struct sg_channel *)handle;
	struct softgpu *gpu = channel->gpu;

	sg_call(SG_CALL_ChannelDestroy, gpu);
	mutex_lock(&model.lock);
	sg_readers_channel_remove(channel);
	gpu->count.channels_now--;
	if (!channel->dead && (channel->segment || channel->pending_count || channel->get != channel->userd[SG_USERD_PUT]))
		sg_error(gpu, SOFTGPU_ERROR_CHANNEL_BUSY, 0, 0, "channel %u destroyed with work pending", channel->id);
	mutex_unlock(&model.lock);
	channel_free(channel);
}

/* ---- channels of processes: they carry nothing but faults ------------------------------------------------- */

#define FIRST_INSTANCE 0x100000ull /* UVM only compares the addresses of instances */
#define INSTANCE_BYTES 0x1000ull

NV_STATUS nvUvmInterfaceRetainChannel(uvmGpuAddressSpaceHandle space, NvHandle client, NvHandle channel, void **out,
				      UvmGpuChannelInstanceInfo *info)
{
	static u64 instances;
	struct sg_user_channel *user;

	SG_CALL(RetainChannel, NULL);
	user = kzalloc(sizeof(*user), GFP_KERNEL);
	if (!user)
		return NV_ERR_NO_MEMORY;
	user->space = (struct sg_space *)space;
	user->gpu = user->space->gpu;
	mutex_lock(&model.lock);
	user->instance = FIRST_INSTANCE + instances++ % 4096 * INSTANCE_BYTES;
	list_add(&user->node, &user->gpu->user_channels);
	mutex_unlock(&model.lock);
	memset(info, 0, sizeof(*info));
	info->base = user->instance;
	info->channelEngineType = UVM_GPU_CHANNEL_ENGINE_TYPE_GR;
	*out = user;
	return NV_OK;
}

NV_STATUS nvUvmInterfaceBindChannelResources(void *channel, UvmGpuChannelResourceBindParams *parameters)
{
	SG_CALL(BindChannelResources, NULL);
	return NV_OK; /* no resources */
}

void nvUvmInterfaceReleaseChannel(void *channel)
{
	struct sg_user_channel *user = channel;

	mutex_lock(&model.lock);
	sg_faults_forget(user->gpu, user);
	list_del(&user->node);
	mutex_unlock(&model.lock);
	kfree(user);
}

void nvUvmInterfaceStopChannel(void *channel, NvBool immediate)
{
	struct sg_user_channel *user = channel;

	mutex_lock(&model.lock);
	user->space = NULL; /* the space may be destroyed before the channel */
	mutex_unlock(&model.lock);
}

NV_STATUS nvUvmInterfaceGetChannelResourcePtes(uvmGpuAddressSpaceHandle space, NvP64 descriptor, NvU64 offset, NvU64 size,
					       UvmGpuExternalMappingInfo *info)
{
	return NV_ERR_NOT_SUPPORTED;
}

/* ---- paging channels, which only virtual GPUs use: not implemented ---------------------------------------- */

NV_STATUS nvUvmInterfacePagingChannelAllocate(uvmGpuDeviceHandle device, const UvmGpuPagingChannelAllocParams *parameters,
					      UvmGpuPagingChannelHandle *out, UvmGpuPagingChannelInfo *info)
{
	return NV_ERR_NOT_SUPPORTED;
}

void nvUvmInterfacePagingChannelDestroy(UvmGpuPagingChannelHandle channel)
{
}

NV_STATUS nvUvmInterfacePagingChannelsMap(uvmGpuAddressSpaceHandle space, UvmGpuPointer address, uvmGpuDeviceHandle device, NvU64 *out)
{
	return NV_ERR_NOT_SUPPORTED;
}

void nvUvmInterfacePagingChannelsUnmap(uvmGpuAddressSpaceHandle space, UvmGpuPointer address, uvmGpuDeviceHandle device)
{
}

NV_STATUS nvUvmInterfacePagingChannelPushStream(UvmGpuPagingChannelHandle channel, char *methods, NvU32 size)
{
	return NV_ERR_NOT_SUPPORTED;
}
