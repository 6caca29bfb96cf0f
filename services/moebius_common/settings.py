"""Settings of a service: flags, then environment, then a TOML file, then defaults."""

import json
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliApp,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

# The type of a setting that holds a time.
Seconds = Annotated[float, Field(gt=0)]


def split_at_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _words(value: Any) -> Any:
    """Of a text; what is a list already stays as it is. All other lists in the environment are JSON, and a
    text that is such a list is one here too."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        if isinstance(given := json.loads(value), list):
            return given
    return split_at_commas(value)


# With the type of a setting that holds a list of words: separated by commas in the environment as in a flag.
SEPARATED_BY_COMMAS = (NoDecode, BeforeValidator(_words))


class ServiceSettings(BaseSettings):
    """What the settings of all services have in common.

    A service adds its fields, each with a description, and `env_prefix` and `cli_prog_name`.
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    config: Path | None = Field(
        None,
        description="A TOML file with settings: some_setting = 1 is --some-setting 1. Every flag is an "
        "environment variable too, named by the service: MOEBIUS_WORKER_SOME_SETTING. Flags win over "
        "environment, that over the file.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _TomlFile(settings_cls)


class _TomlFile(PydanticBaseSettingsSource):
    """The file that `config`, by flag or environment, names; one that cannot be read is a ValueError."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read as a whole")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        if not path:
            return {}
        try:
            return tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read the settings file {path}: {error}") from error


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def read_settings(kind: type[SettingsT], arguments: Sequence[str] | None = None) -> SettingsT:
    """Those of this process; `arguments` are by default its own.

    If some are wrong it says which, by their flags, and ends the process with status 2.
    """
    try:
        return CliApp.run(kind, cli_args=list(sys.argv[1:] if arguments is None else arguments))
    except ValidationError as error:
        lines = [_explain(fault["loc"], fault["msg"]) for fault in error.errors()]
    except SettingsError as error:
        # The library says which variable cannot be parsed, but not why.
        lines = [f"{error}: {error.__cause__}" if error.__cause__ else str(error)]
    except ValueError as error:
        lines = [str(error)]
    # What is wrong comes last, since the last line is what a supervisor quotes.
    program = kind.model_config.get("cli_prog_name")
    for line in ("these settings are wrong; --help explains them", *lines):
        sys.stderr.write(f"{program}: {line}\n")
    sys.exit(2)


def _explain(location: tuple[int | str, ...], message: str) -> str:
    said = message.removeprefix("Value error, ")
    return "--" + ".".join(map(str, location)).replace("_", "-") + f": {said}" if location else said
