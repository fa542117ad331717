"""File systems that end the process, run full or lose power at any chosen step."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

from sidecar.edges.filesystem import FileSystem, remove_tree, walk


class StepFileSystem(FileSystem):
    """Counts steps once it is armed, and calls `strike` before step number `at` (from 0), or in the middle of it."""

    def __init__(self) -> None:
        self.armed = False
        self.steps = 0
        self.at = -1

    def arm(self, at: int) -> None:
        self.armed, self.steps, self.at = True, 0, at

    def strike(self) -> None:
        raise NotImplementedError

    def _step(self) -> None:
        if not self.armed:
            return
        self.steps += 1
        if self.steps - 1 == self.at:
            self.strike()

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        self._step()
        super().mkdir(path, mode)

    def link(self, source: Path, target: Path) -> None:
        self._step()
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._step()
        super().rmdir(path)

    def chmod(self, path: Path, mode: int) -> None:
        self._step()
        super().chmod(path, mode)

    def create(self, path: Path, data: bytes) -> None:
        self._step()
        if self.armed and self.steps == self.at:
            # The next step strikes: let that be the middle of this one.
            super().create(path, data[: len(data) // 2])
        self._step()
        super().create(path, data)

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)


class KilledFileSystem(StepFileSystem):
    """SIGKILL: what was done stays, in the order in which it was done."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FailingFileSystem(StepFileSystem):
    """One step fails, the process goes on."""

    def __init__(self, code: int = errno.ENOSPC) -> None:
        super().__init__()
        self._code = code

    def strike(self) -> None:
        raise OSError(self._code, os.strerror(self._code))


class PowerCut(BaseException):
    """Nothing catches it, as nothing catches a power cut."""


class PowerFileSystem(StepFileSystem):
    """What wasn't synced may be lost when the power goes.

    The model: names (made, moved, taken away) reach the disk when their directory is synced, before that up to any
    point of their order; a file's bytes reach it when the file is synced, before that they may read as zeros.
    """

    def __init__(self, graveyard: Path) -> None:
        super().__init__()
        self._graveyard = graveyard
        self._buried = 0
        self._pending: list[tuple[set[int], Callable[[], None]]] = []
        self._durable: set[int] = set()
        self._handles: list[int] = []

    def strike(self) -> None:
        raise PowerCut

    def cut(self, lost: float, volatile: Path) -> None:
        """Lose the last part `lost` (0 to 1) of the unsynced names, and the unsynced bytes of files in `volatile`."""
        for name, found in walk(volatile):
            if found.st_ino not in self._durable:
                (volatile / name).write_bytes(bytes(found.st_size))
        kept = round(len(self._pending) * (1 - lost))
        for _, undo in reversed(self._pending[kept:]):
            undo()
        for handle in self._handles:
            os.close(handle)

    def _fixed(self, path: Path) -> Path:
        """The same name in the same directory, wherever that will have been moved to."""
        handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._handles.append(handle)
        return Path(f"/proc/self/fd/{handle}") / path.name

    def _bury(self, path: Path) -> Path | None:
        """A second name for what is about to lose its own."""
        if not self.armed or not path.exists() or path.is_dir():
            return None
        grave = self._grave()
        os.link(path, grave)
        return grave

    def _grave(self) -> Path:
        self._buried += 1
        return self._graveyard / str(self._buried)

    def _later(self, undo: Callable[[], None], *names: Path) -> None:
        if self.armed:
            self._pending.append(({name.parent.stat().st_ino for name in names}, undo))

    def mkdir(self, path: Path, mode: int = 0o755) -> None:
        super().mkdir(path, mode)
        fixed = self._fixed(path)
        self._later(lambda: remove_tree(FileSystem(), fixed), path)

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        fixed = self._fixed(target)
        self._later(lambda: fixed.unlink(missing_ok=True), target)

    def rename(self, source: Path, target: Path) -> None:
        replaced = self._bury(target)
        super().rename(source, target)
        old, new = self._fixed(source), self._fixed(target)

        def undo() -> None:
            new.rename(old)
            if replaced is not None:
                os.link(replaced, new)

        self._later(undo, source, target)

    def unlink(self, path: Path) -> None:
        grave = self._bury(path)
        super().unlink(path)
        if grave is not None:
            fixed = self._fixed(path)
            self._later(lambda: os.link(grave, fixed), path)

    def rmdir(self, path: Path) -> None:
        if not self.armed:
            super().rmdir(path)
            return
        assert not any(path.iterdir())
        # The directory itself is kept: names that come back to it come back to this one.
        fixed, grave = self._fixed(path), self._grave()
        path.rename(grave)
        self._later(lambda: grave.rename(fixed), path)

    def create(self, path: Path, data: bytes) -> None:
        super().create(path, data)
        fixed = self._fixed(path)
        self._later(lambda: fixed.unlink(missing_ok=True), path)

    def sync(self, path: Path) -> None:
        super().sync(path)
        synced = path.stat().st_ino
        self._durable.add(synced)
        if path.is_dir():
            self._pending = [(parents, undo) for parents, undo in self._pending if synced not in parents]
