/* SPDX-License-Identifier: MIT */
/* Description: the memory that this process may still allocate, computed from substitutes for the kernel's files and,
 * where this process may create control groups, in real ones of version 1 or 2. */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "base/available.h"
#include "check.h"

/* ---- substitutes for the kernel's files --------------------------------------------------------- */

static char root[64];

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw) {
  (void)st;
  (void)type;
  (void)ftw;
  return remove(path);
}

static void clear_root(void) {
  if (*root) nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static bool write_path(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
  if (fd >= 0) close(fd);
  return ok;
}

/* Writes a file below root; creates missing directories. */
static bool put(const char *path, const char *text) {
  char full[512];
  snprintf(full, sizeof(full), "%s%s", root, path);
  for (char *slash = strchr(full + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
    *slash = 0;
    mkdir(full, 0755);
    *slash = '/';
  }
  return write_path(full, text);
}

static bool put_number(const char *folder, const char *file, uint64_t number) {
  char path[256], text[32];
  snprintf(path, sizeof(path), "%s/%s", folder, file);
  snprintf(text, sizeof(text), "%llu\n", (unsigned long long)number);
  return put(path, text);
}

/* Writes the files of a version 2 group: its limit (0: "max"), its usage, and the inactive, active and dirty file pages
 * included in that. */
static bool put_group(const char *folder, uint64_t max, uint64_t used, uint64_t inactive, uint64_t active,
                      uint64_t dirty) {
  char path[256], text[512];
  bool ok = max ? put_number(folder, "memory.max", max) : true;
  snprintf(path, sizeof(path), "%s/memory.max", folder);
  if (!max) ok = put(path, "max\n");
  snprintf(path, sizeof(path), "%s/memory.stat", folder);
  snprintf(text, sizeof(text),
           "anon 4096\nfile 999999999999\nshmem 999999999999\nfile_dirty %llu\nfile_writeback 0\n"
           "inactive_anon 999999999999\ninactive_file %llu\nactive_file %llu\nunevictable 999999999999\n"
           "workingset_refault_file 77\nslab_reclaimable 0\n",
           (unsigned long long)dirty, (unsigned long long)inactive, (unsigned long long)active);
  return ok && put(path, text) && put_number(folder, "memory.current", used);
}

static bool begin(const char *cgroup, const char *mounts) {
  clear_root();
  strcpy(root, "/tmp/vmem-available-XXXXXX");
  if (!mkdtemp(root)) return false;
  atexit(clear_root);
  return put("/proc/meminfo", "MemTotal: 1073741824 kB\nMemFree: 1 kB\nMemAvailable:   67108864 kB\nBuffers: 5 kB\n") &&
         put("/proc/self/cgroup", cgroup) && put("/proc/self/mountinfo", mounts);
}

#define MOUNT2 "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
#define MOUNT1 "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
#define CPU1 "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
#define MACHINE GIB(64)

/* The bytes of pages that still fit when `left` bytes remain below `limit`. */
static uint64_t pages_of(uint64_t left, uint64_t limit) {
  uint64_t heap = limit / 16 < MIB(16) ? limit / 16 : MIB(16), tables;
  if (left <= heap) return 0;
  tables = (left - heap) / 16;
  return left - heap - (tables < MIB(256) ? tables : MIB(256));
}

static struct vm_available *a;
static uint64_t total, held;

static uint64_t now(void) {
  uint64_t bytes;
  vm_available_read(a, held, UINT64_MAX, &bytes, &total);
  return bytes;
}

static void machine_alone(void) {
  CHECK(begin("0::/\n", MOUNT2));
  OK(vm_available_open(root, &a));
  EQ(now(), MACHINE);
  CHECK(put("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 0 kB\n"));
  EQ(now(), 0);
  vm_available_close(a);
  EQ(unlink(strcat(strcpy((char[128]){0}, root), "/proc/meminfo")), 0);
  OK(vm_available_open(root, &a));
  CHECK(now() > 0 && now() <= total); /* from sysinfo */
  vm_available_close(a);
}

static void cache_is_free(void) {
  CHECK(begin("0::/a b\n", "41 31 0:38 / /sys/fs/cg\\040roup rw - cgroup2 none rw\n" CPU1));
  CHECK(put_group("/sys/fs/cg roup/a b", GIB(1), MIB(1000), 0, 0, 0));
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(MIB(24), GIB(1)));
  EQ(total, GIB(1));
  /* A model file has just been read, once or several times; dirty pages do not count as reclaimable. */
  CHECK(put_group("/sys/fs/cg roup/a b", GIB(1), MIB(1000), MIB(500), MIB(300), MIB(100)));
  EQ(now(), pages_of(MIB(724), GIB(1)));
  CHECK(put_group("/sys/fs/cg roup/a b", GIB(1), GIB(1), MIB(5), 0, MIB(6)));
  EQ(now(), 0);
  vm_available_close(a);
}

/* The kernel's list sizes may be stale: memory that this process has allocated since may have come from the cache. */
static void stale_cache(void) {
  CHECK(begin("0::/box\n", MOUNT2));
  CHECK(put_group("/sys/fs/cgroup/box", GIB(1), GIB(1), 0, 0, 0));
  CHECK(put("/sys/fs/cgroup/box/memory.stat", "shmem 335544320\ninactive_file 524288000\n")); /* 320, 500 MiB */
  OK(vm_available_open(root, &a));
  held = MIB(320);
  EQ(now(), pages_of(MIB(500), GIB(1)));
  held += MIB(160);
  EQ(now(), pages_of(MIB(500 - 160 - 10), GIB(1)));
  held += MIB(320);
  EQ(now(), 0);
  held = 0;
  vm_available_close(a);
}

static void every_ancestor_counts(void) {
  CHECK(begin("0::/pods/one/box\n", MOUNT2));
  CHECK(put_group("/sys/fs/cgroup/pods/one/box", 0, MIB(10), 0, 0, 0));
  CHECK(put_group("/sys/fs/cgroup/pods/one", GIB(4), GIB(1), 0, 0, 0));
  CHECK(put_group("/sys/fs/cgroup/pods", GIB(8), GIB(7), MIB(100), 0, 0));
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(GIB(1) + MIB(100), GIB(8)));
  EQ(total, GIB(4));
  /* Limits change. */
  CHECK(put_group("/sys/fs/cgroup/pods/one", GIB(2), MIB(1500), 0, 0, 0));
  EQ(now(), pages_of(MIB(548), GIB(2)));
  CHECK(put_group("/sys/fs/cgroup/pods/one/box", MIB(100), MIB(10), 0, 0, 0));
  EQ(now(), pages_of(MIB(90), MIB(100)));
  CHECK(put_group("/sys/fs/cgroup/pods/one/box", 0, MIB(10), 0, 0, 0));
  CHECK(put_group("/sys/fs/cgroup/pods/one", 0, MIB(10), 0, 0, 0));
  CHECK(put_group("/sys/fs/cgroup/pods", 0, MIB(10), 0, 0, 0));
  EQ(now(), MACHINE);
  /* memory.high throttles: it is a limit. */
  CHECK(put_number("/sys/fs/cgroup/pods/one", "memory.high", GIB(1)));
  vm_available_close(a);
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(GIB(1) - MIB(10), GIB(1)));
  vm_available_close(a);
}

static void moved(void) {
  CHECK(begin("0::/one\n", MOUNT2));
  CHECK(put_group("/sys/fs/cgroup/one", GIB(1), 0, 0, 0, 0));
  CHECK(put_group("/sys/fs/cgroup/two/three", GIB(2), 0, 0, 0, 0));
  CHECK(put("/sys/fs/cgroup/two/memory.max", "max\n"));
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(GIB(1), GIB(1)));
  CHECK(put("/proc/self/cgroup", "0::/two/three\n"));
  EQ(now(), pages_of(GIB(2), GIB(2)));
  CHECK(put("/proc/self/cgroup", "0::/elsewhere\n")); /* not visible from here */
  EQ(now(), MACHINE);
  CHECK(put("/proc/self/cgroup", "0::/one\n"));
  EQ(now(), pages_of(GIB(1), GIB(1)));
  vm_available_close(a);
}

static void version_1(void) {
  const char *folder = "/sys/fs/cgroup/memory/docker/x", *above = "/sys/fs/cgroup/memory/docker";
  CHECK(begin("9:name=systemd:/docker/x\n4:hugetlb,memory:/docker/x\n0::/docker/x\n", CPU1 MOUNT2 MOUNT1));
  CHECK(put_number(folder, "memory.limit_in_bytes", GIB(2)));
  CHECK(put_number(folder, "memory.usage_in_bytes", GIB(1)));
  CHECK(put("/sys/fs/cgroup/memory/docker/x/memory.stat",
            "cache 1\ninactive_file 888888888888\nactive_file 888888888888\ntotal_inactive_file 1048576\n"
            "total_active_file 2097152\ntotal_dirty 1048576\ntotal_writeback 0\ntotal_unevictable 9999999999\n"));
  CHECK(put_number(above, "memory.limit_in_bytes", INT64_MAX / 4096 * 4096));
  CHECK(put_number(above, "memory.usage_in_bytes", GIB(1)));
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(GIB(1) + MIB(2), GIB(2)));
  EQ(total, GIB(2));
  CHECK(put_number(above, "memory.limit_in_bytes", GIB(1) + MIB(512)));
  EQ(now(), pages_of(MIB(512), GIB(1) + MIB(512)));
  vm_available_close(a);
  /* The limit on memory plus swap counts, even if the limit on memory alone leaves more. */
  CHECK(put_number(folder, "memory.memsw.limit_in_bytes", GIB(3)));
  CHECK(put_number(folder, "memory.memsw.usage_in_bytes", GIB(3) - MIB(64)));
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(MIB(66), GIB(2)));
  vm_available_close(a);
}

/* A container without a cgroup namespace: the mount shows only the container's group, under its name on the host. */
static void mount_of_a_part(void) {
  CHECK(begin("4:memory:/docker/x/y\n", "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
                                        "36 31 0:32 /docker /host/memory ro - cgroup cgroup rw,memory\n"));
  CHECK(put_number("/host/memory/x/y", "memory.limit_in_bytes", GIB(3)));
  CHECK(put_number("/host/memory/x/y", "memory.usage_in_bytes", GIB(1)));
  CHECK(put_number("/host/memory", "memory.limit_in_bytes", GIB(2)));
  CHECK(put_number("/host/memory", "memory.usage_in_bytes", GIB(1)));
  OK(vm_available_open(root, &a));
  EQ(now(), pages_of(GIB(1), GIB(2))); /* uses the mount that shows more of the parent groups */
  vm_available_close(a);
  CHECK(begin("4:memory:/docker/xy\n", "35 31 0:32 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"));
  CHECK(put_number("/sys/fs/cgroup/memory", "memory.limit_in_bytes", GIB(3)));
  CHECK(put_number("/sys/fs/cgroup/memory", "memory.usage_in_bytes", GIB(1)));
  OK(vm_available_open(root, &a));
  EQ(now(), MACHINE); /* another's limit */
  vm_available_close(a);
}

static void without_proc(void) {
  char path[128];
  for (int two = 0; two < 2; two++) {
    CHECK(begin("", ""));
    snprintf(path, sizeof(path), "%s/proc/self/cgroup", root);
    EQ(unlink(path), 0);
    if (two) {
      CHECK(put_group("/sys/fs/cgroup", GIB(2), GIB(1), 0, 0, 0));
    } else {
      CHECK(put_number("/sys/fs/cgroup/memory", "memory.limit_in_bytes", GIB(2)));
      CHECK(put_number("/sys/fs/cgroup/memory", "memory.usage_in_bytes", GIB(1)));
    }
    OK(vm_available_open(root, &a));
    EQ(now(), pages_of(GIB(1), GIB(2)));
    vm_available_close(a);
  }
}

static unsigned open_descriptors(void) {
  unsigned n = 0;
  DIR *dir = opendir("/proc/self/fd");
  while (dir && readdir(dir)) n++;
  if (dir) closedir(dir);
  return n;
}

/* Running out of descriptors makes open fail but has no effect later; no descriptor leaks. */
static void short_of_descriptors(void) {
  struct rlimit all, few;
  unsigned before, refused = 0;
  int low = open("/dev/null", O_RDONLY | O_CLOEXEC);
  CHECK(low >= 0 && !getrlimit(RLIMIT_NOFILE, &all));
  close(low);
  few = all;
  CHECK(begin("0::/one\n", MOUNT2));
  CHECK(put_group("/sys/fs/cgroup/one", GIB(1), 0, 0, 0, 0));
  CHECK(put_group("/sys/fs/cgroup/two", GIB(2), 0, 0, 0, 0));
  before = open_descriptors();
  for (few.rlim_cur = (rlim_t)low;; few.rlim_cur++) {
    int err;
    CHECK(!setrlimit(RLIMIT_NOFILE, &few));
    err = vm_available_open(root, &a);
    CHECK(!setrlimit(RLIMIT_NOFILE, &all));
    if (!err) break;
    EQ(err, -ENOMEM);
    EQ(open_descriptors(), before);
    CHECK(strstr(vmem_last_error(), "Too many open files"));
    refused++;
  }
  CHECK(refused >= 5);
  CHECK(put("/proc/self/cgroup", "0::/two\n"));
  CHECK(!setrlimit(RLIMIT_NOFILE, &few));
  total = now();
  CHECK(!setrlimit(RLIMIT_NOFILE, &all));
  EQ(total, pages_of(GIB(1), GIB(1))); /* still that of the previous group */
  EQ(now(), pages_of(GIB(2), GIB(2)));
  vm_available_close(a);
  EQ(open_descriptors(), before);
}

static void enough_is_not_counted_out(void) {
  uint64_t bytes;
  CHECK(begin("0::/one\n", MOUNT2));
  CHECK(put_group("/sys/fs/cgroup/one", GIB(1), MIB(500), MIB(100), 0, 0));
  OK(vm_available_open(root, &a));
  vm_available_read(a, 0, MIB(64), &bytes, &total);
  EQ(bytes, pages_of(MIB(524), GIB(1)));
  vm_available_read(a, 0, MIB(512), &bytes, &total);
  EQ(bytes, pages_of(MIB(624), GIB(1)));
  vm_available_close(a);
}

/* ---- real groups -------------------------------------------------------------------------------- */

/* Finds the directory of this process's group; returns false if no groups can be created there. */
static bool own_group(char *folder, size_t size, bool *two) {
  char line[700], found[512] = "";
  FILE *f = fopen("/proc/self/cgroup", "re");
  *two = true;
  while (f && fgets(line, sizeof(line), f)) {
    char *path = strchr(strchr(line, ':') + 1, ':') + 1;
    path[strcspn(path, "\n")] = 0;
    if (strstr(line, ":memory:")) {
      *two = false;
      snprintf(found, sizeof(found), "/sys/fs/cgroup/memory%s", path);
    } else if (!strncmp(line, "0::", 3) && *two) {
      snprintf(found, sizeof(found), "/sys/fs/cgroup%s", path);
    }
  }
  if (f) fclose(f);
  snprintf(folder, size, "%s/vmem-test-%d", found, (int)getpid());
  if (!*found || mkdir(folder, 0755)) return false;
  snprintf(line, sizeof(line), "%s/%s", folder, *two ? "memory.max" : "memory.limit_in_bytes");
  if (!access(line, W_OK)) return true;
  rmdir(folder);
  return false;
}

static bool set(const char *folder, const char *file, uint64_t number) {
  char path[600], text[32];
  snprintf(path, sizeof(path), "%s/%s", folder, file);
  snprintf(text, sizeof(text), "%llu", (unsigned long long)number);
  return write_path(path, text);
}

/* Fills the group, most of which is page cache, page by page until -ENOMEM; then raises its limit and continues. */
static int fill_group(const char *folder, const char *limit, uint64_t first, uint64_t then) {
  vmem_t vm = open_host(0);
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = PAGE};
  uint64_t va, mapped[2] = {0, 0};
  char name[] = "/tmp/vmem-cached-XXXXXX", *block = malloc(MIB(1));
  int fd = mkstemp(name), err = 0;
  if (!vm || !block || fd < 0) return 2;
  unlink(name);
  memset(block, 1, MIB(1));
  for (uint64_t i = 0; i < first / 2; i += MIB(1))
    if (write(fd, block, MIB(1)) != (ssize_t)MIB(1)) return 3;
  if (fsync(fd)) return 4;
  free(block);
  if (vMemReserve(vm, GIB(64), NULL, &va)) return 5;
  op.addr = va;
  for (int part = 0; part < 2; part++) {
    if (part && !set(folder, limit, then)) return 6;
    for (; !(err = vmem_batch(vm, &op, 1, NULL, 0, 0)); op.addr += MIB(2)) { /* each page needs its own page table */
      if (vmem_fill(vm, op.addr, PAGE, 7)) return 7;
      mapped[part] += PAGE;
    }
    if (err != -ENOMEM || !strstr(vmem_last_error(), "available")) return 8;
  }
  printf("%llu MiB of %llu, then %llu of %llu\n", (unsigned long long)(mapped[0] >> 20),
         (unsigned long long)(first >> 20), (unsigned long long)((mapped[0] + mapped[1]) >> 20),
         (unsigned long long)(then >> 20));
  if (mapped[0] < first / 2 || mapped[0] + mapped[1] < then * 3 / 4) return 9;
  return vmem_check(vm) || vmem_close(vm) ? 10 : 0;
}

#ifdef __SANITIZE_THREAD__
#define OWN_MEMORY "ThreadSanitizer's own memory grows in the group"
#else
#define OWN_MEMORY NULL
#endif

static void real_group(void) {
  char folder[560], inner[580];
  bool two;
  const char *limit;
  int status = -1;
  pid_t child;
  if (OWN_MEMORY || !own_group(folder, sizeof(folder), &two)) {
    printf("not run: %s\n", OWN_MEMORY ? OWN_MEMORY : "cannot make a control group with a memory limit here");
    return;
  }
  limit = two ? "memory.max" : "memory.limit_in_bytes";
  snprintf(inner, sizeof(inner), "%s/inner", folder); /* a group without a limit */
  if (two) write_path(strcat(strcpy((char[600]){0}, folder), "/cgroup.subtree_control"), "+memory");
  CHECK(set(folder, limit, MIB(192)) && !mkdir(inner, 0755));
  fflush(stdout);
  if (!(child = fork())) {
    if (!set(inner, "cgroup.procs", (uint64_t)getpid())) _exit(1);
    status = fill_group(folder, limit, MIB(192), MIB(384));
    fflush(stdout);
    _exit(status);
  }
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  for (int i = 0; i < 100 && rmdir(inner); i++) usleep(10000);
  rmdir(folder);
  CHECK(WIFEXITED(status)); /* not killed */
  EQ(WEXITSTATUS(status), 0);
}

MAIN(TEST(machine_alone), TEST(cache_is_free), TEST(stale_cache), TEST(every_ancestor_counts), TEST(moved),
     TEST(version_1), TEST(mount_of_a_part), TEST(without_proc), TEST(short_of_descriptors),
     TEST(enough_is_not_counted_out), TEST(real_group))
