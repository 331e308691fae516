// SPDX-License-Identifier: MIT OR GPL-2.0
//
// The definitions of the tracepoints.

#include "uvm_common.h"

#define CREATE_TRACE_POINTS
#include "uvm_vmem_trace.h"
