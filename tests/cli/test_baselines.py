from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from surefoot.cli.baselines import byte_entropy, xz_bits_per_byte


def test_entropy_of_known_distributions() -> None:
    assert byte_entropy(b"aaaa") == 0.0
    assert byte_entropy(b"ab" * 50) == pytest.approx(1.0)
    assert byte_entropy(bytes(range(256))) == pytest.approx(8.0)


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz command is not installed")
def test_xz_is_what_the_command_gives(tmp_path: Path) -> None:
    words = random.Random(1).choices([b"one ", b"two ", b"three ", b"four\n"], k=5000)
    text = b"".join(words)
    packed = subprocess.run(["xz", "-9", "--stdout"], input=text, capture_output=True, check=True).stdout
    assert xz_bits_per_byte(text) == pytest.approx(8 * len(packed) / len(text), rel=1e-2)
