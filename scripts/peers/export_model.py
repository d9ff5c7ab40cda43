"""Write the weights of a Llama-architecture GGUF in float32, in the engines' formats.

Makes `DIR/hf` (config.json, model.safetensors, tokenizer, chat template) and `DIR/model-f32.gguf`,
so that every engine computes with the same numbers. The script has its own conversion and imports
nothing from noria, so a mistake in noria's conversion shows as a difference.

    python scripts/peers/export_model.py MODEL.gguf DIR
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    reader = _open(source)
    tensors = _dequantised(reader)
    target.mkdir(parents=True, exist_ok=True)
    _write_f32_gguf(target / "model-f32.gguf", reader, tensors)
    _write_hugging_face(target / "hf", _metadata(reader), tensors)


def export_hugging_face(source: Path, directory: Path) -> None:
    """Write only the directory that transformers reads."""
    reader = _open(source)
    _write_hugging_face(directory, _metadata(reader), _dequantised(reader))


def _open(source: Path) -> gguf.GGUFReader:
    reader = gguf.GGUFReader(source)
    metadata = _metadata(reader)
    if metadata["general.architecture"] != "llama" or metadata["tokenizer.ggml.pre"] != "smollm":
        sys.exit(f"{source}: expected a SmolLM file, got {metadata['general.architecture']!r}.")
    return reader


def _metadata(reader: gguf.GGUFReader) -> dict:
    return {name: field.contents() for name, field in reader.fields.items()}


def _dequantised(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {
        tensor.name: np.ascontiguousarray(
            dequantize(tensor.data, tensor.tensor_type), dtype=np.float32
        )
        for tensor in reader.tensors
    }


def _write_hugging_face(directory: Path, metadata: dict, tensors: dict) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(metadata, untied="output.weight" in tensors)
    renamed = {
        _published_name(name): _unpermuted(name, array, config) for name, array in tensors.items()
    }
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_tokenizer(directory, metadata)


def _config(metadata: dict, *, untied: bool) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": not untied,
        "torch_dtype": "float32",
    }


def _published_name(name: str) -> str:
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    _, layer, block, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[block]}.{kind}"


def _unpermuted(name: str, array: np.ndarray, config: dict) -> np.ndarray:
    """Undo the interleaving of rotary pairs that this file format applies to queries and keys."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return array
    head_dim = config["head_dim"]
    pairs = array.reshape(-1, head_dim // 2, 2, array.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def _write_tokenizer(directory: Path, metadata: dict) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[metadata["tokenizer.ggml.padding_token_id"]],
        "chat_template": metadata["tokenizer.chat_template"],
        "model_max_length": metadata["llama.context_length"],
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)


def _write_f32_gguf(path: Path, reader: gguf.GGUFReader, tensors: dict) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        # the header's own counts, and what the writer has already set
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind, sub_kind = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), kind, sub_kind)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
