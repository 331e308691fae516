#!/bin/sh
# SPDX-License-Identifier: MIT
# Run by scripts/check_deb.py in a virtual machine whose disk is the system that check_deb.sh ran in: installs
# the packages, loads the module that DKMS built there on a software GPU, uses it, and purges the packages. DKMS
# compiles nothing here: the processor is emulated, and that would take about 35 times as long
# (docs/operations/debian.md). /debs/given holds that build, the driver (nvidia.ko, and UVM as NVIDIA published it),
# and pyvmem with the tests' means of reading the GPU's memory.
set -eu
kernel=$(uname -r)
# shellcheck source=packaging/check_lib.sh
. /check_lib.sh

# Succeeds if the loaded nvidia-uvm is the patched one.
patched() {
	find /sys/module/nvidia_uvm/parameters/ -name 'uvm_vmem_*' | grep -q .
}

# Creates the device nodes, as udev and nvidia-modprobe do on a user's machine.
nodes() {
	major=$(awk '$2 == "nvidia-uvm" { print $1; exit }' /proc/devices)
	control=$(awk '$2 ~ /^nvidia(-frontend)?$/ { print $1; exit }' /proc/devices)
	rm -f /dev/nvidia*
	mknod -m 666 /dev/nvidia-uvm c "$major" 0
	mknod -m 666 /dev/nvidia-uvm-tools c "$major" 1
	mknod -m 666 /dev/nvidia0 c "$control" 0
	mknod -m 666 /dev/nvidiactl c "$control" 255
}

# The guest has no udev.
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd

echo "a machine with Debian's stock driver"
modules=/lib/modules/$kernel/updates/dkms
mkdir -p "$modules"
cp /debs/given/nvidia.ko "$modules/nvidia-current-open.ko"
cp /debs/given/nvidia-uvm.ko "$modules/nvidia-current-open-uvm.ko"
cat >/etc/modprobe.d/nvidia.conf <<'RULES'
install nvidia modprobe -i nvidia-current-open $CMDLINE_OPTS
install nvidia-uvm modprobe nvidia ; modprobe -i nvidia-current-open-uvm $CMDLINE_OPTS
remove nvidia modprobe -r -i nvidia-uvm nvidia
options nvidia-current-open arch=hopper
options nvidia-current-open-uvm uvm_leak_checker=1
RULES
# depmod needs the lists of the kernel's own modules.
for name in modules.order modules.builtin modules.builtin.modinfo; do
	[ -e "/lib/modules/$kernel/$name" ] || : >"/lib/modules/$kernel/$name"
done
depmod -a "$kernel"
files >/tmp/before
modprobe nvidia-uvm
nodes
if patched; then exit 1; fi
rmmod nvidia_uvm

echo "installed without the driver's source: the stock module stays in use"
NV_SRC=/nowhere install /debs/libvmem0_*.deb /debs/libvmem-dev_*.deb /debs/vmem-dkms_*.deb
grep 'NV_SRC=/nowhere holds no driver sources' /tmp/said.log
grep -q 'the stock nvidia-uvm stays in use' /tmp/said.log
modprobe nvidia-uvm 2>&1 | grep 'no patched nvidia-uvm is installed for kernel'
if patched; then exit 1; fi
rmmod nvidia_uvm

echo "DKMS imports what check_deb.sh built for this kernel"
quiet dkms ldtarball /debs/given/built.tar.gz
version=$(modinfo -F version "$modules/nvidia-current-open.ko")
quiet dkms install -m nvidia-uvm-vmem -v "$version" -k "$kernel"
dkms status
dkms status | grep -q "nvidia-uvm-vmem/$version, $kernel, .*: installed"

echo "loaded by modprobe"
modprobe nvidia-uvm
patched
test "$(cat /sys/module/nvidia_uvm/parameters/uvm_leak_checker)" = 1
nodes

echo "used: by a program linked to the package's library, and by the self test"
cat >/tmp/program.c <<'PROGRAM'
#include <stdio.h>
#include <vmem.h>

int main(void) {
  struct vmem_open_opts opts = {.size = sizeof(opts), .backend = "uvm"};
  struct vmem_stats stats = {.size = sizeof(stats)};
  struct vmem_op op = {.op = VMEM_OP_POPULATE, .bytes = 1 << 20, .count = 1};
  vmem_t vm;
  int bad = vmem_open(&opts, &vm) || vMemReserve(vm, 1 << 30, NULL, &op.addr) || vmem_batch(vm, &op, 1, NULL, 0, 0) ||
            vmem_get_stats(vm, &stats) || stats.mapped_bytes != 1 << 20 || vMemFree(vm, op.addr, VMEM_FREE_UNMAP) ||
            vmem_close(vm);
  printf("%llu bytes were mapped %s\n", (unsigned long long)stats.mapped_bytes, bad ? vmem_last_error() : "");
  return bad;
}
PROGRAM
# shellcheck disable=SC2046 # split into words
gcc -Wall -Werror -o /tmp/program /tmp/program.c $(pkg-config --cflags --libs vmem)
/tmp/program
PYTHONPATH=/debs/given/python python3 -B -m pyvmem selftest --backend uvm --samples 0

echo "purge while the module is loaded: the next load gets the stock module"
purge vmem-dkms
patched
rmmod nvidia_uvm
modprobe nvidia-uvm
nodes
if patched; then exit 1; fi
rmmod nvidia_uvm
rmmod nvidia
if grep nvidia /proc/modules /proc/devices; then exit 1; fi
rm -f /dev/nvidia*
if find /lib/modules /usr/src /var/lib/dkms -name 'nvidia-uvm*' | grep .; then exit 1; fi
purge libvmem0 libvmem-dev
nothing_left "$kernel"
echo "passed"
