"""Conversations, and tokenizers with chat templates for them."""

import json
from pathlib import Path

from tokenizers import Tokenizer

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]"),
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_MARKED = """
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "Be brief. Today: " + (date_string or '26 Jul 2024') %}
    {%- set rest = messages %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- for message in rest %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception("Unknown role " ~ message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
LLAMA3_MARKED = LLAMA3.replace(
    "    {{- message['content'] | trim + '<|eot_id|>' }}",
    """    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}""",
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PAIRS = {"chatml": (CHATML, CHATML_MARKED), "llama3": (LLAMA3, LLAMA3_MARKED)}


def say(*contents, system=None):
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return ([{"role": "system", "content": system}] if system else []) + messages


CHATS = [
    say("What is 2 + 2?", "It is 4."),
    say("Hello", " Hi! ä日🚀\n", "and\n\nthen", "\nnothing", system="Be kind."),
    say("one <", "two <|", "three |>", "four"),
    [*say("again?", "first"), {"role": "assistant", "content": "second"}],
]


def write_tokenizer(folder, template=CHATML, eos="<|end_of_text|>", **config):
    """The tests' tokenizer with special tokens for conversations and a template, in `folder`."""
    folder.mkdir(exist_ok=True, parents=True)
    plain = Path("tests/assets/tokenizer")
    backend = Tokenizer.from_file(str(plain / "tokenizer.json"))
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    about = json.loads((plain / "tokenizer_config.json").read_text())
    about |= {"eos_token": eos, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_chats(path, chats=CHATS, column="messages"):
    path.write_text("".join(json.dumps({column: chat}) + "\n" for chat in chats))
    return path


HEADER = "<|start_header_id|>' + {} + '<|end_header_id|>\\n\\n"
FIRST_LLAMA3 = (
    "{% for m in messages %}{% set content = '" + HEADER.format("m['role']") + "' + m['content'] "
    "| trim + '<|eot_id|>' %}{% if loop.first %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{{ '" + HEADER.format("'assistant'") + "' }}"
)
"""Writes the assistant's prompt behind every conversation, as the first one of Llama 3."""
FIRST_LLAMA3_MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '" + HEADER.format("m['role']") + "' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{{ '" + HEADER.format("'assistant'") + "' }}"
)
_THOUGHT = "{{ '<think></think>' if loop.last }}{{ m.content + '<|im_end|>' }}"
THINKS_LAST = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}" + _THOUGHT + "{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Only the last turn has a thought, as in Qwen 3."""
THINKS_LAST_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}" + _THOUGHT + "{% endgeneration %}{% else %}" + _THOUGHT + "{% endif %}"
    "{{ '\\n' }}{% endfor %}"
)
_CHANNELS = (
    "{% if m.role == 'assistant' %}{% if loop.last %}{{ '[INST]thought<|im_end|><|im_start|>"
    "assistant' }}{% endif %}{{ '[/INST]' + m.content }}{{ '<|eot_id|>' if loop.last and not "
    "add_generation_prompt else '<|im_end|>' }}{% endif %}"
)
CHANNELS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    + _CHANNELS
    + "{{ '[/INST]' + m.content + '<|im_end|>' if m.role != 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
"""The last turn is two messages, and ends with another token, as in gpt-oss's harmony."""
CHANNELS_MARKED = CHANNELS.replace(
    _CHANNELS, "{% generation %}" + _CHANNELS + "{% endgeneration %}"
)
REWRITING = {
    "the next prompt": (FIRST_LLAMA3, FIRST_LLAMA3_MARKED),
    "a thought": (THINKS_LAST, THINKS_LAST_MARKED),
    "channels": (CHANNELS, CHANNELS_MARKED),
}
"""Templates whose turns aren't what each message adds, plain and marked."""
