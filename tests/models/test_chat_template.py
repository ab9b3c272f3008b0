"""Chat templates: rendered as their authors intended, inside the sandbox."""

from __future__ import annotations

from datetime import datetime

import pytest

from outpace.errors import ModelError, UsageError
from outpace.models.chat_template import render_chat
from outpace.models.gguf_header import read_header
from outpace.models.resolve import resolve_model

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HELLO = [{"role": "user", "content": "Hello"}]


def render(template, messages=HELLO, **options):
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **options)


def test_smollm2_template():
    assert render(SMOLLM2) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chatml_conversation_without_generation_prompt():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hi."},
    ]
    assert render(SMOLLM2, messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n"
    )


@pytest.mark.model
def test_the_embedded_models_own_template():
    template = read_header(resolve_model(None)).metadata["tokenizer.chat_template"]
    assert render(template) == render(SMOLLM2)


def test_blocks_are_trimmed_as_by_convention():
    template = "{{ bos_token }}\n    {% for m in messages %}\n{{ m.content }}\n    {% endfor %}\n{{ eos_token }}"
    assert render(template) == "<s>\nHello\n</s>"


def test_loop_controls():
    template = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}"  # noqa: E501
    assert render(template) == "02"


def test_generation_blocks_pass_their_words_through():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "aHellob"


def test_tojson_is_plain_and_keeps_unicode():
    value = {"b": "<é&'>", "a": [1, None]}
    assert render("{{ v | tojson }}", v=value) == '{"b": "<é&\'>", "a": [1, null]}'
    assert render("{{ v | tojson(indent=2) }}", v={"a": 1}) == '{\n  "a": 1\n}'


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_tools_and_documents_are_defined_and_extra_reaches_the_template():
    assert render("{{ tools is none and documents is none }} {{ enable_thinking }}", enable_thinking=False) == (
        "True False"
    )
    assert render("{{ tools[0] }}", tools=["t"]) == "t"


def test_other_message_fields_reach_the_template():
    assert render("{{ messages[0].name }}", [{"role": "user", "name": "Ada", "content": ""}]) == "Ada"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render(SMOLLM2, [{"role": "user", "content": parts}]) == render(SMOLLM2)


def test_the_templates_own_refusal_is_told():
    template = "{% if messages[0].role != 'system' %}{{ raise_exception('System first, please') }}{% endif %}"
    with pytest.raises(ModelError, match="refused this conversation: System first, please"):
        render(template)


@pytest.mark.parametrize(
    ("template", "gist"),
    [
        ("{{ messages[0].content / 0 }}", "refused this conversation: unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ raise_exception('') }}", "refused this conversation: TemplateError"),
        ("line one\n{% if %}", r"does not compile: .*\(line 2\)"),
        ("{% for m in messages %}", "does not compile"),
        ("{{" + "(" * 5000, "does not compile"),
    ],
)
def test_broken_templates_are_model_errors(template, gist):
    with pytest.raises(ModelError, match=gist):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ ''|attr('__class__') + '' }}{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__mro__}'.format('') }}{{ cycler.__init__.__globals__.os }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ range(10000000)|list }}",
    ],
)
def test_the_sandbox_holds(template):
    with pytest.raises(ModelError):
        render(template)


def test_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    render(SMOLLM2, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]


@pytest.mark.parametrize(
    ("messages", "gist"),
    [
        ([], "messages is empty"),
        ("Hello", "must be a list of objects with role and content; got str"),
        (None, "got NoneType"),
        ({"role": "user", "content": "Hello"}, "got dict"),
        (["Hello"], r"messages\[0\] must be an object with a role and content; got str"),
        ([*HELLO, {"content": "Hello"}], r"messages\[1\] needs a role, such as 'user'; got None"),
        ([{"role": 3, "content": "Hello"}], "needs a role"),
        ([{"role": "user"}], "needs content that is a string or a list of text parts; got None"),
        ([{"role": "user", "content": 5}], "got 5"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "send only text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "send only text"),
        ([{"role": "user", "content": ["Hello"]}], "send only text"),
    ],
)
def test_malformed_messages_are_usage_errors(messages, gist):
    with pytest.raises(UsageError, match=gist):
        render(SMOLLM2, messages)
