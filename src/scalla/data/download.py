"""Fetch the official files of the image sets: checked, resumable, and never half there.

Bytes go to `<file>.part`; an interrupted download goes on from where it stopped (HTTP Range). Only a file
whose md5 is right gets its name, by an atomic rename.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from scalla.types import FileFormatError, InputError

CHUNK = 1 << 16
MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class RemoteFile:
    """A file of a data set: its name there and here, and the md5 of the official copy."""

    name: str
    md5: str


@dataclass(frozen=True)
class Source:
    """Where a data set comes from, and its (images, labels) for each split."""

    url: str
    train: tuple[RemoteFile, RemoteFile]
    test: tuple[RemoteFile, RemoteFile]


def _source(url: str, *md5: str) -> Source:
    names = [f"{s}-{kind}-ubyte.gz" for s in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    files = [RemoteFile(name, digest) for name, digest in zip(names, md5, strict=True)]
    return Source(url, (files[0], files[1]), (files[2], files[3]))


SOURCES: dict[str, Source] = {
    "FashionMNIST": _source(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    "MNIST": _source(
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "KMNIST": _source(
        "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    ),
}


class _Incomplete(Exception):
    """The connection ended before the file did; what came is kept."""


def download_file(
    url: str,
    path: str | Path,
    md5: str,
    *,
    attempts: int = 3,
    timeout: float = 30.0,
    max_bytes: int = MAX_BYTES,
    progress_bar: bool = True,
) -> Path:
    """Fetch `url` into `path`, resuming what an earlier call left; `path` appears whole or not at all."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"got url {url!r}; wanted one that starts with http:// or https://")
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {path.parent} ({error.strerror}): "
            "set SCALLA_CACHE to a folder that can be written to"
        ) from error
    failure: Exception | None = None
    for _ in range(max(attempts, 1)):
        before = part.stat().st_size if part.exists() else 0
        try:
            _fetch(url, part, timeout, max_bytes, progress_bar)
        except FileFormatError:
            part.unlink(missing_ok=True)
            raise
        except (_Incomplete, OSError, http.client.HTTPException) as error:  # URLError is an OSError
            failure = error
            if not part.exists() or part.stat().st_size <= before:
                break  # nothing came: asking again at once would bring nothing either
            continue
        got = file_digest(part, "md5")
        if got == md5:
            os.replace(part, path)
            return path
        part.unlink()
        failure = FileFormatError(
            f"{url}: got a file of md5 {got}, wanted {md5}; it was deleted: "
            "the server has another file, or something on the way changes it"
        )
        if not before:
            raise failure
        # The remains of an earlier download were of another file: once more, from the start.
    if isinstance(failure, FileFormatError):
        raise failure
    kept = f"; {part.stat().st_size:,} bytes are kept, the next call resumes there" if part.exists() else ""
    raise InputError(f"could not download {url}: {_reason(failure)}{kept}") from failure


def _fetch(url: str, part: Path, timeout: float, max_bytes: int, progress_bar: bool) -> None:
    """Append to `part` what is missing of `url`; start again if the server knows no ranges."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "scalla", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing after `have`: `part` may be whole; its md5 will tell
            return
        raise
    with response:
        if have and not (
            response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        ):
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdigit() else None
        if total is not None and total > max_bytes:
            raise FileFormatError(f"{url}: got a file of {total:,} bytes; wanted at most {max_bytes:,}")
        with (
            part.open("ab" if have else "wb") as file,
            tqdm(
                total=total,
                initial=have,
                unit="B",
                unit_scale=True,
                desc=part.stem,
                disable=not progress_bar,
                leave=False,
            ) as bar,
        ):
            done = have
            while chunk := response.read(CHUNK):
                done += len(chunk)
                if done > max_bytes:
                    raise FileFormatError(f"{url}: got more than {max_bytes:,} bytes, the most that is wanted")
                file.write(chunk)
                bar.update(len(chunk))
    if total is not None and done < total:
        raise _Incomplete(f"the connection ended after {done:,} of {total:,} bytes")


def _reason(failure: Exception | None) -> str:
    if isinstance(failure, urllib.error.HTTPError):
        return f"the server answered {failure.code} {failure.reason}"
    if isinstance(failure, urllib.error.URLError):
        return f"no connection ({failure.reason})"
    return str(failure) or type(failure).__name__


def file_digest(path: Path, algorithm: str) -> str:
    """Checksum of a file, read in pieces; md5 recognises a file here and guards against nobody."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
