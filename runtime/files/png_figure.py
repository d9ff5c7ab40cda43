"""Draws figures with matplotlib, without a display.

Does not know what is drawn.
"""

import io
from collections.abc import Sequence
from contextlib import contextmanager
from types import ModuleType

_SIZE, _DPI = (7.2, 3.6), 110


def matplotlib() -> ModuleType:
    """Import matplotlib, or raise an ImportError with the remedy."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib. Install it with: pip install 'noria[report]'"
        ) from error
    return matplotlib


@contextmanager
def png_figure(
    size: tuple[float, float] = _SIZE, num_panels: int = 1, heights: Sequence[float] = ()
):
    """Open a figure: yields the figure, its panel or panels, and a buffer.

    The panels stand side by side and share the vertical axis. With `heights`, panels of these
    relative heights stand one above the other and share the horizontal axis.

    On exit the buffer holds the figure as a PNG. Dollar signs, as paths of models may have, are
    drawn as they are.
    """
    matplotlib().use("agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"text.parse_math": False}):
        shape = {"ncols": num_panels, "sharey": num_panels > 1}
        if heights:
            shape = {"nrows": len(heights), "sharex": True, "height_ratios": heights}
        figure, panel = pyplot.subplots(figsize=size, layout="constrained", **shape)
        png = io.BytesIO()
        try:
            yield figure, panel, png
            figure.savefig(png, dpi=_DPI, format="png")
        finally:
            pyplot.close(figure)
