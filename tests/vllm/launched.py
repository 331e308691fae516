# SPDX-License-Identifier: MIT
"""A process started by torchrun, whose engine is a data-parallel rank.

Its arguments are the folder for its results and the `LLM` options as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from test_engine import answer, at_rest, elastic_of, prompts
from vllm import LLM


def main() -> None:
    """Writes the answers (only two on rank 1), the hits, and the bytes mapped at the end."""
    rank = int(os.environ["RANK"])
    llm = LLM(distributed_executor_backend="external_launcher", **json.loads(sys.argv[2]))
    elastic = elastic_of(llm)
    asked = prompts()[: 2 if rank else None]
    found = [answer(llm, asked) for _ in range(2)]
    at_rest(llm)
    hits = elastic.hits
    assert llm.reset_prefix_cache()
    at_rest(llm)
    said = {"tokens": found, "hits": hits, "mapped": elastic.backing.mapped_bytes}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(said))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
