/* SPDX-License-Identifier: MIT */
/*
 * Runs the operations of a KV cache in the library's two ways of mapping on a GPU: one batch of the patched driver, or
 * a call of the stock driver for each run of pages. Both map the same pages at the same addresses in the same steps;
 * the cost is counted.
 *
 * The shape is Qwen2.5-1.5B's: 28 layers, a K and a V tensor each (LAYERS= takes fewer), 2 heads x 128 x 2 bytes per
 * token, so that a page of 64 KB holds 128 tokens. Parameters: LAYERS, REQUESTS, TOKENS. Each case is printed as a line
 * "COUNTS {json}".
 */
#include "abi.h"
#include "kcheck.h"
#include "world.h"

#define TOKEN_BYTES 512
#define PAGE_TOKENS (UNIT / TOKEN_BYTES)
#define RES 0x700000000000ull
#define PROMOTED 0x7c0000000000ull /* a reservation that may have 2 MB entries */
#define PREFIX_TOKENS 10240
#define MOST_OPS 65536

static struct world W;
static bool stock;
static unsigned requests, tensors, tokens;
static uint64_t calls;

/* Both ways number physical pages alike: page n is in an object, or at an offset in the stock driver's allocation. */
static struct softgpu_alloc memory;
static uint32_t *object_of; /* the object of each group; a group is one page for each tensor */

struct costs {
  uint64_t calls, tables;
  struct softgpu_counters gpu;
};

static struct costs now(void) {
  struct costs c = {.calls = calls, .gpu = gpu_counters(&W, 0)};
  c.tables = c.gpu.tables_now;
  return c;
}

static void publish(const char *name, const struct costs *before) {
  struct costs after = now();
  struct softgpu_counters d = softgpu_counters_since(&before->gpu, &after.gpu);
  printf("COUNTS {\"case\": \"%s\", \"way\": \"%s\", \"requests\": %u, \"tensors\": %u, \"tokens\": %u, "
         "\"ioctls\": %llu, \"pushes\": %llu, "
         "\"invalidates\": %llu, \"entries\": %llu, \"directory_entries\": %llu, \"tables\": %lld}\n",
         name, stock ? "stock" : "uvm", requests, tensors, tokens, (unsigned long long)(after.calls - before->calls),
         (unsigned long long)d.pushes, (unsigned long long)d.invalidates, (unsigned long long)d.pte_writes,
         (unsigned long long)d.pde_writes, (long long)(after.tables - before->tables));
}

static uint64_t tensor_bytes(void) {
  const uint64_t most = tokens > PREFIX_TOKENS ? tokens : PREFIX_TOKENS;
  return (most * TOKEN_BYTES + SLOT - 1) / SLOT * SLOT;
}

/* The address of a request's token in a tensor. Request number `requests` is the one that begins with a prefix. */
static uint64_t place(unsigned request, unsigned tensor, unsigned token) {
  return RES + ((uint64_t)tensor * (requests + 1) + request) * tensor_bytes() + (uint64_t)token * TOKEN_BYTES;
}

static uint64_t all_bytes(void) {
  return (uint64_t)tensors * (requests + 1) * tensor_bytes();
}

static struct uvm_vmem_op batch[MOST_OPS];
static unsigned batched;

static void submit(void) {
  if (!batched) return;
  calls++;
  int result = vm_bind(W.uvm, batch[0].addr < PROMOTED ? RES : PROMOTED, batch, batched, NULL, NULL);
  if (result) hopeless("BIND", result);
  batched = 0;
}

/* Maps page `tensor` of group `group`: adds it to the batch, or calls the stock driver. */
static void map(uint64_t at, unsigned group, unsigned tensor, unsigned flags) {
  if (!stock) {
    if (batched == MOST_OPS) submit();
    batch[batched++] = op_map(at, object_of[group], tensor, 1, flags);
    return;
  }
  calls++;
  int result = softgpu_uvm_map_external(&W.c, 0, at, UNIT, ((uint64_t)group * tensors + tensor) * UNIT, &memory,
                                        flags & UVM_VMEM_OP_READ_ONLY);
  if (result) hopeless("UVM_MAP_EXTERNAL_ALLOCATION", result);
}

static void unmap(uint64_t at, uint64_t bytes) {
  if (!stock) {
    if (batched == MOST_OPS) submit();
    batch[batched++] = op_unmap(at, bytes / UNIT, 0);
    return;
  }
  calls++;
  int result = softgpu_uvm_unmap_external(&W.c, 0, at, bytes);
  if (result) hopeless("UVM_UNMAP_EXTERNAL", result);
}

/* A request gets its next page in every tensor. The library keeps pages in slabs, so creating them does not count. */
static void grow(unsigned request, unsigned token, unsigned group) {
  for (unsigned t = 0; t < tensors; t++) map(place(request, t, token), group, t, 0);
}

static unsigned groups_of(unsigned length) {
  return (length + PAGE_TOKENS - 1) / PAGE_TOKENS;
}

static void run(void) {
  const unsigned each = groups_of(tokens), groups = requests * each, prefix = groups_of(PREFIX_TOKENS);
  const unsigned more = prefix > each ? prefix - each : 0, all = groups + each + more;
  struct softgpu_alloc large = {0};
  uint32_t large_object = 0;
  struct costs before;
  world_open(&W, 1);
  object_of = calloc(all, sizeof(*object_of));
  calls = 0;
  if (stock) {
    OK(softgpu_alloc(W.dev, 0, (uint64_t)all * tensors * UNIT, UNIT, 0, &memory));
    OK(softgpu_alloc(W.dev, 0, tensors * tensor_bytes(), SLOT, 0, &large));
    OK(softgpu_uvm_create_external(&W.c, RES, all_bytes()));
    OK(softgpu_uvm_create_external(&W.c, PROMOTED, tensors * tensor_bytes()));
  } else {
    OK(vm_reserve(W.uvm, W.uuid[0], RES, all_bytes(), 16, 0));
    OK(vm_reserve(W.uvm, W.uuid[0], PROMOTED, tensors * tensor_bytes(), 16, UVM_VMEM_RESERVE_BIG));
    for (unsigned g = 0; g < all; g++) OK(vm_create(W.uvm, W.uuid[0], 16, tensors, 0, &object_of[g]));
    OK(vm_create(W.uvm, W.uuid[0], 21, tensors * tensor_bytes() / SLOT, 0, &large_object));
  }

  /* One token per step for all requests, whose last pages differ in fill: in each step about two need a page. */
  before = now();
  for (unsigned step = 0; step < tokens; step++) {
    for (unsigned r = step % PAGE_TOKENS; r < requests; r += PAGE_TOKENS) {
      grow(r, step / PAGE_TOKENS * PAGE_TOKENS, r * each + step / PAGE_TOKENS);
    }
    submit();
  }
  publish("growth", &before);
  EQ(gpu_scan(&W, 0, RES, all_bytes()).out_bytes, (uint64_t)groups * tensors * UNIT);

  /* Request 0 grows to the length of a prefix; a new request maps its pages read-only, in the order they were grown. */
  for (unsigned g = 0; g < more; g++) grow(0, (each + g) * PAGE_TOKENS, groups + each + g);
  submit();
  before = now();
  for (unsigned g = 0; g < prefix; g++) {
    const unsigned group = g < each ? g : groups + g;
    for (unsigned t = 0; t < tensors; t++) map(place(requests, t, g * PAGE_TOKENS), group, t, UVM_VMEM_OP_READ_ONLY);
  }
  submit();
  publish("prefix", &before);
  before = now();
  for (unsigned t = 0; t < tensors; t++) unmap(place(requests, t, 0), (uint64_t)prefix * UNIT);
  submit();
  publish("prefix ends", &before);

  /* The first pages of request 0 move to other physical pages, at the same addresses. */
  before = now();
  for (unsigned g = 0; g < each; g++) {
    for (unsigned t = 0; t < tensors; t++) map(place(0, t, g * PAGE_TOKENS), groups + g, t, UVM_VMEM_OP_REPLACE);
  }
  submit();
  publish("move", &before);

  /* The full 2 MB parts of a request become 2 MB pages. */
  for (unsigned g = 0; g < each; g++) {
    for (unsigned t = 0; t < tensors; t++) map(PROMOTED + t * tensor_bytes() + g * UNIT, g, t, 0);
  }
  submit();
  before = now();
  for (unsigned t = 0; t < tensors; t++) {
    for (uint64_t part = 0; part < (uint64_t)tokens * TOKEN_BYTES / SLOT; part++) {
      const uint64_t number = t * (tensor_bytes() / SLOT) + part, at = PROMOTED + t * tensor_bytes() + part * SLOT;
      if (!stock) {
        batch[batched++] = op_map(at, large_object, number, 1, UVM_VMEM_OP_REPLACE);
        continue;
      }
      calls++;
      OK(softgpu_uvm_map_external(&W.c, 0, at, SLOT, number * SLOT, &large, false));
    }
  }
  submit();
  publish("promotion", &before);
  EQ(gpu_xlate(&W, 0, PROMOTED).out_page_size, tokens * TOKEN_BYTES >= SLOT ? SLOT : UNIT);

  /* A request with small pages finishes. */
  before = now();
  for (unsigned t = 0; t < tensors; t++) unmap(place(1, t, 0), (uint64_t)each * UNIT);
  submit();
  publish("a request ends", &before);
  EQ(gpu_scan(&W, 0, RES, all_bytes()).out_bytes, (uint64_t)(groups - each + more) * tensors * UNIT);
  if (stock) {
    OK(softgpu_uvm_free(&W.c, RES, all_bytes()));
    OK(softgpu_uvm_free(&W.c, PROMOTED, tensors * tensor_bytes()));
    OK(softgpu_free(W.dev, large.out_client, large.out_handle));
    OK(softgpu_free(W.dev, memory.out_client, memory.out_handle));
  }
  free(object_of);
  world_close(&W);
}

static void uvm_way(void) {
  stock = false;
  run();
}

static void stock_way(void) {
  stock = true;
  run();
}

int main(int argc, char **argv) {
  static const struct test tests[] = {TEST(uvm_way), TEST(stock_way)};
  for (int i = 1; i < argc; i++) {
    if (strchr(argv[i], '=')) putenv(argv[i]);
  }
  requests = parameter("REQUESTS", 8);
  tensors = 2 * parameter("LAYERS", 28);
  tokens = parameter("TOKENS", 8192);
  if (requests < 2 ||
      !tensors ||
      tokens % PAGE_TOKENS || tokens == 0)
    hopeless("LAYERS >= 1, REQUESTS >= 2, TOKENS a multiple of 128", -EINVAL);
  return run_tests(tests, ARRAY_SIZE(tests), argc, argv);
}
