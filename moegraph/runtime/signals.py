"""What a scheduler asks of a run by a signal: SIGUSR1 to save a checkpoint, SIGTERM to save one and stop.

Contract: within `Signals`, both only set a flag; nothing is interrupted. The flags of all ranks are added up in the
step's one agreement, so that all save after the same step, whichever rank was told. A second signal changes nothing
while a checkpoint is written. Ctrl-C stays what it is: it ends the run at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SAVE, STOP = signal.SIGUSR1, signal.SIGTERM


class Signals:
    """A context in which the main thread's SIGUSR1 and SIGTERM become requests; in other threads it does nothing."""

    def __init__(self) -> None:
        self.save = self.stop = False
        self._before: dict[int, Any] = {}

    @property
    def requests(self) -> tuple[bool, bool]:
        """(a checkpoint is wanted, the end is wanted), as this process has been told so far."""
        return self.save, self.stop

    def saved(self) -> None:
        """A checkpoint has been written: only a later SIGUSR1 asks for another one."""
        self.save = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (SAVE, STOP):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _received(self, number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            self.save = True
        else:
            self.stop = True
