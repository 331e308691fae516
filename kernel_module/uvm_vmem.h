// SPDX-License-Identifier: MIT OR GPL-2.0
//
// What the rest of UVM sees of vmem: the hooks that the patches call. See uvm_vmem.c for what vmem is.

#ifndef __UVM_VMEM_H__
#define __UVM_VMEM_H__

#include "uvm_forward_decl.h"

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
    // The address space that UVM_INITIALIZE was called from, with a reference (mmgrab) so that no other can take
    // its place at the same address. Immutable.
    struct mm_struct *owner;

    // Made by the first command that needs it, then immutable.
    uvm_vmem_state_t *state;
} uvm_vmem_va_space_t;

// Is this one of our ioctls?
bool uvm_vmem_is_ioctl(unsigned int cmd);

// Carry out one of our ioctls; 0 or a negative errno.
long uvm_vmem_ioctl(struct file *filp, unsigned int cmd, unsigned long arg);

// Beginning and end of a VA space. Neither fails. Destroy comes last, when all GPUs were unregistered and all ranges
// destroyed, with no lock held.
void uvm_vmem_va_space_init(uvm_vmem_va_space_t *vmem);
void uvm_vmem_va_space_destroy(uvm_vmem_va_space_t *vmem);

// The file is being closed and the user channels are stopped. Takes the reservations apart, with no lock held: UVM
// destroys their ranges under the VA space lock.
void uvm_vmem_va_space_stop(uvm_vmem_va_space_t *vmem);

// A GPU leaves the VA space: all that lies in its memory goes. Its GPU VA space has been removed before.
//
// LOCKING: the VA space lock is held for write.
void uvm_vmem_unregister_gpu(uvm_va_space_t *va_space, uvm_gpu_t *gpu);

// The external VA range that holds the reservation is destroyed. range may be NULL.
//
// LOCKING: the VA space lock is held for write.
void uvm_vmem_range_destroy(uvm_vmem_range_t *range);

// The page tree of gpu goes away: give all page tables back to it. range may be NULL.
//
// LOCKING: the VA space lock is held for write.
void uvm_vmem_range_remove_gpu(uvm_vmem_range_t *range, uvm_gpu_t *gpu);

// Peer access between two GPUs ends: take away what one maps of the other. range may be NULL.
//
// LOCKING: the VA space lock is held for write.
void uvm_vmem_range_disable_peer(uvm_vmem_range_t *range, uvm_gpu_t *gpu0, uvm_gpu_t *gpu1);

// Make the file "vmem" in UVM's procfs folder. It goes with the folder.
void uvm_vmem_procfs_init(struct proc_dir_entry *dir);

#endif // __UVM_VMEM_H__
