"""Chat templates of five families, written for these tests: each has the documented form of the family's messages.

Source: Qwen, "Function calling" (hermes); Meta, "Llama 3.1: JSON based tool calling" (llama3); Mistral AI,
"Tokenizers", v13 (mistral); the model card of deepseek-ai/DeepSeek-V3 (deepseek); OpenAI, "Harmony response format"
(harmony).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AddedToken, AutoTokenizer

import specdec
from specdec.extensions.tools.answer_formats import FORMATS

_ARGUMENTS = "(c.function.arguments if c.function.arguments is string else c.function.arguments | tojson)"
_HERMES = """{%- if tools %}<|im_start|>system
{{ tools | tojson }} as <tool_call>{"name": …}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ ARGUMENTS }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_LLAMA3 = """<|begin_of_text|>{% if tools %}Answer with {"name": …, "parameters": …} of {{ tools | tojson }}{% endif %}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '; ' if not loop.first -}}
{"name": "{{ c.function.name }}", "parameters": {{ ARGUMENTS }}}{% endfor %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
_MISTRAL = """<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' -%}
[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% else -%}
{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ ARGUMENTS }}{% endfor %}</s>{% endif %}
{%- endfor %}"""
_DEEPSEEK = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' -%}
<｜User｜>{{ m.content }}{% elif m.role == 'tool' -%}
<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% else -%}
<｜Assistant｜>{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content or '' }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls -%}
{{ '\\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}
```json
{{ ARGUMENTS }}
```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
_HARMONY = """{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages -%}
{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% else -%}
{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>{% endif -%}
{% if m.content %}<|start|>assistant<|channel|>{{ 'commentary' if m.tool_calls else 'final' -}}
<|message|>{{ m.content }}{{ '<|end|>' if m.tool_calls else '<|return|>' }}{% endif -%}
{% for c in m.tool_calls or [] -%}
<|start|>assistant<|channel|>commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>
{{- '' }}{{ ARGUMENTS }}<|call|>{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
TEMPLATES = {
    name: text.replace("ARGUMENTS", _ARGUMENTS)
    for name, text in {
        "hermes": _HERMES,
        "llama3": _LLAMA3,
        "mistral": _MISTRAL,
        "deepseek": _DEEPSEEK,
        "harmony": _HARMONY,
    }.items()
}
ENDS = {
    "hermes": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "harmony": "<|return|>",
}
"""Tokens that end an answer; harmony's calls end with <|call|>, the last of several alone."""
_MORE = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "[INST]",
    "[/INST]",
    "<｜User｜>",
    "<｜Assistant｜>",
)
_BASE = AutoTokenizer.from_pretrained(Path(specdec.__file__).parent / "models" / "gsm-llama")


def tokenizer_of(*families: str) -> Any:
    """A tokenizer with the families' markers: special tokens, but for Hermes's, which are added tokens without that.

    Of several families none is special: those of the others would leave no text. Its chat template is the first one's.
    """
    own = copy.deepcopy(_BASE)
    plain = {"hermes"} if len(families) == 1 else {*families}
    for family in families:
        markers = FORMATS[family].special
        own.add_tokens([AddedToken(marker, special=family not in plain, normalized=False) for marker in markers])
        special = [AddedToken(text, special=True, normalized=False) for text in (*_MORE, ENDS[family])]
        own.add_tokens(special, special_tokens=True)
    own.add_tokens([AddedToken("\n\n", normalized=False)] if "llama3" in families else [])  # as Llama 3 has it
    own.chat_template = TEMPLATES[families[0]]
    return own
