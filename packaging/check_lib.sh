# SPDX-License-Identifier: MIT
# shellcheck shell=sh
# What the checks of the Debian packages share; read by check_deb.sh and check_guest.sh. The packages are
# in /debs.
export DEBIAN_FRONTEND=noninteractive LC_ALL=C

# All files of the system but those that any package's installation writes.
files() {
	find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /debs -o -path /run \
		-o -path /var/cache -o -path /var/log -o -path /var/lib/apt -o -path /var/lib/dpkg \) -prune -o -print | sort
}

# Fails, and shows them, if files came or went since /tmp/before was written. dkms makes its keys and its
# folder; depmod its lists: that is their own business.
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
