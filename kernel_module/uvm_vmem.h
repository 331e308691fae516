// SPDX-License-Identifier: MIT OR GPL-2.0
//
// The hooks that the patches call from the rest of UVM. See uvm_vmem.c for the design.

#ifndef __UVM_VMEM_H__
#define __UVM_VMEM_H__

#include "uvm_forward_decl.h"
#include "uvm_processors.h"

struct file;
struct mm_struct;
struct proc_dir_entry;

// State of one reservation; lives in an external VA range.
typedef struct uvm_vmem_range_struct uvm_vmem_range_t;

// State of one file descriptor.
typedef struct uvm_vmem_state_struct uvm_vmem_state_t;

// Embedded in each VA space.
typedef struct
{
    // The address space that UVM_INITIALIZE was called from, with a reference (mmgrab) so that its address is not
    // reused. Immutable.
    struct mm_struct *owner;

    // Created by the first command that needs it, then immutable.
    uvm_vmem_state_t *state;
} uvm_vmem_va_space_t;

// Is this one of our ioctls?
bool uvm_vmem_is_ioctl(unsigned int cmd);

// Carry out one of our ioctls. Returns 0 or a negative errno.
long uvm_vmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg);

// Creation and destruction of a VA space. Neither fails. Destroy runs last, after all GPUs were unregistered and all
// ranges destroyed, with no lock held.
void uvm_vmem_va_space_init(uvm_vmem_va_space_t *vmem);
void uvm_vmem_va_space_destroy(uvm_vmem_va_space_t *vmem);

// The file is being closed and the user channels are stopped. Dismantles the reservations with no lock held: UVM
// destroys their ranges under the VA space lock.
void uvm_vmem_va_space_stop(uvm_vmem_va_space_t *vmem);

// A GPU is unregistered from the VA space: frees everything in its memory. Its GPU VA space was removed before.
//
// LOCKING: Caller holds the VA space lock for write.
void uvm_vmem_unregister_gpu(uvm_va_space_t *va_space, uvm_gpu_t *gpu);

// The external VA range that holds the reservation is destroyed. range may be NULL.
//
// LOCKING: Caller holds the VA space lock for write.
void uvm_vmem_range_destroy(uvm_vmem_range_t *range);

// The page tree of gpu is about to be destroyed: return all page tables to it. range may be NULL.
//
// LOCKING: Caller holds the VA space lock for write.
void uvm_vmem_range_remove_gpu(uvm_vmem_range_t *range, uvm_gpu_t *gpu);

// Peer access between two GPUs ends: unmap each one's pages from the other. range may be NULL.
//
// LOCKING: Caller holds the VA space lock for write.
void uvm_vmem_range_disable_peer(uvm_vmem_range_t *range, uvm_gpu_t *gpu0, uvm_gpu_t *gpu1);

// Called when UVM cancels a GPU access that it cannot service: log it if the address is in a reservation.
//
// LOCKING: Caller holds the VA space lock, for read or write.
void uvm_vmem_fatal_fault(uvm_va_space_t *va_space, uvm_gpu_id_t gpu_id, const uvm_fault_buffer_entry_t *fault);

// Create the files "vmem" and "vmem_dump" in UVM's procfs directory. They are removed with the directory.
void uvm_vmem_procfs_init(struct proc_dir_entry *dir);

#endif // __UVM_VMEM_H__
