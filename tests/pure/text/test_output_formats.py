"""The formats that a template's text speaks, and their names on the command line."""

from __future__ import annotations

import pytest

from quickstep.errors import ConfigError
from quickstep.text.tool_calls.formats import formats_of, reasoning_format, tool_call_format

BAR = "\uff5c"
# what tells of the formats in the templates of these families
TEMPLATES = {
    "Qwen2.5": (
        "{%- if tools %}# Tools\nreturn a json object within <tool_call></tool_call> XML tags",
        "hermes",
        None,
    ),
    "Qwen3": (
        "{%- if tools %}<tool_call>{%- endif %}{% set content = content.split('</think>')[-1] %}"
        "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
        "hermes",
        "think",
    ),
    "Llama 3.1": (
        '{%- if tools is not none %}{"name": function name, "parameters": dictionary of argument '
        "name and its value}{{- '<|python_tag|>' }}",
        "llama3_json",
        None,
    ),
    "Llama 3.2, pythonic": (
        "{%- if tools %}[func_name1(params_name1=params_value1), func_name2(params)]",
        "pythonic",
        None,
    ),
    "Mistral 7B": (
        "{%- if tools is not none %}[AVAILABLE_TOOLS]{{ '[TOOL_CALLS] [' }}",
        *["mistral", None],
    ),
    "Magistral": ("{%- if tools %}[TOOL_CALLS]{{ n }}[ARGS] [THINK]x[/THINK]", *["mistral"] * 2),
    "DeepSeek R1": (
        f"{{{{'<{BAR}tool▁calls▁begin{BAR}><{BAR}tool▁call▁begin{BAR}>' + tool['type']}}}}"
        "{% if '</think>' in content %}",
        "deepseek_v3",
        "think",
    ),
    "Granite 3.3": ("{%- if tools %}respond only with <|tool_call|> followed by", "granite", None),
    "gpt-oss": (
        "{%- if tools -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' }}"
        "<|channel|>commentary json<|message|>",
        "harmony",
        "harmony",
    ),
    "Gemma": ("<start_of_turn>{{ role }}\n{{ message['content'] | trim }}", None, None),
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_shows_its_formats(family):
    template, tool_calls, reasoning = TEMPLATES[family]
    formats = formats_of(template)
    assert (formats.tool_calls.name if formats.tool_calls else None) == tool_calls
    assert (formats.reasoning.name if formats.reasoning else None) == reasoning


@pytest.mark.parametrize(
    ("template", "renders"),
    [
        ("{%- if tools %}x{% endif %}", True),
        ("{{ tools | tojson }}", True),
        ("{% for tool in\n tools %}", True),
        ("You have no tools. {{ messages[0].content }}", False),
        ("{% if x %} tools {% endif %}", False),
        ("{{ tools_in_user_message }}", False),
    ],
)
def test_a_template_that_reads_tools_is_recognised(template, renders):
    assert formats_of(template).renders_tools is renders


def test_a_template_that_writes_earlier_calls_is_recognised():
    assert formats_of("{% if message.tool_calls %}").renders_calls
    assert not formats_of("{{ message.content }}").renders_calls


def test_formats_go_by_vllms_names_too():
    assert tool_call_format("hermes") is tool_call_format("qwen25") is not None
    assert tool_call_format("openai") is tool_call_format("harmony") is not None
    assert reasoning_format("deepseek_r1") is reasoning_format("think") is not None
    assert tool_call_format("qwen3_xml") is tool_call_format("qwen3_coder") is not None
    assert tool_call_format("glm47") is tool_call_format("glm45") is not None
    assert tool_call_format("none") is reasoning_format("none") is None


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"--tool-call-parser is 'xml'; known are hermes, .*none"):
        tool_call_format("xml")
    with pytest.raises(ConfigError, match=r"--reasoning-parser is 'x'; known are think, .*none"):
        reasoning_format("x")
