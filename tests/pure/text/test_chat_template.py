"""Chat templates: what Hugging Face's templates rely on, the sandbox, and its refusals."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from quickstep.errors import ConfigError, RequestError
from quickstep.text.chat_template import ChatTemplate

CHATML = (
    "{% for message in messages %}\n"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def template(text, **named):
    return ChatTemplate(
        {"default": text, **named}, {"bos_token": "<s>"}, now=lambda: datetime(2024, 2, 29)
    )


def test_a_conversation_is_rendered_with_and_without_the_answer_opened():
    chat = template(CHATML)
    closed = "<|im_start|>user\nhello<|im_end|>\n"
    assert chat.render(HELLO, add_generation_prompt=False) == closed
    assert chat.render(HELLO) == closed + "<|im_start|>assistant\n"


def test_tojson_keeps_markup_and_other_scripts_as_they_are():
    tools = [{"name": "f", "description": "a < b & 'ü'"}]
    chat = template("{{ tools[0] | tojson }}|{{ tools[0] | tojson(indent=2) }}")
    plain = json.dumps(tools[0], ensure_ascii=False)
    assert (
        chat.render(HELLO, tools) == f"{plain}|{json.dumps(tools[0], ensure_ascii=False, indent=2)}"
    )


def test_a_template_prints_the_date_it_is_given():
    assert template("{{ strftime_now('%d %B %Y') }}").render(HELLO) == "29 February 2024"


def test_special_tokens_and_extra_variables_are_visible():
    chat = template("{{ bos_token }}{{ 'think' if enable_thinking else 'answer' }}")
    assert chat.render(HELLO) == "<s>answer"
    assert chat.render(HELLO, extra={"enable_thinking": True}) == "<s>think"


def test_loop_controls_and_generation_blocks_are_understood():
    chat = template(
        "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": text} for role, text in ["ua", "tb", "uc"]]
    messages[1]["role"] = "tool"
    assert chat.render(messages) == "ac"


def test_a_refusal_of_the_template_is_the_clients_error():
    chat = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        chat.render(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack):
    with pytest.raises(RequestError):
        template(attack + "{{ undefined_name.x }}").render(HELLO)


@pytest.mark.parametrize("text", ["{{ missing.field }}", "{{ messages + 1 }}", "{{ 1 / 0 }}"])
def test_whatever_a_template_raises_is_a_request_error(text):
    with pytest.raises(RequestError, match="chat template"):
        template(text).render(HELLO)


def test_a_broken_template_is_a_configuration_error():
    with pytest.raises(ConfigError, match="chat template"):
        template("{% for %}")


def test_extra_variables_cannot_replace_the_conversation():
    with pytest.raises(RequestError, match="messages") as caught:
        template(CHATML).render(HELLO, extra={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_text_parts_become_text_and_other_parts_are_refused():
    chat = template("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat.render([{"role": "user", "content": parts}]) == "one\ntwo"
    with pytest.raises(RequestError, match="image_url"):
        chat.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_arguments_of_tool_calls_reach_the_template_as_objects():
    chat = template("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    assert chat.render([{"role": "assistant", "tool_calls": [call]}]) == "Bern"


@pytest.mark.parametrize("broken", ['{"city": "Ber', "[1]", "not json"])
@pytest.mark.parametrize(
    "text",
    [
        "{{ a }}",
        "{{ '' + a }}",
        "{{ a if a is string else a | tojson }}",
        "{% for k, v in a.items() %}{{ k }}{% endfor %}{{ a }}",
    ],
)
def test_broken_arguments_reach_the_template_as_their_text(text, broken):
    chat = template("{% set a = messages[0].tool_calls[0].function.arguments %}" + text)
    call = {"type": "function", "function": {"name": "weather", "arguments": broken}}
    assert chat.render([{"role": "assistant", "tool_calls": [call]}]) == broken


@pytest.mark.parametrize(
    "text",
    [
        "{% for k, v in a|items %}{{ k }}{{ v }}{% endfor %}",
        "{% for k, v in a.items() %}{{ k }}{{ v }}{% endfor %}",
        "{% for k, v in a | dictsort %}{{ k }}{{ v }}{% endfor %}",
        "{% for k in a.keys() %}{{ k }}{% endfor %}{% for v in a.values() %}{{ v }}{% endfor %}",
        "{% for k in a %}{{ k }}{{ a[k] }}{% endfor %}{{ a | list | join }}",
        "{{ a.get('city', '') }}{{ a.get('city') or '' }}{{ a.city }}{{ a['city'] }}",
        "{{ a.city if 'city' in a }}",
        "{{ '' if a | length >= 0 }}{{ '' if a is mapping or a is string }}",
    ],
)
def test_arguments_of_every_form_render_in_every_way_of_reading(text):
    chat = template("{% set a = messages[0].tool_calls[0].function.arguments %}[" + text + "]")
    complete = '{"city": "Bern", "n": [1, {"a": null}]}'
    cut = [complete[:end] for end in range(len(complete))]
    others = ["[1]", "null", "true", "12", '"city"', "city", "\u2028", None, [1], 3, False]
    for arguments in [*cut, *others]:
        call = {"function": {"name": "f", "arguments": arguments}}
        assert chat.render([{"role": "assistant", "tool_calls": [call]}]) == "[]"
    assert chat.render([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]) == "[]"


@pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": None, "tool_calls": []}])
@pytest.mark.parametrize("text", ["{{ m.content }}", "{{ m.content if m.content is not none }}"])
def test_a_turn_without_content_renders_as_an_empty_one(text, turn):
    chat = template("{% for m in messages %}[" + text + "]{% endfor %}")
    message = {"role": "assistant", "reasoning_content": "cut", **turn}
    assert chat.render([*HELLO, message]) == "[hello][]"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{{ a | tojson }}", '{"b": 1, "c": "é"}'),
        ("{{ 'x' + a + 'y' }}", 'x{"b":1, "c":"é"}y'),
        ("{{ a }}{{ a ~ '!' }}", '{"b":1, "c":"é"}{"b":1, "c":"é"}!'),
        ("{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}", "b=1;c=é;"),
        ("{{ a is mapping }}{{ a is string }}{{ a.c }}", "TrueFalseé"),
    ],
)
def test_arguments_are_an_object_that_prints_as_the_models_own_text(text, shown):
    chat = template("{% set a = messages[0].tool_calls[0].function.arguments %}" + text)
    call = {"function": {"name": "f", "arguments": '{"b":1, "c":"é"}'}}
    assert chat.render([{"role": "assistant", "tool_calls": [call]}]) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{{ messages[0].content is string }}", "True"),
        ("{{ messages[0]['content'] is not none }}", "False"),
        ("{{ messages[0].content is none }}", "True"),
    ],
)
def test_content_missing_beside_calls_is_none_for_templates_that_test_it(text, shown):
    message = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert template(text).render([message]) == shown


def test_a_message_without_a_role_is_refused():
    with pytest.raises(RequestError, match="role"):
        template(CHATML).render([{"content": "hello"}])


def test_the_formats_are_those_of_the_template_that_renders_tools():
    formats = template("{{ '</think>' }}", tool_use="{{ tools }}[TOOL_CALLS]").formats
    assert formats.tool_calls is not None
    assert formats.reasoning is not None
    assert (formats.tool_calls.name, formats.reasoning.name) == ("mistral", "think")
    assert formats.renders_tools
    assert not template(CHATML).formats.renders_tools


def test_a_conversation_with_tools_uses_the_tool_template():
    chat = template("plain", tool_use="tools")
    assert chat.render(HELLO) == "plain"
    assert chat.render(HELLO, tools=[{"type": "function"}]) == "tools"


def opened(path):
    return ChatTemplate.open(path, {}, now=lambda: datetime(2024, 1, 1))


def test_templates_are_found_in_every_place_that_checkpoints_use(tmp_path):
    assert opened(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    assert opened(tmp_path).render(HELLO) == "from config"
    named = [{"name": "default", "template": "named"}, {"name": "rag", "template": "other"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert opened(tmp_path).render(HELLO) == "named"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert opened(tmp_path).render(HELLO) == "from file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert opened(tmp_path).render(HELLO, tools=[{}]) == "tools"


@pytest.mark.parametrize("entry", [{"default": 5}, {"default": "{% for %}"}, 7])
def test_a_checkpoint_whose_template_is_none_is_a_configuration_error(tmp_path, entry):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(ConfigError):
        opened(tmp_path)


def test_named_templates_without_a_default_say_the_way_out(tmp_path):
    config = {"chat_template": [{"name": "rag", "template": "x"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match="completion"):
        opened(tmp_path).render(HELLO)


def test_a_continued_message_ends_the_prompt_white_space_included():
    messages = [*HELLO, {"role": "assistant", "content": "im_end, so \n"}]
    chat = template("{% for m in messages %}{{ m.content | trim }}<|im_end|>{% endfor %}")
    prompt = chat.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt == "hello<|im_end|>im_end, so \n"


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
    ],
)
def test_a_message_that_the_template_alters_cannot_be_continued(text):
    messages = [*HELLO, {"role": "assistant", "content": "<think>Hm</think>So"}]
    with pytest.raises(RequestError, match="last message cannot be continued"):
        template(text).render(messages, add_generation_prompt=False, continue_final_message=True)


def said(role, content):
    return {"role": role, "content": content}


ONE_SYSTEM_MESSAGE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)


@pytest.mark.parametrize("text", [ONE_SYSTEM_MESSAGE, ALTERNATING])
def test_system_messages_reach_templates_that_want_one_at_the_beginning(text):
    render = template(text).render
    user, answer, more = said("user", "a"), said("assistant", "b"), said("user", "c")
    one, two, late = said("system", "one"), said("system", "two"), said("system", "late")
    parts = said("system", [{"type": "text", "text": "two"}])
    start = "[system:one\n\ntwo][user:a]"
    assert render([one, two, user]) == start
    assert render([one, parts, user]) == start
    assert render([one, two, user, answer, late, more]) == (start + "[assistant:b][user:late\n\nc]")
    assert render([user, answer, more, late]) == "[user:a][assistant:b][user:c\n\nlate]"
    assert render([user, late, answer, more]) == "[user:a\n\nlate][assistant:b][user:c]"


def test_a_later_system_message_stays_where_the_template_takes_it():
    talk = [said("user", "a"), said("system", "s"), said("user", "c")]
    text = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    assert template(text).render(talk) == "[user:a][system:s][user:c]"


def test_a_refusal_names_the_conversation_that_was_sent():
    with pytest.raises(RequestError, match="3 messages"):
        template("{{ raise_exception(messages | length ~ ' messages') }}").render(
            [said("user", "a"), said("system", "s"), said("user", "c")]
        )
