"""Small random models that turn a text into one vector, and the vectors of the published ones.

A family of encoders takes part through entries in `CASES`; decoders that embed are among them.
Transformers builds each model, with weights so large that a swapped head or a missing norm changes
the result, and saves it with the module files of sentence-transformers. The pooling of the
reference is written in numpy. Does not know how noria computes.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SHARED = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
POSITIONS = {"max_position_embeddings": 40, "pad_token_id": 1}
ENDS = {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
CLASSIFIER = "AutoModelForSequenceClassification"
LENGTHS = (23, 9, 1, 17)
"""The lengths of the texts of every case."""
POOLING_MODES = {
    "first": "cls_token",
    "last": "lasttoken",
    "max": "max_tokens",
    "mean": "mean_tokens",
}


@dataclass(frozen=True)
class EmbedderCase:
    """One small model and its pooling."""

    name: str
    family: str
    pooling: str
    options: Mapping[str, Any] = field(default_factory=dict)
    normalises: bool = True
    dense: tuple[tuple[int, bool, str], ...] = ()
    """Dense modules after the pooling: the output features, whether there is a bias, and the
    activation."""
    architecture: str = "AutoModel"
    """The class of transformers that builds the model; `AutoModel` has no head."""


CASES = (
    EmbedderCase("qwen3-embedding", "qwen3", "last", {"num_key_value_heads": 2, "head_dim": 12}),
    EmbedderCase(
        "qwen3-embedding-with-head",
        "qwen3",
        "last",
        {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
        architecture="AutoModelForCausalLM",
    ),
    EmbedderCase(
        "e5-mistral", "mistral", "last", {"num_key_value_heads": 2, "sliding_window": None}
    ),
    EmbedderCase("llama-mean-plain", "llama", "mean", normalises=False),
    EmbedderCase("minilm", "bert", "mean", {"num_hidden_layers": 6}),
    EmbedderCase(
        "bert-cls-plain",
        "bert",
        "first",
        {"type_vocab_size": 3, "layer_norm_eps": 1e-3},
        normalises=False,
        architecture="AutoModelForMaskedLM",
    ),
    EmbedderCase("roberta-mean", "roberta", "mean", {"type_vocab_size": 1, **POSITIONS}),
    EmbedderCase("roberta-max", "roberta", "max", POSITIONS, architecture="AutoModelForMaskedLM"),
    EmbedderCase("e5-multilingual", "xlm-roberta", "mean", {"type_vocab_size": 1, **POSITIONS}),
    EmbedderCase("bge-m3", "xlm-roberta", "first", POSITIONS),
    EmbedderCase(
        "modernbert",
        "modernbert",
        "mean",
        {"num_hidden_layers": 5, "local_attention": 8, "norm_eps": 1e-3, **ENDS},
    ),
    EmbedderCase(
        "modernbert-biases-cls",
        "modernbert",
        "first",
        {
            "num_hidden_layers": 4,
            "local_attention": 5,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            **ENDS,
        },
        architecture="AutoModelForMaskedLM",
    ),
    EmbedderCase("labse", "bert", "first", dense=((32, True, "Tanh"),)),
    EmbedderCase(
        "two-dense-plain",
        "bert",
        "mean",
        normalises=False,
        dense=((48, False, "Identity"), (20, True, "GELU")),
    ),
    EmbedderCase("qwen2-max", "qwen2", "max", {"num_key_value_heads": 4}),
    EmbedderCase("bert-reranker", "bert", "", {"num_labels": 1}, architecture=CLASSIFIER),
    EmbedderCase(
        "roberta-classes", "roberta", "", {"num_labels": 3, **POSITIONS}, architecture=CLASSIFIER
    ),
    EmbedderCase(
        "bge-reranker", "xlm-roberta", "", {"num_labels": 1, **POSITIONS}, architecture=CLASSIFIER
    ),
    EmbedderCase(
        "modernbert-classes",
        "modernbert",
        "",
        {"num_labels": 4, "classifier_pooling": "mean", "classifier_bias": True, **ENDS},
        architecture=CLASSIFIER,
    ),
    EmbedderCase(
        "modernbert-cls-classes",
        "modernbert",
        "",
        {"num_labels": 2, "norm_bias": True, "local_attention": 4, **ENDS},
        architecture=CLASSIFIER,
    ),
    EmbedderCase(
        "qwen3-reranker",
        "qwen3",
        "",
        {"num_labels": 1, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
        architecture=CLASSIFIER,
    ),
    EmbedderCase(
        "llama-classes",
        "llama",
        "",
        {"num_labels": 5, "pad_token_id": None},
        architecture=CLASSIFIER,
    ),
)


def texts(case: EmbedderCase) -> list[list[int]]:
    """Return random token ids, the same in every run of a case."""
    rng = np.random.default_rng(len(case.name))
    return [rng.integers(3, SHARED["vocab_size"], length).tolist() for length in LENGTHS]


ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Identity": lambda x: x,
    "Tanh": np.tanh,
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU": lambda x: x * np.vectorize(lambda y: (1 + math.erf(y / math.sqrt(2))) / 2)(x),
}


def dense_weights(case: EmbedderCase) -> list[dict[str, np.ndarray]]:
    """Return the tensors of the dense modules of a case, the same in every run."""
    rng, size, layers = np.random.default_rng(len(case.name)), SHARED["hidden_size"], []
    for outputs, has_bias, _ in case.dense:
        weight = rng.normal(size=(outputs, size)).astype(np.float32) * np.float32(size**-0.5)
        bias = {"linear.bias": rng.normal(size=outputs).astype(np.float32)} if has_bias else {}
        layers.append({"linear.weight": weight, **bias})
        size = outputs
    return layers


def pooled(case: EmbedderCase, states_TD: np.ndarray) -> np.ndarray:
    """Return the vector of a text, as sentence-transformers defines it."""
    match case.pooling:
        case "first":
            vector = states_TD[0]
        case "last":
            vector = states_TD[-1]
        case "max":
            vector = states_TD.max(axis=0)
        case _:
            vector = states_TD.mean(axis=0)
    for (_, _, activation), tensors in zip(case.dense, dense_weights(case), strict=True):
        vector = tensors["linear.weight"] @ vector + tensors.get("linear.bias", 0)
        vector = ACTIVATIONS[activation](vector)
    return vector / np.linalg.norm(vector) if case.normalises else vector


def save_reference(case: EmbedderCase, directory: Path) -> np.ndarray:
    """Save the model of a case; return the vector or the outputs for each of its texts."""
    import torch
    import transformers

    model = reference_model(case)
    model.save_pretrained(directory)
    if case.architecture == CLASSIFIER:
        with torch.no_grad():
            return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in texts(case)])
    write_modules(directory, case)
    base = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        states = [base(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in texts(case)]
    assert isinstance(model, transformers.PreTrainedModel)
    return np.stack([pooled(case, states_TD) for states_TD in states])


def reference_model(case: EmbedderCase) -> Any:
    """Return the model of a case, with random norms and biases."""
    import torch
    import transformers

    torch.manual_seed(len(case.name))
    config = transformers.AutoConfig.for_model(case.family, **{**SHARED, **case.options})
    maker = getattr(transformers, case.architecture)
    model = maker.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # norms start at one and biases at zero, where mistakes hide
            if parameter.ndim == 1 or "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def write_modules(directory: Path, case: EmbedderCase) -> None:
    """Write the module files of sentence-transformers."""
    names = [("Transformer", ""), ("Pooling", "1_Pooling")]
    names += [("Dense", f"{i}_Dense") for i in range(2, 2 + len(case.dense))]
    names += [("Normalize", f"{len(names)}_Normalize")] * case.normalises
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(names)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    config: dict[str, Any] = {
        f"pooling_mode_{mode}": kind == case.pooling for kind, mode in POOLING_MODES.items()
    }
    config["word_embedding_dimension"] = SHARED["hidden_size"]
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    size = SHARED["hidden_size"]
    layers = zip(case.dense, dense_weights(case), strict=True)
    for i, ((outputs, has_bias, activation), tensors) in enumerate(layers, start=2):
        part = "linear" if activation == "Identity" else "activation"
        described = {
            "in_features": size,
            "out_features": outputs,
            "bias": has_bias,
            "activation_function": f"torch.nn.modules.{part}.{activation}",
        }
        folder = directory / f"{i}_Dense"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(described))
        save_file(tensors, folder / "model.safetensors")
        size = outputs
