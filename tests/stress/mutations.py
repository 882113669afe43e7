"""Files as faults leave them: flipped bits, cuts, lengths that lie, pieces repeated, swapped, zeroed or lost."""

from __future__ import annotations

import random
import signal
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from scalla.benchmark.environment import peak_memory_mb, restart_peak_memory

SECONDS_OF_A_HANG = 30


def flip_bits(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def alter_length(content: bytes, rng: random.Random) -> bytes:
    """Another whole number in the place of 2, 4 or 8 bytes: sizes, offsets and counts are such."""
    code = rng.choice("HIQ")
    order = rng.choice("<>")
    size = struct.calcsize(code)
    if len(content) < size:
        return content + bytes(size)
    last = len(content) - size
    at = rng.randrange(min(63, last) + 1 if rng.random() < 0.7 else last + 1)  # headers come first in most formats
    (found,) = struct.unpack(order + code, content[at : at + size])
    most = 256**size - 1
    other = rng.choice((0, 1, most, most // 2, found + 1, found - 1, found * 2, rng.randrange(most))) % (most + 1)
    return content[:at] + struct.pack(order + code, other) + content[at + size :]


def alter_digit(content: bytes, rng: random.Random) -> bytes:
    """Another digit in a number that is written as text, as in JSON."""
    places = [i for i, byte in enumerate(content[:8192]) if 48 <= byte <= 57]
    if not places:
        return flip_bits(content, rng)
    at = rng.choice(places)
    return content[:at] + bytes([rng.randrange(48, 58)]) * rng.choice((1, 1, 12)) + content[at + 1 :]


def zero_a_piece(content: bytes, rng: random.Random) -> bytes:
    start, end = _piece(content, rng)
    return content[:start] + bytes(end - start) + content[end:]


def lose_a_piece(content: bytes, rng: random.Random) -> bytes:
    start, end = _piece(content, rng)
    return content[:start] + content[end:]


def repeat_a_piece(content: bytes, rng: random.Random) -> bytes:
    start, end = _piece(content, rng)
    return content[:end] + content[start:end] + content[end:]


def append(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.choice((1, 8, 1000)))


MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip_bits,
    cut,
    alter_length,
    alter_digit,
    zero_a_piece,
    lose_a_piece,
    repeat_a_piece,
    append,
)


def mutants(content: bytes, count: int, *, seed: int) -> Iterator[bytes]:
    """`count` files that are not the given one, each of one or two of the mutations."""
    rng = random.Random(seed)
    made = 0
    while made < count:
        changed = content
        for mutation in rng.choices(MUTATIONS, k=rng.choice((1, 1, 2))):
            changed = mutation(changed, rng) if changed else changed
        if changed != content:
            made += 1
            yield changed


def outcomes(
    contents: Iterable[bytes],
    path: Path,
    read: Callable[[Path], Any],
    *,
    own_errors: type[Exception] | tuple[type[Exception], ...],
    is_right: Callable[[Any], bool],
    memory_mb: float,
) -> Counter[str]:
    """Read each file: "refused" by an error of our own, or "right". Anything else is an AssertionError.

    `is_right` judges what was read: equal to the original's, or as valid as a good file's where a change cannot be
    told from data. A file that takes more than half a minute or `memory_mb` over what there was fails, too.
    """
    counts: Counter[str] = Counter()
    restart_peak_memory()
    before = peak_memory_mb()
    for number, content in enumerate(contents):
        path.unlink(missing_ok=True)  # what was read may still be mapped to it
        path.write_bytes(content)
        try:
            with stopped_when_it_hangs():
                value = read(path)
        except own_errors:
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(f"mutant {number} ({_start_of(content)}): {type(error).__name__}: {error}") from error
        else:
            assert is_right(value), f"mutant {number} ({_start_of(content)}) was read as something else"
            counts["right"] += 1
    grown = peak_memory_mb() - before
    assert grown <= memory_mb, f"reading took {grown:.0f} MB, more than the {memory_mb:.0f} MB allowed"
    return counts


@contextmanager
def stopped_when_it_hangs(seconds: int = SECONDS_OF_A_HANG) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still not done after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _piece(content: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(content))
    return start, min(len(content), start + rng.choice((1, 4, 8, 64, len(content) // 4 + 1)))


def _start_of(content: Sequence[int]) -> str:
    return f"{len(content)} bytes, {bytes(content[:24]).hex(' ')} …"
