# SPDX-License-Identifier: MIT
"""An engine's second machine, which runs ``vllm serve --headless --node-rank 1``.

Its argument is the `EngineArgs` options as JSON.
"""

from __future__ import annotations

import json
import sys

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def main() -> None:
    """Runs until the engine stops."""
    args = AsyncEngineArgs(**json.loads(sys.argv[1]))
    config = args.create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


if __name__ == "__main__":
    main()
