"""Prepared bags on disk: one safetensors file per bag, memory-mapped when read again.

An entry's name is a hash of the feature file's place and of all settings; the file's size and time are inside, so a changed file
replaces its entry. Entries are written under a temporary name and put in place whole: several processes may share a folder, and a
killed one leaves nothing that could be taken for an entry. What a power cut or a bad disk leaves is found by the checksum, which
every process looks at once per entry; waiting for the disk at each write (fsync) would cost more than the preparation.
"""

import hashlib
import json
import re
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gated_srp.data.prepared import Preparation, PreparedBag, identify, prepare
from gated_srp.errors import Note, UserError
from gated_srp.files import remove_drafts, whole
from gated_srp.srp.graph import PatchGraph

FORMAT = 1  # of an entry, and of what preparation computes: raise it when either changes
_FACTS = ("num_patches", "stride", "stride_source", "unit", "encoder")


@dataclass(frozen=True)
class BagCache:
    """A folder of prepared bags."""

    folder: Path
    sound: set[Path] = field(default_factory=set, repr=False, compare=False)  # entries whose checksum was right

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"the cache cannot be made ({error.strerror})"
            raise UserError(what, where=self.folder, cure="Correct `cache`.", kind="cache") from None
        remove_drafts(self.folder)

    def entry(self, path: Path, settings: Preparation) -> Path:
        """Where the bag of this file with these settings is kept."""
        facts = {"format": FORMAT, "path": str(path.resolve()), **asdict(settings)}
        coords, regions = facts.pop("coords"), facts.pop("regions")  # unknown to version 0.1, whose entries stay valid
        del facts["features_low"]  # an entry is of one magnification
        facts |= {"coords": str(coords.resolve())} if coords else {}
        facts |= {"regions": regions | {"annotations": str(regions["annotations"].resolve())}} if regions else {}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]
        return self.folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', path.stem)[:80]}-{digest}.safetensors"

    def read(self, path: Path, settings: Preparation) -> PreparedBag:
        """The prepared bag, from its entry if there is a good one, else made and kept."""
        if settings.features_low is not None:
            from gated_srp.data.two_scales import both_scales

            return both_scales(path, settings, self.read)
        entry, identity = self.entry(path, settings), identify(path, settings)
        found = _load(entry, path, identity, settings.lattice, check=entry not in self.sound)
        if found is None:
            bag = prepare(path, settings)
            try:
                _store(entry, bag, identity)
            except (UserError, SafetensorError) as error:  # a full disk must not end a run that does not need it
                cause = getattr(error.__cause__, "strerror", None) or error.__cause__ or error
                what = f"the cache {self.folder} cannot be written ({cause}); the bag is prepared anew each time"
                note = Note("warning", "cache", what, cure="Free some space, or correct `cache`.")
                return replace(bag, warnings=(*bag.warnings, note))
            found = _load(entry, path, identity, settings.lattice, check=False) or bag
        self.sound.add(entry)
        return found

    def touch(self, path: Path, settings: Preparation) -> bool:
        """Bring an entry's bytes into memory; False where there is none."""
        buffer = bytearray(2**22)
        try:
            with self.entry(path, settings).open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
        except OSError:
            return False
        return True


def _store(entry: Path, bag: PreparedBag, identity: str) -> None:
    facts = {key: getattr(bag, key) for key in _FACTS}
    facts |= {"warnings": [asdict(note) for note in bag.warnings], "window": bag.graph.window}
    tensors = {
        "features": bag.features.contiguous(),
        "coords": bag.coords.contiguous(),
        "neighbours": bag.graph.neighbours,
        "offsets": bag.graph.offsets,
        "homogeneity": bag.graph.homogeneity,
    }
    facts_text = json.dumps(facts)
    metadata = {"identity": identity, "facts": facts_text, "checksum": _checksum(tensors, facts_text)}
    with whole(entry, sync=False) as draft:
        save_file(tensors, draft, metadata=metadata)


def _load(entry: Path, path: Path, identity: str, lattice: str, *, check: bool) -> PreparedBag | None:
    """The entry's bag, its tensors mapped from the file; None where there is no entry, a damaged one or one of another file."""
    try:
        with safe_open(entry, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("identity") != identity:
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if check and metadata["checksum"] != _checksum(tensors, metadata["facts"]):
            return None
        facts = json.loads(metadata["facts"])
        features, coords = tensors.pop("features"), tensors.pop("coords")
        graph = PatchGraph(**tensors, window=facts.pop("window"), lengths=(len(features),))
        graph = graph.with_places(coords, facts["stride"], lattice)
        warnings = tuple(_warning(stored) for stored in facts.pop("warnings"))
        return PreparedBag(path=path, features=features, coords=coords, graph=graph, warnings=warnings, **facts)
    except (OSError, SafetensorError, RuntimeError, LookupError, ValueError, TypeError):
        return None  # RuntimeError: torch, when another process removed the file between opening and mapping


def _warning(stored: str | dict[str, Any]) -> Note:
    """A warning as an entry keeps it: its parts, or of version 0.1 one text, ``kind: what. cure``."""
    if isinstance(stored, str):
        kind, _, what = stored.partition(": ")
        return Note("warning", kind, what)
    return Note(**stored | {"where": tuple(stored["where"])})


def _checksum(tensors: dict[str, Tensor], facts_text: str) -> str:
    value = zlib.crc32(facts_text.encode())
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].flatten().view(torch.uint8).numpy().data, value)
    return f"{value:08x}"
