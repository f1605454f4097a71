"""`surefoot doctor`: can this machine train, and how fast is it?"""

from __future__ import annotations

import click

from surefoot.cli.face import common, show


@click.command("doctor")
@common
@click.pass_context
def doctor_command(ctx: click.Context, as_json: bool) -> int:
    """Check Python, torch, cores, memory, disk and the libraries, and measure the matmul peak.

    Ends with exit code 1 when something that training needs does not work.
    """
    from surefoot.cli.diagnosis import diagnose

    checks = diagnose()
    marks = {True: "ok", False: "FAILED", None: "-"}
    rows = [(check.name, marks[check.works], check.finding) for check in checks]
    data = {check.name: {"works": check.works, "finding": check.finding, **check.numbers} for check in checks}
    show(as_json, "This machine", rows, {"checks": data, "works": all(check.works is not False for check in checks)})
    return 1 if any(check.works is False for check in checks) else 0
