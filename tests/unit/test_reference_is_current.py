import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_reference_pages_say_what_the_code_says() -> None:
    check = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gen_reference.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
