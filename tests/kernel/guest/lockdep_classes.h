/* SPDX-License-Identifier: MIT */
/*
 * Included before each file of UVM in a tree for the self-checking kernel. UVM initialises all its mutexes in one
 * function, and all its rw semaphores in another, so lockdep would give each kind a single class, report the first
 * nesting of two, and switch itself off. Here the class is UVM's own lock order, which is the name of that function's
 * argument (uvm_lock.h). Nothing else in UVM calls these two macros; inline functions of the kernel do, and get class
 * 0.
 */
#pragma once
#include <linux/mutex.h>
#include <linux/rwsem.h>

#ifdef CONFIG_LOCKDEP
enum { lock_order };
static struct lock_class_key uvm_lock_class[128] __maybe_unused;

#undef mutex_init
#define mutex_init(mutex) __mutex_init(mutex, "uvm_mutex", &uvm_lock_class[lock_order])
#undef init_rwsem
#define init_rwsem(sem) __init_rwsem(sem, "uvm_rwsem", &uvm_lock_class[64 + lock_order])
#endif
