/* SPDX-License-Identifier: MIT */
#include <stddef.h>

#include "backend/backend.h"

/* Weak: a program may define its own. */
__attribute__((weak)) const struct vm_backend *const vm_backends[] = {&vm_backend_uvm, &vm_backend_stock,
                                                                      &vm_backend_cuda, &vm_backend_host, NULL};
