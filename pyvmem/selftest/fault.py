# SPDX-License-Identifier: MIT
"""A child process of the self-test, in which a kernel makes an invalid access.

The access breaks the CUDA context of the process. Usage:
``python -m pyvmem.selftest.fault BACKEND DEVICE unmapped|readonly``. Exit status: 0 if the kernel
was stopped, 1 if it was not, 77 if it could not run.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NoReturn

from pyvmem import Context
from pyvmem.commands.cumem import Cuda, CudaCallError, CudaUnavailable
from pyvmem.selftest.check import reserve

__all__ = ["main"]

_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

// touch(u64 addr, u64 write): adds one to the word at addr, or only reads it (into the stack).
.visible .entry touch(.param .u64 p_addr, .param .u64 p_write)
{
  .reg .pred %p;
  .reg .u32 %x;
  .reg .u64 %addr, %write;
  ld.param.u64 %addr, [p_addr];
  ld.param.u64 %write, [p_write];
  ld.volatile.global.u32 %x, [%addr];
  setp.eq.u64 %p, %write, 0;
  @%p bra out;
  add.u32 %x, %x, 1;
  st.volatile.global.u32 [%addr], %x;
out:
  ret;
}
\0"""


def _touch(cuda: Cuda, addr: int, write: bool) -> None:
    """Runs the kernel with one thread and waits; raises CudaCallError if the GPU stops it."""
    d = cuda.driver
    module = cuda.call(d.cuModuleLoadData, _PTX)
    function = cuda.call(d.cuModuleGetFunction, module, b"touch")
    args = ((addr, int(write)), (ctypes.c_uint64, ctypes.c_uint64))
    cuda.call(d.cuLaunchKernel, function, 1, 1, 1, 1, 1, 1, 0, 0, args, 0)
    cuda.call(d.cuCtxSynchronize)


def _end(status: int, text: str) -> NoReturn:
    """Exits without cleanup: a broken CUDA context cannot be torn down."""
    print(text, flush=True)
    os._exit(status)


def main(words: list[str]) -> int:
    """Maps two pages, makes valid accesses and then the invalid one."""
    backend, device, kind = words
    try:
        cuda = Cuda(int(device))
    except CudaUnavailable as error:
        print(error)
        return 77
    context = Context(backend, device=int(device))
    page = context.info.granule
    range_ = reserve(context, 4 * page)
    pages = context.create(page)
    context.map(range_.addr, page, pages)
    context.map(range_.addr + page, page, pages, readonly=kind == "readonly")
    try:
        _touch(cuda, range_.addr, True)
        _touch(cuda, range_.addr + page, kind != "readonly")
    except CudaCallError as error:
        _end(1, f"a kernel was stopped at a valid access: {error}")
    if kind == "unmapped":
        context.unmap(range_.addr + page, page)
    try:
        _touch(cuda, range_.addr + page, kind == "readonly")
    except CudaCallError as error:
        _end(0, f"stopped: {error}")
    _end(1, f"a kernel was not stopped at an invalid access: {kind}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
