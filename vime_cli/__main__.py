"""``python -m vime_cli``: the ``vime`` command."""

from vime_cli.app import main

main()
