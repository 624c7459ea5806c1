from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from edge_convert.runtime.errors import BundleError, InputError
from edge_convert.wrappers.chat import ChatTemplate

USER = [{"role": "user", "content": "Grüße <b> 'x'"}]
CHATML = (
    "{% for message in messages %}\n"
    "    {%- if loop.first and message['role'] != 'system' %}\n"
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\n' }}\n"
    "{%- endif %}"
)


def test_a_chat_with_and_without_the_opening_of_the_answer() -> None:
    template = ChatTemplate(CHATML)
    expected = "\n<|im_start|>system\nBe brief.<|im_end|><|im_start|>user\nGrüße <b> 'x'<|im_end|>\n"
    assert template.render(USER, False).lstrip("\n") == expected.lstrip("\n")
    assert template.render(USER).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_blocks_leave_no_blank_lines() -> None:
    source = "{% if true %}\n  {% if true %}\na\n  {% endif %}\n{% endif %}\nb"
    assert ChatTemplate(source).render(USER) == "a\nb"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", "<s>|</s>|"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Grüße <b> \'x\'"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2026"),
        ("{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "013"),
        ("{% generation %}x{{ 1 + 1 }}{% endgeneration %}y", "x2y"),
        ("{{ tools is none }} {{ documents is none }} {{ unheard_of is defined }}", "True True False"),
    ],
)  # fmt: skip
def test_what_templates_rely_on(source: str, expected: str) -> None:
    template = ChatTemplate(
        source, {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None}, now=lambda: datetime(2026, 3, 5)
    )
    assert template.render(USER) == expected


def test_more_variables_reach_the_template() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ tools[0].name }}")
    assert template.render(USER, variables={"enable_thinking": False, "tools": [{"name": "f"}]}) == "False f"


def test_the_templates_own_refusal_is_an_input_error() -> None:
    with pytest.raises(InputError, match="Roles must alternate"):
        ChatTemplate("{{ raise_exception('Roles must alternate') }}").render(USER)


def test_a_value_of_a_wrong_type_is_an_input_error() -> None:
    with pytest.raises(InputError, match="cannot render"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(USER)


def test_a_broken_template_is_a_bundle_error() -> None:
    with pytest.raises(BundleError, match="does not parse"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
    ],
)
def test_a_template_can_neither_reach_out_nor_change_its_arguments(source: str) -> None:
    messages = [dict(USER[0])]
    with pytest.raises(InputError):
        ChatTemplate(source).render(messages)
    assert messages == USER


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, [{"content": "x"}], ["x"], [{"role": 1}]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(InputError):
        ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize("messages", [5, None, {"role": "user"}, "hi", b"hi", []])
def test_what_is_no_list_of_messages_is_refused(messages: object) -> None:
    with pytest.raises(InputError, match="list of messages"):
        ChatTemplate("x").render(messages)  # type: ignore[arg-type]
