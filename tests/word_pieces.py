"""A small tokenizer of BERT, with a template for texts and for pairs."""

from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
WORDS = (*SPECIAL, "water", "wheel", "##s", "turn", "the", "é", "stone", "driven", "by", "stream")


def write_word_pieces(directory: Path) -> tokenizers.Tokenizer:
    """Write tokenizer.json; return the tokenizer of the library."""
    ids = {word: i for i, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    backend.save(str(directory / "tokenizer.json"))
    return backend
