// SPDX-License-Identifier: MIT OR GPL-2.0
//
// Tracepoints, one for each command: /sys/kernel/tracing/events/uvm_vmem. result is 0 or a negative errno. A valid BIND
// also traces its operations, and the moment when all of them have been sent to the GPUs.

#undef TRACE_SYSTEM
#define TRACE_SYSTEM uvm_vmem

#if !defined(__UVM_VMEM_TRACE_H__) || defined(TRACE_HEADER_MULTI_READ)
#define __UVM_VMEM_TRACE_H__

#include <linux/tracepoint.h>

TRACE_EVENT(uvm_vmem_reserve,
    TP_PROTO(u64 start, u64 length, u32 gpus, int result),
    TP_ARGS(start, length, gpus, result),
    TP_STRUCT__entry(__field(u64, start) __field(u64, length) __field(u32, gpus) __field(int, result)),
    TP_fast_assign(__entry->start = start; __entry->length = length; __entry->gpus = gpus; __entry->result = result;),
    TP_printk("start=0x%llx length=0x%llx gpus=%u result=%d",
              __entry->start, __entry->length, __entry->gpus, __entry->result)
);

TRACE_EVENT(uvm_vmem_free,
    TP_PROTO(u64 start, int result),
    TP_ARGS(start, result),
    TP_STRUCT__entry(__field(u64, start) __field(int, result)),
    TP_fast_assign(__entry->start = start; __entry->result = result;),
    TP_printk("start=0x%llx result=%d", __entry->start, __entry->result)
);

TRACE_EVENT(uvm_vmem_create,
    TP_PROTO(u32 page_shift, u32 count, u32 handle, int result),
    TP_ARGS(page_shift, count, handle, result),
    TP_STRUCT__entry(__field(u32, page_shift) __field(u32, count) __field(u32, handle) __field(int, result)),
    TP_fast_assign(__entry->page_shift = page_shift; __entry->count = count; __entry->handle = handle;
                   __entry->result = result;),
    TP_printk("page_shift=%u count=%u handle=0x%x result=%d",
              __entry->page_shift, __entry->count, __entry->handle, __entry->result)
);

TRACE_EVENT(uvm_vmem_release,
    TP_PROTO(u32 handle, int result),
    TP_ARGS(handle, result),
    TP_STRUCT__entry(__field(u32, handle) __field(int, result)),
    TP_fast_assign(__entry->handle = handle; __entry->result = result;),
    TP_printk("handle=0x%x result=%d", __entry->handle, __entry->result)
);

TRACE_EVENT(uvm_vmem_bind,
    TP_PROTO(u64 start, u32 ops, u32 failed_op, u64 ticket, int result),
    TP_ARGS(start, ops, failed_op, ticket, result),
    TP_STRUCT__entry(__field(u64, start) __field(u32, ops) __field(u32, failed_op) __field(u64, ticket)
                     __field(int, result)),
    TP_fast_assign(__entry->start = start; __entry->ops = ops; __entry->failed_op = failed_op; __entry->ticket = ticket;
                   __entry->result = result;),
    TP_printk("start=0x%llx ops=%u failed_op=%d ticket=%llu result=%d",
              __entry->start, __entry->ops, (int)__entry->failed_op, __entry->ticket, __entry->result)
);

TRACE_EVENT(uvm_vmem_bind_op,
    TP_PROTO(u64 start, u64 length, u64 addr, u64 bytes, u32 op, u32 flags),
    TP_ARGS(start, length, addr, bytes, op, flags),
    TP_STRUCT__entry(__field(u64, start) __field(u64, length) __field(u64, addr) __field(u64, bytes) __field(u32, op)
                     __field(u32, flags)),
    TP_fast_assign(__entry->start = start; __entry->length = length; __entry->addr = addr; __entry->bytes = bytes;
                   __entry->op = op; __entry->flags = flags;),
    TP_printk("start=0x%llx length=0x%llx addr=0x%llx bytes=0x%llx op=%u flags=0x%x",
              __entry->start, __entry->length, __entry->addr, __entry->bytes, __entry->op, __entry->flags)
);

TRACE_EVENT(uvm_vmem_bind_sent,
    TP_PROTO(u64 start, int result),
    TP_ARGS(start, result),
    TP_STRUCT__entry(__field(u64, start) __field(int, result)),
    TP_fast_assign(__entry->start = start; __entry->result = result;),
    TP_printk("start=0x%llx result=%d", __entry->start, __entry->result)
);

TRACE_EVENT(uvm_vmem_wait,
    TP_PROTO(u64 ticket, int result),
    TP_ARGS(ticket, result),
    TP_STRUCT__entry(__field(u64, ticket) __field(int, result)),
    TP_fast_assign(__entry->ticket = ticket; __entry->result = result;),
    TP_printk("ticket=%llu result=%d", __entry->ticket, __entry->result)
);

#endif // __UVM_VMEM_TRACE_H__

#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE uvm_vmem_trace
#include <trace/define_trace.h>
