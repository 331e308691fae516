/* SPDX-License-Identifier: MIT */
#include "backend/nvidia/rm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/error.h"
#include "base/fd.h"

enum { FIRST_HANDLE = 0xcaf00001 };

static bool is_suspended(uint32_t status) { return status == NV_ERR_BUSY_RETRY || status == NV_ERR_GPU_NOT_FULL_POWER; }

int rm_ioctl(int fd, unsigned long request, void *arg) {
  struct vm_suspend_retry retry = {0};
  int err;
  do err = ioctl(fd, request, arg) ? -errno : 0;
  while (err == -EINTR || (err == -EAGAIN && vm_suspend_wait(&retry)));
  return err;
}

static int call(int fd, unsigned long request, void *arg, uint32_t *status) {
  struct vm_suspend_retry retry = {0};
  int err;
  if (!status) return rm_ioctl(fd, request, arg);
  do {
    *status = NV_UNTOUCHED;
    err = rm_ioctl(fd, request, arg);
  } while (!err && is_suspended(*status) && vm_suspend_wait(&retry));
  return err || *status != NV_UNTOUCHED ? err : -RM_UNTOUCHED;
}

/* A copy of a structure for a driver whose layout may differ. It ends at LARGEST; the BEHIND bytes after it are 0. */
enum { LARGEST = sizeof(struct uvm_map_256), BEHIND = 16 << 10 };
struct guarded {
  uint8_t bytes[LARGEST + BEHIND];
};

static void *guard(struct guarded *g, const void *arg, uint32_t bytes) {
  memset(g, 0, sizeof(*g));
  return memcpy(&g->bytes[LARGEST - bytes], arg, bytes);
}

/* Copies the structure back; false if the driver wrote past its end. */
static bool unguard(const struct guarded *g, void *arg, uint32_t bytes) {
  const uint8_t *behind = &g->bytes[LARGEST];
  memcpy(arg, &g->bytes[LARGEST - bytes], bytes);
  return !behind[0] && !memcmp(behind, behind + 1, BEHIND - 1);
}

static int call_guarded(int fd, unsigned long request, void *arg, uint32_t bytes, uint32_t *status) {
  struct guarded g;
  uint8_t *copy = guard(&g, arg, bytes);
  size_t at = status ? (size_t)((uint8_t *)status - (uint8_t *)arg) : 0;
  int err = call(fd, request, copy, status ? (uint32_t *)(void *)(copy + at) : NULL);
  return unguard(&g, arg, bytes) || (err && err != -RM_UNTOUCHED) ? err : -RM_BEHIND;
}

int rm_call(const struct rm *rm, int fd, unsigned long request, void *arg, uint32_t bytes, uint32_t *status) {
  return rm->careful ? call_guarded(fd, request, arg, bytes, status) : call(fd, request, arg, status);
}

/* Calls rm_call with a structure that holds the address of another structure in *inner, and guards both. */
static int call_nested(const struct rm *rm, unsigned long request, void *arg, uint32_t bytes, uint32_t *status,
                       uint64_t *inner, uint32_t inner_bytes) {
  void *ours = (void *)(uintptr_t)*inner;
  struct guarded g;
  int err;
  if (!rm->careful || !ours) return rm_call(rm, rm->fd, request, arg, bytes, status);
  *inner = (uint64_t)(uintptr_t)guard(&g, ours, inner_bytes);
  err = rm_call(rm, rm->fd, request, arg, bytes, status);
  return unguard(&g, ours, inner_bytes) || err ? err : -RM_BEHIND;
}

static bool under_wsl(void) {
  struct utsname u;
  return access("/dev/dxg", F_OK) == 0 || (uname(&u) == 0 && strstr(u.release, "icrosoft"));
}

int rm_open_node(const char *path, int *fd) {
  int err;
  do *fd = vm_above_stdio(open(path, O_RDWR | O_CLOEXEC));
  while (*fd < 0 && errno == EINTR);
  if (*fd >= 0) return 0;
  err = errno;
  if (err == EACCES || err == EPERM) return vm_fail(-EACCES, "no permission to open %s", path);
  if (under_wsl()) return vm_fail(-ENODEV, "WSL has no %s: its driver lacks the resource manager interface", path);
  if (err == ENOENT || err == ENXIO || err == ENODEV)
    return vm_fail(-ENODEV,
                   "%s is missing: no NVIDIA driver is loaded, or this container was not given "
                   "the node",
                   path);
  if (err == EMFILE || err == ENFILE) return vm_fail(-ENOMEM, "%s: %s", path, strerror(err));
  return vm_fail(-ENODEV, "%s: %s", path, strerror(err));
}

static bool parse_version(const char *text, struct nv_version *v) {
  int n;
  memset(v, 0, sizeof(*v));
  n = sscanf(text, "%u.%u.%u", &v->major, &v->minor, &v->patch);
  return n >= 2 && v->major >= 100;
}

/* The control node works in any container, where /proc/driver may not be mounted. */
static int read_version(struct rm *rm) {
  struct nv_api_version query = {.cmd = NV_API_VERSION_QUERY};
  char line[256] = "", *save = NULL;
  FILE *f;
  if (call_guarded(rm->fd, NV_IOCTL(NV_ESC_CHECK_VERSION_STR, sizeof(query)), &query, sizeof(query), NULL) == 0) {
    query.text[sizeof(query.text) - 1] = 0;
    if (parse_version(query.text, &rm->version)) {
      memcpy(rm->version_text, query.text, sizeof(rm->version_text));
      return 0;
    }
  }
  f = fopen("/proc/driver/nvidia/version", "re");
  if (f) {
    if (!fgets(line, sizeof(line), f)) line[0] = 0;
    fclose(f);
  }
  for (char *w = strtok_r(line, " \t\n", &save); w; w = strtok_r(NULL, " \t\n", &save))
    if (strspn(w, "0123456789.") == strlen(w) && parse_version(w, &rm->version)) {
      snprintf(rm->version_text, sizeof(rm->version_text), "%s", w);
      return 0;
    }
  return vm_fail(-ENODEV, "neither /dev/nvidiactl nor /proc/driver/nvidia/version reports the driver's "
                          "version");
}

static int check_version(struct rm *rm) {
  const char *wish = getenv("VMEM_UNKNOWN_DRIVER");
  bool refuse = wish && strcmp(wish, "refuse") == 0;
  if (wish && *wish && !refuse && strcmp(wish, "try"))
    return vm_fail(-EINVAL, "VMEM_UNKNOWN_DRIVER is \"%.32s\": expected \"try\" or \"refuse\"", wish);
  if (rm->version.major < NV_FIRST_BRANCH)
    return vm_fail(-ENODEV, "driver %s is too old: %u or later is needed", rm->version_text, NV_FIRST_BRANCH);
  rm->careful = !nv_branch_of(rm->version);
  if (rm->careful && refuse)
    return vm_fail(-ENODEV,
                   "driver %s is of a branch that this library does not know (%u to %u), and "
                   "VMEM_UNKNOWN_DRIVER=refuse",
                   rm->version_text, NV_FIRST_BRANCH, NV_LAST_BRANCH);
  return 0;
}

void rm_describe(const struct rm *rm, char *text, size_t size) {
  const struct nv_branch *branch = nv_branch_of(rm->version);
  text[0] = 0;
  if (rm->careful)
    snprintf(text, size,
             "driver %s is of a branch that this library does not know (%u to %u): it is used with the layouts of %u, "
             "and every call is checked",
             rm->version_text, NV_FIRST_BRANCH, NV_LAST_BRANCH, NV_LAST_BRANCH);
  else if (branch && branch->evidence == NV_TABLE)
    snprintf(text, size, "driver %s, whose layouts are known only from gVisor's table", rm->version_text);
}

/* Returns the ioctl's negative errno or 0; *status receives RM's own status. */
static int alloc_raw(struct rm *rm, uint32_t parent, uint32_t class_id, void *params, uint32_t bytes, uint32_t *object,
                     uint32_t *status) {
  struct nvos64 a = {.root = rm->client,
                     .parent = parent,
                     .object = *object,
                     .class_id = class_id,
                     .params = (uint64_t)(uintptr_t)params,
                     .params_size = bytes};
  int err;
  if (rm->abi.alloc_bytes == sizeof(struct nvos64_530)) {
    struct nvos64_530 old = {a.root, a.parent, a.object, a.class_id, a.params, 0, 0, 0};
    err = call_nested(rm, NV_IOCTL(NV_ESC_RM_ALLOC, sizeof(old)), &old, sizeof(old), &old.status, &old.params, bytes);
    a.object = old.object;
    a.status = old.status;
  } else {
    err = call_nested(rm, NV_IOCTL(NV_ESC_RM_ALLOC, sizeof(a)), &a, sizeof(a), &a.status, &a.params, bytes);
  }
  *object = a.object;
  *status = a.status;
  return err;
}

static void start(struct rm *rm) {
  memset(rm, 0, sizeof(*rm));
  rm->fd = -1;
  atomic_init(&rm->next_handle, FIRST_HANDLE);
}

int rm_open(struct rm *rm) {
  int err;
  start(rm);
  err = rm_open_node("/dev/nvidiactl", &rm->fd);
  if (!err) err = read_version(rm);
  if (!err) err = check_version(rm);
  if (err)
    rm_close(rm);
  else
    rm->abi = nv_abi_for(rm->version);
  return err;
}

int rm_open_again(struct rm *rm, const struct rm *before) {
  start(rm);
  rm->version = before->version;
  memcpy(rm->version_text, before->version_text, sizeof(rm->version_text));
  rm->abi = before->abi;
  rm->careful = before->careful;
  return rm_open_node("/dev/nvidiactl", &rm->fd);
}

int rm_client(struct rm *rm) {
  static const char what[] = "the RM's client allocation";
  uint32_t status = 0;
  int err = alloc_raw(rm, 0, NV01_ROOT_CLIENT, NULL, 0, &rm->client, &status);
  return err ? rm_fail_errno(err, 0, 0, what) : rm_fail(status, 0, 0, what);
}

void rm_close(struct rm *rm) {
  if (rm->fd >= 0) close(rm->fd);
  rm->fd = -1;
  rm->client = 0;
}

int rm_alloc(struct rm *rm, uint32_t parent, uint32_t class_id, void *params, uint32_t bytes, uint32_t *object,
             const char *what) {
  uint32_t status = 0;
  int err;
  *object = atomic_fetch_add_explicit(&rm->next_handle, 1, memory_order_relaxed);
  err = alloc_raw(rm, parent, class_id, params, bytes, object, &status);
  return err ? rm_fail_errno(err, 0, 0, what) : rm_fail(status, 0, 0, what);
}

int rm_free(struct rm *rm, uint32_t parent, uint32_t object) {
  struct nvos00 f = {.root = rm->client, .parent = parent, .object = object};
  int err = rm_call(rm, rm->fd, NV_IOCTL(NV_ESC_RM_FREE, sizeof(f)), &f, sizeof(f), &f.status);
  return err ? rm_fail_errno(err, 0, 0, "the RM's free") : rm_fail(f.status, 0, 0, "the RM's free");
}

int rm_control(struct rm *rm, uint32_t object, uint32_t cmd, void *params, uint32_t bytes, const char *what) {
  struct nvos54 c = {
      .client = rm->client, .object = object, .cmd = cmd, .params = (uint64_t)(uintptr_t)params, .params_size = bytes};
  int err = call_nested(rm, NV_IOCTL(NV_ESC_RM_CONTROL, sizeof(c)), &c, sizeof(c), &c.status, &c.params, bytes);
  return err ? rm_fail_errno(err, 0, 0, what) : rm_fail(c.status, 0, 0, what);
}

int rm_cards(const struct rm *rm, struct nv_card_info cards[NV_MAX_CARDS]) {
  const uint32_t bytes = NV_MAX_CARDS * sizeof(cards[0]);
  memset(cards, 0, bytes);
  return rm_call(rm, rm->fd, NV_IOCTL(NV_ESC_CARD_INFO, bytes), cards, bytes, NULL);
}

int rm_find_gpu(struct rm *rm, const uint8_t uuid[16], struct rm_gpu *gpu) {
  struct nv0000_uuid_info info = {.flags = NV0000_UUID_BINARY};
  struct nv_card_info cards[NV_MAX_CARDS];
  int err;
  memcpy(info.uuid, uuid, 16);
  err = rm_control(rm, rm->client, NV0000_GET_UUID_INFO, &info, sizeof(info), "looking the GPU up by its UUID");
  if (err) return err;
  err = rm_cards(rm, cards);
  if (err) return rm_fail_errno(err, 0, 0, "listing the cards");
  for (int i = 0; i < NV_MAX_CARDS; i++)
    if (cards[i].valid && cards[i].gpu_id == info.gpu_id) {
      *gpu = (struct rm_gpu){info.gpu_id, info.device_instance, cards[i].minor_number};
      return 0;
    }
  return vm_fail(-ENODEV, "the driver lists no card with id 0x%x", info.gpu_id);
}
