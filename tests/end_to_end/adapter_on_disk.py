"""Random LoRA adapters of the small model on disk, as peft writes them."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

MODULES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def write_adapter(
    directory: Path,
    model: Path,
    *,
    rank: int = 4,
    modules: tuple[str, ...] = MODULES,
    seed: int = 0,
    size: float = 0.2,
    **options: object,
) -> Path:
    """Write an adapter of some modules of all layers; return its folder."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(modules):
            continue
        rows, columns = weight.shape
        beginning = f"base_model.model.{module}.lora"
        tensors[f"{beginning}_A.weight"] = size * rng.standard_normal((rank, columns), np.float32)
        if options.get("use_dora"):
            tensors[f"{beginning}_magnitude_vector"] = np.ones(rows, np.float32)
        tensors[f"{beginning}_B.weight"] = size * rng.standard_normal((rows, rank), np.float32)
    directory.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": [module.rpartition(".")[2] for module in modules],
        "task_type": "CAUSAL_LM",
        **options,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def merge_by_hand(directory: Path, model: Path, adapter: Path) -> Path:
    """Write the model with an adapter of plain LoRA or rsLoRA merged by the published formula."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    weights, pairs = (
        load_file(folder / name)
        for folder, name in ((model, "model.safetensors"), (adapter, "adapter_model.safetensors"))
    )
    for name, down in pairs.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            up = pairs[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * (up @ down)
    directory.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    save_file(weights, directory / "model.safetensors")
    return directory
