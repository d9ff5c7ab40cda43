"""Random adapters of models of transformers, written by peft."""


def write_adapter(base, directory, **options):
    """Write a random adapter of the model in `base`; return transformers' merged model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base).float().eval()
    model = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model.merge_and_unload()
