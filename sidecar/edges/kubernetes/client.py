"""Configuration, authentication and transport of kubernetes-asyncio, without its 760 typed models.

Its packages import every model and API when anything in them is imported: 35 MiB in every pod, for classes that nothing
here uses (bodies are raw bytes, decoded by msgspec). So the few modules that are used are imported by their names under
empty packages. Where that fails (another layout in another version) the packages are imported as usual.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ROOT = "kubernetes_asyncio"


class Parts:
    """What is used of kubernetes-asyncio: `Configuration`, `Rest` (its aiohttp session) and the loaders in `config`."""

    def __init__(self) -> None:
        """Raises ImportError if kubernetes-asyncio isn't installed."""
        if _ROOT in sys.modules:
            self._take()
            return
        try:
            with _empty_packages():
                self._take()
        except (ImportError, AttributeError):
            self._take()

    def _take(self) -> None:
        configuration = importlib.import_module(f"{_ROOT}.client.configuration")
        self.Configuration: Any = configuration.Configuration
        client = sys.modules[f"{_ROOT}.client"]
        if not hasattr(client, "Configuration"):
            client.Configuration = self.Configuration  # type: ignore[attr-defined]  # as its __init__ would
            client.ApiClient = object  # type: ignore[attr-defined]  # named in annotations only
        self.Rest: Any = importlib.import_module(f"{_ROOT}.client.rest").RESTClientObject
        self.config: Any = importlib.import_module(f"{_ROOT}.config")


@contextmanager
def _empty_packages() -> Iterator[None]:
    """Inside, the packages exist without their `__init__`; afterwards all is as if nothing had been imported."""
    spec = importlib.util.find_spec(_ROOT)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{_ROOT} is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    for name, path in ((_ROOT, root), (f"{_ROOT}.client", root / "client")):
        package = types.ModuleType(name)
        package.__path__ = [str(path)]
        sys.modules[name] = package
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n == _ROOT or n.startswith(f"{_ROOT}.")]:
            del sys.modules[name]
