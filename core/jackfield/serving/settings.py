"""What a server is told: by flags, the environment, and a TOML file, in this order."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from jackfield.errors import UsageError, shown
from jackfield.requests.arguments import OF_LOADING


def digest(key: str) -> str:
    """Keys are random and long, so that a fast hash is as good as a slow one."""
    return hashlib.sha256(key.encode()).hexdigest()


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")]


class ModelSettings(BaseModel):
    """A model that may be served: `model` is a hub id, a folder or "demo".

    The rest are arguments of `jackfield.load`.
    """

    model_config = ConfigDict(extra="allow")

    model: str

    @model_validator(mode="after")
    def _known(self) -> ModelSettings:
        for name in self.arguments:
            if name not in OF_LOADING:
                raise ValueError(f"{name!r} is no argument of jackfield.load")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class KeySettings(BaseModel):
    """An API key: only the SHA-256 of it, in hexadecimal, is kept.

    `requests_per_minute` bounds what is done with it; None: no bound.
    """

    model_config = ConfigDict(extra="forbid")

    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    requests_per_minute: Count | None = None


class ServerSettings(BaseSettings):
    """All of a server's settings; in the environment each is called ``JACKFIELD_`` and its name.

    `models` maps the names that clients use to models, `keys` names to API keys. `preload`: models
    are loaded at the start; None: one that is alone is. Sizes are in bytes, times in seconds.
    `stream_interval` is how often a stream is written to at most; its first piece and its last
    come at once.
    """

    model_config = SettingsConfigDict(
        env_prefix="JACKFIELD_", env_nested_delimiter="__", extra="forbid"
    )

    models: dict[Name, ModelSettings] = Field(default_factory=dict)
    preload: bool | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    keys: dict[Name, KeySettings] = Field(default_factory=dict)
    allow_unauthenticated: bool = False
    allowed_hosts: list[str] = Field(default_factory=list)
    cors_origins: list[str] = Field(default_factory=list)
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_waiting: Count = 256
    max_requests: Count = 1024
    max_connections: Count = 20_000
    deadline: Seconds | None = None
    model_timeout: Annotated[float, Field(ge=0)] = 300.0
    stall_after: Seconds = 60.0
    restarts: Annotated[int, Field(ge=0)] = 3
    drain: Annotated[float, Field(ge=0)] = 30.0
    max_body: Count = 4 * 1024 * 1024
    max_depth: Count = 64
    receive_timeout: Seconds = 30.0
    write_timeout: Seconds = 60.0
    max_completion_tokens: Count | None = None
    max_samples: Count = 16
    stream_interval: Annotated[float, Field(ge=0, le=1)] = 0.02
    stored_responses: Annotated[int, Field(ge=0)] = 1000
    stored_bytes: Count = 256 * 1024 * 1024
    default_seed: int | None = Field(default=None, ge=-1)
    reasoning: Literal["auto", "on", "off"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    sanitize_control_tokens: bool = True
    log_texts: bool = False
    page: bool = True

    @field_validator("host")
    @classmethod
    def _host(cls, host: str) -> str:
        if not host or host != host.strip():
            raise ValueError("must be a host name or an address")
        return host

    @model_validator(mode="after")
    def _safe(self) -> ServerSettings:
        if not self.models:
            self.models = {"demo": ModelSettings(model="demo")}
        if not (self.is_loopback or self.keys or self.allow_unauthenticated):
            raise ValueError(
                f"host {self.host} can be reached by others, and there is no API key: add a key "
                "(jackfield serve --new-key NAME), or say allow_unauthenticated"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together; give both")
        return self

    @property
    def preloads(self) -> bool:
        return len(self.models) == 1 if self.preload is None else self.preload

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags first, then the environment, then what stands in a file."""
        del dotenv_settings, file_secret_settings
        assert isinstance(init_settings, InitSettingsSource)
        given = dict(init_settings.init_kwargs)
        of_file = given.pop(_OF_FILE, {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=given),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=of_file),
        )


class _Given(ServerSettings):
    """Of which only what is given counts."""

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, *others: Any, **named: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


_OF_FILE = "_of_file"
_KEY = "JACKFIELD_API_KEY"
#: Variables that others of jackfield's parts read.
_OTHERS = frozenset({
    _KEY, "JACKFIELD_DISABLE", "JACKFIELD_KERNEL_LOCK", "JACKFIELD_LOAD_TIMEOUT",
    "JACKFIELD_PLUGINS", "JACKFIELD_TRUSTED_PUBLISHERS",
})  # fmt: skip


def settings(file: Path | None = None, **flags: Any) -> ServerSettings:
    """The settings of a server. Raises UsageError, with one line for all that is wrong."""
    of_file = {} if file is None else _read(file)
    if "models" in flags and (where := _where("models", of_file, file)):
        raise UsageError(f"a model is named, and {where} names others; leave one of the two out")
    _check_environment()
    if (key := os.environ.get(_KEY)) is not None:  # one for both ends, as its own client reads it
        _check_key(key)
        if where := _where("keys", of_file, file):
            raise UsageError(f"{_KEY} is a key, and {where} has others; leave one of the two out")
        of_file["keys"] = {"default": {"sha256": digest(key)}}
    given: dict[str, Any] = {**flags, _OF_FILE: of_file}
    try:
        return ServerSettings(**given)
    except ValidationError as error:
        where = "the server's settings" if file is None else f"the server's settings ({file})"
        raise UsageError(f"{where}: {'; '.join(map(_line, error.errors()))}") from None
    except ValueError as error:  # of the environment: no JSON where there should be
        raise UsageError(f"the server's settings in the environment: {shown(error)}") from None


def given_settings(**given: Any) -> ServerSettings:
    """Settings for answers without a server: the environment does not count. Raises UsageError."""
    try:
        return _Given(**given)
    except ValidationError as error:
        raise UsageError("; ".join(map(_line, error.errors()))) from None


def name_of(model: str) -> str:
    """What a model is called in requests that is named on a command line."""
    folder = Path(model)
    return folder.resolve().name if folder.is_dir() else model


def _check_key(key: str) -> None:
    """Raise UsageError for a key that no client could send, and for none: that would serve all."""
    if not key.strip():
        raise UsageError(
            f"{_KEY} is set, and empty; unset it to serve without a key, or give it one "
            "(jackfield serve --new-key NAME)"
        )
    if not re.fullmatch("[!-~]+", key):
        raise UsageError(
            f"{_KEY} has a space or another character that no header can have; give it another key "
            "(jackfield serve --new-key NAME)"
        )


def _where(setting: str, of_file: Mapping[str, Any], file: Path | None) -> str | None:
    """The file or the variable that has the setting, or a part of it; None: neither does."""
    if setting in of_file:
        return str(file)
    name = f"JACKFIELD_{setting.upper()}"
    return next((v for v in sorted(os.environ) if v.partition("__")[0] == name), None)


def _check_environment() -> None:
    """Raise UsageError for a variable that looks like a setting and is none."""
    known = {f"JACKFIELD_{name.upper()}" for name in ServerSettings.model_fields} | _OTHERS
    for variable in sorted(os.environ):
        name = variable.partition("__")[0]
        if variable.startswith("JACKFIELD_") and name not in known and "_BENCH_" not in name:
            raise UsageError(
                f"{variable} in the environment is no setting of a server; unset it "
                "(docs/serving.md lists all of them)"
            )


def _line(error: Any) -> str:
    path = ".".join(map(str, error["loc"]))
    said = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        said = "is no setting of a server"
    return f"{path}: {said}" if path else said


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise UsageError(f"cannot read {shown(file)}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{file} is not TOML: {shown(error)}") from None
