/* SPDX-License-Identifier: MIT */
#include "base/available.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fd.h"

#define TEXT 16384 /* longer than memory.stat, and than /proc/self/cgroup with one long path */

/* Allowances for other memory that the kernel charges to a group: page tables, which need at worst 4 KiB for each
 * scattered page of 64 KiB, for at most the 65,530 mappings that a process may have by default; and this process's
 * heap. */
#define TABLES_PART 16
#define TABLES_MOST (256ull << 20)
#define HEAP_PART 16 /* 1/16 of the limit */
#define HEAP_MOST (16ull << 20)

enum file { LIMIT, USAGE, LIMIT_TOO, USAGE_TOO, STAT, FILES };

static const char *const names[2][FILES] = {
    {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes",
     "memory.stat"},
    {"memory.max", "memory.current", "memory.high", "memory.current", "memory.stat"},
};

/* Fields of memory.stat, for a group and its descendants. The second column is the part that cannot be reclaimed
 * immediately, the third is tmpfs. */
static const struct {
  const char *gives[3], *keeps[2], *tmpfs;
} stats[2] = {
    {{"total_inactive_file", "total_active_file", NULL}, {"total_dirty", "total_writeback"}, "total_shmem"},
    {{"inactive_file", "active_file", "slab_reclaimable"}, {"file_dirty", "file_writeback"}, "shmem"},
};

struct level {
  int fds[FILES]; /* -1: no such file */
};

/* The process's group and its ancestors, as far as a mount shows them. */
struct groups {
  bool two; /* control groups of version 2 */
  size_t n;
  struct level levels[];
};

struct vm_available {
  const char *root;
  int meminfo, own; /* own: /proc/self/cgroup; -1: no such file */
  char *group;      /* the line of `own` from which `groups` was built; "": none */
  struct groups *groups;
};

/* ---- files ------------------------------------------------------------------------------------ */

static bool starved(void) { return errno == EMFILE || errno == ENFILE || errno == ENOMEM; }

/* Returns -1 if the file does not exist; sets *err if the attempt to open it does not show whether it exists. */
static int open_file(const char *path, int *err) {
  int fd = vm_above_stdio(open(path, O_RDONLY | O_CLOEXEC));
  if (fd < 0 && starved()) *err = vm_fail(-ENOMEM, "%s: %s", path, strerror(errno));
  return fd;
}

static void close_file(int fd) {
  if (fd >= 0) close(fd);
}

/* Reads the file from its beginning; false if it cannot be read or does not fit. */
static bool read_text(int fd, char text[TEXT]) {
  size_t n = 0;
  ssize_t got = 0;
  if (fd < 0) return false;
  do {
    got = pread(fd, text + n, TEXT - n, (off_t)n);
    if (got > 0) n += (size_t)got;
  } while ((got > 0 && n < TEXT) || (got < 0 && errno == EINTR));
  if (got < 0 || n == TEXT) return false;
  text[n] = 0;
  return n > 0;
}

/* Finds the number after `name` at the beginning of a line. */
static bool find_number(const char *text, const char *name, uint64_t *out) {
  size_t length = strlen(name);
  for (const char *at = text; (at = strstr(at, name)); at += length)
    if ((at == text || at[-1] == '\n') && (at[length] == ' ' || at[length] == ':'))
      return *out = strtoull(at + length + 1, NULL, 10), true;
  return false;
}

/* Reads a file that holds one number; "max" is UINT64_MAX. */
static bool read_number(int fd, uint64_t *out) {
  char text[TEXT];
  char *end;
  if (!read_text(fd, text)) return false;
  if (!strncmp(text, "max", 3)) return *out = UINT64_MAX, true;
  *out = strtoull(text, &end, 10);
  return end != text;
}

/* ---- where the group is ----------------------------------------------------------------------- */

/* Finds the line of /proc/self/cgroup for memory in `text`: version 1's if that has the memory controller, else version
 * 2's "0::/path". NULL: none. */
static char *memory_line(char *text, bool *two) {
  char *found = NULL, *save = NULL;
  for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
    char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!path) continue;
    for (char *name = controllers + 1; name < path; name += strcspn(name, ",:") + 1)
      if (strcspn(name, ",:") == 6 && !strncmp(name, "memory", 6)) return *two = false, line;
    if (path == controllers + 1) *two = true, found = line;
  }
  return found;
}

static const char *path_of(const char *line) { return strchr(strchr(line, ':') + 1, ':') + 1; }

/* The kernel writes spaces and backslashes in paths as \040. */
static void decode(char *text) {
  char *to = text;
  for (const char *from = text; *from; to++) {
    unsigned code;
    if (*from == '\\' && sscanf(from + 1, "%3o", &code) == 1) {
      *to = (char)code;
      from += 4;
    } else {
      *to = *from++;
    }
  }
  *to = 0;
}

/* Returns the part of `path` below `root`; NULL if it is not below. */
static const char *below(const char *root, const char *path) {
  size_t n = strlen(root);
  if (n == 1) return path;
  return !strncmp(root, path, n) && (!path[n] || path[n] == '/') ? path + n : NULL;
}

static bool has_option(const char *options, const char *wanted) {
  size_t n = strlen(wanted);
  for (const char *at = options; (at = strstr(at, wanted)); at += n)
    if ((at == options || at[-1] == ',') && (!at[n] || at[n] == ',' || at[n] == '\n')) return true;
  return false;
}

/* Finds the mount that shows the most ancestors of the group, and the group's path below it. False if no mount shows
 * it. */
static bool find_mount(const struct vm_available *a, bool two, const char *group, char **at, const char **rest) {
  char path[4096], *line = NULL;
  size_t size = 0, shown = SIZE_MAX;
  FILE *f;
  snprintf(path, sizeof(path), "%s/proc/self/mountinfo", a->root);
  if (!(f = fopen(path, "re"))) return false;
  *at = NULL;
  while (getline(&line, &size, f) > 0) {
    char *dash = strstr(line, " - "), *root = NULL, *place = NULL, type[32] = "", *options;
    const char *own;
    if (!dash || sscanf(dash, " - %31s", type) != 1 || strcmp(type, two ? "cgroup2" : "cgroup")) continue;
    options = strrchr(dash, ' ') + 1;
    if (!two && !has_option(options, "memory")) continue;
    if (sscanf(line, "%*s %*s %*s %ms %ms", &root, &place) == 2) {
      decode(root);
      decode(place);
      own = below(root, group);
      if (own && strlen(root) < shown) {
        shown = strlen(root);
        *rest = own;
        free(*at);
        *at = place;
        place = NULL;
      }
    }
    free(root);
    free(place);
  }
  free(line);
  fclose(f);
  return *at != NULL;
}

static void close_groups(struct groups *g) {
  if (!g) return;
  for (size_t i = 0; i < g->n; i++)
    for (size_t k = 0; k < FILES; k++) close_file(g->levels[i].fds[k]);
  free(g);
}

/* Opens the files of the directory `path` and of its `depth` nearest parents. */
static struct groups *open_levels(char *path, size_t depth, bool two, int *err) {
  struct groups *g = malloc(sizeof(*g) + (depth + 1) * sizeof(*g->levels));
  if (!g) {
    *err = vm_fail(-ENOMEM, "no heap memory for %zu control groups", depth + 1);
    return NULL;
  }
  g->two = two;
  for (g->n = 0; g->n <= depth && !*err; g->n++) {
    size_t end = strlen(path);
    for (size_t k = 0; k < FILES; k++) {
      g->levels[g->n].fds[k] = -1;
      if (*err) continue;
      strcpy(path + end, "/");
      strcpy(path + end + 1, names[two][k]);
      g->levels[g->n].fds[k] = open_file(path, err);
    }
    path[end] = 0;
    if (g->n < depth) *strrchr(path, '/') = 0;
  }
  if (!*err) return g;
  close_groups(g);
  return NULL;
}

/* Sets *err if descriptors or heap memory are short; NULL without *err means that no group is visible. */
static struct groups *open_groups(const struct vm_available *a, const char *line, bool two, int *err) {
  const char *group = *line ? path_of(line) : "", *rest = "";
  char *mount = NULL, *path;
  struct groups *g = NULL;
  size_t depth = 0, most;
  errno = 0;
  if (*line && !find_mount(a, two, group, &mount, &rest)) {
    if (starved()) *err = vm_fail(-ENOMEM, "/proc/self/mountinfo: %s", strerror(errno));
    return NULL;
  }
  /* Without /proc, try the directory where a container with its own group finds the files. */
  if (!mount) mount = strdup(two ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory");
  most = strlen(a->root) + (mount ? strlen(mount) : 0) + strlen(rest) + 64;
  if (!mount || !(path = malloc(most))) {
    *err = vm_fail(-ENOMEM, "no heap memory for the path of a control group");
  } else {
    if (!strcmp(rest, "/")) rest = "";
    for (const char *c = rest; *c; c++) depth += *c == '/';
    snprintf(path, most, "%s%s%s", a->root, mount, rest);
    g = open_levels(path, depth, two, err);
    free(path);
  }
  free(mount);
  return g;
}

/* If the process has moved to another group, opens that group's files. If descriptors are short, keeps the old files
 * and retries in the next call. */
static int follow(struct vm_available *a) {
  char text[TEXT], *line = NULL, *name;
  bool two = true;
  int err = 0;
  struct groups *now, *before = a->groups;
  if (read_text(a->own, text)) line = memory_line(text, &two);
  if (!line) line = strcpy(text, "");
  if (a->group && !strcmp(a->group, line)) return 0;
  if (!(line = strdup(line))) return vm_fail(-ENOMEM, "no heap memory for the name of a control group");
  if (*line || a->own >= 0) {
    now = *line ? open_groups(a, line, two, &err) : NULL;
  } else {
    now = open_groups(a, "", true, &err);
    if (!err && now->levels[0].fds[LIMIT] < 0) {
      close_groups(now);
      now = open_groups(a, "", false, &err);
    }
  }
  if (err) {
    free(line);
    return err;
  }
  name = a->group;
  /* Set before the old groups are freed: a signal handler may fork here, and the child closes what it finds. */
  a->group = line;
  a->groups = now;
  free(name);
  close_groups(before);
  return 0;
}

/* ---- open, read ------------------------------------------------------------------------------- */

int vm_available_open(const char *root, struct vm_available **out) {
  struct vm_available *a = calloc(1, sizeof(*a));
  char path[4096];
  int err = 0;
  if (!a) return vm_fail(-ENOMEM, "no heap memory for the limits of this process");
  a->root = root;
  a->meminfo = a->own = -1;
  snprintf(path, sizeof(path), "%s/proc/meminfo", root);
  a->meminfo = open_file(path, &err);
  snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
  if (!err) a->own = open_file(path, &err);
  if (!err) err = follow(a);
  if (err) {
    vm_available_close(a);
    a = NULL;
  }
  *out = a;
  return err;
}

void vm_available_close(struct vm_available *a) {
  if (!a) return;
  close_file(a->meminfo);
  close_file(a->own);
  close_groups(a->groups);
  free(a->group);
  free(a);
}

static uint64_t least_of(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t tables_of(uint64_t pages) { return least_of(pages / TABLES_PART, TABLES_MOST); }

/* Returns how many bytes of page cache and the like the kernel reclaims immediately when the group reaches its
 * limit. */
static int64_t reclaimable(const struct level *level, bool two, uint64_t held) {
  char text[TEXT];
  uint64_t n;
  int64_t all = 0;
  if (!read_text(level->fds[STAT], text)) return 0;
  for (size_t i = 0; i < 3 && stats[two].gives[i]; i++)
    if (find_number(text, stats[two].gives[i], &n)) all += (int64_t)n;
  for (size_t i = 0; i < 2; i++)
    if (find_number(text, stats[two].keeps[i], &n)) all -= (int64_t)n;
  if (find_number(text, stats[two].tmpfs, &n) && held > n) all -= (int64_t)(held - n + tables_of(held - n));
  return all > 0 ? all : 0;
}

/* Returns the part of a group's remaining memory that may hold pages. */
static uint64_t for_pages(int64_t left, uint64_t limit) {
  int64_t heap = (int64_t)least_of(limit / HEAP_PART, HEAP_MOST);
  if (left <= heap) return 0;
  left -= heap;
  return (uint64_t)left - tables_of((uint64_t)left);
}

static void read_level(const struct level *level, bool two, uint64_t held, uint64_t enough, uint64_t *free_bytes,
                       uint64_t *total) {
  uint64_t limit, usage, least = UINT64_MAX, now;
  int64_t left = INT64_MAX;
  for (int k = LIMIT; k <= LIMIT_TOO; k += LIMIT_TOO - LIMIT) {
    if (!read_number(level->fds[k], &limit) || limit > INT64_MAX || !read_number(level->fds[k + 1], &usage)) continue;
    least = least_of(least, limit);
    if ((int64_t)limit - (int64_t)usage < left) left = (int64_t)limit - (int64_t)usage;
  }
  if (least == UINT64_MAX) return;
  now = for_pages(left, least);
  if (now < enough && now < *free_bytes) {
    left += reclaimable(level, two, held);
    now = for_pages(left < (int64_t)least ? left : (int64_t)least, least);
  }
  *free_bytes = least_of(*free_bytes, now);
  *total = least_of(*total, least);
}

void vm_available_read(struct vm_available *a, uint64_t held, uint64_t enough, uint64_t *free_bytes,
                       uint64_t *total_bytes) {
  char text[TEXT];
  struct sysinfo all;
  uint64_t kib;
  bool known = !sysinfo(&all);
  *free_bytes = *total_bytes = UINT64_MAX;
  if (read_text(a->meminfo, text) && find_number(text, "MemAvailable", &kib))
    *free_bytes = kib << 10;
  else if (known) /* excludes reclaimable caches */
    *free_bytes = ((uint64_t)all.freeram + all.bufferram) * all.mem_unit;
  if (known) *total_bytes = (uint64_t)all.totalram * all.mem_unit;
  VM_UNDO(follow(a));
  for (size_t i = 0; a->groups && i < a->groups->n; i++)
    read_level(&a->groups->levels[i], a->groups->two, held, enough, free_bytes, total_bytes);
}

int vm_available_now(uint64_t *free_bytes, uint64_t *total_bytes) {
  struct vm_available *a;
  int err = vm_available_open("", &a);
  if (err) return err;
  vm_available_read(a, 0, UINT64_MAX, free_bytes, total_bytes);
  vm_available_close(a);
  return 0;
}
