# SPDX-License-Identifier: MIT
"""The interface for serving engines: requests as objects, on one `KVCache` or `LayeredCache`.

    cache = RequestCache.open(Model.of(model.config), Policy(max_batch=64))
    request = cache.admit(prompt)                  # maps its recorded prefix, allocates its pages
    while short := cache.extend({request: len(prompt)}):
        ...                                        # a Shortage: preempt a request, retry
    ...                                            # run the model on slot request.slot
    cache.prepare({request: len(prompt) + 1})      # maps in the background
    cache.release(request, tokens=prompt)          # and records its rows for the next turn

`RequestCache` is in the module `cache`. `request` and `shortage` define what its calls accept and
return, `prefix` defines leases and namespaces, `config` the model's shape and the policy, and
`background` the thread that runs slow calls.

`INTERFACE` is the version of this interface: the major number changes when programs have to change,
the minor number when something is added. The interface is built on `KVCache`'s own calls
(``alloc_reqid``, ``step``, ...), which keep the names from the vAttention paper and remain
available.
"""

from pyvmem.engine.cache import RequestCache
from pyvmem.engine.config import Model, Policy
from pyvmem.engine.prefix import Namespace, Prefix
from pyvmem.engine.request import Request, State
from pyvmem.engine.shortage import Shortage

__all__ = [
    "INTERFACE",
    "Model",
    "Namespace",
    "Policy",
    "Prefix",
    "Request",
    "RequestCache",
    "Shortage",
    "State",
]

INTERFACE = (1, 2)
