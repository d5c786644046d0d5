"""The parts of the launcher that decide, without a process."""

import signal

import pytest

from kettle.errors import UsageError
from kettle.exits import ExitCode
from kettle.launch import check_agent, check_grace, decide, describe

TORCH_2_11 = {"min_nodes", "max_nodes", "nproc_per_node", "signals_to_handle"}
TORCH_2_12 = TORCH_2_11 | {"shutdown_timeout"}


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.FAILED])
def test_what_all_ranks_say_is_the_exit_code(code: ExitCode) -> None:
    assert decide({0: code, 1: code, 2: code}) == code


@pytest.mark.parametrize(
    "codes",
    [(75, 1), (1, 75), (75, 0), (0, 1), (2, 75), (75, 74), (4, 1), (0, -9), (75, -15), (2, 1)],
    ids=str,
)
def test_ranks_that_disagree_give_1(codes: tuple[int, ...]) -> None:
    assert decide(dict(enumerate(codes))) == ExitCode.FAILED


@pytest.mark.parametrize("code", [1, -signal.SIGKILL, -signal.SIGSEGV, 99, 143], ids=str)
def test_an_end_without_agreed_meaning_gives_1_though_all_ranks_share_it(code: int) -> None:
    assert decide({0: code, 1: code}) == ExitCode.FAILED


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (75, "exited with 75 (preempted)"),
        (1, "exited with 1 (failed)"),
        (99, "exited with 99 (unknown)"),
        (-9, "was killed by SIGKILL"),
    ],
)
def test_an_exit_status_is_put_in_words(code: int, words: str) -> None:
    assert describe(code) == words


def test_long_grace_on_an_agent_without_shutdown_timeout_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError) as refused:
        check_grace(30.5, agent_settings=TORCH_2_11, torch_version="2.11.0")
    for reason in ("torch 2.11.0", "after 30 s", "grace is 30.5 s", "torch 2.12", "KETTLE_GRACE"):
        assert reason in str(refused.value)
    assert refused.value.exit_code == ExitCode.USAGE


def test_grace_that_an_agent_without_shutdown_timeout_can_give_is_accepted() -> None:
    check_grace(30.0, agent_settings=TORCH_2_11, torch_version="2.11.0")


def test_an_agent_with_shutdown_timeout_gives_any_grace() -> None:
    check_grace(3600.0, agent_settings=TORCH_2_12, torch_version="2.12.0")


def test_the_installed_torch_is_asked_for_the_agent_that_it_has() -> None:
    check_agent(30.0)
