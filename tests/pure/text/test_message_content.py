"""Which content a template reads, by role, and what it is given."""

from __future__ import annotations

from datetime import datetime

import pytest

from quickstep.config import ContentFormat
from quickstep.text.chat_template import ChatTemplate
from quickstep.text.message_content import joined_contents, text_of, text_part

PRINTED = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
DUMPED = "{% for m in messages %}{{ m.role }}:{{ m.content | tojson }}|{% endfor %}"
LOOP = "{% for p in m.content %}{{ p.text }}{% endfor %}"
PARTS_ONLY = "{% for m in messages %}{{ m.role }}:" + LOOP + "|{% endfor %}"
ADDED = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
MIXED = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ '<' + m.content + '>' }}"
    "{% else %}" + LOOP + "{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + LOOP + "|{% endfor %}"
)
WITH_ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system message') }}{% endif %}{{ m.role }}:" + LOOP + "|{% endfor %}"
)


def template(text, content_format=ContentFormat.AUTO):
    now = datetime(2024, 2, 29)
    return ChatTemplate({"default": text}, {}, now=lambda: now, content_format=content_format)


def user(*texts):
    return [{"role": "user", "content": [text_part(text) for text in texts]}]


@pytest.mark.parametrize("text", [PRINTED, DUMPED, ADDED])
def test_parts_are_joined_by_line_ends_for_templates_that_read_text(text):
    chat = template(text)
    assert chat.render(user("A", "B")) == chat.render([{"role": "user", "content": "A\nB"}])


@pytest.mark.parametrize("text", [PARTS_ONLY, MIXED, ALTERNATING])
def test_text_and_parts_are_not_lost_where_the_template_reads_parts(text):
    chat = template(text)
    assert "AB" in chat.render(user("A", "B"))
    assert chat.render([{"role": "user", "content": "AB"}]) == chat.render(user("AB"))


def test_each_role_has_what_the_template_reads_of_it():
    system = [{"role": "system", "content": [text_part("S"), text_part("s")]}]
    assert template(MIXED).render([*system, *user("A", "B")]) == "<S\ns>AB"


def test_a_requested_format_is_used_whatever_the_template_shows():
    both = [{"role": "user", "content": "T"}, *user("A", "B")]
    assert template(PRINTED, ContentFormat.STRING).render(both) == "user:T|user:A\nB|"
    assert template(PARTS_ONLY, ContentFormat.STRING).render(both) == "user:|user:|"
    listed = "user:[{'type': 'text', 'text': 'T'}]|"
    assert template(PRINTED, ContentFormat.OPENAI).render(both[:1]) == listed
    assert template(PARTS_ONLY, ContentFormat.OPENAI).render(both) == "user:T|user:AB|"


@pytest.mark.parametrize("content", ["So", [text_part("Well"), text_part("So")]])
@pytest.mark.parametrize("text", [PRINTED, PARTS_ONLY])
def test_a_message_of_parts_is_continued_after_its_last_part(text, content):
    messages = [*user("A"), {"role": "assistant", "content": content}]
    rendered = template(text).render(messages, continue_final_message=True)
    assert rendered.endswith("So")
    assert rendered == template(text).render(messages).removesuffix("|")


def test_system_messages_of_parts_are_joined_and_later_ones_are_reminders():
    chat = template(WITH_ONE_SYSTEM)
    systems = [{"role": "system", "content": [text_part("S"), text_part("s")]}, *user("A")]
    two = [{"role": "system", "content": "first"}, *systems]
    assert chat.render(two) == "system:first\n\nSs|user:A|"
    later = [*user("A"), {"role": "assistant", "content": "B"}, *systems]
    assert chat.render(later) == "user:A|assistant:B|user:Ss\n\nA|"


def test_contents_are_joined_with_an_empty_line_whatever_they_are():
    parts = [text_part("A"), text_part("B")]
    assert joined_contents("x", "y") == "x\n\ny"
    assert joined_contents("", "y") == "y"
    assert joined_contents("x", parts) == [text_part("x"), text_part("\n\n"), *parts]
    assert joined_contents(parts, "") == parts


def test_the_text_of_a_content_is_its_parts_by_line_ends():
    assert text_of([text_part("A"), "B"]) == "A\nB"
    assert text_of(None) == text_of([]) == ""


def test_a_template_that_never_ends_is_given_up_at_once():
    endless = "{% for i in range(99999999) %}{% for j in range(99999999) %}{% endfor %}{% endfor %}"
    ticks = iter(range(10**9))
    chat = ChatTemplate(
        {"default": endless}, {}, now=datetime.now, limit_s=10.0, clock=lambda: next(ticks)
    )
    assert next(ticks) < 1000
    assert chat.source == endless
