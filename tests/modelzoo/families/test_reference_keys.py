"""Keys of config.json that change an answer, as transformers itself reads them.

Transformers does not read any key that a family notes as unread. Noted and ignored keys do not
change a bit of its logits. Published files have the same meaning in transformers and in noria.
"""

import ast
import copy
import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from alike import alike
from conformance import CASES, SHARED, Case
from published_configs import published_configs

from noria.modelzoo.families.hugging_face import IGNORED_KEYS
from noria.modelzoo.families.registry import FAMILIES, UnsupportedModel, from_hf_config
from noria.modelzoo.layer_config import Chunk, Window
from noria.modelzoo.rope_config import RopeConfig

pytestmark = pytest.mark.reference

READ = [published for published in published_configs() if published.refused is None]

SHARED_CODE = (
    "cache_utils.py",
    "configuration_utils.py",
    "masking_utils.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
)

NOT_KEYS = {
    # keys of other objects that the code calls a config
    "add", "append", "buffers", "compile_config", "create_compatible_mapping", "device_map",
    "device_mesh", "disable_mmap", "disk_offload_folder", "distributed_config", "dtype_plan",
    "from_model_config", "fusion_config", "get", "hf_quantizer", "ignore_mismatched_sizes",
    "inherit_mapping", "is_quantized", "items", "kernel_mapping", "keys", "popleft",
    "pretrained_model_name_or_path", "quant_method", "sanitize_kernel_mapping", "sharded_metadata",
    "transformers_weights", "update", "use_local_kernel", "values", "weight_mapping",
    "weights_only",
    # keys of layers that predict further tokens, and of kinds of layers that no family has
    "first_k_dense_replace", "mlp_layer_types", "mtp_layer_types", "mtp_mlp_layer_types",
    "mtp_per_layer_config", "num_mtp_layers", "number_of_conv_states",
    # keys of initial values and of returned values
    "init_std", "initializer_factor", "output_attentions", "tie_last_hidden_states",
    # keys of vision towers and projectors of models whose text part is read
    "image_size", "image_token_id", "layer_norm_eps", "mm_tokens_per_image", "num_channels",
    "patch_size", "pixel_shuffle_ratio", "projector_dropout", "projector_input_dim",
    "projector_output_dim", "text_config", "vision_config", "vision_output_dim",
    # which implementation runs
    "_attn_implementation_internal", "_experts_implementation",
    "_experts_implementation_internal", "attn_implementation", "experts_implementation",
}  # fmt: skip


@cache
def _library() -> Path:
    import transformers

    return Path(transformers.__file__).parent


@cache
def _attributes_read(path: Path) -> frozenset[str]:
    """Return the attributes that the code reads from any variable named as a config."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and "config" in _name(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and len(node.args) > 1:
            of, key = node.args[:2]
            is_asked = _name(node.func) in ("getattr", "hasattr") and "config" in _name(of)
            if is_asked and isinstance(key, ast.Constant):
                found.add(key.value)
    return frozenset(found)


@cache
def _arguments_taken(path: Path) -> frozenset[str]:
    """Return the names that a configuration's class accepts in addition to its fields."""
    return frozenset(
        node.args[0].value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("get", "pop")
        and _name(node.func.value) == "kwargs"
        and isinstance(node.args[0], ast.Constant)
    )


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def keys_read(model_type: str) -> set[str]:
    """Return every key by which transformers may distinguish models of this type."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    folder = Path(_library(), "models", cls.__module__.split(".")[-2])
    fields = {field.name for field in dataclasses.fields(cls)}
    code = {name for path in folder.glob("*_*.py") for name in _attributes_read(path)}
    code |= {name for file in SHARED_CODE for name in _attributes_read(_library() / file)}
    for path in (*folder.glob("configuration_*.py"), _library() / "modeling_rope_utils.py"):
        code |= _arguments_taken(path)
    methods = {name for name in code if hasattr(cls, name) and name not in fields}
    renamed = {*cls.attribute_map, *cls.attribute_map.values()}
    return fields | renamed | (code - methods - NOT_KEYS) | {"per_layer_config"}


LACKING = {case.family for case in CASES if case.of is not None}
"""The families that transformers lacks."""
REFERENCED = [family for family in FAMILIES if family.name not in LACKING]


def _case(family: str) -> Case:
    return next(case for case in CASES if case.family == family)


@cache
def _small(family: str) -> dict[str, Any]:
    """Return a small configuration of a family as transformers writes it."""
    from transformers import CONFIG_MAPPING

    case = _case(family)
    rope = case.rope or {"rope_type": "default", "rope_theta": 1e4}
    options = {**SHARED, **case.options, "num_hidden_layers": 2, "rope_parameters": dict(rope)}
    if family == "gpt_oss":
        options["layer_types"] = None
    config = CONFIG_MAPPING[family](**options)
    return config.to_dict()


@pytest.mark.parametrize("family", REFERENCED, ids=lambda family: family.name)
def test_no_key_that_the_reference_reads_is_noted_as_one_that_nothing_reads(family):
    plain = _small(family.name)
    assert from_hf_config(plain).ignored_keys == ()
    noted = []
    for key in sorted(keys_read(family.name)):
        try:
            spec = from_hf_config(plain | {key: "another"})
        except UnsupportedModel:
            continue
        noted += spec.ignored_keys
    assert noted == []


@pytest.mark.parametrize("family", REFERENCED, ids=lambda family: family.name)
def test_what_a_family_leaves_out_is_what_the_reference_assumes(family):
    from transformers import CONFIG_MAPPING

    reference = CONFIG_MAPPING[family.name]()
    assert {key: getattr(reference, key) for key in family.hf_defaults} == family.hf_defaults


NEW = {
    "_model_name_or_path": "m.gguf", "unk_token_id": 3, "internal_version": "7b",
    "max_sequence_length": 3, "selective_checkpoint_enabled": True, "move_model_to_device": True,
    "sequence_parallel_enabled": True, "use_flash_attention": True, "paddlenlp_version": "3",
    "attention_probs_dropout_prob": 0.9, "hidden_dropout_prob": 0.9, "virtual_pp_degree": 2,
    "moe_frequency": 1, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "alibi": False,
    "zeta": None, "eta": False, "theta": 0, "iota": [], "kappa": {}, "lambda": "text",
    "attention_chunk_size": None, "is_causal": True, "per_layer_config": {},
    "kv_sharing_modes": None,
}  # fmt: skip


def _noted_in_published() -> dict[str, Any]:
    names = {key.split(" = ")[0] for p in READ for key in p.unread}
    return {key: p.config[key] for p in READ for key in names if key in p.config}


EPSILONS = {
    **dict.fromkeys(("cohere", "cohere2", "stablelm"), "layer_norm_eps"),
    "starcoder2": "norm_epsilon",
}
"""Keys of the epsilon of norms, where they are not the usual one."""
READ_BY = {
    "use_qk_norm": {"cohere", "cohere2", "glm4_moe", "llama4_text"},
    "attention_chunk_size": {"llama4_text"},
    "shared_expert_intermediate_size": {"qwen2_moe"},
}
"""Families that read an option of this name themselves."""


@pytest.mark.parametrize("family", REFERENCED, ids=lambda family: family.name)
def test_keys_that_are_accepted_for_nothing_leave_the_logits_of_the_reference_as_they_were(family):
    options = NEW | _noted_in_published()
    options = {k: v for k, v in options.items() if family.name not in READ_BY.get(k, ())}
    if "sliding_window" in _small(family.name):
        options["sliding_window_size"] = _small(family.name)["sliding_window"]
    assert IGNORED_KEYS & options.keys()
    from_hf_config(_small(family.name) | options)
    plain, changed = _logits(family.name, {}), _logits(family.name, options)
    np.testing.assert_array_equal(plain, changed)
    assert plain.std() > 0.01


def _logits(family: str, options: dict[str, Any]) -> np.ndarray:
    """Return logits of a prompt and of one decode step, always with the same random weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family].from_dict({**_small(family), **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    tokens = torch.tensor([[5, 9, 17, 3, 80, 41, 6, 77, 12, 30]])
    with torch.no_grad():
        whole = model(tokens, use_cache=True)
        # by position: transformers renames this parameter
        step = model(tokens[:, :1], None, None, whole.past_key_values, use_cache=True)
    return np.concatenate([whole.logits[0].numpy(), step.logits[0].numpy()])


@pytest.mark.parametrize("model_type", sorted({p.model_type for p in READ} - LACKING))
def test_published_configurations_mean_what_the_reference_makes_of_them(model_type):
    from transformers import CONFIG_MAPPING

    for published in (p for p in READ if p.model_type == model_type):
        whole = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(published.config))
        config = from_hf_config(published.config).config
        theirs, ours = whole.get_text_config(), alike(config)
        sizes = {
            "vocab_size": ours.vocab_size,
            "hidden_size": ours.embed,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": ours.num_query_heads,
            "num_key_value_heads": ours.num_kv_heads,
            EPSILONS.get(model_type, "rms_norm_eps"): ours.norm_epsilon,
        }
        if len(config.sparse_layers) < config.num_layers:
            key = "intermediate_size_mlp" if "llama4" in model_type else "intermediate_size"
            sizes[key] = ours.mlp
        assert {key: getattr(theirs, key) for key in sizes} == sizes, published.name
        assert whole.tie_word_embeddings == ours.tie_embeddings, published.name
        if ours.latent is None:
            head_dim = getattr(theirs, "head_dim", None)
            head_dim = head_dim or theirs.hidden_size // theirs.num_attention_heads
            assert head_dim == ours.head_dim, published.name
        assert _windows(theirs) == [window and _size(window) for window in ours.windows]
        assert _thetas(theirs) == _our_thetas(ours), published.name


def _size(window: Window) -> int:
    return window.size if isinstance(window, Chunk) else window


def _windows(config: Any) -> list[int | None]:
    """Return the window of each layer by its kind, or one window if there are no kinds."""
    sizes = {
        "full_attention": None,
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    same = ["sliding_attention"] * config.num_hidden_layers
    return [sizes[kind] for kind in getattr(config, "layer_types", None) or same]


def _thetas(config: Any) -> set[float]:
    tables = config.rope_parameters
    tables = [tables] if "rope_theta" in tables else tables.values()
    return {float(table["rope_theta"]) for table in tables}


def _our_thetas(ours: SimpleNamespace) -> set[float]:
    ropes = (ours.rope, ours.local_rope)
    return {rope.theta for rope in ropes if isinstance(rope, RopeConfig)}
