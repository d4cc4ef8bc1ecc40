"""Templates and conversations that would take for ever, or all memory: each is refused."""

from __future__ import annotations

import itertools
import threading
import time
from datetime import datetime
from typing import Any

import pytest

from quickstep.errors import RequestError
from quickstep.text.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "hello"}]


def template(text: str, step_s: float = 0.001, limit_s: float = 1.0) -> ChatTemplate:
    """A template whose clock goes on by `step_s` at each look, so that time is work."""
    ticks = itertools.count()
    return ChatTemplate(
        {"default": text},
        {},
        datetime.now,
        limit_s=limit_s,
        clock=lambda: next(ticks) * step_s,
    )


ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "a loop that says something": "{% for a in range(99999) %}{% for b in range(99999) %}x"
    "{% endfor %}{% endfor %}",
    "a loop that skips all": "{% for a in range(99999) if a > 99999 %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for a in [[[]] * 99] * 99 recursive %}{{ loop(a * 9) }}{% endfor %}",
    "tests of many": "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
    "filters of many": "{{ range(99999) | map('upper') | list | length }}",
    "a call block": "{% macro m() %}{% for a in range(99999) %}{{ caller() }}{% endfor %}"
    "{% endmacro %}{% call m() %}x{% endcall %}",
    "calls in a loop": "{% for a in range(99999) %}{{ 'a'.upper() }}{% endfor %}",
}
HUGE = {
    "a product": "{{ 'a' * 10000000000 }}",
    "a product of lists": "{{ ([0] * 100000000) | length }}",
    "a product from the right": "{{ 10000000000 * 'a' }}",
    "a power": "{{ 9 ** 999999999 }}",
    "a power of a power": "{{ 9 ** (9 ** 9) }}",
    "sums": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "joined": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "captured": "{% set n = namespace(x='ab') %}{% for a in range(60) %}{% set y %}{{ n.x }}"
    "{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "joined by a filter": "{% set n = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set n.x = [n.x, n.x] | join('') %}{% endfor %}",
    "joined by a method": "{% set n = namespace(x='ab') %}{% for a in range(60) %}"
    "{% set n.x = ''.join([n.x, n.x]) %}{% endfor %}",
    "replaced": "{% set n = namespace(x='aaaaaaaaaa') %}{% for a in range(60) %}"
    "{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
    "replaced by a method": "{% set n = namespace(x='aaaaaaaaaa') %}{% for a in range(60) %}"
    "{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "centred": "{{ 'a' | center(10000000000) }}",
    "justified": "{{ 'a'.ljust(10000000000) }}",
    "filled": "{{ 'a'.zfill(10000000000) }}",
    "formatted": "{{ '%10000000000d' % 1 }}",
    "formatted by a value": "{{ '%*d' % (10000000000, 1) }}",
    "formatted by a filter": "{{ '%10000000000d' | format(1) }}",
    "formatted by a method": "{{ '{:10000000000}'.format(1) }}",
    "formatted by a method's value": "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "indented": "{{ 'a\nb' | indent(10000000000) }}",
    "indented as JSON": "{{ [1] | tojson(indent=10000000000) }}",
    "batched": "{{ [1] | batch(10000000000, 'x') | list }}",
    "said often": "{% set x = 'a' * 9999999 %}{% for a in range(99) %}{{ x }}{% endfor %}",
    "a long range": "{{ range(10000000000) | list }}",
    "filler text": "{{ lipsum(n=10000000) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_takes_too_long_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"it took more than 1 s") as caught:
        template(ENDLESS[name]).render(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_makes_too_much_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match="the chat template refused"):
        template(HUGE[name], step_s=0.0).render(HELLO)


def test_a_conversation_that_is_too_much_for_the_template_is_refused_and_the_next_one_is_not() -> (
    None
):
    quadratic = template(
        "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(RequestError, match="took more than 1 s"):
        quadratic.render(HELLO * 100)
    assert quadratic.render(HELLO * 3) == "hello" * 3


def test_numbers_of_the_data_are_no_widths() -> None:
    text = "{{ tools | tojson }}{{ messages[0].content.replace('l', 'L') }}{{ '%s' % n }}"
    tools: list[dict[str, Any]] = [{"id": 10**15}]
    rendered = template(text).render(HELLO, tools=tools, extra={"n": 10**15})
    assert rendered == '[{"id": 1000000000000000}]heLLo1000000000000000'


def test_only_the_processor_time_of_the_render_counts() -> None:
    """Others may work as long as they like meanwhile, and the machine may stand still."""

    def busy(released: threading.Event) -> None:
        began_s = time.monotonic()
        while time.monotonic() - began_s < 0.3:
            pass
        released.set()

    def now() -> datetime:
        released = threading.Event()
        threading.Thread(target=busy, args=(released,)).start()
        assert released.wait(30)
        return datetime(2026, 1, 2)

    text = "{% for a in range(9) %}{{ a }}{% endfor %}{{ strftime_now('%Y') }}{{ 'x' | upper }}"
    waiting = ChatTemplate({"default": text}, {}, now, limit_s=0.2)
    assert waiting.render(HELLO) == "0123456782026X"


def test_what_templates_do_every_day_stays_as_it_is() -> None:
    text = (
        "{%- for m in messages if m.role != 'system' -%}"
        "{{ loop.index0 ~ ':' ~ m.role + '|' + m.content | trim }}"
        "{%- if not loop.last %}{{ '-' * 3 }}{% endif -%}"
        "{%- else -%}nobody{%- endfor -%}"
        "{{ ['a', 'b'] | join(', ') }} {{ 7 % 4 }} {{ 2 ** 10 }} {{ '%s!' % 'x' }} {{ 1 + 2 }}"
        "{{ 'a' in ['a'] }} {{ ' x ' | trim | upper }} {{ [3, 1] | sort | first }} {{ 5 ~ none }}"
    )
    conversation = [{"role": "system", "content": "s"}, *HELLO, *HELLO]
    assert template(text).render(conversation) == (
        "0:user|hello---1:user|helloa, b 3 1024 x! 3True X 1 5None"
    )
    assert template(text).render([]).startswith("nobody")
