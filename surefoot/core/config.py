"""Configuration: TOML read into frozen pydantic models, with errors a person can act on.

A config class says its keys, types and bounds once; loading, overriding (``key.sub=value``), writing back and refusing
are derived from it. Unknown keys are errors that name the nearest valid key.
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from surefoot.core.errors import ConfigError, nearest


class Config(BaseModel):
    """Base of every configuration value: frozen, no unknown keys, JSON and TOML round-trippable."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


C = TypeVar("C", bound=Config)


def load(kind: type[C], path: Path | str, overrides: Sequence[str] = ()) -> C:
    """Read `path` (TOML) into `kind`, apply ``a.b=value`` overrides, and validate everything.

    Raises `ConfigError` with the file, the dotted key, the reason and the nearest valid choice.
    """
    table = read_toml(path)
    for override in overrides:
        _override(table, override)
    return parse(kind, table, where=str(path))


def read_toml(path: Path | str) -> dict[str, Any]:
    """Return the tables of the TOML file `path`; raises `ConfigError` when it cannot be read."""
    path = Path(path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), remedy="give the path of a TOML file; examples/ has some") from None
    except IsADirectoryError:
        raise ConfigError("is a directory, not a TOML file", where=str(path), remedy="give a .toml file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not valid TOML: {error}", where=str(path), remedy="correct the line named") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), remedy="check the file's permissions") from None


def parse(kind: type[C], table: dict[str, Any], *, where: str = "config") -> C:
    """Validate a plain `table` as `kind`; the first problem becomes a one-line `ConfigError`."""
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise _explain(kind, error, where) from None


def dumps(config: Config) -> str:
    """Return `config` as TOML text that `load` reads back to an equal value."""
    return tomli_w.dumps(_without_none(config.model_dump(mode="json")))


def _override(table: dict[str, Any], text: str) -> None:
    key, sign, raw = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"'{text}' is not an override", where="command line", remedy="write key=value, e.g. train.steps=100")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    *parents, last = key.split(".")
    node = table
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"'{key}' goes through '{parent}', which is a value", where="command line", remedy="check the key")
    node[last] = value


def _explain(kind: type[Config], error: ValidationError, where: str) -> ConfigError:
    problem = error.errors()[0]
    steps = [str(step) for step in problem["loc"]]
    dotted = ".".join(steps)
    place = f"{where}: {dotted}" if dotted else where
    if problem["type"] == "extra_forbidden":
        owner = _owner(kind, steps[:-1])
        return ConfigError("unknown key", where=place, remedy=nearest(steps[-1], owner.model_fields if owner else ()))
    if problem["type"] == "missing":
        return ConfigError("required key is missing", where=place, remedy="add it")
    if problem["type"] == "literal_error":
        choices = [part.strip(" '") for part in problem["ctx"]["expected"].replace(" or ", ",").split(",")]
        return ConfigError(f"{problem['input']!r} is not a valid choice", where=place, remedy=nearest(str(problem["input"]), choices))
    if problem["type"] == "value_error":
        cause = problem["ctx"]["error"]
        if isinstance(cause, ConfigError):
            return ConfigError(cause.what, where=f"{place}.{cause.where}" if cause.where else place, remedy=cause.remedy)
        return ConfigError(str(cause), where=place)
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return ConfigError(f"{message} (got {problem['input']!r})", where=place)


def _owner(kind: type[Config], steps: list[str]) -> type[Config] | None:
    """Return the config class that the dotted path `steps` leads to, looking through optional types."""
    owner: type[Config] | None = kind
    for step in steps:
        if owner is None or step not in owner.model_fields:
            return owner if owner is not None and step.isdigit() else None
        owner = _config_in(owner.model_fields[step].annotation)
    return owner


def _config_in(annotation: Any) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, list):
        found = [_config_in(argument) for argument in typing.get_args(annotation)]
        return next((one for one in found if one is not None), None)
    return None


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def to_json(config: Config) -> str:
    """Return `config` as indented JSON with sorted keys."""
    return json.dumps(config.model_dump(mode="json"), indent=2, sort_keys=True)
