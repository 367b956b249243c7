"""Chat templates: transformers' own text, and no template reads, runs, hangs or swells."""

import time

import pytest
from conftest import CHAT_TEMPLATE
from test_tasks import word_tokenizer

from problems import templates
from problems.templates import render_chats

# How the published models write theirs: blocks trimmed, loop controls, tojson, strftime_now, a system turn of its own.
QWEN = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
LLAMA = """{{- bos_token }}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{{- "Cutting Knowledge Date: December 2023" + strftime_now("%Y")[:0] }}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% generation %}{{- message | tojson(indent=1) }}{% endgeneration %}
{% endfor %}
"""
TEXTS = ["What is 2 + 2?", "", "two\nlines, \"quotes\" and {{ 1 / 0 }}", "\u00fc\u4e2d <|im_end|>"]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, QWEN, LLAMA], ids=["plain", "qwen", "llama"])
def test_the_text_is_transformers_own(template):
    tokenizer = word_tokenizer(template, bos=True)
    wanted = [tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
              for text in TEXTS]
    assert render_chats(TEXTS, tokenizer, "abcd") == wanted


def test_of_several_templates_the_default_one_is_taken_as_transformers_does():
    tokenizer = word_tokenizer({"tool_use": "no", "default": CHAT_TEMPLATE})
    assert render_chats(["hi"], tokenizer, ["x"]) == render_chats(["hi"], word_tokenizer(CHAT_TEMPLATE), ["x"])
    with pytest.raises(ValueError, match="no usable chat template") as error:
        render_chats(["hi"], word_tokenizer({"tool_use": "no"}), ["x"])
    assert "\n" not in str(error.value)


def test_more_texts_than_a_batch_keep_their_order():
    texts = [str(i) for i in range(2 * templates.BATCH + 1)]
    assert render_chats(texts, word_tokenizer("{{ messages[0].content }}"), texts) == texts


@pytest.mark.parametrize("template", [
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** (9 ** 9)) }}", "{{ 'x' * 99999999999 }}", "{{ ('x' * 9999999) }}{{ 'y' * 9999999 }}",
    "{{ '%999999999999d' % 1 }}", "{{ messages[0].content.center(99999999999) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "{{ [[[[messages] * 9999] * 9999] * 9999] }}",
])  # fmt: skip
def test_a_template_that_never_ends_or_swells_is_one_line_and_the_next_one_works(template):
    """In this process they would hang it for good (the power is one C call) or have the kernel kill it."""
    started = time.process_time()
    with pytest.raises(ValueError, match="chat template fails on problem seven") as error:
        render_chats(["hi"], word_tokenizer(template), ["seven"], cpu_s=1.5)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert render_chats(["hi"], word_tokenizer("{{ messages[0].content }}"), ["x"], cpu_s=1.5) == ["hi"]
    assert time.process_time() - started < 1  # of this process


def test_the_problem_that_a_template_fails_on_is_named():
    template = "{% if messages[0].content == '3' %}{{ raise_exception('no\\nthree') }}{% endif %}"
    with pytest.raises(ValueError, match=r"problem p3 \(TemplateError: no three\)"):
        render_chats([str(i) for i in range(9)], word_tokenizer(template), [f"p{i}" for i in range(9)])
