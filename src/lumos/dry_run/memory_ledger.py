"""MemoryLedger: which storages of the GPU are alive, as PyTorch's caching allocator counts them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

_BLOCK = 512  # bytes that the caching allocator rounds to


class MemoryLedger:
    """Bytes that are alive now, the most there ever were, and every allocation and release since `restart`."""

    def __init__(self, forget: Callable[[int], None]) -> None:
        self.ids: dict[int, tuple[int, int]] = {}  # of storages that are alive: id and bytes
        self.total = self.peak = 0
        self.most = 0  # ever; `peak` is since the last restart
        self.events: list[tuple[int, int, int]] = []  # (operators before it, id, bytes; negative when released)
        self.places: dict[int, str] = {}  # of ids: the module that allocated it
        self.time = 0  # operators so far
        self._forget, self._next = forget, 0

    def hold(self, tensor: torch.Tensor, place: str = "") -> bool:
        """Count a tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.ids:
            return False
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        self._next += 1
        self.ids[key] = (self._next, size)
        self.places[self._next] = place
        self._change(self._next, size)
        weakref.finalize(storage, self._release, key)
        return True

    def resize(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size than before: FSDP frees parameters so."""
        key = storage._cdata
        if key in self.ids:
            number, size = self.ids[key]
            now = -(-storage.nbytes() // _BLOCK) * _BLOCK
            if now != size:
                self.ids[key] = (number, now)
                self._change(number, now - size)

    def touch(self, size: int) -> None:
        """Count a temporary buffer that an operator frees when it ends."""
        self._next += 1
        rounded = -(-size // _BLOCK) * _BLOCK
        self._change(self._next, rounded)
        self._change(self._next, -rounded)

    def id_of(self, tensor: torch.Tensor) -> int:
        return self.ids.get(tensor.untyped_storage()._cdata, (0, 0))[0]

    def restart(self) -> dict[int, int]:
        """Forget what happened, and say what is alive: bytes by id."""
        self.events.clear()
        self.time = 0
        self.peak = self.total
        return dict(self.ids.values())

    def _change(self, number: int, size: int) -> None:
        self.events.append((self.time, number, size))
        self.total += size
        self.peak = max(self.peak, self.total)
        self.most = max(self.most, self.total)

    def _release(self, key: int) -> None:
        number, size = self.ids.pop(key, (0, 0))
        self._forget(key)
        if number:
            self._change(number, -size)
