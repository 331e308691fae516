// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * main.c - the software GPU: loading, unloading, parameters. See README.md and impl.h.
 *
 * Each GPU has a PCI device (QEMU's `edu`), only because UVM needs a device to map host memory for; the device
 * itself does nothing.
 */
#include <linux/delay.h>
#include <linux/dma-mapping.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/random.h>
#include <linux/slab.h>
#include <linux/vmalloc.h>

#include "impl.h"

#define PCI_VENDOR_QEMU 0x1234
#define PCI_DEVICE_EDU  0x11e8
#define DMA_BITS        47

static char *arch = "hopper";
module_param(arch, charp, 0444);
MODULE_PARM_DESC(arch, "ampere (GA100, page tables version 2), hopper (GH100, version 3); since 570 blackwell (GB100), gb20x");
static uint gpus;
module_param(gpus, uint, 0444);
MODULE_PARM_DESC(gpus, "number of GPUs, 1 to 4; 0: one for each PCI device");
static uint vidmem_mb = 256;
module_param(vidmem_mb, uint, 0444);
MODULE_PARM_DESC(vidmem_mb, "video memory of each GPU in MB, even; costs guest memory only where it holds data");

/* softgpu.h, struct softgpu_settings */
struct sg_settings settings = {
	.reorder = 1,
	.tlb_negative = 1,
	.tlb_pde = 1,
	.check_ordering = 1,
};
module_param_named(delay_us, settings.delay_us, uint, 0644);
module_param_named(reorder, settings.reorder, uint, 0644);
module_param_named(tlb_negative, settings.tlb_negative, uint, 0644);
module_param_named(tlb_pde, settings.tlb_pde, uint, 0644);
module_param_named(seed, settings.seed, uint, 0644);
module_param_named(check_ordering, settings.check_ordering, uint, 0644);

struct sg_model model;

static const u8 uuid_base[SOFTGPU_UUID_BYTES] = {
	0x50, 0x0f, 0x70, 0x90, 0x11, 0x22, 0x43, 0x44, 0x95, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xc0,
};

/* xorshift64*: a seed reproduces the choices, but not the timing. */
u32 sg_random(u32 below)
{
	u64 x = model.random;

	x ^= x >> 12;
	x ^= x << 25;
	x ^= x >> 27;
	model.random = x;
	return (u32)((x * 0x2545F4914F6CDD1Dull) >> 32) % below;
}

struct softgpu *sg_gpu_by_uuid(const void *uuid)
{
	u32 i;

	for (i = 0; i < model.gpus; i++)
		if (!memcmp(model.gpu[i]->uuid, uuid, SOFTGPU_UUID_BYTES))
			return model.gpu[i];
	return NULL;
}

struct softgpu *sg_gpu_by_index(u32 index)
{
	return index < model.gpus ? model.gpu[index] : NULL;
}

static void gpu_free(struct softgpu *gpu)
{
	sg_engine_stop(gpu);
	sg_tlb_exit(gpu);
	sg_vidmem_exit(gpu);
	sg_pma_exit(gpu);
	vfree(gpu->fault_buffer);
	vfree(gpu->shadow_buffer);
	vfree(gpu->access_buffer);
	free_page((unsigned long)gpu->bounce);
	free_page((unsigned long)gpu->registers);
	pci_dev_put(gpu->pci);
	kvfree(gpu);
}

/* Takes over the reference to the PCI device, even on failure. */
static struct softgpu *gpu_new(u32 index, struct pci_dev *pci, const struct sg_arch *chosen)
{
	struct softgpu *gpu = kvzalloc(sizeof(*gpu), GFP_KERNEL);

	if (!gpu) {
		pci_dev_put(pci);
		return NULL;
	}
	gpu->index = index;
	gpu->pci = pci;
	gpu->arch = chosen;
	gpu->format = chosen->format;
	gpu->vidmem = (u64)vidmem_mb << 20;
	memcpy(gpu->uuid, uuid_base, sizeof(gpu->uuid));
	gpu->uuid[SOFTGPU_UUID_BYTES - 1] += index;
	INIT_LIST_HEAD(&gpu->channels);
	INIT_LIST_HEAD(&gpu->user_channels);
	init_waitqueue_head(&gpu->wait);
	sg_tlb_init(gpu);
	gpu->registers = (void *)get_zeroed_page(GFP_KERNEL);
	gpu->bounce = (void *)__get_free_page(GFP_KERNEL);
	if (!gpu->registers || !gpu->bounce || sg_vidmem_init(gpu) || sg_pma_init(gpu)) {
		gpu_free(gpu);
		return NULL;
	}
	if (dma_set_mask_and_coherent(&pci->dev, DMA_BIT_MASK(DMA_BITS)))
		pr_warn("softgpu: no %d-bit DMA mask\n", DMA_BITS);
	pci_set_master(pci);
	return gpu;
}

static void all_free(void)
{
	while (model.gpus)
		gpu_free(model.gpu[--model.gpus]);
}

static int all_new(const struct sg_arch *chosen)
{
	struct pci_dev *pci = NULL;

	while (model.gpus < (gpus ? gpus : SOFTGPU_MAX_GPUS)) {
		struct softgpu *gpu;

		pci = pci_get_device(PCI_VENDOR_QEMU, PCI_DEVICE_EDU, pci);
		if (!pci)
			break;
		gpu = gpu_new(model.gpus, pci_dev_get(pci), chosen);
		if (!gpu) {
			pci_dev_put(pci);
			return -ENOMEM;
		}
		model.gpu[model.gpus++] = gpu;
	}
	pci_dev_put(pci);
	if (model.gpus && model.gpus >= gpus)
		return 0;
	pr_err("softgpu: %u GPUs wanted, %u PCI devices %04x:%04x found\n", gpus, model.gpus, PCI_VENDOR_QEMU, PCI_DEVICE_EDU);
	return -ENODEV;
}

static int __init softgpu_init(void)
{
	const struct sg_arch *chosen = sg_arch_find(arch);
	int result;
	u32 i;

	if (!chosen) {
		pr_err("softgpu: arch=%s is unknown to driver %s\n", arch, NV_VERSION_STRING);
		return -EINVAL;
	}
	if (gpus > SOFTGPU_MAX_GPUS || !vidmem_mb || vidmem_mb % 2) {
		pr_err("softgpu: gpus=%u vidmem_mb=%u out of range\n", gpus, vidmem_mb);
		return -EINVAL;
	}
	mutex_init(&model.lock);
	INIT_LIST_HEAD(&model.spaces);
	INIT_LIST_HEAD(&model.memories);
	INIT_LIST_HEAD(&model.clients);
	model.random = settings.seed ? settings.seed : get_random_u64() | 1;
	result = sg_readers_init();
	if (result)
		return result;
	result = all_new(chosen);
	for (i = 0; !result && i < model.gpus; i++)
		result = sg_engine_start(model.gpu[i]);
	if (result)
		goto no_devices;
	result = sg_chardev_init();
	if (result)
		goto no_devices;
	result = sg_rmdev_init();
	if (result)
		goto no_rmdev;
	pr_info("softgpu: %u x %s, %u MB each, driver %s\n", model.gpus, arch, vidmem_mb, NV_VERSION_STRING);
	return 0;

no_rmdev:
	sg_chardev_exit();
no_devices:
	all_free();
	sg_readers_exit();
	return result;
}

/* nvidia-uvm.ko is unloaded and no descriptor is open: everything they had must be freed. */
static void __exit softgpu_exit(void)
{
	u32 i;

	sg_rmdev_exit();
	sg_chardev_exit();
	for (i = 0; i < model.gpus; i++) {
		struct softgpu *gpu = model.gpu[i];

		if (!list_empty(&gpu->channels))
			sg_error(gpu, SOFTGPU_ERROR_LEAK, 0, 0, "channels leaked");
		if (gpu->pma_free != gpu->frames)
			sg_error(gpu, SOFTGPU_ERROR_LEAK, 0, 0, "%llu frames of video memory leaked", gpu->frames - gpu->pma_free);
	}
	if (!list_empty(&model.spaces) || !list_empty(&model.memories) || !list_empty(&model.clients))
		sg_error(NULL, SOFTGPU_ERROR_LEAK, 0, 0, "address spaces, memory or clients leaked");
	all_free();
	sg_readers_exit();
}

module_init(softgpu_init);
module_exit(softgpu_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Software GPU that replaces nvidia.ko, for tests of nvidia-uvm.ko");
MODULE_VERSION(NV_VERSION_STRING);

#include "softgpu_exports.h"
