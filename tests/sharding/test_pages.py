"""Caches in pages, whole and split over devices, give the answer of one device without pages.

The pages of a row lie anywhere in the pool. Whole prompts end within pages, and of two chunk sizes
one is longer than a page.
"""

import pytest
from laid_out import LaidOut, config_of, expected, greedy_rows, layout_of
from test_coded_caches import assert_close, coded

PAGE = 8
CASES = [
    ("llama", "weight-stationary-1d@tensor=4", 2, False, False),
    ("gemma2", "weight-stationary-1d@tensor=2", 8, False, True),
    ("gpt_oss", "weight-stationary-1d@tensor=2", 8, True, False),
    ("deepseek_v2", None, 8, False, False),
    ("deepseek_v3", "weight-stationary-1d@tensor=4", 8, True, True),
    ("llama4_text", None, 8, True, False),
    ("olmo2", "weight-stationary-1d@tensor=8", 1, True, False),
    ("qwen3", "data-tensor", 8, True, False),
    ("gpt_oss", "ring", 8, False, False),
    ("mistral", "ring", 8, True, False),
    ("llama4_text", "ring-data-expert", 8, True, True),
    ("deepseek_v3", "ring-tensor", 8, True, False),
    ("mixtral", "weight-stationary-1d-batch-attention", 8, True, False),
    ("gemma3_text", "sequence-parallel", 8, True, False),
    ("phi3", "data-parallel", 8, False, False),
]
"""Family, layout, KV heads, and whether prompts come in chunks and layers are scanned. There are
copies of heads, windows, sinks, chunked attention and latents; heads, rows, entries and prompt
tokens are split."""
OFTEN = CASES[:2] + CASES[7:9]
"""Cases of every run; the others are slow."""


@pytest.mark.parametrize(
    ("family", "layout", "num_kv_heads", "in_chunks", "scan_layers"),
    [pytest.param(*c, marks=[] if c in OFTEN else [pytest.mark.slow]) for c in CASES],
)
def test_the_answer_is_that_of_one_device_without_pages(
    family, layout, num_kv_heads, in_chunks, scan_layers
):
    config, placed = config_of(family, num_kv_heads), layout and layout_of(layout)
    options = {"in_chunks": in_chunks, "scan_layers": scan_layers, "page": PAGE}
    got = LaidOut(config, placed, **options).answer(greedy_rows())
    expected(config).assert_equals(got, greedy_rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "codes"),
    [
        ("llama", "weight-stationary-1d@tensor=2", "int8"),
        ("llama", None, "int4"),
        ("deepseek_v3", None, "float8_e4m3fn"),
    ],
)
def test_codes_in_pages_give_the_answer_of_codes_without_pages(family, layout, codes):
    config, placed = config_of(family), layout and layout_of(layout)
    got = LaidOut(config, placed, cache_codes=codes, page=PAGE).answer(greedy_rows())
    wanted = coded("whole", family, None, codes).answer(greedy_rows())
    assert_close(got, wanted, list(greedy_rows()))
