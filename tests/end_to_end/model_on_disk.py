"""A small random Llama or Mixtral directory with its tokenizer, in Hugging Face's format."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["the water wheel turns", "buckets of fixed size", "driven by the stream", "héllo wörld ☂"]
EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 48, 4, 2, 8, 2
MAX_POSITION = 128
SCALE = 0.5
"""Weights are so large that the logits of different prompts are far apart."""


def write_model(
    directory: Path,
    *,
    tokenizer: bool = True,
    kv_heads: int = KV_HEADS,
    num_experts: int = 0,
    num_layers: int = LAYERS,
    mlp: int = MLP,
    max_position: int = MAX_POSITION,
    scale: float = SCALE,
) -> int:
    """Write all files of the model (a Mixtral if it has experts); return its vocabulary size."""
    directory.mkdir(parents=True)
    vocab_size = _write_tokenizer(directory) if tokenizer else 300
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": EMBED,
        "intermediate_size": mlp,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    if num_experts:
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
        config |= {"num_local_experts": num_experts, "num_experts_per_tok": 2}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": 2, "bos_token_id": 0})
    tensors = _tensors(vocab_size, kv_heads, num_experts, num_layers, mlp, scale)
    save_file(tensors, directory / "model.safetensors")
    return vocab_size


def _tensors(
    vocab_size: int, kv_heads: int, num_experts: int, num_layers: int, mlp: int, scale: float
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(scale=scale, size=shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": random(vocab_size, EMBED),
        "lm_head.weight": random(vocab_size, EMBED),
        "model.norm.weight": np.ones(EMBED, np.float32),
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": np.ones(EMBED, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(EMBED, np.float32),
            f"{prefix}.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, EMBED),
            f"{prefix}.self_attn.k_proj.weight": random(kv_heads * HEAD_DIM, EMBED),
            f"{prefix}.self_attn.v_proj.weight": random(kv_heads * HEAD_DIM, EMBED),
            f"{prefix}.self_attn.o_proj.weight": random(EMBED, HEADS * HEAD_DIM),
        }
        if not num_experts:
            tensors |= {
                f"{prefix}.mlp.gate_proj.weight": random(mlp, EMBED),
                f"{prefix}.mlp.up_proj.weight": random(mlp, EMBED),
                f"{prefix}.mlp.down_proj.weight": random(EMBED, mlp),
            }
            continue
        tensors[f"{prefix}.block_sparse_moe.gate.weight"] = random(num_experts, EMBED)
        for expert in range(num_experts):
            of_expert = f"{prefix}.block_sparse_moe.experts.{expert}"
            tensors |= {
                f"{of_expert}.w1.weight": random(mlp, EMBED),
                f"{of_expert}.w3.weight": random(mlp, EMBED),
                f"{of_expert}.w2.weight": random(EMBED, mlp),
            }
    return tensors


def _write_tokenizer(directory: Path) -> int:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    }
    _write_json(directory / "tokenizer_config.json", settings)
    return tokenizer.get_vocab_size()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")
