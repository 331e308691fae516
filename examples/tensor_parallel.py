# SPDX-License-Identifier: MIT
"""A KV cache on every tensor-parallel rank: an engine's loop with random requests.

Two ranks on one machine, with NCCL if torch sees a GPU for each, otherwise on the CPU with gloo:

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Two machines with one rank each; run this on both, with the address of the first:

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/tensor_parallel.py

The engine decides how processes are started and find each other (torchrun, ray, its own way). The
cache only needs their torch.distributed group, and the same calls on every rank.
"""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist

from pyvmem import KVCacheConfig
from pyvmem.kvcache.distributed import ParallelKVCache, RankFailed, shard_kv_heads

MIB = 1 << 20


def serve(cache: ParallelKVCache, iterations: int) -> int:
    """Runs prefill, decoding and preemption; returns the token count, the same on all ranks."""
    chance = random.Random(0)  # stands in for a scheduler that sends its decisions to all ranks
    lens = [0] * cache.config.max_batch
    tokens = 0
    for _ in range(iterations):
        if cache.available_pages > 0 and chance.random() < 0.3:
            length = chance.randint(1, cache.config.max_seq_len // 2)
            reqid = cache.alloc_reqid(length)
            if reqid is not None:
                lens[reqid] = length
        try:
            with cache.together():  # a small all_reduce tells whether a rank has failed
                answer = cache.step(lens)
        except RankFailed as error:
            print(f"rank {dist.get_rank()}: {error}")
            cache.recover()  # every rank does this; the requests must be recomputed
            lens = [0] * len(lens)
            continue
        if answer == -1:  # memory is short; every rank gets this result
            longest = max(range(len(lens)), key=lens.__getitem__)
            cache.free_reqid(longest)
            lens[longest] = 0
            continue
        # Here the model runs over cache.k(layer) and cache.v(layer), with its own collectives.
        tokens += sum(1 for length in lens if length)
        lens = [min(one + 1, cache.config.max_seq_len) if one else 0 for one in lens]
        cache.step_async(lens)
    return tokens


def main() -> None:
    """Creates the process group and the cache, then serves."""
    if "LOCAL_RANK" not in os.environ:  # torchrun sets it
        raise SystemExit(__doc__)
    local, world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= world
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    config = KVCacheConfig(
        num_layers=4,
        num_kv_heads=shard_kv_heads(8, dist.get_world_size()),
        head_dim=128,
        dtype="bfloat16",
        max_batch=8,
        max_seq_len=2048,
        memory_limit=64 * MIB,  # per rank
    )
    with ParallelKVCache(config, backend="auto" if on_gpu else "host") as cache:
        tokens = serve(cache, 500)
        stats = cache.stats()
        print(
            f"rank {dist.get_rank()}: {tokens} tokens, {stats.total_pages} pages, "
            f"{stats.short} preemptions"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
