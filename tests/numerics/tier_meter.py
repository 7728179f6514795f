"""What a pass makes beside the chunks of the tiers, counted as it runs."""

from contextlib import contextmanager

from torch.utils._python_dispatch import _disable_current_modes

from phalanx.memory.arena import Arena
from phalanx.memory.record import OtherBytes


@contextmanager
def counted(tiers, beside):
    """Counts every tensor beside the chunks, with the peak in each interval, as the real pass makes them."""
    meter, peaks, note, new = OtherBytes(), [], tiers.note, Arena.new
    for chunk in tiers.chunks:
        own = [chunk.full, chunk.compute_shard, chunk.master, *(place.bytes for place in chunk.places.values())]
        meter.ignore(own)
    meter.ignore(beside)
    kept = []

    def new_ignored(arena, num_elements, dtype):
        with _disable_current_modes():
            kept.append(new(arena, num_elements, dtype))
        meter.ignore(kept[-1:])
        return kept[-1]

    def note_peak(kind, chunk):
        peaks.append(meter.restart())
        return note(kind, chunk)

    Arena.new, tiers.note = new_ignored, note_peak
    try:
        with meter:
            yield peaks
        peaks.append(meter.restart())
    finally:
        Arena.new, tiers.note = new, note
