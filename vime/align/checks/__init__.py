"""The checks of ``vime align-check``, in the order of the debug guide. A new check is one file and one line here."""

from __future__ import annotations

from vime.align.walk import Check

CHECKS: tuple[Check, ...] = ()
