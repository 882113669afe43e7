"""What the commands write: results to stdout, everything else to stderr, errors in one line with an exit code."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from scalla.types import FileFormatError, InputError, ScallaError

FAILED, WRONG_INPUT, INTERRUPTED = 1, 2, 130

P = ParamSpec("P")
R = TypeVar("R")


def out() -> Console:
    """Made anew for each use, so that it writes to the present stdout."""
    return Console(highlight=False, soft_wrap=False)


def err() -> Console:
    return Console(stderr=True, highlight=False)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Errors that say themselves what is wrong become one line and an exit code; others keep their traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = lambda message, *_, **__: err().print(
                    f"[yellow]warning:[/] {_one_line(message)}", soft_wrap=True
                )
                return command(*args, **kwargs)
        except (InputError, FileFormatError, ImportError) as error:
            fail(error, WRONG_INPUT)
        except BrokenPipeError:
            raise
        except (ScallaError, OSError) as error:
            fail(error, FAILED)
        except KeyboardInterrupt:
            err().print("interrupted", style="yellow")
            raise typer.Exit(INTERRUPTED) from None

    return run


def fail(error: BaseException | str, code: int) -> NoReturn:
    err().print(f"[bold red]error:[/] {_one_line(error)}", soft_wrap=True)
    raise typer.Exit(code)


def print_json(content: Any) -> None:
    """One JSON document, numbers that are not finite as null."""
    print(json.dumps(finite(content), indent=2, ensure_ascii=False))


def finite(content: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {k: finite(v) for k, v in content.items()}
    if isinstance(content, list | tuple):
        return [finite(v) for v in content]
    return content


@contextmanager
def progress(*, counts: bool = False, hidden: bool = False) -> Iterator[Progress]:
    """Bars on stderr, that stay when they are done; `counts`: how many of how many, rather than per cent."""
    columns = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn() if counts else TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
    ]
    with Progress(*columns, console=err(), disable=hidden) as bars:
        yield bars


def _one_line(message: object) -> str:
    """On one line, and brackets are no markup."""
    return escape(" ".join(str(message).split()))
