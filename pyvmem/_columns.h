/* SPDX-License-Identifier: MIT */
/* Per-slot work of a step of the KV cache, in C: see _native/columns.py. cffi reads the part after the
 * includes (see _build.py). Arrays have one item per slot unless stated otherwise. */
#include <vmem.h>

#define PYVMEM_WAIT_COUNTS 40 /* the last bounded item: 2^39 ns, nine minutes */

/* Limits on the pages that a growth maps beyond a request's need; runs.py explains it. Pages are per tensor. */
struct pyvmem_runs {
  double fraction;  /* length of a request's next run as a fraction of its pages */
  uint64_t longest; /* maximum pages per run; 1: growth maps only what is needed */
  uint64_t last;    /* number of pages of a full slot */
  uint64_t tensors;
  uint64_t free; /* number of pages that can be mapped now */
  uint64_t left; /* number of mappings that growth may still use; 0: unlimited */
};

/* Layout of slots, pages and rows. */
struct pyvmem_place {
  uint64_t base;
  uint64_t slot_bytes;
  uint64_t tensor_bytes;
  uint64_t tensors;
  uint64_t page_size;
  uint64_t row_bytes;
  uint64_t max_rows;
  uint64_t overread; /* rows mapped past every length */
  uint64_t guard;    /* further rows mapped past the length at which a prefill ends */
  uint64_t prefill;  /* a step that adds more rows than this is a prefill */
  uint64_t fixed;    /* pages per request, regardless of its length; 0: the number depends on the rows */
  uint64_t block;    /* pages per large entry of the GPU's page tables, if slots use them; else 0 */
  uint32_t op_flags; /* flags of the POPULATE operations */
  uint32_t reserved;
};

/* Flags of a slot; see slots.py. */
#define PYVMEM_FREE 1        /* can be given to a request */
#define PYVMEM_STALE 2       /* holds shared or moved pages of an earlier owner, or lacks its first pages */
#define PYVMEM_LOSING 4      /* must wait for a batch that unmaps before it can grow */
#define PYVMEM_BUSY 8        /* a batch in flight uses its addresses */
#define PYVMEM_CACHED 16     /* has mapped pages but no owner */
#define PYVMEM_LEFT 32       /* active, with mapped pages beyond the granted pages, and no batch in flight */
#define PYVMEM_PLAIN 64      /* active, and can grow with a map call alone */
#define PYVMEM_ROWS_LOST 128 /* its pages stay mapped until the cache is closed */

struct pyvmem_columns {
  uint64_t *capacity; /* number of rows that fit in the granted pages */
  uint64_t *calls;    /* number of map calls since the slot's pages were last joined */
  uint64_t *joined;   /* end of the joined pages */
  uint8_t *named;     /* 1: the slot's length was not 0 in the last scan */
  void **row;         /* the slots: objects of `pyvmem_row_type` */
  void **found;       /* scratch */
  uint32_t count;     /* slots */
};

struct pyvmem_wait { /* clocks at the start of a wait */
  uint64_t start_ns, driver_ns;
};

/* One growth. Arrays have one item per growing slot, and space for all slots. */
struct pyvmem_growth {
  uint32_t *slot;
  uint64_t *pages;  /* granted afterwards */
  uint64_t *goal;   /* pages mapped after the growth, at least `pages` */
  uint64_t *mapped; /* pages mapped before the growth */
  uint64_t *head;
  uint64_t *large_end; /* afterwards */
  uint64_t count;
  uint64_t ops;     /* operations written */
  uint64_t lacking; /* number of missing pages: needed but not mapped */
  uint64_t added;   /* number of pages that the growth maps: the missing pages and the surplus */
  uint64_t reused;  /* number of newly granted pages that were already mapped */
};

/* A group of layers that grows. */
struct pyvmem_grown {
  const struct pyvmem_place *place;
  struct pyvmem_columns *columns;
  const struct pyvmem_growth *growth;
};

/* Statistics of the waits of cache calls for the driver or for GPU work. */
struct pyvmem_waits {
  uint64_t count, ns;
  uint64_t last_ns;   /* waits of the last step only */
  uint64_t driver_ns; /* part spent in the driver */
  /* histogram: item k counts waits of more than 2^(k-1) and at most 2^k ns; the last item counts all longer waits */
  uint64_t lengths[PYVMEM_WAIT_COUNTS];
};

void *pyvmem_row_type(void);
uint32_t pyvmem_pick(const struct pyvmem_columns *columns, uint32_t all, uint32_t none, uint32_t *found);
uint32_t pyvmem_fit(const struct pyvmem_columns *columns, uint32_t all, uint32_t none, uint64_t pages);
uint64_t pyvmem_spare(const struct pyvmem_columns *columns);
int64_t pyvmem_scan(void *list, const struct pyvmem_place *place, const struct pyvmem_columns *columns,
                    const uint64_t *held, uint64_t *rows, uint64_t *needs, uint32_t *beyond, uint64_t *total);
uint64_t pyvmem_goals(const struct pyvmem_runs *runs, const struct pyvmem_columns *columns, uint64_t count,
                      const uint64_t *pages, const uint64_t *mapped, const uint64_t *head, uint64_t *goals);
uint32_t pyvmem_near(const struct pyvmem_place *place, const struct pyvmem_columns *columns, const uint64_t *held,
                     uint64_t ahead, uint64_t room, uint64_t *needs, uint32_t *found);
int pyvmem_plan(const struct pyvmem_runs *runs, const struct pyvmem_place *place, const struct pyvmem_columns *columns,
                const uint64_t *needs, struct pyvmem_growth *growth, struct vmem_op *ops);
void pyvmem_unmaps(const struct pyvmem_place *place, uint64_t count, const uint64_t *slot, const uint64_t *low,
                   const uint64_t *high, struct vmem_op *ops);
int pyvmem_extend(struct pyvmem_outcome *outcome, vmem_t vm, const struct pyvmem_grown *groups, uint64_t count,
                  const struct vmem_op *ops, uint64_t n, struct pyvmem_waits *waits, struct pyvmem_wait *wait);
void pyvmem_wait_add(struct pyvmem_waits *waits, uint64_t ns, uint64_t driver_ns);
void pyvmem_wait_begin(struct pyvmem_wait *wait, vmem_t vm);
void pyvmem_wait_end(struct pyvmem_waits *waits, const struct pyvmem_wait *wait, vmem_t vm);
