"""Chat templates with the conventions that checkpoints' templates are written for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_convert.runtime.errors import BundleError, InputError

Message = Mapping[str, Any]


class ChatTemplate:
    """A Jinja chat template, run in a sandbox that cannot change its arguments.

    Args:
        source: The template's text.
        special_tokens: Names the template may use, such as `bos_token` and `eos_token`; None values are left out.
        now: The clock behind the template's `strftime_now`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str | None] | None = None,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self._special = {name: token for name, token in (special_tokens or {}).items() if token is not None}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise BundleError(f"The chat template does not parse: {error}. Convert the model again.") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text for `messages`, each a mapping with `role` and `content`.

        Args:
            messages: The conversation, oldest first.
            add_generation_prompt: End with the opening of the assistant's turn.
            variables: More names for the template (`tools`, `documents`, a model's own switches).
        """
        check_messages(messages)
        names: dict[str, Any] = {"tools": None, "documents": None, **self._special, **(variables or {})}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **names
            )
        except TemplateError as error:
            raise InputError(f"The chat template refuses these messages: {error}.") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InputError(f"The chat template cannot render these messages: {error}.") from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raise InputError unless `messages` is a list of mappings with a `role`, and not empty."""
    given: Any = messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise InputError("A chat needs a list of messages. Give at least one {'role': 'user', 'content': '...'}.")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError(f"Message {index} has no role. Give {{'role': 'user', 'content': '...'}}.")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own tokens for training; here its body is simply printed."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: no HTML escapes, keys in their own order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
