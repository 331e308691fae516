// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * client.c - the resource manager's clients, which map handles to objects; created through /dev/nvidiactl or
 * /dev/softgpu, and freed with the descriptor that created them. All functions run under model.lock.
 */
#include <linux/slab.h>

#include "impl.h"

#define FIRST_CLIENT 0xc1d00000u
#define FIRST_OBJECT 0xcaf00000u

struct sg_client *sg_client_find(u32 handle)
{
	struct sg_client *client;

	list_for_each_entry(client, &model.clients, node)
		if (client->handle == handle)
			return client;
	return NULL;
}

/* handle 0: choose one */
struct sg_client *sg_client_new(const void *owner, u32 handle)
{
	struct sg_client *client;

	if (handle && sg_client_find(handle))
		return NULL;
	client = kzalloc(sizeof(*client), GFP_KERNEL);
	if (!client)
		return NULL;
	client->owner = owner;
	client->handle = handle ? handle : FIRST_CLIENT + ++model.next_handle;
	client->next = FIRST_OBJECT;
	INIT_LIST_HEAD(&client->objects);
	list_add(&client->node, &model.clients);
	return client;
}

struct sg_object *sg_object_find(struct sg_client *client, u32 handle)
{
	struct sg_object *object;

	list_for_each_entry(object, &client->objects, node)
		if (object->handle == handle)
			return object;
	return NULL;
}

/* handle 0: choose one */
struct sg_object *sg_object_new(struct sg_client *client, u32 handle, enum sg_object_kind kind, struct softgpu *gpu)
{
	struct sg_object *object;

	while (!handle) {
		u32 next = ++client->next;

		if (!sg_object_find(client, next))
			handle = next;
	}
	if (sg_object_find(client, handle))
		return NULL;
	object = kzalloc(sizeof(*object), GFP_KERNEL);
	if (!object)
		return NULL;
	object->handle = handle;
	object->parent = client->handle;
	object->kind = kind;
	object->gpu = gpu;
	list_add(&object->node, &client->objects);
	return object;
}

static void object_free(struct sg_object *object)
{
	list_del(&object->node);
	if (object->memory)
		sg_memory_put(object->memory);
	kfree(object);
}

static void children_free(struct sg_client *client, u32 parent)
{
	struct sg_object *object;
	bool found;

	do {
		found = false;
		list_for_each_entry(object, &client->objects, node) {
			u32 handle = object->handle;

			if (object->parent != parent)
				continue;
			object_free(object);
			children_free(client, handle);
			found = true;
			break;
		}
	} while (found);
}

static void client_free(struct sg_client *client)
{
	while (!list_empty(&client->objects))
		object_free(list_first_entry(&client->objects, struct sg_object, node));
	list_del(&client->node);
	kfree(client);
}

int sg_object_free(const void *owner, u32 client_handle, u32 handle)
{
	struct sg_client *client = sg_client_find(client_handle);
	struct sg_object *object;

	if (!client || client->owner != owner)
		return -ENOENT;
	if (handle == client_handle) {
		client_free(client);
		return 0;
	}
	object = sg_object_find(client, handle);
	if (!object)
		return -ENOENT;
	object_free(object);
	children_free(client, handle);
	return 0;
}

void sg_client_free_all(const void *owner)
{
	struct sg_client *client, *next;

	list_for_each_entry_safe(client, next, &model.clients, node)
		if (client->owner == owner)
			client_free(client);
}
