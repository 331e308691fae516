/* SPDX-License-Identifier: MIT */
/*
 * matrix.h - tables of ioctl structs in which one field is wrong.
 *
 * Each struct is at the end of a readable page, so that a kernel that reads or writes beyond the given
 * size fails with EFAULT. STAT is compared before and after every refused call.
 */
#ifndef MATRIX_H
#define MATRIX_H

#include <stddef.h>
#include <sys/mman.h>
#include "abi.h"
#include "kcheck.h"

/* One wrong field: offset, width, value, and the expected errno. */
struct row {
  const char *what;
  size_t offset, width;
  uint64_t value;
  int want;
};

#define ROW(type, field, value, want) \
  {#field " = " #value, offsetof(type, field), sizeof(((type *)0)->field), (value), (want)}

/* A command with arguments that succeed, and how to undo it. */
struct command {
  const char *name;
  unsigned long number;
  size_t size;
  void (*valid)(void *argument);
  void (*undo)(void *argument);
  size_t least; /* size of the struct's first version, if it has grown since */
};

/* Maps a page followed by an unmapped one; returns the end of the first. */
static inline char *page_end(void) {
  static char *end;
  if (!end) {
    char *at = mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) abort();
    munmap(at + 3 * 4096, 4096);
    end = at + 3 * 4096;
  }
  return end;
}

/* A field of 16 bytes is filled with the value's low byte. */
static inline void poke(void *argument, const struct row *row) {
  char *at = (char *)argument + row->offset;
  if (row->width > 8) {
    memset(at, (int)row->value, row->width);
  } else {
    memcpy(at, &row->value, row->width);
  }
}

/* The call must return want and, if that is an error, leave the descriptor's state unchanged. */
static inline bool expect(int fd, const char *what, unsigned long number, void *argument, int want) {
  struct uvm_vmem_stat before, after;
  int s1 = vm_stat(fd, NULL, &before);
  int got = vm_call(fd, number, argument);
  int s2 = vm_stat(fd, NULL, &after);
  if (got != -want) {
    fail("%s: %s, should be %s", what, got ? strerror(-got) : "success", want ? strerror(want) : "success");
    return false;
  }
  if (s1 || s2) {
    fail("%s: STAT gives %d and %d", what, s1, s2);
    return false;
  }
  if (want && !stat_same(&before, &after)) {
    fail("%s: refused, but STAT changed", what);
    return false;
  }
  return true;
}

static inline bool control(int fd, const struct command *c) {
  char *argument = page_end() - c->size;
  c->valid(argument);
  if (!expect(fd, c->name, c->number, argument, 0)) return false;
  if (c->undo) c->undo(argument);
  return true;
}

/* Every row must fail with its errno, and the valid call must work before and after. */
static inline void run_rows(int fd, const struct command *c, const struct row *rows, size_t n) {
  if (!control(fd, c)) return;
  for (size_t i = 0; i < n; i++) {
    char what[160], *argument = page_end() - c->size;
    snprintf(what, sizeof(what), "%s with %s", c->name, rows[i].what);
    c->valid(argument);
    poke(argument, &rows[i]);
    if (!expect(fd, what, c->number, argument, rows[i].want) && rows[i].want && c->undo) c->undo(argument);
  }
  control(fd, c);
}

/* Only the size field is wrong: too short, longer with a zero tail, longer with a dirty tail, into unmapped memory. */
static inline void run_sizes(int fd, const struct command *c) {
  static const uint32_t longer[] = {8, 24, 2048};
  const size_t least = c->least ? c->least : c->size, short_by[] = {1, 4, 8, least - 4, least};
  char what[160], *argument;
  for (size_t i = 0; i < ARRAY_SIZE(short_by); i++) {
    argument = page_end() - c->size;
    c->valid(argument);
    *(uint32_t *)argument = (uint32_t)(least - short_by[i]);
    snprintf(what, sizeof(what), "%s, struct short by %zu", c->name, short_by[i]);
    if (!expect(fd, what, c->number, argument, EINVAL) && c->undo) c->undo(argument);
  }
  if (least < c->size) { /* a call by a program that was compiled with the first version */
    char whole[4096];
    argument = page_end() - least;
    c->valid(whole);
    memcpy(argument, whole, least);
    *(uint32_t *)argument = (uint32_t)least;
    snprintf(what, sizeof(what), "%s, struct of the first version", c->name);
    if (expect(fd, what, c->number, argument, 0) && c->undo) c->undo(argument);
  }
  for (size_t i = 0; i < ARRAY_SIZE(longer); i++) {
    size_t size = c->size + longer[i];
    argument = page_end() - size;
    memset(argument, 0, size);
    c->valid(argument);
    *(uint32_t *)argument = (uint32_t)size;
    snprintf(what, sizeof(what), "%s, %u extra zero bytes", c->name, longer[i]);
    if (expect(fd, what, c->number, argument, 0) && c->undo) c->undo(argument);
    for (int last = 0; last < 2; last++) {
      memset(argument, 0, size);
      c->valid(argument);
      *(uint32_t *)argument = (uint32_t)size;
      argument[last ? size - 1 : c->size] = 1;
      snprintf(what, sizeof(what), "%s, %u extra bytes, the %s not zero", c->name, longer[i], last ? "last" : "first");
      if (!expect(fd, what, c->number, argument, E2BIG) && c->undo) c->undo(argument);
    }
  }
  /* A struct larger than a page is always refused, whatever it contains. */
  argument = page_end() - 4097;
  memset(argument, 0, 4097);
  c->valid(argument);
  *(uint32_t *)argument = 4097;
  snprintf(what, sizeof(what), "%s, a struct of more than a page", c->name);
  if (!expect(fd, what, c->number, argument, E2BIG) && c->undo) c->undo(argument);
  argument = page_end() - c->size;
  c->valid(argument);
  *(uint32_t *)argument = (uint32_t)(c->size + 8);
  snprintf(what, sizeof(what), "%s, size extends into unmapped memory", c->name);
  if (!expect(fd, what, c->number, argument, EFAULT) && c->undo) c->undo(argument);
}

/* The argument's address: null, unmapped, a kernel address, only the first word readable. */
static inline void run_pointers(int fd, const struct command *c) {
  static const uintptr_t bad[] = {0, 8, 0x00007ffffffff000u, 0xffff888000000000u, 0xffffffffffffff00u};
  char what[160];
  for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
    snprintf(what, sizeof(what), "%s at address %#lx", c->name, (unsigned long)bad[i]);
    expect(fd, what, c->number, (void *)bad[i], EFAULT);
  }
  char *word = page_end() - 4;
  *(uint32_t *)word = (uint32_t)c->size;
  snprintf(what, sizeof(what), "%s, only the size is readable", c->name);
  expect(fd, what, c->number, word, EFAULT);
}

/* A struct that can be read but not written, for the commands that write it. */
static inline void run_read_only(int fd, const struct command *c) {
  char what[160], *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) abort();
  c->valid(page);
  mprotect(page, 4096, PROT_READ);
  snprintf(what, sizeof(what), "%s, struct is read-only", c->name);
  expect(fd, what, c->number, page, EFAULT);
  munmap(page, 4096);
}

#endif
