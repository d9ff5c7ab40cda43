"""Sliding windows of layers in config.json: of all layers, of some kinds of layers, or by a period.

Knows nothing of families.
"""

from collections.abc import Callable

from .config_reader import ConfigReader
from .hugging_face import MAX_LAYERS
from .rope_options import MAX_POSITION


def read_window(config: ConfigReader) -> int | None:
    """The size of windows; None means that no layer has one."""
    if not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", maximum=MAX_POSITION)


def windows_if_used(
    config: ConfigReader,
    num_layers: int,
    slides: Callable[[int, int], bool] = lambda i, first: i >= first,
) -> tuple[int | None, ...]:
    """Windows of layers, if `use_sliding_window` is set.

    Args:
      config: The table of config.json.
      num_layers: The number of layers.
      slides: Tells from a layer and `max_window_layers` whether the layer has a window; by default
        all layers from there on have one. It is used only without `layer_types`.
    """
    is_used = config.flag("use_sliding_window", default=False)
    window = None
    if config.has("sliding_window"):
        # a window that is not used is published as 0 or as any size
        window = config.integer("sliding_window", minimum=int(is_used), maximum=MAX_POSITION)
    border = config.integer("max_window_layers", minimum=0, maximum=MAX_LAYERS, default=28)
    if not is_used:
        window = None
    if not config.has("layer_types"):
        return tuple(window if slides(i, border) else None for i in range(num_layers))
    return windows_by_kind(config, num_layers, window)


def windows_except_every(
    period: int, config: ConfigReader, num_layers: int, default: int, *, is_first: bool = False
) -> tuple[int | None, ...]:
    """Windows by `layer_types`, or in all layers except one of each `period` layers.

    Args:
      period: The number of layers among which one has no window.
      config: The table of config.json.
      num_layers: The number of layers.
      default: The default size of a window.
      is_first: Whether the layer without a window is the first of its period instead of the last.
    """
    if config.is_null("sliding_window"):
        raise config.error("sliding_window", "a size, as some layers slide a window")
    window = config.integer("sliding_window", maximum=MAX_POSITION, default=default)
    if config.has("layer_types"):
        return windows_by_kind(config, num_layers, window)
    offset = 0 if is_first else 1
    return tuple(window if (i + offset) % period else None for i in range(num_layers))


def windows_by_pattern(
    config: ConfigReader, num_layers: int, *, period: int, default: int
) -> tuple[int | None, ...]:
    """Windows by `layer_types`, or by `sliding_window_pattern`, whose default is `period`.

    The pattern is that from which `layer_types` were derived, and is not read beside them.
    """
    keys = ("sliding_window_pattern", "_sliding_window_pattern")
    if config.has("layer_types"):
        config.ignore(keys)
    else:
        period = config.integer(keys[0], maximum=MAX_LAYERS, default=period)
        config.expect_if_unread({keys[1]: period})
    return windows_except_every(period, config, num_layers, default)


def windows_by_kind(
    config: ConfigReader, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """Windows in the layers that `layer_types` says to slide one."""
    kinds = config.texts("layer_types")
    allowed = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if len(kinds) != num_layers or not set(kinds) <= allowed:
        raise config.error("layer_types", f"{num_layers} entries of {sorted(allowed)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
