/* SPDX-License-Identifier: MIT */
/*
 * backend/nvidia/abi.h - every structure, number and flag that we pass to NVIDIA's kernel modules, in one
 * place.
 *
 * Sources: NVIDIA's open kernel modules (github.com/NVIDIA/open-gpu-kernel-modules, MIT licensed).
 * Sizes, numbers and the offsets behind each change were compared with the compiled headers of each of the
 * 146 tags from 530.30.02 to 595.45.04. From 610.43.02 to 620.6 they come from gVisor's table
 * (pkg/sentry/devices/nvproxy/version.go, google/gvisor, August 2026), which its own checker compares with
 * the headers of each driver: none of the structures, classes and numbers that stock uses changed after
 * 590.44.01. The layouts are public but not promised to be stable. What changed:
 *
 *   first tag   change                                                  header
 *   530.30.02   the mapping's page size follows the alignment           uvm_map_external.c
 *   535.43.02   NVOS64_PARAMETERS gains paramsSize (40 -> 48 bytes)     nvos.h
 *   545.23.06   NV_MEMORY_ALLOCATION_PARAMS gains numaNode (120 -> 128) nvos.h
 *   545.23.06   NV2080_CTRL_FB_GET_INFO_V2: 54 -> 55 entries            ctrl2080fb.h
 *   550.40.53   UVM_MAP_EXTERNAL_ALLOCATION: 32 -> 256 GPU records      uvm_ioctl.h
 *   555.42.02   the virtualization mode's result, 4 -> 8 bytes          ctrl0080gpu.h
 *   560.28.03   NV2080_CTRL_FB_GET_INFO_V2: 55 -> 57 entries            ctrl2080fb.h
 *   580.65.06   the same: 57 -> 128 entries                             ctrl2080fb.h
 *   580.65.06   NV_VASPACE_ALLOCATION_PARAMETERS gains pasid (48 -> 56) nvos.h
 *   590.44.01   UVM_FREE loses its length                               uvm_ioctl.h
 *
 * uvm_*: kernel-open/nvidia-uvm/. nv-ioctl*.h: kernel-open/common/inc/. nv_escape.h:
 * src/nvidia/arch/nvalloc/unix/include/. All else: src/common/sdk/nvidia/inc/ with its folders
 * class/ and ctrl/. Names follow NVIDIA's, in lower case; "in" and "out" are the driver's side.
 */
#ifndef VMEM_NVIDIA_ABI_H
#define VMEM_NVIDIA_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>

#define ABI_SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "layout of " #type)
#define ABI_AT(type, field, at) _Static_assert(offsetof(type, field) == (at), "layout of " #type)

/* ---- which layout -------------------------------------------------------------------------- */

struct nv_version {
  unsigned major, minor, patch;
};

static inline bool nv_before(struct nv_version v, unsigned major, unsigned minor, unsigned patch) {
  if (v.major != major) return v.major < major;
  return v.minor != minor ? v.minor < minor : v.patch < patch;
}

/* Sources of a branch's layouts, and their first versions. A driver of any other branch is tested before
 * use (rm.h). scripts/readme_branches.py writes this table into docs/compatibility.md. */
enum nv_evidence {
  NV_TABLE = 1, /* gVisor's table */
  NV_SOURCES,   /* NVIDIA's sources */
  NV_RUN        /* NVIDIA's sources, and a run on hardware */
};
static const struct nv_branch {
  unsigned major;
  enum nv_evidence evidence;
  const char *versions;
} nv_branches[] = {
    {530, NV_SOURCES, "530.30.02 to 530.41.03"},
    {535, NV_SOURCES, "535.43.02 to 535.288.01"},
    {545, NV_SOURCES, "545.23.06 to 545.29.06"},
    {550, NV_SOURCES, "550.40.07 to 550.163.01"},
    {555, NV_SOURCES, "555.42.02 to 555.58.02"},
    {560, NV_SOURCES, "560.28.03 to 560.35.03"},
    {565, NV_SOURCES, "565.57.01 to 565.77"},
    {570, NV_SOURCES, "570.86.15 to 570.211.01"},
    {575, NV_SOURCES, "575.51.02 to 575.64.05"},
    {580, NV_RUN, "run 580.159.04, read 580.65.06 to 580.142"},
    {590, NV_SOURCES, "590.44.01 to 590.48.01"},
    {595, NV_SOURCES, "595.44.02 to 595.45.04"},
    {610, NV_TABLE, "610.43.02, 610.57.04"},
    {615, NV_TABLE, "615.15, 615.62"},
    {620, NV_TABLE, "620.6"},
};
enum { NV_BRANCHES = sizeof(nv_branches) / sizeof(nv_branches[0]) };
#define NV_FIRST_BRANCH (nv_branches[0].major)
#define NV_LAST_BRANCH (nv_branches[NV_BRANCHES - 1].major)

/* NULL: unknown. */
static inline const struct nv_branch *nv_branch_of(struct nv_version v) {
  for (unsigned i = 0; i < NV_BRANCHES; i++)
    if (nv_branches[i].major == v.major) return &nv_branches[i];
  return NULL;
}

struct nv_abi {
  uint32_t alloc_bytes;          /* size of struct nvos64 */
  uint32_t memparams_bytes;      /* size of struct nv_memory_params */
  uint32_t map_records;          /* GPU records in UVM_MAP_EXTERNAL_ALLOCATION */
  bool free_has_length;          /* UVM_FREE */
  uint32_t virtualization_bytes; /* size of struct nv0080_virtualization */
  uint32_t fb_entries;           /* entries of struct nv2080_fb_info */
  uint32_t va_space_bytes;       /* size of struct nv_va_space_params */
};

static inline struct nv_abi nv_abi_for(struct nv_version v) {
  return (struct nv_abi){
      .alloc_bytes = nv_before(v, 535, 0, 0) ? 40 : 48,
      .memparams_bytes = nv_before(v, 545, 0, 0) ? 120 : 128,
      .map_records = nv_before(v, 550, 40, 53) ? 32 : 256,
      .free_has_length = nv_before(v, 590, 0, 0),
      .virtualization_bytes = nv_before(v, 555, 0, 0) ? 4 : 8,
      .fb_entries = nv_before(v, 545, 0, 0)   ? 54
                    : nv_before(v, 560, 0, 0) ? 55
                    : nv_before(v, 580, 0, 0) ? 57
                                              : 128,
      .va_space_bytes = nv_before(v, 580, 0, 0) ? 48 : 56,
  };
}

/* ---- escapes of /dev/nvidiactl --------------------------------------------------------------
 * Numbers: kernel-open/common/inc/nv-ioctl-numbers.h,
 * src/nvidia/arch/nvalloc/unix/include/nv_escape.h */

#define NV_IOCTL(number, bytes) _IOC(_IOC_READ | _IOC_WRITE, 'F', (number), (bytes))
enum {
  NV_ESC_RM_FREE = 0x29,
  NV_ESC_RM_CONTROL = 0x2A,
  NV_ESC_RM_ALLOC = 0x2B,
  NV_ESC_CARD_INFO = 200,
  NV_ESC_CHECK_VERSION_STR = 210
};

/* nvos.h NVOS00_PARAMETERS */
struct nvos00 {
  uint32_t root, parent, object;
  uint32_t status; /* out */
};
ABI_SIZE(struct nvos00, 16);

/* nvos.h NVOS54_PARAMETERS */
struct nvos54 {
  uint32_t client, object, cmd, flags;
  uint64_t params;
  uint32_t params_size;
  uint32_t status; /* out */
};
ABI_SIZE(struct nvos54, 32);
ABI_AT(struct nvos54, params, 16);

/* nvos.h NVOS64_PARAMETERS, from 535 */
struct nvos64 {
  uint32_t root, parent, object, class_id; /* object: in and out, 0 = choose */
  uint64_t params, rights;
  uint32_t params_size, flags;
  uint32_t status; /* out */
  uint32_t pad;
};
ABI_SIZE(struct nvos64, 48);
ABI_AT(struct nvos64, params, 16);
ABI_AT(struct nvos64, status, 40);

/* nvos.h NVOS64_PARAMETERS in 530 */
struct nvos64_530 {
  uint32_t root, parent, object, class_id;
  uint64_t params, rights;
  uint32_t flags;
  uint32_t status;
};
ABI_SIZE(struct nvos64_530, 40);
ABI_AT(struct nvos64_530, status, 36);

/* kernel-open/common/inc/nv-ioctl.h nv_ioctl_card_info_t; the ioctl takes an array of them */
struct nv_card_info {
  uint8_t valid, pad0[3];
  uint32_t pci_domain;
  uint8_t pci_bus, pci_slot, pci_function, pad1;
  uint16_t pci_vendor, pci_device;
  uint32_t gpu_id;
  uint16_t interrupt_line, pad2;
  uint64_t reg_address, reg_size, fb_address, fb_size;
  uint32_t minor_number; /* N of /dev/nvidiaN */
  uint8_t dev_name[10], pad3[2];
};
ABI_SIZE(struct nv_card_info, 72);
ABI_AT(struct nv_card_info, gpu_id, 16);
ABI_AT(struct nv_card_info, reg_address, 24);
ABI_AT(struct nv_card_info, minor_number, 56);
enum { NV_MAX_CARDS = 32 };

/* nv-ioctl.h nv_ioctl_rm_api_version_t; command '2' queries the driver's version */
struct nv_api_version {
  uint32_t cmd, reply;
  char text[64];
};
ABI_SIZE(struct nv_api_version, 72);
enum { NV_API_VERSION_QUERY = '2' };

/* ---- RM classes and controls ---------------------------------------------------------------
 * src/common/sdk/nvidia/inc/class/ and .../ctrl/ */

enum {
  NV01_ROOT_CLIENT = 0x41,         /* cl0041.h */
  NV01_MEMORY_SYSTEM = 0x3e,       /* cl003e.h */
  NV01_MEMORY_LOCAL_USER = 0x40,   /* cl0040.h */
  NV01_DEVICE_0 = 0x80,            /* cl0080.h */
  NV20_SUBDEVICE_0 = 0x2080,       /* cl2080.h */
  FERMI_VASPACE_A = 0x90f1,        /* cl90f1.h */
  NV_CONFIDENTIAL_COMPUTE = 0xcb33 /* clcb33.h, from 535 */
};

/* cl0080.h NV0080_ALLOC_PARAMETERS */
struct nv0080_alloc {
  uint32_t device_id, client_share, target_client, target_device, flags, pad0;
  uint64_t va_space_size, va_start, va_limit;
  uint32_t va_mode, pad1;
};
ABI_SIZE(struct nv0080_alloc, 56);
ABI_AT(struct nv0080_alloc, va_space_size, 24);

/* cl2080.h NV2080_ALLOC_PARAMETERS */
struct nv2080_alloc {
  uint32_t sub_device_id;
};
ABI_SIZE(struct nv2080_alloc, 4);

/* clcb33.h NV_CONFIDENTIAL_COMPUTE_ALLOC_PARAMS */
struct nvcb33_alloc {
  uint32_t client;
};
ABI_SIZE(struct nvcb33_alloc, 4);

/* ctrl0000gpu.h NV0000_CTRL_CMD_GPU_GET_UUID_INFO; takes the binary SHA-1 UUID, as CUDA shows it */
#define NV0000_GET_UUID_INFO 0x274u
enum { NV0000_UUID_BINARY = 2 };
struct nv0000_uuid_info {
  uint8_t uuid[256];                                    /* in */
  uint32_t flags;                                       /* in */
  uint32_t gpu_id, device_instance, subdevice_instance; /* out */
};
ABI_SIZE(struct nv0000_uuid_info, 272);
ABI_AT(struct nv0000_uuid_info, flags, 256);

/* ctrl0000gpu.h NV0000_CTRL_CMD_GPU_GET_UUID_FROM_GPU_ID; flags as above */
#define NV0000_GET_UUID_FROM_GPU_ID 0x275u
struct nv0000_uuid_from_id {
  uint32_t gpu_id, flags;
  uint8_t uuid[256];
  uint32_t uuid_bytes;
};
ABI_SIZE(struct nv0000_uuid_from_id, 268);
ABI_AT(struct nv0000_uuid_from_id, uuid, 8);

/* ctrl2080gpu.h NV2080_CTRL_CMD_GPU_GET_NAME_STRING; flags 0 = ASCII. Up to 580 it is in a union
 * with a string of 16-bit characters, so the structure is longer. */
#define NV2080_GET_NAME_STRING 0x20800110u
struct nv2080_name {
  uint32_t flags;
  char ascii[64], wide[64];
};
ABI_SIZE(struct nv2080_name, 132);

/* ctrl2080fb.h NV2080_CTRL_CMD_FB_GET_INFO_V2; sizes in KiB. 128 entries, fewer before 580. */
#define NV2080_FB_GET_INFO_V2 0x20801303u
enum { NV2080_FB_HEAP_SIZE = 0x09, NV2080_FB_HEAP_FREE = 0x16 };
struct nv2080_fb_info {
  uint32_t count;
  struct {
    uint32_t index, value;
  } list[128];
};
ABI_SIZE(struct nv2080_fb_info, 1028);

/* nvos.h NV_VASPACE_ALLOCATION_PARAMETERS; 48 bytes, without the last two words, before 580 */
#define NV_VA_SPACE_EXTERNALLY_OWNED (1u << 3)
#define NV_VA_SPACE_PAGE_FAULTING (1u << 6)
struct nv_va_space_params {
  uint32_t index, flags;
  uint64_t size, start_internal, limit_internal;
  uint32_t big_page_size, pad0;
  uint64_t base;
  uint32_t pasid, pad1;
};
ABI_SIZE(struct nv_va_space_params, 56);
ABI_AT(struct nv_va_space_params, base, 40);

/* ctrl0080gpu.h NV0080_CTRL_CMD_GPU_GET_VIRTUALIZATION_MODE; before 555, only the first word */
#define NV0080_GET_VIRTUALIZATION_MODE 0x800289u
enum { NV0080_VIRTUALIZATION_VGX = 2 /* a guest that uses a vGPU */ };
struct nv0080_virtualization {
  uint32_t mode;
  uint8_t grid_build, pad[3];
};
ABI_SIZE(struct nv0080_virtualization, 8);

/* ctrlcb33.h NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES: 5 bytes before 550, then 6 */
#define NVCB33_GET_CAPABILITIES 0xcb330101u
struct nvcb33_capabilities {
  uint8_t cpu, gpus, environment, feature, dev_tools, multi_gpu;
};
ABI_SIZE(struct nvcb33_capabilities, 6);
ABI_AT(struct nvcb33_capabilities, feature, 3);

/* nvos.h NV_MEMORY_ALLOCATION_PARAMS; 120 bytes, without the last two words, before 545 */
struct nv_memory_params {
  uint32_t owner, type, flags, width, height;
  int32_t pitch;
  uint32_t attr, attr2, format, compr_covg, zcull_covg, pad0;
  uint64_t range_lo, range_hi, size, alignment, offset, limit, address;
  uint32_t ctag_offset, va_space, internal_flags, tag;
  int32_t numa_node;
  uint32_t pad1;
};
ABI_SIZE(struct nv_memory_params, 128);
ABI_AT(struct nv_memory_params, attr, 24);
ABI_AT(struct nv_memory_params, range_lo, 48);
ABI_AT(struct nv_memory_params, size, 64);
ABI_AT(struct nv_memory_params, ctag_offset, 104);
ABI_AT(struct nv_memory_params, numa_node, 120);

/* nvos.h NVOS32_ALLOC_FLAGS_*, NVOS32_ATTR_*, NVOS32_ATTR2_* */
#define NVOS32_ALIGNMENT_FORCE 0x00000100u
#define NVOS32_MAP_NOT_REQUIRED 0x00008000u
#define NVOS32_ATTR_PAGES_4K (1u << 23)
#define NVOS32_ATTR_PAGES_BIG (2u << 23) /* 64 KiB */
#define NVOS32_ATTR_PAGES_HUGE (3u << 23)
#define NVOS32_ATTR_LOCATION_PCI (1u << 25)
#define NVOS32_ATTR_ALLOW_NONCONTIGUOUS (3u << 27)
#define NVOS32_ATTR_COHERENCY_CACHED (1u << 29)
#define NVOS32_ATTR2_HUGE_2MB (1u << 20)

/* ---- UVM ---------------------------------------------------------------------------------------
 * kernel-open/nvidia-uvm/uvm_ioctl.h; the ioctl's number is plain, with no size encoded in it. Each ioctl
 * returns 0 and puts the result into its status field. */
enum {
  UVM_REGISTER_GPU_VASPACE = 25,
  UVM_ENABLE_PEER_ACCESS = 29,
  UVM_MAP_EXTERNAL_ALLOCATION = 33,
  UVM_FREE = 34,
  UVM_REGISTER_GPU = 37,
  UVM_UNMAP_EXTERNAL = 66,
  UVM_CREATE_EXTERNAL_RANGE = 73,
  UVM_MAP_EXTERNAL_SPARSE = 74,
  UVM_MM_INITIALIZE = 75,
  UVM_INITIALIZE = 0x30000001 /* uvm_linux_ioctl.h */
};
/* nvstatuscodes.h, except the first, which no driver returns: the status field is set to it before each call */
#define NV_UNTOUCHED 0x76776d6du
enum {
  NV_OK = 0,
  NV_ERR_BUSY_RETRY = 0x03,
  NV_ERR_GPU_NOT_FULL_POWER = 0x11,
  NV_ERR_INVALID_DEVICE = 0x26,
  NV_WARN_NOTHING_TO_DO = 0x10006
};

/* UVM_INITIALIZE_PARAMS; UVM_INIT_FLAGS_* in uvm_types.h */
struct uvm_initialize {
  uint64_t flags;
  uint32_t status, pad;
};
enum { UVM_INIT_DISABLE_HMM = 1 };
ABI_SIZE(struct uvm_initialize, 16);

/* UVM_MM_INITIALIZE_PARAMS */
struct uvm_mm_initialize {
  int32_t uvm_fd;
  uint32_t status;
};
ABI_SIZE(struct uvm_mm_initialize, 8);

/* UVM_REGISTER_GPU_PARAMS; rm_fd -1 and no client: not a MIG instance */
struct uvm_register_gpu {
  uint8_t uuid[16];
  uint8_t numa_enabled, pad[3];
  int32_t numa_node, rm_fd;
  uint32_t client, instance, status;
};
ABI_SIZE(struct uvm_register_gpu, 40);
ABI_AT(struct uvm_register_gpu, rm_fd, 24);

/* UVM_REGISTER_GPU_VASPACE_PARAMS */
struct uvm_register_space {
  uint8_t uuid[16];
  int32_t rm_fd;
  uint32_t client, va_space, status;
};
ABI_SIZE(struct uvm_register_space, 32);

/* UVM_ENABLE_PEER_ACCESS_PARAMS */
struct uvm_peer_access {
  uint8_t a[16], b[16];
  uint32_t status;
};
ABI_SIZE(struct uvm_peer_access, 36);

/* uvm_types.h UvmGpuMappingAttributes; 0 in the last four = the allocation's own kind */
struct uvm_gpu_record {
  uint8_t uuid[16];
  uint32_t mapping_type, caching_type, format, element_bits, compression;
};
ABI_SIZE(struct uvm_gpu_record, 36);
enum { UVM_MAPPING_DEFAULT = 0, UVM_MAPPING_READ_ONLY = 3 };

/* UVM_CREATE_EXTERNAL_RANGE_PARAMS */
struct uvm_create_range {
  uint64_t base, length;
  uint32_t status, pad;
};
ABI_SIZE(struct uvm_create_range, 24);

/* UVM_MAP_EXTERNAL_ALLOCATION_PARAMS: struct uvm_map_head, 32 or 256 records, struct uvm_map_tail */
struct uvm_map_head {
  uint64_t base, length, offset;
};
struct uvm_map_tail {
  uint64_t records;
  int32_t rm_fd;
  uint32_t client, memory;
  uint32_t status; /* out */
};
struct uvm_map_32 {
  struct uvm_map_head head;
  struct uvm_gpu_record gpus[32];
  struct uvm_map_tail tail;
};
struct uvm_map_256 {
  struct uvm_map_head head;
  struct uvm_gpu_record gpus[256];
  struct uvm_map_tail tail;
};
ABI_SIZE(struct uvm_map_32, 1200);
ABI_AT(struct uvm_map_32, gpus, 24);
ABI_AT(struct uvm_map_32, tail, 1176);
ABI_SIZE(struct uvm_map_256, 9264);
ABI_AT(struct uvm_map_256, gpus, 24);
ABI_AT(struct uvm_map_256, tail, 9240);
ABI_AT(struct uvm_map_tail, status, 20);

/* UVM_UNMAP_EXTERNAL_PARAMS and UVM_MAP_EXTERNAL_SPARSE_PARAMS */
struct uvm_gpu_range {
  uint64_t base, length;
  uint8_t uuid[16];
  uint32_t status, pad;
};
ABI_SIZE(struct uvm_gpu_range, 40);
ABI_AT(struct uvm_gpu_range, status, 32);

/* UVM_FREE_PARAMS, up to 580 and from 590 */
struct uvm_free_580 {
  uint64_t base, length;
  uint32_t status, pad;
};
struct uvm_free_590 {
  uint64_t base;
  uint32_t status, pad;
};
ABI_SIZE(struct uvm_free_580, 24);
ABI_AT(struct uvm_free_580, status, 16);
ABI_SIZE(struct uvm_free_590, 16);
ABI_AT(struct uvm_free_590, status, 8);

/*
 * Each map call takes one handle per GPU from a client that UVM shares among all processes, until
 * the last part of its range is unmapped. RM numbers them from RS_UNIQUE_HANDLE_BASE within
 * RS_UNIQUE_HANDLE_RANGE (src/nvidia/inc/libraries/resserv/rs_client.h, 530 to 595) and then fails
 * the map with NV_ERR_INSUFFICIENT_RESOURCES. On an H200 that happened at 524,000 single-page mappings.
 */
enum { RM_HANDLES = 0x80000, NV_ERR_INSUFFICIENT_RESOURCES = 0x1a };

#endif
