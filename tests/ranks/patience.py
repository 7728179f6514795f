"""How long tests wait: what a job promises in seconds, it promises for a machine that has time for it."""

import os


def patience(seconds):
    """The seconds that something may take now, if it may take `seconds` where each process has a core."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
