"""The text tokenizer of a checkpoint: one user message in its chat template, as token ids."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai.processing.errors import ProcessingError
from phyai.processing.json_reader import JsonObject, read_json

VISION_START = "<|vision_start|>"
_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class Cosmos3Tokenizer:
    """Turns prompts into the token ids of the understanding tower.

    Attributes:
        source: the folder it was loaded from.
        vocab_size: number of ids.
        eos_id: id of the end of a message.
        vision_start_id: id that announces what is generated.
        render: chat template: system message or None, user message -> text.
        encode_text: ids of a text, special tokens recognised, none added.
    """

    source: Path
    vocab_size: int
    eos_id: int
    vision_start_id: int
    render: Callable[[str | None, str], str]
    encode_text: Callable[[str], list[int]]

    @classmethod
    def from_folder(cls, folder: Path | str) -> "Cosmos3Tokenizer":
        """Loads ``tokenizer.json`` and ``tokenizer_config.json``.

        The chat template is in ``chat_template.jinja``, ``chat_template.json`` or the settings.

        Raises:
            ProcessingError: a file is missing or malformed, a special token is not in it, or the
                template can not render a message.
        """
        folder = Path(folder)
        path = folder / _TOKENIZER
        if not path.is_file():
            raise ProcessingError(
                f"{path} is missing; copy the tokenizer's files from the published checkpoint"
            )
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ProcessingError(f"{path} can not be read as a tokenizer: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        settings = read_json(folder / _SETTINGS)
        variables = {
            name: _token_text(settings, name) for name in ("bos_token", "eos_token", "pad_token")
        }

        def token_id(text: str | None) -> int:
            number = None if text is None else tokenizer.token_to_id(text)
            if number is None:
                raise ProcessingError(
                    f"{path} has no token {text!r}, which ends a prompt; use the tokenizer of the "
                    "checkpoint"
                )
            return number

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False).ids

        loaded = cls(
            source=folder,
            vocab_size=tokenizer.get_vocab_size(),
            eos_id=token_id(variables["eos_token"]),
            vision_start_id=token_id(VISION_START),
            render=_renderer(*_template(folder, settings), variables),
            encode_text=encode,
        )
        loaded.encode("")
        return loaded

    def encode(self, prompt: str, *, system: str | None = None) -> tuple[int, ...]:
        """Returns the ids of a user message, the generation prompt, end and vision start.

        Args:
            prompt: the user message.
            system: a system message in front of it.

        Raises:
            ProcessingError: the chat template refuses the message.
        """
        ids = self.encode_text(self.render(system, prompt))
        return (*ids, self.eos_id, self.vision_start_id)


def _token_text(settings: JsonObject, name: str) -> str | None:
    """A special token is spelled as a string or as an object with ``content``."""
    value = settings.values.get(name)
    if isinstance(value, dict):
        return settings.child(name).get("content", str)
    return settings.get(name, str, None)


def _template(folder: Path, settings: JsonObject) -> tuple[str, str]:
    """Returns the template and where it was found."""
    for path in (folder / name for name in _TEMPLATE_FILES):
        if path.is_file() and path.suffix == ".jinja":
            return path.read_text(encoding="utf-8"), str(path)
        if path.is_file():
            return read_json(path).get("chat_template", str), str(path)
    if "chat_template" not in settings:
        raise ProcessingError(
            f"{folder} has no chat template; looked for {', '.join(_TEMPLATE_FILES)} and "
            f"chat_template in {_SETTINGS}; copy them from the published checkpoint"
        )
    return settings.get("chat_template", str), settings.where("chat_template")


def _renderer(
    template: str, where: str, variables: dict[str, str | None]
) -> Callable[[str | None, str], str]:
    """Compiles a template of a checkpoint, which is data of others, in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    given: dict[str, Any] = {name: text for name, text in variables.items() if text is not None}

    def refuse(message: str) -> None:
        raise ProcessingError(f"{where} refuses the message: {message}")

    environment.globals["raise_exception"] = refuse
    try:
        compiled = environment.from_string(template)
    except TemplateError as error:
        raise ProcessingError(f"{where} is no chat template: {error}") from error

    def render(system: str | None, prompt: str) -> str:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": prompt})
        try:
            return compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                add_vision_id=False,
                **given,
            )
        except (TemplateError, TypeError, ValueError) as error:
            if isinstance(error, ProcessingError):
                raise
            raise ProcessingError(f"{where} can not render a message: {error}") from error

    return render
