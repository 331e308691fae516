/* SPDX-License-Identifier: MIT */
/*
 * Asynchronous batches: map in the background, free once other work is done.
 *
 * An eventfd stands for that other work here; on a GPU it would be a stream or an event.
 *
 * usage: ticket [BACKEND]
 */
#include <errno.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <vmem.h>

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, vmem_last_error());
  return 1;
}

int main(int argc, char **argv) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .backend = argc > 1 ? argv[1] : "auto"};
  struct vmem_info info = {.size = sizeof(info)};
  vmem_ticket mapping, freeing;
  uint64_t addr, bytes, one = 1;
  unsigned char byte = 0;
  vmem_t vm;

  if (vmem_open(&opts, &vm) || vmem_query(vm, &info) || vMemReserve(vm, 1ull << 30, NULL, &addr)) return failed("open");
  bytes = 16 * info.granule;

  /* vmem_submit takes the pages before it returns: the batch cannot run out of memory later. */
  struct vmem_op grow = {.op = VMEM_OP_POPULATE, .addr = addr, .bytes = bytes};
  if (vmem_submit(vm, &grow, 1, NULL, 0, 0, &mapping)) return failed("submit");
  /* ... the caller does something else here ... */
  if (vmem_wait(vm, mapping, -1) || vmem_ticket_drop(vm, mapping) || vmem_fill(vm, addr, bytes, 7))
    return failed("wait");
  printf("mapped %llu KiB in the background\n", (unsigned long long)bytes >> 10);

  /* Free the pages when the work that reads them completes, without waiting for it here. */
  int work = eventfd(0, EFD_CLOEXEC);
  if (work < 0) return perror("eventfd"), 1;
  struct vmem_op shrink = {.op = VMEM_OP_UNMAP, .addr = addr, .bytes = bytes};
  struct vmem_after after = {.kind = VMEM_AFTER_FD, .handle = (uint64_t)work};
  if (vmem_submit(vm, &shrink, 1, &after, 1, 0, &freeing)) return failed("submit");

  int err = vmem_wait(vm, freeing, 1000000);
  printf("while the work runs: %s\n", err == -ETIMEDOUT ? "not finished, still mapped" : vmem_last_error());
  if (err != -ETIMEDOUT) return failed("early end");
  /* The batch owns the range: calls of this library return -EBUSY, but the work itself goes on. */
  if (vmem_read(vm, &byte, addr, 1) != -EBUSY) return failed("read");
  if (info.caps & VMEM_CAP_CPU_ACCESS && *(volatile unsigned char *)(uintptr_t)addr != 7)
    return fprintf(stderr, "the page has other contents\n"), 1;

  if (write(work, &one, sizeof(one)) != sizeof(one)) return perror("write"), 1;
  if (vmem_wait(vm, freeing, -1) || vmem_ticket_drop(vm, freeing)) return failed("wait");
  err = vmem_read(vm, &byte, addr, 1);
  printf("when the work is complete: %s\n", vmem_last_error());
  close(work);
  if (vMemFree(vm, addr, 0) || vmem_close(vm)) return failed("end");
  return err == -EFAULT ? 0 : 1;
}
