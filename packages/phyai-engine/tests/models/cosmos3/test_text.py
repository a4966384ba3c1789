"""The tokenizer of a checkpoint, its chat templates and its faults."""

import json
import shutil

import pytest

from phyai.models.cosmos3.text import Cosmos3Tokenizer
from phyai.processing.errors import ProcessingError


@pytest.fixture
def folder(tiny_nano, tmp_path):
    return shutil.copytree(tiny_nano / "text_tokenizer", tmp_path / "text_tokenizer")


def change(folder, **settings):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_qwen_form(folder):
    tokenizer = Cosmos3Tokenizer.from_folder(folder)
    raw = tokenizer.encode_text
    message = raw("<|im_start|>user\nPut the cup<|im_end|>\n<|im_start|>assistant\n")
    end, start = raw("<|im_end|>"), raw("<|vision_start|>")
    assert len(end) == len(start) == 1
    assert tokenizer.encode("Put the cup") == (*message, *end, *start)
    system = raw("<|im_start|>system\nBe kind<|im_end|>\n")
    assert tokenizer.encode("Put the cup", system="Be kind") == (*system, *message, *end, *start)


def test_empty_prompt_is_the_template_end_and_vision_start(folder):
    """Qwen's own tokenizer has 8 tokens of template; here ``user`` and so on are one token too."""
    tokenizer = Cosmos3Tokenizer.from_folder(folder)
    assert len(tokenizer.encode("")) == 10


def test_edge_ids(tiny_edge):
    tokenizer = Cosmos3Tokenizer.from_folder(tiny_edge / "text_tokenizer")
    assert tokenizer.eos_id == 11
    assert tokenizer.vision_start_id == 20
    assert tokenizer.encode("Open")[-2:] == (11, 20)


NEMOTRON = (
    "{{ bos_token }}{%- if messages[0]['role'] != 'system' -%}\n"
    "{{ '<|im_start|>system\\n<|im_end|>\\n' }}\n"
    "{%- endif -%}\n"
    "{%- for message in messages -%}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


AGENT = (
    "{%- if tools is not none and tools | length > 0 -%}{{ tools | tojson }}{%- endif -%}\n"
    "{%- set state = namespace(last=-1) -%}\n"
    "{%- for message in messages[::-1] -%}\n"
    "{%- if message.role == 'user' and message.content is string and state.last < 0 -%}\n"
    "{%- set state.last = (messages | length - 1) - loop.index0 -%}{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- for message in messages -%}\n"
    "{%- if loop.index0 > state.last -%}{%- break -%}{%- endif -%}\n"
    "{{- '<|im_start|>' + message.role + '\\n' -}}\n"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}\n"
    "{%- for part in message.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>' -}}{%- endif -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def test_template_of_an_agent_makes_the_same_message(folder):
    """With tools, namespaces, loops that break and parts, as the published templates have."""
    plain = Cosmos3Tokenizer.from_folder(folder)
    change(folder, chat_template=AGENT)
    agent = Cosmos3Tokenizer.from_folder(folder)
    for system in (None, "Be kind"):
        assert agent.encode("Put the cup", system=system) == plain.encode(
            "Put the cup", system=system
        )


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_template_files_come_before_the_settings(tiny_edge, tmp_path, name):
    folder = shutil.copytree(tiny_edge / "text_tokenizer", tmp_path / "text_tokenizer")
    content = NEMOTRON if name.endswith("jinja") else json.dumps({"chat_template": NEMOTRON})
    (folder / name).write_text(content)
    change(folder, bos_token={"content": "<s>", "lstrip": False})
    tokenizer = Cosmos3Tokenizer.from_folder(folder)
    text = (
        "<s><|im_start|>system\n<|im_end|>\n<|im_start|>user\nGo<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render(None, " Go ") == text
    assert tokenizer.encode(" Go ") == (*tokenizer.encode_text(text), 11, 20)
    assert tokenizer.encode_text("<s>") == [1]


def test_hostile_template_stays_in_the_sandbox(folder):
    change(folder, chat_template="{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(ProcessingError, match="can not render"):
        Cosmos3Tokenizer.from_folder(folder)


def test_refusing_template(folder):
    change(folder, chat_template="{{ raise_exception('no user') }}")
    with pytest.raises(ProcessingError, match="refuses the message: no user"):
        Cosmos3Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "{% for %}"}, "is no chat template"),
        ({"chat_template": None}, "has no chat template"),
        ({"chat_template": 5}, "must be a string"),
        ({"eos_token": "<nowhere>"}, "has no token '<nowhere>'"),
        ({"eos_token": None}, "has no token None"),
        ({"eos_token": {"text": "x"}}, "eos_token.content is missing"),
    ],
)
def test_bad_settings_are_named(folder, settings, message):
    change(folder, **settings)
    with pytest.raises(ProcessingError, match=message):
        Cosmos3Tokenizer.from_folder(folder)


def test_missing_files_are_named(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ProcessingError, match=r"tokenizer_config\.json can not be read"):
        Cosmos3Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ProcessingError, match="can not be read as a tokenizer"):
        Cosmos3Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ProcessingError, match=r"tokenizer\.json is missing"):
        Cosmos3Tokenizer.from_folder(folder)
