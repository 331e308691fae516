# SPDX-License-Identifier: MIT
"""The interface for serving engines: requests as objects, on one `KVCache` or `LayeredCache`.

    cache = RequestCache.open(Model.of(model.config), Policy(max_batch=64))
    request = cache.admit(prompt)                  # its recorded prefix mapped, its pages taken
    while short := cache.extend({request: len(prompt)}):
        ...                                        # a Shortage: preempt a request, try again
    ...                                            # run the model on slot request.slot
    cache.prepare({request: len(prompt) + 1})      # maps in the background
    cache.release(request, tokens=prompt)          # and leaves its rows for the next turn

The modules: `request` and `shortage` are what calls take and return, `prefix` has leases and
namespaces, `config` the model's shape and the policy, `background` the thread for slow calls, and
`cache` is `RequestCache`.

`INTERFACE` is the version of this interface: the major number changes when programs must change,
the minor one when something is added. `KVCache`'s own calls (``alloc_reqid``, ``step``, ...), which
vAttention's paper names, are what this interface stands on; they stay.
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
