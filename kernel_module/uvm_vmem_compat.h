// SPDX-License-Identifier: MIT OR GPL-2.0
//
// All differences between the driver branches that vmem builds in (535 ... 595). No other file of vmem may test
// UVM_VMEM_BRANCH.

#ifndef __UVM_VMEM_COMPAT_H__
#define __UVM_VMEM_COMPAT_H__

#include "uvm_gpu.h"
#include "uvm_pmm_gpu.h"
#include "uvm_va_range.h"

#ifndef UVM_VMEM_BRANCH
#error "UVM_VMEM_BRANCH is not defined: uvm_vmem-sources.Kbuild did not find NV_VERSION_STRING"
#endif

// Since 565 an external range has a separate type, which contains the VA range.
#if UVM_VMEM_BRANCH >= 565

typedef uvm_va_range_external_t uvm_vmem_external_t;

static uvm_va_range_t *uvm_vmem_external_to_va_range(uvm_vmem_external_t *external)
{
    return &external->va_range;
}

static uvm_vmem_range_t **uvm_vmem_range_slot(uvm_va_range_t *va_range)
{
    return &uvm_va_range_to_external(va_range)->vmem;
}

#else

typedef uvm_va_range_t uvm_vmem_external_t;

static uvm_va_range_t *uvm_vmem_external_to_va_range(uvm_vmem_external_t *external)
{
    return external;
}

static uvm_vmem_range_t **uvm_vmem_range_slot(uvm_va_range_t *va_range)
{
    return &va_range->external.vmem;
}

#endif

static bool uvm_vmem_gpu_is_coherent(uvm_gpu_t *gpu)
{
#if UVM_VMEM_BRANCH >= 545
    return uvm_parent_gpu_is_coherent(gpu->parent);
#else
    return uvm_gpu_is_coherent(gpu->parent);
#endif
}

// Sparse PTEs came with Pascal; 595 runs on Turing and later only.
static bool uvm_vmem_gpu_has_sparse(uvm_gpu_t *gpu)
{
#if UVM_VMEM_BRANCH >= 595
    return true;
#else
    return gpu->parent->sparse_mappings_supported;
#endif
}

// The size of the pages between 4 KB and 2 MB; fixed since 595.
static NvU64 uvm_vmem_big_page_size(uvm_page_tree_t *tree)
{
#if UVM_VMEM_BRANCH >= 595
    return UVM_BIG_PAGE_SIZE;
#else
    return tree->big_page_size;
#endif
}

// The address at which accessing_gpu sees the beginning of a chunk in owner's memory.
static uvm_gpu_phys_address_t uvm_vmem_peer_address(uvm_gpu_t *owner, uvm_gpu_chunk_t *chunk, uvm_gpu_t *accessing_gpu)
{
#if UVM_VMEM_BRANCH >= 570
    return uvm_gpu_peer_phys_address(owner, chunk->address, accessing_gpu);
#else
    return uvm_pmm_gpu_peer_phys_address(&owner->pmm, chunk, accessing_gpu);
#endif
}

#endif // __UVM_VMEM_COMPAT_H__
