"""The nouns of the runtime: sampling parameters, requests, outputs, row errors.

Knows nothing of devices, buckets or files. Names and defaults of `SamplingParams`, `RequestOutput` and
`CompletionOutput` are vLLM's (github.com/vllm-project/vllm, sampling_params.py and outputs.py), with one exception: `max_tokens=None`, the
default, means as many tokens as the plan's `max_length` leaves after the prompt.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 300
