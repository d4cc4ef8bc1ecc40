"""Our template sandbox renders what transformers renders, feature by feature."""

from __future__ import annotations

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quickstep.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "  Be <brief> & 'kind'. "},
    {"role": "user", "content": "Grüße\n\n日本"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "And now?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Today's weather <b>here</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TEMPLATES = {
    "blocks are trimmed": (
        "{% for m in messages %}\n"
        "    {% if m['role'] == 'system' %}\n"
        "  [{{ m['content'] | trim }}]\n"
        "    {% else %}\n"
        "{{ m.role }}: {{ m.content }}\n"
        "    {%- endif %}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}assistant:{% endif %}\n"
    ),
    "tools as JSON": (
        "{{ tools | tojson }}\n{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}"
    ),
    "namespace, macro, slices": (
        "{% set ns = namespace(count=0) %}"
        "{% macro show(m) %}<{{ m.role | upper }}>{{ m.content }}{% endmacro %}"
        "{% for m in messages[1:] %}{% set ns.count = ns.count + 1 %}{{ show(m) }}{% endfor %}"
        "{{ ns.count }}{{ messages[::-1][0].content }}{{ messages | length }}"
    ),
    "loop controls and generation": (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{{ loop.index0 }}{% endfor %}"
    ),
    "tests and string methods": (
        "{% if tools is defined and tools is not none %}T{% endif %}"
        "{% if documents is defined and documents %}D{% endif %}"
        "{{ messages[0].content.strip().split(' ') | join('|') }}{{ bos_token }}{{ missing }}"
        "{% if messages[0].content is string %}S{% endif %}{{ messages[0].get('name', 'none') }}"
    ),
    "extra variables": "{{ 'on' if enable_thinking is defined and enable_thinking else 'off' }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_templates_render_as_in_transformers(name, tools):
    extra = {"enable_thinking": True}
    expected, _ = render_jinja_template(
        conversations=[MESSAGES],
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        **extra,
    )
    ours = ChatTemplate({"default": TEMPLATES[name]}, {"bos_token": "<s>"}, now=datetime.now)
    assert ours.render(MESSAGES, tools, add_generation_prompt=True, extra=extra) == expected[0]


CONTINUED = {
    "plain": "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}<end>{% endfor %}",
    "reasoning": (
        "{% for m in messages %}{{ m.role }}: {% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip('\n') }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    ),
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("text", ["So", "end", "  Well,\n\nand", "a a a <|im_end|> a"])
def test_a_message_is_continued_as_in_transformers(name, text):
    messages = [*MESSAGES, {"role": "assistant", "content": text}]
    expected, _ = render_jinja_template(
        conversations=[messages],
        chat_template=CONTINUED[name],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    ours = ChatTemplate({"default": CONTINUED[name]}, {}, now=datetime.now)
    rendered = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected[0]


LOOP = "{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}"
READS_PARTS = {
    "either": "{% for m in messages %}{{ m.role }}:{% if m.content is string %}"
    "{{ m.content }}{% else %}" + LOOP + "{% endif %}|{% endfor %}",
    "a macro": "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for p in content %}{{ p if p is string else p.text }};{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) | trim }}{% endfor %}",
    "a filter": "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') "
    "| join(' ') }}{% endif %}{% endfor %}",
    "a variable": "{% for m in messages %}{% set content = m['content'] %}"
    "{% if content is string %}{% set content = [{'type': 'text', 'text': content}] %}{% endif %}"
    "{% for p in content %}({{ p['text'] }}){% endfor %}{% endfor %}",
    "by role": "{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ m.content }}"
    "{% else %}" + LOOP + "{% endif %}{% endfor %}",
}
PARTS_ONLY = "{% for m in messages %}{{ m.role }}:" + LOOP + "{% endfor %}"


def as_parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def rendered_by_transformers(source, messages):
    return render_jinja_template(conversations=[messages], chat_template=source)[0][0]


@pytest.mark.parametrize("name", READS_PARTS)
@pytest.mark.parametrize("texts", [("A",), ("A", "B\n"), ("", " C ")])
def test_parts_reach_templates_that_read_them_as_in_transformers(name, texts):
    source = READS_PARTS[name]
    plain = "S" if name == "by role" else as_parts("S", "s")
    messages = [
        {"role": "system", "content": plain},
        {"role": "user", "content": as_parts(*texts)},
        {"role": "assistant", "content": as_parts(*texts)},
        {"role": "tool", "content": plain, "tool_call_id": "c"},
        {"role": "user", "content": as_parts("last")},
    ]
    ours = ChatTemplate({"default": source}, {}, now=datetime.now)
    assert ours.render(messages) == rendered_by_transformers(source, messages)


@pytest.mark.parametrize("name", [name for name in READS_PARTS if name != "by role"])
def test_text_reaches_templates_that_read_either_as_in_transformers(name):
    ours = ChatTemplate({"default": READS_PARTS[name]}, {}, now=datetime.now)
    assert ours.render(MESSAGES) == rendered_by_transformers(READS_PARTS[name], MESSAGES)


def test_text_is_a_part_for_templates_that_read_only_parts():
    wrapped = [{**message, "content": as_parts(message["content"])} for message in MESSAGES]
    ours = ChatTemplate({"default": PARTS_ONLY}, {}, now=datetime.now)
    assert ours.render(MESSAGES) == rendered_by_transformers(PARTS_ONLY, wrapped)
    assert ours.render(MESSAGES) == ours.render(wrapped)
