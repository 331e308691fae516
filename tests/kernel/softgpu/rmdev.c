// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * rmdev.c - /dev/nvidiactl, /dev/nvidia0, ..., /proc/driver/nvidia/version: the part of the resource manager's own interface
 * that a program needs if it creates its own clients, devices and address spaces for UVM, as libvmem does.
 *
 * Sources: kernel-open/common/inc/nv-ioctl.h and nv-ioctl-numbers.h, src/nvidia/arch/nvalloc/unix/include/nv_escape.h,
 * src/common/sdk/nvidia/inc/nvos.h with its folders class/ and ctrl/ (named at each number below).
 */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "impl.h"

#define NV_MAJOR 195 /* NV_MAJOR_DEVICE_NUMBER */
#define NV_TYPE  'F' /* NV_IOCTL_MAGIC */

enum { /* nv_escape.h, nv-ioctl-numbers.h */
	ESC_RM_FREE = 0x29,
	ESC_RM_CONTROL = 0x2a,
	ESC_RM_ALLOC = 0x2b,
	ESC_CARD_INFO = 200,
	ESC_CHECK_VERSION_STR = 210,
};

enum { /* cl0041.h, cl0000.h, cl0080.h, cl2080.h, cl90f1.h, cl0040.h, cl003e.h */
	CLASS_ROOT = 0x00,
	CLASS_ROOT_CLIENT = 0x41,
	CLASS_DEVICE = 0x80,
	CLASS_SUBDEVICE = 0x2080,
	CLASS_VASPACE = 0x90f1,
	CLASS_MEMORY_LOCAL = 0x40,
	CLASS_MEMORY_SYSTEM = 0x3e,
};

enum { /* ctrl0000gpu.h, ctrl0080gpu.h, ctrl2080gpu.h, ctrl2080fb.h */
	CTRL_GET_UUID_INFO = 0x274,
	CTRL_GET_UUID_FROM_GPU_ID = 0x275,
	CTRL_GET_VIRTUALIZATION_MODE = 0x800289,
	CTRL_GET_NAME_STRING = 0x20800110,
	CTRL_FB_GET_INFO_V2 = 0x20801303,
};

#define UUID_FLAGS_BINARY 2 /* NV0000_CTRL_GPU_UUID_FLAGS: binary, SHA-1 */
#define PARAMETERS_MAX    8192
#define MAX_CARDS         32

struct rm_free { /* NVOS00_PARAMETERS */
	u32 root, parent, object, status;
};

struct rm_control { /* NVOS54_PARAMETERS */
	u32 client, object, command, flags;
	u64 parameters;
	u32 size, status;
};

struct rm_alloc { /* NVOS64_PARAMETERS */
	u32 root, parent, object, class_id;
	u64 parameters, rights;
	u32 size, flags, status, pad;
};

struct card_info { /* nv_ioctl_card_info_t */
	u8 valid, pad0[3];
	u32 pci_domain;
	u8 pci_bus, pci_slot, pci_function, pad1;
	u16 pci_vendor, pci_device;
	u32 gpu_id;
	u16 interrupt_line, pad2;
	u64 reg_address, reg_size, fb_address, fb_size;
	u32 minor_number;
	u8 dev_name[10], pad3[2];
};

struct api_version { /* nv_ioctl_rm_api_version_t */
	u32 command, reply;
	char text[64];
};

struct device_parameters { /* NV0080_ALLOC_PARAMETERS; only the first field is used here */
	u32 device_id;
};

struct memory_parameters { /* NV_MEMORY_ALLOCATION_PARAMS up to the size; later fields are ignored */
	u32 owner, type, flags, width, height;
	s32 pitch;
	u32 attr, attr2, format, compr_covg, zcull_covg, pad0;
	u64 range_lo, range_hi, size;
};

#define ATTR_PAGE_SIZE(attr) (((attr) >> 23) & 3) /* NVOS32_ATTR_PAGE_SIZE: 0 default, 1 4 KB, 2 big, 3 huge */
#define ATTR_CONTIGUITY(attr) (((attr) >> 27) & 3) /* NVOS32_ATTR_PHYSICALITY: 0 default, 1 noncontiguous, 2 contiguous, 3 either */
#define CONTIGUOUS 2

struct uuid_info { /* NV0000_CTRL_GPU_GET_UUID_INFO_PARAMS */
	u8 uuid[256];
	u32 flags, gpu_id, device_instance, subdevice_instance;
};

struct uuid_from_id { /* NV0000_CTRL_GPU_GET_UUID_FROM_GPU_ID_PARAMS */
	u32 gpu_id, flags;
	u8 uuid[256];
	u32 length;
};

struct name_string { /* NV2080_CTRL_GPU_GET_NAME_STRING_PARAMS: the text is 64 bytes in its ASCII form */
	u32 flags;
	char text[64];
};

struct fb_get_info { /* NV2080_CTRL_FB_GET_INFO_V2_PARAMS */
	u32 count;
	struct {
		u32 index, data;
	} entry[];
};

enum { FB_INFO_RAM_SIZE = 0x07, FB_INFO_TOTAL_RAM_SIZE = 0x08, FB_INFO_HEAP_SIZE = 0x09, FB_INFO_HEAP_FREE = 0x16 };

/* A number for each GPU, derived from the PCI address as in RM. */
static u32 gpu_id(const struct softgpu *gpu)
{
	return (pci_domain_nr(gpu->pci->bus) << 16) | (gpu->pci->bus->number << 8) | PCI_SLOT(gpu->pci->devfn);
}

/* ---- controls ------------------------------------------------------------------------------------------ */

static NV_STATUS control_uuid_info(struct uuid_info *p)
{
	struct softgpu *gpu = sg_gpu_by_uuid(p->uuid);

	if (!gpu || p->flags != UUID_FLAGS_BINARY)
		return NV_ERR_OBJECT_NOT_FOUND;
	p->gpu_id = gpu_id(gpu);
	p->device_instance = gpu->index;
	p->subdevice_instance = 0;
	return NV_OK;
}

static NV_STATUS control_uuid_from_id(struct uuid_from_id *p)
{
	u32 i;

	for (i = 0; i < model.gpus; i++) {
		if (gpu_id(model.gpu[i]) != p->gpu_id)
			continue;
		memset(p->uuid, 0, sizeof(p->uuid));
		memcpy(p->uuid, model.gpu[i]->uuid, SOFTGPU_UUID_BYTES);
		p->length = SOFTGPU_UUID_BYTES;
		return NV_OK;
	}
	return NV_ERR_INVALID_ARGUMENT;
}

static NV_STATUS control_name(struct softgpu *gpu, struct name_string *p)
{
	strscpy(p->text, gpu->arch->product, sizeof(p->text));
	return NV_OK;
}

static NV_STATUS control_fb_info(struct softgpu *gpu, struct fb_get_info *p, u32 size)
{
	u32 i;

	if (struct_size(p, entry, p->count) > size)
		return NV_ERR_INVALID_ARGUMENT;
	for (i = 0; i < p->count; i++) {
		switch (p->entry[i].index) {
		case FB_INFO_RAM_SIZE:
		case FB_INFO_TOTAL_RAM_SIZE:
		case FB_INFO_HEAP_SIZE:
			p->entry[i].data = gpu->vidmem >> 10;
			break;
		case FB_INFO_HEAP_FREE:
			p->entry[i].data = (gpu->pma_free << SOFTGPU_FRAME_SHIFT) >> 10;
			break;
		default:
			p->entry[i].data = 0;
		}
	}
	return NV_OK;
}

static NV_STATUS control(struct sg_client *client, const struct rm_control *c, void *p)
{
	struct sg_object *object = c->object == client->handle ? NULL : sg_object_find(client, c->object);
	struct softgpu *gpu = object ? object->gpu : NULL;

	if (!object && c->object != client->handle)
		return NV_ERR_OBJECT_NOT_FOUND;
	switch (c->command) {
	case CTRL_GET_UUID_INFO:
		return c->size == sizeof(struct uuid_info) ? control_uuid_info(p) : NV_ERR_INVALID_PARAM_STRUCT;
	case CTRL_GET_UUID_FROM_GPU_ID:
		return c->size == sizeof(struct uuid_from_id) ? control_uuid_from_id(p) : NV_ERR_INVALID_PARAM_STRUCT;
	case CTRL_GET_VIRTUALIZATION_MODE:
		memset(p, 0, c->size);
		return NV_OK;
	case CTRL_GET_NAME_STRING:
		if (!gpu || c->size < sizeof(struct name_string))
			return NV_ERR_INVALID_PARAM_STRUCT;
		return control_name(gpu, p);
	case CTRL_FB_GET_INFO_V2:
		if (!gpu || c->size < sizeof(struct fb_get_info))
			return NV_ERR_INVALID_PARAM_STRUCT;
		return control_fb_info(gpu, p, c->size);
	default:
		return NV_ERR_NOT_SUPPORTED;
	}
}

static long do_control(struct file *file, void *argument)
{
	struct rm_control *c = argument;
	struct sg_client *client;
	void *p;

	if (c->size > PARAMETERS_MAX)
		return -EINVAL;
	p = kzalloc(max_t(u32, c->size, 1), GFP_KERNEL);
	if (!p)
		return -ENOMEM;
	if (copy_from_user(p, u64_to_user_ptr(c->parameters), c->size)) {
		kfree(p);
		return -EFAULT;
	}
	mutex_lock(&model.lock);
	client = sg_client_find(c->client);
	c->status = client && client->owner == file ? control(client, c, p) : NV_ERR_INVALID_CLIENT;
	mutex_unlock(&model.lock);
	if (c->status == NV_OK && copy_to_user(u64_to_user_ptr(c->parameters), p, c->size)) {
		kfree(p);
		return -EFAULT;
	}
	kfree(p);
	return 0;
}

/* ---- objects --------------------------------------------------------------------------------------------- */

static NV_STATUS parameters_in(const struct rm_alloc *a, void *to, size_t size)
{
	if (!a->parameters)
		return NV_ERR_INVALID_ARGUMENT;
	return copy_from_user(to, u64_to_user_ptr(a->parameters), size) ? NV_ERR_INVALID_ADDRESS : NV_OK;
}

static NV_STATUS object_add(struct file *file, struct rm_alloc *a, enum sg_object_kind kind, struct softgpu *gpu, struct sg_memory *memory)
{
	struct sg_client *client = sg_client_find(a->root);
	struct sg_object *object;

	if (!client || client->owner != file)
		return NV_ERR_INVALID_CLIENT;
	if (a->object && sg_object_find(client, a->object))
		return NV_ERR_INSERT_DUPLICATE_NAME;
	object = sg_object_new(client, a->object, kind, gpu);
	if (!object)
		return NV_ERR_NO_MEMORY;
	object->parent = a->parent;
	object->class_id = a->class_id;
	object->memory = memory;
	a->object = object->handle;
	return NV_OK;
}

/* Returns the GPU of the parent, which must belong to this client. */
static struct softgpu *parent_gpu(struct file *file, const struct rm_alloc *a)
{
	struct sg_client *client = sg_client_find(a->root);
	struct sg_object *parent = client && client->owner == file ? sg_object_find(client, a->parent) : NULL;

	return parent ? parent->gpu : NULL;
}

static NV_STATUS alloc_memory(struct file *file, struct rm_alloc *a)
{
	bool sys = a->class_id == CLASS_MEMORY_SYSTEM;
	struct memory_parameters p;
	struct sg_memory *memory;
	struct softgpu *gpu;
	u64 page_size;
	NV_STATUS status = parameters_in(a, &p, sizeof(p));
	int error;

	if (status != NV_OK)
		return status;
	mutex_lock(&model.lock);
	gpu = parent_gpu(file, a);
	mutex_unlock(&model.lock);
	if (!gpu)
		return NV_ERR_INVALID_OBJECT_PARENT;
	if (!p.size)
		return NV_ERR_INVALID_ARGUMENT;
	page_size = ATTR_PAGE_SIZE(p.attr) == 3 ? SG_PAGE_2M : ATTR_PAGE_SIZE(p.attr) == 1 && sys ? SG_PAGE_4K : SG_PAGE_64K;
	p.size = ALIGN(p.size, page_size);
	memory = sg_memory_new(gpu, sys, p.size, page_size, !sys && ATTR_CONTIGUITY(p.attr) == CONTIGUOUS, NULL, &error);
	if (!memory)
		return NV_ERR_NO_MEMORY;
	mutex_lock(&model.lock);
	status = object_add(file, a, SG_OBJECT_MEMORY, gpu, memory);
	if (status != NV_OK)
		sg_memory_put(memory);
	mutex_unlock(&model.lock);
	if (status == NV_OK && copy_to_user(u64_to_user_ptr(a->parameters), &p, sizeof(p)))
		return NV_ERR_INVALID_ADDRESS;
	return status;
}

static NV_STATUS alloc_object(struct file *file, struct rm_alloc *a)
{
	struct device_parameters device;
	struct sg_client *client;
	struct softgpu *gpu;
	NV_STATUS status = NV_OK;

	if (a->class_id == CLASS_DEVICE)
		status = parameters_in(a, &device, sizeof(device));
	if (status != NV_OK)
		return status;
	mutex_lock(&model.lock);
	switch (a->class_id) {
	case CLASS_ROOT:
	case CLASS_ROOT_CLIENT:
		client = sg_client_new(file, a->object);
		if (client)
			a->object = client->handle;
		status = client ? NV_OK : NV_ERR_INSERT_DUPLICATE_NAME;
		break;
	case CLASS_DEVICE:
		gpu = sg_gpu_by_index(device.device_id);
		status = gpu ? object_add(file, a, SG_OBJECT_DEVICE, gpu, NULL) : NV_ERR_INVALID_ARGUMENT;
		break;
	case CLASS_SUBDEVICE:
	case CLASS_VASPACE:
		gpu = parent_gpu(file, a);
		status = gpu ? object_add(file, a, a->class_id == CLASS_VASPACE ? SG_OBJECT_VASPACE : SG_OBJECT_SUBDEVICE, gpu, NULL) :
			       NV_ERR_INVALID_OBJECT_PARENT;
		break;
	default:
		status = NV_ERR_INVALID_CLASS;
	}
	mutex_unlock(&model.lock);
	return status;
}

static long do_alloc(struct file *file, void *argument)
{
	struct rm_alloc *a = argument;

	if (a->class_id == CLASS_MEMORY_LOCAL || a->class_id == CLASS_MEMORY_SYSTEM)
		a->status = alloc_memory(file, a);
	else
		a->status = alloc_object(file, a);
	return 0;
}

static long do_free(struct file *file, void *argument)
{
	struct rm_free *f = argument;

	mutex_lock(&model.lock);
	f->status = sg_object_free(file, f->root, f->object) ? NV_ERR_OBJECT_NOT_FOUND : NV_OK;
	mutex_unlock(&model.lock);
	return 0;
}

/* ---- the rest ---------------------------------------------------------------------------------------------- */

static long do_version(struct file *file, void *argument)
{
	struct api_version *v = argument;

	v->reply = 1; /* NV_RM_API_VERSION_REPLY_RECOGNIZED */
	strscpy(v->text, NV_VERSION_STRING, sizeof(v->text));
	return 0;
}

static long do_card_info(struct file *file, void *argument)
{
	struct card_info *cards = argument;
	u32 i;

	memset(cards, 0, MAX_CARDS * sizeof(*cards));
	for (i = 0; i < model.gpus; i++) {
		struct pci_dev *pci = model.gpu[i]->pci;

		cards[i].valid = 1;
		cards[i].pci_domain = pci_domain_nr(pci->bus);
		cards[i].pci_bus = pci->bus->number;
		cards[i].pci_slot = PCI_SLOT(pci->devfn);
		cards[i].pci_function = PCI_FUNC(pci->devfn);
		cards[i].pci_vendor = pci->vendor;
		cards[i].pci_device = pci->device;
		cards[i].gpu_id = gpu_id(model.gpu[i]);
		cards[i].fb_size = model.gpu[i]->vidmem;
		cards[i].minor_number = i;
	}
	return 0;
}

static const struct {
	u32 number;
	size_t size;
	long (*handler)(struct file *file, void *argument);
} commands[] = {
	{ ESC_RM_FREE, sizeof(struct rm_free), do_free },
	{ ESC_RM_CONTROL, sizeof(struct rm_control), do_control },
	{ ESC_RM_ALLOC, sizeof(struct rm_alloc), do_alloc },
	{ ESC_CARD_INFO, MAX_CARDS * sizeof(struct card_info), do_card_info },
	{ ESC_CHECK_VERSION_STR, sizeof(struct api_version), do_version },
};

static long nvidia_ioctl(struct file *file, unsigned int command, unsigned long user)
{
	size_t size = _IOC_SIZE(command);
	void *argument;
	long result = -EINVAL;
	u32 i;

	if (_IOC_TYPE(command) != NV_TYPE)
		return -EINVAL;
	for (i = 0; i < ARRAY_SIZE(commands); i++) {
		if (commands[i].number != _IOC_NR(command) || commands[i].size != size)
			continue;
		argument = memdup_user((void __user *)user, size);
		if (IS_ERR(argument))
			return PTR_ERR(argument);
		result = commands[i].handler(file, argument);
		if (!result && copy_to_user((void __user *)user, argument, size))
			result = -EFAULT;
		kfree(argument);
		break;
	}
	return result;
}

static int nvidia_release(struct inode *inode, struct file *file)
{
	mutex_lock(&model.lock);
	sg_client_free_all(file);
	mutex_unlock(&model.lock);
	return 0;
}

static const struct file_operations nvidia_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = nvidia_ioctl,
	.release = nvidia_release,
};

static int version_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " NV_VERSION_STRING "  Release Build  (vmem software GPU)\n");
	return 0;
}

static struct proc_dir_entry *proc_folder;

int sg_rmdev_init(void)
{
	int result = register_chrdev(NV_MAJOR, "nvidia", &nvidia_fops);

	if (result)
		return result;
	proc_folder = proc_mkdir("driver/nvidia", NULL);
	if (!proc_folder || !proc_create_single("version", 0444, proc_folder, version_show)) {
		sg_rmdev_exit();
		return -ENOMEM;
	}
	return 0;
}

void sg_rmdev_exit(void)
{
	proc_remove(proc_folder);
	proc_folder = NULL;
	unregister_chrdev(NV_MAJOR, "nvidia");
}
