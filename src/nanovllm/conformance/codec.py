"""JSON into the values of `protocol.py`, checked: what an adapter gets wrong must not pass for a
defect of its engine. `host.plain` is the other direction.

An object may be written as the list of its fields in order, and a mapping as a list of pairs.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from nanovllm.conformance.protocol import RequestId


class ProtocolError(Exception):
    """An answer that is not of the protocol: the adapter's mistake, not the engine's."""


def decode(kind: Any, value: Any, where: str = "result") -> Any:
    """`value`, as parsed from JSON, as a `kind`.

    Args:
        kind: a dataclass of `protocol.py`, or a type made of `int`, `float`, `str`, `bool`, `None`,
            `Any`, `tuple`, `list`, `frozenset`, `Mapping` and unions.
        where: path to the value, for the message.

    Raises:
        ProtocolError: it is not one; the message names the place.
    """
    if kind is Any:
        return value
    if kind is RequestId:
        return _request_id(value, where)
    if is_dataclass(kind):
        return _instance(kind, value, where)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), value, where)
    if origin in (tuple, list, frozenset):
        return _items(origin, get_args(kind), value, where)
    if origin is Mapping:
        return _mapping(get_args(kind), value, where)
    if origin is Literal:
        return _choice(get_args(kind), value, where)
    return _scalar(kind, value, where)


def _scalar(kind: Any, value: Any, where: str) -> Any:
    wanted = (float, int) if kind is float else (kind or types.NoneType)
    # bool is an int in Python, and in nobody's protocol.
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ProtocolError(f"{where}: expected {getattr(kind, '__name__', kind)}, got {value!r}")
    return value


def _choice(allowed: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in allowed:
        raise ProtocolError(f"{where}: expected one of {', '.join(allowed)}, got {value!r}")
    return value


def _union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    rest = [kind for kind in kinds if kind is not types.NoneType]
    for kind in rest[:-1]:
        try:
            return decode(kind, value, where)
        except ProtocolError:
            continue
    return decode(rest[-1], value, where)


def _items(origin: Any, kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if not isinstance(value, list):
        raise ProtocolError(f"{where}: expected a list, got {value!r}")
    if origin is tuple and kinds[-1] is not Ellipsis:
        if len(value) != len(kinds):
            raise ProtocolError(f"{where}: expected {len(kinds)} items, got {value!r}")
        pairs = zip(kinds, value, strict=True)
    else:
        pairs = zip([kinds[0]] * len(value), value, strict=True)
    return origin(decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))


def _mapping(kinds: tuple[Any, ...], value: Any, where: str) -> dict[Any, Any]:
    key_kind, item_kind = kinds
    if isinstance(value, dict):
        pairs = [(_json_key(key_kind, key), item) for key, item in value.items()]
    elif isinstance(value, list) and all(isinstance(p, list) and len(p) == 2 for p in value):
        pairs = [(key, item) for key, item in value]
    else:
        raise ProtocolError(f"{where}: expected an object or a list of pairs, got {value!r}")
    return {
        decode(key_kind, key, f"{where} key"): decode(item_kind, item, f"{where}[{key!r}]")
        for key, item in pairs
    }


def _json_key(kind: Any, key: str) -> Any:
    return int(key) if kind is int and key.lstrip("-").isdigit() else key


def _request_id(value: Any, where: str) -> RequestId:
    """`[request, sample]`, or the request's number alone for its only sample."""
    parts = [value] if isinstance(value, int) else value
    decoded = _items(tuple, (int, ...), parts, where)
    if len(decoded) not in (1, 2):
        raise ProtocolError(f"{where}: expected [request, sample], got {value!r}")
    return RequestId(*decoded)


@lru_cache(maxsize=64)
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Type of each field, in order, and which have no default."""
    hints = get_type_hints(kind)
    required = (
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING
    )
    return {f.name: hints[f.name] for f in fields(kind)}, frozenset(required)


def _instance(kind: Any, value: Any, where: str) -> Any:
    types_of, required = _fields(kind)
    if isinstance(value, list) and len(value) <= len(types_of):
        value = dict(zip(types_of, value, strict=False))
    if not isinstance(value, dict):
        raise ProtocolError(f"{where}: expected a {kind.__name__}, got {value!r}")
    missing, unknown = sorted(required - set(value)), sorted(set(value) - set(types_of))
    if missing or unknown:
        raise ProtocolError(
            f"{where}: a {kind.__name__} has the fields {', '.join(types_of)};"
            f" missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
        )
    return kind(
        **{name: decode(types_of[name], item, f"{where}.{name}") for name, item in value.items()}
    )
