"""Chat templates, against transformers' own rendering."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagestream.engine.core.errors import InvalidRequest, StartError
from pagestream.engine.text.chat_template import ChatTemplate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = """{{ bos_token }}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]
    {%- else %} {% generation %}{{ m['content'].strip() }} {{ eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""
TOOLS = """{% set ns = namespace(n=0) %}
{% if tools %}
{% for tool in tools %}
    {{- tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }}. {{ m.content | tojson }}{% if m.tool_calls is defined %} calls {{ m.tool_calls[0].function.name }}{% endif %}

{% endfor %}{{ style | default('plain') }}"""

CHAT = [
    {"role": "user", "content": "  Is 1 < 2 & 3 > 2?  "},
    {"role": "assistant", "content": "Yes, naïve 🤗. "},
]
TOOL = {"type": "function", "function": {"name": "now", "description": "<time>", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("template", [CHATML, LLAMA2, TOOLS])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"tools": [TOOL], "style": "brief", "add_generation_prompt": True},
    ],
)
def test_text_equals_transformers(template, options):
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is TOOLS and options.get("continue_final_message"):
        pytest.raises(InvalidRequest, ChatTemplate("nothing of it").render, CHAT, **options)
        return
    theirs, _ = render_jinja_template([CHAT], chat_template=template, **special, **options)
    extra = {"style": options.pop("style")} if "style" in options else {}
    assert ChatTemplate(template, special).render(CHAT, template_kwargs=extra, **options) == theirs[0]


def test_smollm2_gets_its_default_system_message(tokenizer):
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens)
    theirs, _ = render_jinja_template([CHAT[:1]], chat_template=tokenizer.chat_template, add_generation_prompt=True)
    ours = template.render(CHAT[:1])
    assert ours == theirs[0]
    assert ours.startswith("<|im_start|>system\n")
    assert tokenizer.decode(tokenizer.encode(ours, add_special_tokens=False), skip_special_tokens=False) == ours


def test_text_parts_can_be_continued():
    template = ChatTemplate("{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}")
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "tw "}]}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "[one][tw "
    assert messages[0]["content"][1]["text"] == "tw ", "the caller's messages are left alone"


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, CHAT, "no chat template"),
        (CHATML, [], "empty"),
        (LLAMA2, CHAT[1:], "roles must alternate"),
        ("{{ messages[0]['content'] + 'x' }}", [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "list"),
        ("{{ messages[0]['content'] + 'x' }}", [{"role": "user", "content": None}], "content"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "unsafe"),
        ("{{ messages.append(1) }}", CHAT, "unsafe|append"),
        (CHATML, [{"role": "user", "content": "\ud83d"}], "surrogate"),
    ],
)
def test_refusals_name_the_messages(template, messages, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        ChatTemplate(template).render(messages)
    assert caught.value.param == "messages"


def test_continuing_and_a_generation_prompt_exclude_each_other():
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(CHATML).render(CHAT, add_generation_prompt=True, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_invalid_jinja_stops_the_start():
    with pytest.raises(StartError, match="line 2"):
        ChatTemplate("fine\n{% for %}")
