from pathlib import Path

import pytest

from kettle.errors import EvidenceError
from kettle.evidence.read import read_logs
from support.logs import flat, interrupted_run, started, step, write_log


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    records = flat(interrupted_run(4, 12))
    assert read_logs([write_log(tmp_path / "run.jsonl", records)]) == records


def test_lines_that_are_no_records_are_passed_over(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run.jsonl", [step("a", 1)])
    text = log.read_text()
    log.write_text(f'loading\n{{"event": "from the future"}}\n[1]\n{text}{{"event": "st')
    assert read_logs([log]) == [step("a", 1)]


def test_a_log_cut_off_inside_a_character_is_read_up_to_there(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run.jsonl", [step("a", 1)])
    log.write_bytes(log.read_bytes() + "é".encode()[:1])
    assert read_logs([log]) == [step("a", 1)]


def test_a_folder_stands_for_all_logs_below_it_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_log(tmp_path / "logs" / "b.jsonl", [step("b", 2)])
    write_log(tmp_path / "logs" / "a" / "1.jsonl", [step("a", 1)])
    (tmp_path / "logs" / "notes.txt").write_text("no log")
    assert read_logs([tmp_path / "logs"]) == [step("a", 1), step("b", 2)]


def test_a_log_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    log = write_log(tmp_path / "run.jsonl", [step("a", 1)])
    assert read_logs([log, tmp_path, log]) == [step("a", 1)]


def test_a_missing_log_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"absent\.jsonl: No such file"):
        read_logs([tmp_path / "absent.jsonl"])


def test_a_log_without_a_record_is_refused_by_name(tmp_path: Path) -> None:
    good = write_log(tmp_path / "good.jsonl", [step("a", 1)])
    empty = write_log(tmp_path / "empty.jsonl", [])
    with pytest.raises(EvidenceError, match=r"empty\.jsonl holds no record"):
        read_logs([good, empty])


def test_a_folder_without_logs_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=f"{tmp_path.name} holds no"):
        read_logs([tmp_path])


def test_no_log_at_all_is_refused() -> None:
    with pytest.raises(EvidenceError, match="no log was named"):
        read_logs([])


def test_logs_of_two_runs_are_refused_with_both_run_ids(tmp_path: Path) -> None:
    one = write_log(tmp_path / "1.jsonl", [started("a", run_id="one-000000000000")])
    two = write_log(tmp_path / "2.jsonl", [started("a", run_id="two-111111111111")])
    with pytest.raises(EvidenceError, match=r"one-000000000000 in .*\n.*two-111111111111 in "):
        read_logs([one, two])
