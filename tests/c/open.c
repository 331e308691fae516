/* SPDX-License-Identifier: MIT */
/* Opens the back end under test and accesses its memory. */
#include "api/api.h"
#include "check.h"

const char *backend(void) {
  const char *name = getenv("VMEM_TEST_BACKEND");
  return name && *name ? name : "host";
}

bool on_host(void) { return !strcmp(backend(), "host"); }

int open_opts(struct vmem_open_opts *o, vmem_t *vm) {
  struct vm_ctx *c;
  int err, ignored;
  o->backend = backend();
  if ((err = vmem_open(o, vm))) return err;
  if (!o->pool_high && (c = vm_get(*vm, "test", &ignored))) {
    c->opts.pool_high = o->pool_low;
    c->phys->surplus.delay = 0;
    vm_put(c);
  }
  return 0;
}

vmem_t open_vm(uint64_t granule) {
  struct vmem_open_opts o = {.size = sizeof(o), .granule = granule};
  vmem_t vm = 0;
  if (open_opts(&o, &vm)) printf("cannot open %s: %s\n", backend(), vmem_last_error());
  return vm;
}

vmem_t open_host(uint64_t granule) {
  struct vmem_open_opts o = {.size = sizeof(o), .backend = "host", .granule = granule};
  vmem_t vm = 0;
  if (vmem_open(&o, &vm)) printf("cannot open host: %s\n", vmem_last_error());
  return vm;
}

int get_byte(vmem_t vm, uint64_t addr) {
  unsigned char b;
  if (on_host()) return BYTE(addr);
  return vmem_read(vm, &b, addr, 1) ? -1 : b;
}

bool put_byte(vmem_t vm, uint64_t addr, int value) {
  unsigned char b = (unsigned char)value;
  if (!on_host()) return !vmem_write(vm, addr, &b, 1);
  BYTE(addr) = b;
  return true;
}

bool with_cuda(vmem_t vm) {
  struct vmem_info info = {.size = sizeof(info)};
  if (vmem_query(vm, &info)) return false;
  return (info.caps & (VMEM_CAP_VISIBLE | VMEM_CAP_CPU_ACCESS)) == VMEM_CAP_VISIBLE;
}

int touch(vmem_t vm, uint64_t addr, bool write) {
  unsigned char b = 1;
  int err;
  struct vm_ctx *c = on_host() ? NULL : vm_get(vm, "test", &err);
  if (!c) {
    if (write) BYTE(addr) = b;
    return BYTE(addr);
  }
  err = write ? c->be->write(c->bes, addr, &b, 1) : c->be->read(c->bes, &b, addr, 1);
  vm_put(c);
  return err ? err : b;
}
