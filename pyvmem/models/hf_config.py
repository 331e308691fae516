# SPDX-License-Identifier: MIT
"""Reads layer shapes, dtype and limits from Hugging Face configurations.

Only this module knows the attributes of these configurations; the cache, the layouts and the
transformers plug-in all use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pyvmem.errors import InvalidArgument, NotSupported
from pyvmem.models.shapes import DTYPE_BYTES, EmptyShape, LayerShape, Shape, StateShape
from pyvmem.plumbing.validation import bounded, invalid

__all__ = [
    "ATTENTION",
    "NO_ATTENTION",
    "config_of",
    "dtype_name",
    "dtype_of",
    "layer_shapes",
    "longest_of",
    "plain_rows",
    "read_values",
    "text_config",
    "uniform_layers",
]

_FULL = ("full_attention", "attention")
_SLIDING = "sliding_attention"
_CHUNKED = "chunked_attention"
_STATE = ("linear_attention", "mamba", "conv")
_EMPTY = ("moe", "mlp")

ATTENTION = {*_FULL, _SLIDING}
NO_ATTENTION = (*_STATE, *_EMPTY)
"""The kinds of layers without attention: those with a state, and those that store nothing."""


def uniform_layers(config: Any, given: Collection[str]) -> dict[str, Any]:
    """Returns the fields of `KVCacheConfig` for a transformers model with identical layers.

    Args:
        config: a transformers ``PreTrainedConfig``, or any object with its attributes.
        given: fields that the caller sets itself.

    Raises:
        InvalidArgument: an attribute is missing, or layers store anything other than keys and
            values.
    """
    text = text_config(config)
    kinds = set(_attribute(text, "layer_types") or ()) - {*_FULL, _CHUNKED, _SLIDING}
    if kinds and "num_layers" not in given:
        raise invalid(
            f"{type(config).__name__} has layers of kind {', '.join(sorted(kinds))}, which "
            "store something else; use layer_shapes and LayeredCache",
            op="KVCacheConfig.from_hf",
        )
    found: dict[str, Any] = {}
    rank = _attribute(text, "kv_lora_rank")
    if rank and not {"num_kv_heads", "head_dim", "tensors_per_layer"} & set(given):
        found.update(num_kv_heads=1, head_dim=_latent(text), tensors_per_layer=1)
    readers: dict[str, Callable[[Any], Any]] = {
        "window": _window,
        "num_layers": _num_layers,
        "num_kv_heads": _num_kv_heads,
        "head_dim": _head_dim,
        "dtype": lambda _: dtype_of(config),
        "max_seq_len": longest_of,
    }
    for field, read in readers.items():
        if field not in found and field not in given:
            found[field] = read(text)
    return found


def text_config(config: Any) -> Any:
    """Returns the part of a transformers configuration that describes the language model.

    Raises InvalidArgument if the configuration has several language models.
    """
    get_text_config = getattr(config, "get_text_config", None)
    try:
        return get_text_config() if callable(get_text_config) else config
    except ValueError as error:
        raise invalid(f"{type(config).__name__}: {error}", op="layer_shapes") from None


def _attribute(text: Any, name: str) -> Any:
    """Returns an attribute, or None if the configuration does not have it.

    Raises InvalidArgument if the attribute differs between layers, which transformers reports with
    its own error.
    """
    try:
        return getattr(text, name, None)
    except RuntimeError:
        raise invalid(
            f"{type(text).__name__}: its layers differ in {name}; use layer_shapes",
            op="layer_shapes",
        ) from None
    except ValueError as error:
        raise invalid(f"{type(text).__name__}: {error}", op="layer_shapes") from None


def _first(text: Any, field: str, *names: str) -> Any:
    """Returns the value of the first of these attributes that is set."""
    for name in names:
        value = _attribute(text, name)
        if value is not None:
            return value
    raise invalid(
        f"{type(text).__name__} has no {' or '.join(names)}; pass {field}",
        op="layer_shapes",
    )


def _num_layers(text: Any) -> Any:
    return _first(text, "num_layers", "num_hidden_layers", "n_layer")


def _num_kv_heads(text: Any) -> Any:
    """Returns the number of KV heads across all ranks. Falcon has a flag for a single KV head."""
    own = _attribute(text, "num_key_value_heads")
    if own is None and _attribute(text, "multi_query"):
        return _attribute(text, "num_kv_heads") if text.new_decoder_architecture else 1
    return _first(text, "num_kv_heads", "num_key_value_heads", "num_attention_heads", "n_head")


def _head_dim(text: Any) -> Any:
    own = _attribute(text, "head_dim")
    if own is not None:
        return own
    hidden = _first(text, "head_dim", "hidden_size", "n_embd")
    heads = _first(text, "head_dim", "num_attention_heads", "n_head")
    if heads < 1 or hidden % heads:
        raise invalid(
            f"hidden size {hidden} is not a multiple of {heads} heads; pass head_dim",
            op="layer_shapes",
        )
    return hidden // heads


def _latent(text: Any) -> Any:
    """Returns the number of elements of MLA's latent, including the rotary part."""
    return text.kv_lora_rank + _first(text, "head_dim", "qk_rope_head_dim")


def dtype_of(config: Any) -> Any:
    """Returns the dtype of a model's weights, and therefore of its keys and values.

    Raises InvalidArgument if neither the text configuration nor the full one specifies it.
    """
    text = text_config(config)
    for one in (text, config):
        for name in ("dtype", "torch_dtype"):
            value = _attribute(one, name)
            if value is not None:
                return value
    raise invalid(
        f"{type(text).__name__} has no dtype or torch_dtype; pass dtype", op="layer_shapes"
    )


def longest_of(config: Any) -> Any:
    """Returns the maximum sequence length that a model supports, in tokens."""
    return _first(
        text_config(config),
        "max_seq_len",
        "max_position_embeddings",
        "n_positions",
        "model_max_length",
    )


def _kinds(text: Any) -> Any:
    """Returns each layer's kind, or None if all layers are of the same kind.

    RecurrentGemma stores the kinds in a separate attribute."""
    return _attribute(text, "layer_types") or _attribute(text, "layers_block_type")


def _window(text: Any) -> int:
    """Returns the window shared by all layers; 0 if a layer has full attention."""
    kinds = _kinds(text)
    if kinds is not None and set(kinds) != {_SLIDING}:
        return 0
    if getattr(text, "use_sliding_window", True) is False:
        return 0
    return _attribute(text, "sliding_window") or 0


def layer_shapes(config: Any) -> list[Shape]:
    """Returns the shape of every layer of a transformers model, for `LayeredCache`.

    Sliding layers, listed in ``layer_types``, have a window; without that list, ``sliding_window``
    applies to all layers. Layers with chunked attention also have a window, the size of a chunk,
    since a token never attends to more tokens than that. MLA (``kv_lora_rank``) has one latent
    tensor, as in engines that absorb the up-projections; transformers itself stores keys and
    values. Linear attention, state spaces and short convolutions have a `StateShape`, if the
    configuration has the fields of Qwen3-Next, Kimi Linear, Jamba, Bamba, Nemotron-H or LFM2.
    Layers without attention, and layers that read another layer's keys, have an `EmptyShape`.

    Args:
        config: a ``PreTrainedConfig``, or any object with its attributes. For a multi-modal model,
            the part that ``get_text_config`` returns is used.

    Raises:
        InvalidArgument: an attribute is missing, or a layer stores data of another kind.
    """
    text = text_config(config)
    count = bounded("num_layers", _num_layers(text), 1, 1 << 14, op="layer_shapes")
    _refuse_cross_attention(config, text)
    kinds = _kinds(text)
    if kinds is not None and len(kinds) != count:
        raise invalid(
            f"layer_types names {len(kinds)} layers, but the model has {count}", op="layer_shapes"
        )
    modes = _attribute(text, "kv_sharing_modes") or _shared_last(text, count)
    shapes: list[Shape] = []
    for layer in range(count):
        own = _layer_config(text, layer)
        if modes[layer] == "reuse":
            shapes.append(EmptyShape())
        elif kinds is None:
            shapes.append(_rows(own, _window(own)))
        else:
            shapes.append(_shape(own, layer, kinds[layer]))
    return shapes


def _refuse_cross_attention(config: Any, text: Any) -> None:
    """Raises InvalidArgument for models with cross-attention."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        raise invalid(
            f"{name}: a decoder that attends to an encoder also stores the encoder's rows",
            op="layer_shapes",
        )
    crossed = _attribute(text, "cross_attention_layers")
    if crossed:
        raise invalid(
            f"{name}: layer {crossed[0]} attends only to an image; rows that do not grow with the "
            "tokens are not supported",
            op="layer_shapes",
        )


def _shared_last(text: Any, count: int) -> list[str]:
    """Emulates transformers' ``kv_sharing_modes`` for configurations that only have a count."""
    shared = _attribute(text, "num_kv_shared_layers") or 0
    return [""] * (count - shared) + ["reuse"] * shared


def _shape(own: Any, layer: int, kind: str) -> Shape:
    """Returns the shape of a layer of this kind."""
    if kind in _FULL:
        return _rows(own, 0)
    if kind == _SLIDING:
        window = _attribute(own, "sliding_window")
        if not window:
            raise invalid(
                f"layer {layer} is {kind}, but sliding_window is {window}", op="layer_shapes"
            )
        return _rows(own, window)
    if kind == _CHUNKED:
        return _rows(own, _attribute(own, "attention_chunk_size") or 0)
    if kind in _EMPTY:
        return EmptyShape()
    if kind in _STATE:
        state = _state(own, kind)
        if state is not None:
            return state
        why = "the state's description in its configuration is not supported"
    elif kind.startswith("hybrid"):
        why = "a layer with both keys and values and a state is not supported"
    else:
        why = "this kind of layer is not supported"
    raise invalid(f"layer {layer} is {kind}: {why}", op="layer_shapes")


def _state(text: Any, kind: str) -> StateShape | None:
    """Returns a layer's state shape; None if the configuration has no known fields for it."""

    def get(name: str) -> Any:
        return getattr(text, name, None)

    if getattr(text, "number_of_conv_states", 1) != 1:
        return None
    if kind == "conv":
        return (
            StateShape(conv=(text.hidden_size, text.conv_L_cache)) if get("conv_L_cache") else None
        )
    if get("linear_num_value_heads"):
        keys, values = get("linear_key_head_dim"), get("linear_value_head_dim")
        channels = 2 * text.linear_num_key_heads * keys + text.linear_num_value_heads * values
        return StateShape(
            (channels, text.linear_conv_kernel_dim), (text.linear_num_value_heads, keys, values)
        )
    if heads := get("linear_num_heads"):
        wide = text.linear_head_dim
        return StateShape((3 * heads * wide, text.linear_conv_kernel_dim), (heads, wide, wide))
    if heads := get("mamba_num_heads"):
        if not get("ssm_state_size"):
            return None
        wide, size = heads * text.mamba_head_dim, text.ssm_state_size
        channels = wide + 2 * text.n_groups * size
        return StateShape((channels, text.conv_kernel), (heads, text.mamba_head_dim, size))
    if not get("mamba_d_state"):
        return None
    size, tokens = text.mamba_d_state, text.mamba_d_conv
    if heads := get("mamba_n_heads"):
        wide = heads * text.mamba_d_head
        channels = wide + 2 * text.mamba_n_groups * size
        return StateShape((channels, tokens), (heads, text.mamba_d_head, size))
    wide = text.mamba_expand * text.hidden_size
    return StateShape((wide, tokens), (wide, size))


class _Own:
    """A configuration with one layer's overrides applied."""

    def __init__(self, text: Any, own: Mapping[str, Any]) -> None:
        self._text = text
        self._own = own

    def __getattr__(self, name: str) -> Any:
        own: Mapping[str, Any] = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_text"], name)


def _layer_config(text: Any, layer: int) -> Any:
    """Returns the configuration of one layer, with ``per_layer_config`` applied (Gemma 4)."""
    every = getattr(text, "per_layer_config", None)
    if not every:
        return text
    if not isinstance(every, Mapping):
        return every[layer]  # a list from transformers, with a complete configuration per layer
    # In a file, the keys are strings with leading zeros.
    own: Any = next((one for key, one in every.items() if int(key) == layer), {})
    return _Own(text, own if isinstance(own, Mapping) else vars(own))


def _rows(own: Any, window: int) -> LayerShape:
    """Returns the shape of a layer with keys and values or a latent."""
    if _attribute(own, "kv_lora_rank"):
        return LayerShape(1, _latent(own), 0, window)
    heads = _num_kv_heads(own)
    if window and _attribute(own, "model_type") == "mimo_v2_flash":
        heads *= 2  # this factor appears only in the model's code, not in its configuration
    return LayerShape(heads, _head_dim(own), _attribute(own, "v_head_dim"), window)


def plain_rows(config: Any, what: str, *others: str) -> None:
    """Rejects models that need more than causal or windowed attention over a layer's own rows.

    Args:
        config: configuration of the text model.
        what: the feature that cannot run the model, named in the message.
        *others: additional kinds of layers that the feature supports.

    Raises:
        NotSupported: the model has layers of another kind (chunked attention, a recurrent state),
            layers that reuse another layer's keys, or capped attention scores. The message names
            `what`.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION - set(others)
    shared = getattr(config, "num_kv_shared_layers", None)
    said = ""
    if kinds:
        said = f"the model has layers of kind {', '.join(sorted(kinds))}"
    elif shared:
        said = f"{shared} of its layers use other layers' keys"
    elif getattr(config, "attn_logit_softcapping", None):
        said = "its attention scores are capped"
    if said:
        raise NotSupported(f"{what}: {said}", op=what)


def read_values(path: Path) -> dict[str, Any]:
    """Returns the values of a ``config.json``.

    Raises:
        OSError, ValueError, TypeError: the file cannot be read or is not JSON.
        InvalidArgument: the JSON is not an object.
    """
    values = json.loads(path.read_text(encoding="utf-8"), object_hook=_number)
    if not isinstance(values, dict):
        raise invalid(f"expected a JSON object, not {type(values).__name__}", op="shape_of")
    return values


def _number(values: dict[str, Any]) -> Any:
    """A JSON object hook that decodes the objects that transformers writes for infinite numbers."""
    return float(values["__float__"]) if set(values) == {"__float__"} else values


def dtype_name(config: Any, given: str) -> str:
    """Returns the configuration's dtype, or `given` if the configuration has none.

    Raises InvalidArgument if both are missing.
    """
    try:
        found = str(dtype_of(config)).removeprefix("torch.")
    except InvalidArgument:
        if not given:
            raise invalid(
                "it does not name a dtype; pass the dtype of keys and values", op="shape_of"
            ) from None
        return given
    if found not in DTYPE_BYTES:
        raise invalid(f"dtype {found!r} is not one of {', '.join(DTYPE_BYTES)}", op="shape_of")
    return found


_TELLING = (
    "block_types",
    "cross_attention_layers",
    "hybrid_override_pattern",
    "is_encoder_decoder",
    "kv_sharing_modes",
    "layers_block_type",
    "linear_num_value_heads",
    "mamba_d_state",
    "multi_query",
    "num_kv_shared_layers",
)
"""Model-specific attributes whose presence means that a file's layers differ."""


def config_of(values: dict[str, Any]) -> Any:
    """Returns the configuration that the values of a ``config.json`` describe.

    If transformers knows the model, returns transformers' configuration: a file omits its class's
    defaults and uses model-specific attributes to say which layers slide, have a state or share
    keys. Otherwise returns the file's values, provided that the layers do not differ or the file
    lists each layer's kind.
    """
    known, why = _transformers(values)
    if known is not None:
        return known
    text: dict[str, Any] = values.get("text_config", values)
    slides = text.get("sliding_window") and text.get("use_sliding_window", True)
    if not text.get("layer_types"):
        if slides:
            raise invalid(
                f"a sliding_window of {text['sliding_window']} without layer_types; "
                f"transformers is needed to find the layers that have it: {why}",
                op="shape_of",
            )
        for name in _TELLING:
            if text.get(name) or values.get(name):
                raise invalid(
                    f"{name}: transformers is needed to find these layers: {why}",
                    op="shape_of",
                )
    given = values.get("dtype") or values.get("torch_dtype")
    return SimpleNamespace(**{"dtype": text.get("torch_dtype") or given, **text})


def _transformers(values: dict[str, Any]) -> tuple[Any, str]:
    """Returns transformers' configuration for a file's values, or the reason there is none.

    Raises InvalidArgument if transformers knows the model and rejects the values.
    """
    kind = values.get("model_type")
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        return None, str(error)
    mapping: Any = CONFIG_MAPPING
    if kind not in mapping:
        return None, f"unknown model_type {kind!r}"
    whole: Any = AutoConfig
    try:
        return whole.for_model(**values), ""
    except Exception as error:  # each class raises its own exceptions
        raise invalid(f"transformers rejects this configuration: {error}", op="shape_of") from None
