"""Chat templates of our own that write tools, calls and reasoning as the families' templates do,
with the same constructs of Jinja: filters, macros, namespaces, tests of types.
"""

from __future__ import annotations

_BAR = "\uff5c"

QWEN3_CODER = """\
{%- if tools %}
{{- '<|im_start|>system\\nCall a function like this:\\n<tool_call>\\n<function=name>\\n' }}
{{- '<parameter=x>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>\\n' }}
{%- for tool in tools %}{{- tool.function.name }}{{- '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message.reasoning_content is string %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for tool_call in message.tool_calls or [] %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{%- if tool_call.arguments is defined %}
{%- for args_name, args_value in tool_call.arguments|items %}
{{- '<parameter=' + args_name + '>\\n' }}
{%- set is_list = args_value is sequence and args_value is not string %}
{%- if args_value is mapping or is_list %}{%- set args_value = args_value | tojson | safe %}
{%- else %}{%- set args_value = args_value | string %}{%- endif %}
{{- args_value }}{{- '\\n</parameter>\\n' }}
{%- endfor %}
{%- endif %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

SEED_OSS = (
    QWEN3_CODER.replace("tool_call>", "seed:tool_call>")
    .replace("<think>", "<seed:think>")
    .replace("</think>", "</seed:think>")
)

GLM45 = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
For each call:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>
{%- endif -%}
{%- macro visible_text(content) -%}{{- content if content is string else '' -}}{%- endmacro -%}
{%- for m in messages %}
{%- if m.role == 'assistant' -%}
<|assistant|>
{{- '\\n<think>' + (m.reasoning_content or '') + '</think>' -}}
{{- '\\n' + visible_text(m.content) if visible_text(m.content) else '' -}}
{%- for tc in m.tool_calls or [] %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{%- for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>
{%- endfor %}
{%- else -%}
<|{{ m.role }}|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{{- '<|assistant|>' if add_generation_prompt -}}
"""

GLM47 = """\
{%- if tools -%}
<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>
{%- endif -%}
{%- for m in messages -%}
<|{{ m.role }}|>{{ '</think>' if m.role == 'assistant' }}{{ m.content or '' }}
{%- for tc in m.tool_calls or [] -%}
{{- '<tool_call>' + tc.function.name -}}
{%- for k, v in tc.function.arguments.items() -%}
<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- endfor -%}
{{- '<|assistant|><think>' if add_generation_prompt -}}
"""

MINIMAX_M2 = """\
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{%- set toolcall_end_token = '</minimax:tool_call>' -%}
{%- if tools -%}{{ tools | map(attribute='function') | map(attribute='name') | join }}{%- endif -%}
{%- for message in messages -%}
{{- ']~b]' ~ ('ai' if message.role == 'assistant' else message.role) ~ '\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- if message.tool_calls -%}
{{- '\\n' ~ toolcall_begin_token ~ '\\n' -}}
{%- for tool_call in message.tool_calls -%}
{%- if tool_call.function -%}{%- set tool_call = tool_call.function -%}{%- endif -%}
{{- '<invoke name="' ~ tool_call.name ~ '">\\n' -}}
{%- set _args = tool_call.arguments -%}
{%- for k, v in _args.items() -%}
{{- '<parameter name="' ~ k ~ '">' -}}
{{- v | tojson(ensure_ascii=False) if v is not string else v -}}
{{- '</parameter>\\n' -}}
{%- endfor -%}
{{- '</invoke>\\n' -}}
{%- endfor -%}
{{- toolcall_end_token -}}
{%- endif -%}
{{- '[e~[\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\\n<think>\\n' -}}{%- endif -%}
"""

DEEPSEEK_V32 = f"""\
{{%- set dsml = '{_BAR}DSML{_BAR}' -%}}
{{%- if tools -%}}{{{{ tools | tojson }}}}{{%- endif -%}}
{{%- for message in messages -%}}
<{_BAR}{{{{ message.role }}}}{_BAR}>
{{%- if message.role == 'assistant' -%}}
{{{{- (message.reasoning_content or '') ~ '</think>' -}}}}
{{%- endif -%}}
{{{{- message.content or '' -}}}}
{{%- if message.tool_calls -%}}
{{{{- '\\n\\n<' ~ dsml ~ 'function_calls>\\n' -}}}}
{{%- for call in message.tool_calls -%}}
{{{{- '<' ~ dsml ~ 'invoke name="' ~ call.function.name ~ '">\\n' -}}}}
{{%- for k, v in call.function.arguments | items -%}}
{{{{- '<' ~ dsml ~ 'parameter name="' ~ k ~ '" string="' -}}}}
{{{{- ('true">' ~ v) if v is string else ('false">' ~ v | tojson) -}}}}
{{{{- '</' ~ dsml ~ 'parameter>\\n' -}}}}
{{%- endfor -%}}
{{{{- '</' ~ dsml ~ 'invoke>\\n' -}}}}
{{%- endfor -%}}
{{{{- '</' ~ dsml ~ 'function_calls>' -}}}}
{{%- endif -%}}
{{%- endfor -%}}
{{{{- '<{_BAR}Assistant{_BAR}><think>' if add_generation_prompt -}}}}
"""

KIMI_K2 = """\
{% macro render_toolcalls(message) -%}
  <|tool_calls_section_begin|>
  {%- for tool_call in message['tool_calls'] -%}
    {%- set formatted_id = tool_call['id'] -%}
    <|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>
    {%- if tool_call['function']['arguments'] is string -%}
      {{ tool_call['function']['arguments'] }}
    {%- else -%}
      {{ tool_call['function']['arguments'] | tojson }}
    {%- endif -%}
    <|tool_call_end|>
  {%- endfor -%}
  <|tool_calls_section_end|>
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] == 'tool' -%}
    <|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message['content'] }}
  {%- else -%}
    <|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>
    {%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}
    {{- message['content'] or '' -}}
    {%- if message.get('tool_calls') -%}{{ render_toolcalls(message) }}{%- endif -%}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""

GEMMA4 = """\
{%- macro format_argument(argument) -%}
{%- if argument is string -%}{{- '<|"|>' + argument + '<|"|>' -}}
{%- elif argument is boolean -%}{{- 'true' if argument else 'false' -}}
{%- elif argument is none -%}{{- 'null' -}}
{%- elif argument is mapping -%}
{{- '{' -}}{%- set ns = namespace(found_first=false) -%}
{%- for key, value in argument | dictsort -%}
{%- if ns.found_first %},{% endif -%}{%- set ns.found_first = true -%}
{{- key -}}:{{- format_argument(value) -}}
{%- endfor -%}{{- '}' -}}
{%- elif argument is sequence -%}
{{- '[' -}}
{%- for item in argument -%}
{{- format_argument(item) -}}{%- if not loop.last %},{% endif -%}
{%- endfor -%}{{- ']' -}}
{%- else -%}{{- argument -}}{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools -%}<|turn>system
{% for tool in tools -%}<|tool>declaration:{{- tool['function']['name'] -}}<tool|>{%- endfor -%}
<turn|>
{% endif -%}
{%- for message in messages -%}
{{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
{%- if message.get('reasoning_content') -%}
{{- '<|channel>thought\\n' + message['reasoning_content'] + '<channel|>' -}}
{%- endif -%}
{{- message['content'] or '' -}}
{%- for tool_call in message.get('tool_calls') or [] -%}
{%- set function = tool_call['function'] -%}
{{- '<|tool_call>call:' + function['name'] + '{' -}}
{%- if function['arguments'] is mapping -%}
{%- set ns_args = namespace(found_first=false) -%}
{%- for key, value in function['arguments'] | dictsort -%}
{%- if ns_args.found_first %},{% endif -%}{%- set ns_args.found_first = true -%}
{{- key -}}:{{- format_argument(value) -}}
{%- endfor -%}
{%- elif function['arguments'] is string -%}{{- function['arguments'] -}}{%- endif -%}
{{- '}<tool_call|>' -}}
{%- endfor -%}
{{- '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n' -}}{%- endif -%}
"""

LFM2 = """\
{{- bos_token -}}
{%- if tools -%}
<|im_start|>system
List of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|><|im_end|>
{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{{- message['content'] or '' -}}
{%- if message.tool_calls -%}
{{- '<|tool_call_start|>[' -}}
{%- for call in message.tool_calls -%}
{{- call.function.name + '(' -}}
{%- for k, v in call.function.arguments | items -%}
{{- k -}}={{- v | tojson -}}{{- ', ' if not loop.last -}}
{%- endfor -%}
{{- ')' + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ']<|tool_call_end|>' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

# with the names of the formats of calls and of reasoning that each family's template shows
TOOL_TEMPLATES = {
    "Qwen3-Coder": (QWEN3_CODER, "qwen3_coder", "think"),
    "Seed OSS": (SEED_OSS, "seed_oss", "seed_oss"),
    "GLM 4.5": (GLM45, "glm45", "think"),
    "GLM 4.7": (GLM47, "glm45", "think"),
    "MiniMax M2": (MINIMAX_M2, "minimax_m2", "think"),
    "DeepSeek V3.2": (DEEPSEEK_V32, "deepseek_v32", "think"),
    "DeepSeek V4": (DEEPSEEK_V32.replace("function_calls", "tool_calls"), "deepseek_v4", "think"),
    "Kimi K2": (KIMI_K2, "kimi_k2", "think"),
    "Gemma 4": (GEMMA4, "gemma4", "gemma4"),
    "LFM2": (LFM2, "lfm2", None),
}
