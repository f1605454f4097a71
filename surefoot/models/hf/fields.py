"""Typed reading of a `config.json`: every refusal names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.core.errors import ModelError, nearest

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


@dataclass(frozen=True)
class Fields:
    """A config's `values`, the family's `defaults` for keys that may be left out, and `where` they come from."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str

    def get(self, key: str) -> Any:
        """Return the value of `key`, or the family's default; raise `ModelError` when there is neither."""
        if key in self.values:
            return self.values[key]
        if key in self.defaults:
            return self.defaults[key]
        raise ModelError("required key is missing", where=f"{self.where}: {key}", remedy="add it, or fetch the whole model again")

    def integer(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "a whole number")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def activation(self, key: str) -> str:
        value = self.get(key)
        if value not in ACTIVATIONS:
            raise ModelError(
                f"activation {value!r} is not supported", where=f"{self.where}: {key}", remedy=nearest(str(value), ACTIVATIONS)
            )
        return ACTIVATIONS[value]

    def layer_kinds(self, key: str, kinds: Mapping[str, str]) -> list[str] | None:
        """Return the list under `key` (one name a layer) translated by `kinds`, or None when it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        layers = self.integer("num_hidden_layers")
        if not isinstance(value, list) or len(value) != layers:
            raise self._wrong(key, value, f"a list of {layers} names, one a layer")
        unknown = next((name for name in value if name not in kinds), None)
        if unknown is not None:
            raise ModelError(f"layer type {unknown!r} is not supported", where=f"{self.where}: {key}", remedy=nearest(str(unknown), kinds))
        return [kinds[name] for name in value]

    def refuse(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Raise `ModelError` unless `key` is absent or has one of the `allowed` values."""
        if key in self.values and self.values[key] not in allowed:
            raise ModelError(
                f"{self.values[key]!r} is not supported: {why}", where=f"{self.where}: {key}", remedy=f"only {allowed[0]!r} can be imported"
            )

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"must be {wanted}, got {value!r}", where=f"{self.where}: {key}", remedy="correct the config")
