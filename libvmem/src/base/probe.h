/* SPDX-License-Identifier: MIT */
/*
 * USDT probes, provider "vmem": what bpftrace, perf and SystemTap attach to (docs/operations/trace.md lists them).
 *
 * A probe is one nop and a note in the ELF file that says where its arguments are. The arguments are values that the
 * code computes anyway. Without <sys/sdt.h> (Debian: systemtap-sdt-dev) or with VMEM_NO_PROBES no probe is compiled in.
 */
#ifndef VMEM_BASE_PROBE_H
#define VMEM_BASE_PROBE_H

#if defined(__has_include) && !defined(VMEM_NO_PROBES)
#if __has_include(<sys/sdt.h>)
#include <sys/sdt.h>
#endif
#endif

#ifdef STAP_PROBE
#define VM_PROBE3(name, a, b, c) STAP_PROBE3(vmem, name, a, b, c)
#define VM_PROBE4(name, a, b, c, d) STAP_PROBE4(vmem, name, a, b, c, d)
#define VM_PROBE5(name, a, b, c, d, e) STAP_PROBE5(vmem, name, a, b, c, d, e)
#else
#define VM_PROBE3(name, a, b, c) ((void)(a), (void)(b), (void)(c))
#define VM_PROBE4(name, a, b, c, d) (VM_PROBE3(name, a, b, c), (void)(d))
#define VM_PROBE5(name, a, b, c, d, e) (VM_PROBE4(name, a, b, c, d), (void)(e))
#endif

#endif
