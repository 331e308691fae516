/* SPDX-License-Identifier: MIT */
/*
 * Lets libvmem's back end "uvm" access GPU memory without CUDA: through /dev/softgpu, as a kernel running on
 * devices[0] would. Linked into test programs only, where it replaces vm_uvm_contents.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "softgpu_user.h"
#include "backend/uvm/uvm.h"

struct state {
  int dev;
  struct softgpu_space space;
};

static int failed(int err, uint64_t addr, uint64_t bytes, uint64_t done, const char *what) {
  unsigned long long at = addr + done;

  if (!err)
    return 0;
  return vm_fail_at(-EIO, addr, bytes, 0, "the software GPU's %s at 0x%llx: %s", what, at,
                    err == -EFAULT  ? "no translation"
                    : err == -EROFS ? "read-only page"
                                    : strerror(-err));
}

static int find_gpu(struct state *s, const uint8_t *uuid) {
  for (unsigned i = 0; i < SOFTGPU_MAX_GPUS; i++) {
    struct softgpu_info info;
    int err = softgpu_info(s->dev, i, &info);

    if (err)
      return err;
    if (memcmp(info.out_uuid, uuid, sizeof(info.out_uuid)) == 0) {
      s->space.gpu = i;
      return 0;
    }
  }
  return -ENOENT;
}

static int contents_open(const struct nvidia *n, void **state) {
  struct state *s = calloc(1, sizeof(*s));
  int err;

  if (!s)
    return vm_fail(-ENOMEM, "heap: %zu bytes", sizeof(*s));
  s->dev = softgpu_open();
  if (s->dev < 0) {
    err = s->dev;
    free(s);
    return vm_fail(-ENODEV, SOFTGPU_DEVICE ": %s", strerror(-err));
  }
  s->space.client = n->rm.client;
  s->space.vaspace = n->devices[0].va_space;
  err = find_gpu(s, n->devices[0].uuid);
  if (err) {
    close(s->dev);
    free(s);
    return vm_fail(-ENODEV, "no software GPU has this UUID: %s", strerror(-err));
  }
  *state = s;
  return 0;
}

static void contents_close(void *state) {
  struct state *s = state;

  close(s->dev);
  free(s);
}

static int contents_read(void *state, void *dst, uint64_t addr, uint64_t bytes) {
  struct state *s = state;
  uint64_t done = 0;
  int err = softgpu_read(s->dev, s->space, addr, dst, bytes, &done);

  return failed(err, addr, bytes, done, "read");
}

static int contents_write(void *state, uint64_t addr, const void *src, uint64_t bytes) {
  struct state *s = state;
  uint64_t done = 0;
  int err = softgpu_write(s->dev, s->space, addr, src, bytes, &done);

  return failed(err, addr, bytes, done, "write");
}

/* The software GPU fills whole words; the bytes before the first and after the last are written separately. */
static int contents_fill(void *state, uint64_t addr, uint64_t bytes, uint8_t value) {
  struct state *s = state;
  uint64_t head = -addr & 7, middle, word = 0x0101010101010101u * value;
  int err = 0;

  if (head > bytes)
    head = bytes;
  middle = (bytes - head) & ~7ull;
  if (head)
    err = contents_write(s, addr, &word, head);
  if (!err && middle)
    err = failed(softgpu_fill(s->dev, s->space, addr + head, middle, word, 0), addr, bytes, 0, "fill");
  if (!err && head + middle < bytes)
    err = contents_write(s, addr + head + middle, &word, bytes - head - middle);
  return err;
}

static int contents_copy(void *state, uint64_t dst, uint64_t src, uint64_t bytes) {
  uint64_t size = bytes < 1 << 20 ? bytes : 1 << 20, n;
  void *buffer = malloc(size);
  int err = 0;

  if (!buffer)
    return vm_fail(-ENOMEM, "heap: %llu bytes", (unsigned long long)size);
  for (uint64_t at = 0; at < bytes && !err; at += n) {
    n = bytes - at < size ? bytes - at : size;
    err = contents_read(state, buffer, src + at, n);
    if (!err)
      err = contents_write(state, dst + at, buffer, n);
  }
  free(buffer);
  return err;
}

static const struct uvm_contents contents = {
    .open = contents_open,
    .close = contents_close,
    .fill = contents_fill,
    .read = contents_read,
    .write = contents_write,
    .copy = contents_copy,
};
const struct uvm_contents *vm_uvm_contents = &contents;
