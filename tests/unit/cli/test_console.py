"""stdout is data, whatever the libraries below print."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = str(Path(__file__).parents[3] / "src")
SCRIPT = """
import os, sys
sys.path.insert(0, {source!r})
from memfit.cli.console import keep_stdout_for_data, print_json
try:
    with keep_stdout_for_data():
        os.write(1, b"noise of a solver\\n")
        print_json({{"answer": 42}})
        {last}
finally:
    print("after", flush=True)
"""


def run(last: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT.format(source=SOURCE, last=last)], capture_output=True, text=True, check=False)


def test_what_a_library_prints_goes_to_stderr() -> None:
    done = run("pass")
    assert done.returncode == 0
    assert done.stdout == '{"answer": 42}\nafter\n'
    assert done.stderr == "noise of a solver\n"


def test_data_printed_before_an_exit_is_not_lost() -> None:
    done = run("sys.exit(3)")
    assert done.returncode == 3
    assert '{"answer": 42}' in done.stdout
