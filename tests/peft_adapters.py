"""Random adapters of models of transformers, written by peft."""


def write_adapter(base, directory, *, kind="AutoModelForCausalLM", **options):
    """Write a random adapter of the model in `base`; return transformers' merged model."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = getattr(transformers, kind).from_pretrained(base).float().eval()
    model = get_peft_model(model, LoraConfig(**options))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model.merge_and_unload()
