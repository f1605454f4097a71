"""The main job as a newcomer runs it: total time and bits per byte beside xz, in a fresh folder.

python -m bench.demo
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from bench.common import Figure, arguments, show, write


def figures(result: dict[str, float]) -> list[Figure]:
    """Return the figures of one demo, from its --json."""
    size = f"{int(result['validation_bytes']):,} bytes of validation text of the standard library, without its tests and tables"
    note = f"model {result['bits_per_byte']:.3f}, xz -9 {result['xz']:.3f} bits per byte on {size}"
    return [
        Figure("demo.seconds", result["seconds"], (), "five minutes of training included"),
        Figure("demo.bits_per_byte_vs_xz", result["bits_per_byte"] / result["xz"], (), note),
    ]


def main() -> None:
    args = arguments("the demo, from text to an exported model")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "surefoot", "demo", "--minutes", "0.5" if args.quick else "5", "--out", "demo", "--json"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    found = figures(result)
    show("figures", ["id", "value"], [[figure.id, figure.value] for figure in found])
    print("wrote", write("demo", found, quick=args.quick).name)


if __name__ == "__main__":
    main()
