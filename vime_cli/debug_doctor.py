"""``vime debug-attach doctor``"""

from __future__ import annotations

from dataclasses import asdict

from vime.errors import CheckFailed
from vime_cli import output
from vime_cli.debug_list import Address
from vime_cli.options import AsJson


def doctor(as_json: AsJson = False, address: Address = None) -> None:
    """Is everything there that debugging needs?

    Also: which Ray clusters are there, and what does breakpoint() do here? Exit code 1 where something is
    missing that it cannot do without.
    """
    from vime.debug.attach import doctor as preflight

    checks = preflight.examine(address)
    if as_json:
        output.data({"checks": [asdict(check) for check in checks]})
    else:
        rows = [(c.name, c.verdict, c.found, c.hint) for c in checks]
        output.table("", preflight.COLUMNS, rows, width=output.OF_SENTENCES)
    failed = [check for check in checks if check.verdict == preflight.FAIL]
    if failed:
        lines = "\n".join(f"{check.name}: {check.found}" for check in failed)
        raise CheckFailed(lines, failed[0].hint or None)
