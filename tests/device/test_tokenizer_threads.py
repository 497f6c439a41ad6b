"""What tokenizers see of the number of threads."""

import subprocess
import sys

PROGRAM = """
import os, subprocess, sys
from backends.tokenizer_threads import hold_tokenizers_to_one_thread
before = dict(os.environ)
hold_tokenizers_to_one_thread()
subprocess.run(["env"], check=True)
print(dict(os.environ) == before, "torch" in sys.modules)
"""


def test_only_the_library_sees_it_and_nothing_imports_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "TOKENIZERS_PARALLELISM=false" in lines
    assert "True False" in lines
