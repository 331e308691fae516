# SPDX-License-Identifier: MIT
"""`vmem bench models`: decode and prefill of several models, compared with transformers' cache.

These are real transformers models with random weights: the shapes of well-known models, but fewer
layers. They run in four ways, each with the same tokens:

    dynamic   ``model.forward`` with transformers' own `DynamicCache`, attention by SDPA
    vmem      ``model.forward`` with `pyvmem.hf.VMemCache`
    attend    requests concatenated in one batch without padding and `pyvmem.attention` over the
              slots (given the up-projections of MLA), as in engines with continuous batching
    fp8       like ``attend``, with 8-bit keys and values, if a kernel supports them

A last part times the kernels themselves (heads.py).
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pyvmem.bench.record import Part
from pyvmem.bench.running import conducted
from pyvmem.bench.timing import Deadline, Samples, quiet
from pyvmem.errors import VMemError
from pyvmem.layouts.options import count
from vmem_bench import heads
from vmem_bench.command import Command, WrongResult, add_common, add_page, open_command

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["KINDS", "add_parser", "run"]

_METHOD = {
    "clock": "perf_counter_ns from before the forward pass until the device is idle",
    "rounds": "the ways take turns, kind after kind; the first round is discarded",
    "memory": "bytes of keys and values after the last token, as tensor storage or mapped pages",
    "peak": "torch's largest allocation during a way's rounds, without the weights; GPU only",
    "check": "the last logits are compared with the first way's; see largest_difference",
}
_NAME = "vmem-bench-models"


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model: the class name of its transformers configuration, without "Config".
        what: description of the model.
        fields: fields of its configuration at full size.
        small: the fields that a quick run changes.
    """

    model: str
    what: str
    fields: dict[str, Any]
    small: dict[str, Any]


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
KINDS = {
    "qwen3": Kind(
        "Qwen3",
        "Qwen3-8B's layers, 12 of 36",
        {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 12,
        },
        _TINY,
    ),
    "mistral": Kind(
        "Mistral",
        "Mistral-7B's layers with its window of 4,096, 12 of 32",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "num_hidden_layers": 12,
            "sliding_window": 4096,
        },
        {**_TINY, "sliding_window": 48},
    ),
    "gemma3": Kind(
        "Gemma3Text",
        "Gemma-3-4B's layers, 10 with a window of 1,024 and 2 without, of 34",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "num_hidden_layers": 12,
            "sliding_window": 1024,
            "layer_types": [_SLIDING] * 5 + [_FULL] + [_SLIDING] * 5 + [_FULL],
        },
        {
            **_TINY,
            "sliding_window": 48,
            "num_hidden_layers": 3,
            "layer_types": [_SLIDING, _FULL, _SLIDING],
        },
    ),
    "deepseek": Kind(
        "DeepseekV3",
        "DeepSeek-V3's attention (MLA), 4 of its dense layers",
        {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "qwen3next": Kind(
        "Qwen3Next",
        "Qwen3-Next's layers with dense MLPs, 9 of linear attention and 3 of full, of 48",
        {
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 12,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "mlp_only_layers": list(range(12)),
        },
        {
            **_TINY,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
    ),
}
WAYS = {
    "dynamic": "transformers' DynamicCache",
    "vmem": "VMemCache",
    "attend": "pyvmem.attention, no padding",
    "fp8": "pyvmem.attention, 8-bit keys and values",
}


def _model(kind: Kind, quick: bool, device: torch.device) -> Any:
    """Creates the model with random weights, in bfloat16 on a GPU."""
    import torch
    import transformers

    fields = {**kind.fields, **({"num_hidden_layers": 2, **kind.small} if quick else {})}
    fields |= {"vocab_size": 512 if quick else 32000, "max_position_embeddings": 1 << 17}
    config = getattr(transformers, kind.model + "Config")(
        **fields, attn_implementation="sdpa", pad_token_id=0, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    name = kind.model.removesuffix("Text") + "ForCausalLM"
    try:
        with device:
            return getattr(transformers, name)(config).eval()
    finally:
        torch.set_default_dtype(before)


def _forget_locals(error: BaseException | None) -> None:
    """Clears the frames of an error and its causes, because they hold a cache's tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Way:
    """Runs equally long requests on one cache, as a context manager that frees all memory."""

    def __init__(self, model: Any, command: Command, batch: int, longest: int) -> None:
        self.model, self.batch, self.longest = model, batch, longest
        self.page, self.backend, self.ordinal = command.page, command.backend, command.args.device
        self.kernel: str = command.args.kernel
        self.notes: list[str] = []

    def __enter__(self) -> Any:
        with ExitStack() as undo:
            self.open(undo)
            self._stack = undo.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        _forget_locals(exc[1])
        self._stack.__exit__(*exc)

    def open(self, stack: ExitStack) -> None:
        """Creates the cache."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the logits ``[batch, vocabulary]`` of the last of ``[batch, new]`` tokens."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Returns the bytes that keys, values and states currently occupy."""
        raise NotImplementedError

    def policy(self) -> dict[str, Any]:
        """Returns the policy settings of our caches."""
        return {"page_size": self.page, "low_watermark": 0.0}


class _Dynamic(_Way):
    def open(self, stack: ExitStack) -> None:
        from transformers import DynamicCache

        self.cache: Any = DynamicCache(config=self.model.config)
        stack.callback(self._drop)

    def _drop(self) -> None:
        self.cache = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from pyvmem.hf.keyword import CACHE

        found: torch.Tensor = self.model(ids, **{CACHE: self.cache}, logits_to_keep=1).logits
        return found[:, -1]

    def nbytes(self) -> int:
        kept = [
            one
            for layer in self.cache.layers
            for one in (
                [*layer.conv_states.values(), *layer.recurrent_states.values()]
                if hasattr(layer, "conv_states")
                else [layer.keys, layer.values]
            )
        ]
        return sum(one.untyped_storage().nbytes() for one in kept if one is not None)


class _VMem(_Dynamic):
    def open(self, stack: ExitStack) -> None:
        from pyvmem.hf import VMemCache

        self.cache = stack.enter_context(
            VMemCache(
                self.model.config,
                self.batch,
                self.longest,
                backend=self.backend,
                **self.policy(),
            )
        )

    def nbytes(self) -> int:
        return int(self.cache.kvcache.stats().mapped_bytes)


class _Attend(_Way):
    dtype = ""  # type of keys and values, or "" for the model's

    def open(self, stack: ExitStack) -> None:
        from pyvmem.attention import Attention, overread_rows
        from pyvmem.hf.latent import absorbed, latent_rank
        from pyvmem.hf.shapes import row_shapes
        from pyvmem.kvcache.layered_cache import cache_of

        config, device = self.model.config, self.model.device
        tile = overread_rows("fa3", device) if device.type == "cuda" else 0
        cache = cache_of(
            row_shapes(config, "pyvmem.attention"),
            None,
            self.backend,
            self.ordinal,
            dtype=self.dtype or self.model.dtype,
            max_batch=self.batch,
            max_seq_len=self.longest,
            **{**self.policy(), "window_tile": 256, "overread_rows": tile},
        )
        self.cache: Any = stack.enter_context(cache)
        self.attend: Any = Attention(cache, self.kernel, v_head_dim=latent_rank(config))
        stack.callback(self._drop)
        self.notes = [str(choice) for choice in self.attend.choices]
        self.lengths = [0] * self.batch
        for _ in range(self.batch):
            cache.alloc_reqid()
        stack.enter_context(absorbed(self.model))
        self._register()
        self.model.set_attn_implementation(_NAME)
        stack.callback(self.model.set_attn_implementation, "sdpa")

    def _drop(self) -> None:
        self.attend.close()

    @staticmethod
    def _register() -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, _attention)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        import torch

        new = ids.shape[1]
        self.lengths = [length + new for length in self.lengths]
        if self.cache.step(self.lengths):
            raise RuntimeError("memory is short")
        slots = list(range(self.batch))
        step = self.attend.batch(slots, [new] * self.batch, self.lengths)
        ends = torch.arange(1, self.batch + 1, device=ids.device) * new - 1
        found: torch.Tensor = self.model(
            input_ids=ids.reshape(1, -1),
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=ends,
            vmem_models=(self.attend, step),
        ).logits
        return found[0]

    def nbytes(self) -> int:
        return int(self.cache.stats().mapped_bytes)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **more: Any
) -> tuple[Any, None]:
    """Computes attention for transformers, which passes ``vmem_models`` through from `forward`."""
    from pyvmem.hf.latent import UP

    attend, step = more["vmem_models"]
    layer = int(module.layer_idx)
    k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)
    attend.write(layer, k, None if attend.is_latent(layer) else v, step)
    q = query[0].transpose(0, 1)
    out = attend(q, layer, step, scale=more.get("scaling"), up=more.get(UP))
    return out[None], None


class _EightBits(_Attend):
    dtype = "float8_e4m3fn"  # a scale of 1 suffices: normalized keys and values are in range


_CLASSES: dict[str, type[_Way]] = {
    "dynamic": _Dynamic,
    "vmem": _VMem,
    "attend": _Attend,
    "fp8": _EightBits,
}


@contextmanager
def _weights(kind: Kind, quick: bool, device: torch.device) -> Iterator[Any]:
    """Creates the model for a `with` block, and frees its memory at the end."""
    import gc

    import torch

    gc.collect()  # reference cycles left over from an earlier part would count as weights
    model = _model(kind, quick, device)
    try:
        with torch.inference_mode():
            yield model
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _time(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    import torch

    start = time.perf_counter_ns()
    out = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out, time.perf_counter_ns() - start


def _measure(command: Command, part: Part, name: str, device: torch.device, left: Deadline) -> None:
    """Adds a kind's rows: for each way, the prefill of one request and the decoding of a batch."""
    import torch

    args, quick = command.args, command.quick
    kind = KINDS[name]
    tokens = min(args.tokens, 96) if quick else args.tokens
    batch = min(args.batch, 2) if quick else args.batch
    steps = min(args.steps, 4) if quick else args.steps
    rounds = 2 if quick else args.rounds
    cuda = device.type == "cuda"
    command.record.options.update(steps=steps)
    first: torch.Tensor | None = None
    differences: dict[str, float] = {}
    with _weights(kind, quick, device) as model:
        dice = torch.Generator().manual_seed(3)
        vocabulary = model.config.vocab_size
        prompts = torch.randint(1, vocabulary, (batch, tokens), generator=dice).to(device)
        new = torch.randint(1, vocabulary, (batch, steps), generator=dice).to(device)
        weights = torch.cuda.memory_allocated(device) if cuda else 0
        for way, what in WAYS.items():
            if not left.allows():
                part.not_run(f"decode/{way}", "the deadline passed first")
                continue
            command.show(f"{name}: {what}")
            prefill, decode = Samples(), Samples()
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            try:
                out, nbytes, notes = _rounds(
                    _CLASSES[way], model, command, prompts, new, rounds, device, (prefill, decode)
                )
            except (RuntimeError, VMemError, torch.OutOfMemoryError) as error:
                part.not_run(f"decode/{way}", str(error).splitlines()[0])
                continue
            part.notes += [f"{name}, {way}: {note}" for note in notes]
            about = f"{kind.what}: {what}"
            prefill.drop_first_round()
            decode.drop_first_round()
            part.time(f"prefill/{way}", f"prefill of {tokens:,}, {about}", way, prefill, unit="ms")
            text = f"decode, {batch} of {tokens:,}, {about}"
            part.time(f"decode/{way}", text, way, decode, unit="ms")
            part.value(f"memory/{way}", f"keys and values, {about}", way, nbytes, "bytes")
            if cuda:
                peak = torch.cuda.max_memory_allocated(device) - weights
                part.value(f"peak/{way}", f"torch's peak, {about}", way, peak, "bytes")
            if first is None:
                first = out
                command.write()
                continue
            difference = float((out - first).abs().max() / first.abs().max())
            what = f"largest difference of the last logits, relative to the largest logit, {about}"
            part.value(f"difference/{way}", what, way, difference, "x")
            differences[way] = difference
            if not difference <= largest_difference(way, cuda, differences):  # also catches NaN
                raise WrongResult(f"{name}, {way}: the logits differ by {difference:.2g}")
            command.write()


def largest_difference(way: str, cuda: bool, found: Mapping[str, float]) -> float:
    """Returns how far the last logits may be from the first way's, relative to the largest logit.

    The tolerance is 0.1 in bfloat16 and 0.001 in float32. An 8-bit element has 3 bits of mantissa
    and a bfloat16 element has 7, so rounding is 16 times as coarse and the difference may be 16
    times that of the same kernels with bfloat16, but at most 0.5, since unrelated logits differ by
    about 1.

    Args:
        way: one of `WAYS`.
        cuda: whether the model is on a GPU and therefore in bfloat16.
        found: the differences of earlier ways.
    """
    if way == "fp8":
        return min(0.5, 16 * found.get("attend", 0.1))
    return 0.1 if cuda else 1e-3


def _rounds(
    make: type[_Way],
    model: Any,
    command: Command,
    prompts: torch.Tensor,
    new: torch.Tensor,
    rounds: int,
    device: torch.device,
    samples: tuple[Samples, Samples],
) -> tuple[torch.Tensor, int, list[str]]:
    """Times prefills of one request, then decode steps of a batch.

    Returns the batch's last logits, its cache's size in bytes, and notes.
    """
    tokens, longest = prompts.shape[1], prompts.shape[1] + new.shape[1]
    with quiet():
        for _ in range(rounds + 1):
            with make(model, command, 1, longest) as one:
                took = _time(partial(one.forward, prompts[:1]), device)[1]
                samples[0].new_round().append(took)
        with make(model, command, len(prompts), longest) as many:
            for start in range(0, tokens, 2048):
                _time(partial(many.forward, prompts[:, start : start + 2048]), device)
            for step in range(new.shape[1]):
                ids = new[:, step : step + 1]
                out, took = _time(partial(many.forward, ids), device)
                samples[1].new_round().append(took)
            return out.float().cpu(), many.nbytes(), many.notes


def add_parser(which: Any) -> None:
    """Adds ``models`` to the benchmarks."""
    parser = which.add_parser(
        "models",
        help="decode and prefill of several models, compared with transformers' cache",
        description="Times transformers models with random weights on DynamicCache, VMemCache and "
        "pyvmem.attention. Full size needs a GPU with 40 GB.",
    )
    add_common(parser, 240)
    add_page(parser)
    add = parser.add_argument
    names = (*KINDS, heads.NAME)
    add("--kinds", default=",".join(names), help=f"some of {', '.join(names)} (all)")
    add("--tokens", type=count, default=8192, help="tokens of each prompt (8192)")
    add("--batch", type=count, default=8, help="requests that decode (8)")
    add("--steps", type=count, default=40, help="decode steps (40)")
    add("--rounds", type=count, default=5, help="prefills in each way (5)")
    add("--kernel", default="auto", help="kernel of pyvmem.attention (auto)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns the exit status from `ended`, or 2 for an unknown kind or an unusable back end.
    """
    import sys

    names = args.kinds.split(",")
    known = (*KINDS, heads.NAME)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(
            f"vmem bench: unknown kind {unknown[0]!r}; known: {', '.join(known)}", file=sys.stderr
        )
        return 2
    command = open_command(
        args, "models", _METHOD, tokens=args.tokens, batch=args.batch, kernel=args.kernel
    )
    if command is None:
        return 2
    for number, name in enumerate(names):
        part = command.record.part(name, KINDS[name].what if name in KINDS else heads.TITLE)
        with conducted(part):
            try:
                device = command.device()
                import transformers

                command.record.options["transformers"] = transformers.__version__
            except (RuntimeError, ImportError) as error:
                part.not_run("*", str(error))
            else:
                if not number:
                    command.load_fa3(part, device)
                left = Deadline(command.deadline.left / (len(names) - number))
                if name == heads.NAME:
                    heads.measure(command, part, device, left)
                else:
                    _measure(command, part, name, device, left)
        command.write()
    return command.finish()
