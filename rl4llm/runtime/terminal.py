"""Text on a terminal: what models, datasets and servers wrote is shown there, and never interpreted."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_RANGES = (
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F),  # controls, such as ESC; line feed and tab stay
    (0x061C, 0x061C), (0x200E, 0x200F), (0x202A, 0x202E), (0x2066, 0x2069),  # the direction of writing
    (0x200B, 0x200B), (0x2028, 0x2029), (0x2060, 0x2064), (0xFEFF, 0xFEFF), (0xE0000, 0xE007F),  # invisible
    (0xD800, 0xDFFF),  # surrogates, which cannot be encoded
)  # fmt: skip
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    for first, last in _RANGES
    for code in range(first, last + 1)
}


def visible(text: str) -> str:
    r"""Return the text with escapes for characters that a terminal would obey or hide.

    >>> visible("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return text.translate(_ESCAPES)


class Terminal(Console):
    """A rich console that applies `visible` to every string; the colours and cursor movements of rich itself still work.

    Emoji codes are off, since ``rows.jsonl:100:`` names line 100 of a file.
    """

    def __init__(self, **options: Any):
        super().__init__(**options, emoji=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """Escape the text first, so that widths are those of what is shown."""
        return super().render_str(visible(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


def notebook_shell() -> Any:
    """Return the shell of the notebook's kernel that runs this process, or None; IPython is not imported for it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell if getattr(shell, "kernel", None) is not None else None


def protect_terminal() -> None:
    """Apply `visible` to what Python itself prints in this process: log lines, warnings and tracebacks."""
    if logging.lastResort:
        logging.lastResort.setFormatter(_Formatter())
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *given, **named: visible(format_warning(*given, **named))
    sys.excepthook = _print_traceback
    sys.unraisablehook = _print_unraisable
    threading.excepthook = _print_of_thread


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _print_traceback(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    sys.stderr.write(visible("".join(traceback.format_exception(kind, error, trace))))


def _print_unraisable(given: Any) -> None:
    """Print an error that no caller can receive, like `sys.unraisablehook`."""
    sys.stderr.write(visible(f"{given.err_msg or 'Exception ignored in'}: {given.object!r}\n"))
    _print_traceback(given.exc_type, given.exc_value, given.exc_traceback)


def _print_of_thread(given: threading.ExceptHookArgs) -> None:
    if not issubclass(given.exc_type, SystemExit):
        sys.stderr.write(
            visible(f"Exception in thread {given.thread.name if given.thread else '(ended)'}:\n")
        )
        _print_traceback(given.exc_type, given.exc_value, given.exc_traceback)
