# SPDX-License-Identifier: MIT
"""The benchmark's two GPU kernels, as PTX text that the driver compiles at load time.

`spin` keeps every multiprocessor busy for a given time; `read` reads a range once, 64 bytes per
thread and iteration. They are PTX rather than C++ so that they need neither nvcc nor torch.
"""

from __future__ import annotations

import ctypes
from typing import Any

from pyvmem.commands.cumem import Cuda

__all__ = ["PTX", "Kernels"]

_THREADS = 512

PTX = """
.version 7.0
.target sm_70
.address_size 64

// spin(u64 ns): every thread waits until the GPU's clock has advanced by ns.
.visible .entry spin(.param .u64 p_ns)
{
  .reg .pred %p;
  .reg .u64 %now, %end, %ns;
  ld.param.u64 %ns, [p_ns];
  mov.u64 %now, %globaltimer;
  add.u64 %end, %now, %ns;
again:
  mov.u64 %now, %globaltimer;
  setp.lt.u64 %p, %now, %end;
  @%p bra again;
  ret;
}

// read(u64 addr, u64 chunks, u64 sink): xors all 16-byte chunks (a multiple of 4 x threads), four
// loads in flight a thread; writes only if the result is one value in 2^32, so that nothing is
// optimised away and nothing is written in practice.
.visible .entry read(.param .u64 p_addr, .param .u64 p_chunks, .param .u64 p_sink)
{
  .reg .pred %p;
  .reg .u32 %me, %team, %block, %blocks;
  .reg .u32 %x, %a<4>, %b<4>, %c<4>, %d<4>;
  .reg .u64 %addr, %i, %n, %step, %stride, %q0, %q1, %q2, %q3, %sink, %w;
  ld.param.u64 %addr, [p_addr];
  ld.param.u64 %n, [p_chunks];
  ld.param.u64 %sink, [p_sink];
  mov.u32 %me, %tid.x;
  mov.u32 %team, %ntid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %blocks, %nctaid.x;
  mul.wide.u32 %i, %block, %team;
  cvt.u64.u32 %w, %me;
  add.u64 %i, %i, %w;
  mul.wide.u32 %step, %blocks, %team;
  shl.b64 %stride, %step, 4;
  mov.u32 %x, 0;
  setp.ge.u64 %p, %i, %n;
  @%p bra done;
loop:
  shl.b64 %q0, %i, 4;
  add.u64 %q0, %q0, %addr;
  add.u64 %q1, %q0, %stride;
  add.u64 %q2, %q1, %stride;
  add.u64 %q3, %q2, %stride;
  ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%q0];
  ld.global.v4.u32 {%b0, %b1, %b2, %b3}, [%q1];
  ld.global.v4.u32 {%c0, %c1, %c2, %c3}, [%q2];
  ld.global.v4.u32 {%d0, %d1, %d2, %d3}, [%q3];
  xor.b32 %a0, %a0, %a1;
  xor.b32 %a2, %a2, %a3;
  xor.b32 %b0, %b0, %b1;
  xor.b32 %b2, %b2, %b3;
  xor.b32 %c0, %c0, %c1;
  xor.b32 %c2, %c2, %c3;
  xor.b32 %d0, %d0, %d1;
  xor.b32 %d2, %d2, %d3;
  xor.b32 %a0, %a0, %a2;
  xor.b32 %b0, %b0, %b2;
  xor.b32 %c0, %c0, %c2;
  xor.b32 %d0, %d0, %d2;
  xor.b32 %a0, %a0, %b0;
  xor.b32 %c0, %c0, %d0;
  xor.b32 %x, %x, %a0;
  xor.b32 %x, %x, %c0;
  shl.b64 %w, %step, 2;
  add.u64 %i, %i, %w;
  setp.lt.u64 %p, %i, %n;
  @%p bra loop;
done:
  setp.ne.u32 %p, %x, 0x5bd1e995;
  @%p bra out;
  st.global.u32 [%sink], %x;
out:
  ret;
}
"""


class Kernels:
    """The kernels, loaded into the primary context until `close`.

    Raises CudaCallError if the driver cannot load them.
    """

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        d = cuda.driver
        self.module = cuda.call(d.cuModuleLoadData, PTX.encode() + b"\0")
        self._spin = cuda.call(d.cuModuleGetFunction, self.module, b"spin")
        self._read = cuda.call(d.cuModuleGetFunction, self.module, b"read")
        self.multiprocessors = cuda.attribute("MULTIPROCESSOR_COUNT")
        threads = cuda.attribute("MAX_THREADS_PER_MULTIPROCESSOR")
        self.blocks = self.multiprocessors * max(threads // _THREADS, 1)
        self.stream = cuda.call(d.cuStreamCreate, 1)  # CU_STREAM_NON_BLOCKING
        self._events = [cuda.call(d.cuEventCreate, 0) for _ in range(2)]
        self._sink = int(cuda.call(d.cuMemAlloc, 256))

    def _launch(self, function: Any, values: tuple[int, ...]) -> None:
        args = (values, tuple(ctypes.c_uint64 for _ in values))
        launch = self.cuda.driver.cuLaunchKernel
        grid = (self.blocks, 1, 1, _THREADS, 1, 1, 0)
        self.cuda.call(launch, function, *grid, self.stream, args, 0)

    def spin(self, seconds: float) -> None:
        """Starts a kernel that fills every multiprocessor with threads for `seconds`."""
        self._launch(self._spin, (int(seconds * 1e9),))

    @property
    def running(self) -> bool:
        """True until every kernel that was started has finished."""
        (error,) = self.cuda.driver.cuStreamQuery(self.stream)
        if error == self.cuda.driver.CUresult.CUDA_ERROR_NOT_READY:
            return True
        self.cuda.check("cuStreamQuery", error)
        return False

    def wait(self) -> None:
        """Waits until every kernel that was started has finished."""
        self.cuda.call(self.cuda.driver.cuStreamSynchronize, self.stream)

    def chunk(self) -> int:
        """Returns the granularity of `read`, whose `nbytes` must be a multiple of it."""
        return self.blocks * _THREADS * 64

    def read(self, addr: int, nbytes: int) -> float:
        """Reads [addr, addr + nbytes) once; returns the GPU time in s. All pages must be mapped."""
        if nbytes <= 0 or nbytes % self.chunk():
            raise ValueError(f"{nbytes} bytes: must be a positive multiple of {self.chunk()}")
        d, call = self.cuda.driver, self.cuda.call
        call(d.cuEventRecord, self._events[0], self.stream)
        self._launch(self._read, (addr, nbytes // 16, self._sink))
        call(d.cuEventRecord, self._events[1], self.stream)
        call(d.cuEventSynchronize, self._events[1])
        return float(call(d.cuEventElapsedTime, *self._events)) / 1e3

    def close(self) -> None:
        """Waits for the kernels and unloads them."""
        d, call = self.cuda.driver, self.cuda.call
        self.wait()
        for event in self._events:
            call(d.cuEventDestroy, event)
        call(d.cuMemFree, self._sink)
        call(d.cuStreamDestroy, self.stream)
        call(d.cuModuleUnload, self.module)
