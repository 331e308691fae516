/* SPDX-License-Identifier: MIT */
/*
 * Every field of every struct: a call in which only that field is wrong gives its errno and changes nothing.
 */
#include "matrix.h"
#include "world.h"

#define RES 0x7c0000000000ull /* a reservation of 64 KB pages; its first 4 units are mapped */
#define RES_BYTES MIB(64)
#define COARSE (RES + GIB(1)) /* a reservation of 128 KB pages */
#define SPARE (RES + GIB(2))  /* not reserved */
#define LOW (1ull << 44) /* room for the longest reservation */
#define A_PAGES 16
#define NO_GPU 0x77

static struct world W;
static uint32_t A, BIG, GONE; /* 16 x 64 KB; 2 x 2 MB; released */
static uint64_t done_ticket;
static struct uvm_vmem_query limits;

static void build(void) {
  if (set_parameter("uvm_vmem_gpu_limit_mb", 0)) hopeless("a parameter of the driver", -EINVAL); /* to get ENOSPC, not EDQUOT */
  const uint8_t *gpu = world_open(&W, 1)->uuid[0];
  uint32_t gone;
  OK(vm_query(W.uvm, gpu, &limits));
  OK(vm_reserve(W.uvm, gpu, RES, RES_BYTES, 16, 0));
  OK(vm_reserve(W.uvm, gpu, COARSE, MIB(4), 17, 0));
  OK(vm_create(W.uvm, gpu, 16, A_PAGES, 0, &A));
  OK(vm_create(W.uvm, gpu, 21, 2, 0, &BIG));
  OK(vm_create(W.uvm, gpu, 16, 1, 0, &gone));
  OK(vm_release(W.uvm, gone));
  GONE = gone;
  struct uvm_vmem_op op = op_map(RES, A, 0, 4, 0);
  OK(vm_bind(W.uvm, RES, &op, 1, NULL, &done_ticket));
  if (done_ticket) OK(vm_wait(W.uvm, done_ticket, FOREVER));
}

static void setup(void) {
  static bool made;
  if (made) return;
  made = true;
  build();
  if (failures_here) exit(1);
}

/* For each of the eight commands, arguments that succeed, and how to undo the call. */

static void query_valid(void *p) {
  struct uvm_vmem_query q = {.size = sizeof(q), .flags = UVM_VMEM_QUERY_GPU};
  memcpy(q.gpu_uuid, W.uuid[0], sizeof(q.gpu_uuid));
  memcpy(p, &q, sizeof(q));
}

static uint8_t reserve_gpus[UVM_VMEM_UUID_BYTES * 64];

static void reserve_valid(void *p) {
  struct uvm_vmem_reserve r = {.size = sizeof(r),
                               .start = SPARE,
                               .length = MIB(4),
                               .page_shift = 16,
                               .gpu_count = 1,
                               .gpus = (uintptr_t)reserve_gpus};
  for (size_t i = 0; i < 64; i++) memcpy(reserve_gpus + i * UVM_VMEM_UUID_BYTES, W.uuid[0], UVM_VMEM_UUID_BYTES);
  memcpy(p, &r, sizeof(r));
}

static void reserve_undo(void *p) {
  vm_free(W.uvm, ((struct uvm_vmem_reserve *)p)->start, 0);
}

static void free_valid(void *p) {
  struct uvm_vmem_free f = {.size = sizeof(f), .start = COARSE};
  memcpy(p, &f, sizeof(f));
}

static void free_undo(void *p) {
  (void)p;
  vm_reserve(W.uvm, W.uuid[0], COARSE, MIB(4), 17, 0);
}

static void create_valid(void *p) {
  struct uvm_vmem_create c = {.size = sizeof(c), .page_shift = 16, .count = 3};
  memcpy(c.gpu_uuid, W.uuid[0], sizeof(c.gpu_uuid));
  memcpy(p, &c, sizeof(c));
}

static void create_undo(void *p) {
  vm_release(W.uvm, ((struct uvm_vmem_create *)p)->out_handle);
}

static void release_valid(void *p) {
  struct uvm_vmem_release r = {.size = sizeof(r)};
  vm_create(W.uvm, W.uuid[0], 16, 1, 0, &r.handle);
  memcpy(p, &r, sizeof(r));
}

static struct uvm_vmem_op bind_ops[3];

static void bind_valid(void *p) {
  struct uvm_vmem_bind b = {
      .size = sizeof(b), .start = RES, .ops = (uintptr_t)bind_ops, .op_count = ARRAY_SIZE(bind_ops)};
  bind_ops[0] = op_map(RES + MIB(8), A, 0, 2, 0);
  bind_ops[1] = op_map(RES + MIB(2), A, 4, 2, 0);
  bind_ops[2] = op_unmap(RES + MIB(16), 4, 0);
  memcpy(p, &b, sizeof(b));
}

static void bind_undo(void *p) {
  struct uvm_vmem_op all = op_unmap(RES + MIB(1), (RES_BYTES - MIB(1)) / UNIT, 0);
  (void)p;
  vm_bind(W.uvm, RES, &all, 1, NULL, NULL);
}

static void wait_valid(void *p) {
  struct uvm_vmem_wait w = {.size = sizeof(w), .ticket = done_ticket};
  memcpy(p, &w, sizeof(w));
}

static void stat_valid(void *p) {
  struct uvm_vmem_stat s = {.size = sizeof(s), .flags = UVM_VMEM_STAT_GPU};
  memcpy(s.gpu_uuid, W.uuid[0], sizeof(s.gpu_uuid));
  memcpy(p, &s, sizeof(s));
}

static void release_undo(void *p) {
  vm_release(W.uvm, ((struct uvm_vmem_release *)p)->handle);
}

enum { QUERY, RESERVE, FREE, CREATE, RELEASE, BIND, WAIT, STAT };

static const struct command commands[] = {
    {"QUERY", UVM_VMEM_QUERY, sizeof(struct uvm_vmem_query), query_valid, NULL},
    {"RESERVE", UVM_VMEM_RESERVE, sizeof(struct uvm_vmem_reserve), reserve_valid, reserve_undo},
    {"FREE", UVM_VMEM_FREE, sizeof(struct uvm_vmem_free), free_valid, free_undo},
    {"CREATE", UVM_VMEM_CREATE, sizeof(struct uvm_vmem_create), create_valid, create_undo},
    {"RELEASE", UVM_VMEM_RELEASE, sizeof(struct uvm_vmem_release), release_valid, release_undo},
    {"BIND", UVM_VMEM_BIND, sizeof(struct uvm_vmem_bind), bind_valid, bind_undo},
    {"WAIT", UVM_VMEM_WAIT, sizeof(struct uvm_vmem_wait), wait_valid, NULL},
    {"STAT", UVM_VMEM_STAT, sizeof(struct uvm_vmem_stat), stat_valid, NULL,
     offsetof(struct uvm_vmem_stat, out_table_bytes)},
};

static void sizes(void) {
  setup();
  for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
    if (control(W.uvm, &commands[i])) run_sizes(W.uvm, &commands[i]);
  }
}

static void pointers(void) {
  setup();
  for (size_t i = 0; i < ARRAY_SIZE(commands); i++) run_pointers(W.uvm, &commands[i]);
}

static void read_only_structs(void) {
  setup();
  run_read_only(W.uvm, &commands[QUERY]);
  run_read_only(W.uvm, &commands[CREATE]);
  run_read_only(W.uvm, &commands[BIND]);
  run_read_only(W.uvm, &commands[STAT]);
}

static void query_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_query, flags, UVM_VMEM_QUERY_GPU | 2, EOPNOTSUPP),
      ROW(struct uvm_vmem_query, flags, UVM_VMEM_QUERY_GPU | 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_query, flags, 0, EINVAL), /* a uuid that is not asked about */
      ROW(struct uvm_vmem_query, gpu_uuid, NO_GPU, ENODEV),
      ROW(struct uvm_vmem_query, gpu_uuid, 0, ENODEV),
      ROW(struct uvm_vmem_query, __reserved, 1, EINVAL),
  };
  setup();
  run_rows(W.uvm, &commands[QUERY], rows, ARRAY_SIZE(rows));
}

static void reserve_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_reserve, flags, 4, EOPNOTSUPP),
      ROW(struct uvm_vmem_reserve, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_reserve, start, 0, EINVAL),
      ROW(struct uvm_vmem_reserve, start, SPARE + 4096, EINVAL),
      ROW(struct uvm_vmem_reserve, start, SPARE + UNIT, EINVAL),
      ROW(struct uvm_vmem_reserve, start, SPARE + 1, EINVAL),
      ROW(struct uvm_vmem_reserve, start, 0xffffffffffe00000u, EOVERFLOW),
      ROW(struct uvm_vmem_reserve, start, 1ull << 60, ERANGE),
      ROW(struct uvm_vmem_reserve, start, RES, EEXIST),
      ROW(struct uvm_vmem_reserve, start, RES - MIB(2), EEXIST),
      ROW(struct uvm_vmem_reserve, start, RES + MIB(62), EEXIST),
      ROW(struct uvm_vmem_reserve, start, RES + MIB(8), EEXIST),
      ROW(struct uvm_vmem_reserve, length, 0, EINVAL),
      ROW(struct uvm_vmem_reserve, length, UNIT, EINVAL),
      ROW(struct uvm_vmem_reserve, length, MIB(2) + 1, EINVAL),
      ROW(struct uvm_vmem_reserve, length, 0xffffffffffe00000u, EOVERFLOW),
      ROW(struct uvm_vmem_reserve, page_shift, 0, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 12, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 15, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 19, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 20, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 22, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 64 + 16, EINVAL),
      ROW(struct uvm_vmem_reserve, page_shift, 0xffffffffu, EINVAL),
      ROW(struct uvm_vmem_reserve, gpu_count, 0, EINVAL),
      ROW(struct uvm_vmem_reserve, gpu_count, 0xffffffffu, EMSGSIZE),
      ROW(struct uvm_vmem_reserve, gpu_count, 2, EINVAL), /* the same GPU twice */
      ROW(struct uvm_vmem_reserve, gpus, 0, EFAULT),
      ROW(struct uvm_vmem_reserve, gpus, 0xffff888000000000u, EFAULT),
  };
  struct row over = ROW(struct uvm_vmem_reserve, gpu_count, 0, EMSGSIZE);
  struct row longer = ROW(struct uvm_vmem_reserve, length, 0, EMSGSIZE);
  char argument[sizeof(struct uvm_vmem_reserve)];
  setup();
  run_rows(W.uvm, &commands[RESERVE], rows, ARRAY_SIZE(rows));
  over.value = limits.out_max_gpus + 1;
  longer.value = limits.out_max_reserve_bytes + SLOT;
  run_rows(W.uvm, &commands[RESERVE], &over, 1);
  run_rows(W.uvm, &commands[RESERVE], &longer, 1);
  OK(vm_reserve(W.uvm, W.uuid[0], LOW, limits.out_max_reserve_bytes, 16, 0)); /* exactly the limit */
  OK(vm_free(W.uvm, LOW, 0));
  struct uvm_vmem_reserve eager;
  reserve_valid(&eager);
  eager.flags = UVM_VMEM_RESERVE_EAGER;
  eager.length = limits.out_max_eager_bytes + SLOT;
  expect(W.uvm, "RESERVE of more tables than EAGER may make", UVM_VMEM_RESERVE, &eager, EMSGSIZE);
  reserve_valid(argument);
  memset(reserve_gpus, NO_GPU, UVM_VMEM_UUID_BYTES);
  expect(W.uvm, "RESERVE on an unknown GPU", UVM_VMEM_RESERVE, argument, ENODEV);
}

static void reserve_where_uvm_has_a_range(void) {
  char argument[sizeof(struct uvm_vmem_reserve)];
  setup();
  void *managed = mmap((void *)(SPARE + MIB(2)), MIB(2), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, W.uvm,
                       SPARE + MIB(2));
  CHECK(managed != MAP_FAILED);
  reserve_valid(argument);
  expect(W.uvm, "RESERVE over managed memory", UVM_VMEM_RESERVE, argument, EEXIST);
  munmap(managed, MIB(2));
  OK(softgpu_uvm_create_external(&W.c, SPARE, MIB(2)));
  expect(W.uvm, "RESERVE over an external range", UVM_VMEM_RESERVE, argument, EEXIST);
  struct uvm_vmem_free f = {.size = sizeof(f), .start = SPARE};
  expect(W.uvm, "FREE of a range that is not ours", UVM_VMEM_FREE, &f, ENOENT);
  OK(softgpu_uvm_free(&W.c, SPARE, MIB(2)));
  control(W.uvm, &commands[RESERVE]);
}

static void free_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_free, flags, 2, EOPNOTSUPP),
      ROW(struct uvm_vmem_free, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_free, start, COARSE + 1, EINVAL),
      ROW(struct uvm_vmem_free, start, COARSE + UNIT, EINVAL),
      ROW(struct uvm_vmem_free, start, COARSE + SLOT, ENOENT),
      ROW(struct uvm_vmem_free, start, SPARE, ENOENT),
      ROW(struct uvm_vmem_free, start, 0, ENOENT),
      ROW(struct uvm_vmem_free, start, RES, EBUSY),
  };
  setup();
  run_rows(W.uvm, &commands[FREE], rows, ARRAY_SIZE(rows));
}

static void create_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_create, flags, 4, EOPNOTSUPP),
      ROW(struct uvm_vmem_create, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_create, gpu_uuid, NO_GPU, ENODEV),
      ROW(struct uvm_vmem_create, gpu_uuid, 0, ENODEV),
      ROW(struct uvm_vmem_create, page_shift, 0, EINVAL),
      ROW(struct uvm_vmem_create, page_shift, 12, EINVAL),
      ROW(struct uvm_vmem_create, page_shift, 19, EINVAL),
      ROW(struct uvm_vmem_create, page_shift, 20, EINVAL),
      ROW(struct uvm_vmem_create, page_shift, 22, EINVAL),
      ROW(struct uvm_vmem_create, page_shift, 64 + 16, EINVAL),
      ROW(struct uvm_vmem_create, page_shift, 0xffffffffu, EINVAL),
      ROW(struct uvm_vmem_create, count, 0, EINVAL),
      ROW(struct uvm_vmem_create, count, 0xffffffffu, EMSGSIZE),
      ROW(struct uvm_vmem_create, __reserved, 1, EINVAL),
  };
  struct row over = ROW(struct uvm_vmem_create, count, 0, EMSGSIZE);
  struct uvm_vmem_create c;
  setup();
  run_rows(W.uvm, &commands[CREATE], rows, ARRAY_SIZE(rows));
  over.value = limits.out_max_create_pages + 1ull;
  run_rows(W.uvm, &commands[CREATE], &over, 1);
  if (!(limits.out_capabilities & UVM_VMEM_CAP_HOST)) {
    create_valid(&c);
    c.flags = UVM_VMEM_CREATE_HOST;
    expect(W.uvm, "CREATE in host memory, which QUERY does not offer", UVM_VMEM_CREATE, &c, EOPNOTSUPP);
  }
  /* More memory than the GPU has, if possible with a count below the limit. */
  create_valid(&c);
  c.page_shift = 21;
  c.count = limits.out_max_create_pages;
  if (c.count * MIB(2) > W.vidmem_bytes) expect(W.uvm, "CREATE of more than the GPU has", UVM_VMEM_CREATE, &c, ENOSPC);
  control(W.uvm, &commands[CREATE]);
}

static void release_fields(void) {
  struct row rows[] = {
      ROW(struct uvm_vmem_release, flags, 1, EOPNOTSUPP),
      ROW(struct uvm_vmem_release, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_release, __reserved, 1, EINVAL),
  };
  struct row handles[] = {
      ROW(struct uvm_vmem_release, handle, 0, ENOENT),
      ROW(struct uvm_vmem_release, handle, 0xffffffffu, ENOENT),
      ROW(struct uvm_vmem_release, handle, 0, ESTALE), /* set below */
  };
  setup();
  for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
    /* valid() creates an object for each row, which is released after the refused call. */
    struct uvm_vmem_release r;
    uint32_t handle;
    release_valid(&r);
    handle = r.handle;
    poke(&r, &rows[i]);
    expect(W.uvm, rows[i].what, UVM_VMEM_RELEASE, &r, rows[i].want);
    OK(vm_release(W.uvm, handle));
  }
  handles[2].value = GONE;
  for (size_t i = 0; i < ARRAY_SIZE(handles); i++) {
    struct uvm_vmem_release r = {.size = sizeof(r)};
    poke(&r, &handles[i]);
    expect(W.uvm, handles[i].what, UVM_VMEM_RELEASE, &r, handles[i].want);
  }
  control(W.uvm, &commands[RELEASE]);
}

static void bind_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_bind, flags, 2, EOPNOTSUPP),
      ROW(struct uvm_vmem_bind, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_bind, start, RES + 1, EINVAL),
      ROW(struct uvm_vmem_bind, start, RES + UNIT, EINVAL),
      ROW(struct uvm_vmem_bind, start, RES + SLOT, ENOENT),
      ROW(struct uvm_vmem_bind, start, SPARE, ENOENT),
      ROW(struct uvm_vmem_bind, start, 0, ENOENT),
      ROW(struct uvm_vmem_bind, ops, 0, EFAULT),
      ROW(struct uvm_vmem_bind, ops, 0xffff888000000000u, EFAULT),
      ROW(struct uvm_vmem_bind, ops, 0xfffffffffffffff0u, EFAULT),
      ROW(struct uvm_vmem_bind, op_count, 0, EINVAL),
      ROW(struct uvm_vmem_bind, op_count, 0xffffffffu, EMSGSIZE),
  };
  struct row over = ROW(struct uvm_vmem_bind, op_count, 0, EMSGSIZE);
  setup();
  run_rows(W.uvm, &commands[BIND], rows, ARRAY_SIZE(rows));
  over.value = limits.out_max_bind_ops + 1ull;
  run_rows(W.uvm, &commands[BIND], &over, 1);
  /* An array that ends at an unmapped page: the first operation is readable, the second is not. */
  struct uvm_vmem_bind b = {.size = sizeof(b), .start = RES, .op_count = 2};
  struct uvm_vmem_op *last = (struct uvm_vmem_op *)page_end() - 1;
  *last = op_map(RES + MIB(4), A, 0, 1, 0);
  b.ops = (uintptr_t)last;
  expect(W.uvm, "BIND whose second operation cannot be read", UVM_VMEM_BIND, &b, EFAULT);
}

/* Puts each wrong operation first, second and third in a batch whose other operations are valid. */
static void bind_wrong_op(int fd, const char *what, uint64_t start, struct uvm_vmem_op wrong, int want) {
  for (unsigned at = 0; at < 3; at++) {
    struct uvm_vmem_op ops[3];
    struct uvm_vmem_bind b = {.size = sizeof(b), .start = start, .ops = (uintptr_t)ops, .op_count = 3};
    char text[160];
    ops[0] = op_unmap(start + MIB(1), 2, 0);
    ops[1] = op_unmap(start + MIB(1) + 8 * UNIT, 2, 0);
    ops[2] = op_unmap(start + MIB(1) + 4 * UNIT, 2, 0);
    ops[at] = wrong;
    b.out_failed_op = 77;
    snprintf(text, sizeof(text), "BIND of 3, number %u has %s", at, what);
    if (!expect(fd, text, UVM_VMEM_BIND, &b, want)) {
      bind_undo(NULL);
    } else if (b.out_failed_op != at) {
      fail("%s: out_failed_op is %u", text, b.out_failed_op);
    }
  }
}

static void bind_map_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_op, op, 0, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, op, 3, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, op, 0xffffffffu, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, flags, 32, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, flags, UVM_VMEM_OP_SPARSE, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, flags, UVM_VMEM_OP_LARGE, EINVAL), /* not BIG */
      ROW(struct uvm_vmem_op, __reserved, 1, EINVAL),
      ROW(struct uvm_vmem_op, count, 0, EINVAL),
      ROW(struct uvm_vmem_op, count, A_PAGES + 1, ERANGE),
      ROW(struct uvm_vmem_op, first, A_PAGES, ERANGE),
      ROW(struct uvm_vmem_op, first, A_PAGES - 1, ERANGE), /* count is 2 */
      ROW(struct uvm_vmem_op, first, 0xffffffffu, EOVERFLOW),
      ROW(struct uvm_vmem_op, addr, RES + MIB(3) + 4096, EINVAL),
      ROW(struct uvm_vmem_op, addr, RES + MIB(3) + 1, EINVAL),
      ROW(struct uvm_vmem_op, addr, RES - UNIT, ERANGE), /* straddles the start */
      ROW(struct uvm_vmem_op, addr, RES - MIB(2), ERANGE),
      ROW(struct uvm_vmem_op, addr, RES + RES_BYTES - UNIT, ERANGE), /* straddles the end */
      ROW(struct uvm_vmem_op, addr, RES + RES_BYTES, ERANGE),
      ROW(struct uvm_vmem_op, addr, 0, ERANGE),
      ROW(struct uvm_vmem_op, addr, 0xffffffffffff0000u, EOVERFLOW), /* two pages wrap */
      ROW(struct uvm_vmem_op, addr, RES, EEXIST),
      ROW(struct uvm_vmem_op, addr, RES + 3 * UNIT, EEXIST), /* half of it is mapped */
      ROW(struct uvm_vmem_op, handle, 0, ENOENT),
      ROW(struct uvm_vmem_op, handle, 0xffffffffu, ENOENT),
  };
  setup();
  control(W.uvm, &commands[BIND]);
  for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
    struct uvm_vmem_op op = op_map(RES + MIB(3), A, 4, 2, 0);
    poke(&op, &rows[i]);
    bind_wrong_op(W.uvm, rows[i].what, RES, op, rows[i].want);
  }
  bind_wrong_op(W.uvm, "a released handle", RES, op_map(RES + MIB(3), GONE, 0, 1, 0), ESTALE);
  bind_wrong_op(W.uvm, "2 MB pages at 64 KB", RES, op_map(RES + MIB(2) + UNIT, BIG, 0, 1, 0), EINVAL);
  bind_wrong_op(W.uvm, "pages smaller than the reservation's", COARSE, op_map(COARSE, A, 0, 2, 0), EINVAL);
  bind_wrong_op(W.uvm, "an address between the reservation's pages", COARSE, op_unmap(COARSE + UNIT, 1, 0), EINVAL);
  control(W.uvm, &commands[BIND]);
}

static void bind_unmap_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_op, flags, UVM_VMEM_OP_READ_ONLY, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, flags, UVM_VMEM_OP_REPLACE, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, flags, UVM_VMEM_OP_LARGE, EOPNOTSUPP),
      ROW(struct uvm_vmem_op, handle, 1, EINVAL),
      ROW(struct uvm_vmem_op, first, 1, EINVAL),
      ROW(struct uvm_vmem_op, __reserved, 1u << 31, EINVAL),
      ROW(struct uvm_vmem_op, count, 0, EINVAL),
      ROW(struct uvm_vmem_op, count, 0xffffffffu, ERANGE),
      ROW(struct uvm_vmem_op, addr, RES + 4096, EINVAL),
      ROW(struct uvm_vmem_op, addr, RES - UNIT, ERANGE),
      ROW(struct uvm_vmem_op, addr, RES + RES_BYTES - UNIT, ERANGE),
      ROW(struct uvm_vmem_op, addr, 0xffffffffffff0000u, EOVERFLOW),
  };
  setup();
  for (size_t i = 0; i < ARRAY_SIZE(rows); i++) {
    struct uvm_vmem_op op = op_unmap(RES, 2, 0);
    poke(&op, &rows[i]);
    bind_wrong_op(W.uvm, rows[i].what, RES, op, rows[i].want);
  }
  control(W.uvm, &commands[BIND]);
}

static void bind_overlap(const char *what, struct uvm_vmem_op one, struct uvm_vmem_op two) {
  for (int turned = 0; turned < 2; turned++) {
    struct uvm_vmem_op ops[3] = {turned ? two : one, op_unmap(RES + MIB(2), 1, 0), turned ? one : two};
    struct uvm_vmem_bind b = {.size = sizeof(b), .start = RES, .ops = (uintptr_t)ops, .op_count = 3};
    if (!expect(W.uvm, what, UVM_VMEM_BIND, &b, EINVAL)) {
      bind_undo(NULL);
    } else if (b.out_failed_op != 0 && b.out_failed_op != 2) {
      fail("%s: out_failed_op is %u", what, b.out_failed_op);
    }
  }
}

static void bind_overlaps(void) {
  const uint64_t at = RES + MIB(20);
  setup();
  bind_overlap("the same page mapped twice", op_map(at, A, 4, 1, 0), op_map(at, A, 5, 1, 0));
  bind_overlap("the same mapping twice", op_map(at, A, 4, 1, 0), op_map(at, A, 4, 1, 0));
  bind_overlap("mapped and unmapped", op_map(at, A, 4, 2, 0), op_unmap(at, 2, 0));
  bind_overlap("unmapped twice", op_unmap(at, 8, 0), op_unmap(at, 8, 0));
  bind_overlap("the last unit of one is the first of the other", op_map(at, A, 4, 3, 0), op_map(at + 2 * UNIT, A, 8, 2, 0));
  bind_overlap("one within the other", op_unmap(at, 100, 0), op_map(at + 50 * UNIT, A, 4, 1, 0));
  bind_overlap("one over several slots", op_unmap(at, 1024 - 320, 0), op_map(RES + MIB(60), A, 4, 1, 0));
  bind_overlap("a large page and a small one in it", op_map(at, BIG, 0, 1, 0), op_map(at + 31 * UNIT, A, 4, 1, 0));
  control(W.uvm, &commands[BIND]);
}

/* The most operations that QUERY allows; the last one is carried out too. */
static void bind_most_operations(void) {
  setup();
  const uint32_t most = limits.out_max_bind_ops;
  const uint64_t bytes = (most * UNIT + SLOT - 1) & ~(SLOT - 1), last = SPARE + (most - 1) * UNIT;
  struct uvm_vmem_op *ops = calloc(most, sizeof(*ops));
  OK(vm_reserve(W.uvm, W.uuid[0], SPARE, bytes, 16, 0));
  for (uint32_t i = 0; i < most; i++) ops[i] = op_unmap(SPARE + i * UNIT, 1, 0);
  ops[most - 1] = op_map(last, A, 1, 1, 0);
  OK(vm_bind(W.uvm, SPARE, ops, most, NULL, NULL));
  EQ(gpu_xlate(&W, 0, last).out_pa, gpu_xlate(&W, 0, RES + UNIT).out_pa);
  OK(vm_free(W.uvm, SPARE, UVM_VMEM_FREE_UNMAP));
  free(ops);
}

static void bind_too_many_units(void) {
  uint32_t many;
  setup();
  /* The same 2 MB page at each slot, and two pages in the last operation: one slot more than the limit of units. */
  const uint64_t count = limits.out_max_bind_units / SLOT_UNITS, slots = count + 1;
  if (count > limits.out_max_bind_ops) SKIP("the unit limit needs too many operations");
  if (slots * SLOT > GIB(1) << 10) SKIP("the unit limit needs more than 1 TB of addresses");
  struct uvm_vmem_op *ops = calloc(count, sizeof(*ops));
  OK(vm_reserve(W.uvm, W.uuid[0], SPARE, slots * SLOT, 16, 0));
  OK(vm_create(W.uvm, W.uuid[0], 21, 2, 0, &many));
  for (uint64_t i = 0; i < count; i++) ops[i] = op_map(SPARE + i * SLOT, many, 0, 1 + (i + 1 == count), 0);
  struct uvm_vmem_bind b = {.size = sizeof(b), .start = SPARE, .ops = (uintptr_t)ops, .op_count = (uint32_t)count};
  expect(W.uvm, "MAPs that together name more units than the limit", UVM_VMEM_BIND, &b, EMSGSIZE);
  EQ(b.out_failed_op, count - 1);
  /* Unmapped units count like mapped units, in one operation or in several. */
  const uint32_t most = limits.out_max_bind_units;
  for (unsigned sparse = 0; sparse < 2; sparse++) {
    const uint32_t flags = sparse ? UVM_VMEM_OP_SPARSE : 0;
    if (sparse && !(limits.out_capabilities & UVM_VMEM_CAP_SPARSE)) break;
    bind_wrong_op(W.uvm, "UNMAP of more units than the limit", SPARE, op_unmap(SPARE, most + 1, flags), EMSGSIZE);
    struct uvm_vmem_op two[2] = {op_unmap(SPARE, most, flags), op_unmap(SPARE + most * UNIT, 1, 0)};
    b = (struct uvm_vmem_bind){.size = sizeof(b), .start = SPARE, .ops = (uintptr_t)two, .op_count = 2};
    expect(W.uvm, "UNMAPs that together name more units than the limit", UVM_VMEM_BIND, &b, EMSGSIZE);
  }
  OK(vm_unmap(W.uvm, SPARE, SPARE, most, 0));
  OK(vm_free(W.uvm, SPARE, UVM_VMEM_FREE_UNMAP));
  OK(vm_release(W.uvm, many));
  free(ops);
}

static void wait_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_wait, flags, 1, EOPNOTSUPP),
      ROW(struct uvm_vmem_wait, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_wait, ticket, ~0ull, ENOENT),
      ROW(struct uvm_vmem_wait, ticket, 1ull << 40, ENOENT),
  };
  setup();
  run_rows(W.uvm, &commands[WAIT], rows, ARRAY_SIZE(rows));
}

static void stat_fields(void) {
  static const struct row rows[] = {
      ROW(struct uvm_vmem_stat, flags, UVM_VMEM_STAT_GPU | 2, EOPNOTSUPP),
      ROW(struct uvm_vmem_stat, flags, 1u << 31, EOPNOTSUPP),
      ROW(struct uvm_vmem_stat, flags, 0, EINVAL), /* a uuid that is not asked about */
      ROW(struct uvm_vmem_stat, gpu_uuid, NO_GPU, ENODEV),
      ROW(struct uvm_vmem_stat, gpu_uuid, 0, ENODEV),
  };
  setup();
  run_rows(W.uvm, &commands[STAT], rows, ARRAY_SIZE(rows));
}

/* Checks that a failed command leaves the output fields unchanged. */
static void left_alone(const char *what, unsigned long number, void *argument, size_t size, int want) {
  char before[256];
  memcpy(before, argument, size);
  expect(W.uvm, what, number, argument, want);
  if (memcmp(before, argument, size)) fail("%s: the struct has changed", what);
}

/* A failed BIND writes both out_failed_op and out_ticket (0), unless it fails before its flags are checked. */
static void bind_outputs(const char *what, struct uvm_vmem_bind b, int want, uint32_t failed_op, uint64_t ticket) {
  b.out_failed_op = 4711;
  b.out_ticket = 4711;
  expect(W.uvm, what, UVM_VMEM_BIND, &b, want);
  if (b.out_failed_op != failed_op) fail("%s: out_failed_op is %u", what, b.out_failed_op);
  if (b.out_ticket != ticket) fail("%s: out_ticket is %llu", what, (unsigned long long)b.out_ticket);
}

static void outputs_of_a_failure(void) {
  static const uint8_t nobody[UVM_VMEM_UUID_BYTES] = {NO_GPU};
  struct {
    struct uvm_vmem_bind bind;
    uint64_t tail;
  } longer = {.tail = 1};
  struct uvm_vmem_query q;
  struct uvm_vmem_create c;
  struct uvm_vmem_stat s, t;
  struct uvm_vmem_bind b;
  setup();
  memset(&q, 0x5a, sizeof(q));
  q.size = sizeof(q);
  q.flags = UVM_VMEM_QUERY_GPU;
  q.__reserved = 0;
  memcpy(q.gpu_uuid, nobody, sizeof(nobody));
  left_alone("QUERY that fails", UVM_VMEM_QUERY, &q, sizeof(q), ENODEV);
  create_valid(&c);
  c.out_handle = 4711;
  c.page_shift = 21;
  c.count = limits.out_max_create_pages;
  left_alone("CREATE without enough memory", UVM_VMEM_CREATE, &c, sizeof(c), ENOSPC);
  memset(&s, 0x5a, sizeof(s));
  s.size = sizeof(s);
  s.flags = UVM_VMEM_STAT_GPU;
  memcpy(s.gpu_uuid, nobody, sizeof(nobody));
  left_alone("STAT that fails", UVM_VMEM_STAT, &s, sizeof(s), ENODEV);
  /* A command that succeeds overwrites all output fields. */
  memcpy(s.gpu_uuid, W.uuid[0], sizeof(s.gpu_uuid));
  OK(vm_call(W.uvm, UVM_VMEM_STAT, &s));
  OK(vm_stat(W.uvm, W.uuid[0], &t));
  EQ(memcmp(&s, &t, sizeof(s)), 0);
  bind_valid(&b);
  b.flags = 2;
  bind_outputs("BIND with an undefined flag", b, EOPNOTSUPP, ~0u, 0);
  bind_valid(&b);
  b.ops = 0;
  bind_outputs("BIND without operations", b, EFAULT, ~0u, 0);
  bind_valid(&b);
  b.flags = UVM_VMEM_BIND_ASYNC;
  bind_ops[2].addr = RES - UNIT;
  bind_outputs("BIND whose third operation is wrong", b, ERANGE, 2, 0);
  /* A command that fails before its flags are checked writes nothing. */
  bind_valid(&longer.bind);
  longer.bind.size = sizeof(longer);
  left_alone("BIND with a dirty tail", UVM_VMEM_BIND, &longer, sizeof(longer), E2BIG);
}

static void unknown_commands(void) {
  char argument[256] = {0};
  setup();
  *(uint32_t *)argument = sizeof(argument);
  expect(W.uvm, "command 0x88", _IO(UVM_VMEM_IOCTL_TYPE, 0x88), argument, ENOTTY);
  expect(W.uvm, "command 0xff", _IO(UVM_VMEM_IOCTL_TYPE, 0xff), argument, ENOTTY);
}

static void handles_of_another_descriptor(void) {
  struct world other;
  struct uvm_vmem_query q;
  uint32_t mine;
  setup();
  world_open(&other, 1);
  OK(vm_reserve(other.uvm, other.uuid[0], SPARE, MIB(4), 16, 0));
  EQ(vm_map(other.uvm, SPARE, SPARE, A, 0, 1, 0), -ENOENT);
  EQ(vm_release(other.uvm, A), -ENOENT);
  EQ(vm_free(other.uvm, RES, 0), -ENOENT);
  OK(vm_create(other.uvm, other.uuid[0], 16, 1, 0, &mine));
  OK(vm_release(other.uvm, mine));
  OK(vm_query(other.uvm, NULL, &q));
  world_close(&other);
  control(W.uvm, &commands[BIND]);
}

static void a_gpu_without_an_address_space(void) {
  struct world other;
  uint32_t handle;
  setup();
  world_open(&other, 1);
  OK(softgpu_uvm_unregister_space(&other.c, 0));
  EQ(vm_reserve(other.uvm, other.uuid[0], SPARE, MIB(4), 16, 0), -ENODEV);
  OK(softgpu_uvm_unregister_gpu(&other.c, 0));
  EQ(vm_create(other.uvm, other.uuid[0], 16, 1, 0, &handle), -ENODEV);
  world_close(&other);
}

MAIN(TEST(sizes), TEST(pointers), TEST(read_only_structs), TEST(query_fields), TEST(reserve_fields),
     TEST(reserve_where_uvm_has_a_range), TEST(free_fields), TEST(create_fields), TEST(release_fields),
     TEST(bind_fields), TEST(bind_map_fields), TEST(bind_unmap_fields), TEST(bind_overlaps),
     TEST(bind_most_operations),
     TEST(bind_too_many_units), TEST(wait_fields), TEST(stat_fields), TEST(outputs_of_a_failure),
     TEST(unknown_commands),
     TEST(handles_of_another_descriptor), TEST(a_gpu_without_an_address_space))
