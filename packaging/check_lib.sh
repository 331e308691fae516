# SPDX-License-Identifier: MIT
# shellcheck shell=sh
# Functions for check_deb.sh and check_guest.sh, which check the Debian packages in /debs.
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

# Lists every file on the system, except in directories that any package installation changes.
files() {
	find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /debs -o -path /run \
		-o -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg \) -prune -o -print | sort
}

# Fails, and prints the difference, if files were added or removed since /tmp/before was written. Ignores the
# keys and folder that dkms creates and the lists that depmod writes.
nothing_left() {
	files >/tmp/after
	diff /tmp/before /tmp/after | grep '^[<>]' | grep -v "/var/lib/dkms\$\|/var/lib/dkms/mok\|/var/lib/dkms/dkms_dbversion" |
		grep -v "/lib/modules/$1/modules\.\|/lib/modules/$1/updates" >/tmp/left || true
	if [ -s /tmp/left ]; then
		cat /tmp/left
		return 1
	fi
}

quiet() {
	"$@" </dev/null >/tmp/said.log 2>&1 || {
		cat /tmp/said.log
		return 1
	}
}

install() {
	quiet apt-get install -qq -y --no-install-recommends "$@"
}

purge() {
	quiet apt-get purge -qq -y "$@"
}
