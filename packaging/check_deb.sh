#!/bin/sh
# SPDX-License-Identifier: MIT
# Run by scripts/check_deb.py in a fresh Debian system, with the packages in /debs: installs them, uses them
# as a user would, and purges them. To apt and dkms the driver looks installed: Debian's source, and an
# nvidia.ko that was built from it.
set -eu
kernel=$1
# shellcheck source=packaging/check_lib.sh
. /check_lib.sh

files >/tmp/before

echo "libvmem0, libvmem-dev: an example, linked dynamically and statically, on host memory"
install /debs/libvmem0_*.deb /debs/libvmem-dev_*.deb
example=/usr/share/doc/libvmem-dev/examples/growing_cache.c
# shellcheck disable=SC2046 # split into words
cc -Wall -Werror -o /tmp/shared "$example" $(pkg-config --cflags --libs vmem)
ldd /tmp/shared | grep -q 'libvmem.so.0 => /'
/tmp/shared host
# shellcheck disable=SC2046
cc -Wall -Werror -o /tmp/static "$example" $(pkg-config --cflags vmem) -l:libvmem.a -pthread -ldl
if ldd /tmp/static | grep libvmem; then exit 1; fi
/tmp/static host
test -s /usr/share/man/man3/vmem_open.3.gz
readelf -n "$(ldd /tmp/shared | awk '$1 == "libvmem.so.0" { print $3 }')" | grep -A 1 'Provider: vmem' | grep 'Name: map'

echo "vmem-dkms without a driver: installs, and reports that nothing was built"
install /debs/vmem-dkms_*.deb
grep -q 'the stock nvidia-uvm stays in use' /tmp/said.log
if vmem-dkms install 2>/tmp/said; then exit 1; fi
grep 'nvidia.ko of driver .* is not installed' /tmp/said
purge vmem-dkms

echo "vmem-dkms with the driver of nvidia-open-kernel-source"
modules=/lib/modules/$kernel/updates/dkms
mkdir -p "$modules"
cp /debs/given/nvidia.ko "$modules/nvidia-current.ko"
install /debs/vmem-dkms_*.deb
dkms status
dkms status | grep -q "nvidia-uvm-vmem/.*: installed"
depmod "$kernel" 2>/dev/null
modprobe --set-version "$kernel" --showconfig | grep '^install nvidia_uvm /usr/libexec/vmem/load-uvm'
test -x /usr/libexec/vmem/load-uvm
# For check_guest.sh: in its virtual machine compiling takes about 35 times as long.
version=$(modinfo -F version "$(find /lib/modules -name 'nvidia-uvm-vmem.ko*')")
quiet dkms mktarball -m nvidia-uvm-vmem -v "$version" -k "$kernel/$(uname -m)" --archive built.tar.gz
mv "/var/lib/dkms/nvidia-uvm-vmem/$version/tarball/built.tar.gz" /debs/given/

echo "purged: no file remains"
purge vmem-dkms
if find /lib/modules /usr/src /var/lib/dkms -name 'nvidia-uvm*' | grep .; then exit 1; fi
test -s "$modules/nvidia-current.ko"
purge libvmem0 libvmem-dev
rm -r "$modules"
nothing_left "$kernel"
echo "passed"
