"""Load the tokenizer of a model's files in any format.

The module of a format is imported when it is needed. Does not know about requests or devices.
"""

from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidTokenizer
from ..files.small_files import has_file
from .tokenizer import Tokenizer


def load_tokenizer(
    files: str | Path | Mapping[str, object], model: str | Path = "GGUF metadata"
) -> Tokenizer | None:
    """Load the tokenizer of a model directory or of GGUF metadata; None if there is none.

    In a directory, `tokenizer.json` is preferred to a sentencepiece `tokenizer.model`.

    Args:
      files: The directory or the metadata.
      model: The file that the metadata are from, which begins the messages about them.

    Raises:
      InvalidTokenizer: The tokenizer is invalid, or its form is not supported.
    """
    if isinstance(files, Mapping):
        from .gguf_vocabulary import tokenizer_from_gguf

        try:
            return tokenizer_from_gguf(files)
        except InvalidTokenizer as error:
            raise InvalidTokenizer(f"{model}: {error}") from None
    directory = Path(files)
    if has_file(directory, "tokenizer.json"):
        from .tokenizer_json import tokenizer_from_json

        return tokenizer_from_json(directory)
    if has_file(directory, "tokenizer.model"):
        from .sentencepiece_model import tokenizer_from_sentencepiece

        return tokenizer_from_sentencepiece(directory)
    for name in ("vocab.json", "vocab.txt", "tekken.json", "qwen.tiktoken"):
        if has_file(directory, name):
            raise InvalidTokenizer(
                f"{directory}: expected tokenizer.json or a sentencepiece tokenizer.model, got "
                f"only {name}. Save the tokenizer as tokenizer.json, or remove {name} to serve "
                "prompts of token ids."
            )
    return None
