"""The tools of a request: functions by name, with the schemas of their arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jackfield.errors import SettingsError, quoted

#: What a request may say of calls; a mapping names the one function that is called.
ToolChoice = Literal["auto", "none", "required"] | Mapping[str, Any]

_MOST_REFERENCES = 16  # from one to the next
_NAME = re.compile(r"[\w.:/-]{1,256}")  # what parsers read of a name
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
    "string": (str,),
}


@dataclass(frozen=True)
class Tool:
    """One function. `parameters` is the JSON schema of its arguments; `strict`: they keep to it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.parameters.get("properties")
        return found if isinstance(found, Mapping) else {}

    @property
    def required(self) -> frozenset[str]:
        """The arguments that must be there."""
        said = self.parameters.get("required")
        return frozenset(map(str, said)) if isinstance(said, list) else frozenset()

    def schema(self, key: str) -> Mapping[str, Any]:
        """The schema of one argument, wherever in `parameters` it stands."""
        found = self.properties.get(key)
        for _ in range(_MOST_REFERENCES):
            reference = found.get("$ref") if isinstance(found, Mapping) else None
            if not isinstance(reference, str) or not reference.startswith("#/"):
                break
            found = self.parameters
            for part in reference.removeprefix("#/").split("/"):
                found = found.get(part) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def read(self, key: str, text: str) -> Any:
        """The value of an argument that is written as plain text, as the schema says.

        It is a string where the schema allows one, or says nothing, or is not kept to.
        """
        schema = self.schema(key)
        if text in (named := ways(schema)):
            return named[text]
        said = kinds(schema)
        if text == "null" and "null" in said:
            return None
        if not said or "string" in said:
            return text
        try:
            value = json.loads(_WORDS.get(text.strip(), text), parse_constant=_no_number)
        except (ValueError, RecursionError):
            return text
        wanted = tuple(kind for name in said for kind in _KINDS.get(name, ()))
        fits = isinstance(value, wanted) and (not isinstance(value, bool) or bool in wanted)
        return value if fits else text


def ways(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an `enum` or a `const`, by how they are written as plain text."""
    listed = schema.get("enum")
    values = listed if isinstance(listed, list) else [schema["const"]] if "const" in schema else []
    return {value if isinstance(value, str) else json.dumps(value): value for value in values}


def _no_number(word: str) -> None:
    raise ValueError(word)


def kinds(schema: Any) -> set[str]:
    """The types that a schema allows, as far as it says so."""
    if not isinstance(schema, Mapping):
        return set()
    said = schema.get("type")
    found = {said} if isinstance(said, str) else set(said) if isinstance(said, list) else set()
    for key in ("anyOf", "oneOf", "allOf"):
        for other in schema[key] if isinstance(schema.get(key), list) else ():
            found |= kinds(other)
    return found


def read_tools(tools: Sequence[Any] | None) -> dict[str, Tool]:
    """Function tools as OpenAI has them, `type` and `function` or not. Raises SettingsError."""
    found: dict[str, Tool] = {}
    for n, given in enumerate(tools or ()):
        where = f"tools[{n}]"
        function = given.get("function") if isinstance(given, Mapping) else None
        at = f"{where}.function"
        if isinstance(given, Mapping) and "name" in given and "function" not in given:
            function, at = given, where
        if not isinstance(function, Mapping) or given.get("type", "function") != "function":
            raise SettingsError(
                f"{where} must be like {{'type': 'function', 'function': {{'name': …}}}}, not "
                f"{quoted(given)}"
            )
        tool = _tool(at, function)
        if tool.name in found:
            raise SettingsError(f"{where}: there are two functions {quoted(tool.name)}; name it")
        found[tool.name] = tool
    return found


def _tool(where: str, function: Mapping[str, Any]) -> Tool:
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SettingsError(
            f"{where}.name must have up to 256 letters, digits and '_', '-', '.', ':', '/', not "
            f"{quoted(name)}"
        )
    if not isinstance(strict, bool | None):
        raise SettingsError(f"{where}.strict must be true or false, not {quoted(strict)}")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise SettingsError(f"{where}.parameters must be a JSON schema, not {quoted(parameters)}")
    if parameters is not None and parameters.get("type", "object") != "object":
        raise SettingsError(f"{where}.parameters must be the schema of an object")
    if parameters is None:  # it takes none
        parameters = {"properties": {}, "additionalProperties": False}
    return Tool(name, {"type": "object", **parameters}, bool(strict))


def chosen(tools: Mapping[str, Tool], choice: ToolChoice) -> tuple[Mapping[str, Tool], bool]:
    """The tools that may be called, and whether one must be. Raises SettingsError."""
    if choice == "none":
        return {}, False
    if choice == "auto":
        return tools, False
    if not (choice == "required" or isinstance(choice, Mapping)):
        raise SettingsError(
            "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': "
            f"{{'name': …}}}}, not {quoted(choice)}"
        )
    if not tools:
        raise SettingsError("tool_choice asks for a call, and there are no tools; give some")
    if isinstance(choice, str):
        return tools, True
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise SettingsError(
            "tool_choice must be like {'type': 'function', 'function': {'name': …}}, not "
            f"{quoted(choice)}"
        )
    if name not in tools:
        raise SettingsError(f"tool_choice names {quoted(name)}, which is none of the tools")
    return {name: tools[name]}, True
