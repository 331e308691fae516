#!/bin/sh
# SPDX-License-Identifier: MIT
# Run by scripts/check_wheel_debian.py in a fresh Debian system, with the wheel and its dependencies in /wheels:
# installs it with pip, without a network, and uses it as an ordinary user.
set -eu
version=$1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

for tool in cc gcc clang nvcc nvidia-smi; do
	if command -v "$tool"; then
		echo "the system has $tool: it must have no compiler and no CUDA"
		exit 1
	fi
done
python3 -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')"

python3 -m venv /venv
/venv/bin/pip install -q --no-index --find-links /wheels pyvmem

user() {
	(cd / && setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/nonexistent "$@")
}

user /venv/bin/python -c "
import sys
from pathlib import Path
import pyvmem._vmem
file = Path(pyvmem._vmem.__file__)
if file.name != '_vmem.abi3.so' or not file.is_relative_to('/venv'):
    sys.exit(f'{file} is not the wheel\'s')
"
user /venv/bin/python /check_wheel.py
user /venv/bin/vmem probe | tee /tmp/probe
grep -Eq '^host +used ' /tmp/probe
test "$(grep -Ec '^(uvm|stock|cuda) +not usable .* E[A-Z]+: ' /tmp/probe)" = 3
user /venv/bin/vmem selftest --backend host --samples 0 >/tmp/selftest || {
	cat /tmp/selftest
	exit 1
}
tail -n 1 /tmp/selftest

/venv/bin/pip uninstall -q -y pyvmem
if find /venv -name '*vmem*' | grep .; then exit 1; fi
