"""Hugging Face models: the keys of config.json and tensor names that families have in common.

Works on the parsed table and knows nothing of files. `auto_map` is never followed: `model_type`
alone selects the model. Guarantees: each key is either read, or known not to change the answer, or
noted because the reference does not read it either, or refused by name.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from ..config import DecoderConfig
from .config_reader import ConfigReader
from .expert_sources import ExpertNames, find_expert_names
from .family import Family, ModelSpec, WholeModel
from .mapping import TensorPrefix
from .quantisation import read_quantisation
from .rope_options import MAX_POSITION, read_rope
from .sources import TensorNames, parameter_sources

_MLP = "model.layers.{i}.mlp"
SPLIT_EXPERTS = ExpertNames(
    router=f"{_MLP}.gate.weight",
    gate=f"{_MLP}.experts.{{e}}.gate_proj.weight",
    up=f"{_MLP}.experts.{{e}}.up_proj.weight",
    down=f"{_MLP}.experts.{{e}}.down_proj.weight",
    choice_bias=f"{_MLP}.gate.e_score_correction_bias",
    shared_router=f"{_MLP}.shared_expert_gate.weight",
)
FUSED_EXPERTS = replace(
    SPLIT_EXPERTS,
    gate=f"{_MLP}.experts.gate_up_proj",
    up=f"{_MLP}.experts.gate_up_proj",
    down=f"{_MLP}.experts.down_proj",
)
"""The names of experts in the memory of transformers, which can also write them to files."""

SHARED_EXPERTS = {
    f"shared_{part}": f"{_MLP}.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
"""The names of shared experts in most families that have several."""

NAMES = TensorNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    attention_norm="model.layers.{i}.input_layernorm",
    query="model.layers.{i}.self_attn.q_proj",
    key="model.layers.{i}.self_attn.k_proj",
    value="model.layers.{i}.self_attn.v_proj",
    output="model.layers.{i}.self_attn.o_proj",
    sinks="model.layers.{i}.self_attn.sinks",
    query_norm="model.layers.{i}.self_attn.q_norm",
    key_norm="model.layers.{i}.self_attn.k_norm",
    attention_post_norm="model.layers.{i}.post_attention_layernorm",
    mlp_norm="model.layers.{i}.post_attention_layernorm",
    gate="model.layers.{i}.mlp.gate_proj",
    up="model.layers.{i}.mlp.up_proj",
    down="model.layers.{i}.mlp.down_proj",
    mlp_post_norm="model.layers.{i}.post_feedforward_layernorm",
    experts=SPLIT_EXPERTS,
    shared_gate=f"{_MLP}.shared_expert.gate_proj",
    shared_up=f"{_MLP}.shared_expert.up_proj",
    shared_down=f"{_MLP}.shared_expert.down_proj",
)

ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
"""Activations, and their names in config.json."""

_TIED = "tie_word_embeddings"

EPSILONS = {"rms": "rms_norm_eps", "layer": "layer_norm_eps"}

# Bounds far above all published models: a larger size is a mistake or an attack.
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 8192
MAX_EMBED = 2**18
MAX_MLP = 2**20
MAX_EXPERTS = 2**14
MAX_VOCAB = 2**24

# Keys that cannot change the forward pass of a model.
IGNORED_KEYS = frozenset({
    # provenance and storage
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map",
    "_model_name_or_path", "internal_version",
    "torch_dtype", "dtype", "transformers.js_config", "is_llama_config", "unsloth_fixed",
    "unsloth_version", "model_name", "paddlenlp_version",
    # training
    "initializer_range", "attention_dropout", "pretraining_tp", "gradient_checkpointing",
    "router_aux_loss_coef", "selective_checkpoint_enabled", "sequence_parallel_enabled",
    "move_model_to_device", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "virtual_pp_degree",
    # choice of the implementation, and its additional results
    "use_cache", "cache_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "torchscript", "use_bfloat16", "use_flash_attention",
    "tf_legacy_loss", "keys_to_ignore_at_inference", "chunk_size_feed_forward", "is_decoder",
    # text and tasks
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "max_sequence_length",
    "tokenizer_class", "prefix", "task_specific_params", "finetuning_task", "problem_type",
    "id2label", "label2id", "num_labels",
    # sampling defaults of old releases
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "max_new_tokens",
})  # fmt: skip

# Options that most families do not have. Some files have them; they are harmless only at these
# values. The list has every key that the reference reads for any model in masks, caches and layers.
NEUTRAL_VALUES: Mapping[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "qkv_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "attention_chunk_size": None,
    "is_causal": True,
    "per_layer_config": {},
    "kv_sharing_modes": None,
    "moe_frequency": 1,
    "alibi": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}


def model_spec(
    family: Family, config: ConfigReader, tensor_names: Collection[str] = ()
) -> ModelSpec:
    """Read config.json into the decoder and the sources of its parameters.

    Args:
      family: The family of the model.
      config: The table of config.json.
      tensor_names: The tensors of the model. They select among the published forms of experts.

    Raises:
      UnsupportedModel: The model or an option is not supported, or a value is malformed.
    """
    config.text("model_type")
    kind = _published_class(config, family)
    read_quantisation(config)  # the loader dequantises, so tensors have plain names and shapes
    decoder = _decoder_config(config, family)
    if kind != "head":
        decoder = replace(decoder, has_head=False)
    names = names_of(family, decoder, tensor_names)
    has_prefix = [name.startswith(family.hf_prefix) for name in tensor_names]
    # the tensors of a model without a head have no prefix
    if not any(has_prefix) if has_prefix else kind == "base":
        names = replace(names, prefix=TensorPrefix(family.hf_prefix, ""))
    if kind == "classifier":
        classifier = family.hf_classifier
        decoder = replace(decoder, pooling=classifier.pooling(config, decoder.embed))
        names = replace(names, dense=classifier.dense, dense_norm=classifier.norm)
    if any(name.endswith(".LayerNorm.gamma") for name in tensor_names):
        names = replace(names, norm_suffixes=("gamma", "beta"))
    if (key := family.hf_interleaved_key) is not None:
        names = replace(names, is_interleaved=config.flag(key, default=True))
    unused = ()
    if family.hf_unused_tensors is not None:
        unused = family.hf_unused_tensors(config, decoder.num_layers)
    ignored = (
        *map(names.prefix.to_whole, _ignored_tensors(decoder)),
        *(n for n in tensor_names if n.startswith(unused)),
    )
    _account_for_rest(config, decoder)
    return ModelSpec(
        family.name,
        decoder,
        parameter_sources(decoder, names),
        ignored,
        names,
        ignored_keys=tuple(config.ignored),
    )


def names_of(
    family: Family, decoder: DecoderConfig, tensor_names: Collection[str] = ()
) -> TensorNames:
    """The tensor names of a family; `tensor_names` select among the published forms of experts.

    Rotated pairs are adjacent features if they may be so in the family.
    """
    forms = family.hf_experts or (SPLIT_EXPERTS, FUSED_EXPERTS)
    experts = find_expert_names(decoder, forms, frozenset(tensor_names))
    names = replace(NAMES, experts=experts, **family.hf_names)
    return replace(names, is_interleaved=True) if family.hf_interleaved_key else names


def text_part_spec(
    whole: WholeModel, config: ConfigReader, tensor_names: Collection[str] = ()
) -> ModelSpec:
    """Read the text part of a model of more than text.

    The other parts are not needed for text. Their tables and tensors are not read; the tensors are
    recognised by the prefixes of their names.

    Args:
      whole: The whole model.
      config: The table of config.json of the whole model.
      tensor_names: The tensors of the whole model.

    Raises:
      UnsupportedModel: The model or an option is not supported, or a value is malformed.
    """
    check_architecture(config, whole.architecture)
    read_quantisation(config)
    tokens = {
        key: config.integer(key, minimum=0, maximum=MAX_VOCAB)
        for key in whole.other_tokens
        if config.has(key)
    }
    family, text = _text_part(whole, config)
    usual, *others = whole.prefixes
    found = (p for p in others if any(name.startswith(p.whole) for name in tensor_names))
    prefix = next(found, usual)
    spec = model_spec(family, text, [prefix.to_standalone(name) for name in tensor_names])
    config.ignore(("model_type", *whole.other_keys, *IGNORED_KEYS))
    config.expect_if_unread(NEUTRAL_VALUES)
    config.ignore_rest()
    assert spec.names is not None, family.name
    names = replace(spec.names, prefix=prefix)
    return replace(
        spec,
        names=names,
        sources=parameter_sources(spec.config, names),
        ignored_tensors=tuple(prefix.to_whole(name) for name in spec.ignored_tensors),
        ignored_prefixes=whole.other_prefixes,
        other_tokens=tokens,
        ignored_keys=tuple(config.ignored),
    )


def _text_part(whole: WholeModel, config: ConfigReader) -> tuple[Family, ConfigReader]:
    """The family of the text part, and its table."""
    is_flat = whole.is_flat and not config.has("text_config")
    text = config.table("text_config")
    if is_flat:
        own = ("architectures", "model_type", *whole.other_keys, *whole.other_tokens)
        text = config.without(own, {"model_type": next(iter(whole.texts))})
    name = text.text(
        "model_type", default=None if len(whole.texts) > 1 else next(iter(whole.texts))
    )
    if name not in whole.texts:
        raise text.error("model_type", " or ".join(map(repr, whole.texts)))
    family = whole.texts[name]
    if config.flag(_TIED, default=False):
        # if only one of the two keys ties embeddings, a head of its own is used where there is one
        text = text.without((_TIED,), {_TIED: True})
    return family, text.with_defaults(family.hf_defaults)


def _account_for_rest(config: ConfigReader, decoder: DecoderConfig) -> None:
    """Refuse unread keys that may change the answer; note the other unread keys."""
    config.ignore(IGNORED_KEYS)
    # a second name of the option; the reference reads only the usual name
    config.expect_equal("sliding_window_size", "sliding_window")
    config.expect_if_unread(NEUTRAL_VALUES)
    if not config.is_null("layer_types"):
        kinds = [
            "sliding_attention" if attention.window else "full_attention"
            for attention in decoder.attentions
        ]
        config.expect_if_unread({"layer_types": kinds})
    config.ignore_rest()


def _published_class(config: ConfigReader, family: Family) -> Literal["head", "base", "classifier"]:
    """The kind of the class that a file names.

    `head` computes logits of the next token. `base` has no head that is read, as in files of
    embedding models. `classifier` classifies texts.
    """
    stem = family.architecture.removesuffix("ForCausalLM").removesuffix("Model")
    kinds: dict[str, Literal["head", "base", "classifier"]] = {}
    if family.architecture.endswith("ForCausalLM"):
        kinds[family.architecture] = "head"
    kinds |= dict.fromkeys((f"{stem}Model", *family.hf_other_heads), "base")
    kinds[f"{stem}ForSequenceClassification"] = "classifier"
    return list(kinds.values())[check_architecture(config, *kinds)]


def check_architecture(config: ConfigReader, *architectures: str) -> int:
    """Refuse a file with the class of another model.

    Case and underscores are ignored: old files write LLaMA, or Ernie4_5_ForCausalLM.

    Returns:
      The index of the class among `architectures`; 0 for a file that names none.
    """
    if not config.has("architectures"):
        return 0
    known = [name.lower().replace("_", "") for name in architectures]
    named = [name.lower().replace("_", "") for name in config.texts("architectures")]
    if len(named) != 1 or named[0] not in known:
        raise config.error("architectures", " or ".join(f"[{name!r}]" for name in architectures))
    return known.index(named[0])


def _decoder_config(config: ConfigReader, family: Family) -> DecoderConfig:
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    options = family.hf_options(config, num_layers)
    embed = config.integer("hidden_size", maximum=MAX_EMBED)
    num_heads, num_kv_heads = read_heads(config, "num_attention_heads", "num_key_value_heads")
    max_position = config.integer("max_position_embeddings", maximum=MAX_POSITION)
    options = replace(
        options,
        windows=options.windows or (None,) * num_layers,
        rope=options.rope or read_rope(config, family.hf_theta),
        max_position=options.max_position or max_position,
        norm_epsilon=options.norm_epsilon or read_epsilon(config, EPSILONS[options.norm]),
        mlp=options.mlp or config.integer("intermediate_size", maximum=MAX_MLP),
    )
    published = ACTIVATIONS[options.activation]
    config.expect_if_unread({"hidden_act": published, "hidden_activation": published})
    if options.latent is not None:
        head_dim = options.latent.head_dim
    else:
        head_dim = read_head_dim(config, "head_dim", "hidden_size", num_heads)
    return DecoderConfig.alike(
        vocab_size=config.integer("vocab_size", maximum=MAX_VOCAB),
        embed=embed,
        num_query_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tie_embeddings=config.flag("tie_word_embeddings", default=False),
        **options.decoder_fields(),
    )


def read_epsilon(config: ConfigReader, key: str) -> float:
    """Epsilon of norms."""
    return config.number(key, above=0.0, maximum=1.0)


def read_heads(config: ConfigReader, key: str, kv_key: str) -> tuple[int, int]:
    """The number of query heads and of key/value heads."""
    num_heads = config.integer(key, maximum=MAX_HEADS)
    num_kv_heads = config.integer(kv_key, maximum=MAX_HEADS, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error(key, f"a multiple of {kv_key} ({num_kv_heads})")
    return num_heads, num_kv_heads


def read_head_dim(config: ConfigReader, key: str, embed_key: str, num_heads: int) -> int:
    """The head size: the published one, or the embedding size divided by the number of heads."""
    embed = config.integer(embed_key, maximum=MAX_EMBED)
    if config.has(key):
        head_dim = config.integer(key, maximum=MAX_HEAD_DIM)
        if head_dim % 2:
            raise config.error(key, "an even number, as rotary embedding rotates pairs")
        return head_dim
    if embed % (2 * num_heads):
        raise config.error(embed_key, f"an even multiple of {num_heads} heads, or a {key}")
    return embed // num_heads


def _ignored_tensors(decoder: DecoderConfig) -> tuple[str, ...]:
    # frequencies follow from the configuration; a tied head repeats the embedding
    frequencies = (
        "model.rotary_emb.inv_freq",
        *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(decoder.num_layers)),
    )
    return (*frequencies, f"{NAMES.head}.weight") if decoder.tie_embeddings else frequencies
