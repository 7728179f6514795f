"""The logger and the event sink."""

import json
import math
import multiprocessing

import torch

from phalanx import log
from phalanx.log import Events, read_events


def test_every_field_survives_the_file(tmp_path):
    sink = Events()
    sink.open(tmp_path / "deep" / "events.jsonl", run="a", rank=3)
    sink.emit("train", "loss", 2.5, step=7, tokens=12, note="é")
    sink.close()
    (event,) = read_events(tmp_path / "deep" / "events.jsonl")
    assert (event.run, event.rank, event.step, event.kind, event.name, event.value) == ("a", 3, 7, "train", "loss", 2.5)
    assert event.attrs == {"tokens": 12, "note": "é"}
    assert event.time > 1e9


def test_without_a_sink_nothing_happens():
    Events().emit("train", "loss", 1.0)


def test_every_line_is_strict_json(tmp_path):
    path = tmp_path / "events.jsonl"
    sink = Events()
    sink.open(path, run="a", rank=0)
    sink.emit("train", "loss", float("nan"), step=0, worst=[float("inf"), torch.tensor(2.0)], path=path)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert math.isnan(float(record["value"]))
    assert record["attrs"] == {"worst": ["inf", 2.0], "path": str(path)}


def test_a_torn_line_is_passed_over_and_a_resumed_run_appends(tmp_path):
    path = tmp_path / "events.jsonl"
    for step in range(2):
        sink = Events()
        sink.open(path, run="a", rank=0)
        sink.emit("train", "loss", 1.0, step=step)
        sink.close()
    with path.open("a") as stream:
        stream.write('{"time": 1, "run"')
    assert [event.step for event in read_events(path)] == [0, 1]


def _write_many(path, rank):
    sink = Events()
    sink.open(path, run="a", rank=rank)
    for step in range(200):
        sink.emit("train", "loss", 1.0, step=step, filler="x" * 300)


def test_processes_that_share_a_file_do_not_tear_lines(tmp_path):
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, rank)) for rank in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(path.read_text().splitlines()) == 600
    assert len(list(read_events(path))) == 600


def test_other_ranks_only_warn_and_say_who_they_are(capsys):
    logger = log.get_logger()
    try:
        log.set_rank(0, 2)
        logger.info("from rank 0")
        log.set_rank(1, 2)
        logger.info("not shown")
        logger.warning("careful")
    finally:
        log.set_rank(0, 1)
    assert capsys.readouterr().err == "from rank 0\n[rank 1] warning: careful\n"
