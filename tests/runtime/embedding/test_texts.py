"""Texts of a request as one list of integers."""

import pytest

from noria.runtime.embedding.texts import EncodedText, cuts_of, lengths_of, pack, unpack, whole_text

TEXTS = [whole_text([5, 6, 7]), EncodedText((1, 2, 3, 4), 2, num_cut=9), whole_text([])]


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:1], []])
def test_a_list_is_read_as_the_same_texts(texts):
    packed = pack(texts)
    assert unpack(packed) == texts
    assert lengths_of(packed) == tuple(len(text.ids) for text in texts)
    assert cuts_of(packed) == tuple(text.num_cut for text in texts)


def test_other_texts_have_other_lists():
    lists = [pack(texts) for texts in (TEXTS, TEXTS[:2], [whole_text([5, 6, 7, 1, 2, 3, 4])])]
    assert len(set(map(tuple, lists))) == 3
