"""What does not go with layers that run in a loop. Knows nothing of how they do."""

from .attention_kernels import AUTO, AttentionPlan
from .bucket_grid import BucketGrid

_KERNELS = (AUTO, "xla")


def check_scanned(grid: BucketGrid, attention: AttentionPlan) -> None:
    """Raise ValueError if a plan with scanned layers asks for what only unrolled ones can do."""
    if grid.chunks:
        raise ValueError(
            f"model.scan_layers: expected whole prompts, as chunks are written to the cache of one "
            f"layer, got [buckets] chunk = {list(grid.chunks)}. Leave out chunk, or scan_layers."
        )
    if attention.decode not in _KERNELS:
        raise ValueError(
            f"model.scan_layers: expected [attention] decode among {', '.join(_KERNELS)}, as other "
            f"kernels read the cache of one layer where it lies, got {attention.decode!r}. Leave "
            f"out decode, or scan_layers."
        )
