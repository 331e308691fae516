/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * calls.h - the resource manager calls that UVM makes, of all branches (nv_uvm_interface.h).
 * X(name, can_fail): calls that destroy something, or whose result UVM only asserts on, are never made to fail.
 */
#ifndef SOFTGPU_CALLS_H
#define SOFTGPU_CALLS_H

#define SG_CALLS(X) \
	X(AccessBitsBufAlloc, 1) \
	X(AccessBitsBufFree, 0) \
	X(AccessBitsDump, 1) \
	X(AddressSpaceCreate, 1) \
	X(AddressSpaceDestroy, 0) \
	X(BindChannelResources, 1) \
	X(ChannelAllocate, 1) \
	X(ChannelDestroy, 0) \
	X(CslDecrypt, 0) \
	X(CslEncrypt, 0) \
	X(CslIncrementIv, 0) \
	X(CslInitContext, 0) \
	X(CslLogEncryption, 0) \
	X(CslQueryMessagePool, 0) \
	X(CslRotateIv, 0) \
	X(CslRotateKey, 0) \
	X(CslSign, 0) \
	X(DeRegisterUvmEvents, 0) \
	X(DeRegisterUvmOps, 0) \
	X(DeinitCslContext, 0) \
	X(DestroyAccessCntrInfo, 0) \
	X(DestroyFaultInfo, 0) \
	X(DeviceCreate, 1) \
	X(DeviceDestroy, 0) \
	X(DisableAccessCntr, 0) \
	X(DupAddressSpace, 1) \
	X(DupAllocation, 1) \
	X(DupMemory, 1) \
	X(EnableAccessCntr, 1) \
	X(FlushReplayableFaultBuffer, 0) \
	X(FreeDupedHandle, 0) \
	X(GetChannelResourcePtes, 1) \
	X(GetEccInfo, 1) \
	X(GetExternalAllocPhysAddrs, 1) \
	X(GetExternalAllocPtes, 1) \
	X(GetFbInfo, 1) \
	X(GetGpuInfo, 1) \
	X(GetNonReplayableFaults, 0) \
	X(GetNvlinkInfo, 1) \
	X(GetP2PCaps, 1) \
	X(GetPmaObject, 1) \
	X(HasPendingNonReplayableFaults, 0) \
	X(InitAccessCntrInfo, 1) \
	X(InitFaultInfo, 1) \
	X(MemoryAllocFB, 1) \
	X(MemoryAllocSys, 1) \
	X(MemoryCpuMap, 1) \
	X(MemoryCpuUnMap, 0) \
	X(MemoryFree, 0) \
	X(OwnPageFaultIntr, 0) \
	X(P2pObjectCreate, 1) \
	X(P2pObjectDestroy, 0) \
	X(PagingChannelAllocate, 1) \
	X(PagingChannelDestroy, 0) \
	X(PagingChannelPushStream, 0) \
	X(PagingChannelsMap, 1) \
	X(PagingChannelsUnmap, 0) \
	X(PmaAllocPages, 1) \
	X(PmaFreePages, 0) \
	X(PmaPinPages, 1) \
	X(PmaRegisterEvictionCallbacks, 1) \
	X(PmaUnregisterEvictionCallbacks, 0) \
	X(QueryCaps, 1) \
	X(QueryCopyEnginesCaps, 1) \
	X(RegisterGpu, 1) \
	X(RegisterUvmCallbacks, 1) \
	X(RegisterUvmEvents, 1) \
	X(ReleaseChannel, 0) \
	X(ReportFatalError, 0) \
	X(ReportNonReplayableFault, 0) \
	X(RetainChannel, 1) \
	X(ServiceDeviceInterruptsRM, 0) \
	X(SessionCreate, 1) \
	X(SessionDestroy, 0) \
	X(SetPageDirectory, 1) \
	X(StopChannel, 0) \
	X(TogglePrefetchFaults, 0) \
	X(TsgAllocate, 1) \
	X(TsgDestroy, 0) \
	X(UnregisterGpu, 0) \
	X(UnsetPageDirectory, 0)

enum sg_call_id {
#define SG_CALL_ID(name, can_fail) SG_CALL_##name,
	SG_CALLS(SG_CALL_ID)
#undef SG_CALL_ID
	SG_CALL_COUNT
};

#endif
