"""The tokenizer of a model's files, whatever their format.

Formats are imported when they are needed. Does not know about requests or devices.
"""

from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidTokenizer
from .tokenizer import Tokenizer


def load_tokenizer(files: str | Path | Mapping[str, object]) -> Tokenizer | None:
    """Loads the tokenizer of a model directory or of GGUF metadata; None where there is none.

    In a directory `tokenizer.json` is preferred over a sentencepiece `tokenizer.model`.
    """
    if isinstance(files, Mapping):
        from .gguf_vocabulary import tokenizer_from_gguf

        return tokenizer_from_gguf(files)
    # here, as merging parts imports this module, and needs neither numpy nor model files
    from ..checkpoint.small_files import has_file

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
