"""Rows of a combine that become final tile by tile, while the call runs."""

from __future__ import annotations

import contextlib
import threading
import time

import torch

LATE_SECONDS = 0.002  # ample for a call to begin


class LateTiles:
    """Rows ``y`` [L, C, H], of which an expert has ``counts``, taken away until their tiles are finished."""

    def __init__(self, y: torch.Tensor, counts: list[int], tile_rows: int, threshold: int) -> None:
        self.final, self.counts, self.tile_rows, self.threshold = y.clone(), counts, tile_rows, threshold
        self.y = torch.full_like(y, torch.nan)
        self.words = torch.zeros(len(y), -(-y.shape[1] // tile_rows), dtype=torch.int32, device=y.device)
        self.stream = torch.cuda.Stream() if y.is_cuda else None

    def finish(self) -> None:
        """All tiles, the last first."""
        with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
            for local, count in enumerate(self.counts):
                for tile in reversed(range(-(-count // self.tile_rows))):
                    rows = slice(tile * self.tile_rows, min((tile + 1) * self.tile_rows, count))
                    self.words[local, tile] = self.threshold - 1
                    self.y[local, rows] = self.final[local, rows]
                    self.words[local, tile] = self.threshold

    def _finish_late(self) -> None:
        time.sleep(LATE_SECONDS)
        self.finish()

    def finish_late(self) -> threading.Thread:
        """On a thread of its own, which the caller joins. After what is on the caller's stream now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        thread = threading.Thread(target=self._finish_late)
        thread.start()
        return thread
