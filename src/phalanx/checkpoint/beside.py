"""Saving beside the steps: the run stands while its state is copied on the host, and a thread writes the copy."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint import directory
from phalanx.checkpoint.agree import gathered, require_all_ranks
from phalanx.checkpoint.writing import Share, new_token, write
from phalanx.cluster import failure, launch
from phalanx.cluster.meeting import Meeting
from phalanx.cluster.mesh import Axis
from phalanx.log import get_logger


def save_beside(path: str | os.PathLike, share: Share, axis: Axis, then: Callable[[], object] = lambda: None) -> Saving:
    """Copies this rank's share, and writes it while the caller goes on; collective like `save`, with the same result.

    `then` is called on every rank by the thread that writes, once the checkpoint is complete. The program does not end before.
    Cost: the bytes of this rank's owned pieces on the host, until they are written.
    Raises: CheckpointError on all ranks where a share cannot be copied; what fails later is raised by `Saving.wait`.
    """
    require_all_ranks(axis, "save")
    staged, tokens = gathered(axis, lambda: (share.staged(), new_token()))
    target, token = directory.resolve(path), tokens[0]
    meeting = Meeting(f"save/{token}")

    def work() -> None:
        write(target, token, staged, axis, gather=meeting.gather)
        then()

    return Saving(target, work)


class Saving:
    """A checkpoint that is being written while the run goes on."""

    def __init__(self, path: Path, work: Callable[[], None]):
        self.path = path
        self._error: BaseException | None = None
        # Not a daemon: Python waits for it before it ends.
        self._thread = threading.Thread(target=self._run, args=(work,), name="phalanx-save")
        self._thread.start()

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is complete. Raises: once, what went wrong, on all ranks."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            _unseen.remove(self)
            raise error

    def settle(self) -> None:
        """Returns when the writing has ended, one way or the other; what went wrong is told when the program ends, or by `wait`."""
        self._thread.join()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is: it is the program's, which learns of it at the next call
            self._error = error
            _unseen.append(self)
            atexit.unregister(_end_honestly)
            atexit.register(_end_honestly)  # last, so that it comes first, while there still is a world to tell
            get_logger().warning("saving %s failed: %s", self.path, error)


_unseen: list[Saving] = []  # failed, and nobody has asked yet


def _end_honestly() -> None:
    """A program that ends without having asked for its last checkpoint, which failed, has not ended well."""
    if not _unseen:
        return
    error = _unseen[0]._error
    assert error is not None
    failure.publish(error)
    print(f"the program ends with 1: {_unseen[0].path} was not saved", file=sys.stderr)
    launch.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # there is no other way to say so from here
