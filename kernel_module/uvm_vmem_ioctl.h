/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * The ioctls of the patched nvidia-uvm driver for fine-grained GPU memory (64 KB to 2 MB pages).
 * Shared unchanged by the kernel module and by libvmem; nothing here depends on the driver version.
 *
 * Vocabulary
 *   unit         64 KB, the smallest page: what one page table entry (PTE) of this interface maps.
 *   slot         2 MB of virtual addresses, aligned: what one table of 32 PTEs covers.
 *   reservation  a range of GPU virtual addresses, made by RESERVE. Unbacked at first.
 *   object       the physical pages of one CREATE; named by a handle. Pages are numbered from 0.
 *   handle       a number that is valid only on the file descriptor that returned it.
 *   ticket       a number for a BIND that the GPU may still be executing.
 *
 * The file descriptor is one of /dev/nvidia-uvm after UVM_INITIALIZE, either the one that CUDA uses
 * or another on which the GPU and its address space were registered. Before UVM_INITIALIZE only QUERY
 * without UVM_VMEM_QUERY_GPU works. QUERY with it and all other commands are reserved to the process that
 * initialised the descriptor: a forked child, or a process that was passed the descriptor, gets EPERM.
 *
 * Each command takes a pointer to its struct, whose first field is the size that the caller was
 * compiled with. A shorter struct from an older caller is padded with zeros, but must have at least the size of version
 * 1 below; a longer one from a newer caller is accepted if its unknown part is zero. The kernel writes only fields that
 * start with out_, and only on success unless noted otherwise. Reserved fields and undefined flags must be zero. Arrays
 * are passed as user addresses in a __u64.
 *
 * A command that fails changes nothing, with three exceptions: EIO; EFAULT from a BIND whose struct another thread
 * unmapped while it ran; and EINTR from a BIND that waited for the GPU. (Page tables that a BIND made before it failed
 * may stay until FREE, and count against the limits.)
 * A struct with out_ fields must be writable; if it is not, the command fails with EFAULT before it does anything.
 *
 * Errors mean the same in all commands:
 *   ENOTTY      unknown command
 *   E2BIG       the struct is longer than the kernel knows, and its unknown part is not all zero; or it is
 *               longer than 4096 bytes
 *   EINVAL      a value is invalid in any state: struct too short, a reserved field that is
 *               not zero, a misaligned address, a count of zero, an unknown page size, operations of a
 *               batch that overlap, a page smaller than the reservation's
 *   EOPNOTSUPP  an undefined flag or operation, or an unsupported kind of GPU (QUERY says which)
 *   EOVERFLOW   an address range or a page range wraps around
 *   EMSGSIZE    a count is above the limit that QUERY reports
 *   EFAULT      user memory cannot be read or written
 *   ERANGE      an address is outside the reservation, or outside what the GPU can address, or a
 *               page number is outside the object
 *   ENOENT      no reservation at that address, or no such handle or ticket
 *   ESTALE      the handle's object was released
 *   EEXIST      the addresses are in use: by another range, or, for MAP without REPLACE, by a mapping
 *   EADDRINUSE  an operation without CUT changes part of a 2 MB page table entry; the rest may be in use
 *   EADDRNOTAVAIL an operation with LARGE cannot get a 2 MB page table entry: the batch does not name the whole slot,
 *               or maps anything but a whole 2 MB chunk there in order and with one access right; or a unit was sparse
 *   EBUSY       the reservation still has mappings
 *   EXDEV       a GPU of the reservation cannot access the object's memory
 *   ENODEV      the GPU is not registered on this descriptor, or has no address space here, or is gone
 *   ENOMEM      out of kernel memory
 *   ENOSPC      out of physical memory for pages or page tables in the requested place
 *   EDQUOT      a limit (below) is reached, set by an administrator or by default: on pinned pages (CREATE) or on page
 *               tables (RESERVE, BIND)
 *   EPERM       the descriptor was initialised by another process
 *   EBADFD      the descriptor is not initialised (UVM_INITIALIZE)
 *   EAGAIN      the system is being suspended, or too many tickets are unfinished: call again
 *   ETIMEDOUT   WAIT: the ticket is not finished yet
 *   EINTR       a fatal signal arrived during the call
 *   EIO         the GPU failed. Work already sent is in an unknown state until FREE or close. From then on only
 *               QUERY, FREE, RELEASE and STAT work.
 */
/*
 * Limits, in MB, as parameters of the module, which an administrator may change at any time; memory already held
 * stays. 0 means no limit. A call that would exceed one fails with EDQUOT and changes nothing.
 *
 *   uvm_vmem_limit_mb                  GPU memory that one descriptor pins on each GPU, in 2 MB steps. Default: no
 *                                      limit.
 *   uvm_vmem_gpu_limit_mb              ... that all descriptors pin on each GPU. Default (-1): 15/16 of the GPU's
 *                                      memory.
 *   uvm_vmem_host_limit_mb             host memory that one descriptor pins, in 2 MB steps. Default: no limit.
 *   uvm_vmem_user_host_limit_mb        host memory that all descriptors of one user pin
 *   uvm_vmem_cgroup_host_limit_mb      ... of one cgroup. Default of both (-1): half of the machine's memory.
 *   uvm_vmem_total_host_limit_mb       ... of the machine. Default (-1): three quarters of its memory.
 *   uvm_vmem_user_tables_limit_mb      page tables and descriptions of reservations, all descriptors of one user
 *   uvm_vmem_cgroup_tables_limit_mb    ... of one cgroup. Default of both (-1): 1/32 of the machine's memory.
 *   uvm_vmem_total_tables_limit_mb     ... of the machine. Default (-1): 1/8 of its memory.
 *
 * A reservation counts from RESERVE on, and each 1 GB and each 2 MB of it from the first BIND there on, until FREE; a
 * fully sparse 2 MB adds nothing. STAT returns the sum. The user is the real user id of the process that gives the
 * descriptor's first command other than QUERY, and the cgroup (of version 2) the one that this process is in then. The
 * root cgroup has no limit; in any other cgroup the user limits do not apply to root. The module's own kernel memory is
 * charged to the memory cgroup as well.
 */
#ifndef UVM_VMEM_IOCTL_H
#define UVM_VMEM_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define UVM_VMEM_ABI_VERSION 1

/* UVM's own commands are bare numbers; none of them has this type byte. */
#define UVM_VMEM_IOCTL_TYPE 0xB7

#define UVM_VMEM_QUERY   _IO(UVM_VMEM_IOCTL_TYPE, 0x80)
#define UVM_VMEM_RESERVE _IO(UVM_VMEM_IOCTL_TYPE, 0x81)
#define UVM_VMEM_FREE    _IO(UVM_VMEM_IOCTL_TYPE, 0x82)
#define UVM_VMEM_CREATE  _IO(UVM_VMEM_IOCTL_TYPE, 0x83)
#define UVM_VMEM_RELEASE _IO(UVM_VMEM_IOCTL_TYPE, 0x84)
#define UVM_VMEM_BIND    _IO(UVM_VMEM_IOCTL_TYPE, 0x85)
#define UVM_VMEM_WAIT    _IO(UVM_VMEM_IOCTL_TYPE, 0x86)
#define UVM_VMEM_STAT    _IO(UVM_VMEM_IOCTL_TYPE, 0x87)

#define UVM_VMEM_UUID_BYTES    16
#define UVM_VMEM_VERSION_BYTES 32

#define UVM_VMEM_UNIT_SHIFT 16
#define UVM_VMEM_SLOT_SHIFT 21

/* The page sizes, ORed: 64 KB, 128 KB, 256 KB, 2 MB. */
#define UVM_VMEM_PAGE_SIZES (0x10000ull | 0x20000ull | 0x40000ull | 0x200000ull)

/*
 * QUERY: capabilities and limits; with UVM_VMEM_QUERY_GPU also whether that GPU is refused, and why.
 */
#define UVM_VMEM_QUERY_GPU (1u << 0)

#define UVM_VMEM_CAP_HOST      (1ull << 0) /* CREATE: pinned host memory */
#define UVM_VMEM_CAP_PEER      (1ull << 1) /* BIND: a page of another GPU that has peer access */
#define UVM_VMEM_CAP_MULTI_GPU (1ull << 2) /* RESERVE: more than one GPU */
#define UVM_VMEM_CAP_READ_ONLY (1ull << 3) /* BIND: UVM_VMEM_OP_READ_ONLY */
#define UVM_VMEM_CAP_SPARSE    (1ull << 4) /* BIND: UVM_VMEM_OP_SPARSE */
#define UVM_VMEM_CAP_REPLACE   (1ull << 5) /* BIND: UVM_VMEM_OP_REPLACE */
#define UVM_VMEM_CAP_BIG       (1ull << 6) /* RESERVE: UVM_VMEM_RESERVE_BIG; BIND: UVM_VMEM_OP_CUT */
#define UVM_VMEM_CAP_ASYNC     (1ull << 7) /* BIND: UVM_VMEM_BIND_ASYNC */
#define UVM_VMEM_CAP_LARGE     (1ull << 8) /* CREATE: more than 2 MB made CONTIGUOUS; BIND: UVM_VMEM_OP_LARGE */

/* Why a GPU is refused. These kinds are not supported because no run of the self test on them has been reported. */
#define UVM_VMEM_GPU_OK           0
#define UVM_VMEM_GPU_COHERENT     1 /* its memory is part of the CPU's address space (Grace) */
#define UVM_VMEM_GPU_MIG          2
#define UVM_VMEM_GPU_VIRTUAL      3 /* vGPU, or SR-IOV */
#define UVM_VMEM_GPU_CONFIDENTIAL 4 /* confidential computing */
#define UVM_VMEM_GPU_NO_64K       5 /* its page tables are not those of Pascal and later */
#define UVM_VMEM_GPU_INTEGRATED   6 /* it has no memory of its own */

struct uvm_vmem_query {
    __u32 size;
    __u32 flags;                         /* UVM_VMEM_QUERY_GPU */
    __u8  gpu_uuid[UVM_VMEM_UUID_BYTES]; /* with UVM_VMEM_QUERY_GPU; else zero */
    __u32 out_abi_version;
    __u32 out_gpu_refusal;               /* UVM_VMEM_GPU_*; with UVM_VMEM_QUERY_GPU */
    __aligned_u64 out_capabilities;      /* UVM_VMEM_CAP_* */
    __aligned_u64 out_page_sizes;        /* ORed */
    __u32 out_max_bind_ops;
    __u32 out_max_bind_units;            /* total units that a BIND's operations name */
    __u32 out_max_create_pages;
    __u32 out_max_gpus;                  /* in one reservation */
    __u32 out_max_tickets;               /* unfinished at a time */
    __u32 __reserved;
    __aligned_u64 out_max_reserve_bytes;
    __aligned_u64 out_max_eager_bytes;   /* of a reservation with UVM_VMEM_RESERVE_EAGER */
    __u8  out_driver_version[UVM_VMEM_VERSION_BYTES]; /* text, NUL-terminated */
};

/*
 * RESERVE: reserve [start, start + length) for pages of 1 << page_shift bytes and above on gpu_count GPUs;
 * every mapping exists on all of them. start and length are multiples of 2 MB; start is not 0. The
 * addresses may lie in a range that CUDA knows, if UVM holds no range there. Page tables are created when a slot
 * is first bound, or first mapped if it is sparse, and kept until FREE; EAGER makes all of them now.
 *
 * When peer access between two GPUs is disabled, a reservation on one of them loses its mappings of pages in the
 * other, on all its GPUs. When a GPU or its address space here is unregistered, a reservation on it loses its mappings
 * there and refuses MAP (ENODEV), but exists until FREE; all mappings of the GPU's pages are removed.
 *
 * BIG: a slot that a single MAP operation fills, with a 2 MB page or a 2 MB object made CONTIGUOUS, in GPU memory, is
 * mapped by one 2 MB PTE, unless a unit of it was sparse; so is a slot that is mapped with UVM_VMEM_OP_LARGE. All other
 * slots, and all slots without BIG, get 64 KB PTEs. These are not merged when the last page of a slot is mapped, and
 * part of a 2 MB PTE changes only with UVM_VMEM_OP_CUT.
 */
#define UVM_VMEM_RESERVE_EAGER (1u << 0)
#define UVM_VMEM_RESERVE_BIG   (1u << 1)

struct uvm_vmem_reserve {
    __u32 size;
    __u32 flags;
    __aligned_u64 start;
    __aligned_u64 length;
    __u32 page_shift; /* 16, 17, 18 or 21 */
    __u32 gpu_count;
    __aligned_u64 gpus; /* user address of gpu_count * UVM_VMEM_UUID_BYTES bytes */
};

/*
 * FREE: free the reservation that starts at start. EBUSY if it has mappings (sparse ranges do not count), unless UNMAP
 * is given: then they are removed first.
 */
#define UVM_VMEM_FREE_UNMAP (1u << 0)

struct uvm_vmem_free {
    __u32 size;
    __u32 flags;
    __aligned_u64 start;
};

/*
 * CREATE: allocate count pages of 1 << page_shift bytes, zeroed and pinned, as one object. Pages of 128 KB and above
 * are physically contiguous and aligned to their size; consecutive pages are physically adjacent if possible.
 * CONTIGUOUS guarantees that: each 2 MB of the object, counted from its beginning, is a 2 MB chunk of memory aligned to
 * 2 MB, and the remainder at its end, or an object below 2 MB, is one physical run inside such a chunk (more than 2 MB
 * without UVM_VMEM_CAP_LARGE: EINVAL). HOST: in pinned host memory that the GPU can reach, instead of GPU memory; that
 * memory is physically contiguous only within 64 KB. A descriptor has at most 2^20 - 1 objects (ENOMEM).
 *
 * RELEASE: drop the handle. Mapped pages live until the last mapping is removed.
 */
#define UVM_VMEM_CREATE_HOST       (1u << 0)
#define UVM_VMEM_CREATE_CONTIGUOUS (1u << 1)

struct uvm_vmem_create {
    __u32 size;
    __u32 flags;
    __u8  gpu_uuid[UVM_VMEM_UUID_BYTES];
    __u32 page_shift;
    __u32 count;
    __u32 out_handle; /* never 0 */
    __u32 __reserved;
};

struct uvm_vmem_release {
    __u32 size;
    __u32 flags; /* none yet */
    __u32 handle;
    __u32 __reserved;
};

/*
 * BIND: op_count operations on one reservation, all or nothing, on all its GPUs.
 *
 *   MAP     map count pages of the object, starting with page first, at addr. EEXIST if a page is already
 *           mapped there; with REPLACE the new translation replaces the old one.
 *   UNMAP   unmap count pages of the reservation's page size. Pages that are not mapped are skipped. With
 *           SPARSE the range afterwards reads as zeros and drops writes instead of faulting.
 *
 * addr is a multiple of the reservation's page size, and for MAP of the object's. No unit may be named twice
 * in one call. Order in the array does not matter.
 *
 * BIND waits for an earlier BIND on the same reservation, for the page tables that it makes and, without ASYNC, for the
 * GPU to execute the batch. A fatal signal ends the first and the last of these waits with EINTR. If it ends the last,
 * the batch is committed and the GPU still executes it; otherwise nothing has changed.
 *
 * On return every GPU sees the new translations and no old one, and unmapped memory may be released. With ASYNC the
 * call may return earlier: out_ticket is then a ticket, or 0 if nothing is pending. Whatever the caller does, memory is
 * never reused before the translations to it are gone.
 *
 * What concurrent GPU work sees:
 *   - An address that no operation names reads and writes as before, at every moment.
 *   - A named address changes from its old translation to the new one in a single step. GPU work may read where MAP
 *     replaces the zeros of a sparse range, or REPLACE a page: it gets the old contents or the new.
 *   - Two exceptions, both in BIG reservations. When a slot changes from a 2 MB PTE to 64 KB PTEs or back, all of it is
 *     invalid for a moment. Without CUT this happens only where the batch names every unit of the slot: no GPU work
 *     may use those addresses until the BIND is done.
 *   - CUT lets an operation change part of a slot that has a 2 MB PTE, instead of EADDRINUSE; the slot gets 64 KB PTEs,
 *     even if the operation maps what is already mapped. No GPU work may use any address of the slot, named or not,
 *     until the BIND is done. In other slots, and if the same batch gives the slot a 2 MB PTE, CUT has no effect.
 *
 * LARGE, in a BIG reservation (EINVAL in another): each slot in which the operation maps has one 2 MB PTE afterwards,
 * whatever was there, or the batch is refused (EADDRNOTAVAIL). The batch's MAP operations must name the whole slot, and
 * map 2 MB of one GPU's memory there: the chunk of a 2 MB page or of an object made CONTIGUOUS, or a chunk that smaller
 * objects share, each unit at its offset in the chunk, with one access right. No unit may have been sparse. With
 * REPLACE this joins pages that are already mapped there.
 *
 * On failure too, out_failed_op is written (the index of the invalid operation, or ~0) and out_ticket is set to 0.
 * Neither is written if the call is refused for its struct, its descriptor, a suspended system or an earlier fatal
 * error.
 * Should an operation ever need more than 32 bytes, its size will be a field at the end of struct uvm_vmem_bind.
 */
#define UVM_VMEM_OP_MAP   1
#define UVM_VMEM_OP_UNMAP 2

#define UVM_VMEM_OP_READ_ONLY (1u << 0) /* MAP */
#define UVM_VMEM_OP_REPLACE   (1u << 1) /* MAP */
#define UVM_VMEM_OP_SPARSE    (1u << 2) /* UNMAP */
#define UVM_VMEM_OP_CUT       (1u << 3) /* MAP, UNMAP */
#define UVM_VMEM_OP_LARGE     (1u << 4) /* MAP */

struct uvm_vmem_op {
    __aligned_u64 addr;
    __u32 op;
    __u32 flags;
    __u32 handle; /* MAP; else 0 */
    __u32 first;  /* MAP: a page number; else 0 */
    __u32 count;
    __u32 __reserved;
};

#define UVM_VMEM_BIND_ASYNC (1u << 0)

struct uvm_vmem_bind {
    __u32 size;
    __u32 flags;
    __aligned_u64 start; /* of the reservation */
    __aligned_u64 ops;   /* user address of op_count struct uvm_vmem_op */
    __u32 op_count;
    __u32 out_failed_op;
    __aligned_u64 out_ticket;
};

/*
 * WAIT: wait until the ticket's BIND is done, at most timeout_ns (0: poll; ~0: forever). Waiting again for a ticket
 * that is done, or for ticket 0, returns immediately.
 */
struct uvm_vmem_wait {
    __u32 size;
    __u32 flags; /* none yet */
    __aligned_u64 ticket;
    __aligned_u64 timeout_ns;
};

/*
 * STAT: what this descriptor holds, and what it has done since it was initialised. With UVM_VMEM_STAT_GPU the created,
 * mapped, chunk and host bytes cover pages in that GPU only; everything else is per descriptor. A page mapped at n
 * addresses counts n times in out_mapped_bytes.
 */
#define UVM_VMEM_STAT_GPU (1u << 0)

struct uvm_vmem_stat {
    __u32 size;
    __u32 flags;
    __u8  gpu_uuid[UVM_VMEM_UUID_BYTES];
    __aligned_u64 out_reserved_bytes;   /* virtual */
    __aligned_u64 out_created_bytes;    /* in objects, including released ones still mapped */
    __aligned_u64 out_mapped_bytes;
    __aligned_u64 out_chunk_bytes;      /* taken from the GPU: for objects, and free for the next ones */
    __aligned_u64 out_host_bytes;       /* the part of created_bytes in host memory */
    __aligned_u64 out_kernel_bytes;     /* our own kernel memory for all this; not UVM's page tables */
    __u32 out_reservations;
    __u32 out_objects;
    __u32 out_slots;                    /* bound at least once; they stay until FREE */
    __u32 out_tickets;                  /* unfinished */
    __aligned_u64 out_binds;            /* calls that succeeded */
    __aligned_u64 out_pushes;           /* command buffers sent to a GPU by BIND and FREE */
    __aligned_u64 out_invalidates;      /* TLB invalidates in them */
    __aligned_u64 out_pte_writes;       /* PTEs written by them */
    __aligned_u64 out_table_waits;      /* waits for new page tables */
    __aligned_u64 out_zeroed_bytes;
    __aligned_u64 out_table_bytes;      /* for page tables and reservations, as counted against the limits */
    __aligned_u64 out_most_units;       /* covered by one hold of the descriptor's lock */
};

#endif
