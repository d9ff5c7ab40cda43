"""Configurations of real models: known families are read, unless an unread key changes answers."""

import re

import pytest
from published_configs import PublishedConfig, published_configs

from noria.modelzoo.families.registry import FAMILIES, UnsupportedModel, from_hf_config
from noria.modelzoo.families.wholes import WHOLES

CONFIGS = published_configs()
CLAIMED = {known.name for known in (*FAMILIES, *WHOLES)}


@pytest.mark.parametrize("published", CONFIGS, ids=lambda published: published.name)
def test_a_published_configuration_is_read_or_refused_with_its_reason(published: PublishedConfig):
    if published.refused is not None:
        with pytest.raises(UnsupportedModel, match=f"^{published.refused}"):
            from_hf_config(published.config)
        return
    spec = from_hf_config(published.config)
    assert spec.ignored_keys == published.unread
    layers = published.config.get("text_config", published.config)["num_hidden_layers"]
    assert spec.config.num_layers == layers


def test_what_is_refused_of_a_family_that_is_claimed_would_change_the_answer():
    refused = [p for p in CONFIGS if p.refused is not None and p.model_type in CLAIMED]
    reasons = (r"quantization_config\.", r"text_config\.hidden_activation:")
    assert all(re.match("|".join(reasons), str(p.refused)) for p in refused)
    unknown = [p for p in CONFIGS if p.model_type not in CLAIMED]
    assert (len(CONFIGS), len(unknown), len(refused)) == (128, 16, 3)


def test_every_configuration_says_where_it_was_found():
    assert len({p.name for p in CONFIGS}) == len(CONFIGS)
    assert all(re.match(r"GitHub |package |a public file ", p.source) for p in CONFIGS)
