/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/*
 * softgpu_user.h - a small C library for tests: the software GPU (softgpu.h), and a client of the real
 * nvidia-uvm.ko on it. Static, no dependency beyond libc, nothing printed, no exit.
 *
 * Every function returns 0 (or a descriptor) or a negative errno. UVM calls that fail with an NV_STATUS return it
 * as a positive number: 0 is success, > 0 an NV_STATUS, < 0 an errno.
 *
 *     struct softgpu_client c;
 *     if (softgpu_client_open(&c, 1))                  // gpu 0, ready for the ioctls on c.uvm
 *         return 1;
 *     ... ioctl(c.uvm, UVM_VMEM_RESERVE, ...), c.uuid[0] ...
 *     softgpu_fill(c.dev, c.space[0], va, 65536, 0x1234, 1);
 *     softgpu_check(c.dev, c.space[0], va, 65536, 0x1234, 1, NULL);
 *     softgpu_client_close(&c);
 */
#ifndef SOFTGPU_USER_H
#define SOFTGPU_USER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "softgpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- /dev/softgpu; dev is the descriptor ------------------------------------------------------- */

int softgpu_open(void); /* creates the device node if there is none */
int softgpu_info(int dev, unsigned gpu, struct softgpu_info *out);
int softgpu_counters(int dev, unsigned gpu, struct softgpu_counters *out);
/* now - before, member by member; the "now" members are copied from now */
struct softgpu_counters softgpu_counters_since(const struct softgpu_counters *before, const struct softgpu_counters *now);

int softgpu_xlate(int dev, struct softgpu_space space, uint64_t va, struct softgpu_xlate *out);
int softgpu_scan(int dev, struct softgpu_space space, uint64_t start, uint64_t length, struct softgpu_scan *out);
int softgpu_frame(int dev, unsigned gpu, uint64_t pa, struct softgpu_frame *out);

/* done (may be NULL): bytes before the fault. Errors: see ACCESS in softgpu.h */
int softgpu_read(int dev, struct softgpu_space space, uint64_t va, void *buf, size_t length, uint64_t *done);
int softgpu_write(int dev, struct softgpu_space space, uint64_t va, const void *buf, size_t length, uint64_t *done);
int softgpu_fill(int dev, struct softgpu_space space, uint64_t va, uint64_t length, uint64_t value, uint64_t step);
/* -EBADMSG: a word differs; out_done and out_found are set in *where, which may be NULL */
int softgpu_check(int dev, struct softgpu_space space, uint64_t va, uint64_t length, uint64_t value, uint64_t step,
                  struct softgpu_access *where);
/* Reads one word through the TLB model: 0 and *value, or the fault's errno. */
int softgpu_peek(int dev, struct softgpu_space space, uint64_t va, uint64_t *value);
int softgpu_poke(int dev, struct softgpu_space space, uint64_t va, uint64_t value);
/* Accesses memory as a process's kernel: UVM gets the fault and cancels it. Needs softgpu_uvm_register_channel. */
int softgpu_touch(int dev, struct softgpu_space space, uint64_t va, bool write);
/* Video memory by its physical address. */
int softgpu_read_phys(int dev, unsigned gpu, uint64_t pa, void *buf, size_t length);
int softgpu_check_phys(int dev, unsigned gpu, uint64_t pa, uint64_t length, uint64_t value, uint64_t step);

int softgpu_alloc(int dev, unsigned gpu, uint64_t size, uint64_t page_size, unsigned flags, struct softgpu_alloc *out);
int softgpu_free(int dev, uint32_t client, uint32_t handle);

int softgpu_space_new(int dev, unsigned gpu, struct softgpu_space *out);
int softgpu_space_free(int dev, struct softgpu_space space);

/* INJECT: the nth call of name ("" = any) made by this process fails with status. */
int softgpu_fail_nth(int dev, const char *name, uint64_t nth, uint32_t status);
int softgpu_inject(int dev, const char *name, unsigned flags, uint64_t nth, uint64_t repeat, uint32_t status, uint64_t delay_us);
int softgpu_inject_clear(int dev);
int softgpu_injected(int dev, struct softgpu_injected *out);

int softgpu_hold(int dev, unsigned gpu, unsigned op);
int softgpu_hold_wait(int dev, unsigned gpu, unsigned timeout_ms); /* -ETIMEDOUT */
int softgpu_settings(int dev, const struct softgpu_settings *set, struct softgpu_settings *old); /* either may be NULL */
int softgpu_lost(int dev, unsigned gpu, bool lost);
int softgpu_faults(int dev, unsigned gpu, struct softgpu_faults *out);
const char *softgpu_fault_name(unsigned kind);
int softgpu_suspend(int dev, bool suspend); /* > 0: NV_STATUS */
int softgpu_verify(int dev);
int softgpu_flush(int dev, unsigned gpu);

/* ---- a client of nvidia-uvm.ko ------------------------------------------------------------------- */

struct softgpu_client {
  int dev;                                   /* /dev/softgpu */
  int uvm;                                   /* /dev/nvidia-uvm, UVM_INITIALIZE done */
  int mm;                                    /* /dev/nvidia-uvm, ties uvm to the process's memory (UVM_MM_INITIALIZE) */
  unsigned gpus;                             /* registered, with an address space: 0 .. gpus - 1 */
  unsigned branch;
  uint8_t uuid[SOFTGPU_MAX_GPUS][SOFTGPU_UUID_BYTES];
  struct softgpu_space space[SOFTGPU_MAX_GPUS];
};

/* Opens everything for the first `gpus` gpus. > 0: NV_STATUS. On failure nothing is left open. */
int softgpu_client_open(struct softgpu_client *client, unsigned gpus);
/* The same with UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE: the address space lives until the descriptor is closed. */
int softgpu_client_open_shared(struct softgpu_client *client, unsigned gpus);
/* Closes the descriptors without unregistering, as the exit of a process does. */
void softgpu_client_close(struct softgpu_client *client);

int softgpu_uvm_open(void); /* /dev/nvidia-uvm, without UVM_INITIALIZE; makes the device node if there is none */
int softgpu_uvm_initialize(int uvm);
/* A second descriptor for UVM_MM_INITIALIZE, without which no address space can be registered; close it last. */
int softgpu_uvm_initialize_mm(int uvm);

int softgpu_uvm_register_gpu(struct softgpu_client *client, unsigned gpu);
int softgpu_uvm_unregister_gpu(struct softgpu_client *client, unsigned gpu);
int softgpu_uvm_register_space(struct softgpu_client *client, unsigned gpu); /* creates client->space[gpu] */
int softgpu_uvm_unregister_space(struct softgpu_client *client, unsigned gpu);
int softgpu_uvm_register_channel(struct softgpu_client *client, unsigned gpu); /* registers a channel that runs kernels in the space */
int softgpu_uvm_enable_peer(struct softgpu_client *client, unsigned a, unsigned b);
int softgpu_uvm_disable_peer(struct softgpu_client *client, unsigned a, unsigned b);

int softgpu_uvm_create_external(struct softgpu_client *client, uint64_t base, uint64_t length);
int softgpu_uvm_map_external(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length, uint64_t offset,
                             const struct softgpu_alloc *memory, bool read_only);
int softgpu_uvm_map_sparse(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length);
int softgpu_uvm_unmap_external(struct softgpu_client *client, unsigned gpu, uint64_t base, uint64_t length);
int softgpu_uvm_free(struct softgpu_client *client, uint64_t base, uint64_t length);

#ifdef __cplusplus
}
#endif
#endif
