/* SPDX-License-Identifier: MIT */
/* Finds CUDA's /dev/nvidia-uvm among this process's descriptors. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "backend/nvidia/nvidia.h"
#include "base/error.h"
#include "base/fd.h"

int nvidia_check_uvm_node(void) {
  if (access(UVM_NODE, R_OK | W_OK) == 0) return 0;
  if (errno == EACCES || errno == EPERM) return vm_fail(-EACCES, "no permission to open " UVM_NODE);
  return vm_fail(-ENODEV, UVM_NODE " is missing: the nvidia-uvm module is not loaded, or this "
                                   "container was not given the node");
}

/* Compares device numbers, since a container may show the node under another path; compares names if the node is not
 * visible. */
static bool is_uvm(int fd, const char *link, bool have_node, dev_t node) {
  struct stat st;
  if (have_node && fstat(fd, &st) == 0) return S_ISCHR(st.st_mode) && st.st_rdev == node;
  return strcmp(link, UVM_NODE) == 0;
}

/* True if a process that this user may inspect has UVM's node open. */
static bool has_uvm(int proc, const char *pid, bool have_node, dev_t node) {
  char path[64];
  DIR *dir;
  struct dirent *entry;
  bool found = false;
  int fd;
  snprintf(path, sizeof(path), "%.16s/fd", pid);
  fd = openat(proc, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  dir = fd < 0 ? NULL : fdopendir(fd);
  if (!dir) {
    if (fd >= 0) close(fd);
    return false;
  }
  while (!found && (entry = readdir(dir))) {
    char link[64];
    struct stat st;
    ssize_t length = readlinkat(dirfd(dir), entry->d_name, link, sizeof(link) - 1);
    if (length <= 0) continue;
    link[length] = 0;
    found = have_node && fstatat(dirfd(dir), entry->d_name, &st, 0) == 0 ? S_ISCHR(st.st_mode) && st.st_rdev == node
                                                                         : strcmp(link, UVM_NODE) == 0;
  }
  closedir(dir);
  return found;
}

static void process_name(int proc, const char *pid, char *name, size_t size) {
  char path[64];
  ssize_t length = 0;
  int fd;
  snprintf(path, sizeof(path), "%.16s/comm", pid);
  fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    length = read(fd, name, size - 1);
    close(fd);
  }
  name[length > 0 ? length : 0] = 0;
  name[strcspn(name, "\n")] = 0;
}

void nvidia_uvm_users(char *text, size_t size) {
  DIR *dir = opendir("/proc");
  struct dirent *entry;
  struct stat st;
  bool have_node = stat(UVM_NODE, &st) == 0 && S_ISCHR(st.st_mode);
  size_t used = 0;
  text[0] = 0;
  while (dir && (entry = readdir(dir)) && used + 32 < size) {
    char name[32];
    long pid = strtol(entry->d_name, NULL, 10);
    if (pid <= 0 || pid == getpid() || !has_uvm(dirfd(dir), entry->d_name, have_node, st.st_rdev)) continue;
    process_name(dirfd(dir), entry->d_name, name, sizeof(name));
    used += (size_t)snprintf(text + used, size - used, "%s%ld %.16s", used ? ", " : "", pid, name);
  }
  if (!used) snprintf(text, size, "no other process that this user may see");
  if (dir) closedir(dir);
}

int nvidia_find_uvm(struct nvidia *n, int (*trial)(struct nvidia *n, void *arg), void *arg) {
  DIR *dir = opendir("/proc/self/fd");
  int err = -ENODEV;
  bool tried = false;
  struct dirent *entry;
  struct stat st;
  bool have_node = stat(UVM_NODE, &st) == 0 && S_ISCHR(st.st_mode);
  if (!dir) return vm_fail(-ENODEV, "/proc/self/fd: %s", strerror(errno));
  while ((entry = readdir(dir))) {
    char link[64];
    ssize_t length;
    int fd = (int)strtol(entry->d_name, NULL, 10);
    length = readlinkat(dirfd(dir), entry->d_name, link, sizeof(link) - 1);
    if (length <= 0 || fd == dirfd(dir)) continue;
    link[length] = 0;
    if (!is_uvm(fd, link, have_node, st.st_rdev)) continue;
    tried = true;
    /* Duplicate it first: its owner may close it during the trial. */
    fd = vm_duplicate(fd);
    if (fd < 0) {
      err = vm_fail(-ENOMEM, "duplicating a descriptor: %s", strerror(errno));
      continue;
    }
    n->uvm_fd = fd;
    err = trial(n, arg);
    if (!err) break;
    close(fd);
    n->uvm_fd = -1;
  }
  closedir(dir);
  return tried ? err : vm_fail(-ENODEV, "this process has no open " UVM_NODE ": CUDA runs without UVM here");
}
