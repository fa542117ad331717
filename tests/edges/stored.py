"""Contents for the store's tests: small trees of files, staged as a fetcher stages them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from sidecar.edges.disk import AdapterStore
from sidecar.model import StoredFile, revision_of

Tree = Mapping[str, bytes]


def content(seed: str, size: int = 1000) -> dict[str, bytes]:
    """Two files, one in a folder; the configuration is the same for all seeds."""
    weights = hashlib.shake_256(seed.encode()).digest(size)
    return {"adapter_config.json": b'{"r": 8}', "sub/adapter_model.safetensors": weights}


def stored(tree: Tree) -> tuple[StoredFile, ...]:
    return tuple(
        StoredFile(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest()) for path, data in tree.items()
    )


def revision(tree: Tree) -> str:
    return revision_of(stored(tree))


def write(directory: Path, tree: Tree) -> Path:
    for path, data in tree.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def read(directory: str | Path) -> dict[str, bytes]:
    root = Path(directory)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def publish(store: AdapterStore, tree: Tree, key: str = "k") -> tuple[str, Path]:
    return store.publish(write(store.staging(key) / "files", tree), stored(tree))
