"""Templates render as transformers renders them, and nothing a caller sends can break more than its own request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine import chat_template
from engine.chat_template import ChatTemplate
from engine.errors import ConfigError, InvalidRequest

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RICH = """
{%- if tools %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- '\n' }}{{ tool | tojson }}
    {%- endfor %}
{%- endif %}
{%- set state = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
    {% if message.role == 'assistant' %}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
    {% else %}
    [{{ message.role }}] {{ message.content if message.content is string else message.content | tojson(indent=2) }}
    {% endif %}
    {%- if message.tool_calls is defined %}{{ message.tool_calls | tojson }}{% endif %}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
{%- endfor %}
{{ state.count }} {{ bos_token }} {{ mood }} {{ dict(a=1) }}
{%- if add_generation_prompt %}>>>{% endif %}
"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Größe? <b>&\"'</b> 👍🏽"}],
    [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "a\n b "},
        {"role": "assistant", "content": " c "},
    ],
    [{"role": "skip", "content": "no"}, {"role": "user", "content": [{"type": "text", "text": "é"}]}],
    [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}],
    [{"role": "assistant", "content": "5", "reasoning": "2+3", "tool_calls": None}],
]
TOOLS = [{"type": "function", "function": {"name": "get", "description": "日本 <>", "parameters": {"type": "object"}}}]


def made(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special)


def by_transformers(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered, _ = render_jinja_template([kept], chat_template=source, **more)
    return str(rendered[0])


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("generation", [True, False])
def test_renders_as_transformers_does(messages: Any, tools: Any, generation: bool) -> None:
    ours = made(RICH, bos_token="<s>").render(
        messages, tools=tools, add_generation_prompt=generation, extra={"mood": "good"}
    )
    theirs = by_transformers(
        RICH, messages, tools=tools, add_generation_prompt=generation, bos_token="<s>", mood="good"
    )
    assert ours == theirs


def test_chatml_by_hand() -> None:
    text = made(CHATML).render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("content", ["The capital", "ends in space ", "two\nlines", [{"type": "text", "text": "part"}]])
@pytest.mark.parametrize("body", ["message.content", "message.content | trim"])
def test_continues_the_last_message_as_transformers_does(content: Any, body: str) -> None:
    if isinstance(content, list):
        body = body.replace("message.content", "message.content[0].text")
    source = "{% for message in messages %}<{{ message.role }}>{{ " + body + " }}</end>\n{% endfor %}"
    messages = [{"role": "user", "content": [{"text": "q"}] if isinstance(content, list) else "q"}]
    messages.append({"role": "assistant", "content": content})
    ours = made(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    copied = json.loads(json.dumps(messages))
    assert ours == by_transformers(source, copied, continue_final_message=True)
    assert messages[-1]["content"] == content


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].absent.deeper }}", "absent"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages[0].content | nofilter }}", "nofilter"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "__class__"),
        ("{{ 'x' * 100000000 }}", "repetition"),
        ("{{ '%1000000000d' % 1 }}", "format"),
        ("{{ 10 ** 100000000 }}", "exponent"),
        ("{% for a in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "longer than"),
    ],
)
def test_what_goes_wrong_in_a_template_is_told_to_the_caller(source: str, said: str) -> None:
    try:
        template = made(source)
    except ConfigError as error:  # found when compiled: the operator is told
        assert said in str(error)
        return
    with pytest.raises(InvalidRequest, match=said) as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert caught.value.param == "messages"
    assert len(str(caught.value)) < 400


def test_endless_output_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.1)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="longer than"):
        made(source).render([])


def test_callers_cannot_replace_what_the_template_is_given() -> None:
    source = "{{ messages[0].content }}{{ add_generation_prompt }}{{ bos_token }}"
    extra = {"messages": [{"content": "forged"}], "add_generation_prompt": False, "bos_token": "chosen"}
    assert made(source, bos_token="<s>").render([{"content": "real"}], extra=extra) == "realTruechosen"


def test_message_that_cannot_be_continued_is_refused() -> None:
    for messages in ([], [{"role": "assistant", "tool_calls": []}], [{"role": "assistant", "content": [{"x": 1}]}]):
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            made(CHATML).render(messages, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="drops the last message"):
        made("fixed").render([{"content": "x"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="both"):
        made(CHATML).render([{"content": "x"}], continue_final_message=True)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "T {{ bos_token }}"),
        ("chat_template.json", json.dumps({"chat_template": "T {{ bos_token }}"})),
        ("tokenizer_config.json", json.dumps({"bos_token": "<s>", "chat_template": "T {{ bos_token }}"})),
        (
            "tokenizer_config.json",
            json.dumps({"bos_token": "<s>", "chat_template": [{"name": "default", "template": "T {{ bos_token }}"}]}),
        ),
    ],
)
def test_found_wherever_it_is_kept(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    (tmp_path / name).write_text(content)
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.render([]) == "T <s>"


def test_template_for_tools_is_taken_when_there_are_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert (template.render([]), template.render([], tools=TOOLS)) == ("plain", "tools")


def test_none_when_the_model_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert ChatTemplate.from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [("{% for %}", "cannot be used"), ([{"name": "rag", "template": "x"}], "none named default")],
)
def test_template_that_cannot_be_used_stops_the_start(tmp_path: Path, content: Any, said: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": content}))
    with pytest.raises(ConfigError, match=said):
        ChatTemplate.from_folder(tmp_path)
