# SPDX-License-Identifier: MIT
"""A driver source of two small modules, laid out like NVIDIA's, which builds in seconds.

nvidia.ko exports one function, which nvidia-uvm.ko calls. This is enough to test driver discovery,
symbol versions and DKMS; the real driver's behavior is tested in the guest.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

KBUILD = """\
# SPDX-License-Identifier: MIT
$(foreach _module, $(NV_KERNEL_MODULES), $(eval include $(src)/$(_module)/$(_module).Kbuild))
ccflags-y += -DNV_VERSION_STRING=\\"{version}\\" -I$(src)/nvidia
"""

MAKEFILE = """\
# SPDX-License-Identifier: MIT
modules:
\t$(MAKE) -C $(SYSSRC) M=$(CURDIR) KBUILD_OUTPUT=$(SYSOUT) \\
\t\tNV_KERNEL_MODULES="$(NV_KERNEL_MODULES)" modules
"""

NVIDIA_KBUILD = """\
# SPDX-License-Identifier: MIT
obj-m += nvidia.o
nvidia-y := nvidia/nv.o
NV_CONFTEST_FUNCTION_COMPILE_TESTS += mini
"""

# The symbol's version is computed from the fields.
HEADER = """\
/* SPDX-License-Identifier: MIT OR GPL-2.0 */
struct mini_info {{ {fields} }};
int nvUvmInterfaceMini(struct mini_info *info);
"""

NVIDIA = """\
// SPDX-License-Identifier: {words}
#include <linux/module.h>
#include "mini.h"

int nvUvmInterfaceMini(struct mini_info *info)
{{
    return info->value;
}}
EXPORT_SYMBOL(nvUvmInterfaceMini);

MODULE_LICENSE("{licence}");
MODULE_VERSION(NV_VERSION_STRING);
"""

UVM_KBUILD = """\
# SPDX-License-Identifier: MIT
obj-m += nvidia-uvm.o
nvidia-uvm-y := nvidia-uvm/uvm.o
"""

UVM = """\
// SPDX-License-Identifier: MIT OR GPL-2.0
#include <linux/module.h>
#include "mini.h"

{parameter}

static int __init mini_init(void)
{{
    struct mini_info info = {{ .value = 0 }};

    return nvUvmInterfaceMini(&info);
}}

static void __exit mini_exit(void)
{{
}}

module_init(mini_init);
module_exit(mini_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION(NV_VERSION_STRING);
"""

PARAMETER = """\
static unsigned uvm_vmem_limit;
module_param(uvm_vmem_limit, uint, S_IRUGO);"""


def write_driver(
    folder: Path,
    version: str = "535.261.03",
    *,
    fields: str = "int value;",
    patched: bool = True,
    proprietary: bool = False,
) -> Path:
    """Writes a driver source; different `fields` give the exported symbol a different version."""
    licence, words = ("NVIDIA", "none") if proprietary else ("Dual MIT/GPL", "MIT OR GPL-2.0")
    files = {
        "Kbuild": KBUILD.format(version=version),
        "Makefile": MAKEFILE,
        "conftest.sh": "#!/bin/sh\n# SPDX-License-Identifier: MIT\n",
        "common/inc/mini.txt": "\n",
        "nvidia/nvidia.Kbuild": NVIDIA_KBUILD,
        "nvidia/mini.h": HEADER.format(fields=fields),
        "nvidia/nv.c": NVIDIA.format(licence=licence, words=words),
        "nvidia-uvm/nvidia-uvm.Kbuild": UVM_KBUILD,
        "nvidia-uvm/uvm.c": UVM.format(parameter=PARAMETER if patched else ""),
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def make_driver(tree: Path, source: Path, build: Path) -> None:
    """Builds both modules of a driver source, to stand in for an installed driver."""
    command = ["make", "modules", f"SYSSRC={source}", f"SYSOUT={build}"]
    command.append("NV_KERNEL_MODULES=nvidia nvidia-uvm")
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
