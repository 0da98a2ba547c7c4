"""Damage to files as hypothesis draws it: bytes anywhere, numbers that lie, words that spreadsheets, shells and parsers stumble over.

Archives and files with a header are also damaged inside, with lengths and checksums made right again: so damage reaches the parser
that reads the content and does not end at the first checksum.
"""

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Files = dict[str, bytes]  # by relative path
Seed = tuple[str, Files]  # what is opened, and the files
Draw = Callable[[st.SearchStrategy[Any]], Any]

_NUMBERS = (0, 1, 2, 7, 127, 255, 256, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = (
    *("", "nan", "inf", "-inf", "-1", "0", "1", "3", "1e308", "1e-320", "100000", "1000000001", "99999999999999999999", "0x10"),
    *("null", "~", "true", "no", "[]", "{}", "[x]", "{a: 1}", "[[[[[[[[1]]]]]]]]", '"', "'", "\0", "\t", "\r", "\n", ",", ";", ":"),
    *("=1+1", "@SUM(A1)", "+1", "\x1b[31mred", "a" * 300, "a" * 5000, "../../etc/passwd", "/dev/zero", "/dev/stdin", "~", "$HOME"),
    *("&a", "*a", "!!python/object/apply:os.mkdir [harm]", "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "é", "&x;"),
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 10**5, 10**9 + 1, 10**12, 10**400, 0.5, 1e308, float("nan"), float("inf"), ""),
    *(
        "x",
        "nan",
        "gated_srp",
        "\0",
        "=1+1",
        [],
        {},
        [1],
        ["a", "b"],
        [[1, 2], [3]],
        {"a": 1},
        {"": None},
        [None],
        "a" * 5000,
    ),
)
_TOKEN = re.compile(rb"[\w.+-]+|[^\w\s]|\s+")
_TEXTS = (".csv", ".tsv", ".json", ".yaml", ".yml", ".svg", ".txt", ".xml", ".rels")
_ZIPS = (".xlsx", ".npz", ".pt", ".pth")


@st.composite
def damaged(draw: Draw, good: list[Seed], corpus: list[Seed]) -> Seed:
    """One of the folders of files with one to three files hurt. Of those that are bad already, which may take seconds, few are taken."""
    seeds = corpus if corpus and draw(st.integers(0, 49)) == 0 else good
    main, whole = seeds[draw(st.integers(0, len(seeds) - 1))]
    files = dict(whole)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        name = draw(st.sampled_from(sorted(files)))
        if len(files) > 1 and draw(st.integers(0, 19)) == 0:
            files.pop(name)
        else:
            files[name] = _hurt(draw, name, files[name])
    return main, files


def _hurt(draw: Draw, name: str, data: bytes) -> bytes:
    ending = "." + name.rsplit(".", 1)[-1].lower()
    inner: list[Callable[[Draw, bytes], bytes]] = [_bytes]
    if ending in _TEXTS or "." not in name.rsplit("/", 1)[-1]:
        inner = [_bytes, _tokens, _tokens, _tokens]
    if ending == ".json":
        inner += [_json] * 4
    if ending in _ZIPS and data.startswith(b"PK"):
        inner += [_zip] * 2
    if ending == ".safetensors":
        inner += [_safetensors] * 2
    if ending == ".npy":
        inner += [_npy]
    return draw(st.sampled_from(inner))(draw, data)


def _bytes(draw: Draw, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at, what = draw(st.integers(0, max(len(out) - 1, 0))), draw(st.integers(0, 7))
        if what <= 2:
            out[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif what <= 4:
            width, order = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from(("little", "big")))
            number = draw(st.sampled_from(_NUMBERS)) % 256**width
            out[at : at + width] = number.to_bytes(width, order)
        elif what == 5:
            span = draw(st.integers(1, 64))
            out[at : at + span] = bytes(span)
        elif what == 6:
            span = draw(st.integers(1, 200))
            out[at:at] = out[at : at + span]
        else:
            del out[at : at + draw(st.sampled_from((1, 4, 100, 10**9)))]
    return bytes(out)


def _tokens(draw: Draw, data: bytes) -> bytes:
    """A word, a sign or a space replaced by another, or by nothing."""
    found = _TOKEN.findall(data)
    for _ in range(draw(st.integers(1, 3))):
        if found:
            at = draw(st.integers(0, len(found) - 1))
            word = draw(st.sampled_from(_WORDS)).encode("utf-8", "surrogatepass")
            found[at] = word if draw(st.integers(0, 5)) else found[at] + word
    return b"".join(found)


def _json(draw: Draw, data: bytes) -> bytes:
    """A value of another type somewhere inside, or a key taken away."""
    try:
        content = json.loads(data)
    except ValueError:
        return _bytes(draw, data)
    return json.dumps(_other(draw, content)).encode()


def _other(draw: Draw, content: Any) -> Any:
    keys = (
        list(content) if isinstance(content, dict) else list(range(len(content))) if isinstance(content, list) else []
    )
    if not keys or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(_VALUES))
    key = draw(st.sampled_from(keys))
    copy = dict(content) if isinstance(content, dict) else list(content)
    if draw(st.integers(0, 9)) == 0:
        del copy[key]
    else:
        copy[key] = _other(draw, copy[key])
    return copy


def _zip(draw: Draw, data: bytes) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old:
            content = {entry.filename: old.read(entry) for entry in old.infolist()}
    except Exception:  # damaged before
        content = {}
    if not content:
        return _bytes(draw, data)
    chosen = draw(st.sampled_from(sorted(content)))
    content[chosen] = _hurt(draw, chosen, content[chosen])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", draw(st.sampled_from((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)))) as new:
        for name, inside in content.items():
            new.writestr(name, inside)
    return out.getvalue()


def _safetensors(draw: Draw, data: bytes) -> bytes:
    try:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        if draw(st.booleans()) and "card" in header.get("__metadata__", {}):
            header["__metadata__"]["card"] = _json(draw, header["__metadata__"]["card"].encode()).decode()
            text = json.dumps(header).encode()
        else:
            text = _json(draw, data[8 : 8 + length])
    except (ValueError, struct.error, AttributeError, TypeError):
        return _bytes(draw, data)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _npy(draw: Draw, data: bytes) -> bytes:
    if len(data) < 12:
        return _bytes(draw, data)
    length = struct.unpack("<H", data[8:10])[0]
    header = _tokens(draw, data[10 : 10 + length])[: 2**16 - 1]
    return data[:8] + struct.pack("<H", len(header)) + header + data[10 + length :]
